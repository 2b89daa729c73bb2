"""fuse-prologue: pointwise nodes, and parts of tensors, become prologues of the kernels that read them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ...compiler.ir.assignments.kernel_choice import Ask
from ...compiler.ir.cloning import ValueMap, clone_node
from ...compiler.ir.facts import has_static_type, tensor_type
from ...compiler.ir.functions import drop_uncalled_groups, fuse_into_function, inline_function, is_fused
from ...compiler.ir.kinds import is_pointwise
from ...compiler.ir.matching import is_constant
from ...compiler.ir.names import fresh_name
from ...compiler.ir.rewriter import Rejection, copy_source, remove_nodes
from ...compiler.pipeline import Context, Pass, number
from ...kernels.cost.memory import parallel_work
from ...kernels.cost.operations import operations_of
from .fuse_concat import Makers, pointwise_makers
from .fusion_cost import Join, drawback
from .operand_reads import Body, Reading, reading_of
from .parts import Parts, is_free, is_part, parts_of
from .short_runs import wasted_operations

_NAMED_OPS = 6  # a function of more nodes is named by the group that took them in


@dataclass(frozen=True)
class FusePrologue(Pass):
    """Move a pointwise group into the groups that read it.

    Before:  a = prefuse.mul_add_relu(x, s, b);  y = prefuse.conv_relu(a, w)           the convolution makes a padded copy of a
    After:   y = prefuse.mul_add_relu_conv_relu(x, s, b, w)

    Before:  a = Slice(x, 0, 64, 2);  b = Slice(x, 64, 128, 2);  y = prefuse.sigmoid_mul(b, a)      a gate
    After:   y = prefuse.slice_slice_sigmoid_mul(x)

    Legal where the reader reads its operand's elements one by one: as an operand of its epilogue, or as its anchor's first
    operand; and of parts where all others that the reader computes are pointwise. Of several readers each computes it again.
    `fusion_cost` decides whether it pays: bytes and launches saved against operations repeated. Never an output of the graph, nor
    what a subgraph reads.
    """

    name: ClassVar[str] = "fuse-prologue"
    max_ops: int = number(32, least=1)  # largest group, in nodes
    max_readers: int = number(4, least=1)  # kernels that may compute the same

    def run(self, model: ir.Model, context: Context) -> bool:
        moving = _Moving(model, context, self, context.kernels_of(model))
        changed = False
        for node in reversed(list(model.graph)):
            if node.graph is not None and (parts := parts_of(model, node)) is not None:
                changed |= moving.move(node, parts)
        if changed:
            drop_uncalled_groups(model)
        return changed


@dataclass(slots=True)
class _Moving:
    """The groups of one graph."""

    model: ir.Model
    context: Context
    options: FusePrologue
    ask: Ask

    def move(self, node: ir.Node, parts: Parts) -> bool:
        """Compute a pointwise group, or what takes a part of a tensor, in all of its readers, if that is legal and pays."""
        if is_part(node, {}) and is_free(node):
            return False
        readers = list(dict.fromkeys(reader for value in node.outputs for reader in value.consumers()))
        if not readers or any(reader.graph is not self.model.graph for reader in readers):
            return False
        if output := next((value for value in node.outputs if value.is_graph_output()), None):
            return self._reject(node, readers, f"%{output.name} is an output of the graph")
        if not self._is_static(node):
            return self._reject(node, readers, "shapes are symbolic")
        if len(readers) > self.options.max_readers:
            return self._reject(node, readers, f"{len(readers)} groups read it, more than {self.options.max_readers}")
        readings = {}
        for reader in readers:
            reading = self._parts_fault(parts, reader) or self._reading(node, reader)
            if isinstance(reading, str):
                self._reject(node, [reader], reading)
                return self._reject(node, [one for one in readers if one is not reader], f"it is in memory for {reader.op_type}")
            readings[reader] = reading
        join = self._join(node, parts, readings)
        target = self.context.target
        if fault := drawback(join, target.vector_lanes, self.options.max_ops, target.threads):
            return self._reject(node, readers, fault)
        self._rewrite(node, readers)
        return True

    def _reject(self, node: ir.Node, readers: Iterable[ir.Node], reason: str) -> bool:
        """Say why a group is not computed in its readers; False, as nothing changed."""
        for reader in readers:
            message = f"{node.op_type} not computed in {reader.op_type}: {reason}"
            self.context.reject(self.options.name, Rejection(message, (node, reader)))
        return False

    def _parts_fault(self, parts: Parts, reader: ir.Node) -> str:
        """Why a reader cannot read parts where they lie; empty if it can, or if there are none."""
        if not parts.nodes:
            return ""
        lanes, neighbours = self.context.target.vector_lanes, parts.neighbours()
        if neighbours < lanes:
            return f"{neighbours} neighbours of {parts.nodes[0].op_type} fill no vector"
        nodes = Body.of(self.model, reader).nodes
        if parts_of(self.model, reader) is None or not any(map(is_pointwise, nodes)):
            return f"{reader.op_type} reads its operands from memory as they are"
        return ""

    def _reading(self, node: ir.Node, reader: ir.Node) -> Reading | str:
        """How a reader reads all that it has from a group."""
        if isinstance(makers := pointwise_makers(self.model, reader), Makers) and makers.run >= self.context.target.vector_lanes:
            return "fuse-concat stores it in the result"
        times, is_indexed = 0.0, True
        for value in node.outputs:
            if reader not in value.consumers():
                continue
            one = reading_of(self.model, reader, value)
            if isinstance(one, str):
                return one
            times, is_indexed = max(times, one.times), is_indexed and one.is_indexed
        if not is_indexed and not self.context.target.fuses_prologues:
            return "on a GPU kernels read the operands of their anchors from memory"
        if not is_indexed and not self._is_flat(node):
            return "it has operands that span only some dimensions, and the reader knows no index"
        return Reading(times, is_indexed)

    def _is_flat(self, node: ir.Node) -> bool:
        """Whether all values of a group have as many elements as its result, or one."""
        return {tensor_type(value).elements for value in self._values(node)} <= {1, tensor_type(node.outputs[0]).elements}

    def _is_static(self, node: ir.Node) -> bool:
        return all(map(has_static_type, self._values(node)))

    def _values(self, node: ir.Node) -> list[ir.Value]:
        """All that the nodes of a group read and make."""
        nodes = Body.of(self.model, node).nodes
        return [value for one in nodes for value in (*one.inputs, *one.outputs) if value is not None]

    def _join(self, node: ir.Node, parts: Parts, readings: dict[ir.Node, Reading]) -> Join:
        target, made, read = self.context.target, _bytes(node.outputs), parts.read_bytes(node)
        nodes = [one for one in Body.of(self.model, node).nodes if one not in parts.nodes]
        operations = sum(operations_of(one.op_type) * tensor_type(one.outputs[0]).hinted.elements for one in nodes)
        times = sum(reading.times for reading in readings.values())
        again = sum(max(reading.times - 1, 0.0) for reading in readings.values())
        sizes = [len(Body.of(self.model, reader).nodes) + len(parts.nodes) + len(nodes) for reader in readings]
        tensors = [_count({*node.inputs, *reader.inputs, *reader.outputs} - {*node.outputs}) for reader in readings]
        return Join(
            saved_bytes=made * (1 + len(readings)),
            added_bytes=read * (len(readings) - 1) + int(again * max(read - made, 0)),
            recomputed_operations=(times - 1) * operations + self._wasted_operations(nodes, readings),
            saved_regions=int(operations >= parallel_work(target.machine) and target.threads > 1),
            tensors=max(tensors),
            operators=max(sizes),
        )

    def _wasted_operations(self, nodes: Iterable[ir.Node], readings: dict[ir.Node, Reading]) -> float:
        """In empty lanes, where readers go over few neighbours at a time."""
        lanes, nodes = self.context.target.vector_lanes, list(nodes)
        return sum(reading.times * wasted_operations(reader, nodes, lanes, self.ask) for reader, reading in readings.items())

    def _rewrite(self, node: ir.Node, readers: list[ir.Node]) -> None:
        places = {reader: place for place, reader in enumerate(self.model.graph) if reader in readers} if len(readers) > 1 else {}
        *others, last = sorted(readers, key=lambda reader: places.get(reader, 0))
        nodes = inline_function(self.model, node) if is_fused(node) else (node,)
        for reader in others:
            self._fuse(_copies(self.model, nodes, reader), reader)
        self.model.graph.remove(nodes)
        self.model.graph.insert_before(last, nodes)
        self._fuse(nodes, last)

    def _fuse(self, made: tuple[ir.Node, ...], reader: ir.Node) -> None:
        nodes = _read(made)
        parts = [one.op_type.lower() for one in nodes if one.op_type != "Constant"]
        base = re.sub(r"_\d+$", "", reader.op_type) if is_fused(reader) else reader.op_type.lower()
        size = len(Body.of(self.model, reader).nodes) + len(nodes)
        name = "_".join([*parts, base]) if size <= _NAMED_OPS else f"{base}_of_{len(nodes)}_more"
        members = [*nodes, *(inline_function(self.model, reader) if is_fused(reader) else (reader,))]
        fuse_into_function(self.model, members, name, adjacent=True)


def _read(nodes: tuple[ir.Node, ...]) -> list[ir.Node]:
    """Those nodes that something reads; the others, whose results another reader wanted, are removed."""
    read: list[ir.Node] = []
    for node in reversed(nodes):
        if any(value.uses() for value in node.outputs):
            read.insert(0, node)
        else:
            remove_nodes([node])
    return read


def _copies(model: ir.Model, nodes: tuple[ir.Node, ...], reader: ir.Node) -> tuple[ir.Node, ...]:
    """Copies of nodes in front of a reader, which reads them instead."""
    values: ValueMap = {}
    copies = []
    for node in nodes:
        copy = clone_node(node, values)
        copy.name = ""  # which is the other one's; copy_source says where it comes from
        copy_source((node,), copy)
        for output in copy.outputs:
            output.name = fresh_name(model, str(output.name))
        copies.append(copy)
    model.graph.insert_before(reader, copies)
    for position, value in enumerate(reader.inputs):
        if value is not None and value in values:
            reader.replace_input_with(position, values[value])
    return tuple(copies)


def _count(values: Iterable[ir.Value | None]) -> int:
    """Of the tensors that a kernel reads and writes: of integers that tell it places it knows the numbers."""
    return sum(value is not None and not (value.dtype == ir.DataType.INT64 and is_constant(value)) for value in values)


def _bytes(values: Iterable[ir.Value | None]) -> int:
    return sum(tensor_type(value).hinted.size_bytes for value in values if value is not None)
