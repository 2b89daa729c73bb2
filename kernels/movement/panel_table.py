"""Rows of constant tables that lie in the panels that kernels of products read: tied embeddings.

Neighbours in a row lie a panel's width apart, so that each is a cache line of its own. A step of text generation reads a row of
some thousand elements that way, beside megabytes of weights; the table does not lie in memory a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from tvm import tirx

from ..codegen.builder import Expr, KernelBuilder
from ..groups.group import Group
from ..microkernels.packing import SHARED_VECTORS, PackPanels
from ..microkernels.weight_packing import PackBlocks, PackSections, bits_of, middle_of, shared_sections
from ..template.contract import Operand

Row = Callable[[Expr], Expr]  # an element of a row, by its place
_WORD_BYTES = 4


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
