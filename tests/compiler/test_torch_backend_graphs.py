"""torch.compile with prefuse as its backend: graphs that torch is to run, memory that is shared, weights that change often."""

from __future__ import annotations

import gc
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest
import torch
from prefuse import torch_backend
from prefuse.compiler.frontend.dynamo_graphs import form_of
from prefuse.runtime.errors import InputError
from prefuse.torch_backend import DynamoGraph, compile_graph
from torch import nn
from torch.utils.checkpoint import checkpoint


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What Dynamo knows of functions of other tests; none may warn that does not say so."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def traced(function: Callable[..., object], *args: object) -> tuple[torch.fx.GraphModule, tuple[object, ...]]:
    """The graph of a function, and its arguments: Dynamo's own, which nothing compiles."""
    found: list[tuple[torch.fx.GraphModule, tuple[object, ...]]] = []

    def kept(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        def run(*given: object) -> object:
            found.append((graph, given))
            return graph(*given)

        return run

    torch.compile(function, backend=kept)(*args)
    return found[-1]


def refusal(function: Callable[..., object], *args: object) -> str:
    """Why torch is to run a function."""
    with pytest.raises(InputError) as raised:
        form_of(*traced(function, *args), ())
    return str(raised.value)


class Weighted(nn.Module):
    """The smallest module with a weight."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), float(value)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def of_module() -> tuple[DynamoGraph, Weighted]:
    """The graph of a module between its weight and an argument, for calls with any."""
    graphs: list[DynamoGraph] = []

    def kept(graph: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        made = compile_graph(graph, inputs)
        assert isinstance(made, DynamoGraph)
        graphs.append(made)
        return made

    module = Weighted()
    with torch.no_grad():
        torch.compile(module, backend=kept)(torch.ones(4))
    return graphs[0], module


def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x + 1
    return y, y.view(-1)


def test_results_that_share_memory() -> None:
    assert "two results share memory" in refusal(split, torch.ones(2, 4))
    form = form_of(*traced(lambda x: (x + 1).chunk(2, -1), torch.ones(2, 4)), ())
    assert form.computed == (0, 1)  # parts that lie between each other


def test_a_result_twice() -> None:
    graph, args = traced(lambda x: x + 1, torch.ones(2))
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    output.args = ((output.args[0][0], output.args[0][0]),)
    graph.recompile()
    one, other = compile_graph(graph, args)(*args)
    assert one is other
    assert one.tolist() == [2, 2]  # type: ignore[attr-defined]


def test_what_is_changed_lies_in_another_argument() -> None:
    """For such a call alone torch runs the graph."""

    def changing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    fast = torch.compile(changing, backend=compile_graph, dynamic=False)
    x = torch.zeros(6)
    assert fast(x[:4], x[2:]).tolist() == [2, 2, 0, 0]
    assert fast(x[:2], x[4:]).tolist() == [0, 0]
    assert x.tolist() == [2, 2, 1, 1, 0, 0]


def test_statistics_that_a_graph_within_renews() -> None:
    norm, x = nn.BatchNorm1d(4).train(), torch.randn(8, 4)
    statistics = norm.running_mean, norm.running_var

    def inside(x: torch.Tensor) -> object:
        return checkpoint(norm, x, use_reentrant=False)

    def direct(x: torch.Tensor) -> torch.Tensor:
        return torch.batch_norm(x, None, None, *statistics, True, 0.1, 1e-5, False)

    with torch.no_grad():
        of_instances = nn.InstanceNorm1d(4, track_running_stats=True).train()
        for function, batch in ((inside, x), (direct, x), (of_instances, x.T[None])):
            form = form_of(*traced(function, batch), ())
            assert len(form.changed) >= 2, function
    fast = torch.compile(direct, backend=compile_graph)
    with torch.no_grad():
        norm.reset_running_stats()
        direct(x)
        wanted = [one.clone() for one in statistics]  # type: ignore[union-attr]
        norm.reset_running_stats()
        fast(x)
    for found, one in zip(statistics, wanted, strict=True):
        torch.testing.assert_close(found, one, rtol=1e-5, atol=1e-5)


def test_a_tensor_that_a_graph_holds() -> None:
    graph, args = traced(lambda x: x + 1, torch.ones(2))
    graph.register_buffer("held", torch.ones(2))
    first = next(node for node in graph.graph.nodes if node.op == "call_function")
    with graph.graph.inserting_before(first):
        first.args = (first.args[0], graph.graph.get_attr("held"))
    graph.recompile()
    with pytest.raises(InputError, match="it holds a tensor, held"):
        form_of(graph, args, ())


def test_what_is_random() -> None:
    heads = torch.randn(1, 2, 3, 4)

    def attention(dropout: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=dropout)

    def steps(rate: float, is_training: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        layer = nn.LSTM(4, 4, 2, dropout=rate).train(is_training)
        return lambda x: layer(x)[0]

    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        assert "bernoulli" in refusal(attention(0.5), heads)
        assert "bernoulli" in refusal(steps(0.5, True), torch.randn(3, 4))
        for function, x in (
            (attention(0.0), heads),
            (steps(0.5, False), torch.randn(3, 4)),
            (steps(0.0, True), torch.randn(3, 4)),
        ):
            torch._dynamo.reset()
            form_of(*traced(function, x), ())


def test_results_elsewhere() -> None:
    fast = torch.compile(lambda x: (x + 1, torch.ones(3, device="meta") + 1), backend=compile_graph)
    with pytest.warns(RuntimeWarning, match="a result is on meta, and would be on cpu|meta"):
        assert fast(torch.ones(2))[1].is_meta


def test_gradients_by_what_a_graph_does() -> None:
    """Switched off inside, prefuse runs it; switched on inside, torch does."""
    weight, x = nn.Parameter(torch.ones(4)), torch.ones(4)

    @torch.compile(backend=compile_graph)
    @torch.no_grad()
    def without(x: torch.Tensor) -> torch.Tensor:
        return x * weight + 1

    @torch.compile(backend=compile_graph)
    def within(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return x * weight

    found = without(x)
    assert found.tolist() == [2, 2, 2, 2]
    assert not found.requires_grad
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="its results need gradients"):
        assert within(x).requires_grad


def test_an_error_without_a_message() -> None:
    graph, args = traced(lambda x: x + 1, torch.ones(2))

    def silent(*_: object) -> object:
        raise NotImplementedError

    next(node for node in graph.graph.nodes if node.op == "call_function").target = silent
    graph.recompile()
    with pytest.raises(InputError, match="NotImplementedError: without a message"):
        form_of(graph, args, ())


def test_arguments_that_are_no_plain_tensors() -> None:
    class Own(torch.Tensor):
        pass

    graph, _ = traced(lambda x: x + 1, torch.ones(2))
    for argument, what in ((torch.ones(2).as_subclass(Own), "Own"), (torch.eye(2).to_sparse(), "sparse"), ("text", "str")):
        with pytest.raises(InputError, match=f"an argument is .*{what}"):
            form_of(graph, (argument,), ())


def test_examples_that_dynamo_does_not_tell() -> None:
    graph, args = traced(lambda x: x + 1, torch.ones(2))
    for node in graph.graph.nodes:
        node.meta.pop("example_value", None)
    assert form_of(graph, args, ()).tensors == (0,)


def test_strides_of_results() -> None:
    fast = torch.compile(lambda x: (x * 2, (x + 1).transpose(1, 2)), backend=compile_graph)
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for found, wanted in zip(fast(x), (x * 2, (x + 1).transpose(1, 2)), strict=True):
        assert found.stride() == wanted.stride()
        torch.testing.assert_close(found, wanted)


def test_modules_that_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a program; where they are too many, all have one, which takes their weights."""
    monkeypatch.setattr(torch_backend, "_MOST_PROGRAMS", 2)
    graph, first = of_module()
    modules = [first, Weighted(2), Weighted(3)]
    x, called = torch.ones(4), list[int]()
    with torch.no_grad():
        for module in (*modules, *modules):
            assert graph(*_order_of(graph, module, x))[0].tolist() == [module.weight[0].item()] * 4  # type: ignore[attr-defined]
            called.append(len(graph._programs))
    assert called == [1, 2, 1, 1, 1, 1]


def _order_of(graph: DynamoGraph, module: Weighted, x: torch.Tensor) -> list[torch.Tensor]:
    return [module.weight if is_constant else x for is_constant in graph._are_constant]


@pytest.mark.parametrize("how", ["in place", "another", "data"])
def test_weights_that_change_at_every_call(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the second time they are arguments. Programs of weights that are gone do not stay."""
    made = Mock(side_effect=torch_backend._compile)
    monkeypatch.setattr(torch_backend, "_compile", made)
    graph, module = of_module()
    with torch.no_grad():
        for step in range(2, 9):
            if how == "in place":
                module.weight.fill_(step)
            elif how == "data":
                module.weight.data.fill_(step)
            else:
                module.weight = nn.Parameter(torch.full((4,), float(step)))
                gc.collect()
            found = graph(*_order_of(graph, module, torch.ones(4)))[0]
            assert found.tolist() == [step] * 4  # type: ignore[attr-defined]
    assert len(graph._programs) == 1
    assert made.call_count == 1 + 4  # that of the options


def test_numbers_that_differ_at_every_call() -> None:
    graph, _ = traced(lambda x, n: x * n, torch.ones(2), 3)
    placed = [node for node in graph.graph.nodes if node.op == "placeholder"]
    if len(placed) == 1:  # Dynamo has made it a constant
        with graph.graph.inserting_after(placed[0]):
            number = graph.graph.placeholder("n")
        next(node for node in graph.graph.nodes if node.op == "call_function").args = (placed[0], number)
        graph.recompile()
    fast = compile_graph(graph, [torch.ones(2), 3])
    for value in range(torch_backend._MOST_NUMBERS):
        assert fast(torch.ones(2), value)[0].tolist() == [value] * 2  # type: ignore[attr-defined]
    with pytest.warns(RuntimeWarning, match="a number in it has had 8 values"):
        assert fast(torch.ones(2), 99)[0].tolist() == [99, 99]  # type: ignore[attr-defined]
    assert isinstance(fast, DynamoGraph)
    fast._graph = Mock(side_effect=AssertionError)  # torch's
    assert fast(torch.ones(2), 3)[0].tolist() == [3, 3]  # type: ignore[attr-defined]


def test_floats_are_numbers() -> None:
    """From the second value on Dynamo gives them as tensors, of which the graph reads the number."""
    made: list[DynamoGraph] = []

    def kept(graph: torch.fx.GraphModule, inputs: list[object]) -> Callable[..., object]:
        made.append(DynamoGraph(graph, inputs, {}))
        return made[-1]

    scaled = torch.compile(lambda x, s: x * (s + 1), backend=kept)
    for value in (0.5, 0.25, -1.0, 3.0, 0.25):
        assert scaled(torch.ones(2), value).tolist() == [value + 1] * 2
    signed = torch.compile(lambda x, s: x * s, backend=kept)
    for value in (1.0, 0.0, -0.0, math.nan, math.nan):
        assert repr(signed(torch.ones(1), value).tolist()) == repr([value])
    assert sum(len(graph._programs) for graph in made) == 4 + 4


def test_a_size_that_torch_is_to_run_leaves_the_others_theirs() -> None:
    graph, args = traced(lambda x: torch.linalg.inv(x) * 2, torch.eye(3))
    fast = DynamoGraph(graph, args, {})
    fast(torch.eye(3))
    with pytest.warns(RuntimeWarning, match="torch runs a graph that prefuse does not"):
        fast(torch.eye(65))
    fast(torch.eye(66))
    fast._graph = Mock(side_effect=AssertionError)  # torch's
    assert torch.equal(fast(torch.eye(3))[0], 2 * torch.eye(3))  # type: ignore[arg-type]


def test_a_graph_that_may_draw() -> None:
    fast = torch.compile(lambda x: x + torch.rand(3), backend=compile_graph, options={"random": True})
    found = [fast(torch.zeros(3)) for _ in range(2)]
    assert all(((one >= 0) & (one < 1)).all() for one in found)
    assert not torch.equal(*found)


def test_weights_of_inference_mode() -> None:
    """torch counts no changes of them: they are arguments."""
    graph, _ = of_module()
    with torch.inference_mode():
        module = Weighted(2)
        for step in (2, 3):
            module.weight.fill_(step)
            found = graph(*_order_of(graph, module, torch.ones(4)))[0]
            assert found.tolist() == [step] * 4  # type: ignore[attr-defined]


def test_steps_of_a_fused_optimizer() -> None:
    """They change a row of a weight, perhaps one that no sample is of."""
    graph, module = of_module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0, weight_decay=0, fused=True)
    module.weight.grad = torch.tensor([1.0, 0, 0, 0])
    optimizer.step()
    with torch.no_grad():
        found = graph(*_order_of(graph, module, torch.ones(4)))[0]
    torch.testing.assert_close(found, module.weight.detach())
    assert module.weight.detach().tolist() != [1] * 4


def test_threads_make_one_program() -> None:
    graph, module = of_module()
    weights = [Weighted(step) for step in (2, 3)]
    start = threading.Barrier(4)

    def run(module: Weighted) -> None:
        start.wait()
        with torch.no_grad():
            graph(*_order_of(graph, module, torch.ones(4)))

    threads = [threading.Thread(target=run, args=(module,)) for module in weights * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(graph._programs) == 3
    assert module is not None


def test_types_of_autocast() -> None:
    graph, args = traced(nn.functional.linear, torch.randn(3, 16), torch.randn(4, 16))
    fast = compile_graph(graph, args)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            (inside,) = fast(*args)
        (outside,) = fast(*args)
        assert [torch.as_tensor(made).dtype for made in (inside, outside)] == [torch.bfloat16, torch.float32]
