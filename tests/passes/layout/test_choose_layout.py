"""The choice of layouts: the cut against all choices, the choice on whole graphs, and programs that follow it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefuse.compiler.debugging.oracle import Engine, random_inputs, relative_error, run_model
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.kernels.cost.convolution import Convolution, channels_first_cycles, channels_last_cycles, direct_cycles
from prefuse.kernels.cost.memory import conversion_cycles
from prefuse.passes.layout.choose_layout.cut import OUTSIDE, Crossing, LayoutProblem, choose_layouts, cost_of
from prefuse.passes.layout.choose_layout.forms import Flexible
from prefuse.passes.layout.choose_layout.nodes import flexible_form
from prefuse.passes.precision.assign_formats import AssignFormats
from prefuse.passes.precision.place_casts import PlaceCasts
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.hardware.machine import row
from prefuse.runtime.precision import PRECISIONS, Precision
from prefuse.runtime.target import Target
from prefuse.tests.scaling import assert_scales

ZEN5 = row("zen5", 16)  # that what stands here was measured on
ZEN3 = row("zen3", 8)

NETWORK = """
<ir_version: 10, opset_import: ["": 21]>
main (float[1,3,20,20] x, float[32,3,3,3] v, float[32,32,3,3] w, float[32] k, float[32,1,3,3] z)
  => (float[1,32] y, float[1,32,5,5] r)
{
  shape = Constant<value_ints=[32, 1, 1]>()
  scale = Reshape(k, shape)
  a = Conv<pads=[1,1,1,1], strides=[2,2]>(x, v)
  b = Relu(a)
  p = MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(b)
  c = Conv<pads=[1,1,1,1]>(p, w)
  d = Mul(c, scale)
  e = Sigmoid(d)
  f = Conv<pads=[1,1,1,1]>(e, w)
  g = Add(f, p)
  h = Relu(g)
  q = Conv<pads=[1,1,1,1], group=32>(h, z)
  r = Conv<pads=[1,1,1,1]>(q, w)
  m = GlobalAveragePool(r)
  y = Flatten(m)
}
"""

# Everything that may lie channels-last, once; constants for the product are filled in.
FORMS = """
<ir_version: 10, opset_import: ["": 21]>
main (float[2,32,6,6] x, float[2,36,32] t, float[32,32,3,3] w, float[32,32,2,2] u, float[64,64,3,3] v)
  => (float[2,3] y, float[2,144,64] tokens, float[2,12,12,64] last, float[2,13,12,64] padded)
<float[2304,3] m = {WEIGHTS}, int64[8] pads = {0, 0, 1, 0, 0, 0, 0, 0}, float[4] scales = {1, 1, 2, 2}>
{
  swapped = Transpose<perm=[0,2,1]>(t)
  image = Constant<value_ints=[2,32,6,6]>()
  i = Reshape(swapped, image)
  a = Conv<pads=[1,1,1,1]>(x, w)
  b = Add(a, i)
  c = Conv<pads=[1,1,1,1]>(b, w)
  d = Relu(c)
  up = ConvTranspose<strides=[2,2]>(d, u)
  starts = Constant<value_ints=[1,1]>()
  ends = Constant<value_ints=[6,7]>()
  axes = Constant<value_ints=[2,3]>()
  large = Resize<mode="linear">(c, "", scales)
  joined = Concat<axis=1>(large, up)
  e = Conv<pads=[1,1,1,1]>(joined, v)
  f, g = Split<axis=1, num_outputs=2>(e)
  h = Concat<axis=1>(g, f)
  k = Conv<pads=[1,1,1,1]>(h, v)
  pooled = AveragePool<kernel_shape=[2,2], strides=[2,2]>(k)
  cut = Slice(pooled, starts, ends, axes)
  whole = Conv<pads=[1,1,1,0]>(cut, v)
  flat = Flatten(pooled)
  y = MatMul(flat, m)
  shape = Constant<value_ints=[2,64,144]>()
  merged = Reshape(k, shape)
  tokens = Transpose<perm=[0,2,1]>(merged)
  last = Transpose<perm=[0,2,3,1]>(k)
  small = GlobalAveragePool(whole)
  scaled = Mul(k, small)
  longer = Pad(scaled, pads)
  padded = Transpose<perm=[0,2,3,1]>(longer)
}
""".replace("WEIGHTS", ", ".join(str(number % 17 / 16) for number in range(3 * 2304)))

# The same with three spatial dimensions, beside an image of two.
VOLUMES = """
<ir_version: 10, opset_import: ["": 21]>
main (float[2,16,3,5,4] x, float[32,3,5,4] i, float[32,16,3,3,3] v, float[32,32,3,1,2] w, float[32,1,3,3,3] d,
  float[16,24,2,3,3] l) => (float[2,3] y, float[2,60,16] tokens, float[2,3,5,5,32] last, float[2,6,5,4,40] large)
