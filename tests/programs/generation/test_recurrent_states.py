"""Texts of models that keep recurrent states: errors, files, going back and NaN leave each text what it should be.

Of the three models those of the day; all with PREFUSE_TEST_WHOLE=1.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import prefuse
import pytest
import torch
from prefuse.runtime.errors import ProgramFileError
from prefuse.runtime.generation.generator import Generator
from prefuse.tests.sample import every
from prefuse.tests.zoo.text import HYBRIDS, RECURRENCES
from torch import nn

pytest.importorskip("transformers")

PROMPTS = [[5, 90, 3, 17, 44, 61, 8], [9, 33]]
NAN = 95  # a token whose embedding is NaN
NAMES = ("mamba", "falcon-h1", "qwen3-next")  # states alone, beside keys and values of the same layer, and of other layers
PIECES = {"mamba": [1], "falcon-h1": [1, 3], "qwen3-next": [1]}  # tokens of programs


def _module(name: str) -> nn.Module:
    architecture = next(one for one in (*RECURRENCES, *HYBRIDS) if one.name == name)
    module, _, _ = architecture.build()
    embedding = module.get_input_embeddings()  # type: ignore[operator]
    if module.get_output_embeddings().weight is embedding.weight:  # type: ignore[operator]
        embedding.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)
    embedding.weight[NAN] = torch.nan
    module.generation_config.eos_token_id = None  # type: ignore[union-attr]
    return module


@pytest.fixture(scope="module", params=every(2, NAMES))
def case(request: pytest.FixtureRequest) -> tuple[str, Generator]:
    name: str = request.param
    return name, prefuse.compile_generation(_module(name), max_tokens=40, prefill=(3,), batch=2, cache=False)


@pytest.fixture
def generator(case: tuple[str, Generator]) -> Generator:
    return case[1]


def test_pieces_are_read_where_the_code_goes_on_from_states(case: tuple[str, Generator]) -> None:
    """Mamba begins anew with several tokens, linear attention has a loop over them."""
    name, generator = case
    assert list(generator.programs) == PIECES[name]
    assert ("prompts are read token by token" in generator.report()) == (PIECES[name] == [1])


def test_a_call_that_ends_with_an_error_leaves_the_states(generator: Generator, tmp_path: Path) -> None:
    expected = generator.generate(PROMPTS, 12)
    session = generator.session()
    first = session.generate(PROMPTS, 5)
    session.save(tmp_path / "text.session")

    def refuse(_: np.ndarray) -> bool:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        session.generate([[7, 8], []], 4, stream=refuse)
    np.testing.assert_array_equal(np.concatenate([first, session.generate([[], []], 7)], axis=1), expected)
    session.load(tmp_path / "text.session")
    np.testing.assert_array_equal(session.generate([[], []], 7), expected[:, 5:])


@pytest.mark.parametrize("length", [-1, 10**6])
def test_a_saved_text_of_an_impossible_length_is_refused(generator: Generator, tmp_path: Path, length: int) -> None:
    """Kernels would write there. The text that is here stays."""
    session, expected = generator.session(), generator.generate(PROMPTS, 8)
    session.generate(PROMPTS, 5)
    session.save(tmp_path / "text.session")
    with zipfile.ZipFile(tmp_path / "text.session") as whole, zipfile.ZipFile(tmp_path / "wrong", "w") as wrong:
        for name in whole.namelist():
            content = io.BytesIO()
            np.save(content, np.full(len(PROMPTS), length, np.int64))
            wrong.writestr(name, content.getvalue() if name == "length.npy" else whole.read(name))
    with pytest.raises(ProgramFileError, match="lengths"):
        session.load(tmp_path / "wrong")
    np.testing.assert_array_equal(session.generate([[], []], 3), expected[:, 5:])


def test_a_sequence_that_has_ended_keeps_its_states(generator: Generator) -> None:
    """The other one goes on: the ended one's step has no token."""
    expected = generator.generate(PROMPTS, 10)
    stop = int(expected[0, 2])
    place = expected[0].tolist().index(stop)
    session = generator.session()
    made = session.generate(PROMPTS, 6, stop=stop, pad=0)
    assert made[0].tolist() == [*expected[0, : place + 1], *[0] * (made.shape[1] - place - 1)]
    again = session.generate([[], []], 3)
    np.testing.assert_array_equal(again[0], expected[0, place + 1 : place + 4])


def test_states_go_back_to_the_beginning_only(generator: Generator) -> None:
    session = generator.session()
    expected = session.generate(PROMPTS, 6)
    with pytest.raises(prefuse.InputError, match=r"length: .*recurrent states.*give 0, or the lengths"):
        session.rewind([2, 0], [[5], [9]])
    np.testing.assert_array_equal(session.length, [len(prompt) + 5 for prompt in PROMPTS])
    session.rewind([0, 0], PROMPTS)
    np.testing.assert_array_equal(session.generate([[], []], 6), expected)


def test_nan_of_one_text_is_not_in_the_next(generator: Generator) -> None:
    expected = generator.generate(PROMPTS, 6)
    session = generator.session()
    session.generate([[5, NAN, 3], [9]], 3)
    session.reset()
    np.testing.assert_array_equal(session.generate(PROMPTS, 6), expected)


def test_one_sequence_does_not_see_the_other(generator: Generator) -> None:
    expected = generator.generate(PROMPTS, 6)
    np.testing.assert_array_equal(generator.generate([PROMPTS[0], [NAN, 4]], 6)[0], expected[0])


def test_other_caches_are_refused() -> None:
    module, _, _ = next(one for one in RECURRENCES if one.name == "rwkv").build()
    with pytest.raises(prefuse.UnsupportedModelError, match="something else than keys, values and recurrent states"):
        prefuse.compile_generation(module, max_tokens=16)
