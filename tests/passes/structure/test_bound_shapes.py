"""What bound-shapes carries on at the largest size, and what it leaves: each operator is executed before and after."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from prefuse.compiler.debugging.oracle import run_model
from prefuse.compiler.ir.bounds import is_data_sized, trim_of
from prefuse.compiler.ir.facts import has_static_type, infer_facts
from prefuse.compiler.ir.verifier import verify_model
from prefuse.compiler.pipeline import Context
from prefuse.passes.structure.bound_shapes import BoundShapes
from prefuse.runtime.errors import InvalidModelError
from prefuse.runtime.target import Target

INPUTS = {
    "x": np.array([[1, -2, 0], [0, 3, 0.5], [2, 2, -1], [0, 0, 0], [4, 0, 1]], np.float32),
    "c": np.array([1, 0, 1, 0, 1], bool),
    "d": np.array([0, 0, 1, 1, 1], bool),
}
CONSTANTS = {
    "zero": [0],
    "one": [1],
    "two": [2],
    "rows": [2, 0],
    "every": [-1],
    "deep": [1, -1, 3, 1],
    "bias": [0.5, -1.0, 2.0],
    "scalar": 3.0,
    "table": np.arange(12.0).reshape(4, 3),
    "ones": np.ones((5, 3)),
    "row": np.ones(64),
    "long_row": np.ones(65),
    "long_table": np.ones((3, 65)),
}

# Of v: float[k,3], the rows of x that c chooses, and n: int64[2,j], where x is not zero.
CARRIED = {
    "elementwise": "y = Exp(v)",
    "cast": "y = Cast<to = 7>(v)",
    "broadcast": "a = Add(v, bias) b = Mul(scalar, a) y = Max(b, v, bias)",
    "broadcast to more dimensions": "u = Unsqueeze(v, two) y = Add(u, bias)",
    "with itself": "y = Mul(v, v)",
    "float division": "y = Div(bias, v)",
    "where": "a = Greater(v, scalar) y = Where(a, v, scalar)",
    "transpose": "y = Transpose(v)",
    "transpose by order": "u = Unsqueeze(v, one) y = Transpose<perm = [2, 0, 1]>(u)",
    "unsqueeze": "y = Unsqueeze(v, zero)",
    "squeeze": "u = Unsqueeze(v, rows) y = Squeeze(u, rows)",
    "reshape": "y = Reshape(v, deep)",
    "reshape to one dimension": "a = Gather<axis = 1>(v, one) y = Reshape(a, every)",
    "gather around the axis": "y = Gather<axis = 1>(v, rows)",
    "gather before the axis": "a = Transpose(v) b = Unsqueeze(rows, zero) y = Gather(a, b)",
    "gather by indices": "i = ArgMax<axis = 1, keepdims = 0>(v) y = Gather(table, i)",
    "gather along another axis by indices": "i = ArgMin<axis = -1>(v) y = Gather<axis = 1>(table, i)",
    "masked selection": "i = Transpose(n) y = GatherND(x, i)",
    "slice": "y = Slice(v, one, two, one)",
    "concat": "a = Exp(v) y = Concat<axis = -1>(v, a)",
    "split": "y, z = Split<axis = 1, num_outputs = 2>(v)",
    "reduction": "y = ReduceMax(v, one)",
    "reduction without the dimension": "u = Unsqueeze(v, zero) y = ReduceSum<keepdims = 0>(u, zero)",
    "softmax": "y = Softmax(v)",
    "identity": "y = Identity(v)",
    "growth by a little": "u = Unsqueeze(v, two) y = Mul(u, row)",
    "two readers": "a = Exp(v) b = Neg(a) y = Add(a, b) z = Abs(v)",
}
LEFT = {
    "integer division": "i = Cast<to = 7>(v) y = Div(i, i)",
    "broadcast along the axis": "y = Add(v, ones)",
    "reduction along the axis": "y = ReduceSum(v, zero)",
    "reduction of everything": "y = ReduceSum(v)",
    "softmax along the axis": "y = Softmax<axis = 0>(v)",
    "search along the axis": "y = ArgMax<axis = 0>(v)",
    "slice along the axis": "y = Slice(v, one, two, zero)",
    "slice without axes": "y = Slice(v, one, two)",
    "gather along the axis": "y = Gather(v, zero)",
    "gather by itself": "i = Cast<to = 7>(v) y = Gather(v, i)",
    "concat along the axis": "y = Concat<axis = 0>(v, v)",
    "concat with others": "y = Concat<axis = 1>(v, x)",
    "split along the axis": "y, z = Split<axis = 0, num_outputs = 2>(v)",
    "reshape across the axis": "y = Reshape(v, every)",
    "squeeze of what may be one": "y = Squeeze(v)",
    "product": "y = MatMul(x, v)",
    "two unknown sizes": "w = Compress<axis = 0>(x, d) y = Add(v, w)",
    "size": "y = Shape(v)",
    "growth by much": "u = Unsqueeze(v, two) y = Mul(u, long_row)",
    "gathers of much": "i = ArgMax<axis = 1, keepdims = 0>(v) y = Gather(long_table, i)",
    "gathers of much by several indices": "i = ArgMax<axis = 1>(v) y = GatherND(long_table, i)",
    "not the last reader": "a = Exp(v) y = ReduceSum(a) z = Abs(v)",
}


def model_of(nodes: str) -> ir.Model:
    constants = ", ".join(_constant(name, np.asarray(value)) for name, value in CONSTANTS.items())
    outputs = "float[m] y, float[m] z" if "z = " in nodes else "float[m] y"
    operators = f"v = Compress<axis = 0>(x, c) {'n = NonZero(x)' if '(n)' in nodes else ''} {nodes}"
    inputs = "float[5,3] x, bool[5] c, bool[5] d"
    model = ir.from_onnx_text(
        f'<ir_version: 10, opset_import: ["": 21]> main ({inputs}) => ({outputs}) <{constants}> {{ {operators} }}'
    )
    for value in model.graph.outputs:
        value.shape = value.type = None
    infer_facts(model)
    return model


def _constant(name: str, array: np.ndarray) -> str:
    kind = "float" if array.dtype.kind == "f" else "int64"
    shape = f"[{','.join(map(str, array.shape))}]" if array.ndim else ""
    return f"{kind}{shape} {name} = {{{', '.join(map(str, array.reshape(-1).tolist()))}}}"


def bound(model: ir.Model) -> tuple[bool, list[str]]:
    """Whether the pass changed the model, and its remarks."""
    context = Context(Target.parse("cpu"))
    changed = BoundShapes().run(model, context)
    verify_model(model)
    return changed, [str(remark) for remark in context.remarks]


@pytest.mark.parametrize("name", CARRIED)
def test_carried(name: str) -> None:
    model = model_of(CARRIED[name])
    original = model.clone()
    changed, remarks = bound(model)
    assert (changed, remarks) == (True, [])
    trims = [node for node in model.graph if trim_of(model, node) is not None]
    assert {value for node in trims for value in node.outputs} == set(model.graph.outputs)
    assert not any(is_data_sized(node) for node in model.graph)
    assert all(has_static_type(value) for node in model.graph if node not in trims for value in node.outputs)
    for chosen in (INPUTS["c"], np.zeros(5, bool), np.ones(5, bool)):
        given = {**INPUTS, "c": chosen}
        with np.errstate(all="ignore"):
            expected, results = run_model(original, given, "reference"), run_model(model, given, "reference")
        for output, array in expected.items():
            np.testing.assert_array_equal(results[output], array)


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    model = model_of(LEFT[name])
    changed, remarks = bound(model)
    assert not changed
    assert remarks
    assert all("not bounded: " in remark and "whose result may have any size" in remark for remark in remarks)
    assert any(is_data_sized(node) for node in model.graph)


@pytest.mark.parametrize(
    ("signature", "node", "fault"),
    [
        ("float[3,4] x, bool[3,1] c", "Compress<axis = 0>(x, c)", r"its condition has the shape \[3, 1\], not one dimension"),
        ("float[5,4] b, float[1,2,5] s", "NonMaxSuppression(b, s)", r"boxes \[5, 4\] and scores \[1, 2, 5\] are not"),
        ("float[1,5,4] b, float[2,5] s", "NonMaxSuppression(b, s)", r"boxes \[1, 5, 4\] and scores \[2, 5\] are not"),
        ("float[1,5,4] b, float[2,1,5] s", "NonMaxSuppression(b, s)", "are not"),
        ("float[1,5,4] b, float[1,1,6] s", "NonMaxSuppression(b, s)", "are not"),
        ("float[1,5,3] b, float[1,1,5] s", "NonMaxSuppression(b, s)", "are not"),
        ("float[1,5,4] b, float[1,1,5] s, int64[2] k", "NonMaxSuppression(b, s, k)", "its limits are not single numbers"),
        ("float[1,5,4] b, float[1,1,5] s", "NonMaxSuppression<center_point_box = 2>(b, s)", "center_point_box is 2, not 0 or 1"),
    ],
)
def test_inputs_that_do_not_fit_are_a_fault_of_the_model(signature: str, node: str, fault: str) -> None:
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]> main ({signature}) => (float[n] y) {{ y = {node} }}')
    for value in model.graph.outputs:
        value.shape = value.type = None
    infer_facts(model)
    with pytest.raises(InvalidModelError, match=fault):
        BoundShapes().run(model, Context(Target.parse("cpu")))
