"""`prefuse why-not`: why two nodes are not in one group."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from .common import JSON, MODEL, SHAPES, Shapes, refuse_program, show, trace_file, with_trace_arguments


@click.command("why-not")
@MODEL
@click.argument("first")
@click.argument("second")
@SHAPES
@with_trace_arguments
@JSON
def command(
    model: Path, first: str, second: str, shapes: Shapes, target: str, precision: str, pipeline: str | None, as_json: bool
) -> None:
    """Say why the nodes FIRST and SECOND of the ONNX file MODEL are not in one group.

    A node is named by its name, one of its outputs, its operator with a number (MatMul#0 is the first), or its line of torch
    source (model.py:12).
    """
    from ..debugging.why_not import why_not

    refuse_program(model, "why-not")
    answer = why_not(trace_file(model, shapes, target, precision, pipeline), first, second)
    show(as_json, {"first": first, "second": second, **asdict(answer)}, *answer.lines())
