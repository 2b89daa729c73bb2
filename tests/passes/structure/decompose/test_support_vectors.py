"""SVMClassifier and SVMRegressor of ai.onnx.ml, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from .expanding import compiled, expanded, operators
from .ml_oracle import agrees, ml_model

_X = np.random.default_rng(0).integers(-3, 4, (11, 5)).astype(np.float32)
_KERNELS = ["LINEAR", "POLY", "RBF", "SIGMOID"]


def _numbers(*shape: int, seed: int = 6) -> list[float]:
    numbers: list[float] = np.random.default_rng(seed).standard_normal(shape).ravel().tolist()
    return numbers


def _classifier(classes: int, **changes: Any) -> dict[str, Any]:
    """Attributes of a machine with other numbers of support vectors for each class."""
    vectors, pairs = [2 + number % 3 for number in range(classes)], classes * (classes - 1) // 2
    attributes = {
        "classlabels_ints": [7 - 2 * number for number in range(classes)],
        "vectors_per_class": vectors,
        "support_vectors": _numbers(sum(vectors), _X.shape[1]),
        "coefficients": _numbers(classes - 1, sum(vectors), seed=7),
        "rho": _numbers(pairs, seed=8),
        "kernel_params": [0.3, 0.5, 3.0],
        "kernel_type": "RBF",
    }
    return attributes | changes


def _with_probabilities(classes: int, slope: float = 2.0, **changes: Any) -> dict[str, Any]:
    pairs = classes * (classes - 1) // 2
    slopes = (-slope - np.abs(_numbers(pairs, seed=9))).tolist()
    return _classifier(classes, prob_a=slopes, prob_b=_numbers(pairs, seed=10), **changes)


@pytest.mark.parametrize("kernel", _KERNELS)
@pytest.mark.parametrize("one_class", [0, 1])
def test_regressor(kernel: str, one_class: int) -> None:
    attributes: dict[str, Any] = {
        "support_vectors": _numbers(15),
        "coefficients": [0.5, -0.25, 1.0],
        "rho": [0.1],
        "kernel_params": [0.3, 0.5, 3.0],
        "n_supports": 3,
    }
    agrees("SVMRegressor", {"x": _X}, kernel_type=kernel, one_class=one_class, **attributes)


def test_regressor_without_support_vectors() -> None:
    agrees("SVMRegressor", {"x": _X}, coefficients=_numbers(5), rho=[0.25], kernel_params=[0.0] * 3)


@pytest.mark.parametrize("kernel", _KERNELS)
@pytest.mark.parametrize("classes", [2, 3, 5])
def test_votes(kernel: str, classes: int) -> None:
    agrees("SVMClassifier", {"x": _X}, 2, **_classifier(classes, kernel_type=kernel))


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("transform", ["LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
def test_transformed_sums(classes: int, transform: str) -> None:
    agrees("SVMClassifier", {"x": _X}, 2, **_classifier(classes, post_transform=transform))


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(("classes", "slope"), [(2, 0.0), (3, 2.0), (4, 30.0), (6, 0.5)])
def test_probabilities(classes: int, slope: float, is_compiled: bool) -> None:
    """Of clear votes and of others; classes of almost equal chances are left at those from which the search starts."""
    x = np.random.default_rng(3).standard_normal((64, _X.shape[1])).astype(np.float32)
    agrees("SVMClassifier", {"x": x}, 2, is_compiled=is_compiled, **_with_probabilities(classes, slope))


def test_transformed_probabilities() -> None:
    agrees("SVMClassifier", {"x": _X}, 2, **_with_probabilities(3, post_transform="SOFTMAX"))


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize("has_probabilities", [False, True])
def test_classes_without_support_vectors(classes: int, is_positive: bool, has_probabilities: bool) -> None:
    """ONNX Runtime lets the second of two classes win where the greatest score is beyond a threshold, whosever it is."""
    weights = np.array(_numbers(classes, _X.shape[1]))
    attributes: dict[str, Any] = {
        "classlabels_ints": [5, 3, 9][:classes],
        "coefficients": (np.abs(weights) if is_positive else weights).ravel().tolist(),
        "rho": [0.25],
        "kernel_params": [0.0] * 3,
    }
    if has_probabilities:
        attributes |= {"prob_a": [1.0], "prob_b": [0.0]}
    agrees("SVMClassifier", {"x": _X}, 2, **attributes)


@pytest.mark.parametrize("kind", [np.float64, np.int64])
def test_other_types(kind: type[np.generic]) -> None:
    agrees("SVMClassifier", {"x": _X.astype(kind)}, 2, **_with_probabilities(3))


def test_scores_have_a_shape_for_what_reads_them() -> None:
    """As skl2onnx writes an SVC of several classes: ONNX infers nothing of the scores, and features by index must know them."""
    model = ml_model("SVMClassifier", {"x": _X}, 2, **_classifier(4))
    model.graph.node.append(onnx.helper.make_node("Neg", ["y1"], ["negative"]))
    model.graph.node.append(onnx.helper.make_node("ArrayFeatureExtractor", ["negative", "place"], ["z"], domain="ai.onnx.ml"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(3), "place"))
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info("z"))
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": _X})
    for found, wanted in zip(compiled(model, _X), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"post_transform": "PROBIT"},
        {"rho": [0.1]},
        {"coefficients": [1.0]},
        {"support_vectors": [1.0]},
        {"prob_b": None},
    ],
)
def test_what_does_not_fit_is_left(changes: dict[str, Any]) -> None:
    model = ml_model("SVMClassifier", {"x": _X}, 2, **{**_with_probabilities(3), **changes})
    assert "SVMClassifier" in operators(expanded(model))
