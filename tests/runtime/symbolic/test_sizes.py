"""Sizes against the numbers that they are at each point, the questions that cut a domain, and what must not become a number."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from itertools import product
from math import ceil, floor, prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefuse.runtime.symbolic.shapes import broadcast_shape, equal, is_one, same_shape
from prefuse.runtime.symbolic.size_text import evaluator, interval_of, size_faults
from prefuse.runtime.symbolic.sizes import (
    Dim,
    Domain,
    Size,
    SymbolicSizeError,
    estimate,
    estimating,
    greatest_of,
    hint_of,
    least_of,
    maximum_of,
    minimum_of,
)

DIMS = (Dim("T", 1, 9), Dim("B", 2, 8, 2))


def domain(**hint: int) -> Domain:
    return Domain(DIMS, {"T": 5, "B": 4, **hint})


_leaves = st.one_of(st.integers(-9, 9), st.sampled_from(["T", "B"]))
_trees = st.recursive(
    _leaves,
    lambda inner: st.tuples(st.sampled_from(["+", "-", "*", "//", "%", "min", "max", "ceil"]), inner, inner),
    max_leaves=9,
)


def compute(tree: Any, names: Mapping[str, Any]) -> Any:
    """The value of a tree of operations; divisors are made positive numbers."""
    if isinstance(tree, int):
        return tree
    if isinstance(tree, str):
        return names[tree]
    operator, left, right = tree
    a, b = compute(left, names), compute(right, names)
    divisor = maximum_of(b, 1) if operator in ("//", "%", "ceil") else b
    return {
        "+": lambda: a + b,
        "-": lambda: a - b,
        "*": lambda: a * b,
        "//": lambda: a // divisor,
        "%": lambda: a % divisor,
        "min": lambda: minimum_of(a, b),
        "max": lambda: maximum_of(a, b),
        "ceil": lambda: -(-a // divisor),
    }[operator]()


@settings(deadline=None)
@given(_trees)
def test_a_size_is_its_number_at_every_point(tree: Any) -> None:
    one = domain()
    found = compute(tree, {dim.name: one.size(dim.name) for dim in DIMS})
    text = evaluator(str(found)) if isinstance(found, Size) else lambda sizes: found
    for position in range(len(one.alive)):
        sizes = {name: int(values[position]) for name, values in one.points.items()}
        expected = compute(tree, sizes)
        assert (found.values[position] if isinstance(found, Size) else found) == expected
        assert text(sizes) == expected


@settings(deadline=None)
@given(_trees, _trees)
def test_answers_hold_at_every_point_that_is_left(left: Any, right: Any) -> None:
    one = domain()
    names = {dim.name: one.size(dim.name) for dim in DIMS}
    a, b = compute(left, names), compute(right, names)
    try:
        is_less = a < b
    except SymbolicSizeError:
        assert one.alive.all()
        return
    at = np.flatnonzero(one.alive)
    values = [np.broadcast_to(side.values if isinstance(side, Size) else side, one.alive.shape)[at] for side in (a, b)]
    assert ((values[0] < values[1]) == is_less).all()
    assert one.alive[one.at]


def test_a_question_cuts_the_domain_to_a_box_around_the_hint() -> None:
    one = domain(T=5)
    assert one.size("T") > 3
    assert one.box == (Dim("T", 4, 9), Dim("B", 2, 8, 2))
    assert one.cuts == ["T > 3"]
    assert one.serves({"T": 4, "B": 2})
    assert not one.serves({"T": 3, "B": 2})
    assert least_of(one.size("T")) == 4


def test_what_is_no_box_cuts_nothing() -> None:
    one = domain()
    with pytest.raises(SymbolicSizeError, match="differs from size to size"):
        assert one.size("T") % 2 > 0
    assert one.alive.all()


def test_equal_at_some_points_is_different_but_for_one() -> None:
    one = domain()
    t = one.size("T")
    assert t != 7
    assert t not in (2, 3)
    assert one.alive.all()
    assert t != 1
    assert one.box[0].least == 2
    assert t == one.size("T")
    assert (t, 3) == (one.size("T"), 3)


def test_cuts_of_a_failed_trial_are_undone() -> None:
    one = domain()

    def fail() -> None:
        with one.trial():
            assert one.size("T") > 3
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert one.alive.all()
    assert not one.cuts


@pytest.mark.parametrize(
    "use",
    [
        int,
        float,
        range,
        lambda size: [0] * size,
        lambda size: [1, 2][size],
        lambda size: np.zeros(size),
        lambda size: np.array([size], np.int64),
        lambda size: np.int64(size),
        lambda size: ceil(size / 2) + 0.5,
        lambda size: size * 0.5,
        lambda size: float(size / 2),
        lambda size: 1 / size,
        round,
        lambda size: size.bit_length(),
        lambda size: size < 2.5,
        lambda size: 7 // (size - 5),
    ],
)
def test_a_size_is_no_number(use: Callable[[Any], object]) -> None:
    with pytest.raises(SymbolicSizeError):
        use(domain().size("T"))


def test_estimates_take_the_hint() -> None:
    one = domain(T=5)
    t = one.size("T")
    with estimate():
        assert (int(t), float(t), t * 0.5, t / 2, t > 4, t < 2.5) == (5, 5.0, 2.5, 2.5, True, False)
        assert list(range(t)) == [0, 1, 2, 3, 4]
    assert estimating(lambda size: 3.0 / size)(t) == 0.6
    assert one.alive.all()
    assert (hint_of(t), hint_of(3), greatest_of(t), least_of(t)) == (5, 3, 9, 1)


def test_sizes_that_grow_without_end_are_refused() -> None:
    """Each step doubles a text, or the terms of a polynomial: all would wait for them."""

    first = Domain((Dim("N", 1, 4096),), {"N": 64}).size("N")

    def grown(step: Callable[[Any], Any]) -> None:
        size = first
        for _ in range(60):
            size = step(size)

    with pytest.raises(SymbolicSizeError, match="characters"):
        grown(lambda size: size - size // 3)
    with pytest.raises(SymbolicSizeError, match="terms"):
        grown(lambda size: (size + first % 7 + 1) * (size + 2))


def test_sizes_beyond_64_bits_are_refused() -> None:
    size = Domain((Dim("N", 1, 99999),), {"N": 99}).size("N")
    assert (size * size * size).greatest == 99999**3
    with pytest.raises(SymbolicSizeError, match="may be more"):
        _ = (size * size * size * size).greatest


def test_a_divisor_may_be_zero_where_the_domain_has_been_cut() -> None:
    sizes = domain()
    divisor = sizes.size("T") - 2
    with pytest.raises(SymbolicSizeError, match="may be 0"):
        _ = sizes.size("B") // divisor
    assert divisor > 0
    quotient = sizes.size("B") // divisor
    assert (quotient.least, quotient.greatest) == (0, 8)


def test_polynomials_are_canonical() -> None:
    one = domain()
    t, b = one.size("T"), one.size("B")
    assert str(t * b * 6) == str(6 * b * t) == "6*B*T"
    assert str(prod((b, t, 4, 16)) // (t * b)) == "64"
    assert (t * 32) // 8 == 4 * t
    assert equal((t + b) * (t - b), t * t - b * b)
    assert (ceil(t / 4), floor(t / 4)) == (-(-t // 4), t // 4)
    assert t // 100 == 0
    assert isinstance(t // 100, int)
    assert maximum_of(t, 1) is t
    assert minimum_of(t, 100) is t


def test_shapes() -> None:
    t = domain().size("T")
    assert same_shape((t, 3), (t * 1, 3))
    assert not same_shape((t,), (t, 1))
    assert not is_one(t)
    assert broadcast_shape((t, 1), (4,), ()) == (t, 4)
    for other in (3, t + 1):
        with pytest.raises(ValueError, match="in one dimension"):
            broadcast_shape((t,), (other,))


def test_a_dimension_of_one_size_is_a_number() -> None:
    assert Domain((Dim("T", 3, 3), Dim("B", 1, 2)), {"T": 3, "B": 1}).size("T") == 3


@pytest.mark.parametrize("text", ["__import__('os')", "T.real", "T if T else 1", "[T]", "T < 3", "lambda: 1"])
def test_other_expressions_are_no_sizes(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        evaluator(text)({"T": 1})


@pytest.mark.parametrize("text", ["min(4)", "min()", "max", "max + 1", "n // 0", "m"])
def test_sizes_that_cannot_be_computed_are_faults(text: str) -> None:
    assert "cannot be computed" in "".join(size_faults([(0, text)], [9], [Dim("n", 0, 4)]))


@pytest.mark.parametrize("text", ["-" * 10_000 + "1", "1+" * 30_000 + "1", "(" * 300 + "1" + ")" * 300])
def test_texts_that_nest_too_deeply_are_no_sizes(text: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        evaluator(text)


@pytest.mark.parametrize("greatest", [3_000_000_000, 2**63 - 1])
def test_large_dimensions_take_no_memory(greatest: int) -> None:
    tracemalloc.start()
    try:
        assert list(size_faults([(0, "n")], [greatest], [Dim("n", 0, greatest)])) == []
        assert len(list(size_faults([(0, "n")], [greatest - 1], [Dim("n", 0, greatest)]))) == 1
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_sizes_of_many_dimensions_are_looked_at_in_bounded_time() -> None:
    """A stranger's plan has as many as it likes; a size depends on few."""
    dims = [Dim(f"n{number}", 1, 1000) for number in range(60)]
    assert list(size_faults([(0, "n3 * n50")], [1_000_000], dims)) == []
    assert "from 1 to 1000000" in "".join(size_faults([(0, "n3 * n50")], [999_999], dims))
    everything = " + ".join(dim.name for dim in dims)
    assert list(size_faults([(0, everything)], [100_000], dims)) == []
    assert "from 60 to 60000" in "".join(size_faults([(0, everything)], [59_999], dims))


