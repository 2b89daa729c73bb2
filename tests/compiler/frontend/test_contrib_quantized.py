"""ONNX Runtime's operators on 8-bit integers, and its weights of 2, 4 and 8 bits in blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.external_data_helper import convert_model_to_external_data
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.stored_weights import reads_integers
from prefuse.runtime.errors import UnsupportedModelError

from .contrib_oracle import Case, by_onnxruntime, check

RANDOM = np.random.default_rng(8)


def floats(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def positive(*shape: int) -> np.ndarray:
    return np.asarray(np.abs(floats(*shape)) + 0.01, np.float32)


def bytes_(*shape: int) -> np.ndarray:
    return RANDOM.integers(0, 256, shape).astype(np.uint8)


def signed(*shape: int) -> np.ndarray:
    return RANDOM.integers(-127, 128, shape).astype(np.int8)


def weights(*shape: int) -> np.ndarray:
    """Of 7 bits: two products with bytes fit 16 bits, where ONNX Runtime saturates their sum on CPUs without VNNI."""
    return RANDOM.integers(-64, 64, shape).astype(np.int8)


def scale(number: float) -> np.ndarray:
    return np.array(number, np.float32)


def point(number: int, kind: type[np.generic] = np.uint8) -> np.ndarray:
    return np.array(number, kind)


IN, OUT = [scale(0.02), point(120)], [scale(0.005), point(3)]
POOL = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
INT8_OUT = [scale(0.1), point(0, np.int8)]
EMBEDDING = [
    *(RANDOM.integers(0, count, (2, 4)).astype(np.int32) for count in (9, 2)),
    *(bytes_(9, 8), bytes_(6, 8), bytes_(2, 8), bytes_(8), bytes_(8)),
    np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32),
    *map(scale, (0.02, 0.03, 0.01, 0.02, 0.02)),
    *map(point, (100, 90, 8, 100, 90)),
]
CONVOLUTION = [bytes_(1, 7, 6, 4), *IN, weights(5, 4, 3, 3), scale(0.01), point(0, np.int8), scale(0.3), point(100)]
INTEGER_CASES = {
    "add": Case("QLinearAdd", [bytes_(3, 5), *IN, bytes_(5), scale(0.03), point(100), scale(0.04), point(128)], steps=1),
    "multiply": Case(
        "QLinearMul",
        [signed(3, 5), scale(0.02), point(-3, np.int8), signed(3, 5), scale(0.03), point(2, np.int8), *INT8_OUT],
        steps=1,
    ),
    "sigmoid": Case("QLinearSigmoid", [bytes_(3, 5), *IN, *OUT], steps=1),
    "leaky-relu": Case("QLinearLeakyRelu", [bytes_(3, 5), *IN, *OUT], {"alpha": 0.1}, steps=1),
    "softmax": Case("QLinearSoftmax", [bytes_(3, 5), *IN, *OUT], {"opset": 13}, steps=1),
    "old-softmax": Case("QLinearSoftmax", [bytes_(2, 3, 5), *IN, *OUT], {"opset": 12, "axis": 1}, steps=1),
    "average-pool": Case("QLinearAveragePool", [bytes_(1, 4, 6, 6), *IN, *OUT], POOL, steps=1),
    "average-pool-last": Case(
        "QLinearAveragePool", [bytes_(1, 6, 6, 4), *IN, *OUT], {**POOL, "channels_last": 1, "count_include_pad": 1}, steps=1
    ),
    "global-pool": Case("QLinearGlobalAveragePool", [bytes_(1, 4, 6, 6), *IN, *OUT], steps=1),
    "global-pool-last": Case("QLinearGlobalAveragePool", [bytes_(1, 6, 6, 4), *IN, *OUT], {"channels_last": 1}, steps=1),
    "concat": Case(
        "QLinearConcat",
        [*OUT, bytes_(2, 3), *IN, bytes_(2, 4), scale(0.01), point(7)],
        {"axis": 1},
        constants=(0, 1, 3, 4, 6, 7),
        steps=1,
    ),
    "where": Case(
        "QLinearWhere",
        [RANDOM.random((3, 5)) > 0.5, bytes_(3, 5), *IN, bytes_(3, 5), scale(0.03), point(4), *OUT],
        constants=(2, 3, 5, 6, 7, 8),
        steps=1,
    ),
    "convolution": Case("QLinearConv", CONVOLUTION, {"channels_last": 1}, constants=range(1, 8), steps=1),
    "quantize-16": Case("QuantizeLinear", [floats(3, 5), scale(0.001), point(300, np.uint16)]),
    "quantize-columns": Case("QuantizeLinear", [floats(3, 5), positive(5), signed(5)], {"axis": 1}),
    "dequantize-16": Case(
        "DequantizeLinear", [RANDOM.integers(0, 999, (3, 5)).astype(np.int16), scale(0.02), point(7, np.int16)]
    ),
    "dequantize-32": Case("DequantizeLinear", [RANDOM.integers(0, 999, (3, 5)).astype(np.int32), scale(0.02)]),
    "gemm": Case(
        "QGemm",
        [bytes_(3, 4), *IN, weights(5, 4), positive(5), signed(5), RANDOM.integers(-99, 99, 5).astype(np.int32)],
        {"transB": 1, "alpha": 0.5},
    ),
    "gemm-to-bytes": Case(
        "QGemm", [bytes_(3, 4), *IN, bytes_(4, 5), scale(0.01), point(99), None, scale(0.05), point(60)], steps=1
    ),
    "product-to-float": Case(
        "MatMulIntegerToFloat", [bytes_(2, 3, 4), weights(4, 5), scale(0.02), positive(5), point(120), signed(5), floats(5)]
    ),
    "dynamic-product": Case(
        "DynamicQuantizeMatMul", [floats(2, 3, 4), weights(4, 5), scale(0.02), point(3, np.int8), floats(5)], tolerance=1e-4
    ),
    "embedding": Case("QEmbedLayerNormalization", EMBEDDING, outputs=(1, 1), tolerance=1e-4),
}


@pytest.mark.parametrize("case", INTEGER_CASES.values(), ids=INTEGER_CASES)
def test_integers(case: Case) -> None:
    check(case)


def test_integers_by_hand() -> None:
    """What ONNX Runtime's CPU has no kernels for."""
    a, b = bytes_(3, 5), bytes_(5)
    product = (a.astype(np.int32) - 3) * b
    check(Case("MulInteger", [a, point(3), b]), [product])
    check(Case("ReduceSumInteger", [a], {"axes": [1], "keepdims": 0}), [a.sum(1, dtype=np.int32)])
    mean = ((a.astype(np.float64) - 120) * 0.02).mean(1, keepdims=True)
    expected = np.clip(np.rint(mean / 0.005) + 3, 0, 255).astype(np.uint8)
    check(Case("QLinearReduceMean", [a, *IN, *OUT], {"axes": [1], "keepdims": 1}, steps=1), [expected])


