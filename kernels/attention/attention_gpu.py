"""Fused attention on a GPU: a block of threads has some queries of a head; keys and values come through shared memory.

Scores and results stay in registers, as in FlashAttention (Dao et al., arXiv 2205.14135, 2022), with the online softmax of
Milakov and Gimelshein (arXiv 1805.02867, 2018). Q, K and V are read through the views and the pointwise prologue before them, and
the result is stored through the views after it, so that splitting and merging heads copies nothing.

A thread has rows g, g + 16, ... of the block and of them columns c, c + 8, ...: eight neighbours share rows. Their maxima meet in
shared memory at each block of keys, their sums once. Where operators compute something from the probabilities, a first pass over
the keys finds maxima and sums, and a second one the scores once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

import numpy as np
from tvm import tirx

from ...runtime.hardware.gpu import gpu_machine
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate
from ..groups.group import Group
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import finish, new_builder
from ..template.loops import bound_unravel
from .operands import Elements
from .pattern import Attention, attention_of

_ROW_GROUPS, _COLUMNS = 16, 8  # of the threads of a block
_THREADS = _ROW_GROUPS * _COLUMNS
_LANES_A_CLOCK, _RESIDENT = 128, 4  # of a multiprocessor: instructions of threads, and blocks
_SHARED_BYTES = 48 << 10  # of a block, on every GPU
_Element = Callable[[Expr, Expr], tuple[Expr, Callable[[], Expr]]]  # whether there is one at (line, column), and what it is


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes two products with a softmax between them, and pointwise operators and views around and between."""
    form = attention_of(group)
    if isinstance(form, Refusal):
        return form
    return Candidate(_estimate(form, target), lambda: _build(form, target))


def _estimate(form: Attention, target: Target) -> Estimate:
    """In clocks of the whole GPU: instructions of all blocks, and the wait for each part of keys and values."""
    machine, (rows, columns) = gpu_machine(target.level), _tile(form)
    own, keys = ceil(form.width / _COLUMNS), columns * _COLUMNS
    multiplied = form.depth * (rows * columns + rows + columns) + keys * (own * (rows + 1) + rows)
    part = max(_THREADS / _LANES_A_CLOCK * multiplied, 2.0 * machine.memory_latency / _RESIDENT)
    turns = ceil(prod(form.batch) * ceil(form.queries / (rows * _ROW_GROUPS)) / machine.multiprocessors)
    clocks = turns * ceil(form.keys / keys) * part + 2.0 * machine.memory_latency * ceil(form.keys / keys)
    flops = 2 * prod(form.batch) * form.queries * form.keys * (form.depth + form.width)
    return Estimate(clocks, flops, is_parallel=False)


