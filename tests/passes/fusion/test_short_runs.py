"""Costly operators beside kernels of short runs: which runs those are, when they stay apart, and that the numbers are right."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from prefuse.compiler.ir.assignments.kernel_choice import Ask
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE, PASSES
from prefuse.passes.fusion.short_runs import short_run_fault, stored_runs
from prefuse.runtime.target import Target
from prefuse.tests.sample import dealt

CPU = Target.parse("cpu:avx512,threads=1")
TYPES = ("float32", "float64", "float16")
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 10, 12, 16, 17, 31, 40)
ROWS = 400


def _model(inputs: str, body: str, outputs: str) -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["": 21]>\nmain ({inputs}) => ({outputs}) {{ {body} }}'
    model = ir.from_onnx_text(text)
    infer_facts(model)
    return model


def _ask(model: ir.Model, target: Target = CPU) -> Ask:
    return Context(target).kernels_of(model)


def _fault(model: ir.Model, target: Target = CPU) -> str | None:
    """Why what follows the first operator is not to be computed where it stores."""
    anchor, *followers = (one for one in model.graph if one.op_type != "Constant")
    return short_run_fault(anchor, followers, target, _ask(model, target))


def _pair(inputs: str, node: str, follower: str = "Sigmoid") -> ir.Model:
    """An operator and what follows it."""
    return _model(inputs, f"t = {node} y = {follower}(t)", "float y")


def _runs(model: ir.Model, op_type: str = "") -> tuple[int, ...]:
    """Of the operator of a type, or the first one."""
    return stored_runs(next(one for one in model.graph if one.op_type == op_type or not op_type), _ask(model))


@pytest.mark.parametrize(
    ("inputs", "node", "runs"),
    [
        ("float[900,3] x", "Transpose <perm = [1, 0]> (x)", (900,)),
        ("float[3,900] x", "Transpose <perm = [1, 0]> (x)", (3,)),
        ("float[2,3,4,5] x", "Transpose <perm = [1, 0, 2, 3]> (x)", (20,)),
        ("float[2,3,4,5] x", "Transpose <perm = [2, 3, 0, 1]> (x)", (6,)),
        ("float[2,3,1,5] x", "Transpose <perm = [0, 2, 1, 3]> (x)", (30,)),
        ("float[9,100,5] x", "Transpose <perm = [0, 2, 1]> (x)", (5,)),
        ("float[9,100,3] x", "Transpose <perm = [0, 2, 1]> (x)", (100,)),
        ("float[9,3] x, float[9,5] z", "Concat <axis = -1> (x, z)", (3, 5)),
        ("float[9,3,7] x, float[9,5,7] z", "Concat <axis = 1> (x, z)", (21, 35)),
        ("float[90,3] x, int64[900] i", "Gather <axis = 0> (x, i)", (3,)),
        ("float[90,3] x, int64[900] i", "Gather <axis = 1> (x, i)", ()),
        ("float[9,9,3] x, int64[80,2] i", "GatherND (x, i)", (3,)),
        ("float[9,3] x, int64[9,2] i", "GatherElements <axis = 0> (x, i)", (2,)),
        ("float[1,12,5,5] x", "DepthToSpace <blocksize = 2> (x)", (2,)),
        ("float[1,3,8,8] x", "SpaceToDepth <blocksize = 2> (x)", (4,)),
        ("float[9,32] x, float[32,3] w", "MatMul(x, w)", (3,)),
        ("float[9,32] x, float[32] w", "MatMul(x, w)", (1,)),
        ("float[9,3] x", "Softmax(x)", (3,)),
        ("float[9,3] x", "Softmax <axis = 0> (x)", ()),
        ("float[9,2,3] x, float[2,3] s", "LayerNormalization <axis = 1> (x, s)", (6,)),
        ("float[9,0] x, float[9,3] z", "Concat <axis = 1> (x, z)", (3,)),
        ("float[9,3] x", "Relu(x)", ()),
    ],
)
def test_runs_of_anchors(inputs: str, node: str, runs: tuple[int, ...]) -> None:
    assert _runs(_pair(inputs, node)) == runs


def test_runs_of_boxes() -> None:
    starts = "s = Constant <value_ints = [0, 0, 1]> () e = Constant <value_ints = [9, 4, 4]> ()"
    for inputs, node, runs in (
        ("float[9,4,6] x", "Slice(x, s, e)", (3,)),
        ("float[9,8,3] x", "Slice(x, s, e)", (2,)),
        ("float[3,2,3] x", "Pad(x, p)", (6,)),
        ("float[3,2,2] x", "Pad(x, q)", (2,)),
    ):
        pads = "p = Constant <value_ints = [0,1,0,0,1,0]> () q = Constant <value_ints = [0,1,1,0,1,0]> ()"
        model = _model(inputs, f"{starts} {pads} t = {node} y = Exp(t)", "float y")
        assert _runs(model, node[: node.index("(")]) == runs, node


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_runs_of_transposes_are_neighbours(order: tuple[int, int, int]) -> None:
    """Where any stay together: the first place whose step in the operand differs ends them."""
    for shape in ((7, 2, 3), (3, 1, 5), (1, 1, 2)):
        if np.transpose(np.empty(shape), order).strides[-1] != 8 and prod(shape) != max(shape):
            continue
        numbers = ", ".join(map(str, order))
        model = _pair(f"float{[*shape]} x", f"Transpose <perm = [{numbers}]> (x)")
        flat = np.transpose(np.arange(prod(shape)).reshape(shape), order).reshape(-1)
        run = next((i for i in range(1, flat.size) if flat[i] != flat[0] + i), flat.size)
        assert _runs(model) == (run,), shape


@pytest.mark.parametrize(
    ("operand", "apart"),
    [
        ("float[3]", True),
        ("float[20,400,1]", True),
        ("float[20,1,1]", False),
        ("float[400,3]", False),
        ("float[1]", False),
        ("float[20,400,3]", False),
    ],
)
def test_operands_that_followers_read_cut_runs(operand: str, apart: bool) -> None:
    """Wherever they come in: a costly operator before them is cut as one after them."""
    inputs = f"float[10,400,3] x, float[10,400,3] z, {operand} b"
    for chain in ("m = Mul(t, b) y = Exp(m)", "m = Exp(t) y = Sub(m, b)"):
        model = _model(inputs, f"t = Concat <axis = 0> (x, z) {chain}", "float y")
        concat, *followers = model.graph
        assert (_fault(model) is not None) == apart
        assert short_run_fault(concat, followers[:1], CPU, _ask(model)) is None


def test_shorter_runs_waste_more() -> None:
    told = [_fault(_pair(f"float[{n},9000] x", "Transpose(x)")) for n in (2, 3, 5, 10, 16, 20, 64)]
    assert [fault is not None for fault in told] == [True, True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("inputs", "follower", "target"),
    [
        ("float[3,4] x", "Sigmoid", CPU),
        ("float[3,9000] x", "Relu", CPU),
        ("float[N,9000] x", "Sigmoid", CPU),
        ("float[3,9000] x", "Sigmoid", Target.parse("cuda:sm_90")),
    ],
)
def test_together_where_apart_would_not_pay(inputs: str, follower: str, target: Target) -> None:
    assert _fault(_pair(inputs, "Transpose(x)", follower), target) is None


def test_a_result_of_no_elements_has_no_runs() -> None:
    """A batch of no rows: the operand that cuts runs has no neighbours at all."""
    model = _model("float[0,16,3] x, float[3,3] w", "t = MatMul(x, w) e = Tanh(t) y = Add(e, x)", "float y")
    assert _runs(model) == (3,)
    assert _fault(model) is None


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def _gathered(x: np.ndarray) -> np.ndarray:
    return x[np.arange(ROWS) % 7]


# By name: an operator on x, with the shape of x for a short extent, and what it gives.
ANCHORS: dict[str, tuple[str, Callable[[int], tuple[int, ...]], Callable[[np.ndarray], np.ndarray]]] = {
    "turned": ("Transpose <perm = [1, 0]> ({0})", lambda n: (n, ROWS), np.transpose),
    "squares": ("Transpose <perm = [0, 2, 1]> ({0})", lambda n: (4, 100, n), lambda x: np.transpose(x, (0, 2, 1))),
    "slice": ("Slice({0}, two, end, last)", lambda n: (ROWS, n + 3), lambda x: x[:, 2:-1]),
    "concat": ("Concat <axis = -1> ({0}, {0})", lambda n: (ROWS, n), lambda x: np.concatenate([x, x], -1)),
    "gather": ("Gather({0}, rows)", lambda n: (7, n), _gathered),
    "product": ("MatMul({0}, ones)", lambda n: (ROWS, n, 8), lambda x: np.repeat(x.sum(-1, keepdims=True), 3, -1)),
    "softmax": ("Softmax({0})", lambda n: (ROWS, n), lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True)),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ANCHORS)
def test_numbers(name: str, dtype: str) -> None:
    """y = v * sigmoid(v), v of an anchor over rows of any short extent and of tanh(x) before it.

    Each extent in one type a day, in the next one tomorrow.
    """
    node, shape_of, compute = ANCHORS[name]
    generator = np.random.default_rng(len(name))
    extents = dealt(EXTENTS, [name] * len(EXTENTS), dtype, TYPES)
    arrays = {f"x{n}": generator.standard_normal(shape_of(n)).astype(dtype) for n in extents}
    word = {"float32": "float", "float64": "double", "float16": "float16"}[dtype]
    lines = [
        "two = Constant <value_ints = [2]> () end = Constant <value_ints = [-1]> () last = Constant <value_ints = [1]> ()",
        f"rows = Constant <value_ints = [{', '.join(str(i % 7) for i in range(ROWS))}]> ()",
        f"w = Constant <value = float[8,3] {{{', '.join(['1'] * 24)}}}> () ones = CastLike(w, x{extents[0]})",
    ]
    lines += [f"t{x} = Tanh({x}) v{x} = {node.format('t' + x)} s{x} = Sigmoid(v{x}) y{x} = Mul(v{x}, s{x})" for x in arrays]
    inputs = ", ".join(f"{word}{[*array.shape]} {x}" for x, array in arrays.items())
    model = _model(inputs, "\n".join(lines), ", ".join(f"{word} y{x}" for x in arrays))
    net: Any = prefuse.compile(model, threads=1, cache=False)
    tolerance = 2e-2 if dtype == "float16" else 2e-5
    for array, output in zip(arrays.values(), net(*arrays.values()), strict=True):
        value = compute(np.tanh(array.astype(np.float64)))
        np.testing.assert_allclose(np.asarray(output), value * _sigmoid(value), tolerance, tolerance, err_msg=str(array.shape))


def test_a_detection_head_is_two_trips() -> None:
    """What turns boxes into rows, and one flat pass that goes on over whole vectors, in the same memory."""
    text = "t = Transpose <perm = [0, 1, 3, 2]> (x) s = Sigmoid(t) d = Mul(s, two) y = Sub(d, half)"
    constants = "two = Constant <value_float = 2.0> () half = Constant <value_float = 0.5> ()"
    model = _model("float[1,3,6,6400] x", f"{constants} {text}", "float y")
    graph_passes = parse_pipeline(DEFAULT_PIPELINE.removesuffix(",plan-memory"), PASSES)
    run_pipeline(model, graph_passes, Context(CPU))
    assert [node.op_type for node in model.graph] == ["Transpose", "sigmoid_mul_sub"]
