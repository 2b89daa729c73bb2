"""ConvTranspose on the matrix unit of a GPU, NHWC: a product, and a grid, for output positions that use the same taps.

Positions `u * stride + phase` of a phase are a convolution of stride 1 with some of the taps (transposed_phases.py); phases that
read the same input are a batch of products of the same windows, one after the other in L2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, unravel
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate
from ..cost.gpu_product import ProductSize, TiledProduct, tiled_products
from ..groups.group import Group
from ..microkernels.gpu_pipelined_product import PipelinedProduct, emit_pipelined_product
from ..microkernels.gpu_window_tiles import MOST_TAPS, ImageWindows
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal, packed_name
from ..template.kernel import finish, new_builder
from .channels_last_form import channels_last_form
from .mma_image_product import MmaImageProduct, obstacle
from .transposed_phases import PackPhases, PhaseProduct, phase_products

_MAX_PRODUCTS = 16  # each is a grid


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one ConvTranspose of float32, bfloat16 or float16 with constant weights, an epilogue, and a result transposed to
    NHWC, of an image in memory whose channels fill chunks of 16 bytes."""
    form = channels_last_form(group, may_join=True)
    if isinstance(form, Refusal):
        return form
    if form.anchor.op_type != "ConvTranspose":
        return Refusal("has no transposed convolution")
    if reason := obstacle(form, target):
        return Refusal(reason)
    groups = form.anchor.attribute("group", 1)
    kernel = MmaTransposedConvolution(form, target, form.inner.types[form.anchor.inputs[1]].shape[1] * groups)
    if not kernel.lies_in_chunks:
        return Refusal(f"{kernel.channels} channels do not lie in whole chunks of 16 bytes")
    if len(kernel.phases) > _MAX_PRODUCTS:
        return Refusal(f"{len(kernel.phases)} different phases of output positions, more than {_MAX_PRODUCTS}")
    if not all(taps.count for phases in kernel.phases for taps in phases.taps):
        return Refusal("some phases of output positions are the bias alone")
    if any(prod(taps.count for taps in phases.taps) > MOST_TAPS for phases in kernel.phases):
        return Refusal(f"more than {MOST_TAPS} taps, which a mask has no bits for")
    return Candidate(kernel.estimate(), kernel.build)


@dataclass(frozen=True)
class _Phases:
    """A product of several phases: its windows, its size, and how it may be computed."""

    phases: PhaseProduct
    windows: ImageWindows
    size: ProductSize
    ways: list[TiledProduct]


class MmaTransposedConvolution(MmaImageProduct):
    """The kernel of a ConvTranspose being built."""

    template = "gpu_mma_transposed"

    @cached_property
    def phases(self) -> list[PhaseProduct]:
        return phase_products(self.window)

    @cached_property
    def windows(self) -> list[ImageWindows]:
        """Of each product: what its positions read, tap after tap, forwards or backwards."""
        return [self._windows(one) for one in self.phases]

    def _windows(self, phases: PhaseProduct) -> ImageWindows:
        taps = phases.taps
        ones = (1,) * len(taps)
        steps = tuple(one.count for one in taps), ones, tuple(one.pitch for one in taps), tuple(-one.begin for one in taps)
        rest = self.image.shape[1], self.channels, self.channels, self.channels, self.chunk
        return ImageWindows(self.image.shape[0], self.window.inputs, phases.positions, *steps, *rest)

    @cached_property
    def products(self) -> list[_Phases]:
        sizes = [self.size_of(self.groups * prod(p.phases), w) for p, w in zip(self.phases, self.windows, strict=True)]
        return [
            _Phases(p, w, s, tiled_products(s, self.machine)) for p, w, s in zip(self.phases, self.windows, sizes, strict=True)
        ]

    @property
    def flops(self) -> int:
        return sum(one.size.flops for one in self.products)

    def estimate(self) -> Estimate:
        """All products one after the other, by the fastest way of each, in clocks of the whole GPU with all bytes."""
        clocks = sum(one.ways[0].clocks for one in self.products) - self.machine.launch_cycles
        return Estimate(clocks, self.flops, unit="tile", is_parallel=False)

    def build(self) -> BuiltKernel:
        builder = new_builder(self.target, self.form.outer.configuration)
        assert isinstance(builder, GpuBuilder)
        self.form.copy_pieces(builder)
        image, packed = self.image_in_place(builder), dict[str, Operand]()
        for number, one in enumerate(self.products):
            name = f"tile {number}" if number else "tile"
            way = builder.choose(name, {str(way): way for way in one.ways})
            self._emit(builder, image, one, way, packed)
        return finish(self.template, builder, self.form.outer, flops=self.flops, packed=packed)

    def _emit(self, builder: GpuBuilder, image: Buffer, one: _Phases, way: TiledProduct, packed: dict[str, Operand]) -> None:
        """Write the grids of a product, whose weights are a constant of their own."""
        count, unit = prod(one.phases.phases), self.unit_of(builder, way.tile)
        shape = self.groups, self.channels, *self.weights.shape[1:]
        panels = PackPhases(shape, one.phases.phases, one.phases.places, way.tile.columns)
        source = self.anchor.inputs[1]
        name = packed_name(source, str(len(packed)))
        pack, weights = self.weights_source(unit, way, panels, name)
        packed[name] = Operand(source, pack)

        def store(batch: Expr, m: Expr, n: Expr, value: Expr) -> None:
            group, phase = builder.bind(tirx.floordiv(batch, count)), builder.bind(tirx.floormod(batch, count))
            image, *position = unravel(m, (0, *one.phases.positions))
            places = zip(position, self.window.strides, one.phases.runs, unravel(phase, one.phases.phases), strict=True)
            place = [builder.bind(u * stride + (run.first + part)) for u, stride, run, part in places]
            self.store_one(builder, self.form, builder.bind(group * self.outputs + n), (image, *place), value)

        product = PipelinedProduct(
            one.size.batch,
            one.size.m,
            one.size.n,
            one.size.k,
            unit,
            way,
            self.windows_source(unit, way.tile, image, one.windows),
            weights,
            lambda batch: tirx.floordiv(batch, count),
            lambda batch: batch,
            store,
            stores_neighbours=self.stores_neighbours(self.form, unit.neighbours),
        )
        emit_pipelined_product(builder, product)
