"""From a float model and calibration data to quantized models, one for each assignment of formats to units."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ...runtime.target import VNNI, Target
from ..engines.random_inputs import random_inputs
from ..ir.facts import KEPT_FLOAT_KEY, infer_facts
from ..pipeline import Context, parse_pipeline, run_pipeline
from ..pipeline.pass_table import PASSES
from .batches import Batch, Batches
from .calibration import Observer, Progress, observe
from .flow import Flow, find_flow
from .formats import Affine, unsigned_affine
from .histogram import ChannelMoments, Histogram
from .placement import place_rows, place_static
from .ranges import RangeMethod, choose_range
from .recurrences import find_recurrences, place_recurrences, recurrence_fault
from .smoothing import smooth, smoothable
from .units import Unit, UnitFormat, fault_of, find_units

# What brings the model into the form whose products are counted: constants folded, normalizations inside the weights, products
# of the same activations joined. What scales inputs of the model stays ahead of the products: columns of all sizes would share a
# range else, in which the small ones are 0, and `smoothing` has no operator that it could scale them in.
PREPARATION = (
    "canonicalize,unroll-loops,eliminate-dead,merge-equal,fold-batchnorm{keeps-inputs=true},canonicalize,eliminate-dead,"
    "merge-parallel-matmul,fold-batchnorm{keeps-inputs=true},canonicalize,merge-equal,eliminate-dead"
)
_ASSUMED_BATCHES = 8
_WORD = 4  # 8-bit numbers that a dot product multiplies at a time
ASSUMED = (
    f"no calibration data: ranges of activations are those of {_ASSUMED_BATCHES} random inputs (floats of the normal "
    "distribution, small integers), which real inputs may exceed"
)

Assignment = Mapping[str, UnitFormat]  # by the names of units; the others stay float


@dataclass(frozen=True, slots=True)
class Settings:
    """How ranges of activations are chosen, and whether scales are moved from activations into weights."""

    ranges: RangeMethod = "minmax"
    is_smooth: bool = True

    def __str__(self) -> str:
        return f"ranges={self.ranges}" + " smooth" * self.is_smooth


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A float model, prepared, and what calibration has seen of its values: `place` quantizes it.

    `left` says of units and recurrences that no 8-bit format takes why not; `smoothed` are the exponents of scales that were
    moved into weights, by the names of the activations. With `keeps_pairs` weights are as `pairs` asks.
    """

    model: ir.Model
    settings: Settings
    histograms: Mapping[str, Histogram]
    left: Mapping[str, str]
    smoothed: Mapping[str, float] = field(default_factory=dict)
    keeps_pairs: bool = False

    @property
    def units(self) -> tuple[Unit, ...]:
        """All that could be quantized, in the model's order."""
        return find_units(self.model)

    def fault(self, unit: Unit, form: UnitFormat) -> str:
        """Why a unit cannot have a format; empty if it can."""
        if unit.name in self.left:
            return self.left[unit.name]
        return fault_of(unit, form)

    @property
    def recurrences(self) -> tuple[ir.Node, ...]:
        """The recurrent operators that could be quantized, in the model's order."""
        return find_recurrences(self.model)

    def uniform(self, form: UnitFormat = "int8") -> Assignment:
        """One format for all units that can have it; recurrences round their rows in any case."""
        found: dict[str, UnitFormat] = {unit.name: form for unit in self.units if not self.fault(unit, form)}
        return found | {str(node.name): "int8-rows" for node in self.recurrences if node.name not in self.left}

    def ranges(self) -> dict[str, tuple[float, float]]:
        """Those chosen for activations, by the names of the values."""
        return {name: choose_range(one, self.settings.ranges) for name, one in self.histograms.items() if one.total}

    def place(self, assignment: Assignment) -> ir.Model:
        """A new model, weights shared, whose units and recurrences have the formats that `assignment` names, those left out
        float32."""
        model = self.model.clone()
        units = [unit for unit in find_units(model) if unit.name in assignment]
        static = [unit for unit in units if assignment[unit.name] == "int8"]
        flow = find_flow(model.graph, [unit.node for unit in static])
        place_rows(model, [unit for unit in units if assignment[unit.name] == "int8-rows"], self.keeps_pairs)
        place_static(model, static, flow, self._formats(flow), self.keeps_pairs)
        place_recurrences(model, [node for node in find_recurrences(model) if node.name in assignment], self.keeps_pairs)
        for unit in find_units(model):
            if reason := self.left.get(unit.name):
                unit.node.metadata_props[KEPT_FLOAT_KEY] = reason
        return model

    def _formats(self, flow: Flow) -> dict[str, Affine]:
        """The format of each group of values that share one, by the name of its leader."""
        formats = {}
        for leader, values in flow.groups().items():
            merged = Histogram()
            for value in values:
                merged.merge(self.histograms[str(value.name)])
            formats[str(leader.name)] = unsigned_affine(*choose_range(merged, self.settings.ranges))
        return formats


def prepare(model: ir.Model, target: Target) -> ir.Model:
    """A copy of a model, in which its products are as they will be quantized."""
    prepared = model.clone()
    infer_facts(prepared)
    run_pipeline(prepared, parse_pipeline(PREPARATION, PASSES), Context(target))
    return prepared


