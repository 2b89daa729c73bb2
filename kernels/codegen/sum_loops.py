"""The loops over k of sums of products: in blocks, for their error, and in steps, for their speed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import gcd, prod
from typing import TypeAlias

from ...runtime.symbolic.sizes import Size, greatest_of, hint_of
from .builder import Index

_UNROLLED_OPERATIONS = 320  # multiply-adds of one unrolled loop body; more of them overflow the decoded-instruction cache
_LEAST_BLOCK = 256  # products of a partial sum (block of k): adding up shorter ones would cost more than 1%
_BLOCK = 512  # products of a partial sum where none divide all
_LONGEST_BLOCK = 1024  # products of a partial sum, at most
_Map: TypeAlias = Callable[[Index], Index]
_Nest: TypeAlias = tuple[tuple[int, ...], int, _Map]  # extents, how many of the loops are outside of partial sums, and the map


@dataclass(frozen=True)
class SumLoops:
    """Loops over k, outermost first, with their extents and kinds. The `outer` first ones add up partial sums, which the loops
    inside of them make. `joined` maps iterations to those of the loops that these stand for."""

    extents: tuple[int, ...]
    kinds: tuple[str, ...]
    outer: int
    joined: _Map


def sum_loops(
    depth: tuple[int, ...], longest: int | None, spans: Collection[int], cells: int, step_operations: int
) -> tuple[SumLoops, ...]:
    """The loops over k, of extents `depth`, of a tile of `cells` registers: one nest after the other, as sums are added up.

    Chains of more than `longest` additions are split into blocks: equal ones, or those of one nest and a shorter last one, which
    is the second. The loops of `spans`, by their numbers, stay as they are. An innermost loop whose number is none of these has
    steps of `step_operations` multiply-adds at most.
    """
    plain: _Nest = depth, _outer_loops(depth, longest), lambda ks: ks
    nests = _in_blocks(depth, longest, spans) or [plain]
    found = []
    for extents, outer, joined in nests:
        stepped, whole = _in_steps(extents, joined, step_operations // cells, spans)
        found.append(SumLoops(stepped, _loop_kinds(stepped, cells, spans), outer, whole))
    return tuple(found)


def _in_blocks(depth: tuple[int, ...], longest: int | None, spans: Collection[int]) -> list[_Nest]:
    """The loops over k with the outermost loop of a too long chain of additions split into blocks; how many of them are outside
    of a block; and the map from the new loops' iterations to those of `depth`. Empty where no chain is too long."""
    axis = _outer_loops(depth, longest)
    before, extent, after = depth[:axis], depth[axis], depth[axis + 1 :]
    if longest is None or any(spanned >= axis for spanned in spans) or greatest_of(prod(depth[axis:])) <= longest:
        return []
    step = prod(after)
    lengths = range(_LONGEST_BLOCK // step, (_LEAST_BLOCK - 1) // step, -1)
    block = next((length for length in lengths if _divides(length, extent)), 0) or max(_BLOCK // step, 1)
    whole, rest = extent // block, extent % block

    def of_block(ks: Index) -> Index:
        return (*ks[:axis], ks[axis] * block + ks[axis + 1], *ks[axis + 2 :])

    def of_rest(ks: Index) -> Index:
        return (*ks[:axis], whole * block + ks[axis], *ks[axis + 1 :])

    nests: list[_Nest] = [((*before, whole, block, *after), axis + 1, of_block)]
    if not _divides(block, extent):
        nests.append(((*before, rest, *after), axis, of_rest))
    return nests


def _divides(length: int, extent: int) -> bool:
    """Whether blocks of a length fill an extent, whichever of its sizes it has."""
    rest = extent % length
    return not isinstance(rest, Size) and rest == 0


def _in_steps(extents: tuple[int, ...], joined: _Map, most: int, spans: Collection[int]) -> tuple[tuple[int, ...], _Map]:
    """The loops over k with a long innermost one in steps of `most` or fewer, unrolled.

    A step of 6 x 2 multiply-adds is 24 instructions, of which 3 count; a core that two threads share takes three in a cycle.
    """
    extent = extents[-1]
    is_long = len(extents) - 1 not in spans and not isinstance(extent, Size)
    step = gcd(1 << (most.bit_length() - 1), extent) if is_long and most > 1 else 1
    if not 1 < step < extent:
        return extents, joined
    return (*extents[:-1], extent // step, step), lambda ks: joined((*ks[:-2], ks[-2] * step + ks[-1]))


def _outer_loops(depth: tuple[int, ...], longest: int | None) -> int:
    """How many of the outermost loops over k add up partial sums, made by the loops inside of them.

    A sum of n products in one chain has an error bound in proportion to n; a blocked one, in proportion to the length of a block
    plus their number (Higham: The accuracy of floating point summation, 1993). Exact sums (`longest` is None) need no blocks.
    """
    if longest is None or len(depth) == 1:
        return 0
    return max((outer for outer in range(len(depth)) if hint_of(prod(depth[outer:])) >= _LEAST_BLOCK), default=0)


def _loop_kinds(extents: tuple[int, ...], cells: int, spans: Collection[int]) -> tuple[str, ...]:
    """The kind of each loop over k: inner loops are unrolled while the body stays small, but for those in `spans` and a single or
    long one, which LLVM may unroll."""
    kinds, operations = [], cells
    for position, extent in enumerate(reversed(extents)):
        operations *= extent
        is_whole = len(extents) - 1 - position not in spans
        is_inner = is_whole and position < len(extents) - 1 and "serial" not in kinds
        kinds.append("unrolled" if is_inner and operations <= _UNROLLED_OPERATIONS else "serial")
    return tuple(kinds[::-1])
