"""Products of rows by the weights of a recurrence: by FMAs, or by dot products of bfloat16 pairs.

A pair is elements k and k + ceil(depth / 2) of a row, not neighbours, so that two vectors of a row are rounded to one vector of
pairs without a shuffle. Weights are packed in the same pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product as nest
from math import ceil

from tvm import tirx

from ...runtime.hardware.machine import Machine
from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..cost.register_tile import MAX_ROWS, Step, tile_cycles
from ..formats.bfloat16 import word
from ..formats.format import Format, Storage, format_for
from ..formats.multiply_add import factor
from ..groups.group import Group
from ..microkernels.register_tile import Tile
from ..template.loops import accumulator_type

_FEW_ROWS = 2  # up to which products are bound by the bytes of the weights, so that dot products of rounded rows gain nothing
_LINE_ELEMENTS = 16  # float32 numbers or 32-bit pairs in a cache line
Element = Callable[[Expr], Expr]  # of k


def row_format(group: Group, x: str, weights: str, rows: int, target: Target) -> Format:
    """The format of products of `rows` rows in a recurrence over `x`: their type, or bfloat16 pairs to which rows are rounded."""
    may_round = group.tolerance.may_round or group.types[x].dtype == "bfloat16"
    rounds = may_round and rows > _FEW_ROWS and target.multiplies_pairs  # CPUs with AMX have slow dot products of vectors

    def can_read(one: Format) -> bool:
        return one.k_pack == 1 or (weights in group.constants and one.packs_a == rounds)

    number, packed = Storage(accumulator_type(group.types[x].dtype)), Storage("bfloat16")
    storage = group.storage(weights)
    found = format_for(packed, storage, target, lambda one: one.k_pack > 1 and can_read(one)) if rounds else None
    found = found or format_for(number, storage, target, can_read) or format_for(number, number, target)
    assert found is not None, "the template has looked at the types"
    return found


def pitch_of(elements: int) -> int:
    """The pitch of rows in the workspace: an odd number of cache lines, to avoid set conflicts."""
    lines = ceil(elements / _LINE_ELEMENTS)
    return (lines + 1 - lines % 2) * _LINE_ELEMENTS


@dataclass(frozen=True)
class GateTile:
    """The products by one panel are `parts` register tiles in turn, each with an equal part of the gates.

    So a tile may have more rows than registers allow for all gates at once, and panels are read less often.
    """

    tile: Tile
    parts: int
    units: int  # hidden units of a panel, whole vectors
    cycles: float  # estimated, of a panel


def choose_gate_tile(rows: int, gates: int, units: int, steps: int, machine: Machine) -> GateTile:
    """The tiles with the fewest estimated cycles for products of `rows` rows by the weights of `units` hidden units.

    `steps`: iterations of the loop over k. Every tile of rows reads the panel again, from L2 if L1 does not hold it; a single
    tile reads each panel once, from the cache that holds all weights until the next step of the sequence.
    """
    all_bytes = steps * gates * ceil(units / machine.lanes) * machine.vector_bytes

    def cycles(height: int, parts: int, wide: int) -> float:  # of a panel
        vectors = gates // parts * wide
        panel = min(steps * vectors * parts * machine.vector_bytes, machine.l2.size_bytes)
        step = Step(panel if rows > height else max(panel, all_bytes))
        return ceil(rows / height) * parts * tile_cycles(machine, height, vectors, steps, step)

    def all_cycles(height: int, parts: int, wide: int) -> float:
        return ceil(units / (wide * machine.lanes)) * cycles(height, parts, wide)

    choices = [
        (height, parts, wide)
        for height, parts, wide in nest(range(1, max(min(rows, MAX_ROWS), 1) + 1), range(1, gates + 1), range(1, 9))
        if gates % parts == 0
        and (vectors := gates // parts * wide) <= 8
        and height * vectors + vectors + 1 <= machine.registers
        and (wide == 1 or (wide - 1) * machine.lanes < units)
        and (parts == 1 or height > 1)
    ]
    height, parts, wide = min(choices, key=lambda choice: (all_cycles(*choice), choice))
    tile = Tile(height, gates // parts * wide, machine.lanes)
    return GateTile(tile, parts, wide * machine.lanes, cycles(height, parts, wide))


class RowProduct:
    """Products of `rows` rows of `depth` float32 numbers, given by `element(k)`.

    For a format of bfloat16 pairs each row must first be rounded to the workspace (`round_row`).
    """

    def __init__(self, builder: KernelBuilder, number_format: Format, rows: int, depth: int) -> None:
        self.builder, self.format, self.depth = builder, number_format, depth
        self.steps = ceil(depth / number_format.k_pack)
        self._pitch = pitch_of(self.steps)
        self._words: Buffer = builder.workspace(rows * self._pitch, "int32") if self.rounds else None

    @property
    def rounds(self) -> bool:
        """Whether rows are rounded before they are multiplied."""
        return self.format.packs_a

    @property
    def is_rough(self) -> bool:
        """Whether what they are rounded to is no more exact than bfloat16."""
        return self.rounds

    def finished(self, total: Expr, row: Expr, line: Expr) -> Expr:
        """The product of a row by line `line`, over all directions, of the weights: the sum itself."""
        return total

    def round_row(self, row: Expr, element: Element) -> None:
        """Round a row to pairs in the workspace; nothing if the format has no pairs."""
        if not self.rounds:
            return
        builder, begin = self.builder, self.builder.bind(row * self._pitch)
        whole = self.depth // 2
        builder.vector_loop(
            whole,
            builder.lanes("int32"),
            lambda k: builder.store(self._words, begin + k, word(element(k), element(k + self.steps), builder.name)),
        )
        if self.steps > whole:
            zero = tirx.const(0, "float32")
            builder.store(self._words, begin + whole, word(element(whole), zero, builder.name))

    def factor(self, row: Expr, k: Expr, element: Element) -> Expr | tuple[Expr, Expr]:
        """The operand of a multiply-add from a row, for iteration k of `steps`."""
        if self.rounds:
            return self._words[row * self._pitch + k]
        if self.format.k_pack == 1:
            return element(k)
        second = element(tirx.min(k + self.steps, self.depth - 1) if self.depth % 2 else k + self.steps)
        if self.depth % 2:
            second = self.builder.masked(k + self.steps < self.depth, second, tirx.const(0, "float32"))
        return element(k), second

    def weight(self, packed: Expr) -> Expr:
        """The operand of a multiply-add from packed weights."""
        return factor(self.format, packed)
