"""Random weights that keep activations of order one at any depth.

PyTorch's defaults shrink them layer by layer, down to denormals in a deep vision network: slow to run, and a comparison of
near-zeros proves nothing.
"""

from __future__ import annotations

from math import prod, sqrt

import torch
from torch import nn

_BIASED = nn.Conv2d | nn.ConvTranspose2d | nn.Linear | nn.BatchNorm2d | nn.LayerNorm


def initialize(module: nn.Module, gain: float) -> None:
    """Draw every parameter of the layers below `module`. `gain` is sqrt(2) where ReLU follows the layers, else 1."""
    for layer in module.modules():
        match layer:
            case nn.Conv2d():
                _normal(layer.weight, gain / sqrt(prod(layer.weight.shape[1:])))
            case nn.ConvTranspose2d():
                # With the kernel as wide as the stride, each output pixel sums over the input channels alone.
                _normal(layer.weight, gain / sqrt(layer.in_channels))
            case nn.Linear():
                _normal(layer.weight, gain / sqrt(layer.in_features))
            case nn.GRU() | nn.GRUCell():
                for weight in layer.parameters():
                    _normal(weight, 0.1 if weight.ndim == 1 else 1 / sqrt(weight.shape[-1]))
            case nn.BatchNorm2d() | nn.LayerNorm():
                nn.init.uniform_(layer.weight, 0.5, 1.5)
        if isinstance(layer, _BIASED) and layer.bias is not None:
            _normal(layer.bias, 0.1)


def random_tokens(vocabulary: int, *shape: int, lowest: int = 0) -> torch.Tensor:
    """Token numbers in [lowest, vocabulary)."""
    return torch.randint(lowest, vocabulary, shape)


def _normal(parameter: torch.Tensor, deviation: float) -> None:
    nn.init.normal_(parameter, std=deviation)
