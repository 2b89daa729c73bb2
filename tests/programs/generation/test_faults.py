"""What a call of `generate` and the options of a generator may not be: each with a reason, and nothing changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import prefuse
import pytest
import torch
from prefuse.runtime.errors import InputError, OptionError
from prefuse.runtime.generation.generator import Generator

from .test_texts import MAX_TOKENS, PROMPTS, language_model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return language_model(n_positions=64, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def generator(gpt2: Any) -> Generator:
    return prefuse.compile_generation(gpt2, max_tokens=MAX_TOKENS, prefill=(8,), batch=2, threads=2, cache=False)


@pytest.fixture(scope="module")
def texts(generator: Generator) -> np.ndarray:
    return generator.generate(PROMPTS, 3)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an empty prompt": ({"tokens": [[1], []]}, "sequence 1: an empty prompt"),
    "three sequences": ({"tokens": [[1], [2], [3]]}, "3 sequences given, the generator takes 2"),
    "no sequences": ({"tokens": np.zeros(0, np.int64)}, "0 sequences given"),
    "three counts": ({"n": [1, 2, 3]}, "n: 3 numbers given; give one, or one for each of 2"),
    "a negative count": ({"n": [1, -1]}, "n: -1 new tokens"),
    "a large count": ({"n": [1, 99]}, "n: 99 new tokens"),
    "no such setting": ({"temprature": 1.0}, "temprature: no such setting; did you mean 'temperature'"),
    "a negative least probability": ({"min_p": -0.1}, "min_p: -0.1 given"),
    "a penalty of nothing": ({"repetition_penalty": 0}, "repetition_penalty: 0 given"),
    "a bias of no token": ({"logit_bias": {96: 1.0}}, "logit_bias: there is no token 96"),
    "a bias of some": ({"logit_bias": [1.0, 2.0]}, r"logit_bias: an array \[2\] given"),
    "a bias that is no number": ({"logit_bias": {3: "much"}}, "logit_bias: not all that is given are numbers"),
    "a bias that has a gradient in a list": ({"logit_bias": [torch.ones(96, requires_grad=True)] * 2}, "logit_bias: not all"),
    "a bias on no device": ({"logit_bias": torch.ones(96, device="meta")}, "logit_bias: a torch.strided tensor on meta"),
    "an infinite bias": ({"logit_bias": {3: float("inf")}}, "logit_bias: a number that is NaN or inf"),
    "a ban of all tokens": ({"logit_bias": np.full(96, -np.inf)}, "logit_bias: no token is left"),
    "three seeds": ({"seed": [1, 2, 3]}, "seed: 3 seeds given"),
    "no whole numbers": ({"tokens": [[1.5], [2]]}, "whole numbers"),
    "text": ({"tokens": "ab"}, "whole numbers"),
    "nothing": ({"tokens": None}, "whole numbers"),
    "an array without dimensions": ({"tokens": np.array(1)}, "whole numbers"),
    "half a stop": ({"stop": 2.5}, "stop: there is no token 2.5"),
    "no stop at all": ({"stop": [None]}, "stop: there is no token None"),
    "no such token": ({"tokens": [[1], [96]]}, "there is no token 96"),
    "a negative token": ({"tokens": np.array([[1], [-1]])}, "there is no token -1"),
    "fewer than none": ({"n": -1}, "-1 new tokens"),
    "half a token": ({"n": 1.5}, "1.5 new tokens"),
    "too many": ({"n": 99}, "the caches hold 40"),
    "floating point": ({"tokens": np.ones((2, 3), np.float32)}, "whole numbers"),
    "flags": ({"tokens": np.ones((2, 3), bool)}, "whole numbers"),
    "three dimensions": ({"tokens": np.ones((2, 3, 1), np.int64)}, "whole numbers"),
    "rows without tokens": ({"tokens": np.ones((2, 0), np.int64)}, "sequence 0: an empty prompt"),
    "a prompt longer than the cache": ({"tokens": [[1], [2] * 41], "n": 0}, "sequence 1: .*41 of the prompt.*the caches hold 40"),
    "too many for nothing": ({"tokens": np.ones((0, 3), np.int64), "n": 10**30}, "the caches hold 40"),
    "no temperature at all": ({"temperature": None}, "temperature: None is no number"),
    "an infinite temperature": ({"temperature": float("inf")}, "temperature: inf given"),
    "fewer than no tokens of k": ({"top_k": -1}, "top_k: -1 given"),
    "too much probability": ({"top_p": 1.5}, "top_p: 1.5 given"),
    "a negative temperature": ({"temperature": -1.0}, "temperature: -1 given"),
    "no temperature": ({"temperature": float("nan")}, "temperature"),
    "three temperatures": ({"temperature": [1.0, 2.0, 3.0]}, "one for each of 2"),
    "half a token of k": ({"top_k": 1.5}, "top_k: 1.5 given"),
    "no probability": ({"top_p": 0.0}, "top_p: 0 given"),
    "text for a number": ({"top_p": "most"}, "no number"),
    "a large seed": ({"seed": 2**64}, "seed"),
    "many stops": ({"stop": range(17)}, "17 tokens or sequences given"),
    "a stop that is no token": ({"stop": 96}, "stop: there is no token 96"),
    "a phrase with no such token": ({"stop": [[1, 96]]}, "stop: there is no token 96"),
    "a phrase without tokens": ({"stop": [3, []]}, "stop: a sequence without tokens"),
    "phrases in phrases": ({"stop": [[[1]]]}, r"stop: there is no token \[1\]"),
    "a pad that is no token": ({"pad": -1}, "pad: there is no token -1"),
    "no function": ({"stream": 3}, "cannot be called"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_call_may_not_ask(name: str, generator: Generator, texts: np.ndarray) -> None:
    given, message = WRONG[name]
    with pytest.raises(InputError, match=message):
        generator.generate(**{"tokens": PROMPTS, "n": 3, **given})
    np.testing.assert_array_equal(generator.generate(PROMPTS, 3), texts)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"max_tokens": 0}, OptionError, "max_tokens: 0 given"),
        ({"max_tokens": 65}, OptionError, "the model has no position 64; give at most 64"),
        ({"batch": 1.5}, OptionError, "batch: 1.5 given"),
        ({"prefill": 16}, OptionError, "prefill: 16 given"),
        ({"prefill": (0,)}, OptionError, "prefill: 0 given"),
        ({"memory_limit": "50%"}, OptionError, "memory_limit"),
        ({"target": "cuda-sim", "weights": "int8"}, OptionError, "no kernel for cuda-sim reads weights of few bits"),
        ({"weihgts": "int8"}, OptionError, "did you mean 'weights'"),
    ],
)
def test_options_that_cannot_be(change: dict[str, Any], kind: type[Exception], message: str, gpt2: Any) -> None:
    with pytest.raises(kind, match=message):
        prefuse.compile_generation(gpt2, **{"max_tokens": 8, **change})
