"""Which values need no memory of their own: views, contiguous parts of other values, and pieces of a Concat.

A tensor is dense and row-major, so a part of one is contiguous where all dimensions before the axis that is cut are 1. Then a
Slice, a Split or a Gather of neighbours is its source's bytes from some offset on; and the producers of a Concat's operands can
write straight into the Concat's bytes. Along another axis those can whose kernels store rows with the Concat's pitch. Values are
written once, so that sharing bytes is always sound for what reads them; what writes in place of what it reads must be the last to
use that buffer, and the first to use its own. Parts begin at any element: kernels of CPUs assume of a pointer no more than that,
since a caller's arrays have no other alignment. Those of GPUs load vectors, so that parts begin at multiples of `alignment` bytes
there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import onnx_ir as ir

from ...runtime.symbolic.shapes import equal, is_one
from ...runtime.symbolic.sizes import SizeLike
from .constants import constant_array, constant_tensor
from .facts import has_static_type, tensor_type
from .kinds import Kind, is_known, kind_of
from .rewriter import Rejection, remove_nodes

_PARTS = ("Gather", "Slice", "Split")


@dataclass(frozen=True, slots=True)
class Place:
    """The bytes of `value` from `offset_bytes` on; or `rows` equal parts of it, whose beginnings are `pitch_bytes` apart."""

    value: ir.Value
    offset_bytes: int
    rows: int = 1
    pitch_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Aliases:
    """Where values lie that have no memory of their own.

    `places` maps each of them to bytes of one that has. `free` are the views, parts and Concats that need no kernel, each with
    the operands of a Concat that remain to be copied into it, and to which of its bytes. `rejections` say of other parts and
    Concats why they are computed.
    """

    places: Mapping[ir.Value, Place]
    free: Mapping[ir.Node, tuple[tuple[ir.Value, int], ...]]
    rejections: tuple[Rejection, ...]
    owners: frozenset[ir.Value]  # what keeps memory of its own

    def place(self, value: ir.Value) -> Place:
        """The memory that holds a value."""
        return self.places.get(value, Place(value, 0))

    def bytes_in_place(self, pieces: Sequence[ir.Value]) -> int:
        """How much of a Concat along the outermost dimension of these operands, in this order, could be written in place."""
        taken: set[ir.Value] = set()
        size_bytes = 0
        for run in _runs(pieces, self.place):
            if _fault(run, self.owners, taken) is None:
                size_bytes += run.size_bytes
                taken.add(run.source.value)
        return size_bytes


def is_view(node: ir.Node) -> bool:
    """Whether the node only gives the same bytes another shape."""
    return kind_of(node) is Kind.VIEW


def may_be_alias(node: ir.Node) -> bool:
    """Whether a node is of a kind that can do without a kernel."""
    return is_view(node) or (is_known(node) and node.op_type in (*_PARTS, "Concat"))


def view_root(value: ir.Value) -> ir.Value:
    """The value whose bytes a chain of views shows."""
    while (producer := value.producer()) is not None and is_view(producer) and producer.inputs[0] is not None:
        value = producer.inputs[0]
    return value


def remove_unread_views(value: ir.Value) -> list[ir.Value | None]:
    """Take the views that make a value out of the graph, as far as nothing reads them; return their other operands."""
    left: list[ir.Value | None] = []
    source: ir.Value | None = value
    while source is not None and (view := source.producer()) is not None and is_view(view):
        if view.graph is None or source.uses() or source.is_graph_output():  # removed already, or read
            break
        source, *others = view.inputs
        left += others
        remove_nodes([view])
    return left


def find_aliases(
    graph: ir.Graph, owners: Iterable[ir.Value], alignment: int = 1, pitched: Container[ir.Value] = frozenset()
) -> Aliases:
    """What of a graph without control flow needs no memory of its own. Linear in the graph, but for runs through nested parts.

    `owners` are the values whose bytes go to the caller: they, or what they are views of, keep memory of their own. No value
    begins but at a multiple of `alignment` bytes of another. Of the values `pitched`, each all that a Concat along an inner axis
    reads or none of it, kernels store the rows with the Concat's pitch.
    """
    search = _Search({view_root(value) for value in owners}, alignment, pitched)
    for node in graph:
        if rejection := search.visit(node):
            search.rejections.append(rejection)
    places = {value: search.place(value) for value in search.parents}
    return Aliases(places, search.free, tuple(search.rejections), frozenset(search.owners))


def part_offsets(node: ir.Node) -> tuple[int, ...] | None:
    """Where the outputs of a Slice, Split or Gather begin in its first input, in elements; None where one is not contiguous."""
    source = node.inputs[0] if node.inputs else None
    if not is_known(node) or node.op_type not in _PARTS or source is None or not _all_static(source, *node.outputs):
        return None
    shape = tensor_type(source).shape
    if any(equal(dim, 0) for dim in (*shape, *(dim for value in node.outputs[:1] for dim in tensor_type(value).shape))):
        return None
    found = _offsets_of(node, shape)
    return found if found is None or all(isinstance(offset, int) for offset in found) else None  # others, a call decides


def whole_of(value: ir.Value) -> ir.Value:
    """The value of whose bytes a chain of views and contiguous parts shows some, or all."""
    while (producer := (value := view_root(value)).producer()) is not None and part_offsets(producer) is not None:
        source = producer.inputs[0]
        assert source is not None
        value = source
    return value


def _offsets_of(node: ir.Node, shape: Sequence[SizeLike]) -> tuple[SizeLike, ...] | None:
    match node.op_type:
        case "Slice":
            return _slice_offset(node, shape)
        case "Gather":
            return _gather_offset(node, shape)
        case _:
            axis = node.attributes.get_int("axis", 0) % len(shape)
            return _split_offsets(node, shape, axis) if is_outermost(shape, axis) else None


def is_outermost(shape: Sequence[int], axis: int) -> bool:
    """Whether every part of a tensor along `axis` is contiguous."""
    return all(map(is_one, shape[:axis]))


def _all_static(*values: ir.Value | None) -> bool:
    return all(value is not None and (value.name == "" or has_static_type(value)) for value in values)


def _split_offsets(node: ir.Node, shape: Sequence[int], axis: int) -> tuple[int, ...] | None:
    if any(value.name == "" for value in node.outputs):
        return None
    offsets, end = [], 0
    for value in node.outputs:
        offsets.append(end)
        end += tensor_type(value).elements
    return tuple(offsets)


def _slice_offset(node: ir.Node, shape: Sequence[int]) -> tuple[int] | None:
    """By ONNX's rules: negative positions count from the end, and all are clamped."""
    out = tensor_type(node.outputs[0]).shape
    operands = [constant_array(value) for value in node.inputs[1:]]
    given = [value is not None for value in node.inputs[1:]]
    if any(array is None and is_given for array, is_given in zip(operands, given, strict=True)):
        return None
    starts, _, axes, steps = [None if one is None else [int(i) for i in one.reshape(-1)] for one in (*operands, None, None)[:4]]
    assert starts is not None, "a Slice has starts"
    first, step = [0] * len(shape), [1] * len(shape)
    for place, axis in enumerate(range(len(starts)) if axes is None else axes):
        extent, start = shape[axis], starts[place]
        step[axis] = 1 if steps is None else steps[place]
        first[axis] = min(max(start + extent if start < 0 else start, 0), extent if step[axis] > 0 else extent - 1)
    return _box_offset(shape, out, first, step)