<float[1920,3] m = {WEIGHTS}, int64[10] pads = {0, 0, 0, 0, 0, 0, 0, 0, 0, 1}, float[5] scales = {1, 1, 2, 1, 1},
 float[32,1,1,1] s = {SCALES}, float[4] z = {1, 2, 3, 4}, int64[3] merge = {2, 16, 60}>
{
  a = Conv<pads=[1,1,1,1,1,1]>(x, v)
  b = Mul(a, s)
  c = Add(b, z)
  e = Add(c, i)
  f = MaxPool<kernel_shape=[3,3,1], pads=[1,1,0,1,1,0]>(c)
  g = Conv<pads=[1,1,1,1,1,1], group=32>(f, d)
  h, k = Split<axis=1, num_outputs=2>(g)
  n = Conv<pads=[1,1,1,1,1,1]>(h, v)
  j = Concat<axis=1>(k, h)
  o = Conv<pads=[1,0,0,1,0,1]>(j, w)
  r = GlobalAveragePool(n)
  t = Mul(o, r)
  q = Add(t, e)
  flat = Flatten(q)
  y = MatMul(flat, m)
  merged = Reshape(k, merge)
  tokens = Transpose<perm=[0,2,1]>(merged)
  p = Pad(n, pads)
  last = Transpose<perm=[0,2,3,4,1]>(p)
  u = Resize<mode="nearest">(h, "", scales)
  up = ConvTranspose<strides=[2,1,1], pads=[0,1,1,0,1,1]>(h, l)
  joined = Concat<axis=1>(up, u)
  large = Transpose<perm=[0,2,3,4,1]>(joined)
}
"""
VOLUMES = VOLUMES.replace("WEIGHTS", ", ".join(str(number % 17 / 16) for number in range(3 * 1920)))
VOLUMES = VOLUMES.replace("SCALES", ", ".join(str(number / 16) for number in range(32)))

# With one: transposes that begin signals, that end them, and that stand in groups with pointwise nodes.
SIGNALS = """
<ir_version: 10, opset_import: ["": 21]>
main (float[2,24,40] x, float[2,40,32] t, float[32,24,3] v, float[32,32,3] w, float[32,32,4] u, float[32,1,7] d, float[32] s,
  float[32] b, float[20,1] e) => (float[2,40,32] rows, float[2,20,32] y, float[2,3] z, float[2,80,64] wide)
