"""fuse-recurrent against torch and ONNX Runtime: torch's cells and cells written by hand, unrolled in every way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
import torch
from prefuse.compiler.debugging.oracle import Arrays, run_model
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE, PASSES
from prefuse.runtime.target import Target
from prefuse.tests.scaling import assert_scales
from torch import Tensor, nn

INPUTS, HIDDEN = 5, 7
RECURRENT = ("GRU", "LSTM", "RNN")
BEFORE = DEFAULT_PIPELINE.partition(",fuse-recurrent")[0].partition(",fold-batchnorm")[0]
State = Tensor | tuple[Tensor, Tensor] | None


class Unrolled(nn.Module):
    """Some cells of torch on top of each other, unrolled over a sequence in a given order of steps."""

    def __init__(self, cells: list[nn.Module], order: list[int], axis: int = 0) -> None:
        super().__init__()
        self.cells, self.order, self.axis = nn.ModuleList(cells), order, axis

    def forward(self, sequence: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
        current: list[State] = [None if not states else states[0] if len(states) == 1 else (states[0], states[1])] * len(
            self.cells
        )
        tops = []
        for time in self.order:
            x = sequence.select(self.axis, time)
            for layer, cell in enumerate(self.cells):
                current[layer] = cell(x, current[layer])
                x = hidden(current[layer])
            tops.append(x)
        return torch.stack(tops, self.axis), torch.cat(tops, -1), tops[len(tops) // 2], tops[-1]


def given(states: tuple[Tensor, ...]) -> State:
    """No state, a hidden state, or that and a cell state."""
    return None if not states else states[0] if len(states) == 1 else (states[0], states[1])


def hidden(state: State) -> Tensor:
    assert state is not None
    return state[0] if isinstance(state, tuple) else state


def states_of(cell: type[nn.Module], batch: int) -> list[Tensor]:
    return [torch.randn(batch, HIDDEN) for _ in range(2 if cell is nn.LSTMCell else 1)]


def fused(module: nn.Module, *arguments: Tensor) -> Counter[str]:
    """Run the pass on a module, compare its results with those of torch and ONNX Runtime, and count the operators left."""
    torch.manual_seed(0)
    model = import_model(torch.export.export(module.eval(), arguments))
    run_pipeline(model, parse_pipeline(BEFORE, PASSES), Context(Target.parse("cpu")))
    inputs = {str(value.name): given.numpy() for value, given in zip(model.graph.inputs, arguments, strict=True)}
    expected = run_model(model, inputs, "onnxruntime")
    with torch.no_grad():
        results = module(*arguments)
    (record,) = run_pipeline(model, parse_pipeline("fuse-recurrent", PASSES), Context(Target.parse("cpu")))
    actual = run_model(model, inputs, "onnxruntime")
    assert_close(actual, expected)
    assert_close(actual, dict(zip(expected, [one.numpy() for one in results], strict=True)))
    operators = Counter(node.op_type for node in model.graph)
    if not any("activations" in node.attributes for node in model.graph):  # onnx.reference knows few
        assert_close(run_model(model, inputs, "reference"), expected)
    assert record.changed == any(operators[one] for one in RECURRENT)
    text = print_model(model)
    (again,) = run_pipeline(model, parse_pipeline("fuse-recurrent", PASSES), Context(Target.parse("cpu")))
    assert not again.changed
    assert print_model(model) == text
    return operators


def assert_close(actual: Arrays, expected: Arrays) -> None:
    assert list(actual) == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("bias", "steps", "batch"), [(True, 1, 3), (False, 1, 1), (True, 5, 1), (False, 5, 3)])
@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_torch_cells(cell: type[nn.Module], bias: bool, steps: int, batch: int) -> None:
    module = Unrolled([cell(INPUTS, HIDDEN, bias=bias)], list(range(steps)))
    operators = fused(module, torch.randn(steps, batch, INPUTS), *states_of(cell, batch))
    if cell is nn.RNNCell and steps == 1:
        assert operators["Gemm"] == 2  # a single step of an RNN is no more than that
    else:
        assert operators[cell.__name__.removesuffix("Cell")] == 1
        assert not operators["Gemm"] + operators["Concat"]


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_layers_from_zero_states(cell: type[nn.Module]) -> None:
    """The first steps have no products with the state: constants have been folded. The second layer reads all of the first."""
    module = Unrolled([cell(INPUTS, HIDDEN), cell(HIDDEN, HIDDEN)], [0, 1], axis=1)
    operators = fused(module, torch.randn(3, 2, INPUTS))
    assert operators[cell.__name__.removesuffix("Cell")] == 2
    assert operators.keys() <= {"GRU", "LSTM", "RNN", "Reshape", "Transpose", "Gather", "Identity"}


class TwoStarts(nn.Module):
    """Two layers, of which only the second is given a state: its first step is seen before the first layer's."""

    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.below, self.above = cell(INPUTS, HIDDEN), cell(HIDDEN, HIDDEN)

    def forward(self, sequence: Tensor, *states: Tensor) -> tuple[Tensor]:
        below, above = None, given(states)
        for x in sequence:
            below = self.below(x, below)
            above = self.above(hidden(below), above)
        return (hidden(above),)


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell])
def test_a_layer_is_one_node_whichever_is_found_first(cell: type[nn.Module]) -> None:
    operators = fused(TwoStarts(cell), torch.randn(4, 2, INPUTS), *states_of(cell, 2))
    assert operators[cell.__name__.removesuffix("Cell")] == 2


