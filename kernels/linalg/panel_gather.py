"""Rows of constant tables that lie in the panels that kernels of products read: tied embeddings.

Neighbours in a row lie a panel's width apart, so that each is a cache line of its own. A step of text generation reads a row of
some thousand elements that way, beside megabytes of weights; the table does not lie in memory a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import ceil, prod

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Expr, KernelBuilder
from ..groups.group import Group, Op
from ..microkernels.packing import SHARED_VECTORS, PackPanels
from ..microkernels.weight_packing import PackBlocks, PackSections, bits_of, middle_of, shared_sections
from ..movement.gather import gather_estimate, index_at
from ..template.contract import BuiltKernel, Candidate, Operand, Refusal
from ..template.kernel import finish, narrowest_lanes, new_builder, pointwise_cost
from ..template.loops import bound_unravel, merge_sections, store_epilogue
from ..template.values import PANELS, anchor_of

Row = Callable[[Expr], Expr]  # an element of a row, by its place
_WORD_BYTES = 4


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes a Gather of rows of a constant table that lies in panels, with its epilogue."""
    anchor = anchor_of(group)
    table = anchor.inputs[0]
    if PANELS not in anchor.attributes or table not in group.constants or target.is_gpu:
        return Refusal("its table lies as it is")
    if table in group.weights and len(group.weights[table].inputs) > 2:
        return Refusal("its integers have zero points")
    if not group.types[table].elements or not group.types[anchor.outputs[0]].elements:
        return Refusal("is empty")
    return Candidate(gather_estimate(group, anchor, target), partial(_build, group, anchor, target))


def _build(group: Group, anchor: Op, target: Target) -> BuiltKernel:
    builder = new_builder(target)
    shape, (rows, depth) = group.types[anchor.outputs[0]].shape, group.types[anchor.inputs[0]].shape
    operands, row = panel_table(group, builder, anchor.inputs[0])
    last = len(shape) - 1
    merged, runs = merge_sections(group, shape, (range(last), range(last, last + 1)))
    lead = [prod(shape[axis] for axis in run) for run in runs[0]]
    with builder.chunks(prod(lead), 4 * prod(shape)) as chunk:
        at = bound_unravel(builder, chunk, lead)
        element = row(builder.bind(index_at(group, anchor, builder, chunk, rows)))
        lanes = narrowest_lanes(builder, group)
        builder.vector_loop(depth, lanes, lambda k: store_epilogue(merged, builder, anchor, (*at, k), element(k)))
    flops = prod(shape) * pointwise_cost(group)
    return finish("panel_gather", builder, group, flops=flops, packed={one.name: one for one in operands})


def panel_table(group: Group, builder: KernelBuilder, name: str) -> tuple[tuple[Operand, ...], Callable[[Expr], Row]]:
    """A table [rows, depth] as the kernels of products read it as their transposed right operand: its operands, and its rows by
    number, as float32 where it lies as integers with scales."""
    return _integers(group, builder, name) if name in group.weights else _panels(group, builder, name)


def _panels(group: Group, builder: KernelBuilder, name: str) -> tuple[tuple[Operand, ...], Callable[[Expr], Row]]:
    kind, width = group.types[name], SHARED_VECTORS * builder.lanes("float32")
    rows, depth = kind.shape
    k_pack = max(32 // kind.bits, 1)
    pack = PackPanels((rows, depth), (0, 1), 0, 1, width, k_pack=k_pack)
    buffer = builder.parameter(name, pack.packed_type(kind).elements, kind.dtype)
    panel_elements = ceil(depth / k_pack) * k_pack * width

    def row(number: Expr) -> Row:
        panel, line = tirx.floordiv(number, width), tirx.floormod(number, width)
        base = builder.bind(panel * panel_elements + line * k_pack)
        return lambda k: buffer[base + tirx.floordiv(k, k_pack) * (k_pack * width) + tirx.floormod(k, k_pack)]

    return (Operand(name, pack),), row


def _integers(group: Group, builder: KernelBuilder, name: str) -> tuple[tuple[Operand, ...], Callable[[Expr], Row]]:
    kind, scaling = group.types[name], group.weights[name]
    (rows, depth), block, scale = kind.shape, scaling.attribute("block_size", 0), scaling.inputs[1]
    blocks = ceil(depth / block) if block else 1
    bits, middle = bits_of(kind.dtype), middle_of(kind.dtype)
    s = shared_sections(depth, rows, bits, block, builder.lanes("float32"))
    pack = PackBlocks(blocks, rows, s.tile, lines_last=False)
    words = builder.parameter(name, s.size_bytes // _WORD_BYTES, "int32")
    scales = builder.parameter(scale, pack.packed_type(group.types[scale]).elements, "float32")

    def row(number: Expr) -> Row:
        panel, line = tirx.floordiv(number, s.tile), tirx.floormod(number, s.tile)
        base, first = builder.bind(panel * (s.count * s.words * s.tile) + line), builder.bind(panel * (blocks * s.tile) + line)

        def element(k: Expr) -> Expr:
            inside = tirx.floormod(k, s.length)
            place = tirx.floordiv(k, s.length) * s.words + tirx.floordiv(inside, s.numbers)
            field, byte = tirx.floordiv(tirx.floormod(inside, s.numbers), _WORD_BYTES), tirx.floormod(inside, _WORD_BYTES)
            number = (words[base + place * s.tile] >> (byte * 8 + field * bits)) & tirx.const((1 << bits) - 1, "int32")
            factor = scales[first + (tirx.floordiv(k, block) * s.tile if block else 0)]
            return tirx.Cast("float32", number - middle) * factor

        return element

    return (Operand(name, PackSections(s, lines_last=False)), Operand(scale, pack)), row
