"""MatMul and Gemm on the matrix unit of a GPU, batched and broadcast, of any size, with a pointwise epilogue.

Operands of bfloat16 or float16 are multiplied as they are, and so are bytes by constant signed ones, whose sums are int32.
Those of float32 are, on NVIDIA's unit, sums of bfloat16 numbers, as many as the precision asks for (bf16_split.py); AMD's
multiplies float32 itself, or what is rounded to bfloat16. Constants are packed at compile time as stages of shared memory hold
them; rows of numbers that are multiplied are copied there as they lie, all else passes through registers.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from functools import cached_property
from math import prod

from tvm import tirx

from ...runtime.hardware.gpu import gpu_machine
from ...runtime.target import Target
from ..codegen import amdgcn
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate
from ..cost.gpu_product import ProductSize, TiledProduct, tiled_products
from ..groups.group import Group
from ..microkernels.bf16_split import PRODUCTS
from ..microkernels.gpu_matrix_unit import MatrixUnit
from ..microkernels.gpu_operand_tiles import ConvertedSource, CopiedSource, PackedSource, Source
from ..microkernels.gpu_part_layout import PackParts, PartLayout
from ..microkernels.gpu_pipelined_product import PipelinedProduct, emit_pipelined_product
from ..microkernels.gpu_units import (
    BYTES,
    byte_format,
    chunk_of,
    missing_bytes,
    missing_terms,
    missing_unit,
    multiplied_as,
    new_unit,
    number_bytes,
)
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal, packed_name
from ..template.kernel import finish
from .matmul import MatMulKernel, Side, product_of

_TYPES = ("float32", "bfloat16", "float16")
_LANES = 4  # of float32 in 16 bytes
_MOST_NUMBERS = 2**31 - 1  # of a packed operand, which 32-bit indices reach
_EDGE = 256  # lines, and numbers along k, that tiles have at most, and that may pad an operand


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one MatMul or Gemm of float32, bfloat16 or float16 with float32 sums, or of bytes less a zero point by constant int8
    with int32 sums, and an epilogue of pointwise operators."""
    if missing := missing_unit(target):
        return Refusal(f"{target} has no {missing}")
    kernel = mma_product_of(group, target)
    return kernel if isinstance(kernel, Refusal) else Candidate(kernel.estimate(), kernel.build)


def mma_product_of(group: Group, target: Target) -> MmaProduct | Refusal:
    """The group's product on a matrix unit before code is written, or why there is none."""
    product = product_of(group, target)
    if isinstance(product, Refusal):
        return product
    types = {product.group.types[name].dtype for name in product.anchor.inputs[:2]}
    if reason := _byte_obstacle(product, target) if types <= BYTES else _float_obstacle(product, types):
        return Refusal(reason)
    if 0 in (product.a.lines, product.b.lines, product.a.depth, prod(product.batch)):
        return Refusal("has nothing to multiply")
    kernel = MmaProduct(product, target)
    missing = missing_terms(target, max(kernel.terms))
    return Refusal(missing) if missing else kernel


def _float_obstacle(product: MatMulKernel, types: Set[str]) -> str:
    """Why the unit does not multiply floats of such types; empty where it does."""
    is_float = types <= set(_TYPES) and product.dtype in _TYPES
    if not is_float or product.group.zero_points or ("float16" in types and len(types) > 1):
        return f"the matrix unit does not multiply {' by '.join(sorted(types))}"
    return ""


def _byte_obstacle(product: MatMulKernel, target: Target) -> str:
    """Why the unit does not multiply bytes; empty where it does."""
    a, b, group = product.a, product.b, product.group
    if missing := missing_bytes(target):
        return f"{target} has no {missing}"
    if b.name not in group.constants or a.name in group.constants or group.types[b.name].dtype != "int8":
        return "bytes are multiplied by constant int8 only"
    if b.name in group.zero_points:
        return "weights have a zero point"
    return "ldmatrix does not turn bytes that lie along rows" if a.lines_last else ""


