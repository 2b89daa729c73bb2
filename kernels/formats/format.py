"""Number formats as values: how a product's operands lie in memory, what multiplies them, and what adds them up.

A format is a row of `FORMATS`; `formats_for` is the one place that says which a product may go by. To add one is to add a row
here and, where `total + a * b` is not how it multiplies, its multiply-add to `multiply_add.MULTIPLY_ADDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from ...runtime.hardware.machine import Machine
from ...runtime.plan import TensorType
from ...runtime.target import VNNI, Target

# FMAs of vectors, dot products (VDPBF16PS, VPDPBUSD), the same of 16-bit integers (VPMADDWD) and of pairs of bytes that 16 bits
# hold (VPMADDUBSW), AMX tiles (TDPBF16PS, TDPBUSD, TDPBSSD).
Unit: TypeAlias = Literal["fma", "dot", "madd", "pairs", "tile"]
Granularity: TypeAlias = Literal["none", "tensor", "channel", "group"]  # what has a scale of its own
_WORD_BITS = 32
# Words in the time of so many multiply-adds: three and six instructions, of which two multiply, as measured on Zen 3.
_MULTIPLY_ADDS: dict[Unit, float] = {"dot": 1, "pairs": 2.5, "madd": 4}
_CHAIN = 1024  # additions in a chain: more have over twice the error of ONNX Runtime's sums, which are made of blocks of k


@dataclass(frozen=True, slots=True)
class Storage:
    """How an operand is stored: its type, and the scales that make real numbers of its elements. `keeps_pairs`: neighbours along
    k of a constant are as `pairs.keeps_pairs` asks."""

    dtype: str
    scales: Granularity = "none"
    is_packed: bool = False  # as in TensorType
    keeps_pairs: bool = False

    @property
    def bits(self) -> int:
        """Bits of an element in memory."""
        return TensorType((), self.dtype, self.is_packed).bits

    def __str__(self) -> str:
        return f" by {self.scales}" * (self.scales != "none") + " in small pairs" * self.keeps_pairs

    def holds(self, other: Storage) -> bool:
        """Whether all that is stored as the other is stored so, too."""
        return replace(other, keeps_pairs=self.keeps_pairs) == self and other.keeps_pairs >= self.keeps_pairs


@dataclass(frozen=True, slots=True)
class Format:
    """How a product is computed: `a` and `b` are the storage of activations and of weights, `sums` the type of accumulators.

    One operation of `unit` takes `k_pack` neighbours along k. Those of `b`, and of `a` where they fill 32 bits, are loaded as one
    32-bit word, the first in the lowest bits (VNNI layout). A sum of more than `longest_chain` operations is made of partial sums
    over blocks of k; None: never, as sums are exact. With AMX an operand of floats is the sum of `terms` bfloat16 numbers.
    `feature`: what the CPU must have (`Target.has`); `registers`: vectors that a multiply-add needs beside its sum and its
    factors. What is read of `a` is its number plus `offset`.
    """

    name: str
    a: Storage
    b: Storage
    sums: str
    unit: Unit = "fma"
    k_pack: int = 1
    longest_chain: int | None = _CHAIN
    terms: int = 1
    feature: str = ""
    registers: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        assert self.k_pack == 1 or self.b.bits * self.k_pack == _WORD_BITS or self.unit == "tile", f"{self.name} fills no words"

    @property
    def packs_a(self) -> bool:
        """Whether A, too, is read as words of neighbours along k."""
        return self.k_pack > 1 and self.a.bits * self.k_pack == _WORD_BITS

    def machine(self, machine: Machine) -> Machine:
        """A core as the format uses it: with the registers that are left for sums and factors, and, where these are integers,
        with its operations in a cycle as multiply-adds and as dot products.

        VPDPBUSD is made where multiply-adds are, as often. VPMADDWD takes half a word, and VPMADDUBSW one, whose pairs a
        VPMADDWD adds. Of integers one by one a product takes two instructions and its sum a third.
        """
        left = replace(machine, registers=machine.registers - self.registers)
        if "float" in self.sums:
            return left
        rate = machine.multiply_adds / _MULTIPLY_ADDS.get(self.unit, 3)
        return replace(left, multiply_adds=rate, dots=rate)

    def runs_on(self, target: Target) -> bool:
        """Whether the target has the format's instructions; GPUs have those with a k-pack of 1 only."""
        if self.unit == "tile":
            return target.has_tiles
        return not (self.feature and not target.has(self.feature)) and not (self.k_pack > 1 and target.is_gpu)


