"""fuse-concat: kernels of pointwise operators store their results where a Concat would copy them to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import onnx_ir as ir

from ...compiler.ir.aliases import is_outermost, is_view
from ...compiler.ir.facts import has_static_type, tensor_type
from ...compiler.ir.functions import drop_uncalled_groups, fuse_into_function, group_name, inline_function, is_fused
from ...compiler.ir.kinds import is_known
from ...compiler.ir.rewriter import Rejection
from ...compiler.pipeline import Context, Pass, number
from ...kernels.cost.operations import operations_of
from ...kernels.cost.pointwise import scalar_steps
from .fusion_cost import Join, drawback
from .operand_reads import Body
from .parts import is_part, parts_of

_SMALLEST_BITS = 8  # of numbers that lie apart in memory


@dataclass(frozen=True)
class FuseConcat(Pass):
    """Put a Concat into one function with the pointwise groups that make all its operands.

    Before:  a, b = prefuse.mul_sub_mul_add(x, c, s);  u = Unsqueeze(a);  v = Unsqueeze(b);  y = Concat<axis = 3>(u, v)
    After:   y = prefuse.mul_sub_mul_add_unsqueeze_unsqueeze_concat(x, c, s)      a rotation of pairs

    Legal where the operands have one shape, perhaps with other dimensions of one, nothing else reads them, and they lie in the
    result at one distance over runs that fill a vector. Not along an outermost axis, where operands are written in place anyway.
    """

    name: ClassVar[str] = "fuse-concat"
    max_ops: int = number(32, least=1)  # largest group, in nodes

    def run(self, model: ir.Model, context: Context) -> bool:
        changed = False
        for node in list(model.graph):
            found = pointwise_makers(model, node)
            if isinstance(found, str):
                if found:
                    context.reject(self.name, Rejection(f"operands of Concat not stored in its result: {found}", (node,)))
                continue
            if fault := self._drawback(model, context, node, found):
                context.reject(self.name, Rejection(f"operands of Concat not stored in its result: {fault}", (node,)))
                continue
            self._fuse(model, node, found)
            changed = True
        if changed:
            drop_uncalled_groups(model)
        return changed

    def _drawback(self, model: ir.Model, context: Context, concat: ir.Node, found: Makers) -> str:
        lanes, run = context.target.vector_lanes, found.run
        if run < lanes:
            return f"{run} neighbours fill no vector"
        result = concat.outputs[0]
        read = {value for maker in found.makers for value in maker.inputs if value is not None}
        made = {value for maker in found.makers for value in maker.outputs}
        nodes = [one for maker in found.makers for one in Body.of(model, maker).nodes]
        operations = sum(operations_of(one.op_type) * tensor_type(one.outputs[0]).hinted.elements for one in nodes)
        join = Join(
            saved_bytes=2 * tensor_type(result).hinted.size_bytes,
            recomputed_operations=operations * (lanes * scalar_steps(run, lanes) / run - 1),  # in empty lanes at rows' ends
            saved_launches=len(found.makers),
            tensors=len(read - made) + 1,
            operators=len(nodes) + len(found.views) + 1,
        )
        return drawback(join, lanes, self.max_ops, context.target.threads)

    def _fuse(self, model: ir.Model, concat: ir.Node, found: Makers) -> None:
        graph = model.graph
        members = [
            one
            for maker in found.makers
            for one in (inline_function(model, maker) if is_fused(maker) else (maker,))
            if one.op_type != "Constant"
        ]
        members += found.views
        graph.remove(members)
        graph.insert_before(concat, members)
        nodes = [*members, concat]
        fuse_into_function(model, nodes, group_name(nodes), adjacent=True)


@dataclass(frozen=True, slots=True)
class Makers:
    """What makes the operands of a Concat, in the graph's order, the views between, and how many neighbours of an operand lie in
    the result at one distance."""

    makers: tuple[ir.Node, ...]
    views: tuple[ir.Node, ...]
    run: int


def pointwise_makers(model: ir.Model, concat: ir.Node) -> Makers | str:
    """The pointwise groups that make all operands of a Concat, for it alone; or why they cannot store them in its result.

    "" where a node is no Concat that copies what pointwise groups make.
    """
    if concat.op_type != "Concat" or not is_known(concat) or not has_static_type(concat.outputs[0]):
        return ""
    kind = tensor_type(concat.outputs[0])
    axis = concat.attributes.get_int("axis", 1) % max(len(kind.shape), 1)
    if kind.is_symbolic or not kind.elements or is_outermost(kind.shape, axis):
        return ""
    if kind.bits < _SMALLEST_BITS or "complex" in kind.dtype or len(concat.inputs) < 2:
        return ""
    values, views, makers = list[ir.Value](), list[ir.Node](), dict[ir.Node, None]()
    for operand in concat.inputs:
        value = _made(operand, views)
        maker = None if value is None else value.producer()
        if value is None or maker is None or not _is_pointwise(model, maker):
            return ""
        values.append(value)
        makers[maker] = None
    members = {concat, *views, *makers}
    if len(set(values)) < len(values):
        return "one of them is there twice"
    if any(value.is_graph_output() or any(user not in members for user in value.consumers()) for value in values):
        return "others read them, too"
    if any(output.name and output.uses() and output not in values for maker in makers for output in maker.outputs):
        return "who makes them has other results"
    if len({str(value.shape) for value in values}) > 1:
        return "they differ in shape"
    places = {node: place for place, node in enumerate(model.graph) if node in makers}
    ordered = tuple(sorted(places, key=places.__getitem__))
    return Makers(ordered, tuple(views), _run(tensor_type(values[0]).shape, kind.shape, axis, len(values)))


def _made(operand: ir.Value | None, views: list[ir.Node]) -> ir.Value | None:
    """What an operand is but for dimensions of one; the views between are added to `views`."""
    value, found = operand, list[ir.Node]()
    while value is not None and (view := value.producer()) is not None and is_view(view):
        source = view.inputs[0]
        if source is None or len(value.uses()) != 1 or value.is_graph_output() or not _differs_by_ones(source, value):
            return None
        found.append(view)
        value = source
    views += reversed(found)
    return value if value is not None and has_static_type(value) else None


def _differs_by_ones(one: ir.Value, other: ir.Value) -> bool:
    if not has_static_type(one) or not has_static_type(other):
        return False
    shapes = [[extent for extent in tensor_type(value).shape if extent != 1] for value in (one, other)]
    return shapes[0] == shapes[1]


def _is_pointwise(model: ir.Model, maker: ir.Node) -> bool:
    if maker.graph is not model.graph or is_part(maker, {}):
        return False
    return parts_of(model, maker) is not None and all(map(has_static_type, (one for one in maker.outputs if one.name)))


def _run(part: Sequence[int], result: Sequence[int], axis: int, count: int) -> int:
    """How many neighbours of a part, one of `count` along an axis of the result, lie there at one distance."""
    inner, extent = prod(result[axis + 1 :]), result[axis] // count
    if inner * extent == 1:  # in turns
        return prod(part)
    return inner * extent
