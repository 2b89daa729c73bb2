"""Files that ONNX Runtime's tools have quantized, by us as they are, against ONNX Runtime: speed, constants, and every value.

Values are those that a file keeps in 8 bits between its nodes, each made of the others as ONNX Runtime has them without its
optimizations. In a whole model what differs by ties alone is in the inputs of the next layers, which amplify it: after fifty of
them two programs are as far apart as rounding to 8 bits makes them, ONNX Runtime's own with and without its optimizations, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast, get_args

import click
import numpy as np
import onnx
import onnxruntime
import prefuse
from prefuse.runtime.executor import CompiledModel
from rich.console import Console
from rich.table import Table

from .engines.engine import Task
from .engines.onnxruntime_int8 import FileKind, quantized_file
from .harness import Result, Settings, compared, measure_task
from .nets import is_known
from .record import record
from .reference import make_task
from .turns import Spread

FILES = ("resnet50:qdq", "resnet50:qoperator", "bert-base:qdq", "bert-base:dynamic")
_ENGINES = ("prefuse", "onnxruntime")
_WRONG = 0.5  # an error that rounding to 8 bits, layer after layer, does not explain
_BYTES, _GIVEN = ("tensor(uint8)", "tensor(int8)"), "/given"


@dataclass(frozen=True, slots=True)
class Found:
    """One file. `speed`: times as fast as ONNX Runtime; `constants`: bytes of ours over the file's; `within_step`: the share
    of elements that are at most one step off, of the value that has the least; `apart`: outputs from ONNX Runtime's, relative."""

    file: str
    speed: Spread
    ours_ms: float
    theirs_ms: float
    constants: float
    values: int
    within_step: float
    worst_value: str
    equal: float  # the share of equal elements, of the value that has the least
    apart: float
    results: tuple[Result, ...]  # with their rounds


def stored_bytes(path: Path) -> int:
    """What the constants of a file take."""
    model = onnx.load(path)
    tensors = [
        *model.graph.initializer,
        *(one.t for node in model.graph.node if node.op_type == "Constant" for one in node.attribute),
    ]
    return sum(onnx.numpy_helper.to_array(tensor).nbytes for tensor in tensors)


