"""A group's values are the bits of its operators one by one: no product is rounded together with a sum of the next operator."""

from __future__ import annotations

import numpy as np
import onnx.parser
import prefuse
import pytest
from onnx import numpy_helper
from prefuse.runtime.executor import CompiledModel

_ROWS, _DEPTH, _COLUMNS = 5, 33, 70


def _net(body: str, *arrays: tuple[str, np.ndarray]) -> object:
    shape = f"float[{_ROWS},{_COLUMNS}]"
    head = '<ir_version: 10, opset_import: ["": 21]> '
    model = onnx.parser.parse_model(f"{head} g (float[{_ROWS},{_DEPTH}] x, {shape} y, {shape} z) => ({shape} r) {{ {body} }}")
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays)
    return prefuse.compile(model, cache=False, threads=2)


@pytest.mark.parametrize(
    "body", ["m = Mul(y, z) r = Add(m, y)", "m = Mul(y, z) n = Neg(m) r = Add(n, y)", "m = Mul(y, z) r = Sub(m, z)"]
)
def test_products_of_two_inputs(body: str) -> None:
    rng = np.random.default_rng(1)
    x = np.zeros((_ROWS, _DEPTH), np.float32)
    y, z = (rng.standard_normal((_ROWS, _COLUMNS)).astype(np.float32) for _ in range(2))
    expected = {"Neg": -(y * z) + y, "Sub": y * z - z}.get("Neg" if "Neg" in body else "Sub" if "Sub" in body else "", y * z + y)
    np.testing.assert_array_equal(np.asarray(_net(body)(x, y, z)), expected)  # type: ignore[operator]


@pytest.mark.parametrize("product", ["p = MatMul(x, w)", "p = Gemm<alpha = 0.3>(x, w)"])
@pytest.mark.parametrize(
    "more", ["r = Add(p, z)", "q = Mul(p, y) r = Add(q, z)", "q = Mul(p, y) t = Sigmoid(q) v = Mul(q, t) r = Add(v, z)"]
)
def test_epilogues_of_products(product: str, more: str) -> None:
    """The same whether the kernel of the product has its followers, or each operator a kernel of its own."""
    rng = np.random.default_rng(2)
    x, w, y, z = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((_ROWS, _DEPTH), (_DEPTH, _COLUMNS), (_ROWS, _COLUMNS), (_ROWS, _COLUMNS))
    )
    p = np.asarray(_net(product.replace("p =", "r ="), ("w", w))(x, y, z))  # type: ignore[operator]
    q = p * y
    if "Sigmoid" in more:
        t = np.asarray(_net("r = Sigmoid(y)")(x, q, z))  # type: ignore[operator]
        q = q * t
    expected = (p if "Mul" not in more else q) + z
    np.testing.assert_array_equal(np.asarray(_net(f"{product} {more}", ("w", w))(x, y, z)), expected)  # type: ignore[operator]


@pytest.mark.parametrize(
    "statements",
    [
        ["r = ReduceL2<keepdims = 1>(y, last)", "q = Div(y, r)"],
        ["r = ReduceSumSquare<keepdims = 1>(y, last)", "q = Div(y, r)"],
        ["t = Mul(y, s)", "r = LayerNormalization(t, s, b)", "q = Softmax(r)"],
        ["r = LayerNormalization(y, s)", "t = Add(r, y)", "q = Softmax(t)"],
        ["r = RMSNormalization(y, s)", "t = Add(r, y)", "q = Softmax(t)"],
        ["r = Softmax(y)", "t = Add(r, y)", "q = LayerNormalization(t, s, b)"],
    ],
)
def test_rows_that_are_reduced(statements: list[str]) -> None:
    """An operator over rows has the bits of its own kernel where its group computes more of each row, and so have the others."""
    rng = np.random.default_rng(4)
    y = rng.standard_normal((_ROWS, _COLUMNS)).astype(np.float32)
    s, b = (rng.standard_normal(_COLUMNS).astype(np.float32) for _ in range(2))
    constants = [numpy_helper.from_array(array, name) for name, array in (("s", s), ("b", b), ("last", np.array([-1])))]

    def run(some: list[str], values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [statement.split(" = ")[0] for statement in some]
        inputs = {name: values[name] for name in values if any(name in statement.split("(")[1] for statement in some)}
        given = ", ".join(f"float[{','.join(map(str, value.shape))}] {name}" for name, value in inputs.items())
        results = ", ".join(f"float[{_ROWS},N] {name}" for name in names)
        model = onnx.parser.parse_model(
            f'<ir_version: 10, opset_import: ["": 23]> g ({given}) => ({results}) {{ {" ".join(some)} }}'
        )
        model.graph.initializer.extend(constants)
        net = prefuse.compile(model, cache=False, threads=2)
        assert isinstance(net, CompiledModel)
        found = net(*inputs.values())
        return dict(zip(names, map(np.asarray, found if isinstance(found, tuple) else (found,)), strict=True))

    fused, values = run(statements, {"y": y}), {"y": y}
    for statement in statements:
        values |= run([statement], values)
    for name, value in fused.items():
        np.testing.assert_array_equal(value, values[name], err_msg=name)
