"""UNet (Ronneberger et al., 2015) as in the paper: unpadded convolutions, 572x572 pixels in, 388x388 out, skips cropped."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from .spec import Inputs
from .weights import initialize


def _two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3), nn.ReLU(), nn.Conv2d(outputs, outputs, 3), nn.ReLU())


def _center_crop(features: Tensor, like: Tensor) -> Tensor:
    top, left = ((full - kept) // 2 for full, kept in zip(features.shape[-2:], like.shape[-2:], strict=True))
    return features[..., top : top + like.shape[-2], left : left + like.shape[-1]]


class UNet(nn.Module):
    """[N, 1, H, W] -> [N, 2, H', W'] scores a pixel; the width doubles at each of `depth` poolings from `width`."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(_two_convolutions(a, b) for a, b in zip([1, *widths[:-1]], widths, strict=True))
        self.pool = nn.MaxPool2d(2)
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(deep, shallow, 2, stride=2) for deep, shallow in pairs)
        self.up = nn.ModuleList(_two_convolutions(2 * shallow, shallow) for _, shallow in pairs)
        self.classifier = nn.Conv2d(width, 2, 1)
        initialize(self, gain=sqrt(2))

    def forward(self, image: Tensor) -> Tensor:
        features: Tensor = self.down[0](image)
        skips: list[Tensor] = []
        for convolutions in self.down[1:]:
            skips.append(features)
            features = convolutions(self.pool(features))
        for widen, convolutions, skip in zip(self.widen, self.up, reversed(skips), strict=True):
            wide = widen(features)
            features = convolutions(torch.cat([_center_crop(skip, wide), wide], dim=1))
        scores: Tensor = self.classifier(features)
        return scores


def unet() -> tuple[nn.Module, Inputs]:
    """The paper's 31 million parameters and 572x572 pixels."""
    return UNet(), (torch.randn(1, 1, 572, 572),)


def unet_small() -> tuple[nn.Module, Inputs]:
    """Two poolings, four channels; 60 pixels fit them exactly as 572 fit four."""
    return UNet(width=4, depth=2), (torch.randn(1, 1, 60, 60),)
