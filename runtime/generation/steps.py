"""The steps of a call: the first token of each sequence, then the program and the sampler in turns."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import numpy as np

from ..cpu_device import CpuInvocation
from ..device import Invocation
from .loop import GenerationLibrary, function_address
from .request import Choice, Stream

_TOKEN = 6  # place of the new token among the sampler's parameters
_NOTHING = np.zeros(1, np.float32)  # for what the sampler does not look at


class Steps:
    """What the sampler reads and writes, for one call after the other. `made` int64 [steps, batch] and `logprobs` float32
    [steps, batch], which is 0 where nobody asked for it, are those of the last one, of which `count` steps are made.
    """

    def __init__(self, library: GenerationLibrary, step: Invocation, logits: np.ndarray, scratch: int) -> None:
        """`step` takes the tokens of a step and leaves `logits` float32 [batch, vocabulary]."""
        self._library, self._step, self._logits = library, step, logits
        self._batch = len(logits)
        self._state = np.ones(1 + 3 * self._batch, np.int64)
        self._running = self._state[1 : 1 + self._batch]
        self._alive, self._cancelled = np.zeros(1, np.int64), np.zeros(1, np.int64)
        self._scratch = np.empty(scratch, np.float32)
        self._choice: Choice | None = None
        self._kept: Sequence[np.ndarray] = ()  # whose addresses the table has
        self._table = (ctypes.c_int64 * 0)()
        self.made, self.logprobs = np.zeros((0, self._batch), np.int64), np.zeros((0, self._batch), np.float32)
        self.count = 0

    def renew(self) -> None:
        """A call begins, which nobody has cancelled yet."""
        self.count, self._cancelled[0] = 0, 0

    def cancel(self) -> None:
        """Any thread may ask the call to end."""
        self._cancelled[0] = 1

    @property
    def is_cancelled(self) -> bool:
        """Whether the call was asked to end."""
        return bool(self._cancelled[0])

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to make."""
        return self.count == len(self.made) or not self._alive[0] or self.is_cancelled

    def begin(self, choice: Choice, n: np.ndarray, places: np.ndarray, seen: np.ndarray | None) -> None:
        """Choose the first tokens by the logits that are there: of sequences with n > 0, at these places of their texts. `seen`
        int8 [batch, vocabulary]: the tokens that texts have, where there is a penalty."""
        self._choice, batch = choice, self._batch
        self.made = np.zeros((int(n.max()), batch), np.int64)  # a row a step, where the sampler writes and the next step reads
        wants_logprobs = bool(choice.settings[:, -1].any())
        self.logprobs = np.zeros(self.made.shape, np.float32) if wants_logprobs else self.logprobs[:0]
        self._state[0], self._running[:] = 0, n > 0
        self._state[1 + batch : 1 + 2 * batch], self._state[1 + 2 * batch :] = places, n
        bias, seen = (_NOTHING if one is None else one for one in (choice.bias, seen))
        arrays = (
            self._logits, choice.settings, choice.key, choice.ends, self._state, self._scratch, self.made, self._alive,
            bias, seen, self.logprobs if wants_logprobs else _NOTHING,
        )  # fmt: skip
        self._kept = arrays
        self._table = (ctypes.c_int64 * len(arrays))(*(array.ctypes.data for array in arrays))
        self._library.prepare()
        self._library.sample(ctypes.byref(self._table))
        self.count = 1
        self._end_phrases()

    def last(self, rows: int) -> np.ndarray:
        """The tokens of the last step, int64 [rows]."""
        return self.made[self.count - 1, :rows].copy()

    def run(self, steps: int, rows: int, stream: Stream | None) -> None:
        """Make up to so many steps more, as long as there are sequences that run; `stream` is told the tokens of each, and ends
        it by False."""
        assert self._choice is not None
        if self.is_over:
            return
        first, steps = self.count, min(steps, len(self.made) - self.count)

        def after(number: int) -> bool:
            self.count = first + number + 1
            self._end_phrases()
            return stream is None or stream(self.last(rows)) is not False

        if isinstance(self._step, CpuInvocation):
            is_told = stream is not None or bool(self._choice.phrases)
            self.count = first + self._repeat(self._step, steps, after if is_told else None)
        else:
            self.count = first + self._launch(steps, after)

    def _end_phrases(self) -> None:
        """End the sequences whose new tokens so far end with a phrase: the loop makes no more of them."""
        assert self._choice is not None
        if not self._choice.phrases:
            return
        made = self.made[: self.count][-max(map(len, self._choice.phrases)) :]
        for number in np.flatnonzero(self._running):
            if self._choice.ends_at(made[:, number].tolist(), len(made) - 1):
                self._running[number] = 0
                self._alive[0] -= 1

    def _repeat(self, call: CpuInvocation, steps: int, after: Callable[[int], bool] | None) -> int:
        """Steps in one native call; how many were made."""
        library, made = self._library, self.made
        library.prepare()
        arguments = (made[self.count - 1].ctypes.data, self._running.ctypes.data, self._logits.ctypes.data)
        function, start, first = call.set_up(*arguments)
        self._table[_TOKEN] = made[self.count].ctypes.data
        fields = {
            "steps": steps,
            "step": function_address(function),
            "step_table": start,
            "step_token": first,
            "sample": function_address(library.sample),
            "sample_table": ctypes.addressof(self._table),
            "sample_token": ctypes.addressof(self._table) + ctypes.sizeof(ctypes.c_int64) * _TOKEN,
            "stride": made.strides[0],
            "alive": self._alive.ctypes.data,
            "cancelled": self._cancelled.ctypes.data,
        }
        is_watched = steps > 1 and threading.current_thread() is threading.main_thread()
        return library.repeat(fields, after, is_watched=is_watched)

    def _launch(self, steps: int, after: Callable[[int], bool]) -> int:
        """The same on a GPU: a launch a step, whose logits come to the host, where tokens are chosen."""
        first = self.count
        for number in range(steps):
            self._step(self.made[first + number - 1].ctypes.data, self._running.ctypes.data, self._logits.ctypes.data)
            self._table[_TOKEN] = self.made[first + number].ctypes.data
            self._library.sample(ctypes.byref(self._table))
            if not after(number) or not self._alive[0] or self.is_cancelled:
                return number + 1
        return steps


def log_probability(logits: np.ndarray, token: int) -> float:
    """Of a token by logits [vocabulary] as they are, as the sampler tells it: those of inf share it all. NaN behind any NaN."""
    wide = logits.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        below = np.minimum(wide - min(wide.max(), float(np.finfo(np.float32).max)), 0)
        return float(below[token] - np.log(np.exp(below).sum()))
