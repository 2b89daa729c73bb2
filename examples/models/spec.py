"""What a model of the zoo is: two recipes, full size and small, built the same way every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Inputs = tuple[Tensor, ...]
Recipe = Callable[[], tuple[nn.Module, Inputs]]

_SEED = 20_26


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A named model. `full` is the published architecture, `small` the same code at a size that tests can afford."""

    name: str
    full: Recipe
    small: Recipe

    def build(self, small: bool = False) -> tuple[nn.Module, Inputs]:
        """The module in inference mode and example inputs; see `seeded`."""
        return seeded(self.small if small else self.full)


def seeded(recipe: Recipe) -> tuple[nn.Module, Inputs]:
    """What a recipe makes, in inference mode: equal bits at every call, the global random state untouched.

    Batch-norm statistics are those of the example inputs, so that activations stay of order one through any depth.
    """
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(_SEED)
        module, inputs = recipe()
        _calibrate_batch_norm(module, inputs)
    return module.eval().requires_grad_(False), inputs


def _calibrate_batch_norm(module: nn.Module, inputs: Inputs) -> None:
    norms = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)]
    if not norms:
        return
    module.eval()
    for norm in norms:
        norm.train()
        norm.momentum = 1.0  # the running statistics become those of this batch
    module(*inputs)
    for norm in norms:
        norm.momentum = 0.1
