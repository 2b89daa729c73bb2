"""A graph as numbers: which node makes, reads and frees which bytes, and greedy orders of it."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import onnx_ir as ir

from ....compiler.ir.facts import has_static_type, tensor_type
from ....compiler.ir.kinds import Kind, kind_of
from ....compiler.ir.scopes import read_values


class Dataflow:
    """What the nodes of a graph make and read, all by number. A view is the tensor that it views.

    `makes[n]` and `reads[n]` are the tensors of node n, `readers[t]` the nodes that read tensor t, `sizes[t]` its bytes in the
    arena, `needs[n]` how many nodes node n needs and `after[n]` the nodes that need it.
    """

    def __init__(self, graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
        self.sizes: list[int] = []
        self.makes: list[list[int]] = []
        self.reads: list[list[int]] = []
        self.readers: list[list[int]] = []
        self.after: list[list[int]] = [[] for _ in nodes]
        self.needs: list[int] = []
        outputs = set(graph.outputs)
        tensors: dict[ir.Value, int] = {}
        numbers: dict[ir.Node, int] = {}
        for number, node in enumerate(nodes):
            numbers[node] = number
            values = read_values(node)
            self.reads.append(list(dict.fromkeys(tensors[value] for value in values if value in tensors)))
            for tensor in self.reads[-1]:
                self.readers[tensor].append(number)
            needed = {numbers[producer] for value in values if (producer := value.producer()) in numbers}
            self.needs.append(len(needed))
            for earlier in needed:
                self.after[earlier].append(number)
            self.makes.append([])
            for value in node.outputs:
                source = node.inputs[0] if kind_of(node) is Kind.VIEW and value not in outputs else None
                if source is not None and source in tensors:
                    tensors[value] = tensors[source]
                    continue
                tensors[value] = len(self.sizes)
                self.makes[-1].append(tensors[value])
                self.readers.append([])
                self.sizes.append(0 if value in outputs else _size_bytes(value))

    def peak_bytes(self, order: Sequence[int]) -> int:
        """The largest sum of live tensors when the nodes run in this order."""
        unread = [len(readers) for readers in self.readers]
        live = peak = 0
        for node in order:
            live += sum(self.sizes[tensor] for tensor in self.makes[node])
            peak = max(peak, live)
            for tensor in self.reads[node]:
                unread[tensor] -= 1
            dead = (tensor for tensor in self.reads[node] + self.makes[node] if not unread[tensor])
            live -= sum(self.sizes[tensor] for tensor in dead)
        return peak

    def greedy_order(self, *, depth_first: bool) -> list[int]:
        """A topological order that, step by step, takes the ready node after which the fewest bytes live."""
        unread = [len(readers) for readers in self.readers]
        needs = list(self.needs)
        ready_since: dict[int, int] = {}
        queue: list[tuple[int, int, int]] = []
        order: list[int] = []
        done = [False] * len(needs)

        def offer(node: int) -> None:
            added = sum(self.sizes[tensor] for tensor in self.makes[node] if unread[tensor])
            freed = sum(self.sizes[tensor] for tensor in self.reads[node] if unread[tensor] == 1)
            heappush(queue, (added - freed, -ready_since[node] if depth_first else node, node))

        def make_ready(node: int) -> None:
            ready_since[node] = len(order)
            offer(node)

        for node, count in enumerate(needs):
            if not count:
                make_ready(node)
        while queue:
            _, _, node = heappop(queue)
            if done[node]:
                continue  # offered again since, at a lower cost
            done[node] = True
            order.append(node)
            for tensor in self.reads[node]:
                unread[tensor] -= 1
                if unread[tensor] == 1:
                    last = next(reader for reader in self.readers[tensor] if not done[reader])
                    if last in ready_since:
                        offer(last)
            for follower in self.after[node]:
                needs[follower] -= 1
                if not needs[follower]:
                    make_ready(follower)
        return order


def _size_bytes(value: ir.Value) -> int:
    return tensor_type(value).size_bytes if has_static_type(value) and value.dtype is not ir.DataType.STRING else 0
