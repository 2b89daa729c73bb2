"""What sessions and programs hold in memory: caches as far as a text has come, one arena, and no more than is used."""

from __future__ import annotations

import threading
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import prefuse
import pytest
import torch
from onnx import parser
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.generation.generator import Generator
from prefuse.tests.runtime.test_cpu_device import resident_bytes

transformers = pytest.importorskip("transformers")

MAX_TOKENS = 9000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a generator with caches of 37 MB, of heads of 2.3 MB, whose programs are for 1, 4 and 16 tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, max_position_embeddings=MAX_TOKENS, **sizes))
    generator = prefuse.compile_generation(model.eval(), max_tokens=MAX_TOKENS, prefill=(4, 16), threads=1, cache=False)
    path = tmp_path_factory.mktemp("generator") / "model.prefuse"
    generator.save(path)
    return path


@pytest.fixture(scope="module")
def generator(path: Path) -> Generator:
    return prefuse.load_generator(path)


def provided_bytes(address: int, size: int) -> int:
    """Of so much memory of this process what is in pages."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(address // PAGESIZE * 8)
        entries = np.frombuffer(pages.read(size // PAGESIZE * 8), np.uint64)
    return int((entries >> np.uint64(63)).sum()) * PAGESIZE


def test_programs_hold_no_caches_that_no_text_uses(path: Path) -> None:
    """Nor arenas: sessions have theirs."""
    generator = prefuse.load_generator(path)
    for _ in range(2):
        for program in generator.programs.values():
            assert program._session is not None
            assert program._session.kept is not None
            assert program._session.kept._memory is None
            assert program._session._invocation is None
        generator.session().generate([1, 2, 3], 2)


def test_a_program_of_its_own_has_its_states_from_the_first_call_on(generator: Generator) -> None:
    program = generator.programs[1]
    one = np.ones((1, 1), np.int64)
    np.testing.assert_array_equal(program(one, one[0]), program.context()(one, one[0]))
    assert program.states["length"] == 1


def test_memory_of_a_cache_is_provided_as_a_text_grows(generator: Generator) -> None:
    session = generator.session()
    place = session._states.memory().address
    whole = sum(state.type.size_bytes for state in generator.programs[1].plan.states)
    assert whole > 32 << 20
    assert provided_bytes(place, whole) < whole / 16
    assert not any(session._states[name].any() for name in session._states)
    session.generate([3, 4, 5], 5)
    assert session.length == 7


def test_a_first_token_takes_few_pages(generator: Generator) -> None:
    """Each head's first rows are in a page of their own, which is a small one."""
    session = generator.session()
    place = session._states.memory().address
    before = resident_bytes(place)
    session.generate([3, 4, 5], 1)
    assert 0 < resident_bytes(place) - before < 1 << 20


def test_programs_of_a_session_share_an_arena(generator: Generator) -> None:
    session = generator.session()
    assert len(session._readers) == 3
    (arena,) = {reader.call._arena for reader in session._readers}  # type: ignore[attr-defined]
    assert len(arena.memory) == max(program._arena_bytes for program in generator.programs.values())


def test_a_burst_of_calls_leaves_few_idle_sessions(generator: Generator) -> None:
    met, made = threading.Barrier(5), list[list[int]]()

    def work() -> None:
        made.append(generator.generate([7, 8, 9], 3, stream=lambda _: met.wait() >= 0)[0].tolist())

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 5
    assert all(row == made[0] for row in made)
    assert 1 <= len(generator._idle) <= 2


def test_a_program_without_states_is_ready_when_it_is_loaded(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 21]> main (float[4] x) => (float[4] y) { y = Neg(x) }'
    prefuse.compile(parser.parse_model(text), cache=False).save(tmp_path / "net.prefuse")
    net = prefuse.load(tmp_path / "net.prefuse")
    assert isinstance(net, CompiledModel)
    assert len(net._idle) == 1
