"""Tensors side by side by torch's second names: its exporter makes them sequences, which it has no bfloat16 of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from ...ir.facts import data_type, dtype_name

Translation = Callable[..., Any]


def stacks() -> dict[Any, Translation]:
    """The translation of each operator."""
    import torch

    aten = torch.ops.aten
    return {
        aten.vstack.default: _stacked({0: [0, 1], 1: [0]}, 0),
        aten.hstack.default: _stacked({0: [0]}, 1),
        aten.dstack.default: _stacked({0: [0, 1, 2], 1: [0, 2], 2: [2]}, 2),
        aten.column_stack.default: _stacked({0: [0, 1], 1: [1]}, 1),
    }


def _stacked(axes: Mapping[int, list[int]], axis: int) -> Translation:
    """Concat along an axis of tensors that get `axes` by their rank; of rows that get none (hstack) along theirs."""

    def stacked(tensors: Sequence[Any]) -> Any:
        from onnxscript.onnx_opset import opset18 as op

        parts, ranks = [], []
        for original, one in zip(tensors, _of_one_type(tensors), strict=True):
            added = axes.get(len(original.shape), [])
            ranks.append(len(original.shape) + len(added))
            parts.append(op.Unsqueeze(one, added) if added else one)
        return op.Concat(*parts, axis=min(axis, max(ranks) - 1))

    return stacked


def _of_one_type(tensors: Sequence[Any]) -> list[Any]:
    """The tensors in the type that torch promotes theirs to."""
    import torch
    from onnxscript.onnx_opset import opset18 as op

    kinds = [getattr(torch, dtype_name(one.dtype)) for one in tensors]
    wide = reduce(torch.promote_types, kinds)
    to = data_type(str(wide).removeprefix("torch."))
    return [one if kind == wide else op.Cast(one, to=to) for one, kind in zip(tensors, kinds, strict=True)]
