"""Compile a PyTorch module: it is called as before, and compiled at its first call for each input signature."""

from __future__ import annotations

import prefuse
import torch
from torch import Tensor, nn


class Classifier(nn.Module):
    """Features [N, 64] to scores and their probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        scores = self.layers(features)
        return {"scores": scores, "probabilities": scores.softmax(dim=-1)}


def main() -> None:
    """Compile, call, compare."""
    torch.manual_seed(0)
    module = Classifier().eval()
    net = prefuse.compile(module)  # at once
    features = torch.randn(8, 64)
    actual = net(features)  # exported, compiled and run: torch in, torch out, in the module's own structure
    assert isinstance(actual, dict)
    with torch.no_grad():
        expected = module(features)
    for name, tensor in expected.items():
        error = (actual[name] - tensor).norm() / tensor.norm()
        print(f"{name}: shape {list(tensor.shape)}, relative error {error:.1e}")
        assert error < 1e-5
    net(torch.randn(1, 64))  # another shape, another program; the next calls of either shape only run
    print(net.report())


if __name__ == "__main__":
    main()
