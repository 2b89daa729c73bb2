"""Functions of torch that its exporter writes in operators which lose digits, or numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import prefuse
import pytest
import torch
import torch.nn.functional as F
from prefuse.compiler.frontend.torch_forms.rounding import is_rounded
from torch import nn

from .applied import check

Function = Callable[..., torch.Tensor]
INFINITE = float("inf")


class Calling(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: torch.Tensor) -> torch.Tensor:
        return self.function(*operands)


def compiled(function: Function, *operands: torch.Tensor) -> torch.Tensor:
    net: Any = prefuse.compile(Calling(function), operands, threads=1, cache=False)
    result = net(*operands)
    assert isinstance(result, torch.Tensor)
    assert result.dtype == function(*operands).dtype
    return result


def tenths() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers whose quotients are nearly whole, above or below."""
    divisors = torch.tensor([0.1, 0.2, 0.3, -0.1, -0.2, -0.3, 0.7, -0.7, 0.6])
    return (torch.arange(-40, 41) * 0.1)[:, None].expand(-1, 9).contiguous(), divisors.expand(81, -1).contiguous()


QUOTIENTS: dict[str, Function] = {
    "floor_divide": torch.floor_divide,
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "remainder": torch.remainder,
}


@pytest.mark.parametrize("name", QUOTIENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quotients(name: str, dtype: torch.dtype) -> None:
    """0.6 / 0.2 of float32 is below 3."""
    a, b = (one.to(dtype) for one in tenths())
    torch.testing.assert_close(compiled(QUOTIENTS[name], a, b), QUOTIENTS[name](a, b), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", QUOTIENTS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_quotients_of_integers(name: str, dtype: torch.dtype) -> None:
    """float32 has no 2^24 + 1."""
    limits = torch.iinfo(dtype)
    a = torch.tensor([7, -7, 8, 0, 5, limits.max, limits.min + 1, limits.max - 2, 1 << 24 | 1, -(1 << 24 | 3)]).to(dtype)
    b = torch.tensor([3, 3, -4, 5, 100, 1, 1, 3, 1, 2]).to(dtype)
    torch.testing.assert_close(compiled(QUOTIENTS[name], a, b), QUOTIENTS[name](a, b))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x % 0.3,
        lambda x: x // 0.3,
        lambda x: torch.remainder(7.3, x),
        lambda x: 7.3 // x,
        lambda x: torch.div(x, 0.3, rounding_mode="floor"),
        lambda x: (10 * x).to(torch.int64) % 3,
        lambda x: (10 * x).to(torch.int64) // -3,
        lambda x: (10 * x).to(torch.int32) % 2.5,
        lambda x: torch.div((10 * x).to(torch.int32), 4, rounding_mode=None),
        lambda x: torch.div(x, x * x, rounding_mode=None),
    ],
)
def test_quotients_of_numbers(function: Function) -> None:
    x = tenths()[1] * 3
    torch.testing.assert_close(compiled(function, x), function(x), rtol=1e-6, atol=0)


def test_quotients_by_zero_and_of_infinities() -> None:
    a, b = torch.tensor([1.0, -1.0, 0.0, INFINITE, 2.0, -2.0]), torch.tensor([0.0, 0.0, 0.0, 2.0, INFINITE, INFINITE])
    for function in (torch.floor_divide, torch.remainder):
        torch.testing.assert_close(compiled(function, a, b), function(a, b), equal_nan=True)


TINY = [1e-8, -1e-8, 3e-7, 1e-5, -1e-5, 1e-3, 0.0, -0.0, 0.4, -0.4, 0.75, 3.0, 30.0, 1e30, INFINITE, float("nan")]
LOGARITHMS: dict[str, Function] = {
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "log_sigmoid": F.logsigmoid,
    "log_sigmoid of the negative": lambda x: F.logsigmoid(-x),
    "log_ndtr": torch.special.log_ndtr,
}


@pytest.mark.parametrize("name", LOGARITHMS)
def test_logarithms_near_zero(name: str) -> None:
    x = torch.tensor(TINY)
    torch.testing.assert_close(compiled(LOGARITHMS[name], x), LOGARITHMS[name](x), rtol=2e-6, atol=0, equal_nan=True)


