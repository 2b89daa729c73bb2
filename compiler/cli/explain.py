"""`prefuse explain`: what the passes made of a node."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from .common import JSON, MODEL, SHAPES, Shapes, refuse_program, show, trace_file, with_trace_arguments


@click.command("explain")
@MODEL
@click.argument("node")
@SHAPES
@with_trace_arguments
@JSON
def command(model: Path, node: str, shapes: Shapes, target: str, precision: str, pipeline: str | None, as_json: bool) -> None:
    """Tell the history of NODE of the ONNX file MODEL: its source, what each pass did to it, its group, and its kernel.

    A node is named by its name, one of its outputs, its operator with a number (MatMul#0 is the first), or its line of torch
    source (model.py:12), which may mean several.
    """
    from ..debugging.explanation import explain

    refuse_program(model, "explain")
    found = explain(trace_file(model, shapes, target, precision, pipeline), node)
    show(as_json, {"nodes": [asdict(one) for one in found]}, *(line for one in found for line in one.lines()))
