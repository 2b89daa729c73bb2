"""Texts that a generator continues, against those of transformers, token for token; and what a call may get wrong."""

from __future__ import annotations

import os
import signal
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import prefuse
import pytest
import torch
from prefuse.runtime.errors import InputError, ProgramFileError, UnsupportedModelError
from prefuse.runtime.generation.generator import Generator

transformers = pytest.importorskip("transformers")

MAX_TOKENS, VOCABULARY = 40, 96
NAN = VOCABULARY - 1  # a token whose embedding `gpt2` lacks
PROMPTS = [[5, 90, 3, 17, 44, 8, 61, 29, 2, 70, 11], [9, 33, 71]]  # the first is longer than what is read at once


def language_model(kind: str = "GPT2LMHeadModel", **settings: Any) -> Any:
    """A small model of transformers with weights so large that texts do not repeat one token."""
    found = getattr(transformers, kind)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.manual_seed(5)
        model = found(found.config_class(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=None, **settings)).eval()
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=1.5 * parameter[0].numel() ** -0.5)
    return model


def continued(model: Any, prompt: list[int], n: int) -> list[int]:
    """The greedy text of transformers."""
    with torch.no_grad():
        found = model.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0)
    return [int(token) for token in found[0, len(prompt) :]]


@pytest.fixture(scope="module")
def gpt2() -> Any:
    """Its last token, which no text has, is NaN."""
    model = language_model(n_positions=64, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=False)
    model.transformer.wte.weight.data[NAN] = float("nan")
    return model


@pytest.fixture(scope="module")
def generator(gpt2: Any) -> Generator:
    return prefuse.compile_generation(gpt2, max_tokens=MAX_TOKENS, prefill=(8,), batch=2, threads=2, cache=False)


@pytest.fixture(scope="module")
def texts(gpt2: Any) -> np.ndarray:
    return np.array([continued(gpt2, prompt, 20) for prompt in PROMPTS])


def test_texts_are_those_of_transformers(generator: Generator, texts: np.ndarray) -> None:
    """Sequences of different lengths, a prompt in two pieces; twice the same."""
    assert len(set(texts[0].tolist())) > 5, "a text that repeats itself shows little"
    for _ in range(2):
        np.testing.assert_array_equal(generator.generate(PROMPTS, 20), texts)
    assert generator.generate(torch.tensor([[1, 2], [3, 4]]), 0).shape == (2, 0)


def test_a_sequence_up_to_the_last_place(generator: Generator, gpt2: Any) -> None:
    """The cache's last row but one is written, the row after it takes what is no token."""
    n = MAX_TOKENS + 1 - len(PROMPTS[0])
    np.testing.assert_array_equal(generator.generate(PROMPTS, n)[0], continued(gpt2, PROMPTS[0], n))
    with pytest.raises(InputError, match="the caches hold 40"):
        generator.generate(PROMPTS, n + 1)


def test_a_session_goes_on(generator: Generator, texts: np.ndarray) -> None:
    session = generator.session()
    parts = [session.generate(PROMPTS, 7), session.generate([[], []], 0), session.generate([[], []], 13)]
    np.testing.assert_array_equal(np.concatenate(parts, 1), texts)
    assert session.length.tolist() == [len(PROMPTS[0]) + 19, len(PROMPTS[1]) + 19]
    session.reset()
    session.generate([PROMPTS[0][:4], PROMPTS[1][:1]], 0)
    np.testing.assert_array_equal(session.generate([PROMPTS[0][4:], PROMPTS[1][1:]], 20), texts)


def test_a_text_may_be_taken_back(generator: Generator, texts: np.ndarray) -> None:
    session = generator.session()
    session.generate(PROMPTS, 12)
    session.rewind([len(prompt) + 2 for prompt in PROMPTS], texts[:, 2:3].tolist())
    np.testing.assert_array_equal(session.generate([[], []], 17), texts[:, 3:])
    for length in ([1], [0, 41], [-1, 0], [0.5, 1]):
        with pytest.raises(InputError, match="length"):
            session.rewind(length, [[], []])  # type: ignore[arg-type]


def test_each_step_is_told(generator: Generator, texts: np.ndarray) -> None:
    told: list[np.ndarray] = []
    generator.generate(PROMPTS, 20, stream=told.append)
    np.testing.assert_array_equal(np.stack(told, 1), texts)


