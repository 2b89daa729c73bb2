"""What tokens are chosen by, and how likely they were: seeds, penalties, biases, ends of the model; against torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import prefuse
import pytest
import torch
from prefuse.runtime.generation.generator import Generator

from .test_texts import MAX_TOKENS, PROMPTS, continued, language_model

pytest.importorskip("transformers")

DRAWN: Any = {"temperature": 1.5, "top_p": 0.95}


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return language_model(n_positions=64, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def generator(gpt2: Any) -> Generator:
    return prefuse.compile_generation(gpt2, max_tokens=MAX_TOKENS, prefill=(8,), batch=2, threads=2, cache=False)


def log_softmax(model: Any, tokens: list[int]) -> np.ndarray:
    """Of the logits behind each token, float32 [tokens, vocabulary]."""
    with torch.no_grad():
        found: np.ndarray = model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()
    return found


def test_a_text_is_the_same_in_one_call_and_in_many(generator: Generator) -> None:
    """A seed's noise is of the places of a text, not of the steps of a call: else calls of one seed would draw alike."""
    expected = generator.generate(PROMPTS, 20, seed=7, **DRAWN)
    session = generator.session()
    parts = [session.generate(PROMPTS, 1, seed=7, **DRAWN)]
    parts += [session.generate([[], []], n, seed=7, **DRAWN) for n in (1, 1, 6, 11)]
    np.testing.assert_array_equal(np.concatenate(parts, 1), expected)
    np.testing.assert_array_equal(np.stack(list(generator.stream(PROMPTS, 20, seed=7, **DRAWN)), 1), expected)


def test_a_seed_for_each_draws_the_same_beside_any_other(generator: Generator) -> None:
    one = generator.generate(PROMPTS, 9, seed=[3, 4], **DRAWN)
    other = generator.generate(PROMPTS[::-1], 9, seed=np.array([4, 3]), **DRAWN)
    np.testing.assert_array_equal(one, other[::-1])
    alike = generator.generate([PROMPTS[0], PROMPTS[0]], 9, seed=3, **DRAWN)
    assert (alike[0] != alike[1]).any(), "one seed for all draws other tokens for each"
    np.testing.assert_array_equal(alike[0], generator.generate([PROMPTS[0]], 9, seed=[3], **DRAWN)[0])


