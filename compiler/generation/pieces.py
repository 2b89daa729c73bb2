"""Whether a model with recurrent states reads a prompt in pieces, each by one program, or token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...runtime.generation.session import RECURRENT
from .causal_step import CausalStep, tolerance_of
from .check import goes_on

_PIECES = (6, 5)  # tokens, one after the other
_COUNTED = 16  # tokens of the piece whose operators are counted
_MOST_MORE = 200  # operators a layer, beside those of one token: torch exports some tens in a second


def takes_pieces(step: CausalStep) -> bool:
    """Whether several tokens a call, of each sequence as many, go on from the states of those before, by not many more operators.

    The code of some models begins anew with more than one token (Mamba), or is exported with a loop over tokens (linear
    attention), of which a program would have all turns one after the other. States are zeros afterwards, as before.
    """
    if not step.is_recurrent:
        return True
    if step.max_tokens < max(sum(_PIECES), _COUNTED):
        return False
    return _goes_on(step) and _operators(step, _COUNTED) - _operators(step, 1) <= _MOST_MORE * len(step.kept)


def _goes_on(step: CausalStep) -> bool:
    vocabulary = step.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    text = (torch.arange(sum(_PIECES)) * 5 + 7) % vocabulary
    recurrent = [buffer for name, buffer in step.named_buffers(recurse=False) if name.startswith(RECURRENT)]

    def after(first: Sequence[int], then: Sequence[int], is_emptied: bool) -> list[np.ndarray]:
        logits, begin = torch.zeros(0), 0
        with torch.no_grad(), _begun_anew(step):
            for number, count in enumerate((*first, *then)):
                if is_emptied and number == len(first):
                    for buffer in recurrent:
                        buffer.zero_()
                logits, begin = _step(step, text[begin : begin + count]), begin + count
            return [logits.numpy(), *(buffer.float().numpy().copy() for buffer in step.buffers(recurse=False))]

    try:
        return goes_on(after, *_PIECES, tolerance_of(step.model) / 10)
    except (RuntimeError, TypeError, ValueError, IndexError):  # of the model's own code
        return False


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