<float[640,3] m = {WEIGHTS}, int64[6] pads = {0, 0, 2, 0, 0, 0}>
{
  a = Conv<pads=[1,1]>(x, v)
  r = Transpose<perm=[0,2,1]>(a)
  n = LayerNormalization(r, s, b)
  f = Transpose<perm=[0,2,1]>(n)
  g = Gelu(f)
  k = Transpose<perm=[0,2,1]>(t)
  h = Add(g, k)
  c = Conv<pads=[4,0], dilations=[2]>(h, w)
  q = Conv<pads=[3,3], group=32>(c, d)
  o = Transpose<perm=[0,2,1]>(q)
  rows = Neg(o)
  p = MaxPool<kernel_shape=[2], strides=[2]>(q)
  l = Transpose<perm=[0,2,1]>(p)
  y = Mul(l, e)
  flat = Flatten(p)
  z = MatMul(flat, m)
  up = ConvTranspose<strides=[2], pads=[1,1]>(q, u)
  longer = Pad(up, pads)
  cut = Conv(longer, w)
  both = Concat<axis=1>(cut, up)
  wide = Transpose<perm=[0,2,1]>(both)
}
""".replace("WEIGHTS", ", ".join(str(number % 17 / 16) for number in range(3 * 640)))


@st.composite
def problems(draw: st.DrawFn) -> LayoutProblem:
    count = draw(st.integers(1, 6))
    costs = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    someone = st.integers(OUTSIDE, count - 1)

    @st.composite
    def crossings(draw: st.DrawFn) -> Crossing:
        producer = draw(someone)
        others = [node for node in range(OUTSIDE, count) if node != producer or node == OUTSIDE]
        readers = draw(st.lists(st.sampled_from(others), unique=True, max_size=3))
        rest = [node for node in others if node not in (*readers, OUTSIDE)]
        direct = draw(st.lists(st.sampled_from(rest), unique=True, max_size=2)) if rest else []
        costs = tuple((reader, draw(st.integers(0, 9))) for reader in direct)
        return Crossing(producer, tuple(readers), draw(st.integers(0, 9)), costs)

    return LayoutProblem(draw(costs), draw(costs), draw(st.lists(crossings(), max_size=6)))


@given(problems())
def test_the_cut_is_a_cheapest_choice(problem: LayoutProblem) -> None:
    cheapest = min(cost_of(problem, choice) for choice in product((False, True), repeat=len(problem.first)))
    assert cost_of(problem, choose_layouts(problem)) == cheapest


def test_ties_are_channels_first() -> None:
    assert choose_layouts(LayoutProblem([3, 5], [3, 4], [])) == (False, True)


def lowered(text: str, target: str = "cpu:avx512", pipeline: str = "fuse-epilogue,choose-layout") -> tuple[ir.Model, Context]:
    model = ir.from_onnx_text(text)
    infer_facts(model)
    context = Context(Target.parse(target))
    run_pipeline(model, parse_pipeline(pipeline, PASSES), context)
    return model, context


def form_of(model: ir.Model, node: ir.Node, target: Target, precision: Precision = "float32") -> object:
    return flexible_form(model, node, target, Context(target, precision=precision).kernels_of(model))


@pytest.mark.parametrize(
    ("target", "refused"), [("rocm:gfx1030", True), ("cuda:sm_75", True), ("rocm:gfx942", False), ("cuda:sm_90", False)]
)
def test_gpus_without_a_matrix_unit_have_no_kernel(target: str, refused: bool) -> None:
    _, context = lowered(NETWORK, target)
    reason = f"no kernel computes Conv channels-last on {target.partition(':')[0]}"
    assert any(reason in str(remark) for remark in context.remarks) == refused


def test_a_convolution_beside_other_operators_is_refused() -> None:
    """A group that some other pass has made."""
    from prefuse.compiler.ir.functions import fuse_into_function

    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["": 21]>
        main (float[1,64,7,7] x, float[64,64,3,3] w) => (float[1,64,5,5] y) {
          c = Conv(x, w)
          y = Softmax(c)
        }""")
    infer_facts(model)
    fuse_into_function(model, list(model.graph), "conv_softmax")
    context = Context(Target.parse("cpu"))
    run_pipeline(model, parse_pipeline("choose-layout", PASSES), context)
    assert any("the group of Conv has other operators that are not pointwise" in str(remark) for remark in context.remarks)


