"""VGG-16 (Simonyan and Zisserman, 2014), configuration D: 138 million parameters, no normalisation."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from .spec import Inputs
from .weights import initialize


class VGG(nn.Module):
    """[N, 3, size, size] -> [N, classes] scores; `stages` lists (3x3 convolutions, channels) between 2x2 poolings."""

    def __init__(self, stages: tuple[tuple[int, int], ...], size: int, hidden: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for convolutions, width in stages:
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(channels * (size >> len(stages)) ** 2, hidden), nn.ReLU(), nn.Dropout()),
            *(nn.Linear(hidden, hidden), nn.ReLU(), nn.Dropout()),
            nn.Linear(hidden, classes),
        )
        initialize(self, gain=sqrt(2))

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(image))
        return scores


def vgg16() -> tuple[nn.Module, Inputs]:
    """One image of 224x224."""
    stages = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
    return VGG(stages, size=224, hidden=4096, classes=1000), (torch.randn(1, 3, 224, 224),)


def vgg16_small() -> tuple[nn.Module, Inputs]:
    """Two stages of narrow convolutions on 16x16 pixels."""
    return VGG(((1, 8), (2, 16)), size=16, hidden=32, classes=10), (torch.randn(2, 3, 16, 16),)
