"""torch's recurrent modules, exported and compiled whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import prefuse
import pytest
import torch
from prefuse.compiler.programs.specialize import SpecializedModel


@pytest.mark.parametrize("kind", ["GRU", "LSTM", "RNN"])
def test_torch_modules(kind: str) -> None:
    """Two bidirectional layers, batch first, from given states."""
    torch.manual_seed(3)
    module = getattr(torch.nn, kind)(10, 20, num_layers=2, batch_first=True, bidirectional=True).eval()
    x, h, c = torch.randn(3, 7, 10), torch.randn(4, 3, 20), torch.randn(4, 3, 20)
    state: Any = (h, c) if kind == "LSTM" else h
    compiled = prefuse.compile(module, (x, state), cache=False)
    with torch.no_grad():
        expected = module(x, state)
    _agree(compiled(x, state), expected)
    assert isinstance(compiled, SpecializedModel)
    templates = {kernel.template for program in compiled.programs for kernel in program.plan.kernels}
    if kind != "RNN":  # whose steps torch exports
        assert templates == {"recurrent"}, "nothing only orders the layers' inputs and sequences"


class Encoder(torch.nn.Module):
    """A recurrent layer between others."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 12)
        self.recurrent = torch.nn.LSTM(12, 24, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(24, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        y, _ = self.recurrent(self.embedding(tokens))
        return torch.relu(self.head(y[:, -1]))


def test_encoder_without_states() -> None:
    torch.manual_seed(4)
    module, tokens = Encoder().eval(), torch.randint(0, 50, (2, 9))
    with torch.no_grad():
        expected = module(tokens)
    _agree(prefuse.compile(module, (tokens,), cache=False)(tokens), expected)


class Decoder(torch.nn.Module):
    """An unrolled encoder, then steps of which each waits for the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.head = torch.nn.GRUCell(6, 9), torch.nn.LSTMCell(5, 9), torch.nn.Linear(9, 5)

    def forward(self, sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state, cell = torch.zeros(sequence.shape[0], 9), torch.zeros(sequence.shape[0], 9)
        for step in range(4):
            state = self.encoder(sequence[:, step], state)
        outputs = [torch.softmax(self.head(state), -1)]
        for _ in range(3):
            state, cell = self.decoder(outputs[-1], (state, cell))
            outputs.append(torch.softmax(self.head(state), -1))
        return torch.stack(outputs, 1), state


@pytest.mark.parametrize("batch", [1, 3])
def test_cells_in_loops(batch: int) -> None:
    """One recurrent node for the sequence and one for each of the other steps, which have no output Y and one kernel."""
    torch.manual_seed(5)
    module, sequence = Decoder().eval(), torch.randn(batch, 4, 6)
    compiled = prefuse.compile(module, (sequence,), cache=False)
    with torch.no_grad():
        expected = module(sequence)
    _agree(compiled(sequence), expected)
    assert "recurrent: 4 launches" in str(compiled.report())


def _agree(got: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        np.testing.assert_allclose(got.numpy(), expected.numpy(), rtol=1e-5, atol=1e-5)
        return
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        _agree(one, other)
