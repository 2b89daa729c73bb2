"""MatMulInteger, ConvInteger, QLinearMatMul and QLinearConv."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import add_constant, constant_array
from ....compiler.ir.matching import static_shape
from ....compiler.ir.rewriter import Rejection, operation, replace_node
from .operands import BYTES, LARGEST_FLOAT, Operands, channel_shape, placed_constant

_OF_INTEGERS = {"ConvInteger": "Conv", "MatMulInteger": "MatMul"}
_QLINEAR = {"QLinearConv": "Conv", "QLinearMatMul": "MatMul"}
_FLOAT, _INT32 = int(ir.DataType.FLOAT), int(ir.DataType.INT32)


@dataclass(frozen=True, slots=True)
class Integers:
    """Finds MatMulInteger and ConvInteger, whose results are made float32, or stay where float32 holds them."""

    name: str
    is_rounded: bool  # no kernel sums integers: sums beyond 2^24 would be rounded

    def match(self, node: ir.Node) -> _Summed | Rejection | None:
        if node.domain != "" or node.op_type not in _OF_INTEGERS:
            return None
        x, w, x_zero, w_zero = (*node.inputs, None, None)[:4]
        if x is None or w is None:
            return None
        found = Operands(_OF_INTEGERS[node.op_type], node, x, w, x_zero, w_zero)
        result = node.outputs[0]
        casts = [one for one in result.consumers() if one.op_type == "Cast" and one.outputs[0].dtype == ir.DataType.FLOAT]
        is_float = len(casts) == len(result.consumers()) and not result.is_graph_output()
        if reason := found.fault() or _range_fault(found, is_exact=self.is_rounded or not is_float):
            return Rejection(f"{node.op_type} is expanded: {reason}", (node,))
        return _Summed(found, tuple(casts) if is_float else ())


def _range_fault(found: Operands, *, is_exact: bool) -> str:
    largest = found.largest_sum() if is_exact else 0
    return f"sums could reach {largest}, and float32 holds integers to 2^24" if largest > LARGEST_FLOAT else ""


@dataclass(frozen=True, slots=True)
class _Summed:
    """A product of integers, and the Casts that read it, if nobody else does."""

    found: Operands
    casts: tuple[ir.Node, ...]

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        nodes = self.found.multiplied(model)
        if not self.casts:
            nodes.append(operation("Cast", nodes[-1].outputs, to=_INT32))
        sums, product = nodes[-1].outputs[0], self.found.product
        if self.casts:
            first, *others = self.casts
            for other in others:
                replace_node(model, other, (), first.outputs)
            replace_node(model, first, nodes, [sums])
            replace_node(model, product, (), [None])
        else:
            replace_node(model, product, nodes, [sums])
        return nodes


@dataclass(frozen=True, slots=True)
class QLinear:
    """Finds QLinearMatMul and QLinearConv."""

    name: str
    is_rounded: bool

    def match(self, node: ir.Node) -> _Requantized | Rejection | None:
        if node.domain != "" or node.op_type not in _QLINEAR:
            return None
        x, s, x_zero, w, t, w_zero, r, y_zero, bias = (*node.inputs, None)[:9]
        if x is None or s is None or w is None or t is None or r is None or y_zero is None or x.dtype not in BYTES:
            return None
        found = Operands(_QLINEAR[node.op_type], node, x, w, x_zero, w_zero)
        columns = (static_shape(w) or (1,))[found.channel_axis]
        shapes = [prod(static_shape(one) or ()) if one.shape is not None else 0 for one in (s, r, y_zero, t)]
        reason = found.fault() or (
            "" if shapes[:3] == [1] * 3 and shapes[3] in (1, columns) else "activations have several scales"
        )
        reason = reason or ("" if y_zero.dtype in BYTES else "the result has no 8 bits")
        if reason := reason or _range_fault(found, is_exact=self.is_rounded):
            return Rejection(f"{node.op_type} is expanded: {reason}", (node,))
        return _Requantized(found, (s, t, r), y_zero, bias)


@dataclass(frozen=True, slots=True)
class _Requantized:
    """A product with scales of activations, weights and result, the zero point of the result and a bias in sums."""

    found: Operands
    scales: tuple[ir.Value, ir.Value, ir.Value]
    zero: ir.Value
    bias: ir.Value | None

    def rewrite(self, model: ir.Model) -> Sequence[ir.Node]:
        nodes = self.found.multiplied(model)
        if self.bias is not None:
            bias, made = self._bias(model, self.bias)
            nodes += [*made, operation("Add", [nodes[-1].outputs[0], bias])]
        sums = nodes[-1].outputs[0]
        factor, made = self._factor(model)
        nodes += [*made, operation("Mul", [sums, factor])]
        scaled = nodes[-1].outputs[0]
        zero, made = self._scalar(model, self.zero)
        one = add_constant(model, np.array(1, np.float32), f"{self.scales[2].name}_one")
        nodes += [*made, operation("QuantizeLinear", [scaled, one, zero])]
        replace_node(model, self.found.product, nodes, nodes[-1].outputs)
        return nodes

    def _factor(self, model: ir.Model) -> tuple[ir.Value, list[ir.Node]]:
        """a_scale * b_scale / y_scale in float32, in this order."""
        known = [constant_array(scale) for scale in self.scales]
        s, t, r = known
        if s is not None and t is not None and r is not None:
            product = s.astype(np.float32).reshape(()) * t.astype(np.float32) / r.astype(np.float32).reshape(())
            return placed_constant(model, self.found, product, f"{self.scales[1].name}_factor"), []
        nodes, placed = list[ir.Node](), list[ir.Value]()
        for scale in self.scales:
            value, made = self._placed(model, scale)
            nodes += made
            placed.append(value)
        product_node = operation("Mul", placed[:2])
        quotient = operation("Div", [product_node.outputs[0], placed[2]])
        return quotient.outputs[0], [*nodes, product_node, quotient]

    def _bias(self, model: ir.Model, bias: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
        """The bias as float32, shaped to broadcast over the sums."""
        if (known := constant_array(bias)) is not None:
            return placed_constant(model, self.found, known.astype(np.float32), f"{bias.name}_sums"), []
        widened = operation("Cast", [bias], to=_FLOAT)
        shape = add_constant(model, np.array(channel_shape(self.found, -1), np.int64), f"{bias.name}_shape")
        placed = operation("Reshape", [widened.outputs[0], shape])
        return placed.outputs[0], [widened, placed]

    def _scalar(self, model: ir.Model, value: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
        return self._placed(model, value) if static_shape(value) else (value, [])

    def _placed(self, model: ir.Model, value: ir.Value) -> tuple[ir.Value, list[ir.Node]]:
        """A parameter of one element without dimensions, one of more shaped to broadcast over the result."""
        dims = static_shape(value) or ()
        shape = channel_shape(self.found, -1 if prod(dims) > 1 else 1)
        if (known := constant_array(value)) is not None:
            return add_constant(model, known.reshape(shape), f"{value.name}_placed"), []
        node = operation("Reshape", [value, add_constant(model, np.array(shape, np.int64), f"{value.name}_shape")])
        return node.outputs[0], [node]
