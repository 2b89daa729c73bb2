"""LeNet-5 (LeCun et al., 1998): digits of 32x32 pixels, tanh and average pooling as in the paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .spec import Inputs
from .weights import initialize


class LeNet5(nn.Module):
    """[N, 1, 32, 32] -> [N, 10] scores; `width` scales the layers of the paper (1.0: 6, 16, 120, 84)."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        c1, c3, c5, f6 = (max(1, round(size * width)) for size in (6, 16, 120, 84))
        self.features = nn.Sequential(
            *(nn.Conv2d(1, c1, 5), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(c1, c3, 5), nn.Tanh(), nn.AvgPool2d(2)),
            *(nn.Conv2d(c3, c5, 5), nn.Tanh()),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(c5, f6), nn.Tanh(), nn.Linear(f6, 10))
        initialize(self, gain=1.5)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(image))
        return scores


def lenet5() -> tuple[nn.Module, Inputs]:
    """The paper's sizes."""
    return LeNet5(), (torch.randn(1, 1, 32, 32),)


def lenet5_small() -> tuple[nn.Module, Inputs]:
    """Half the channels."""
    return LeNet5(width=0.5), (torch.randn(2, 1, 32, 32),)
