"""Every pointwise operator against onnx.reference: special values, odd lengths, broadcasts, and all element types."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from prefuse.kernels.expressions.pointwise import POINTWISE
from prefuse.kernels.groups.group import Group, Op
from prefuse.runtime.plan import TensorType

from ..harness import LEVELS, Case, check, check_in_turn, operator, target_of, type_of

INF, NAN = float("inf"), float("nan")
SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-30, -1e-30, 88.0, -88.0, 1e10, -1e10, INF, -INF, NAN]
FLOATS = np.array([*SPECIAL, *np.linspace(-4, 4, 35)], np.float32)  # 53: whole vectors and a tail
UNIT = np.concatenate([np.linspace(-1, 1, 37), [0.0, -0.0, NAN]]).astype(np.float32)
ABOVE_ONE = np.concatenate([np.geomspace(1, 1e6, 37), [INF, NAN]]).astype(np.float32)
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NARROW = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))

_UNARY = """
    Abs Ceil Celu Cos Elu Erf Exp Floor HardSigmoid HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg Reciprocal Relu Round
    Selu Shrink Sigmoid Sign Sin Softplus Softsign Sqrt Tanh ThresholdedRelu Atan Sinh Cosh Asinh Gelu Swish"""
_SMALL = ("Sin", "Cos", "Tan", "Sinh", "Cosh")  # compared where libm's argument reduction and overflow do not matter
_BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum")
_NUMPY = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Max": np.maximum, "Min": np.minimum}
_COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")


def _pairs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each value with each."""
    return np.repeat(values, len(values)), np.tile(values, len(values))


def _float_cases() -> Iterator[Case]:
    for name in _UNARY.split():
        values = FLOATS[np.abs(FLOATS) < 20] if name in _SMALL else FLOATS
        yield operator(name, values, rtol=1e-6, atol=2e-7)
    for name in ("Acos", "Asin", "Atanh"):
        yield operator(name, UNIT, rtol=1e-6, atol=1e-7)
    yield operator("Atanh", np.geomspace(1e-300, 0.5, 50), rtol=1e-15)
    yield operator("Acosh", ABOVE_ONE, rtol=1e-6)
    yield operator("Tan", UNIT, rtol=1e-6)
    yield operator("Gelu", FLOATS, rtol=1e-5, atol=1e-6, approximate="tanh")
    a, b = _pairs(FLOATS[::2])
    for name in _BINARY:
        yield operator(name, a, b, rtol=1e-6, variables=(1,))
    for name in _COMPARISONS:
        yield operator(name, a, b)
    yield operator("Pow", *_pairs(np.array([0.0, 0.5, 1.0, 2.0, 3.0, 7.5], np.float32)), rtol=1e-6)
    for exponent in (0.5, 1.0, 2.0, 3.0, -1.0, 0.0):
        yield operator("Pow", FLOATS[FLOATS >= 0], np.array(exponent, np.float32), rtol=1e-6)
    yield operator("Where", a > 0, a, b)
    with np.errstate(invalid="ignore"):
        yield operator("PRelu", a, b, expected=[np.where(a < 0, a * b, a)], variables=(1,))
    yield operator("Mod", a, b, fmod=1, rtol=1e-6)
    yield operator("Clip", FLOATS, np.array(-1, np.float32), np.array(2, np.float32))
    yield operator("Clip", FLOATS, None, np.array(2, np.float32))
    yield operator("Clip", FLOATS, opset=6, min=-1.0, max=1.0, expected=[np.clip(FLOATS, -1, 1)])


