"""Why groups are what they are: what was refused, and where nothing was, what stands beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir

from ..ir.aliases import is_view
from ..ir.functions import anchor_among, body_of, fused_names, is_fused
from ..ir.names import operator_name
from ..ir.scopes import read_values
from . import Remark


class Rejections:
    """The rejections of a compilation, by the nodes that they name; those of the pass that had the last word come first."""

    def __init__(self, remarks: Iterable[Remark]) -> None:
        said = [remark for remark in remarks if remark.kind == "rejection"]
        last = {remark.pass_name: place for place, remark in enumerate(said)}
        self._said = sorted(dict.fromkeys(said), key=lambda remark: -last[remark.pass_name])
        self._by_name: dict[str, list[int]] = defaultdict(list)
        for number, remark in enumerate(self._said):
            for name in dict.fromkeys(name for names in remark.nodes for name in names):
                self._by_name[name].append(number)

    def naming(self, names: Iterable[str]) -> tuple[Remark, ...]:
        """Those that name any of these nodes, each once."""
        numbers = {number for name in names for number in self._by_name.get(name, ())}
        return tuple(self._said[number] for number in sorted(numbers))

    def between(self, first: Iterable[str], second: Iterable[str]) -> tuple[Remark, ...]:
        """Those that name one of `first`, and as another node one of `second`."""
        some, others = frozenset(first), frozenset(second)
        return tuple(remark for remark in self.naming(some) if _names_both(remark, some, others))


def _names_both(remark: Remark, first: frozenset[str], second: frozenset[str]) -> bool:
    one = [position for position, names in enumerate(remark.nodes) if not first.isdisjoint(names)]
    two = [position for position, names in enumerate(remark.nodes) if not second.isdisjoint(names)]
    return any(a != b for a in one for b in two)


def members_of(node: ir.Node) -> tuple[str, ...]:
    """Names of the nodes that a node consists of: its own, or those of what is fused into it."""
    return (fused_names(node) if is_fused(node) else ()) or (str(node.name),)


def lone_groups(model: ir.Model, nodes: Iterable[ir.Node], remarks: Iterable[Remark]) -> dict[str, tuple[str, ...]]:
    """For groups of one operator, by the names of these nodes, why they are no larger: what was refused, else what is beside."""
    rejections = Rejections(remarks)
    found = {}
    for node in nodes:
        reasons = dict.fromkeys(str(remark) for remark in rejections.naming(members_of(node)))
        found[str(node.name)] = tuple(reasons) or (_surroundings(model, node),)
    return found


def _surroundings(model: ir.Model, node: ir.Node) -> str:
    """What is computed right before and after a node, seen through views."""
    before = sorted({anchor_name(model, one) for one in _behind_views(node, _producers)})
    after = sorted({anchor_name(model, one) for one in _behind_views(node, _readers)})
    parts = [f"{verb} {', '.join(names)}" for verb, names in (("it reads", before), ("it is read by", after)) if names]
    return "nothing beside it to fuse" + (f": {'; '.join(parts)}" if parts else "")


def _producers(node: ir.Node) -> list[ir.Node]:
    return [producer for value in read_values(node) if (producer := value.producer()) is not None]


def _readers(node: ir.Node) -> list[ir.Node]:
    return [reader for value in node.outputs for reader in value.consumers()]


def neighbours(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes right before and after a node, seen through views."""
    yield from _behind_views(node, _producers)
    yield from _behind_views(node, _readers)


def _behind_views(node: ir.Node, step: Callable[[ir.Node], list[ir.Node]]) -> Iterator[ir.Node]:
    """The nodes one step away, views skipped."""
    pending = list(step(node))
    seen = set(pending)
    while pending:
        one = pending.pop()
        if not is_view(one):
            yield one
            continue
        more = [other for other in step(one) if other not in seen]
        seen.update(more)
        pending += more


def anchor_of(model: ir.Model, node: ir.Node) -> ir.Node:
    """The node that a group is built around."""
    if not is_fused(node):
        return node
    return anchor_among([child for child in body_of(model, node) if child.op_type != "Constant"] or [node])


def anchor_name(model: ir.Model, node: ir.Node) -> str:
    """The operator that a group is built around."""
    return operator_name(anchor_of(model, node))
