"""Pointwise groups over short or ragged rows: extents, broadcast patterns and types, in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd, inf, prod

import ml_dtypes
import numpy as np
import pytest
from prefuse.kernels.elementwise import row_blocks
from prefuse.kernels.elementwise.elementwise import merge_dimensions
from prefuse.kernels.elementwise.row_blocks import RowBlocks, Steps, choose_blocks
from prefuse.kernels.groups.group import Group, Op
from prefuse.runtime.plan import TensorType
from tvm_ffi import structural_equal

from ..harness import LEVELS, OPSET, Case, build, check, in_turn, run, target_of, type_of

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 10, 12, 16, 20, 31, 40, 100)
# Shapes of two operands; "n" is the short extent.
PATTERNS: tuple[tuple[tuple[int | str, ...], tuple[int | str, ...]], ...] = (
    ((300, 1), ("n",)),
    ((300, "n"), (300, 1)),
    ((300, "n"), ("n",)),
    ((7, 11, "n"), (7, 1, 1)),
    ((7, 1, "n"), (7, 11, 1)),
    ((5, 1, 3, "n"), (1, 4, 3, 1)),
    ((5, 4, 1, "n"), (5, 1, 3, 1)),
    ((2, "n", 1, 5), (3, 1)),
    ((41, 2, 1, "n"), (41, 1, 3, 1)),
)


def _group(
    ops: tuple[Op, ...], arrays: Mapping[str, np.ndarray], kinds: Mapping[str, np.ndarray | TensorType], *outputs: str
) -> Group:
    types = {name: kind if isinstance(kind, TensorType) else type_of(kind) for name, kind in {**arrays, **kinds}.items()}
    return Group(ops, tuple(arrays), outputs, types)


def _op(op_type: str, *names: str, **attributes: object) -> Op:
    """Its last name is its output."""
    return Op(op_type, names[:-1], names[-1:], attributes, OPSET)


def _bells(a: np.ndarray, b: np.ndarray) -> Case:
    """exp(-(a - b)**2)."""
    shape = np.broadcast_shapes(a.shape, b.shape)
    ops = (_op("Sub", "a", "b", ".d"), _op("Mul", ".d", ".d", ".s"), _op("Neg", ".s", ".n"), _op("Exp", ".n", "y"))
    kinds = dict.fromkeys((".d", ".s", ".n", "y"), TensorType(shape, "float32"))
    expected = np.exp(-((a.astype(np.float64) - b) ** 2))
    group = _group(ops, {"a": a, "b": b}, kinds, "y")
    return Case(group, {"a": a, "b": b}, [expected], 1e-5, 1e-7, f"{a.shape} {b.shape}", "elementwise")


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(prod(shape)).standard_normal(shape).astype(np.float32)


def check_in_blocks(cases: Sequence[Case], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case gives what it must in blocks of rows wherever these can be, and as elsewhere where they do not seem to pay.

    Of the cases those whose turn it is at this level.
    """
    target, cases = target_of(level), in_turn(cases, level)
    estimated = [build(case, target).function for case in cases]
    with monkeypatch.context() as patch:
        patch.setattr(row_blocks, "_GAIN", 0.0)
        pairs = zip(cases, estimated, strict=True)
        others = [case for case, function in pairs if not structural_equal(function, build(case, target).function)]
        check(cases, target)
    if others:
        check(others, target)


