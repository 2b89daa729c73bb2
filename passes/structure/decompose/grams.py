"""TfIdfVectorizer of integers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx_ir as ir

from .body import Body, ints
from .common import dims

_MAX_COMPARISONS = 2**28  # of one length of n-grams: windows of all rows times n-grams


def tfidf_vectorizer(node: ir.Node) -> ir.Function | None:
    """How often each n-gram of the pool is found, with up to `max_skip_count` elements between any two of its own.

    Weights belong to the n-grams of the pool; n-grams of one element have no skips. None for strings.
    """
    shape, places = dims(node.inputs[0]), np.array(node.attributes.get_ints("ngram_indexes", ()), np.int64)
    pool = _pool(node)
    if pool is None or len(shape) not in (1, 2) or sum(map(len, pool)) != len(places) or not len(places):
        return None
    body, (rows, length) = Body(node), (shape if len(shape) == 2 else (1, *shape))
    x = body.reshape(body.cast(body.input(0), "int64"), [rows, length])
    skips = node.attributes.get_int("max_skip_count", 0)
    first, last = (node.attributes.get_int(f"{which}_gram_length", 1) for which in ("min", "max"))
    counts, columns, start = [], [], 0
    for size, grams in enumerate(pool, 1):
        if first <= size <= last and len(grams):
            if rows * length * len(grams) > _MAX_COMPARISONS:
                return None
            found = _counted(body, x, (rows, length), grams, skips if size > 1 else 0)
            counts.append(_weighted(body, found, node, slice(start, start + len(grams))))
            columns.append(_last_of_equal(grams, places[start : start + len(grams)]))
        start += len(grams)
    result = _placed(body, counts, columns, (rows, int(places.max()) + 1))
    return body.function(result if len(shape) == 2 else body.reshape(result, [int(places.max()) + 1]))


def _pool(node: ir.Node) -> list[np.ndarray] | None:
    """The n-grams of each length, from 1 on, as the rows of a matrix."""
    pool = np.array(node.attributes.get_ints("pool_int64s", ()), np.int64)
    starts = [*node.attributes.get_ints("ngram_counts", ()), len(pool)]
    sizes = [end - start for start, end in pairwise(starts)]
    if not len(pool) or any(extent < 0 or extent % size for size, extent in enumerate(sizes, 1)):
        return None
    return [
        pool[start : start + extent].reshape(-1, size) for size, (start, extent) in enumerate(zip(starts, sizes, strict=False), 1)
    ]


def _counted(body: Body, x: ir.Value, shape: tuple[int, int], grams: np.ndarray, skips: int) -> ir.Value:
    """How often each n-gram is in each row of x, [rows, n-grams]."""
    total = body.constant(np.zeros((shape[0], len(grams)), np.float32))
    for distance in range(1, skips + 2):
        windows = shape[1] - distance * (grams.shape[1] - 1)
        if windows <= 0:
            break
        parts = []
        for at in range(grams.shape[1]):
            element = body.op("Slice", x, ints([at * distance]), ints([at * distance + windows]), ints([1]))
            parts.append(body.op("Equal", body.op("Unsqueeze", element, ints([2])), np.ascontiguousarray(grams[:, at])))
        found = parts[0]
        for part in parts[1:]:
            found = body.op("And", found, part)
        total = body.op("Add", total, body.op("ReduceSum", body.cast(found, "float32"), ints([1]), keepdims=0))
    return total


def _last_of_equal(grams: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The coordinates of n-grams; -1 where the same n-gram comes again, which is the one that counts."""
    later: set[tuple[int, ...]] = set()
    kept = places.copy()
    for at in reversed(range(len(grams))):
        gram = tuple(grams[at].tolist())
        kept[at] = -1 if gram in later else places[at]
        later.add(gram)
    return kept


def _placed(body: Body, counts: list[ir.Value], columns: list[np.ndarray], shape: tuple[int, int]) -> ir.Value:
    """Counts added up at their coordinates: gathered where each has one count at most, else by a product with 0 and 1."""
    nothing = body.constant(np.zeros((shape[0], 1), np.float32))
    every = body.op("Concat", *counts, nothing, axis=1)
    where = np.concatenate([*columns, [-1]]).astype(np.int64)
    used = where[where >= 0]
    if len(np.unique(used)) < len(used):
        return body.op("MatMul", every, (where[:, None] == np.arange(shape[1])).astype(np.float32))
    source = np.full(shape[1], len(where) - 1, np.int64)
    source[used] = np.flatnonzero(where >= 0)
    return body.op("Gather", every, source, axis=1)


def _weighted(body: Body, counts: ir.Value, node: ir.Node, grams: slice) -> ir.Value:
    """Counts, or whether there are any, times the weights of these n-grams."""
    mode, weights = node.attributes.get_string("mode"), np.array(node.attributes.get_floats("weights", ()), np.float32)
    if mode == "IDF":
        counts = body.cast(body.op("Greater", counts, np.array(0, np.float32)), "float32")
    return counts if mode == "TF" or not weights.size else body.op("Mul", counts, weights[grams])
