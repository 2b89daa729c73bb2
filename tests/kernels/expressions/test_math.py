"""Every function of kernels/expressions (math, power, trigonometry) against float64, over all of float32: errors in ulp."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from prefuse.kernels.groups.group import Group, Op
from prefuse.runtime.plan import TensorType
from prefuse.runtime.precision import PRECISIONS, Precision

from ..harness import LEVELS, Case, operator, run, target_of

TINY = float(np.finfo(np.float32).tiny)


def everywhere() -> np.ndarray:
    """Every 16,384th float32: both signs, denormals, infinities and NaN; and the neighbourhoods of where functions bend."""
    bits = np.arange(0, 2**32, 1 << 14, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = np.concatenate([np.linspace(-100, 100, 50_001), np.linspace(-5, 5, 50_001), np.geomspace(1e-6, 1, 10_001)])
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 88.7228, 88.7229, -103.9, -104.1, 0.625, 0.927734375]
    return np.concatenate([bits, near.astype(np.float32), np.array(special, np.float32)])


def _erf(x: np.ndarray) -> np.ndarray:
    return np.array([math.erf(value) for value in x])


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


# operator: exact function, ulps allowed where the result is a normal number, absolute error allowed below
FUNCTIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float, float]] = {
    "Exp": (np.exp, 2, 1e-44),
    "Log": (np.log, 2, 0.0),
    "Tanh": (np.tanh, 3, 1e-44),
    "Erf": (_erf, 3, 1e-44),
    "Sigmoid": (_sigmoid, 4, 2e-38),
    "Softplus": (lambda x: np.logaddexp(x, 0), 4, 1e-44),
    "Elu": (lambda x: np.where(x < 0, np.expm1(x), x), 4, 1e-44),
    "Asin": (np.arcsin, 2.5, 1e-44),
    "Acos": (np.arccos, 1.5, 1e-44),
    "Sin": (np.sin, 2, 1e-44),
    "Cos": (np.cos, 2, 1e-44),
    "Tan": (np.tan, 4, 1e-44),
    "Atan": (np.arctan, 1.8, 1e-44),
    "Atanh": (np.arctanh, 4, 1e-44),
}


def ulps(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Error in units of the last place of the exact result, which is a normal number."""
    spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return np.asarray(np.abs(got.astype(np.float64) - exact) / spacing)


@pytest.mark.parametrize("level", LEVELS)
def test_errors_in_ulps(level: str) -> None:
    x = everywhere()
    kind = TensorType(x.shape, "float32")
    cases = []
    for name in FUNCTIONS:
        group = Group((Op(name, ("x",), ("y",), {}, 23),), ("x",), ("y",), {"x": kind, "y": kind})
        cases.append(Case(group, {"x": x}, [x]))
    run(cases, target_of(level))
    for case, (name, (function, allowed, tiny)) in zip(cases, FUNCTIONS.items(), strict=True):
        with np.errstate(all="ignore"):
            exact = function(x.astype(np.float64))
            rounded = exact.astype(np.float32)
        (got,) = case.got
        np.testing.assert_array_equal(np.isnan(got), np.isnan(rounded), name)
        finite = np.isfinite(rounded) & (np.abs(rounded) > TINY)
        error = ulps(got[finite], exact[finite])
        worst = x[finite][error.argmax()]
        assert error.max() <= allowed, f"{name}: {error.max():.1f} ulp at {worst!r}"
        infinite = np.isinf(rounded)
        np.testing.assert_array_equal(got[infinite], rounded[infinite], name)
        small = np.abs(rounded) <= TINY
        assert np.abs(got[small].astype(np.float64) - exact[small]).max(initial=0) <= tiny, name
        print(f"{level} {name}: {error.max():.2f} ulp at {worst!r}")


@pytest.mark.parametrize("level", LEVELS)
def test_mish(level: str) -> None:
    """In ulp while e**x is a normal number, else to what is lost of it."""
    x = np.concatenate([np.linspace(-120, 30, 300_001), np.geomspace(1e-37, 3e38, 9_999), [np.inf, np.nan]]).astype(np.float32)
    kind = TensorType(x.shape, "float32")
    case = Case(Group((Op("Mish", ("x",), ("y",), {}, 18),), ("x",), ("y",), {"x": kind, "y": kind}), {"x": x}, [x])
    run([case], target_of(level))
    wide, got = x[:-2].astype(np.float64), case.got[0]
    exact = wide * np.tanh(np.logaddexp(wide, 0))
    normal = wide > -87.3
    assert ulps(got[:-2][normal], exact[normal]).max() <= 4
    assert np.abs(got[:-2][~normal] - exact[~normal]).max() <= 1.5e-43
    np.testing.assert_array_equal(got[-2:], [np.inf, np.nan])


