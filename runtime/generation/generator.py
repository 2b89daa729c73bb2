"""Text generators: a model's programs for prompts and for single tokens, and the sessions that each keep a text."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Literal, Unpack, overload

import numpy as np

from ..executor import CompiledModel, Shared
from ..plan import Port
from .generator_file import Parts, read_parts, save_parts
from .request import Counts, Settings, Stream, Tokens
from .session import Limits, Session

_MOST_IDLE = 2  # sessions kept for the next calls: each has caches, and the burst in which it was made may be over


class Generator(Shared):
    """A language model that continues texts. Threads may call it at the same time: each call has a session of its own."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._idle: deque[Session] = deque(maxlen=_MOST_IDLE)  # the longest idle one gives way

    @property
    def programs(self) -> Mapping[int, CompiledModel]:
        """The model's programs, by the number of tokens that they take of each sequence."""
        return dict(self._parts.programs)

    @property
    def limits(self) -> Limits:
        """What it was compiled for."""
        return self._parts.limits

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
        """Continue texts from their beginning on. Numbers may be one for all prompts, or one for each.

        Args:
            tokens: the prompts: for a batch of 1 a row of token numbers, else up to batch rows of any lengths: lists of lists, as
                all numbers of an array are tokens, also those that filled its rows up. An array without rows gives a result
                without rows.
            n: new tokens, at most.
            logprobs: whether the log-probability of each new token is returned, too: by the model's logits as they are.
            stream: called with the new tokens int64 [rows] after each step; where it returns False, generation ends there.
            settings:
                temperature: 0 (the default) takes the likeliest token, else a token is drawn from logits divided by it.
                top_k: draw from the k likeliest only; 0 from all.
                top_p: draw from the fewest likeliest whose probabilities sum to this; 1 from all.
                min_p: draw from those at least this many times as likely as the likeliest; 0 from all.
                repetition_penalty: divides logits above 0 of tokens that the text has, prompts too, multiplies others; 1: none.
                logit_bias: added to the logits before: {token: number}, or an array [vocabulary] or [rows, vocabulary]; -inf bans
                    a token.
                seed: of the random numbers: equal ones draw equal tokens at equal places of a text; None is another one each
                    time. One for each prompt draws the same whatever the other prompts are.
                stop: what ends a sequence, at most 16: tokens, or lists of several new tokens in a row; the end itself is its
                    last. None: the model's own (`limits.ends`, of its generation_config); () for none.
                pad: what a sequence gets that has ended; by default the first stop token, or the last of the first list, or 0.

        Returns:
            int64 [rows, made]: made is the largest n, or less where all sequences have ended or `stream` ended it. With
            `logprobs` also float32 [rows, made], 0 of what only fills up.

        Raises:
            InputError: prompts, n or settings that cannot be, or more tokens than the caches hold. No call after it is affected.
            ArenaMemoryError: there is no memory for another session.
        """
        session = self._taken()
        try:
            session.reset()
            found: np.ndarray | tuple[np.ndarray, np.ndarray]
            if logprobs:
                found = session.generate(tokens, n, logprobs=True, stream=stream, **settings)
            else:
                found = session.generate(tokens, n, stream=stream, **settings)
        except Exception:
            self._idle.append(session)
            raise  # Ctrl-C drops the session: it may come behind any statement
        self._idle.append(session)
        return found

    def stream(self, tokens: Tokens, n: Counts, **settings: Unpack[Settings]) -> Iterator[np.ndarray]:
        """Continue texts from their beginning on, step by step: new tokens int64 [rows] of each. Arguments as of `generate`.

        Raises:
            InputError: prompts, n or settings that cannot be, or more tokens than the caches hold.
            ArenaMemoryError: there is no memory for another session.
        """
        session = self._taken()
        try:
            session.reset()
            steps = session.stream(tokens, n, **settings)
        except Exception:
            self._idle.append(session)
            raise
        return self._streamed(session, steps)

    def _streamed(self, session: Session, steps: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        with suppress(GeneratorExit):  # whoever iterated has left
            yield from steps
        self._idle.append(session)

    def _taken(self) -> Session:
        try:
            return self._idle.pop()
        except IndexError:
            return self.session()

    def session(self) -> Session:
        """A text of its own, empty at first: caches that no other session uses. All sessions share the weights."""
        return Session(self._parts.limits, self._parts.programs, self._parts.library)

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Those of the program that makes a step."""
        return self._parts.programs[1].inputs

    def report(self) -> str:
        """What makes texts slow, if anything does, and the reports of all programs."""
        programs = (f"{count} tokens: {program.report()}" for count, program in self._parts.programs.items())
        return "\n\n".join((*self._parts.notes, *programs))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the generator to a `.prefuse` file, whole or not at all; `prefuse.load_generator` reads it.

        Raises:
            ProgramFileError: the file cannot be written.
        """
        save_parts(path, self._parts)


def load_generator(path: str | os.PathLike[str]) -> Generator:
    """Load a file that `Generator.save` wrote. It holds native code that runs with your rights.

    Raises:
        ProgramFileError: no such file, a corrupt one, or one for another CPU or version.
    """
    return Generator(read_parts(path))
