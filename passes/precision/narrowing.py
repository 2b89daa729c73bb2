"""The narrow forms of values: constants rounded at compile time, Casts of what is computed, and moves of either."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from ...compiler.ir.assignments.operand_formats import Format, Formats
from ...compiler.ir.constants import add_constant, constant_tensor, derived_tensor
from ...compiler.ir.facts import infer_node
from ...compiler.ir.kinds import Kind, is_pointwise, kind_of
from ...compiler.ir.names import fresh_name
from ...compiler.ir.rewriter import copy_source, drop_unused_constants, graph_of
from .moves import is_image_move, is_move, is_pool, moved_values, remove_unread_moves

_TYPES: dict[Format, ir.DataType] = {"bfloat16": ir.DataType.BFLOAT16, "float16": ir.DataType.FLOAT16}
_LONGEST_CHAIN = 64  # of nodes that move elements, through which a rounding is moved up


@dataclass(slots=True)
class Narrowing:
    """The rewriting of one graph whose nodes are to read their operands in `formats`. `narrow` are the forms made so far."""

    model: ir.Model
    formats: Mapping[ir.Node, Formats]
    narrow: dict[tuple[ir.Value, Format], ir.Value] = field(default_factory=dict)

    def replace_operand(self, node: ir.Node, position: int, form: Format) -> None:
        """Let a node read the narrow form of an operand, by a Cast of its own, which its kernel reads through."""
        value = node.inputs[position]
        assert value is not None
        self.read_narrow(node, position, self._narrowed(value, form, {node}))
        drop_unused_constants(self.model, [value])
        remove_unread_moves(value)

    def read_narrow(self, reader: ir.Node, position: int, narrow: ir.Value) -> None:
        """Let a node read a narrow value as float32, by a Cast of its own."""
        cast = self._cast(narrow, ir.DataType.FLOAT, f"{narrow.name}_wide", reader)
        graph_of(reader).insert_before(reader, cast)
        infer_node(cast, self.model)
        reader.replace_input_with(position, cast.outputs[0])

    def _narrowed(self, value: ir.Value, form: Format, readers: set[ir.Node], moves: int = _LONGEST_CHAIN) -> ir.Value:
        """The narrow form of a value: constants are rounded now, what is moved is moved narrow, through at most `moves` nodes."""
        if (value, form) in self.narrow:
            return self.narrow[value, form]
        tensor, producer = constant_tensor(value), value.producer()
        passes = producer is not None and moves > 0 and (is_move(producer) or is_pool(producer))
        passes = passes and self._is_for_products(value, readers)
        if tensor is not None:
            narrow = self._rounded(value, tensor, form)
        elif producer is not None and passes and is_move(producer):
            sources = [self._narrowed(source, form, {producer}, moves - 1) for source in moved_values(producer)]
            narrow = self._moved(producer, sources, f"{value.name}_{form}")
        else:
            if producer is not None and passes:
                self._read_pool_narrow(producer, form, moves - 1)
            cast = self._cast(value, _TYPES[form], f"{value.name}_{form}", producer)
            self._insert_after(producer, cast)
            narrow = cast.outputs[0]
        self.narrow[value, form] = narrow
        return narrow

    def _is_for_products(self, value: ir.Value, readers: set[ir.Node]) -> bool:
        """Whether products alone read a value, beside `readers`, some of them through what moves elements."""
        return not value.is_graph_output() and self._lead_to_products(use for use in value.uses() if use.node not in readers)

    def _lead_to_products(self, uses: Iterable[tuple[ir.Node, int]]) -> bool:
        """Whether all are of products that are to read narrow numbers there, or of what moves elements to nothing else.

        Each is looked at once, by however many ways it is met.
        """
        pending = list(uses)
        seen = set(pending)
        while pending:
            reader, position = pending.pop()
            if is_image_move(reader) or (is_pool(reader) and reader.op_type == "MaxPool"):
                result = reader.outputs[0]
                if result.is_graph_output() or not result.uses():
                    return False
                found = [use for use in result.uses() if use not in seen]
                seen.update(found)
                pending += found
            elif kind_of(reader) is not Kind.OUTPUT_FUSABLE or position not in self.formats.get(reader, {}):
                return False
        return True

    def _read_pool_narrow(self, pool: ir.Node, form: Format, moves: int) -> None:
        """Let a MaxPool whose result is rounded read what is rounded before, unless that would be stored in both types."""
        source = pool.inputs[0]
        if pool.op_type != "MaxPool" or source is None or source.producer() is None or source.is_graph_output():
            return
        if self._lead_to_products(use for use in source.uses() if use.node is not pool and not is_pointwise(use.node)):
            self.read_narrow(pool, 0, self._narrowed(source, form, {pool}, moves))
            remove_unread_moves(source)

    def _rounded(self, value: ir.Value, tensor: ir.TensorProtocol, form: Format) -> ir.Value:
        """A constant in the narrow type, not computed before it is read."""
        dtype = _TYPES[form]
        how, shape = ("round", str(dtype)), tensor.shape.numpy()
        lazy = derived_tensor(how, [tensor], lambda: tensor.numpy().astype(dtype.numpy()), dtype, shape)
        return add_constant(self.model, lazy, f"{value.name}_{form}")

    def _moved(self, move: ir.Node, sources: list[ir.Value], name: str) -> ir.Value:
        copy = ir.Node("", move.op_type, [*sources, *move.inputs[len(sources) :]], move.attributes.values(), version=move.version)
        copy.outputs[0].name = fresh_name(self.model, name)
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
