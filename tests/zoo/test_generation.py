"""The zoo's decoders continue texts as transformers does, token for token: one a day, all with PREFUSE_TEST_WHOLE=1."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import prefuse
import pytest
import torch

from ..sample import every
from .architecture import Architecture

pytest.importorskip("transformers")

from .text import DECODERS, EXPERTS, HYBRIDS, RECURRENCES

TOKENS = 16
PROMPTS = [[5, 90, 3, 17, 44, 8, 61, 29, 2, 70, 11], [9, 33, 71]]
GENERATING = {one.name: one for one in (*DECODERS, *EXPERTS, *RECURRENCES[:3], *HYBRIDS) if one.family != "encoder-decoder"}
GENERATING = {name: one for name, one in GENERATING.items() if one.model.endswith(("ForCausalLM", "LMHeadModel"))}


def remembering(architecture: Architecture) -> Architecture:
    return replace(architecture, settings={**architecture.settings, "use_cache": True})


@pytest.mark.daily
@pytest.mark.parametrize("name", every(len(GENERATING), list(GENERATING)))
def test_texts_of_the_zoo(name: str) -> None:
    module, _, _ = remembering(GENERATING[name]).build()
    generator = prefuse.compile_generation(module, max_tokens=40, prefill=(8,), batch=2, cache=False)
    made = generator.generate(PROMPTS, TOKENS, stop=())
    for row, prompt in zip(made, PROMPTS, strict=True):
        with torch.no_grad():
            text = module.generate(  # type: ignore[operator]
                torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        np.testing.assert_array_equal(row, text[0, len(prompt) :].numpy())


def test_most_of_the_zoo_generates() -> None:
    assert len(GENERATING) >= 52
