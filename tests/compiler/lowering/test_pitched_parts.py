"""Concats along an inner axis: products are stored side by side into the result, where all of them can be."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from onnx.reference import ReferenceEvaluator
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.lowering.pitched_parts import inner_concats
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Launch, Region
from prefuse.runtime.target import Target

COLUMNS = (128, 37, 256)


def model(body: str, shape: str = "2,37,96", outputs: str = "float[2,37,421] y") -> ir.Model:
    rng = np.random.default_rng(0)
    arrays = {f"w{number}": rng.standard_normal((96, columns), np.float32) for number, columns in enumerate(COLUMNS)}
    text = f'<ir_version: 10, opset_import: ["": 20]> main (float[{shape}] x) => ({outputs}) {{ {body} }}'
    made = ir.from_onnx_text(text, initializers=[ir.tensor(array, name=name) for name, array in arrays.items()])
    infer_facts(made)
    return made


PRODUCTS = "a = MatMul(x, w0) m = MatMul(x, w1) b = Relu(m) c = MatMul(x, w2) "


def written(net: object) -> list[Region]:
    assert isinstance(net, CompiledModel)
    return [region for step in net.plan.steps if isinstance(step, Launch) for region in step.writes]


@pytest.mark.parametrize("target", ["cpu:avx2", "cpu:avx512", "cpu:avx512bf16", "cpu"])
def test_products_are_stored_side_by_side(target: str) -> None:
    if missing := Target.parse(target).missing_features():
        pytest.skip(f"this CPU lacks {', '.join(missing)}")
    made = model(PRODUCTS + "y = Concat<axis = -1>(a, b, c)")
    net = prefuse.compile(made, target=target, threads=2, cache=False)
    places = sorted((region.offset, region.rows, region.pitch) for region in written(net) if region.rows > 1)
    assert places == [(0, 74, 4 * 421), (4 * 128, 74, 4 * 421), (4 * 165, 74, 4 * 421)]
    x = np.random.default_rng(1).standard_normal((2, 37, 96), np.float32)
    w = [np.asarray(made.graph.initializers[f"w{number}"].const_value, np.float64) for number in range(3)]
    expected = np.concatenate([x @ w[0], np.maximum(x @ w[1], 0), x @ w[2]], axis=-1)
    np.testing.assert_allclose(np.asarray(net(x)), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        ("y = Concat<axis = -1>(a, b, c) z = Neg(a)", "float[2,37,421] y, float[2,37,128] z"),
        ("y = Concat<axis = -1>(a, b, c)", "float[2,37,421] y, float[2,37,128] a"),
        ("y = Concat<axis = -1>(a, b, c, a)", "float[2,37,549] y"),
        ("s = Softmax(c) y = Concat<axis = -1>(a, b, s)", "float[2,37,421] y"),
        ("t = Slice(x, zero, four, two) y = Concat<axis = -1>(a, t, b)", "float[2,37,169] y"),
    ],
    ids=["read twice", "a result", "comes twice", "of another kernel", "no result of a kernel"],
)
def test_all_of_them_or_none(body: str, outputs: str) -> None:
    constants = "zero = Constant<value_ints = [0]>() four = Constant<value_ints = [4]>() two = Constant<value_ints = [2]>() "
    text = constants + PRODUCTS + body
    made = model(text, outputs=outputs)
    proto = ir.to_proto(made)
    net = prefuse.compile(made, target="cpu:avx2", threads=1, pipeline="none", cache=False)
    assert all(region.rows == 1 for region in written(net))
    x = np.random.default_rng(1).standard_normal((2, 37, 96), np.float32)
    results = net(x)
    found = results if isinstance(results, tuple | list) else (results,)
    for one, expected in zip(found, ReferenceEvaluator(proto).run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(np.asarray(one), expected, rtol=0, atol=1e-4)


def test_parts_within_a_part_of_the_outermost_axis() -> None:
    """Rows side by side, and such blocks one behind the other: one buffer of the caller's has it all."""
    body = PRODUCTS + "h = Concat<axis = -1>(a, b, c) y = Concat<axis = 0>(h, h2) "
    second = "g = Tanh(x) d = MatMul(g, w2) n = MatMul(g, w1) e = Tanh(n) f = MatMul(g, w0) h2 = Concat<axis = 2>(f, e, d) "
    made = model(second + body, "1,37,96", "float[2,37,421] y")
    net = prefuse.compile(made, target="cpu:avx2", threads=2, cache=False)
    assert {region.buffer for region in written(net)} == {"output0:y", "g"}
    assert sorted(region.offset for region in written(net) if region.rows == 37) == [0, 512, 660, 62308, 62820, 62968]
    x = np.random.default_rng(1).standard_normal((1, 37, 96), np.float32)
    w = [np.asarray(made.graph.initializers[f"w{number}"].const_value, np.float64) for number in range(3)]
    first = np.concatenate([x @ w[0], np.maximum(x @ w[1], 0), x @ w[2]], axis=-1)
    g = np.tanh(x.astype(np.float64))
    last = np.concatenate([g @ w[0], np.tanh(g @ w[1]), g @ w[2]], axis=-1)
    np.testing.assert_allclose(np.asarray(net(x)), np.concatenate([first, last]), rtol=0, atol=1e-4)


def test_what_a_call_decides_is_copied() -> None:
    assert not list(inner_concats(model(PRODUCTS + "y = Concat<axis = -1>(a, b, c)", "n,37,96", "float[n,37,421] y").graph))
    assert not list(inner_concats(model(PRODUCTS + "y = Concat<axis = -1>(a, b, c)", "1,1,96", "float[1,1,421] y").graph))
    (one,) = inner_concats(model(PRODUCTS + "y = Concat<axis = 2>(a, b, c)").graph)
    assert one.shape == (2, 37, 421)
    assert [node.op_type for node in one.makers] == ["MatMul", "Relu", "MatMul"]
