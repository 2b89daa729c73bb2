"""NonMaxSuppression: boxes in the order of their scores, without those that overlap one selected before too much.

The boxes of each class of each batch are judged by one thread, from the highest score on, of equal ones from the lower index
on. A box whose score is NaN is never selected. Overlap is as ONNX Runtime and onnx.reference compute it, in float32 with a
rounding after each operation, so that a box on the threshold is judged as there.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from ...runtime.target import Target
from ..builder import Buffer, Expr, KernelBuilder, share
from ..group import Group, Op
from ..template import BuiltKernel, Refusal
from .common import finish, minimum, new_builder
from .selection import clear_rest
from .sorting import Entries, Sorter, key_type, order_key

OPERATORS = frozenset(["NonMaxSuppression"])


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes one bounded NonMaxSuppression: its outputs are the largest list of (batch, class, box) and the length of the list."""
    (op,) = group.ops
    if len(op.outputs) != 2:
        return Refusal("the size of its result depends on data and is needed while compiling")
    if target.is_gpu:
        return Refusal("it sorts on the CPU only")
    builder = new_builder(target)
    batches, classes, boxes = group.types[op.inputs[1]].shape
    lists = batches * classes
    room = group.types[op.outputs[0]].shape[0] // lists
    work = lists * boxes * (16 + 8 * room)
    suppression = _Suppression(group, op, builder, classes, boxes, room, builder.workspace(lists * room, "int32"))
    lengths = builder.workspace(lists, "int32")
    threads = min(builder.threads_for(work), lists)
    sorter = Sorter(builder, boxes, key_type("float32"), threads)
    with builder.loop(threads, "parallel", "thread") as thread:
        begin, end = share(thread, threads, lists)
        with builder.loop(end - begin, name="list") as i:
            number = builder.bind(begin + i)
            builder.store(lengths, number, suppression.select(number, sorter, thread))
    suppression.store(lists, lengths)
    return finish("suppression", builder, group, flops=work)


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

    def select(self, number: Expr, sorter: Sorter, thread: Expr) -> Expr:
        """Put the boxes selected for a list into its room; how many they are."""
        builder = self.builder
        entries = sorter.entries(thread)
        candidates = builder.bind(self._collect(number, entries))
        sorter.sort(thread, candidates)
        overlap = _Overlap(self, builder.bind(tirx.floordiv(number, self.classes) * self.boxes))
        limit = self._limit()
        rank, found = builder.local(1, "int32", "rank"), builder.local(1, "int32", "found")
        builder.store(rank, 0, tirx.const(0, "int32"))
        builder.store(found, 0, tirx.const(0, "int32"))
        with builder.while_true(tirx.And(rank[0] < candidates, found[0] < limit)):
            box = builder.bind(entries.place(rank[0]))
            kept = self._first_overlapping(overlap, number, box, found)
            with builder.when(tirx.EQ(kept, found[0])):
                builder.store(self.selected, number * self.room + found[0], box)
                builder.store(found, 0, found[0] + 1)
            builder.store(rank, 0, rank[0] + 1)
        return found[0]

    def store(self, lists: int, lengths: Buffer) -> None:
        """Write what was selected, list after list, and how much it is."""
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
        """Put the boxes that are good enough into `entries`, in the order of their indices; how many they are."""
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

    def _first_overlapping(self, overlap: _Overlap, number: Expr, box: Expr, found: Buffer) -> Expr:
        """The number of the first selected box that `box` overlaps too much; `found` if there is none."""
        builder = self.builder
        corners = overlap.corners(box)
        other, hit = builder.local(1, "int32", "other"), builder.local(1, "int32", "hit")
        builder.store(other, 0, tirx.const(0, "int32"))
        builder.store(hit, 0, tirx.const(0, "int32"))
        with builder.while_true(tirx.And(other[0] < found[0], tirx.EQ(hit[0], 0))):
            rival = overlap.corners(builder.bind(self.selected[number * self.room + other[0]]))
            is_hit = builder.bind(tirx.Cast("int32", overlap.is_too_large(corners, rival)))
            builder.store(hit, 0, is_hit)
            builder.store(other, 0, other[0] + 1 - is_hit)
        return builder.bind(other[0])

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


_Corners = tuple[Expr, Expr, Expr, Expr]  # least y, least x, greatest y, greatest x


class _Overlap:
    """The boxes of one batch, which begin with number `first`, and their intersection over union."""

    def __init__(self, call: _Suppression, first: Expr) -> None:
        self.builder = call.builder
        name = call.op.inputs[0]
        self.boxes = call.builder.parameter(name, call.group.types[name].elements, "float32")
        self.first = first
        self.is_centered = bool(call.op.attribute("center_point_box", 0))
        self.threshold = call._scalar(3, "float32")

    def corners(self, box: Expr) -> _Corners:
        """The corners of a box, given by any two opposite ones (y, x, y, x), or as (x, y, width, height) around its centre."""
        builder = self.builder
        begin = builder.bind((self.first + box) * 4)
        a, b, c, d = (builder.bind(self.boxes[begin + part]) for part in range(4))
        if self.is_centered:
            half = builder.bind(c * 0.5), builder.bind(d * 0.5)
            sides = b - half[1], a - half[0], b + half[1], a + half[0]
        else:
            sides = minimum(a, c), minimum(b, d), tirx.max(a, c), tirx.max(b, d)
        y0, x0, y1, x1 = map(builder.bind, sides)
        return y0, x0, y1, x1

    def is_too_large(self, one: _Corners, other: _Corners) -> Expr:
        """Whether two boxes overlap by more than the threshold. Nothing overlaps a box without area."""
        bind = self.builder.bind
        height = bind(tirx.min(one[2], other[2]) - tirx.max(one[0], other[0]))
        width = bind(tirx.min(one[3], other[3]) - tirx.max(one[1], other[1]))
        common, first, second = bind(_product(width, height)), self._area(one), self._area(other)
        union = bind(first + second - common)
        too_large = common / union > (tirx.const(0.0, "float32") if self.threshold is None else self.threshold)
        for extent in (height, width, common, first, second, union):
            too_large = tirx.And(extent > 0.0, too_large)
        return too_large

    def _area(self, box: _Corners) -> Expr:
        return self.builder.bind(_product(box[3] - box[1], box[2] - box[0]))


def _product(a: Expr, b: Expr) -> Expr:
    """The float32 product, rounded: from float64, where it is exact, since LLVM would fuse a float32 one with a sum."""
    return tirx.Cast("float32", tirx.Cast("float64", a) * tirx.Cast("float64", b))
