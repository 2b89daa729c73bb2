"""ONNX's conformance cases, and how prefuse fares on them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnx.backend.test.loader
from onnx.backend.test.case.model import collect_testcases as collect_models
from onnx.backend.test.case.node import collect_testcases as collect_nodes
from onnx.backend.test.case.test_case import TestCase
from prefuse.backend import UnsupportedByBackendError, prepare

from ..worker_pool import Lost, run_apart
from .chance import chance_difference, is_chance
from .means import Account, account_of

Outcome = Literal["pass", "unlike", "wrong", "refused", "error", "crash", "hang"]
OUTCOMES: tuple[Outcome, ...] = ("pass", "unlike", "wrong", "refused", "error", "crash", "hang")
SOUND = ("pass", "unlike")
_CORNERS = "onnx.reference aligns corners of a length that is no whole number, ONNX's text and ONNX Runtime those of the result"
# Cases with numbers that ONNX's text does not have, which is followed here, and why they have them: they are to be "unlike".
UNLIKE = {f"test_resize_downsample_scales_{mode}_align_corners": _CORNERS for mode in ("linear", "cubic")}
SETS = ("node", "simple", "pytorch-operator", "pytorch-converted", "light")
# What the float32 arithmetic of two sound implementations may differ by, where a case asks for less.
_RTOL, _ATOL = 1e-3, 1e-5
# Two units in the last place of types whose arithmetic here rounds once, where the reference rounds after each operator.
_ROUNDING = {"bfloat16": 2**-6, "float16": 2**-9}
_DATA = Path(onnx.backend.test.loader.DATA_DIR)

Row = list[Any]  # inputs or outputs: arrays, lists of them, None


@dataclass(frozen=True)
class Case:
    """A model, its rows of inputs and outputs, and the tolerances that it asks for."""

    name: str
    load: Callable[[], tuple[onnx.ModelProto, list[tuple[Row, Row]]]]
    rtol: float
    atol: float


@dataclass(frozen=True)
class Result:
    """How one case went."""

    name: str
    operator: str
    outcome: Outcome
    detail: str
    seconds: float
    account: Account | None = None  # of what passed


@cache
def cases(kind: str) -> dict[str, Case]:
    """All cases of one of the sets of the installed onnx, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "node":
            found: Iterable[Case] = map(_in_memory, collect_nodes(None))
        elif kind == "light":
            found = (_light(case) for case in collect_models() if case.url is not None)
        else:
            found = (_on_disk(Path(case.model_dir or ""), case) for case in onnx.backend.test.loader.load_model_tests(kind=kind))
        return {case.name: case for case in found}


def case_of(name: str) -> Case:
    """The case of this name among the node cases, or of "set/name" in another set."""
    kind, _, rest = name.rpartition("/")
    return cases(kind or "node")[rest]


def operator_of(case: Case) -> str:
    """The operator that a case is about: the name of its expanded form is that of the function."""
    nodes = case.load()[0].graph.node
    return str(nodes[-1].op_type) if len(nodes) == 1 else str(case.name).removeprefix("test_")


def run_cases(names: Sequence[str], processes: int, timeout_s: float) -> Iterator[Result]:
    """Results in the order in which they come. A crash or a hang costs one case and is counted."""
    for done in run_apart(names, judge, processes=processes, timeout_s=timeout_s):
        outcome, detail, account = (done.result.how, done.result.detail, None) if isinstance(done.result, Lost) else done.result
        yield Result(done.task, operator_of(case_of(done.task)), outcome, detail, done.seconds, account)


def judge(name: str) -> tuple[Outcome, str, Account | None]:
    """Run a case, and say how it went, why, and what computed it."""
    case = case_of(name)
    try:
        model, rows = case.load()
        prepared = prepare(model, random=is_chance(case.name))
        for inputs, outputs in rows:
            got = prepared.run(inputs)
            by_chance = is_chance(case.name)
            if difference := (
                chance_difference(case.name, inputs, outputs, got) if by_chance else _difference(got, outputs, case)
            ):
                return ("unlike", UNLIKE[name], None) if name in UNLIKE else ("wrong", difference, None)
        if name in UNLIKE:
            return "wrong", "has the numbers of the case, which ONNX's text does not have", None
        return "pass", "", account_of(prepared.model)
    except UnsupportedByBackendError as refusal:
        return "refused", str(refusal), None
    except Exception as error:  # any other is a bug of ours, or an invalid model
        return "error", f"{type(error).__name__}: {error}", None


