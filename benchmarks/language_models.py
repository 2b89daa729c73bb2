"""Causal language models of `transformers` with random weights, in the formats that engines are compared in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_DEVIATION = 0.02  # of weights


def gpt2(*, is_small: bool = False) -> Any:
    """GPT-2 of 124M parameters, float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 0} if is_small else {}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes)).eval()


def llama(*, is_small: bool = False) -> Any:
    """A Llama of the sizes of TinyLlama, 1.1e9 parameters, in bfloat16; never in float32, which would be 4.4 GB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 96 if is_small else 32_000,
        "hidden_size": 32 if is_small else 2048,
        "intermediate_size": 64 if is_small else 5632,
        "num_hidden_layers": 1 if is_small else 22,
        "num_attention_heads": 4 if is_small else 32,
        "num_key_value_heads": 2 if is_small else 4,
        "max_position_embeddings": 64 if is_small else 2048,
    }
    with _without_initial_weights(torch.bfloat16):
        model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=_DEVIATION, generator=generator)
    return model


MODELS: dict[str, Callable[..., Any]] = {"gpt2": gpt2, "llama": llama}


def positions(model: Any) -> int:
    """Tokens that a text may have."""
    return int(model.config.max_position_embeddings)


@contextmanager
def _without_initial_weights(dtype: torch.dtype) -> Iterator[None]:
    """Modules are made in a type, without the draws of their own weights."""
    from transformers.initialization import no_init_weights

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with no_init_weights():
            yield
    finally:
        torch.set_default_dtype(before)
