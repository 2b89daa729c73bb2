"""Other architectures of the zoo each day, and what a decoder's cache becomes; `python -m tests.zoo` compiles all of them."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import prefuse
import pytest
import torch
import transformers
from prefuse.compiler.frontend import torch_export
from prefuse.compiler.frontend.pytree import flatten
from prefuse.compiler.lowering.gpu.simulator.library import find_compiler
from prefuse.runtime.precision import PRECISIONS, Precision
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..sample import VARIABLE, every, sample_number
from . import judge as judging
from .architecture import Architecture
from .architectures import ZOO
from .judge import BOUND, Difference, compare, error_bound, judge, judge_apart
from .peers import by_autocast, by_openvino, in_float64, peer_of, peer_outputs
from .result import Result, append_results, read_results
from .table import table

_OF_TRANSFORMERS = [name for name, one in ZOO.items() if isinstance(one, Architecture)]
_STRIDE = len(_OF_TRANSFORMERS) // 2  # two a day, each in two precisions
_NOT_EXPORTED = {"led", "longformer", "nystromformer", "switch-transformers"}  # by this torch


def is_right(result: Result) -> bool:
    """Whether a result is good, and torch exports what it can export."""
    return result.is_good and (result.outcome == "not exported by torch") <= (result.name in _NOT_EXPORTED)


def precisions_of_the_day(place: int) -> tuple[Precision, Precision]:
    """float32 and another one, for the architecture at a place of the list: the next one each time its turn comes."""
    others = PRECISIONS[1:]
    return PRECISIONS[0], others[(sample_number() // _STRIDE + place) % len(others)]


@pytest.mark.daily
@pytest.mark.parametrize("name", every(_STRIDE, _OF_TRANSFORMERS))
def test_what_torch_exports_agrees(name: str) -> None:
    for result in judge(name, precisions_of_the_day(_OF_TRANSFORMERS.index(name))):
        assert is_right(result), f"{result.precision}: {result.detail}"


@pytest.mark.daily
@pytest.mark.parametrize("target", ["cuda-sim", "rocm-sim"])
@pytest.mark.parametrize("name", every(len(_OF_TRANSFORMERS), _OF_TRANSFORMERS))
def test_on_a_simulated_gpu(name: str, target: str) -> None:
    """One a day, in a precision that changes with it; a race is a failure."""
    if not find_compiler():
        pytest.skip("the simulators need g++")
    (result,) = judge(name, (PRECISIONS[sample_number() % len(PRECISIONS)],), target)
    assert is_right(result), f"{result.precision}: {result.detail}"


def test_samples_in_a_row_hold_all_architectures_in_all_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    held = set()
    for number in range(len(PRECISIONS[1:]) * _STRIDE):
        monkeypatch.setenv(VARIABLE, str(number))
        for name in every(_STRIDE, _OF_TRANSFORMERS):
            held |= {(name, precision) for precision in precisions_of_the_day(_OF_TRANSFORMERS.index(name))}
    assert held == set(product(_OF_TRANSFORMERS, PRECISIONS))


def test_an_encoder_and_its_decoder_need_nothing_beside_kernels() -> None:
    (result,) = judge("t5")
    assert (result.outcome, result.means) == ("agrees", ()), result.detail


def test_one_export_serves_all_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program is made in its own precision all the same, and narrow ones have the error of a peer beside them."""
    export = Mock(wraps=torch_export.export_module)
    monkeypatch.setattr(torch_export, "export_module", export)
    exact, rounded = judge("our-lenet5", ("float32", "bfloat16"), "cpu:avx512bf16-emulated")
    export.assert_called_once()
    assert exact.error is not None
    assert rounded.error is not None
    assert rounded.peer_error is not None
    assert exact.is_good
    assert rounded.is_good
    assert exact.error < 1e-5 < 1e-4 < rounded.error
    assert exact.peer_error is None


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
    assert compare(second.logits, whole.logits[:, -1:]).largest <= BOUND
    assert compare(second.past_key_values, whole.past_key_values).largest <= BOUND


def test_every_build_has_equal_bits() -> None:
    (one, _, its), (other, _, others) = (ZOO["roberta"].build() for _ in range(2))
    found = compare((dict(one.named_parameters()), its), (dict(other.named_parameters()), others))
    assert found == Difference("", 0.0, 0.0)


@pytest.mark.parametrize(
    ("got", "form"),
    [
        (torch.ones(2), r"is torch.float32\[2\]"),
        (torch.ones(3, dtype=torch.float64), r"is torch.float64\[3\]"),
        ((torch.ones(3),), "another structure"),
    ],
)
def test_results_of_another_form_are_noticed(got: object, form: str) -> None:
    assert re.search(form, compare(got, torch.ones(3)).form)


