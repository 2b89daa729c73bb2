"""Round, a zero point, Clip and Cast to 8 bits as one rounding: to the same integers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.template.rounding import Rounding, rounding_of
from prefuse.runtime.plan import TensorType

from ..harness import Case, check_in_turn, type_of

NUMBERS = np.array(
    [0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 254.5, 255.5, 126.5, 127.5, -127.5, -128.5, 3e9, -3e9, 1e38, np.inf, -np.inf]
)
CASES = [("uint8", 0), ("uint8", 128), ("uint8", 117), ("uint8", 255), ("int8", 0), ("int8", -128), ("int8", 77)]


def quantizing(
    dtype: str, zero: int, bounds: tuple[float, float] | None = None, *, relu: bool = False
) -> tuple[Group, np.ndarray]:
    """Relu, Round, Add, Clip and Cast of numbers at and beside halves and bounds; the first and the second only where asked."""
    rng = np.random.default_rng(5)
    halves = rng.integers(-700, 700, 300) / 2
    x = np.concatenate([NUMBERS, halves, np.nextafter(halves.astype(np.float32), np.float32(9e9))]).astype(np.float32)
    limits = np.iinfo(dtype)
    low, high = bounds or (limits.min, limits.max)
    literals = {"z": np.float32(zero), "low": np.float32(low), "high": np.float32(high)}
    arrays = {name: np.asarray(value) for name, value in literals.items()}
    ops = [Op("Relu", ("x",), ("r",), {}, 23)] if relu else []
    ops.append(Op("Round", ("r" if relu else "x",), ("n",), {}, 23))
    ops += [Op("Add", ("n", "z"), ("m",), {}, 23)] if zero else []
    ops.append(Op("Clip", ("m" if zero else "n", "low", "high"), ("c",), {}, 23))
    ops.append(Op("Cast", ("c",), ("y",), {"to": 2 if dtype == "uint8" else 3}, 23))
    types = {name: type_of(array) for name, array in arrays.items()} | dict.fromkeys("xrnmc", type_of(x))
    types["y"] = TensorType(x.shape, dtype)
    return Group(tuple(ops), ("x", *arrays), ("y",), types, frozenset(arrays), arrays), x


def expected(x: np.ndarray, dtype: str, zero: int, bounds: tuple[float, float], *, relu: bool) -> np.ndarray:
    wide = np.rint(np.maximum(x, 0) if relu else x).astype(np.float64) + zero
    held: np.ndarray = np.minimum(np.maximum(wide, bounds[0]), bounds[1]).astype(dtype)
    return held


@pytest.mark.parametrize("level", ["avx2", "avx512"])
def test_same_integers(level: str) -> None:
    cases = []
    for dtype, zero in CASES:
        limits = np.iinfo(dtype)
        for bounds in ((limits.min, limits.max), (zero, limits.max), (limits.min // 2 + 3, 100)):
            for relu in (False, True):
                group, x = quantizing(dtype, zero, bounds, relu=relu)
                assert rounding_of(group, group.ops[-1]) is not None
                arrays = {"x": x, **group.literals}
                cases.append(Case(group, arrays, [expected(x, dtype, zero, bounds, relu=relu)], label=f"{dtype} {zero} {bounds}"))
    check_in_turn(cases, level)


def test_what_is_one() -> None:
    group, _ = quantizing("uint8", 7, relu=True)
    assert rounding_of(group, group.ops[-1]) == Rounding("r", 7, 0, 255)  # a Relu has an effect: 0 becomes 7
    group, _ = quantizing("uint8", 0, relu=True)
    assert rounding_of(group, group.ops[-1]) == Rounding("x", 0, 0, 255)


def test_what_is_none() -> None:
    """A zero point with a fraction, bounds that the type does not hold or that are not known, a value that others read, too."""
    group, _ = quantizing("uint8", 7)
    cast = group.ops[-1]
    for name, value in (("z", 0.5), ("low", -1), ("high", 256), ("low", np.nan)):
        literals = {**group.literals, name: np.array(value, np.float32)}
        assert rounding_of(replace(group, literals=literals), cast) is None
    assert rounding_of(replace(group, literals={name: group.literals[name] for name in ("z", "low")}), cast) is None
    assert rounding_of(replace(group, outputs=("n", "y")), cast) is None
    assert rounding_of(group, group.ops[-2]) is None
