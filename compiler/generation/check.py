"""Whether the programs of a generator agree: a prompt in one piece, and in two, one of them a token; and with the file itself."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...runtime.errors import UnsupportedModelError
from ...runtime.executor import CompiledModel

_TOKENS = 7
_TOLERANCE = 0.05  # of the norm of logits: of programs that round to bfloat16, too
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


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest norm of a row of logits' differences, of the norm of all; NaN where there is one. Logits of -inf may agree."""
    if np.isnan(found).any() or np.isnan(expected).any():
        return np.nan
    with np.errstate(invalid="ignore"):
        differences = np.where(found == expected, 0, found - expected)
    size = np.linalg.norm(expected[np.isfinite(expected)])
    return float(np.linalg.norm(differences, axis=-1).max() / max(size, 1e-30))
