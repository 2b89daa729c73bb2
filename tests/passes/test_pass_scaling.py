"""Each pass of the default pipeline takes time linear in a model of many patterns, in which most passes have work."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx_ir as ir
import pytest
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.pipeline import Context, Pass, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE, PASSES
from prefuse.passes.precision.assign_formats import AssignFormats
from prefuse.passes.precision.place_casts import PlaceCasts
from prefuse.runtime.target import Target
from prefuse.tests.scaling import assert_scales

_IDLE = {  # these only look through the model
    "assign-formats", "bound-shapes", "fuse-concat", "fuse-gather", "fuse-prologue", "fuse-reorders", "keep-weights",
    "merge-parallel-matmul", "order-concats", "place-casts", "quantize-weights", "reassociate-product", "share-tables",
    "sink-scales", "split-weights",
}  # fmt: skip
_BLOCKS = 8
_LIMIT = 3.0  # the most that twice the blocks may cost: the passes are short, so that other work on the machine shows
_TARGET = Target.parse("cpu:avx512")
_PASSES = [one for one in parse_pipeline(DEFAULT_PIPELINE, PASSES) if isinstance(one, Pass)]
_NAMES = list(dict.fromkeys(one.name for one in _PASSES))
_WEIGHTS = {
    "w": (64, 64),
    "u": (64, 64),
    "v": (64, 64),
    "b": (64,),
    "j": (128, 64),
    "g": (64, 4),
    "r": (4, 4),
    "k": (64, 64, 3, 3),
}
_WEIGHTS |= {"s": (64,), "table": (16, 64)}
_CONSTANTS = """float eps = {0.001}, float two = {2}, float half = {0.5}, float root = {1.41421356}, float one = {1},
    int64[1] last = {-1}, int64 trips = {2}, bool yes = {1}, int64[5] rows = {1, 0, 3, 2, 5},
    int64[2] tall = {10, 32}, int64[2] wide = {5, 64}"""
_BLOCK = """
    mean# = ReduceMean(x#, last) d# = Sub(x#, mean#) q# = Pow(d#, two) var# = ReduceMean(q#, last) ve# = Add(var#, eps)
    sd# = Sqrt(ve#) n# = Div(d#, sd#) nw# = Mul(n#, b) nb# = Add(nw#, b)
    p# = MatMul(nb#, w) k# = MatMul(nb#, u) c# = MatMul(nb#, v)
    t# = Transpose<perm = [1, 0]>(k#) sc# = MatMul(p#, t#) sd2# = Mul(sc#, half) so# = Softmax(sd2#) at# = MatMul(so#, c#)
    re# = Add(at#, x#) dv# = Div(re#, root) er# = Erf(dv#) e1# = Add(er#, one) m1# = Mul(re#, e1#) ge# = Mul(m1#, half)
    ca# = Concat<axis = 1>(ge#, x#) jo# = MatMul(ca#, j)
    i1# = MatMul(x#, g) h1# = MatMul(z#, r) su# = Add(i1#, h1#) z% = Tanh(su#)
    co# = Conv<pads = [1, 1, 1, 1]>(y#, k) bn# = BatchNormalization(co#, s, s, s, s) rl# = Relu(bn#) y% = Add(rl#, y#)
    ga# = Gather(table, rows) gm# = Gemm<transB = 1>(ga#, w) mv# = MeanVarianceNormalization<axes = [1]>(gm#)
    lo# = Loop(trips, yes, jo#) <body = body# (int64 it#, bool go#, float[5,64] in#) => (bool no#, float[5,64] ou#)
        { no# = Identity(go#) ou# = Relu(in#) }>
    un# = ReduceL2<keepdims = 1>(mv#, last) gd# = Add(lo#, un#) ne# = Neg(gd#) unused# = Exp(ne#)
    so2# = Softmax(gd#) sm# = Mul(so2#, x#) sr# = ReduceSum<keepdims = 1>(sm#, last)
    pr# = MatMul(jo#, v) tu# = Transpose<perm = [1, 0]>(pr#) ab# = Abs(tu#) tb# = Transpose<perm = [1, 0]>(ab#)
    tl# = Reshape(tb#, tall) th# = Relu(tl#) vw# = Reshape(th#, wide)
    ta# = Tanh(jo#) pt# = Add(vw#, ta#) ps# = Add(pt#, sr#)
    again# = Neg(gd#) both# = Add(ne#, again#) bp# = Add(both#, ps#) x% = Tanh(bp#)
"""


@cache
def _before_each_pass(blocks: int) -> list[ir.Model]:
    """The model of so many blocks as each pass finds it, and as the last one leaves it."""
    text = "".join(_BLOCK.replace("#", f"_{block}").replace("%", f"_{block + 1}") for block in range(blocks))
    inputs = ", ".join(f"float{list(shape)} {name}" for name, shape in _WEIGHTS.items())
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["": 21]>
        main (float[5,64] x_0, float[5,4] z_0, float[1,64,14,14] y_0, {inputs})
            => (float[5,64] x_{blocks}, float[5,4] z_{blocks}, float[1,64,14,14] y_{blocks}) <{_CONSTANTS}> {{ {text} }}""")
    for value in [value for value in model.graph.inputs if value.name in _WEIGHTS]:
        value.const_value = ir.tensor(np.random.default_rng(0).uniform(0.1, 1, _WEIGHTS[str(value.name)]).astype(np.float32) / 8)
        model.graph.inputs.remove(value)
        model.graph.register_initializer(value)
    infer_facts(model)
    models = [model]
    for one in _PASSES:
        models.append(models[-1].clone())
        run_pipeline(models[-1], [one], Context(_TARGET), verify=False)
    return models


