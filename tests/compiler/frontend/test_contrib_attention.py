"""ONNX Runtime's attention operators: masks of every form, states, packed operands, rotation, caches, windows, sinks."""

from __future__ import annotations

import numpy as np
import pytest
from prefuse.compiler.frontend.importer import import_model
from prefuse.runtime.errors import UnsupportedModelError

from .contrib_oracle import Array, Case, by_onnxruntime, check, rewritten

RANDOM = np.random.default_rng(6)
LOWEST = float(np.finfo(np.float32).min)


def floats(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def ints(*values: object) -> np.ndarray:
    return np.array(values, np.int32)


def projected(*, mask: np.ndarray | None = None) -> list[np.ndarray | None]:
    """Inputs of Attention: batch 2, 5 queries, 8 channels."""
    return [floats(2, 5, 8), floats(8, 24), floats(24), mask]


ROWS = ints([1, 1, 1, 0, 0], [1, 1, 1, 1, 1])
SQUARES = (RANDOM.random((2, 5, 5)) > 0.4).astype(np.int32)
ATTENTION = {
    "plain": Case("Attention", projected(), {"num_heads": 2}),
    "without-bias": Case("Attention", [floats(2, 5, 8), floats(8, 24)], {"num_heads": 2, "unidirectional": 1}),
    "causal": Case("Attention", projected(), {"num_heads": 2, "unidirectional": 1}),
    "rows": Case("Attention", projected(mask=ROWS), {"num_heads": 2}),
    "causal-rows": Case("Attention", projected(mask=ROWS), {"num_heads": 2, "unidirectional": 1}),
    "hidden-rows": Case(  # the first queries see masked keys alone
        "Attention",
        projected(mask=ROWS[:, ::-1].copy()),
        {"num_heads": 2, "unidirectional": 1, "mask_filter_value": LOWEST},
    ),
    "ends": Case("Attention", projected(mask=ints(3, 5)), {"num_heads": 2, "scale": 0.3}),
    "ends-and-starts": Case("Attention", projected(mask=ints(3, 5, 1, 0)), {"num_heads": 2}),
    "squares-and-bias": Case("Attention", [*projected(mask=SQUARES), None, floats(2, 2, 5, 5)], {"num_heads": 2}),
    "causal-bias": Case("Attention", [*projected(), None, floats(1, 2, 5, 5)], {"num_heads": 2, "unidirectional": 1}),
    "past": Case("Attention", [*projected(), floats(2, 2, 2, 3, 4)], {"num_heads": 2, "unidirectional": 1}, (1, 1)),
    "past-and-mask": Case(
        "Attention",
        [floats(2, 1, 8), floats(8, 24), floats(24), ints([1, 1, 0, 1], [1, 1, 1, 1]), floats(2, 2, 2, 3, 4)],
        {"num_heads": 2, "unidirectional": 1},
        (1, 1),
    ),
    "present-alone": Case("Attention", projected(), {"num_heads": 2}, (1, 1)),
    "other-sizes": Case(
        "Attention", [floats(2, 5, 8), floats(8, 28), floats(28)], {"num_heads": 2, "qkv_hidden_sizes": [8, 8, 12]}
    ),
}


@pytest.mark.parametrize("case", ATTENTION.values(), ids=ATTENTION)
def test_attention(case: Case) -> None:
    if len(case.inputs) == 2:  # ONNX Runtime crashes without a bias
        expected = by_onnxruntime(Case("Attention", [*case.inputs, np.zeros(24, np.float32)], case.attributes))
        check(case, expected)
    else:
        check(case)


QUERIES = floats(2, 3, 8)
STATES = [floats(2, 2, 4, 4), floats(2, 2, 4, 4)]
KEYS = [floats(2, 5, 8), floats(2, 5, 8)]
NEW = [floats(2, 3, 8), floats(2, 3, 8)]
CACHED = [floats(2, 2, 5, 4), floats(2, 2, 5, 4)]
MULTI_HEAD = {
    "plain": Case("MultiHeadAttention", [QUERIES, *KEYS], {"num_heads": 2}),
    "everything": Case(
        "MultiHeadAttention",
        [QUERIES, floats(2, 5, 8), floats(2, 5, 12), floats(28), ints([1, 1, 0, 1, 0], [1] * 5), floats(1, 2, 3, 5)],
        {"num_heads": 2, "scale": 0.2},
    ),
    "ends": Case("MultiHeadAttention", [QUERIES, *KEYS, None, ints(3, 5)], {"num_heads": 2}),
    "one-causal-query": Case("MultiHeadAttention", [floats(2, 1, 8), *KEYS, None, ROWS], {"num_heads": 2, "unidirectional": 1}),
    "squares": Case("MultiHeadAttention", [QUERIES, *KEYS, None, SQUARES[:, :3]], {"num_heads": 2}),
    "past": Case(
        "MultiHeadAttention", [QUERIES, *NEW, floats(24), None, None, *STATES], {"num_heads": 2, "unidirectional": 1}, (1, 1, 1)
    ),
    "past-and-mask": Case(
        "MultiHeadAttention", [QUERIES, *NEW, None, np.ones((2, 7), np.int32), None, *STATES], {"num_heads": 2}, (1, 1, 1)
    ),
    "present-alone": Case("MultiHeadAttention", [QUERIES, *NEW], {"num_heads": 2, "unidirectional": 1}, (1, 1, 1)),
    "cross": Case("MultiHeadAttention", [QUERIES, *CACHED, floats(24)], {"num_heads": 2}),
    "float16": Case("MultiHeadAttention", [one.astype(np.float16) for one in (QUERIES, *KEYS)], {"num_heads": 2}, tolerance=2e-3),
    "decoder": Case("DecoderMaskedMultiHeadAttention", [floats(2, 1, 8), *CACHED], {"num_heads": 2}),
}


@pytest.mark.parametrize("case", MULTI_HEAD.values(), ids=MULTI_HEAD)
def test_multi_head_attention(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("mask", [None, ROWS])
def test_causal_attention_to_other_than_the_own_keys(mask: np.ndarray | None) -> None:
    """Its CPU kernel shows all keys to the last query and counts the others from the first key, its GPU kernels from the last."""
    case = Case("MultiHeadAttention", [QUERIES, *KEYS, None, mask], {"num_heads": 2, "unidirectional": 1})
    with pytest.raises(UnsupportedModelError, match="disagree on causal attention"):
        import_model(case.model())


@pytest.mark.parametrize("bias", [None, floats(24)])
def test_packed_operands(bias: np.ndarray | None) -> None:
    """ONNX Runtime's CPU takes them apart only."""
    q, k, v = (floats(2, 5, 8) for _ in range(3))
    apart = by_onnxruntime(Case("MultiHeadAttention", [q, k, v, bias], {"num_heads": 2}))
    by_head = [one.reshape(2, 5, 2, 1, 4) for one in (q, k, v)]
    check(Case("MultiHeadAttention", [np.concatenate(by_head, 3), None, None, bias], {"num_heads": 2}), apart)
    if bias is None:
        check(Case("MultiHeadAttention", [q, np.concatenate(by_head[1:], 3)], {"num_heads": 2}), apart)


def test_decoder_attention_with_a_past() -> None:
    """ONNX Runtime's CPU takes it in shared buffers only."""
    q, k, v, past_key, past_value = (*(floats(2, 1, 8) for _ in range(3)), floats(2, 2, 3, 4), floats(2, 2, 3, 4))
    expected = by_onnxruntime(
        Case("MultiHeadAttention", [q, k, v, None, None, None, past_key, past_value], {"num_heads": 2}, (1, 1, 1))
    )
    inputs = [q, k, v, None, None, past_key, past_value]
    check(Case("DecoderMaskedMultiHeadAttention", inputs, {"num_heads": 2}, (1, 1, 1)), expected)
    packed = [np.concatenate([q, k, v], 2), None, None, None, None, past_key, past_value]
    check(Case("DecoderMaskedMultiHeadAttention", packed, {"num_heads": 2}, (1, 1, 1)), expected)


def quantized(scale: np.ndarray, zero: np.ndarray, mask: np.ndarray | None) -> list[np.ndarray | None]:
    x = RANDOM.integers(0, 255, (2, 5, 8))
    weights = RANDOM.integers(-64, 64, (8, 24))  # of 7 bits, as ONNX Runtime needs them on CPUs without VNNI
    parameters = [np.array(0.02, np.float32), scale, mask, np.array(120, np.uint8), zero]
    return [x.astype(np.uint8), weights.astype(np.int8), floats(24), *parameters]


def test_quantized_attention() -> None:
    whole = quantized(np.array(0.01, np.float32), np.array(3, np.int8), ROWS)
    check(Case("QAttention", whole, {"num_heads": 2}, tolerance=1e-4))
    columns = quantized(np.abs(floats(24)) * 0.01, RANDOM.integers(-9, 9, 24).astype(np.int8), None)
    check(Case("QAttention", [*columns, floats(2, 2, 2, 3, 4)], {"num_heads": 2, "unidirectional": 1}, (1, 1), tolerance=1e-4))


def test_sums_of_quantized_attention_that_float16_does_not_hold() -> None:
    x, weights = RANDOM.integers(200, 256, (2, 5, 64)).astype(np.uint8), RANDOM.integers(-9, 64, (64, 24)).astype(np.int8)
    bias, scales = floats(24), (np.array(0.02, np.float32), np.array(0.001, np.float32))
    wide = Case("QAttention", [x, weights, bias, *scales], {"num_heads": 2})
    narrow: list[Array] = [x, weights, *(np.asarray(one, np.float16) for one in (bias, *scales))]
    (expected,) = by_onnxruntime(wide)
    check(Case("QAttention", narrow, {"num_heads": 2}, tolerance=2e-2), [expected.astype(np.float16)])


def tables(size: int) -> list[np.ndarray]:
    """Cosines and sines of 32 positions."""
    angles = np.arange(32)[:, None] / 100 ** (np.arange(size) / size)
    return [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]


PLACES = np.array([[0, 1, 2], [3, 4, 5]])
ROTARY = {
    "rows": Case("RotaryEmbedding", [floats(2, 3, 16), PLACES, *tables(4)]),
    "from-one": Case("RotaryEmbedding", [floats(2, 3, 16), np.array([2]), *tables(4)], {"interleaved": 1}),
    "heads": Case("RotaryEmbedding", [floats(2, 2, 3, 8), PLACES, *tables(4)]),
    "partial": Case("RotaryEmbedding", [floats(2, 3, 16), PLACES, *tables(2)], {"rotary_embedding_dim": 4, "num_heads": 2}),
}


@pytest.mark.parametrize("case", ROTARY.values(), ids=ROTARY)
def test_rotary_embedding(case: Case) -> None:
    check(case)


def grouped(
    batch: int, queries: int, past: int, total: int, *more: np.ndarray | None, ends: list[int] | None = None, **attributes: object
) -> Case:
    """GroupQueryAttention with 4 heads of queries and 2 of keys, 16 numbers each; `past` rows in the cache, 0: none.

    `more` are the inputs from the tables on; `ends` the places of each row's last valid key.
    """
    cache = [floats(batch, 2, past, 16) if past else None for _ in range(2)]
    rows = np.array(ends or [total - 1] * batch, np.int32)
    operands = [floats(batch, queries, 64), floats(batch, queries, 32), floats(batch, queries, 32)]
    inputs = [*operands, *cache, rows, np.array(total, np.int32), *more]
    return Case("GroupQueryAttention", inputs, {"num_heads": 4, "kv_num_heads": 2, **attributes}, (1, 1, 1), (6,))


GROUPED = {
    "prompt": grouped(1, 4, 0, 4),
    "rotated-prompts": grouped(2, 4, 0, 4, *tables(8), do_rotary=1),
    "token": grouped(1, 1, 5, 6),
    "rotated-tokens": grouped(2, 1, 5, 6, *tables(8), do_rotary=1, rotary_interleaved=1),
    "second-prompt": grouped(1, 3, 5, 8, *tables(8), do_rotary=1),
    "places": grouped(1, 4, 0, 4, *tables(8), np.array([[0, 1, 2, 3]]), do_rotary=1),
    "window": grouped(1, 6, 0, 6, local_window_size=3),
    "window-of-a-token": grouped(1, 1, 8, 9, local_window_size=4),
    "cap": grouped(1, 6, 0, 6, softcap=2.0, scale=0.5),
    "smooth": grouped(1, 6, 0, 6, smooth_softmax=1),
    "sinks": grouped(1, 2, 4, 6, None, None, None, None, floats(4), local_window_size=3),
    "sinks-and-cap": grouped(1, 2, 4, 6, None, None, None, None, floats(4), softcap=2.0),
    "bias": grouped(1, 1, 4, 5, None, None, None, floats(1, 4, 1, 5)),
    "both-ways": grouped(1, 4, 0, 4, causal=0),
}


@pytest.mark.parametrize("case", GROUPED.values(), ids=GROUPED)
def test_group_query_attention(case: Case) -> None:
    check(case)


def test_a_cache_that_is_longer_than_what_is_in_it() -> None:
    """The rows behind the valid ones are nobody's; the rest is ONNX Runtime's."""
    case = grouped(2, 1, 8, 6, ends=[5, 3])
    expected, actual = by_onnxruntime(case), rewritten(case)
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-5)
    for row, end in enumerate([6, 4]):
        for got, wanted in zip(actual[1:], expected[1:], strict=True):
            np.testing.assert_allclose(got[row, :, :end], wanted[row, :, :end], atol=1e-6)


def test_prompts_of_different_lengths() -> None:
    case = grouped(2, 4, 0, 4, *tables(8), ends=[3, 1], do_rotary=1)
    expected, actual = by_onnxruntime(case)[0], rewritten(case)[0]
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-5)
    np.testing.assert_allclose(actual[1, :2], expected[1, :2], atol=1e-5)


