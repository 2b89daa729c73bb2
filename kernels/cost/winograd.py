"""Estimated cycles of Winograd's convolutions (Lavin, Gray: Fast Algorithms for Convolutional Neural Networks, CVPR 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from ...runtime.hardware.machine import Machine
from ...runtime.precision import TOLERANCES
from ...runtime.symbolic.sizes import SizeLike, estimating
from .convolution import Convolution
from .product import product_cycles, product_tile

_PLAIN_OUTPUTS = 4  # m of F(m x m, 3x3) up to which images may be of any size
WINOGRAD_HALF_OUTPUTS = 5  # m up to which transformed weights may be float16: beyond, their rounding exceeds that of bfloat16
PAIRED_OUTPUTS = 2  # m whose products may be of bfloat16 pairs: rounding the transformed input makes 1.8 times the error
PAIRED_TILES = 64  # of one image, up to which that is done, on residual branches
_LARGE_TILE_BYTES = 8 * 1024 * 1024  # of transformed weights where m is larger: programs would be many times their size
_SMALL_IMAGE_BYTES = 2 * 1024 * 1024  # of an image in float32, up to which an m above 4 pays on several threads
_TRANSFORM_CYCLES = 6.0  # of a vector of channels at one point of a tile, both transforms
_WORD_BYTES = 4  # of a channel in float32


@dataclass(frozen=True, slots=True)
class WinogradChoice:
    """F(outputs x outputs, 3x3), and its estimated cycles. With `has_pairs` its products are dot products of bfloat16 pairs."""

    outputs: int
    cycles: float
    has_pairs: bool = False

    def __str__(self) -> str:
        return f"{self.outputs} in pairs" if self.has_pairs else str(self.outputs)


def winograd_choice(one: Convolution, machine: Machine, precision: str, *, paired_tiles: int = 0) -> WinogradChoice | None:
    """The F(m x m, 3x3) with the fewest cycles; None where `winograd_choices` has none."""
    return next(iter(winograd_choices(one, machine, precision, paired_tiles=paired_tiles)), None)


@estimating
def winograd_choices(one: Convolution, machine: Machine, precision: str, *, paired_tiles: int = 0) -> list[WinogradChoice]:
    """All F(m x m, 3x3) that a precision allows, those with the fewest cycles first; none for kernels other than 3x3 of stride 1.

    bfloat16 images of up to `paired_tiles` tiles may also have F(2x2, 3x3) by dot products of pairs.
    """
    is_empty = not one.images * one.rows * one.columns
    if is_empty or one.kernel != (3, 3) or one.strides != (1, 1):
        return []
    weights = one.groups * one.inputs * one.outputs
    is_small = one.height * one.width * one.groups * one.inputs * _WORD_BYTES <= _SMALL_IMAGE_BYTES
    sizes = [
        outputs
        for outputs in TOLERANCES[precision].winograd_outputs
        if (outputs <= _PLAIN_OUTPUTS or is_small)
        and (outputs <= WINOGRAD_HALF_OUTPUTS or (outputs + 2) ** 2 * weights * _WORD_BYTES <= _LARGE_TILE_BYTES)
    ]
    choices = [WinogradChoice(outputs, _winograd_cycles(one, outputs, machine)) for outputs in sizes]
    tiles = prod(tiles_along(one, PAIRED_OUTPUTS))  # of an image
    if TOLERANCES[precision].may_round and one.element_bytes == 2 and one.inputs % 2 == 0 and tiles <= paired_tiles:
        cycles = _winograd_cycles(one, PAIRED_OUTPUTS, machine, has_pairs=True)
        choices.append(WinogradChoice(PAIRED_OUTPUTS, cycles, has_pairs=True))
    return sorted(choices, key=lambda choice: choice.cycles)


def tiles_along(one: Convolution, outputs: int) -> tuple[SizeLike, ...]:
    """Tiles of outputs x outputs along rows and columns of a result, summed over the phases of a dilated convolution."""
    sizes = zip((one.rows, one.columns), one.dilations, strict=True)
    return tuple(phases * ceil(ceil(extent / phases) / outputs) for extent, phases in sizes)


def _winograd_cycles(one: Convolution, outputs: int, machine: Machine, *, has_pairs: bool = False) -> float:
    tiles, points = one.images * prod(tiles_along(one, outputs)), (outputs + 2) ** 2
    vectors = ceil(one.groups * one.inputs / machine.lanes) + one.groups * ceil(one.outputs / machine.lanes)
    depth = one.inputs // 2 if has_pairs else one.inputs
    tile = product_tile(tiles, one.outputs, depth, machine)
    products = points * one.groups * product_cycles(tile, tiles, one.outputs, depth, machine)
    weight_bytes = one.element_bytes if outputs <= WINOGRAD_HALF_OUTPUTS else max(one.element_bytes, _WORD_BYTES)
    more_bytes = (points * weight_bytes - prod(one.kernel) * one.element_bytes) * one.groups * one.inputs * one.outputs
    fetched, transformed = more_bytes / machine.memory_bytes, tiles * points * vectors * _TRANSFORM_CYCLES
    return max(products, fetched) + min(products, fetched) / 4 + transformed  # weights are prefetched