def _gather_offset(node: ir.Node, shape: Sequence[int]) -> tuple[int] | None:
    """Indices that are known, inside the axis and one after the other."""
    axis = node.attributes.get_int("axis", 0) % len(shape)
    indices = constant_array(node.inputs[1])
    if indices is None or not indices.size:
        return None
    flat = [int(index) for index in indices.reshape(-1)]
    first = flat[0] + shape[axis] if flat[0] < 0 else flat[0]
    if not 0 <= first <= shape[axis] - len(flat) or any(index - flat[0] != place for place, index in enumerate(flat)):
        return None
    out = [*shape[:axis], len(flat), *shape[axis + 1 :]]
    return _box_offset(shape, out, [first if one == axis else 0 for one in range(len(shape))], [1] * len(shape))


def _box_offset(shape: Sequence[int], out: Sequence[int], first: Sequence[int], step: Sequence[int]) -> tuple[int] | None:
    """The offset in elements of the box `out` at `first` in a tensor of `shape`; None where it has gaps."""
    is_cut, offset = False, 0
    for axis in reversed(range(len(shape))):
        if not is_one(out[axis]) and (is_cut or step[axis] != 1):
            return None
        is_cut |= not equal(out[axis], shape[axis])
        offset += first[axis] * prod(shape[axis + 1 :])
    return (offset,)


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring operands of a Concat that are neighbours in memory too: bytes of `source`, for those from `begin` on."""

    pieces: tuple[ir.Value, ...]
    source: Place
    size_bytes: int
    begin: int


@dataclass(slots=True)
class _Search:
    """One walk in the order of the graph. `parents` are places in values that may lie in others again."""

    owners: set[ir.Value]
    alignment: int
    pitched: Container[ir.Value]
    parents: dict[ir.Value, Place] = field(default_factory=dict)
    free: dict[ir.Node, tuple[tuple[ir.Value, int], ...]] = field(default_factory=dict)
    rejections: list[Rejection] = field(default_factory=list)

    def place(self, value: ir.Value) -> Place:
        """The memory that holds a value, so far; the way there is shortened for who asks next. What has a pitch holds nothing."""
        way, offset, current = [], 0, value
        first = self.parents.get(value, Place(value, 0))
        while (parent := self.parents.get(current)) is not None:
            way.append((current, offset))
            current, offset = parent.value, offset + parent.offset_bytes
        for passed, before in way:
            self.parents[passed] = Place(current, offset - before)
        place = replace(first, value=current, offset_bytes=offset)
        if way:
            self.parents[value] = place
        return place

    def visit(self, node: ir.Node) -> Rejection | None:
        """Record what a node's outputs are parts of, or what is written into its output; or why neither."""
        if is_view(node) and node.inputs[0] is not None:
            self.parents[node.outputs[0]] = Place(node.inputs[0], 0)
            self.free[node] = ()
        elif (offsets := part_offsets(node)) is not None:
            return self._divide(node, offsets)
        elif is_known(node) and node.op_type == "Concat" and _all_static(*node.inputs, *node.outputs):
            return self._join(node)
        return None

    def _divide(self, node: ir.Node, offsets: Sequence[int]) -> Rejection | None:
        source = node.inputs[0]
        assert source is not None
        if output := next((value for value in node.outputs if value in self.owners), None):
            return Rejection(f"{node.op_type} is computed: %{output.name} is an output of the graph", (node,))
        kind = tensor_type(source)
        assert all(offset * kind.bits % 8 == 0 for offset in offsets), f"parts of {kind} begin within a byte"
        if any(kind.bytes_of(offset) % self.alignment for offset in offsets):
            return Rejection(f"{node.op_type} is computed: a part begins at no multiple of {self.alignment} bytes", (node,))
        for value, offset in zip(node.outputs, offsets, strict=True):
            self.parents[value] = Place(source, kind.bytes_of(offset))
        self.free[node] = ()
        return None

    def _join(self, node: ir.Node) -> Rejection | None:
        result = node.outputs[0]
        kind = tensor_type(result)
        if equal(kind.elements, 0):
            return None
        if kind.is_symbolic:
            return Rejection(f"Concat is computed: a call decides where its pieces begin in %{result.name}", (node,))
        axis = node.attributes.get_int("axis", 1) % len(kind.shape)
        pieces = [piece for piece in node.inputs if piece is not None]
        if not is_outermost(kind.shape, axis) and all(piece in self.pitched for piece in pieces):
            self._join_rows(node, pieces, prod(kind.shape[:axis]))
            return None
        if not is_outermost(kind.shape, axis):
            rows = prod(kind.shape[:axis])
            return Rejection(f"Concat is computed: its pieces come {rows} times each in %{result.name}", (node,))
        copies, faults, copied = [], [], 0
        runs = _runs(pieces, self.place)
        for run in runs:
            if fault := _fault(run, self.owners, self.parents) or self._misplaced(run):
                faults.append(fault)
                copied += run.size_bytes
                copies += _pieces_at(run)
            else:
                self.parents[run.source.value] = Place(result, run.begin)
        if 2 * copied > kind.size_bytes:
            for run in runs:
                self.parents.pop(run.source.value, None)
            return Rejection(f"Concat is computed: {'; '.join(dict.fromkeys(faults))}", (node,))
        self.free[node] = tuple(copies)
        return Rejection(f"{copied} bytes of %{result.name} are copied: {'; '.join(faults)}", (node,)) if faults else None

    def _join_rows(self, node: ir.Node, pieces: Sequence[ir.Value], rows: int) -> None:
        """Put pieces, of so many rows each, side by side into a Concat."""
        result = node.outputs[0]
        pitch, begin = tensor_type(result).size_bytes // rows, 0
        for piece in pieces:
            self.parents[piece] = Place(result, begin, rows, pitch)
            begin += tensor_type(piece).size_bytes // rows
        self.free[node] = ()

    def _misplaced(self, run: _Run) -> str | None:
        """Why a run may not begin where it would lie in a Concat."""
        return (
            f"%{run.source.value.name} would begin at no multiple of {self.alignment} bytes"
            if run.begin % self.alignment
            else None
        )


