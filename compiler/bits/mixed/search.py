"""The search for formats: programs of one format are measured, the best mixture is solved for, and measured, until it fits."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from ....runtime.errors import OptionError
from ...ir.assignments.node_precision import CHOICES_KEY
from ...programs.builder import CompileModel
from ...programs.options import Options
from ...quantization.batches import Batch, Batches
from ...quantization.held_out import Split
from ...quantization.quantizer import ASSUMED, Calibrated, assumed_batches, calibrate
from ..indicators.choice import default_indicator
from ..indicators.sections import has_real_outputs
from ..indicators.study import Study
from ..pareto import pareto_front
from ..solver import Solution
from .choice import Measured, Table, Uniform, best_of, recovered, scaled
from .costs import StepOwners, casts, unit_times
from .findings import Findings
from .formats import EXACT, FORMATS, INDICATED, REST, Formats, candidates, narrow_roundings, placed, uniform, weight_bytes
from .request import Request
from .trials import Bench, Times, Trial

Progress = Callable[[str, float], None]
_AIM = 0.97  # of the error that is allowed: other inputs lose a little more or less
_ENOUGH = 0.85  # of the damage that is allowed: what takes less is solved again, by what was measured of it
_ROUNDS = 3  # of solving, the later ones by damages as they were measured
_LONGER = 1.03  # times what was predicted of a program: what takes longer is solved again with the times of its steps
_RECOVERIES = 4
_FARTHER = 0.9  # each recovery leaves so much of the damage that would fit by what was measured
_DAMAGE_BATCHES, _DAMAGE_SECONDS = 4, 10.0  # at most, and about: to measure damages with
_RUN_FACTOR = 1.0  # of a whole run: what stands behind a product, with what rounds it
_FRONT_POINTS = 12
_INDICATED = tuple(INDICATED[form] for form in FORMATS)
_PARTLY = ("a16", "w16")  # what a program of bfloat16 rounds of units whose other operand it leaves float32


def search(
    model: ir.Model,
    data: object | None,
    options: Options,
    request: Request,
    drive: CompileModel,
    progress: Progress | None = None,
) -> Findings:
    """Find the formats of a model's units, on this machine. The model, of static shapes, stays as it is.

    Args:
        data: calibration data as `quantization.batches` describes them; None: random ones are assumed, with a warning.
        drive: compiles a graph.

    Raises:
        InputError: the data do not fit the model, or there are none in them.
        OptionError: the plan names units or formats that are not there; the model has no outputs of real numbers; or this machine
            cannot run programs for the target.
        UnsupportedModelError: the model cannot be compiled into one program, or ONNX Runtime cannot run it.
    """
    if missing := options.target.missing_features():
        what = f"this CPU lacks {', '.join(missing)}, and formats are chosen by what is measured"
        raise OptionError("target", what, "choose what this machine can run, or give a plan of all units as bits=")
    if not has_real_outputs(model):
        raise OptionError("precision", "the model has no outputs of real numbers, by which errors are measured", 'use "int8"')
    begin, tell = time.perf_counter(), progress or (lambda text, fraction: None)
    calibrated, split = _calibrated(model, data, options, tell)
    return _Search(calibrated, split, options, request, drive, tell).run(begin)


def planned(
    model: ir.Model, data: object | None, options: Options, request: Request, progress: Progress | None = None
) -> ir.Model | None:
    """The model as a plan says that leaves nothing to be searched for; None if it leaves something. Nothing is measured.

    Raises:
        As `search`.
    """
    if not request.plan.units:
        return None
    calibrated, _ = _calibrated(model, data, options, progress or (lambda text, fraction: None))
    legal = candidates(calibrated)
    formats = request.plan.formats(calibrated.units, legal)
    if formats.keys() != legal.keys():
        return None
    found = placed(calibrated, formats, options.precision)
    found.metadata_props[CHOICES_KEY] = "as the plan says; nothing was measured"
    return found


def _calibrated(model: ir.Model, data: object | None, options: Options, progress: Progress) -> tuple[Calibrated, Split]:
    """The model calibrated with the batches that are not held out, and the batches. Raises as `search`."""
    if data is None:
        warnings.warn(ASSUMED, stacklevel=2)
    split = Split(assumed_batches(model) if data is None else Batches(data, model.graph.inputs))
    found = calibrate(model, split, options.target, progress=lambda text, part: progress(text, 0.15 * part))
    return found, split


@dataclass(frozen=True, slots=True)
class _Timed:
    """A program and the microseconds of a call, when it was measured."""

    trial: Trial
    time_us: float


@dataclass
class _Search:
    """One search on its way."""

    calibrated: Calibrated
    split: Split
    options: Options
    request: Request
    drive: CompileModel
    progress: Progress
    pinned: Formats = field(init=False)
    choices: Mapping[str, tuple[str, ...]] = field(init=False)
    held_out: list[Batch] = field(init=False)
    bench: Bench = field(init=False)
    owners: StepOwners = field(init=False)

    def __post_init__(self) -> None:
        legal = candidates(self.calibrated)
        self.pinned = self.request.plan.formats(self.calibrated.units, legal)
        if EXACT in self.pinned.values():
            what = f"{EXACT} is what is left where no format keeps the error, and nothing is searched for beside it"
            fix = f"say float32-fast, or give prefuse.compile a plan of all units and {REST!r} as bits="
            raise OptionError("bits", what, fix)
        self.choices = {name: (self.pinned[name],) if name in self.pinned else forms for name, forms in legal.items()}
        self.held_out = self.split.held_out()
        self.owners = StepOwners.of(self.calibrated.model, self.calibrated.units)
        self.bench = Bench(self.calibrated, self.held_out, self.options, self.request.metric, self.drive, self.progress)

    def run(self, begin: float) -> Findings:
        uniforms = self._uniforms()
        times = self.bench.times(list(uniforms.values()), 0.45)
        table = self._table(uniforms, dict(zip(uniforms, times, strict=True)))
        timed = [_Timed(trial, found.call_us) for trial, found in zip(uniforms.values(), times, strict=True)]
        table, mixed = self._mixed(table, min(timed, key=lambda one: one.time_us))
        programs = self._measured(list(uniforms.values()), mixed)
        best, reason = best_of([one for one, _ in programs], self.request.max_error, self.request.objective)
        trial = next(trial for one, trial in programs if one is best)
        self.progress("sweeping budgets", 0.97)
        legal = table.legal
        is_known = all(form in legal[name] for name, form in trial.formats.items())
        return Findings(
            calibrated=self.calibrated,
            formats=trial.formats,
            name=best.name,
            reason=reason,
            error=best.error,
            max_error=self.request.max_error,
            metric=self.request.metric,
            objective=self.request.objective,
            table=table,
            programs=tuple(one for one, _ in programs),
            pinned=self.pinned,
            predicted_us=table.total_time_us(trial.formats) if is_known else 0.0,
            front=self._front(table),
            batches=self.split.count,
            held_out=len(self.held_out),
            is_split=self.split.is_split,
            is_timed=not self.options.target.is_simulated,
            seconds=time.perf_counter() - begin,
        )

    # What formats cost ------------------------------------------------------------------------------------------------

    def _uniforms(self) -> dict[str, Trial]:
        """The programs of one format, by it."""
        offered = [form for form in FORMATS if any(form in legal for legal in self.choices.values())]
        return {
            form: self.bench.trial(form, uniform(self.choices, form, self.options.precision), 0.15 + 0.3 * number / len(offered))
            for number, form in enumerate(offered)
        }

    def _table(self, uniforms: Mapping[str, Trial], times: Mapping[str, Times]) -> Table:
        units = self.calibrated.units
        rest = uniforms[next(iter(uniforms))].formats[REST]
        rest = self.options.precision if self.options.precision in times else rest
        steps = {form: found.steps for form, found in times.items()}
        units_us = unit_times(self.owners, self.choices, steps, rest)
        sizes = {(unit.name, form): weight_bytes(unit, form) for unit in units for form in self.choices[unit.name]}
        sizes |= {(REST, form): 0 for form in self.choices[REST]}
        metric = self.request.metric
        measured = [Uniform(form, trial.formats, metric.damage(trial.error)) for form, trial in uniforms.items()]
        damages = scaled(self._damages(), measured, self.choices)
        return Table(self.choices, units_us, sizes, damages, casts(units, self.choices, self.options.target))

    def _damages(self) -> dict[tuple[str, str], float]:
        """Squared relative error of the outputs with each unit alone in each of its formats."""
        self.progress("measuring damages", 0.5)
        batches = [batch for batch, _ in zip(self.split, range(self._damage_batches()), strict=False)]
        units = tuple(name for name in self.choices if name != REST)
        found = self._indicated(batches, units, _INDICATED)
        narrow = narrow_roundings(self.calibrated, self.options.target)
        partly = tuple(name for name in units if narrow[name] in _PARTLY)
        found |= self._indicated(batches, partly, _PARTLY) if partly else {}
        columns = {(name, "bfloat16"): narrow[name] for name in units}
        return {
            (name, form): found[name, columns.get((name, form), INDICATED[form])] for name in units for form in self.choices[name]
        }

    def _indicated(self, batches: Sequence[Batch], units: Sequence[str], forms: tuple[str, ...]) -> dict[tuple[str, str], float]:
        """Damages by units and formats of the indicators."""
        calibrated, alone = self.calibrated, {name: (name,) for name in units}
        study = Study(calibrated.model, batches, alone, forms, calibrated.ranges(), keeps_pairs=calibrated.keeps_pairs)
        rows = dict(zip(study.units, default_indicator(study).damages(study), strict=True))
        return {(name, form): float(rows[name][place]) for name in units for place, form in enumerate(forms)}

    def _damage_batches(self) -> int:
        """How many batches damages are measured on: fewer where a run takes long. Few are enough (docs/bits.md)."""
        changes = sum(len(forms) - 1 for name, forms in self.choices.items() if name != REST)
        seconds = _RUN_FACTOR * changes * self.bench.reference_seconds
        return int(min(max(_DAMAGE_SECONDS / max(seconds, 1e-9), 1), _DAMAGE_BATCHES))

    # Solving, measuring, recovering -----------------------------------------------------------------------------------

    def _mixed(self, table: Table, reference: _Timed) -> tuple[Table, list[Trial]]:
        """Programs of several formats, the later ones with what was learnt of those before; and the table with that."""
        metric, max_error = self.request.metric, self.request.max_error
        bound = metric.damage(max_error * _AIM)
        tried: list[Trial] = []
        for number in range(_ROUNDS):
            formats = dict(table.solved(self.request.objective, bound).formats)
            if any(trial.formats == formats for trial in self.bench.trials):
                break
            tried.append(trial := self.bench.trial(f"mixed {number + 1}", formats, 0.65 + 0.08 * number))
            damage, predicted_us = metric.damage(trial.error), table.total_time_us(formats)
            is_near = _ENOUGH * bound <= damage <= metric.damage(max_error) or not table.total_damage(formats)
            table, time_us = self._corrected(table, trial, reference)
            if is_near and (self.request.objective == "size" or time_us <= _LONGER * predicted_us):
                break
            table = table.learnt(formats, damage)
        if tried and not any(trial.error <= max_error for trial in tried):
            tried += self._recovered(table, min(tried, key=lambda trial: trial.error), bound)
        return table, tried

    def _corrected(self, table: Table, trial: Trial, reference: _Timed) -> tuple[Table, float]:
        """The table with what is learnt of a program's steps, and its microseconds, at the clock of when the table was made."""
        found, beside = self.bench.times([trial, reference.trial], 0.7)
        drift = beside.call_us / reference.time_us
        units_us = {name: time_us / drift for name, time_us in self.owners.times_us(found.steps).items()}
        return table.corrected(trial.formats, units_us, found.call_us / drift), found.call_us / drift

    def _recovered(self, table: Table, trial: Trial, bound: float) -> list[Trial]:
        """Programs with ever more units in formats that damage less, until one keeps the error."""
        tried: list[Trial] = []
        for number in range(_RECOVERIES):
            damage = self.request.metric.damage(trial.error)
            allowed = table.total_damage(trial.formats) * min(bound / damage, 1.0) * _FARTHER
            formats = recovered(table, trial.formats, allowed)
            if any(one.formats == formats for one in self.bench.trials):
                break
            trial = self.bench.trial(f"recovered {number + 1}", formats, 0.85)
            tried.append(trial)
            if trial.error <= self.request.max_error:
                break
        return tried

    def _measured(self, uniforms: Sequence[Trial], mixed: Sequence[Trial]) -> list[tuple[Measured, Trial]]:
        """The programs that one is to be taken of, timed in turns: those within the error, or if none is, all."""
        trials = list({id(one): one for one in (*uniforms, *mixed)}.values())
        if not any(one.error <= self.request.max_error for one in trials) and not self.pinned:
            exact = self.bench.trial(EXACT, dict.fromkeys(self.choices, EXACT), 0.9)
            uniforms, trials = [*uniforms, exact], [*trials, exact]
        times = self.bench.times(trials, 0.92)
        is_uniform = {id(one) for one in uniforms}
        return [
            (Measured(one.name, one.error, found.call_us, one.size_bytes, id(one) in is_uniform), one)
            for one, found in zip(trials, times, strict=True)
        ]

    def _front(self, table: Table) -> tuple[Solution, ...]:
        problem = table.problem(self.request.objective, None)
        return pareto_front(problem, "damage", points=_FRONT_POINTS)
