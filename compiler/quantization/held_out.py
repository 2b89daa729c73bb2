"""The batches to calibrate with, and those that are kept for measuring errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .batches import Batch

HELD_OUT_EVERY = 4  # of so many batches the last is kept for measuring; of fewer, all are calibrated with and measured
_MOST_HELD_OUT = 8


class Split:
    """The batches to calibrate with: those of `data` that are not held out, of which `held_out` gives some."""

    def __init__(self, data: Iterable[Batch]) -> None:
        self._data = data
        self.count = sum(1 for _ in data)
        self.is_split = self.count >= HELD_OUT_EVERY

    def __iter__(self) -> Iterator[Batch]:
        return (batch for number, batch in enumerate(self._data) if not (self.is_split and self._is_held_out(number)))

    def held_out(self) -> list[Batch]:
        """What the error is measured on: a quarter of the batches, at most 8; all of them (likewise) where there are too few."""
        kept = (batch for number, batch in enumerate(self._data) if not self.is_split or self._is_held_out(number))
        return [batch for batch, _ in zip(kept, range(_MOST_HELD_OUT), strict=False)]

    @staticmethod
    def _is_held_out(number: int) -> bool:
        return number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
