"""Recurrent layers of torch while it traces: what shapes their results have, without the steps; and the ONNX form of RNNs.

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
    """Within, RNNs, GRUs and LSTMs that are traced, not run, keep their number of steps open."""
    import torch
    from torch._subclasses.fake_impls import get_fast_op_impls

    aten = torch.ops.aten
    shapes: dict[Any, Callable[..., Any]] = {aten.lstm.input: _of_lstm, aten.gru.input: _of_gru}
    shapes |= dict.fromkeys((aten.rnn_tanh.input, aten.rnn_relu.input), _of_gru)
    with _TABLES:
        yield from _exchanged(shapes, get_fast_op_impls())


def rnn(activation: str) -> Callable[..., Any]:
    """The translation of torch's RNNs, whose own exporter has none: an RNN of ONNX for each layer."""

    def translated(
        input: Any,
        hx: Any,
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Any, Any]:
        """The outputs of all steps [steps, batch, directions * hidden], or batch first, and the last states [layers * directions,
        batch, hidden]. `params`: of each layer and direction what multiplies inputs and states, and their biases."""
        from onnxscript.onnx_opset import opset18 as op

        directions, kinds, hidden = 1 + bidirectional, 2 + 2 * has_biases, hx.shape[-1]
        rows, states = op.Transpose(input, perm=[1, 0, 2]) if batch_first else input, list[Any]()
        for first in range(0, num_layers * directions, directions):
            sides = [params[side * kinds : (side + 1) * kinds] for side in range(first, first + directions)]
            weights = [_stacked([side[which] for side in sides]) for which in range(2)]
            biases = _stacked([op.Concat(side[2], side[3], axis=0) for side in sides]) if has_biases else None
            rows, last = op.RNN(
                rows,
                *weights,
                biases,
                None,
                op.Slice(hx, [first], [first + directions], [0]),
                activations=[activation] * directions,
                direction="bidirectional" if bidirectional else "forward",
                hidden_size=int(hidden),
            )
            rows = op.Reshape(op.Transpose(rows, perm=[0, 2, 1, 3]), [0, 0, directions * int(hidden)])
            states.append(last)
        outputs = op.Transpose(rows, perm=[1, 0, 2]) if batch_first else rows
        return outputs, op.Concat(*states, axis=0) if len(states) > 1 else states[0]

    return translated


def _stacked(parts: Sequence[Any]) -> Any:
    """[directions, ...]"""
    from onnxscript.onnx_opset import opset18 as op

    rows = [op.Unsqueeze(part, [0]) for part in parts]
    return op.Concat(*rows, axis=0) if len(rows) > 1 else rows[0]


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
