"""GPT-2 (Radford et al., 2019), the 124 million parameter size: pre-norm causal transformer, tied word embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from .spec import Inputs
from .weights import initialize, random_tokens


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of the 124M model unless changed."""

    vocabulary: int = 50_257
    positions: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12


class Layer(nn.Module):
    """Causal attention, then a GELU (tanh form) network four times as wide; each normalises its input and adds to it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.project(self.attention_norm(hidden)).chunk(3, dim=-1)
        query, key, value = (part.view(*part.shape[:2], self.heads, -1).transpose(1, 2) for part in parts)
        context = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.merge(context.transpose(1, 2).flatten(2))
        activated = functional.gelu(self.expand(self.network_norm(hidden)), approximate="tanh")
        output: Tensor = hidden + self.contract(activated)
        return output


class GPT2(nn.Module):
    """Tokens [N, T] -> logits [N, T, vocabulary] of every position."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        initialize(self, gain=1.0)
        nn.init.normal_(self.tokens.weight, std=1 / sqrt(config.width))  # also the output weights

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.tokens(input_ids) + self.positions(positions)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.linear(self.norm(hidden), self.tokens.weight)


def gpt2() -> tuple[nn.Module, Inputs]:
    """One text of 128 tokens."""
    config = Config()
    return GPT2(config), (random_tokens(config.vocabulary, 1, 128),)


def gpt2_small() -> tuple[nn.Module, Inputs]:
    """One layer of width 32 on 16 tokens."""
    config = Config(vocabulary=96, positions=32, width=32, layers=1, heads=4)
    return GPT2(config), (random_tokens(config.vocabulary, 1, 16),)