@pytest.mark.parametrize("last", [0, 1, 6])
def test_a_stream_may_end_it(generator: Generator, texts: np.ndarray, last: int) -> None:
    session, told = generator.session(), list[int]()

    def stream(tokens: np.ndarray) -> bool:
        told.append(int(tokens[0]))
        return len(told) <= last

    first = session.generate(PROMPTS, 20, stream=stream)
    np.testing.assert_array_equal(first, texts[:, : last + 1])
    np.testing.assert_array_equal(session.generate([[], []], 19 - last), texts[:, last + 1 :])


def test_an_exception_leaves_the_text_as_it_was(generator: Generator, texts: np.ndarray) -> None:
    session = generator.session()
    session.generate(PROMPTS, 4)

    def stream(tokens: np.ndarray) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        session.generate([[1], [2, 3]], 9, stream=stream)
    np.testing.assert_array_equal(session.generate([[], []], 16), texts[:, 4:])


def test_interrupts_end_it_between_steps(generator: Generator, texts: np.ndarray, sigint_handler: object) -> None:
    """Ctrl-C reaches the caller, and the session stays as it was."""
    session = generator.session()
    session.generate(PROMPTS, 4)

    def stream(tokens: np.ndarray) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        session.generate([[], []], 9, stream=stream)
    np.testing.assert_array_equal(session.generate([[], []], 16), texts[:, 4:])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("step", [1, 3, 8])
def test_an_interrupt_as_python_is_entered(step: int, generator: Generator, texts: np.ndarray) -> None:
    """Before any line of the function that is told of steps runs, ctypes makes a message of the exception."""
    session, streamed, steps = generator.session(), list[np.ndarray](), 0
    session.generate(PROMPTS, 4)

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal steps
        if frame.f_code.co_name == "told":
            steps += 1
            if steps == step:
                raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.generate([[], []], 9, stream=streamed.append)
    finally:
        sys.settrace(None)
    assert len(streamed) == step
    np.testing.assert_array_equal(session.generate([[], []], 16), texts[:, 4:])


def test_stop_tokens_end_sequences_one_by_one(generator: Generator, texts: np.ndarray) -> None:
    first, second = (int(texts[row, at]) for row, at in ((0, 3), (1, 8)))
    places = [next(at for at, token in enumerate(row.tolist()) if token in (first, second)) for row in texts]
    made = generator.generate(PROMPTS, 20, stop=(first, second), pad=95)
    assert made.shape == (2, max(places) + 1)
    for row, text, place in zip(made, texts, places, strict=True):
        np.testing.assert_array_equal(row[: place + 1], text[: place + 1])
        assert (row[place + 1 :] == 95).all()


def test_a_stopped_text_goes_on_from_its_stop_token(generator: Generator, texts: np.ndarray) -> None:
    """What was padded is no part of it."""
    session = generator.session()
    place = int(np.flatnonzero(texts[1] == texts[1, 2])[0])
    session.generate(PROMPTS, 10, stop=int(texts[1, 2]))
    rest = session.generate([[], []], 5)
    np.testing.assert_array_equal(rest[1], texts[1, place + 1 : place + 6])


def test_phrases_end_sequences(generator: Generator, texts: np.ndarray) -> None:
    """Several tokens in a row, all of them new; beside stop tokens, streamed or not. The texts go on from their ends."""
    first, second = texts[0, 3:6].tolist(), [int(texts[1, 9])]
    places = [
        next(at for at in range(20) if row[max(at - 2, 0) : at + 1] == first or row[at : at + 1] == second)
        for row in texts.tolist()
    ]
    assert places[0] != places[1]
    for stream in (None, lambda tokens: True):
        session = generator.session()
        made = session.generate(PROMPTS, 20, stop=[first, second], pad=95, stream=stream)
        assert made.shape == (2, max(places) + 1)
        for row, text, place in zip(made, texts, places, strict=True):
            np.testing.assert_array_equal(row[: place + 1], text[: place + 1])
            assert (row[place + 1 :] == 95).all()
        rest = session.generate([[], []], 3)
        for row, text, place in zip(rest, texts, places, strict=True):
            np.testing.assert_array_equal(row, text[place + 1 : place + 4])


