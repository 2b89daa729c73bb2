"""Properties of every graph pass: results are kept, the model stays valid, and a second run finds nothing to do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, assume, given, settings
from prefuse.compiler.debugging.oracle import random_inputs, run_model
from prefuse.compiler.ir.constants import constant_array
from prefuse.compiler.ir.facts import SOURCE_KEY
from prefuse.compiler.ir.functions import inline_all, is_fused
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.pipeline import Context, Pass, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE, PASSES
from prefuse.passes.structure.determinism import is_deterministic
from prefuse.runtime.target import Target
from prefuse.tests.models.strategies import onnx_models
from prefuse.tests.models.text import read
from prefuse.tests.scaling import assert_scales

GRAPH_PASSES = (
    "canonicalize",
    "eliminate-dead",
    "merge-equal",
    "decompose",
    "fold-batchnorm",
    "fuse-attention",
    "fuse-norm",
    "fuse-rows",
    "fuse-epilogue",
    "fuse-epilogue{max-ops=3}",
)
ALL = DEFAULT_PIPELINE.partition(",order-nodes")[0]
slow = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


def run(model: ir.Model, pipeline: str) -> tuple[Context, bool]:
    """Run a pipeline, verifying after each pass; whether any pass changed the model."""
    context = Context(Target.parse("cpu"))
    records = run_pipeline(model, parse_pipeline(pipeline, PASSES), context)
    return context, any(record.changed for record in records)


def assert_equal_results(before: ir.Model, after: ir.Model, engine: str = "reference") -> None:
    inputs = random_inputs(before)
    expected = run_model(before, inputs, engine)  # type: ignore[arg-type]
    assume(all(np.isfinite(array).all() and np.abs(array).max(initial=0) < 1e6 for array in expected.values()))
    actual = run_model(after, inputs, engine)  # type: ignore[arg-type]
    assert list(actual) == list(expected)
    for name, array in expected.items():
        assert (actual[name].dtype, actual[name].shape) == (array.dtype, array.shape), name
        np.testing.assert_allclose(actual[name], array, rtol=1e-5, atol=1e-5 * (1 + np.abs(array).max(initial=0)), err_msg=name)


@pytest.mark.parametrize("pipeline", [*GRAPH_PASSES, ALL])
@slow
@given(model=onnx_models())
def test_results_are_kept(pipeline: str, model: ir.Model) -> None:
    original = model.clone()
    run(model, pipeline)
    assert_equal_results(original, model)


@pytest.mark.parametrize("name", GRAPH_PASSES)
@slow
@given(model=onnx_models())
def test_passes_are_idempotent_and_say_whether_they_changed_something(name: str, model: ir.Model) -> None:
    before = print_model(model)
    _, changed = run(model, name)
    text = print_model(model)
    assert changed or text == before
    _, changed = run(model, name)
    assert not changed
    assert print_model(model) == text


@slow
@given(model=onnx_models())
def test_groups_are_legal(model: ir.Model) -> None:
    """One value leaves each group, every member has the anchor's output shape, and inlining gives the model back."""
    run(model, "canonicalize,eliminate-dead")
    text = print_model(model)
    run(model, "fuse-epilogue")
    for call in (node for node in model.graph if is_fused(node)):
        members = [node for node in model.functions[call.op_identifier()] if node.op_type != "Constant"]
        assert len(call.outputs) == 1
        assert len(members) > 1
        assert len({str(node.outputs[0].shape) for node in members}) == 1
    inline_all(model)
    assert sorted(_facts(print_model(model))) == sorted(_facts(text))


def _facts(text: str) -> list[str]:
    """Lines of a printed model that inlining may reorder."""
    return [line for line in text.splitlines() if line]


@pytest.mark.parametrize("opset", [11, 12])
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [-3, 0, 1, 2, None])
def test_softmax_before_opset_13(opset: int, op_type: str, axis: int | None) -> None:
    """It normalised over all dimensions from `axis` on, which onnx.reference does not know; ONNX Runtime does."""
    attribute = "" if axis is None else f"<axis = {axis}>"
    model = read(f"main (float[2,3,4] x) => (float[2,3,4] y) {{ y = {op_type} {attribute} (x) }}", opset)
    original = model.clone()
    run(model, "canonicalize")
    assert_equal_results(original, model, "onnxruntime")
    (node,) = (node for node in model.graph if node.op_type == op_type)
    rank = len(node.outputs[0].shape or ())
    assert node.attributes["axis"].as_int() == rank - 1


