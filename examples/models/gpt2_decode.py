"""GPT-2 that writes a text: one token a call, with the keys and values of the tokens before it in buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .gpt2 import GPT2, Config, Layer


class Decoder(nn.Module):
    """Token [1, 1] at position [1] -> logits [1, 1, vocabulary] of the next one.

    The caches, two a layer of [1, heads, positions, width / heads], are buffers: a call writes one row a head into each, and
    reads those up to its own.
    """

    def __init__(self, model: GPT2, config: Config) -> None:
        super().__init__()
        self.model, self.config = model, config
        shape = (1, config.heads, config.positions, config.width // config.heads)
        for layer in range(config.layers):
            self.register_buffer(f"keys{layer}", torch.zeros(shape))
            self.register_buffer(f"values{layer}", torch.zeros(shape))

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        hidden = self.model.tokens(token) + self.model.positions(position)
        is_seen = (torch.arange(self.config.positions) <= position)[None, None, None]
        for number, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            parts = layer.project(layer.attention_norm(hidden)).chunk(3, dim=-1)
            query, key, value = (part.view(1, 1, layer.heads, -1).transpose(1, 2) for part in parts)
            keys, values = self.get_buffer(f"keys{number}"), self.get_buffer(f"values{number}")
            keys.index_copy_(2, position, key)
            values.index_copy_(2, position, value)
            context = functional.scaled_dot_product_attention(query, keys, values, attn_mask=is_seen)
            hidden = hidden + layer.merge(context.transpose(1, 2).flatten(2))
            activated = functional.gelu(layer.expand(layer.network_norm(hidden)), approximate="tanh")
            hidden = hidden + layer.contract(activated)
        return functional.linear(self.model.norm(hidden), self.model.tokens.weight)


def gpt2_decoder(config: Config | None = None) -> Decoder:
    """Of the 124M model unless a configuration is given, with random weights."""
    config = config or Config()
    return Decoder(GPT2(config), config)