def test_a_phrase_may_end_with_the_first_step_and_begins_no_earlier(generator: Generator, texts: np.ndarray) -> None:
    phrase = [PROMPTS[0][-1], int(texts[0, 0])]  # the first of which is no new token
    np.testing.assert_array_equal(generator.generate(PROMPTS, 5, stop=[phrase]), texts[:, :5])
    ends = np.unique(texts[:, 0])
    np.testing.assert_array_equal(generator.generate(PROMPTS, 5, stop=np.reshape(ends, (-1, 1))), texts[:, :1])


def test_seeds_draw_the_same_texts(generator: Generator) -> None:
    settings: dict[str, Any] = {"temperature": 1.5, "top_k": [0, 20], "top_p": 0.95}
    one, two, other = (generator.generate(PROMPTS, 12, seed=seed, **settings) for seed in (4, 4, 5))
    np.testing.assert_array_equal(one, two)
    assert (one != other).any()
    assert (generator.generate(PROMPTS, 12, **settings) != generator.generate(PROMPTS, 12, **settings)).any()


def test_a_loaded_generator_and_saved_sessions(generator: Generator, texts: np.ndarray, tmp_path: Path) -> None:
    generator.save(tmp_path / "model.prefuse")
    loaded = prefuse.load_generator(tmp_path / "model.prefuse")
    session, again = generator.session(), loaded.session()
    session.generate(PROMPTS, 6)
    session.save(tmp_path / "text.npz")
    again.load(tmp_path / "text.npz")
    np.testing.assert_array_equal(again.generate([[], []], 14), texts[:, 6:])
    (tmp_path / "cut.npz").write_bytes((tmp_path / "text.npz").read_bytes()[:-100])
    with zipfile.ZipFile(tmp_path / "text.npz") as whole, zipfile.ZipFile(tmp_path / "part.npz", "w") as part:
        for name in whole.namelist():
            if name != "session.json":
                part.writestr(name, whole.read(name))
    for name, fault in (("cut", ""), ("part", "session.json: it holds no texts of a session")):
        with pytest.raises(ProgramFileError, match=fault):
            session.load(tmp_path / f"{name}.npz")
    np.testing.assert_array_equal(session.generate([[], []], 14), texts[:, 6:])


def test_files_of_other_kinds(generator: Generator, tmp_path: Path) -> None:
    """Each loader says which one reads the file; what is cut short or changed is refused."""
    path, program = tmp_path / "model.prefuse", tmp_path / "program.prefuse"
    generator.save(path)
    generator.programs[1].save(program)
    with pytest.raises(ProgramFileError, match=r"use prefuse\.load_generator") as caught:
        prefuse.load(path)
    assert str(caught.value).count(str(path)) == 1
    with pytest.raises(ProgramFileError, match=r"prefuse\.load reads programs"):
        prefuse.load_generator(program)
    content = bytearray(path.read_bytes())
    for end in (0, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:end])
        with pytest.raises(ProgramFileError, match="not a sound program file"):
            prefuse.load_generator(path)
    for place in (content.index(b"max_tokens") + 15, content.index(b"\x7fELF") + 5000):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(ProgramFileError, match=r"not a sound program file|its hash is not the one"):
            prefuse.load_generator(path)


def test_the_states_of_another_program_are_refused(generator: Generator, texts: np.ndarray, tmp_path: Path) -> None:
    path = tmp_path / "text.npz"
    session = generator.session()
    session.generate(PROMPTS, 6)
    session.save(path)
    other = language_model(n_positions=64, n_embd=16, n_layer=1, n_head=4)
    another = prefuse.compile_generation(other, max_tokens=MAX_TOKENS, prefill=(), batch=2, cache=False).session()
    with pytest.raises(ProgramFileError, match="other states"):
        another.load(path)
    with pytest.raises(InputError, match="no text before it"):
        another.generate([[], []], 1)


def test_the_texts_of_other_weights_are_refused(generator: Generator, tmp_path: Path) -> None:
    """Of tables alone, which all programs of a generator share and which its manifest names by their contents."""
    session, another = generator.session(), generator.session()
    session.generate(PROMPTS, 2)
    session.save(tmp_path / "text.npz")
    program = generator.programs[1].program
    manifest = {**program.manifest, "contents": dict.fromkeys(program.shared, "0" * 64)}
    assert program.shared
    another._states._program = replace(program, manifest=manifest)
    with pytest.raises(ProgramFileError, match="it holds the texts of another program"):
        another.load(tmp_path / "text.npz")