def _build(form: Attention, target: Target) -> BuiltKernel:
    builder = new_builder(target, form.group.configuration)
    assert isinstance(builder, GpuBuilder)
    rows, columns = _tile(form)
    row_blocks = ceil(form.queries / (rows * _ROW_GROUPS))
    with builder.blocks(prod(form.batch) * row_blocks, _THREADS) as (block, thread):
        *batch, number = bound_unravel(builder, block, (*form.batch, row_blocks))
        first, row, column = (builder.bind(one) for one in (number * (rows * _ROW_GROUPS), thread // _COLUMNS, thread % _COLUMNS))
        _Block(form, builder, rows, columns, thread, row, column, tuple(batch), first).compute()
    flops = 2 * prod(form.batch) * form.queries * form.keys * (form.depth + form.width)
    return finish("gpu_attention", builder, form.group, flops=flops)


def _tile(form: Attention) -> tuple[int, int]:
    """Rows and columns of scores of a thread: the most whose operands fit in shared memory; 1 and 1 where none do."""
    most = min(4, ceil(form.queries / _ROW_GROUPS)), min(4, ceil(form.keys / _COLUMNS))
    options = sorted(((r, c) for r in range(1, most[0] + 1) for c in range(1, most[1] + 1)), key=prod, reverse=True)
    return next((one for one in options if sum(_sizes(form, *one)) * _bytes(form) <= _SHARED_BYTES), (1, 1))


def _sizes(form: Attention, rows: int, columns: int) -> tuple[int, int, int, int]:
    """Elements of the shared arrays of queries, keys, values and weights; the pitch of rows is odd."""
    queries, keys = rows * _ROW_GROUPS, columns * _COLUMNS
    partial = queries * _COLUMNS
    return queries * (form.depth | 1), keys * (form.depth | 1), keys * form.width, queries * (keys | 1) + partial


def _bytes(form: Attention) -> int:
    return np.dtype(form.dtype).itemsize


@dataclass(frozen=True)
class _Block:
    """The work of one thread: `rows` x `columns` scores from `row` and `column` on of the block that begins at query `first`."""

    form: Attention
    builder: GpuBuilder
    rows: int
    columns: int
    thread: Expr
    row: Expr
    column: Expr
    batch: Index
    first: Expr

    @cached_property
    def elements(self) -> Elements:
        return Elements(self.form, self.builder)

    @property
    def keys(self) -> int:
        """Of a block of keys."""
        return self.columns * _COLUMNS

    @property
    def queries(self) -> int:
        """Of the block."""
        return self.rows * _ROW_GROUPS

    @cached_property
    def is_staged(self) -> bool:
        """Whether operands go through shared memory; heads that are too deep for it are read where they lie."""
        return sum(_sizes(self.form, self.rows, self.columns)) * _bytes(self.form) <= _SHARED_BYTES

    def compute(self) -> None:
        form, builder = self.form, self.builder
        scores, maxima, sums = (builder.local(size, form.dtype) for size in (self.rows * self.columns, self.rows, self.rows))
        own = ceil(form.width / _COLUMNS)
        results = builder.local(self.rows * own, form.dtype)
        _fill(builder, maxima, self.rows, -np.inf)
        _fill(builder, sums, self.rows, 0)
        _fill(builder, results, self.rows * own, 0)
        queries, keys, values = self._shared_operands()
        weights = builder.shared(self.queries * (self.keys | 1), form.dtype, "weights")
        partial = builder.shared(self.queries * _COLUMNS, form.dtype, "partial")
        self._stage(queries, self.queries, form.depth, form.depth | 1, self._query)
        if form.weighs_probabilities:
            with self._key_blocks() as begin:
                self._scores(begin, queries, keys, scores)
                self._exponentials(scores, maxima, sums, None, partial)
            self._meet(sums, partial, lambda a, b: a + b)
        with self._key_blocks() as begin:
            self._scores(begin, queries, keys, scores)
            if form.weighs_probabilities:
                self._weigh(begin, scores, maxima, sums)
            else:
                self._exponentials(scores, maxima, sums, results, partial)
            for r, c in np.ndindex(self.rows, self.columns):
                place = (self.row + r * _ROW_GROUPS) * (self.keys | 1) + self.column + c * _COLUMNS
                builder.store(weights, place, scores[self._at(r, c)])
            self._stage(values, self.keys, form.width, form.width, lambda key, w: self._value(begin, key, w))
            builder.barrier()
            self._add(begin, weights, values, results)
        if not form.weighs_probabilities:
            self._meet(sums, partial, lambda a, b: a + b)
        self._store(results, sums)

    def _shared_operands(self) -> tuple[Buffer | None, Buffer | None, Buffer | None]:
        if not self.is_staged:
            return None, None, None
        sizes = _sizes(self.form, self.rows, self.columns)[:3]
        queries, keys, values = (
            self.builder.shared(max(size, 1), self.form.dtype, name)
            for size, name in zip(sizes, ("queries", "keys", "values"), strict=True)
        )
        return queries, keys, values

    @contextmanager
    def _key_blocks(self) -> Iterator[Expr]:
        """The loop over blocks of keys; yields the first key of each."""
        with self.builder.loop(ceil(self.form.keys / self.keys), name="keys") as number:
            yield self.builder.bind(number * self.keys)

    def _stage(self, shared: Buffer | None, lines: int, length: int, pitch: int, element: _Element) -> None:
        """Fill a shared array, line by line, by all threads together."""
        if shared is None or not length:
            return
        builder, count = self.builder, lines * length
        with builder.loop(ceil(count / _THREADS), name="turn") as turn:
            number = builder.bind(turn * _THREADS + self.thread)
            with builder.when(number < count):
                line, at = builder.bind(number // length), builder.bind(number % length)
                place = builder.bind(line * pitch + at)
                builder.store(shared, place, tirx.const(0, self.form.dtype))
                self._put(shared, place, element(line, at))

    def _put(self, shared: Buffer, place: Expr, found: tuple[Expr, Callable[[], Expr]]) -> None:
        """An element where its condition holds."""
        condition, read = found
        with self.builder.when(condition):
            self.builder.store(shared, place, read())

    def _query(self, line: Expr, k: Expr) -> tuple[Expr, Callable[[], Expr]]:
        query = self.first + line
        return query < self.form.queries, lambda: self.elements.query(self.batch, query, k)

    def _key(self, begin: Expr, line: Expr, k: Expr) -> tuple[Expr, Callable[[], Expr]]:
        key = begin + line
        return key < self.form.keys, lambda: self.elements.key(self.batch, key, k)

    def _value(self, begin: Expr, line: Expr, at: Expr) -> tuple[Expr, Callable[[], Expr]]:
        key = begin + line
        return key < self.form.keys, lambda: self.elements.value(self.batch, key, at)

    def _at(self, r: int, c: int) -> int:
        return r * self.columns + c

    def _place(self, begin: Expr, r: int, c: int) -> tuple[Expr, Expr]:
        """Query and key of a thread's score."""
        return self.first + self.row + r * _ROW_GROUPS, begin + self.column + c * _COLUMNS

    def _scores(self, begin: Expr, queries: Buffer | None, keys: Buffer | None, scores: Buffer) -> None:
        """The thread's scores of a block of keys as the softmax takes them; -inf beyond the last key."""
        form, builder = self.form, self.builder
        builder.barrier()  # the block before has been read
        self._stage(keys, self.keys, form.depth, form.depth | 1, lambda key, k: self._key(begin, key, k))
        builder.barrier()
        _fill(builder, scores, self.rows * self.columns, 0)
        with builder.loop(form.depth, name="k") as k:
            for r, c in np.ndindex(self.rows, self.columns):
                self._multiply(begin, (queries, keys), scores, (r, c), k)
        for r, c in np.ndindex(self.rows, self.columns):
            query, key = (builder.bind(place) for place in self._place(begin, r, c))
            product = builder.name(scores[self._at(r, c)])
            builder.store(scores, self._at(r, c), tirx.const(-np.inf, form.dtype))
            with builder.when(tirx.all(query < form.queries, key < form.keys)):
                builder.store(scores, self._at(r, c), self.elements.score(self.batch, query, key, product))

    def _multiply(
        self, begin: Expr, operands: tuple[Buffer | None, Buffer | None], scores: Buffer, at: tuple[int, int], k: Expr
    ) -> None:
        builder, (r, c), (queries, keys) = self.builder, at, operands
        slot, pitch = self._at(r, c), self.form.depth | 1
        if queries is not None and keys is not None:
            q = queries[(self.row + r * _ROW_GROUPS) * pitch + k]
            builder.store(scores, slot, scores[slot] + q * keys[(self.column + c * _COLUMNS) * pitch + k])
            return
        query, key = self._place(begin, r, c)
        with builder.when(tirx.all(query < self.form.queries, key < self.form.keys)):
            product = self.elements.query(self.batch, query, k) * self.elements.key(self.batch, key, k)
            builder.store(scores, slot, scores[slot] + product)

    def _exponentials(self, scores: Buffer, maxima: Buffer, sums: Buffer, results: Buffer | None, partial: Buffer) -> None:
        """Scores become exponentials; what was summed before is rescaled where a row's maximum has grown."""
        builder, own = self.builder, ceil(self.form.width / _COLUMNS)
        grown = builder.local(self.rows, self.form.dtype)
        for r in range(self.rows):
            builder.store(grown, r, maxima[r])
            for c in range(self.columns):
                builder.store(grown, r, tirx.max(grown[r], scores[self._at(r, c)]))
        self._meet(grown, partial, tirx.max)
        for r in range(self.rows):
            base = builder.name(self._base(grown[r]))
            factor = builder.name(tirx.exp(maxima[r] - base))
            builder.store(maxima, r, grown[r])
            builder.store(sums, r, sums[r] * factor)
            for c in range(self.columns):
                builder.store(scores, self._at(r, c), tirx.exp(scores[self._at(r, c)] - base))
                builder.store(sums, r, sums[r] + scores[self._at(r, c)])
            for w in range(own if results is not None else 0):
                assert results is not None
                builder.store(results, r * own + w, results[r * own + w] * factor)

    def _base(self, maximum: Expr) -> Expr:
        """What is subtracted from scores: their maximum, but 0 for a row that has seen no key, whose exponentials are then 0."""
        return tirx.Select(maximum.equal(tirx.const(-np.inf, self.form.dtype)), tirx.const(0, self.form.dtype), maximum)

    def _weigh(self, begin: Expr, scores: Buffer, maxima: Buffer, sums: Buffer) -> None:
        """Scores become what the product with V takes for their probabilities; 0 beyond the last key."""
        builder, form = self.builder, self.form
        for r, c in np.ndindex(self.rows, self.columns):
            query, key = (builder.bind(place) for place in self._place(begin, r, c))
            slot = self._at(r, c)
            probability = builder.name(tirx.exp(scores[slot] - self._base(maxima[r])) / sums[r])
            builder.store(scores, slot, tirx.const(0, form.dtype))
            with builder.when(tirx.all(query < form.queries, key < form.keys)):
                builder.store(scores, slot, self.elements.weight(self.batch, query, key, probability))

    def _meet(self, values: Buffer, partial: Buffer, combine: Callable[[Expr, Expr], Expr]) -> None:
        """Bring the values that the eight threads of a row have together in each of them, in a fixed order."""
        builder = self.builder
        builder.barrier()
        for r in range(self.rows):
            builder.store(partial, (self.row + r * _ROW_GROUPS) * _COLUMNS + self.column, values[r])
        builder.barrier()
        for r in range(self.rows):
            place = (self.row + r * _ROW_GROUPS) * _COLUMNS
            builder.store(values, r, partial[place])
            for other in range(1, _COLUMNS):
                builder.store(values, r, combine(values[r], builder.name(partial[place + other])))

    def _add(self, begin: Expr, weights: Buffer, values: Buffer | None, results: Buffer) -> None:
        """Add a block's weights times values to the thread's results."""
        form, builder, own = self.form, self.builder, ceil(self.form.width / _COLUMNS)
        with builder.loop(tirx.min(form.keys - begin, self.keys), name="key") as key:
            for w in range(own):
                at = self.column + w * _COLUMNS
                with builder.when(at < form.width):
                    staged = None if values is None else values[key * form.width + at]
                    value = builder.name(self.elements.value(self.batch, begin + key, at) if staged is None else staged)
                    for r in range(self.rows):
                        weight = weights[(self.row + r * _ROW_GROUPS) * (self.keys | 1) + key]
                        builder.store(results, r * own + w, results[r * own + w] + weight * value)

    def _store(self, results: Buffer, sums: Buffer) -> None:
        form, builder, own = self.form, self.builder, ceil(self.form.width / _COLUMNS)
        for r, w in np.ndindex(self.rows, own):
            query, at = builder.bind(self.first + self.row + r * _ROW_GROUPS), builder.bind(self.column + w * _COLUMNS)
            with builder.when(tirx.all(query < form.queries, at < form.width)):
                result = results[r * own + w]
                divided = result if form.weighs_probabilities else result / sums[r]
                self.elements.store_result(self.batch, query, at, builder.name(divided))


def _fill(builder: GpuBuilder, buffer: Buffer, count: int, value: float) -> None:
    for slot in range(count):
        builder.store(buffer, slot, tirx.const(value, str(buffer.dtype)))