def expected_values(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The values that nodes make in 8 bits of the inputs, by ONNX Runtime without its optimizations."""
    wider = onnx.ModelProto()
    wider.CopyFrom(model)
    known = {one.name for one in model.graph.output}
    made = [name for node in model.graph.node if node.op_type != "Constant" for name in node.output if name not in {"", *known}]
    wider.graph.output.extend(onnx.ValueInfoProto(name=name) for name in made)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(wider.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = [one.name for one in session.get_outputs() if one.type in _BYTES and one.name in made]
    return dict(zip(wanted, session.run(wanted, dict(inputs)), strict=True))


def apart(model: onnx.ModelProto, values: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """A model that gives these values alone, each made of the others as given: inputs named with `_GIVEN` behind."""
    cut = onnx.ModelProto()
    cut.CopyFrom(model)
    for node in cut.graph.node:
        node.input[:] = [name + _GIVEN if name in values else name for name in node.input]
    kinds = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in values.items()}
    describe = onnx.helper.make_tensor_value_info
    read = {name for node in cut.graph.node for name in node.input}
    given = [name for name in values if name + _GIVEN in read]
    cut.graph.input.extend(describe(name + _GIVEN, kinds[name], values[name].shape) for name in given)
    del cut.graph.output[:], cut.graph.value_info[:]
    cut.graph.output.extend(describe(name, kinds[name], array.shape) for name, array in values.items())
    return cut


def values_compared(path: Path, inputs: Mapping[str, np.ndarray], threads: int) -> Iterator[tuple[str, float, float]]:
    """Each value in 8 bits, with the shares of elements that are within a step of ONNX Runtime's, and equal."""
    model = onnx.load(path)
    values = expected_values(model, inputs)
    cut = apart(model, values)
    ours = prefuse.compile(cut, threads=threads, cache=False)
    assert isinstance(ours, CompiledModel)
    every = {**inputs, **{name + _GIVEN: array for name, array in values.items()}}
    found = ours(*(every[one.name] for one in cut.graph.input))
    for (name, expected), one in zip(values.items(), found if isinstance(found, tuple) else (found,), strict=True):
        steps = np.abs(np.asarray(one).astype(np.int32) - expected.astype(np.int32))
        yield name, float(np.mean(steps <= 1)), float(np.mean(steps == 0))


def measure_file(name: str, settings: Settings, folder: Path, console: Console) -> Found:
    """One file, "model:kind"."""
    model, _, kind = name.partition(":")
    task, _ = make_task(model, settings.small, settings.batch, settings.threads, folder)
    path = quantized_file(task, cast(FileKind, kind))
    given = replace(task, onnx_path=path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    exact = [np.asarray(one) for one in session.run(None, task.inputs)]
    with console.status(name) as status:
        measured = measure_task(given, exact, settings, lambda text: status.update(f"{name}: {text}"))
        ours, theirs = measured.results
        if failed := [row for row in measured.results if row.failure]:
            raise click.ClickException(f"{failed[0].engine} on {name}: {failed[0].failure[:300]}")
        status.update(f"{name}: every value in 8 bits")
        values = list(values_compared(path, task.inputs, task.threads))
    worst = min(values, key=lambda one: one[1:])
    constants = _our_bytes(given) / stored_bytes(path)
    equal = min(one[2] for one in values)
    times = compared(theirs, ours), ours.median_ms, theirs.median_ms
    return Found(name, *times, constants, len(values), worst[1], worst[0], equal, ours.error, (ours, theirs))


def _our_bytes(task: Task) -> int:
    net = prefuse.compile(task.onnx_path, threads=task.threads, cache=False)
    assert isinstance(net, CompiledModel)
    return net.plan.weights_bytes


@click.command()
@click.argument("files", nargs=-1, metavar="[MODEL:KIND...]")
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1), help="Threads that each engine may use.")
@click.option("--seconds", default=3.0, show_default=True, type=click.FloatRange(min=0.1), help="Time for each engine and file.")
@click.option("--small", is_flag=True, help="Small variants of the models: checks the benchmark, not the engines.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Where files are kept for later runs.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Add the results to this file.")
def main(files: tuple[str, ...], threads: int, seconds: float, small: bool, folder: Path | None, json_path: Path | None) -> None:
    """Compare MODEL:KIND files (kinds: qdq, qoperator, dynamic) with ONNX Runtime; the usual four if none is named."""
    for name in files:
        if not is_known(name.partition(":")[0]):
            raise click.BadParameter(f"there is no model of {name!r}")
        if name.partition(":")[2] not in get_args(FileKind):
            raise click.BadParameter(f"{name!r} names no kind of file; use {', '.join(get_args(FileKind))}")
    console = Console(width=130)
    settings = Settings(_ENGINES, threads, small, seconds=seconds, wrong_error=_WRONG)
    kept = record(json_path, threads, {"seconds": seconds, "small": small}, ("onnxruntime",), key=("file",))
    found = list[Found]()
    with TemporaryDirectory(prefix="prefuse-benchmark-") as temporary:
        where = folder or Path(temporary)
        where.mkdir(parents=True, exist_ok=True)
        for name in files or FILES:
            found.append(measure_file(name, settings, where, console))
            kept.add(found[-1])
    console.print(_table(found))


def _table(found: Sequence[Found]) -> Table:
    headings = ("file", "ms (ONNX Runtime)", "times as fast", "constants / file", "values", "within a step", "equal", "apart")
    table = Table(*headings)
    for one in found:
        times = f"{one.ours_ms:.2f} ({one.theirs_ms:.2f})", str(one.speed), f"{one.constants:.3f}"
        table.add_row(one.file, *times, str(one.values), f"{one.within_step:.5f}", f"{one.equal:.4f}", f"{one.apart:.1e}")
    return table


if __name__ == "__main__":
    main()
