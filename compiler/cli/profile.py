"""`prefuse profile`: where the time of a program goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
from rich.table import Table

from ...runtime.errors import OptionError
from ...runtime.executor import CompiledModel
from ...runtime.loading.load import Loaded, load
from ...runtime.profile import Limits, Profile, StepProfile, profile_in_turns
from ...runtime.program_set.program_set import ProgramSet
from ...runtime.staged.staged_model import StagedModel
from ...runtime.target import Target
from ..debugging.comparison import Match, match_steps
from .common import (
    INPUTS,
    JSON,
    MODEL,
    SEED,
    SHAPES,
    CompileArguments,
    Shapes,
    compile_graph,
    concrete_model,
    input_types,
    is_program,
    random_arrays,
    read_inputs,
    refuse_program,
    show,
    size_text,
    table,
    warn_of_ignored,
    with_compile_arguments,
)
from .output import check_output

_LABEL = 64  # characters shown of a group
_ROWS = 40  # groups shown, those that take longest
_SAME_SPEED = 0.02  # by which multiply-adds measured twice at one clock differ
_CHANGED = (
    "the limits before and after the calls differ by {change:.0%}: other work took the cores, or two of them were one, "
    "so times and limits may be of different moments; profile again\n"
)


@click.command("profile")
@MODEL
@INPUTS
@SEED
@click.option("--runs", default=20, show_default=True, type=click.IntRange(1), help="Calls to record.")
@click.option("--trace", type=click.Path(path_type=Path), help="A .json file for the calls, for ui.perfetto.dev.")
@click.option("--compare", help="Another pipeline, as --pipeline names it: show both programs side by side.")
@SHAPES
@with_compile_arguments
@JSON
def command(
    model: Path,
    inputs_path: Path | None,
    seed: int,
    runs: int,
    trace: Path | None,
    compare: str | None,
    shapes: Shapes,
    arguments: CompileArguments,
    as_json: bool,
) -> None:
    """Say where the time of MODEL goes, an ONNX file or a .prefuse program that was compiled with counters (--profile).

    For each group: time, what the cost model predicted, share, arithmetic, bytes from and to memory, and the fraction of the
    roofline, whose limits are measured before the calls and after them.
    """
    if compare is not None:
        refuse_program(model, "--compare")
    if trace:
        check_output(trace, "--trace")
    graph = None if is_program(model) else concrete_model(model, shapes)
    pipelines = [arguments] if compare is None else [arguments, replace(arguments, pipeline=compare)]
    if graph is None:
        warn_of_ignored(model, arguments, shapes)
        nets = [_whole(load(model))]
    else:
        nets = [_whole(compile_graph(graph, model.stem, one, profile=True)) for one in pipelines]
    inputs = read_inputs(inputs_path, input_types(nets[0])) if inputs_path else random_arrays(nets[0], graph, seed)
    before = measure(nets[0])
    profiles = profile_in_turns(nets, inputs, runs)
    limits = before.joined(measure(nets[0]))
    first, *others = (profile.with_limits(limits) for profile in profiles)
    if trace:
        first.write_trace(trace)
    data = {**first.as_json(), "compared": [_comparison(first, other) for other in others]}
    tables = [_compared(first, other, str(compare)) for other in others] or [_steps(first, limits)]
    show(as_json, data, _head(first, limits), *tables, *(() if others else _details(first)))


def measure(net: CompiledModel) -> Limits:
    """The limits of this machine at a program's threads, as they are now."""
    from ..lowering.roofline import measure_limits

    return measure_limits(Target.parse(net.plan.target))


def _whole(net: Loaded) -> CompiledModel:
    if isinstance(net, ProgramSet):
        fix = "give the ONNX file and --shape, or save one program of it: net.specialize(...).save(path)"
        raise OptionError("profile", f"the file holds {len(net.members)} programs for several sizes", fix)
    if isinstance(net, StagedModel):
        raise OptionError("profile", "the model runs in stages, in several programs", "give concrete shapes, or profile a part")
    return net


def _head(profile: Profile, limits: Limits) -> str:
    return (
        f"{profile.name} for {profile.plan.target}: {profile.time_us / 1e3:.3f} ms a call (median of {len(profile.stamps_ns)}), "
        f"{_predicted(profile)}"
        f"{size_text(profile.bytes_moved)} moved\n"
        f"limits: {limits.flops_per_second / 1e9:.0f} GFLOP/s, {_narrow_limits(limits)}"
        f"{limits.bytes_per_second / 1e9:.1f} GB/s ({limits.method})\n"
        "a roofline above 100% says that the data lay in caches, which are faster than memory, or that more is read than "
        "written, as the bytes a second are those of a copy\n"
        f"{_CHANGED.format(change=limits.change) * limits.has_changed}"
    )