@pytest.mark.parametrize(("text", "threads"), [(NETWORK, 1), (NETWORK, 2), (FORMS, 2), (VOLUMES, 2), (SIGNALS, 2)])
def test_programs_compute_the_same(text: str, threads: int) -> None:
    model = ir.from_onnx_text(text)
    inputs = random_inputs(model)
    engine: Engine = "reference" if text in (NETWORK, FORMS) else "onnxruntime"  # which pads pools of volumes
    expected = run_model(model, inputs, engine)
    pipeline = "canonicalize,eliminate-dead,fuse-epilogue,choose-layout,order-nodes,plan-memory"
    compiled = prefuse.compile(ir.to_proto(model), pipeline=pipeline, cache=False, target=f"cpu:avx2,threads={threads}")
    assert isinstance(compiled, CompiledModel)
    assert "channels_last" in str(compiled.report())
    results = compiled(*inputs.values())
    assert isinstance(results, tuple)
    for got, array in zip(results, expected.values(), strict=True):
        assert relative_error(np.asarray(got), array) < 1e-5


def test_volumes_of_many_planes_are_converted() -> None:
    """A window of three planes reads three times as many of them as one of an image does."""
    volume = Convolution(1, 1, 64, 32, 1024, 32, 1024, 32, (9, 3), (1, 1), True, depths=3, gaps=64)
    assert direct_cycles(volume, ZEN5) > conversion_cycles(volume.input_bytes)
    flat = replace(volume, depths=1)
    assert direct_cycles(flat, ZEN5) < conversion_cycles(flat.input_bytes)
    assert channels_first_cycles(volume, ZEN5) > channels_first_cycles(replace(volume, gaps=0), ZEN5)


def test_lines_that_leave_the_first_cache_are_converted() -> None:
    """Of 320 channels each tile reads a line of its own, beside a panel of weights; of 64 they stay there."""
    many = Convolution(1, 1, 320, 1280, 14, 14, 14, 14, (1, 1), (1, 1), False)
    assert direct_cycles(many, ZEN3) > conversion_cycles(many.input_bytes)
    assert direct_cycles(replace(many, inputs=64), ZEN3) == 0


def test_images_beyond_the_second_cache_are_converted() -> None:
    """Each panel of weights would read them from there again, a piece of a line at a time; unless they are read for few."""
    signal = Convolution(1, 1, 512, 512, 1, 3199, 1, 1599, (1, 3), (1, 2), False)
    assert direct_cycles(signal, ZEN5) > conversion_cycles(signal.input_bytes)
    short = replace(signal, width=2200, columns=1099)
    assert direct_cycles(short, ZEN5) < 0.5 * direct_cycles(signal, ZEN5)
    few = replace(signal, outputs=32)
    assert direct_cycles(few, ZEN5) < conversion_cycles(few.input_bytes)


def test_every_form_is_channels_last() -> None:
    """Nothing is converted: what leaves the graph is asked for channels-last, or as tokens."""
    model, _ = lowered(FORMS, pipeline="fuse-epilogue,choose-layout")
    counts = Counter(re.sub(r"_\d+$", "", node.op_type) for node in model.graph)
    assert counts["convtranspose_concat_channels_last"] == 1
    assert not {"Flatten", "Conv", "ConvTranspose", "AveragePool", "Transpose"} & set(counts)


def test_every_signal_is_channels_last() -> None:
    model, _ = lowered(SIGNALS, pipeline="fuse-epilogue,choose-layout")
    assert not {"Flatten", "Conv", "ConvTranspose", "MaxPool"} & {node.op_type for node in model.graph}
    assert all(list(value.shape or ()) != [2, 32, 40] for node in model.graph for value in node.outputs)


def test_time_is_linear_in_the_nodes() -> None:
    def prepare(blocks: int) -> Callable[[], object]:
        """Convolutions with residual connections, and every fourth time an operator that has one layout only."""
        value, lines = "x", []
        for i in range(blocks):
            lines += [f"a{i} = Conv<pads=[1,1,1,1]>({value}, w)", f"b{i} = Relu(a{i})", f"c{i} = Conv<pads=[1,1,1,1]>(b{i}, w)"]
            lines += [f"d{i} = Add(c{i}, {value})", f"e{i} = {'Softmax<axis=1>' if i % 4 == 3 else 'Neg'}(d{i})"]
            value = f"e{i}"
        body = "\n".join(lines)
        model = ir.from_onnx_text(f"""
            <ir_version: 10, opset_import: ["": 21]>
            main (float[1,64,7,7] x, float[64,64,3,3] w) => (float[1,64,7,7] {value}) {{ {body} }}""")
        infer_facts(model)
        return lambda: run_pipeline(model, parse_pipeline("choose-layout", PASSES), Context(Target.parse("cpu:avx512")))

    prepare(2)()
    assert_scales(prepare, 80, 160, 2.8)


