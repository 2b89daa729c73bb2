"""GRU against torch in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prefuse.kernels.group import Group, Op

from .harness import LEVELS, Case, check, target_of, type_of


def gru(steps: int, batch: int, inputs: int, hidden: int, direction: str = "forward", *, initial: bool = True) -> Case:
    both = direction == "bidirectional"
    directions = 2 if both else 1
    torch.manual_seed(steps + hidden)
    module = torch.nn.GRU(inputs, hidden, bidirectional=both, dtype=torch.float64)
    x = torch.randn(steps, batch, inputs, dtype=torch.float64)
    h = torch.randn(directions, batch, hidden, dtype=torch.float64) if initial else None
    with torch.no_grad():
        y, last = module(x.flip(0) if direction == "reverse" else x, h)
    y = y.flip(0) if direction == "reverse" else y

    def gates(kind: str) -> torch.Tensor:
        """torch orders the gates reset, update, new; ONNX update, reset, hidden."""
        ends = ["_l0", "_l0_reverse"] if both else ["_l0"]
        parts = [getattr(module, kind + end).detach().chunk(3) for end in ends]
        return torch.stack([torch.cat([update, reset, new]) for reset, update, new in parts])

    tensors = {"x": x, "w": gates("weight_ih"), "r": gates("weight_hh")}
    tensors["b"] = torch.cat([gates("bias_ih"), gates("bias_hh")], 1)
    if h is not None:
        tensors["h"] = h
    arrays = {name: tensor.numpy().astype(np.float32) for name, tensor in tensors.items()}
    expected = [y.reshape(steps, batch, directions, hidden).transpose(1, 2).numpy(), last.numpy()]
    types = {name: type_of(array) for name, array in arrays.items()}
    types |= {name: type_of(array.astype(np.float32)) for name, array in zip(("y", "l"), expected, strict=True)}
    attributes = {"hidden_size": hidden, "linear_before_reset": 1, "direction": direction}
    op = Op("GRU", ("x", "w", "r", "b", "", "h" if initial else ""), ("y", "l"), attributes)
    group = Group((op,), tuple(arrays), ("y", "l"), types, frozenset("wrb"))
    return Case(group, arrays, expected, 1e-6, 2e-6, f"GRU {(steps, batch, inputs, hidden, direction, initial)}", "recurrent")


@pytest.mark.parametrize("level", LEVELS)
def test_gru(level: str) -> None:
    cases = [
        gru(5, 1, 8, 32),
        gru(4, 9, 7, 37),
        gru(3, 5, 7, 37, "bidirectional", initial=False),
        gru(6, 32, 16, 64, "bidirectional"),
        gru(3, 2, 5, 17, "reverse"),
        gru(1, 1, 1, 1),
    ]
    check(cases, target_of(level))
