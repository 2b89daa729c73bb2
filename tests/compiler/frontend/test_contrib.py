"""ONNX Runtime's operators that are neither attention nor on integers, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
import torch
from onnx import parser
from onnxruntime.capi import onnxruntime_pybind11_state as onnxruntime_state
from prefuse.compiler.frontend.contrib.table import OPERATORS, REFUSED
from prefuse.compiler.frontend.importer import import_model
from prefuse.runtime.errors import InvalidModelError, UnsupportedModelError

from .contrib_oracle import Case, by_onnxruntime, check

RANDOM = np.random.default_rng(5)


def floats(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def ids(limit: int, *shape: int) -> np.ndarray:
    return RANDOM.integers(0, limit, shape).astype(np.int32)


def conv(activation: str, *parameters: float) -> Case:
    attributes = {"group": 2, "strides": [2, 2], "activation": activation}
    if parameters:
        attributes["activation_params"] = list(parameters)
    return Case("FusedConv", [floats(1, 4, 6, 6), floats(4, 2, 3, 3), floats(4)], attributes)


def attention_with_state(rule: str, *more: np.ndarray, **attributes: object) -> Case:
    """LinearAttention of 2 heads with 8 numbers of keys and 4 of values."""
    inputs = [floats(2, 3, 16), floats(2, 3, 16), floats(2, 3, 8), *more]
    heads = {"q_num_heads": 2, "kv_num_heads": 2}
    return Case("LinearAttention", inputs, {**heads, "update_rule": rule, **attributes}, (1, 1))


def three_positions(heads: int = 2, *, sizes: tuple[int, ...] = (2, 3, 32), **attributes: object) -> Case:
    tables = [floats(9, 8), floats(9, 8)]
    settings = {"mrope_section": [4, 2, 2], "num_heads": heads, **attributes}
    return Case("MRotaryEmbedding", [floats(*sizes), ids(9, 3, 2, 3).astype(np.int64), *tables], settings)


def experts(name: str, **attributes: object) -> Case:
    width = 24 if name == "swiglu" else 12
    inputs = [floats(2, 3, 8), floats(6, 4), floats(4, width, 8), floats(4, width), floats(4, 8, 12), floats(4, 8)]
    return Case("MoE", inputs, {"k": 2, "activation_type": name, **attributes})


SKIP = [floats(2, 3, 8), floats(2, 3, 8)]
MASK = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)
CASES = {
    "gelu": Case("Gelu", [floats(3, 5)]),
    "bias-gelu": Case("BiasGelu", [floats(3, 5), floats(5)]),
    "bias-gelu-16": Case("BiasGelu", [floats(3, 5).astype(np.float16), floats(5).astype(np.float16)], tolerance=2e-3),
    "fast-gelu": Case("FastGelu", [floats(3, 5), floats(5)]),
    "fast-gelu-alone": Case("FastGelu", [floats(3, 5)]),
    "quick-gelu": Case("QuickGelu", [floats(3, 5)], {"alpha": 1.3}),
    "quick-gelu-default": Case("QuickGelu", [floats(3, 5)]),
    "scaled-silu": Case("ScaledSiLU", [floats(3, 5)], {"alpha": 0.7}),
    "gated-add": Case("GatedAdd", [floats(3, 5), floats(3, 5), floats(3, 1)]),
    "skip-norm": Case("SkipLayerNormalization", [*SKIP, floats(8), floats(8), floats(8)], {"epsilon": 1e-5}, (1, 0, 0, 1)),
    "skip-norm-plain": Case("SkipLayerNormalization", [SKIP[0], floats(3, 8), floats(8)]),
    "skip-rms-norm": Case("SkipSimplifiedLayerNormalization", [*SKIP, floats(8), floats(8)], {"epsilon": 1e-5}, (1, 0, 0, 1)),
    "rms-norm": Case("SimplifiedLayerNormalization", [floats(2, 8), floats(8)], {"axis": -1}, domain=""),
    "rms-norm-inverse": Case("SimplifiedLayerNormalization", [floats(2, 8), floats(8)], {"axis": -1}, (1, 1), domain=""),
    "layer-norm-of-opset-12": Case("LayerNormalization", [floats(2, 8), floats(8), floats(8)], domain="", opset=12),
    "embedding": Case(
        "EmbedLayerNormalization",
        [ids(9, 2, 4), ids(2, 2, 4), floats(9, 8), floats(6, 8), floats(2, 8), floats(8), floats(8), MASK],
        {"epsilon": 1e-6},
        (1, 1, 1),
    ),
    "embedding-places": Case(
        "EmbedLayerNormalization",
        [ids(9, 2, 4), None, floats(9, 8), floats(6, 8), None, floats(8), floats(8), None, ids(4, 1, 4)],
        outputs=(1, 1),
    ),
    "gated-rms-norm": Case("GatedRMSNorm", [floats(2, 3, 8), floats(4), floats(2, 3, 8)]),
    "gated-rms-norm-sigmoid": Case("GatedRMSNorm", [floats(2, 8), floats(8), floats(2, 8)], {"activation": "sigmoid"}),
    "branches": Case("BranchwiseRMSNorm", [floats(2, 8), floats(8)], {"num_branches": 2}),
    "branches-apart": Case("BranchwiseRMSNorm", [floats(2, 2, 4), floats(4)]),
    "matmul": Case("FusedMatMul", [floats(3, 2, 4), floats(3, 5, 2)], {"transA": 1, "transB": 1, "alpha": 0.5}),
    "matmul-batches": Case(
        "FusedMatMul", [floats(2, 3, 4, 5), floats(2, 3, 4, 6)], {"transBatchA": 1, "transBatchB": 1, "transA": 1}
    ),
    "matmul-vector": Case("FusedMatMul", [floats(4), floats(4, 2)], {"transA": 1}),
    "old-matmul": Case("TransposeMatMul", [floats(4, 3), floats(4, 2)], {"transA": 1}),
    "gemm": Case(
        "FusedGemm", [floats(3, 4), floats(5, 4), floats(5)], {"transB": 1, "activation": "LeakyRelu", "activation_alpha": 0.2}
    ),
    "gemm-scaled": Case("FusedGemm", [floats(3, 4), floats(4, 5), floats(5)], {"activation": "Tanh", "alpha": 0.5, "beta": 2.0}),
    "conv-sum": Case(
        "FusedConv",
        [floats(1, 3, 7, 7), floats(4, 3, 3, 3), floats(4), floats(1, 4, 7, 7)],
        {"pads": [1, 1, 1, 1], "activation": "Relu"},
    ),
    "conv-clip": conv("Clip", -0.5, 0.5),
    "conv-leaky-relu": conv("LeakyRelu", 0.2),
    "conv-hard-sigmoid": conv("HardSigmoid", 0.2, 0.4),
    "conv-tanh": conv("Tanh"),
    "pool-last": Case("NhwcMaxPool", [ids(255, 1, 6, 6, 4).astype(np.uint8)], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    "transposed": Case(
        "ConvTransposeWithDynamicPads",
        [floats(1, 4, 5, 5), floats(4, 3, 3, 3), np.array([1, 1, 1, 1])],
        {"strides": [2, 2]},
        constants=(2,),
    ),
    "product-16": Case("MatMulInteger16", [ids(300, 3, 4).astype(np.int16), -ids(300, 4, 5).astype(np.int16)]),
    "expand-dims": Case("ExpandDims", [floats(3, 5), np.array(1, np.int32)], constants=(1,)),
    "gather": Case("GatherND", [floats(3, 5), ids(3, 4, 1)]),
    "triangle": Case("Trilu", [floats(4, 5), np.array(1)], {"upper": 0}, constants=(1,)),
    "unique": Case("Unique", [np.array([2, 1, 1, 3, 4, 3], np.float32)], outputs=(1, 1, 1)),
    "pad": Case("Pad", [floats(3, 5), np.array([[1, 0, 2, 1]]), np.array([3], np.float32)], constants=(1,)),
    "range": Case("Range", [np.array(1, np.float32), np.array(7, np.float32)], constants=(0, 1)),
    "range-by-two": Case("Range", [np.array(1), np.array(9), np.array(2)], constants=(0, 1, 2)),
    "grid": Case("GridSample", [floats(1, 2, 5, 6), floats(1, 3, 4, 2)], {"padding_mode": "border"}),
    "grid-cubic": Case("GridSample", [floats(1, 2, 5, 6), floats(1, 3, 4, 2) * 0.5], {"mode": "bicubic", "align_corners": 1}),
    "distance": Case("CDist", [floats(3, 5), floats(4, 5)]),
    "euclidean": Case("CDist", [floats(3, 5), floats(4, 5)], {"metric": "euclidean"}),
    "unfold": Case("UnfoldTensor", [floats(3, 7, 2)], {"dim": 1, "size": 3, "step": 2}),
    "state": attention_with_state("linear", scale=0.3),
    "state-gated": attention_with_state("gated_delta", floats(2, 2, 8, 4), -np.abs(floats(2, 3, 2)), np.abs(floats(2, 3, 2))),
    "causal-conv": Case("CausalConvWithState", [floats(2, 3, 7), floats(3, 1, 4)], outputs=(1, 1)),
    "causal-conv-state": Case(
        "CausalConvWithState", [floats(2, 3, 7), floats(3, 1, 4), floats(3), floats(2, 3, 3)], {"activation": "silu"}, (1, 1)
    ),
    "positions-chunked": three_positions(),
    "positions-alternating": three_positions(mrope_layout=1),
    "positions-of-heads": three_positions(0, sizes=(2, 2, 3, 16), interleaved=1),
    "positions-of-a-part": three_positions(sizes=(2, 3, 64), rotary_embedding_dim=16),
    **{f"experts-{name}": experts(name, normalize_routing_weights=1) for name in ("relu", "gelu", "silu")},
    "experts-swiglu": experts("swiglu", swiglu_fusion=1, activation_alpha=1.702, activation_beta=1.0, swiglu_limit=7.0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_onnxruntime(case: Case) -> None:
    check(case)


COMPILED = ("skip-norm", "embedding", "gemm", "conv-sum", "experts-swiglu", "unique")


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name: str) -> None:
    check(CASES[name], is_compiled=True)


# ---- operators for which ONNX Runtime's CPU has no kernel ----


def by_torch(function: object, *arrays: np.ndarray) -> np.ndarray:
    assert callable(function)
    result: np.ndarray = function(*(torch.from_numpy(array) for array in arrays)).numpy()
    return result


def test_sums_and_activations() -> None:
    x, bias, skip = floats(2, 4, 6), floats(6), floats(2, 4, 6)
    check(Case("BiasAdd", [x, bias, skip]), [x + bias + skip])
    check(Case("BiasDropout", [x, bias, skip], {"seed": 3}), [x + bias + skip])
    left, right = np.split(x + bias, 2, -1)
    check(Case("BiasSplitGelu", [x, bias]), [left * by_torch(torch.nn.functional.gelu, right)])
    weight = floats(6, 5)
    product = by_torch(lambda y: torch.nn.functional.gelu(y, approximate="tanh"), x @ weight)
    check(Case("GemmFastGelu", [x, weight]), [product])
    check(Case("FusedMatMulActivation", [x, weight], {"activation": "Relu"}), [np.maximum(x @ weight, 0)])


def test_group_normalization() -> None:
    x, scale, bias, skip = floats(2, 3, 5, 8), floats(8), floats(8), floats(2, 8)

    def expected(y: np.ndarray) -> np.ndarray:
        first = np.ascontiguousarray(y.transpose(0, 3, 1, 2))
        normal = by_torch(lambda *a: torch.nn.functional.group_norm(a[0], 2, a[1], a[2], 1e-5), first, scale, bias)
        return np.ascontiguousarray(normal.transpose(0, 2, 3, 1))

    plain = {"groups": 2, "activation": 0}
    swish = by_torch(torch.nn.functional.silu, expected(x))
    check(Case("GroupNorm", [x, scale, bias], {**plain, "activation": 1}), [swish])
    first = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    check(Case("GroupNorm", [first, scale, bias], {**plain, "channels_last": 0}), [expected(x).transpose(0, 3, 1, 2)])
    total = x + skip[:, None, None, :] + bias
    check(Case("SkipGroupNorm", [x, scale, bias, skip, bias], plain, (1, 1)), [expected(total), total])


def test_convolutions_of_channels_last() -> None:
    x, weight, bias, more = floats(1, 7, 6, 4), floats(5, 4, 3, 3), floats(5), floats(1, 5, 4, 5)
    first = by_torch(torch.nn.functional.conv2d, np.ascontiguousarray(x.transpose(0, 3, 1, 2)), weight, bias)
    last = first.transpose(0, 2, 3, 1)
    check(Case("NhwcFusedConv", [x, weight, bias, more], {"activation": "Relu"}), [np.maximum(last + more, 0)])
    check(Case("NhwcConv", [x, weight, bias]), [last])
    check(Case("NhwcConv", [x, np.ascontiguousarray(weight.transpose(0, 2, 3, 1)), bias]), [last])


def test_tensors() -> None:
    pairs = [floats(3, 2), floats(3, 2)]
    a, b = (pair.view(np.complex64) for pair in pairs)
    check(Case("ComplexMul", pairs), [(a * b).view(np.float32)])
    check(Case("ComplexMulConj", pairs), [(a * b.conj()).view(np.float32)])
    x = floats(3, 8)
    check(Case("Rfft", [x]), [np.fft.rfft(x).astype(np.complex64).view(np.float32).reshape(3, 5, 2)])
    check(Case("TorchEmbedding", [x, np.array([[1, 2]])]), [x[[[1, 2]]]])
    for number, expected in ((1.0, True), (math.inf, False), (math.nan, False)):
        check(Case("IsAllFinite", [floats(3), np.array([[1, number]], np.float32)]), [np.array(expected)])
    check(Case("IsAllFinite", [np.array([math.inf], np.float32)], {"isnan_only": 1}), [np.array(True)])
    check(Case("IsAllFinite", [np.zeros((0, 3), np.float32)]), [np.array(True)])


def bucket(distance: int, is_bidirectional: bool, buckets: int, furthest: int) -> int:
    """T5's bucket of a key that lies `distance` behind the query, as its authors have it."""
    first = 0
    if is_bidirectional:
        buckets //= 2
        first, distance = (buckets if distance > 0 else 0), abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    far = exact + int(np.float32(math.log(distance / exact)) / np.float32(math.log(furthest / exact)) * (buckets - exact))
    return first + min(far, buckets - 1)


