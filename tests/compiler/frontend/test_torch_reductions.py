"""Greatest and least elements, sorts, second names of operators and losses, against torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from .applied import check


def test_greatest_and_least() -> None:
    def extremes(x: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        by_axes = torch.amax(x), torch.amin(x), x.amax((0, 2)), x.amin(-1, keepdim=True)
        pairs = (*torch.aminmax(x), *torch.aminmax(x, dim=1), *torch.aminmax(x, dim=0, keepdim=True))
        return *by_axes, *pairs, torch.amax(number), *torch.aminmax(number)

    check(extremes, torch.randn(3, 4, 5), torch.tensor(2.0))


def test_numbers_are_taken_before_none() -> None:
    a = torch.tensor([1.0, math.nan, 3.0, math.nan, -0.5])
    b = torch.tensor([2.0, 1.0, math.nan, math.nan, -1.0])
    check(lambda a, b: (torch.fmax(a, b), torch.fmin(a, b)), a, b)


@pytest.mark.parametrize("extent", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_running_extremes(extent: int, dtype: torch.dtype) -> None:
    """Of equal elements the last place is named; a NaN stays."""
    x = torch.randint(-3, 4, (3, extent, 2)).to(dtype)
    if dtype.is_floating_point and extent > 6:
        x[1, 5, 0] = math.nan
    check(lambda x: (*torch.cummax(x, 1), *torch.cummin(x, 1)), x)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b, n: (*a.max(dim=1), *a.min(0), *a.cummax(1), *a.cummin(0)),
        lambda a, b, n: (torch.fmax(a, b), torch.fmin(a, n), torch.heaviside(a, b), torch.isclose(a, b)),
        lambda a, b, n: (a.clamp(min=b), a.clamp(max=n), a.clamp_min(1), a.clamp(0, 0.5), n.clamp(-1, 1)),
        lambda a, b, n: torch.addr(a, b[:, 0], b[0], beta=3, alpha=2),
    ],
    ids=["extremes", "pairs", "clamp", "addr"],
)
def test_booleans_where_onnx_has_numbers_alone(function: Callable[..., Any]) -> None:
    a, b = (torch.rand(4, 5) > 0.5 for _ in range(2))
    check(function, a, b, torch.randint(-3, 3, (4, 5), dtype=torch.int8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_bounds_of_which_one_has_a_fraction(dtype: torch.dtype) -> None:
    x = torch.randn(4, 5).to(dtype)
    check(lambda x: (x.clamp(0, 0.5), torch.clip(x, -0.5, 1), x.clamp(max=0.5)), x)


@pytest.mark.parametrize("order", [0, 1, 2, 3, 0.5, -1, math.inf, -math.inf])
def test_norms(order: float) -> None:
    """Of all elements the exporter drops the axes that are kept; of a number it reduces an axis that is not there."""
    norm = torch.linalg.vector_norm

    def norms(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        some = norm(x, order), norm(x, order, 1), norm(x, order, (0, 2), keepdim=True), norm(x, order, keepdim=True)
        return *some, norm(x, order, dtype=torch.float64), norm(a, order), functional.cosine_similarity(a, b, dim=0)

    check(norms, torch.randn(3, 4, 5) + 2, torch.tensor(-1.5), torch.tensor(2.0))


def test_stable_sorts() -> None:
    x = torch.randint(0, 4, (3, 50)).float()
    check(lambda x: (*torch.sort(x, stable=True), torch.argsort(x, dim=0, descending=True, stable=True)), x)


@pytest.mark.parametrize("name", ["divide", "true_divide", "multiply", "subtract", "greater", "less_equal", "not_equal"])
def test_second_names_bring_operands_to_one_type(name: str) -> None:
    """The exporter did so for torch.div, not for torch.divide."""
    numbers = (torch.randn(3, 4), torch.randint(1, 5, (3, 4)), torch.rand(3, 4) > 0.5, torch.randn(3, 4, dtype=torch.float64))
    function = getattr(torch, name)

    def of_all_pairs(*operands: Tensor) -> dict[str, Tensor]:
        pairs = product(operands[:4], operands[4:])
        legal = [(a, b) for a, b in pairs if name != "subtract" or torch.bool not in (a.dtype, b.dtype)]
        return {f"{a.dtype}, {b.dtype}": function(a, b) for a, b in legal}

    check(of_all_pairs, *numbers, *(one.clone() for one in numbers))


def test_shares_of_classes_in_place_of_labels() -> None:
    def loss(x: Tensor, shares: Tensor) -> tuple[Tensor, ...]:
        return functional.cross_entropy(x, shares), functional.cross_entropy(x, shares, reduction="none", label_smoothing=0.1)

    check(loss, torch.randn(4, 5), torch.rand(4, 5).softmax(-1))


@pytest.mark.parametrize("reduce", ["sum", "mean", "prod", "amax", "amin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_scatters_with_a_reduction(reduce: str, dtype: torch.dtype) -> None:
    """The exporter took the last element for a mean. Of graph networks, whose nodes have any number of neighbours."""
    x, base = torch.randint(-5, 6, (7, 6)).to(dtype), torch.randint(-5, 6, (4, 6)).to(dtype)
    index = torch.randint(0, 3, (7, 6))  # the last row gets none

    def scattered(b: Tensor, i: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        made = [b.scatter_reduce(0, i, x, reduce, include_self=own) for own in (True, False)]
        made.append(b.scatter_reduce(0, i[:5, :4], x, reduce))
        return *made, *([] if reduce == "sum" else [b.index_reduce(0, i[:, 0], x, reduce, include_self=False)])

    check(scattered, base, index, x)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax"])
def test_scatters_into_a_number(reduce: str) -> None:
    def scattered(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        place = torch.tensor(0)
        return a.scatter_reduce(0, place, b, reduce), a.scatter_reduce(0, place, b, reduce, include_self=False)

    check(scattered, torch.tensor(2.0), torch.tensor(5.0))


@pytest.mark.parametrize(
    ("shape", "sizes", "axis", "size", "step"),
    [
        ((2, 7, 16), (2, 64), 1, 16, 8),
        ((1, 7, 16), (3, 66), 1, 16, 8),
        ((3, 5, 4, 6), (3, 14, 4), 1, 6, 2),
        ((3, 4), (17,), 0, 4, 6),
    ],
)
def test_overlapping_windows(shape: tuple[int, ...], sizes: tuple[int, ...], axis: int, size: int, step: int) -> None:
    check(lambda x: torch.ops.aten.unfold_backward(x, sizes, axis, size, step), torch.randn(shape))


def test_tails_of_the_normal_distribution() -> None:
    x = torch.linspace(-4, 30, 200)
    check(lambda x: (torch.special.erfcx(x), torch.special.log_ndtr(-x)), x, tolerance=1e-4)


def test_what_does_nothing() -> None:
    check(lambda x: (torch.squeeze(x, (0, 1)), x + 1), torch.randn(3, 4))


def test_unique_numbers_of_one() -> None:
    """A pass changed what had been fused, of whose parts the names were asked then."""
    check(lambda x: torch.unique(x, return_inverse=True, return_counts=True), torch.tensor(2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_slopes_and_signs_by_numbers(dtype: torch.dtype) -> None:
    x = torch.randn(4, 5).to(dtype)
    check(
        lambda x: (functional.rrelu(x, 0.1, 0.3, training=False), torch.copysign(x, -1), torch.copysign(x, 2.5)),
        x,
        tolerance=2e-3,
    )


def test_means_are_of_the_type_they_are_asked_for() -> None:
    """The exporter casts what ReduceMean gives: of integers a whole number."""

    def means(x: Tensor, truths: Tensor, narrow: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        of_integers = x.mean(1, dtype=torch.float32), x.mean((0, 1), True, dtype=torch.float64)
        of_truths = truths.mean(0, dtype=torch.float32), truths.mean(dtype=torch.float32)
        of_narrow = narrow.mean(1, dtype=torch.float32), torch.mean(narrow, 0, dtype=torch.float64)
        return *of_integers, *of_truths, *of_narrow, y.mean(0), y.mean(-1, keepdim=True), y.mean((0, 1))

    x = torch.randint(-9, 9, (3, 5), dtype=torch.int32)
    check(means, x, x > 0, torch.randn(4, 300).half(), torch.randn(3, 4), tolerance=1e-6)


def test_any_of_nothing_is_false() -> None:
    x = torch.tensor([[0.0, 2.0, 0.0], [0.0, math.nan, -0.0]])
    functions = (torch.any, lambda x: x.any(0), lambda x: x.any(1, keepdim=True), lambda x: x.any((0, 1)), lambda x: x.any(-1))

    def found(x: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        of_nothing = x[:0].any(), x[:0].any(0), x[:0].all(), x[:, :0].any(1, keepdim=True)
        return *(function(x) for function in functions), *of_nothing, number.any(), number.any(0)

    check(found, x, torch.tensor(2))


def test_places_of_all_keep_as_many_axes() -> None:
    def places(x: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        many = x.argmax(keepdim=True), x.argmin(keepdim=True), x.argmax(), x.argmin(1), x.argmax(0, keepdim=True)
        return *many, number.argmax(), number.argmin(0), number.argmax(0, keepdim=True)

    check(places, torch.randn(3, 4), torch.tensor(1.0))


def test_sorts_of_truths() -> None:
    x = torch.rand(3, 9) > 0.5
    check(
        lambda x: (*torch.sort(x, stable=True), *torch.sort(x, dim=0, descending=True, stable=True), *torch.sort(x, -1, True)), x
    )
    check(lambda x: (torch.sort(x).values, *torch.sort(x.int(), 0)), x[:2])


def test_numbers_that_are_not_come_behind_infinity() -> None:
    x = torch.tensor([[math.nan, math.inf, 1.0, math.nan], [2.0, math.nan, math.inf, -math.inf]])
    check(lambda x: tuple(torch.kthvalue(x, k, 1).values for k in (2, 3, 4)), x)


def test_scatters_of_more_than_there_are_indices() -> None:
    """And into a tensor without dimensions."""
    base, x = torch.randn(4, 6), torch.randn(7, 8)
    index = torch.stack([torch.randperm(4)[:3] for _ in range(5)], 1)
    place = torch.tensor(0)

    def scattered(b: Tensor, i: Tensor, x: Tensor, number: Tensor, row: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        one_by_one = [(into.scatter(0, place, other), into.scatter_add(0, place, other)) for into in (number, row)]
        return b.scatter(0, i, x), b.scatter_add(0, i, x), b.scatter_add(0, i, x[:3, :5]), *one_by_one[0], *one_by_one[1]

    check(scattered, base, index, x, torch.tensor(2.0), torch.randn(3), torch.tensor(5.0))


def test_axes_of_more_than_one_element_stay() -> None:
    check(lambda x: (x.squeeze(0), x.squeeze(1), x.squeeze(-1), x + 1), torch.randn(3, 1, 4))


@pytest.mark.parametrize("right", [False, True])
def test_places_in_long_rows(right: bool) -> None:
    """Which are halved step by step, of any length and in rows of their own."""
    values = torch.cat([torch.randn(2, 40), torch.tensor([[math.inf, -math.inf, math.nan]] * 2)], 1)
    rows = [torch.randn(2, extent).mul(8).round().div(8).sort(-1).values for extent in (256, 300, 511)]

    def places(x: Tensor, both: Tensor, *some: Tensor) -> tuple[Tensor, ...]:
        found = [torch.searchsorted(row, x, right=right, out_int32=True) for row in some]
        return *found, torch.searchsorted(both, x, right=right), torch.searchsorted(some[-1], 0.25, right=right)

    check(places, values, rows[-1], *(one[0].clone() for one in rows))
