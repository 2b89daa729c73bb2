"""One text, or a batch of them, that grows: its caches, and the calls that read prompts and make tokens."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

import numpy as np

from ..cpu_device import CpuInvocation
from ..device import Invocation
from ..errors import InputError
from ..executor import CompiledModel
from ..interchange import is_integer
from ..states import CACHE_RANK
from .loop import GenerationLibrary
from .prompt_cover import first_piece
from .request import Counts, Request, Settings, Stream, Tokens, listed, prompts_of, request_of, with_room
from .session_file import UNKNOWN, Texts, load_texts, rows_in_use, save_texts, set_rows
from .steps import Steps, log_probability

LENGTH = "length"  # the state of the programs that says how many tokens of each sequence are in the caches
RECURRENT = "recurrent_"  # what the names of states begin with that each token changes whole


@dataclass(frozen=True, slots=True)
class Limits:
    """What a generator was compiled for: sequences of a call, tokens of a sequence, tokens that there are; how many numbers of
    scratch its sampler wants; and the tokens that end a sequence where a call does not say what does."""

    batch: int
    max_tokens: int
    vocabulary: int
    scratch: int
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Reader:
    """A program that takes `count` tokens of each sequence, in this session."""

    count: int
    call: Invocation
    tokens: np.ndarray  # int64 [batch, count], and how many of each row are real
    counts: np.ndarray


class Session:
    """Texts of a generator, empty at first. One thread at a time may use it, but for `cancel` and `length`.

    `generate` adds prompts to the texts and continues them. Whatever ends a call with an exception leaves the texts as they
    were before it; a `stream` that ends it, or `cancel`, leaves what was made.
    """

    def __init__(
        self,
        limits: Limits,
        programs: Mapping[int, CompiledModel],
        library: GenerationLibrary,
    ) -> None:
        """Take the memory of caches and activations. Raises ArenaMemoryError."""
        batch, vocabulary = limits.batch, limits.vocabulary
        self._batch, self._max_tokens, self._vocabulary = batch, limits.max_tokens, vocabulary
        self._limits, self._programs, self._library = limits, programs, library
        first = programs[1].context()
        self._states = first.states
        self._recurrent = [name for name in self._states if name.startswith(RECURRENT)]
        self._caches = [
            state.name
            for state, _ in self._states.layout
            if state.name not in self._recurrent and len(state.type.shape) == CACHE_RANK  # a model may keep other things
        ]
        contexts = {count: first if count == 1 else program.context_of(self._states) for count, program in programs.items()}
        arena = first.new_arena(max(context.arena_bytes for context in contexts.values()))  # one program runs at a time
        self._readers = [_reader(batch, count, context.prepare(arena)) for count, context in sorted(contexts.items())]
        self._logits = np.zeros((batch, vocabulary), np.float32)
        self._steps = Steps(library, self._readers[0].call, self._logits, limits.scratch)
        self._read: list[list[int]] = [[] for _ in range(batch)]  # of the texts, what is in the caches
        self._waiting: list[list[int]] = [[] for _ in range(batch)]  # and what is not
        self._before: tuple[np.ndarray, list[list[int]], dict[str, np.ndarray]] = np.zeros(batch, np.int64), [], {}  # of the call
        self._has_nan = False  # in caches that were loaded
        self._lock = threading.Lock()

    @overload
    def generate(
        self,
        tokens: Tokens,
        n: Counts,
        *,
        logprobs: Literal[False] = False,
        stream: Stream | None = None,
        **settings: Unpack[Settings],
    ) -> np.ndarray: ...

    @overload
    def generate(
        self,
        tokens: Tokens,
        n: Counts,
        *,
        logprobs: Literal[True],
        stream: Stream | None = None,
        **settings: Unpack[Settings],
    ) -> tuple[np.ndarray, np.ndarray]: ...

    def generate(
        self,
        tokens: Tokens,
        n: Counts,
        *,
        logprobs: bool = False,
        stream: Stream | None = None,
        **settings: Unpack[Settings],
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Add prompts to the texts, and continue them; arguments, result and errors are those of `Generator.generate`.

        A prompt may be empty where there is a text. Sequences that have no prompt here, as fewer are given than the batch has,
        stay as they are. Where n is 0, a prompt is only read. A text without a prompt and without room stays as it is, if there
        are others that go on. No rows of prompts give no rows.
        """
        with self._held():
            request = self._checked(tokens, n, settings)
            if stream is not None and not callable(stream):
                raise InputError("stream", f"{stream!r} cannot be called", "give a function of the new tokens")
            request.choice.settings[:, -1] = bool(logprobs)
            with self._undone():
                made = self._generate(request, stream) if request.rows else np.empty((0, request.columns), np.int64)
            if not logprobs:
                return made
            told = self._steps.logprobs[: made.shape[1], : request.rows].T
            return made, np.ascontiguousarray(told) if made.size else np.zeros(made.shape, np.float32)

    def stream(self, tokens: Tokens, n: Counts, **settings: Unpack[Settings]) -> Iterator[np.ndarray]:
        """Add prompts to the texts, and continue them as `generate` does, step by step: new tokens int64 [rows] of each.

        The session is taken from the first token on until the iterator ends or is closed, as a `for` loop does that is left;
        what was made by then is the text. What is wrong with the arguments is raised here, else errors are those of `generate`.
        """
        with self._held():
            request = self._checked(tokens, n, settings)
        return self._streamed(request)

    def score(self, tokens: Tokens) -> list[np.ndarray]:
        """Add tokens to the texts, and tell how likely they were, read one by one.

        Returns:
            the log-probability of each token, float32 [tokens] of each row: by all tokens before it, NaN where there are none.

        Raises:
            InputError: no such tokens, or more than the caches hold; or `cancel` was called. The texts stay.
        """
        with self._held():
            request = self._checked(tokens, 0, {})
            with self._undone():
                return self._score(request.prompts)[: request.rows]

    def cancel(self) -> None:
        """Ask the call under way in another thread to end: between two steps, or two pieces of a prompt. Nothing without one.

        The call returns what was made, perhaps nothing: then the prompts wait for the next one, which reads them.
        """
        self._steps.cancel()

    @property
    def length(self) -> np.ndarray:
        """How many tokens of each text are in the caches, int64 [batch]; the last one made is not yet."""
        return self._states.glance(LENGTH)

    @property
    def waiting(self) -> list[list[int]]:
        """The tokens of each text that are not in the caches yet: the last one made, and what `rewind` left there."""
        return [list(row) for row in self._waiting]

    def fork(self) -> Session:
        """Another session with the same texts, which go on independently: a copy of the rows of the caches that are in use.

        Raises:
            InputError: the session is in use.
            ArenaMemoryError: there is no memory for another one.
        """
        with self._held():
            other = Session(self._limits, self._programs, self._library)
            other._take(self._texts())
            other._has_nan = self._has_nan or bool(np.isnan(self._logits).any())
            return other

    def __copy__(self) -> Session:
        """As `fork`."""
        return self.fork()

    def __deepcopy__(self, memo: object) -> Session:
        """As `fork`."""
        return self.fork()

    def reset(self, rows: int | Sequence[int] | None = None) -> None:
        """Begin new texts, or those of some rows of the batch alone. Raises InputError for rows that there are not."""
        with self._held():
            numbers = list(range(self._batch)) if rows is None else listed(rows)
            if outside := [row for row in numbers if not is_integer(row) or row not in range(self._batch)]:
                raise InputError("rows", f"there is no row {outside[0]!r}", f"give numbers from 0 to {self._batch - 1}")
            length = self.length
            length[numbers] = 0
            self._go_back(length, [[] if row in numbers else waiting for row, waiting in enumerate(self._waiting)])

    def rewind(self, length: Sequence[int] | np.ndarray, waiting: Tokens) -> None:
        """Go back, or on, to texts of `length` tokens in the caches, as they are there, and `waiting` ones after them.

        Before more tokens are made of a text, at least one must wait: to take tokens back, go to the length before the last
        that stays, and give that. Going on is to rows of texts that were taken back, or to zeros. Recurrent states are of the
        last token alone: with them a text begins anew, or stays.

        Raises:
            InputError: there is no room for so many, or no such token; the session is in use; or recurrent states cannot go
                there.
        """
        with self._held():
            lengths = np.asarray(length)
            is_inside = lengths.dtype.kind in "iu" and bool(((lengths >= 0) & (lengths <= self._max_tokens)).all())
            if lengths.shape != (self._batch,) or not is_inside:
                raise InputError("length", f"{length!r} given", f"give {self._batch} numbers from 0 to {self._max_tokens}")
            if self._recurrent and ((lengths != 0) & (lengths != self.length)).any():
                fix = f"give 0, or the lengths that there are ({self.length.tolist()}), or save the session before"
                raise InputError("length", "the model's recurrent states are those of its last token", fix)
            given: Any = [row if is_integer(row) else listed(row) for row in listed(waiting)]  # of one text perhaps its tokens
            rows = prompts_of(given, self._batch, self._vocabulary)
            if len(rows) != self._batch:
                raise InputError("waiting", f"{len(rows)} rows given", f"give {self._batch}, empty ones perhaps")
            for number, (held, row) in enumerate(zip(lengths.tolist(), rows, strict=True)):
                if len(row) > 1 and held + len(row) > self._max_tokens:  # the last one made needs no place
                    what = f"text {number} would have {held + len(row)} tokens"
                    raise InputError("waiting", what, f"the caches hold {self._max_tokens}: give fewer")
            self._go_back(lengths.astype(np.int64), rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the texts to a file, of caches the rows in use.

        Raises:
            ProgramFileError: it cannot be written.
            InputError: the session is in use.
        """
        with self._held():
            save_texts(path, self._states, self._texts())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on with texts that `save` wrote; if it fails, those that are here stay.

        Raises:
            ProgramFileError: no such file, a corrupt one, or one of another program.
            InputError: the session is in use.
        """
        with self._held():
            texts = load_texts(path, self._states, self._caches, LENGTH, self._max_tokens, self._vocabulary)
            self._go_back(np.zeros(self._batch, np.int64), self._waiting)  # clears NaN of rows that no saved one replaces
            self._take(texts)
            self._has_nan = any(np.isnan(array).any() for array in texts.states.values())

    def _texts(self) -> Texts:
        """A copy of the texts."""
        states = rows_in_use(self._states, self._caches, self.length.tolist())
        return Texts(states, [list(row) for row in self._read], self.waiting)

    def _take(self, texts: Texts) -> None:
        """Have other texts."""
        set_rows(self._states, texts.states)
        self._read, self._waiting = texts.read, texts.waiting

    def _go_back(self, length: np.ndarray, waiting: list[list[int]]) -> None:
        """Forget what is in the caches from these places on.

        A model may look at forgotten rows, whose weight is 0, as numbers: NaN would stay there, which logits tell.
        """
        if self._has_nan or np.isnan(self._logits).any():
            for name in self._caches:  # recurrent states are emptied by programs
                cache = self._states[name]
                for sequence, first in zip(cache, length.tolist(), strict=True):
                    sequence[:, first:] = 0
                self._states[name] = cache
            self._logits[:], self._has_nan = 0, self._keeps_nan()
        self._states[LENGTH] = length
        self._read = [
            [*row[:held], *[UNKNOWN] * (held - len(row))] for row, held in zip(self._read, length.tolist(), strict=True)
        ]
        self._waiting = waiting

    def _keeps_nan(self) -> bool:
        return any(np.isnan(self._states[name]).any() for name in self._states)

    @contextmanager
    def _held(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            what = "it is in use: by another thread, by the call whose stream this is, or by an iterator that has not ended"
            raise InputError("session", what, "give each thread its own, generator.session(), and close iterators")
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """What ends a call with an exception leaves the texts as they were."""
        self._steps.renew()
        self._before = self.length, self.waiting, {name: self._states[name] for name in self._recurrent}
        try:
            yield
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        """Have the texts that were there before the call."""
        length, waiting, recurrent = self._before
        self._go_back(length, waiting)
        for name, state in recurrent.items():
            self._states[name] = state

    def _checked(self, tokens: Tokens, n: Counts, settings: Settings) -> Request:
        """What a call asks for, of texts as they are. Raises InputError."""
        limits = self._limits
        request = request_of(tokens, n, self._batch, self._vocabulary, self._max_tokens, limits.ends, settings)
        return self._with_room(request)

    def _with_room(self, request: Request) -> Request:
        return with_room(request, self.length.tolist(), self._waiting, self._max_tokens)

    def _generate(self, request: Request, stream: Stream | None) -> np.ndarray:
        rows, steps = request.rows, self._steps
        kept = self._begin(request)
        if kept is None:
            return np.empty((rows, 0), np.int64)
        if stream is None or stream(steps.last(rows)) is not False:
            steps.run(len(steps.made), rows, stream)
        self._settle(request, kept)
        return np.ascontiguousarray(steps.made[: steps.count, :rows].T)

    def _streamed(self, request: Request) -> Iterator[np.ndarray]:
        with self._held(), self._undone():
            request = self._with_room(request)  # the text may be another one since
            kept = self._begin(request) if request.rows else None
            if kept is None:
                return
            with suppress(GeneratorExit):  # whoever iterated has left
                yield self._steps.last(request.rows)
                while not self._steps.is_over:
                    self._steps.run(1, request.rows, None)
                    yield self._steps.last(request.rows)
            self._settle(request, kept)

    def _begin(self, request: Request) -> list[list[int]] | None:
        """Read what is to be read, and choose the first tokens. Returns what waits of the sequences that get none; None where
        none gets any, or the call is cancelled, and then all is as it shall be."""
        texts = [[*waiting, *prompt] for waiting, prompt in zip(self._waiting, request.prompts, strict=True)]
        kept = [
            [] if new else text[-1:] if number < request.rows else text  # of those that are given all but the last token is read
            for number, (text, new) in enumerate(zip(texts, request.n.tolist(), strict=True))
        ]
        self._waiting = [text[: len(text) - len(rest)] for text, rest in zip(texts, kept, strict=True)]
        self._read_prompts()
        if any(self._waiting):  # cancelled: some texts have logits and some have not
            self._undo()
            self._waiting = texts
            return None
        if not request.n.any():
            self._waiting = kept
            return None
        seen = None
        if request.choice.has_penalty:
            seen = np.zeros((self._batch, self._vocabulary), np.int8)
            for marks, text in zip(seen, self._read, strict=True):
                marks[[token for token in text if token != UNKNOWN]] = 1
        self._steps.begin(request.choice, request.n, self.length, seen)
        return kept

    def _settle(self, request: Request, kept: list[list[int]]) -> None:
        """Add the new tokens to the texts: the last of each, which no step has read yet, waits."""
        count = self._steps.count
        for number, (column, new) in enumerate(zip(self._steps.made.T, request.n.tolist(), strict=True)):
            tokens = request.choice.unfilled(column[: min(count, new)].tolist()) if new else []
            self._read[number] += tokens[:-1]
            self._waiting[number] = tokens[-1:] if new else kept[number]

    def _score(self, prompts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Read prompts token by token behind what waits before them; the log-probability of each of their tokens."""
        found = [np.full(len(prompt), np.nan, np.float32) for prompt in prompts]
        waiting = self._waiting
        self._waiting = [row if prompt else [] for row, prompt in zip(waiting, prompts, strict=True)]
        self._read_prompts()
        for place in range(max(map(len, prompts))):
            for number, prompt in enumerate(prompts):
                if place < len(prompt) and (place or waiting[number]):
                    found[number][place] = log_probability(self._logits[number], prompt[place])
            self._waiting = [list(prompt[place : place + 1]) if place + 1 < len(prompt) else [] for prompt in prompts]
            self._read_prompts()
        if self._steps.is_cancelled:
            raise InputError("session", "it was cancelled", "score the tokens again")
        self._waiting = [list(prompt[-1:]) or row for prompt, row in zip(prompts, waiting, strict=True)]
        return found

    def _read_prompts(self) -> None:
        """Put all tokens that wait into the caches, in pieces; the logits of the last of each sequence are left."""
        kept, self._has_nan = np.zeros_like(self._logits), self._has_nan or bool(np.isnan(self._logits).any())
        while any(self._waiting) and not self._steps.is_cancelled:
            reader = self._next_reader()
            reader.tokens[:], last = 0, []
            for number, waiting in enumerate(self._waiting):
                taken = waiting[: reader.count]
                reader.tokens[number, : len(taken)] = taken
                reader.counts[number] = len(taken)
                self._read[number] += taken
                if taken and len(taken) == len(waiting):
                    last.append(number)
            reader.call(reader.tokens.ctypes.data, reader.counts.ctypes.data, self._logits.ctypes.data)
            self._waiting = [waiting[reader.count :] for waiting in self._waiting]
            kept[last] = self._logits[last]
        self._logits[:] = kept

    def _next_reader(self) -> _Reader:
        """The program for what waits: the first of those that read it in the least time; but none that would be filled up beyond
        the end of the caches, where some models count. With recurrent states, where nothing may be filled up, the largest that
        each sequence with tokens has enough of."""
        lengths = [len(waiting) for waiting in self._waiting if waiting]
        if self._recurrent:
            return next(one for one in reversed(self._readers) if one.count <= min(lengths))
        held = max(int(length) for length, waiting in zip(self.length, self._waiting, strict=True) if waiting)
        fixed = (_WEIGHTS_ROWS if isinstance(self._readers[0].call, CpuInvocation) else _LAUNCHES_ROWS) / self._batch
        counts = [one.count for one in self._readers]
        return self._readers[counts.index(first_piece(counts, max(lengths), self._max_tokens - held, fixed))]


_WEIGHTS_ROWS = 12  # of a prompt's piece, which take as long as reading all weights: GPT-2 in float32, two threads
_LAUNCHES_ROWS = 1 << 20  # the same on a GPU: the fewest pieces


def _reader(batch: int, count: int, call: Invocation) -> _Reader:
    return _Reader(count, call, np.zeros((batch, count), np.int64), np.zeros(batch, np.int64))
