"""The layout of every node, chosen on the whole graph as a minimum cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx

OUTSIDE = -1  # whoever reads or makes values channels-first and has no choice


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one node makes and others read; a conversion of it costs `cost`, once for all who need it.

    `readers` want it in their own layout. `direct` readers do so too, but when they are channels-last themselves and it is not,
    they read it as it is, each at a cost of its own.
    """

    producer: int
    readers: tuple[int, ...]
    cost: int
    direct: tuple[tuple[int, int], ...] = ()  # reader, cost


@dataclass(frozen=True, slots=True)
class LayoutProblem:
    """`first[i]` and `last[i]` are the costs of node i in each layout, all not negative."""

    first: Sequence[int]
    last: Sequence[int]
    crossings: Sequence[Crossing]


def choose_layouts(problem: LayoutProblem) -> tuple[bool, ...]:
    """Which nodes had better be channels-last; of equally good choices the one with fewest.

    A cut separates a source, with all that is channels-first, from a sink. A node cut from the source pays its cost
    channels-last, one cut from the sink that of channels-first. Each crossing has two more vertices, of which one is on the side
    of the readers that are channels-last and the other on that of those that are not: cutting them from the producer is the
    conversion. An edge from the producer to a direct reader is cut where that one alone is channels-last.
    """
    graph = nx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    for node, (first, last) in enumerate(zip(problem.first, problem.last, strict=True)):
        graph.add_edge("source", node, capacity=last)
        graph.add_edge(node, "sink", capacity=first)
    for number, one in enumerate(problem.crossings):
        producer = _vertex(one.producer)
        for reader in one.readers:
            if reader != OUTSIDE:
                graph.add_edge(("to last", number), reader)  # without a capacity: never cut
        graph.add_edge(producer, ("to last", number), capacity=one.cost)
        for reader, cost in one.direct:
            graph.add_edge(producer, ("direct", number, reader), capacity=cost)
            graph.add_edge(("direct", number, reader), reader)
        if producer != "source":
            for reader in (*one.readers, *(reader for reader, _ in one.direct)):
                graph.add_edge(_vertex(reader), ("to first", number))
            graph.add_edge(("to first", number), producer, capacity=one.cost)
    _, (_, last_side) = nx.minimum_cut(graph, "source", "sink")
    return tuple(node in last_side for node in range(len(problem.first)))


def cost_of(problem: LayoutProblem, is_last: Sequence[bool]) -> int:
    """What a choice costs; written apart from the cut, which it checks."""
    total = sum(last if chosen else first for first, last, chosen in zip(problem.first, problem.last, is_last, strict=True))
    for one in problem.crossings:
        made_last = one.producer != OUTSIDE and is_last[one.producer]
        reads = [reader != OUTSIDE and is_last[reader] for reader in one.readers]
        reads += [False for reader, _ in one.direct if not is_last[reader]]
        total += one.cost * any(wanted != made_last for wanted in reads)
        total += sum(cost for reader, cost in one.direct if is_last[reader] and not made_last)
    return total


def _vertex(node: int) -> int | str:
    return "source" if node == OUTSIDE else node
