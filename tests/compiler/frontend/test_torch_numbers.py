"""Functions of torch that its exporter writes in operators which lose digits, or numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import onnx_ir as ir
import prefuse
import pytest
import torch
import torch.nn.functional as F
from prefuse.compiler.frontend.torch_forms.rounding import is_rounded
from torch import nn

from .applied import check

Function = Callable[..., Any]
INFINITE = float("inf")


class Calling(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *operands: torch.Tensor) -> Any:
        return self.function(*operands)


def compiled(functions: Mapping[str, Function], *operands: torch.Tensor) -> dict[str, torch.Tensor]:
    """What one program gives for all the functions, by their names."""

    def of_all(*operands: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: function(*operands) for name, function in functions.items()}

    net: Any = prefuse.compile(Calling(of_all), operands, threads=1, cache=False)
    results: dict[str, torch.Tensor] = net(*operands)
    assert {name: one.dtype for name, one in results.items()} == {name: one.dtype for name, one in of_all(*operands).items()}
    return results


def check_digits(functions: Mapping[str, Function], *operands: torch.Tensor, rtol: float = 1e-6, **how: Any) -> None:
    """Those of the functions in one program are torch's; which of them differ is said by its name."""
    wanted = {name: function(*operands) for name, function in functions.items()}
    torch.testing.assert_close(compiled(functions, *operands), wanted, rtol=rtol, **{"atol": 0, **how})


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_quotients(dtype: torch.dtype) -> None:
    """0.6 / 0.2 of float32 is below 3."""
    check_digits(QUOTIENTS, *(one.to(dtype) for one in tenths()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_quotients_of_integers(dtype: torch.dtype) -> None:
    """float32 has no 2^24 + 1."""
    limits = torch.iinfo(dtype)
    a = torch.tensor([7, -7, 8, 0, 5, limits.max, limits.min + 1, limits.max - 2, 1 << 24 | 1, -(1 << 24 | 3)]).to(dtype)
    b = torch.tensor([3, 3, -4, 5, 100, 1, 1, 3, 1, 2]).to(dtype)
    check_digits(QUOTIENTS, a, b, rtol=0)


def test_quotients_of_numbers() -> None:
    functions: dict[str, Function] = {
        "%": lambda x: x % 0.3,
        "//": lambda x: x // 0.3,
        "remainder of a number": lambda x: torch.remainder(7.3, x),
        "a number //": lambda x: 7.3 // x,
        "div": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
        "int64 %": lambda x: (10 * x).to(torch.int64) % 3,
        "int64 //": lambda x: (10 * x).to(torch.int64) // -3,
        "int32 %": lambda x: (10 * x).to(torch.int32) % 2.5,
        "div of int32": lambda x: torch.div((10 * x).to(torch.int32), 4, rounding_mode=None),
        "div of tensors": lambda x: torch.div(x, x * x, rounding_mode=None),
    }
    check_digits(functions, tenths()[1] * 3)


def test_quotients_by_zero_and_of_infinities() -> None:
    a, b = torch.tensor([1.0, -1.0, 0.0, INFINITE, 2.0, -2.0]), torch.tensor([0.0, 0.0, 0.0, 2.0, INFINITE, INFINITE])
    check_digits({"floor_divide": torch.floor_divide, "remainder": torch.remainder}, a, b, equal_nan=True)


TINY = [1e-8, -1e-8, 3e-7, 1e-5, -1e-5, 1e-3, 0.0, -0.0, 0.4, -0.4, 0.75, 3.0, 30.0, 1e30, INFINITE, float("nan")]
LOGARITHMS: dict[str, Function] = {
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "log_sigmoid": F.logsigmoid,
    "log_sigmoid of the negative": lambda x: F.logsigmoid(-x),
    "log_ndtr": torch.special.log_ndtr,
}


def test_logarithms_near_zero() -> None:
    check_digits(LOGARITHMS, torch.tensor(TINY), rtol=2e-6, equal_nan=True)


def test_logarithms_at_their_ends() -> None:
    x = torch.tensor([-1.0, -2.0, -INFINITE, -100.0, -20.0, -0.9999999])
    check_digits({"log1p": torch.log1p, "expm1": torch.expm1}, x, rtol=2e-6, equal_nan=True)


def test_sums_of_powers_that_are_not_finite() -> None:
    a = torch.tensor([1e3, -1e3, 0.0, INFINITE, -INFINITE, INFINITE, 0.0, 5.0, 5.0])
    b = torch.tensor([1e3, -1e3, -20.0, 1.0, -INFINITE, -INFINITE, 0.0, 5.5, float("nan")])
    check_digits({"logaddexp": torch.logaddexp, "logaddexp2": torch.logaddexp2}, a, b, equal_nan=True)


def test_tails() -> None:
    x = torch.tensor([-5.0, -0.3, 0.0, 0.4, 0.6, 1.0, 3.0, 5.0, 8.0, 9.0, 20.0, INFINITE, -INFINITE])
    check_digits({"erfc": torch.erfc}, x, rtol=2e-5, atol=1e-38)


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


def _of_first(function: Function, count: int, *operands: torch.Tensor) -> Any:
    return function(*operands[:count])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_numbers_are_rounded_as_often_as_by_torch(dtype: torch.dtype) -> None:
    """The mean error is at most torch's, of which the exporter's forms have up to 2.5 times: of remainders a thousand times."""
    random = torch.Generator().manual_seed(0)
    operands = [torch.randn(60, 60, generator=random).to(dtype) for _ in range(3)]
    functions: dict[str, Function] = {name: partial(_of_first, function, count) for name, (function, count) in NARROW.items()}
    found = compiled(functions, *operands)
    for name, function in functions.items():
        exact = function(*(one.double() for one in operands))
        errors = [(made.double() - exact).abs().mean() for made in (found[name], function(*operands))]
        assert errors[0] <= 1.1 * errors[1], name


def test_numbers_that_are_exact_need_no_casts() -> None:
    assert not is_rounded(ir.DataType.BFLOAT16, [0.125, 2, True, None])
    assert is_rounded(ir.DataType.BFLOAT16, [0.125, 0.1])
    assert is_rounded(ir.DataType.BFLOAT16, [257])
    assert not is_rounded(ir.DataType.FLOAT16, [257])


def test_gamma_functions() -> None:
    x = torch.tensor(
        [0.0, 1e-30, 1e-5, 0.3, 0.999999, 1.0, 1.0000001, 1.5, 2.0, 3.0, 30.0, 1e5, 1e20, INFINITE, -0.5, -1.5, -7.3, -1e3]
    )
    functions: dict[str, Function] = {
        "lgamma": lambda x, some: torch.lgamma(x),
        "digamma": lambda x, some: torch.digamma(x[1:-1]),
        "lgamma of doubles": lambda x, some: torch.lgamma(some),
    }
    operands = x, x[4:14].double()
    found, wanted = compiled(functions, *operands), {name: function(*operands) for name, function in functions.items()}
    for name, rtol, atol in (("lgamma", 2e-6, 1e-12), ("digamma", 2e-6, 0.0), ("lgamma of doubles", 1e-12, 1e-14)):
        torch.testing.assert_close(found[name], wanted[name], rtol=rtol, atol=atol, equal_nan=name == "digamma")


def test_angles_of_all_quadrants_and_signs_of_zeros() -> None:
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-30, -1e30, INFINITE, -INFINITE, float("nan"), 0.25])
    y, x = edges[:, None].repeat(1, 10), edges.repeat(10, 1)
    check_digits({"atan2": torch.atan2, "sign": lambda y, x: torch.sign(x[0])}, y, x, equal_nan=True)
    check_digits({"atan2": torch.atan2}, y.double(), x.double(), rtol=1e-14, equal_nan=True)