@pytest.mark.parametrize("is_compiled", [False, True])
def test_products_of_whole_bytes_are_exact(is_compiled: bool) -> None:
    """What saturates 16 bits, too, where ONNX Runtime is no reference."""
    a, b = bytes_(3, 64), signed(64, 5)
    b[:, 0], b[:, 1] = 127, -128
    product = ((a.astype(np.int64) - 120) @ (b.astype(np.int64) - 3) * np.float64(0.02) * 0.25).astype(np.float32)
    inputs = [a, b, scale(0.02), scale(0.25), point(120), point(3, np.int8)]
    check(Case("MatMulIntegerToFloat", inputs), [product], is_compiled=is_compiled)


def test_zero_points_may_be_left_out() -> None:
    a, b = bytes_(3, 5), bytes_(5)
    expected = np.clip(np.rint((a * 0.02 + b * 0.03) / 0.09), 0, 255).astype(np.uint8)
    check(Case("QLinearAdd", [a, scale(0.02), None, b, scale(0.03), None, scale(0.09)], steps=1), [expected])


def lstm(
    kind: type[np.generic], by_column: bool, direction: str = "forward", *more: np.ndarray | None, **attributes: object
) -> Case:
    """DynamicQuantizeLSTM of 16 units over 7 steps of 8 numbers, for a batch of 3."""
    directions = 2 if direction == "bidirectional" else 1
    matrices = [RANDOM.integers(*((-64, 64) if kind is np.int8 else (0, 128)), (directions, size, 64)) for size in (8, 16)]
    form = (directions, 64) if by_column else (directions,)
    parameters = [(positive(*form) * 0.003, np.full(form, zero * (kind is np.uint8), kind)) for zero in (60, 66)]
    state = [*more, *[None] * (5 - len(more))]
    inputs = [floats(7, 3, 8), *(one.astype(kind) for one in matrices), *state, *parameters[0], *parameters[1]]
    settings = {"hidden_size": 16, "direction": direction, **attributes}
    return Case("DynamicQuantizeLSTM", inputs, settings, (1, 1, 1), constants=(1, 2, 8, 9, 10, 11), tolerance=1e-2)