@pytest.mark.parametrize("is_bidirectional", [0, 1])
def test_relative_positions(is_bidirectional: int) -> None:
    table, length = floats(8, 3), 30
    buckets = [[bucket(k - q, bool(is_bidirectional), 8, 20) for k in range(length)] for q in range(length)]
    attributes = {"max_distance": 20, "is_bidirectional": is_bidirectional}
    case = Case("RelativePositionBias", [table, np.array(length), np.array(length)], attributes, constants=(1, 2))
    check(case, [table[buckets].transpose(2, 0, 1)[None]])


def test_gated_relative_positions() -> None:
    x, x_bias, places, weight, bias, eco = (
        floats(2, 4, 8),
        floats(8),
        floats(1, 2, 4, 4),
        floats(4, 6),
        floats(6),
        floats(1, 2, 1, 1),
    )
    heads = (x + x_bias).reshape(2, 4, 2, 4).transpose(0, 2, 1, 3)
    gates = 1 / (1 + np.exp(-(heads @ weight + bias).reshape(2, 2, 4, 2, 3).sum(-1)))
    update, reset = gates[..., :1], gates[..., 1:]
    expected = (update * (reset * eco - 1) + 2) * places
    check(Case("GatedRelativePositionBias", [x, x_bias, places, weight, bias, eco], {"num_heads": 2}), [expected])


