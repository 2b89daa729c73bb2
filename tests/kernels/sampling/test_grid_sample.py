"""GridSample against onnx.reference, whose coordinates are float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from prefuse.kernels.registry import build_kernel
from prefuse.runtime.plan import TensorType
from prefuse.runtime.symbolic.sizes import Dim, Domain

from ..harness import LEVELS, Case, check, check_in_turn, followed, operator, run, target_of
from ..symbolic import Shape, built_for, run_at, sized

rng = np.random.default_rng(7)
_PADDINGS = ("zeros", "border", "reflection")


def sample(
    shape: tuple[int, ...], places: tuple[int, ...], dtype: str = "float32", grid_dtype: str = "float32", **attributes: Any
) -> Case:
    """Places of a whole grid and beyond, so that every padding matters."""
    x = rng.standard_normal(shape).astype(dtype)
    grid = rng.uniform(-1.6, 1.6, (shape[0], *places, len(shape) - 2)).astype(grid_dtype)
    unit = {"float16": 5e-3, "float64": 1e-5}.get(dtype, 2e-5)
    return operator("GridSample", x, grid, rtol=unit, atol=10 * unit, template="grid_sample", **attributes)


def plane() -> list[Case]:
    return [
        sample((2, 2, 5, 6), (1, 19), mode=mode, padding_mode=padding, align_corners=aligned)
        for mode, padding, aligned in (
            *product(("nearest", "linear"), _PADDINGS, (0, 1)),
            ("cubic", "zeros", 0),
            ("cubic", "reflection", 1),
        )
    ]


def space() -> list[Case]:
    return [
        sample((1, 1, 3, 4, 5), (1, 3, 3), mode=mode, padding_mode=padding, align_corners=aligned)
        for mode, padding, aligned in (
            ("linear", "zeros", 0),
            ("linear", "reflection", 1),
            ("nearest", "border", 1),
            ("cubic", "zeros", 0),
        )
    ]


def shapes_and_types() -> list[Case]:
    whole = np.arange(24, dtype=np.int32).reshape(1, 1, 4, 6)
    grid = rng.uniform(-1, 1, (1, 2, 9, 2)).astype(np.float32)
    return [
        sample((1, 1, 7, 9), (13, 11), "float16"),
        sample((1, 1, 7, 9), (13, 11), "float64", "float64", mode="cubic"),
        sample((1, 2, 7, 9), (4, 5), "float32", "float64"),
        sample((2, 1, 1, 1), (4, 5), padding_mode="border"),
        sample((2, 1, 1, 3), (4, 5), padding_mode="reflection", align_corners=0),
        sample((1, 1, 2, 2), (1, 1)),
        operator("GridSample", whole, grid, mode="nearest", template="grid_sample"),
        operator("GridSample", whole > 3, grid, mode="nearest", template="grid_sample"),
        operator("GridSample", np.zeros((1, 2, 4, 4), np.float32), np.zeros((1, 0, 3, 2), np.float32),
                 expected=[np.zeros((1, 2, 0, 3), np.float32)]),
    ]  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [plane, space, shapes_and_types], ids=lambda make: make.__name__)
def test_grid_sample(make: Callable[[], list[Case]], level: str) -> None:
    check_in_turn(make(), level)


def test_followers() -> None:
    check([followed(case) for case in (*plane()[:6], *space()[:1])], target_of("avx2"))


def test_as_torch_does_far_outside() -> None:
    """Also with cubic weights and a border, where onnx.reference holds the place, torch and ONNX Runtime the elements."""
    x = torch.randn(1, 2, 5, 6)
    grid = torch.rand(1, 4, 17, 2) * 12 - 6
    cases = []
    for mode, padding, aligned in product(("bilinear", "bicubic"), _PADDINGS, (False, True)):
        expected = torch.nn.functional.grid_sample(x, grid, mode, padding, align_corners=aligned).numpy()
        attributes: dict[str, Any] = {"padding_mode": padding, "align_corners": int(aligned)}
        attributes["mode"] = {"bilinear": "linear", "bicubic": "cubic"}[mode]
        cases.append(operator("GridSample", x.numpy(), grid.numpy(), expected=[expected], atol=1e-4, **attributes))
    check(cases, target_of("avx2"))


@pytest.mark.parametrize("padding", _PADDINGS)
def test_places_that_are_no_numbers_read_the_operand_alone(padding: str) -> None:
    x = rng.standard_normal((1, 1, 3, 4)).astype(np.float32)
    grid = np.full((1, 1, 6, 2), 0.1, np.float32)
    grid[0, 0, :, 0] = [np.nan, np.inf, -np.inf, 3e38, -3e38, 0.2]
    expected = np.zeros((1, 1, 1, 6), np.float32)
    cases = [
        operator("GridSample", x, grid, mode=mode, padding_mode=padding, expected=[expected]) for mode in ("linear", "nearest")
    ]
    run(cases, target_of("avx2"))
    for case in cases:
        assert np.abs(case.got[0]).max() <= np.abs(x).max()
        if padding == "zeros":
            assert (case.got[0][0, 0, 0, :5] == 0).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("aligned", [0, 1])
@pytest.mark.parametrize(("mode", "padding"), [*product(("linear", "nearest"), _PADDINGS), ("cubic", "reflection")])
def test_images_and_grids_of_any_size(mode: str, padding: str, aligned: int, level: str) -> None:
    """An image of unknown height and width, at an unknown number of places: fewer than a block, one more, several."""
    dims = Dim("H", 1, 9), Dim("W", 1, 9), Dim("P", 1, 200)
    target, domain = target_of(level), Domain(dims, {"H": 5, "W": 6, "P": 19})
    least = 2 if padding == "reflection" and aligned else 1  # onnx.reference divides by what is between the bounds
    sizes = ((5, 6, 19), (least, least, 1), (least, 7, 64), (9, least, 65), (4, 4, 200))
    points = {
        number: (
            sample((2, 3, h, w), (1, p), mode=mode, padding_mode=padding, align_corners=aligned),
            {"H": h, "W": w, "P": p},
        )
        for number, (h, w, p) in enumerate(sizes)
    }
    shapes: dict[str, Shape] = {"x0": (2, 3, "H", "W"), "x1": (2, 1, "P", 2), "y0": (2, 3, 1, "P")}
    run_at(built_for(sized(points[0][0], shapes, domain), target), target, domain, points)


def test_one_element_is_its_own_reflection() -> None:
    x, grid = rng.standard_normal((1, 2, 1, 1), np.float32), rng.uniform(-3, 3, (1, 4, 5, 2)).astype(np.float32)
    expected = [np.broadcast_to(x, (1, 2, 4, 5))]
    cases = [
        operator("GridSample", x, grid, expected=expected, mode=mode, padding_mode="reflection", align_corners=1, rtol=1e-6)
        for mode in ("linear", "nearest", "cubic")
    ]
    check(cases, target_of("avx2"))


def test_complex_numbers_are_refused() -> None:
    case = operator("GridSample", x := rng.standard_normal((1, 1, 2, 2), np.float32), x, mode="nearest", expected=[x])
    types = dict(case.group.types) | {name: TensorType(x.shape, "complex64") for name in ("x0", "y0")}
    refused = build_kernel(replace(case.group, types=types), target_of("avx2"))
    assert refused == (("grid_sample", "no complex numbers"),)
