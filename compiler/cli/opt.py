"""`prefuse opt`: passes on a model, graph to graph."""

from __future__ import annotations

import difflib
from pathlib import Path

import click

from ...runtime.errors import OptionError
from ...runtime.target import Target
from ..frontend.importer import import_model
from ..ir.printer import print_model
from ..pipeline import Context, Pass, PassRecord, format_pipeline, parse_pipeline, run_pipeline
from ..pipeline.pass_table import DEFAULT_PIPELINE, PASSES, named_pipeline
from ..programs.options import parse_precision
from .common import JSON, MODEL, PRECISION, SHAPES, TARGET, Shapes, concrete_model, refuse_program, show, table
from .output import check_output, write_model


def _list(context: click.Context, parameter: click.Parameter, is_given: bool) -> None:
    """Print every pass, with its options as they are by default and what it does, and the default pipeline."""
    if not is_given or context.resilient_parsing:
        return
    for name in PASSES:
        (one,) = parse_pipeline(name, PASSES)
        summary, *_ = (type(one).__doc__ or "").split("\n\n")
        click.echo(f"{format_pipeline([one], with_defaults=True)}\n    {' '.join(summary.split())}")
    click.echo(f"\ndefault: {DEFAULT_PIPELINE}")
    context.exit()


@click.command("opt")
@MODEL
@click.option(
    "--pipeline",
    default=DEFAULT_PIPELINE,
    show_default="those of prefuse compile",
    help="The passes; those that work on a Plan are left out. Or default, or no-fusion.",
)
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list,
    help="List the passes with their options, and the default pipeline.",
)  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the model there: .onnx, or .txt for text.")
@click.option("--start", help="The first pass to run, by name or position.")
@click.option("--stop", help="The last pass to run, by name or position.")
@click.option("--print-changed", is_flag=True, help="Print what each pass changed, not the result.")
@click.option("--time", "timed", is_flag=True, help="Print the time of each pass.")
@click.option("--remarks", is_flag=True, help="Print what the passes say: what they did not do, and why.")
@TARGET
@PRECISION
@SHAPES
@JSON
def command(
    model: Path,
    pipeline: str,
    output: Path | None,
    start: str | None,
    stop: str | None,
    print_changed: bool,
    timed: bool,
    remarks: bool,
    target: str,
    precision: str,
    shapes: Shapes,
    as_json: bool,
) -> None:
    """Run passes on the ONNX file MODEL and print the graph. Without --shape, symbolic dimensions stay symbolic."""
    refuse_program(model, "opt")
    if output:
        check_output(output)
        if output.suffix not in (".onnx", ".txt"):
            raise OptionError("--output", f"unknown form {output.suffix!r}", "write .onnx or .txt")
    passes = [one for one in parse_pipeline(named_pipeline(pipeline), PASSES) if isinstance(one, Pass)]
    context = Context(Target.parse(target), precision=parse_precision(precision))
    graph = concrete_model(model, shapes, keeps_groups=True) if shapes else import_model(model, keeps_groups=True)
    records = run_pipeline(graph, passes, context, start=_place(start), stop=_place(stop), keep_texts=print_changed)
    text = "" if print_changed else print_model(graph)  # before what is written takes the place of files that it is read from
    if output:
        write_model(graph, output)
    said = [str(remark) for remark in context.remarks]
    times = [{"pass": record.name, "changed": record.changed, "seconds": record.seconds} for record in records]
    data = {"pipeline": format_pipeline(passes), "passes": times, "remarks": said}
    if print_changed:
        parts = [_difference(record) for record in records if record.changed]
        data["changes"] = parts
    else:
        parts = [] if output else [text]
        data["graph"] = text
    rows = [(record.name, "yes" if record.changed else "", f"{record.seconds * 1e3:.1f}") for record in records]
    tables = [table("Passes", ("pass", "changed", "ms"), rows)] if timed else []
    show(as_json, data, *parts, *(said if remarks else []), *tables)


def _place(text: str | None) -> str | int | None:
    return int(text) if text is not None and text.isdecimal() else text


def _difference(record: PassRecord) -> str:
    """What a pass changed, as a unified diff."""
    before, after = ((text or "").splitlines() for text in (record.before_text, record.after_text))
    lines = difflib.unified_diff(before, after, f"before {record.name}", f"after {record.name}", n=1, lineterm="")
    return "\n".join(lines)