def test_constants_are_turned() -> None:
    scale = ", ".join(str(number) for number in range(64))
    text = f"""
        <ir_version: 10, opset_import: ["": 21]>
        main (float[1,64,7,7] x, float[64,64,3,3] w) => (float[1,64,7,7] y) {{
          k = Constant<value = float[64,1,1] {{{scale}}}>()
          z = Conv<pads=[1,1,1,1]>(x, w)
          a = Conv<pads=[1,1,1,1]>(z, w)
          c = Neg(a)
          d = Add(a, k)
          e = Abs(a)
          f = Mul(d, c)
          b = Sub(f, e)
          y = Conv<pads=[1,1,1,1]>(b, w)
        }}"""
    model, _ = lowered(text, pipeline="choose-layout")
    (add,) = (node for node in model.graph if node.op_type == "Add")
    assert [tuple(value.shape or ()) for value in add.inputs if value is not None] == [(1, 7, 7, 64), (64,)]


@pytest.mark.parametrize(("images", "is_in_place"), [(1, True), (2, False)])
def test_channels_of_one_image_are_joined_in_place(images: int, is_in_place: bool) -> None:
    text = f"main (float[{images},8,4,4] x) => (float[{images},16,4,4] y) {{ a = Relu(x) y = Concat<axis = 1>(a, x) }}"
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]> {text}')
    infer_facts(model)
    form = form_of(model, model.graph[1], Target.parse("cpu:avx2"))
    assert isinstance(form, Flexible)
    assert (form.first_cycles < form.last_cycles) == is_in_place


def test_winograd_counts_where_the_precision_allows_it() -> None:
    """Its tiles are fewer products, and are read channels-last only."""
    weights, scales = (", ".join(["0.0"] * (64 * 64 * taps)) for taps in (9, 1))
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["": 21]>
        main (float[1,64,28,28] x) => (float[1,64,28,28] y) <float[64,64,3,3] w = {{{weights}}},
          float[64,64,1,1] p = {{{scales}}}> {{
          c = Conv<pads = [1,1,1,1]>(x, w)
          y = Conv(c, p)
        }}""")
    infer_facts(model)
    forms = {
        precision: [form_of(model, node, Target.parse("cpu:avx512"), precision) for node in model.graph]
        for precision in PRECISIONS
    }
    (windows, points), (fast, same) = forms["float32"], forms["float32-fast"]
    assert isinstance(windows, Flexible)
    assert isinstance(fast, Flexible)
    assert fast.last_cycles < 0.6 * windows.last_cycles
    assert windows.direct
    assert not fast.direct
    assert points == same
    for precision in ("bfloat16", "float16"):  # this target multiplies neither faster, but they allow larger tiles
        wide, same = forms[precision]
        assert isinstance(wide, Flexible)
        assert wide.last_cycles < fast.last_cycles
        assert not wide.direct
        assert points == same


def test_tiles_count_where_the_target_has_them() -> None:
    weights = ", ".join(["0.0"] * (64 * 128))
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["": 21]>
        main (float[1,128,28,28] x) => (float[1,64,28,28] y) <float[64,128,1,1] w = {{{weights}}}> {{ y = Conv(x, w) }}""")
    infer_facts(model)
    (node,) = model.graph
    cycles = {}
    for level in ("avx512", "amx"):
        for precision in PRECISIONS:
            form = form_of(model, node, Target("cpu", level), precision)
            assert isinstance(form, Flexible)
            cycles[level, precision] = form.last_cycles
    assert cycles["amx", "bfloat16"] < 0.6 * cycles["avx512", "bfloat16"]
    assert cycles["amx", "bfloat16"] < cycles["amx", "float32-fast"] < cycles["amx", "float32"]
    assert cycles["amx", "float32"] <= cycles["avx512", "float32"]


