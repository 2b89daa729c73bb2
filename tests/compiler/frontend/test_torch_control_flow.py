"""PyTorch modules whose shapes or control flow depend on data, as torch computes them."""

from __future__ import annotations

from typing import Any

import prefuse
import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop


class Selected(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[x > 0] * 2


class Nonzero(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x > 0)


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        return result


class Growth(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loop: Any = while_loop
        _, result = loop(lambda i, x: x.sum() < 100, lambda i, x: (i + 1, x * 1.5 + 1), (torch.tensor(0), x))
        assert isinstance(result, torch.Tensor)
        return result


class Bags(nn.Module):
    """torch's exporter writes a loop over a sequence for it, with branches that it has decided itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 8, mode="mean")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.table((10 * x.abs()).long().clamp(max=19))
        return result


@pytest.mark.parametrize("module", [Selected, Nonzero, Branch, Growth, Bags])
def test_as_torch_computes_it(module: type[nn.Module]) -> None:
    torch.manual_seed(0)
    eager = module().eval()
    net = prefuse.compile(eager, cache=False)
    for x in (torch.randn(4, 5), torch.ones(4, 5), -torch.ones(4, 5)):
        found = net(x)
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, eager(x))
