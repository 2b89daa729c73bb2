"""What merging products costs and saves, in bytes moved; a launch counts as the bytes that could be moved in its time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from ....compiler.ir.facts import tensor_type
from ....compiler.ir.kinds import is_pointwise
from ....compiler.ir.matching import has_same_shape
from ....compiler.ir.rewriter import Rejection
from ...fusion.fuse_attention.core import find_core
from ...fusion.fuse_attention.surroundings import absorb_prologues
from .families import Branch

LAUNCH_BYTES = 24_000  # 2.4 us at 10 GB/s
_MAX_FOLLOWERS = 16  # pointwise nodes behind a branch that are looked at


@dataclass(frozen=True, slots=True)
class Balance:
    """Of merging some branches: bytes of the shared operand and launches saved, bytes moved and launches made in return."""

    saved_bytes: int
    saved_launches: int
    cost_bytes: int
    cost_launches: int

    @property
    def is_worth_it(self) -> bool:
        return self.saved_bytes + self.saved_launches * LAUNCH_BYTES > self.cost_bytes + self.cost_launches * LAUNCH_BYTES

    def __str__(self) -> str:
        saved = f"{self.saved_bytes} bytes and {self.saved_launches} launches"
        return f"it saves {saved}, and costs {self.cost_bytes} bytes and {self.cost_launches} launches"


def attention_groups(graph: ir.Graph, opset: int) -> dict[ir.Node, int]:
    """The number of the attention that each node will be a part of, as fuse-attention finds them."""
    groups: dict[ir.Node, int] = {}
    for softmax in [node for node in graph if node.op_type == "Softmax" and node.domain == ""]:
        core = find_core(softmax, opset)
        if core is None or isinstance(core, Rejection):
            continue
        members = core.nodes
        absorb_prologues(members, core.operands)
        number = len(groups)
        groups.update((node, number) for node in members)
    return groups


def reading_attention(value: ir.Value, groups: Mapping[ir.Node, int]) -> int | None:
    """The attention that alone reads a value and can do so through a Split, maybe scaled by a constant first; None if none is."""
    if value.is_graph_output():
        return None
    readers = list(value.consumers())
    if len(readers) == 1 and readers[0] not in groups and _is_scaling(readers[0], value):
        return reading_attention(readers[0].outputs[0], groups)
    numbers = {groups.get(reader) for reader in readers}
    return numbers.pop() if len(numbers) == 1 else None


def balance_of(branches: Sequence[Branch], source_bytes: int, *, is_read_through: bool, is_contiguous: bool) -> Balance:
    """What merging these branches is worth.

    Args:
        is_read_through: one kernel reads all results and can do so through a Split.
        is_contiguous: the Split is no kernel, but the results must still lie in memory.
    """
    cost_bytes = sum(branch_bytes(branch, is_read_through=is_read_through, is_contiguous=is_contiguous) for branch in branches)
    launches = 0 if is_read_through or is_contiguous else 1
    if not is_read_through:
        launches += _separate([_followers(branch.result) for branch in branches])
    return Balance((len(branches) - 1) * source_bytes, len(branches) - 1, cost_bytes, launches)


def branch_bytes(branch: Branch, *, is_read_through: bool, is_contiguous: bool) -> int:
    """Bytes moved because a branch is a part of something: its copy, and storing what its epilogue would have taken over."""
    if is_read_through:
        return 0
    size_bytes = tensor_type(branch.result).hinted.size_bytes
    return 2 * size_bytes * ((not is_contiguous) + bool(_followers(branch.result)))


def _is_scaling(node: ir.Node, value: ir.Value) -> bool:
    others = [other for other in node.inputs if other is not value]
    is_scalar = all(other is not None and other.is_initializer() and other.shape is not None for other in others)
    return node.op_type in ("Mul", "Div") and is_scalar and all(tensor_type(o).elements == 1 for o in others if o is not None)


def _followers(result: ir.Value) -> set[ir.Node]:
    """The pointwise nodes that the product would take as its epilogue, and those behind them."""
    found: set[ir.Node] = set()
    pending = [result]
    while pending and len(found) < _MAX_FOLLOWERS:
        value = pending.pop()
        for reader in value.consumers():
            if reader not in found and is_pointwise(reader) and has_same_shape(reader.outputs[0], result):
                found.add(reader)
                pending.append(reader.outputs[0])
    return found


def _separate(sets: Iterable[set[ir.Node]]) -> int:
    """How many kernels compute these pointwise nodes: sets that meet share one."""
    joined: list[set[ir.Node]] = []
    for nodes in sets:
        if nodes:
            meeting = [other for other in joined if other & nodes]
            joined = [other for other in joined if not other & nodes] + [nodes.union(*meeting)]
    return len(joined)
