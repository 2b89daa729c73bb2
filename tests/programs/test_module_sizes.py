"""A module is exported once for all sizes that torch allows; each specialisation gives the numbers of a fresh compilation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import prefuse
import pytest
import torch
from prefuse.compiler.frontend import torch_export
from prefuse.compiler.programs import sources
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.runtime.errors import CompileError, OptionError, UnsupportedModelError
from torch import Tensor, nn

WIDTH = 16


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each export was one for any sizes, in order."""
    found: list[bool] = []
    export = torch_export.export_module

    def counted(*arguments: Any) -> object:
        found.append(len(arguments) > 3)
        return export(*arguments)

    monkeypatch.setattr(torch_export, "export_module", counted)
    return found


class Encoder(nn.Module):
    """An attention over tokens with positions, whose inputs are nested and named, and whose result is a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, WIDTH), nn.Embedding(64, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, batch: dict[str, Tensor], *, scale: float = 1.0, bias: Tensor | None = None) -> dict[str, Any]:
        words = batch["words"]
        x = self.words(words) + self.positions(torch.arange(words.shape[1])) * scale
        y = self.attention(x, x, x, need_weights=False)[0]
        return {"tokens": y if bias is None else y + bias, "pooled": [y.mean(1), y[:, -1]]}


def batch(rows: int, tokens: int) -> dict[str, Tensor]:
    return {"words": torch.randint(0, 50, (rows, tokens), generator=torch.Generator().manual_seed(rows * 100 + tokens))}


def check(net: Any, module: nn.Module, *inputs: Any, **named: Any) -> None:
    """Like the module, and to the bit like a program that was compiled for these inputs alone."""
    found = net(*inputs, **named)
    alone = prefuse.compile(module, inputs, named, cache=False)(*inputs, **named)
    with torch.no_grad():
        wanted = module(*inputs, **named)
    leaves = [torch.utils._pytree.tree_leaves(one) for one in (found, alone, wanted)]
    for mine, fresh, torchs in zip(*leaves, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-5)
        assert torch.equal(mine, fresh)


def test_one_export_serves_all_lengths(exports: list[bool]) -> None:
    module = Encoder().eval()
    net = prefuse.compile(module, cache=False)
    assert isinstance(net, SpecializedModel)
    for tokens in (7, 9, 12, 33):
        net(batch(2, tokens))
    assert exports == [False, True]
    assert "exported once for any sizes of batch_words.shape[1]" in net.report()
    for rows, tokens in ((3, 9), (5, 14), (2, 40)):  # another axis: once more, for both
        net(batch(rows, tokens))
    assert exports == [False, True, True]
    for rows, tokens in ((4, 20), (3, 7)):
        check(net, module, batch(rows, tokens))


def test_keyword_inputs_and_constants_make_families(exports: list[bool]) -> None:
    module = Encoder().eval()
    net = prefuse.compile(module, cache=False)
    for tokens in (4, 6, 8):
        net(batch(2, tokens), bias=torch.ones(WIDTH))
    assert exports == [False, True]
    net(batch(2, 6), scale=0.5)
    assert exports == [False, True, False]
    check(net, module, batch(2, 11), bias=torch.ones(WIDTH))


class Branching(nn.Module):
    """Decides by sizes: what torch traces holds for some of them alone."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[0] % 2 == 0:
            x = x * 2
        return x + y[: x.shape[0]]


def test_guards_are_kept(exports: list[bool]) -> None:
    module = Branching()
    net = prefuse.compile(module, cache=False)
    for rows in (4, 6, 8):
        check(net, module, torch.randn(rows, 3), torch.randn(rows, 3))
    assert sum(exports) == 1
    check(net, module, torch.randn(5, 3), torch.randn(5, 3))
    assert isinstance(net, SpecializedModel)
    assert "exported for these sizes alone: torch has traced what holds only where" in net.report()
    assert "x.shape[0] % 2" in net.report()
    assert not exports[-2]  # for the call, before that of the check


