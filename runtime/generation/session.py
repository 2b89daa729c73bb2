"""One text, or a batch of them, that grows: its caches, and the calls that read prompts and make tokens."""

from __future__ import annotations

import ctypes
import json
import os
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from ..archive import COPY_AGAIN
from ..cpu_device import CpuInvocation
from ..device import Invocation
from ..errors import InputError, ProgramFileError
from ..executor import CompiledModel, Context
from ..interchange import is_integer
from .loop import GenerationLibrary, function_address
from .request import Choice, Stop, Stream, Tokens, choice_of, has_no_rows, prompts_of

Table: TypeAlias = "ctypes.Array[ctypes.c_int64]"  # of addresses

LENGTH = "length"  # the state of the programs that says how many tokens of each sequence are in the caches
RECURRENT = "recurrent_"  # what the names of states begin with that each token changes whole


@dataclass(frozen=True, slots=True)
class Limits:
    """What a generator was compiled for: sequences of a call, tokens of a sequence, tokens that there are; and how many numbers
    of scratch its sampler wants."""

    batch: int
    max_tokens: int
    vocabulary: int
    scratch: int


@dataclass(frozen=True, slots=True)
class _Reader:
    """A program that takes `count` tokens of each sequence, in this session."""

    count: int
    call: Invocation
    tokens: np.ndarray  # int64 [batch, count], and how many of each row are real
    counts: np.ndarray


