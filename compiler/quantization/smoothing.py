"""Scales moved from activations into weights, so that all channels of the activations fill the one range that they share.

x W = (x / s) (s W) for any positive s of each channel k. SmoothQuant (Xiao and others, ICML 2023) takes
s = max|x|^a / max|w|^(1 - a); here a is that of the least error which rounding makes, as it is predicted from the moments of x:

    activations: step^2 / 12 * sum over k, n of (s_k w_kn)^2, the step being that of the common range of all x_k / s_k
    weights:     sum over n of t_n^2 / 12 * sum over k of E[x_k^2] / s_k^2, the step t_n being that of column n of s W

A convolution is such a product, with several columns, its taps, of one step for each output channel. Where it is depthwise, each
channel of weights has a step of its own, which loses nothing by s: then s = max|x| (Nagel and others: Data-Free Quantization
Through Weight Equalization and Bias Correction, ICCV 2019, for the same of networks whose weights have one step).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ..ir.constants import add_constant, constant_array
from ..ir.facts import infer_node
from ..ir.kinds import Kind, kind_of
from ..ir.matching import is_constant, rank_of
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
_FINEST = 64  # times as fine as without: channels that were hardly seen may be larger on other inputs


def smoothable(units: Sequence[Unit]) -> dict[ir.Value, list[Unit]]:
    """The units whose activations a pointwise operator, a normalization or a convolution makes, by these activations.

    A factor for each channel is computed where they are, for nothing. Of images units of one kind are the only readers, as the
    image would be stored twice else; and they are no sums of images, one of which lies in 8 bits as the sum does (`flow.py`).
    """
    rows: dict[ir.Value, list[Unit]] = {}
    images: dict[ir.Value, list[Unit]] = {}
    for unit in units:
        producer = unit.activations.producer()
        if producer is None or not (_is_pointwise(producer) or producer.op_type in (*_NORMALIZATIONS, "Conv")):
            continue
        (images if unit.is_convolution else rows).setdefault(unit.activations, []).append(unit)
    return {**{value: some for value, some in images.items() if _has_factors(value, some)}, **rows}


def _has_factors(value: ir.Value, units: Sequence[Unit]) -> bool:
    """Whether an image that `units` read may have a factor for each channel, as `smoothable` says."""
    are_alike = all(unit.is_depthwise for unit in units) or all(unit.groups == 1 for unit in units)
    is_read_alone = not value.is_graph_output() and {unit.node for unit in units} == set(value.consumers())
    return are_alike and is_read_alone and not _is_sum(value)


def _is_sum(value: ir.Value) -> bool:
    """Whether pointwise operators of one operand that is no constant make a value of the sum of two such."""
    while (node := value.producer()) is not None and _is_pointwise(node):
        operands = [one for one in node.inputs if one is not None and not is_constant(one)]
        if len(operands) != 1:
            return node.op_type == "Add"
        value = operands[0]
    return False


def smooth(model: ir.Model, groups: Mapping[ir.Value, Sequence[Unit]], moments: Mapping[str, ChannelMoments]) -> dict[str, float]:
    """Move scales of the activations `groups` into the weights of the units that read them, where that is predicted to help.

    No result changes but by float32 rounding. Returns the exponents `a`, by the names of the activations.
    """
    chosen = {}
    for value, units in groups.items():
        matrices = [_rows_of_k(unit) for unit in units]
        choose = equal_ranges if units[0].is_depthwise else best_scales
        exponent, scales = choose(moments[str(value.name)], matrices)
        if scales is not None:
            _move(model, value, units, scales)
            chosen[str(value.name)] = exponent
    return chosen


def best_scales(moments: ChannelMoments, matrices: Sequence[np.ndarray]) -> tuple[float, np.ndarray | None]:
    """The exponent and the scales [k] of least predicted error for products of rows by weights [k, n] or [k, n, taps]; None:
    leave them."""
    joined = _some_columns(matrices)
    x, w = np.maximum(-moments.low, moments.high), joined.sizes.max(1, initial=0.0)
    is_used = (x > 0) & (w > 0)
    if not is_used.any():
        return 0.0, None
    row_squares = np.einsum("kn,kn->k", joined.sizes, joined.sizes, dtype=np.float64)
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


def equal_ranges(moments: ChannelMoments, windows: Sequence[np.ndarray]) -> tuple[float, np.ndarray | None]:
    """The same for depthwise convolutions by windows [k, n, taps]: scales that give all channels one range."""
    x = np.maximum(-moments.low, moments.high)
    if not (x > 0).any():
        return 0.0, None
    scales = np.maximum(x, x.max() / _FINEST)
    scales /= np.exp(np.log(scales).mean())
    squares = sum(np.einsum("knt,knt->k", one, one, dtype=np.float64) for one in windows)
    steps = [np.abs(one).max(2, initial=0.0).astype(np.float64) / _LARGEST_WEIGHT for one in windows]
    of_weights = sum(one.shape[2] * ((step**2).sum(1) @ moments.mean_square) for one, step in zip(windows, steps, strict=True))
    before, after = (
        _step(moments, some) ** 2 * float(np.sum(squares * some**2)) + float(of_weights) for some in (np.ones(len(x)), scales)
    )
    return (1.0, scales) if after < _LEAST_GAIN * before else (0.0, None)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The sizes of weights [k, columns]: those from `starts[n]` up to the next start have the step of output channel n."""

    sizes: np.ndarray
    starts: np.ndarray

    def squared_steps(self, scales: np.ndarray) -> float:
        """The sum over columns of their squared steps, with the rows scaled."""
        largest = np.maximum.reduceat((self.sizes * scales[:, None].astype(self.sizes.dtype)).max(0), self.starts)
        counts = np.diff(self.starts, append=self.sizes.shape[1])
        return float(np.sum(counts * (largest.astype(np.float64) / _LARGEST_WEIGHT) ** 2))


