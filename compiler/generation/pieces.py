"""Whether a model with recurrent states reads a prompt in pieces, each by one program, or token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .causal_step import CausalStep, tolerance_of
from .check import relative_error

_PIECES = (6, 5)  # tokens, one after the other, and one behind them
_COUNTED = 16  # tokens of the piece whose operators are counted
_MOST_MORE = 200  # operators a layer, beside those of one token: torch exports some tens in a second


def takes_pieces(step: CausalStep) -> bool:
    """Whether several tokens a call, of each sequence as many, go on from the states of those before, by not many more operators.

    The code of some models begins anew with more than one token (Mamba), or is exported with a loop over tokens (linear
    attention), of which a program would have all turns one after the other. States are zeros afterwards, as before.
    """
    if not step.is_recurrent:
        return True
    if step.max_tokens < max(sum(_PIECES) + 1, _COUNTED):
        return False
    return _goes_on(step) and _operators(step, _COUNTED) - _operators(step, 1) <= _MOST_MORE * len(step.kept)


def _goes_on(step: CausalStep) -> bool:
    vocabulary = step.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    tokens = (torch.arange(sum(_PIECES) + 1) * 5 + 7) % vocabulary
    found, begin = torch.zeros(()), 0
    try:
        with torch.no_grad(), _begun_anew(step):
            for count in (*_PIECES, 1):
                found = _step(step, tokens[begin : begin + count])
                begin += count
            expected = step.model(input_ids=tokens[None]).logits[:, -1].float()
    except (RuntimeError, TypeError, ValueError, IndexError):  # of the model's own code
        return False
    return bool(relative_error(found.numpy(), expected.numpy()) <= tolerance_of(step.model))


def _operators(step: CausalStep, count: int) -> int:
    """How many the code calls when it is exported."""
    counter = _Counter()
    with torch.no_grad(), _begun_anew(step), patch.object(torch.compiler, "is_exporting", lambda: True), counter:
        _step(step, torch.zeros(count, dtype=torch.int64))
    return counter.calls


def _step(step: CausalStep, tokens: Tensor) -> Tensor:
    batch = len(step.length)
    logits: Tensor = step(tokens.expand(batch, -1), torch.full((batch,), len(tokens)))
    return logits


@contextmanager
def _begun_anew(step: CausalStep) -> Iterator[None]:
    try:
        yield
    finally:
        for buffer in step.buffers(recurse=False):
            buffer.zero_()


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))
