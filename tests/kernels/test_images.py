"""MaxPool with indices, Col2Im, ReverseSequence, TensorScatter and Det."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from .harness import LEVELS, Case, check, check_in_turn, followed, operator, run, target_of

rng = np.random.default_rng(13)


def pool(x: np.ndarray, reverse: bool = False, **attributes: Any) -> Case:
    """Greatest elements and their places, from every window written out."""
    rank, extents = x.ndim - 2, x.shape[2:]
    kernel = attributes["kernel_shape"]
    strides, dilations = (attributes.get(name, (1,) * rank) for name in ("strides", "dilations"))
    pads = attributes.get("pads", (0,) * (2 * rank))
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    sides = zip(extents, spans, strides, pads[:rank], pads[rank:], strict=True)
    places = [(n + low + high - span) // s + 1 for n, span, s, low, high in sides]
    values = np.zeros((*x.shape[:2], *places), x.dtype)
    indices = np.zeros(values.shape, np.int64)
    for at in np.ndindex(values.shape):
        best: tuple[Any, int] | None = None
        for tap in np.ndindex(*kernel):
            steps = zip(at[2:], strides, tap, dilations, pads[:rank], strict=True)
            where = tuple(o * s + t * d - p for o, s, t, d, p in steps)
            if not all(0 <= a < n for a, n in zip(where, extents, strict=True)):
                continue
            element = x[(*at[:2], *where)]
            if best is None or element > best[0] or (np.isnan(element) and not np.isnan(best[0])):
                plane = (at[0] * x.shape[1] + at[1]) * int(np.prod(extents))
                best = element, plane + int(np.ravel_multi_index(where, extents, order="F" if reverse else "C"))
        assert best is not None
        values[at], indices[at] = best
    storage: dict[str, Any] = {"storage_order": 1} if reverse else {}
    return operator("MaxPool", x, expected=[values, indices], outputs=2, template="pooling_indices", **attributes, **storage)


def indices() -> list[Case]:
    x = rng.integers(0, 9, (2, 3, 7, 37)).astype(np.float32)  # with ties, of which the first counts
    spoilt = x.copy()
    spoilt[0, 0, 2, 3], spoilt[1, 1] = np.nan, -np.inf
    return [
        pool(x, kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
        pool(x, kernel_shape=(2, 2), strides=(2, 2)),
        pool(x, True, kernel_shape=(2, 3), dilations=(2, 3)),
        pool(spoilt, kernel_shape=(2, 3), pads=(0, 1, 1, 2)),
        pool(rng.standard_normal((1, 2, 530)), kernel_shape=(3,), pads=(1, 1)),
        pool(rng.standard_normal((1, 2, 4, 5, 6)).astype(np.float32), True, kernel_shape=(2, 2, 3), strides=(1, 2, 1)),
        pool(x.astype(np.uint8), kernel_shape=(3, 3)),
        pool((x - 4).astype(np.int8), kernel_shape=(3, 3), strides=(3, 1)),
        pool(x.astype(np.float16), kernel_shape=(1, 5)),
    ]


def blocks() -> list[Case]:
    def col2im(
        image: tuple[int, ...], block: tuple[int, ...], shape: tuple[int, ...], dtype: str = "float32", **more: Any
    ) -> Case:
        x = (rng.standard_normal(shape) * 20).astype(dtype)
        unit = {"float16": 1e-2}.get(dtype, 1e-5)
        case = operator("Col2Im", x.astype(np.float64), np.array(image), np.array(block), rtol=unit, atol=20 * unit, **more)
        types = {"x0": dtype, "y0": dtype}
        typed = {name: replace(kind, dtype=types.get(name, kind.dtype)) for name, kind in case.group.types.items()}
        expected = [case.expected[0].astype(dtype)]
        return replace(case, group=replace(case.group, types=typed), arrays={**case.arrays, "x0": x}, expected=expected)

    return [
        col2im((5, 5), (1, 5), (1, 5, 5)),
        col2im((9, 23), (3, 2), (2, 12, 24), strides=(3, 3), pads=(0, 1, 1, 0)),
        col2im((8, 19), (3, 4), (1, 12, 96)),
        col2im((8, 19), (2, 3), (1, 12, 105), dilations=(1, 2)),
        col2im((40,), (5,), (2, 10, 22), strides=(2,), pads=(3, 4)),
        col2im((4, 4, 5), (2, 1, 3), (1, 12, 36)),
        col2im((8, 19), (3, 4), (1, 12, 96), "float16"),
        col2im((8, 19), (3, 4), (1, 12, 96), "int32"),
        operator("Col2Im", np.zeros((0, 5, 5), np.float32), np.array((5, 5)), np.array((1, 5)),
                 expected=[np.zeros((0, 1, 5, 5), np.float32)]),
    ]  # fmt: skip


def slices() -> list[Case]:
    x = rng.standard_normal((5, 3, 37)).astype(np.float32)
    cases = [
        operator("ReverseSequence", x, np.array([5, 1, 3]), variables=(1,), template="sequence"),
        operator("ReverseSequence", x, np.array([1, 0, 3, 2, 1]), variables=(1,), batch_axis=0, time_axis=1),
        operator("ReverseSequence", x[..., 0], np.array([5, 1, 3]), variables=(1,)),
        operator("ReverseSequence", x.astype(np.int8), np.array([5, 1, 3])),
        operator("ReverseSequence", x > 0, np.array([5, 1, 3])),
    ]
    cache, update = rng.standard_normal((2, 3, 5, 19)).astype(np.float32), rng.standard_normal((2, 3, 2, 19)).astype(np.float32)
    for dtype in ("float32", "float16", "int8"):
        arrays = cache.astype(dtype), update.astype(dtype), np.array([3, 1])
        cases.append(operator("TensorScatter", *arrays, opset=24, variables=(2,), template="sequence"))
    return [
        *cases,
        operator("TensorScatter", cache, update, np.array([4, 13]), opset=24, variables=(2,), mode="circular"),
        operator("TensorScatter", cache, update, opset=24),
        operator("TensorScatter", cache, cache[..., :4], np.array([5, 15]), opset=24, variables=(2,), axis=3),
        operator("TensorScatter", cache[:, 0, :, 0], update[:, 0, :, 0], np.array([3, 0]), opset=24, variables=(2,), axis=1),
    ]


def determinants() -> list[Case]:
    def determinant(x: np.ndarray) -> Case:
        expected = [np.asarray(np.linalg.det(x.astype(np.float64))).astype(x.dtype)]
        unit = {"float16": 1e-2, "float64": 1e-10}.get(str(x.dtype), 1e-4)
        return operator("Det", x, expected=expected, rtol=unit, atol=unit, template="determinant")

    square = rng.standard_normal((2, 3, 5, 5))
    singular = np.ones((2, 3, 3))
    exchanged = np.eye(4)[[1, 0, 3, 2]]
    cases = [
        determinant(x) for x in (square, square[0, 0], singular, exchanged, rng.standard_normal((9, 17, 17)), square[..., :1, :1])
    ]
    typed = [determinant(square.astype(dtype)) for dtype in ("float32", "float16")]
    return [*cases, *typed, determinant(np.zeros((3, 0, 0))), determinant(np.zeros((0, 2, 2)))]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", [indices, blocks, slices, determinants], ids=lambda make: make.__name__)
def test_alone(make: Callable[[], list[Case]], level: str) -> None:
    check_in_turn(make(), level)


def test_followers() -> None:
    check([followed(case) for case in (*blocks()[:4], *slices()[:3], slices()[5], slices()[-4])], target_of("avx2"))


def test_indices_are_torch_s() -> None:
    """Which counts within a plane."""
    x = torch.randn(2, 3, 9, 11)
    values, places = torch.nn.functional.max_pool2d(x, 3, 2, 1, return_indices=True)
    plane = torch.arange(6).reshape(2, 3, 1, 1) * 99
    expected = [values.numpy(), (places + plane).numpy()]
    check([operator("MaxPool", x.numpy(), expected=expected, outputs=2, kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))],
          target_of("avx2"))  # fmt: skip


def test_lengths_and_places_out_of_range_stay_within_the_tensor() -> None:
    """A length is held within the sequence; of an update what lies outside of the cache is left out."""
    x = rng.standard_normal((4, 3, 5)).astype(np.float32)
    turned = np.stack([x[::-1, 0], x[:, 1], x[[1, 0, 2, 3], 2]], 1)
    cache, update = x.transpose(1, 0, 2).copy(), rng.standard_normal((3, 2, 5)).astype(np.float32)
    written = cache.copy()
    written[0, 3], written[1, 0] = update[0, 0], update[1, 1]
    cases = [
        operator("ReverseSequence", x, np.array([2**40, -7, 2]), variables=(1,), expected=[turned]),
        operator("TensorScatter", cache, update, np.array([3, -1, 2**40]), opset=24, variables=(2,), expected=[written]),
    ]
    check(cases, target_of("avx2"))


def test_a_large_det_repeats_bitwise() -> None:
    x = rng.standard_normal((64, 9, 9)).astype(np.float32)
    one, other = (operator("Det", x, expected=[np.zeros(64, np.float32)]) for _ in range(2))
    run([one, other], target_of("avx2", threads=2))
    assert one.got[0].tobytes() == other.got[0].tobytes()


def test_a_determinant_is_nan_where_an_element_is() -> None:
    """Also below a zero, which is no greater."""
    x = np.array([[[0.0, 1.0], [np.nan, 1.0]], [[np.nan, 0.0], [0.0, 1.0]], [[0.0, np.nan], [1.0, 0.0]]], np.float32)
    check([operator("Det", x, expected=[np.full(3, np.nan, np.float32)])], target_of("avx2"))
