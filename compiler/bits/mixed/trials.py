"""Programs of one model in several assignments of formats: compiled, their errors measured, and their times, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from ....runtime.constants.shared import ConstantPool
from ....runtime.errors import DeviceError, OptionError, UnsupportedModelError
from ....runtime.executor import CompiledModel
from ....runtime.profile import Profile, StepProfile, profile_in_turns
from ....runtime.signature import in_order
from ...programs.builder import CompileModel
from ...programs.cache import build_uncached
from ...programs.options import Options
from ...quantization.batches import Batch
from ...quantization.calibration import FloatModel
from ...quantization.quantizer import Calibrated
from .formats import Formats, placed
from .metrics import Metric, Outputs

Progress = Callable[[str, float], None]
_SECONDS = 1.0  # of calls of each program that are timed
_LEAST_CALLS, _MOST_CALLS = 10, 1000
_PROBE_CALLS = 3
_QUANTILE = 0.25


@dataclass(frozen=True)
class Trial:
    """A program in some assignment of formats, and its error on held-out batches."""

    name: str
    formats: Formats
    net: CompiledModel
    error: float

    @property
    def size_bytes(self) -> int:
        """What its weights take."""
        return self.net.plan.weights_bytes


@dataclass(frozen=True, slots=True)
class Times:
    """What a program takes, in microseconds: a call, and each of its steps. Of several calls it is the lower quartile, as other
    work on the machine makes them only longer."""

    call_us: float
    steps: tuple[StepProfile, ...]


def predicted_times(profile: Profile) -> Times:
    """What the cost model says of a program's steps, which a simulator cannot measure."""
    steps = tuple(replace(step, time_us=step.group.predicted_us) for step in profile.steps)
    return Times(sum(step.time_us for step in steps), steps)


def times_of(profile: Profile) -> Times:
    """Those of a profile."""
    stamps = profile.stamps_ns
    call_ns = float(np.quantile(stamps[:, -1] - stamps[:, 0], _QUANTILE))
    steps_us = np.quantile(np.diff(stamps, axis=1), _QUANTILE, axis=0) / 1e3
    steps = (replace(step, time_us=time_us) for step, time_us in zip(profile.steps, steps_us.tolist(), strict=True))
    return Times(call_ns / 1e3, tuple(steps))


class Bench:
    """Compiles and measures programs of one calibrated model. What has been compiled once is known by its formats.

    Raises:
        UnsupportedModelError: ONNX Runtime cannot run the model.
    """

    def __init__(
        self,
        calibrated: Calibrated,
        held_out: Sequence[Batch],
        options: Options,
        metric: Metric,
        drive: CompileModel,
        progress: Progress,
    ) -> None:
        self._calibrated = calibrated
        self._batches = held_out
        self._options = replace(options, profile=True, quantization="")
        self._metric = metric
        self._drive = drive
        self._progress = progress
        reference = FloatModel(calibrated.model)
        begin = perf_counter()
        self._expected: list[Outputs] = [reference.outputs(batch) for batch in held_out]
        self.reference_seconds = (perf_counter() - begin) / len(held_out)
        self._known: dict[tuple[tuple[str, str], ...], Trial] = {}

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All that were made."""
        return tuple(self._known.values())

    def trial(self, name: str, formats: Formats, fraction: float) -> Trial:
        """The program of an assignment; `fraction` of all work is done before it.

        Raises:
            CompileError: the model cannot be compiled into one program.
            OptionError: there is no GPU that runs it.
        """
        key = tuple(sorted(formats.items()))
        if key not in self._known:
            self._progress(f"compiling {name}", fraction)
            net = self._compiled(name, formats)
            self._known[key] = Trial(name, formats, net, self._metric.measure(self._results(net), self._expected))
        return self._known[key]

    def times(self, trials: Sequence[Trial], fraction: float) -> list[Times]:
        """What programs take, over a second of calls each, some of each in turn; on a simulated GPU what is predicted of them."""
        self._progress("measuring programs", fraction)
        batch: Mapping[str, object] = self._batches[0]
        if self._options.target.is_simulated:
            return [predicted_times(_profile(trial.net, batch, 1)) for trial in trials]
        slowest = max(_profile(trial.net, batch, _PROBE_CALLS).time_us for trial in trials)
        calls = int(np.clip(_SECONDS * 1e6 / max(slowest, 1.0), _LEAST_CALLS, _MOST_CALLS))
        return list(map(times_of, profile_in_turns([trial.net for trial in trials], batch, calls)))

    def _results(self, net: CompiledModel) -> list[Outputs]:
        """Those of the held-out batches."""
        try:
            return [_outputs(net, batch) for batch in self._batches]
        except DeviceError as error:
            target = self._options.target
            what = f"formats are chosen by programs that run, and this one does not: {error.what}"
            fix = f'search with target="{target.kind}-sim:{target.level}", and give the plan that it finds as bits='
            raise OptionError("target", what, fix if target.is_gpu and not target.is_simulated else error.fix) from error

    def _compiled(self, name: str, formats: Formats) -> CompiledModel:
        model = placed(self._calibrated, formats, self._options.precision)
        try:
            pool = ConstantPool(is_temporary=True)
            return CompiledModel(
                build_uncached(lambda path: self._drive(model.clone(), self._options, name=name, output=path, constants=pool))
            )
        except UnsupportedModelError as error:
            fix = 'use precision="int8" or "bfloat16", which take models of several programs'
            raise UnsupportedModelError(error.where, error.what, f"{error.fix}; {fix}" if error.fix else fix) from error


def _profile(net: CompiledModel, batch: Mapping[str, object], runs: int) -> Profile:
    return net.profile(*in_order(net.input_names, (), batch), runs=runs)  # not by name: an input may be called "runs"


def _outputs(net: CompiledModel, batch: Batch) -> Outputs:
    found = net(**batch)
    row = found if isinstance(found, tuple) else (found,)
    return [np.asarray(array) for array in row]