class Session:
    """Texts of a generator, empty at first. One thread at a time may use it.

    `generate` adds prompts to the texts and continues them. Whatever ends a call with an exception leaves the texts as they
    were before it; a `stream` that ends it leaves what was made.
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
        self._library = library
        first = programs[1].context()
        self._states = first.states
        self._recurrent = [name for name in self._states if name.startswith(RECURRENT)]
        contexts = {count: first if count == 1 else program.context_of(self._states) for count, program in programs.items()}
        self._readers = [_reader(batch, count, context) for count, context in sorted(contexts.items())]
        self._logits = np.zeros((batch, vocabulary), np.float32)
        self._state = np.ones(1 + batch, np.int64)  # of the sampler: the number of its step, and which sequences run
        self._alive = np.zeros(1, np.int64)
        self._scratch = np.empty(limits.scratch, np.float32)
        self._waiting: list[list[int]] = [[] for _ in range(batch)]  # of the texts, what is not in the caches
        self._has_nan = False  # in caches that were loaded
        self._lock = threading.Lock()

    def generate(
        self,
        tokens: Tokens,
        n: int,
        *,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        seed: int | None = None,
        stop: Stop = (),
        pad: int | None = None,
        stream: Stream | None = None,
    ) -> np.ndarray:
        """Add prompts to the texts, and continue them; arguments, result and errors are those of `Generator.generate`.

        A prompt may be empty where there is a text. Where n is 0, prompts are only read. No rows of prompts give no rows.
        """
        with self._held():
            is_empty = has_no_rows(tokens, self._batch)
            prompts = [] if is_empty else prompts_of(tokens, self._batch, self._vocabulary)
            choice = choice_of(self._batch, self._vocabulary, temperature, top_k, top_p, seed, stop, pad)
            if not is_integer(n) or n < 0:
                raise InputError("n", f"{n!r} new tokens", "give a whole number from 0 on")
            if n > self._max_tokens:
                raise InputError("n", f"{n} new tokens", f"the caches hold {self._max_tokens}: give fewer")
            if stream is not None and not callable(stream):
                raise InputError("stream", f"{stream!r} cannot be called", "give a function of the new tokens")
            if is_empty:
                return np.empty((0, int(n)), np.int64)
            self._check_room(prompts, int(n))
            before = self.length, [list(row) for row in self._waiting]
            recurrent = {name: self._states[name] for name in self._recurrent}
            try:
                return self._generate(prompts, int(n), choice, stream)
            except BaseException:
                self._go_back(*before)
                for name, state in recurrent.items():
                    self._states[name] = state
                raise

    @property
    def length(self) -> np.ndarray:
        """How many tokens of each text are in the caches, int64 [batch]; the last one made is not yet."""
        return self._states[LENGTH]

    def reset(self) -> None:
        """Begin new texts."""
        with self._held():
            self._go_back(np.zeros(self._batch, np.int64), [[] for _ in range(self._batch)])

    def rewind(self, length: Sequence[int] | np.ndarray, waiting: Sequence[Sequence[int]]) -> None:
        """Go back, or on, to texts of `length` tokens in the caches, as they are there, and `waiting` ones after them.

        Recurrent states are of the last token alone: with them a text begins anew, or stays.

        Raises:
            InputError: there is no room for so many, or no such token; another thread uses the session; or recurrent states
                cannot go there.
        """
        with self._held():
            lengths = np.asarray(length)
            is_inside = lengths.dtype.kind == "i" and bool(((lengths >= 0) & (lengths <= self._max_tokens)).all())
            if lengths.shape != (self._batch,) or not is_inside:
                raise InputError("length", f"{length!r} given", f"give {self._batch} numbers from 0 to {self._max_tokens}")
            if self._recurrent and ((lengths != 0) & (lengths != self.length)).any():
                fix = f"give 0, or the lengths that there are ({self.length.tolist()}), or save the session before"
                raise InputError("length", "the model's recurrent states are those of its last token", fix)
            rows = prompts_of([list(row) for row in waiting], self._batch, self._vocabulary)
            self._go_back(lengths.astype(np.int64), rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the texts' caches to a file. Raises ProgramFileError, or InputError if another thread uses the session."""
        with self._held():
            self._states.save(path, {_WAITING: json.dumps(self._waiting).encode()})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on with texts that `save` wrote; if it fails, those that are here stay.

        Raises:
            ProgramFileError: no such file, a corrupt one, or one of another program.
            InputError: another thread uses the session.
        """
        with self._held():
            waiting = _read_waiting(Path(path), self._batch, self._vocabulary)
            self._states.load(path, check=self._check_states)
            self._waiting = waiting
            self._has_nan = self._keeps_nan()

    def _check_states(self, states: Mapping[str, np.ndarray]) -> str:
        """Why saved states are of no texts: kernels write behind the length that they tell. Empty if they are."""
        is_inside = (states[LENGTH] >= 0) & (states[LENGTH] <= self._max_tokens)
        return "" if is_inside.all() else f"lengths {states[LENGTH].tolist()}, where there is room for {self._max_tokens} tokens"

    def _go_back(self, length: np.ndarray, waiting: list[list[int]]) -> None:
        """Forget what is in the caches from these places on.

        A model may look at forgotten rows, whose weight is 0, as numbers: NaN would stay there, which logits tell.
        """
        if self._has_nan or np.isnan(self._logits).any():
            for name in self._states.keys() - {LENGTH, *self._recurrent}:  # the last of which programs empty
                cache = self._states[name]
                if cache.ndim == _CACHE_RANK:  # a model may keep other things
                    for sequence, first in zip(cache, length.tolist(), strict=True):
                        sequence[:, first:] = 0
                    self._states[name] = cache
            self._logits[:], self._has_nan = 0, self._keeps_nan()
        self._states[LENGTH] = length
        self._waiting = waiting

    def _keeps_nan(self) -> bool:
        return any(np.isnan(self._states[name]).any() for name in self._states)

    @contextmanager
    def _held(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise InputError("session", "another thread is using it", "give each thread its own: generator.session()")
        try:
            yield
        finally:
            self._lock.release()

    def _check_room(self, prompts: Sequence[Sequence[int]], n: int) -> None:
        """Raise InputError if a sequence has no token to begin with, or more than the caches hold."""
        for number, (prompt, waiting, held) in enumerate(zip(prompts, self._waiting, self.length.tolist(), strict=True)):
            where = f"tokens of sequence {number}" if self._batch > 1 else "tokens"
            if not prompt and not waiting and n:
                raise InputError(where, "an empty prompt, and no text before it", "give at least one token")
            needed = held + len(waiting) + len(prompt) + max(n - 1, 0)  # the last new token is not kept
            if needed > self._max_tokens and (prompt or n):
                what = f"{held + len(waiting)} tokens before, {len(prompt)} of the prompt and {n} new ones"
                fix = f"the caches hold {self._max_tokens}: give fewer, or compile with a larger max_tokens"
                raise InputError(where, what, fix)

    def _generate(self, prompts: Sequence[Sequence[int]], n: int, choice: Choice, stream: Stream | None) -> np.ndarray:
        texts = [[*waiting, *prompt] for waiting, prompt in zip(self._waiting, prompts, strict=True)]
        if n == 0:  # all but the last token of each, as after tokens were made
            self._waiting = [text[:-1] for text in texts]
            self._read_prompts()
            self._waiting = [text[-1:] for text in texts]
            return np.empty((self._batch, 0), np.int64)
        self._waiting = texts
        self._read_prompts()
        made = np.zeros((n, self._batch), np.int64)  # a row a step, where the sampler writes and the next step reads
        self._state[0], self._state[1:] = 0, 1
        count = self._run(made, choice, stream)
        made = made[:count]
        self._waiting = [[choice.last_of(row)] for row in made.T.tolist()]  # which no step has read yet
        return np.ascontiguousarray(made.T)

    def _end_phrases(self, made: np.ndarray, choice: Choice) -> None:
        """End the sequences whose new tokens so far end with a phrase: the loop makes no more of them."""
        made = made[-max(map(len, choice.phrases), default=1) :]
        for number in np.flatnonzero(self._state[1:]) if choice.phrases else ():
            if choice.ends_at(made[:, number].tolist(), len(made) - 1):
                self._state[1 + number] = 0
                self._alive[0] -= 1

    def _read_prompts(self) -> None:
        """Put all tokens that wait into the caches, in pieces; the logits of the last of each sequence are left."""
        kept, self._has_nan = np.zeros_like(self._logits), self._has_nan or bool(np.isnan(self._logits).any())
        while any(self._waiting):
            reader = self._next_reader()
            reader.tokens[:], last = 0, []
            for number, waiting in enumerate(self._waiting):
                taken = waiting[: reader.count]
                reader.tokens[number, : len(taken)] = taken
                reader.counts[number] = len(taken)
                if taken and len(taken) == len(waiting):
                    last.append(number)
            reader.call(reader.tokens.ctypes.data, reader.counts.ctypes.data, self._logits.ctypes.data)
            self._waiting = [waiting[reader.count :] for waiting in self._waiting]
            kept[last] = self._logits[last]
        self._logits[:] = kept

    def _next_reader(self) -> _Reader:
        """The program for what waits: the least that takes all of it, or the largest; but none that would be filled up beyond the
        end of the caches, where some models count. With recurrent states, where nothing may be filled up, the largest that each
        sequence with tokens has enough of."""
        lengths = [len(waiting) for waiting in self._waiting if waiting]
        if self._recurrent:
            return next(one for one in reversed(self._readers) if one.count <= min(lengths))
        held = max(int(length) for length, waiting in zip(self.length, self._waiting, strict=True) if waiting)
        fitting = [one for one in self._readers if one.count <= max(self._max_tokens - held, 1)]
        return next((one for one in fitting if one.count >= max(lengths)), fitting[-1])

    def _run(self, made: np.ndarray, choice: Choice, stream: Stream | None) -> int:
        """Fill rows of new tokens; how many were made."""
        library, step = self._library, self._readers[0]
        arrays = (self._logits, choice.settings, choice.key, choice.ends, self._state, self._scratch, made, self._alive)
        table = (ctypes.c_int64 * len(arrays))(*(array.ctypes.data for array in arrays))
        library.prepare()
        library.sample(ctypes.byref(table))

        def after(number: int) -> bool:
            self._end_phrases(made[: number + 2], choice)
            return stream is None or stream(made[number + 1].copy()) is not False

        self._end_phrases(made[:1], choice)
        is_ended = stream is not None and stream(made[0].copy()) is False
        if is_ended or len(made) == 1 or not self._alive[0]:
            return 1
        if not isinstance(step.call, CpuInvocation):
            return 1 + self._launch(step.call, made, table, after)
        is_told = stream is not None or bool(choice.phrases)
        is_watched = is_told or threading.current_thread() is threading.main_thread()
        return 1 + self._repeat(step.call, made, table, after if is_watched else None)

    def _repeat(self, call: CpuInvocation, made: np.ndarray, table: Table, after: Callable[[int], bool] | None) -> int:
        """All further rows of new tokens in one native call; how many were made."""
        library, running = self._library, self._state[1:]
        item, stride = made.itemsize, made.strides[0]
        function, start, first = call.set_up(made.ctypes.data, running.ctypes.data, self._logits.ctypes.data)
        token_place = ctypes.addressof(table) + ctypes.sizeof(ctypes.c_int64) * _TOKEN
        table[_TOKEN] = made.ctypes.data + stride
        fields = {
            "steps": len(made) - 1,
            "step": function_address(function),
            "step_table": start,
            "step_token": first,
            "sample": function_address(library.sample),
            "sample_table": ctypes.addressof(table),
            "sample_token": token_place,
            "stride": self._batch * item,
            "alive": self._alive.ctypes.data,
        }
        return library.repeat(fields, after)

    def _launch(self, call: Invocation, made: np.ndarray, table: Table, after: Callable[[int], bool]) -> int:
        """The same on a GPU: a launch a row, whose logits come to the host, where tokens are chosen."""
        running = self._state[1:]
        for number in range(len(made) - 1):
            call(made[number].ctypes.data, running.ctypes.data, self._logits.ctypes.data)
            table[_TOKEN] = made[number + 1].ctypes.data
            self._library.sample(ctypes.byref(table))
            if not after(number) or not self._alive[0]:
                return number + 1
        return len(made) - 1


_TOKEN = 6  # place of the new token among the sampler's parameters
_CACHE_RANK = 4  # of keys and values: [batch, heads, rows, width]
_WAITING = "waiting.json"  # the member of a saved session with the tokens that are not in the caches


def _reader(batch: int, count: int, context: Context) -> _Reader:
    call = context.prepare()
    return _Reader(count, call, np.zeros((batch, count), np.int64), np.zeros(batch, np.int64))


def _read_waiting(path: Path, batch: int, vocabulary: int) -> list[list[int]]:
    """The tokens that wait, of a saved session; none where its file is none: what is wrong with that, its states tell.

    Raises:
        ProgramFileError: there are states in the file, and no such tokens.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            found = json.loads(archive.read(_WAITING))
        return prompts_of(found, batch, vocabulary) if batch > 1 else prompts_of(found[0], 1, vocabulary)
    except (OSError, zipfile.BadZipFile):
        return [[] for _ in range(batch)]
    except (LookupError, ValueError, TypeError, AttributeError, InputError) as error:
        raise ProgramFileError(f"{path}: {_WAITING}", "it tells no tokens that wait, for texts like these", COPY_AGAIN) from error
