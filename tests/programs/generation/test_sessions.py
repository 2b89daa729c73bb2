"""Texts of a session apart from each other: forks, rows that stay as they are, iterators, and calls that another thread ends."""

from __future__ import annotations

import copy
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import prefuse
import pytest
from prefuse.runtime.errors import InputError, ProgramFileError
from prefuse.runtime.generation.generator import Generator
from prefuse.runtime.generation.session import Session

from .test_texts import MAX_TOKENS, PROMPTS, language_model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def generator() -> Generator:
    model = language_model(n_positions=64, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=False)
    return prefuse.compile_generation(model, max_tokens=MAX_TOKENS, prefill=(8,), batch=2, threads=2, cache=False)


@pytest.fixture(scope="module")
def texts(generator: Generator) -> np.ndarray:
    return generator.generate(PROMPTS, 20)


@pytest.mark.parametrize("fork", [Session.fork, copy.copy, copy.deepcopy])
def test_forks_go_on_independently(fork: Any, generator: Generator, texts: np.ndarray) -> None:
    session = generator.session()
    session.generate(PROMPTS, 5)
    other = fork(session)
    changed = other.generate([[7], [3, 8]], 6)
    np.testing.assert_array_equal(session.generate([[], []], 15), texts[:, 5:])
    expected = [[*prompt, *text[:5].tolist(), *more] for prompt, text, more in zip(PROMPTS, texts, [[7], [3, 8]], strict=True)]
    np.testing.assert_array_equal(changed, generator.generate(expected, 6))


def test_files_have_the_rows_in_use(generator: Generator, texts: np.ndarray, tmp_path: Path) -> None:
    """Their size is that of the tokens that there are; none, too, and texts of other lengths load over longer ones."""
    session = generator.session()
    caches = sum(state.type.size_bytes for state in generator.programs[1].plan.states)
    session.save(tmp_path / "none")
    assert (tmp_path / "none").stat().st_size < 5000
    session.generate([[4], [9]], 1)
    session.save(tmp_path / "one")
    assert (tmp_path / "one").stat().st_size < caches / 10
    session.reset()
    session.generate(PROMPTS, 12)
    session.save(tmp_path / "many")
    assert caches / 4 < (tmp_path / "many").stat().st_size < caches
    expected = generator.generate([[4], [9]], 7)
    session.load(tmp_path / "one")
    np.testing.assert_array_equal(session.generate([[], []], 6), expected[:, 1:])
    session.load(tmp_path / "none")
    np.testing.assert_array_equal(session.generate(PROMPTS, 20), texts)
    session.load(tmp_path / "many")
    np.testing.assert_array_equal(session.generate([[], []], 8), texts[:, 12:])


def test_states_of_a_program_are_no_texts(generator: Generator, tmp_path: Path) -> None:
    context = generator.programs[1].context()
    context.states.save(tmp_path / "states.npz")
    with pytest.raises(ProgramFileError, match=r"session\.json: it holds no texts of a session; give a file that session\.save"):
        generator.session().load(tmp_path / "states.npz")


def test_fewer_prompts_than_the_batch_has(generator: Generator, texts: np.ndarray) -> None:
    """The others stay as they are, and wait for prompts of their own."""
    np.testing.assert_array_equal(generator.generate(PROMPTS[:1], 20), texts[:1])
    np.testing.assert_array_equal(generator.generate(PROMPTS[1], 20), generator.generate([PROMPTS[1]], 20))
    told: list[np.ndarray] = []
    session = generator.session()
    first = session.generate(PROMPTS[:1], 4, stream=told.append)
    assert [one.shape for one in told] == [(1,)] * 4
    second = session.generate([[], PROMPTS[1]], 6)
    np.testing.assert_array_equal(first, texts[:1, :4])
    np.testing.assert_array_equal(second, [texts[0, 4:10], texts[1, :6]])
    np.testing.assert_array_equal(session.generate([[]], 5), texts[:1, 10:15])
    np.testing.assert_array_equal(session.generate([[], []], 4), [texts[0, 15:19], texts[1, 6:10]])


def test_as_many_new_tokens_as_each_wants(generator: Generator, texts: np.ndarray) -> None:
    session = generator.session()
    made = session.generate(PROMPTS, [7, 3], pad=95)
    np.testing.assert_array_equal(made[0], texts[0, :7])
    np.testing.assert_array_equal(made[1], [*texts[1, :3], *[95] * 4])
    assert session.waiting == [[texts[0, 6]], [texts[1, 2]]]
    made = session.generate([[], []], np.array([0, 5]))
    np.testing.assert_array_equal(made, [[0] * 5, texts[1, 3:8]])
    made = session.generate([[], [9]], [2, 0])  # a prompt that is only read
    np.testing.assert_array_equal(made[0], texts[0, 7:9])
    assert session.waiting[1] == [9]
    expected = generator.generate([[*PROMPTS[1], *texts[1, :8].tolist(), 9]], 3)
    np.testing.assert_array_equal(session.generate([[], []], [0, 3])[1:], expected)


