"""Operators that move elements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.movement.injective import plan
from prefuse.kernels.template.contract import Candidate, Refusal
from prefuse.runtime.plan import TensorType
from prefuse.runtime.symbolic.sizes import Dim, Domain, SizeLike

from ..harness import LEVELS, OPSET, Case, check_in_turn, operator, target_of, with_followers

rng = np.random.default_rng(0)


def x(*shape: int, dtype: str = "float32") -> np.ndarray:
    return (rng.standard_normal(shape) * 50).astype(dtype)


def i64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def transposes() -> list[Case]:
    shapes = [((5, 7), (1, 0)), ((3, 33, 17), (0, 2, 1)), ((2, 3, 4, 5), (3, 1, 0, 2)), ((2, 9, 4, 16), (0, 2, 1, 3))]
    shapes += [((4, 20, 3, 40), (0, 2, 3, 1)), ((1, 1, 6), (2, 1, 0)), ((64, 64), (1, 0)), ((2, 70, 130), (2, 0, 1))]
    cases = [operator("Transpose", x(*shape), perm=order) for shape, order in shapes]
    cases += [operator("Transpose", x(19, 35, dtype=dtype)) for dtype in ("float64", "float16", "int8", "int64", "bool")]
    return [*cases, operator("Transpose", np.array(3, np.float32)), operator("Transpose", x(0, 4))]


def slices() -> list[Case]:
    data = x(6, 7, 37)
    bounds = [
        (i64(1), i64(5), None, None), (i64(0, 2), i64(6, 30), i64(0, 2), None), (i64(-1), i64(-100), i64(2), i64(-1)),
        (i64(5, -2), i64(-9, 0), i64(0, 2), i64(-2, -3)), (i64(1), i64(2**62), i64(-1), i64(2)), (i64(9), i64(3), i64(0), None),
    ]  # fmt: skip
    return [operator("Slice", data, *(b if b[2] is not None else b[:2])) for b in bounds]


def pads() -> list[Case]:
    data = x(3, 4, 5)
    cases = [operator("Pad", data, i64(0, 1, 2, 0, 0, 3))]
    cropped = np.pad(data[:, :, 1:], ((1, 2), (0, 1), (0, 2)), constant_values=7)  # onnx.reference has no negative pads
    cases += [operator("Pad", data, i64(1, 0, -1, 2, 1, 2), np.array(7, np.float32), expected=[cropped])]
    # All of the operand is cropped, on the left, on the right, by more than the result has.
    cases += [operator("Pad", x(3), i64(*ends), expected=[np.zeros(2, np.float32)]) for ends in ((5, -6), (-4, 3), (50, -51))]
    cases += [operator("Pad", x(2, 3), i64(0, 4, 0, -5), expected=[np.zeros((2, 2), np.float32)])]
    cases += [operator("Pad", data, i64(1, 2, 3, 0, 3, 2), mode=mode) for mode in ("edge", "reflect", "wrap")]
    cases += [operator("Pad", data, i64(2, 2), None, i64(-2), mode="reflect")]
    cases += [operator("Pad", x(1, 3, 40, 40), i64(0, 0, 1, 1, 0, 0, 1, 1)), operator("Pad", x(0, 2), i64(1, 0, 1, 2))]
    return cases


def joins() -> list[Case]:
    cases = [operator("Concat", x(2, 3, 5), x(2, 1, 5), x(2, 8, 5), axis=axis) for axis in (1, -2)]
    cases += [operator("Concat", x(4, 3), x(4, 30), axis=1), operator("Concat", x(3), x(0), x(8), axis=0)]
    cases += [operator("Split", x(7, 12), i64(5, 0, 7), outputs=3, axis=1)]
    cases += [
        operator("Split", x(7, 12), outputs=3, axis=0, num_outputs=3),
        operator("Split", x(2, 6, 3), outputs=2, axis=-2, num_outputs=2),
    ]
    return cases


def grids() -> list[Case]:
    cases = [operator("DepthToSpace", x(2, 12, 3, 5), blocksize=2, mode=mode) for mode in ("DCR", "CRD")]
    cases += [operator("DepthToSpace", x(1, 36, 4, 20), blocksize=3), operator("SpaceToDepth", x(2, 3, 6, 8), blocksize=2)]
    cases += [
        operator("Expand", x(3, 1, 5), i64(2, 3, 4, 1)),
        operator("Expand", x(1), i64(40, 3)),
        operator("Expand", x(7, 1), i64(7, 50)),
        operator("Expand", x(3, 37, 1), i64(3, 37, 3)),
    ]
    cases += [operator("Tile", x(3, 4), i64(2, 3)), operator("Tile", x(5), i64(1)), operator("Tile", x(2, 3), i64(0, 2))]
    return cases


def triangles() -> list[Case]:
    cases = [operator("Trilu", x(2, 9, 21), np.array(k), upper=upper) for k in (0, -3, 5) for upper in (0, 1)]
    return [*cases, operator("Trilu", x(18, 18)), operator("Trilu", x(5, 3), np.array(1), variables=(1,)),
            *(operator("Trilu", x(5, 3), np.array(k), variables=(1,)) for k in (2**32 + 1, -(2**62), 2**62)),
            operator("Trilu", x(8, 8, dtype="bool"))]  # fmt: skip


ALL = (triangles, transposes, slices, pads, joins, grids)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_alone(make: Callable[[], list[Case]], level: str) -> None:
    check_in_turn(make(), level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_with_followers(make: Callable[[], list[Case]], level: str) -> None:
    check_in_turn(with_followers(make()), level)


def padded(mode: str, extent: SizeLike, result: SizeLike, pads: tuple[int, int]) -> Group:
    shapes = {"x": ((extent,), "float32"), "p": ((2,), "int64"), "y": ((result,), "float32")}
    types = {name: TensorType(*kind) for name, kind in shapes.items()}
    op = Op("Pad", ("x", "p"), ("y",), {"mode": mode}, OPSET)
    return Group((op,), ("x", "p"), ("y",), types, constants=frozenset(["p"]), literals={"p": i64(*pads)})


def test_of_too_many_segments_none_is_made() -> None:
    assert "many segments" in str(plan(padded("wrap", 1, 1 + 2**30, (0, 2**30)), target_of("avx2")))


@pytest.mark.parametrize(("mode", "pads", "least"), [("edge", 3, 1), ("wrap", 3, 3), ("reflect", 3, 4), ("reflect", 0, 0)])
def test_what_is_repeated_of_any_number_of_elements_is_there(mode: str, pads: int, least: int) -> None:
    """The edge of a dimension that may be empty was read in front of it."""
    for fewest in (least - 1, least):
        if fewest >= 0:
            extent = Domain((Dim("N", fewest, 9),), {"N": 5}).size("N")
            found = plan(padded(mode, extent, extent + 2 * pads, (pads, pads)), target_of("avx2"))
            assert isinstance(found, Candidate if fewest >= least else Refusal)


def test_what_is_computed_of_several_parts_is_not_stored_part_by_part() -> None:
    """A gated linear unit: sigmoid(second half) * first half. Another template takes it whatever this one would cost."""
    whole, half = TensorType((60, 60), "float32"), TensorType((60, 30), "float32")
    ops = (
        Op("Split", ("x",), ("a", "b"), {"axis": 1, "num_outputs": 2}),
        Op("Sigmoid", ("b",), ("s",)),
        Op("Mul", ("a", "s"), ("y",)),
    )
    group = Group(ops, ("x",), ("y",), {"x": whole, "a": half, "b": half, "s": half, "y": half}, frozenset())
    assert "stored one by one" in str(plan(group, target_of("avx2")))
