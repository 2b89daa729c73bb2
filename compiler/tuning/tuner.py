"""`prefuse tune`: the problems of a model, each with its share of the time that there is.

Shares are by what there may be to gain: the time of all launches of a problem beyond what its operations would take at the
highest rate that any problem of the model reaches.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from time import monotonic

import onnx_ir as ir

from ...kernels.groups.configuration import TEMPLATE, Choice
from ...kernels.groups.group import Group
from ...kernels.problem import problem_of
from ...kernels.registry import build_kernel, measurable_templates
from ...kernels.template.contract import BuiltKernel
from ...runtime.errors import OptionError
from ...runtime.target import Target
from ..driver import lower_groups
from ..frontend.shaping import forget_decided_shapes
from ..ir.facts import infer_facts
from ..ir.validity import check_lowered, check_nodes
from ..pipeline import Context, Pass, parse_pipeline, run_pipeline
from ..pipeline.pass_table import PASSES, named_pipeline
from ..programs.options import Options
from ..programs.tuning_database import Finding, Section, add_findings, read_database
from .measuring import Trial
from .search import OutOfTimeError, Search
from .worker import Worker

_FIRST_PART = 0.3  # of the time, in which problems are timed as they are
_LEAST_GAIN = 0.05  # of a time, that there may be to gain wherever the rate of operations is already
_EXPLORE_SECONDS, _CONFIRM_SECONDS = 0.15, 0.6  # of calls in one trial
_TRIAL_BYTES = 1 << 30  # of constants in one trial
_TRIAL_SIZE = 8  # configurations
_FLOPS_PER_US, _BYTES_PER_US = 100_000, 20_000  # of a core, roughly: what decides how time is shared out
Progress = Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class Problem:
    """A group that can be computed in several ways, and how many of a model's launches are such."""

    text: str
    group: Group
    template: str
    flops: int  # of a launch
    launches: int
    estimated_us: float  # of all its launches, roughly

    @property
    def constant_bytes(self) -> int:
        return sum(self.group.types[name].size_bytes for name in self.group.constants)


@dataclass(frozen=True)
class Tuned:
    """A problem and what is known of it; `is_new` says that it was found out now."""

    problem: Problem
    finding: Finding
    is_new: bool


def tune_model(
    model: ir.Model, options: Options, *, seconds: float, database: Path, again: bool = False, progress: Progress | None = None
) -> tuple[Tuned, ...]:
    """Measure a model's problems for so many seconds and put what is found into the database, each as soon as it is there.

    Problems whose alternatives have all been measured before are left out, unless `again`.

    Args:
        model: with static shapes; it is changed.

    Raises:
        OptionError: the target is no CPU like this one, or the database cannot be read or written.
        UnsupportedModelError: the model cannot be compiled into one program.
    """
    if options.target.is_gpu:
        raise OptionError("target", f"kernels for {options.target} cannot be tuned", "tune for a CPU")
    if missing := options.target.missing_features():
        what = f"this CPU lacks {', '.join(missing)}, which {options.target} needs"
        raise OptionError("target", what, "tune on the machine that shall run the program")
    if not options.target.is_here:
        what = f"kernels for a {options.target.machine.name} cannot be timed on this machine"
        raise OptionError("target", what, "leave out its machine, or tune there")
    section = Section.here(options.target, options.precision)
    known = dict(read_database(database).get(section, {})) if os.path.exists(database) else {}
    tell = progress or (lambda text, fraction: None)
    tell("finding groups", 0.0)
    problems, constant_bytes = problems_of(model, options)
    earlier = {} if again else known
    unfinished = [one for one in problems if one.text not in earlier or not earlier[one.text].is_complete]
    found: dict[str, Finding] = {}
    for problem, finding in _measured(unfinished, earlier, options.target, constant_bytes, seconds, tell):
        found[problem.text] = finding
        add_findings(database, section, {problem.text: finding})
    both = {**known, **found}
    ranked = sorted((one for one in problems if one.text in both), key=lambda one: one.text not in found)
    return tuple(Tuned(one, both[one.text], one.text in found) for one in ranked)


def _measured(
    problems: Sequence[Problem],
    earlier: Mapping[str, Finding],
    target: Target,
    constant_bytes: int,
    seconds: float,
    tell: Progress,
) -> Iterator[tuple[Problem, Finding]]:
    """What is found of problems, from earlier findings on, in so many seconds."""
    if not problems:
        return
    with Worker() as worker:
        tell("timing kernels", 0.0)
        begin = monotonic()
        times = _own_times(problems, earlier, target, worker, constant_bytes, begin + _FIRST_PART * seconds)
        for number, (problem, until) in enumerate(shares(_possible_gains(problems, times), begin + seconds)):
            tell(f"{number + 1} of {len(problems)}: {problem.template}", min((monotonic() - begin) / seconds, 0.99))
            finding = _Tuning(problem, target, worker, constant_bytes, until).find(earlier.get(problem.text))
            if finding is not None:
                yield problem, finding


def problems_of(model: ir.Model, options: Options) -> tuple[list[Problem], int]:
    """The problems of a model that have alternatives, those that take longest first, and the bytes of all constants.

    Raises:
        UnsupportedModelError: the model cannot be compiled into one program.
    """
    passes = [one for one in parse_pipeline(named_pipeline(options.pipeline), PASSES) if isinstance(one, Pass)]
    forget_decided_shapes(model)
    infer_facts(model)
    check_nodes(model)
    run_pipeline(model, passes, Context(options.target, precision=options.precision, weights=options.weights))
    check_lowered(model)
    lowered, _ = lower_groups(model, options.target, options.precision)
    same: dict[str, list[tuple[Group, BuiltKernel]]] = {}
    for item in lowered:
        same.setdefault(problem_of(item.group), []).append((replace(item.group, enclosing={}), item.kernel))
    problems = [_problem(text, found, options.target) for text, found in same.items()]
    constants = {name: item.group.types[name].size_bytes for item in lowered for name in item.group.constants}
    ranked = sorted((one for one in problems if one is not None), key=lambda one: -one.estimated_us)
    return ranked, sum(constants.values())