@pytest.mark.parametrize(
    ("got", "largest", "norm"),
    [
        ([1.0, 2.0, 2.0], 0.0, 0.0),
        ([1.0, 2.0, 2.3], 0.15, 0.1),
        ([1.3, 2.0, 2.4], 0.2, 0.5 / 3),
        ([1.0, 2.0, math.nan], math.nan, math.nan),
        ([1.0, 2.0, math.inf], math.inf, math.inf),
    ],
)
def test_errors_are_those_of_the_worst_output(got: list[float], largest: float, norm: float) -> None:
    right = torch.tensor([1.0, 2.0, 2.0])
    found = compare((right, torch.tensor(got)), (right, right))
    assert (found.form, found.largest, found.norm) == ("", *(pytest.approx(one, 1e-6, nan_ok=True) for one in (largest, norm)))


@pytest.mark.parametrize(
    ("precision", "peer_error", "bound"),
    [
        ("float32", None, 1e-4),
        ("float32-fast", None, 2e-5),
        ("float32-fast", 1e-6, 2e-5),
        ("float32-fast", 3e-5, 4.8e-4),
        ("bfloat16", 1e-2, 1.2e-2),
        ("bfloat16", 1e-4, 2**-9),
        ("bfloat16", None, 2e-2),
        ("float16", 1e-3, 1.2e-3),
        ("float16", 1e-5, 2**-12),
        ("float16", None, 5e-3),
    ],
)
def test_precisions_are_judged_beside_a_peer(precision: Precision, peer_error: float | None, bound: float) -> None:
    assert error_bound(precision, peer_error) == pytest.approx(bound)


