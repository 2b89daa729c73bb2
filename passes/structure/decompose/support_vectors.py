"""SVMClassifier and SVMRegressor of ai.onnx.ml, as in ONNX Runtime where their specification says too little."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod

import numpy as np
import onnx_ir as ir

from .body import Body, ints
from .common import MAX_COMPARISONS, dims
from .pairwise_coupling import MAX_CLASSES, class_probabilities
from .scores import labelled, transformed

_LEAST, _GREATEST = np.array(1e-7, np.float32), np.array(1 - 1e-7, np.float32)  # probability that the first of two classes wins
_ZERO, _HALF, _ONE = (np.array(number, np.float32) for number in (0, 0.5, 1))


def svm_regressor(node: ir.Node) -> ir.Function | None:
    """The kernel of x and each support vector, times the coefficients, plus rho; its sign (1 or -1) for one class.

    Kernels: LINEAR x s; POLY (gamma x s + coef0)^degree; RBF e^(-gamma |x - s|^2); SIGMOID tanh(gamma x s + coef0). Without
    support vectors the coefficients are weights of x.
    """
    body, count, rho = Body(node), node.attributes.get_int("n_supports", 0), _floats(node, "rho")
    coefficients = _floats(node, "coefficients")
    if rho.size != 1 or node.attributes.get_string("post_transform", "NONE") != "NONE":
        return None
    similar = _kernel(body, node, count) if count else _rows(body, node)
    if similar is None or coefficients.size != (count or dims(node.inputs[0])[-1]):
        return None
    result = body.op("Add", body.op("MatMul", similar, coefficients[:, None]), rho)
    if node.attributes.get_int("one_class", 0):
        result = body.op("Where", body.op("Greater", result, _ZERO), _ONE, np.array(-1, np.float32))
    return body.function(result)


def svm_classifier(node: ir.Node) -> ir.Function | None:
    """The label that most pairs of classes vote for, the first of several, and scores. Labels are integers.

    Of two classes, the first gets the vote where the kernels of x and their support vectors, times the coefficients, plus rho
    are positive. The scores are these sums, [rows, pairs], or with `prob_a` and `prob_b` probabilities, [rows, classes].
    """
    labels, transform = node.attributes.get_ints("classlabels_ints", ()), node.attributes.get_string("post_transform", "NONE")
    if not 2 <= len(labels) <= MAX_CLASSES or transform == "PROBIT":
        return None
    if not sum(node.attributes.get_ints("vectors_per_class", ())):
        return _linear_classifier(node, labels, transform)
    body, pairs = Body(node), tuple(combinations(range(len(labels)), 2))
    sums = _sums_of_pairs(body, node, pairs)
    slopes, offsets = _floats(node, "prob_a"), _floats(node, "prob_b")
    if sums is None or slopes.size != offsets.size or slopes.size not in (0, len(pairs)):
        return None
    if slopes.size:
        logits = body.op("Sub", body.op("Mul", sums, -slopes), offsets)  # Platt's: what is positive counts for the first class
        probabilities = body.op("Clip", body.op("Sigmoid", logits), _LEAST, _GREATEST)
        scores = transformed(body, class_probabilities(body, probabilities, pairs), transform)
    else:
        scores = transformed(body, sums, transform) if len(pairs) > 1 else _two_scores(body, sums, transform)
    return None if scores is None else body.function(labelled(body, _most_voted(body, sums, pairs), labels), scores)


def _linear_classifier(node: ir.Node, labels: Sequence[int], transform: str) -> ir.Function | None:
    """A score for each class, x W^T + rho, the greatest of which wins; but of two classes the second, from a threshold on.

    As in ONNX Runtime, the threshold is 0.5 where no coefficient is negative, else 0, unless there are `prob_a` and `prob_b`.
    """
    body, coefficients, rho = Body(node), _floats(node, "coefficients"), _floats(node, "rho")
    x = _rows(body, node)
    if x is None or not rho.size or coefficients.size != len(labels) * dims(node.inputs[0])[-1]:
        return None
    weights = np.ascontiguousarray(coefficients.reshape(len(labels), -1).T)
    scores = body.op("Add", body.op("MatMul", x, weights), rho[:1])
    chosen = body.op("ArgMax", scores, axis=1, keepdims=0)
    if len(labels) == 2 and not _floats(node, "prob_a").size:
        greatest = body.op("ReduceMax", scores, ints([1]), keepdims=0)
        is_positive = bool((coefficients >= 0).all())
        beyond = body.op("GreaterOrEqual", greatest, _HALF) if is_positive else body.op("Greater", greatest, _ZERO)
        chosen = body.op("Where", beyond, np.array(1), chosen)
    results = transformed(body, scores, transform)
    return None if results is None else body.function(labelled(body, chosen, labels), results)


def _sums_of_pairs(body: Body, node: ir.Node, pairs: Sequence[tuple[int, int]]) -> ir.Value | None:
    """What decides between the classes of each pair, [rows, pairs]; None where the sizes do not fit.

    A support vector has a coefficient for each class but its own, in their order.
    """
    counts = np.array(node.attributes.get_ints("vectors_per_class", ()))
    coefficients, rho = _floats(node, "coefficients"), _floats(node, "rho")
    classes, count = pairs[-1][1] + 1, int(counts.sum())
    if counts.size != classes or coefficients.size != (classes - 1) * count or rho.size != len(pairs):
        return None
    of_others = coefficients.reshape(classes - 1, count)
    ends = counts.cumsum()
    weights = np.zeros((count, len(pairs)), np.float32)
    for number, (first, second) in enumerate(pairs):
        for own, other in ((first, second - 1), (second, first)):
            vectors = slice(ends[own] - counts[own], ends[own])
            weights[vectors, number] = of_others[other, vectors]
    similar = _kernel(body, node, count)
    return None if similar is None else body.op("Add", body.op("MatMul", similar, weights), rho)


def _two_scores(body: Body, score: ir.Value, transform: str) -> ir.Value:
    """The one score s of two classes as -s and s, transformed; by a softmax, ONNX Runtime gives 1 - s and s."""
    if transform in ("SOFTMAX", "SOFTMAX_ZERO"):
        return body.op("Concat", body.op("Sub", _ONE, score), score, axis=1)
    both = body.op("Concat", body.op("Neg", score), score, axis=1)
    return both if transform == "NONE" else body.op("Sigmoid", both)


def _most_voted(body: Body, sums: ir.Value, pairs: Sequence[tuple[int, int]]) -> ir.Value:
    """The number of the class that most pairs vote for, [rows]."""
    classes = np.arange(pairs[-1][1] + 1)
    first, second = (np.array([pair[place] for pair in pairs])[:, None] == classes for place in (0, 1))
    is_first = body.op("Unsqueeze", body.op("Greater", sums, _ZERO), ints([2]))
    votes = body.op("ReduceSum", body.cast(body.op("Where", is_first, first, second), "float32"), ints([1]), keepdims=0)
    return body.op("ArgMax", votes, axis=1, keepdims=0)


def _kernel(body: Body, node: ir.Node, count: int) -> ir.Value | None:
    """The kernel of each row of x and each of `count` support vectors, [rows, vectors]; None where the sizes do not fit."""
    x, vectors, features = _rows(body, node), _floats(node, "support_vectors"), dims(node.inputs[0])[-1]
    if x is None or vectors.size != count * features:
        return None
    vectors = vectors.reshape(count, features)
    kind = node.attributes.get_string("kernel_type", "LINEAR")
    gamma, offset, degree = np.array([*node.attributes.get_floats("kernel_params", ()), 0, 0, 0][:3], np.float32)[:, None]
    if kind == "RBF":
        if prod(dims(node.inputs[0])) * count > MAX_COMPARISONS:
            return None
        apart = body.op("Sub", body.op("Unsqueeze", x, ints([1])), vectors)
        return body.op("Exp", body.op("Mul", body.op("ReduceSumSquare", apart, ints([2]), keepdims=0), -gamma))
    product = body.op("MatMul", x, np.ascontiguousarray(vectors.T))
    if kind == "LINEAR":
        return product
    affine = body.op("Add", body.op("Mul", product, gamma), offset)
    return body.op("Pow", affine, degree) if kind == "POLY" else body.op("Tanh", affine) if kind == "SIGMOID" else None


def _rows(body: Body, node: ir.Node) -> ir.Value | None:
    """x as a matrix in float32, a vector as one row; None for more dimensions."""
    shape = dims(node.inputs[0])
    if len(shape) not in (1, 2):
        return None
    return body.reshape(body.cast(body.input(0), "float32"), [prod(shape[:-1]), shape[-1]])


def _floats(node: ir.Node, name: str) -> np.ndarray:
    return np.array(node.attributes.get_floats(name, ()), np.float32)
