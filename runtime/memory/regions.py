"""Regions: the bytes of a Plan's buffers that its steps read and write, what they have in common, and what they leave out.

All is decided by numbers of rows and pitches, never row by row: a Plan from a stranger may speak of 10^18 of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes of a buffer: what a step reads or writes.

    They are [offset, offset + size_bytes); or `rows` equal parts of so many bytes in all, each `pitch` bytes behind the one
    before, as a matrix lies that is some columns of a wider one.
    """

    buffer: str
    offset: int
    size_bytes: int
    rows: int = 1
    pitch: int = 0

    @property
    def end(self) -> int:
        """Behind the last byte."""
        return self.offset + (self.rows - 1) * self.pitch + self.size_bytes // self.rows


def region_fault(region: Region, size_bytes: int) -> str | None:
    """Why a region cannot be of a buffer of so many bytes; None if it can."""
    if region.rows < 1 or region.offset < 0 or region.size_bytes < 0 or region.size_bytes % region.rows:
        return f"{region.size_bytes} bytes from {region.offset} on are no {region.rows} equal rows"
    if region.rows > 1 and region.pitch < region.size_bytes // region.rows:
        return f"rows of {region.size_bytes // region.rows} bytes lie {region.pitch} bytes apart"
    if region.end > size_bytes:
        return f"bytes [{region.offset}, {region.end}) are not inside {region.buffer}, which has {size_bytes}"
    return None


def meet(first: Region, second: Region) -> bool:
    """Whether two regions share a byte; of different pitches, whether what lies between their first and last bytes does."""
    if first.buffer != second.buffer or not (first.size_bytes and second.size_bytes):
        return False
    if first.offset >= second.end or second.offset >= first.end:
        return False
    pitches = {region.pitch for region in (first, second) if region.rows > 1}
    if len(pitches) != 1:
        return True
    (pitch,) = pitches
    # Of rows i and j let k = j - i: they meet if -second_bytes < behind + k * pitch < first_bytes.
    first_bytes, second_bytes = first.size_bytes // first.rows, second.size_bytes // second.rows
    behind = second.offset - first.offset
    least = max(-((second_bytes + behind - 1) // pitch), 1 - first.rows)
    return least <= min((first_bytes - 1 - behind) // pitch, second.rows - 1)


def close_pairs(regions: Sequence[tuple[Region, _T]]) -> Iterator[tuple[_T, _T]]:
    """The pairs of what has regions that share a byte, each once, in the order of buffers and offsets."""
    ordered = sorted((one for one in regions if one[0].size_bytes), key=lambda one: (one[0].buffer, one[0].offset))
    for number, (region, item) in enumerate(ordered):
        for place in range(number + 1, len(ordered)):
            other, another = ordered[place]
            if other.buffer != region.buffer or other.offset >= region.end:
                break
            if meet(region, other):
                yield item, another


def close_between(firsts: Sequence[tuple[Region, _T]], seconds: Sequence[tuple[Region, _T]]) -> Iterator[tuple[_T, _T]]:
    """The pairs of one of `firsts` and one of `seconds` whose regions share a byte. Of many regions that lie apart this takes
    linear time but for sorting, however many of one side are equal."""
    both = [(one, 0) for one in firsts if one[0].size_bytes] + [(one, 1) for one in seconds if one[0].size_bytes]
    open_ones: tuple[list[tuple[Region, _T]], list[tuple[Region, _T]]] = ([], [])
    buffer = ""
    for one, side in sorted(both, key=lambda entry: (entry[0][0].buffer, entry[0][0].offset)):
        region = one[0]
        if region.buffer != buffer:
            buffer = region.buffer
            open_ones = ([], [])
        others = open_ones[1 - side]
        others[:] = [other for other in others if other[0].end > region.offset]
        for other in others:
            if meet(region, other[0]):
                yield (one[1], other[1]) if side == 0 else (other[1], one[1])
        open_ones[side].append(one)


def merged(regions: Iterable[Region]) -> list[Region]:
    """The bytes of regions of one buffer as fewer ones, by their offsets: rows side by side are wider rows, and whole rows of a
    pitch are no rows any more."""
    families: dict[tuple[int, int], list[Region]] = defaultdict(list)
    for region in regions:
        families[region.rows, region.pitch if region.rows > 1 else 0].append(region)
    found = families.pop((1, 0), [])
    for (rows, pitch), members in families.items():
        for wide in _side_by_side(members):
            is_whole = wide.size_bytes >= rows * pitch
            found.append(replace(wide, size_bytes=rows * pitch, rows=1, pitch=0) if is_whole else wide)
    return [*_side_by_side(one for one in found if one.rows == 1), *(one for one in found if one.rows > 1)]


def first_missing(region: Region, written: Iterable[Region]) -> int | None:
    """The first byte of a region outside all the written ones, as far as `merged` knows these."""
    for one in merged(written):
        if one.rows == 1 or (one.rows, one.pitch) == (region.rows, region.pitch):
            end = region.end if one.rows == 1 else region.offset + region.size_bytes // region.rows
            row_end = one.offset + one.size_bytes // one.rows
            if one.offset <= region.offset and end <= row_end:
                return None
            if one.rows == 1 == region.rows and one.offset <= region.offset < row_end:
                return row_end
    return region.offset if region.size_bytes else None


def _side_by_side(regions: Iterable[Region]) -> list[Region]:
    """Regions of equal rows and pitches, those that touch or meet as one."""
    found: list[Region] = []
    for region in sorted(regions, key=lambda one: one.offset):
        last, rows = found[-1] if found else None, region.rows
        if last is not None and region.offset <= last.offset + last.size_bytes // rows:
            width = max(last.size_bytes // rows, region.offset - last.offset + region.size_bytes // rows)
            found[-1] = replace(last, size_bytes=width * rows)
        else:
            found.append(region)
    return found