def test_the_median_of_draws_decides_where_the_first_is_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a narrow type beside a peer; any other result is as it is, and one that is too far in most draws stays wrong."""

    def judged(errors: list[float], precision: Precision = "float16", peer_error: float | None = 1e-3) -> tuple[Result, int]:
        asked: list[int] = []

        def draw(name: str, precisions: Sequence[Precision], target: str, number: int) -> tuple[Result, ...]:
            asked.append(number)
            bound = error_bound(precision, peer_error)
            result = Result(name, "agrees", error=errors[number], precision=precision, target=target, peer_error=peer_error)
            return (result if errors[number] <= bound else replace(result, outcome="wrong"),)

        monkeypatch.setattr(judging, "_judge_draw", draw)
        (result,) = judge("bert", (precision,))
        return result, len(asked)

    assert judged([1.1e-3, 9.0, 9.0, 9.0, 9.0])[1] == 1
    unlucky, draws = judged([1.5e-3, 0.7e-3, 0.9e-3, 9.0, 1.1e-3])
    assert (unlucky.outcome, unlucky.error, draws) == ("agrees", 1.1e-3, 5)
    later, draws = judged([1.5e-3, 1.3e-3, 0.9e-3, 1.4e-3, 0.5e-3, 0.8e-3, 0.7e-3, 0.6e-3, 0.9e-3])
    assert (later.outcome, later.error, draws) == ("agrees", 0.9e-3, 9)
    wrong, draws = judged([1.5e-3, 1.3e-3, 1.1e-3, 1.4e-3, 1.2e-3, 1.6e-3, 1.3e-3, 1.4e-3, 1.3e-3])
    assert (wrong.outcome, wrong.error, draws) == ("wrong", 1.3e-3, 9)
    chance, draws = judged([1.3e-3, 1.3e-3, 1.3e-3, 2e-3, 2e-3, 1.3e-3, 0.2e-3, 0.3e-3, 0.3e-3])
    assert (chance.outcome, chance.error, draws) == ("agrees", 1.3e-3, 9)
    assert judged([math.inf] * 9)[0].outcome == judged([math.nan] * 9)[0].outcome == "wrong"
    assert judged([9.0] * 5, "float32")[1] == 1
    assert judged([9.0] * 5, peer_error=None)[1] == 1


def test_the_peers_compute_the_model() -> None:
    """OpenVINO, in float32, which it has on every CPU, and autocast."""
    pytest.importorskip("openvino")
    call = ZOO["our-lenet5"].build()
    module, inputs, _ = call
    structure, leaves = flatten((inputs, {}))
    graph = torch_export.export_module(module, structure, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]).model
    with torch.no_grad():
        expected = module(*inputs).double().numpy()
        (rounded,) = by_autocast(call, torch.bfloat16)
    (exact,) = by_openvino(call, graph, "f32")
    np.testing.assert_allclose(exact, expected, atol=1e-5 * abs(expected).max())
    assert 1e-4 < np.linalg.norm(rounded - expected) / np.linalg.norm(expected) < 2e-2
    assert peer_of("float32") == ""
    assert peer_outputs("", call, graph, "float32") == []
    assert len(peer_outputs(peer_of("bfloat16"), call, graph, "bfloat16")) == 1


def test_the_exact_result_has_the_form_of_the_expected_one() -> None:
    """And is what float32 differs from by its rounding. A module that takes nothing but float32 gives what is expected."""

    class Far(torch.nn.Module):
        is_strict = False

        def forward(self, x: torch.Tensor, number: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.is_strict and x.dtype != torch.float32:
                raise RuntimeError(x.dtype)
            return {"back": x + 100 - 100, "next": number + 1}

    module, inputs = Far(), {"x": torch.tensor([0.1, 0.7]), "number": torch.arange(2)}
    expected = module(**inputs)
    assert 1e-6 < compare(in_float64((module, (), inputs), expected), expected).norm < 1e-4
    module.is_strict = True
    assert in_float64((module, (), inputs), expected) is expected


def test_a_result_that_is_no_number_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "compare", lambda *results: Difference("", math.nan, math.nan))
    (result,) = judge("our-lenet5", ("float16",))
    assert result.outcome == "wrong"


def test_a_crash_and_a_hang_cost_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def act(name: str, precisions: tuple[Precision, ...], target: str) -> tuple[Result, ...]:
        if name == "crash":
            os.abort()
        if name == "hang":
            time.sleep(60)
        return tuple(Result(name, "agrees", precision=precision, target=target) for precision in precisions)

    monkeypatch.setattr(judging, "judge", act)
    rows = list(judge_apart(["crash", "hang", "good"], processes=1, timeout_s=2.0))
    assert [[result.precision for result in row] for row in rows] == [list(PRECISIONS)] * 3
    assert {row[0].name: row[-1].outcome for row in rows} == {"crash": "crash", "hang": "hang", "good": "agrees"}


def test_results_survive_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert read_results(path) == []
    one, other = (
        Result("bert", "agrees", "", 1e-7, 3.0, ("stages",)),
        Result("gpt2", "wrong", precision="float16", peer_error=1e-3),
    )
    append_results(path, [one])
    append_results(path, [other])
    assert read_results(path) == [one, other]


def test_the_table_has_a_row_for_each_architecture() -> None:
    refusal = "a | b in /x/site-packages/y/z.py:3"
    page = table(
        [
            Result("bert", "agrees", "", 1e-7, 3.0),
            Result("bert", "agrees", "", 1.1e-2, 3.0, precision="bfloat16", peer="OpenVINO", peer_error=1e-2),
            Result("llama", "refused", refusal),
            Result("llama", "refused", refusal, precision="bfloat16"),
        ]
    )
    assert "- float32: **1 of 2** (1 agrees, 1 refused)" in page
    assert "the *peer's* on the same model,\nthat of OpenVINO." in page
    assert "| bert | BertModel | encoder | agrees | 1.0e-07 |  | 1.1e-02 (1.10 x) | 1.0e-02 |  |  | 3 |  |" in page
    assert r"| llama | LlamaForCausalLM | decoder | **refused**: a \| b in y/z.py:3 |  |  |  |  |  |  |  |  |" in page


def test_the_table_tells_precisions_and_targets_apart() -> None:
    emulated = "cpu:avx512bf16-emulated"
    page = table(
        [
            Result("bert", "agrees", "", 1e-7, 3.0),
            Result("bert", "wrong", "too far", 1e-1, 3.0, precision="float16", peer_error=1e-3),
            Result("bert", "agrees", "", 5e-3, 3.0, precision="bfloat16", target=emulated, peer_error=1e-2),
        ]
    )
    assert "| float16 **wrong**: too far | 1.0e-07 |  |  |  | 1.0e-01 (100.00 x) | 1.0e-03 |" in page
    assert "| architecture | result | bfloat16 | peer |\n|---|---|---|---|\n| bert | agrees | 5.0e-03 | 1.0e-02 |\n" in page
    assert f"With the target `{emulated}`" in page


def test_the_table_tells_what_became_of_architectures_for_gpus() -> None:
    page = table(
        [
            Result("bert", "agrees", "", 1e-7, 3.0),
            Result("bert", "compiles", compile_seconds=4.0, target="cuda:sm_90", grids=31),
            Result("llama", "refused", "too large", target="cuda:sm_90"),
        ]
    )
    assert "## Compiled for `cuda:sm_90`\n\n- float32: **1 of 2** (1 compiles, 1 refused)\n" in page
    assert (
        "| architecture | result | float32 | seconds | beside |\n|---|---|---|---|---|\n| bert | compiles | 31 | 4 |  |\n" in page
    )
    assert "| llama | **refused**: too large |  |  |  |" in page


@pytest.mark.daily
@pytest.mark.parametrize("target", ["cuda:sm_90", "rocm:gfx942"])
@pytest.mark.parametrize("name", every(len(_OF_TRANSFORMERS), _OF_TRANSFORMERS))
def test_compiled_for_a_gpu(name: str, target: str) -> None:
    """One a day, in a precision that changes with it: there is a binary, or a compiler is missing and named."""
    (result,) = judge(name, (PRECISIONS[sample_number() % len(PRECISIONS)],), target)
    if re.search("this machine has (neither nvcc|no ld.lld)", result.detail):
        pytest.skip(result.detail)
    assert is_right(result), f"{result.precision}: {result.detail}"
    assert result.outcome == "not exported by torch" or result.grids