def test_rotation_of_gemma() -> None:
    angles, rest = floats(2, 3, 8), [floats(2, 4, 3, 8) for _ in range(4)]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    expected = [rest[0] * cos + rest[1] * sin, rest[2] * cos + rest[3] * sin]
    check(Case("GemmaRotaryEmbedding", [angles, *rest], outputs=(1, 1)), expected)


def test_experts_with_three_products() -> None:
    x, logits, up, down, gate = floats(6, 8), floats(6, 4), floats(4, 12, 8), floats(4, 8, 12), floats(4, 12, 8)
    chances = by_torch(lambda y: torch.softmax(y, -1), logits)
    expected = np.zeros_like(x)
    for row, best in enumerate(chances.argmax(-1)):
        inner = by_torch(torch.nn.functional.silu, x[row] @ up[best].T) * (x[row] @ gate[best].T)
        expected[row] = chances[row, best] * (inner @ down[best].T)
    check(Case("MoE", [x, logits, up, None, down, None, gate], {"k": 1, "activation_type": "silu"}), [expected])


# ---- the walk over a model ----

HEAD = '<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]> main '


def test_names_and_sources_stay() -> None:
    model = parser.parse_model(
        HEAD + "(float[N,4] x, float[4] b) => (float[N,4] y) { h = com.microsoft.BiasGelu(x, b) y = Relu(h) }"
    )
    model.graph.node[0].metadata_props.add(key="prefuse.source", value="net.py:7")
    graph = import_model(model).graph
    assert [node.op_type for node in graph] == ["Add", "Gelu", "Relu"]
    assert graph.node(1).outputs[0].name == "h"
    assert [node.metadata_props.get("prefuse.source") for node in graph] == ["net.py:7", "net.py:7", None]
    assert graph.opset_imports == {"": OPERATORS["BiasGelu"].opset}
    assert str(graph.outputs[0].shape) == "[N,4]"


