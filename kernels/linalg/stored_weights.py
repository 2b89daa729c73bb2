"""Products of float32 rows by constant weights that lie as integers of 2, 4 or 8 bits with scales: what their templates share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr
from ..codegen.work_stealing import Shares
from ..cost.memory import product_work
from ..formats.format import F32, Format
from ..groups.group import Group, Op
from ..microkernels.fixed_point import BlockScales
from ..microkernels.register_tile import Tile
from ..microkernels.weight_packing import PackBlocks, PackSections, Sections, bits_of, cut_sections, middle_of, shared_sections
from ..template.contract import Candidate, Operand, Refusal, packed_name
from ..template.values import NARROW_FLOATS, anchor_of
from .matmul import MatMulKernel

BlockReader = Callable[[Expr, Expr], Expr]  # of (section, column of a panel)
PER_WORD = {8: 4, 4: 8, 2: 16}  # numbers of a word


@dataclass(frozen=True)
class Weights:
    """B of a product: integers `name` [depth, columns], or transposed, scaled by blocks of `block` along k; 0: by columns."""

    name: str
    scale: str
    zero: str  # "" where there is none
    dtype: str
    block: int

    @property
    def bits(self) -> int:
        return bits_of(self.dtype)

    @property
    def middle(self) -> int:
        """What is too much in a number as it is packed."""
        return middle_of(self.dtype)

    @property
    def usual_zero(self) -> int:
        """The zero point of packed numbers where none is given; where one is, the middle of their range."""
        return 1 << (self.bits - 1) if self.zero else self.middle


def stored_weights(group: Group, target: Target) -> Weights | Refusal:
    """The weights of a group that reads some, or why no kernel takes them as they lie."""
    anchor = anchor_of(group)
    name = anchor.inputs[1] if len(anchor.inputs) > 1 else ""
    if name not in group.weights:
        return Refusal("its right operand is not constant integers with scales")
    if target.is_gpu:
        return Refusal("is for CPUs")
    op, kind = group.weights[name], group.types[name]
    found = Weights(name, op.inputs[1], op.inputs[2] if len(op.inputs) > 2 else "", kind.dtype, op.attribute("block_size", 0))
    a, result = anchor.inputs[0], anchor.outputs[0]
    if not found.bits or len(kind.shape) != 2:
        return Refusal(f"the weights are {kind}, no matrix of 2, 4 or 8 bits")
    if {group.types[one].dtype for one in (result, found.scale)} != {"float32"} or a in group.producers:
        return Refusal("rows, scales or results are not float32 in memory")
    if group.types[a].dtype not in ("float32", *NARROW_FLOATS):
        return Refusal(f"rows are {group.types[a].dtype}")
    if anchor.op_type == "Gemm" and anchor.attribute("transA", 0):
        return Refusal("the rows of the left operand do not lie one after the other")
    return _scale_fault(group, anchor, op, found) or found


def _scale_fault(group: Group, anchor: Op, op: Op, found: Weights) -> Refusal | None:
    """Why scales or zero points are not of columns, or of blocks along k."""
    shape, scales = group.types[found.name].shape, group.types[found.scale].shape
    k_axis = 1 if anchor.op_type == "Gemm" and anchor.attribute("transB", 0) else 0
    axis = op.attribute("axis", 1) % 2
    if found.zero and (group.types[found.zero].shape != scales or bits_of(group.types[found.zero].dtype) != found.bits):
        return Refusal("zero points are of another shape or type than scales and weights")
    if not found.block:
        by_column = axis == 1 - k_axis and scales == (shape[1 - k_axis],)
        return None if by_column else Refusal("scales are not one for each column")
    if found.block % PER_WORD[found.bits]:
        return Refusal(f"blocks of {found.block} fill no words of {PER_WORD[found.bits]}")
    blocks = -(-shape[k_axis] // found.block)
    wanted = (blocks, shape[1]) if k_axis == 0 else (shape[0], blocks)
    return None if axis == k_axis and scales == wanted else Refusal("blocks are not along k")


def scaled(value: Expr, scale: Expr) -> Expr:
    """A sum times the scale of its column, rounded before anything is added to it.

    LLVM would contract the product and a sum behind it into one multiply-add, so that a result's bits would depend on what is
    computed in its store.
    """
    return tirx.call_llvm_pure_intrin("float32", "llvm.arithmetic.fence", value * scale)


class WeightsKernel(MatMulKernel):
    """A product by stored weights being built: rows in memory, panels of words, scales and zero points by panels."""

    def __init__(self, group: Group, anchor: Op, target: Target, weights: Weights) -> None:
        super().__init__(group, anchor, target)
        self.weights = weights

    def _formats(self) -> tuple[Format, ...]:
        return (F32,)

    @property
    def constant_bytes(self) -> int:
        """Of weights, scales and zero points as they are packed, without what pads them."""
        scales = self.group.types[self.weights.scale].elements
        return self.a.depth * self.b.lines * self.weights.bits // 8 + scales * (5 if self.weights.zero else 4)

    @property
    def work(self) -> int:
        """Scalar operations of the whole, to be dealt to threads."""
        return product_work(2 * self.a.lines * self.b.lines * self.a.depth, self.constant_bytes, self.target.machine)

    def sections(self, longest: int, tile: int) -> Sections:
        """Sections of k of at most `longest` elements, each within a block, in panels of `tile` columns; of weights that kernels
        for other numbers of rows read, too, as many for all of these."""
        size = self.a.depth, self.b.lines, self.weights.bits, self.weights.block
        return (
            shared_sections(*size, self.builder.lanes("float32")) if self.shares_weights else cut_sections(*size, longest, tile)
        )

    def words(self, sections: Sections) -> Buffer:
        """The packed integers."""
        name = self.weights.name
        pack, key = PackSections(sections, self.b.lines_last), packed_name(name)
        self.packed[key] = Operand(name, pack)
        return self.builder.parameter(key, sections.size_bytes // 4, "int32")

    def by_blocks(self, name: str, sections: Sections, panel: Expr) -> tuple[Buffer, Expr, int]:
        """Packed scales or zero points: the buffer, where a panel's begin, and the sections of a block."""
        block, tile = self.weights.block, sections.tile
        blocks = -(-sections.depth // block) if block else 1
        pack = PackBlocks(blocks, sections.columns, tile, self.b.lines_last)
        packed, key = pack.packed_type(self.group.types[name]), packed_name(name)
        self.packed[key] = Operand(name, pack)
        buffer = self.builder.parameter(key, packed.elements, packed.dtype)
        return buffer, self.builder.bind(panel * (blocks * tile)), block // sections.length if block else 0

    def reader(self, name: str, sections: Sections, panel: Expr) -> BlockReader:
        """Scales or zero points, as they are packed, of a panel."""
        if (known := self.as_constant(name)) is not None:
            return lambda section, column: known
        buffer, base, per_block = self.by_blocks(name, sections, panel)

        def read(section: Expr, column: Expr) -> Expr:
            if not per_block:
                return buffer[base + column]
            block = section if per_block == 1 else tirx.floordiv(section, per_block)
            return buffer[base + block * sections.tile + column]

        return read

    def rows_of_a(self) -> Buffer:
        """The rows, one behind the other, in float32: those that lie in bfloat16 or float16 are copied first."""
        builder, a, kind = self.builder, self.a, self.group.types[self.a.name]
        source = builder.parameter(a.name, kind.elements, kind.dtype)
        if kind.dtype == "float32":
            return source
        copy, lanes = builder.workspace(a.lines * a.depth, "float32"), builder.lanes("float32")
        with builder.chunks(a.lines, a.lines * a.depth) as row:
            begin = builder.bind(row * a.depth)
            builder.vector_loop(a.depth, lanes, lambda i: builder.store(copy, begin + i, tirx.Cast("float32", source[begin + i])))
        return copy

    def as_constant(self, name: str) -> Expr | None:
        """A scale or zero point that is known while compiling, as there is one alone; None where it lies in memory."""
        literal = self.group.literal(name)
        if literal is None or name in self.group.inputs:
            return None
        offset = middle_of(self.group.types[name].dtype) if bits_of(self.group.types[name].dtype) else 0
        return tirx.const(float(literal.item()) + offset, "float32")

    def each_tile(self, tile: Tile, sections: Sections, words: Buffer, multiply: Callable[..., Buffer]) -> None:
        """Share panels out to threads, and store what `multiply(rows, (words, first word), scales)` makes of each register tile:
        totals [rows, columns] of these rows."""
        builder, store, rows = self.builder, self.store(), self.a.lines
        threads = min(builder.threads_for(self.work), sections.panels)
        shares = Shares(builder, threads, sections.panels, self.work)
        with (
            builder.loop(threads, "parallel", "thread") as thread,
            shares.of(thread) as (begin, end),
            builder.loop(end - begin, name="panel") as number,
        ):
            panel = builder.bind(begin + number)
            base = builder.bind(panel * (sections.count * sections.words * sections.tile))
            with builder.loop(-(-rows // tile.rows), name="tile") as i:
                first = builder.bind(i * tile.rows)
                places = [builder.bind(tirx.min(first + r, rows - 1)) for r in range(tile.rows)]
                with builder.loop(sections.tile // tile.columns, name="part") as part:
                    left = builder.bind(part * tile.columns)
                    blocks, column_scale = self._tile_scales(sections, panel, left)
                    totals = multiply(places, (words, builder.bind(base + left)), blocks)
                    self._store_tile(tile, builder.bind(panel * sections.tile + left), first, totals, column_scale, store)

    def _tile_scales(self, sections: Sections, panel: Expr, left: Expr) -> tuple[BlockScales, Callable[[Expr], Expr] | None]:
        """What multiplies sections, and what multiplies columns at the end, of columns from `left` of the panel on."""
        weights = self.weights

        def reader(name: str) -> BlockReader:
            whole = self.reader(name, sections, panel)
            return lambda section, column: whole(section, left + column)

        zero = reader(weights.zero) if weights.zero else None
        above = None
        if zero is not None:
            middle = tirx.const(float(weights.usual_zero), "float32")

            def above(section: Expr, column: Expr) -> Expr:
                return tirx.Cast("float32", zero(section, column)) - middle

        scale = reader(weights.scale)
        if weights.block:
            return BlockScales(scale, above), None
        return BlockScales(None, above), partial(scale, 0)

    def _store_tile(
        self,
        tile: Tile,
        begin: Expr,
        first: Expr,
        totals: Buffer,
        column_scale: Callable[[Expr], Expr] | None,
        store: Callable[[Expr, Expr, Expr, Expr, Expr], None],
    ) -> None:
        """The rows of a tile from `first` on, columns from `begin` on: totals, times the scales of their columns, through the
        epilogue."""
        builder = self.builder
        end = builder.bind(tirx.min(begin + tile.columns, self.b.lines))
        with builder.loop(builder.bind(tirx.min(self.a.lines - first, tile.rows)), name="row") as row:
            line = builder.bind(row * tile.columns)

            def element(column: Expr) -> None:
                value = totals[line + column - begin]
                if column_scale is not None:
                    value = scaled(value, column_scale(column - begin))
                store(0, first + row, 0, column, value)

            builder.dynamic_vector_loop(begin, end, tile.lanes, element)


def planned(kernel_type: type[WeightsKernel], group: Group, target: Target) -> Candidate | Refusal:
    """What a kernel that multiplies words as they lie would do for a group; why it cannot."""
    weights = stored_weights(group, target)
    if isinstance(weights, Refusal):
        return weights
    kernel = kernel_type(group, anchor_of(group), target, weights)
    if kernel.a.depth == 0 or kernel.a.lines == 0 or kernel.b.lines == 0:
        return Refusal("is empty")
    return Candidate(kernel.estimate(), kernel.build, stored_runs=(kernel.b.lines,))
