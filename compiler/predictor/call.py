"""`prefuse.predict`: its arguments checked, its model read; and predictions of several graphs by one predictor."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir

from ...runtime.errors import InputError, OptionError
from ...runtime.plan import TensorType
from ..api import reporter
from ..driver import PlannedModel, plan_model
from ..frontend.dimensions import is_dynamic
from ..frontend.importer import import_model
from ..programs.builder import Progress
from ..programs.options import Options, check_names, parse_options, suggest
from ..programs.run_database import default_run_file
from ..tuning.worker import Worker
from .calibration import fit_coldness
from .prediction import Prediction
from .predictor import Predictor

_FLOATS, _BYTES = ("float32", "bfloat16", "float16"), ("int8", "uint8")  # between which values are converted
_OPTIONS = ("memory_limit", "pipeline", "random", "threads", "tuning", "weights")


def predict(
    model: object,
    *,
    target: str,
    precision: str,
    measure: bool,
    again: bool,
    database: str | os.PathLike[str] | None,
    progress: bool | Progress | None,
    options: Mapping[str, object],
) -> Prediction:
    """As `prefuse.predict` says.

    Raises:
        CompileError: the model or an option cannot be taken, or the database cannot be written.
    """
    check_names(options, _OPTIONS)
    for name, value in (("measure", measure), ("again", again)):
        if not isinstance(value, bool):
            raise OptionError(name, f"{value!r} is neither True nor False", "say whether kernels are to be measured")
    if database is not None and not isinstance(database, (str, os.PathLike)):
        raise OptionError("database", f"{database!r} is no file", "give the path of a file, or leave it out")
    checked = parse_options(target, precision, options)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        raise OptionError("model", "a torch.nn.Module has no shapes", "give torch.export.export(module, args), or an ONNX file")
    graph, tell = import_model(model), reporter(progress)
    _require_static(graph)  # before anything is measured
    name = Path(model).stem if isinstance(model, (str, os.PathLike)) else str(graph.graph.name or "model")
    try:
        with predictor_for(checked, database, measure=measure, again=again, progress=tell) as predictor:
            return predict_graph(graph, checked, predictor, name)
    finally:
        if tell is not None:
            tell("done", 1.0)


@contextmanager
def predictor_for(
    options: Options,
    database: str | os.PathLike[str] | None = None,
    *,
    measure: bool,
    again: bool = False,
    progress: Progress | None = None,
) -> Iterator[Predictor]:
    """A predictor for programs that are compiled by `options`. Where it is to measure, there is a process for it, and the share
    of coldness of this machine is fitted first if nobody has done so. With `again` it measures what was measured before, too, and
    the shorter times count.

    Raises:
        OptionError: the target is a GPU, or cannot be measured here; or the database cannot be written.
    """
    path, tell = Path(database) if database else default_run_file(), progress or (lambda text, fraction: None)
    if not (measure or again):
        yield Predictor(options.target, path, progress=tell)
        return
    with Worker() as worker:
        predictor = Predictor(options.target, path, worker.ask, again, tell)
        if again or not predictor.is_fitted:
            fit_coldness(predictor, worker.ask)
        yield predictor


def predict_graph(graph: ir.Model, options: Options, predictor: Predictor, name: str) -> Prediction:
    """The program of a graph with static shapes, which is changed, by options that are those of all graphs of the predictor but
    for the precision. Several graphs share its kernels and what it has measured of them.

    Raises:
        InputError: it has symbolic dimensions.
        UnsupportedModelError: it cannot be compiled into one program.
        OptionError: the predictor's database cannot be written.
    """
    return planned_and_predicted(graph, options, predictor, name)[1]


def planned_and_predicted(graph: ir.Model, options: Options, predictor: Predictor, name: str) -> tuple[PlannedModel, Prediction]:
    """As `predict_graph`, with what the passes have made of the graph."""
    _require_static(graph)
    planned = plan_model(graph, options, predictor.progress, predictor.kernels)
    return planned, predictor.predict(planned, name, options.precision)


def _require_static(graph: ir.Model) -> None:
    if is_dynamic(graph):
        what = "has symbolic dimensions, and each shape has a program of its own"
        raise InputError("model", what, "predict a model of concrete shapes, or prefuse predict --shape NAME=SIZES")


def predict_conversion(kind: TensorType, wanted: str, options: Options, predictor: Predictor) -> Prediction:
    """A program that only makes a value of another type: what a conversion takes that no store and no load of a group computes.
    It is paid once for each value and type, however many read it.

    Args:
        kind: of the value, float32, bfloat16, float16, int8 or uint8.
        wanted: likewise; from and to 8 bits by a scale and a zero point.

    Raises:
        OptionError: a type is none of these, or both are of 8 bits; or the predictor's database cannot be written.
    """
    known = (*_FLOATS, *_BYTES)
    for one in (kind.dtype, wanted):
        if one not in known:
            raise OptionError("wanted", f"no conversion from or to {one}", suggest(one, known))
    if kind.dtype in _BYTES and wanted in _BYTES:
        raise OptionError("wanted", f"no scales from {kind.dtype} to {wanted}", "convert it to a float first")
    body, scale = f"y = Cast<to = {int(_data_type(wanted))}>(x)", ""
    byte = next((one for one in (kind.dtype, wanted) if one in _BYTES), "")
    if byte:
        body = f"y = {'QuantizeLinear' if wanted in _BYTES else 'DequantizeLinear'}(x, s, z)"
        scale = f"<{_text_type(wanted if kind.dtype in _BYTES else kind.dtype)} s = {{0.1}}, {byte} z = {{0}}>"
    shape = ",".join(map(str, kind.shape))
    ports = f"({_text_type(kind.dtype)}[{shape}] x) => ({_text_type(wanted)}[{shape}] y)"
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]> main {ports} {scale} {{ {body} }}')
    return predict_graph(model, options, predictor, f"{kind.dtype} to {wanted}")


def _data_type(dtype: str) -> ir.DataType:
    return ir.DataType[dtype.upper()] if dtype != "float32" else ir.DataType.FLOAT


def _text_type(dtype: str) -> str:
    """As ONNX text writes it."""
    return "float" if dtype == "float32" else dtype
