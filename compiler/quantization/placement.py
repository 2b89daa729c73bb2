"""Quantized units in the graph: QuantizeLinear and DequantizeLinear around what lies in 8 bits. What is made is plain ONNX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..ir.constants import add_constant, constant_array, contiguous
from ..ir.facts import infer_node
from ..ir.names import fresh_name
from ..ir.rewriter import copy_source, drop_unused_constants, graph_of, operation, replace_node
from .flow import Flow
from .formats import SMALLEST_SCALE, Affine, Quantized, quantize_channels, quantize_pairs
from .units import Unit

_LARGEST_INT32 = 2**31 - 1


def place_static(
    model: ir.Model, units: Sequence[Unit], flow: Flow, formats: Mapping[str, Affine], keeps_pairs: bool = False
) -> None:
    """Let `units` multiply 8-bit numbers, and let what `flow` names lie in 8 bits; `formats` are those of its leaders, by name.

    Before:  y = Conv(x, w, b)
    After:   a = DequantizeLinear(QuantizeLinear(x, s, z), s, z);  v = DequantizeLinear(w8, t, 0)
             c = DequantizeLinear(b32, s * t, 0);  y = Conv(a, v, c)

    Weights are as `pairs.keeps_pairs` asks where `keeps_pairs` is set. A bias that is too large for 32 bits of the scale s * t,
    and those that are added by other nodes, stay float32.
    """
    placing = _Placing(model, keeps_pairs)
    scales = {unit.name: float(formats[str(flow.leader[unit.activations].name)].scale) for unit in units}
    for leader, values in flow.groups().items():
        scale, zero = placing.constants(formats[str(leader.name)], str(leader.name))
        for value in values:
            dequantized = placing.rounded(value, scale, zero)
            for reader, index in flow.readers[value]:
                reader.replace_input_with(index, dequantized)
    for unit in units:
        placing.quantize_weights(unit, scales[unit.name])
    _infer(model)


def place_rows(model: ir.Model, units: Sequence[Unit], keeps_pairs: bool = False) -> None:
    """Let matrix products quantize each row of their activations by its own range, all scales behind the product of integers.

    Before:  y = MatMul(x, w)
    After:   z = least of the row, s = its range / 255, as uint8: q = Cast(Clip(Round(x / s) + z))
             y = (MatMul(Cast(q), Cast(w8)) - z * sums of the columns of w8) * s * t
    """
    placing = _Placing(model, keeps_pairs)
    made: dict[ir.Value, _Rows] = {}
    for unit in units:
        x = unit.activations
        if x not in made:
            made[x] = placing.rows(x)
        placing.multiply_rows(unit, made[x])
    _infer(model)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a tensor as uint8 numbers, widened to float32; their scales and zero points [..., 1]."""

    numbers: ir.Value
    scale: ir.Value
    zero: ir.Value


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights as int8 constants, and their scales, one a channel, once more as an array."""

    numbers: ir.Value
    scale: ir.Value
    zero: ir.Value
    scales: np.ndarray


@dataclass(slots=True)
class _Placing:
    """New nodes and constants of a model."""

    model: ir.Model
    keeps_pairs: bool  # whether weights are such that pairs of them stay in 16 bits
    _weights: dict[tuple[ir.Value | None, int], _Weights] = field(default_factory=dict)  # by the constant and its channels' axis

    def constants(self, affine: Affine, name: str) -> tuple[ir.Value, ir.Value]:
        """A scale and a zero point as constants."""
        return add_constant(self.model, affine.scale, f"{name}_scale"), add_constant(self.model, affine.zero, f"{name}_zero")

    def rounded(self, value: ir.Value, scale: ir.Value, zero: ir.Value) -> ir.Value:
        """What is left of a value in 8 bits: it is rounded right behind its producer."""
        quantize = operation("QuantizeLinear", [value, scale, zero])
        dequantize = operation("DequantizeLinear", [quantize.outputs[0], scale, zero])
        self._insert_behind(value, [quantize, dequantize], ("quantized", "dequantized"))
        return dequantize.outputs[0]

    def quantize_weights(self, unit: Unit, scale: float) -> None:
        """Let a unit read weights of 8 bits, and a bias of 32 bits where it fits; `scale` is that of its activations."""
        node, old = unit.node, list(unit.node.inputs[1:])
        weights = self._weights_of(unit)
        nodes = [operation("DequantizeLinear", [weights.numbers, weights.scale, weights.zero], axis=unit.channel_axis)]
        bias = self._bias(unit, scale * weights.scales.astype(np.float64))
        if bias is not None:
            nodes.append(bias)
        self._insert_before(node, nodes, ("weights", "bias"))
        for index, made in enumerate(nodes, 1):
            node.replace_input_with(index, made.outputs[0])
        drop_unused_constants(self.model, old)

    def _weights_of(self, unit: Unit) -> _Weights:
        old, axis = unit.node.inputs[1], unit.channel_axis
        if (old, axis) not in self._weights:
            found = self._quantized(unit.weights, axis, unit.node.op_type)
            name = unit.name if old is None else str(old.name)
            scales = found.affine.scale.reshape(-1)
            self._weights[old, axis] = _Weights(
                add_constant(self.model, found.numbers, f"{name}_int8"),
                add_constant(self.model, scales, f"{name}_scale"),
                add_constant(self.model, np.zeros(scales.shape, np.int8), f"{name}_zero"),
                scales,
            )
        return self._weights[old, axis]

    def _quantized(self, w: np.ndarray, axis: int, op_type: str) -> Quantized:
        if not self.keeps_pairs or op_type == "ConvTranspose":
            return quantize_channels(w, axis)
        return quantize_pairs(w, axis)

    def _bias(self, unit: Unit, scales: np.ndarray) -> ir.Node | None:
        bias = constant_array(unit.bias)
        if bias is None or (unit.alpha, unit.beta) != (1.0, 1.0) or bias.shape != scales.shape:
            return None
        if scales.min(initial=1.0) < SMALLEST_SCALE:
            return None
        rounded = scales.astype(np.float32)
        numbers = np.rint(bias / rounded.astype(np.float64))
        if not (np.abs(numbers) <= _LARGEST_INT32).all():
            return None
        name = str(unit.bias.name) if unit.bias is not None else unit.name
        operands = [
            add_constant(self.model, numbers.astype(np.int32), f"{name}_int32"),
            add_constant(self.model, rounded, f"{name}_scale"),
            add_constant(self.model, np.zeros(rounded.shape, np.int32), f"{name}_zero"),
        ]
        return operation("DequantizeLinear", operands, axis=0)

    def rows(self, x: ir.Value) -> _Rows:
        """The rows of a tensor in 8 bits."""

        def number(value: float) -> ir.Value:
            return add_constant(self.model, np.array(value, np.float32), f"{x.name}_rows")

        last, none, all_levels = add_constant(self.model, np.array([-1], np.int64), f"{x.name}_axis"), number(0.0), number(255.0)
        nodes: list[ir.Node] = []

        def op(op_type: str, *operands: ir.Value, **attributes: int) -> ir.Value:
            nodes.append(operation(op_type, operands, **attributes))
            return nodes[-1].outputs[0]

        least = op("Min", op("ReduceMin", x, last, keepdims=1), none)
        greatest = op("Max", op("ReduceMax", x, last, keepdims=1), none)
        step = op("Div", op("Sub", greatest, least), all_levels)
        scale = op("Max", step, number(SMALLEST_SCALE))
        inverse = op("Div", number(1.0), scale)
        zero = op("Round", op("Neg", op("Mul", least, inverse)))
        placed = op("Add", op("Round", op("Mul", x, inverse)), zero)
        narrow = op("Cast", op("Clip", placed, none, all_levels), to=int(ir.DataType.UINT8))
        numbers = op("Cast", narrow, to=int(ir.DataType.FLOAT))
        self._insert_behind(x, nodes, ("row",))
        return _Rows(numbers, scale, zero)

    def multiply_rows(self, unit: Unit, rows: _Rows) -> None:
        """Put the product of integers in the place of a unit."""
        node, old, name = unit.node, unit.node.inputs[1], f"{unit.name}_weights"
        weights = self._quantized(unit.weights if unit.channel_axis else unit.weights.T, 1, "MatMul")
        column_sums = weights.numbers.sum(0, dtype=np.int64).astype(np.float32)
        narrow = add_constant(self.model, contiguous(weights.numbers), f"{name}_int8")
        scales = add_constant(self.model, weights.affine.scale.reshape(-1), f"{name}_scale")
        sums = add_constant(self.model, column_sums, f"{name}_sums")
        widened = operation("Cast", [narrow], to=int(ir.DataType.FLOAT))
        product = operation("MatMul", [rows.numbers, widened.outputs[0]])
        offset = operation("Mul", [rows.zero, sums])
        centred = operation("Sub", [product.outputs[0], offset.outputs[0]])
        by_row = operation("Mul", [centred.outputs[0], rows.scale])
        nodes = [widened, product, offset, centred, by_row, operation("Mul", [by_row.outputs[0], scales])]
        if unit.bias is not None:
            nodes.append(operation("Add", [nodes[-1].outputs[0], unit.bias]))
        replace_node(self.model, node, nodes, nodes[-1].outputs)
        drop_unused_constants(self.model, [old])

    def _insert_behind(self, value: ir.Value, nodes: Sequence[ir.Node], roles: Sequence[str]) -> None:
        """Put nodes behind the producer of a value, at the graph's beginning for an input."""
        producer = value.producer()
        if producer is not None:
            self._name(nodes, str(value.name), roles, producer)
            graph_of(producer).insert_after(producer, nodes)
            return
        first = self.model.graph[0]
        self._name(nodes, str(value.name), roles, first)
        self.model.graph.insert_before(first, nodes)

    def _insert_before(self, node: ir.Node, nodes: Sequence[ir.Node], roles: Sequence[str]) -> None:
        self._name(nodes, str(node.name), roles, node)
        graph_of(node).insert_before(node, nodes)

    def _name(self, nodes: Sequence[ir.Node], stem: str, roles: Sequence[str], origin: ir.Node) -> None:
        for number, node in enumerate(nodes):
            copy_source((origin,), node)
            node.outputs[0].name = fresh_name(self.model, f"{stem}_{roles[min(number, len(roles) - 1)]}")
            node.name = node.outputs[0].name


def _infer(model: ir.Model) -> None:
    """Give what is new its type and shape."""
    for node in model.graph:
        if any(value.shape is None or value.dtype is None for value in node.outputs if value.name):
            infer_node(node, model)
