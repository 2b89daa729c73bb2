"""What a call of `generate` asks for, checked: prompts, how many tokens, settings of the choice, and ends."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import numpy as np

from ..errors import InputError
from ..interchange import as_array, is_integer, is_torch

if TYPE_CHECKING:
    import torch

STOPS = 16  # ends of a call, at most: as many tokens as the sampler compares with
SETTINGS, KEY_WORDS = 7, 3  # numbers of a sequence that the sampler reads
Tokens: TypeAlias = "Sequence[int] | Sequence[Sequence[int]] | np.ndarray | torch.Tensor"
Counts: TypeAlias = "int | Sequence[int] | np.ndarray"
Stop: TypeAlias = "int | Sequence[int | Sequence[int]] | np.ndarray"
Bias: TypeAlias = "Mapping[int, float] | Sequence[float] | np.ndarray | torch.Tensor"
Stream: TypeAlias = Callable[[np.ndarray], object]


class Settings(TypedDict, total=False):
    """How tokens are chosen and what ends a sequence: keywords of `generate` and `stream`, which say what they mean."""

    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    repetition_penalty: float | Sequence[float]
    logit_bias: Bias | None
    seed: int | Sequence[int] | np.ndarray | None
    stop: Stop | None
    pad: int | None


@dataclass(frozen=True, slots=True)
class Choice:
    """How tokens are chosen, as the sampler reads it: settings float32 [batch, SETTINGS], key uint32 [batch, KEY_WORDS], ends
    int64 [STOPS + 1], of which the last is what a sequence gets that has ended; bias float32 [batch, vocabulary], if any. It
    knows nothing of `phrases`, several tokens that end one."""

    settings: np.ndarray
    key: np.ndarray
    ends: np.ndarray
    phrases: tuple[list[int], ...]
    bias: np.ndarray | None
    has_penalty: bool

    def ends_at(self, tokens: list[int], place: int) -> bool:
        """Whether new tokens of a sequence up to a place end with one of the phrases."""
        parts = ((place + 1 - len(phrase), phrase) for phrase in self.phrases)
        return any(begin >= 0 and tokens[begin : place + 1] == phrase for begin, phrase in parts)

    def unfilled(self, tokens: list[int]) -> list[int]:
        """New tokens up to the first end, which is the last that is no filling."""
        stops = set(self.ends[:-1].tolist())
        ends = (place for place, token in enumerate(tokens) if token in stops or self.ends_at(tokens, place))
        return tokens[: next(ends, len(tokens) - 1) + 1]


@dataclass(frozen=True, slots=True)
class Request:
    """A call: prompts of all sequences of the batch, of which the first `rows` are given and the others have none; how many new
    tokens of each, int64 [batch], and of a call in all."""

    prompts: list[list[int]]
    rows: int
    n: np.ndarray
    columns: int
    choice: Choice


def request_of(
    tokens: Tokens, n: Counts, batch: int, vocabulary: int, most: int, ends: Sequence[int], settings: Settings
) -> Request:
    """Check a call to a generator of `batch` sequences that hold `most` tokens, by default ended by `ends`. Raises InputError."""
    prompts = [] if has_no_rows(tokens, batch) else prompts_of(tokens, batch, vocabulary)
    rows = len(prompts)
    counts = _counts(n, rows, most)
    choice = choice_of(rows, batch, vocabulary, ends, settings)
    idle = batch - rows
    whole = np.array([*(counts if rows else ()), *[0] * idle], np.int64)
    return Request([*prompts, *([] for _ in range(idle))], rows, whole, max(counts, default=0), choice)


def with_room(request: Request, held: Sequence[int], waiting: Sequence[Sequence[int]], most: int) -> Request:
    """The same without texts that are full, if others go on: those with nothing but a last token to read, and no place for it.
    `held` and `waiting` are how many tokens of each are in the caches, and those that are not; the caches hold `most`.

    Raises:
        InputError: a sequence that is given has no token to begin with, or more than the caches hold.
    """
    whole = np.array([*map(int, held)]) + [len(row) for row in waiting]
    has_prompt = np.array([bool(prompt) for prompt in request.prompts])
    has_more = np.array([len(row) > 1 for row in waiting])
    is_full = ~has_prompt & ~has_more & (request.n > 0) & (whole > most)
    n = np.where(is_full, 0, request.n) if request.n[~is_full].any() else request.n
    for number, prompt in enumerate(request.prompts[: request.rows]):
        where, new = f"tokens of sequence {number}" if len(whole) > 1 else "tokens", int(n[number])
        if not prompt and not waiting[number] and new:
            if held[number]:
                fix = f"give one, or rewind to {held[number] - 1} tokens with the last one waiting"
                raise InputError(where, f"of a text of {held[number]} tokens nothing waits to be read", fix)
            raise InputError(where, "an empty prompt, and no text before it", "give at least one token")
        needed = int(whole[number]) + len(prompt) + max(new - 1, 0)  # the last new token is not kept
        if needed > most and (prompt or new or has_more[number]):
            what = f"{whole[number]} tokens before, {len(prompt)} of the prompt and {new} new ones"
            raise InputError(where, what, f"the caches hold {most}: give fewer, or compile with a larger max_tokens")
    return replace(request, n=n)


def prompts_of(tokens: Tokens, batch: int, vocabulary: int) -> list[list[int]]:
    """The prompts of the sequences that are given. Raises InputError where they are not token numbers, or more than the batch."""
    where = "tokens"
    rows = tokens.tolist() if hasattr(tokens, "tolist") else listed(tokens)
    if isinstance(rows, list):
        rows = [row.tolist() if hasattr(row, "tolist") else row for row in rows]
        if all(isinstance(row, int) for row in rows) and (rows or batch == 1):
            rows = [rows]
    if not isinstance(rows, list) or not all(isinstance(row, (list, tuple)) and all(map(is_integer, row)) for row in rows):
        raise InputError(where, "not all of them are whole numbers", "give a row of token numbers for each sequence")
    if not 0 < len(rows) <= batch:
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


def _counts(given: Counts, rows: int, most: int) -> list[int]:
    """How many new tokens of each of the sequences; of no sequence one number. Raises InputError."""
    numbers, is_list = _each(given, max(rows, 1))
    if is_list and len(numbers) != rows:
        raise InputError("n", f"{len(numbers)} numbers given", f"give one, or one for each of {rows} prompts")
    for number in numbers:
        if not is_integer(number) or number < 0:
            raise InputError("n", f"{number!r} new tokens", "give a whole number from 0 on, or one for each prompt")
        if number > most:
            raise InputError("n", f"{number} new tokens", f"the caches hold {most}: give fewer")
    return [int(number) for number in numbers]


def choice_of(rows: int, batch: int, vocabulary: int, model_ends: Sequence[int], settings: Settings) -> Choice:
    """Check the settings of a call with `rows` sequences. Raises InputError."""
    for name in settings:
        if name not in Settings.__annotations__:
            near = get_close_matches(name, Settings.__annotations__, 1)
            raise InputError(name, "no such setting", f"did you mean {near[0]!r}?" if near else "leave it out")
    numbers = np.tile(np.array([0, 0, 1, -np.inf, 1, 0, 0], np.float32), (batch, 1))
    for place, (setting, (default, is_legal, wanted)) in enumerate(_NUMBERS.items()):
        numbers[:rows, place] = _numbers(setting, settings.get(setting, default), rows, is_legal, wanted)
    numbers[:rows, 1] = np.minimum(numbers[:rows, 1], vocabulary)
    with np.errstate(divide="ignore"):
        numbers[:rows, 3] = np.log(numbers[:rows, 3])
    bias = _bias(settings.get("logit_bias"), rows, batch, vocabulary)
    numbers[:rows, 5] = bias is not None
    ends, phrases = _ends(settings.get("stop"), settings.get("pad"), vocabulary, model_ends)
    has_penalty = bool((numbers[:, 4] != 1).any())
    return Choice(numbers, _key(settings.get("seed"), rows, batch), ends, phrases, bias, has_penalty)


# Defaults, what may be given, and how that is told: in the order in which the sampler reads them.
_NUMBERS: dict[str, tuple[float, Callable[[float], bool], str]] = {
    "temperature": (0.0, lambda x: x == 0 or 1e-3 <= x <= 1e6, "0, or 0.001 to 1e6"),
    "top_k": (0, lambda x: x >= 0 and x == int(x), "a whole number from 0 on"),
    "top_p": (1.0, lambda x: 0 < x <= 1, "a number above 0, up to 1"),
    "min_p": (0.0, lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "repetition_penalty": (1.0, lambda x: 1e-3 <= x <= 1e3, "a number from 0.001 to 1000, 1 for none"),
}


def _bias(given: Bias | None, rows: int, batch: int, vocabulary: int) -> np.ndarray | None:
    """What is added to the logits, float32 [batch, vocabulary]. Raises InputError."""
    if given is None:
        return None
    name, whole = "logit_bias", np.zeros((batch, vocabulary), np.float32)
    try:
        if isinstance(given, Mapping):
            for token, number in given.items():
                if not is_integer(token) or not 0 <= token < vocabulary:
                    raise InputError(name, f"there is no token {token!r}", f"the model has tokens 0 to {vocabulary - 1}")
                whole[:, token] = _without_torch(number, name)
        else:
            array = np.asarray(_without_torch(given, name), np.float32)
            if array.shape not in ((vocabulary,), (rows, vocabulary)):
                fix = f"give a dictionary by tokens, or an array [{vocabulary}] or [{rows}, {vocabulary}]"
                raise InputError(name, f"an array {list(array.shape)} given", fix)
            whole[:rows] = array
    except (TypeError, ValueError, RuntimeError) as error:  # the last of tensors in a list that are no plain numbers
        if isinstance(error, InputError):
            raise
        raise InputError(name, "not all that is given are numbers", "give a dictionary by tokens, or an array") from None
    if np.isnan(whole).any() or np.isposinf(whole).any():
        raise InputError(name, "a number that is NaN or inf given", "give finite numbers, or -inf for a token that never comes")
    if np.isneginf(whole).all(1).any():
        raise InputError(name, "no token is left", "leave one that is not -inf")
    return whole


def _without_torch(given: Any, where: str) -> Any:
    """What is given, as an array where it is a tensor, of any type, with or without a gradient. Raises InputError."""
    return as_array(given, where) if not isinstance(given, (list, tuple)) and is_torch(given) else given


def _key(seed: object, rows: int, batch: int) -> np.ndarray:
    """What tells the draws of sequences apart: the seed, and the number where one seed is for all. Raises InputError."""
    seeds, is_list = _each(secrets.randbits(64) if seed is None else seed, rows)
    if len(seeds) != rows:
        raise InputError("seed", f"{len(seeds)} seeds given", f"give one, or one for each of {rows} prompts")
    for one in seeds:
        if not is_integer(one) or not 0 <= one < 2**64:
            raise InputError("seed", f"{one!r} is no whole number of 64 bits", "give a number from 0 on, or None")
    key = np.zeros((batch, KEY_WORDS), np.uint32)
    for row, one in enumerate(seeds):
        key[row] = int(one) & 0xFFFFFFFF, int(one) >> 32, 0 if is_list else row
    return key


def _ends(
    stop: Stop | None, pad: int | None, vocabulary: int, model_ends: Sequence[int]
) -> tuple[np.ndarray, tuple[list[int], ...]]:
    """Stop tokens with what fills up behind them, int64 [STOPS + 1], and the phrases. Raises InputError."""
    stops = [listed(one) for one in (model_ends if stop is None else listed(stop))]
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
    return np.array([*single, *[-1] * (STOPS - len(single)), last], np.int64), phrases


def _each(given: Any, rows: int) -> tuple[list[Any], bool]:
    """What is given for each of the rows, and whether it is one each, of whatever number; else it is one for all."""
    given = given.tolist() if hasattr(given, "tolist") else given
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    return (list(given) if is_list else [given] * rows), is_list


def listed(given: Any) -> list[Any]:
    """What is given one by one; by itself where it is one thing only."""
    given = given.tolist() if hasattr(given, "tolist") else given
    try:
        return list(given)
    except TypeError:
        return [given]


def _numbers(name: str, given: object, rows: int, is_legal: Callable[[float], bool], wanted: str) -> np.ndarray:
    """One number for all sequences, or one each."""
    try:
        numbers = np.asarray(given, np.float64)
    except (TypeError, ValueError):
        raise InputError(name, f"{given!r} is no number", f"give {wanted}") from None
    if given is None:  # which NumPy takes for NaN
        raise InputError(name, "None is no number", f"give {wanted}")
    if numbers.shape not in ((), (rows,)):
        raise InputError(name, f"{numbers.shape} numbers given", f"give one, or one for each of {rows} sequences")
    for number in numbers.reshape(-1).tolist():
        if not np.isfinite(number) or not is_legal(number):
            raise InputError(name, f"{number:g} given", f"give {wanted}")
    return np.broadcast_to(numbers, (rows,))