def with_float_weights(case: Case) -> Case:
    """The LSTM of the weights that the integers stand for."""
    x, *quantized = case.inputs[:3]
    weights = []
    for integers, scales, zeros in zip(quantized, case.inputs[8::2], case.inputs[9::2], strict=True):
        assert integers is not None
        assert scales is not None
        assert zeros is not None
        centred = integers.astype(np.float32) - zeros.astype(np.float32).reshape(len(zeros), 1, -1)
        weights.append((centred * scales.reshape(len(scales), 1, -1)).transpose(0, 2, 1))
    return Case("LSTM", [x, *weights, *case.inputs[3:8]], case.attributes, case.outputs, domain="")


LSTMS = {
    "bytes": lstm(np.uint8, False),
    "columns": lstm(np.int8, True, "reverse", floats(1, 128) * 0.1),
    "both-ways": lstm(np.uint8, True, "bidirectional", None, np.array([7, 2, 0], np.int32)),
    "states": lstm(np.int8, False, "forward", None, None, floats(1, 3, 16), floats(1, 3, 16), floats(1, 48)),
    "activations": lstm(np.int8, True, activations=["HardSigmoid", "Tanh", "Relu"], clip=0.5, input_forget=1),
}


@pytest.mark.parametrize("case", LSTMS.values(), ids=LSTMS)
def test_recurrence(case: Case) -> None:
    """ONNX Runtime quantizes inputs and states, too, as we do where weights are symmetric; without that, results are its own to
    the last bits."""
    check(case, is_compiled=True)
    exact, expected = replace(case, tolerance=1e-5), by_onnxruntime(with_float_weights(case))
    is_symmetric = not any(zeros is not None and zeros.any() for zeros in case.inputs[9::2])
    check(replace(case, tolerance=2e-2) if is_symmetric else exact, expected, is_compiled=True)


def test_symmetric_weights_of_a_recurrence_stay_integers() -> None:
    model = import_model(LSTMS["columns"].model())
    (recurrence,) = (node for node in model.graph if node.op_type == "LSTM")
    assert reads_integers(recurrence) == (1, 2)
    shifted = import_model(LSTMS["bytes"].model())
    assert not any(node.op_type == "DequantizeLinear" for node in shifted.graph)


def test_weights_of_a_recurrence_are_constant() -> None:
    case = LSTMS["bytes"]
    with pytest.raises(UnsupportedModelError, match="DynamicQuantizeLSTM: input 2 is no constant"):
        import_model(replace(case, constants=(1, 8, 9, 10, 11)).model())


