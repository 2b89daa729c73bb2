"""How rows of numbers meet the weights of a recurrence: number by number, or by pairs where the weights are bfloat16.

A pair is elements k and k + ceil(depth / 2) of a row, so that whole vectors of a row make its words.
Weights are packed in the same pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import product as nest
from math import ceil

from tvm import tirx

from ...runtime.machine import Machine
from ...runtime.target import Target
from ..builder import Buffer, Expr, KernelBuilder
from ..cost.register_tile import MAX_ROWS, Step, tile_cycles
from ..formats.bfloat16 import MultiplyAdd, halves_multiply_add, multiply_add, word, words_multiply_add
from ..group import Group
from .tile_product import Tile

_FEW_ROWS = 2  # whose products take as long as weights take to arrive, so that nothing is gained by rounding the rows
_LINE_ELEMENTS = 16  # float32 numbers or words of a cache line
Element = Callable[[Expr], Expr]  # of k


class Form(Enum):
    """What a multiply-add takes of a row and of the weights."""

    NUMBERS = "a number of each"
    HALVES = "two numbers of a row, a word of weights"
    WORDS = "a word of each, so that rows are rounded to bfloat16"


def form_of(group: Group, x: str, weights: str, rows: int, target: Target) -> Form:
    """How `rows` rows of float32 numbers are multiplied, in a recurrence over `x`."""
    is_paired = group.types[weights].dtype == "bfloat16" and weights in group.constants and not target.is_gpu
    if not is_paired:
        return Form.NUMBERS
    may_round = group.precision == "bfloat16" or group.types[x].dtype == "bfloat16"
    has_instruction = target.has("avx512_bf16") and not target.has_tiles  # CPUs with tiles have a slow one
    return Form.WORDS if may_round and rows > _FEW_ROWS and has_instruction else Form.HALVES


def pitch_of(elements: int) -> int:
    """Elements from row to row in the workspace: an odd number of cache lines, so that rows lie in all sets of a cache."""
    lines = ceil(elements / _LINE_ELEMENTS)
    return (lines + 1 - lines % 2) * _LINE_ELEMENTS


@dataclass(frozen=True)
class GateTile:
    """The products of one panel are `parts` tiles, one after the other, each with as many of the gates.

    So a tile may have more rows than the registers allow for all gates at once, and reads the weights less often.
    """

    tile: Tile
    parts: int
    units: int  # hidden units of a panel, whole vectors
    cycles: float  # estimated, of a panel


def choose_gate_tile(rows: int, gates: int, units: int, steps: int, machine: Machine) -> GateTile:
    """The tiles with the fewest estimated cycles for products of `rows` rows with the weights of `units` hidden units.

    Every tile of rows reads the whole panel again, from beyond L1 if that does not hold it. A single row reads each panel once,
    in order.
    """

    def cycles(height: int, parts: int, wide: int) -> float:  # of a panel
        vectors = gates // parts * wide
        step = Step(min(steps * vectors * parts * machine.vector_bytes, machine.l2.size_bytes))
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
    """Products of `rows` rows of `depth` float32 numbers, `element(k)` of each given where it is needed.

    In the form WORDS rows must have been rounded (`round_row`), which they are in the workspace.
    """

    def __init__(self, builder: KernelBuilder, form: Form, rows: int, depth: int, target: Target) -> None:
        self.builder, self.form, self.depth = builder, form, depth
        self.terms = 1 if form is Form.NUMBERS else 2
        self.steps = ceil(depth / self.terms)
        self._pitch = pitch_of(self.steps)
        self._words: Buffer = builder.workspace(rows * self._pitch, "int32") if form is Form.WORDS else None
        self.multiply_add: MultiplyAdd = multiply_add
        if form is not Form.NUMBERS:
            self.multiply_add = words_multiply_add(target) if form is Form.WORDS else halves_multiply_add

    @property
    def rounds(self) -> bool:
        """Whether rows are rounded before they are multiplied."""
        return self.form is Form.WORDS

    def round_row(self, row: Expr, element: Element) -> None:
        """Write the words of a row; nothing if the form has none."""
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
        """What a multiply-add takes of a row for iteration k of `steps`."""
        if self.form is Form.WORDS:
            return self._words[row * self._pitch + k]
        if self.form is Form.NUMBERS:
            return element(k)
        second = element(tirx.min(k + self.steps, self.depth - 1) if self.depth % 2 else k + self.steps)
        if self.depth % 2:
            second = self.builder.masked(k + self.steps < self.depth, second, tirx.const(0, "float32"))
        return element(k), second

    def weight(self, packed: Expr, dtype: str) -> Expr:
        """What it takes of packed weights."""
        return tirx.Cast(dtype, packed) if self.form is Form.NUMBERS else packed
