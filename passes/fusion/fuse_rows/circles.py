"""Groups that wait for each other's results: each for itself can be one node, but not all of them."""

from __future__ import annotations

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import onnx_ir as ir

from ....compiler.ir.rewriter import Rejection
from ....compiler.ir.rows import rows_of
from ....compiler.ir.scopes import read_values


def drop_circles(groups: list[list[ir.Node]], order: dict[ir.Node, int]) -> list[Rejection]:
    """Take groups out of a list, of those on a circle the last one, until the graph has an order with each as one node.

    `order` are the nodes of the graph in theirs, as those of each group are. Returns why groups are out.
    """
    rejections = []
    while _overlap(groups, order) and (circle := _circle(groups, order)):
        group = groups.pop(max(circle))
        seed = next(node for node in group if rows_of(node) is not None)
        reason = f"nothing computed in the rows of {seed.op_type}: another group makes what they read of what they make"
        rejections.append(Rejection(reason, tuple(group)))
    return rejections


def _overlap(groups: Iterable[list[ir.Node]], order: dict[ir.Node, int]) -> bool:
    """Whether one group begins before another one ends: else none reads what a later one makes."""
    spans = sorted((order[group[0]], order[group[-1]]) for group in groups)
    return any(begin < end for (_, end), (begin, _) in pairwise(spans))


def _circle(groups: Iterable[list[ir.Node]], order: Iterable[ir.Node]) -> set[int]:
    """The numbers of groups that wait for each other; empty where there are none."""
    numbers = {node: number for number, group in enumerate(groups) for node in group}
    sorter = TopologicalSorter[ir.Node | int]()
    for node in order:
        whole = numbers.get(node, node)
        for value in read_values(node):
            producer = value.producer()
            if producer is not None and (read := numbers.get(producer, producer)) != whole:
                sorter.add(whole, read)
    try:
        sorter.prepare()
    except CycleError as error:
        return {one for one in error.args[1] if isinstance(one, int)}
    return set()
