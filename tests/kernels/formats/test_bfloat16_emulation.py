"""The dot product of bfloat16 pairs, native and emulated, against Intel's definition of it: bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from prefuse.kernels.groups.group import Group, Op
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import BFLOAT16_EMULATED, Target

from ..harness import Case, run, type_of

TINY = np.float32(2.0**-126)  # the least normal float32
rng = np.random.default_rng(11)


def flushed(x: np.ndarray) -> np.ndarray:
    """Zeros of their sign for denormal numbers."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x).astype(np.float32)


def fused(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """total + a * b of float32, rounded once: products of bfloat16 are exact in float64, where their sum is rounded to odd."""
    product, wide = a.astype(np.float64) * b, total.astype(np.float64)
    with np.errstate(all="ignore"):
        exact = product + wide
        part = exact - product
        error = (product - (exact - part)) + (wide - part)
        is_even = (exact.view(np.int64) & 1) == 0
        toward = np.where(error > 0, np.inf, -np.inf)
        odd = np.where((error != 0) & np.isfinite(exact) & is_even, np.nextafter(exact, toward), exact)
        rounded: np.ndarray = odd.astype(np.float32)
        return rounded


def dot(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """VDPBF16PS of pairs in the last dimension: the high halves first."""
    a, b = flushed(a.astype(np.float32)), flushed(b.astype(np.float32))
    for half in (1, 0):
        total = flushed(fused(flushed(total), a[..., half], b[..., half]))
    return total


def numbers(*shape: int) -> np.ndarray:
    """Numbers of all sizes, among them zeros, denormal numbers, and those whose products cancel or round to ties."""
    some = rng.integers(-128, 128, shape) * np.exp2(rng.integers(-9, 9, shape))
    wide = rng.standard_normal(shape) * np.exp2(rng.integers(-133, 60, shape))
    return np.where(rng.random(shape) < 0.6, some, wide).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("level", [BFLOAT16_EMULATED, "avx512bf16"])
def test_two_dots_one_after_the_other(level: str) -> None:
    """A product of rows of two pairs: the second dot begins with the sum that the first made."""
    target = Target("cpu", level, 1)
    if missing := target.missing_features():
        pytest.skip(f"this CPU lacks {', '.join(missing)}")
    a, b = numbers(96, 4), numbers(4, 160)
    a[:16] *= 2.0**-70  # whose products are denormal, or nearly
    b[:, :32] *= 2.0**-50
    pairs = b.reshape(2, 2, 160)
    expected = np.zeros((96, 160), np.float32)
    for word in range(2):
        row = np.broadcast_to(a[:, None, 2 * word : 2 * word + 2], (96, 160, 2))
        expected = dot(expected, row, np.broadcast_to(pairs[word].T, (96, 160, 2)))
    assert 0 < (expected == 0).sum() < expected.size / 2
    casts = tuple(Op("Cast", (name,), (f".{name}",), {"to": 1}) for name in "ab")
    kinds = {"a": type_of(a), "b": type_of(b), ".a": TensorType(a.shape, "float32"), ".b": TensorType(b.shape, "float32")}
    group = Group(
        (*casts, Op("MatMul", (".a", ".b"), ("y",))), ("a", "b"), ("y",), kinds | {"y": type_of(expected)}, frozenset("b")
    )
    case = Case(group, {"a": a, "b": b}, [expected])
    run([case], target)
    np.testing.assert_array_equal(case.got[0].view(np.int32), expected.view(np.int32))


def test_kernels_are_those_of_the_level_and_machines_need_avx2_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    emulated, native = Target.parse(f"cpu:{BFLOAT16_EMULATED}", threads=2), Target("cpu", "avx512bf16", 2)
    assert Target.parse(str(emulated)) == emulated
    assert emulated.multiplies_pairs
    assert (emulated.vector_lanes, emulated.vector_registers) == (native.vector_lanes, native.vector_registers) == (16, 32)
    monkeypatch.setattr("prefuse.runtime.target.host_cpu_flags", lambda: frozenset(["avx2", "fma", "f16c", "bmi2"]))
    assert emulated.missing_features() == ()
    assert "avx512_bf16" in native.missing_features()
