"""What became of each node: the graph's nodes after every pass, and the way of one of them through these.

A node is followed by its name, which fusing keeps among the members of the group. Where the name is gone it is followed by the
values that it computed, to whatever computes them now, with the new nodes that stand before that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

import onnx_ir as ir

from ..ir.facts import source_of
from ..ir.functions import fused_names, is_fused
from ..ir.names import operator_name
from ..ir.scopes import read_values

IMPORT, LOWERING = "import", "lowering"
Change = Literal["changed", "fused", "taken apart", "replaced", "merged", "absorbed", "removed"]


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node after some pass. `members` are the nodes that it consists of: itself, or those fused into it."""

    name: str
    operator: str
    members: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        return (
            f"{', '.join(f'%{name}' for name in self.outputs)} = {self.operator}({', '.join(f'%{name}' for name in self.inputs)})"
        )


@dataclass(frozen=True)
class Snapshot:
    """The nodes of the main graph after a pass, in order. `position` counts the passes from 0; -1 is the imported graph."""

    pass_name: str
    position: int
    nodes: tuple[NodeState, ...]

    @cached_property
    def by_member(self) -> dict[str, NodeState]:
        return {member: node for node in self.nodes for member in node.members}

    @cached_property
    def by_output(self) -> dict[str, NodeState]:
        return {output: node for node in self.nodes for output in node.outputs}

    @cached_property
    def order(self) -> dict[str, int]:
        return {node.name: place for place, node in enumerate(self.nodes)}

    @cached_property
    def readers(self) -> dict[str, list[NodeState]]:
        found: dict[str, list[NodeState]] = defaultdict(list)
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                found[name].append(node)
        return found


@dataclass(frozen=True, slots=True)
class Event:
    """What a pass did to a node, with the names of what it is afterwards (none: it is gone)."""

    pass_name: str
    position: int
    change: Change
    detail: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Life:
    """The way of one node: its first state, the events, and what it is at the end.

    `inserted` is what passes put before or behind it, such as a change of layout. That is no part of the node: a group that it
    is fused into later is not the node's.
    """

    first: NodeState
    events: tuple[Event, ...]
    last: tuple[NodeState, ...]
    inserted: tuple[NodeState, ...]
    aliases: frozenset[str]  # every name that it, or what became of it, has had


@dataclass
class History:
    """The snapshots of one compilation, oldest first; a pass that changes nothing leaves none."""

    snapshots: list[Snapshot] = field(default_factory=list)

    def take(self, pass_name: str, position: int, model: ir.Model) -> None:
        """Record the graph as it is now."""
        self.snapshots.append(Snapshot(pass_name, position, tuple(map(_state, model.graph))))

    def follow(self, start: int, name: str) -> Life:
        """The way of the node that is called so in the snapshot `start`, to the end."""
        first = self.snapshots[start].by_member[name]
        names, beside, aliases, events = [name], list[str](), {name}, list[Event]()
        for before, after in pairwise(self.snapshots[start:]):
            steps = [_Step(before, after, one) for one in names]
            for step in steps:
                if step.change is not None:
                    events.append(Event(after.pass_name, after.position, step.change, step.detail, step.names))
            followed = [one for other in beside for one in _Step(before, after, other).names]
            names = list(dict.fromkeys(one for step in steps for one in step.names))
            beside = list(dict.fromkeys(followed + [one for step in steps for one in step.inserted]))
            aliases.update(names)
        at_end = self.snapshots[-1].by_member
        last, inserted = (tuple(dict.fromkeys(at_end[one] for one in group)) for group in (names, beside))
        return Life(first, tuple(events), last, inserted, frozenset(aliases))


