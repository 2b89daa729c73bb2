"""The core of attention: a product of queries and keys, Softmax of its rows, and their product with values."""

from __future__ import annotations

from collections import deque
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.kinds import Kind, is_pointwise, kind_of
from ....compiler.ir.matching import static_shape
from ....compiler.ir.rewriter import Rejection
from .membership import absorb, outside_reader

_MAX_CHAIN = 64  # nodes that are looked at on either side of Softmax; the longest chain of a known model has about 12
_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
_REGROUPED = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Core:
    """weighted = after(softmax(before(scores))) @ values, with scores [..., M, N] = queries [..., M, D] @ keys [..., D, N].

    `chain` holds the nodes of `before` and `after`: pointwise, or views that only regroup the dimensions before M, so that an
    element of any value of the chain depends on the score at its own place. No value but that of `weighted` is read outside.
    """

    scores: ir.Node
    softmax: ir.Node
    weighted: ir.Node
    chain: frozenset[ir.Node]

    @property
    def nodes(self) -> set[ir.Node]:
        return {self.scores, self.softmax, self.weighted, *self.chain}

    @property
    def operands(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Queries, keys and values as the products read them."""
        return _input(self.scores, 0), _input(self.scores, 1), _input(self.weighted, 1)


def find_core(softmax: ir.Node, opset: int) -> Core | Rejection | None:
    """The core around one Softmax; why there is none, where a matrix product follows it; None where none does."""
    weighted = _product_after(softmax)
    if not isinstance(weighted, ir.Node):
        return weighted
    shape = static_shape(softmax.outputs[0])
    if shape is None:
        return Rejection(f"%{softmax.outputs[0].name} has no static shape", (softmax, weighted))
    if softmax.attributes.get_int("axis", -1 if opset >= 13 else 1) not in (-1, len(shape) - 1):
        return Rejection(f"Softmax is not over the last axis of {list(shape)}, the keys", (softmax, weighted))
    after = _Region.of(_input(weighted, 0)).between(softmax)
    if after is None:
        return Rejection("MatMul does not multiply the probabilities from the right, each at its place", (softmax, weighted))
    if fault := _leaving(softmax, after, weighted):
        return fault
    if (values := _input(weighted, 1)).producer() in (softmax, *after):
        return Rejection(f"the values %{values.name} are made of the probabilities", (softmax, weighted))
    found = scores_of(softmax)
    if isinstance(found, Rejection):
        return found
    scores, before = found
    members = {scores, softmax, weighted, *before, *after}
    inputs = [value for node in members if node not in (scores, weighted) for value in node.inputs]
    absorb(members, inputs, lambda node: is_pointwise(node) and _keeps_places(node, shape))
    core = Core(scores, softmax, weighted, frozenset(members - {scores, softmax, weighted}))
    return _fault(core) or core


@dataclass(frozen=True, slots=True)
class _Region:
    """The nodes that compute a value from others of its size, each element from those at its place, and what made the others."""

    value: ir.Value
    nodes: AbstractSet[ir.Node]
    sources: tuple[ir.Node, ...]  # nearest first

    @classmethod
    def of(cls, value: ir.Value) -> _Region:
        nodes: set[ir.Node] = set()
        sources: dict[ir.Node, None] = {}
        shape, pending, seen = static_shape(value), deque([value]), {value}
        while pending and len(nodes) < _MAX_CHAIN:
            node = pending.popleft().producer()
            if node is None or node.op_type == "Constant":
                continue
            if shape is None or not _keeps_places(node, shape):
                sources[node] = None
                continue
            nodes.add(node)
            found = dict.fromkeys(one for one in node.inputs if one is not None and one not in seen)
            seen.update(found)
            pending.extend(found)
        return cls(value, nodes, tuple(sources))

    def between(self, source: ir.Node) -> set[ir.Node] | None:
        """The nodes of the region on paths from `source` to the value that broadcast nothing; None: there is no such path."""
        found: set[ir.Node] = set()
        pending = [source]
        while pending:
            made = pending.pop().outputs[0]
            readers = [node for node in made.consumers() if node in self.nodes and node not in found and _keeps_shape(node, made)]
            found.update(readers)
            pending += readers
        return found if self.value.producer() in (source, *found) else None


def _product_after(softmax: ir.Node) -> ir.Node | Rejection | None:
    """The nearest MatMul that reads the probabilities, through what keeps each of them at its place."""
    shape, nearly = static_shape(softmax.outputs[0]), None
    pending, seen = deque([softmax]), {softmax}
    while pending and len(seen) < _MAX_CHAIN:
        for reader in pending.popleft().outputs[0].consumers():
            if reader in seen or reader.graph is not softmax.graph:
                continue
            if _is_product(reader):
                return reader
            if shape is not None and _keeps_places(reader, shape):
                seen.add(reader)
                pending.append(reader)
            elif kind_of(reader) is Kind.INJECTIVE and any(map(_is_product, reader.outputs[0].consumers())):
                nearly = Rejection(f"{reader.op_type} stands between the probabilities and MatMul", (softmax, reader))
    return nearly


def scores_of(softmax: ir.Node) -> tuple[ir.Node, set[ir.Node]] | Rejection:
    """The product whose elements Softmax reads and what lies between, or why there is none that the group can hold."""
    region = _Region.of(_input(softmax, 0))
    products = [node for node in region.sources if _is_product(node)]
    fault: Rejection | None = None
    for node in products:
        between = region.between(node)
        if between is None:
            continue
        why = _leaving(node, between, softmax)
        if why is None:
            return node, between
        fault = fault or why
    if fault is not None:
        return fault
    nearest = next(iter((*products, *(node for node in region.sources if not is_pointwise(node)), *region.sources)), None)
    if nearest is None:
        return Rejection("no matrix product gives the scores", (softmax,))
    if is_pointwise(nearest) or _is_product(nearest):
        return Rejection(f"the scores are broadcast to {region.value.shape}", (nearest, softmax))
    return Rejection(f"no matrix product gives the scores, but {nearest.op_type}", (nearest, softmax))


def _leaving(source: ir.Node, between: AbstractSet[ir.Node], sink: ir.Node) -> Rejection | None:
    """That a value on the way from `source` to `sink` has a reader elsewhere."""
    members = {*between, sink}
    for node in (source, *between):
        if why := outside_reader(node.outputs[0], members):
            return Rejection(f"%{node.outputs[0].name} {why}", (source, sink))
    return None


def _fault(core: Core) -> Rejection | None:
    """What of the types and shapes keeps the core from being one kernel."""
    blamed = (core.scores, core.softmax, core.weighted)
    for value in (*core.operands, core.softmax.outputs[0], core.weighted.outputs[0]):
        if why := _type_fault(value, core.softmax.outputs[0]):
            return Rejection(f"%{value.name} {why}", blamed)
    for value in core.operands[1:]:
        if constant_tensor(value) is not None:
            return Rejection(f"%{value.name} is a constant: a product by weights has a better kernel", blamed)
    batch, result = (static_shape(one) or () for one in (_input(core.weighted, 0), core.weighted.outputs[0]))
    if batch[:-2] != result[:-2]:
        return Rejection(f"the probabilities of {list(batch)} are broadcast to values of {list(result)}", blamed)
    return None


def _type_fault(value: ir.Value, probabilities: ir.Value) -> str:
    """Why an operand or result cannot be in one kernel with `probabilities`; empty if it can."""
    shape = static_shape(value)
    if shape is None:
        return "has no static shape"
    if value.dtype not in _TYPES:
        return f"is of type {value.dtype}"
    if ir.DataType.DOUBLE in (value.dtype, probabilities.dtype) and value.dtype is not probabilities.dtype:
        return f"is of type {value.dtype} and the probabilities of type {probabilities.dtype}"
    return "" if prod(shape) else "has no elements"


def _is_product(node: ir.Node) -> bool:
    """Whether a node multiplies matrices, both of them with rows and columns."""
    if node.op_type != "MatMul" or kind_of(node) is not Kind.OUTPUT_FUSABLE:
        return False
    return all(value is not None and value.shape is not None and len(value.shape) >= 2 for value in node.inputs)


def _keeps_places(node: ir.Node, shape: _Shape) -> bool:
    """Whether a pointwise or regrouping node makes a value of the size of `shape`, with the same rows."""
    return (is_pointwise(node) or _is_regrouping(node)) and _has_places(node.outputs[0], shape)


def _keeps_shape(node: ir.Node, value: ir.Value) -> bool:
    """Whether elements of `value` stay at their places in the output of its pointwise or regrouping reader."""
    shape = static_shape(value)
    if _is_regrouping(node):
        return node.inputs[0] is value and shape is not None and _has_places(node.outputs[0], shape)
    return static_shape(node.outputs[0]) == shape


def _is_regrouping(node: ir.Node) -> bool:
    """Whether a node changes nothing but the dimensions before the last two."""
    shape = static_shape(node.inputs[0]) if node.op_type in _REGROUPED and node.domain == "" else None
    return shape is not None and _has_places(node.outputs[0], shape)


def _has_places(value: ir.Value, shape: _Shape) -> bool:
    """Whether a value is as large as `shape`, with the same last two dimensions."""
    own = static_shape(value)
    return own is not None and len(own) >= 2 and own[-2:] == shape[-2:] and prod(own) == prod(shape)


def _input(node: ir.Node, position: int) -> ir.Value:
    value = node.inputs[position]
    assert value is not None, f"{node.op_type} lacks input {position}"
    return value
