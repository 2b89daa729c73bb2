"""As much in 8 bits as a bound on the error of the outputs allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..engines.onnxruntime_session import OnnxRuntimeSession
from .batches import Batch
from .quantizer import Assignment, Calibrated
from .sensitivity import damages, relative_error, squared_error

HELD_OUT_EVERY = 4  # of so many batches the last is kept for measuring; of fewer, all are calibrated with and measured
_MOST_HELD_OUT = 8
_MOST_DAMAGE_BATCHES = 1


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


@dataclass(frozen=True, slots=True)
class Outcome:
    """A quantized model with the error that was measured of it. `uniform_error` is that with all units quantized; `returned`
    are the units put back to float, the most damaging first, and `damage` the squared errors of units alone, where measured.
    """

    model: ir.Model
    assignment: Assignment
    error: float
    uniform_error: float
    returned: tuple[str, ...] = ()
    damage: Mapping[str, float] = field(default_factory=dict)


def meet_budget(
    calibrated: Calibrated,
    assignment: Assignment,
    held_out: list[Batch],
    max_error: float | None,
    progress: Callable[[str, float], None] | None = None,
) -> Outcome:
    """Quantize as `assignment` says, or, where the error is greater than `max_error`, without the units that damage most.

    Errors are those of the worst output over all held-out batches, relative to its norm, by ONNX Runtime without optimizations.
    Squared errors of units add up, nearly; so the damage of each is measured once, and their sum is scaled to what is measured.
    """
    measure = _Measure(calibrated.model, held_out)
    model = calibrated.place(assignment)
    uniform = error = measure.error(model)
    if max_error is None or error <= max_error:
        return Outcome(model, assignment, error, uniform)
    damage = damages(calibrated, assignment, held_out[:_MOST_DAMAGE_BATCHES], progress)
    order = sorted(assignment, key=lambda name: -damage[name])
    kept = list(reversed(order))
    while error > max_error and kept:
        kept = _reduced(kept, damage, max_error / error)
        model = calibrated.place({name: assignment[name] for name in kept})
        error = measure.error(model)
    remaining = {name: form for name, form in assignment.items() if name in set(kept)}
    return Outcome(model, remaining, error, uniform, tuple(name for name in order if name not in remaining), damage)


def _reduced(kept: list[str], damage: Mapping[str, float], share: float) -> list[str]:
    """The units of least damage, in rising order, whose sum is within `share` squared of that of all; at least one fewer."""
    sums = np.cumsum([damage[name] for name in kept])
    count = int(np.searchsorted(sums, share**2 * sums[-1], side="right"))
    return kept[: min(count, len(kept) - 1)]


class _Measure:
    """The error of models against a float model's outputs on some batches."""

    def __init__(self, model: ir.Model, batches: list[Batch]) -> None:
        self._batches = batches
        session = OnnxRuntimeSession(model, optimize=True)
        self._expected = [session.run(batch) for batch in batches]

    def error(self, model: ir.Model) -> float:
        session = OnnxRuntimeSession(model, optimize=False)  # which may saturate sums of 8 bits on some CPUs
        squares = [squared_error(session.run(batch), known) for batch, known in zip(self._batches, self._expected, strict=True)]
        return relative_error(np.sum(squares, axis=0))
