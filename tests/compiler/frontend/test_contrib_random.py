"""Random attributes and inputs of ONNX Runtime's most used operators, and models whose shapes only a call knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import prefuse
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import parser

from .contrib_oracle import Case, by_onnxruntime, check, rewritten

QUICK = settings(max_examples=25, deadline=None, derandomize=True)
Draw = Any  # of hypothesis: draws a value of a strategy


def drawn_by(random: np.random.Generator) -> Callable[..., np.ndarray]:
    """Arrays of the shapes asked for, of the standard normal distribution."""

    def floats(*shape: int) -> np.ndarray:
        return np.asarray(random.normal(size=shape), np.float32)

    return floats


def masks(draw: Draw, random: np.random.Generator, batch: int, queries: int, keys: int) -> np.ndarray | None:
    """A mask of one of the forms, which hides no row whole."""
    kind = draw(st.sampled_from(["none", "ends", "rows", "squares"]))
    if kind == "none":
        return None
    if kind == "ends":
        return random.integers(1, keys + 1, batch).astype(np.int32)
    mask = (random.random((batch, keys) if kind == "rows" else (batch, queries, keys)) > 0.4).astype(np.int32)
    mask[..., 0] = 1
    return mask


@st.composite
def attentions(draw: Draw) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 999)))
    batch, queries, heads, size = (draw(st.integers(1, limit)) for limit in (3, 4, 3, 4))
    past = draw(st.integers(0, 3))
    width = heads * size
    floats = drawn_by(random)
    inputs: list[np.ndarray | None] = [floats(batch, queries, 5), floats(5, 3 * width), floats(3 * width)]
    inputs.append(masks(draw, random, batch, queries, past + queries))
    inputs.append(floats(2, batch, heads, past, size) if past else None)
    if not past and draw(st.booleans()):  # ONNX Runtime's CPU takes one of both
        inputs.append(floats(draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), queries, past + queries))
    attributes = {"num_heads": heads, "unidirectional": draw(st.integers(0, 1))}
    if draw(st.booleans()):
        attributes["scale"] = draw(st.integers(1, 20)) / 10
    return Case("Attention", inputs, attributes, (1, 1) if past else (1,))


@st.composite
def cross_attentions(draw: Draw) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 999)))
    batch, queries, keys, heads, size, value_size = (draw(st.integers(1, limit)) for limit in (3, 4, 4, 3, 4, 4))
    floats = drawn_by(random)
    widths = (queries, heads * size), (keys, heads * size), (keys, heads * value_size)
    inputs: list[np.ndarray | None] = [floats(batch, *width) for width in widths]
    inputs.append(floats(heads * (2 * size + value_size)) if draw(st.booleans()) else None)
    inputs.append(masks(draw, random, batch, queries, keys))
    if draw(st.booleans()):
        inputs.append(floats(1, heads, queries, keys))
    is_causal = draw(st.booleans()) and queries in (1, keys)
    attributes = {"num_heads": heads, "unidirectional": int(is_causal)}
    return Case("MultiHeadAttention", inputs, attributes, (1, 1, 1) if draw(st.booleans()) else (1,))


@st.composite
def products(draw: Draw) -> Case:
    random = np.random.default_rng(draw(st.integers(0, 999)))
    batch, rows, inner, columns = (draw(st.integers(1, 4)) for _ in range(4))
    flags = {name: draw(st.integers(0, 1)) for name in ("transA", "transB", "transBatchA", "transBatchB")}
    shapes = []
    for name, (first, second) in (("A", (rows, inner)), ("B", (inner, columns))):
        first, second = (second, first) if flags[f"trans{name}"] else (first, second)
        shapes.append((first, batch, second) if flags[f"transBatch{name}"] else (batch, first, second))
    arrays = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    return Case("FusedMatMul", arrays, {**flags, "alpha": draw(st.sampled_from([1.0, 0.5, -2.0]))})


@st.composite
def grouped_attentions(draw: Draw) -> tuple[Case, int]:
    """GroupQueryAttention, and how many rows of its caches are valid."""
    random = np.random.default_rng(draw(st.integers(0, 999)))
    groups, share, size = draw(st.integers(1, 2)), draw(st.integers(1, 3)), 8
    past, more = draw(st.sampled_from([(0, 0), (3, 0), (4, 4)]))
    queries = draw(st.integers(1, 4))
    batch = 1 if past and queries > 1 else draw(st.integers(1, 2))
    floats = drawn_by(random)
    widths = groups * share * size, groups * size, groups * size
    cache = [floats(batch, groups, past + more, size) if past else None for _ in range(2)]
    apart = [floats(batch, queries, width) for width in widths]
    operands = [np.concatenate(apart, 2), None, None] if draw(st.booleans()) else apart
    total = past + queries
    inputs = [*operands, *cache, np.full(batch, total - 1, np.int32), np.array(total, np.int32)]
    chosen = draw(st.sets(st.sampled_from([("local_window_size", 2), ("softcap", 1.5), ("scale", 0.4)])))
    attributes = {"num_heads": groups * share, "kv_num_heads": groups, **dict(chosen)}
    if draw(st.booleans()):
        inputs += [None, None, None, None, floats(groups * share)]  # a sink for each head
    return Case("GroupQueryAttention", inputs, attributes, (1, 1, 1), (6,)), total


@QUICK
@given(attentions())
def test_attention(case: Case) -> None:
    check(case)


@QUICK
@given(cross_attentions())
def test_cross_attention(case: Case) -> None:
    check(case)


@QUICK
@given(products())
def test_products(case: Case) -> None:
    check(case)


@QUICK
@given(grouped_attentions())
def test_grouped_attention(example: tuple[Case, int]) -> None:
    case, valid = example
    expected, actual = by_onnxruntime(case), rewritten(case)
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-5)
    for got, wanted in zip(actual[1:], expected[1:], strict=True):
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got[:, :, :valid], wanted[:, :, :valid], atol=1e-6)


HEAD = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> main '
ATTENTION = (
    HEAD
    + """(float[B,S,8] x, int32[B,T] m, float[2,B,2,P,4] p, float[8,24] w, float[24] b) => (y, z) {
  y, z = com.microsoft.Attention<num_heads = 2, unidirectional = 1>(x, w, b, m, p) }"""
)
DECODER = (
    HEAD
    + """(float[B,S,64] q, float[B,S,32] k, float[B,S,32] v, float[B,2,P,16] pk, float[B,2,P,16] pv, int64[B,T] m, float[64,8] c,
         float[64,8] s) => (y, nk, nv) {
  one = Constant<value_ints = [1]>()
  counts = ReduceSum<keepdims = 0>(m, one)
  last = Sub(counts, one)
  ends = Cast<to = 6>(last)
  shape = Shape(m)
  axis = Constant<value_int = 1>()
  length = Gather(shape, axis)
  total = Cast<to = 6>(length)
  y, nk, nv = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = 1>(
      q, k, v, pk, pv, ends, total, c, s) }"""
)


def attention_feeds(batch: int, queries: int, past: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(batch)
    shapes = {"x": (batch, queries, 8), "p": (2, batch, 2, past, 4), "w": (8, 24), "b": (24,)}
    floats = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {**floats, "m": np.ones((batch, past + queries), np.int32)}


def decoder_feeds(batch: int, queries: int, past: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(batch)
    shapes = {"q": (batch, queries, 64), "k": (batch, queries, 32), "v": (batch, queries, 32), "c": (64, 8), "s": (64, 8)}
    shapes |= {"pk": (batch, 2, past, 16), "pv": (batch, 2, past, 16)}
    floats = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return {**floats, "m": np.ones((batch, past + queries), np.int64)}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (ATTENTION, [attention_feeds(2, 1, 5), attention_feeds(1, 3, 2)]),
        (DECODER, [decoder_feeds(2, 1, 5), decoder_feeds(1, 3, 0), decoder_feeds(1, 3, 4)]),
    ],
    ids=["attention", "decoder"],
)
def test_shapes_that_only_a_call_knows(text: str, calls: list[dict[str, np.ndarray]]) -> None:
    model = parser.parse_model(text)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    compiled = prefuse.compile(model, cache=False)
    for feeds in calls:
        result = compiled(**feeds)
        assert isinstance(result, tuple)
        for got, wanted in zip(result, session.run(None, feeds), strict=True):
            np.testing.assert_allclose(got, wanted, atol=1e-5)
