"""Models that run in stages: control flow and shapes that only a run decides, sequences, optionals and strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import prefuse
import pytest
import torch
from prefuse.compiler.staging.host_operators import host_function
from prefuse.runtime.errors import InputError, OptionError
from prefuse.runtime.plan import TensorType
from prefuse.runtime.staged.host_operators import HostOperator
from prefuse.runtime.staged.procedure import HostStep, Procedure, ScanStep
from prefuse.runtime.staged.staged_model import StagedModel
from prefuse.tests.runtime.staged.staged_models import floats

Run = Callable[..., Any]
_HEADER = '<ir_version: 10, opset_import: ["": 21]>\n'


def _model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(_HEADER + text)


def _compiled(text: str) -> Any:
    return prefuse.compile(_model(text), cache=False)


def _check(net: Any, text: str, *inputs: Any) -> None:
    """The compiled model gives what ONNX Runtime gives."""
    model = _model(text)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {value.name: array for value, array in zip(model.graph.input, inputs, strict=True)})
    found = net(*inputs)
    for a, b in zip(found if len(expected) > 1 else (found,), expected, strict=True):
        for x, y in zip(a if isinstance(b, list) else [a], b if isinstance(b, list) else [b], strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


_LOOP = """main (float[4,3] x, int64 n, bool go) => (float[4,3] y, float[K,4,3] s) {
    y, s = Loop(n, go, x) <body = body (int64 i, bool c, float[4,3] a) => (bool again, float[4,3] b, float[4,3] o) {
        f = CastLike(i, a)
        sum = Add(a, f)
        b = Sin(sum)
        o = Mul(b, x)
        largest = ReduceMax<keepdims=0>(b)
        limit = Constant<value_float=0.99>()
        again = Less(largest, limit)
    }>
}"""


@pytest.fixture(scope="module")
def loop() -> Any:
    return _compiled(_LOOP)


@pytest.mark.parametrize(("trips", "goes_on"), [(5, True), (1, True), (0, True), (3, False), (100, True)])
def test_a_loop_runs_as_often_as_trips_and_condition_say(loop: Any, trips: int, goes_on: bool) -> None:
    _check(loop, _LOOP, 0.1 * floats(4, 3), np.array(trips), np.array(goes_on))


def test_a_loop_s_body_is_compiled_once(loop: Any) -> None:
    assert loop.report().count("compiled") == 1
    assert "host: Loop" in loop.report()


def test_a_branch_inside_a_loop_reads_values_of_both_scopes() -> None:
    text = """main (float[6] x, float[6] w, int64 n) => (float[6] y) {
        go = Constant<value_int=1>()
        true = Cast<to=9>(go)
        y = Loop(n, true, x) <body = body (int64 i, bool c, float[6] a) => (bool again, float[6] b) {
            again = Identity(c)
            two = Constant<value_int=2>()
            rest = Mod(i, two)
            odd = Cast<to=9>(rest)
            b = If(odd) <then_branch = then () => (float[6] t) { t = Add(a, w) },
                         else_branch = otherwise () => (float[6] e) { e = Mul(a, x) }>
        }>
    }"""
    net = _compiled(text)
    for trips in (0, 1, 4):
        _check(net, text, floats(6), floats(6, seed=1), np.array(trips))


def test_branches_of_different_shapes() -> None:
    text = """main (float[2,3] x) => (float[N] y) {
        total = ReduceSum<keepdims=0>(x)
        zero = Constant<value_float=0.0>()
        positive = Greater(total, zero)
        found = If(positive) <then_branch = then () => (float[N] t) { k = Constant<value_ints=[6]>() t = Reshape(x, k) },
                              else_branch = otherwise () => (float[M] e) { e = ReduceSum<keepdims=0>(x, axis) }>
        y = Exp(found)
    }""".replace("total =", "axis = Constant<value_ints=[0]>() total =", 1)
    net = _compiled(text)
    x = np.abs(floats(2, 3))
    for array in (x, -x, x):
        _check(net, text, array)


def test_scan_in_both_directions_along_other_axes() -> None:
    text = """main (float[3] start, float[3,N] xs, float[N,3] zs) => (float[3] final, float[3,N] ys, float[N,3] ws) {
        final, ys, ws = Scan<num_scan_inputs=2, scan_input_axes=[1,0], scan_input_directions=[0,1],
                             scan_output_axes=[1,0], scan_output_directions=[1,0],
            body = body (float[3] a, float[3] x, float[3] z) => (float[3] b, float[3] y, float[3] w) {
                b = Add(a, x)
                y = Mul(b, z)
                w = Sub(b, x)
            }>(start, xs, zs)
    }"""
    net = _compiled(text)
    for length in (1, 5):
        _check(net, text, floats(3), floats(3, length, seed=1), floats(length, 3, seed=2))


def test_a_scan_over_a_vector_gives_its_body_arrays() -> None:
    text = """main (float[4] x, bool[4] c) => (float[4] y) {
        y = Scan<num_scan_inputs=2, body = body (float p, bool q) => (float r) {
            r = If(q) <then_branch = t () => (float a) { a = Exp(p) }, else_branch = e () => (float b) { b = Neg(p) }>
        }>(x, c)
    }"""
    _check(_compiled(text), text, floats(4), np.array([True, False, False, True]))


def test_results_are_the_caller_s() -> None:
    """Neither constants of the model nor inputs, which a caller that writes to them would change for the next call."""
    text = """main (float[2,3] x, int64 n, bool go, int64[2] s) => (float[2,3] y, float[2,3] z, float[A,B] w, float[A,B] v)
        <float[2,3] k = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}, float[1,1] one = {1.0}> {
        y, z = Loop(n, go, x, k) <body = body (int64 i, bool c, float[2,3] a, float[2,3] b) =>
            (bool d, float[2,3] e, float[2,3] f) {
            d = Identity(c)
            e = Exp(a)
            f = Neg(b)
        }>
        w = Expand(one, s)
        v = Reshape(x, s)
    }"""
    net = _compiled(text)
    x, shape = floats(2, 3), np.array([3, 2])
    for trips in (0, 1, 0):
        given = (x, np.array(trips), np.array(True), shape)
        _check(net, text, *given) if trips else None
        results = net(*given)
        wanted = [np.copy(one) for one in results]
        kept = x.copy()
        for result in results:
            result += 100
        np.testing.assert_array_equal(x, kept)
        for found, want in zip(net(*given), wanted, strict=True):
            np.testing.assert_array_equal(found, want)


def test_results_share_no_memory_with_each_other() -> None:
    """Not those that are views of one array on the host either, nor an item of a sequence that is a result, too."""
    text = """main (float[6] x, int64[2] s) => (float[6] z, float[A,B] y, seq(float[6]) t, float[6] u) {
        one = Constant<value_float=1.0>()
        z = Add(x, one)
        y = Reshape(z, s)
        t = SequenceConstruct(z, x, z)
        place = Constant<value_int=0>()
        u = SequenceAt(t, place)
    }"""
    net, x = _compiled(text), floats(6)
    given = (x, np.array([2, 3]))
    _check(net, text, *given)
    z, y, t, u = net(*given)
    for number, array in enumerate(arrays := [z, y, *t, u]):
        assert not any(np.shares_memory(array, other) for other in [*arrays[:number], x])
        assert array.flags.writeable


def test_a_shape_that_the_model_computes_from_data() -> None:
    text = """main (float[12,2] x, float[2000] noise) => (float[A,B] y) {
        peak = ReduceMax<keepdims=0>(noise)
        rows = Cast<to=7>(peak)
        axis = Constant<value_ints=[0]>()
        length = Unsqueeze(rows, axis)
        rest = Constant<value_ints=[-1]>()
        shape = Concat<axis=0>(length, rest)
        z = Reshape(x, shape)
        y = Softmax(z)
    }"""
    net = _compiled(text)
    for rows in (3, 4, 3):
        noise = np.zeros(2000, np.float32)
        noise[17] = rows
        _check(net, text, floats(12, 2), noise)


def test_sequences_come_in_are_changed_and_go_out() -> None:
    text = """main (seq(float[N]) s, float[3] x) => (float[M] y, seq(float[N]) t) {
        t = SequenceInsert(s, x)
        whole = ConcatFromSequence<axis=0>(t)
        y = Exp(whole)
    }"""
    net = _compiled(text)
    _check(net, text, [floats(2), floats(4)], floats(3))
    _check(net, text, [floats(1)], floats(3))


def test_a_map_over_sequences_of_unlike_items() -> None:
    text = """main (seq(float[N]) s, seq(float[N]) t, float[1] k) => (seq(float[M]) y) {
        y = SequenceMap(s, t, k) <body = body (float[N] a, float[N] b, float[1] c) => (float[N] o) {
            d = Mul(a, b)
            o = Add(d, c)
        }>
    }"""
    net = _compiled(text)
    _check(net, text, [floats(2), floats(4)], [floats(2, seed=1), floats(4, seed=2)], floats(1))
    with pytest.raises(InputError, match="lengths"):
        net([floats(2)], [floats(2)] * 2, floats(1))


def test_an_empty_optional_is_none() -> None:
    text = """main (optional(float[2]) o) => (bool has) { has = OptionalHasElement(o) }"""
    net = _compiled(text)
    assert net(None) == np.array(False)
    assert net(floats(2)) == np.array(True)


def test_strings_are_the_reference_s_and_the_report_says_so() -> None:
    net = _compiled("main (string[N] a, string[N] b) => (string[N] y) { y = StringConcat(a, b) }")
    result = net(np.array(["x", "é"], object), np.array(["1", "2"], object))
    assert result.tolist() == ["x1", "é2"]
    program = net.programs[0] if hasattr(net, "programs") else net
    assert "StringConcat at y (onnx.reference)" in program.report()


def test_a_loop_that_collects_a_sequence() -> None:
    text = """main (float[5] x, int64 n) => (seq(float[5]) s) {
        empty = SequenceEmpty<dtype=1>()
        one = Constant<value_int=1>()
        true = Cast<to=9>(one)
        s = Loop(n, true, empty) <body = body (int64 i, bool c, seq(float[5]) a) => (bool again, seq(float[5]) b) {
            again = Identity(c)
            f = CastLike(i, x)
            item = Mul(x, f)
            b = SequenceInsert(a, item)
        }>
    }"""
    net = _compiled(text)
    for trips in (0, 3):
        _check(net, text, floats(5), np.array(trips))


def test_torch_in_torch_out(loop: Any) -> None:
    y, s = loop(torch.full((4, 3), 0.1), torch.tensor(2), torch.tensor(True))
    assert isinstance(y, torch.Tensor)
    assert isinstance(s, torch.Tensor)
    assert s.shape == (2, 4, 3)


def test_numbers_are_taken_where_inputs_have_no_dimensions(loop: Any) -> None:
    x = floats(4, 3)
    for found, expected in zip(loop(x, 2, True), loop(x, np.array(2), np.array(True)), strict=True):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(InputError, match=r"input 'n': the number 2\.5 is no int64"):
        loop(x, 2.5, True)


def test_no_single_plan_describes_stages(loop: StagedModel) -> None:
    with pytest.raises(OptionError, match="runs in stages"):
        _ = loop.plan


def test_inputs_and_outputs_have_names_and_types_where_these_are_static(loop: StagedModel) -> None:
    assert [(port.name, port.type_text) for port in loop.inputs] == [("x", "float32[4,3]"), ("n", "int64[]"), ("go", "bool[]")]
    assert loop.inputs[0].type == TensorType((4, 3), "float32")
    assert [(port.name, port.type is None) for port in loop.outputs] == [("y", False), ("s", True)]
    assert loop.input_names == ("x", "n", "go")
    assert "  input x: float32[4,3]" in loop.report()


def test_inputs_of_other_types_and_shapes_are_refused(loop: Any) -> None:
    """Also where the host reads them, or nothing at all does."""
    x, go = floats(4, 3), np.array(True)
    for n, what in ((np.array(2.7), r"float64\[\]"), (np.array([0]), r"int64\[1\]"), (np.array(0, np.int32), r"int32\[\]")):
        with pytest.raises(InputError, match=f"input 'n': {what} given, the model takes int64"):
            loop(x, n, go)
    for wrong in (floats(4, 2), floats(4), x.astype(np.float64)):
        with pytest.raises(InputError, match=r"input 'x': .* given, the model takes float32"):
            loop(wrong, np.array(0), go)
    with pytest.raises(InputError, match="input 'go'"):
        loop(x, np.array(1), np.array(0.5))


def test_results_are_copied_to_what_is_given_for_them(loop: Any) -> None:
    x, go, place = floats(4, 3), np.array(True), np.zeros((4, 3), np.float32)
    for trips in (0, 3):
        expected = loop(x, np.array(trips), go)
        found = loop(x, np.array(trips), go, out=(place, None))
        assert found[0] is place
        np.testing.assert_array_equal(place, expected[0])
        np.testing.assert_array_equal(found[1], expected[1])
        loop(x, np.array(trips), go, out={"y": place})
    with pytest.raises(InputError, match="out, output 'y'"):
        loop(x, np.array(1), go, out=(np.zeros(3, np.float32), None))


def test_wrong_inputs_name_the_input() -> None:
    net = _compiled("main (seq(float[N]) s) => (float[N] y) { i = Constant<value_int=4>() y = SequenceAt(s, i) }")
    with pytest.raises(InputError, match="position 4 in a sequence of 1"):
        net([floats(2)])


def test_slices_of_a_loop_must_agree() -> None:
    text = """main (float[5] x, int64 n) => (float[K,M] s) {
        one = Constant<value_int=1>()
        true = Cast<to=9>(one)
        s = Loop(n, true) <body = body (int64 i, bool c) => (bool again, float[M] o) {
            again = Identity(c)
            axis = Constant<value_ints=[0]>()
            end = Unsqueeze(i, axis)
            o = Slice(x, axis, end)
        }>
    }"""
    with pytest.raises(InputError, match="differ in shape"):
        _compiled(text)(floats(5), np.array(3))


def test_what_numpy_refuses_names_the_step() -> None:
    body = Procedure(("a",), (), (), {}, ())
    step = ScanStep("Scan at s", (), ("x",), body, (), (3,), (False,), (), (), ())
    with pytest.raises(InputError, match="Scan at s: AxisError"):
        step.run({"x": np.zeros(2)})


_MOVES: dict[str, list[tuple[list[int], ...]]] = {
    "Slice(x, a, b, c, d)": [
        ([3], [-100], [0], [-1]),
        ([-3], [100], [1], [2]),
        ([0], [0], [0], [1]),
        ([9], [-9], [1], [-2]),
        ([-9], [-100], [0], [-1]),
        ([1, 0], [3, 4], [1, -2], [1, 3]),
    ],
    "Slice(x, a, b)": [([1, 2], [4, -1])],
    "Reshape(x, a)": [([0, -1],), ([5, 4],), ([20],)],
    "Expand(x, a)": [([1],), ([3, 1, 5],), ([4, 5],)],
    "Tile(x, a)": [([2, 3],), ([1, 0],)],
    "Unsqueeze(x, a)": [([0],), ([-1, 1],)],
    "Split<axis=1>(x, a)": [([2, 3],), ([5, 0],)],
    "Split<axis=1, num_outputs=2>(x)": [()],
    "Squeeze(x)": [()],
}


@pytest.mark.parametrize("call", _MOVES)
def test_the_host_moves_bytes_as_onnx_says(call: str) -> None:
    x = floats(4, 5)
    names = "abcd"[: len(_MOVES[call][0])]
    outputs = "y, z" if call.startswith("Split") else "y"
    declared = "".join(f", int64[K{name}] {name}" for name in names)
    results = ", ".join(f"float[R{name}] {name}" for name in outputs.split(", "))
    model = _model(f"main (float[4,5] x{declared}) => ({results}) {{ {outputs} = {call} }}")
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    node = ir.serde.deserialize_node(model.graph.node[0])
    function = host_function(node, {"": 21}, "node")
    assert isinstance(function, HostOperator)
    for case in _MOVES[call]:
        operands = [np.array(values, np.int64) for values in case]
        expected = session.run(None, {"x": x, **dict(zip(names, operands, strict=True))})
        for found, array in zip(function(x, *operands), expected, strict=True):
            np.testing.assert_array_equal(found, array)


_SELECTED = """main (float[4,6] x) => (float[N] y) {
    places = NonZero(x)
    rows = Transpose<perm=[1,0]>(places)
    chosen = GatherND(x, rows)
    y = Exp(chosen)
}"""


def test_a_result_of_data_dependent_size_is_read_again() -> None:
    net = _compiled(_SELECTED)
    for zeros in (0, 5, 24, 5):
        x = np.abs(floats(24)) + 1
        x[:zeros] = 0
        _check(net, _SELECTED, x.reshape(4, 6))


def test_many_shapes_are_warned_of() -> None:
    net = prefuse.compile(_model("main (float[9] x) => (int64[N] y) { p = NonZero(x) y = ReduceSum(p) }"), cache=False)
    for ones in range(7):
        net((np.arange(9) < ones).astype(np.float32))
    with pytest.warns(UserWarning, match="stage 2 is compiled for the 8th shape"):
        net(np.ones(9, np.float32))


def test_host_steps_of_moves_are_not_the_reference() -> None:
    text = """main (float[3000] x) => (float[N] y) {
        most = ReduceMax<keepdims=0>(x)
        count = Cast<to=7>(most)
        axis = Constant<value_ints=[0]>()
        end = Unsqueeze(count, axis)
        part = Slice(x, axis, end)
        y = Neg(part)
    }"""
    net = _compiled(text)
    assert isinstance(net, StagedModel)
    x = np.zeros(3000, np.float32)
    x[5] = 7
    np.testing.assert_array_equal(net(x), -x[:7])
    hosted = [step for step in net.program.procedure.walk() if isinstance(step, HostStep)]
    assert [step.source for step in hosted] == ["Slice at part"]
    assert not hosted[0].is_reference


def test_distinct_strings_in_order_of_appearance() -> None:
    """Which onnx.reference sorts all the same."""
    net = _compiled("main (string[4] x) => (string[N] y, int64[N] c) { y, , , c = Unique<sorted=0>(x) }")
    y, c = net(np.array(["b", "a", "b", "c"], object))
    assert (list(y), list(c)) == (["b", "a", "c"], [2, 1, 1])
    assert "onnx.reference" not in net.report()
