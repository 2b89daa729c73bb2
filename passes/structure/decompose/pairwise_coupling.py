"""Probabilities of classes from those of their pairs: Wu, Lin and Weng, JMLR 5 (2004), their second method, as LIBSVM runs it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .body import Body, ints
from .formula import Number

MAX_CLASSES = 32  # each is a dozen operators in every sweep
_SWEEPS = 6  # LIBSVM stops after 100, but at most 5 were needed for 30,000 random cases of 2 to 20 classes
_TOLERANCE = 0.005  # over the classes


def class_probabilities(body: Body, of_first: ir.Value, pairs: Sequence[tuple[int, int]]) -> ir.Value:
    """Probabilities [rows, classes] from those that the first class of each pair wins, [rows, pairs], between 0 and 1.

    They minimize p Q p under sum p = 1, where Q[i, j] is -r[j, i] r[i, j] for the probability r[i, j] that i wins against j, and
    Q[i, i] the sum of r[j, i]^2. From equal ones on, one is improved after the other, in sweeps that leave a row as it is once
    all elements of Q p are p Q p up to a tolerance, which is so wide that results depend on this way to them.
    """
    classes = pairs[-1][1] + 1
    quadratic = _quadratic_form(body, of_first, pairs)
    units = body.op("Expand", np.eye(classes, dtype=np.float32), body.op("Shape", quadratic))
    moves = body.op("Concat", units, quadratic, axis=2)
    rows = [body.op("Gather", moves, np.array(place), axis=1) for place in range(classes)]
    state = body.op("ReduceMean", moves, ints([1]), keepdims=0)
    level = Number(body, body.op("ReduceMean", _part(body, state, classes, classes), ints([1]), keepdims=1), "float32")
    for _ in range(_SWEEPS):
        state, level = _swept(body, state, level, rows)
    return _part(body, state, 0, classes)


def _swept(body: Body, state: ir.Value, level: Number, rows: Sequence[ir.Value]) -> tuple[ir.Value, Number]:
    """p and Q p side by side, [rows, 2 classes], and p Q p, [rows, 1], after a sweep.

    `rows` are those of the unit matrix and Q side by side. What is added to one probability is taken from all by division.
    """
    classes = len(rows)
    p, now = Number(body, state, "float32"), level
    for place, row in enumerate(rows):
        slope, curvature = (Number(body, _part(body, value, classes + place, 1), "float32") for value in (p.value, row))
        step = (now - slope) / curvature
        total = step + 1
        p, now = (p + step * Number(body, row, "float32")) / total, (now + step * (now + slope)) / (total * total)
    error = body.op("Abs", body.op("Sub", _part(body, state, classes, classes), level.value))
    worst = Number(body, body.op("ReduceMax", error, ints([1]), keepdims=1), "float32")
    is_done = worst.like(_TOLERANCE / classes) > worst
    return body.op("Where", is_done.value, state, p.value), is_done.where(level, now)


def _part(body: Body, value: ir.Value, start: int, count: int) -> ir.Value:
    """Columns of a matrix."""
    return body.op("Slice", value, ints([start]), ints([start + count]), ints([1]))


def _quadratic_form(body: Body, of_first: ir.Value, pairs: Sequence[tuple[int, int]]) -> ir.Value:
    """Q, [rows, classes, classes]."""
    classes = pairs[-1][1] + 1
    places = np.full((classes, classes), 2 * len(pairs))
    for number, (first, second) in enumerate(pairs):
        places[first, second], places[second, first] = number, number + len(pairs)
    zero, one = np.array(0, np.float32), np.array(1, np.float32)
    both = body.op("Concat", of_first, body.op("Sub", one, of_first), axis=1)
    padded = body.op("Pad", both, ints([0, 0, 0, 1]), zero)  # r[i, i] is zero
    wins, losses = (body.op("Gather", padded, table, axis=1) for table in (places, np.ascontiguousarray(places.T)))
    diagonal = body.op("Mul", body.op("ReduceSumSquare", losses, ints([2]), keepdims=1), np.eye(classes, dtype=np.float32))
    return body.op("Sub", diagonal, body.op("Mul", wins, losses))
