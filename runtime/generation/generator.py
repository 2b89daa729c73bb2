"""Text generators: a model's programs for prompts and for single tokens, and the sessions that each keep a text."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from ..executor import CompiledModel, Shared
from ..plan import Port
from .generator_file import Parts, read_parts, save_parts
from .request import Stop, Stream, Tokens
from .session import Limits, Session


class Generator(Shared):
    """A language model that continues texts. Threads may call it at the same time: each call has a session of its own."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._idle: deque[Session] = deque()

    @property
    def programs(self) -> Mapping[int, CompiledModel]:
        """The model's programs, by the number of tokens that they take of each sequence."""
        return dict(self._parts.programs)

    @property
    def limits(self) -> Limits:
        """What it was compiled for."""
        return self._parts.limits

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
        """Continue texts from their beginning on.

        Args:
            tokens: the prompts: for a batch of 1 a row of token numbers, else a row each, of any lengths; an array without rows
                gives a result without rows.
            n: new tokens of each sequence, at most.
            temperature: 0 takes the likeliest token, else a token is drawn from logits divided by it; one for all, or one each.
            top_k: draw from the k likeliest only; 0 from all.
            top_p: draw from the fewest likeliest whose probabilities sum to this; 1 from all.
            seed: of the random numbers: equal ones draw equal tokens; None is another one each time.
            stop: what ends a sequence, at most 16: tokens, or lists of several new tokens in a row; the end itself is its last.
            pad: what a sequence gets that has ended; by default the first stop token, or the last of the first list.
            stream: called with the new tokens int64 [batch] after each step; where it returns False, generation ends there.

        Returns:
            int64 [batch, made]: made is n, or less where all sequences have ended or `stream` ended it.

        Raises:
            InputError: prompts, n or settings that cannot be, or more tokens than the caches hold. No call after it is affected.
            ArenaMemoryError: there is no memory for another session.
        """
        try:
            session = self._idle.pop()
        except IndexError:
            session = self.session()
        try:
            session.reset()
            made = session.generate(
                tokens, n, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop, pad=pad, stream=stream
            )
        except Exception:
            self._idle.append(session)
            raise  # Ctrl-C drops the session: it may come behind any statement
        self._idle.append(session)
        return made

    def session(self) -> Session:
        """A text of its own, empty at first: caches that no other session uses. All sessions share the weights."""
        return Session(self._parts.limits, self._parts.programs, self._parts.library)

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Those of the program that makes a step."""
        return self._parts.programs[1].inputs

    def report(self) -> str:
        """The reports of all programs."""
        return "\n\n".join(f"{count} tokens: {program.report()}" for count, program in self._parts.programs.items())

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