def test_packed_and_normalized_queries() -> None:
    """ONNX Runtime's CPU has no normalization inside: it is done before."""
    q, k, v, weights = floats(1, 4, 64), floats(1, 4, 32), floats(1, 4, 32), [floats(16), floats(16)]
    attributes = {"num_heads": 4, "kv_num_heads": 2}
    rows = [np.array([3], np.int32), np.array(4, np.int32)]

    def normalized(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        heads = x.reshape(1, 4, -1, 16)
        return np.asarray(heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-6) * weight, np.float32).reshape(x.shape)

    before = [normalized(q, weights[0]), normalized(k, weights[1]), v, None, None, *rows]
    expected = by_onnxruntime(Case("GroupQueryAttention", before, attributes, (1, 1, 1)))
    packed = [np.concatenate([q, k, v], 2), None, None, None, None, *rows, *[None] * 7, *weights]
    check(Case("GroupQueryAttention", packed, attributes, (1, 1, 1), (6,)), expected)


COMPILED = {
    "mask": ATTENTION["past-and-mask"],
    "cross": MULTI_HEAD["cross"],
    "rotary": ROTARY["partial"],
    "second-prompt": GROUPED["second-prompt"],
    "sinks": GROUPED["sinks"],
}


@pytest.mark.parametrize("case", COMPILED.values(), ids=COMPILED)
def test_compiled(case: Case) -> None:
    check(case, is_compiled=True)
