"""lower-precision: what matrix products read lies in memory as bfloat16 or float16."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import ClassVar, Literal

import onnx_ir as ir

from ..compiler.ir.constants import add_constant, constant_tensor
from ..compiler.ir.facts import infer_node
from ..compiler.ir.kinds import Kind, kind_of
from ..compiler.ir.names import fresh_name
from ..compiler.ir.opset_raise import OLDEST
from ..compiler.ir.rewriter import Rejection, copy_source, drop_unused_constants, graph_of, remove_nodes
from ..compiler.pipeline import Context, Pass
from .canonicalization.scope import static_shape

Narrow = Literal["bfloat16", "float16"]
_TYPES: dict[Narrow, ir.DataType] = {"bfloat16": ir.DataType.BFLOAT16, "float16": ir.DataType.FLOAT16}
_LARGEST_FLOAT16 = 65504.0
_PRODUCTS = frozenset(["Gemm", "MatMul"])
_MOVES = frozenset(["Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"])  # of elements, whatever their type


@dataclass(frozen=True)
class LowerPrecision(Pass):
    """Store the operands of matrix products in a narrow type: half the bytes, and twice the operations where the CPU has them.

    Before:  h = LayerNormalization(x);  y = MatMul(h, w)
    After:   h = LayerNormalization(x);  n = Cast<to=bfloat16>(h);  f = Cast<to=float>(n);  v = Cast<to=float>(w_bfloat16)
             y = MatMul(f, v)

    Products stay float32 operators, of operands that are narrow numbers: their kernels read these as they lie and add up in
    float32, as ONNX Runtime would by the same graph. The first Cast joins the kernel of the value, the others that of the
    product (fuse-epilogue). What is neither weight nor operand of a product stays float32: normalizations, softmax, residual
    sums, the model's inputs and outputs. Products of up to `few_rows` rows take narrow weights and float32 rows, as the weights
    are all that takes time there.
    """

    name: ClassVar[str] = "lower-precision"
    precision: Narrow | None = None  # None: what the user asked for, if that is one of the two
    min_operations: int = 1 << 17  # multiply-adds of a product that is worth rounding for
    few_rows: int = 8

    def run(self, model: ir.Model, context: Context) -> bool:
        precision = self.precision or _narrow_precision(context)
        if precision is None:
            return False
        lowering = _Lowering(model, context, self, precision)
        changed = [lowering.lower(node) for node in list(model.graph) if kind_of(node) is Kind.OUTPUT_FUSABLE]
        return any(changed)


def _narrow_precision(context: Context) -> Narrow | None:
    return context.precision if context.precision in ("bfloat16", "float16") else None


@dataclass(slots=True)
class _Lowering:
    """One run of the pass. `narrow` are the narrow forms found so far, by the value that they are of."""

    model: ir.Model
    context: Context
    limits: LowerPrecision
    precision: Narrow
    narrow: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def lower(self, node: ir.Node) -> bool:
        """Give a product narrow operands; whether it has any now that it had not."""
        positions = [i for i in (0, 1) if not _is_narrow(node.inputs[i])]
        if not positions:
            return False
        if fault := self._fault(node):
            self.context.reject(self.limits.name, Rejection(f"{node.op_type} stays float32: {fault}", (node,)))
            return False
        if _rows(node) <= self.limits.few_rows and _is_constant(node.inputs[1]):
            positions = [i for i in positions if i == 1]
        for position in positions:
            self._replace_operand(node, position)
        return bool(positions)

    def _fault(self, node: ir.Node) -> str:
        """Why a product's operands stay as they are; empty if they need not."""
        if node.op_type not in _PRODUCTS:
            return "no kernel reads its operands narrow"
        if self.model.opset_imports.get("", 1) < OLDEST:
            return f"opset {self.model.opset_imports.get('', 1)} is older than {OLDEST}"
        operands = [value for value in node.inputs[:2] if value is not None]
        if other := next((value for value in operands if value.dtype != ir.DataType.FLOAT and not _is_narrow(value)), None):
            return f"%{other.name} is of type {other.dtype}"
        depth = _depth(node)
        if depth is None:
            return "its shapes are not static"
        if self._operations(node) < self.limits.min_operations:
            return f"{self._operations(node)} multiply-adds are too few to round for"
        if self.precision == "bfloat16" and (depth % 2 or node.attributes.get_int("transA", 0)):
            return f"rows of {depth} elements are no pairs" if depth % 2 else "elements of a row are not neighbours"
        return self._weight_fault(operands)

    def _weight_fault(self, operands: list[ir.Value]) -> str:
        for value in operands:
            tensor = constant_tensor(value)
            if self.precision == "float16" and tensor is not None and abs(tensor.numpy()).max(initial=0) > _LARGEST_FLOAT16:
                return f"%{value.name} has numbers beyond float16"
        return ""

    def _operations(self, node: ir.Node) -> int:
        return prod(static_shape(node.outputs[0]) or ()) * (_depth(node) or 0)

    def _replace_operand(self, node: ir.Node, position: int) -> None:
        """Let a product read the narrow form of an operand, by a Cast of its own, which its kernel reads through."""
        value = node.inputs[position]
        assert value is not None
        cast = self._cast(self._narrowed(value, {node}), ir.DataType.FLOAT, f"{value.name}_wide", node)
        graph_of(node).insert_before(node, cast)
        infer_node(cast, self.model)
        node.replace_input_with(position, cast.outputs[0])
        drop_unused_constants(self.model, [value])
        _remove_unread_moves(value)

    def _narrowed(self, value: ir.Value, readers: set[ir.Node]) -> ir.Value:
        """The narrow form of a value: constants are rounded now, what is moved is moved narrow."""
        if value in self.narrow:
            return self.narrow[value]
        tensor, producer = constant_tensor(value), value.producer()
        if tensor is not None:
            narrow = self._rounded(value, tensor)
        elif producer is not None and _is_move(producer) and self._is_for_products(value, readers):
            assert producer.inputs[0] is not None
            source = self._narrowed(producer.inputs[0], {producer})
            narrow = self._moved(producer, source, value)
        else:
            cast = self._cast(value, _TYPES[self.precision], f"{value.name}_{self.precision}", producer)
            self._insert_after(producer, cast)
            narrow = cast.outputs[0]
        self.narrow[value] = narrow
        return narrow

    def _is_for_products(self, value: ir.Value, readers: set[ir.Node]) -> bool:
        others = set(value.consumers()) - readers
        return not value.is_graph_output() and all(kind_of(reader) is Kind.OUTPUT_FUSABLE for reader in others)

    def _rounded(self, value: ir.Value, tensor: ir.TensorProtocol) -> ir.Value:
        """A constant in the narrow type, not computed before it is read."""
        dtype = _TYPES[self.precision]
        lazy = ir.LazyTensor(
            lambda: ir.tensor(tensor.numpy().astype(dtype.numpy())), dtype=dtype, shape=ir.Shape(tensor.shape.numpy())
        )
        return add_constant(self.model, lazy, f"{value.name}_{self.precision}")

    def _moved(self, move: ir.Node, source: ir.Value, value: ir.Value) -> ir.Value:
        copy = ir.Node("", move.op_type, [source, *move.inputs[1:]], move.attributes.values(), version=move.version)
        copy.outputs[0].name = fresh_name(self.model, f"{value.name}_{self.precision}")
        copy_source((move,), copy)
        graph_of(move).insert_after(move, copy)
        infer_node(copy, self.model)
        return copy.outputs[0]

    def _cast(self, value: ir.Value, dtype: ir.DataType, name: str, origin: ir.Node | None) -> ir.Node:
        cast = ir.node("Cast", [value], {"to": dtype.value})
        cast.outputs[0].name = fresh_name(self.model, name)
        if origin is not None:
            copy_source((origin,), cast)
        return cast

    def _insert_after(self, producer: ir.Node | None, node: ir.Node) -> None:
        graph = self.model.graph
        if producer is not None:
            graph_of(producer).insert_after(producer, node)
        elif len(graph):
            graph.insert_before(graph[0], node)
        infer_node(node, self.model)