class _Step:
    """What one pass made of one node: `change` None where it left it alone, `names` of what is followed from there on.

    `inserted` are the members of new nodes beside a node that is still there.
    """

    def __init__(self, before: Snapshot, after: Snapshot, name: str) -> None:
        self.before, self.after = before, after
        self.old = before.by_member[name]
        self.names: tuple[str, ...] = (name,)
        self.inserted: tuple[str, ...] = ()
        self.change: Change | None = None
        self.detail = ""
        new = after.by_member.get(name)
        if new is not None:
            self._kept(new)
        elif not (self._replaced() or self._bypassed() or self._absorbed()):
            self._set("removed", "nothing needs its result", ())

    def _set(self, change: Change, detail: str, names: Iterable[str]) -> None:
        self.change, self.detail, self.names = change, detail, tuple(names)

    def _kept(self, new: NodeState) -> None:
        old = self.old
        if len(new.members) > len(old.members):
            others = [member for member in new.members if member not in self.names]
            self._set("fused", f"into {new.operator}, with {', '.join(others)}", self.names)
        elif len(new.members) < len(old.members):
            self._set("taken apart", f"it is {new}", self.names)
        elif (old.operator, old.inputs, old.outputs) != (new.operator, new.inputs, new.outputs):
            self._set("changed", f"it was {old}, and is {new}", self.names)
        self._surrounded(new)

    def _surrounded(self, new: NodeState) -> None:
        """New nodes stand before it, or compute its results from what it computes now."""
        if self.change is None:
            return
        ends = [self.after.by_output[name] for name in self.old.outputs if name in self.after.by_output]
        made = [node for node in self._new_before((new, *ends)) if not self._was_there(node)]
        if made:
            self._set(self.change, f"{self.detail}; new beside it: {_listed(made)}", self.names)
            self.inserted = tuple(member for node in made for member in node.members)

    def _replaced(self) -> bool:
        """Something else computes its result now."""
        now = dict.fromkeys(self.after.by_output[name] for name in self.old.outputs if name in self.after.by_output)
        if not now:
            return False
        if all(map(self._was_there, now)):
            node = next(iter(now))
            old = self.before.by_member[next(member for member in node.members if member in self.before.by_member)]
            if old.inputs == node.inputs:  # that node alone was enough
                self._set("removed", f"{node.name} computes its result", ())
            else:
                self._set("absorbed", f"into {node.name}: {node}", node.members)
            return True
        made = list(self._new_before(now))
        self._set("replaced", f"by {_listed(made)}", [member for node in made for member in node.members])
        return True

    def _new_before(self, nodes: Iterable[NodeState]) -> Iterator[NodeState]:
        """Those of `nodes`, and the new nodes that they are computed from, inputs first, without constants.

        What computes a value that was there before takes the place of another node, and is not among them.
        """
        pending, seen = list(nodes), dict[NodeState, None]()
        while pending:
            node = pending.pop()
            if node in seen or (node.operator == "Constant" and seen):
                continue
            seen[node] = None
            producers = (self.after.by_output.get(name) for name in node.inputs if name not in self.before.by_output)
            pending += [one for one in producers if one is not None and not self._was_there(one)]
        yield from sorted(seen, key=lambda node: self.after.order[node.name])

    def _was_there(self, node: NodeState) -> bool:
        return any(member in self.before.by_member for member in node.members)

    def _bypassed(self) -> bool:
        """A reader is still there, and reads something else."""
        for output in self.old.outputs:
            for reader in self.before.readers.get(output, ()):
                now = self.after.by_member.get(reader.members[-1])
                if now is None or len(now.inputs) != len(reader.inputs) or now.members != reader.members:
                    continue
                value = now.inputs[reader.inputs.index(output)]
                producer = self.after.by_output.get(value)
                if producer is None:
                    self._set("removed", f"%{value}, a constant or an input, takes the place of its result", ())
                elif producer.operator == self.old.operator and value not in self.old.inputs:
                    self._set("merged", f"with {producer.name}, which computes the same", producer.members)
                else:
                    self._set("removed", f"%{value} takes the place of its result", ())
                return True
        return False

    def _absorbed(self) -> bool:
        """Its readers are gone too: what computes their results now has taken it in."""
        pending, seen = list(self.old.outputs), set[str]()
        while pending:
            value = pending.pop(0)
            if value in seen:
                continue
            seen.add(value)
            now = self.after.by_output.get(value)
            if now is not None:
                self._set("absorbed", f"into {now.name}: {now}", now.members)
                return True
            for reader in self.before.readers.get(value, ()):
                pending += reader.outputs
        return False


def _state(node: ir.Node) -> NodeState:
    name = node.name or str(node.outputs[0].name)
    members = (fused_names(node) or (name,)) if is_fused(node) else (name,)
    inputs = tuple(str(value.name) for value in read_values(node))
    outputs = tuple(str(value.name) for value in node.outputs if value.name)
    return NodeState(name, operator_name(node), members, inputs, outputs, source_of(node))


def _listed(nodes: Sequence[NodeState]) -> str:
    return "; ".join(f"{node.name}: {node}" for node in nodes)
