"""Models with sliding windows: steps and prompts read no row of a cache outside of their windows, whatever is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import prefuse
import pytest
import torch

from .test_texts import continued, language_model

transformers = pytest.importorskip("transformers")

WINDOW, MAX_TOKENS = 8, 400
TEXT = [(7 * place * place + 3 * place) % 90 + 2 for place in range(100)]


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return language_model(
        "MistralForCausalLM", num_key_value_heads=2, sliding_window=WINDOW, max_position_embeddings=512, **sizes
    )


def test_steps_and_prompts_read_their_window(model: Any) -> None:
    """Rows before the step of a window's first key, and behind that of the last one, are NaN."""
    generator = prefuse.compile_generation(model, max_tokens=MAX_TOKENS, prefill=(16,), threads=2, cache=False)
    texts = []
    for is_poisoned in (False, True):
        session = generator.session()
        session.generate(TEXT[:-1], 0)
        if is_poisoned:
            for name in session._states.keys() - {"length"}:
                rows = session._states[name]
                rows[:, :, : (len(TEXT) - WINDOW) // 32 * 32], rows[:, :, 160:] = np.nan, np.nan
                session._states[name] = rows
        made = session.generate(TEXT[-1:], 10)
        more = session.generate(TEXT[:16], 5)  # of which a prompt's program reads all but one
        texts.append([*made[0].tolist(), *more[0].tolist()])
    assert len(set(texts[0])) > 4
    assert texts[0] == texts[1]
    with torch.no_grad():
        assert texts[0][:10] == continued(model, TEXT, 10)
