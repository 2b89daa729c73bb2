"""`python -m benchmarks.prediction [MODEL...]`: how far predictions of programs are from the programs.

Programs are compiled, measured, and planned again for their predictions. With --folder each of the three can be a run of its
own: --only compile and --only predict beside other work, --only measure without, and --only predict again after each change of
the cost model: a program whose plan is another one then is marked, and only launches with the same kernel are compared. With
--measure kernels are measured alone, too.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from prefuse.compiler.predictor.call import predictor_for
from prefuse.examples.models import MODELS
from rich.console import Console

from .. import record
from ..nets import model_names
from . import errors, runs
from .programs import PRECISIONS, Case

_PARTS = ("compile", "measure", "predict")
_RUNS = "runs.json"


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL...]", callback=model_names)
@click.option("--precision", "precisions", multiple=True, default=PRECISIONS, type=click.Choice(PRECISIONS))
@click.option("--threads", default=1, show_default=True, type=click.IntRange(min=1))
@click.option("--measure", is_flag=True, help="Measure kernels alone, and predict programs from that.")
@click.option("--small", is_flag=True, help="Small variants of the models: checks the benchmark, not the predictions.")
@click.option("--folder", type=click.Path(path_type=Path), help=f"Keep programs and what they took ({_RUNS}) here.")
@click.option("--only", "parts", multiple=True, default=_PARTS, type=click.Choice(_PARTS))
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Add the results to this file.")
def main(
    models: tuple[str, ...],
    precisions: tuple[str, ...],
    threads: int,
    measure: bool,
    small: bool,
    folder: Path | None,
    parts: tuple[str, ...],
    json_path: Path | None,
) -> None:
    """Predict programs of MODELs (all examples if none is named), and compare."""
    kept = record.record(json_path, threads, {"small": small, "measure": measure}, key=("model", "precision", "threads"))
    with ExitStack() as stack:
        where = folder or Path(stack.enter_context(TemporaryDirectory(prefix="prefuse-benchmark-")))
        where.mkdir(parents=True, exist_ok=True)
        cases = [Case(model, precision, threads, where, small) for model in models or tuple(MODELS) for precision in precisions]
        if "compile" in parts:
            for case in cases:
                case.compiled()
        if "measure" in parts:
            for case in cases:
                runs.add(where / _RUNS, [runs.measured(case)])
        if "predict" in parts:
            _predict(cases, runs.read(where / _RUNS), kept, measure=measure)


def _predict(cases: list[Case], measured: list[runs.ProgramTime], kept: record.Record, *, measure: bool) -> None:
    known, console, results = {one.key: one for one in measured}, Console(width=170), list[errors.Found]()
    for case in cases:
        if (run := known.get((case.model, case.precision, case.threads))) is not None:
            with predictor_for(case.options, measure=measure) as predictor:
                results.append(errors.found(run, case, predictor))
    for one in errors.tables(results):
        console.print(one)
    kept.add(*results)


if __name__ == "__main__":
    main()