def test_a_text_that_is_full_lets_the_others_go_on(generator: Generator, texts: np.ndarray) -> None:
    session = generator.session()
    room = MAX_TOKENS + 1 - len(PROMPTS[0])
    session.generate(PROMPTS, [room, 4])
    assert session.length[0] == MAX_TOKENS
    made = session.generate([[], []], 6, pad=95)
    np.testing.assert_array_equal(made, [[95] * 6, texts[1, 4:10]])
    for prompts, n in (([[]], 1), ([[1], []], 1), ([[], []], [1, 0])):
        with pytest.raises(InputError, match=r"sequence 0: 41 tokens before.*the caches hold 40"):
            session.generate(prompts, n)
    session.reset([0])
    made = session.generate([PROMPTS[0], []], 6)
    np.testing.assert_array_equal(made, [texts[0, :6], texts[1, 10:16]])
    for rows in ([2], [-1], [0.0]):
        with pytest.raises(InputError, match="rows: there is no row"):
            session.reset(rows)  # type: ignore[arg-type]


def test_what_waits_has_room(generator: Generator, texts: np.ndarray) -> None:
    """Only reading it, too: kernels would write beyond the caches."""
    session = generator.session()
    for waiting in ([1, 2, 3, 4], [1, 2, 3]):
        with pytest.raises(InputError, match=r"waiting: text 0 would have .* tokens; the caches hold 40"):
            session.rewind([38, 0], [waiting, []])
    session.rewind([40, 38], [[5], [6, 7]])  # of the last one made no place is needed
    assert session.waiting == [[5], [6, 7]]
    session.reset()
    session._waiting = [[], [1] * 42]  # as a file may have it
    with pytest.raises(InputError, match=r"sequence 1: 42 tokens before.*the caches hold 40"):
        session.generate([[], []], 0)
    np.testing.assert_array_equal(session.generate(PROMPTS[:1], 3), texts[:1, :3])  # nothing is read of the other text


def test_rewinding_to_all_tokens_leaves_none_to_read(generator: Generator, texts: np.ndarray) -> None:
    session = generator.session()
    session.generate(PROMPTS, 3)
    session.rewind(np.array([5, 4], np.uint64), [[], []])
    with pytest.raises(InputError, match="of a text of 5 tokens nothing waits to be read; give one, or rewind to 4 tokens with"):
        session.generate([[], []], 3)
    session.rewind([4, 3], [[PROMPTS[0][4]], [int(texts[1, 0])]])
    expected = generator.generate([PROMPTS[0][:5], [*PROMPTS[1], int(texts[1, 0])]], 3)
    np.testing.assert_array_equal(session.generate([[], []], 3), expected)
    with pytest.raises(InputError, match="waiting: 1 rows given; give 2"):
        session.rewind([0, 0], [[1]])


def test_rows_and_what_waits_may_be_flat(generator: Generator) -> None:
    """A row of a session, the tokens of one text; what is neither is refused as such."""
    session = generator.session()
    session.generate(PROMPTS, 1)
    session.reset(1)
    assert session.length.tolist() == [len(PROMPTS[0]), 0]
    for rows in (2, "0", 1.5, [[0]]):
        with pytest.raises(InputError, match="rows: there is no row"):
            session.reset(rows)  # type: ignore[arg-type]
    for waiting, fault in (([5], "waiting: 1 rows given; give 2"), ([5, [6]], "whole numbers"), (1.5, "whole numbers")):
        with pytest.raises(InputError, match=fault):
            session.rewind([3, 3], waiting)  # type: ignore[arg-type]
    session.rewind([3, 0], np.array([[5], [6]]))
    assert session.waiting == [[5], [6]]


def test_an_iterator_of_steps(generator: Generator, texts: np.ndarray) -> None:
    """Each of its tokens when it is made; who leaves has what was made as the text."""
    np.testing.assert_array_equal(np.stack(list(generator.stream(PROMPTS, 20)), 1), texts)
    session, seen = generator.session(), list[np.ndarray]()
    for tokens in session.stream(PROMPTS, 20):
        seen.append(tokens)
        if len(seen) == 6:
            break
    np.testing.assert_array_equal(np.stack(seen, 1), texts[:, :6])
    np.testing.assert_array_equal(np.stack(list(session.stream([[], []], [2, 4], pad=95)), 1), [
        [*texts[0, 6:8], 95, 95], texts[1, 6:10],
    ])  # fmt: skip
    stop = int(texts[0, 9])
    ended = list(session.stream([[]], 10, stop=stop))
    assert [int(tokens[0]) for tokens in ended] == texts[0, 8 : 9 + texts[0, 8:].tolist().index(stop)].tolist()
    assert len(generator._idle) >= 1