class Fixed(nn.Module):
    """Reads the elements of a size that it names."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, 6, -1) * 2.0 if x.shape[0] == 12 else x


def test_a_dimension_that_torch_made_a_constant(exports: list[bool]) -> None:
    module = Fixed()
    net = prefuse.compile(module, cache=False)
    for rows in (9, 12, 20):
        check(net, module, torch.randn(rows, 5))
    assert isinstance(net, SpecializedModel)
    assert "for these sizes alone: torch made dimension 0 of x the constant 12" in net.report()


class Counted:
    """A cache that knows how many rows it has."""

    def __init__(self) -> None:
        self.rows = 0

    def add(self, x: Tensor) -> Tensor:
        self.rows += x.shape[0]
        return x * 2


class Measured(nn.Module):
    """Returns numbers that torch, where it traces for any sizes, has symbols for."""

    def forward(self, x: Tensor) -> tuple[object, ...]:
        cache = Counted()
        return cache.add(x), x.shape[0], x.shape[0] > 5, cache


def test_sizes_among_results_are_those_of_the_call(exports: list[bool]) -> None:
    net = prefuse.compile(Measured(), cache=False)
    assert isinstance(net, SpecializedModel)
    for rows in (4, 6, 4):
        found: Any = net(torch.ones(rows, 2))
        _, size, is_long, cache = found
        assert (type(size), size, is_long, cache.rows) == (int, rows, rows > 5, rows)
    assert "for these sizes alone: output[1]" in net.report()
    with pytest.raises(CompileError, match=r"output\[1\]: s\d+ depends on sizes"):
        prefuse.compile(Measured(), torch.ones(4, 2), dims={"x": {0: "N"}, "N": (2, 9)})


def test_a_size_as_a_tensor_is_of_any_size(exports: list[bool]) -> None:
    """As the error of the test above says."""

    class Full(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((), x.shape[0])

    net = prefuse.compile(Full(), torch.ones(4, 2), dims={"x": {0: "N"}, "N": (2, 9)}, cache=False)
    for rows in (2, 3, 9):
        assert torch.equal(net(torch.ones(rows, 2)), torch.tensor(rows))  # type: ignore[arg-type]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(12, 5, batch_first=True)
        self.projected = nn.LSTM(3, 6, proj_size=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        states: Tensor = self.gru(self.lstm(x)[0])[0]
        return states


def test_recurrent_layers_are_exported_once(exports: list[bool]) -> None:
    """torch takes their number of steps for a constant, which it is not."""
    module = Recurrent().eval()
    net = prefuse.compile(module, threads=1)
    for steps in (7, 9, 4, 12):
        net(torch.randn(2, steps, 4))
    assert exports == [False, True]
    check(net, module, torch.randn(2, 5, 4))
    ranged = prefuse.compile(module, torch.randn(2, 7, 4), dims={"x": {1: "T"}, "T": (3, 16)}, threads=1)
    for steps in (3, 16):
        check(ranged, module, torch.randn(2, steps, 4))


def test_a_layer_that_is_taken_apart_keeps_its_steps() -> None:
    """An LSTM with projections, for which ONNX has no operator, is written out step by step."""
    module = Recurrent().eval().projected
    net = prefuse.compile(module, threads=1)
    for steps in (3, 5, 4):
        check(net, module, torch.randn(2, steps, 3))


class Boxes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(x, 2)


def test_what_torch_assumes_after_the_trace() -> None:
    """Its exporter makes a pool of windows of equal sizes of one by boxes, where the example's sizes allow it."""
    net = prefuse.compile(Boxes(), threads=1)
    for size in (12, 16, 17, 18, 13, 23):
        check(net, Boxes(), torch.randn(1, 2, size, 12))
    assert "exported for these sizes alone: torch has traced what holds only where" in net.report()
    free = torch.export.Dim.AUTO
    program = torch.export.export(Boxes(), (torch.randn(1, 2, 12, 12),), dynamic_shapes=({2: free},), strict=False)
    with pytest.raises(UnsupportedModelError, match="holds only where"):
        prefuse.compile(program)
    with pytest.raises(OptionError, match="torch has traced what holds only where"):
        prefuse.compile(Boxes(), torch.randn(1, 2, 12, 12), dims={"x": {2: "H"}, "H": (8, 32)})


