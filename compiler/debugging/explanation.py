"""The history of a node, for people: where it comes from, what each pass did to it, and which kernel computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..lowering.chooser import KernelEstimate, estimates_of
from ..pipeline.grouping import Rejections, lone_groups
from .compilation import Compilation
from .history import Event, Life, NodeState


@dataclass(frozen=True, slots=True)
class Placement:
    """What is left of a node at the end: its group (itself where it is alone), and the kernel; no template: it needs none.

    `estimates` are of the kernel and of those that would have computed the group, too.
    """

    operator: str
    members: tuple[str, ...]
    outputs: tuple[str, ...]
    template: str
    estimates: tuple[KernelEstimate, ...]
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
        if self.estimates:
            yield f"  {'predicted':28}{'us':>10}{'cycles':>14}{'bytes':>12}{'operations':>14}  unit"
            yield from (f"  {_row(one)}" for one in self.estimates)
        known = {one.template for one in self.estimates}
        yield from (f"not {template}: {reason}" for template, reason in self.refused if template not in known)
        yield from (f"alone: {reason}" for reason in self.alone)


def _row(one: KernelEstimate) -> str:
    """The numbers of an estimate, under their heads."""
    least = " at least" if one.is_floor else ""
    numbers = f"{one.time_us:10.1f}{one.cycles:14.0f}{one.bytes_moved:12}{one.operations:14}"
    return f"{one.template:28}{numbers}  {one.unit}{least}"


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
    alone_for = alone.get(node.name, ())
    if item is None:
        return Placement(node.operator, node.members, node.outputs, "", (), (), alone_for)
    kernel, found = item.kernel, estimates_of(item.group, compilation.context.target)
    known = tuple(one for one in found if one.template == kernel.template or not one.is_floor)  # floors are no comparison
    return Placement(node.operator, node.members, node.outputs, kernel.template, known, kernel.refused, alone_for)
