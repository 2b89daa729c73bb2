"""The two grids of attention of a few queries (attention_decode_gpu.py): parts of the keys, and what brings them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil, prod

import numpy as np
from tvm import tirx

from ..codegen.builder import Buffer, Expr, Index
from ..codegen.gpu_builder import GpuBuilder
from ..reduction.thread_block import combined_threads
from ..template.loops import bound_unravel
from .mask import HIDDEN, may_hide_keys
from .operands import Elements
from .pattern import Attention

_LEAST = -np.inf


@dataclass(frozen=True)
class DecodeShape:
    """How a block of `warps` of `lanes` threads shares its work: `heads` of one key, whose neighbouring lanes load `key_vector`
    elements of a key and `value_vector` of a value at once, `keys_at_once` keys one after the other."""

    form: Attention
    heads: int
    warps: int
    lanes: int
    key_vector: int
    value_vector: int
    keys_at_once: int

    @property
    def threads(self) -> int:
        return self.warps * self.lanes

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Head, of the block's, and query of each row of scores."""
        return [(head, query) for head in range(self.heads) for query in range(self.form.queries)]

    def lanes_of(self, length: int, vector: int) -> int:
        """That read a key or a value of so many elements together: a power of two."""
        return min(1 << (ceil(length / vector) - 1).bit_length(), self.lanes)

    def turns_of(self, length: int, vector: int) -> int:
        """Vectors of a lane."""
        return ceil(length / vector / self.lanes_of(length, vector))

    @property
    def step(self) -> int:
        """Keys that the block has under way at once: of them a part is a multiple."""
        return self.threads // self.lanes_of(self.form.depth, self.key_vector) * self.keys_at_once


@dataclass(frozen=True)
class Parts:
    """What parts of the keys leave for the second grid: a row of scores has `count` of each after the other."""

    maxima: Buffer
    sums: Buffer
    results: Buffer  # with a row of the width each
    count: int