def test_penalties_are_those_of_transformers(gpt2: Any, generator: Generator, tmp_path: Path) -> None:
    """Tokens of prompts and those made, also by calls before, in forks and in files."""
    with torch.no_grad():
        expected = [
            gpt2.generate(
                torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0, repetition_penalty=2.5
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]  # fmt: skip
    assert expected != [continued(gpt2, prompt, 20) for prompt in PROMPTS]
    np.testing.assert_array_equal(generator.generate(PROMPTS, 20, repetition_penalty=2.5), expected)
    session = generator.session()
    first = session.generate(PROMPTS, 8, repetition_penalty=2.5)
    np.testing.assert_array_equal(first, np.array(expected)[:, :8])
    session.save(tmp_path / "text")
    loaded = generator.session()
    loaded.load(tmp_path / "text")
    for one in (session.fork(), loaded, session):
        np.testing.assert_array_equal(one.generate([[], []], 12, repetition_penalty=2.5), np.array(expected)[:, 8:])
    session.rewind([len(prompt) + 2 for prompt in PROMPTS], first[:, 2:3].tolist())
    np.testing.assert_array_equal(session.generate([[], []], 5, repetition_penalty=2.5), first[:, 3:])
    one_each = generator.generate(PROMPTS, 20, repetition_penalty=[2.5, 1.0])
    np.testing.assert_array_equal(one_each, [expected[0], continued(gpt2, PROMPTS[1], 20)])


def test_banned_tokens_never_come(gpt2: Any, generator: Generator) -> None:
    """The likeliest of the others does; by a dictionary, by an array for all, and for each."""
    texts = [continued(gpt2, prompt, 20) for prompt in PROMPTS]
    banned = sorted({token for text in texts for token in text[:5]})
    bias = np.zeros(96, np.float32)
    bias[banned] = -np.inf
    made = generator.generate(PROMPTS, 20, logit_bias=dict.fromkeys(banned, -np.inf))
    assert not set(made.ravel().tolist()) & set(banned)
    first = [(log_softmax(gpt2, prompt)[-1] + bias).argmax() for prompt in PROMPTS]
    assert made[:, 0].tolist() == first
    np.testing.assert_array_equal(generator.generate(PROMPTS, 20, logit_bias=bias), made)
    each = generator.generate(PROMPTS, 20, logit_bias=torch.from_numpy(np.stack([np.zeros_like(bias), bias])))
    np.testing.assert_array_equal(each, [texts[0], made[1]])
    forced = generator.generate(PROMPTS, 5, logit_bias={np.int64(33): 1000}, **DRAWN)  # type: ignore[dict-item]
    np.testing.assert_array_equal(forced, np.full((2, 5), 33))


def test_a_least_probability(generator: Generator) -> None:
    """Those as likely as the likeliest alone are it; of 0 all are left."""
    np.testing.assert_array_equal(generator.generate(PROMPTS, 9, temperature=2.0, min_p=1.0), generator.generate(PROMPTS, 9))
    one = generator.generate(PROMPTS, 9, temperature=2.0, seed=3)
    two = generator.generate(PROMPTS, 9, temperature=2.0, seed=3, min_p=[0.0, 0.0])
    np.testing.assert_array_equal(one, two)


def test_log_probabilities_are_those_of_torch(gpt2: Any, generator: Generator) -> None:
    """Of drawn tokens by the model's logits, whatever the settings; 0 behind an end."""
    made, told = generator.generate(PROMPTS, [12, 5], logprobs=True, seed=2, **DRAWN)
    assert told.dtype == np.float32
    for row, (prompt, n) in enumerate(zip(PROMPTS, (12, 5), strict=True)):
        tokens = made[row, :n].tolist()
        whole = log_softmax(gpt2, [*prompt, *tokens])[len(prompt) - 1 : -1]
        np.testing.assert_allclose(told[row, :n], whole[range(n), tokens], atol=2e-4)
        assert not told[row, n:].any()
    none = generator.generate(np.zeros((0, 3), np.int64), 4, logprobs=True)
    assert [one.shape for one in none] == [(0, 4), (0, 4)]


def test_scores_are_those_of_torch(gpt2: Any, generator: Generator) -> None:
    session = generator.session()
    found = session.score(PROMPTS)
    for prompt, score in zip(PROMPTS, found, strict=True):
        assert np.isnan(score[0])
        whole = log_softmax(gpt2, prompt)[:-1]
        np.testing.assert_allclose(score[1:], whole[range(len(prompt) - 1), prompt[1:]], atol=2e-4)
    made, told = session.generate([[], []], 6, logprobs=True)
    np.testing.assert_array_equal(made, [continued(gpt2, prompt, 6) for prompt in PROMPTS])
    other = generator.session()
    other.generate(PROMPTS, 0)
    one, two = other.score(made.tolist())
    np.testing.assert_allclose([one, two], told, atol=2e-4)
    (only,) = other.score([[8, 9]])  # the other text stays
    assert only.shape == (2,)
    assert other.waiting[1] == [made[1, -1]]


def test_a_bias_may_be_any_tensor(generator: Generator) -> None:
    """In bfloat16, or with a gradient."""
    bias = np.zeros(96, np.float32)
    bias[[7, 9]] = 200, 100
    expected = generator.generate(PROMPTS, 2, logit_bias=bias)
    tensor = torch.tensor(bias)
    given: list[Any] = [tensor.to(torch.bfloat16), torch.nn.Parameter(tensor), {7: torch.nn.Parameter(tensor[7])}]
    for one in given:
        np.testing.assert_array_equal(generator.generate(PROMPTS, 2, logit_bias=one), expected)


@pytest.mark.filterwarnings("error")
def test_infinite_logits_share_all_probability(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is scored as in what is made."""
    session = generator.session()
    session.generate(PROMPTS, 1)

    def read() -> None:
        session._logits[:], session._waiting = 0, [[], []]
        session._logits[:, [3, 5]] = np.inf

    monkeypatch.setattr(session, "_read_prompts", read)
    (likely,), (unlikely,) = session.score([[5], [4]])
    assert unlikely < -1e38
    made, told = session.generate([[1], [1]], 1, logprobs=True)
    np.testing.assert_array_equal(made, [[3], [3]])
    np.testing.assert_allclose([*told[:, 0], likely], [-np.log(2)] * 3, rtol=1e-6)


def test_the_models_own_ends(gpt2: Any, tmp_path: Path) -> None:
    """Of its generation_config, where a call names none; from a file, too. None beyond the vocabulary."""
    texts = [continued(gpt2, prompt, 20) for prompt in PROMPTS]
    end = texts[0][6]
    place = texts[0].index(end)
    config = gpt2.generation_config
    before, config.eos_token_id = config.eos_token_id, [end, 4000]
    try:
        generator = prefuse.compile_generation(gpt2, max_tokens=MAX_TOKENS, prefill=(8,), cache=False)
    finally:
        config.eos_token_id = before
    generator.save(tmp_path / "net")
    for one in (generator, prefuse.load_generator(tmp_path / "net")):
        assert one.limits.ends == (end,)
        assert one.generate(PROMPTS[0], 20)[0].tolist() == texts[0][: place + 1]
        assert one.generate(PROMPTS[0], 20, stop=())[0].tolist() == texts[0]
        assert one.generate(PROMPTS[0], 20, stop=[texts[0][0]])[0].tolist() == texts[0][:1]
