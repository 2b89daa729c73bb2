"""Which operations must wait for which: against all pairs of random ones, and without an edge too many."""

from __future__ import annotations

import random

from prefuse.runtime.gpu.hazards import Access, Span, dependencies, unordered_conflicts


def random_accesses(draw: random.Random) -> list[Access]:
    """Reads and writes of a few bytes of two memories, some empty, some of them chained as a stream's copies are."""

    def spans() -> tuple[Span, ...]:
        found = []
        for _ in range(draw.randrange(3)):
            begin = draw.randrange(24)
            found.append(Span(draw.choice("ab"), begin, begin + draw.randrange(9)))
        return tuple(found)

    count = draw.randrange(1, 14)
    after = [(draw.randrange(number),) if number and not draw.randrange(5) else () for number in range(count)]
    return [Access(spans(), spans(), one) for one in after]


def reaches(after: list[tuple[int, ...]], late: int, early: int) -> bool:
    return any(one == early or reaches(after, one, early) for one in after[late])


def test_conflicts_are_ordered_and_nothing_else_is() -> None:
    """Each edge is needed: without it a conflict, or what was asked for, is unordered."""
    draw = random.Random(5)
    edges = 0
    for _ in range(400):
        accesses = random_accesses(draw)
        after = dependencies(accesses)
        assert list(unordered_conflicts(accesses, after)) == []
        assert all(reaches(after, number, one) for number, access in enumerate(accesses) for one in access.after)
        for number, before in enumerate(after):
            for one in before:
                fewer = [tuple(e for e in before if e != one) if at == number else b for at, b in enumerate(after)]
                asked = one in accesses[number].after and not reaches(fewer, number, one)
                assert asked or list(unordered_conflicts(accesses, fewer))
                edges += 1
    assert edges > 1000


def test_readers_run_side_by_side() -> None:
    """A writer waits for all readers of what it overwrites; through them it waits for the writer before."""
    whole, left, right = Span("m", 0, 8), Span("m", 0, 4), Span("m", 4, 8)
    accesses = [Access((), (whole,)), Access((left,), ()), Access((right,), ()), Access((), (right,)), Access((whole,), ())]
    assert dependencies(accesses) == [(), (0,), (0,), (2,), (3,)]
    assert dependencies([Access((), (left,)), Access((left,), (right,)), Access((), (left, right))]) == [(), (0,), (1,)]


def test_a_read_and_a_write_of_one_operation_do_not_meet() -> None:
    place = Span("m", 0, 4)
    assert dependencies([Access((place,), (place,)), Access((place,), (place,))]) == [(), (0,)]
