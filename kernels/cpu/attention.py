"""Attention by blocks of queries: scores, their softmax and its product with the values, while the block's scores are in cache.

The matrix of all scores never exists. Queries, keys and values are read through the views and pointwise operators before them,
and the result is stored at the place to which those after it take it, so that splitting and merging heads copies nothing. Keys
and values of a head are laid out in panels, as the tile product loads them, in scratch of the thread that computes the head. Each
row of the result is divided by the sum of its exponentials at the end, unless something is computed from the probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod

import numpy as np
from tvm import tirx

from ...runtime.target import Target
from .. import math
from ..builder import Expr, Index, KernelBuilder, broadcast_index, row_major, share
from ..group import Group
from ..template import BuiltKernel, Refusal
from ..values import GroupValues, source_offset
from .anchored import bound_unravel
from .attention_form import Attention, attention_of
from .common import finish, new_builder, pointwise_cost
from .panel_product import Panels, Scratch
from .reduction import Fold, add, fold_block
from .reduction_loops import Block, Loop, block_slots
from .tile_product import choose_tile

ANCHORS = frozenset(["MatMul", "Softmax"])
_BLOCK_ROWS = 48  # queries of a block, about
_COST_OF_SOFTMAX = 16  # scalar operations of one score
_LINE_BYTES = 64


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes two products with a softmax between them, and what is pointwise or a view around and between."""
    form = attention_of(group)
    if isinstance(form, Refusal):
        return form
    if target.is_gpu:
        return Refusal("is for CPUs")
    return _Kernel(form, new_builder(target), target).build()


@dataclass(frozen=True)
class _Head:
    """Where one thread works: the place among the batch dimensions, and its scratch."""

    batch: Index
    queries: Scratch
    keys: Scratch
    values: Scratch
    scores: Scratch
    factors: Scratch


