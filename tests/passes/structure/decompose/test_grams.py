"""TfIdfVectorizer against ONNX Runtime, and against onnx.reference where n-grams share a coordinate or come twice."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

from .expanding import evaluate, expanded, one_node, operators

_POOL: dict[str, Any] = {
    "pool_int64s": [2, 3, 5, 2, 3, 3, 2, 5, 5, 2, 3, 5],
    "ngram_counts": [0, 3, 9],
    "ngram_indexes": [0, 1, 6, 3, 4, 5, 2],
}
_WEIGHTS = [0.5, 1.5, 2.0, 3.0, 0.25, 1.0, 0.75]


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize(("first", "last", "skips"), [(1, 1, 0), (1, 3, 0), (2, 2, 3), (1, 3, 2), (3, 3, 20)])
@pytest.mark.parametrize("shape", [(9,), (3, 9), (2, 1)])
def test_counts(mode: str, first: int, last: int, skips: int, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).choice([2, 3, 5, 7], shape)
    lengths: dict[str, Any] = {"min_gram_length": first, "max_gram_length": last, "max_skip_count": skips}
    model = one_node("TfIdfVectorizer", {"x": x}, opset=21, mode=mode, weights=_WEIGHTS, **lengths, **_POOL)
    assert "TfIdfVectorizer" not in operators(expanded(model))
    (expected,) = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    (found,) = evaluate(expanded(model), {"x": x})
    np.testing.assert_allclose(found, expected)


def test_shared_coordinates_and_repeated_grams() -> None:
    x = np.array([[2, 3, 2, 3, 5]], np.int32)
    attributes: dict[str, Any] = {"min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 0, "mode": "TF"}
    attributes |= {"pool_int64s": [2, 3, 2, 2, 3], "ngram_counts": [0, 3], "ngram_indexes": [0, 1, 2, 1]}
    model = one_node("TfIdfVectorizer", {"x": x}, **attributes)
    (found,) = evaluate(expanded(model), {"x": x})
    np.testing.assert_array_equal(found, evaluate(model, {"x": x})[0])
    np.testing.assert_array_equal(found, [[0, 4, 2]])