@pytest.mark.parametrize("level", LEVELS)
def test_all_extents_and_patterns(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [
        _bells(*(_normal(*(n if extent == "n" else int(extent) for extent in shape)) for shape in pattern))
        for pattern in PATTERNS
        for n in EXTENTS
    ]
    check_in_blocks(cases, level, monkeypatch)


@pytest.mark.parametrize("level", LEVELS)
def test_blocks_that_end_within_a_vector(level: str) -> None:
    """Buffers of as many rows as are whole vectors would be too large."""
    case = _bells(_normal(41, 1), _normal(201))
    cut = choose_blocks(merge_dimensions(case.group, {})[0], Steps(16, 16))
    assert cut is not None
    assert cut.elements % 16
    assert cut.blocks > 1
    check([case], target_of(level))


def _computed(rows: int, n: int) -> Case:
    """Operators at all sizes before the one at full size: y = tanh(a) * x + exp(g) * exp(u), z = y - tanh(a)."""
    shapes = {"x": (3, rows, n), "a": (3, rows, 1), "g": (n,), "u": (3, 1, 1), "c": (3, 1, n), "s": ()}
    arrays = {name: _normal(*shape) for name, shape in shapes.items()}
    x, a, g, u, c, s = (array.astype(np.float64) for array in arrays.values())
    steps = {".t": np.tanh(a), ".g": np.exp(g), ".u": np.exp(u), ".c": c * np.exp(g), ".s": np.exp(s)}
    steps |= {".m": np.tanh(a) * x, ".w": np.exp(u) * np.exp(g)}
    steps[".p"] = steps[".m"] + steps[".w"]
    steps[".q"] = steps[".p"] * np.exp(s)
    steps["y"] = steps[".q"] - steps[".c"]
    steps["z"] = steps["y"] - steps[".t"]
    ops = (
        *(_op(kind, source, result) for kind, source, result in (("Tanh", "a", ".t"), ("Exp", "g", ".g"), ("Exp", "u", ".u"))),
        _op("Exp", "s", ".s"),
        _op("Mul", "c", ".g", ".c"),
        _op("Mul", ".t", "x", ".m"),
        _op("Mul", ".u", ".g", ".w"),
        _op("Add", ".m", ".w", ".p"),
        _op("Mul", ".p", ".s", ".q"),
        _op("Sub", ".q", ".c", "y"),
        _op("Sub", "y", ".t", "z"),
    )
    kinds = {name: TensorType(value.shape, "float32") for name, value in steps.items()}
    group = _group(ops, arrays, kinds, "y", "z")
    return Case(group, arrays, [steps["y"], steps["z"]], 1e-4, 1e-5, f"{rows} rows of {n}", "elementwise")


@pytest.mark.parametrize("level", LEVELS)
def test_operators_before_the_full_size(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_blocks([_computed(rows, n) for rows in (2, 19, 400) for n in (2, 3, 8, 10, 21, 40)], level, monkeypatch)


def _typed(n: int) -> Iterator[Case]:
    generator = np.random.default_rng(n)
    for kind in (np.dtype(name) for name in ("int8", "uint8", "int32", "int64", "float16", "float64")):
        x, a, g = (generator.integers(0, 9, shape).astype(kind) for shape in ((90, n), (90, 1), (n,)))
        ops = (_op("Mul", "x", "a", ".p"), _op("Sub", ".p", "g", "y"))
        arrays, y = {"x": x, "a": a, "g": g}, x * a - g
        yield Case(_group(ops, arrays, {".p": y, "y": y}, "y"), arrays, [y], label=f"{kind} {n}")
    x, a, g = generator.standard_normal((90, n)).astype(np.float32), _normal(90, 1), _normal(n)
    chosen = np.where(a > 0, x, g)
    masks = {"a": a > 0, "x": x, "g": g}
    yield Case(_group((_op("Where", "a", "x", "g", "y"),), masks, {"y": chosen}, "y"), masks, [chosen], label=f"masked {n}")
    yield Case(
        _group((_op("Less", "x", "a", "y"),), {"x": x, "a": a}, {"y": x < a}, "y"), {"x": x, "a": a}, [x < a], label=f"less {n}"
    )
    flags = {"p": a > 0, "q": g > 0}
    yield Case(_group((_op("And", "p", "q", "y"),), flags, {"y": chosen > 0}, "y"), flags, [(a > 0) & (g > 0)], label=f"and {n}")
    b = a.astype(BFLOAT16)
    bell = np.exp(-np.abs(b.astype(np.float64) - g))
    rounded = (
        _op("Cast", "b", ".a", to=1),
        _op("Sub", ".a", "g", ".d"),
        _op("Abs", ".d", ".s"),
        _op("Neg", ".s", ".n"),
        _op("Exp", ".n", ".e"),
        _op("Cast", ".e", "y", to=16),
    )
    kinds = {".a": a} | dict.fromkeys((".d", ".s", ".n", ".e"), x) | {"y": x.astype(BFLOAT16)}
    narrow = {"b": b, "g": g}
    expected = bell.astype(BFLOAT16)
    yield Case(_group(rounded, narrow, kinds, "y"), narrow, [expected], 1e-2, label=f"bfloat16 {n}")


@pytest.mark.parametrize("level", LEVELS)
def test_types(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_in_blocks([case for n in (1, 2, 3, 5, 8, 12, 16, 20, 24, 40) for case in _typed(n)], level, monkeypatch)


@pytest.mark.parametrize("level", LEVELS)
def test_blocks_change_no_bit(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of operators that all are at full size: what is computed before is rounded before it is added to something."""
    results = []
    for gain in (0.0, inf):
        monkeypatch.setattr(row_blocks, "_GAIN", gain)
        cases = [_bells(_normal(300, 1), _normal(n)) for n in (3, 8, 10, 21)]
        run(cases, target_of(level))
        results.append([got.tobytes() for case in cases for got in case.got])
    assert results[0] == results[1]


def test_whole_vectors_stay_rows() -> None:
    for n in (16, 48, 1600):
        assert choose_blocks(merge_dimensions(_bells(_normal(300, 1), _normal(n)).group, {})[0], Steps(16, 16)) is None


def test_long_rows_stay_rows() -> None:
    assert choose_blocks(merge_dimensions(_bells(_normal(4, 1), _normal(20001)).group, {})[0], Steps(16, 16)) is None


def test_light_operators_on_short_rows_stay_rows() -> None:
    x, a = _normal(300, 4), _normal(300, 1)
    group = _group((_op("Add", "x", "a", "y"),), {"x": x, "a": a}, {"y": x}, "y")
    assert choose_blocks(group, Steps(16, 16)) is None


@pytest.mark.parametrize("lanes", [8, 16, 32, 64])
def test_blocks_are_whole_vectors_in_little_memory(lanes: int) -> None:
    taken = 0
    for rows in (2, 33, 1000):
        for n in range(1, 200):
            group, *_ = merge_dimensions(_bells(_normal(3, rows, 1), _normal(n)).group, {})
            cut = choose_blocks(group, Steps(lanes, 16))
            if cut is None:
                continue
            taken += 1
            whole_rows = lanes // gcd(cut.width, lanes)
            row_bytes = sum(group.types[name].bytes_of(cut.width) for name in cut.spread)
            assert cut.rows * row_bytes <= row_blocks._BUFFER_BYTES
            is_small = whole_rows * row_bytes <= row_blocks._BUFFER_BYTES
            assert cut.rows == cut.shape[cut.axis] or (cut.elements % lanes == 0) == is_small
    assert taken > 100


def test_values_are_told_apart() -> None:
    """By whether they are spread, computed once for a run, or neither."""
    group = _computed(19, 5).group
    cut = RowBlocks(merge_dimensions(group, {})[0], 1, 19)
    assert set(cut.spread) == {".t", ".w", ".c"}
    assert cut.uniform == (".s",)
    assert cut.parts(".t") == [(19, True), (5, False)]
