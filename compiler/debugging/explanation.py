"""The history of a node, for people: where it comes from, what each pass did to it, and which kernel computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..pipeline.grouping import Rejections, lone_groups
from .compilation import Compilation
from .history import Event, Life, NodeState


@dataclass(frozen=True, slots=True)
class Placement:
    """What is left of a node at the end: its group (itself where it is alone), and the kernel; no template: it needs none."""

    operator: str
    members: tuple[str, ...]
    outputs: tuple[str, ...]
    template: str
    refused: tuple[tuple[str, str], ...]
    alone: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        results = ", ".join(f"%{name}" for name in self.outputs)
        others = f" of {', '.join(self.members)}" if len(self.members) > 1 else ""
        yield f"group {self.operator}{others}, which computes {results}"
        if self.template:
            yield f"kernel template {self.template}"
        else:
            yield "no kernel: its result is part of another value's bytes, or empty"
        yield from (f"not {template}: {reason}" for template, reason in self.refused)
        yield from (f"alone: {reason}" for reason in self.alone)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The way of one node from its source to its kernels. `rejections` are all that were refused to it, or to what it became."""

    name: str
    node: str
    source: str
    events: tuple[Event, ...]
    rejections: tuple[str, ...]
    placements: tuple[Placement, ...]
    failure: str

    def lines(self) -> Iterator[str]:
        """The history, a line an event."""
        yield f"{self.name}: {self.node}"
        if self.source != self.name:
            yield f"  from {self.source}"
        for event in self.events:
            yield f"  {event.pass_name} (number {event.position}): {event.change}: {event.detail}"
        yield from (f"  refused: {reason}" for reason in self.rejections)
        yield from (f"  {line}" for placement in self.placements for line in placement.lines())
        if not self.placements:
            yield f"  not compiled: {self.failure}" if self.failure else "  nothing of it is left to compute"


def explain(compilation: Compilation, text: str) -> tuple[Explanation, ...]:
    """The history of each node that `text` means, as `Compilation.find` reads it.

    Raises:
        InputError: there is no such node.
    """
    rejections = Rejections(compilation.context.remarks)
    alone = lone_groups(compilation.model, compilation.lone_nodes, compilation.context.remarks)
    found = []
    for start, name in compilation.find(text):
        life = compilation.history.follow(start, name)
        said = tuple(dict.fromkeys(str(remark) for remark in rejections.naming(sorted(life.aliases))))
        placements = tuple(_placement(compilation, node, alone) for node in life.last) if not compilation.failure else ()
        found.append(Explanation(name, str(life.first), life.first.source, life.events, said, placements, compilation.failure))
    return tuple(found)


def removal_of(life: Life) -> str:
    """Which pass removed a node that is gone, and why."""
    event = life.events[-1]
    return f"{event.pass_name} removed it: {event.detail}"


def _placement(compilation: Compilation, node: NodeState, alone: dict[str, tuple[str, ...]]) -> Placement:
    item = compilation.group_of(node)
    template, refused = ("", ()) if item is None else (item.kernel.template, item.kernel.refused)
    return Placement(node.operator, node.members, node.outputs, template, refused, alone.get(node.name, ()))
