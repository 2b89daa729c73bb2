"""Programs hold the weights that there were when each was made: what is said where these differ, and what the cache keeps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
import torch
from prefuse.compiler.programs import symbolic
from torch import nn

_SAID = "weights have changed since"


@pytest.fixture
def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3, bias=False).requires_grad_(False)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Nothing is said but what is expected."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=f".*{_SAID}")
        yield


def rows(number: int) -> torch.Tensor:
    return torch.ones(number, 4)


def is_like(found: Any, module: nn.Linear, x: torch.Tensor) -> bool:
    return torch.allclose(torch.as_tensor(found), module(x), rtol=1e-5)


def program(linear: nn.Linear) -> Any:
    return torch.export.export(linear, (rows(5),), dynamic_shapes=({0: torch.export.Dim("N", min=2, max=100)},))


def graph(linear: nn.Linear) -> ir.Model:
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[N,4] x) => (float[N,3] y) { t = Transpose(w) y = MatMul(x, t) }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((3, 4), np.float32), "w"))
    found = ir.from_proto(model)
    found.graph.initializers["w"].const_value = ir.tensor(linear.weight.numpy(), name="w")
    return found


@pytest.mark.usefixtures("quiet")
def test_a_module_is_read_at_the_first_call_of_each_signature(linear: nn.Linear) -> None:
    net = prefuse.compile(linear, cache=False)
    linear.weight.mul_(2)  # no program has them yet
    for number in (3, 4):
        assert is_like(net(rows(number)), linear, rows(number))
    before = linear(rows(3))
    linear.weight.mul_(-1)
    with pytest.warns(UserWarning, match=f"Linear: its {_SAID}.*: compile it again"):
        assert is_like(net(rows(7)), linear, rows(7))
    torch.testing.assert_close(torch.as_tensor(net(rows(3))), before)
    assert is_like(net(rows(8)), linear, rows(8))  # said once


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("model", [program, graph])
def test_the_cache_keeps_programs_by_their_weights(model: Callable[[nn.Linear], Any], linear: nn.Linear, tmp_path: Path) -> None:
    """Not by those that a graph of any sizes had when it was imported."""
    net, kept = prefuse.compile(model(linear), cache=tmp_path), linear.weight.clone()
    assert is_like(net(rows(3)), linear, rows(3))
    linear.weight.mul_(2)
    with pytest.warns(UserWarning, match=_SAID):
        assert is_like(net(rows(4)), linear, rows(4))
    assert is_like(net(rows(6)), linear, rows(6))
    linear.weight.copy_(kept)
    assert is_like(prefuse.compile(model(linear), cache=tmp_path)(rows(4)), linear, rows(4))


@pytest.mark.usefixtures("quiet")
def test_programs_for_ranges_of_sizes(linear: nn.Linear, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those that are made later, too."""
    monkeypatch.setattr(symbolic, "_MOST_PROGRAMS", 1)

    def compiled() -> Any:
        return prefuse.compile(linear, (rows(300),), dims={"input": {0: (2, 400)}}, cache=tmp_path)

    net, kept = compiled(), linear.weight.clone()
    linear.weight.mul_(2)
    with pytest.warns(UserWarning, match=_SAID):
        assert is_like(net(rows(9)), linear, rows(9))
    linear.weight.copy_(kept)
    assert is_like(compiled()(rows(9)), linear, rows(9))