def test_sizes_of_one_and_none(exports: list[bool]) -> None:
    module = Encoder().eval()
    net = prefuse.compile(module, cache=False)
    for rows in (1, 2, 3, 1):
        check(net, module, batch(rows, 5))
    assert isinstance(net, SpecializedModel)
    found: Any = net(batch(0, 5))
    assert found["tokens"].shape == (0, 5, WIDTH)
    assert [one.shape for one in found["pooled"]] == [(0, WIDTH), (0, WIDTH)]
    assert "for these sizes alone" in net.report()


def test_two_inputs_that_disagree(exports: list[bool]) -> None:
    """As without a graph for all sizes: torch says what does not fit."""

    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x + y

    net = prefuse.compile(Sum(), cache=False)
    for rows in (3, 4, 5):
        net(torch.ones(rows, 2), torch.ones(rows, 2))
    with pytest.raises(CompileError, match=r"must match the size|incompatible|broadcast"):
        net(torch.ones(6, 2), torch.ones(7, 2))
    assert net(torch.ones(6, 2), torch.ones(6, 2)).shape == (6, 2)  # type: ignore[attr-defined]
    broadcast: Any = net(torch.ones(6, 2), torch.ones(1, 2))
    assert torch.equal(broadcast, 2 * torch.ones(6, 2))


def scaled(module: Encoder) -> None:
    module.words.weight.data.mul_(2)  # which changes no version that autograd counts


def with_more_heads(module: Encoder) -> None:
    module.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True).eval()


@pytest.mark.parametrize("change", [scaled, with_more_heads])
def test_a_module_that_has_changed_is_exported_anew(
    change: Callable[[Encoder], None], exports: list[bool], tmp_path: Path
) -> None:
    module = Encoder().eval()
    net = prefuse.compile(module, cache=tmp_path)
    for tokens in (4, 6, 8):
        net(batch(2, tokens))
    change(module)
    with pytest.warns(UserWarning, match="Encoder: its weights have changed"):
        check(net, module, batch(2, 10))
    assert exports == [False, True, True, False]


class Times(nn.Module):
    def forward(self, x: Tensor, factor: float, *, by: dict[str, float]) -> Tensor:
        return x * factor + by["more"]


def test_many_values_of_numbers_come_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MANY_PROGRAMS", 2)
    net, x = prefuse.compile(Times(), cache=False), torch.ones(3)
    net(x, 2.0, by={"more": 1.0})
    net(x, 2.0, by={"more": 1.0})
    net(torch.ones(4), 2.0, by={"more": 1.0})
    with pytest.warns(UserWarning, match="Times is compiled for the 2th values of inputs that are no tensors"):
        net(x, 2.0, by={"more": 3.0})


class Counter(nn.Module):
    """Keeps a sum over calls."""

    sum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.sum += x.sum(0)
        return x * self.sum


def test_states_go_from_size_to_size(exports: list[bool]) -> None:
    net, module = prefuse.compile(Counter(), cache=False), Counter()
    for rows in (2, 3, 5, 4):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(net(x), module(x))
    assert exports == [False, True]


def test_another_process_finds_the_programs(exports: list[bool], tmp_path: Path) -> None:
    module = Encoder().eval()
    first = prefuse.compile(module, cache=tmp_path)
    wanted = [first(batch(2, tokens)) for tokens in (4, 6, 8)]
    second = prefuse.compile(module, cache=tmp_path)
    found = [second(batch(2, tokens)) for tokens in (4, 6, 8)]
    assert exports == [False, True]
    for mine, theirs in zip(*map(torch.utils._pytree.tree_leaves, (found, wanted)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    second(batch(2, 10))
    assert exports == [False, True, True]
