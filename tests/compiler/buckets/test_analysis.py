"""What keeps parts of its operands apart, what does not and is refused by name, and where a dimension lies in results."""

from __future__ import annotations

import re

import pytest
from onnx import parser
from prefuse.compiler.frontend.dimensions import bind_domain
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.programs.options import parse_options
from prefuse.compiler.programs.padded import find_padding
from prefuse.runtime.program_set.padding import Cut, Padding
from prefuse.runtime.symbolic.sizes import Dim, Domain

_DIMS = (Dim("N", 2, 9), Dim("T", 3, 17))


def found(body: str, names: str) -> Padding | str:
    """What is found out about a graph of x [N, T, 8] and weights, of which these dimensions are padded."""
    head = '<ir_version: 10, opset_import: ["": 20]> g (float[N,T,8] x, float[8,4] w, float[64,8] table) => (y) '
    constants = "c0 = Constant<value_ints=[0]>() c1 = Constant<value_ints=[1]>() m1 = Constant<value_ints=[-1]>() "
    model = import_model(parser.parse_model(head + "{ " + constants + body + " }"))
    domain = Domain(_DIMS, {"N": 3, "T": 5})
    return find_padding(bind_domain(model, domain, {}), tuple(names), parse_options("cpu", "float32", {}))


def text(cuts: frozenset[Cut]) -> str:
    """N0 lies in axis 0; N1*T in axis 1, with T elements for each part."""
    return " ".join(sorted(f"{one.name}{one.axis}" + (f"*{one.inner}" if one.inner != "1" else "") for one in cuts))


@pytest.mark.parametrize(
    ("body", "names", "expected"),
    [
        ("y = Relu(x)", "NT", "N0 T1"),
        ("y = MatMul(x, w)", "NT", "N0 T1"),
        ("t = Transpose<perm=[2,0,1]>(x) y = Softmax<axis=0>(t)", "NT", "N1 T2"),
        ("s = ReduceSum(x, c1) y = Exp(s)", "N", "N0"),
        ("s = ReduceSum<keepdims=0>(x, c0) y = Exp(s)", "T", "T0"),
        ("k = Constant<value_ints=[-1, 8]>() y = Reshape(x, k)", "N", "N0*T"),
        ("k = Constant<value_ints=[-1, 8]>() y = Reshape(x, k)", "T", "T0"),
        ("k = Constant<value_ints=[0, -1]>() y = Reshape(x, k)", "T", "T1*8"),
        ("k = Constant<value_ints=[0, 0, 2, 4]>() y = Reshape(x, k)", "NT", "N0 T1"),
        ("t = Transpose<perm=[0,2,1]>(x) y = MatMul(x, t)", "NT", "N0 T1 T2"),
        ("t = Transpose<perm=[0,2,1]>(x) s = MatMul(x, t) p = Softmax(s) y = MatMul(p, x)", "N", "N0 T1"[:2]),
        ("y = Gather<axis=1>(x, c1)", "NT", "N0"),
        ("s = Shape(x) n = Gather(s, c1) z = Squeeze(n) o = Constant<value_int=1>() k = Constant<value_int=0>()"
         " r = Range(k, z, o) p = Gather(table, r) y = Add(x, p)", "NT", "N0 T1"),
        ("y = CumSum(x, c1)", "NT", "N0 T1"),
        ("y = Concat<axis=2>(x, x)", "NT", "N0 T1"),
        ("k = Constant<value_floats=[1., 1., 2.]>() y = Resize(x, , k)", "NT", "N0 T1"),
        ("y = LayerNormalization(x, s, s) ", "NT", "N0 T1"),
        ("k = Constant<value_ints=[2]>() y, i = TopK(x, k)", "NT", "N0 T1"),
        ("s = Shape(x) z = ConstantOfShape(s) y = Sub(x, z)", "NT", "N0 T1"),
    ],
)  # fmt: skip
def test_what_is_carried(body: str, names: str, expected: str) -> None:
    body = body.replace("x, s, s", "x, s").replace(
        "y = Layer", "s = Constant<value_floats=[1.,1.,1.,1.,1.,1.,1.,1.]>() y = Layer"
    )
    padding = found(body, names)
    assert isinstance(padding, Padding), padding
    assert text(padding.outputs[0]) == expected
    assert padding.inputs[0] == {0: "N", 1: "T"}


@pytest.mark.parametrize(
    ("body", "names", "reason"),
    [
        ("t = Transpose<perm=[0,2,1]>(x) y = MatMul(t, x)", "T", "MatMul adds along T"),
        ("y = Softmax<axis=1>(x)", "T", "Softmax mixes along T"),
        ("y = ReduceMax(x, c1)", "NT", "ReduceMax reduces along T"),
        ("y = CumSum<reverse=1>(x, c1)", "T", "CumSum adds from the end along T"),
        ("y = Gather<axis=1>(x, m1)", "T", "Gather reads places that may be behind the end of T"),
        ("k = Constant<value_ints=[4]>() y = Gather<axis=1>(x, k)", "T", "Gather reads places that may be behind"),
        ("s = Shape(x) n = Gather(s, c1) f = Cast<to=1>(n) y = Div(x, f)", "T", "Cast computes with T"),
        ("y = Concat<axis=1>(x, x)", "T", "Concat joins along T"),
        ("k = Constant<value_ints=[-1, 8]>() y = Reshape(x, k)", "NT", "elements along axis 0"),
        ("k = Constant<value_ints=[-1]>() t = Transpose<perm=[0,2,1]>(x) r = Reshape(t, k) y = Relu(r)", "NT", "along axis 0"),
        ("a = Slice(x, c1, m1, c1) b = Relu(a) y = Abs(b)", "T", "Slice cuts along T"),
        ("y = Einsum<equation=\"ntc->n\">(x)", "T", "no rule|unknown|MatMul|Reduce"),
        ("k = Constant<value_floats=[1., 2., 1.]>() y = Resize(x, , k)", "T", "Resize resizes along T"),
        ("k = Constant<value_floats=[1., 1., 2.]>() r = Constant<value_floats=[0., 0., 0., 1., 1., 1.]>()"
         " y = Resize<coordinate_transformation_mode=\"tf_crop_and_resize\">(x, r, k)", "N", "Resize crops"),
        ("r = RandomNormalLike(x) y = Add(x, r)", "N", "RandomNormalLike has no rule"),
        ("i = Cast<to=7>(x) y = Div(i, i)", "N", "Div of integers"),
        ("y = NonZero(x)", "N", "NonZero has no rule"),
        ("u = Unsqueeze(x, c0) y = ReduceSum(u)", "N", "ReduceSum reduces along N"),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(body: str, names: str, reason: str) -> None:
    refusal = found(body, names)
    assert isinstance(refusal, str), refusal
    assert re.search(reason, refusal), refusal
