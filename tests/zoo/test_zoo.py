"""Other architectures of the zoo each day, and what a decoder's cache becomes; `python -m tests.zoo` compiles all of them."""

from __future__ import annotations

import math
import os
import re
import time

import prefuse
import pytest
import torch
import transformers
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..sample import every
from . import judge as judging
from .architecture import Architecture
from .architectures import ZOO
from .judge import Result, compare, judge, judge_apart
from .table import table

_OF_TRANSFORMERS = [name for name, one in ZOO.items() if isinstance(one, Architecture)]
_STRIDE = len(_OF_TRANSFORMERS) // 3  # three a day


@pytest.mark.parametrize("name", every(_STRIDE, _OF_TRANSFORMERS))
def test_what_torch_exports_agrees(name: str) -> None:
    result = judge(name)
    assert result.outcome in ("agrees", "not exported by torch"), result.detail


def test_an_encoder_and_its_decoder_need_nothing_beside_kernels() -> None:
    result = judge("t5")
    assert (result.outcome, result.means) == ("agrees", ()), result.detail


def test_results_and_caches_are_objects_as_the_module_gives_them() -> None:
    """The first tokens fill a cache; the compiled module takes it back for the next token."""
    module, _, inputs = ZOO["llama-with-cache"].build()
    compiled = prefuse.compile(module, cache=False)
    tokens = inputs["input_ids"]
    first = compiled(input_ids=tokens[:, :-1])
    assert isinstance(first, CausalLMOutputWithPast)
    assert isinstance(first.past_key_values, transformers.DynamicCache)
    assert first.past_key_values.get_seq_length() == tokens.shape[1] - 1
    second = compiled(input_ids=tokens[:, -1:], past_key_values=first.past_key_values)
    assert isinstance(second, CausalLMOutputWithPast)
    whole = module(input_ids=tokens)
    assert compare(second.logits, whole.logits[:, -1:])[0] == ""
    assert compare(second.past_key_values, whole.past_key_values)[0] == ""


def test_every_build_has_equal_bits() -> None:
    (one, _, its), (other, _, others) = (ZOO["roberta"].build() for _ in range(2))
    assert compare((dict(one.named_parameters()), its), (dict(other.named_parameters()), others)) == ("", 0.0)


@pytest.mark.parametrize(
    ("got", "difference"),
    [
        (torch.ones(3), ""),
        (torch.tensor([1.0, 1.0, 1.001]), "differs by"),
        (torch.tensor([1.0, 1.0, math.nan]), "differs by nan"),
        (torch.ones(2), r"is torch.float32\[2\]"),
        (torch.ones(3, dtype=torch.float64), r"is torch.float64\[3\]"),
        ((torch.ones(3),), "another structure"),
    ],
)
def test_differences_are_noticed(got: object, difference: str) -> None:
    found, _ = compare(got, torch.ones(3))
    assert bool(found) == bool(difference)
    assert re.search(difference, found)


def test_a_crash_and_a_hang_cost_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(name: str) -> Result:
        if name == "crash":
            os.abort()
        if name == "hang":
            time.sleep(60)
        return Result(name, "agrees")

    monkeypatch.setattr(judging, "judge", act)
    found = {result.name: result.outcome for result in judge_apart(["crash", "hang", "good"], processes=1, timeout_s=2.0)}
    assert found == {"crash": "crash", "hang": "hang", "good": "agrees"}


def test_the_table_has_a_row_for_each_result() -> None:
    page = table([Result("bert", "agrees", "", 1e-7, 3.0), Result("llama", "refused", "a | b in /x/site-packages/y/z.py:3")])
    assert "**1 of 2**" in page
    assert r"| llama | LlamaForCausalLM | decoder | **refused**: a \| b in y/z.py:3 |  |  |  |" in page