@pytest.mark.parametrize("opset", [11, 13, 14, 15, 21])
def test_batch_normalization(opset: int) -> None:
    """Before opset 14 onnx.reference trains; ONNX Runtime infers, as the number of outputs says."""
    model = read(
        """main (float[2,3,4] x) => (float[2,3,4] y)
        <float[3] scale = {1, 2, 3}, float[3] bias = {0, 1, -1}, float[3] mean = {0.5, 0, 1}, float[3] variance = {1, 4, 0.25}>
        { y = BatchNormalization <epsilon = 0.01> (x, scale, bias, mean, variance) }""",
        opset,
    )
    original = model.clone()
    run(model, "canonicalize")
    assert [node.op_type for node in model.graph] == ["Mul", "Add"]
    assert_equal_results(original, model, "onnxruntime")


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("op_type", ["Conv", "MaxPool", "AveragePool"])
@pytest.mark.parametrize("size", [(5, 6), (7, 4)])
def test_padding_means_the_same(mode: str, op_type: str, size: tuple[int, int]) -> None:
    """onnx.reference pads the wrong axes of pools; ONNX Runtime does not."""
    weight, kernel = (", w", "") if op_type == "Conv" else ("", "kernel_shape = [2, 3], ")
    model = read(
        f"main (float[1,1,{size[0]},{size[1]}] x, float[1,1,2,3] w) => (float[n,c,h,v] y) "
        f'{{ y = {op_type} <{kernel}auto_pad = "{mode}", strides = [2, 1]> (x{weight}) }}'
    )
    original = model.clone()
    run(model, "canonicalize")
    assert "auto_pad" not in print_model(model)
    assert_equal_results(original, model, "onnxruntime")


def test_nothing_is_known_of_custom_operators() -> None:
    model = read("main (float[3] x) => (float[3] y) { y = Relu(x) }")
    assert not is_deterministic(ir.node("Draw", [model.graph.inputs[0]], domain="custom"), model)


def test_huge_constants_are_not_made() -> None:
    """A tensor of 4 TiB would not fit, and is never computed."""
    model = read("""main (float[1048576,1] x) => (float[1048576,1] y) {
        shape = Constant <value_ints = [1048576, 1048576]> ()
        ones = ConstantOfShape <value = float[1] {1.0}> (shape)
        half = Constant <value_float = 0.5> ()
        halves = Mul(ones, half)
        y = MatMul(halves, x)
    }""")
    context, _ = run(model, "canonicalize")
    assert any("not folded" in str(remark) for remark in context.remarks)
    assert sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value) < 1024


def test_growth_by_folding_is_bounded() -> None:
    """Many small folds together do not bloat the model either."""
    lines = "\n".join(f"e{index} = Expand(c, shape)\n n{index} = Not(e{index})" for index in range(100))
    reads = ", ".join(f"n{index}" for index in range(100))
    model = read(f"""main (float[1] x) => (bool[100,1000] y) {{
        c = Constant <value = bool {{1}}> ()
        shape = Constant <value_ints = [1, 1000]> ()
        {lines}
        y = Concat <axis = 0> ({reads})
    }}""")
    run(model, "canonicalize{fold-limit-kib=1}")
    constants = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    assert 16_000 <= sum(tensor.nbytes for tensor in constants) <= 50_000