@pytest.mark.parametrize("dim", [0, -1])
def test_logarithms_of_sums_of_prefixes(dim: int) -> None:
    """Of terms far below the largest, which come before it."""
    x = torch.tensor([[-1e3, -900.0, 3.0, 5.0, 1e3, -INFINITE, 7.0], [0.5, 1e3, -1e3, 2.0, 3.0, 4.0, 5.0]])
    operands = (x, x[1, :1], x[0, 2], x.double(), torch.full((3, 5), -INFINITE))
    sums = {f"of operand {i}": lambda *some, i=i: torch.logcumsumexp(some[i], dim if some[i].ndim else 0) for i in range(5)}
    check_digits(sums, *operands, rtol=2e-6)


def test_logits_within_bounds() -> None:
    x = torch.tensor([0.0, 1.0, 0.3, 1e-8, float("nan")])
    logits: dict[str, Function] = {"none": torch.logit, "1e-6": lambda x: torch.logit(x, 1e-6)}
    check_digits(logits, x, rtol=2e-6, equal_nan=True)


def test_rolls_by_sizes() -> None:
    """A size that a call decides was no attribute of the exporter's form."""

    def rolled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shifted = torch.fft.fftshift(x), torch.fft.ifftshift(x, dim=0)
        return *shifted, torch.roll(x, x.shape[0] - 1, 0), torch.roll(x, x.shape[0]), torch.roll(x, (1, -7), (0, -1))

    dims: Any = {"operands_0": {0: "N"}, "N": (1, 9)}
    net: Any = prefuse.compile(Calling(rolled), (torch.randn(6, 5),), dims=dims, threads=1, cache=False)
    for rows in (1, 2, 6, 9):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(net(x), rolled(x), rtol=0, atol=0)


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
