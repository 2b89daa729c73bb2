"""Recurrent layers of torch while it traces: what shapes their results have, without the steps.

torch finds the shapes by taking a layer apart into its steps, by which their number becomes a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_TABLES = RLock()  # of all threads: what one thread exchanges another one must not take for torch's


@contextmanager
def any_number_of_steps() -> Iterator[None]:
    """Within, GRUs and LSTMs that are traced, not run, keep their number of steps open. RNNs have no form in torch's exporter but
    their steps."""
    import torch
    from torch._subclasses.fake_impls import get_fast_op_impls

    aten = torch.ops.aten
    shapes: dict[Any, Callable[..., Any]] = {aten.lstm.input: _of_lstm, aten.gru.input: _of_gru}
    with _TABLES:
        yield from _exchanged(shapes, get_fast_op_impls())


def _exchanged(shapes: Mapping[Any, Callable[..., Any]], quick: dict[Any, Callable[..., Any]]) -> Iterator[None]:
    """Torch's tables of kernels have the shapes, until they are as before."""
    kept = {operator: dict(operator.py_kernels) for operator in shapes}
    try:
        for operator, kernels in kept.items():
            _replace(operator, {key: _where_traced(shapes[operator], steps) for key, steps in kernels.items()})
            quick[operator] = _of_mode(shapes[operator])  # of operators that are taken apart later
        yield
    finally:
        for operator, kernels in kept.items():
            _replace(operator, kernels)
            quick.pop(operator, None)


def _replace(operator: Any, kernels: Mapping[Any, Callable[..., Any]]) -> None:
    """Kernels in Python, by dispatch keys, which torch looks up once."""
    operator.py_kernels.update(kernels)
    operator._dispatch_cache.clear()


def _where_traced(shapes: Callable[..., Any], steps: Callable[..., Any]) -> Callable[..., Any]:
    from torch._subclasses.fake_tensor import FakeTensor

    def kernel(x: torch.Tensor, *further: Any, **named: Any) -> Any:
        return (shapes if isinstance(x, FakeTensor) else steps)(x, *further, **named)

    return kernel


def _of_mode(shapes: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(mode: Any, *arguments: Any, **named: Any) -> Any:
        with mode:
            return shapes(*arguments, **named)

    return kernel


def _of_gru(x: torch.Tensor, state: torch.Tensor, *further: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs of all steps and the last states. x: [steps, batch, inputs] or batch first; state: [layers * directions, batch,
    hidden]."""
    is_bidirectional = named.get("bidirectional", further[5] if len(further) > 5 else False)
    outputs = x.new_empty((*x.shape[:2], state.shape[-1] * (2 if is_bidirectional else 1)))
    return outputs, state.new_empty(state.shape)


def _of_lstm(x: torch.Tensor, states: Sequence[torch.Tensor], *further: Any, **named: Any) -> tuple[torch.Tensor, ...]:
    hidden, cell = states
    return *_of_gru(x, hidden, *further, **named), cell.new_empty(cell.shape)
