"""As much in 8 bits as a bound on the error of the outputs allows: what `prefuse quantize` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ...runtime.errors import OptionError
from ..engines.onnxruntime_session import OnnxRuntimeSession
from ..quantization.batches import Batch
from ..quantization.quantizer import Assignment, Calibrated
from .indicators.measured import Distance, Evaluator
from .indicators.sections import REALS, has_real_outputs
from .indicators.study import Study

Progress = Callable[[str, float], None]
_MOST_DAMAGE_BATCHES = 1


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
    held_out: Sequence[Batch],
    max_error: float | None,
    progress: Progress | None = None,
) -> Outcome:
    """Quantize as `assignment` says, or, where the error is greater than `max_error`, without the units that damage most.

    Errors are those of the worst output over all held-out batches, relative to its norm, by ONNX Runtime without optimizations.
    Squared errors of units add up, nearly; so the damage of each is measured once, and their sum is scaled to what is measured.
    Without outputs of real numbers nothing measures it, and it is 0.

    Raises:
        OptionError: there is a bound, and no such output.
    """
    if max_error is not None and not has_real_outputs(calibrated.model):
        what = "the model has no outputs of real numbers, by which errors are measured"
        raise OptionError("max_error", what, "leave it out, or give the model an output before its integers are made")
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


def damages(
    calibrated: Calibrated, assignment: Assignment, batches: Sequence[Batch], progress: Progress | None = None
) -> dict[str, float]:
    """The squared relative error of the model's worst output when one unit alone has its format, by the names of units.

    Of recurrences it is that of their weights: what their rows lose no other runtime shows.

    Raises:
        InputError: there are no batches.
    """
    tell, found = progress or (lambda text, fraction: None), dict[str, float]()

    def note(name: str, damage: float) -> None:
        found[name] = damage
        tell(f"measuring {name}", len(found) / len(assignment))

    products = {unit.name for unit in calibrated.units}
    for form in dict.fromkeys(assignment.values()):
        units = {name: (name,) for name, one in assignment.items() if one == form and name in products}
        study = Study(calibrated.model, batches, units, (form,), calibrated.ranges(), keeps_pairs=calibrated.keeps_pairs)
        for name, _, damage in Evaluator(study).alone():
            note(name, damage)
    measure = _Measure(calibrated.model, batches)
    for name, form in assignment.items():
        if name not in products:
            note(name, measure.error(calibrated.place({name: form})) ** 2)
    return found


def _reduced(kept: list[str], damage: Mapping[str, float], share: float) -> list[str]:
    """The units of least damage, in rising order, whose sum is within `share` squared of that of all; at least one fewer."""
    sums = np.cumsum([damage[name] for name in kept])
    count = int(np.searchsorted(sums, share**2 * sums[-1], side="right"))
    return kept[: min(count, len(kept) - 1)]


class _Measure:
    """The error of models against a float model's outputs on some batches."""

    def __init__(self, model: ir.Model, batches: Sequence[Batch]) -> None:
        self._batches = batches
        self._names = [str(value.name) if value.dtype in REALS else "" for value in model.graph.outputs]
        session = OnnxRuntimeSession(model, optimize=True)
        self._expected = [self._outputs(session, batch) for batch in batches]

    def error(self, model: ir.Model) -> float:
        """The relative error of the worst output."""
        session = OnnxRuntimeSession(model, optimize=False)  # which may saturate sums of 8 bits on some CPUs
        distance = Distance()
        for batch, expected in zip(self._batches, self._expected, strict=True):
            distance.add(self._outputs(session, batch), expected)
        return float(np.sqrt(distance.damage))

    def _outputs(self, session: OnnxRuntimeSession, batch: Batch) -> dict[str, np.ndarray]:
        """Those of real numbers."""
        return {name: array for name, array in zip(self._names, session.run(batch), strict=True) if name}
