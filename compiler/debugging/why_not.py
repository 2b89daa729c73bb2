"""Why two nodes are not in one group: what was refused, else what lies between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import onnx_ir as ir

from ...runtime.errors import InputError
from ..ir.kinds import Kind, kind_of
from ..ir.names import operator_name
from ..ir.scopes import read_values
from ..pipeline.grouping import Rejections, anchor_name, anchor_of, members_of
from .compilation import Compilation
from .explanation import removal_of
from .history import Life

_SHOWN = 8  # nodes that an ambiguous name lists


@dataclass(frozen=True, slots=True)
class Answer:
    """`together`: they are in one group. `path`: the groups from one to the other, as data flows; `reasons`: what passes said."""

    together: bool
    summary: str
    reasons: tuple[str, ...] = ()
    path: tuple[str, ...] = ()

    def lines(self) -> Iterator[str]:
        """The answer, for people."""
        yield self.summary
        yield from (f"  {reason}" for reason in self.reasons)
        if self.path:
            yield f"  path: {' -> '.join(self.path)}"


def why_not(compilation: Compilation, first: str, second: str) -> Answer:
    """Why the nodes that two texts mean, as `Compilation.find` reads them, are not in one group.

    Raises:
        InputError: a text means no node, or several.
    """
    lives = [_life(compilation, text) for text in (first, second)]
    for text, life in zip((first, second), lives, strict=True):
        if not life.last:
            return Answer(False, f"{text} is in no group: {removal_of(life)}")
    one, other = lives
    rejections = Rejections(compilation.context.remarks)
    refused = tuple(dict.fromkeys(map(str, rejections.between(one.aliases, other.aliases))))
    if common := [node for node in one.last if node in other.last]:
        item = compilation.group_of(common[0])
        template = "" if item is None else f", computed by template {item.kernel.template}"
        before = tuple(f"refused before: {reason}" for reason in refused)
        return Answer(True, f"{first} and {second} are in one group, {common[0].operator}{template}", before)
    if refused:
        return Answer(False, f"{first} and {second} are not in one group: it was refused", refused)
    return _Nearest(compilation, rejections, first, second).answer(one, other)


def _life(compilation: Compilation, text: str) -> Life:
    found = compilation.find(text)
    if len(found) > 1:
        names = ", ".join(name for _, name in found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")
        raise InputError(f"node {text!r}", f"{len(found)} nodes are meant", f"name one: {names}")
    return compilation.history.follow(*found[0])


class _Nearest:
    """What can be said of two nodes that no rejection names together."""

    def __init__(self, compilation: Compilation, rejections: Rejections, first: str, second: str) -> None:
        self.model = compilation.model
        self.rejections = rejections
        self.names = (first, second)
        self.nodes = {str(node.name): node for node in compilation.model.graph}
        self.asked: dict[ir.Node, str] = {}  # groups of the nodes asked about, and how these were called

    def answer(self, one: Life, other: Life) -> Answer:
        """The path between them with the first refusal on it, or that there is none."""
        starts, goals = ([self.nodes[node.name] for node in life.last] for life in (one, other))
        self.asked = {node: name for name, nodes in zip(self.names, (starts, goals), strict=True) for node in nodes}
        path = _path(starts, goals) or _path(goals, starts)
        head = f"{self.names[0]} and {self.names[1]} are not in one group"
        if not path:
            shared = sorted(_inputs(starts) & _inputs(goals))
            beside = f"; both read {', '.join(f'%{name}' for name in shared[:_SHOWN])}" if shared else ""
            return Answer(False, f"{head}: no path leads from one to the other{beside}", self._around(starts, goals))
        shown = tuple(map(self._shown, path))
        for before, after in pairwise(path):
            if refused := self.rejections.between(members_of(before), members_of(after)):
                where = f"the first refusal between them keeps {self._called(before)} and {self._called(after)} apart"
                return Answer(False, f"{head}: {where}", tuple(dict.fromkeys(map(str, refused))), shown)
        reason = f"no pass refused it; {self._apart(path[0], path[1])}"
        return Answer(False, f"{head}: {reason}", (*_joined(one, other), *self._around(starts, goals)), shown)

    def _apart(self, before: ir.Node, after: ir.Node) -> str:
        """Why two neighbours are two groups, by their kinds alone."""
        for node in (before, after):
            if self._kind(node) is Kind.VIEW:
                return f"{self._called(node)} is a view, which needs no kernel, and no pass led a group through it"
        if all(self._kind(node) > Kind.BROADCAST for node in (before, after)):
            anchors = " and ".join(anchor_name(self.model, node) for node in (before, after))
            return f"{self._shown(before)} and {self._shown(after)} have anchors, {anchors}, each with a kernel of its own"
        return f"no pass of the pipeline joins {self._shown(before)} and {self._shown(after)}"

    def _shown(self, node: ir.Node) -> str:
        """A group, with the function that it is or its operator."""
        return f"{self._called(node)} ({operator_name(node)})"

    def _called(self, node: ir.Node) -> str:
        """A group by the node of it that was asked about, else by its own name."""
        return self.asked.get(node, str(node.name))

    def _kind(self, node: ir.Node) -> Kind:
        return kind_of(anchor_of(self.model, node))

    def _around(self, *sides: Iterable[ir.Node]) -> tuple[str, ...]:
        """What was refused to either, with whomever."""
        names = [name for side in sides for node in side for name in members_of(node)]
        return tuple(dict.fromkeys(f"refused to one of them: {remark}" for remark in self.rejections.naming(names)))


def _joined(*lives: Life) -> tuple[str, ...]:
    """Which passes put either into a group, before any other could, the last of them first."""
    found = [(event, life.first.name) for life in lives for event in life.events if event.change == "fused"]
    found.sort(key=lambda one: -one[0].position)
    return tuple(f"{event.pass_name} fused {name} {event.detail}" for event, name in found)


def _path(starts: list[ir.Node], goals: list[ir.Node]) -> list[ir.Node]:
    """A shortest way from one of `starts` along readers to one of `goals`, both ends with it; empty where there is none."""
    wanted, queue = set(goals), deque(starts)
    parents: dict[ir.Node, ir.Node | None] = dict.fromkeys(starts)
    while queue:
        node = queue.popleft()
        if node in wanted:
            way = [node]
            while (parent := parents[way[-1]]) is not None:
                way.append(parent)
            return way[::-1]
        for reader in (reader for value in node.outputs for reader in value.consumers()):
            if reader not in parents:
                parents[reader] = node
                queue.append(reader)
    return []


def _inputs(nodes: Iterable[ir.Node]) -> set[str]:
    return {str(value.name) for node in nodes for value in read_values(node) if not value.is_initializer()}
