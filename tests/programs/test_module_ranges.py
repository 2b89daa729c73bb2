"""Modules compiled for ranges of sizes: one export for many sizes, right at each; what torch fixes is an error that names it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import prefuse
import pytest
import torch
from prefuse.compiler.frontend import torch_export
from prefuse.compiler.programs.symbolic import SymbolicModel
from prefuse.runtime.errors import CompileError, InputError, OptionError
from torch import Tensor, nn

WIDTH = 16
ONE_NAME = {"batch_words": {0: "B", 1: "T"}, "mask": {0: "B", -1: "T"}, "B": (2, 4), "T": (0, 24)}


@pytest.fixture(scope="module")
def every_export() -> Iterator[list[Any]]:
    """The sizes of the first tensors that modules are exported with."""
    found: list[Any] = []
    export = torch_export.export_module

    def counted(*arguments: Any) -> object:
        found.append(tuple(arguments[2][0].shape))
        return export(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_export, "export_module", counted)
        yield found


@pytest.fixture
def exports(every_export: list[Any]) -> list[Any]:
    every_export.clear()
    return every_export


class Tagger(nn.Module):
    """Words with positions, an average of those that a mask shows, and a class for each; nested inputs and results."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(50, WIDTH), nn.Embedding(64, WIDTH)
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, 5)

    def forward(self, batch: dict[str, Tensor], mask: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        words = batch["words"]
        x = self.norm(self.words(words) + self.positions(torch.arange(words.shape[1])) * scale)
        shown = mask.unsqueeze(-1)
        mean = (x * shown).sum(1, keepdim=True) / shown.sum(1, keepdim=True).clamp(min=1)
        return {"tags": self.out(torch.cat([x, mean.expand_as(x)], -1)), "last": [x.mean(1), mean.squeeze(1)]}


def inputs(rows: int, tokens: int) -> tuple[dict[str, Tensor], Tensor]:
    random = torch.Generator().manual_seed(rows * 100 + tokens)
    words = torch.randint(0, 50, (rows, tokens), generator=random)
    return {"words": words}, (torch.rand(rows, tokens, generator=random) < 0.7).float()


def check(net: Any, module: nn.Module, *given: Any, **named: Any) -> None:
    """Like the module, and twice the same bits."""
    found, again = net(*given, **named), net(*given, **named)
    with torch.no_grad():
        wanted = module(*given, **named)
    leaves = [torch.utils._pytree.tree_leaves(one) for one in (found, again, wanted)]
    for mine, twice, torchs in zip(*leaves, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert torch.equal(mine.nan_to_num(7), twice.nan_to_num(7))


def compiled(module: nn.Module, *given: Any, dims: object) -> SymbolicModel:
    net = prefuse.compile(module, given or None, dims=dims, cache=False, threads=2)
    assert isinstance(net, SymbolicModel)
    return net


@pytest.fixture(scope="module")
def tagger(every_export: list[Any]) -> tuple[Tagger, SymbolicModel]:
    """torch makes sizes of 0 and 1 constants: those of 1 have graphs of their own; all other sizes are served by one export."""
    module = Tagger().eval()
    every_export.clear()
    net = compiled(module, *inputs(2, 7), dims=ONE_NAME)
    assert every_export == [(2, 7), (2, 1)]
    assert sum("one program" in note for note in net.notes) == len(net.notes) >= 2, net.notes
    return module, net


@pytest.mark.parametrize(("rows", "tokens"), [(4, 24), (2, 7), (3, 1), (3, 2)])
def test_every_size_is_right(tagger: tuple[Tagger, SymbolicModel], exports: list[Any], rows: int, tokens: int) -> None:
    module, net = tagger
    given = inputs(rows, tokens)
    check(net, module, *given)
    out = [torch.empty_like(one) for one in torch.utils._pytree.tree_leaves(net(*given))]
    result: Any = net(*given, out=out)
    leaves = torch.utils._pytree.tree_leaves(result)
    assert all(one is other for one, other in zip(leaves, out, strict=True))
    check(lambda *_: result, module, *given)
    assert not exports
    assert "sizes B=2..4, T=" in net.report()


def test_nothing_gives_nothing(tagger: tuple[Tagger, SymbolicModel]) -> None:
    _, net = tagger
    found: Any = net(*inputs(2, 0))
    assert found["tags"].shape == (2, 0, 5)
    assert [one.shape for one in found["last"]] == [(2, WIDTH), (2, WIDTH)]


def test_another_structure_is_exported_at_its_first_call(exports: list[Any]) -> None:
    module = Tagger().eval()
    dims = {"batch_words": {1: "T"}, "mask": {1: "T"}, "T": (2, 20, 2)}
    net = compiled(module, dims=dims)
    assert net.report() == "not compiled yet: it is at its first call"
    check(net, module, *inputs(2, 6))
    check(net, module, *inputs(2, 20))
    assert len(exports) == 1
    check(net, module, *inputs(2, 6), scale=0.5)
    check(net, module, *inputs(3, 8))  # the batch has no range
    assert len(exports) == 3


@pytest.mark.parametrize(
    ("words", "mask", "what"),
    [
        ((5, 7), (5, 7), "5 is outside of B=2..4"),
        ((2, 25), (2, 25), "25 is outside of T=0..24"),
        ((2, 7), (2, 8), "dimension 1 must be T = 7"),
        ((2, 7), (3, 7), "dimension 0 must be B = 2"),
    ],
)
def test_sizes_that_nobody_asked_for(tagger: tuple[Tagger, SymbolicModel], words: Any, mask: Any, what: str) -> None:
    module, net = tagger
    with pytest.raises(InputError, match=what):
        net({"words": torch.zeros(words, dtype=torch.long)}, torch.zeros(mask))
    check(net, module, *inputs(2, 7))


class Halves(nn.Module):
    """Decides by sizes: what torch traces holds for some of them alone."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x + y[: x.shape[0]]


class Twelve(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.reshape(12, -1) + y.sum()


class Windows(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.conv1d(x[None], torch.ones(2, 12, 3)) + y.sum()


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Twice(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, x]) + y


@pytest.mark.parametrize(
    ("module", "dims", "what"),
    [
        (Halves(), {"x": {0: (2, 16)}}, r"x_0 = 3: torch has traced what holds only where \(x.shape\[0\] % 2\) == 0"),
        (Twelve(), {"x": {0: "R"}, "R": (2, 24)}, "R: torch made dimension 0 of x the constant 12"),
        (Windows(), {"x": {1: "R"}, "R": (2, 4)}, "R = 2: torch exports dimension 1 of x for 3 to"),
        (Sum(), {"x": {0: (2, 24)}}, "x_0: torch made dimension 0 of x the constant 12"),
        (Sum(), {"x": {0: "R"}, "y": {0: "S"}, "R": (2, 24), "S": (2, 24)}, "torch found R and S to be the same size"),
        (Twice(), {"x": {0: "R"}, "y": {0: "S"}, "R": (6, 6), "S": (2, 24)}, "S: torch made dimension 0 of y the constant 12"),
    ],
)
def test_what_torch_fixes_is_an_error_that_names_the_dimension(module: nn.Module, dims: object, what: str) -> None:
    rows = 6 if isinstance(module, Twice) else 12
    with pytest.raises(OptionError, match=what):
        compiled(module, torch.ones(rows, 4), torch.ones(12, 4), dims=dims)


class Blocks(nn.Module):
    """Of 8 rows or fewer there is one block: torch makes its number a constant, and asks for more with max()."""

    def forward(self, x: Tensor) -> Tensor:
        padded = nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 8))
        return padded.view(x.shape[0], -1, 8, x.shape[2]).amax(2).sum(1)


def test_sizes_for_which_a_guard_breaks_are_exported_for_themselves(exports: list[Any]) -> None:
    module = Blocks().eval()
    net = compiled(module, torch.randn(3, 20, 12), dims={"x": {0: "B", 1: "L"}, "B": (2, 4), "L": (6, 30)})
    assert len(exports) == 2, exports
    for length in (6, 7, 8, 9, 16, 29, 30):
        check(net, module, torch.randn(2 + length % 3, length, 12))
    assert len(exports) == 2, exports


def test_multiples_keep_what_torch_assumes() -> None:
    module = Halves()
    net = compiled(module, torch.ones(12, 4), torch.ones(12, 4), dims={"x": {0: (2, 12, 2)}, "y": {0: "Y"}, "Y": (9, 12)})
    for rows in (2, 6, 12):
        check(net, module, torch.randn(rows, 4), torch.randn(11, 4))
    with pytest.raises(InputError, match=r"5 is outside of x_0=2..12 by 2"):
        net(torch.ones(5, 4), torch.ones(11, 4))


def test_a_dimension_of_torch() -> None:
    rows = torch.export.Dim("rows", min=1, max=9)
    net = compiled(Sum(), torch.ones(3, 4), torch.ones(3, 4), dims={"x": {0: rows}, "y": {0: rows}})
    check(net, Sum(), torch.randn(9, 4), torch.randn(9, 4))
    assert "rows=2..9" in "".join(net.notes)


@pytest.mark.parametrize(
    ("dims", "what"),
    [
        ({"T": (1, 8)}, "'T' is the name of no axis"),
        ({"x": {0: "T"}}, "'T' has no range"),
        ({"x": {"0": (1, 8)}}, "'0' is no axis of x"),
        ({"x": {0: (8, 1)}}, "no sizes"),
        ({"x": {0: (8,)}}, "no range"),
        ({"x": {0: (1, 2**31)}}, "at most 2147483647"),
        ({"x": {0: (1, 10**20, 10**19)}}, "at most 2147483647"),
        ({"x": {2: (1, 8)}}, "x has no axis 2"),
        ({"z": {0: (1, 8)}}, "no tensor of the call is 'z'"),
        ({"x": {0: torch.export.Dim("rows")}}, "no range"),
        ((1, 8), "no mapping"),
    ],
)
def test_other_dims_are_refused(dims: object, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        compiled(Sum(), torch.ones(3, 4), torch.ones(3, 4), dims=dims)


class Counter(nn.Module):
    sum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sum", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.sum += x.sum(0)
        return x * self.sum


def test_none_is_no_range() -> None:
    """As if the option were left out: sizes of the call."""
    net = prefuse.compile(nn.Linear(3, 2), (torch.ones(4, 3),), dims=None)
    assert not isinstance(net, SymbolicModel)
    y = net(torch.ones(4, 3))
    assert isinstance(y, Tensor)
    assert y.shape == (4, 2)


def test_states_are_refused() -> None:
    with pytest.raises(OptionError, match="with states"):
        compiled(Counter(), torch.ones(3, 4), dims={"x": {0: (2, 8)}})


class Several(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            raise ValueError("one is not enough")
        return x * 2


def test_what_torch_cannot_trace_names_the_sizes() -> None:
    with pytest.raises(CompileError, match=r"one is not enough \(exported for T = 1\)"):
        compiled(Several(), torch.ones(9, 2), dims={"x": {0: "T"}, "T": (1, 9)})


def test_sizes_of_one_along_two_axes(exports: list[Any]) -> None:
    net = compiled(
        Sum(), torch.ones(1, 5), torch.ones(1, 5), dims={"x": {0: "R", 1: "C"}, "y": {0: "R", 1: "C"}, "R": (1, 3), "C": (1, 9)}
    )
    assert sorted(exports) == [(1, 1), (1, 5), (3, 1), (3, 5)]
    for shape in ((1, 1), (1, 9), (2, 1), (3, 8)):
        check(net, Sum(), torch.randn(shape), torch.randn(shape))


def test_numpy_in_numpy_out() -> None:
    net = compiled(Sum(), dims={"x": {0: "N"}, "y": {0: "N"}, "N": (2, 8)})
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    found = net(x, x)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, 2 * x)


class Pairs(nn.Module):
    """Adds neighbours along the last axis, of which there must be an even number."""

    def forward(self, x: Tensor) -> Tensor:
        return x[..., ::2] + x[..., 1::2]


def test_ranges_that_need_steps_are_told_which() -> None:
    dims = {"x": {0: "B", 1: "T"}, "B": (2, 5), "T": (3, 21)}
    with pytest.raises(OptionError, match=re.escape('dims={"T": (3, 21, 2), ...}')):
        prefuse.compile(Pairs(), torch.randn(3, 8), dims=dims, cache=False)
    net = prefuse.compile(Pairs(), torch.randn(3, 8), dims={**dims, "T": (3, 21, 2)}, cache=False)
    x = torch.randn(4, 18)
    torch.testing.assert_close(net(x), Pairs()(x))
