"""A case of a classic pattern of fusion: a small module, and the groups that it should become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

IMAGE = ((1, 4, 6, 6),)
SEQUENCE = ((1, 4, 7),)
VOLUME = ((1, 4, 3, 4, 3),)
ROWS = ((3, 8),)
TOKENS = ((2, 5, 8),)


class Net(nn.Module):
    """Layers by name, and what is done with them."""

    def __init__(self, compute: Callable[..., Any], layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.compute = compute
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.compute(self, *inputs)


@dataclass(frozen=True)
class Case:
    """A module, the shapes of its inputs, the groups that it should become, and a part of what some pass should refuse."""

    name: str
    compute: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    groups: str  # kernels in order of execution: the operators of each, joined by underscores
    refusal: str
    layers: dict[str, nn.Module]

    def build(self) -> tuple[Net, tuple[Tensor, ...]]:
        """The module in inference mode, with weights and statistics that are not those of a fresh layer, and inputs."""
        generator = torch.Generator().manual_seed(0)
        net = Net(self.compute, self.layers).eval().requires_grad_(False)
        for layer in net.modules():
            low = 0.5 if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) else -0.5
            for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.uniform_(low, low + 1, generator=generator)
        return net, tuple(torch.randn(shape, generator=generator) for shape in self.shapes)


def case(
    name: str,
    compute: Callable[..., Any],
    shapes: tuple[tuple[int, ...], ...],
    groups: str,
    refusal: str = "",
    **layers: nn.Module,
) -> Case:
    return Case(name, compute, shapes, groups, refusal, layers)
