"""Scales moved from activations into weights, so that all channels of the activations fill the one range that they share.

x W = (x / s) (s W) for any positive s of each channel k. SmoothQuant (Xiao and others, ICML 2023) takes
s = max|x|^a / max|w|^(1 - a); here a is that of the least error which rounding makes, as it is predicted from the moments of x:

    activations: step^2 / 12 * sum over k, n of (s_k w_kn)^2, the step being that of the common range of all x_k / s_k
    weights:     sum over n of t_n^2 / 12 * sum over k of E[x_k^2] / s_k^2, the step t_n being that of column n of s W
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ..ir.constants import add_constant, constant_array
from ..ir.facts import infer_node
from ..ir.kinds import Kind, kind_of
from ..ir.names import fresh_name
from ..ir.rewriter import copy_source, drop_unused_constants, graph_of, operation
from .formats import LEVELS
from .histogram import ChannelMoments
from .units import Unit

_EXPONENTS = tuple(number / 20 for number in range(1, 20))
_LEAST_GAIN = 0.8  # predicted error with the scales moved, in units of that without: else they stay
_NORMALIZATIONS = ("GroupNormalization", "LayerNormalization", "RMSNormalization")
_SCALED_OPERANDS = {"LayerNormalization": (1, 2), "RMSNormalization": (1,)}  # which a factor of the result's columns goes into
_LARGEST_WEIGHT = 127
_MOST_COLUMNS = 2048  # that an error is predicted from: twice as many at most


def smoothable(units: Sequence[Unit]) -> dict[ir.Value, list[Unit]]:
    """The matrix products whose activations a pointwise operator or a normalization makes, by these activations.

    A factor for each channel is computed where they are, for nothing.
    """
    found: dict[ir.Value, list[Unit]] = {}
    for unit in units:
        producer = unit.activations.producer()
        if unit.is_convolution or producer is None or not (_is_pointwise(producer) or producer.op_type in _NORMALIZATIONS):
            continue
        found.setdefault(unit.activations, []).append(unit)
    return found


def smooth(model: ir.Model, groups: Mapping[ir.Value, Sequence[Unit]], moments: Mapping[str, ChannelMoments]) -> dict[str, float]:
    """Move scales of the activations `groups` into the weights of the units that read them, where that is predicted to help.

    No result changes but by float32 rounding. Returns the exponents `a`, by the names of the activations.
    """
    chosen = {}
    for value, units in groups.items():
        matrices = [_rows_of_k(unit) for unit in units]
        exponent, scales = best_scales(moments[str(value.name)], matrices)
        if scales is not None:
            _move(model, value, units, scales)
            chosen[str(value.name)] = exponent
    return chosen


def best_scales(moments: ChannelMoments, matrices: Sequence[np.ndarray]) -> tuple[float, np.ndarray | None]:
    """The exponent and the scales [k] of least predicted error for products of rows by matrices [k, n]; None: leave them."""
    joined = _some_columns(matrices)
    x, w = np.maximum(-moments.low, moments.high), joined.max(1, initial=0.0)
    is_used = (x > 0) & (w > 0)
    if not is_used.any():
        return 0.0, None
    row_squares = np.einsum("kn,kn->k", joined, joined, dtype=np.float64)
    as_it_is = _predicted_error(moments, joined, row_squares, np.ones(len(x)))
    candidates = {}
    for exponent in _EXPONENTS:
        scales = np.ones(len(x))
        logs = exponent * np.log(x[is_used]) - (1 - exponent) * np.log(w[is_used])
        scales[is_used] = np.exp(np.clip(logs - logs.mean(), -30.0, 30.0))
        candidates[exponent] = _predicted_error(moments, joined, row_squares, scales), scales
    best = min(candidates, key=lambda one: candidates[one][0])
    error, scales = candidates[best]
    return (best, scales) if error < _LEAST_GAIN * as_it_is else (0.0, None)


def _some_columns(matrices: Sequence[np.ndarray]) -> np.ndarray:
    """The sizes of the weights [k, columns]: of evenly spread columns where there are very many."""
    count = sum(matrix.shape[1] for matrix in matrices)
    stride = max(1, count // _MOST_COLUMNS)
    return np.asarray(np.abs(np.concatenate([matrix[:, ::stride] for matrix in matrices], axis=1)))


def _predicted_error(moments: ChannelMoments, w: np.ndarray, row_squares: np.ndarray, scales: np.ndarray) -> float:
    """The mean squared error of a row of x W, summed over the columns of sizes `w`, as at the top of the page.

    `row_squares` [k] are the sums of their squares.
    """
    step = (max((moments.high / scales).max(), 0.0) - min((moments.low / scales).min(), 0.0)) / LEVELS
    column_steps = (w * scales[:, None].astype(w.dtype)).max(0).astype(np.float64) / _LARGEST_WEIGHT
    of_activations = step**2 * np.sum(row_squares * scales**2)
    of_weights = np.sum(column_steps**2) * np.sum(moments.mean_square / scales**2)
    return float(of_activations + of_weights) / 12


def _move(model: ir.Model, value: ir.Value, units: Sequence[Unit], scales: np.ndarray) -> None:
    """Divide a value by the scales of its columns where `units` read it, and multiply their weights by them."""
    inverse = (1 / scales).astype(np.float32)
    if not _divide_normalization(model, value, units, inverse):
        producer = value.producer()
        assert producer is not None
        factor = add_constant(model, inverse, f"{value.name}_smoothing")
        divided = operation("Mul", [value, factor])
        copy_source((producer,), divided)
        divided.name = divided.outputs[0].name = fresh_name(model, f"{value.name}_smooth")
        graph_of(producer).insert_after(producer, divided)
        infer_node(divided, model)
        for unit in units:
            unit.node.replace_input_with(0, divided.outputs[0])
    for unit in units:
        old = unit.node.inputs[1]
        columns = scales[:, None] if unit.channel_axis else scales
        new = add_constant(model, (unit.weights * columns).astype(np.float32), f"{unit.name}_smooth_weights")
        unit.node.replace_input_with(1, new)
        drop_unused_constants(model, [old])


def _divide_normalization(model: ir.Model, value: ir.Value, units: Sequence[Unit], inverse: np.ndarray) -> bool:
    """Put a factor into the gain and bias of the normalization that makes a value; whether it could be: `units` alone read it."""
    producer = value.producer()
    readers = {unit.node for unit in units}
    if producer is None or producer.op_type not in _SCALED_OPERANDS or value.is_graph_output():
        return False
    positions = [place for place in _SCALED_OPERANDS[producer.op_type] if place < len(producer.inputs) and producer.inputs[place]]
    arrays = [constant_array(producer.inputs[place]) for place in positions]
    if any(node not in readers for node in value.consumers()) or any(
        array is None or array.shape != inverse.shape for array in arrays
    ):
        return False
    for place, array in zip(positions, arrays, strict=True):
        old = producer.inputs[place]
        assert array is not None
        assert old is not None
        producer.replace_input_with(place, add_constant(model, (array * inverse).astype(np.float32), f"{old.name}_smooth"))
        drop_unused_constants(model, [old])
    return True


def _rows_of_k(unit: Unit) -> np.ndarray:
    """The weights as a matrix [k, columns]."""
    return unit.weights if unit.channel_axis else unit.weights.T


def _is_pointwise(node: ir.Node) -> bool:
    return kind_of(node) <= Kind.BROADCAST
