"""A row of the zoo: a class of `transformers` in a small configuration with seeded random weights, or an example of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from prefuse.examples.models import MODELS
from torch import Tensor, nn

Settings = Mapping[str, Any]
Inputs = dict[str, Tensor]
Call = tuple[nn.Module, tuple[Tensor, ...], Inputs]  # a module, and positional and named inputs

_SEED = 20_26


@dataclass(frozen=True, slots=True)
class Architecture:
    """A class of `transformers` at a size that a test can afford; `inputs` makes the tensors of one call of its forward()."""

    name: str
    family: str
    model: str  # name of the class
    inputs: Callable[[], Inputs]
    settings: Settings

    def build(self, draw: int = 0) -> Call:
        """The module in evaluation mode and its inputs; equal bits at every call for the same draw of weights and inputs."""
        import transformers

        kind = getattr(transformers, self.model)
        with torch.random.fork_rng(devices=()), torch.no_grad():
            torch.manual_seed(_SEED + draw)
            module = kind(kind.config_class(**self.settings))
            inputs = self.inputs()
            _randomize(module.eval())
            _calibrate(module, inputs)
            return module.eval().requires_grad_(False), (), inputs


@dataclass(frozen=True, slots=True)
class Example:
    """A model of our own examples, the small variant."""

    name: str
    model: str
    family: str = "our examples"

    def build(self, draw: int = 0) -> Call:
        """The module and its inputs, of which there is one draw."""
        module, inputs = MODELS[self.model].build(small=True)
        return module, inputs, {}


@dataclass(frozen=True, slots=True)
class Family:
    """Architectures that take the same inputs; calling it makes one, with settings beside the common ones."""

    name: str
    inputs: Callable[[], Inputs]
    common: Settings

    def __call__(self, name: str, model: str, **settings: Any) -> Architecture:
        return Architecture(name, self.name, model, self.inputs, {**self.common, **settings})


def _randomize(module: nn.Module) -> None:
    """Weights with which every part of the model matters: as initialised, biases are 0, scales 1 and all logits alike."""
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            fan_in = parameter[0].numel()
            parameter.normal_(std=fan_in**-0.5)
        elif parameter.is_floating_point():
            parameter.add_(0.1 * torch.randn_like(parameter))


def _calibrate(module: nn.Module, inputs: Inputs) -> None:
    """Batch-norm statistics of the inputs themselves, so that activations stay of order one through any depth.

    Images must be large enough that the last planes have several positions: the statistics of two numbers alone blow rounding up.
    """
    norms = [layer for layer in module.modules() if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d))]
    for norm in norms:
        norm.train().momentum = 1.0
    if norms:
        module(**inputs)
