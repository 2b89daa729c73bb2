"""Weights that steps and prompts read lie in memory and in the file once: all programs of a generator together."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import prefuse
import pytest
import torch
from prefuse.compiler.quantization.formats import group_scales, quantize_channels, quantize_groups
from prefuse.runtime.generation.generator import Generator

from ...sample import every

transformers = pytest.importorskip("transformers")

WIDTH, VOCABULARY, BLOCK = 256, 992, 32
PROMPTS = [[5, 90, 3, 17, 44, 8, 61, 29, 2, 70, 11, 300, 4, 9, 41, 801, 7, 22, 990], [9, 33, 71]]
Weights = Literal["int8", "int4"]
OPTIONS: dict[str, dict[str, str]] = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "int8": {"weights": "int8"},
    "int4": {"weights": "int4"},
}


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=WIDTH, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=1
        )
    )


def llama(*, is_tied: bool = True) -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, tie_word_embeddings=is_tied, **sizes)
    )


def seeded(make: Callable[[], Any]) -> Any:
    """A model with weights so large that its texts do not repeat one token."""
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(5)
        model = make().eval()
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return model


def product_weights(model: Any) -> list[tuple[torch.Tensor, int]]:
    """The weights of products, each once, and their dimension that is summed over."""
    found = {}
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            found[module.weight] = 1
        elif isinstance(module, transformers.pytorch_utils.Conv1D):
            found[module.weight] = 0
    return list(found.items())


def wanted_bytes(model: Any, form: str) -> float:
    """Of all parameters, the weights of products in their format with their scales, all else in float32."""
    products, total = dict(product_weights(model)), 0.0
    for parameter in set(model.parameters()):
        elements, scales = parameter.numel(), 0.0
        if parameter in products and form in ("int8", "int4"):
            scales = elements / BLOCK if form == "int4" else parameter.shape[1 - products[parameter]]
        item = {"float32": 4, "bfloat16": 2, "int8": 1, "int4": 0.5}[form] if parameter in products else 4
        total += item * elements + 4 * scales
    return total


def held_bytes(generator: Generator) -> int:
    """Of the constants of all programs, those that several share once."""
    programs = [one.program for one in generator.programs.values()]
    shared = {constant.content: constant.data.nbytes for one in programs for constant in one.shared.values()}
    return sum(shared.values()) + sum(one.constants.nbytes for one in programs)


def round_weights(model: Any, weights: Weights) -> None:
    """Give a model the weights that the formats stand for."""
    with torch.no_grad():
        for parameter, k_axis in product_weights(model):
            array = parameter.numpy()
            rounded = quantize_channels(array, 1 - k_axis) if weights == "int8" else quantize_groups(array, BLOCK, 4, k_axis)
            parameter.copy_(torch.from_numpy(rounded.dequantize()))
    assert weights == "int8" or group_scales(array, BLOCK, 4, k_axis).size == array.size // BLOCK


def texts(model: Any, n: int) -> list[list[int]]:
    """Greedy ones of transformers."""
    found = []
    for prompt in PROMPTS:
        with torch.no_grad():
            tokens = model.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)
        found.append(tokens[0, len(prompt) :].tolist())
    return found


CASES = [(make, form) for form in OPTIONS for make in (gpt2, llama)]


@pytest.mark.parametrize(("make", "form"), every(len(CASES), CASES))
def test_weights_lie_there_once(make: Callable[[], Any], form: str, tmp_path: Path) -> None:
    """At most 1.02 times the parameters, with a tied embedding; and the texts are right that are read from these."""
    model = seeded(make)
    generator = prefuse.compile_generation(model, max_tokens=40, prefill=(16,), batch=2, threads=2, cache=False, **OPTIONS[form])  # type: ignore[arg-type]
    wanted = wanted_bytes(model, form)
    assert 0.95 * wanted <= held_bytes(generator) <= 1.02 * wanted, generator.report()
    contents = [{constant.content for constant in one.program.shared.values()} for one in generator.programs.values()]
    assert contents[0] & contents[1], "programs share none"
    generator.save(tmp_path / "generator.prefuse")
    with zipfile.ZipFile(tmp_path / "generator.prefuse") as archive:
        (stored,) = (info.file_size for info in archive.infolist() if info.filename == "shared.safetensors")
    assert stored <= 1.02 * wanted + 16384  # with a header
    code = sum(len(one.program.library) for one in generator.programs.values())
    assert (tmp_path / "generator.prefuse").stat().st_size < 1.02 * wanted + code + 400_000
    made = generator.generate(PROMPTS, 12, stop=())
    np.testing.assert_array_equal(prefuse.load_generator(tmp_path / "generator.prefuse").generate(PROMPTS, 12, stop=()), made)
    if form == "bfloat16":
        check_logits(generator, model)
        return
    if form != "float32":
        round_weights(model, form)  # type: ignore[arg-type]
    assert len({token for row in made.tolist() for token in row}) > 5
    np.testing.assert_array_equal(made, texts(model, 12))


def check_logits(generator: Generator, model: Any) -> None:
    """Those after a prompt and after one more token, against float32."""
    context = generator.programs[16].context()
    step = generator.programs[1].context_of(context.states)
    tokens = np.array([row[:3] + [0] * 13 for row in PROMPTS])
    first = np.asarray(context(tokens, np.array([3, 3])))
    second = np.asarray(step(np.array([[7], [600]]), np.array([1, 1])))
    with torch.no_grad():
        whole = torch.tensor([[*row[:3], last] for row, last in zip(PROMPTS, (7, 600), strict=True)])
        expected = model(input_ids=whole).logits.numpy()
    for found, place in ((first, 2), (second, 3)):
        error = np.linalg.norm(found - expected[:, place]) / np.linalg.norm(expected[:, place])
        assert error < 2e-2


def test_weights_of_their_own_lie_beside_the_table() -> None:
    """Untied: the embedding is a table as it is, and nothing else is."""
    model = seeded(lambda: llama(is_tied=False))
    generator = prefuse.compile_generation(model, max_tokens=40, prefill=(16,), cache=False)
    assert held_bytes(generator) <= 1.02 * wanted_bytes(model, "float32")
    np.testing.assert_array_equal(generator.generate(PROMPTS[0], 6, stop=())[0], texts(model, 6)[0])
