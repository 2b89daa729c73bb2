"""ResNet (He et al., 2015), the v1.5 form that torchvision and every benchmark use: the stride sits on the 3x3 convolution."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor, nn

from .spec import Inputs
from .weights import initialize


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    """Residual block: two 3x3 convolutions, or 1x1, 3x3, 1x1 with the outer width four times the inner (a bottleneck)."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = self.outputs(width, bottleneck)
        if bottleneck:
            first = [*_convolution(inputs, width, 1), nn.ReLU(), *_convolution(width, width, 3, stride)]
            last = _convolution(width, outputs, 1)
        else:
            first, last = _convolution(inputs, width, 3, stride), _convolution(width, outputs, 3)
        self.residual = nn.Sequential(*first, nn.ReLU(), *last)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(inputs, outputs, 1, stride))

    @staticmethod
    def outputs(width: int, bottleneck: bool) -> int:
        """Channels that leave a block of this inner width."""
        return width * 4 if bottleneck else width

    def forward(self, features: Tensor) -> Tensor:
        return torch.relu(self.residual(features) + self.shortcut(features))


class ResNet(nn.Module):
    """[N, 3, H, W] -> [N, classes] scores; `depths` blocks a stage, the first stage of width `width`, doubled at each next."""

    def __init__(self, depths: tuple[int, ...], bottleneck: bool, width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_convolution(3, width, 7, stride=2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
        blocks: list[Block] = []
        channels = width
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(Block(channels, width << stage, stride, bottleneck))
                channels = Block.outputs(width << stage, bottleneck)
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
        initialize(self, gain=sqrt(2))
        for block in blocks:  # trained networks weigh the residual lightly; at full weight, rounding errors grow block by block
            norm = block.residual[-1]
            assert isinstance(norm, nn.BatchNorm2d)
            nn.init.uniform_(norm.weight, 0.1, 0.4)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.blocks(self.stem(image)))
        return scores


def resnet50() -> tuple[nn.Module, Inputs]:
    """Bottleneck blocks 3, 4, 6, 3: 25.6 million parameters, one image of 224x224."""
    return ResNet((3, 4, 6, 3), bottleneck=True), (torch.randn(1, 3, 224, 224),)


def resnet50_small() -> tuple[nn.Module, Inputs]:
    """Two stages of one bottleneck each."""
    return ResNet((1, 1), bottleneck=True, width=8, classes=10), (torch.randn(2, 3, 32, 32),)


def resnet18() -> tuple[nn.Module, Inputs]:
    """Plain blocks 2, 2, 2, 2: 11.7 million parameters, one image of 224x224."""
    return ResNet((2, 2, 2, 2), bottleneck=False), (torch.randn(1, 3, 224, 224),)


def resnet18_small() -> tuple[nn.Module, Inputs]:
    """Two stages of one block each."""
    return ResNet((1, 1), bottleneck=False, width=8, classes=10), (torch.randn(2, 3, 32, 32),)
