"""Models whose caches are not as others', and those that have none: texts as of transformers, or a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import prefuse
import pytest
import torch
from click.testing import CliRunner
from prefuse.compiler.cli import cli
from prefuse.runtime.errors import OptionError, UnsupportedModelError

pytest.importorskip("transformers")

from prefuse.compiler.generation.causal_step import _masks_by_position
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .test_texts import PROMPTS, continued, language_model

THEIRS = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


@pytest.mark.parametrize("max_tokens", [63, 64])
def test_windows_that_end_at_the_last_row_of_a_cache(max_tokens: int) -> None:
    """GPT-Neo counts the keys of its local attention from the end of a cache; here as long as its table of positions, or not."""
    sizes = {"max_position_embeddings": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
    model = language_model("GPTNeoForCausalLM", attention_types=[[["local", "global"], 1]], **sizes)
    generator = prefuse.compile_generation(model, max_tokens=max_tokens, prefill=(8,), batch=2, threads=2, cache=False)
    assert generator.report().startswith("slow: attention reads copies of its caches")
    session = generator.session()
    for prompts in (PROMPTS, [[4, 4, 4], [9] * 11]):
        session.reset()
        made = np.hstack([session.generate(prompts, 9), session.generate([[], []], 12)])
        for row, prompt in zip(made, prompts, strict=True):
            np.testing.assert_array_equal(row, continued(model, prompt, 21))


@pytest.mark.parametrize(
    ("window", "max_tokens", "prefill", "turns"), [(4, 50, (32,), [45]), (64, 63, (8, 32), [40, 20]), (4, 63, (8, 32), [40, 20])]
)
def test_pieces_that_end_at_the_end_of_the_caches(
    window: int, max_tokens: int, prefill: tuple[int, ...], turns: list[int]
) -> None:
    """What fills a piece up is never beyond the end, from which GPT-Neo counts: no key is lost."""
    sizes = {"max_position_embeddings": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": window}
    model = language_model("GPTNeoForCausalLM", attention_types=[[["global", "local"], 1]], **sizes)
    session = prefuse.compile_generation(model, max_tokens=max_tokens, prefill=prefill, threads=2, cache=False).session()
    text = list[int]()
    for turn, count in enumerate(turns):
        prompt = [(11 * i * i + 7 * turn + 3) % 96 for i in range(count)]
        made = session.generate(prompt, 2)[0].tolist()
        text += prompt
        assert made == continued(model, text, 2)
        text += made


def test_positions_that_a_longer_text_turns_otherwise() -> None:
    """What transformers turns by the longest text of a batch would depend on the other texts, and on how a prompt is cut."""
    factors = [1.0, 1.5, 2.0, 4.0]
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors[::-1]}
    model = language_model(
        "Phi3ForCausalLM",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        pad_token_id=0,
        rope_parameters={**rope, "original_max_position_embeddings": 32},
    )
    with pytest.raises(OptionError, match="more than 32 tokens; give at most 32"):
        prefuse.compile_generation(model, max_tokens=33)
    made = prefuse.compile_generation(model, max_tokens=32, prefill=(8,), cache=False).generate([5, 9, 2], 12)
    assert made[0].tolist() == continued(model, [5, 9, 2], 12)


def test_models_of_other_threads_keep_their_masks() -> None:
    model = language_model(n_positions=32, n_embd=16, n_layer=1, n_head=2)
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        wanted = model(tokens, attention_mask=torch.tensor([[0, 1, 1, 1, 1]])).logits
        with _masks_by_position(), _masks_by_position():
            found = model(tokens, attention_mask=torch.tensor([[0, 1, 1, 1, 1]])).logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is THEIRS


def test_a_model_in_training_stays_so_and_its_file_is_inspected(tmp_path: Path) -> None:
    model = language_model(n_positions=32, n_embd=16, n_layer=1, n_head=2).train()
    model.transformer.h.eval()
    generator = prefuse.compile_generation(model, max_tokens=8, prefill=(4,), cache=False)
    generator.save(tmp_path / "model.prefuse")
    said = CliRunner().invoke(cli, ["inspect", str(tmp_path / "model.prefuse")], catch_exceptions=False)
    assert said.output.split() == generator.report().split()
    assert model.training
    assert model.transformer.drop.training
    assert not model.transformer.h[0].training


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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"calibration": []}, "calibration: is no option here; leave it out"),
        ({"precision": "int8"}, "no generator is made in 'int8'"),
    ],
)
def test_what_compile_alone_takes(option: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        prefuse.compile_generation(torch.nn.Linear(2, 2), max_tokens=8, **option)


def test_an_error_of_the_model_itself_is_named() -> None:
    model = language_model(n_positions=8, n_embd=16, n_layer=1, n_head=2)

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a state of the wrong shape")

    model.transformer.forward = fail
    with pytest.raises(UnsupportedModelError, match="cannot take one token: a state of the wrong shape"):
        prefuse.compile_generation(model, max_tokens=8)
