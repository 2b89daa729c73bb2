"""Sessions of models with a program for each size: they keep as many programs as the model does."""

from __future__ import annotations

from typing import Any

import numpy as np
import prefuse
import pytest
import torch
from onnx import parser
from prefuse.compiler.programs import specialize
from prefuse.compiler.programs.specialize import SpecializedContext, SpecializedModel


def doubling(**options: Any) -> SpecializedModel:
    """A model of any number of rows, one program each."""
    text = '<ir_version: 10, opset_import: ["": 21]> main (float[N,3] x) => (float[N,3] y) { y = Add(x, x) }'
    net = prefuse.compile(parser.parse_model(text), cache=False, threads=1, **options)
    assert isinstance(net, SpecializedModel)
    return net


def test_a_session_lets_programs_go() -> None:
    """As the model does: a size that comes again is compiled, or read from the cache, again."""
    net = doubling()
    net._capacity = 3
    session = net.context()
    for size in (1, 2, 3, 4, 5, 1, 5, 2):
        x = np.full((size, 3), size, np.float32)
        np.testing.assert_array_equal(session(x), x + x)
        assert len(session._contexts) <= 3
        assert set(session._contexts) <= set(net.programs)


class Total(torch.nn.Module):
    """Adds up all rows that there were."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum(0)
        return self.total * 1


def test_states_stay_where_programs_go() -> None:
    net = prefuse.compile(Total().eval(), cache=False)
    assert isinstance(net, SpecializedModel)
    net._capacity = 2
    for session in (net, net.context()):
        for call, size in enumerate((1, 2, 3, 1)):
            found = session(torch.ones(size, 3))
            np.testing.assert_array_equal(found, np.full(3, (1, 3, 6, 7)[call]))
        owner = session if isinstance(session, SpecializedContext) else net._session
        assert len(owner._contexts) == 2


def test_shortcuts_of_many_sizes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specialize, "_MOST_SHORTCUTS", 4)
    net = doubling(dims={"N": (1, 40)})
    for size in (*range(1, 12), 3, 3, 3):
        x = np.full((size, 3), size, np.float32)
        np.testing.assert_array_equal(net(x), x + x)
        assert 1 <= len(net._shortcuts) <= 4