@pytest.mark.parametrize("name", _NAMES)
def test_twice_the_blocks_take_twice_the_time(name: str) -> None:
    place = [one.name for one in _PASSES].index(name)

    def prepare(blocks: int) -> Callable[[], object]:
        model = _before_each_pass(blocks)[place].clone()
        return lambda: run_pipeline(model, [_PASSES[place]], Context(_TARGET), verify=False)

    assert_scales(prepare, _BLOCKS, 2 * _BLOCKS, _LIMIT)


def test_passes_have_work() -> None:
    models = _before_each_pass(_BLOCKS)
    texts = [print_model(model) for model in models]
    idle = {one.name for one in _PASSES} - {one.name for one, a, b in zip(_PASSES, texts, texts[1:], strict=False) if a != b}
    assert idle == _IDLE


def test_paths_that_part_and_meet_again_are_walked_once() -> None:
    """Rolls of an image before a convolution, each by two slices and a Concat: there are 2^n ways through n of them."""

    def prepare(rolls: int) -> Callable[[], object]:
        text = "".join(
            f"a_{i} = Slice(x_{i}, one, end, axes) b_{i} = Slice(x_{i}, zero, one, axes) "
            f"x_{i + 1} = Concat<axis = 2>(a_{i}, b_{i}) "
            for i in range(rolls)
        )
        model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["": 21]>
            main (float[1,64,56,56] x, float[64,64,3,3] k) => (float[1,64,56,56] y)
            <int64[1] zero = {{0}}, int64[1] one = {{1}}, int64[1] end = {{56}}, int64[1] axes = {{2}}>
            {{ x_0 = Relu(x) {text} y = Conv<pads = [1, 1, 1, 1]>(x_{rolls}, k) }}""")
        weights = model.graph.inputs.pop()
        weights.const_value = ir.tensor(np.ones((64, 64, 3, 3), np.float32))
        model.graph.register_initializer(weights)
        infer_facts(model)

        def lower() -> None:
            context = Context(Target.parse("cpu:avx512bf16"), precision="bfloat16")
            run_pipeline(model, [AssignFormats(), PlaceCasts()], context, verify=False)
            assert "Cast" in {node.op_type for node in model.graph}

        return lower

    assert_scales(prepare, 15, 30, 6.0)


def test_a_long_chain_of_moves_is_no_recursion() -> None:
    """Python's own limit is 1000 calls."""
    text = "".join(f"x_{i + 1} = Transpose<perm = [1, 0]>(x_{i}) " for i in range(1500))
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["": 21]>
        main (float[64,64] x, float[64,64] w) => (float[64,64] y) {{ x_0 = Relu(x) {text} y = MatMul(x_1500, w) }}""")
    infer_facts(model)
    context = Context(Target.parse("cpu:avx512bf16"), precision="bfloat16")
    run_pipeline(model, [AssignFormats(), PlaceCasts()], context, verify=False)
    assert "Cast" in {node.op_type for node in model.graph}
