"""`prefuse compile`: an ONNX model to a `.prefuse` file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...runtime.errors import OptionError
from ...runtime.executor import CompiledModel
from .common import (
    DIMS,
    JSON,
    MODEL,
    SHAPES,
    CompileArguments,
    Dims,
    Shapes,
    compile_dims,
    compile_graph,
    concrete_model,
    refuse_program,
    show,
    size_text,
    with_compile_arguments,
)
from .output import check_output

if TYPE_CHECKING:
    from ...runtime.staged.staged_model import StagedModel
    from ..programs.symbolic import SymbolicModel


@click.command("compile")
@MODEL
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write it; ./STEM.prefuse if left out.")
@click.option("--name", help="What reports call the program; the file's name if left out.")
@click.option("--profile", is_flag=True, help="Give the program the counters that prefuse profile reads.")
@click.option("--remarks", is_flag=True, help="Print all that the passes say: what they did not do, and why.")
@SHAPES
@DIMS
@with_compile_arguments
@JSON
def command(
    model: Path,
    output: Path | None,
    name: str | None,
    profile: bool,
    remarks: bool,
    shapes: Shapes,
    dims: Dims,
    arguments: CompileArguments,
    as_json: bool,
) -> None:
    """Compile the ONNX file MODEL into one .prefuse file."""
    refuse_program(model, "compile")
    path = output or Path(f"{model.stem or 'model'}.prefuse")  # a path such as ".", which is refused below, has no name
    check_output(path, is_replaced=True)
    begin = time.perf_counter()
    if shapes and dims:
        raise OptionError("--shape", "given with --dims", 'give one size as a range: --dims "N=8:8"')
    title = name or model.stem
    compiled: CompiledModel | StagedModel | SymbolicModel
    if dims:
        compiled = compile_dims(model, dims, title, arguments, profile=profile)
        for note in compiled.unserved:
            click.echo(f"warning: the file has no program for {note}", err=True)
    else:
        compiled = compile_graph(concrete_model(model, shapes), title, arguments, profile=profile)
    compiled.save(path)
    seconds, size_bytes = time.perf_counter() - begin, path.stat().st_size
    plan = compiled.plan if isinstance(compiled, CompiledModel) else None  # a model in stages has one in each
    result = {
        "output": str(path),
        "target": str(arguments.options().target),
        "seconds": round(seconds, 3),
        "size_bytes": size_bytes,
        "spaces": {} if plan is None else {space.name: space.size_bytes for space in plan.spaces},
        "report": compiled.report(),
        "remarks": list(compiled.remarks),
    }
    said = ("", *compiled.remarks) if remarks else ()
    show(as_json, result, compiled.report(), *said, f"\n{path}: {size_text(size_bytes)}, compiled in {seconds:.1f} s")