FLOAT64: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Tanh": np.tanh,
    "Mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
    "Elu": lambda x: np.where(x < 0, np.expm1(x), x),
    "Celu": lambda x: np.where(x < 0, np.expm1(x), x),
    "Selu": lambda x: np.where(x < 0, np.expm1(x) * 1.67326319217681884765625, x) * 1.05070102214813232421875,
}


def test_float64_keeps_the_digits_of_small_numbers() -> None:
    """Against numbers of 80 bits: sums with 1, in which digits cancel, gave Tanh of 1e-17 as 0. Zeros keep their sign."""
    sizes = np.concatenate([np.geomspace(1e-300, 1e-3, 200), np.linspace(1e-3, 40, 200), [0.0, 700.0]])
    x = np.concatenate([sizes, -sizes])
    cases = [operator(name, x, expected=[x]) for name in FLOAT64]
    run(cases, target_of("avx2"))
    for case, (name, function) in zip(cases, FLOAT64.items(), strict=True):
        exact = function(x.astype(np.longdouble))
        error = np.abs(case.got[0] - exact) / np.spacing(np.abs(exact).astype(np.float64))
        assert error.max() <= 4, f"{name}: {error.max():.1f} ulp at {x[error.argmax()]!r}"
        np.testing.assert_array_equal(np.signbit(case.got[0]), np.signbit(x), name)


@pytest.mark.parametrize("level", LEVELS)
def test_powers_in_ulps(level: str) -> None:
    """Bases and exponents of every size whose power is a number, and each special value to the power of each."""
    generator = np.random.default_rng(0)
    base = generator.integers(0, 0x7F800000, 400_000, dtype=np.uint32).view(np.float32)
    base[::4] = generator.uniform(0.5, 2, 100_000)
    base[1::4] = 1 + generator.uniform(-1e-3, 1e-3, 100_000)
    with np.errstate(all="ignore"):
        exponent = (generator.uniform(-150, 129, 400_000) / np.log2(base.astype(np.float64))).astype(np.float32)
    base[::8] *= -1
    exponent[::8] = np.round(exponent[::8])
    values = [0, 0.5, 1, 1.5, 2, 3, 7, 16777215, 16777217, 1e30, 1e-40, 3.4e38, np.inf, 1 - 2**-24, 1 + 2**-23]
    special = np.array([*values, *(-value for value in values), np.nan], np.float32)
    special[len(values)] = -0.0
    x = np.concatenate([base, np.repeat(special, len(special))])
    y = np.concatenate([exponent, np.tile(special, len(special))])
    kind = TensorType(x.shape, "float32")
    group = Group((Op("Pow", ("x", "y"), ("z",), {}, 15),), ("x", "y"), ("z",), {"x": kind, "y": kind, "z": kind})
    case = Case(group, {"x": x, "y": y}, [x])
    run([case], target_of(level))
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(np.float64), y.astype(np.float64))
        rounded = exact.astype(np.float32)
    (got,) = case.got
    error = np.zeros(len(x))
    normal = np.isfinite(rounded) & (np.abs(rounded) > TINY)
    error[normal] = ulps(got[normal], exact[normal])
    worst = error.argmax()
    print(f"{level} Pow: {error[worst]:.2f} ulp at {x[worst]!r} to the power of {y[worst]!r}")
    assert error[worst] <= 1.5
    np.testing.assert_array_equal(got[~np.isfinite(rounded)], rounded[~np.isfinite(rounded)])
    small = np.abs(rounded) <= TINY
    assert np.abs(got[small].astype(np.float64) - exact[small]).max() <= 1e-44
    np.testing.assert_array_equal(np.signbit(got[small]), np.signbit(rounded[small]))


@pytest.mark.parametrize("level", LEVELS)
def test_exponentials_of_softmax_in_ulps(level: str) -> None:
    """Of a row (x, 0) with x below -17, the first is e**x to the last bit of float32; results below the normal numbers are 0."""
    x = np.stack([-np.linspace(17, 100, 200_001, dtype=np.float32), np.zeros(200_001, np.float32)], axis=1)
    kind = TensorType(x.shape, "float32")
    group = Group((Op("Softmax", ("x",), ("y",), {"axis": -1}, 23),), ("x",), ("y",), {"x": kind, "y": kind})
    case = Case(group, {"x": x}, [x])
    run([case], target_of(level))
    got, exact = case.got[0][:, 0], np.exp(x[:, 0].astype(np.float64))
    normal = x[:, 0] > -87.3
    assert ulps(got[normal], exact[normal]).max() <= 1.1
    assert not got[x[:, 0] < -87.4].any()