def test_threads_have_texts_of_their_own(generator: Generator, texts: np.ndarray) -> None:
    with ThreadPoolExecutor(3) as pool:
        for made in pool.map(lambda _: generator.generate(PROMPTS, 20), range(6)):
            np.testing.assert_array_equal(made, texts)


def test_a_session_refuses_a_second_thread(generator: Generator) -> None:
    session, refused = generator.session(), list[BaseException]()

    def other() -> None:
        try:
            session.generate(PROMPTS, 1)
        except InputError as error:
            refused.append(error)

    def stream(tokens: np.ndarray) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    session.generate(PROMPTS, 2, stream=stream)
    assert len(refused) == 2


@pytest.mark.parametrize("nothing", [np.zeros((0, 5), np.int64), torch.zeros(0, 5, dtype=torch.int64), []])
def test_no_rows_of_prompts_give_no_rows(nothing: Any, generator: Generator) -> None:
    session = generator.session()
    session.generate(PROMPTS, 2)
    length = session.length
    assert session.generate(nothing, 3).shape == (0, 3)
    np.testing.assert_array_equal(session.length, length)


def test_an_empty_prompt_beside_others_continues_its_text(generator: Generator, texts: np.ndarray) -> None:
    session = generator.session()
    session.generate(PROMPTS, 4)
    found = session.generate([[], [5, 6]], 6)
    np.testing.assert_array_equal(found[0], texts[0, 4:10])
    expected = generator.generate([[1], [*PROMPTS[1], *texts[1, :4].tolist(), 5, 6]], 6)
    np.testing.assert_array_equal(found[1], expected[1])


def test_more_than_all_tokens_are_all(generator: Generator) -> None:
    one, two = (generator.generate(PROMPTS, 8, temperature=1.5, top_k=k, seed=3) for k in (0, 10**12))
    np.testing.assert_array_equal(one, two)


def test_nan_stays_in_its_text(generator: Generator, texts: np.ndarray, tmp_path: Path) -> None:
    """A token whose embedding is NaN makes all logits NaN: token 0 follows. Texts after it, or taken back before it, have none of
    it, though attention looks at rows of the caches that were forgotten."""
    texts, session = texts[:, :10], generator.session()
    for temperature in (0.0, 1.0):
        made = session.generate([[NAN] * 15, PROMPTS[1]], 10, temperature=temperature, top_k=5)
        np.testing.assert_array_equal(made[0], np.zeros(10))
        session.reset()
        np.testing.assert_array_equal(session.generate(PROMPTS, 10), texts)
        session.reset()
    session.generate([[NAN] * 15, PROMPTS[1]], 0)
    session.generate([[], []], 0)  # whose logits are not those of NaN, which is in the caches
    session.reset()
    np.testing.assert_array_equal(session.generate(PROMPTS, 10), texts)
    session.reset()
    session.generate([[NAN] * 5, [NAN]], 3)
    with pytest.raises(ZeroDivisionError):
        session.generate([[1], [1]], 3, stream=lambda _: 1 // 0 > 0)  # back to where NaN still is
    session.reset()
    np.testing.assert_array_equal(session.generate(PROMPTS, 10), texts)
    session.reset()
    session.generate(PROMPTS, 4)
    session.generate([[NAN] * 5, [NAN]], 5)
    session.save(tmp_path / "text.npz")
    for after in (session, generator.session()):
        after.load(tmp_path / "text.npz")
        after.rewind([len(prompt) + 3 for prompt in PROMPTS], texts[:, 3:4].tolist())
        np.testing.assert_array_equal(after.generate([[], []], 6), texts[:, 4:])


def test_models_of_nan_alone_are_refused() -> None:
    model = language_model(n_positions=8, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=False)
    model.transformer.wte.weight.data[:] = float("nan")
    with pytest.raises(UnsupportedModelError, match="NaN in its logits"):
        prefuse.compile_generation(model, max_tokens=8)


def test_whole_numbers_may_be_those_of_numpy(generator: Generator, texts: np.ndarray) -> None:
    numbers: dict[str, Any] = {"n": 3, "stop": 0, "pad": 0, "seed": 5, "top_k": 1}
    rows: Any = [[*map(np.int64, PROMPTS[0])], torch.tensor(PROMPTS[1], dtype=torch.int32)]
    of_numpy: dict[str, Any] = {name: np.int64(number) for name, number in numbers.items()}
    found = generator.generate(rows, **of_numpy)
    expected = generator.generate(PROMPTS, **numbers)
    np.testing.assert_array_equal(found, expected)