def _some_columns(matrices: Sequence[np.ndarray]) -> _Columns:
    """The sizes of weights [k, n] or [k, n, taps]: of evenly spread output channels where there are very many."""
    windows = [matrix if matrix.ndim > 2 else matrix[..., None] for matrix in matrices]
    stride = max(1, sum(one.shape[1] * one.shape[2] for one in windows) // _MOST_COLUMNS)
    some = [np.abs(one[:, ::stride]) for one in windows]
    counts = np.concatenate([np.full(one.shape[1], one.shape[2]) for one in some])
    return _Columns(np.concatenate([one.reshape(len(one), -1) for one in some], axis=1), np.cumsum(counts) - counts)


def _predicted_error(moments: ChannelMoments, w: _Columns, row_squares: np.ndarray, scales: np.ndarray) -> float:
    """The mean squared error of a row of x W, summed over the columns of sizes `w`, as at the top of the page.

    `row_squares` [k] are the sums of their squares.
    """
    of_activations = _step(moments, scales) ** 2 * np.sum(row_squares * scales**2)
    of_weights = w.squared_steps(scales) * np.sum(moments.mean_square / scales**2)
    return float(of_activations + of_weights) / 12


def _step(moments: ChannelMoments, scales: np.ndarray) -> float:
    """The step of activations whose channels are divided by scales."""
    return float((max((moments.high / scales).max(), 0.0) - min((moments.low / scales).min(), 0.0)) / LEVELS)


def _move(model: ir.Model, value: ir.Value, units: Sequence[Unit], scales: np.ndarray) -> None:
    """Divide a value by the scales of its channels where `units` read it, and multiply their weights by them."""
    inverse = (1 / scales).astype(np.float32)
    if not _divide_normalization(model, value, units, inverse):
        producer = value.producer()
        assert producer is not None
        is_image = units[0].is_convolution
        factors = inverse.reshape(-1, *(1,) * ((rank_of(value) or 0) - 2)) if is_image else inverse
        factor = add_constant(model, factors, f"{value.name}_smoothing")
        divided = operation("Mul", [value, factor])
        copy_source((producer,), divided)
        divided.name = divided.outputs[0].name = fresh_name(model, f"{value.name}_smooth")
        graph_of(producer).insert_after(producer, divided)
        infer_node(divided, model)
        for unit in units:
            unit.node.replace_input_with(0, divided.outputs[0])
    for unit in units:
        old = unit.node.inputs[1]
        new = add_constant(model, _scaled_weights(unit, scales), f"{unit.name}_smooth_weights")
        unit.node.replace_input_with(1, new)
        drop_unused_constants(model, [old])


def _scaled_weights(unit: Unit, scales: np.ndarray) -> np.ndarray:
    weights = unit.weights
    if unit.is_transposed:
        factors = scales.reshape(-1, *(1,) * (weights.ndim - 1))
    elif not unit.is_convolution:
        factors = scales[:, None] if unit.channel_axis else scales
    else:
        each = np.repeat(scales, len(weights) // len(scales))[:, None] if unit.is_depthwise else scales[None]
        factors = each.reshape(*each.shape, *(1,) * (weights.ndim - 2))
    return np.asarray(weights * factors, np.float32)


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
    """The weights as a matrix [k, columns]; those of convolutions as [input channels, output channels of each, taps]."""
    weights = unit.weights
    if not unit.is_convolution:
        return weights if unit.channel_axis else weights.T
    if unit.is_depthwise:
        return weights.reshape(unit.groups, len(weights) // unit.groups, -1)
    taps = weights.reshape(*weights.shape[:2], -1)
    return taps if unit.is_transposed else taps.swapaxes(0, 1)


def _is_pointwise(node: ir.Node) -> bool:
    return kind_of(node) <= Kind.BROADCAST
