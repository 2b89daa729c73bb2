"""Regions with rows and pitches, against sets of their bytes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prefuse.runtime.memory.regions import Region, close_between, close_pairs, first_missing, meet, merged, region_fault


def bytes_of(region: Region) -> set[int]:
    width = region.size_bytes // region.rows
    return {region.offset + row * region.pitch + byte for row in range(region.rows) for byte in range(width)}


@st.composite
def regions(draw: st.DrawFn, pitch: int | None = None, rows: int | None = None) -> Region:
    offset = draw(st.integers(0, 60))
    if draw(st.booleans()):
        return Region("b", offset, draw(st.integers(0, 60)))
    rows, pitch = rows or draw(st.integers(2, 6)), pitch or draw(st.integers(1, 20))
    return Region("b", offset, rows * draw(st.integers(0, pitch)), rows, pitch)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_regions_of_one_pitch_meet_where_they_share_a_byte(data: st.DataObject) -> None:
    pitch = data.draw(st.integers(1, 20))
    first, second = data.draw(regions(pitch)), data.draw(regions(pitch))
    assert meet(first, second) == bool(bytes_of(first) & bytes_of(second)) == meet(second, first)


@settings(max_examples=300, deadline=None)
@given(regions(), regions())
def test_regions_that_share_a_byte_meet(first: Region, second: Region) -> None:
    assert meet(first, second) or not bytes_of(first) & bytes_of(second)
    assert not meet(first, Region("c", second.offset, second.size_bytes, second.rows, second.pitch))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_pairs_are_all_that_meet(data: st.DataObject) -> None:
    found = [(one, number) for number, one in enumerate(data.draw(st.lists(regions(11), max_size=6)))]
    expected = {frozenset((i, j)) for one, i in found for other, j in found if i < j and meet(one, other)}
    pairs = [frozenset(pair) for pair in close_pairs(found)]
    assert set(pairs) == expected
    assert len(pairs) == len(expected)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_pairs_of_two_sides_are_all_that_meet(data: st.DataObject) -> None:
    sides = [[(one, i) for i, one in enumerate(data.draw(st.lists(regions(11), max_size=6)))] for _ in range(2)]
    sides[1].append((Region("a", 0, 60), 99))
    expected = {(i, j) for one, i in sides[0] for other, j in sides[1] if meet(one, other)}
    assert sorted(close_between(*sides)) == sorted(expected)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_missing_bytes_are_told(data: st.DataObject) -> None:
    """No byte is taken for written that is not; of rows of one pitch and number, or of none, nothing is missing that is not."""
    pitch, rows = data.draw(st.integers(1, 12)), data.draw(st.integers(2, 4))
    pieces, wanted = data.draw(st.lists(regions(pitch, rows), max_size=8)), data.draw(regions(pitch, rows))
    known = set().union(*map(bytes_of, merged(pieces)))
    assert known <= set().union(*map(bytes_of, pieces))
    missing = first_missing(wanted, pieces)
    if missing is None:
        assert bytes_of(wanted) <= set().union(*map(bytes_of, pieces))
    if all(one.rows == 1 for one in (*pieces, wanted)):
        expected = bytes_of(wanted) - set().union(*map(bytes_of, pieces))
        assert missing == min(expected, default=None)


def test_columns_side_by_side_are_the_whole() -> None:
    pieces = [Region("b", 4, 40, 5, 16), Region("b", 0, 20, 5, 16), Region("b", 12, 20, 5, 16)]
    assert merged(pieces) == [Region("b", 0, 80)]
    assert first_missing(Region("b", 0, 80), pieces) is None
    assert first_missing(Region("b", 0, 81), pieces) == 80
    assert first_missing(Region("b", 0, 80), pieces[:2]) == 0
    assert first_missing(Region("b", 2, 40, 5, 16), pieces[:2]) is None
    assert merged([]) == []


def test_rows_are_not_counted_one_by_one() -> None:
    many = Region("b", 0, 8 << 58, 1 << 58, 16)
    assert not meet(many, Region("b", 8, 8 << 58, 1 << 58, 16))
    assert first_missing(many, [many]) is None
    assert first_missing(Region("b", 0, 16 << 58), [many, Region("b", 8, 8 << 58, 1 << 58, 16)]) is None


def test_impossible_rows() -> None:
    assert region_fault(Region("b", 0, 96, 3, 32), 96) is None
    assert "3 equal rows" in str(region_fault(Region("b", 0, 95, 3, 32), 96))
    assert "0 equal rows" in str(region_fault(Region("b", 0, 96, 0, 32), 96))
    assert "lie 31 bytes apart" in str(region_fault(Region("b", 0, 96, 3, 31), 96))
    assert "[4, 100) are not inside b, which has 96" in str(region_fault(Region("b", 4, 96, 3, 32), 96))
