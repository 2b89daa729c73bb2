"""Masked keys that no query of a block sees (their scores are -inf) are skipped.

Each block finds at run time, from the mask's own numbers, between which keys lie those that it sees: half of all scores in causal
attention, what is in front of a sliding window or behind it, and the padding of shorter sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil

from tvm import tirx

from ...runtime.symbolic.dims import estimating
from ...runtime.symbolic.shapes import equal
from ...runtime.symbolic.sizes import Size
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..groups.group import Op
from ..microkernels.packed_gemm import Span
from .pattern import Attention, values_after

HIDDEN = -1e38  # below it a score, such as the least float32, has probability 0 among scores that models compute
_NONE = tirx.const(0, "float32")  # no key is seen
_SKIPPED_STEPS = 8  # that are looked at together, until one of their keys is seen
_STEPS = frozenset(["Add", "Cast", "Div", "Mul", "Sub", "Tanh", "Where"])  # if they make -inf of 0, then of every finite score
_LOOKS = (("float32", "each"), ("float32", "seen"), ("int32", "at"))
Score = Callable[[Expr, Expr], Expr]  # of (row, key), of a product that is 0


def may_hide_keys(form: Attention) -> bool:
    """Whether a mask that heads share may hide keys: an operand is added to the scores, or chosen in their place."""
    group, score = form.group, form.scores.outputs[0]
    reached = values_after(group, score)
    steps = [op for op in group.ops if op is not form.scores and not reached.isdisjoint(op.outputs)]
    steps = [op for op in steps if op.op_type != "Reshape"]
    if form.dtype != "float32" or any(op.op_type not in _STEPS for op in steps):
        return False
    if any(op.op_type == "Div" and op.inputs[1] in reached for op in steps):
        return False
    if any("float" not in group.types[op.outputs[0]].dtype for op in steps):  # a comparison with the score itself may decide
        return False
    shape = group.types[score].shape
    shared = [op for op in steps if op.op_type in ("Add", "Where") and _is_shared(form, op, reached, shape)]
    return bool(shared)


@estimating
def share_seen(form: Attention, rows: int, step: int) -> float:
    """The part of the scores up to the last key, in steps of so many, that blocks of so many queries see; 1 if nothing tells."""
    if not _hides_later_keys(form):
        return 1.0
    firsts = range(0, form.queries, rows)
    ends = [min(ceil(min(first + rows, form.queries) / step) * step, form.keys) for first in firsts]
    return sum(ends) / len(ends) / form.keys


def _hides_later_keys(form: Attention) -> bool:
    """Whether a mask is a constant of each query and key: hardly anything but a text's later part is hidden by one."""
    group, reached = form.group, values_after(form.group, form.scores.outputs[0])
    beside = [
        name for op in group.ops if op.op_type in ("Add", "Where") and not reached.isdisjoint(op.inputs) for name in op.inputs
    ]
    sizes = form.queries, form.keys
    return form.queries > 1 and any(group.types[name].shape[-2:] == sizes for name in beside if name in group.constants)


def _is_shared(form: Attention, op: Op, reached: set[str], shape: tuple[int, ...]) -> bool:
    """Whether another operand of a step has a number for each key, and fewer elements than there are scores."""
    heads = max(shape[-3:-2], default=1)
    beside = (form.group.types[name] for name in op.inputs if name not in reached)
    return any(kind.shape[-1:] == shape[-1:] and kind.elements * heads <= form.score_count for kind in beside)