def _in_memory(case: TestCase) -> Case:
    model = case.model
    assert model is not None, f"{case.name} has no model of its own"
    rows = [(list(map(_as_array, inputs)), list(map(_as_array, outputs))) for inputs, outputs in case.data_sets or ()]
    return Case(case.name, lambda: (model, rows), case.rtol, case.atol)


def _on_disk(folder: Path, case: TestCase) -> Case:
    def load() -> tuple[onnx.ModelProto, list[tuple[Row, Row]]]:
        model = onnx.load(folder / "model.onnx")
        initialized = {tensor.name for tensor in model.graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in initialized]
        sets = sorted(folder.glob("test_data_set_*"))
        return model, [(list(_read(one, "input", inputs)), list(_read(one, "output", model.graph.output))) for one in sets]

    return Case(case.name, load, case.rtol, case.atol)


def _read(folder: Path, kind: str, ports: Sequence[onnx.ValueInfoProto]) -> Iterator[Any]:
    for number, port in enumerate(ports):
        content = (folder / f"{kind}_{number}.pb").read_bytes()
        if port.type.HasField("sequence_type"):
            yield onnx.numpy_helper.to_list(onnx.SequenceProto.FromString(content))
        elif port.type.HasField("optional_type"):
            yield onnx.numpy_helper.to_optional(onnx.OptionalProto.FromString(content))
        else:
            yield onnx.numpy_helper.to_array(onnx.TensorProto.FromString(content))


def _light(case: TestCase) -> Case:
    """A well-known network without its weights, on the input and with the output that onnx's own runner gives it."""

    def load() -> tuple[onnx.ModelProto, list[tuple[Row, Row]]]:
        path = _DATA / "light" / Path(str(case.url)).name
        model = onnx.load(path)
        initialized = {tensor.name for tensor in model.graph.initializer}
        ports = [value for value in model.graph.input if value.name not in initialized]
        shapes = [[dim.dim_value or 1 for dim in port.type.tensor_type.shape.dim] for port in ports]
        inputs = [(np.arange(np.prod(shape)).reshape(shape) / np.prod(shape)).astype(np.float32) for shape in shapes]
        files = [path.with_name(f"{path.stem}_output_{number}.pb") for number in range(len(model.graph.output))]
        outputs = [onnx.numpy_helper.to_array(onnx.TensorProto.FromString(file.read_bytes())) for file in files]
        return model, [(inputs, outputs)]

    return Case(case.name, load, case.rtol, case.atol)


def _as_array(value: Any) -> Any:
    """A value as prefuse takes it: cases hold what NumPy has no type for as protos."""
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _difference(got: Sequence[Any], expected: Sequence[Any], case: Case) -> str:
    """How the results differ from what they should be; empty if they do not. Sequences are compared item by item."""
    if len(got) != len(expected):
        return f"{len(got)} outputs, not {len(expected)}"
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        if b is None or isinstance(b, list) or isinstance(a, list):
            if (a is None) != (b is None) or isinstance(a, list) != isinstance(b, list):
                return f"output {number} is {type(a).__name__}, not {type(b).__name__}"
            difference = "" if b is None else _difference(a, b, case)
        else:
            difference = _array_difference(a, np.asarray(b), case)
        if difference:
            return f"output {number}: {difference}"
    return ""


def _array_difference(a: np.ndarray, b: np.ndarray, case: Case) -> str:
    if a.shape != b.shape:
        return f"shape {list(a.shape)}, not {list(b.shape)}"
    if b.dtype.kind in "OUS":
        return "" if a.dtype.kind in "OUS" and a.tolist() == b.tolist() else f"{a.tolist()}, not {b.tolist()}"
    if a.dtype != b.dtype:
        return f"type {a.dtype}, not {b.dtype}"
    kind = np.complex128 if b.dtype.kind == "c" else np.float64
    x, y = a.astype(kind), b.astype(kind)
    rtol = max(case.rtol, _RTOL, _ROUNDING.get(b.dtype.name, 0.0))
    if np.allclose(x, y, rtol=rtol, atol=max(case.atol, _ATOL), equal_nan=True):
        return ""
    return f"differs by up to {np.nanmax(np.abs(x - y)):.3g} of {np.nanmax(np.abs(y)):.3g}"
