"""Rules for the parts of complex numbers where torch's ComplexTensor loses digits, overflows, or makes constants.

A constant that is made while a program is taken apart is lost.
"""

from __future__ import annotations

from functools import reduce
from math import log
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

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
            operators.tanh: _tanh,
            operators.polar: lambda radius, angle: ComplexTensor(radius * torch.cos(angle), radius * torch.sin(angle)),
            operators.log2: lambda x: torch.log(x) * (1 / log(2)),
            operators.log10: lambda x: torch.log(x) * (1 / log(10)),
        }
    )


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
    """The divisor is scaled first (R. Smith, CACM 5/8, 1962): its square may be infinite, or 0."""
    import torch
    from torch._subclasses.complex_tensor._core import ComplexTensor
    from torch._subclasses.complex_tensor._ops import common

    result, (a, b) = _promoted(a, b)
    real, imaginary = common.split_complex_arg(a)
    if not common.is_complex(b):
        return ComplexTensor(real / b, imaginary / b).to(result)
    c, d = common.split_complex_arg(b)
    scale = torch.maximum(c.abs(), d.abs())
    c, d = c / scale, d / scale
    square = (c * c + d * d) * scale
    return ComplexTensor((real * c + imaginary * d) / square, (imaginary * c - real * d) / square).to(result)


def _power(x: Any, exponent: Any) -> Any:
    """Small whole powers by products, exact to their last digits; others by the logarithm."""
    import torch

    if not isinstance(exponent, int) or not 0 < exponent <= _LARGEST_PRODUCT:
        result, (x, exponent) = _promoted(x, exponent)
        return torch.exp(exponent * torch.log(x)).to(result)
    found, square = None, x
    while exponent:
        if exponent % 2:
            found = square if found is None else found * square
        exponent //= 2
        square = square * square if exponent else square
    return found


def _tanh(x: Any) -> Any:
    """By exp(-2 |real part|), which does not overflow as cosh does."""
    import torch
    from torch._subclasses.complex_tensor._core import ComplexTensor
    from torch._subclasses.complex_tensor._ops import common

    result, (real, imaginary) = _promoted(*common.split_complex_tensor(x))
    small = torch.exp(-2 * real.abs())
    divisor = 1 + small * small + 2 * small * torch.cos(2 * imaginary)
    parts = (torch.sign(real) * (1 - small * small), 2 * small * torch.sin(2 * imaginary))
    return ComplexTensor(*((part / divisor).to(result) for part in parts))