def test_an_iterator_has_the_session(generator: Generator, texts: np.ndarray) -> None:
    session = generator.session()
    with pytest.raises(InputError, match="temperature"):
        session.stream(PROMPTS, 3, temperature=-1.0)
    steps = session.stream(PROMPTS, 3)
    steps_left = session.stream(PROMPTS, 3)  # nobody reads it: nothing happens
    next(steps)
    for call in (session.reset, session.fork, lambda: session.generate(PROMPTS, 1), lambda: next(session.stream(PROMPTS, 1))):
        with pytest.raises(InputError, match=r"it is in use: .* by an iterator that has not ended; .* close iterators"):
            call()
    steps.close()  # type: ignore[attr-defined]
    del steps_left
    np.testing.assert_array_equal(session.generate([[], []], 5), texts[:, 1:6])


def test_a_stream_may_not_use_its_session(generator: Generator, tmp_path: Path) -> None:
    session = generator.session()
    with pytest.raises(InputError, match=r"it is in use: .*by the call whose stream this is"):
        session.generate(PROMPTS, 2, stream=lambda _: session.save(tmp_path / "text"))
    session.generate(PROMPTS, 2, stream=lambda _: session.length.sum() > 0)


def test_the_length_is_told_while_another_thread_has_the_states(generator: Generator) -> None:
    """Who generates has them time after time, and does not find them taken."""
    session = generator.session()
    session.generate(PROMPTS, 3)
    with session._states.lock:
        np.testing.assert_array_equal(session.length, [len(prompt) + 2 for prompt in PROMPTS])


def test_an_iterator_that_fails_leaves_the_text(generator: Generator, texts: np.ndarray) -> None:
    session = generator.session()
    session.generate(PROMPTS, 4)
    steps = session.stream([[3], [4]], 9)
    next(steps)
    with pytest.raises(ZeroDivisionError):
        steps.throw(ZeroDivisionError)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(session.generate([[], []], 16), texts[:, 4:])


def test_another_thread_cancels_steps(generator: Generator, texts: np.ndarray) -> None:
    """Told by the loop alone, or beside a stream; what was made is the text. Of no call it is nothing."""
    session, count = generator.session(), 0
    session.cancel()

    def stream(tokens: np.ndarray) -> None:
        nonlocal count
        count += 1
        if count == 5:
            canceller = threading.Thread(target=session.cancel)
            canceller.start()
            canceller.join()

    made = session.generate(PROMPTS, 20, stream=stream)
    np.testing.assert_array_equal(made, texts[:, :5])
    np.testing.assert_array_equal(session.generate([[], []], 15), texts[:, 5:])


def test_a_prompt_is_cancelled_between_pieces(generator: Generator, texts: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is made, and the prompts wait for the next call."""
    session = generator.session()
    session.generate(PROMPTS, 3)
    more = [list(range(20, 38)), [5]]
    calls, next_reader = 0, session._next_reader

    def cancelling() -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            session.cancel()
        return next_reader()

    monkeypatch.setattr(session, "_next_reader", cancelling)
    assert session.generate(more, 4).shape == (2, 0)
    assert calls == 2
    assert session.waiting == [[int(texts[0, 2]), *more[0]], [int(texts[1, 2]), 5]]
    expected = [[*prompt, *text[:3].tolist(), *rest] for prompt, text, rest in zip(PROMPTS, texts, more, strict=True)]
    np.testing.assert_array_equal(session.generate([[], []], 4), generator.generate(expected, 4))
    calls = 1
    with pytest.raises(InputError, match="session: it was cancelled"):
        session.score([[1, 2, 3], [4]])


def test_without_a_stream_python_is_entered_now_and_then(generator: Generator, texts: np.ndarray) -> None:
    """For a Ctrl-C; each time would wait for threads that have the GIL."""
    session, entered = generator.session(), 0

    def trace(frame: FrameType, event: str, argument: object) -> None:
        nonlocal entered
        entered += frame.f_code.co_name == "told"

    sys.settrace(trace)
    try:
        made = session.generate(PROMPTS, 20)
    finally:
        sys.settrace(None)
    np.testing.assert_array_equal(made, texts)
    assert 1 <= entered < 19
