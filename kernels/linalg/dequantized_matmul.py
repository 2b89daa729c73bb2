"""MatMul and Gemm by stored weights on float32 multiply-adds: each thread makes float32 of its panels, a block of k at a time.

A block stays in cache until all rows have met it: unpacking is done once a product, and the micro-kernel is the ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tvm import tirx

from ...runtime.symbolic.sizes import estimating, hint_of
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr
from ..codegen.work_stealing import Shares
from ..cost.estimate import Estimate, with_bytes, with_epilogue
from ..cost.stored_weights import dequantized_cycles, dequantized_tiles
from ..formats.format import F32
from ..groups.group import Group
from ..microkernels.register_tile import Tile, sum_tile
from ..microkernels.weight_packing import Sections
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import machine_of
from ..template.values import anchor_of
from .stored_weights import WeightsKernel, scaled, stored_weights

_LONGEST_BLOCK = 256  # elements of k that are unpacked at a time
_FEW_ROWS = 8  # for which a block stays in L1
_L1_SHARE = 0.5  # of L1 for a block that few rows read
_LONGEST_SECTION = 64  # where scales are of columns
_BYTES = 4  # of a word


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes a product of float32 rows by constant integers with scales, with an epilogue of pointwise operators."""
    weights = stored_weights(group, target)
    if isinstance(weights, Refusal):
        return weights
    kernel = _DequantizedKernel(group, anchor_of(group), target, weights)
    return Candidate(kernel.estimate(), kernel.build, stored_runs=(kernel.b.lines,))


@dataclass(frozen=True)
class _Scratch:
    """Of one thread, from elements of shared buffers on: a block of a panel as float32, and sums of all rows by the panel."""

    block: Buffer
    block_base: Expr
    sums: Buffer
    sums_base: Expr


