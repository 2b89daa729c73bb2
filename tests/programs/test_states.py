"""Programs with states against loops: random ones, all ways in which a state can be renewed, and torch's buffers."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
import torch
from hypothesis import HealthCheck, given, reject, seed, settings
from hypothesis import strategies as st
from onnx import parser
from prefuse.compiler.debugging.oracle import random_inputs, relative_error, run_model
from prefuse.compiler.ir.facts import has_static_type, tensor_type
from prefuse.runtime.errors import InputError, OptionError, UnsupportedModelError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Copy
from prefuse.runtime.plan_checker import check_plan
from prefuse.tests.models.program_strategies import programs
from prefuse.tests.sample import examples, sample_number

EXAMPLES = examples(40)


def drawn_pairs(model: ir.Model, draw: st.DataObject) -> dict[str, str]:
    """Values of the model, made outputs, as the new values of inputs of their type."""
    made = [value for node in model.graph for value in node.outputs if value.name and has_static_type(value)]
    pairs: dict[str, str] = {}
    for old in model.graph.inputs:
        equal: list[ir.Value] = [v for v in made if tensor_type(v) == tensor_type(old) and v.name not in pairs]
        is_state: bool = draw.draw(st.booleans())
        if equal and is_state:
            new: ir.Value = draw.draw(st.sampled_from(equal))
            if not new.is_graph_output():
                model.graph.outputs.append(new)
            pairs[str(new.name)] = str(old.name)
    return pairs


def results(model: CompiledModel, call: object, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    assert callable(call)
    found = call(**{name: inputs[name] for name in model.input_names})
    return dict(zip(model.output_names, found if isinstance(found, tuple) else (found,), strict=True))


@pytest.mark.daily
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@seed(sample_number())
@given(programs(), st.data())
def test_random_programs_with_states_agree_with_loops(model: ir.Model, data: st.DataObject) -> None:
    """Three calls: bit for bit the program without states, whose results are given back to it; the first as the reference."""
    pairs = drawn_pairs(model, data)
    if not pairs:
        reject()
    inputs = random_inputs(model)
    try:
        with np.errstate(all="ignore"):
            results_by_reference = run_model(model, inputs, "reference").values()
    except (IndexError, ValueError):
        reject()  # an operator that has no meaning on an empty tensor
    plain = prefuse.compile(model, threads=2, cache=False)
    if not isinstance(plain, CompiledModel):
        reject()
    net = prefuse.compile(model, states=pairs, threads=2, cache=False)
    assert isinstance(net, CompiledModel)
    assert check_plan(net.plan) == ()
    reference = dict(zip(plain.output_names, results_by_reference, strict=True))
    session = net.context()
    for name in pairs.values():
        assert not session.states[name].astype(bool).any()
        session.states[name] = inputs[name]
    for call in range(3):
        wanted, found = results(plain, plain, inputs), results(net, session, inputs)
        for name in (*found, *pairs):
            got = found[name] if name in found else session.states[pairs[name]]
            assert got.tobytes() == wanted[name].tobytes(), f"{name} in call {call}"
            if call == 0:
                assert relative_error(got, reference[name]) <= (1e-5 if got.dtype.kind == "f" else 0), name
        inputs = {**inputs, **{old: wanted[new] for new, old in pairs.items()}}


HEAD = '<ir_version: 10, opset_import: ["": 24]>\n'
# Body, pairs, and how many copies of states the program may make.
WAYS: dict[str, tuple[str, dict[str, str], int]] = {
    "in place": ("g (float[64] x, float[64] a) => (float[64] y, float[64] b) { b = Add(a, x) y = Neg(b) }", {"b": "a"}, 0),
    "from an input": (
        "g (float[64] x, float[64] a) => (float[64] y, float[64] b) { y = Mul(a, x) b = Identity(x) }",
        {"b": "a"},
        1,
    ),
    "old value read after": (
        "g (float[4,8] x, float[4,8] a) => (float[4] y, float[4,8] b) {"
        "  b = Softmax(x) p = MatMul(b, w) q = Add(p, a) y = ReduceSum<keepdims = 0>(q, one) }",
        {"b": "a"},
        1,
    ),
    "kept": ("g (float[64] x, float[64] a) => (float[64] y, float[64] b) { y = Mul(a, x) b = Identity(a) }", {"b": "a"}, 0),
    "swapped": (
        "g (float[64] x, float[64] a, float[64] b) => (float[64] y, float[64] c, float[64] d) {"
        "  y = Sub(a, b) c = Identity(b) d = Identity(a) }",
        {"c": "a", "d": "b"},
        3,
    ),
    "a chain": (
        "g (float[64] x, float[64] a, float[64] b) => (float[64] y, float[64] c, float[64] d) {"
        "  y = Sub(a, b) c = Identity(x) d = Identity(a) }",
        {"c": "a", "d": "b"},
        2,
    ),
    "shifted": (
        "g (float[1,8] x, float[4,8] a) => (float[8] y, float[4,8] b) {"
        "  from = Constant<value_ints = [1]>() to = Constant<value_ints = [4]>() t = Slice(a, from, to)"
        "  b = Concat<axis = 0>(t, x) axis = Constant<value_ints = [0]>() y = ReduceSum<keepdims = 0>(b, axis) }",
        {"b": "a"},
        4,
    ),
    "one value twice": (
        "g (float[64] x, float[64] a, float[64] b) => (float[64] y, float[64] c, float[64] d) {"
        "  c = Add(a, x) d = Identity(c) y = Sub(b, d) }",
        {"c": "a", "d": "b"},
        2,
    ),
    "a constant": (
        "g (float[64] x, float[64] a) => (float[64] y, float[64] b) {"
        "  y = Add(a, x) n = Constant<value_ints = [64]>() f = Constant<value_float = 3.0>() b = Expand(f, n) }",
        {"b": "a"},
        1,
    ),
    "both the new state and an output": (
        "g (float[64] x, float[64] a) => (float[64] y, float[64] b) { b = Add(a, x) y = Identity(b) }",
        {"b": "a"},
        1,
    ),
    "a running sum of products": (
        "g (float[3,8] x, float[3,8] a) => (float[3,8] y, float[3,8] b) {"
        "  p = MatMul(x, w) q = Mul(a, half) b = Add(p, q) y = Neg(b) }",
        {"b": "a"},
        0,
    ),
    "a moment of gradients": (
        "g (float[5,8] x, float[5,3] z, float[8,3] a) => (float[8,3] y, float[8,3] b) {"
        "  t = Transpose(x) p = MatMul(t, z) q = Mul(a, half) r = Mul(p, half) b = Add(q, r) y = Identity(p) }",
        {"b": "a"},
        0,
    ),
    "added to by Gemm": (
        "g (float[3,8] x, float[3,8] a) => (float[3,8] y, float[3,8] b) { b = Gemm(x, w, a) y = Neg(b) }",
        {"b": "a"},
        0,
    ),
    "its own factor": (
        "g (float[8,8] x, float[8,8] a) => (float[8,8] y, float[8,8] b) { p = MatMul(a, w) b = Add(p, a) y = Add(x, b) }",
        {"b": "a"},
        1,
    ),
    "a running sum of convolutions": (
        "g (float[1,2,7,9] x, float[1,2,6,8] a) => (float[1,2,6,8] y, float[1,2,6,8] b) {"
        "  s = Constant<value_ints = [2, 2, 2, 2]>() f = Reshape(sixteen, s) p = Conv(x, f) b = Add(p, a) y = Neg(p) }",
        {"b": "a"},
        0,
    ),
    "a running sum of columns": (
        "g (float[5,64] x, float[64] a) => (float[64] y, float[64] b) {"
        "  axis = Constant<value_ints = [0]>() s = ReduceSum<keepdims = 0>(x, axis) b = Add(a, s) y = Neg(b) }",
        {"b": "a"},
        0,
    ),
    "columns computed twice": (
        "g (float[5,63] x, float[63] a) => (float[63] y, float[63] b) {"
        "  axis = Constant<value_ints = [0]>() s = ReduceSum<keepdims = 0>(x, axis) b = Add(a, s) y = Neg(b) }",
        {"b": "a"},
        1,
    ),
    "rows": (
        "g (float[5,64] x, float[5,64] a) => (float[5,64] y, float[5,64] b) {"
        "  b = Add(a, x) n = ReduceMax<keepdims = 1>(b, last) y = Sub(b, n) }",
        {"b": "a"},
        0,
    ),
    "halves, each in place": (
        "g (float[1,64] x, float[1,64] u, float[2,64] a) => (float[1,64] y, float[2,64] b) {"
        "  p, q = Split<axis = 0, num_outputs = 2>(a)"
        "  r = ScatterElements<axis = 1>(p, places, x) s = ScatterElements<axis = 1>(q, places, u)"
        "  b = Concat<axis = 0>(r, s) y = Neg(x) }",
        {"b": "a"},
        0,
    ),
    "packed keys and values of two layers": (
        "g (float[1,2,1,8] x, float[4,1,2,16,8] a) => (float[1,2,16,1] y, float[4,1,2,16,8] b) {"
        "  i0 = Constant<value_int = 0>() i1 = Constant<value_int = 1>() i2 = Constant<value_int = 2>()"
        "  i3 = Constant<value_int = 3>() z = Constant<value_ints = [0]>()"
        "  k = Gather(a, i0) v = Gather(a, i1) m = Gather(a, i2) n = Gather(a, i3)"
        "  k2 = TensorScatter<axis = -2>(k, x, one) v2 = TensorScatter<axis = -2>(v, x, one)"
        "  kv = Mul(k2, v2) s = ReduceMax<keepdims = 1>(kv, last2) t = Tanh(s)"
        "  m2 = TensorScatter<axis = -2>(m, t, one) n2 = TensorScatter<axis = -2>(n, t, one)"
        "  k3 = Unsqueeze(k2, z) v3 = Unsqueeze(v2, z) m3 = Unsqueeze(m2, z) n3 = Unsqueeze(n2, z)"
        "  b = Concat<axis = 0>(k3, v3, m3, n3) mn = Mul(m2, n2) y = ReduceSum<keepdims = 1>(mn, last) }",
        {"b": "a"},
        0,
    ),
    "first and last rows, each in place": (
        "g (float[1,8] x, float[8] u, float[4,8] a) => (float[1,8] y, float[4,8] b) {"
        "  from = Constant<value_ints = [0]>() to = Constant<value_ints = [3]>() i = Constant<value_int = 3>()"
        "  z = Constant<value_ints = [0]>() t = Slice(a, from, to) t2 = Mul(t, half) m = ReduceMax<keepdims = 1>(x, last)"
        "  l = Gather(a, i) r = Reshape(m, one) l2 = Add(l, r) l3 = Unsqueeze(l2, z) b = Concat<axis = 0>(t2, l3) y = Neg(x) }",
        {"b": "a"},
        0,
    ),
    "packed sums of products and largest of rows": (
        "g (float[3,8] x, float[3,8] u, float[3,3,8] a) => (float[3,8] y, float[3,3,8] b) {"
        "  k1, m1, n1 = Split<axis = 0, num_outputs = 3>(a) z = Constant<value_ints = [0]>()"
        "  k = Squeeze(k1, z) m = Squeeze(m1, z) n = Squeeze(n1, z)"
        "  p = MatMul(x, w) k2 = Add(p, k) q = MatMul(u, w) m2 = Add(q, m)"
        "  t = Tanh(u) s = ReduceMax<keepdims = 1>(t, last) n2 = Add(s, n)"
        "  k3 = Unsqueeze(k2, z) m3 = Unsqueeze(m2, z) n3 = Unsqueeze(n2, z) b = Concat<axis = 0>(k3, m3, n3) y = Neg(x) }",
        {"b": "a"},
        0,
    ),
    "read after rows with a pitch": (
        "g (float[16,8] x, float[16,8] u, float[16,8] a) => (float[16,8] y, float[16,8] b) {"
        "  b = Tanh(x) v, z = Split<axis = 1, num_outputs = 2>(w) p = MatMul(b, v) q = MatMul(u, v) c = Concat<axis = 1>(p, q)"
        "  from = Constant<value_ints = [15]>() to = Constant<value_ints = [16]>() t = Slice(c, from, to)"
        "  r = MatMul(t, w) y = Add(a, r) }",
        {"b": "a"},
        1,
    ),
    "no outputs": ("g (float[64] x, float[64] a) => (float[64] b) { b = Max(a, x) }", {"b": "a"}, 0),
    "no inputs": ("g (float[64] a) => (float[64] y, float[64] b) { b = Add(a, a) y = Neg(b) }", {"b": "a"}, 1),
}


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_renew_a_state(way: str) -> None:
    body, pairs, copies = WAYS[way]
    numbers = {name: ",".join(str(n % 5) for n in range(count)) for name, count in (("w", 64), ("sixteen", 16))}
    numbers["places"] = ",".join(str(n) for n in range(64))
    weights = f"<float[8,8] w = {{{numbers['w']}}}, float[16] sixteen = {{{numbers['sixteen']}}}, "
    weights += f"int64[1,64] places = {{{numbers['places']}}}, "
    weights += "int64[1] one = {1}, int64[1] last = {-1}, int64[1] last2 = {-2}, float half = {0.5}>"
    model = parser.parse_model(HEAD + body.replace(" {", f" {weights} {{", 1))
    plain, net = (prefuse.compile(model, states=states, cache=False) for states in (None, pairs))
    assert isinstance(plain, CompiledModel)
    assert isinstance(net, CompiledModel)
    assert sum(isinstance(step, Copy) for step in net.plan.steps) <= copies
    rng = np.random.default_rng(0)
    inputs = {port.name: rng.integers(-4, 5, port.type.shape).astype(port.type.dtype) for port in plain.inputs}
    session = net.context()
    for name in pairs.values():
        session.states[name] = inputs[name]
    for _ in range(4):
        wanted, found = results(plain, plain, inputs), results(net, session, inputs)
        for name in (*found, *pairs):
            got = found[name] if name in found else session.states[pairs[name]]
            assert got.tobytes() == wanted[name].tobytes(), name
        fresh = {name: rng.integers(-4, 5, array.shape).astype(array.dtype) for name, array in inputs.items()}
        inputs = {**fresh, **{old: wanted[new] for new, old in pairs.items()}}


class Memory(torch.nn.Module):
    """Buffers that are added to, written in part, replaced, read only, and written only."""

    cache: torch.Tensor
    count: torch.Tensor
    seen: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.arange(32, dtype=torch.float32).reshape(8, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.full((4,), 2.0, dtype=torch.bfloat16))
        self.register_buffer("table", torch.arange(4.0))
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> dict[str, torch.Tensor]:
        self.cache.index_copy_(0, at, self.linear(x))
        self.count += x.shape[0]
        self.seen.copy_(x[0])
        return {"sum": self.cache.sum(0) + self.count, "table": x + self.table}


def test_buffers_that_a_module_changes_are_states() -> None:
    torch.manual_seed(0)
    module = Memory().eval()
    net, wanted = prefuse.compile(module, cache=False), copy.deepcopy(module)
    with pytest.raises(OptionError, match="not compiled yet"):
        _ = net.states  # type: ignore[union-attr]
    session = net.context()
    for rows, at in ((1, [3]), (1, [0]), (2, [7, 3]), (1, [1])):  # two specialisations of one session
        x, places = torch.randn(rows, 4), torch.tensor(at)
        got = session(x, places)
        for name, value in wanted(x, places).items():
            torch.testing.assert_close(got[name], value)  # type: ignore[index]
    assert dict(module.named_buffers())["cache"][3, 0] == 12, "the module itself stays as it was"
    states = session.states  # type: ignore[union-attr]
    assert sorted(states) == ["cache", "count", "seen"]
    for name in states:
        np.testing.assert_allclose(states[name].astype(float), getattr(wanted, name).detach().double().numpy(), rtol=1e-5)
    assert net.states["count"] == 0  # type: ignore[union-attr]


@pytest.mark.parametrize("precision", ["int8", "mixed"])
def test_ranges_from_data_and_buffers_that_change_do_not_go_together(precision: str) -> None:
    data = [(np.ones((1, 4), np.float32), np.array([3]))]
    net = prefuse.compile(Memory().eval(), precision=precision, calibration=data, cache=False)
    with pytest.raises(UnsupportedModelError, match=r"states: ranges of tensors are taken from data, .*; use precision"):
        net(torch.randn(1, 4), torch.tensor([3]))


def test_a_module_has_a_session_of_its_own() -> None:
    net = prefuse.compile(Memory().eval(), cache=False)
    for rows in (1, 2, 1):
        net(torch.randn(rows, 4), torch.arange(rows))
    assert net.states["count"] == 4  # type: ignore[union-attr]


def test_an_exported_program_has_states() -> None:
    exported = torch.export.export(Memory().eval(), (torch.randn(1, 4), torch.tensor([2])))
    net = prefuse.compile(exported, cache=False)
    assert isinstance(net, CompiledModel)
    assert net.input_names == ("x", "at")
    assert len(net.outputs) == 2
    net(np.ones((1, 4), np.float32), np.array([2]))
    net(np.ones((1, 4), np.float32), np.array([3]))
    assert net.states["count"] == 2
    np.testing.assert_array_equal(net.states["seen"].astype(float), np.ones(4))


DYNAMIC = HEAD + (
    "g (float[N,4] x, float[4] a) => (float[N,4] y, float[4] b) {"
    "  axis = Constant<value_ints = [0]>() s = ReduceSum<keepdims = 0>(x, axis) b = Add(a, s) y = Mul(x, b) }"
)


def test_specialisations_of_a_graph_share_a_session() -> None:
    net = prefuse.compile(parser.parse_model(DYNAMIC), states={"b": "a"}, cache=False)
    total = np.zeros(4, np.float32)
    for rows in (2, 3, 2):
        x = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
        total += x.sum(0)
        np.testing.assert_array_equal(net(x), x * total)
    np.testing.assert_array_equal(net.states["a"], total)  # type: ignore[union-attr]
    with pytest.raises(InputError):
        net(x, total)


def test_example_inputs_give_states_their_shapes() -> None:
    """Of a state whose shape the model leaves open; what an If in the way hides is known after passes alone."""
    text = HEAD + (
        "g (float[N,4] x, float[N,4] a) => (float[N,4] y, float[M,K] b) {"
        "  many = Shape(x) s = ReduceMin<keepdims = 0>(many) t = Constant<value_int = 4>()"
        "  is_wide = Less(s, t) b = If (is_wide) <"
        "    then_branch = g1 () => (p) { p = Add(a, x) }, else_branch = g2 () => (q) { z = Sub(a, x) q = Transpose(z) }>"
        "  y = Mul(x, a) }"
    )
    x = np.arange(8, dtype=np.float32).reshape(2, 4)

    def compiled(args: object, kwargs: dict[str, object]) -> object:
        return prefuse.compile(parser.parse_model(text), args, kwargs, states={"b": "a"}, cache=False)

    for net in (compiled((x, x), {}), compiled(None, {"a": x, "x": x}), compiled(x, {"a": x})):
        assert isinstance(net, CompiledModel)
        for calls in range(3):
            np.testing.assert_array_equal(net(x), calls * x * x)
    for args, kwargs, message in (
        ((x, x, x), {}, "at most 2: x, a"),
        ((x,), {"x": x}, "x: given twice"),
        ((x,), {}, "a: its shape .* is not concrete"),
        ((), {"x": x, "a": x[:1]}, "dimension 0 must be N = 2"),
    ):
        with pytest.raises(InputError, match=message):
            compiled(args, kwargs)  # type: ignore[arg-type]


def test_programs_with_states_come_from_the_cache(tmp_path: os.PathLike[str]) -> None:
    """What another pair of states makes of one file is another program."""
    path = os.path.join(tmp_path, "model.onnx")
    text = HEAD + "g (float[4] x, float[4] a) => (float[4] y, float[4] b) { b = Add(a, x) y = Sub(x, a) }"
    with open(path, "wb") as file:
        file.write(parser.parse_model(text).SerializeToString())
    for pairs, ports in (({"b": "a"}, ("x",)), ({"y": "a"}, ("x",)), (None, ("x", "a"))):
        for _ in range(2):
            net = prefuse.compile(path, states=pairs, cache=tmp_path)
            assert isinstance(net, CompiledModel)
            assert net.input_names == ports
            assert [buffer.name for buffer in net.plan.buffers if buffer.renews] == [f"new:{new}" for new in pairs or ()]