def gelu_error(approximate: str, precision: Precision, exact: Callable[[np.ndarray], np.ndarray], level: str) -> float:
    """The greatest error of Gelu, relative to the argument, of arguments of every size."""
    x = everywhere()
    x = x[np.isfinite(x)]
    kind = TensorType(x.shape, "float32")
    op = Op("Gelu", ("x",), ("y",), {"approximate": approximate}, 20)
    case = Case(Group((op,), ("x",), ("y",), {"x": kind, "y": kind}, precision=precision), {"x": x}, [x])
    run([case], target_of(level))
    wide = x[np.abs(x) > TINY].astype(np.float64)
    with np.errstate(all="ignore"):
        return float((np.abs(case.got[0][np.abs(x) > TINY] - wide * exact(wide)) / np.abs(wide)).max())


@pytest.mark.parametrize("level", LEVELS)
def test_gelu(level: str) -> None:
    """Where all is rounded to bfloat16, whose numbers are 4e-3 apart, errors may be greater; but none where the factor is 1."""

    def by_erf(x: np.ndarray) -> np.ndarray:
        return (1 + _erf(x * np.sqrt(0.5))) / 2

    def by_tanh(x: np.ndarray) -> np.ndarray:
        return _sigmoid(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))

    assert gelu_error("none", "float32", by_erf, level) < 1.3e-7
    assert gelu_error("none", "bfloat16", by_erf, level) < 2.5e-7
    assert gelu_error("tanh", "float32", by_tanh, level) < 2e-7
    assert gelu_error("tanh", "bfloat16", by_tanh, level) < 2e-5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("precision", "bound"), [("float32", 4e-7), ("bfloat16", 1e-4)])
def test_swish(level: str, precision: Precision, bound: float) -> None:
    """Relative errors, of results of every size; nothing is left of very negative numbers."""
    x = np.concatenate([np.linspace(-80, 100, 100_001, dtype=np.float32), -np.geomspace(100, 1e30, 20, dtype=np.float32)])
    kind = TensorType(x.shape, "float32")
    group = Group((Op("Swish", ("x",), ("y",), {}, 24),), ("x",), ("y",), {"x": kind, "y": kind}, precision=precision)
    case = Case(group, {"x": x}, [x])
    run([case], target_of(level))
    wide = x[:100_001].astype(np.float64)
    exact = wide * _sigmoid(wide)
    assert (np.abs(case.got[0][:100_001] - exact) <= bound * np.abs(exact)).all()
    assert not case.got[0][100_001:].any()


def test_gelu_of_very_negative_numbers_is_nothing() -> None:
    x = -np.geomspace(6, 1e30, 100, dtype=np.float32)
    kind = TensorType(x.shape, "float32")
    ops = [Op("Gelu", ("x",), ("y",), {"approximate": approximate}, 20) for approximate in ("none", "tanh")]
    cases = [
        Case(Group((op,), ("x",), ("y",), {"x": kind, "y": kind}, precision=name), {"x": x}, [x])
        for op, name in product(ops, PRECISIONS)
    ]
    run(cases, target_of("avx512"))
    for case in cases:
        assert np.abs(case.got[0]).max() < 1e-6


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("divisor", [3.0, 0.0235294122248888, -1.9999999, 16777215.0, 7.3e-29, 1.1e29, 0.1, 8.0])
def test_division_by_a_constant_rounds_as_division(level: str, divisor: float) -> None:
    """All of float32, and quotients that are next to halves between integers: where 8 bits are rounded."""
    number = np.float32(divisor)
    ties = (np.arange(-300, 300, dtype=np.float32) + np.float32(0.5)) * number
    x = np.concatenate([everywhere(), *(np.nextafter(ties, np.float32(towards)) for towards in (-np.inf, np.inf)), ties])
    types = {"x": TensorType(x.shape, "float32"), "c": TensorType((), "float32"), "y": TensorType(x.shape, "float32")}
    group = Group(
        (Op("Div", ("x", "c"), ("y",), {}, 14),),
        ("x", "c"),
        ("y",),
        types,
        constants=frozenset({"c"}),
        literals={"c": np.array(number)},
    )
    with np.errstate(all="ignore"):
        exact = x / number
    case = Case(group, {"x": x, "c": np.array(number)}, [exact])
    run([case], target_of(level))
    is_large = np.abs(x) >= np.float32(2.0**-100)
    np.testing.assert_array_equal(case.got[0][is_large], exact[is_large])
    np.testing.assert_array_equal(np.signbit(case.got[0])[~np.isnan(x)], np.signbit(exact)[~np.isnan(x)])
    small = np.abs(case.got[0][~is_large].astype(np.float64) - exact[~is_large]), np.spacing(np.abs(exact[~is_large]))
    assert not (small[0] > small[1]).any()
