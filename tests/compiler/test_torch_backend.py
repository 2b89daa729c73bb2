"""torch.compile with prefuse as its backend: results, arguments that change, weights that change, and what torch runs."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib.metadata import EntryPoint
from pathlib import Path

import prefuse
import pytest
import torch
from prefuse.runtime.errors import OptionError
from prefuse.torch_backend import DynamoGraph, compile_graph
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What Dynamo knows of functions of other tests; none may warn that does not say so."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


class Watched:
    """The backend, with the graphs that it was given."""

    def __init__(self) -> None:
        self.graphs: list[DynamoGraph] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[object], **how: object) -> Callable[..., object]:
        made = compile_graph(graph, inputs, **how)  # type: ignore[arg-type]
        assert isinstance(made, DynamoGraph)
        self.graphs.append(made)
        return made

    @property
    def programs(self) -> list[int]:
        """Sets of weights by graph."""
        return [len(graph._programs) for graph in self.graphs]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.LayerNorm(32), nn.Linear(32, 8)).eval()


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_torch_finds_it_by_name() -> None:
    """By an entry point of the group that torch looks for backends in, which an installation writes down."""
    project = tomllib.loads((Path(prefuse.__file__).parent / "pyproject.toml").read_text())["project"]
    (group,) = (one for one in project["entry-points"] if one == "torch_dynamo_backends")
    found = EntryPoint("prefuse", project["entry-points"][group]["prefuse"], group)
    assert found.load() is compile_graph


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_sizes_of_a_batch(guard: Callable[[], torch.autograd.grad_mode.no_grad]) -> None:
    """The third size is of a graph for any, whose program prefuse makes for this one."""
    module, watched = small(), Watched()
    fast = torch.compile(module, backend=watched)
    with guard():
        for size in (3, 5, 7, 5):
            x = torch.randn(size, 16)
            close(fast(x), module(x))
    assert watched.programs == [1, 1]


def test_numbers_that_are_sizes_come_from_tensors() -> None:
    @torch.compile(backend=compile_graph, dynamic=True)
    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x / x.shape[0]).reshape(-1, x.shape[1] // 2) + y.shape[0]

    for rows, columns, more in ((3, 8, 5), (7, 6, 4), (4, 10, 9)):
        x, y = torch.randn(rows, columns), torch.randn(more, 3)
        close(scaled(x, y), (x / rows).reshape(-1, columns // 2) + more)


def test_python_between_graphs() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = small()

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.body(x)
            return (y * 2 if float(y.sum()) > 0 else y - 1), x

    module, watched = Branching().eval(), Watched()
    fast = torch.compile(module, backend=watched)
    with torch.no_grad():
        for seed in range(6):
            torch.manual_seed(seed)
            x = torch.randn(4, 16)
            found, same = fast(x)
            close(found, module(x)[0])
            assert same is x
    assert len(watched.graphs) >= 3
    assert set(watched.programs) == {1}


def test_what_a_graph_changes_is_changed() -> None:
    """A counter, a cache that is written in part, an argument; and running statistics, which training renews."""

    class Counting(nn.Module):
        count: torch.Tensor
        cache: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm = small(), nn.BatchNorm1d(8)
            self.register_buffer("count", torch.zeros(1))
            self.register_buffer("cache", torch.zeros(6, 8))

        def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            y: torch.Tensor = self.body(x)
            self.cache.index_copy_(0, row, y[:1])
            x.mul_(2)
            normal: torch.Tensor = self.norm(y)
            return normal + self.cache.sum() * self.count

    module = Counting().train()
    other = deepcopy(module)
    fast = torch.compile(other, backend=compile_graph)
    with torch.no_grad():
        for step in range(3):
            x, row = torch.randn(4, 16), torch.tensor([step])
            y = x.clone()
            close(fast(y, row), module(x, row))
            close(y, x)
            for name, buffer in other.named_buffers():
                close(buffer, module.get_buffer(name))


def test_a_view_of_what_is_changed() -> None:
    """Its result is an argument, as it is after the call."""

    @torch.compile(backend=compile_graph)
    def renewed(x: torch.Tensor) -> torch.Tensor:
        x[:, 0] += 1
        return x

    x = torch.zeros(2, 3)
    assert renewed(x) is x
    assert x.tolist() == [[1, 0, 0], [1, 0, 0]]


def test_weights_that_change() -> None:
    module, watched = small(), Watched()
    fast, x = torch.compile(module, backend=watched), torch.randn(4, 16)
    with torch.no_grad():
        close(fast(x), module(x))
        module.get_parameter("0.weight").mul_(3)
        close(fast(x), module(x))
        module.load_state_dict({name: value / 2 for name, value in module.state_dict().items()})
        close(fast(x), module(x))
        module.get_parameter("3.bias").data = torch.ones(8)
        close(fast(x), module(x))
    assert watched.programs == [1]


def test_a_result_of_bfloat16_without_inputs() -> None:
    found = torch.compile(lambda: torch.arange(3).to(torch.bfloat16) + 1, backend=compile_graph)()
    assert found.dtype == torch.bfloat16
    assert found.tolist() == [1, 2, 3]


def test_gradients_are_those_of_torch() -> None:
    module = small()
    fast, x = torch.compile(module, backend=compile_graph), torch.randn(4, 16)
    with pytest.warns(RuntimeWarning, match=r"its results need gradients; call it under torch.no_grad\(\)"):
        fast(x).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x.view(-1), "a result is a view of an argument"),
        (lambda x: torch.linalg.svd(x)[1], "svd"),
        (lambda x: torch.nn.functional.dropout(x, 0.5, training=True), "random"),
    ],
)
def test_torch_runs_the_rest(function: Callable[[torch.Tensor], torch.Tensor], reason: str) -> None:
    """With one warning, however often it is called."""
    fast, x = torch.compile(function, backend=compile_graph), torch.randn(4, 4)
    with pytest.warns(RuntimeWarning, match=f"torch runs a graph that prefuse does not: .*{reason}"):
        fast(x)
    torch.manual_seed(1)
    found = fast(x)
    torch.manual_seed(1)
    close(found, function(x))


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ({"options": {"precison": "float32"}}, "precison"),
        ({"options": {"precision": "float33"}}, "float33"),
        ({"options": {"states": {}}}, "states: is no option here"),
        ({"options": {"dims": {}}}, "dims: is no option here"),
        ({"mode": "max-autotune"}, "'max-autotune' is one of torch's own backend"),
    ],
)
def test_options_that_are_wrong(how: dict[str, object], fault: str) -> None:
    fast = torch.compile(small(), backend=compile_graph, **how)  # type: ignore[call-overload]
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=fault) as raised:
        fast(torch.randn(2, 16))
    assert isinstance(raised.value.inner_exception, OptionError)


def test_options_of_prefuse() -> None:
    module, watched = small(), Watched()
    fast, x = torch.compile(module, backend=watched, options={"name": "inner", "threads": 1}), torch.randn(4, 16)
    with torch.no_grad():
        close(fast(x), module(x))
    (program,) = watched.graphs[0]._programs.values()
    assert "inner" in program._model.report()
    assert "threads=1" in program._model.plan.target