def emit_parts(builder: GpuBuilder, shape: DecodeShape, keys: int, parts: Parts | None) -> None:
    """The grid whose blocks have so many keys each; what they find is the result where there are no `parts`."""
    form, count = shape.form, 1 if parts is None else parts.count
    groups = prod(form.batch) // shape.heads
    extents = (*form.batch[:-1], form.batch[-1] // shape.heads) if form.batch else ()
    with builder.blocks(groups * count, shape.threads) as (block, thread):
        *batch, number = bound_unravel(builder, block, (*extents, count))
        if batch:
            batch[-1] = builder.bind(batch[-1] * shape.heads)
        group = builder.bind(tirx.floordiv(block, count))
        _Block(builder, shape, keys, parts, thread, tuple(batch), group, number).compute()


def emit_meeting(builder: GpuBuilder, shape: DecodeShape, parts: Parts) -> None:
    """The grid that brings parts together, in their order: a block for each query of a head, a thread for each column."""
    form = shape.form
    elements, threads = Elements(form, builder), max(-(-form.width // shape.lanes) * shape.lanes, shape.lanes)
    with builder.blocks(prod(form.batch) * form.queries, threads) as (block, column):
        *batch, query = bound_unravel(builder, block, (*form.batch, form.queries))
        best, total, result = (builder.local(1, "float32", name) for name in ("best", "total", "result"))
        first = builder.bind(block * parts.count)
        for register, value in ((best, _LEAST), (total, 0.0), (result, 0.0)):
            builder.store(register, 0, _f32(value))
        with builder.loop(parts.count, name="part") as part:
            builder.store(best, 0, tirx.max(best[_i32(0)], parts.maxima[first + part]))
        base = builder.name(_base(best[_i32(0)]))
        with builder.loop(parts.count, name="part") as part:
            place = builder.bind(first + part)
            found = builder.name(parts.sums[place])
            with builder.when(tirx.NE(found, _f32(0))):  # else nobody has stored results
                factor = builder.name(tirx.exp(parts.maxima[place] - base))
                builder.store(total, 0, total[_i32(0)] + found * factor)
                at = builder.bind(tirx.min(column, form.width - 1))
                builder.store(result, 0, result[_i32(0)] + parts.results[place * form.width + at] * factor)
        with builder.when(column < form.width):
            value = _divided(form, result[_i32(0)], total[_i32(0)])
            elements.store_result(tuple(batch), query, column, builder.name(value))


@dataclass(frozen=True)
class _Block:
    """A block: part `number` of the keys of the heads from `batch` on, which are number `group` of all such heads."""

    builder: GpuBuilder
    shape: DecodeShape
    keys: int
    parts: Parts | None
    thread: Expr
    batch: Index
    group: Expr
    number: Expr

    @cached_property
    def form(self) -> Attention:
        return self.shape.form

    @cached_property
    def elements(self) -> Elements:
        return Elements(self.form, self.builder)

    @cached_property
    def first(self) -> Expr:
        """The part's first key."""
        return self.builder.bind(self.number * self.keys)

    @cached_property
    def lane(self) -> Expr:
        return self.builder.bind(tirx.floormod(self.thread, self.shape.lanes))

    @cached_property
    def warp(self) -> Expr:
        return self.builder.bind(tirx.floordiv(self.thread, self.shape.lanes))

    @property
    def is_even(self) -> bool:
        """Whether all parts have all of their keys."""
        return self.form.keys % self.keys == 0

    def batch_of(self, row: int) -> Index:
        head = self.shape.rows[row][0]
        return (*self.batch[:-1], self.batch[-1] + head) if head else self.batch

    def score(self, row: int, key: Expr, product: Expr) -> Expr:
        return self.elements.score(self.batch_of(row), _i32(self.shape.rows[row][1]), key, product)

    def compute(self) -> None:
        builder, count = self.builder, len(self.shape.rows)
        scores = builder.shared(count * self.keys, "float32", "scores")
        found = builder.shared(2 * count, "float32", "found")  # maxima, then sums
        _ = self.first, self.lane, self.warp  # bound outside of what is under a condition
        if self.parts is None or not may_hide_keys(self.form):
            self._compute(scores, found)
            return
        seen = builder.name(self._is_seen())
        with builder.when(tirx.NE(seen, _f32(0))):
            self._compute(scores, found)
        with builder.when(tirx.And(tirx.EQ(seen, _f32(0)), self.thread < count)):
            self._store_sums(self.thread, _f32(_LEAST), _f32(0))

    def _compute(self, scores: Buffer, found: Buffer) -> None:
        self._multiply_keys(scores)
        self.builder.barrier()
        self._exponentials(scores, found)
        self.builder.barrier()
        self._store(self._multiply_values(scores), found)

    def _is_seen(self) -> Expr:
        """1 where a query may see one of the keys, or not the first of all: then it may see none, which are equal to it."""
        builder, form = self.builder, self.form
        seen = builder.local(1, "float32", "seen")
        builder.store(seen, 0, _f32(0))

        def look(key: Expr, *, is_first: bool) -> None:
            for row in range(len(self.shape.rows)):
                is_hidden = builder.name(self.score(row, key, _f32(0))) < _f32(HIDDEN)  # not where it is NaN
                one, other = (_f32(1), seen[_i32(0)]) if is_first else (seen[_i32(0)], _f32(1))
                builder.store(seen, 0, tirx.Select(is_hidden, one, other))

        look(_i32(0), is_first=True)
        with builder.loop(ceil(self.keys / self.shape.threads), name="turn") as turn:
            place = builder.bind(turn * self.shape.threads + self.thread)
            with builder.when(place < tirx.min(form.keys - self.first, self.keys)):
                look(builder.bind(self.first + place), is_first=False)
        (any_seen,) = combined_threads(builder, [seen[_i32(0)]], self.thread, self.shape.threads, tirx.max)
        return any_seen

    # Scores -----------------------------------------------------------------------------------------------------------

    def _multiply_keys(self, scores: Buffer) -> None:
        """Scores of all queries and of the part's keys; -inf beyond the last key."""
        builder, shape, form = self.builder, self.shape, self.form
        vector, lanes = shape.key_vector, shape.lanes_of(form.depth, shape.key_vector)
        turns, rows = shape.turns_of(form.depth, vector), len(shape.rows)
        own = builder.bind(tirx.floormod(self.lane, lanes))
        queries = builder.local(rows * turns * vector, "float32", "queries")
        for row, (_, query) in enumerate(shape.rows):
            element = partial(self.elements.query, self.batch_of(row), _i32(query))
            self._load(queries, row * turns, own, (form.depth, vector), element)
        at_once = shape.threads // lanes
        keys = builder.local(shape.keys_at_once * turns * vector, "float32", "keys")
        sums = builder.local(shape.keys_at_once * rows, "float32", "sums")
        with builder.loop(self.keys // shape.step, name="step") as step:
            begin = builder.bind(step * shape.step + tirx.floordiv(self.thread, lanes))
            for number in range(shape.keys_at_once):
                key = self._inner(begin + number * at_once)
                self._load(keys, number * turns, own, (form.depth, vector), partial(self.elements.key, self.batch, key))
            for number, row in np.ndindex(shape.keys_at_once, rows):
                cell = _i32(number * rows + row)
                builder.store(sums, cell, _f32(0))
                for i in range(turns * vector):
                    product = keys[_i32(number * turns * vector + i)] * queries[_i32(row * turns * vector + i)]
                    builder.store(sums, cell, sums[cell] + product)
                self._add_lanes(sums, cell, 1, lanes)
            for number, row in np.ndindex(shape.keys_at_once, rows):
                place = builder.bind(begin + number * at_once)
                with builder.when(tirx.EQ(own, row % lanes)):
                    self._store_score(scores, row, place, builder.name(sums[_i32(number * rows + row)]))

    def _store_score(self, scores: Buffer, row: int, place: Expr, product: Expr) -> None:
        """Of the part's key number `place`."""
        builder, at, key = self.builder, row * self.keys + place, self.builder.bind(self.first + place)
        if self.is_even:
            builder.store(scores, at, self.score(row, key, product))
            return
        builder.store(scores, at, _f32(_LEAST))
        with builder.when(key < self.form.keys):
            builder.store(scores, at, self.score(row, key, product))

    def _inner(self, place: Expr) -> Expr:
        """The part's key number `place`, or the last of all where it is beyond that."""
        key = self.first + place
        return self.builder.bind(key if self.is_even else tirx.min(key, self.form.keys - 1))

    def _load(self, registers: Buffer, first: int, own: Expr, size: tuple[int, int], element: Callable[[Expr], Expr]) -> None:
        """A lane's vectors of a line of `size` (length, vector), 0 beyond its end, to the registers from vector `first` on."""
        (length, vector), builder = size, self.builder
        lanes = self.shape.lanes_of(length, vector)
        for turn in range(self.shape.turns_of(length, vector)):
            place = builder.bind((turn * lanes + own) * vector)
            begin = (first + turn) * vector
            if (turn + 1) * lanes * vector <= length:
                with builder.neighbours(vector) as e:
                    builder.store(registers, begin + e, element(place + e))
                continue
            for e in range(vector):
                builder.store(registers, begin + e, _f32(0))
            with builder.when(place < length), builder.neighbours(vector) as e:
                builder.store(registers, begin + e, element(place + e))

    def _add_lanes(self, registers: Buffer, cell: Expr, least: int, lanes: int) -> None:
        """Add up a register of lanes whose numbers differ in the bits from `least` to below `lanes`, in each of them."""
        while least < lanes:
            other = self.builder.shuffle(self.builder.name(registers[cell]), self.lane ^ _i32(least), self.shape.lanes)
            self.builder.store(registers, cell, registers[cell] + other)
            least *= 2

    # Softmax ----------------------------------------------------------------------------------------------------------

    def _exponentials(self, scores: Buffer, found: Buffer) -> None:
        """Scores become exponentials; a warp finds maximum and sum of a row."""
        builder, shape, rows = self.builder, self.shape, len(self.shape.rows)
        best, total = (builder.local(1, "float32", name) for name in ("best", "total"))
        with self._rows_of_warp() as row:
            builder.store(best, 0, _f32(_LEAST))
            builder.store(total, 0, _f32(0))

            with self._scores_of_lane(row) as place:
                builder.store(best, 0, tirx.max(best[_i32(0)], scores[place]))
            for distance in self._distances():
                other = builder.shuffle(builder.name(best[_i32(0)]), self.lane ^ _i32(distance), shape.lanes)
                builder.store(best, 0, tirx.max(best[_i32(0)], other))
            base = builder.name(_base(best[_i32(0)]))
            with self._scores_of_lane(row) as place:
                power = builder.name(tirx.exp(scores[place] - base))
                builder.store(scores, place, power)
                builder.store(total, 0, total[_i32(0)] + power)
            self._add_lanes(total, _i32(0), 1, shape.lanes)
            with builder.when(tirx.EQ(self.lane, 0)):
                builder.store(found, row, best[_i32(0)])
                builder.store(found, row + rows, total[_i32(0)])

    @contextmanager
    def _rows_of_warp(self) -> Iterator[Expr]:
        """The rows of scores that are the warp's."""
        builder, shape, rows = self.builder, self.shape, len(self.shape.rows)
        with builder.loop(ceil(rows / shape.warps), name="row") as turn:
            row = builder.bind(turn * shape.warps + self.warp)
            if rows % shape.warps == 0:
                yield row
                return
            with builder.when(row < rows):
                yield row

    @contextmanager
    def _scores_of_lane(self, row: Expr) -> Iterator[Expr]:
        """Places of the scores of a row that are the lane's."""
        builder, lanes = self.builder, self.shape.lanes
        with builder.loop(ceil(self.keys / lanes), name="turn") as turn:
            place = builder.bind(turn * lanes + self.lane)
            if self.keys % lanes == 0:
                yield builder.bind(row * self.keys + place)
                return
            with builder.when(place < self.keys):
                yield builder.bind(row * self.keys + place)

    def _distances(self) -> list[int]:
        return [1 << bit for bit in range(self.shape.lanes.bit_length() - 1)]

    # Values -----------------------------------------------------------------------------------------------------------

    def _multiply_values(self, scores: Buffer) -> Buffer:
        """Exponentials times values, added up over the part's keys: [warps, rows, width] in shared memory."""
        builder, shape, form = self.builder, self.shape, self.form
        vector, lanes = shape.value_vector, shape.lanes_of(form.width, shape.value_vector)
        cells, rows = shape.turns_of(form.width, vector) * vector, len(shape.rows)
        own = builder.bind(tirx.floormod(self.lane, lanes))
        values, results = builder.local(shape.keys_at_once * cells, "float32"), builder.local(rows * cells, "float32", "results")
        for cell in range(rows * cells):
            builder.store(results, cell, _f32(0))
        at_once = shape.threads // lanes
        step = at_once * shape.keys_at_once
        with builder.loop(ceil(self.keys / step), name="step") as number:
            begin = builder.bind(number * step + tirx.floordiv(self.thread, lanes))
            places = [builder.bind(begin + i * at_once) for i in range(shape.keys_at_once)]
            for i, place in enumerate(places):
                key = builder.bind(tirx.min(self.first + place, form.keys - 1))
                element = partial(self.elements.value, self.batch, key)
                self._load(values, i * cells // vector, own, (form.width, vector), element)
            for i, place in enumerate(places):
                with builder.when(tirx.And(place < self.keys, self.first + place < form.keys)):
                    for row in range(rows):
                        weight = builder.name(scores[row * self.keys + place])
                        for cell in range(cells):
                            at = _i32(row * cells + cell)
                            builder.store(results, at, results[at] + weight * values[_i32(i * cells + cell)])
        return self._met(results, lanes, own)

    def _met(self, results: Buffer, lanes: int, own: Expr) -> Buffer:
        """What the lanes of each warp have of the same columns, added up: [warps, rows, width] in shared memory."""
        builder, shape, form = self.builder, self.shape, self.form
        vector, rows = shape.value_vector, len(shape.rows)
        turns = shape.turns_of(form.width, vector)
        for cell in range(rows * turns * vector):
            self._add_lanes(results, _i32(cell), lanes, shape.lanes)
        met = builder.shared(shape.warps * rows * form.width, "float32", "met")
        with builder.when(self.lane < lanes):
            for row, turn in np.ndindex(rows, turns):
                place = builder.bind((turn * lanes + own) * vector)
                with builder.when(place < form.width):
                    for e in range(vector):
                        at = builder.bind((self.warp * rows + row) * form.width + place)
                        builder.store(met, at + e, results[_i32((row * turns + turn) * vector + e)])
        builder.barrier()
        return met

    def _store(self, met: Buffer, found: Buffer) -> None:
        """The block's results: added up over its warps."""
        builder, shape, form, rows = self.builder, self.shape, self.form, len(self.shape.rows)
        count = rows * form.width
        with builder.loop(ceil(count / shape.threads), name="turn") as turn:
            number = builder.bind(turn * shape.threads + self.thread)
            with builder.when(number < count):
                total = builder.local(1, "float32", "total")
                builder.store(total, 0, met[number])
                for warp in range(1, shape.warps):
                    builder.store(total, 0, total[_i32(0)] + met[number + warp * count])
                row, column = builder.bind(tirx.floordiv(number, form.width)), builder.bind(tirx.floormod(number, form.width))
                self._store_result(row, column, builder.name(total[_i32(0)]), found)
        if self.parts is not None:
            with builder.when(self.thread < rows):
                self._store_sums(self.thread, found[self.thread], found[self.thread + rows])

    def _store_result(self, row: Expr, column: Expr, total: Expr, found: Buffer) -> None:
        form, builder = self.form, self.builder
        if self.parts is not None:
            builder.store(self.parts.results, self._place(row) * form.width + column, total)
            return
        head, query = builder.bind(tirx.floordiv(row, form.queries)), builder.bind(tirx.floormod(row, form.queries))
        batch = (*self.batch[:-1], builder.bind(self.batch[-1] + head)) if self.batch else ()
        value = _divided(form, total, found[row + len(self.shape.rows)])
        self.elements.store_result(batch, query, column, builder.name(value))

    def _store_sums(self, row: Expr, best: Expr, total: Expr) -> None:
        assert self.parts is not None
        place = self.builder.bind(self._place(row))
        self.builder.store(self.parts.maxima, place, best)
        self.builder.store(self.parts.sums, place, total)

    def _place(self, row: Expr) -> Expr:
        """Of a row's numbers among those of all parts."""
        assert self.parts is not None
        return (self.group * len(self.shape.rows) + row) * self.parts.count + self.number


def _base(maximum: Expr) -> Expr:
    """What is subtracted from scores: their maximum, but 0 for a row that has seen no key, whose exponentials are then 0."""
    return tirx.Select(maximum.equal(_f32(_LEAST)), _f32(0), maximum)


def _divided(form: Attention, result: Expr, total: Expr) -> Expr:
    """What a row's sum makes of its results; a guard makes zeros of a row without a key."""
    if not form.weighs_probabilities:
        return result / total
    return tirx.Select(total > _f32(0), result / total, _f32(0))


def _i32(value: int) -> Expr:
    return tirx.const(value, "int32")


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")