def test_normalized_weights_are_constant_whatever_their_size() -> None:
    """As torch's weight_norm and spectral_norm write them; beyond the limit of other operators."""
    v, g, u = (np.random.default_rng(1).standard_normal(shape).astype(np.float32) for shape in ((8, 8), (8, 1), 8))
    numbers = [",".join(str(number) for number in array.flat) for array in (v, g, u)]
    model = read(f"""main (float[1,8,9] x) => (float[1,8,9] y)
    <float[8,8] v = {{{numbers[0]}}}, float[8,1] g = {{{numbers[1]}}}, float[8] u = {{{numbers[2]}}}, int64[1] axes = {{1}}> {{
        long = ReduceL2(v, axes)
        ratio = Div(g, long)
        normal = Mul(ratio, v)
        turned = MatMul(v, u)
        sigma = ReduceL2 <keepdims = 0> (turned)
        both = Div(normal, sigma)
        y = MatMul(both, x)
    }}""")
    run(model, "canonicalize{fold-limit-kib=0}")
    assert [node.op_type for node in model.graph] == ["MatMul"]
    expected = g * v / np.linalg.norm(v, axis=1, keepdims=True) / np.linalg.norm(v @ u)
    weights = constant_array(model.graph[0].inputs[0])
    assert weights is not None
    np.testing.assert_allclose(weights, expected, 1e-5)


def test_torch_source_survives() -> None:
    model = read("""main (float[1,2,2] x, float[2,2] w) => (float[4] y) {
        a = MatMul(x, w)
        b = MeanVarianceNormalization <axes = [0]> (a)
        c = Relu(b)
        y = Flatten(c)
    }""")
    for number, node in enumerate(model.graph):
        node.metadata_props["pkg.torch.onnx.stack_trace"] = f'File "net.py", line {number}, in forward'
    run(model, ALL)
    sources = {}
    for node in model.graph:
        sources[node.op_type] = node.metadata_props.get(SOURCE_KEY) or node.metadata_props["pkg.torch.onnx.stack_trace"]
    assert "line 3" in sources["Reshape"]
    assert all("net.py" in source for source in sources.values())


def _layers(count: int) -> ir.Model:
    """`count` nodes in layers with shape arithmetic, a matrix product, GELU and a residual add."""
    lines, value = [], "x"
    for k in range(count // 12):
        lines.append(f"""s{k} = Shape({value})
            d{k} = Gather(s{k}, zero)
            t{k} = Concat <axis = 0> (d{k}, rest)
            r{k} = Reshape({value}, t{k})
            h{k} = MatMul(r{k}, w)
            a{k} = Add(h{k}, b)
            e{k} = Erf(a{k})
            f{k} = Add(e{k}, one)
            g{k} = Mul(a{k}, f{k})
            y{k} = Add(g{k}, {value})
            m{k} = Softmax(y{k})
            i{k} = Identity(m{k})""")
        value = f"i{k}"
    body = "\n".join(lines)
    return read(f"""main (float[8,16] x, float[16,16] w, float[16] b) => (float[8,16] y) {{
        one = Constant <value_float = 1.0> ()
        zero = Constant <value_ints = [0]> ()
        rest = Constant <value_ints = [-1]> ()
        {body}
        y = Relu({value})
    }}""")


def test_passes_are_linear() -> None:
    """Twice the nodes take about twice the time."""

    def prepare(count: int) -> Callable[[], object]:
        model = _layers(count)
        passes = [one for one in parse_pipeline(ALL, PASSES) if isinstance(one, Pass)]
        return lambda: run_pipeline(model, passes, Context(Target.parse("cpu")), verify=False)

    assert_scales(prepare, 2400, 4800, 2.8)


@pytest.mark.parametrize(
    "text",
    [
        "y = Softmax <axis = 0> (c)",
        "scale = Constant <value_floats = [1.0, 2.0]> () y = BatchNormalization(c, scale, scale, scale, scale)",
        "y = MaxPool <kernel_shape = [2], pads = [0, 1]> (c)",
    ],
)
def test_folding_does_not_trust_the_reference_blindly(text: str) -> None:
    """It computes these operators wrongly at opset 11; ONNX Runtime does not."""
    value = "c = Constant <value = float[1,2,3] {1, 2, 3, 4, 0, -1}> ()"
    model = read(f"main (float[1,2,3] x) => (float[1,2,3] z) {{ {value} {text} z = Add(y, x) }}", 11)
    original = model.clone()
    run(model, "canonicalize")
    assert_equal_results(original, model, "onnxruntime")