def _runs(pieces: Sequence[ir.Value], place_of: Callable[[ir.Value], Place]) -> list[_Run]:
    runs: list[_Run] = []
    end = 0
    for piece in pieces:
        size_bytes = tensor_type(piece).size_bytes
        place, last = place_of(piece), runs[-1] if runs else None
        if last and last.source == Place(place.value, place.offset_bytes - last.size_bytes):
            runs[-1] = _Run((*last.pieces, piece), last.source, last.size_bytes + size_bytes, last.begin)
        elif size_bytes:
            runs.append(_Run((piece,), place, size_bytes, end))
        end += size_bytes
    return runs


def _fault(run: _Run, owners: Container[ir.Value], taken: Container[ir.Value]) -> str | None:
    """Why a run cannot be written in place; None if it is all of a value that a kernel writes and nobody else wants."""
    source = run.source.value
    if source.producer() is None or constant_tensor(source) is not None:
        return f"%{source.name} is {'an input of the graph' if source.is_graph_input() else 'constant'}"
    if source in owners:
        return f"%{source.name} is an output of the graph"
    if source in taken:
        return f"%{source.name} comes twice"
    if run.size_bytes != tensor_type(source).size_bytes:
        return f"%{run.pieces[0].name} is a part of %{source.name}"
    return None


def _pieces_at(run: _Run) -> list[tuple[ir.Value, int]]:
    """The operands of a run, each with its place in the Concat's bytes."""
    placed, end = [], run.begin
    for piece in run.pieces:
        placed.append((piece, end))
        end += tensor_type(piece).size_bytes
    return placed