def plain(dtype: str, b: str = "", sums: str = "") -> Format:
    """The format of multiply-adds (k-pack 1) of operands that are converted to the type of the sums; both default to `dtype`."""
    b, sums = b or dtype, sums or dtype
    return Format(f"{dtype}*{b}", Storage(dtype), Storage(b), sums, longest_chain=_CHAIN if "float" in sums else None)


def is_plain(one: Format) -> bool:
    """Whether the format multiplies numbers one by one: a k-pack of 1."""
    return one.k_pack == 1


_BFLOAT16, _FLOAT32 = Storage("bfloat16"), Storage("float32")
_PAIR_CHAIN = 2 * _CHAIN  # of dot products: the rounding of their operands makes the larger error

F32 = plain("float32")
BF16_DOT = Format("bf16 dot", _BFLOAT16, _BFLOAT16, "float32", "dot", 2, _PAIR_CHAIN, feature="avx512_bf16")
BF16_PAIRS = Format("bf16 pairs", _BFLOAT16, _BFLOAT16, "float32", "fma", 2, _PAIR_CHAIN)
F32_BF16_PAIRS = Format("f32*bf16 pairs", _FLOAT32, _BFLOAT16, "float32", "fma", 2, _PAIR_CHAIN)
BF16X1 = Format("bf16x1", _BFLOAT16, _BFLOAT16, "float32", "tile", 2, terms=1)
BF16X2 = Format("bf16x2", _FLOAT32, _FLOAT32, "float32", "tile", 2, terms=2)
BF16X3 = Format("bf16x3", _FLOAT32, _FLOAT32, "float32", "tile", 2, terms=3)
_UINT8, _INT8 = Storage("uint8"), Storage("int8")
U8_DOT = Format("u8*s8 dot", _UINT8, _INT8, "int32", "dot", 4, None, feature=VNNI)
SMALL_PAIRS = Storage("int8", keeps_pairs=True)
U8_PAIRS = Format("u8*s8 pairs", _UINT8, SMALL_PAIRS, "int32", "pairs", 4, None, registers=5)
S8_PAIRS = Format("s8*s8 pairs", _INT8, SMALL_PAIRS, "int32", "pairs", 4, None, registers=5, offset=128)
U8_MADD = Format("u8*s8 madd", _UINT8, _INT8, "int32", "madd", 4, None, registers=4)
S8_DOT = Format("s8*s8 dot", _INT8, _INT8, "int32", "dot", 4, None, feature=VNNI, offset=128)
S8_MADD = Format("s8*s8 madd", _INT8, _INT8, "int32", "madd", 4, None, registers=4, offset=128)
U8_TILE = Format("u8*s8 tile", _UINT8, _INT8, "int32", "tile", 4, None)
S8_TILE = Format("s8*s8 tile", _INT8, _INT8, "int32", "tile", 4, None)
_BYTES = ("uint8", "int8")
_NARROW = ("float16", "bfloat16")  # types whose sums are float32
_WIDE = ("float64", "int32", "int64", "uint32", "uint64")

# Of several formats for the same operands, the best first.
FORMATS: tuple[Format, ...] = (
    BF16_DOT,
    BF16_PAIRS,
    F32_BF16_PAIRS,
    U8_DOT,
    U8_PAIRS,
    U8_MADD,
    S8_DOT,
    S8_PAIRS,
    S8_MADD,
    F32,
    *(plain(a, b, "int32") for a in _BYTES for b in _BYTES),
    *(plain(a, b, "float32") for a in ("float32", *_NARROW) for b in ("float32", *_NARROW) if (a, b) != ("float32", "float32")),
    *(plain(dtype) for dtype in _WIDE),
    BF16X1,
    BF16X2,
    BF16X3,
    U8_TILE,
    S8_TILE,
)


def format_for(
    a: Storage, b: Storage, target: Target, can_read: Callable[[Format], bool] = lambda _: True, *, unit: Unit | None = None
) -> Format | None:
    """The best of `formats_for`, or None."""
    return next(iter(formats_for(a, b, target, can_read, unit=unit)), None)


def formats_for(
    a: Storage, b: Storage, target: Target, can_read: Callable[[Format], bool] = lambda _: True, *, unit: Unit | None = None
) -> tuple[Format, ...]:
    """The formats of the table for operands of this storage that the target multiplies and the caller can read, best first.

    Formats of AMX tiles are given only for `unit="tile"`.
    """
    fitting = (one for one in FORMATS if one.a.holds(a) and one.b.holds(b) and one.runs_on(target))
    return tuple(one for one in fitting if (one.unit == unit if unit else one.unit != "tile") and can_read(one))
