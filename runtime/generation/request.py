"""What a call of `generate` asks for, checked: prompts, settings of the choice, and ends."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import InputError
from ..interchange import is_integer

if TYPE_CHECKING:
    import torch

STOPS = 16  # ends of a call, at most: as many tokens as the sampler compares with
Tokens: TypeAlias = "Sequence[int] | Sequence[Sequence[int]] | np.ndarray | torch.Tensor"
Stop: TypeAlias = "int | Sequence[int | Sequence[int]] | np.ndarray"
Stream: TypeAlias = Callable[[np.ndarray], object]


@dataclass(frozen=True, slots=True)
class Choice:
    """How tokens are chosen, as the sampler reads it: settings float32 [batch, 3], key uint32 [2], ends int64 [STOPS + 1], of
    which the last is what a sequence gets that has ended. It knows nothing of `phrases`, several tokens that end one."""

    settings: np.ndarray
    key: np.ndarray
    ends: np.ndarray
    phrases: tuple[list[int], ...]

    def ends_at(self, tokens: list[int], place: int) -> bool:
        """Whether new tokens of a sequence up to a place end with one of the phrases."""
        parts = ((place + 1 - len(phrase), phrase) for phrase in self.phrases)
        return any(begin >= 0 and tokens[begin : place + 1] == phrase for begin, phrase in parts)

    def last_of(self, tokens: list[int]) -> int:
        """The last of new tokens that is no filling: where the first end is, or the very last."""
        stops = set(self.ends[:-1].tolist())
        ends = (place for place, token in enumerate(tokens) if token in stops or self.ends_at(tokens, place))
        return tokens[next(ends, -1)]


def prompts_of(tokens: Tokens, batch: int, vocabulary: int) -> list[list[int]]:
    """The prompts of each sequence. Raises InputError where they are not token numbers, or not as many as the batch."""
    where = "tokens"
    rows = tokens.tolist() if hasattr(tokens, "tolist") else _listed(tokens)
    if isinstance(rows, list):
        rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
        if all(isinstance(row, int) for row in rows) and (rows or batch == 1):
            rows = [rows]
    if not isinstance(rows, list) or not all(isinstance(row, (list, tuple)) and all(map(is_integer, row)) for row in rows):
        raise InputError(where, "not all of them are whole numbers", "give a row of token numbers for each sequence")
    if len(rows) != batch:
        raise InputError(where, f"{len(rows)} sequences given, the generator takes {batch}", "compile it with batch=...")
    for row in rows:
        if outside := [token for token in row if not 0 <= token < vocabulary]:
            raise InputError(where, f"there is no token {outside[0]}", f"the model has tokens 0 to {vocabulary - 1}")
    return [list(map(int, row)) for row in rows]


def has_no_rows(tokens: Tokens, batch: int) -> bool:
    """Whether prompts of no sequence at all are given: an array of no rows, or an empty list in the place of several."""
    shape = getattr(tokens, "shape", None)
    if shape is not None:
        return len(shape) == 2 and shape[0] == 0
    return batch > 1 and isinstance(tokens, (list, tuple)) and not tokens


def choice_of(
    batch: int,
    vocabulary: int,
    temperature: float | Sequence[float],
    top_k: int | Sequence[int],
    top_p: float | Sequence[float],
    seed: int | None,
    stop: Stop,
    pad: int | None,
) -> Choice:
    """Check the settings of a call. Raises InputError."""
    settings = np.empty((batch, 3), np.float32)
    settings[:, 0] = _numbers("temperature", temperature, batch, lambda x: x == 0 or 1e-3 <= x <= 1e6, "0, or 0.001 to 1e6")
    counts = _numbers("top_k", top_k, batch, lambda x: x >= 0 and x == int(x), "a whole number from 0 on")
    settings[:, 1] = np.minimum(counts, vocabulary)
    settings[:, 2] = _numbers("top_p", top_p, batch, lambda x: 0 < x <= 1, "a number above 0, up to 1")
    if seed is not None and (not is_integer(seed) or not 0 <= seed < 2**64):
        raise InputError("seed", f"{seed!r} is no whole number of 64 bits", "give a number from 0 on, or None")
    number = secrets.randbits(64) if seed is None else int(seed)
    stops = [_listed(one) for one in _listed(stop)]
    if len(stops) > STOPS:
        raise InputError("stop", f"{len(stops)} tokens or sequences given", f"give at most {STOPS}")
    if [] in stops:
        raise InputError("stop", "a sequence without tokens", "give tokens, or sequences of some")
    for name, token in (*(("stop", one) for tokens in stops for one in tokens), *(() if pad is None else (("pad", pad),))):
        if not is_integer(token) or not 0 <= token < vocabulary:
            raise InputError(name, f"there is no token {token!r}", f"the model has tokens 0 to {vocabulary - 1}")
    single = [tokens[0] for tokens in stops if len(tokens) == 1]
    phrases = tuple([int(token) for token in tokens] for tokens in stops if len(tokens) > 1)
    last = pad if pad is not None else stops[0][-1] if stops else 0
    ends = np.array([*single, *[-1] * (STOPS - len(single)), last], np.int64)
    return Choice(settings, np.array([number & 0xFFFFFFFF, number >> 32], np.uint32), ends, phrases)


def _listed(given: Any) -> list[Any]:
    """What is given one by one; by itself where it is one thing only."""
    given = given.tolist() if hasattr(given, "tolist") else given
    try:
        return list(given)
    except TypeError:
        return [given]


def _numbers(name: str, given: object, batch: int, is_legal: Callable[[float], bool], wanted: str) -> np.ndarray:
    """One number for all sequences, or one each."""
    try:
        numbers = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        raise InputError(name, f"{given!r} is no number", f"give {wanted}") from None
    if given is None:  # which NumPy takes for NaN
        raise InputError(name, "None is no number", f"give {wanted}")
    if numbers.shape not in ((), (batch,)):
        raise InputError(name, f"{numbers.shape} numbers given", f"give one, or one for each of {batch} sequences")
    for number in numbers.reshape(-1).tolist():
        if not np.isfinite(number) or not is_legal(number):
            raise InputError(name, f"{number:g} given", f"give {wanted}")
    return np.broadcast_to(numbers, (batch,))
