"""Rules for the parts of complex numbers where torch's ComplexTensor loses digits, overflows, or makes constants.

A constant that is made while a program is taken apart is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import log
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Parts: TypeAlias = tuple[Any, Any]
_LARGEST_PRODUCT = 16  # power that is one


def prepare_rules() -> None:
    """Put them into torch's table."""
    import torch
    from torch._subclasses.complex_tensor._core import ComplexTensor
    from torch._subclasses.complex_tensor._ops import aten, common

    for module in (aten, common):
        module.promote_tensors = _promoted  # type: ignore[attr-defined]  # the one imports it from the other
    operators = torch.ops.aten
    common.COMPLEX_OPS_TABLE.update(
        {
            operators.mul: _product,
            operators.div: _quotient,
            operators.true_divide: _quotient,
            operators.reciprocal: lambda x: _quotient(torch.ones_like(x.re), x),
            operators.pow: _power,
            operators.sigmoid: lambda x: torch.reciprocal(1 + torch.exp(-x)),
            operators.all: lambda x, *axes, **named: torch.all((x.re != 0) | (x.im != 0), *axes, **named),
            **{operator: _of_parts(rule) for operator, rule in _functions().items()},
            operators.polar: lambda radius, angle: ComplexTensor(radius * torch.cos(angle), radius * torch.sin(angle)),
            operators.log2: lambda x: torch.log(x) * (1 / log(2)),
            operators.log10: lambda x: torch.log(x) * (1 / log(10)),
        }
    )


def _functions() -> dict[Any, Callable[[Any, Any], Parts]]:
    """Those of one number, by the operator."""
    import torch

    operators = torch.ops.aten
    return {
        operators.exp: _exp,
        operators.expm1: _exp_less_one,
        operators.log1p: _log_of_sum,
        operators.sqrt: _root,
        operators.tanh: _tanh,
        operators.asin: _asin,
        operators.acos: _acos,
        operators.asinh: _asinh,
        operators.acosh: _acosh,
        operators.atanh: _atanh,
    }


def _promoted(*values: Any) -> tuple[torch.dtype, tuple[Any, ...]]:
    """The common type, and tensors of it, if narrow of a wider one, as torch's own; Python's numbers are filled in."""
    import torch
    from torch._subclasses.complex_tensor._ops import common

    result = reduce(torch.promote_types, [one.dtype for one in values if isinstance(one, torch.Tensor)])
    wide = common.PROMOTE_TYPES.get(result, result)
    part = common.complex_to_real_dtype(wide)
    made = (one.to(wide) if isinstance(one, torch.Tensor) else torch.full((), one, dtype=part) for one in values)
    return result, tuple(made)


def _product(a: Any, b: Any) -> Any:
    """A real factor is one of each part; torch multiplies by its imaginary part, 0, too."""
    from torch._subclasses.complex_tensor._core import ComplexTensor
    from torch._subclasses.complex_tensor._ops import common

    result, (a, b) = _promoted(a, b)
    if not common.is_complex(a):
        a, b = b, a
    real, imaginary = common.split_complex_arg(a)
    if not common.is_complex(b):
        return ComplexTensor(real * b, imaginary * b).to(result)
    c, d = common.split_complex_arg(b)
    return ComplexTensor(real * c - imaginary * d, real * d + imaginary * c).to(result)


def _quotient(a: Any, b: Any, *, rounding_mode: None = None) -> Any:
    """The divisor is scaled first (R. Smith, CACM 5/8, 1962): its square may be infinite, or 0. By an infinite one, 0."""
    import torch
    from torch._subclasses.complex_tensor._core import ComplexTensor
    from torch._subclasses.complex_tensor._ops import common

    result, (a, b) = _promoted(a, b)
    real, imaginary = common.split_complex_arg(a)
    if not common.is_complex(b):
        return ComplexTensor(real / b, imaginary / b).to(result)
    c, d = common.split_complex_arg(b)
    scale = torch.maximum(c.abs(), d.abs())
    c, d = (torch.where(part.isinf(), part.sign(), part / scale) for part in (c, d))
    square = (c * c + d * d) * scale
    return ComplexTensor((real * c + imaginary * d) / square, (imaginary * c - real * d) / square).to(result)


