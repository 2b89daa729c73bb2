"""Texts that GPUs continue: those of transformers, and those that the CPU draws; on simulators and a driver double."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import prefuse
import pytest
from prefuse.runtime.errors import DeviceError
from prefuse.runtime.generation.generator import Generator
from prefuse.runtime.plan import CONSTANTS, SHARED

from ...programs.generation.test_texts import MAX_TOKENS, PROMPTS, continued, language_model
from ...sample import dealt
from ..simulator import FakeGpu, need_compiler

transformers = pytest.importorskip("transformers")
SIMULATED = ("cuda-sim", "rocm-sim:gfx942", "rocm-sim:gfx1100")
NEW = 8


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return language_model(n_positions=64, n_embd=32, n_layer=1, n_head=4)


@pytest.fixture(scope="module")
def texts(gpt2: Any) -> np.ndarray:
    return np.array([continued(gpt2, prompt, NEW) for prompt in PROMPTS])


def compiled(gpt2: Any, target: str) -> Generator:
    return prefuse.compile_generation(gpt2, max_tokens=MAX_TOKENS, prefill=(8,), batch=2, target=target, cache=False)


@pytest.mark.parametrize("target", dealt(SIMULATED, SIMULATED, True, (True, False, False)))
def test_texts_are_those_of_transformers(target: str, gpt2: Any, texts: np.ndarray, tmp_path: Path) -> None:
    """Prompts of different lengths, one of them in two pieces; tokens that are drawn, too; from a file; caches are not copied."""
    need_compiler()
    net = compiled(gpt2, target)
    np.testing.assert_array_equal(net.generate(PROMPTS, NEW), texts)
    drawn, expected = (
        one.generate(PROMPTS, NEW, temperature=0.8, top_k=20, top_p=0.9, seed=7) for one in (net, compiled(gpt2, "cpu"))
    )
    np.testing.assert_array_equal(drawn, expected)
    assert "0 copies" in net.programs[1].report()
    net.save(tmp_path / "gpt2.prefuse")
    session = prefuse.load_generator(tmp_path / "gpt2.prefuse").session()
    parts = [session.generate(PROMPTS, 3), session.generate([[], []], NEW - 3)]
    np.testing.assert_array_equal(np.concatenate(parts, 1), texts)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_lie_there_once(precision: str, simulated_gpu: FakeGpu, tmp_path: Path) -> None:
    """In the file and on the GPU, for prompts and for steps: the embedding, too, by which the last product multiplies."""
    module = language_model(n_positions=64, n_embd=256, n_layer=2, n_head=4)
    net = prefuse.compile_generation(module, max_tokens=32, prefill=(8,), target="cuda:sm_90", precision=precision, cache=False)
    parameters = sum(one.numel() for one in module.parameters()) * (2 if precision == "bfloat16" else 4)
    path = tmp_path / "gpt2.prefuse"
    net.save(path)
    code = sum(len(program.program.library) for program in net.programs.values())
    assert path.stat().st_size < 1.02 * parameters + code + 200_000  # the sampler's code, and what a file says of programs
    before = simulated_gpu.held()[0]
    assert net.generate([[1, 2, 3]], 2).shape == (1, 2)
    plans = [program.plan for program in net.programs.values()]
    rest = sum(space.size_bytes for plan in plans for space in plan.spaces if space.name not in (CONSTANTS, SHARED))
    assert simulated_gpu.held()[0] - before < 1.02 * parameters + rest + 400_000  # caches, and what is staged


def test_ends_and_faults(simulated_gpu: FakeGpu, gpt2: Any, texts: np.ndarray) -> None:
    """What is told of each step may end it, stop tokens do; after a call that failed the session is as before."""
    net = compiled(gpt2, "cuda:sm_90")
    told: list[list[int]] = []

    def listen(tokens: np.ndarray) -> bool:
        told.append(tokens.tolist())
        return len(told) < 3

    np.testing.assert_array_equal(net.generate(PROMPTS, NEW, stream=listen), texts[:, :3])
    assert told == texts[:, :3].T.tolist()
    stop = int(texts[0, 2])
    ended = net.generate([PROMPTS[0], PROMPTS[0]], NEW, stop=stop)
    np.testing.assert_array_equal(ended[0], texts[0, : list(texts[0]).index(stop) + 1])
    session = net.session()
    first = session.generate(PROMPTS, 2)
    simulated_gpu.fail("cuGraphLaunch", 2)
    with pytest.raises(DeviceError):
        session.generate([[], []], NEW - 2)
    rest = session.generate([[], []], NEW - 2)
    np.testing.assert_array_equal(np.concatenate([first, rest], 1), texts)