def test_sizes_leave_their_room_between_the_ends_of_many_points() -> None:
    """These are largest, or negative, where no dimension ends, and there are too many points to try all."""
    dims = [Dim("a", 1, 1024), Dim("b", 1, 1000)]
    assert list(size_faults([(0, "a % 64 + b // 1000")], [64], dims)) == []
    for text, size in (("a % 64 + b // 1000", 63), ("min(a, 1025 - a) + b // 1000", 511), ("a // 64 * 64 - a + b // b", 9)):
        assert list(size_faults([(0, text)], [size], dims)), text


def test_all_points_decide_where_bounds_are_too_wide() -> None:
    dims = [Dim("a", 64, 640, 64), Dim("b", 1, 300)]
    text = "a * b // 64 - a * b // 64 + b"
    assert list(size_faults([(0, text), (0, "b // (a % 63)")], [300], dims)) == []
    assert "is from 1 to 300" in "".join(size_faults([(0, text)], [299], dims))


def written(tree: Any) -> str:
    """A tree of operations as the text of a size."""
    if isinstance(tree, (int, str)):
        return f"({tree})"
    sign, left, right = tree
    a, b = written(left), written(right)
    return f"{sign}({a}, {b})" if sign in ("min", "max") else f"(-(-{a} // {b}))" if sign == "ceil" else f"({a} {sign} {b})"


@settings(deadline=None)
@given(_trees, st.tuples(*[st.integers(-4, 4)] * 2), st.tuples(*[st.integers(0, 9)] * 2))
def test_intervals_hold_every_value(tree: Any, firsts: tuple[int, int], more: tuple[int, int]) -> None:
    text, names = written(tree), ("T", "B")
    ranges = [range(first, first + extent + 1) for first, extent in zip(firsts, more, strict=True)]
    try:
        least, most = interval_of(text, {name: (one[0], one[-1]) for name, one in zip(names, ranges, strict=True)})
    except ZeroDivisionError:
        return
    values = [evaluator(text)(dict(zip(names, point, strict=True))) for point in product(*ranges)]
    assert least <= min(values) <= max(values) <= most