def _typed_cases() -> Iterator[Case]:
    for dtype in INTEGERS:
        info = np.iinfo(dtype)
        values = np.array([0, 1, 2, 3, 7, 100, info.max, info.min, info.max - 1, info.min + 1], dtype)
        small = np.array([1, 2, 3, 7, info.max], dtype)
        a, b = _pairs(values)
        for name in ("Add", "Sub", "Mul", "Max", "Min", "BitwiseAnd", "BitwiseOr", "BitwiseXor", *_COMPARISONS):
            with np.errstate(over="ignore"):
                yield operator(name, a, b, variables=(1,))
        yield operator("Div", np.abs(np.repeat(values[:7], 5)), np.tile(small, 7), variables=(1,))
        yield operator("Mod", np.repeat(values, 5), np.tile(small, 10), variables=(1,))
        exponents = np.array([0, 1, 2, 5, 31, 63, 100, info.max, -1 if info.min < 0 else 7, info.min], dtype)
        bases, powers = np.repeat(values, 10), np.tile(exponents, 10)
        ten = 10 if info.bits > 16 else 1
        floats, raised = np.array([0.5, 2.0, 9.0, 1.5, -0.5], np.float32), np.array([1, 9, ten**9, 2, 0], dtype)
        yield operator("Pow", np.array([3, 3, ten, 2, 2], dtype), floats, expected=[raised])
        yield operator("Pow", bases, powers, expected=[_raised(bases, powers)], variables=(1,))
        yield operator("Pow", values, np.array(13, dtype), expected=[_raised(values, np.full(10, 13, dtype))])
        yield operator("Where", a > b, a, b, variables=(1, 2))
        yield operator("Clip", values, np.array(1, dtype), np.array(5, dtype))
        yield operator("BitwiseNot", values)
        yield operator("Sign", values)
        if info.min < 0:
            yield operator("Neg", values)
            yield operator("Abs", values)
            yield operator("Relu", values)
        else:
            yield operator("BitShift", a, b % 70, direction="LEFT", expected=[_shifted(a, b % 70, left=True)], variables=(1,))
            yield operator("BitShift", a, b % 70, direction="RIGHT", expected=[_shifted(a, b % 70, left=False)], variables=(1,))
    truths = _pairs(np.array([False, True]))
    for name in ("And", "Or", "Xor", "Equal"):
        yield operator(name, *truths, variables=(1,))
    yield operator("Not", truths[0])
    yield operator("Where", *truths, ~truths[0], variables=(1, 2))
    for kind in (np.dtype(np.float64), *NARROW):
        values = np.array([0, -0.0, 1, -1, 0.3, -2.7, 3.5, 7, INF, -INF, NAN]).astype(kind)
        tolerance = {"float64": 1e-7, "float16": 2e-3, "bfloat16": 2e-2}[kind.name]
        for name in _NUMPY:
            a, b = _pairs(values)
            function = {
                "Add": np.add,
                "Sub": np.subtract,
                "Mul": np.multiply,
                "Div": np.divide,
                "Max": np.maximum,
                "Min": np.minimum,
            }
            with np.errstate(all="ignore"):
                expected = function[name](a.astype(np.float64), b.astype(np.float64)).astype(kind)
            yield operator(name, a, b, expected=[expected], rtol=tolerance, variables=(1,))
        for name, call in (("Exp", np.exp), ("Tanh", np.tanh), ("Relu", lambda v: np.maximum(v, 0)), ("Sqrt", np.sqrt)):
            with np.errstate(all="ignore"):
                expected = call(values.astype(np.float64)).astype(kind)
            yield operator(name, values, expected=[expected], rtol=tolerance)


