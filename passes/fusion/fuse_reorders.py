"""fuse-reorders: a recurrence reads its inputs as they are stored, and stores its sequence as it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ...compiler.ir.aliases import is_view
from ...compiler.ir.functions import body_of, drop_uncalled_groups, fuse_into_function, group_name, inline_function, is_fused
from ...compiler.ir.matching import static_shape
from ...compiler.ir.rewriter import Rejection
from ...compiler.ir.stored_weights import RECURRENT
from ...compiler.pipeline import Context, Pass


@dataclass(frozen=True)
class FuseReorders(Pass):
    """Put the Transposes of a recurrence's inputs and of its sequence into one function with it.

    Before:  s, h = GRU(x, w, r);  y = Transpose<perm = [0, 2, 1, 3]>(s)      with s [steps, 2, batch, hidden]
    After:   h, y = prefuse.gru_transpose(x, w, r)

    Both directions side by side, as the next layer reads them, or batches before steps are then no copy. Legal when a Transpose
    alone reads the sequence, through views perhaps, and leaves the units of a step side by side; and before the recurrence, when
    it exchanges steps and batch of what the recurrence alone reads.
    """

    name: ClassVar[str] = "fuse-reorders"

    def run(self, model: ir.Model, context: Context) -> bool:
        recurrences = [node for node in model.graph if _recurrence_of(model, node) is not None]
        changed = False
        for node in recurrences:
            before, behind = _exchange_before(model, node), _reorders_behind(model, node)
            if isinstance(behind, Rejection):
                context.reject(self.name, behind)
                behind = []
            if before or behind:
                inner = inline_function(model, node) if is_fused(node) else (node,)
                nodes = [*before, *inner, *behind]
                fuse_into_function(model, nodes, group_name(nodes))
                changed = True
        if changed:
            drop_uncalled_groups(model)
        return changed


def _recurrence_of(model: ir.Model, node: ir.Node) -> ir.Node | None:
    """The recurrent operator that a node is, or a group with what makes its operands."""
    inner = list(body_of(model, node)) if is_fused(node) else [node]
    found = [one for one in inner if one.op_type in RECURRENT and one.domain == ""]
    return found[0] if len(found) == 1 and found[0] is inner[-1] else None


def _exchange_before(model: ir.Model, node: ir.Node) -> list[ir.Node]:
    """The Transpose that makes the inputs of steps out of those of batches, which the recurrence reads as well; none if there is
    none, or if others read what it makes."""
    recurrence = _recurrence_of(model, node)
    assert recurrence is not None, "chosen before"
    x = recurrence.inputs[0]
    if recurrence is not node and x is not None:
        parameters = list(body_of(model, node).inputs)
        x = node.inputs[parameters.index(x)] if x in parameters and len(x.uses()) == 1 else None
    maker = None if x is None or x.is_graph_output() or len(x.uses()) != 1 else x.producer()
    if maker is None or not _is_transpose(maker) or maker.graph is not node.graph:
        return []
    return [maker] if list(maker.attributes.get_ints("perm", ())) == [1, 0, 2] else []


def _reorders_behind(model: ir.Model, node: ir.Node) -> list[ir.Node] | Rejection:
    """The Transposes of a sequence, with the views before them; none if it is read as it is, or why they stay outside."""
    recurrence = _recurrence_of(model, node)
    assert recurrence is not None, "chosen before"
    value: ir.Value | None = recurrence.outputs[0]
    if recurrence is not node:
        outputs = list(body_of(model, node).outputs)
        value = node.outputs[outputs.index(value)] if value in outputs else None
    weights = recurrence.inputs[2]
    if value is None or weights is None or (shape := static_shape(weights)) is None:
        return []
    nodes, legal = list[ir.Node](), 0
    while len(readers := value.consumers()) == 1 and not value.is_graph_output():
        (reader,) = readers
        result = reader.outputs[0]
        if reader.graph is not node.graph or reader.inputs[0] is not value or not _is_reorder(reader):
            return nodes[:legal]
        if (fault := _parts_units(reader, shape[2])) is not None:
            return nodes[:legal] if legal or is_view(reader) else Rejection(fault, (node, reader))
        nodes.append(reader)
        legal = len(nodes) if _is_transpose(reader) else legal
        value = result
    others = [reader for reader in value.consumers() if _is_transpose(reader)]
    if others and not legal:
        return Rejection(f"%{value.name} is not read by one Transpose alone", (node, others[0]))
    return nodes[:legal]


def _parts_units(reorder: ir.Node, hidden: int) -> str | None:
    """Why the `hidden` units of a step do not stay side by side in what a view or Transpose makes; None if they do."""
    value = reorder.inputs[0]
    assert value is not None, "it was found as what it reads"
    why = f"the units of a step of %{value.name} do not stay side by side"
    if _is_transpose(reorder):
        order = reorder.attributes.get_ints("perm", ())
        return None if order and order[-1] == len(order) - 1 else why
    shape = static_shape(reorder.outputs[0])
    return None if shape and shape[-1] and hidden and shape[-1] % hidden == 0 else why


def _is_reorder(node: ir.Node) -> bool:
    """Whether kernels store through a node. An Identity is there only where its result must be another value."""
    return _is_transpose(node) or (is_view(node) and node.op_type != "Identity")


def _is_transpose(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and node.domain == ""
