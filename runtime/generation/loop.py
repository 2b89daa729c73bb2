"""Steps of text generation in one native call: a decode step, the choice of a token, and so on until one of the ends."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from ..cpu_device import load_library
from ..threads.pool import PoolUser

REPEAT, SAMPLE = "prefuse_repeat", "prefuse_sample"  # of the library

# Of the control that the loop is given, 64 bits each: how many steps; how many it has made, which it writes; what a step calls
# with which table, and where in it stands the address of the token that it reads; the same of the sampler, and the token that it
# writes; by how many bytes both addresses grow from step to step; the address of the number of sequences that run, 0 of which
# end the loop; and that of a function int32(int64), or 0, which is told the step's number after each, and whose 0 ends it, too.
FIELDS = (
    "steps",
    "made",
    "step",
    "step_table",
    "step_token",
    "sample",
    "sample_table",
    "sample_token",
    "stride",
    "alive",
    "callback",
)

_Callback = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64)


class GenerationLibrary:
    """The native code beside the programs: `sample` with a table of addresses, `repeat` with a control."""

    def __init__(self, content: bytes, threads: int) -> None:
        """Load it; `threads` are those of the programs. Raises ProgramFileError."""
        self.content = content
        self._library = load_library(content, (REPEAT, SAMPLE))
        self._pool_user = PoolUser(self._library, threads)
        self._repeat = self._library.functions[REPEAT]
        self.sample = self._library.functions[SAMPLE]

    def prepare(self) -> None:
        """Give the calling thread the workers that the functions need."""
        self._pool_user.enter()

    def repeat(self, fields: dict[str, int], after: Callable[[int], bool] | None) -> int:
        """Run the loop; returns the number of steps that it has made.

        `after` is told the number of each step. Where it returns False or raises, the loop ends, and raises the same. A Ctrl-C
        that comes as Python enters it, and of which ctypes leaves nothing but a message, is a KeyboardInterrupt, too.
        """
        raised: list[BaseException] = []
        answered = 0

        def told(number: int) -> int:
            nonlocal answered
            if number > answered:  # an interrupt came before the first line of an earlier call, which ctypes answered
                return 0
            try:
                answer = int(after is None or after(number))
            except BaseException as error:  # Ctrl-C, too, which Python raises in here
                raised.append(error)
                return 0
            answered += 1
            return answer

        callback = _Callback(told) if after is not None else None
        address = 0 if callback is None else ctypes.cast(callback, ctypes.c_void_p).value or 0
        control = (ctypes.c_int64 * len(FIELDS))(*({**fields, "made": 0, "callback": address}[name] for name in FIELDS))
        self._repeat(ctypes.byref(control))
        if raised:
            raise raised[0]
        made = int(control[FIELDS.index("made")])
        if callback is not None and answered < made:
            raise KeyboardInterrupt
        return made


def function_address(function: Callable[..., object]) -> int:
    """The address of a native function."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
