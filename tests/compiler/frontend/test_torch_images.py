"""What torch does with images where its exporter has no form, or a wrong one, against torch."""

from __future__ import annotations

import pytest
import torch
from prefuse.runtime.errors import UnsupportedModelError
from torch.nn import functional

from .applied import check

SIZES = {"linear": (7,), "bilinear": (5, 7), "bicubic": (5, 7), "trilinear": (3, 5, 7)}


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("mode", SIZES)
def test_resampling_by_fractions(mode: str, aligned: bool) -> None:
    """With aligned corners the exporter's form was 6 off: it kept the scale, where torch takes the quotient of the sizes."""
    x = torch.randn(2, 3, *SIZES[mode])

    def resampled(x: torch.Tensor) -> dict[str, torch.Tensor]:
        to_size = functional.interpolate(x, size=SIZES[mode][::-1], mode=mode, align_corners=aligned)
        by_scale = {s: functional.interpolate(x, scale_factor=s, mode=mode, align_corners=aligned) for s in (1.7, 2.0, 0.6)}
        return {"to a size": to_size, **{f"by {scale}": image for scale, image in by_scale.items()}}

    check(resampled, x)


@pytest.mark.parametrize("mode", SIZES)
def test_resampling_to_one_pixel(mode: str) -> None:
    """It is in the middle, as all others are; by ONNX's pytorch_half_pixel it was the first one."""

    def resampled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        by_size = functional.interpolate(x, size=[1] * (x.ndim - 2), mode=mode, align_corners=False)
        return by_size, functional.interpolate(x, scale_factor=0.25, mode=mode, align_corners=False)

    check(resampled, torch.randn(1, 2, *[4] * len(SIZES[mode])))


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_volumes_at_places(mode: str, padding: str) -> None:
    x, grid = torch.randn(2, 3, 4, 5, 6), torch.rand(2, 3, 4, 2, 3) * 2.4 - 1.2
    ways = (False, True)
    check(lambda x, g: tuple(functional.grid_sample(x, g, mode, padding, align_corners=aligned) for aligned in ways), x, grid)


def _both(affine: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (affine[0], affine[1]) if affine else (None, None)


@pytest.mark.parametrize("has_affine", [False, True])
def test_normalization_by_the_batch_itself(has_affine: bool) -> None:
    """The exporter takes running means, also where a function is told to train."""
    x, mean, variance = torch.randn(4, 3, 5, 6) * 3 + 1, torch.randn(3), torch.rand(3) + 0.5
    affine = (torch.randn(3), torch.randn(3)) if has_affine else ()

    def normalized(x: torch.Tensor, m: torch.Tensor, v: torch.Tensor, *affine: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "training": functional.batch_norm(x, m.clone(), v.clone(), *_both(affine), True),
            "without means": functional.batch_norm(x, None, None, *_both(affine), True),
            "by running means": functional.batch_norm(x, m, v, *_both(affine), False),
        }

    check(normalized, x, mean, variance, *affine)


def test_running_means_are_renewed() -> None:
    def renewed(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean, variance = mean.clone(), variance.clone()
        return functional.batch_norm(x, mean, variance, training=True, momentum=0.3), mean, variance

    check(renewed, torch.randn(4, 3, 5) * 3 + 1, torch.randn(3), torch.rand(3) + 0.5)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_smooth_resampling_by_fractions(mode: str) -> None:
    """The exporter drops the scale, and takes the quotient of the sizes."""
    x = torch.randn(1, 2, 11, 13)

    def resampled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scales = (0.37, 1.3, (0.6, 0.45))
        by_scale = [functional.interpolate(x, scale_factor=scale, mode=mode, antialias=True) for scale in scales]
        return *by_scale, functional.interpolate(x, size=(5, 6), mode=mode, antialias=True)

    check(resampled, x)
    with pytest.raises(UnsupportedModelError, match="antialias=True with align_corners=True"):
        check(lambda x: functional.interpolate(x, size=(5, 6), mode=mode, antialias=True, align_corners=True), x)


@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_sizes_are_counted_in_double_precision(mode: str) -> None:
    """5 times float32's 1.4 is less than 7, and 25 times its 1.16, rounded to it, is 29."""

    def resampled(*images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scaled = zip(images, (1.4, 1.16, 2.12), strict=True)
        return tuple(functional.interpolate(x, scale_factor=scale, mode=mode) for x, scale in scaled)

    images = [torch.arange(2.0 * size).reshape(1, 2, size) for size in (5, 25, 25)]
    check(resampled, *images, tolerance=1.0 if mode == "nearest" else 1e-3)  # which of two neighbours is nearest may differ


def test_greatest_elements_of_an_empty_batch() -> None:
    check(lambda x: (functional.adaptive_max_pool2d(x, (2, 3)), functional.adaptive_max_pool2d(x, 1)), torch.randn(0, 2, 5, 5))