def test_logarithms_at_their_ends() -> None:
    x = torch.tensor([-1.0, -2.0, -INFINITE, -100.0, -20.0, -0.9999999])
    for function in (torch.log1p, torch.expm1):
        torch.testing.assert_close(compiled(function, x), function(x), rtol=2e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", [torch.logaddexp, torch.logaddexp2])
def test_sums_of_powers_that_are_not_finite(function: Function) -> None:
    a = torch.tensor([1e3, -1e3, 0.0, INFINITE, -INFINITE, INFINITE, 0.0, 5.0, 5.0])
    b = torch.tensor([1e3, -1e3, -20.0, 1.0, -INFINITE, -INFINITE, 0.0, 5.5, float("nan")])
    torch.testing.assert_close(compiled(function, a, b), function(a, b), rtol=1e-6, atol=0, equal_nan=True)


def test_tails() -> None:
    x = torch.tensor([-5.0, -0.3, 0.0, 0.4, 0.6, 1.0, 3.0, 5.0, 8.0, 9.0, 20.0, INFINITE, -INFINITE])
    torch.testing.assert_close(compiled(torch.erfc, x), torch.erfc(x), rtol=2e-5, atol=1e-38)


NARROW: dict[str, tuple[Function, int]] = {
    "times a number": (lambda x: x * 0.1, 1),
    "by a number": (lambda x: x / 0.3, 1),
    "a number by": (lambda x: 0.7 / (x.abs() + 1), 1),
    "plus a number": (lambda x: x + 0.1, 1),
    "a number less": (lambda x: 0.7 - x, 1),
    "alpha": (lambda x, y: torch.add(x, y, alpha=0.3), 2),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.4), 2),
    "addcmul": (lambda x, y, z: torch.addcmul(x, y, z, value=0.3), 3),
    "atan2": (torch.atan2, 2),
    "expm1": (torch.expm1, 1),
    "log1p": (lambda x: torch.log1p(x.abs()), 1),
    "log2": (lambda x: torch.log2(x.abs() + 1), 1),
    "log10": (lambda x: torch.log10(x.abs() + 1), 1),
    "logaddexp2": (torch.logaddexp2, 2),
    "rsqrt": (lambda x: torch.rsqrt(x.abs() + 1), 1),
    "remainder": (lambda x, y: torch.remainder(9 * x, y.abs() + 1), 2),
    "sinc": (torch.sinc, 1),
    "softplus": (lambda x: F.softplus(x, beta=0.3), 1),
    "glu": (F.glu, 1),
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers_are_rounded_as_often_as_by_torch(name: str, dtype: torch.dtype) -> None:
    """The mean error is at most torch's, of which the exporter's forms have up to 2.5 times: of remainders a thousand times."""
    function, count = NARROW[name]
    random = torch.Generator().manual_seed(0)
    operands = [torch.randn(60, 60, generator=random).to(dtype) for _ in range(count)]
    exact = function(*(one.double() for one in operands))
    errors = [(made.double() - exact).abs().mean() for made in (compiled(function, *operands), function(*operands))]
    assert errors[0] <= 1.1 * errors[1]


def test_numbers_that_are_exact_need_no_casts() -> None:
    assert not is_rounded(ir.DataType.BFLOAT16, [0.125, 2, True, None])
    assert is_rounded(ir.DataType.BFLOAT16, [0.125, 0.1])
    assert is_rounded(ir.DataType.BFLOAT16, [257])
    assert not is_rounded(ir.DataType.FLOAT16, [257])


def test_gamma_functions() -> None:
    x = torch.tensor(
        [0.0, 1e-30, 1e-5, 0.3, 0.999999, 1.0, 1.0000001, 1.5, 2.0, 3.0, 30.0, 1e5, 1e20, INFINITE, -0.5, -1.5, -7.3, -1e3]
    )
    torch.testing.assert_close(compiled(torch.lgamma, x), torch.lgamma(x), rtol=2e-6, atol=1e-12)
    x = x[1:]
    torch.testing.assert_close(compiled(torch.digamma, x[:-1]), torch.digamma(x[:-1]), rtol=2e-6, atol=0, equal_nan=True)
    exact = torch.lgamma(x[3:13].double())
    torch.testing.assert_close(compiled(torch.lgamma, x[3:13].double()), exact, rtol=1e-12, atol=1e-14)


def test_angles_of_all_quadrants_and_signs_of_zeros() -> None:
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-30, -1e30, INFINITE, -INFINITE, float("nan"), 0.25])
    y, x = edges[:, None].repeat(1, 10), edges.repeat(10, 1)
    torch.testing.assert_close(compiled(torch.atan2, y, x), torch.atan2(y, x), rtol=1e-6, atol=0, equal_nan=True)
    found = compiled(torch.atan2, y.double(), x.double())
    torch.testing.assert_close(found, torch.atan2(y.double(), x.double()), rtol=1e-14, atol=0, equal_nan=True)
    torch.testing.assert_close(compiled(torch.sign, edges), torch.sign(edges))


@pytest.mark.parametrize("dim", [0, -1])
def test_logarithms_of_sums_of_prefixes(dim: int) -> None:
    """Of terms far below the largest, which come before it."""
    x = torch.tensor([[-1e3, -900.0, 3.0, 5.0, 1e3, -INFINITE, 7.0], [0.5, 1e3, -1e3, 2.0, 3.0, 4.0, 5.0]])
    for one in (x, x[1, :1], x[0, 2], x.double(), torch.full((3, 5), -INFINITE)):
        place = dim if one.ndim else 0
        result = torch.logcumsumexp(one, place)
        torch.testing.assert_close(compiled(lambda x, d=place: torch.logcumsumexp(x, d), one), result, rtol=2e-6, atol=0)


