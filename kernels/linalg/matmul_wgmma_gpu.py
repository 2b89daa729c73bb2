"""MatMul and Gemm by warpgroups of Hopper's GPUs, batched and broadcast, of any m, n and k, with a pointwise epilogue.

Operands of bfloat16 or float16 are copied by tensor maps from where they lie, along k or along lines, if rows of theirs are
multiples of 16 bytes; constants are packed at compile time as stages of shared memory hold them. All else is for
`matmul_mma_gpu`, whose answers to what is multiplied these are.
"""

from __future__ import annotations

from math import prod

from tvm import tirx

from ...runtime.hardware.gpu import has_warpgroup_products
from ...runtime.target import Target
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate
from ..cost.gpu_warpgroup_product import DEPTH, warpgroup_ways
from ..groups.group import Group
from ..microkernels.gpu_part_layout import PackParts, PartLayout
from ..microkernels.gpu_tile_copies import ROW_ITEMS, MappedTiles, PackedTiles, Tile, TileCopies, map_of_matrices
from ..microkernels.gpu_warpgroup_product import WarpgroupProduct, emit_warpgroup_product
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal, packed_name
from ..template.kernel import finish
from .matmul import Side
from .matmul_mma_gpu import MmaProduct, mma_product_of

_NEIGHBOURS = 2  # sums of a thread in a row


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one MatMul or Gemm of bfloat16 or float16 with float32 sums, and an epilogue of pointwise operators."""
    if not has_warpgroup_products(target.level):
        return Refusal(f"{target} has no wgmma")
    found = mma_product_of(group, target)
    if isinstance(found, Refusal):
        return found
    if found.kind == "i8":
        return Refusal("it multiplies no bytes yet")
    if found.terms != (1, 1):
        return Refusal("the numbers that it multiplies are sums of several")
    for side in (found.product.a, found.product.b):
        if not found.is_packed(side) and not found.is_copied(side):
            return Refusal(f"{side.name} has no rows of whole 16 bytes of the numbers that are multiplied")
    kernel = WgmmaProduct(found, target)
    return Candidate(kernel.estimate(), kernel.build)


class WgmmaProduct:
    """The kernel of a MatMul or Gemm being built."""

    template = "gpu_wgmma_matmul"

    def __init__(self, found: MmaProduct, target: Target) -> None:
        self.found, self.product, self.group, self.machine = found, found.product, found.group, found.machine
        self.size = found.size
        b = self.product.b
        lies_along_lines = b.lines_last and not found.is_packed(b)
        self.ways = warpgroup_ways(self.size, self.machine, ROW_ITEMS if lies_along_lines else 1)

    def estimate(self) -> Estimate:
        """That of the fastest way, in clocks of the whole GPU, with all bytes."""
        clocks = self.ways[0].clocks - self.machine.launch_cycles
        return Estimate(clocks, self.size.flops, unit="tile", is_parallel=False)

    def build(self) -> BuiltKernel:
        product, builder, size = self.product, self.product.builder, self.size
        assert isinstance(builder, GpuBuilder)
        assert self.found.kind != "f32"
        assert self.found.kind != "i8"
        way = builder.choose("tile", {str(one): one for one in self.ways})
        store = product.store()
        emitted = WarpgroupProduct(
            size.batch,
            size.m,
            size.n,
            size.k,
            self.found.kind,
            way,
            self.machine.multiprocessors,
            self._copies(builder, product.a, way.tile.rows),
            self._copies(builder, product.b, way.tile.columns),
            lambda batch: product.a.matrix_of(product.batch, batch),
            lambda batch: product.b.matrix_of(product.batch, batch),
            lambda batch, m, n, value: store(batch, m, tirx.const(0, "int32"), n, value),
            stores_neighbours=self.found.stores_neighbours(_NEIGHBOURS),
        )
        emit_warpgroup_product(builder, emitted)
        return finish(self.template, builder, self.group, flops=size.flops, packed=product.packed)

    def _copies(self, builder: GpuBuilder, side: Side, lines: int) -> TileCopies:
        """What brings parts of an operand: a constant, packed, or matrices where they lie."""
        kind = self.group.types[side.name]
        if self.found.is_packed(side):
            pack = PackParts(side.pack(lines), PartLayout(lines, DEPTH, 1, along_k=True))
            packed, key = pack.packed_type(kind), packed_name(side.name, "a" if side is self.product.a else "b")
            self.product.packed[key] = Operand(side.name, pack)
            buffer = builder.parameter(key, packed.elements, packed.dtype)
            return PackedTiles(builder, Tile(lines, along_k=True), buffer, packed.shape[1], packed.shape[2])
        builder.parameter(side.name, kind.elements, "uint16")
        tile, matrices = Tile(lines, along_k=not side.lines_last), prod(side.batch)
        address = builder.tensor_map(side.name, map_of_matrices(tile, matrices, side.lines, side.depth))
        return MappedTiles(builder, tile, address, has_matrices=matrices > 1)