@pytest.mark.parametrize(("order", "nodes"), [([2, 1, 0], 1), ([0, 1, 4, 3], 2), ([0, 2], 2)])
def test_order_of_steps(order: list[int], nodes: int) -> None:
    """Backwards is one node too; what is no run of neighbours is several."""
    operators = fused(Unrolled([nn.GRUCell(INPUTS, HIDDEN)], order), torch.randn(5, 3, INPUTS), *states_of(nn.GRUCell, 3))
    assert (operators["GRU"], operators["Gemm"]) == (nodes, 0)


@pytest.mark.parametrize("relu", [True, False])
def test_relu_of_rnn(relu: bool) -> None:
    cell = nn.RNNCell(HIDDEN, HIDDEN, nonlinearity="relu" if relu else "tanh")  # which of two squares is the state's?
    operators = fused(Unrolled([cell], [0, 1, 2]), torch.randn(3, 2, HIDDEN), torch.randn(2, HIDDEN))
    assert (operators["RNN"], operators["Gemm"]) == (1, 0)


class Greedy(nn.Module):
    """The next input depends on the state."""

    def __init__(self, cell: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = cell(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, *states: Tensor) -> tuple[Tensor]:
        state = given(states)
        for _ in range(3):
            state = self.cell(x, state)
            x = torch.softmax(self.head(hidden(state)), -1)
        return (x,)


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell, nn.RNNCell])
def test_steps_that_wait_for_each_other(cell: type[nn.Module]) -> None:
    operators = fused(Greedy(cell), torch.randn(1, HIDDEN), *states_of(cell, 1))
    assert operators[cell.__name__.removesuffix("Cell")] == 3
    assert operators["Gemm"] == 3  # the heads


class Again(nn.Module):
    """The states of a first run are the sequence of a second one, of the same weights and from the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(HIDDEN, HIDDEN)

    def forward(self, sequence: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            states = []
            for time in range(3):
                h = self.cell(sequence[time], h)
                states.append(h)
            sequence = torch.stack(states)
        return sequence, self.cell(torch.cat([sequence[0], sequence[1]], 0), torch.cat([h, h], 0))


def test_states_as_the_next_sequence() -> None:
    operators = fused(Again(), torch.randn(3, 2, HIDDEN), torch.randn(2, HIDDEN))
    assert (operators["GRU"], operators["Gemm"]) == (3, 0)


class CellStates(nn.Module):
    """Somebody reads the cell state in the middle, which no operator gives out."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(INPUTS, HIDDEN)

    def forward(self, sequence: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        cells = []
        for time in range(4):
            h, c = self.cell(sequence[time], (h, c))
            cells.append(c)
        return h, torch.relu(cells[1]), cells[3]


def test_cell_state_that_is_read() -> None:
    assert fused(CellStates(), torch.randn(4, 2, INPUTS), *states_of(nn.LSTMCell, 2))["LSTM"] == 2


UPDATES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "paper": lambda z, n, h: (1 - z) * h + z * n,
    "onnx": lambda z, n, h: (1 - z) * n + z * h,
    "torch": lambda z, n, h: n + z * (h - n),
    "difference": lambda z, n, h: h - z * (h - n),
    "multiplied out": lambda z, n, h: z * h - z * n + n,
    "negated": lambda z, n, h: h * (1.0 - z) - (-z) * n,
    "lerp": lambda z, n, h: torch.lerp(n, h, z),
}


