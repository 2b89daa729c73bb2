"""How exactly a program computes float32, which its user chooses, and what that allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias, get_args

from .symbolic.sizes import SizeLike, greatest_of

# bfloat16, float16: what products read is stored in that type where that is faster, all sums and all else is float32.
# float32: the error against float64 is at most twice that of ONNX Runtime in float32. float32-fast: at most 2e-5 relative.
Precision: TypeAlias = Literal["float32", "float32-fast", "bfloat16", "float16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# What large weights of matrix products are stored as, with scales, while their rows stay float32.
Weights: TypeAlias = Literal["int8", "int4"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)
LONGEST_SUM = 65_000  # products of a uint8 and an int8 number that surely stay below 2^31
LONGEST_WIDE_SUM = 33_000  # the same of two numbers up to 255: of uint8, or less a zero point


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a precision allows: a type to store operands of products in, and ways to compute that are not as exact as others.

    `error` is how far results may be apart that are as exact, relative to their norm. `terms` are the bfloat16 numbers whose sum
    a float32 operand is where products are of these. Errors of Winograd's tiles grow with the largest element of a tile, and with
    their size: `winograd_outputs` are the sizes that are allowed. Those of Strassen's products grow with that of a block.
    """

    error: float
    storage: Literal["float32", "bfloat16", "float16"] = "float32"
    terms: int = 3
    winograd_outputs: tuple[int, ...] = ()
    allows_strassen: bool = False

    @property
    def may_round(self) -> bool:
        """Whether kernels may round operands of products to bfloat16, and compute what is about them no better than that."""
        return self.terms == 1


# A layer's own error, of 128 channels, is 0.7e-6 by Winograd's tiles of 4, 1.2e-6 by 5, 2e-6 by 6 and 4e-6 by 7.
TOLERANCES: Mapping[str, Tolerance] = {
    "float32": Tolerance(1e-5),
    "float32-fast": Tolerance(1e-4, terms=2, winograd_outputs=(2, 4, 5), allows_strassen=True),
    "bfloat16": Tolerance(2e-2, "bfloat16", 1, (2, 4, 5, 6, 7)),
    "float16": Tolerance(5e-3, "float16", winograd_outputs=(2, 4, 5, 6, 7)),
}


def holds_sums(op_type: str, a: Sequence[SizeLike], b: Sequence[SizeLike], *, is_turned: bool, is_wide: bool) -> bool:
    """Whether 32 bits surely hold the sums of a product of 8-bit operands of these shapes, of which a Gemm's A may be `is_turned`
    (transA). It `is_wide` if numbers of both sides are up to 255."""
    if op_type == "Conv":
        depth = prod(b[1:])
    elif op_type == "ConvTranspose":
        depth = prod((*b[:1], *b[2:]))
    else:
        depth = a[-2 if is_turned else -1]
    return greatest_of(depth) <= (LONGEST_WIDE_SUM if is_wide else LONGEST_SUM)