def low_bit(bits: int, columns: int, depth: int, block: int, zero: str = "", kind: type[np.generic] = np.float32) -> Case:
    """MatMulNBits with random weights; zero points packed, as floats, or none."""
    blocks = -(-depth // block)
    points: dict[str, np.ndarray | None] = {
        "": None,
        "packed": bytes_(columns, -(-blocks * bits // 8)),
        "float": (RANDOM.random((columns, blocks)) * 2**bits).astype(kind),
    }
    scales = (positive(columns, blocks) * 0.1).astype(kind)
    inputs = [floats(2, 3, depth).astype(kind), bytes_(columns, blocks, block * bits // 8), scales, points[zero]]
    attributes = {"bits": bits, "N": columns, "K": depth, "block_size": block}
    return Case("MatMulNBits", inputs, attributes, constants=(1, 2, 3), tolerance=2e-5 if kind is np.float32 else 5e-3)


LOW_BIT = {
    **{f"{bits}-{zero or 'middle'}": low_bit(bits, 5, 64, 32, zero) for bits in (2, 4, 8) for zero in ("", "packed")},
    **{f"{bits}-float": low_bit(bits, 5, 64, 32, "float") for bits in (2, 4)},
    "uneven": low_bit(4, 5, 70, 16, "packed"),
    "float16": low_bit(4, 8, 96, 32, "packed", np.float16),
}


@pytest.mark.parametrize("case", LOW_BIT.values(), ids=LOW_BIT)
def test_low_bit_products(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(("columns", "depth"), [(5, 32), (6, 32), (5, 96), (1, 32)])
def test_packed_zero_points_may_lie_in_one_row(columns: int, depth: int) -> None:
    """Whole bytes for each column, as older quantizers wrote them."""
    case = low_bit(4, columns, depth, 32, "packed")
    *given, zero = case.inputs
    assert zero is not None
    check(Case(case.op_type, [*given, zero.reshape(-1)], case.attributes, constants=case.constants))


def test_low_bit_bias() -> None:
    case = low_bit(4, 5, 70, 16)
    check(Case(case.op_type, [*case.inputs, None, floats(5)], case.attributes, constants=case.constants))


def test_low_bit_weights_stay_packed_and_shared(tmp_path: Path) -> None:
    model = low_bit(4, 64, 512, 32, "packed").model()
    convert_model_to_external_data(model, all_tensors_to_one_file=True, location="weights", size_threshold=100)
    onnx.save(model, tmp_path / "m.onnx")
    graph = import_model(tmp_path / "m.onnx").graph
    weight = next(value.const_value for value in graph.initializers.values() if value.shape == (64, 512))
    assert isinstance(weight, ir.ExternalTensor)
    assert weight.dtype == ir.DataType.UINT4
    assert weight.nbytes == 64 * 512 // 2
    assert not any(value.dtype == ir.DataType.UINT8 for value in graph.initializers.values())  # the bytes are there once


def test_low_bit_weights_that_are_not_taken() -> None:
    case = low_bit(4, 5, 64, 32)
    with pytest.raises(UnsupportedModelError, match="MatMulNBits: its quantized weights are no constant"):
        import_model(Case(case.op_type, case.inputs, case.attributes, constants=(2,)).model())
    groups = [*case.inputs[:3], None, np.zeros(64, np.int32)]
    with pytest.raises(UnsupportedModelError, match="MatMulNBits: input 4 is not taken"):
        import_model(Case(case.op_type, groups, case.attributes, constants=(1, 2)).model())
    with pytest.raises(UnsupportedModelError, match=r"are not of shape \[5, 128\] in 4 bits"):
        import_model(Case(case.op_type, case.inputs, {**case.attributes, "K": 128}, constants=(1, 2)).model())


@pytest.mark.parametrize(("columns", "depth"), [(4, 16), (3, 21)])
@pytest.mark.parametrize("kind", [0, 1])
def test_products_of_bitsandbytes(columns: int, depth: int, kind: int) -> None:
    count = columns * depth
    inputs = [floats(2, depth), bytes_((count + 1) // 2), positive(-(-count // 16))]
    attributes = {"N": columns, "K": depth, "block_size": 16, "quant_type": kind}
    check(Case("MatMulBnb4", inputs, attributes, constants=(1, 2)))


def nibbles(kind: type[np.generic], *shape: int) -> np.ndarray:
    return RANDOM.integers(-8 if kind is ml_dtypes.int4 else 0, 8, shape).astype(kind)


OUTSIDE = np.array([[0, -9, 99]])
TABLES = {
    "bytes-4": Case(
        "GatherBlockQuantized",
        [bytes_(9, 32), RANDOM.integers(0, 9, (2, 3)), positive(9, 4), bytes_(9, 2)],
        {"block_size": 16, "bits": 4},
        constants=(0, 2, 3),
    ),
    "bytes-4-middle": Case(
        "GatherBlockQuantized", [bytes_(9, 32), OUTSIDE, positive(9, 2)], {"block_size": 32, "bits": 4}, constants=(0, 2)
    ),
    "bytes-8": Case(
        "GatherBlockQuantized",
        [bytes_(9, 64), OUTSIDE, positive(9, 2), bytes_(9, 2)],
        {"block_size": 32, "bits": 8},
        constants=(0, 2, 3),
    ),
    **{
        f"{kind.__name__}-{name}": Case(
            "GatherBlockQuantized",
            [nibbles(kind, *shape), OUTSIDE if axis else np.array([0, 1, 1]), positive(*blocks), nibbles(kind, *blocks)],
            {"block_size": 16, "quantize_axis": axis, "gather_axis": 1 - axis},
            constants=(0, 2, 3),
        )
        for kind in (ml_dtypes.int4, ml_dtypes.uint4)
        for name, shape, blocks, axis in (("rows", (9, 32), (9, 2), 1), ("columns", (16, 3, 4), (1, 3, 4), 0))
    },
}


@pytest.mark.parametrize("case", TABLES.values(), ids=TABLES)
def test_quantized_tables(case: Case) -> None:
    check(case)


def experts(
    *,
    block: int = 0,
    with_points: bool = False,
    chances: np.ndarray | None = None,
    bits: int = 4,
    hidden: int = 32,
    **more: object,
) -> Case:
    """QMoE: 6 tokens of `hidden` numbers, 4 experts with 64 inner numbers; scales of rows, or of blocks of them."""
    inner = 128 if more["activation_type"] == "swiglu" else 64
    layers: list[np.ndarray | None] = []
    points: list[np.ndarray | None] = []
    for rows, depth in ((inner, hidden), (hidden, 64)):
        blocks = (4, rows, -(-depth // block)) if block else (4, rows)
        layers += [bytes_(4, rows, depth * bits // 8), positive(*blocks) * np.float32(0.05), floats(4, rows)]
        points.append(bytes_(*blocks[:-1], -(-blocks[-1] * bits // 8)) if with_points else None)
    inputs = [floats(6, hidden), floats(6, 4), *layers, None, None, None, *points, None, chances]
    attributes = {"k": 2, "expert_weight_bits": bits, "normalize_routing_weights": int(chances is None), **more}
    if block:
        attributes["block_size"] = block
    return Case("QMoE", inputs, attributes, constants=(2, 3, 4, 5, 6, 7, 11, 12), tolerance=1e-4)


EXPERTS = {
    "rows": experts(activation_type="silu"),
    "rows-of-bytes": experts(activation_type="silu", bits=8, with_points=True),
    "rows-and-points": experts(activation_type="relu", with_points=True, chances=positive(6, 4)),
    "blocks": experts(activation_type="gelu", block=16, with_points=True),
    "short-blocks": experts(activation_type="relu", block=32, hidden=48),
    "short-blocks-and-points": experts(activation_type="relu", block=32, hidden=80, with_points=True),
    "swiglu": experts(activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.7, activation_beta=1.0),
}


@pytest.mark.parametrize("case", EXPERTS.values(), ids=EXPERTS)
def test_quantized_experts(case: Case) -> None:
    check(case)


def test_experts_whose_routing_weights_do_not_add_up() -> None:
    """ONNX Runtime's CPU normalizes them whatever the attribute says."""
    case = experts(activation_type="relu", normalize_routing_weights=0)
    with pytest.raises(UnsupportedModelError, match="disagree"):
        import_model(case.model())


def test_experts_whose_scales_are_not_those_of_blocks() -> None:
    case = experts(activation_type="relu", block=16)
    with pytest.raises(UnsupportedModelError, match="2 scales of a row are not those of blocks of 8 of 32 numbers"):
        import_model(replace(case, attributes={**case.attributes, "block_size": 8}).model())


def test_sums_that_float16_does_not_hold() -> None:
    """Times scales of float16 they are its numbers again."""
    a, b = np.full((2, 64), 250, np.uint8), RANDOM.integers(30, 64, (64, 5)).astype(np.int8)
    scales, bias = [np.array(0.02, np.float16), np.array(0.01, np.float16)], floats(5).astype(np.float16)
    exact = (a.astype(np.float64) @ b) * float(scales[0]) * float(scales[1]) + bias
    case = Case("MatMulIntegerToFloat", [a, b, *scales, None, None, bias], tolerance=2e-3)
    check(case, [exact.astype(np.float16)])


COMPILED = {
    "experts": EXPERTS["blocks"],
    "short-blocks": EXPERTS["short-blocks-and-points"],
    "add": INTEGER_CASES["add"],
    "convolution": INTEGER_CASES["convolution"],
    "gemm": INTEGER_CASES["gemm"],
    "2-bits": LOW_BIT["2-packed"],
    "4-bits": LOW_BIT["uneven"],
    "table": TABLES["int4-rows"],
}


@pytest.mark.parametrize("case", COMPILED.values(), ids=COMPILED)
def test_compiled(case: Case) -> None:
    check(case, is_compiled=True)