def calibrate(
    model: ir.Model, data: object | None, target: Target, settings: Settings | None = None, progress: Progress | None = None
) -> Calibrated:
    """Show calibration data (as `batches` describes them) to a float model of the frontend's dialect, which stays as it is.

    Without data, random ones are assumed, with a warning.

    Raises:
        InputError: the data do not fit the model, or there are none in them.
        UnsupportedModelError: ONNX Runtime cannot run the model.
    """
    chosen = settings or Settings()
    if data is None:
        warnings.warn(ASSUMED, stacklevel=2)
    batches = assumed_batches(model) if data is None else Batches(data, model.graph.inputs)
    prepared = prepare(model, target)
    units = find_units(prepared)
    left = {unit.name: reason for unit in units if (reason := fault_of(unit, "int8"))}
    left |= _without_kernel(prepared, [unit for unit in units if unit.name not in left], target)
    left |= _left_recurrences(prepared)
    taken = [unit for unit in units if unit.name not in left]
    smoothed = _smooth(prepared, taken, batches, progress) if chosen.is_smooth else {}
    histograms = {name: Histogram() for name in _observed(prepared, taken)}
    observe(prepared, batches, {name: [histogram] for name, histogram in histograms.items()}, progress)
    for unit in taken:
        if histograms[str(unit.activations.name)].odd:
            left[unit.name] = "its activations have NaN or infinities on calibration data"
    return Calibrated(prepared, chosen, histograms, left, smoothed, wants_pairs(target))


def uncalibrated(model: ir.Model, target: Target) -> Calibrated:
    """A float model, prepared, without data: its units can have ranges of rows alone, which is what `left` says of the others."""
    prepared = prepare(model, target)
    faults = {unit.name: fault_of(unit, "int8-rows") for unit in find_units(prepared)}
    left = {name: f"{reason} (calibration data would give ranges of tensors)" for name, reason in faults.items() if reason}
    left |= _left_recurrences(prepared)
    return Calibrated(prepared, Settings(is_smooth=False), {}, left, keeps_pairs=wants_pairs(target))


def wants_pairs(target: Target) -> bool:
    """Whether a target multiplies bytes fastest where pairs of weights are small: a CPU without dot products of bytes."""
    return not target.is_gpu and not target.has(VNNI)


def _left_recurrences(model: ir.Model) -> dict[str, str]:
    """Why recurrences stay float."""
    return {str(node.name): reason for node in find_recurrences(model) if (reason := recurrence_fault(model, node))}


def assumed_batches(model: ir.Model) -> list[Batch]:
    """Random inputs in the place of calibration data; `ASSUMED` is what to tell the user."""
    return [random_inputs(model, seed) for seed in range(_ASSUMED_BATCHES)]


def _without_kernel(model: ir.Model, units: Iterable[Unit], target: Target) -> dict[str, str]:
    """Why units would be computed in float if they were quantized: what the pass says that makes integer products of them.

    It is asked of convolutions whose channels fill no words; all others have kernels.
    """
    doubtful = {unit.name for unit in units if unit.is_convolution and unit.group_channels % _WORD}
    if not doubtful:
        return {}
    asked, context = model.clone(), Context(target)
    placed = [unit for unit in find_units(asked) if unit.name in doubtful]
    flow = find_flow(asked.graph, [unit.node for unit in placed])
    place_static(asked, placed, flow, {str(value.name): unsigned_affine(0.0, 1.0) for value in flow.groups()})
    run_pipeline(asked, parse_pipeline("sink-scales", PASSES), context)
    refused = [remark for remark in context.remarks if remark.kind == "rejection"]
    return {names[0]: str(remark.message) for remark in refused for names in remark.nodes if names[0] in doubtful}


def _smooth(model: ir.Model, units: Iterable[Unit], batches: Iterable[Batch], progress: Progress | None) -> dict[str, float]:
    groups = smoothable(list(units))
    moments = {
        str(value.name): ChannelMoments(group[0].channels, 1 if group[0].is_convolution else -1)
        for value, group in groups.items()
    }
    finite = {name: _Finite(one) for name, one in moments.items()}
    if not groups:
        return {}
    observers: dict[str, list[Observer]] = {name: [one] for name, one in finite.items()}
    observe(model, batches, observers, progress)
    return smooth(model, {value: group for value, group in groups.items() if not finite[str(value.name)].odd}, moments)


@dataclass(slots=True)
class _Finite:
    """Shows to another observer what has neither NaN nor infinities."""

    observer: ChannelMoments
    odd: int = 0

    def add(self, array: np.ndarray) -> None:
        if np.isfinite(array).all():
            self.observer.add(array)
        else:
            self.odd += 1


def _observed(model: ir.Model, units: Iterable[Unit]) -> list[str]:
    """Names of all values that lie in 8 bits when some of the units are quantized.

    Which of two convolutions' results a sum reads in 8 bits depends on the assignment, so both are among them.
    """
    taken = {unit.node for unit in units}
    flow = find_flow(model.graph, taken)
    names = {str(value.name) for value in flow.readers}
    for node in model.graph:
        if node.op_type == "Add" and node.domain == "":
            names |= {str(value.name) for value in node.inputs if value is not None and value.producer() in taken}
    return sorted(names)