class _DequantizedKernel(WeightsKernel):
    template = "dequantized_matmul"

    @estimating
    def estimate(self) -> Estimate:
        machine = machine_of(self.target, "float32")
        size = self.a.lines, self.b.lines, self.a.depth
        cycles = dequantized_cycles(*size, self.weights.bits, machine)
        operations = 2 * self.a.lines * self.b.lines * self.a.depth
        alone = Estimate(cycles, operations, overlap=1.0 if hint_of(self.a.lines) <= _FEW_ROWS else 0.5)
        whole = replace(with_bytes(alone, self.group), constant_bytes=self.constant_bytes)
        return with_epilogue(whole, self.group, machine, self.anchor)

    def build(self) -> BuiltKernel:
        builder, machine, rows = self.builder, machine_of(self.target, "float32"), self.a.lines
        how = {"shifted_loads": False, "b_padded": True, "streams_b": hint_of(rows) > _FEW_ROWS}
        ranked = dequantized_tiles(rows, self.b.lines, _LONGEST_BLOCK, self.weights.bits, machine, **how)
        tiles = {str(one): one for one in (Tile(*shape, machine.lanes) for shape in ranked)}
        tile = builder.choose("tile", self.as_shared(tiles))
        sections = self.sections(_LONGEST_SECTION, tile.columns)
        if self.weights.block and not self.shares_weights:
            sections = replace(sections, length=self.weights.block)
        words, a, flops = self.words(sections), self.rows_of_a(), 2 * rows * self.b.lines * self.a.depth
        in_block = max(self._block_limit(tile) // sections.length, 1)
        size, padded_rows = in_block * sections.length, -(-rows // tile.rows) * tile.rows
        threads = max(min(builder.threads_for(self.work), sections.panels), 1)
        block = builder.workspace(threads * size * tile.columns, "float32")
        sums = builder.workspace(threads * padded_rows * tile.columns, "float32")
        shares = Shares(builder, threads, sections.panels, self.work)
        with builder.loop(threads, "parallel", "thread") as thread:
            scratch = _Scratch(block, thread * (size * tile.columns), sums, thread * (padded_rows * tile.columns))
            with shares.of(thread) as (begin, end), builder.loop(end - begin, name="panel") as number:
                panel = builder.bind(begin + number)
                self._multiply_panel(tile, sections, in_block, panel, words, a, scratch)
        return self.finish(flops)

    def _block_limit(self, tile: Tile) -> int:
        if hint_of(self.a.lines) > _FEW_ROWS:
            return _LONGEST_BLOCK
        return min(int(self.target.machine.l1.size_bytes * _L1_SHARE) // (tile.columns * _BYTES), _LONGEST_BLOCK)

    def _multiply_panel(
        self, tile: Tile, sections: Sections, in_block: int, panel: Expr, words: Buffer, a: Buffer, scratch: _Scratch
    ) -> None:
        builder, size = self.builder, in_block * sections.length
        dequantize = self._dequantized(sections, panel, words)
        tiles = -(-self.a.lines // tile.rows)
        with (
            builder.loop(tiles * tile.rows * tile.vectors, name="v") as v,
            builder.loop(tile.lanes, "vectorized", "lane") as lane,
        ):
            builder.store(scratch.sums, scratch.sums_base + v * tile.lanes + lane, tirx.const(0, "float32"))

        def add_block(first: Expr, depth: int) -> None:
            """The products of elements [first, first + depth) of k."""
            count = -(-depth // sections.length)
            with builder.loop(count, name="section") as s:
                section = builder.bind(tirx.floordiv(first, sections.length) + s)
                target = builder.bind(scratch.block_base + s * (sections.length * tile.columns))
                self._unpack(tile, sections, section, (scratch.block, target), dequantize)
            with builder.loop(tiles, name="tile") as i:
                self._add_tile(tile, builder.bind(i * tile.rows), (first, depth), a, scratch)

        whole, rest = divmod(self.a.depth, size)
        with builder.loop(whole, name="block") as i:
            add_block(builder.bind(i * size), size)
        if rest:
            add_block(tirx.const(whole * size, "int32"), rest)
        self._store_panel(tile, sections, panel, scratch)

    def _unpack(
        self, tile: Tile, sections: Sections, section: Expr, to: tuple[Buffer, Expr], dequantize: Callable[..., Expr]
    ) -> None:
        """The rows of a section as float32 [k, column]."""
        builder, (buffer, base) = self.builder, to
        with builder.loop(sections.words, name="word") as word:
            for v in range(tile.vectors):
                with builder.loop(tile.lanes, "vectorized", "lane") as lane:
                    column = v * tile.lanes + lane
                    values = dequantize(section, word, column)
                    for k, value in enumerate(values):
                        at = base + (word * sections.numbers + k) * tile.columns + column
                        builder.store(buffer, at, value)

    def _dequantized(self, sections: Sections, panel: Expr, words: Buffer) -> Callable[..., list[Expr]]:
        """The numbers of a word, as a function of (section, word, column of the panel), in their order along k."""
        weights, builder, tile = self.weights, self.builder, sections.tile
        base = builder.bind(panel * (sections.count * sections.words * tile))
        scale = self.reader(weights.scale, sections, panel) if weights.block else None
        zero = self.reader(weights.zero, sections, panel) if weights.zero else None
        mask = tirx.const((1 << weights.bits) - 1, "int32")

        def numbers(section: Expr, word: Expr, column: Expr) -> list[Expr]:
            packed = builder.name(words[base + (section * sections.words + word) * tile + column])
            factor = None if scale is None else builder.name(scale(section, column))
            point = tirx.const(float(weights.middle), "float32")
            if zero is not None:
                point = builder.name(tirx.Cast("float32", zero(section, column)))
            found = []
            for field in range(sections.fields):
                for byte in range(_BYTES):
                    shift = 8 * byte + weights.bits * field
                    number = ((packed >> tirx.const(shift, "int32")) if shift else packed) & mask
                    value = tirx.Cast("float32", number) - point
                    found.append(value if factor is None else value * factor)
            return found

        return numbers

    def _add_tile(self, tile: Tile, start: Expr, block: tuple[Expr, int], a: Buffer, scratch: _Scratch) -> None:
        """Add the products of a register tile's rows by the unpacked block to their sums."""
        builder, (first, depth) = self.builder, block
        lines = [builder.bind(tirx.min(start + r, self.a.lines - 1) * self.a.depth + first) for r in range(tile.rows)]
        found = sum_tile(
            builder,
            tile,
            F32,
            (depth,),
            lambda row, ks: a[lines[row] + ks[0]],
            lambda column, ks: scratch.block[scratch.block_base + ks[0] * tile.columns + column],
        )
        base = builder.bind(scratch.sums_base + start * tile.columns)
        with builder.loop(tile.rows * tile.vectors, name="v") as v, builder.loop(tile.lanes, "vectorized", "lane") as lane:
            at = v * tile.lanes + lane
            builder.store(scratch.sums, base + at, scratch.sums[base + at] + found[at])

    def _store_panel(self, tile: Tile, sections: Sections, panel: Expr, scratch: _Scratch) -> None:
        builder, store = self.builder, self.store()
        scale = None if self.weights.block else self.reader(self.weights.scale, sections, panel)
        begin = builder.bind(panel * tile.columns)
        end = builder.bind(tirx.min(begin + tile.columns, self.b.lines))
        with builder.loop(self.a.lines, name="row") as row:
            line = builder.bind(scratch.sums_base + row * tile.columns)

            def element(column: Expr) -> None:
                value = scratch.sums[line + column - begin]
                store(0, row, 0, column, value if scale is None else scaled(value, scale(0, column - begin)))

            builder.dynamic_vector_loop(begin, end, tile.lanes, element)
