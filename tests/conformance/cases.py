"""ONNX's conformance cases, and how prefuse fares on one of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import onnx
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.case.test_case import TestCase
from prefuse.backend import UnsupportedByBackendError, prepare

Outcome = Literal["pass", "wrong", "refused", "error", "crash", "hang"]
OUTCOMES: tuple[Outcome, ...] = ("pass", "wrong", "refused", "error", "crash", "hang")
# What the float32 arithmetic of two sound implementations may differ by, where a case asks for less.
_RTOL, _ATOL = 1e-3, 1e-5
# Two units in the last place of types whose arithmetic here rounds once, where the reference rounds after each operator.
_ROUNDING = {"bfloat16": 2**-6, "float16": 2**-9}


@cache
def node_cases() -> dict[str, TestCase]:
    """All cases for single operators of the installed onnx, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {case.name: case for case in collect_testcases(None)}


def operator_of(case: TestCase) -> str:
    """The operator that a case is about: the name of its expanded form is that of the function."""
    nodes = model_of(case).graph.node
    return str(nodes[-1].op_type) if len(nodes) == 1 else str(case.name).removeprefix("test_")


def model_of(case: TestCase) -> onnx.ModelProto:
    assert case.model is not None, f"{case.name} has no model of its own"
    return case.model


def judge(case: TestCase) -> tuple[Outcome, str]:
    """Run a case, and say how it went and why."""
    try:
        for inputs, outputs in case.data_sets or ():
            got = prepare(model_of(case)).run([_as_array(value) for value in inputs])
            if difference := _difference(got, outputs, case):
                return "wrong", difference
    except UnsupportedByBackendError as refusal:
        return "refused", str(refusal)
    except Exception as error:  # any other is a bug of ours, or an invalid model
        return "error", f"{type(error).__name__}: {error}"
    return "pass", ""


def _as_array(value: Any) -> Any:
    """An input as prefuse takes it: cases hold what NumPy has no type for as protos."""
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _difference(got: Sequence[Any], expected: Sequence[Any], case: TestCase) -> str:
    """How the results differ from what they should be; empty if they do not. Sequences are compared item by item."""
    if len(got) != len(expected):
        return f"{len(got)} outputs, not {len(expected)}"
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        if b is None or isinstance(b, list) or isinstance(a, list):
            if (a is None) != (b is None) or isinstance(a, list) != isinstance(b, list):
                return f"output {number} is {type(a).__name__}, not {type(b).__name__}"
            difference = "" if b is None else _difference(a, b, case)
        else:
            difference = _array_difference(a, np.asarray(_as_array(b)), case)
        if difference:
            return f"output {number}: {difference}"
    return ""


def _array_difference(a: np.ndarray, b: np.ndarray, case: TestCase) -> str:
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
