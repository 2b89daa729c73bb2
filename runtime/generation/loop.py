"""Steps of text generation in one native call: a decode step, the choice of a token, and so on until one of the ends."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from time import perf_counter

from ..cpu_device import load_library
from ..threads.pool import PoolUser

REPEAT, SAMPLE = "prefuse_repeat", "prefuse_sample"  # of the library

# Of the control that the loop is given, 64 bits each: how many steps; how many it has made, which it writes; what a step calls
# with which table, and where in it stands the address of the token that it reads; the same of the sampler, and the token that it
# writes; by how many bytes both addresses grow from step to step; the address of the number of sequences that run, 0 of which
# end the loop; that of a function int32(int64), or 0, which is told the step's number after each, and whose 0 ends it, too; the
# address of a number that ends it where it is not 0; from which step on the function is told, which it may move on; and how
# often it was called, which the loop counts.
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
    "cancelled",
    "next_told",
    "calls",
)
_PAUSE_SECONDS = 0.02  # between looks for a Ctrl-C, about
_MOST_UNTOLD = 1 << 12  # steps

_NEXT_TOLD, _CALLS = FIELDS.index("next_told"), FIELDS.index("calls")
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

    def repeat(self, fields: dict[str, int], after: Callable[[int], bool] | None, *, is_watched: bool) -> int:
        """Run the loop; returns the number of steps that it has made.

        `after` is told the number of each step. Where it returns False or raises, the loop ends, and raises the same. A Ctrl-C
        that comes as Python enters it, and of which ctypes leaves nothing but a message, is a KeyboardInterrupt, too. Without
        it, Python is entered now and then for a Ctrl-C alone, if `is_watched`: each time waits for threads that have the GIL.
        """
        raised: list[BaseException] = []
        answered, every, last = 0, 1, perf_counter()

        def told(number: int) -> int:
            nonlocal answered, every, last
            if control[_CALLS] > answered + 1:  # an interrupt came before the first line of an earlier call: ctypes answered it
                return 0
            try:
                answer = 1
                if after is not None:
                    answer = int(after(number))
                else:
                    before, last = last, perf_counter()
                    every = min(2 * every, _MOST_UNTOLD) if last - before < _PAUSE_SECONDS else max(every // 2, 1)
                    control[_NEXT_TOLD] = number + every
            except BaseException as error:  # Ctrl-C, too, which Python raises in here
                raised.append(error)
                return 0
            answered += 1
            return answer

        callback = _Callback(told) if after is not None or is_watched else None
        address = 0 if callback is None else ctypes.cast(callback, ctypes.c_void_p).value or 0
        own = {"made": 0, "callback": address, "next_told": 0, "calls": 0}
        control = (ctypes.c_int64 * len(FIELDS))(*({**fields, **own}[name] for name in FIELDS))
        self._repeat(ctypes.byref(control))
        if raised:
            raise raised[0]
        if answered < control[_CALLS]:
            raise KeyboardInterrupt
        return int(control[FIELDS.index("made")])


def function_address(function: Callable[..., object]) -> int:
    """The address of a native function."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]
