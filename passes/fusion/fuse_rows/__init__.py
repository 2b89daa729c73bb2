"""fuse-rows: reductions over the same rows, and pointwise nodes before, between and after them, become one group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ....compiler.ir.functions import fuse_into_function
from ....compiler.ir.kinds import is_pointwise
from ....compiler.ir.rewriter import Rejection
from ....compiler.ir.rows import Rows, claimed_nodes, rows_of
from ....compiler.pipeline import Context, Pass, number
from ....runtime.symbolic.sizes import hint_of
from ....runtime.target import Target
from .circles import drop_circles
from .columns import column_fault, is_by_column, spell_as_sum, summed_rows
from .growth import Growth, neighbours
from .product import product_before, product_fault

_NAMED_OPS = 6  # a function of more nodes is named by its first ones and their number
_MIN_LENGTH = 8  # elements of a row; shorter ones fill no vector
_SOFTMAX_OPSET = 13  # from which on Softmax is over one dimension
_SERIAL_ELEMENTS = 1 << 14  # that one thread may compute alone
_BLOCKS, _BLOCK_ELEMENTS = 32, 1 << 13  # fewer rows of more elements leave a GPU without work, which pointwise nodes alone share


@dataclass(frozen=True)
class FuseRows(Pass):
    """Move what is computed row by row into one function.

    Before:  s = Add(x, r);  n = RMSNormalization(s, w);  m = Mul(n, v);  t = ReduceSum(m, -1)
    After:   s, t = prefuse.add_rmsnormalization_mul_reducesum(x, r, w, v)

    A reduction, normalization or softmax over the last dimensions takes pointwise nodes and others over the same rows, so that
    a row is read and written once. Legal when every value has an element, or one number, for each place or row, and no path
    leaves the group and returns, other groups being nodes. Worth it when more than one reduction is in it, or what the epilogue
    of one cannot hold: nodes before it, or larger than its result. What an epilogue of a matrix product takes stays there, as
    that costs the same bytes, unless the product itself is computed with the rows of its result: one by constant float32
    weights, which each thread reads for its share of the rows, where that is large enough, and no kernel on a tile unit or by
    Strassen's algorithm, which takes blocks of all rows, computes it faster alone.

    A product by one column is a sum over rows, too, which is first spelled as one: of a vector of columns, which a product's tile
    has, all but one would be computed for nothing. Legal for floats of 32 bits or more, where the left operand has all dimensions
    of the batch. Sums are rounded in another order.
    """

    name: ClassVar[str] = "fuse-rows"
    max_ops: int = number(32, least=1)  # largest group, in nodes

    def run(self, model: ir.Model, context: Context) -> bool:
        if model.graph.opset_imports.get("", 1) < _SOFTMAX_OPSET:
            return False
        changed, is_left = _spell_columns(model, context), True
        while is_left:  # beside other groups as nodes, one that was on a circle with them may be a smaller one
            order = {node: index for index, node in enumerate(model.graph)}
            groups = self._groups(model, context, order)
            faults = drop_circles(groups, order)
            for fault in faults:
                context.reject(self.name, fault)
            _fuse(model, groups, order)
            changed, is_left = changed or bool(groups), bool(faults and groups)
        return changed

    def _groups(self, model: ir.Model, context: Context, order: dict[ir.Node, int]) -> list[list[ir.Node]]:
        """The groups that are worth it, each in order of the graph, without a node that is in two."""
        claimed = claimed_nodes(model.graph)
        taken: set[ir.Node] = set()
        groups, ask = list[list[ir.Node]](), context.kernels_of(model)
        for seed in order:
            rows = rows_of(seed)
            if rows is None or seed in taken:
                continue
            product = None if context.target.is_gpu else product_before(seed, claimed)
            if product is None and not _has_neighbours(seed):
                continue
            if (rejection := _obstacle(seed, rows, context.target)) is not None:
                context.reject(self.name, rejection)
                continue
            fault = None if product is None else product_fault(product, seed, rows, context.target, ask)
            if fault is not None:
                context.reject(self.name, fault)
                product = None
            growth = Growth(seed, rows, order, taken, claimed, self.max_ops, product)
            group, rejections = growth.grow()
            if product is not None and not growth.holds_head():
                for one in rejections:
                    context.reject(self.name, one)
                growth = Growth(seed, rows, order, taken, claimed, self.max_ops)
                group, rejections = growth.grow()
            for one in rejections:
                context.reject(self.name, one)
            if _is_worth(group, growth):
                taken.update(group)
                groups.append(group)
        return groups


def _fuse(model: ir.Model, groups: list[list[ir.Node]], order: dict[ir.Node, int]) -> None:
    """Make a function of each group. What stands between the nodes of one and reads it is moved behind its call."""
    for group in groups:
        nodes = sorted(group, key=order.__getitem__)
        is_adjacent = _is_adjacent(nodes, order)
        call = fuse_into_function(model, nodes, _group_name(nodes), adjacent=is_adjacent)
        if is_adjacent or len(call.outputs) == 1:
            order[call] = order[nodes[-1]]
        else:
            order = {node: place for place, node in enumerate(model.graph)}


def _spell_columns(model: ir.Model, context: Context) -> bool:
    """Spell those products by one column as sums over rows whose rows can be computed together; return whether there are any."""
    changed = False
    if context.target.is_gpu:  # products by a column share k among blocks there
        return changed
    for node in [node for node in model.graph if is_by_column(node)]:
        fault = column_fault(node) or _obstacle(node, summed_rows(node), context.target)
        if fault is not None:
            context.reject(FuseRows.name, fault)
        else:
            spell_as_sum(model, node)
            changed = True
    return changed


def _obstacle(seed: ir.Node, rows: Rows, target: Target) -> Rejection | None:
    """Why rows are not computed together at all."""

    def no(reason: str) -> Rejection:
        return Rejection(f"nothing computed in the rows of {seed.op_type}: {reason}", (seed,))

    number, length = hint_of(rows.number), hint_of(rows.length)
    if not number or length < _MIN_LENGTH:
        return no(f"{rows.length} elements are too few")
    if target.is_gpu and number < _BLOCKS and length > _BLOCK_ELEMENTS:
        return no(f"{rows.number} rows are the work of as many thread blocks, and most of a GPU would wait")
    if number < target.threads and number * length > _SERIAL_ELEMENTS:
        return no(f"{rows.number} rows leave threads without work, which pointwise nodes alone would share")
    return None


def _has_neighbours(seed: ir.Node) -> bool:
    """Whether a pointwise node or another reduction is next to it."""
    return any(is_pointwise(node) or rows_of(node) is not None for node in neighbours(seed))


def _is_worth(group: list[ir.Node], growth: Growth) -> bool:
    """Whether a group is more than one reduction and what its own epilogue holds."""
    if growth.head is not None:
        return True
    places = growth.members
    reductions = [node for node in group if rows_of(node) is not None]
    if len(reductions) > 1:
        return True
    (reduction,) = reductions
    first, place = group.index(reduction), places[reduction]
    return first > 0 or any(places[node] is not place for node in group)


def _is_adjacent(group: list[ir.Node], order: dict[ir.Node, int]) -> bool:
    """Whether everybody else who reads a group stands after its last node."""
    members, last = set(group), order[group[-1]]
    readers = (reader for node in group for value in node.outputs for reader in value.consumers() if reader not in members)
    return all(order.get(reader, -1) > last for reader in readers)


def _group_name(group: list[ir.Node]) -> str:
    names = [node.op_type.lower() for node in group]
    return "_".join(names) if len(names) <= _NAMED_OPS else f"{'_'.join(names[:2])}_and_{len(names) - 2}_of_rows"