class HandWritten(nn.Module):
    """GRUs that differ in the update of the state, in what the reset gate scales, and in how weights are grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = (nn.Parameter(torch.randn(size, 3 * HIDDEN) / 2) for size in (INPUTS, HIDDEN))
        self.gates, self.new = nn.Linear(INPUTS + HIDDEN, 2 * HIDDEN), nn.Linear(INPUTS + HIDDEN, HIDDEN)
        self.bias = nn.Parameter(torch.randn(HIDDEN))

    def joined(self, x: Tensor, h: Tensor) -> Tensor:
        z, r = torch.sigmoid(self.gates(torch.cat([x, h], -1))).chunk(2, -1)
        return UPDATES["paper"](z, torch.tanh(self.new(torch.cat([r * h, x], -1))), h)

    def separate(self, x: Tensor, h: Tensor, update: str, *, reset_after: bool) -> Tensor:
        (wz, wr, wn), (uz, ur, un) = (one.chunk(3, -1) for one in (self.w, self.u))
        z, r = torch.sigmoid(x @ wz + h @ uz + self.bias), torch.sigmoid(self.bias + h @ ur + x @ wr)
        product = r * (h @ un + self.bias) if reset_after else (h * r) @ un
        return UPDATES[update](z, torch.tanh(product + x @ wn), h)

    def forward(self, sequence: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        joined, *separate = [h + number for number in range(2 + len(UPDATES))]  # equal products would be shared
        for time in range(2):
            x = sequence[:, time]
            joined = self.joined(x, joined)
            forms = [(update, False) for update in UPDATES] + [("onnx", True)]
            separate = [
                self.separate(x + number, state, update, reset_after=after)
                for number, (state, (update, after)) in enumerate(zip(separate, forms, strict=True))
            ]
        return joined, *separate


def test_cells_written_by_hand() -> None:
    operators = fused(HandWritten(), torch.randn(2, 2, INPUTS), torch.randn(2, HIDDEN))
    assert not operators["MatMul"] + operators["Gemm"] + operators["Where"]
    assert operators["GRU"] == 2 + 2 * len(UPDATES)  # x + number is no element of a sequence, but where it is 0


class Coupled(nn.Module):
    """An LSTM with one gate for input and forget gate, from inputs of two sources."""

    def __init__(self, negated: bool) -> None:
        super().__init__()
        self.negated = negated
        self.x, self.y, self.h = (nn.Linear(size, 3 * HIDDEN) for size in (INPUTS, 2, HIDDEN))

    def forward(self, xs: Tensor, ys: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        for time in range(3):
            i, o, g = (self.x(xs[time]) + self.y(ys[:, time]) + self.h(h)).chunk(3, -1)
            gate, new = torch.sigmoid(i), torch.tanh(g)
            c = gate * c + (1 - gate) * new if self.negated else c + gate * (new - c)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h, c


@pytest.mark.parametrize("negated", [True, False])
def test_coupled_gates(negated: bool) -> None:
    operators = fused(Coupled(negated), torch.randn(3, 2, INPUTS), torch.randn(2, 3, 2), *states_of(nn.LSTMCell, 2))
    assert (operators["LSTM"], operators["Gemm"]) == (1, 0)


def test_time_is_linear_in_the_steps() -> None:
    def prepare(steps: int) -> Callable[[], object]:
        model = chain(steps)
        return lambda: run_pipeline(model, parse_pipeline("fuse-recurrent", PASSES), Context(Target.parse("cpu")))

    prepare(2)()
    assert_scales(prepare, 100, 200, 2.6)


def chain(steps: int) -> ir.Model:
    """Steps of a GRU that wait for each other."""
    lines, h, x = [], "h0", "x0"
    for step in range(1, steps + 1):
        lines += [
            f"a{step} = MatMul({x}, w)  c{step} = MatMul({h}, u)",
            f"az{step}, ar{step}, an{step} = Split<axis=1, num_outputs=3>(a{step})",
            f"cz{step}, cr{step}, cn{step} = Split<axis=1, num_outputs=3>(c{step})",
            f"zs{step} = Add(az{step}, cz{step})  z{step} = Sigmoid(zs{step})",
            f"rs{step} = Add(ar{step}, cr{step})  r{step} = Sigmoid(rs{step})",
            f"rn{step} = Mul(r{step}, cn{step})  ns{step} = Add(an{step}, rn{step})  n{step} = Tanh(ns{step})",
            f"d{step} = Sub({h}, n{step})  s{step} = Mul(d{step}, z{step})  h{step} = Add(n{step}, s{step})",
            f"x{step} = Softmax(h{step})",
        ]
        h, x = f"h{step}", f"x{step}"
    weights = ", ".join(f"{0.1 * number:.1f}" for number in range(12))
    constants = f"float[2,6] w = {{{weights}}}, float[2,6] u = {{{weights}}}"
    body = "\n".join(lines)
    header = '<ir_version: 10, opset_import: ["": 21]>'
    return ir.from_onnx_text(f"{header}\nmain (float[1,2] x0, float[1,2] h0) => (float[1,2] {h})\n<{constants}> {{\n{body}\n}}")
