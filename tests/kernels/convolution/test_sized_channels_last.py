"""Kernels of values that lie channels-last for images of any height and width; against torch in float64 at many of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prefuse.kernels.convolution import implicit_gemm_amx
from prefuse.kernels.groups.group import Group
from prefuse.runtime.plan import TensorType
from prefuse.runtime.symbolic.sizes import Dim, Domain
from prefuse.tests.sample import every

from ..harness import Case, target_of
from ..symbolic import built_for, run_at
from .channels_last_cases import convolution, joined, of_several_results, pooling, transposed
from .test_convolution_tiles import tiled
from .test_winograd import fast, forced

_RANGES, _HINT = (Dim("H", 1, 40), Dim("W", 1, 40)), {"H": 13, "W": 17}
_POINTS = ((1, 1), (1, 9), (3, 2), (7, 13), (8, 8), (14, 16), (16, 33), (40, 17), (39, 40))
Make = Callable[[int, int], Case]

_DIRECT: dict[str, Make] = {
    "3x3": lambda h, w: convolution((2, 17, h, w), 33, 3, 1, 1),
    "1x1": lambda h, w: convolution((2, 16, h, w), 40, 1),
    "1x1 of a prologue's layout": lambda h, w: convolution((2, 5, h, w), 7, 1, keep_first=("x",)),
    "strides": lambda h, w: convolution((1, 8, 2 * h, 2 * w), 20, 3, 2, 1),
    "strides without padding": lambda h, w: convolution((1, 8, 2 * h, 2 * w + 1), 70, (2, 3), 2),
    "dilated": lambda h, w: convolution((1, 4, h, w), 6, 3, 1, 4, 4),
    "ragged padding": lambda h, w: convolution((1, 8, h, w), 5, 3, 1, (1, 0, 2, 3)),
    "groups": lambda h, w: convolution((1, 12, h, w), 20, 3, 1, 1, group=2),
    "far weights": lambda h, w: replace(convolution((1, 160, h, w), 200, 3, 1, 1), atol=1e-3),
    "channels first": lambda h, w: convolution((1, 3, 2 * h, 2 * w), 20, 7, 2, 3, keep_first=("x",)),
    "doubles": lambda h, w: convolution((1, 9, h, w), 24, 3, 1, 1, dtype="float64"),
    "volume": lambda h, w: convolution((1, 6, 3, h, w), 9, 3, 1, 1),
    "joined": lambda h, w: joined(convolution((1, 6, h, w), 33, 3, 1, 1)),
    "several results": lambda h, w: of_several_results(convolution((1, 6, h, w), 17, 3, 1, 1)),
    "depthwise": lambda h, w: convolution((2, 17, h, w), 17, 3, 1, 1, group=17),
    "depthwise with strides": lambda h, w: convolution((1, 40, 2 * h, 2 * w), 40, 5, 2, 2, group=40),
    "depthwise, wider than an image": lambda h, w: convolution((1, 20, h, w), 20, 9, 1, 4, group=20),
    "depthwise without padding": lambda h, w: convolution((1, 12, h + 2, w + 4), 12, (3, 5), group=12),
    "transposed": lambda h, w: transposed((2, 6, h, w), 20, 2, 2),
    "transposed with padding": lambda h, w: transposed((1, 6, h, w), 20, 3, 2, 1, 1, 1),
    "transposed, of even windows": lambda h, w: transposed((1, 17, h, w), 5, 4, 2, 1),
    "transposed, joined": lambda h, w: joined(transposed((1, 6, h, w), 8, 2, 2)),
    "greatest": lambda h, w: pooling("MaxPool", (2, 17, h, w), kernel_shape=(3, 3), pads=(1, 1, 1, 1)),
    "averages": lambda h, w: pooling("AveragePool", (1, 20, 2 * h, 2 * w), kernel_shape=(2, 2), strides=(2, 2)),
    "averages over padding": lambda h, w: pooling("AveragePool", (1, 20, h, w), kernel_shape=(5, 5), pads=(2, 2, 2, 2)),
}
_PAIRS: dict[str, Make] = {
    "3x3": lambda h, w: convolution((1, 16, h, w), 40, 3, 1, 1, narrow="xwr"),
    "1x1": lambda h, w: convolution((1, 16, h, w), 40, 1, narrow="xwry"),
    "odd channels": lambda h, w: convolution((1, 33, h, w), 40, 3, 1, 1, narrow="xw"),
    "depthwise": lambda h, w: convolution((1, 24, h, w), 24, 3, 1, 1, group=24, narrow="xw"),
    "transposed": lambda h, w: transposed((1, 16, h, w), 20, 2, 2, narrow="xw"),
}
_TILES: dict[str, Make] = {
    "3x3": lambda h, w: tiled(convolution((2, 40, h, w), 33, 3, 1, 1)),
    "strides": lambda h, w: tiled(convolution((1, 20, 2 * h, 2 * w), 18, 3, 2, 1), "float32"),
    "joined columns": lambda h, w: tiled(convolution((1, 3, 2 * h, 2 * w), 20, 7, 2, 3, keep_first=("x",))),
    "in place": lambda h, w: tiled(convolution((1, 32, h + 31, w), 40, 1, narrow="xw"), "bfloat16"),
    "groups": lambda h, w: tiled(convolution((1, 12, h, w), 20, 3, 1, 1, group=2)),
    "far weights": lambda h, w: tiled(convolution((1, 160, h, w), 200, 3, 1, 1), "bfloat16"),
    "transposed": lambda h, w: tiled(transposed((1, 20, h, w), 40, 3, 2, 1, 1, 1)),
    "joined": lambda h, w: tiled(joined(convolution((1, 20, h, w), 33, 3, 1, 1))),
}


def sized_group(make: Make, domain: Domain) -> Group:
    """The group of a case for all sizes of a domain: each extent is a number and multiples of both dimensions."""
    (here, below, beside), hint = ((13, 17), (14, 17), (13, 18)), make(_HINT["H"], _HINT["W"]).group
    at = {place: make(*place).group.types for place in (here, below, beside)}
    heights, widths = domain.size("H"), domain.size("W")

    def linear(extent: int, taller: int, wider: int) -> Any:
        down, across = taller - extent, wider - extent
        return down * heights + across * widths + (extent - 13 * down - 17 * across)

    def sized(name: str, kind: TensorType) -> TensorType:
        shapes = (at[place][name].shape for place in (here, below, beside))
        return replace(kind, shape=tuple(linear(*extents) for extents in zip(*shapes, strict=True)))

    literals = dict(hint.literals)
    for name, literal in hint.literals.items():
        numbers = [make(*place).group.literals[name].reshape(-1).tolist() for place in (here, below, beside)]
        found = [linear(*some) for some in zip(*numbers, strict=True)]
        if not all(isinstance(number, int) for number in found):
            literals[name] = np.array(found, object).reshape(literal.shape)
    return replace(hint, types={name: sized(name, kind) for name, kind in hint.types.items()}, literals=literals)


def serves_all(make: Make, level: str, template: str = "") -> None:
    """Check one kernel for all sizes at each of the points."""
    target, domain = target_of(level), Domain(_RANGES, _HINT)
    kernel = built_for(sized_group(make, domain), target)
    assert kernel.template == (template or make(8, 8).template)
    assert not domain.cuts
    run_at(
        kernel,
        target,
        domain,
        {number: (make(*point), dict(zip("HW", point, strict=True))) for number, point in enumerate(_POINTS)},
    )


@pytest.mark.parametrize(("level", "name"), [(("avx2", "avx512")[n % 2], name) for n, name in enumerate(_DIRECT)])
def test_images_of_any_size(level: str, name: str) -> None:
    serves_all(_DIRECT[name], level)


@pytest.mark.parametrize("name", every(2, list(_PAIRS)))
def test_pairs_of_images_of_any_size(name: str) -> None:
    serves_all(_PAIRS[name], "avx512bf16")


@pytest.mark.parametrize("name", every(2, list(_TILES)))
@pytest.mark.parametrize("in_bands", [False, True])
def test_tiles_of_images_of_any_size(name: str, in_bands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implicit_gemm_amx, "tile_convolution_cycles", lambda *sizes, **how: -1e9)
    if in_bands:
        monkeypatch.setattr(implicit_gemm_amx, "_BANDED", 0.0)
        monkeypatch.setattr(implicit_gemm_amx, "_BAND_SHARE", 0.01)
        monkeypatch.setattr(implicit_gemm_amx, "_BAND_WEIGHTS", 100.0)
    serves_all(_TILES[name], "amx")


@pytest.mark.parametrize("outputs", [2, 4, 5])
def test_winograd_of_images_of_any_size(outputs: int) -> None:
    serves_all(lambda h, w: forced(fast((1, 17, h, w), 40, 3, 1, 1), outputs), "avx512")
    serves_all(lambda h, w: forced(fast((2, 8, h, w), 20, 3, 1, 2, 2), outputs), "avx2")