@dataclass(frozen=True)
class Looks:
    """Looks at the mask, at run time: which of `keys` keys from `first` on `rows` queries may see, in steps of `step` keys."""

    builder: KernelBuilder
    score: Score
    rows: Expr
    first: Expr
    keys: int
    step: int

    def visible(self, extent: int, each_sees: Expr | None = None) -> Span:
        """The keys that some query may see: multiples of `step`; or [0, `extent`), if a query sees no key at all: then its
        probabilities are equal.

        `each_sees`, of keys that are one of several blocks: whether each query sees a key of any; None: these are all keys.
        """
        builder, zero = self.builder, tirx.const(0, "int32")
        end, begin = self._end(extent), builder.local(1, "int32", "begin")
        builder.store(begin, zero, zero)

        def take_all() -> None:
            builder.store(begin, zero, zero)
            builder.store(end, zero, builder.bind(extent) if isinstance(extent, Size) else tirx.const(extent, "int32"))

        with builder.when(tirx.Not(self._each_sees_first()) if each_sees is None else each_sees):
            self._skip(begin, end)
            if each_sees is None:
                sees = end[0] > zero if self.has_one_row else self.each_sees(begin[0], end[0])
                with builder.when(tirx.Not(sees)):
                    take_all()
        if each_sees is not None:
            with builder.when(tirx.Not(each_sees)):
                take_all()
        return builder.bind(begin[0]), builder.bind(end[0])

    @property
    def has_one_row(self) -> bool:
        return isinstance(self.rows, int) and self.rows == 1

    def _look(self, seen: Buffer, begin: Expr, columns: int, score: Score | None = None) -> None:
        """Put into `seen` whether any query may see one of so many keys from `begin` on."""
        found = _any_seen(self.builder, score or self.score, self.rows, self.first + begin, columns)
        self.builder.store(seen, tirx.const(0, "int32"), found)

    def _end(self, extent: int) -> Buffer:
        """Behind the last key that a query may see; 0 if none sees any."""
        builder, step, zero = self.builder, self.step, tirx.const(0, "int32")
        seen, end = builder.local(1, "float32", "seen"), builder.local(1, "int32", "end")
        builder.store(end, zero, builder.bind(extent) if isinstance(extent, Size) else tirx.const(extent, "int32"))
        builder.store(seen, zero, _NONE)
        if isinstance(self.keys, Size):
            assert equal(extent, ceil(self.keys / step) * step), "rows of scores end with the last step"
            with builder.while_true(tirx.And(tirx.EQ(seen[0], _NONE), end[0] > zero)):
                begin = builder.bind(end[0] - step)
                self._look_at_step(seen, begin)
                with builder.when(tirx.EQ(seen[0], _NONE)):
                    builder.store(end, zero, begin)
            return end
        whole, rest = divmod(self.keys, step)
        if rest:
            self._look(seen, whole * step, rest)
            with builder.when(tirx.EQ(seen[0], _NONE)):
                builder.store(end, zero, tirx.const(whole * step, "int32"))

        def look_back(size: int) -> None:
            """Look at `size` keys before the end, and move it back, until some are seen."""
            with builder.while_true(tirx.And(tirx.EQ(seen[0], _NONE), end[0] > zero)):
                begin = builder.bind(tirx.max(tirx.min(end[0], whole * step) - size, 0))
                self._look(seen, begin, size)
                with builder.when(tirx.EQ(seen[0], _NONE)):
                    builder.store(end, zero, begin)

        if whole > _SKIPPED_STEPS:  # of a cache that has hardly begun, most is left out by far fewer looks
            with builder.when(tirx.EQ(seen[0], _NONE)):
                look_back(_SKIPPED_STEPS * step)
                builder.store(seen, zero, _NONE)
                look_back(step)
        else:
            look_back(step)
        return end

    def _look_at_step(self, seen: Buffer, begin: Expr, score: Score | None = None) -> None:
        """Look at the keys of one step, where there are a number of them that a call decides."""
        builder, step, of = self.builder, self.step, score or self.score
        with builder.when(begin + step <= self.keys):
            self._look(seen, begin, step, of)
        with builder.when(begin + step > self.keys):  # the last key again, in the place of those beyond it
            last = builder.bind(self.first + self.keys - 1)
            self._look(seen, begin, step, lambda row, key: of(row, tirx.min(key, last)))

    def _skip(self, begin: Buffer, end: Buffer) -> None:
        """Move `begin` on, in front of the end, to the first step of which a query may see a key."""
        builder, step, zero = self.builder, self.step, tirx.const(0, "int32")
        seen = builder.local(1, "float32", "seen")
        builder.store(seen, zero, _NONE)

        def look_on(size: int) -> None:
            """Skip `size` keys at a time, but not the last step, of which some key is seen."""
            with builder.while_true(tirx.And(tirx.EQ(seen[0], _NONE), begin[0] + size < end[0])):
                self._look(seen, begin[0], size)
                with builder.when(tirx.EQ(seen[0], _NONE)):
                    builder.store(begin, zero, begin[0] + size)

        if isinstance(self.keys, Size) or self.keys > _SKIPPED_STEPS * step:
            with builder.when(begin[0] + step < end[0]):
                self._look(seen, begin[0], step)
            with builder.when(tirx.EQ(seen[0], _NONE)):
                look_on(_SKIPPED_STEPS * step)
                builder.store(seen, zero, _NONE)
                look_on(step)
        else:
            look_on(step)

    def each_sees(self, begin: Expr, end: Expr) -> Expr:
        """Whether each query may see one of the keys [begin, end), multiples of the step."""
        builder, zero = self.builder, tirx.const(0, "int32")
        each, seen, at = (builder.local(1, kind, name) for kind, name in _LOOKS)
        builder.store(each, zero, tirx.const(1, "float32"))
        begin = builder.bind(begin)
        with builder.loop(self.rows, name="row") as row:
            one = replace(self, rows=1, score=lambda _, key: self.score(row, key))
            builder.store(seen, zero, _NONE)
            builder.store(at, zero, begin)
            with builder.while_true(tirx.And(tirx.EQ(seen[0], _NONE), at[0] < end)):
                if isinstance(self.keys, Size):
                    one._look_at_step(seen, at[0])
                else:  # the last step may be a part of one: the keys before it are looked at again
                    columns = min(self.step, self.keys)
                    one._look(seen, builder.bind(tirx.min(at[0], self.keys - columns)), columns)
                builder.store(at, zero, at[0] + self.step)
            builder.store(each, zero, tirx.min(each[0], seen[0]))
        return tirx.NE(each[0], _NONE)

    def _each_sees_first(self) -> Expr:
        """Whether each query sees the very first key; not where its score is NaN."""
        builder, zero = self.builder, tirx.const(0, "int32")
        seen = builder.local(1, "float32", "seen")
        builder.store(seen, zero, tirx.const(1, "float32"))
        with builder.loop(self.rows, name="row") as row:
            is_seen = builder.name(self.score(row, 0)) > tirx.const(HIDDEN, "float32")
            builder.store(seen, zero, tirx.Select(is_seen, seen[0], _NONE))
        return tirx.NE(seen[0], _NONE)


