"""NonMaxSuppression: boxes in the order of their scores, without those that overlap one selected before too much.

The boxes of each class of each batch are judged by one thread, from the highest score on, of equal ones from the lower index
on. A box whose score is NaN is never selected. Overlap is as ONNX Runtime and onnx.reference compute it, in float32 with a
rounding after each operation, so that a box on the threshold is judged as there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..codegen.work_stealing import Shares
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel
from ..template.kernel import finish, new_builder
from .heap import Heap
from .selection import clear_rest
from .sorting import Entries, order_key

OPERATORS = frozenset(["NonMaxSuppression"])


def obstacle(group: Group, target: Target) -> str:
    """Why the kernel cannot be written for a group; empty if it can."""
    if len(group.ops[0].outputs) != 2:
        return "the size of its result depends on data and is needed while compiling"
    return "it takes candidates from a heap on the CPU only" if target.is_gpu else ""


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes one bounded NonMaxSuppression: its outputs are the largest list of (batch, class, box) and the length of the list."""
    (op,) = group.ops
    builder = new_builder(target)
    batches, classes, boxes = group.types[op.inputs[1]].shape
    lists = batches * classes
    room = group.types[op.outputs[0]].shape[0] // lists
    work = lists * boxes * (16 + 8 * room)
    threads = min(builder.threads_for(work), lists)
    suppression = _Suppression(
        group, op, builder, classes, boxes, room, builder.workspace(lists * room, "int32"), _Corners(builder, threads, room)
    )
    lengths, keys = builder.workspace(lists, "int32"), builder.workspace(threads * boxes, "int64")
    shares = Shares(builder, threads, lists, work)
    with builder.loop(threads, "parallel", "thread") as thread:
        entries = Entries(builder, keys, None, builder.bind(thread * boxes))
        with shares.of(thread) as (begin, end), builder.loop(end - begin, name="list") as i:
            number = builder.bind(begin + i)
            builder.store(lengths, number, suppression.select(number, entries, thread))
    suppression.store(lists, lengths)
    return finish("suppression", builder, group, flops=work)


class _Corners:
    """The corners of a thread's selected boxes: arrays of least y, least x, greatest y, greatest x, of `room` numbers each."""

    def __init__(self, builder: KernelBuilder, threads: int, room: int) -> None:
        self._builder = builder
        self._room = room
        self._memory = builder.workspace(threads * 4 * room, "float32")

    def put(self, thread: Expr, number: Expr, corners: Sequence[Expr]) -> None:
        for side, corner in enumerate(corners):
            self._builder.store(self._memory, (thread * 4 + side) * self._room + number, corner)

    def get(self, thread: Expr, number: Expr) -> list[Expr]:
        return [self._builder.bind(self._memory[(thread * 4 + side) * self._room + number]) for side in range(4)]