def _predicted(profile: Profile) -> str:
    """What the cost model expected; beside it what it expects at this run's clock, where that is not the one it was fitted at."""
    if not profile.predicted_us:
        return ""
    text = f"{profile.predicted_us / 1e3:.3f} ms predicted, "
    if abs(profile.speed - 1) <= _SAME_SPEED:
        return text
    now = f"{profile.predicted_now_us / 1e3:.3f} ms at this run's clock"
    return f"{text}{now} (multiply-adds at {profile.speed:.2f} of the fitted rate), "


def _narrow_limits(limits: Limits) -> str:
    rates = {"in bfloat16": limits.bfloat16_flops_per_second, "in bfloat16 on tiles": limits.tile_flops_per_second}
    return "".join(f"{rate / 1e9:.0f} {how}, " for how, rate in rates.items() if rate)


def _steps(profile: Profile, limits: Limits) -> Table:
    slowest = sorted(profile.steps, key=lambda step: -step.time_us)
    rows = [
        (
            _short(step.label),
            step.template,
            f"{step.time_us:.1f}",
            f"{step.group.predicted_us:.1f}" if step.group.predicted_us else "-",
            f"{step.share:.1%}",
            f"{step.flops_per_second / 1e9:.1f}",
            f"{step.bytes_per_second / 1e9:.1f}",
            f"{step.roofline(limits):.0%}",
        )
        for step in slowest[:_ROWS]
    ]
    title = "Groups" if len(slowest) <= _ROWS else f"The {_ROWS} slowest of {len(slowest)} groups"
    return table(title, ("group", "template", "us", "predicted", "share", "GFLOP/s", "GB/s", "roofline"), rows)


def _details(profile: Profile) -> list[str]:
    """Why other templates did not take a group, and why a group of one node is alone: each reason once, by its slowest group."""
    groups: dict[str, list[str]] = {}
    for step in sorted(profile.steps, key=lambda step: -step.time_us):
        reasons = [f"not {name}: {why}" for name, why in step.group.refused] + [f"alone: {why}" for why in step.group.alone]
        for reason in dict.fromkeys(reasons):
            groups.setdefault(reason, []).append(_short(step.label))
    lines = [f"{first}{f' and {len(more)} more' if more else ''}: {reason}" for reason, (first, *more) in groups.items()]
    return ["", *lines] if lines else []


def _comparison(first: Profile, second: Profile) -> dict[str, object]:
    groups = [
        {
            "first": [step.label for step in match.first],
            "second": [step.label for step in match.second],
            "time_us": match.time_us,
            "bytes_moved": match.bytes_moved,
        }
        for match in match_steps(first, second)
    ]
    return {**second.as_json(), "groups": groups}


def _compared(first: Profile, second: Profile, name: str) -> Table:
    matches = sorted(match_steps(first, second), key=lambda match: -max(match.time_us))
    total = ("all groups", len(first.steps), len(second.steps), *_pair((first.time_us, second.time_us)))
    rows = [(*total, *map(size_text, (first.bytes_moved, second.bytes_moved))), *map(_match_row, matches[:_ROWS])]
    columns = ("group", "steps", f"steps of {name}", "us", f"us of {name}", "ratio", "bytes", f"bytes of {name}")
    return table("Side by side", columns, rows)


def _match_row(match: Match[StepProfile]) -> tuple[object, ...]:
    sizes = map(size_text, match.bytes_moved)
    return _short(match.label), len(match.first), len(match.second), *_pair(match.time_us), *sizes


def _pair(times: tuple[float, float]) -> tuple[str, str, str]:
    ratio = f"{times[1] / times[0]:.2f}" if times[0] else "-"
    return f"{times[0]:.1f}", f"{times[1]:.1f}", ratio


def _short(label: str) -> str:
    """A label that fits its column: of its nodes the anchor alone, without sources, or the end of that where no more fits."""
    nodes, at, source = label.partition(" at ")
    anchor, *others = nodes.split("+")
    brief = f"{anchor} and {len(others)} more" if others else anchor
    fitting = (text for text in (label, brief + at + source, brief) if len(text) <= _LABEL)
    return next(fitting, f"...{brief[3 - _LABEL :]}")