def _any_seen(builder: KernelBuilder, score: Score, rows: Expr, first: Expr, columns: int) -> Expr:
    """1 where one of `rows` queries may see one of `columns` keys from `first` on, else 0.

    A NaN counts as seen: scores are compared one by one, since a maximum may lose a NaN.
    """
    lanes = builder.lanes("float32")
    seen = builder.local(lanes, "float32", "seen")
    with builder.loop(lanes, "vectorized", "lane") as lane:
        builder.store(seen, lane, _NONE)
    with builder.loop(rows, name="row") as row:
        for begin, count, width in _vectors(columns, lanes):
            with builder.loop(count, name="v") as v:
                column = builder.bind(first + begin + v * width)
                with builder.loop(width, "vectorized", "lane") as lane:
                    is_hidden = builder.name(score(row, column + lane)) < tirx.const(HIDDEN, "float32")
                    builder.store(seen, lane, tirx.Select(is_hidden, seen[lane], tirx.const(1, "float32")))
    return _folded(builder, seen, lanes)


def _vectors(columns: int, lanes: int) -> Iterator[tuple[int, int, int]]:
    """Whole vectors, then ever shorter ones: (first column, number of vectors, width)."""
    done = 0
    while done < columns:
        while lanes > columns - done:
            lanes //= 2
        count = (columns - done) // lanes
        yield done, count, lanes
        done += count * lanes


def _folded(builder: KernelBuilder, seen: Buffer, lanes: int) -> Expr:
    while lanes > 1:
        lanes //= 2
        with builder.loop(lanes, "vectorized", "lane") as lane:
            builder.store(seen, lane, tirx.max(seen[lane], seen[lanes + lane]))
    return seen[tirx.const(0, "int32")]
