"""ViT-B/16 (Dosovitskiy et al., 2020): a pre-norm transformer over 16x16 patches and one class token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .spec import Inputs
from .weights import initialize


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of ViT-B/16 at 224x224 pixels unless changed."""

    image: int = 224
    patch: int = 16
    width: int = 768
    layers: int = 12
    heads: int = 12
    classes: int = 1000


class Layer(nn.Module):
    """Attention over all patches, then a GELU network four times as wide; each normalises its input and adds to it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm, self.network_norm = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.project(self.attention_norm(hidden)).view(*hidden.shape[:2], 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        context = functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.merge(context.transpose(1, 2).flatten(2))
        output: Tensor = hidden + self.network(self.network_norm(hidden))
        return output


class ViT(nn.Module):
    """[N, 3, image, image] -> [N, classes] scores."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        patches = (config.image // config.patch) ** 2
        self.patches = nn.Conv2d(3, config.width, config.patch, stride=config.patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, config.width))
        self.positions = nn.Parameter(torch.randn(1, patches + 1, config.width) / 2)
        self.layers = nn.Sequential(*(Layer(config) for _ in range(config.layers)))
        self.norm = nn.LayerNorm(config.width, eps=1e-6)
        self.classifier = nn.Linear(config.width, config.classes)
        initialize(self, gain=1.0)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patches(image).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.class_token.expand(image.shape[0], -1, -1), patches], dim=1) + self.positions
        scores: Tensor = self.classifier(self.norm(self.layers(hidden))[:, 0])
        return scores


def vit_b16() -> tuple[nn.Module, Inputs]:
    """86 million parameters, one image of 224x224."""
    return ViT(Config()), (torch.randn(1, 3, 224, 224),)


def vit_b16_small() -> tuple[nn.Module, Inputs]:
    """One layer of width 32 on four patches."""
    return ViT(Config(image=32, width=32, layers=1, heads=4, classes=10)), (torch.randn(2, 3, 32, 32),)