def test_logits_within_bounds() -> None:
    x = torch.tensor([0.0, 1.0, 0.3, 1e-8, float("nan")])
    for eps in (None, 1e-6):
        result = torch.logit(x, eps)
        torch.testing.assert_close(compiled(lambda x, e=eps: torch.logit(x, e), x), result, rtol=2e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        torch.fft.fftshift,
        lambda x: torch.fft.ifftshift(x, dim=0),
        lambda x: torch.roll(x, x.shape[0] - 1, 0),
        lambda x: torch.roll(x, x.shape[0]),
        lambda x: torch.roll(x, (1, -7), (0, -1)),
    ],
)
def test_rolls_by_sizes(function: Function) -> None:
    """A size that a call decides was no attribute of the exporter's form."""
    dims: Any = {"operands_0": {0: "N"}, "N": (1, 9)}
    net: Any = prefuse.compile(Calling(function), (torch.randn(6, 5),), dims=dims, threads=1, cache=False)
    for rows in (1, 2, 6, 9):
        x = torch.randn(rows, 5)
        assert torch.equal(net(x), function(x))


def _filled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mask, least = x > 0, torch.finfo(torch.float64).min
    made = torch.full((2,), 0.1, dtype=torch.float64), torch.full_like(x, 0.1), x.new_full((2,), 1e300)
    return *made, x.masked_fill(mask, least), x.masked_fill(mask, 0.1), torch.where(mask, x, 0.1), torch.where(mask, 0.1, x)


DOUBLES: dict[str, Callable[[torch.Tensor], Any]] = {
    "numbers beside tensors": lambda x: (x * 0.1, x * 1e300, x + 0.1, 0.7 - x, x / 0.3, torch.rsub(x, 0.7, alpha=0.3)),
    "numbers that fill": _filled,
    "bounds": lambda x: (x.clamp(-0.1, 0.1), x.clamp(min=0.1), x.clamp_min(0.1), x.clamp_max(0.1), x.clamp(-1, 0.3)),
    "factors": lambda x: (
        torch.add(x, x, alpha=0.1),
        torch.sub(x, x, alpha=0.3),
        torch.lerp(x, 2 * x, 0.1),
        torch.addcmul(x, x, x, value=0.1),
        torch.addcdiv(x, x, x.abs() + 1, value=0.1),
    ),
    "norms": lambda x: (torch.linalg.vector_norm(x, 3), torch.cdist(x, 2 * x, 3.0), torch.pdist(x, 1.5)),
    "logarithms": lambda x: (torch.log2(x.abs()), torch.log10(x.abs()), torch.sinc(x)),
    "normal": lambda x: (torch.erfinv(x / 9), torch.erfc(3 * x), torch.special.erfcx(x.abs()), torch.special.log_ndtr(4 * x)),
    "batch": lambda x: F.batch_norm(x, None, None, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], scale=0.1),
}


@pytest.mark.parametrize("name", DOUBLES)
def test_numbers_have_the_digits_of_doubles(name: str) -> None:
    """The exporter makes each a float32 first: 0.1 was off by 1.5e-9, 1e300 infinite."""
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    check(DOUBLES[name], x, tolerance=1e-14)


def test_the_error_function_is_inverted_to_the_digits_of_doubles() -> None:
    near = torch.tensor([0.0, 1e-300, 0.7, -0.7, 1.0, -1.0, 1.5, float("nan")], dtype=torch.float64)
    check(torch.erfinv, torch.tensor([1 - 1e-9, 1e-15 - 1], dtype=torch.float64), tolerance=1e-3)  # erf has few digits there
    check(torch.erfinv, torch.cat([near, torch.linspace(-1, 1, 101, dtype=torch.float64)]), tolerance=1e-13)


def test_places_among_doubles() -> None:
    """float32's 0.1 stands behind that of double precision."""
    row = torch.tensor([0.0, 0.1, 0.2], dtype=torch.float64)
    check(lambda row: (torch.searchsorted(row, 0.1), torch.searchsorted(row, 0.1, right=True), torch.bucketize(0.2, row)), row)


def test_ranges_are_counted_in_double_precision() -> None:
    check(lambda x: (x + torch.arange(1, 2.2, 0.1)[0], torch.arange(2, 2.1, 0.1), torch.arange(1, 1.2, 0.2)), torch.ones(1))
    kinds = (torch.float64, torch.float16)
    check(lambda x: tuple(x.to(kind) + torch.arange(3, -1.5, -0.5, dtype=kind)[-1] for kind in kinds), torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_powers_in_norms_do_not_overflow(dtype: torch.dtype) -> None:
    x = torch.tensor([[300.0, -200.0, 100.0]], dtype=dtype)
    check(lambda x: (torch.linalg.vector_norm(x, 3), torch.linalg.vector_norm(x, 3, 1, keepdim=True)), x, tolerance=1e-2)