def _power(x: Any, exponent: Any) -> Any:
    """Small whole powers by products, exact to their last digits; others by the logarithm, but for those of 0."""
    import torch
    from torch._subclasses.complex_tensor._core import ComplexTensor
    from torch._subclasses.complex_tensor._ops import common

    if isinstance(exponent, (int, float)) and exponent == 0:
        return ComplexTensor(torch.ones_like(x.re), torch.zeros_like(x.re))
    if isinstance(exponent, (int, float)) and 0 < exponent <= _LARGEST_PRODUCT and exponent == int(exponent):
        return _product_of_equals(x, int(exponent))
    result, (x, exponent) = _promoted(x, exponent)
    real, imaginary = common.split_complex_arg(x)
    vanishes = (real == 0) & (imaginary == 0) & (common.split_complex_arg(exponent)[0] > 0)
    found = torch.exp(exponent * torch.log(x))
    return ComplexTensor(*(torch.where(vanishes, 0, part) for part in common.split_complex_arg(found))).to(result)


def _product_of_equals(x: Any, count: int) -> Any:
    """The product of as many, of which there is one."""
    found, square = None, x
    while count:
        if count % 2:
            found = square if found is None else found * square
        count //= 2
        square = square * square if count else square
    return found


def _of_parts(rule: Callable[[Any, Any], Parts]) -> Callable[[Any], Any]:
    """A function of complex numbers by a rule for their real and imaginary parts; narrow types are computed in wide ones."""

    def applied(x: Any) -> Any:
        from torch._subclasses.complex_tensor._core import ComplexTensor
        from torch._subclasses.complex_tensor._ops import common

        result, parts = _promoted(*common.split_complex_tensor(x))
        return ComplexTensor(*(part.to(result) for part in rule(*parts)))

    return applied


def _exp(x: Any, y: Any) -> Parts:
    """Real where the operand is: an infinite radius by the sine of 0 would be NaN."""
    import torch

    radius = torch.exp(x)
    return radius * torch.cos(y), torch.where(y == 0, y, radius * torch.sin(y))


def _exp_less_one(x: Any, y: Any) -> Parts:
    """exp(x) cos(y) - 1 is (exp(x) - 1) cos(y) - 2 sin(y / 2)^2, which loses nothing near 0."""
    import torch

    half = torch.sin(y * 0.5)
    return torch.expm1(x) * torch.cos(y) - 2 * half * half, _exp(x, y)[1]


def _log_of_sum(x: Any, y: Any) -> Parts:
    """Near 0 by the square of |1 + z|, less 1; elsewhere by |1 + z|, whose square may be infinite."""
    import torch

    near, far = 0.5 * torch.log1p(x * (2 + x) + y * y), torch.log(torch.hypot(1 + x, y))
    return torch.where(torch.maximum(x.abs(), y.abs()) < 0.5, near, far), torch.atan2(y, 1 + x)


def _root(x: Any, y: Any) -> Parts:
    """By real roots, of which one part is, and the other the imaginary part by twice that: exact for real numbers."""
    import torch

    larger = 2 * torch.sqrt(0.125 * x.abs() + torch.hypot(0.125 * x, 0.125 * y))  # whose sum is finite
    size = y.abs()
    smaller = torch.where((larger == 0) | torch.isinf(size), size, size / (2 * larger))
    return torch.where(x >= 0, larger, smaller), torch.copysign(torch.where(x >= 0, smaller, larger), y)


def _tanh(x: Any, y: Any) -> Parts:
    """By exp(-2 |x|), which does not overflow as cosh does."""
    import torch

    small = torch.exp(-2 * x.abs())
    divisor = 1 + small * small + 2 * small * torch.cos(2 * y)
    return -torch.sign(x) * torch.expm1(-4 * x.abs()) / divisor, 2 * small * torch.sin(2 * y) / divisor


# Inverse functions: W. Kahan, "Branch cuts for complex elementary functions", 1987.


def _asin(x: Any, y: Any) -> Parts:
    import torch

    (a, b), (c, d) = _root(1 - x, -y), _root(1 + x, y)
    return torch.atan2(x, a * c - b * d), torch.asinh(a * d - b * c)


def _acos(x: Any, y: Any) -> Parts:
    import torch

    (a, b), (c, d) = _root(1 - x, -y), _root(1 + x, y)
    return 2 * torch.atan2(a, c), torch.asinh(b * c - a * d)


def _asinh(x: Any, y: Any) -> Parts:
    real, imaginary = _asin(-y, x)
    return imaginary, -real


def _acosh(x: Any, y: Any) -> Parts:
    import torch

    (a, b), (c, d) = _root(x - 1, y), _root(x + 1, y)
    return torch.asinh(a * c + b * d), 2 * torch.atan2(b, c)


def _atanh(x: Any, y: Any) -> Parts:
    """Of the square of |(1 + z) / (1 - z)|, which is near 1 at 0 and at infinity."""
    import torch

    square = (1 - x) * (1 - x) + y * y
    return 0.25 * torch.log1p(4 * x / square), 0.5 * torch.atan2(2 * y, (1 - x) * (1 + x) - y * y)