@dataclass(frozen=True)
class _Kernel:
    form: Attention
    builder: KernelBuilder
    target: Target

    @cached_property
    def lanes(self) -> int:
        return self.builder.lanes(self.form.dtype)

    @cached_property
    def score_panels(self) -> Panels:
        """Of the keys."""
        return self._panels(self.form.depth, self.form.keys)

    @cached_property
    def result_panels(self) -> Panels:
        """Of the values."""
        return self._panels(self.form.keys, self.form.width)

    def _panels(self, depth: int, columns: int) -> Panels:
        registers = self.target.vector_registers
        tile = choose_tile(self.form.queries, columns, depth, self.lanes, registers, shifted_loads=False, b_padded=True)
        return Panels(self.builder, depth, columns, tile)

    @cached_property
    def block_rows(self) -> int:
        rows = max(self.score_panels.tile.rows, self.result_panels.tile.rows)
        return rows * max(min(_BLOCK_ROWS, self.form.queries) // rows, 1)

    @property
    def flops(self) -> int:
        form = self.form
        return 2 * prod(form.batch) * form.queries * form.keys * (form.depth + form.width)

    def build(self) -> BuiltKernel:
        form, builder = self.form, self.builder
        heads, blocks = prod(form.batch), ceil(form.queries / self.block_rows)
        cost = pointwise_cost(form.group) + _COST_OF_SOFTMAX
        threads = builder.threads_for(self.flops // 16 + heads * form.queries * form.keys * cost)
        chunks = _chunks(heads, blocks, threads)
        with builder.loop(threads, "parallel", "thread") as thread:
            scratch = self._scratch(thread, threads)
            begin, end = share(thread, threads, heads * chunks)
            with builder.loop(end - begin, name="task") as i:
                *batch, chunk = bound_unravel(builder, builder.bind(begin + i), (*form.batch, chunks))
                head = _Head(tuple(batch), *scratch)
                self._pack_keys(head)
                self._pack_values(head)
                first, last = share(chunk, chunks, blocks)
                with builder.loop(last - first, name="block") as block:
                    self._block(head, builder.bind((first + block) * self.block_rows))
        return finish("attention", builder, form.group, flops=self.flops)

    def _scratch(self, thread: Expr, threads: int) -> list[Scratch]:
        """In the order of `_Head`; rows that complete a tile exist too, but hold nothing."""
        form, keys, values = self.form, self.score_panels, self.result_panels
        rows = max(ceil(self.block_rows / panels.tile.rows) * panels.tile.rows for panels in (keys, values))
        sizes = (rows * form.depth, keys.elements, values.elements, rows * form.keys, rows)
        line = _LINE_BYTES // np.dtype(form.dtype).itemsize
        whole = [ceil(size / line) * line for size in sizes]
        return [Scratch(self.builder.workspace(size * threads, form.dtype), thread * size) for size in whole]

    def _block(self, head: _Head, first: Expr) -> None:
        """All there is to do for the queries [first, first + block_rows), as far as they exist."""
        form, builder = self.form, self.builder
        rows = builder.bind(tirx.min(form.queries - first, self.block_rows))
        with builder.loop(rows, name="row") as row:
            self._each(form.depth, lambda k: self._pack_query(head, first, row, k))
        self.score_panels.multiply(head.queries, head.keys, rows, lambda *at: self._store_score(head, first, *at))
        with builder.loop(rows, name="row") as row:
            self._softmax(head, first, row)
        self.result_panels.multiply(head.scores, head.values, rows, lambda *at: self._store_result(head, first, *at))

    def _pack_query(self, head: _Head, first: Expr, row: Expr, k: Expr) -> None:
        value = self._operand(self.form.scores.inputs[0], self.form.scores.outputs[0], head.batch, (first + row, k))
        self._put(head.queries, row * self.form.depth + k, value)

    def _pack_values(self, head: _Head) -> None:
        def element(j: Expr, column: Expr) -> Expr:
            return self._operand(self.form.product.inputs[1], self.form.product.outputs[0], self._weight_batch(head), (j, column))

        self.result_panels.pack_columns(head.values, element)

    def _pack_keys(self, head: _Head) -> None:
        def element(k: Expr, j: Expr) -> Expr:
            return self._operand(self.form.scores.inputs[1], self.form.scores.outputs[0], head.batch, (k, j))

        pack = self.score_panels.pack_rows if self.keys_are_rows else self.score_panels.pack_columns
        pack(head.keys, element)

    @property
    def keys_are_rows(self) -> bool:
        """Whether the elements of a key lie side by side, as they do before the usual transpose."""
        form, name = self.form, self.form.scores.inputs[1]
        if min(form.depth, form.keys) == 1:
            return False
        outer = (0,) * (len(form.group.types[name].shape) - 2)
        origin, along_key, along_keys = (source_offset(form.group, name, (*outer, *at)) for at in ((0, 0), (1, 0), (0, 1)))
        return abs(along_key - origin) < abs(along_keys - origin)

    def _store_score(self, head: _Head, first: Expr, row: Expr, column: Expr, value: Expr) -> None:
        form, scores = self.form, self.form.scores.outputs[0]
        place = form.softmax_place((*head.batch, first + row, column))
        self._put(head.scores, row * form.keys + column, self._followed(scores, value, form.softmax.inputs[0], place))

    def _softmax(self, head: _Head, first: Expr, row: Expr) -> None:
        """Exponentials in place of a row's scores, and the factor that makes probabilities of them; or what becomes of those."""
        form, builder, dtype = self.form, self.builder, self.form.dtype
        lanes, slots = block_slots(self.lanes, form.keys)
        base = builder.bind(head.scores.base + row * form.keys)
        block = Block(builder, slots, lanes, True, base, (Loop(form.keys, 1),), ())
        top = builder.name(fold_block(block, head.scores.buffer, dtype, Fold(-np.inf, math.maximum))[tirx.const(0, "int32")])

        def exponential(x: Expr, slot: Expr, offset: Expr) -> Expr:
            shifted = x - top
            value = builder.name(math.exp_nonpositive(builder.name, shifted) if dtype == "float32" else tirx.exp(shifted))
            builder.store(head.scores.buffer, offset, value)
            return value

        total = fold_block(block, head.scores.buffer, dtype, Fold(0, add, exponential))
        factor = builder.name(tirx.const(1, dtype) / total[tirx.const(0, "int32")])
        if not form.weighs_probabilities:
            self._put(head.factors, row, factor)
            return

        def weigh(inner: Index, offset: Expr) -> None:
            place = (*form.softmax_place((*head.batch, first + row, inner[0])),)
            value = head.scores.buffer[offset] * factor
            weight = self._followed(form.softmax.outputs[0], value, form.product.inputs[0], form.weight_place(place))
            builder.store(head.scores.buffer, offset, weight)

        block.each_of_row((form.keys,), weigh)

    def _store_result(self, head: _Head, first: Expr, row: Expr, column: Expr, value: Expr) -> None:
        form, out = self.form, self.form.group.outputs[0]
        kind = form.group.types[out]
        place = form.result_place((*self._weight_batch(head), first + row, column))
        if not form.weighs_probabilities:
            value = value * head.factors[row]
        element = self._followed(form.product.outputs[0], value, out, place, kind.dtype)
        self.builder.store(self.builder.parameter(out, kind.elements, kind.dtype), row_major(place, kind.shape), element)

    def _weight_batch(self, head: _Head) -> Index:
        """The place of a head among the batch dimensions of the product with the values."""
        zero = (tirx.const(0, "int32"),) * 2
        return self.form.weight_place(self.form.softmax_place((*head.batch, *zero)))[:-2]

    def _followed(self, given: str, value: Expr, result: str, place: Index, dtype: str = "") -> Expr:
        """The element of `result` at a place, where that of `given` which it is made of is `value`."""
        types = self.form.group.types
        element = self.builder.name(tirx.Cast(types[given].dtype, value))
        values = GroupValues(self.form.group, self.builder, {given: lambda _: element})
        return tirx.Cast(dtype or self.form.dtype, values.read(result, place))

    def _operand(self, name: str, product: str, batch: Index, place: tuple[Expr, Expr]) -> Expr:
        """An element of an operand of `product` at a place of its matrix, for a place among the product's batch dimensions."""
        types = self.form.group.types
        outer = types[name].shape[:-2]
        index = (*broadcast_index(batch, types[product].shape[:-2], outer), *place)
        return tirx.Cast(self.form.dtype, GroupValues(self.form.group, self.builder).read(name, index))

    def _put(self, to: Scratch, offset: Expr, value: Expr) -> None:
        self.builder.store(to.buffer, to.base + offset, value)

    def _each(self, extent: int, body: Callable[[Expr], None]) -> None:
        self.builder.vector_loop(extent, self.lanes, body)


def _chunks(heads: int, blocks: int, threads: int) -> int:
    """Runs of blocks that a head is cut into, as few as deal the work to the threads within a tenth of evenly, if any does."""
    for chunks in range(1, blocks + 1):
        tasks = heads * chunks
        if ceil(tasks / threads) * threads <= 1.1 * tasks:
            return chunks
    return blocks
