"""Models whose caches are not as others', and those that have none: texts as of transformers, or a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import prefuse
import pytest
import torch
from prefuse.runtime.errors import OptionError, UnsupportedModelError

pytest.importorskip("transformers")

from .test_texts import PROMPTS, continued, language_model


@pytest.mark.parametrize("max_tokens", [63, 64])
def test_windows_that_end_at_the_last_row_of_a_cache(max_tokens: int) -> None:
    """GPT-Neo counts the keys of its local attention from the end of a cache; here as long as its table of positions, or not."""
    sizes = {"max_position_embeddings": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
    model = language_model("GPTNeoForCausalLM", attention_types=[[["local", "global"], 1]], **sizes)
    generator = prefuse.compile_generation(model, max_tokens=max_tokens, prefill=(8,), batch=2, threads=2, cache=False)
    session = generator.session()
    for prompts in (PROMPTS, [[4, 4, 4], [9] * 11]):
        session.reset()
        made = np.hstack([session.generate(prompts, 9), session.generate([[], []], 12)])
        for row, prompt in zip(made, prompts, strict=True):
            np.testing.assert_array_equal(row, continued(model, prompt, 21))


def rwkv() -> Any:
    """It keeps states in a list of its own."""
    return language_model("RwkvForCausalLM", hidden_size=16, attention_hidden_size=16, num_hidden_layers=2)


@pytest.mark.parametrize(
    ("model", "kind"),
    [(lambda: torch.nn.Linear(2, 2), UnsupportedModelError), (lambda: 3, OptionError), (rwkv, UnsupportedModelError)],
)
def test_models_that_generate_no_text(model: Callable[[], object], kind: type[Exception]) -> None:
    with pytest.raises(kind):
        prefuse.compile_generation(model(), max_tokens=8)


def test_an_error_of_the_model_itself_is_named() -> None:
    model = language_model(n_positions=8, n_embd=16, n_layer=1, n_head=2)

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a state of the wrong shape")

    model.transformer.forward = fail
    with pytest.raises(UnsupportedModelError, match="cannot take one token: a state of the wrong shape"):
        prefuse.compile_generation(model, max_tokens=8)
