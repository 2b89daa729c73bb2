"""Whether the programs of a generator agree: a prompt in one piece, and in two, one of them a token; and with the file itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ...runtime.errors import UnsupportedModelError
from ...runtime.executor import CompiledModel, Context
from ...runtime.generation.session import RECURRENT

_TOKENS = 7
_PAST = 4  # tokens behind which a piece is read, at least
_TOLERANCE, _EXACT = 0.05, 1e-3  # of the norm of logits: of programs that round to bfloat16, too, and of those that do not
_FIX = "export the model with the input position_ids"


def check_programs(programs: Mapping[int, CompiledModel], max_tokens: int, whole: CompiledModel | None = None) -> None:
    """Compare the logits after all of some tokens with those of all but the last, and then that: nothing without two programs.
    And with those that `whole` has of tokens without a past [batch, count, vocabulary], for the least count above 1.

    Raises:
        UnsupportedModelError: they differ: the model counts places by the length of its past.
    """
    count = next((one for one in sorted(programs) if one > 1), 0)
    tokens = min(count, _TOKENS, max_tokens)
    if tokens < 2:
        return
    prompt, step = programs[count], programs[1]
    batch, vocabulary = step.outputs[0].type.shape
    row = np.zeros((batch, count), np.int64)
    row[:, :tokens] = (7 + 5 * np.arange(tokens)) % vocabulary
    first = np.array(prompt.context()(row, np.full(batch, tokens)))
    context = prompt.context()
    context(row, np.full(batch, tokens - 1))
    last = np.array(step.context_of(context.states)(row[:, tokens - 1 : tokens], np.ones(batch, np.int64)))
    others = [last] if whole is None else [last, np.asarray(whole(row), np.float32)[:, tokens - 1]]
    error = max(relative_error(one, first) for one in others)
    if np.isnan(error):
        raise UnsupportedModelError("model", "there is NaN in its logits", "see that its weights are finite")
    if error > _TOLERANCE:
        what = f"its logits differ by {error:.1g} of their norm with where the past ends"
        raise UnsupportedModelError("model", f"{what}: places are counted by the length of the past, which is fixed here", _FIX)


def check_pieces(programs: Mapping[int, CompiledModel], max_tokens: int, *, is_float32: bool) -> None:
    """Compare the logits behind a piece by each program, where there is a past, with those of pieces by the next smaller one.

    Raises:
        UnsupportedModelError: they differ: what a token sees depends on where keys lie in the caches.
    """
    batch, vocabulary = programs[1].outputs[0].type.shape

    def read(context: Context, tokens: np.ndarray, most: int) -> np.ndarray:
        """The logits after tokens, in pieces of `most`, of which none is filled up."""
        begin, logits = 0, np.zeros(0)
        while begin < tokens.shape[1]:
            count = most if begin + most <= tokens.shape[1] else 1
            piece, begin = np.ascontiguousarray(tokens[:, begin : begin + count]), begin + count
            logits = np.array(programs[count].context_of(context.states)(piece, np.full(batch, count)))
        return logits

    for smaller, count in pairwise(sorted(programs)):
        past = min(max(_PAST, max_tokens // 8), 2 * count, max_tokens - 1)
        new = min(count, max_tokens - past)
        text = np.tile((7 + 5 * np.arange(past + new)) % vocabulary, (batch, 1))
        contexts = [programs[1].context() for _ in range(2)]
        read(contexts[0], text[:, :past], smaller)
        for name in contexts[0].states:
            contexts[1].states[name] = contexts[0].states[name]
        others = read(contexts[0], text[:, past:], smaller)
        rest = np.zeros((batch, count), np.int64)
        rest[:, :new] = text[:, past:]
        found = np.array(programs[count].context_of(contexts[1].states)(rest, np.full(batch, new)))
        error = relative_error(found, others)
        if not error <= (_EXACT if is_float32 else _TOLERANCE):
            what = f"behind {past} tokens, logits differ by {error:.1g} of their norm between pieces of {count} and of {smaller}"
            raise UnsupportedModelError("model", f"{what}: what a token sees depends on where keys lie in the caches", _FIX)


def check_singles(step: CompiledModel, whole: CompiledModel, *, is_float32: bool) -> None:
    """Compare the logits after single tokens with those that `whole` has of them without a past [batch, count, vocabulary].

    Raises:
        UnsupportedModelError: they differ.
    """
    batch, count = whole.inputs[0].type.shape
    text = np.tile((7 + 5 * np.arange(count)) % step.outputs[0].type.shape[1], (batch, 1))
    context, logits = step.context(), np.zeros(0)
    for number in range(count):
        logits = np.array(context(np.ascontiguousarray(text[:, number : number + 1]), np.ones(batch, np.int64)))
    if not relative_error(logits, np.asarray(whole(text), np.float32)[:, -1]) <= (_EXACT if is_float32 else _TOLERANCE):
        what = "token by token its logits are not those of the file, or there is NaN in them"
        raise UnsupportedModelError("model", what, "see that its weights are finite, and that outputs renew all that it keeps")


def agreeing_programs(programs: Mapping[int, CompiledModel], max_tokens: int, *, is_float32: bool) -> dict[int, CompiledModel]:
    """Of programs with recurrent states that of one token, and those that read two pieces in a row as it does."""
    step, tolerance = programs[1], 1e-4 if is_float32 else _TOLERANCE
    batch, vocabulary = step.outputs[0].type.shape
    text = np.tile((7 + 5 * np.arange(max_tokens)) % vocabulary, (batch, 1))

    def after(first: Sequence[int], then: Sequence[int], is_emptied: bool) -> list[np.ndarray]:
        context, begin, logits = step.context(), 0, np.zeros(0)
        for number, count in enumerate((*first, *then)):
            if is_emptied and number == len(first):
                for name in context.states:
                    if name.startswith(RECURRENT):
                        context.states[name] = np.zeros_like(context.states[name])
            tokens, begin = np.ascontiguousarray(text[:, begin : begin + count]), begin + count
            logits = np.array(programs[count].context_of(context.states)(tokens, np.full(batch, count)))
        return [logits, *(context.states[name].astype(np.float32) for name in sorted(context.states))]

    larger = [count for count in programs if 1 < count <= max_tokens // 2]
    return {count: programs[count] for count in (1, *(count for count in larger if goes_on(after, count, count, tolerance)))}


After: TypeAlias = Callable[[Sequence[int], Sequence[int], bool], list[np.ndarray]]


def goes_on(after: After, first: int, then: int, tolerance: float) -> bool:
    """Whether pieces of `first` and `then` tokens leave what as many single tokens do.

    `after` gives the logits and all states after pieces of the first and second tokens, with recurrent states emptied between
    these if asked. Where single tokens then leave other states, pieces must, too: that they begin anew may show little.
    """
    pieces, singles = ([first], [then]), ([1] * first, [1] * then)
    found, expected = after(*pieces, False), after(*singles, False)
    if not all(relative_error(*pair) <= tolerance for pair in zip(found, expected, strict=True)):
        return False
    emptied = zip(found, after(*pieces, True), expected, after(*singles, True), strict=True)
    return all(np.array_equal(*both[2:]) or not np.array_equal(*both[:2]) for both in emptied)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest norm of a row of logits' differences, of the norm of all; NaN where there is one. Logits of -inf may agree."""
    if np.isnan(found).any() or np.isnan(expected).any():
        return np.nan
    with np.errstate(invalid="ignore"):
        differences = np.where(found == expected, 0, found - expected)
    size = np.linalg.norm(expected[np.isfinite(expected)])
    return float(np.linalg.norm(differences, axis=-1).max() / max(size, 1e-30))
