"""Roundings and powers of integers, and functions whose result has a type of its own, against torch."""

from __future__ import annotations

import prefuse
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from .applied import Applied, check

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


def numbers(dtype: torch.dtype) -> Tensor:
    info = torch.iinfo(dtype)
    few = [0, 1, 2, 3, 5, 7, info.max, info.max - 1, info.min]
    return torch.tensor(few if dtype == torch.uint8 else [*few, -1, -2, -3])[:, None].to(dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_round(dtype: torch.dtype) -> None:
    check(lambda x: (torch.ceil(x), torch.floor(x), torch.round(x), torch.trunc(x)), numbers(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_real_numbers_are_rounded(dtype: torch.dtype) -> None:
    x = torch.tensor([-2.5, -1.5, -0.5, -0.0, 0.5, 1.5, 2.7, torch.inf, -torch.inf]).to(dtype)
    check(lambda x: (torch.ceil(x), torch.floor(x), torch.round(x), torch.trunc(x), x**2, x**-1.5), x)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_powers_of_integers_wrap_around(dtype: torch.dtype) -> None:
    """They went through float64: the powers of 0 that it has none of were the least integer, and large ones were rounded."""
    exponents = [0, 1, 2, 5, 13, 31, 62, 63, 64, 100] + ([] if dtype == torch.uint8 else [-1, -2, -7])
    x, y = numbers(dtype), torch.tensor(exponents).to(dtype)
    check(lambda x, y, few: (x**y, x**2, x**3, x**13, 3**y, few**2.5, few**0.5), x, y, x.clamp(0, 100))


def test_truths_are_numbers_in_powers() -> None:
    x, y = torch.arange(4), torch.tensor([True, False, True, False])
    check(lambda x, y: (x**y, 2 ** y.long(), y.float() ** x, 3**y, 2.5**y, 2.5**x, 1.5 ** x.double()), x, y)
    check(lambda y: y**2, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_softmax_is_of_the_type_it_is_asked_for(dtype: torch.dtype) -> None:
    """torch's exporter casts the result: of bfloat16 its error was 8e-4 instead of 3e-8."""
    x = (4 * torch.randn(7, 19)).to(dtype)
    kinds = (torch.float32, torch.float64)

    def of_kinds(x: Tensor) -> tuple[Tensor, ...]:
        shares = [functional.softmax(x, -1, dtype=kind) for kind in kinds]
        logarithms = [functional.log_softmax(x, 0, dtype=kind) for kind in kinds]
        least = functional.softmin(x, 1, dtype=torch.float32)
        return *shares, *logarithms, least, torch.special.softmax(x, 1, torch.float32)

    check(of_kinds, x, tolerance=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_last_result_has_the_type_that_torch_gives_it(dtype: torch.dtype) -> None:
    """torch's exporter made what sums and magnitudes are computed in, float32, the output."""
    x = torch.randn(5, 6).to(dtype)
    net = check(lambda x: (x.abs(), x.sum(), x.amax(1), x.cumsum(0), torch.nansum(x), x.abs()), x, tolerance=2e-2)
    check(lambda x: {"sum": x.sum(1) + x[:, 0], "same": x}, x, tolerance=2e-2)
    program = torch.export.export(Applied(lambda x: x.sum(0)), (x,))
    found = prefuse.compile(program, cache=False)(x)
    assert isinstance(found, Tensor)
    assert found.dtype == net(x)[1].dtype == dtype


def test_tails_of_integers_are_real() -> None:
    x = torch.arange(-5, 6)
    check(lambda x: (torch.special.erfcx(x), torch.special.log_ndtr(x)), x, tolerance=3e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_shifts_keep_their_type(dtype: torch.dtype) -> None:
    """Of uint8 the exporter made int8; halves of bytes are numbers of 4 bits."""
    x = torch.tensor([0x12, 0x7F, 0xF0, 0x80, 0xFF]).to(dtype)

    def shifted(x: Tensor, by: Tensor) -> tuple[Tensor, ...]:
        low, high = x & 15, (x >> 4) & 15
        halves = torch.stack([low, x >> 4], -1), high.float() - 8, torch.bitwise_right_shift(x, by)
        return *halves, x << 1, torch.bitwise_left_shift(x, by)

    check(shifted, x, torch.tensor([0, 1, 2, 3, 7]).to(dtype))