def _raised(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Powers that wrap around; of negative exponents those of 1 and -1, else 0."""
    modulus = 1 << (8 * a.dtype.itemsize)
    whole = [
        pow(int(x), int(n), modulus) if n >= 0 else (int(x) ** (int(n) % 2) if abs(int(x)) == 1 else 0)
        for x, n in zip(a, b, strict=True)
    ]
    return np.array([x % modulus for x in whole], np.uint64).astype(a.dtype)


def _shifted(a: np.ndarray, b: np.ndarray, *, left: bool) -> np.ndarray:
    bits = a.dtype.itemsize * 8
    mask = (1 << bits) - 1
    whole = [(int(x) << int(n)) & mask if left else int(x) >> int(n) for x, n in zip(a, b, strict=True)]
    return np.array(whole, np.uint64).astype(a.dtype)


def _cast_cases() -> Iterator[Case]:
    kinds = [np.dtype(k) for k in ("float32", "float64", *INTEGERS, "bool")] + list(NARROW)
    numbers = [0, 1, 2, 3, 100, 127]
    for source in kinds:
        for to in kinds:
            values = np.array(numbers + ([-1, -100] if source.kind in "if" and to.kind != "u" else [])).astype(source)
            yield operator("Cast", values, expected=[values.astype(to)], to=_onnx_type(to))
    halves = np.array([0.5, -0.5, 2.9, -2.9, NAN, INF], np.float32)
    yield operator("Cast", halves[:4], expected=[halves[:4].astype(np.int64)], to=7)
    yield operator("Cast", halves, expected=[halves != 0], to=9)


def _byte_cases() -> Iterator[Case]:
    """All numbers of 8 bits less a zero point, and scaled."""
    for dtype in (np.uint8, np.int8):
        info = np.iinfo(dtype)
        numbers, scale, zero = (
            np.arange(info.min, info.max + 1).astype(dtype),
            np.array(0.37, np.float32),
            np.array(info.max - 9, dtype),
        )
        exact = (numbers.astype(np.float32) - np.float32(zero)) * scale
        yield operator("DequantizeLinear", numbers, scale, zero, expected=[exact], rtol=1e-7, variables=(1, 2))
        yield operator("DequantizeLinear", numbers, scale, expected=[numbers * scale], rtol=1e-7, variables=(1,))


def _onnx_type(kind: np.dtype) -> int:
    return int(ir.DataType.from_numpy(kind))


def _shape_cases() -> Iterator[Case]:
    generator = np.random.default_rng(0)
    for first, second in (
        ((), ()), ((1,), ()), ((0,), (1,)), ((3, 0, 2), (0, 1)), ((2, 3, 4), (4,)), ((2, 3, 4), (3, 1)), ((2, 1, 4), (3, 1)),
        ((1, 1, 1), (5,)), ((2, 3, 4, 5), (3, 1, 1)), ((7, 1, 3), (7, 5, 1)), ((129,), (1,)), ((33, 17), (17,)), ((4, 1), (1, 5)),
    ):  # fmt: skip
        a, b = (generator.standard_normal(shape).astype(np.float32) for shape in (first, second))
        yield operator("Sub", a, b, variables=(1,))
        yield operator("Where", a > 0, b, np.array(2, np.float32), variables=(1,))
    parts = [generator.standard_normal(shape).astype(np.float32) for shape in ((2, 3), (3,), (2, 1))]
    yield operator("Max", *parts)
    yield operator("Sum", *parts, expected=[parts[0] + parts[1] + parts[2]], rtol=1e-6)


GROUPS = {"floats": _float_cases, "types": _typed_cases, "casts": _cast_cases, "bytes": _byte_cases, "shapes": _shape_cases}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", GROUPS)
def test_operators_agree_with_the_reference(kind: str, level: str) -> None:
    cases = list(GROUPS[kind]())
    check_in_turn(cases, level)


def test_every_pointwise_operator_is_tested() -> None:
    tested = {op.op_type for make in GROUPS.values() for case in make() for op in case.group.ops}
    assert tested >= POINTWISE.keys()


@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_division_by_a_zero_in_the_code(dtype: str, zero: float) -> None:
    x = np.array([1, -2, 0, -0.0, INF, -INF, NAN], dtype)
    check([operator("Div", x, np.array(zero, dtype))], target_of("avx2"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_bound_in_the_code_that_is_nan_makes_nan(dtype: str) -> None:
    x, nan = np.array([1, -INF, NAN], dtype), np.array(NAN, dtype)
    cases = [operator(name, x, nan, expected=[np.full_like(x, NAN)]) for name in ("Max", "Min", "Clip")]
    cases.append(operator("Clip", x, None, nan, expected=[np.full_like(x, NAN)]))
    check(cases, target_of("avx2"))


def test_a_square_root_in_the_code_is_that_of_sqrt() -> None:
    """Not of C's pow, which has infinity and 0 there."""
    x = np.array([-INF, -0.0, INF, 9, -9], np.float32)
    case = operator("Pow", x, np.array(0.5, np.float32), expected=[np.array([NAN, -0.0, INF, 3, NAN], np.float32)])
    check([case], target_of("avx2"))
    assert np.signbit(case.got[0][1])


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_integers_wrap_around(dtype: str) -> None:
    """And what follows knows of it: LLVM must not think that a sum of two positive numbers is positive."""
    info = np.iinfo(dtype)
    x = np.array([info.max, info.min, info.max // 2 + 1, 3, info.max - 1] * 9, dtype)
    with np.errstate(all="ignore"):
        cases = [operator(name, x, x, variables=[1]) for name in ("Add", "Mul")]
        cases += [operator("Sub", x, x[::-1], variables=[1])]
        cases += [operator(name, x, np.array(info.max, dtype)) for name in ("Add", "Sub")]
        if info.min:
            cases.append(operator("Neg", x))
        raised = x + np.array(7, dtype)
    ops = (
        Op("Add", ("x", "seven"), (".s",), {}, 23),
        Op("Cast", (".s",), (".f",), {"to": 1}, 23),
        Op("Sqrt", (".f",), ("y",), {}, 23),
    )
    seven = np.array(7, dtype)
    types = {"x": type_of(x), "seven": type_of(seven), ".s": type_of(x), ".f": TensorType(x.shape, "float32")}
    types["y"] = types[".f"]
    group = Group(ops, ("x", "seven"), ("y",), types, frozenset(["seven"]), {"seven": seven})
    with np.errstate(all="ignore"):
        cases.append(Case(group, {"x": x, "seven": seven}, [np.sqrt(raised.astype(np.float32))], 1e-6))
    check(cases, target_of("avx2"))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_the_size_of_the_least_integer_wraps_around(dtype: str) -> None:
    """And what follows does not take it for positive."""
    x = np.array([np.iinfo(dtype).min, 5, -3, 0, np.iinfo(dtype).max] * 9, dtype)
    cases = []
    for follower, to in ((Op("Cast", (".a",), ("y",), {"to": 11}, 13), "float64"), (Op("Relu", (".a",), ("y",), {}, 14), dtype)):
        types = {"x": type_of(x), ".a": type_of(x), "y": TensorType(x.shape, to)}
        expected = np.abs(x).astype(to) if follower.op_type == "Cast" else np.maximum(np.abs(x), 0)
        cases.append(Case(Group((Op("Abs", ("x",), (".a",), {}, 13), follower), ("x",), ("y",), types), {"x": x}, [expected]))
    check(cases, target_of("avx2"))


@pytest.mark.parametrize("level", LEVELS)
def test_quotients_of_integers_are_exact(level: str) -> None:
    """Next to multiples of the divisor, and with the least integer."""
    generator = np.random.default_rng(0)
    least, greatest = -(2**31), 2**31 - 1
    divisor = np.concatenate([generator.integers(-(2**k), 2**k, 500) for k in range(1, 32)])
    divisor = np.where(divisor == 0, -1, divisor)
    quotient = np.trunc(generator.uniform(least, greatest, divisor.size) / divisor).astype(np.int64)
    dividend = np.clip(quotient * divisor + generator.integers(-1, 2, divisor.size), least, greatest)
    edges = np.array([least, least + 1, -1, 1, greatest - 1, greatest])
    a, b = (np.concatenate([one, more]) for one, more in zip((dividend, divisor), _pairs(edges), strict=True))
    exact = np.where((a < 0) == (b < 0), np.abs(a) // np.abs(b), -(np.abs(a) // np.abs(b))).astype(np.int32)  # wraps around
    check([operator("Div", a.astype(np.int32), b.astype(np.int32), expected=[exact], variables=(1,))], target_of(level))


def test_floats_beyond_the_signed_integers_are_unsigned_ones() -> None:
    x = np.array([0, 1.75, 2.0**31, 2.0**32 - 256, 2.0**63, 1.5 * 2.0**63, 2.0**64 - 2.0**40, -3.0], np.float32)
    expected = [np.array([int(v) % 2**64 for v in x], np.uint64)]
    cases = [operator("Cast", x.astype(dtype), to=13, expected=expected) for dtype in ("float32", "float64")]
    cases.append(operator("Cast", x[:4], to=12, expected=[x[:4].astype(np.uint32)]))
    check(cases, target_of("avx2"))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_shrunk_as_real_numbers(dtype: str) -> None:
    x = np.arange(0 if dtype[0] == "u" else -6, 7).astype(dtype)
    check([operator("Shrink", x, lambd=1.5, bias=0.75), operator("Shrink", x, bias=-1.5)], target_of("avx2"))


def test_complex_numbers_are_chosen_as_bits() -> None:
    x, y = (np.arange(6) * (1 + 2j)).astype(np.complex64), (-np.arange(6) - 1j).astype(np.complex64)
    check([operator("Where", np.arange(6) % 2 == 0, x, y, variables=(1, 2))], target_of("avx2"))
