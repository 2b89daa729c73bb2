"""What ai.onnx.ml's classifiers and regressors do to their scores, and how they name the classes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .body import Body, ints

TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
_ZERO = 1e-7  # scores as small as this count as zero in SOFTMAX_ZERO, as they do in ONNX Runtime


def transformed(body: Body, scores: ir.Value, transform: str) -> ir.Value | None:
    """Scores [rows, classes] after a `post_transform`. None for PROBIT: there is no operator for the inverse of erf."""
    if transform == "NONE":
        return scores
    if transform == "LOGISTIC":
        return body.op("Sigmoid", scores)
    if transform == "SOFTMAX":
        return body.op("Softmax", scores, axis=1)
    return _softmax_zero(body, scores) if transform == "SOFTMAX_ZERO" else None


def _softmax_zero(body: Body, scores: ir.Value) -> ir.Value:
    """A softmax over the scores that are not zero; the others stay zero."""
    lifted = body.op("Sub", scores, body.op("ReduceMax", scores, ints([1]), keepdims=1))
    limit = body.op("CastLike", np.array(_ZERO), scores)
    counts = body.op("CastLike", body.op("Greater", body.op("Abs", scores), limit), scores)
    powers = body.op("Mul", body.op("Exp", lifted), counts)
    return body.op("Div", powers, body.op("ReduceSum", powers, ints([1]), keepdims=1))


def labelled(body: Body, numbers: ir.Value, labels: Sequence[int]) -> ir.Value:
    """The labels of classes given by number; nothing to look up where they are the numbers."""
    return numbers if list(labels) == list(range(len(labels))) else body.op("Gather", ints(labels), numbers)