def _problem(text: str, found: Sequence[tuple[Group, BuiltKernel]], target: Target) -> Problem | None:
    """A problem by the group that has most of its launches; None where there is nothing to choose."""
    by_key: dict[str, list[tuple[Group, BuiltKernel]]] = {}
    for group, kernel in found:
        by_key.setdefault(group.key(), []).append((group, kernel))
    group, kernel = max(by_key.values(), key=len)[0]
    if not kernel.choices and len(measurable_templates(group, target)) < 2:
        return None
    size_bytes = sum(group.types[name].size_bytes for name in (*group.inputs, *group.outputs))
    once = max(kernel.flops / _FLOPS_PER_US, size_bytes / _BYTES_PER_US)
    return Problem(text, group, kernel.template, kernel.flops, len(found), once * len(found))


def _own_times(
    problems: Sequence[Problem], known: Mapping[str, Finding], target: Target, worker: Worker, constant_bytes: int, end: float
) -> dict[str, float]:
    """Microseconds of a launch of each problem by the model's own choices, measured until the time is over."""
    times = {problem.text: known[problem.text].own_time_us for problem in problems if problem.text in known}
    for problem in problems:
        if problem.text not in times and monotonic() < end:
            (time,) = worker.measure(Trial(problem.group, target, ({},), constant_bytes, _EXPLORE_SECONDS))
            if time is not None:
                times[problem.text] = time
    return times


def _possible_gains(problems: Sequence[Problem], times: Mapping[str, float]) -> dict[Problem, float]:
    """Microseconds of all launches of each problem that may be gained, the most first; of those not timed nothing is known."""
    rate = max((one.flops / time for one in problems if (time := times.get(one.text))), default=0.0)

    def gain(one: Problem) -> float:
        time = times.get(one.text)
        if not time:
            return _LEAST_GAIN * one.estimated_us
        operations_us = one.flops / rate if rate else 0.0
        return one.launches * max(time - operations_us, _LEAST_GAIN * time)

    gains = {one: gain(one) for one in problems}
    return dict(sorted(gains.items(), key=lambda item: -item[1]))


def shares(gains: Mapping[Problem, float], end: float) -> Iterator[tuple[Problem, float]]:
    """Each problem with the time until which it may be tuned, until the time is over; the first in any case."""
    rests = reversed(list(accumulate(reversed(list(gains.values())))))  # of a problem and those behind it
    for number, ((problem, gain), rest) in enumerate(zip(gains.items(), rests, strict=True)):
        now = monotonic()
        if number and now >= end:
            return
        yield problem, now + (end - now) * gain / rest


class _Tuning:
    """The search for one problem."""

    def __init__(self, problem: Problem, target: Target, worker: Worker, model_constant_bytes: int, until: float) -> None:
        self.problem, self.target, self.worker, self.until = problem, target, worker, until
        self.model_constant_bytes = model_constant_bytes
        self.rivals = measurable_templates(problem.group, target)
        self.kernels: dict[str, BuiltKernel] = {}

    def find(self, known: Finding | None) -> Finding | None:
        """What is found, from an earlier finding on; None where nothing could be measured."""
        size = min(max(_TRIAL_BYTES // max(self.problem.constant_bytes, 1), 2), _TRIAL_SIZE)
        start, tried = dict[str, str](), set[str]()
        if known is not None and not self._kernel(known.configuration).ignored:
            start, tried = dict(known.configuration), set(known.tried)
        result = Search(self.choices, self.explore, self.confirm, start, tried, size).run()
        if result.time_us is None or result.own_time_us is None:
            return None
        times = (round(result.time_us, 3), round(result.own_time_us, 3))
        left = () if result.is_complete else tuple(sorted(result.tried))
        return Finding(result.configuration, *times, result.is_complete, left)

    def choices(self, configuration: Mapping[str, str]) -> tuple[Choice, ...]:
        kernel = self._kernel(configuration)
        own = tuple(dict.fromkeys((kernel.template, *self.rivals)))
        return (Choice(TEMPLATE, own, kernel.template), *kernel.choices)

    def explore(self, configurations: Sequence[Mapping[str, str]]) -> tuple[float | None, ...]:
        if monotonic() >= self.until:
            raise OutOfTimeError
        return self._measure(configurations, _EXPLORE_SECONDS)

    def confirm(self, configurations: Sequence[Mapping[str, str]]) -> tuple[float | None, ...]:
        return self._measure(configurations, _CONFIRM_SECONDS)

    def _measure(self, configurations: Sequence[Mapping[str, str]], seconds: float) -> tuple[float | None, ...]:
        trial = Trial(self.problem.group, self.target, tuple(configurations), self.model_constant_bytes, seconds)
        return self.worker.measure(trial)

    def _kernel(self, configuration: Mapping[str, str]) -> BuiltKernel:
        key = repr(sorted(configuration.items()))
        if key not in self.kernels:
            kernel = build_kernel(replace(self.problem.group, configuration=configuration), self.target)
            assert isinstance(kernel, BuiltKernel), f"{self.problem.text} was computed a moment ago"
            self.kernels[key] = kernel
        return self.kernels[key]