@dataclass(frozen=True)
class _Suppression:
    """One call: `selected` has room for `room` boxes of each list, a list being one class of one batch."""

    group: Group
    op: Op
    builder: KernelBuilder
    classes: int
    boxes: int
    room: int
    selected: Buffer
    corners: _Corners

    def select(self, number: Expr, entries: Entries, thread: Expr) -> Expr:
        """Store the boxes selected for a list; returns their number."""
        builder = self.builder
        limit, threshold = self._limit(), self._scalar(3, "float32")
        heap = Heap(builder, entries, builder.bind(self._collect(number, entries)))
        first = builder.bind(tirx.floordiv(number, self.classes) * self.boxes)
        found = builder.local(1, "int32", "found")
        builder.store(found, 0, tirx.const(0, "int32"))
        with builder.while_true(tirx.And(heap.size > 0, found[0] < limit)):
            box = heap.pop()
            corners = self._corners_of(builder.bind(first + box))
            other, hit = builder.local(1, "int32", "other"), builder.local(1, "int32", "hit")
            builder.store(other, 0, tirx.const(0, "int32"))
            builder.store(hit, 0, tirx.const(0, "int32"))
            with builder.while_true(tirx.And(other[0] < found[0], tirx.EQ(hit[0], 0))):
                self._compare(corners, self.corners.get(thread, other[0]), threshold, hit)
                builder.store(other, 0, other[0] + 1)
            with builder.when(tirx.EQ(hit[0], 0)):
                builder.store(self.selected, number * self.room + found[0], box)
                self.corners.put(thread, found[0], corners)
                builder.store(found, 0, found[0] + 1)
        return found[0]

    def store(self, lists: int, lengths: Buffer) -> None:
        """Store all selected boxes, list after list, and their number."""
        builder = self.builder
        result, count = self.op.outputs
        out = builder.parameter(result, self.group.types[result].elements, "int64")
        place = builder.local(1, "int32", "place")
        builder.store(place, 0, tirx.const(0, "int32"))
        with builder.loop(lists, name="list") as number:
            with builder.loop(builder.bind(lengths[number]), name="rank") as rank:
                box = self.selected[number * self.room + rank]
                row = (tirx.floordiv(number, self.classes), tirx.floormod(number, self.classes), box)
                for column, value in enumerate(row):
                    builder.store(out, (place[0] + rank) * 3 + column, tirx.Cast("int64", value))
            builder.store(place, 0, place[0] + lengths[number])
        if self.op.attribute("padded", 0):
            clear_rest(builder, self.group, result, 0, place[0])
        builder.store(builder.parameter(count, 1, "int64"), 0, tirx.Cast("int64", place[0]))

    def _collect(self, number: Expr, entries: Entries) -> Expr:
        """Store the boxes above the score threshold to `entries`, in the order of their indices; returns their number."""
        builder, name = self.builder, self.op.inputs[1]
        scores = builder.parameter(name, self.group.types[name].elements, "float32")
        threshold = self._scalar(4, "float32")
        count = builder.local(1, "int32", "count")
        builder.store(count, 0, tirx.const(0, "int32"))
        with builder.loop(self.boxes, name="box") as box:
            score = builder.bind(scores[number * self.boxes + box])
            with builder.when(tirx.Not(tirx.isnan(score)) if threshold is None else score > threshold):
                entries.put(count[0], order_key(score, "float32", builder.name, descending=True), box)
                builder.store(count, 0, count[0] + 1)
        return count[0]

    def _corners_of(self, box: Expr) -> list[Expr]:
        """The corners of a box, given by any two opposite ones (y, x, y, x), or as (x, y, width, height) around its centre."""
        builder, name = self.builder, self.op.inputs[0]
        boxes = builder.parameter(name, self.group.types[name].elements, "float32")
        a, b, c, d = (builder.bind(boxes[box * 4 + part]) for part in range(4))
        if self.op.attribute("center_point_box", 0):
            x, y = builder.bind(c * 0.5), builder.bind(d * 0.5)
            return [builder.bind(side) for side in (b - y, a - x, b + y, a + x)]
        return [builder.bind(side) for side in (tirx.min(a, c), tirx.min(b, d), tirx.max(a, c), tirx.max(b, d))]

    def _compare(self, one: Sequence[Expr], other: Sequence[Expr], threshold: Expr | None, hit: Buffer) -> None:
        """Set `hit` if two boxes overlap by more than the threshold. Nothing overlaps a box without area."""
        builder = self.builder
        height = builder.bind(tirx.min(one[2], other[2]) - tirx.max(one[0], other[0]))
        width = builder.bind(tirx.min(one[3], other[3]) - tirx.max(one[1], other[1]))
        with builder.when(tirx.And(height > 0.0, width > 0.0)):
            common = builder.bind(_product(width, height))
            first, second = (builder.bind(_product(box[3] - box[1], box[2] - box[0])) for box in (one, other))
            union = builder.bind(first + second - common)
            too_large = common / union > (tirx.const(0.0, "float32") if threshold is None else threshold)
            for extent in (common, first, second, union):
                too_large = tirx.And(extent > 0.0, too_large)
            builder.store(hit, 0, tirx.Cast("int32", too_large))

    def _limit(self) -> Expr:
        """The most boxes that may be selected for a list, within its room."""
        limit = self._scalar(2, "int64")
        if limit is None:
            return tirx.const(0, "int32")
        room, none = tirx.const(self.room, "int64"), tirx.const(0, "int64")
        return self.builder.bind(tirx.Cast("int32", tirx.max(tirx.min(limit, room), none)))

    def _scalar(self, position: int, dtype: str) -> Expr | None:
        """The one element of an input; None where it is absent."""
        name = self.op.inputs[position] if position < len(self.op.inputs) else ""
        if not name or not self.group.types[name].elements:
            return None
        literal = self.group.literal(name)
        if literal is not None:
            return tirx.const(literal.item(), dtype)
        return self.builder.bind(self.builder.parameter(name, 1, dtype)[0])


def _product(a: Expr, b: Expr) -> Expr:
    """The float32 product, rounded: from float64, where it is exact, since LLVM would fuse a float32 one with a sum."""
    return tirx.Cast("float32", tirx.Cast("float64", a) * tirx.Cast("float64", b))