def test_a_model_without_such_operators_keeps_its_opset() -> None:
    model = parser.parse_model(HEAD + "(float[N,4] x) => (float[N,4] y) { y = Relu(x) }")
    assert import_model(model).graph.opset_imports[""] == 18


def test_operators_in_branches() -> None:
    text = """(float[2,4] x, float[4] b, bool c) => (float[2,4] y) {
      h = Abs(x)
      y = If(c)<then_branch = t () => (u) { u = com.microsoft.BiasGelu(h, b) },
                else_branch = e () => (v) { v = com.microsoft.FastGelu(x) }>
    }"""
    nodes = [node.op_type for node in import_model(parser.parse_model(HEAD + text)).graph.all_nodes()]
    assert sorted(nodes) == ["Abs", "Add", "Gelu", "Gelu", "If"]


def test_results_that_are_outputs_twice_or_not_at_all() -> None:
    text = "(float[2,4] x, float[4] g) => (float[2,4] s) { y, , , s = com.microsoft.SkipLayerNormalization(x, x, g) }"
    graph = import_model(parser.parse_model(HEAD + text)).graph
    assert [value.name for value in graph.outputs] == ["s"]


REFUSALS = {
    "attribute do_rotary is not taken": "com.microsoft.Attention<num_heads = 2, do_rotary = 1>(x, w)",
    "attribute mode is not taken": 'com.microsoft.Gelu<mode = "x">(x)',
    "input 1 is not taken": "com.microsoft.Gelu(x, w)",
    "has no attribute num_heads": "com.microsoft.Attention(x, w)",
    "has no input 1": "com.microsoft.BiasGelu(x)",
    "strings are not computed with": "com.microsoft.Tokenizer(x)",
    "loop outside": "com.microsoft.BeamSearch(x)",
    "without a rewrite": "com.microsoft.Nonsense(x)",
    r"activation Swallow\[\] is not taken": 'com.microsoft.FusedGemm<activation = "Swallow", transB = 1>(w, w)',
    "metric cosine is not taken": 'com.microsoft.CDist<metric = "cosine">(w, w)',
    "saved for the CPU that it ran on": "com.microsoft.nchwc.Conv(x, w)",
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_refusals_have_reasons(reason: str) -> None:
    model = parser.parse_model(HEAD + f"(float[2,5,8] x, float[8,24] w) => (float y) {{ y = {REFUSALS[reason]} }}")
    with pytest.raises(UnsupportedModelError, match=reason):
        import_model(model)


BROKEN = ["FusedMatMul<alpha = 1>(x, x)", "BiasGelu(x, n)", "MoE(x, x, x, x, x)", "QLinearSigmoid(x, x, x, x, x)"]


@pytest.mark.parametrize(
    "text", [*BROKEN, "FusedMatMul(x, g)", "Attention<num_heads = 0>(x, v)", "MatMulNBits<N = 4, K = 8, block_size = 0>(x, w, w)"]
)
def test_broken_nodes_are_one_error_that_names_them(text: str) -> None:
    inputs = "(float[2,5,8] x, int64[8] n, float[3] g, float[8,24] v)"
    model = parser.parse_model(f"{HEAD}{inputs} => (float y) <uint8[4] w = {{1, 2, 3, 4}}> {{ y = com.microsoft.{text} }}")
    with pytest.raises((InvalidModelError, UnsupportedModelError), match=text.partition("(")[0].partition("<")[0]):
        import_model(model)


def test_all_refusals_are_named_at_once() -> None:
    text = "(float[2] x) => (float y, float z) { y = com.microsoft.Tokenizer(x) z = com.microsoft.Gelu(x, x) }"
    with pytest.raises(UnsupportedModelError, match=r"(?s)2 parts.*Tokenizer.*Gelu: input 1"):
        import_model(parser.parse_model(HEAD + text))


def test_outputs_that_are_not_computed_are_refused_when_asked_for() -> None:
    text = "(float[2,5,8] x, float[8] g) => (float y, float m) { y, m = com.microsoft.SkipSimplifiedLayerNormalization(x, x, g) }"
    with pytest.raises(UnsupportedModelError, match="output 1 is asked for"):
        import_model(parser.parse_model(HEAD + text))


def test_every_operator_of_onnxruntime_is_in_the_table() -> None:
    """Those that ONNX Runtime's CPU runs are rewritten, or refused with a reason; and none is both."""
    kernels = {one.op_name for one in onnxruntime_state.get_all_opkernel_def() if one.domain == "com.microsoft"}
    assert not OPERATORS.keys() & REFUSED.keys()
    assert kernels <= OPERATORS.keys() | REFUSED.keys()
    assert all(operator.summary for operator in OPERATORS.values())


def test_old_opsets() -> None:
    """The replacements are of a newer opset, to which the rest of the model is brought."""
    case = Case("BiasGelu", [floats(3, 5), floats(5)], opset=11)
    check(case, by_onnxruntime(case))
    assert onnx.defs.onnx_opset_version() >= max(operator.opset for operator in OPERATORS.values())
