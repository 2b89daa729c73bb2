"""BERT (Devlin et al., 2018) and RoBERTa (Liu et al., 2019) encoders: post-norm transformers with a pooled first token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from .spec import Inputs
from .weights import initialize, random_tokens


@dataclass(frozen=True, slots=True)
class Config:
    """Sizes of an encoder. `padding` is RoBERTa's padding token, from which it counts positions; BERT has none."""

    vocabulary: int
    positions: int
    token_types: int
    width: int = 768
    layers: int = 12
    heads: int = 12
    epsilon: float = 1e-12
    padding: int | None = None


class Layer(nn.Module):
    """Attention, then a GELU network four times as wide; each added to its input and normalised."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.query, self.key, self.value, self.merge = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm = nn.LayerNorm(width, eps=config.epsilon)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.output_norm = nn.LayerNorm(width, eps=config.epsilon)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        query, key, value = (self._split(project(hidden)) for project in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / sqrt(query.shape[-1]) + bias
        context = (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)
        hidden = self.attention_norm(hidden + self.merge(context))
        normed: Tensor = self.output_norm(hidden + self.contract(functional.gelu(self.expand(hidden))))
        return normed

    def _split(self, hidden: Tensor) -> Tensor:
        """[N, T, width] -> [N, heads, T, width / heads]."""
        return hidden.view(*hidden.shape[:2], self.heads, -1).transpose(1, 2)


class Encoder(nn.Module):
    """Tokens and their mask [N, T] (and BERT's segments) -> hidden states [N, T, width] and the pooled state [N, width]."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.positions, config.width)
        self.token_types = nn.Embedding(config.token_types, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.epsilon)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.pooler = nn.Linear(config.width, config.width)
        initialize(self, gain=1.0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(input_ids)
        hidden = self.tokens(input_ids) + self.token_types(token_type_ids) + self.positions(self._position_ids(input_ids))
        hidden = self.norm(hidden)
        bias = (1.0 - attention_mask[:, None, None, :].to(hidden.dtype)) * torch.finfo(hidden.dtype).min
        for layer in self.layers:
            hidden = layer(hidden, bias)
        return hidden, torch.tanh(self.pooler(hidden[:, 0]))

    def _position_ids(self, input_ids: Tensor) -> Tensor:
        if self.config.padding is None:
            return torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        real = (input_ids != self.config.padding).to(torch.int64)
        return real.cumsum(dim=1) * real + self.config.padding


BERT_BASE = Config(vocabulary=30_522, positions=512, token_types=2)
ROBERTA_BASE = Config(vocabulary=50_265, positions=514, token_types=1, epsilon=1e-5, padding=1)


def small(config: Config) -> Config:
    """One layer of width 32, for texts of 32 tokens."""
    return replace(config, vocabulary=96, positions=32, width=32, layers=1, heads=4)


def bert(config: Config, tokens: int) -> tuple[nn.Module, Inputs]:
    """An encoder, and a sentence pair of so many tokens."""
    segments = (torch.arange(tokens) >= tokens // 2).to(torch.int64)[None]
    return Encoder(config), (random_tokens(config.vocabulary, 1, tokens), _mask(tokens), segments)


def _roberta(config: Config, tokens: int) -> tuple[nn.Module, Inputs]:
    assert config.padding is not None
    words, mask = random_tokens(config.vocabulary, 1, tokens, lowest=config.padding + 1), _mask(tokens)
    return Encoder(config), (words.where(mask == 1, config.padding), mask)


def _mask(tokens: int) -> Tensor:
    """Ones, and zeros for the padding in the last eighth."""
    return (torch.arange(tokens) < tokens - tokens // 8).to(torch.int64)[None]


def bert_base() -> tuple[nn.Module, Inputs]:
    """110 million parameters, one sentence pair of 128 tokens."""
    return bert(BERT_BASE, tokens=128)


def bert_base_small() -> tuple[nn.Module, Inputs]:
    """One layer of width 32 on 16 tokens."""
    return bert(small(BERT_BASE), tokens=16)


def roberta_base() -> tuple[nn.Module, Inputs]:
    """125 million parameters, one text of 128 tokens."""
    return _roberta(ROBERTA_BASE, tokens=128)


def roberta_base_small() -> tuple[nn.Module, Inputs]:
    """One layer of width 32 on 16 tokens."""
    return _roberta(small(ROBERTA_BASE), tokens=16)