class MmaProduct:
    """The kernel of a MatMul or Gemm being built."""

    template = "gpu_mma_matmul"

    def __init__(self, product: MatMulKernel, target: Target) -> None:
        self.product, self.group, self.target = product, product.group, target
        self.machine = gpu_machine(target.level)
        self.kind = self._kind()
        if self.kind == "i8":
            product.format = byte_format(self.group.types[product.a.name].dtype, target)
        self.terms = self._terms(product.a), self._terms(product.b)
        products = sum(a < self.terms[0] and b < self.terms[1] for a, b in PRODUCTS[max(self.terms)])
        conversions = self._conversions(product.a), self._conversions(product.b)
        size = prod(product.batch), product.a.lines, product.b.lines, product.a.depth
        self.size = ProductSize(*size, self.terms, products, conversions, item_bytes=number_bytes(self.kind))

    def _kind(self) -> amdgcn.Number:
        dtypes = {self.group.types[side.name].dtype for side in (self.product.a, self.product.b)}
        return multiplied_as(dtypes, self.target, may_round=self.group.tolerance.may_round)

    def _terms(self, side: Side) -> int:
        is_split = self.kind == "bf16" and self.group.types[side.name].dtype == "float32"
        return self.group.tolerance.terms if is_split else 1

    def _conversions(self, side: Side) -> int:
        """Operations that an element passes through registers with, as the assembly has them; none where copies bring it."""
        if self.is_packed(side) or self.is_copied(side):
            return 0
        if self.group.types[side.name].dtype == "float32":
            return 3 + 4 * self._terms(side) if self.kind == "bf16" else 1
        return 4 if number_bytes(self.kind) > 1 else 6

    def is_copied(self, side: Side) -> bool:
        """Whether the operand has the numbers that are multiplied, in rows of whole chunks."""
        is_multiplied = (self.group.types[side.name].dtype == "float32") == (self.kind == "f32")  # so are bytes
        return is_multiplied and self._row(side) % chunk_of(self.kind) == 0

    def is_packed(self, side: Side) -> bool:
        """Whether the operand is packed at compile time: constants, but for weights that kernels for other numbers of rows read,
        too, each by tiles of its own. These are read as they lie where that is by vectors. All terms of a large constant may be
        more than indices reach."""
        terms = self._terms(side)
        padded = terms * prod(side.batch) * (side.lines + _EDGE) * (side.depth + _EDGE)
        if side.name not in self.group.constants or (terms > 1 and padded > _MOST_NUMBERS):
            return False
        is_shared = self.product.shares_weights and side is self.product.b
        is_wide = self.group.types[side.name].dtype == "float32" and self._row(side) % _LANES == 0
        return not (is_shared and self.kind != "i8" and (is_wide or self.is_copied(side)))

    @staticmethod
    def _row(side: Side) -> int:
        """Neighbours in memory."""
        return side.lines if side.lines_last else side.depth

    @cached_property
    def ways(self) -> list[TiledProduct]:
        return tiled_products(self.size, self.machine)

    def estimate(self) -> Estimate:
        """That of the fastest way, in clocks of the whole GPU, with all bytes."""
        clocks = self.ways[0].clocks - self.machine.launch_cycles
        return Estimate(clocks, self.size.flops, unit="tile", is_parallel=False)

    def build(self) -> BuiltKernel:
        product, builder = self.product, self.product.builder
        assert isinstance(builder, GpuBuilder)
        way = builder.choose("tile", {str(one): one for one in self.ways})
        is_unsigned = self.group.types[product.a.name].dtype == "uint8"
        unit = new_unit(builder, self.target, self.kind, way.tile.warp_rows, way.tile.warp_columns, is_unsigned=is_unsigned)
        store = product.store()
        pipelined = PipelinedProduct(
            self.size.batch,
            self.size.m,
            self.size.n,
            self.size.k,
            unit,
            way,
            self._source(unit, product.a, way, is_a=True),
            self._source(unit, product.b, way, is_a=False),
            lambda batch: product.a.matrix_of(product.batch, batch),
            lambda batch: product.b.matrix_of(product.batch, batch),
            lambda batch, m, n, value: store(batch, m, tirx.const(0, "int32"), n, value),
            stores_neighbours=self.stores_neighbours(unit.neighbours),
        )
        emit_pipelined_product(builder, pipelined)
        return finish(self.template, builder, self.group, flops=self.size.flops, packed=product.packed)

    def stores_neighbours(self, count: int) -> bool:
        """Whether so many neighbours of a row may be stored at once: as many bytes as a vector has, at multiples of these."""
        kinds = {self.group.types[name].dtype for name in self.group.outputs}
        return self.size.n % count == 0 and kinds <= set(_TYPES)

    def _source(self, unit: MatrixUnit, side: Side, way: TiledProduct, *, is_a: bool) -> Source:
        """What brings parts of an operand: packed constants, asynchronous copies of rows, or loads through registers."""
        product, builder, tile = self.product, self.product.builder, way.tile
        kind = self.group.types[side.name]
        lines, is_swizzled = tile.rows if is_a else tile.columns, unit.swizzles_lines or not side.lines_last
        layout = PartLayout(lines, tile.depth, self.terms[not is_a], not side.lines_last, unit.chunk, is_swizzled)
        if self.is_packed(side):
            layout = replace(layout, along_k=True, is_swizzled=True)
            pack = PackParts(side.pack(lines), layout)
            packed, key = pack.packed_type(kind), packed_name(side.name, "a" if is_a else "b")
            product.packed[key] = Operand(side.name, pack)
            buffer = builder.parameter(key, packed.elements, packed.dtype)
            return PackedSource(unit, layout, tile.threads, buffer, packed.shape[1], packed.shape[2])
        buffer = builder.parameter(side.name, kind.elements, "uint16" if kind.bits == 16 else kind.dtype)
        rest = unit, layout, tile.threads, buffer, side.offset, side.lines, side.depth
        if self.is_copied(side):
            return CopiedSource(*rest)
        is_whole = kind.dtype == "float32" and self._row(side) % _LANES == 0
        return ConvertedSource(*rest, vector_lanes=_LANES if is_whole else 1)