def _is_move(node: ir.Node) -> bool:
    return node.op_type in _MOVES and node.domain == ""


def _remove_unread_moves(value: ir.Value) -> None:
    """Take what only moved elements to nobody out of the graph."""
    while (node := value.producer()) is not None and _is_move(node) and not value.uses() and not value.is_graph_output():
        source = node.inputs[0]
        remove_nodes([node])
        if source is None:
            return
        value = source


def _is_narrow(value: ir.Value | None) -> bool:
    """Whether a product reads a value that lies in a narrow type."""
    producer = None if value is None else value.producer()
    return producer is not None and kind_of(producer) is Kind.OPERAND


def _is_constant(value: ir.Value | None) -> bool:
    return value is not None and (constant_tensor(value) is not None or _is_narrow(value))


def _depth(node: ir.Node) -> int | None:
    """Multiply-adds for each element of the result; None where that is not known."""
    shapes = [static_shape(value) for value in (*node.inputs[:2], *node.outputs) if value is not None]
    if None in shapes:
        return None
    first = shapes[0] or ()
    return first[-2] if node.attributes.get_int("transA", 0) else first[-1] if first else None


def _rows(node: ir.Node) -> int:
    """Rows of the result, of all matrices together."""
    return prod((static_shape(node.outputs[0]) or ())[:-1])