@pytest.mark.parametrize(
    ("kinds", "call"),
    [
        ("float[1,128,3136] x, float[64,128,3] w", "Conv<pads = [1, 1]>(x, w)"),
        ("float[1,128,8,20,20] x, float[64,128,3,3,3] w", "Conv<pads = [1, 1, 1, 1, 1, 1]>(x, w)"),
        ("float[1,128,28,28] x, float[128,32,3,3] w", "Conv<group = 4, pads = [1, 1, 1, 1]>(x, w)"),
        ("float[1,128,28,28] x, float[128,64,2,2] w", "ConvTranspose<strides = [2, 2]>(x, w)"),
    ],
)
def test_tiles_count_for_windows_of_all_kinds(kinds: str, call: str) -> None:
    """Weights are variables of the text, made constants here: their numbers do not matter."""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]> main ({kinds}) => (y) {{ y = {call} }}')
    weights = model.graph.inputs.pop()
    assert weights.shape is not None
    weights.const_value = ir.tensor(np.zeros(weights.shape.numpy(), np.float32))
    model.graph.register_initializer(weights)
    infer_facts(model)
    (node,) = model.graph
    forms = [form_of(model, node, Target("cpu", level), "bfloat16") for level in ("avx512", "amx")]
    vectors, tiles = (form.last_cycles for form in forms if isinstance(form, Flexible))
    assert tiles < 0.6 * vectors


def test_odd_channels_of_narrow_images_count_by_pairs() -> None:
    """As those of one channel more, where the image is copied for its padding, too; on slower targets as in float32."""
    cycles = {}
    for level, channels in (("avx512bf16", 37), ("avx512bf16", 38), ("avx512", 37)):
        model = ir.from_onnx_text(f"""
            <ir_version: 10, opset_import: ["": 21]>
            main (float[1,{channels},28,28] x, float[75,{channels},3,3] w) => (y) {{
                y = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(x, w) }}""")
        weights = model.graph.inputs.pop()
        weights.const_value = ir.tensor(np.zeros((75, channels, 3, 3), np.float32))
        model.graph.register_initializer(weights)
        infer_facts(model)
        target = Target("cpu", level)
        passes = [AssignFormats("bfloat16", weights_only=False), PlaceCasts(), *parse_pipeline("fuse-epilogue", PASSES)]
        run_pipeline(model, passes, Context(target, precision="bfloat16"))
        form = form_of(model, list(model.graph)[-1], target, "bfloat16")
        assert isinstance(form, Flexible)
        cycles[level, channels] = form.last_cycles
    even, odd, wide = cycles["avx512bf16", 38], cycles["avx512bf16", 37], cycles["avx512", 37]
    assert odd == pytest.approx(even, rel=0.01)  # whose bytes are one channel's more
    assert odd < 0.7 * wide


def test_nothing_of_an_image_that_lies_channels_last() -> None:
    """A Reshape to extents of which one is 0 copied another one there."""
    ends = "int64[1] end = {99}, int64[1] low = {-2}, int64[1] behind = {11}, int64[1] two = {2}, int64[1] three = {3}"
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["": 21]>
        main (float[1,64,9,9] x, float[64,64,3,3] w) => (float[1,64,2,0] y) <{ends}> {{
            c = Conv<pads = [1, 1, 1, 1]>(x, w) s = Slice(c, low, end, two) y = Slice(s, behind, end, three) }}""")
    inputs = random_inputs(model, 0)
    assert np.asarray(prefuse.compile(model, cache=False)(*inputs.values())).shape == (1, 64, 2, 0)


def test_phases_share_no_vector() -> None:
    """Nine phases of one channel fill a lane each channels-last, where a vector has sixteen."""
    one = Convolution.of_phases((1, 1, 56, 1), (64, 64), (192, 192), (9, 9), (3, 3), has_pads=True, element_bytes=4)
    assert channels_last_cycles(one, ZEN5) > 4 * channels_first_cycles(one, ZEN5)
