"""What onnx's inference lets through and kernels could not stand."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
from onnx import parser
from prefuse.compiler.frontend.function_calls import inlined_nodes
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.validity import check_nodes
from prefuse.runtime.errors import InvalidModelError, UnsupportedModelError
from prefuse.tests.fuzz.broken import doubling_functions

_CONV = "main (float[1,%d,4,4] x, float[%d,%d,2,2] w) => (float[A,B,C,D] y) { y = %s<%s>(x, w) }"
_HEADER = '<ir_version: 8, opset_import: ["": 18]>\n'


def _compile(text: str) -> object:
    return prefuse.compile(parser.parse_model(_HEADER + text), cache=False)


@pytest.mark.parametrize(
    ("shape", "operator", "attributes", "message"),
    [
        ((2, 2, 1), "Conv", "group=0", "group 0"),
        ((3, 2, 1), "Conv", "group=2", "3 channels"),
        ((4, 3, 2), "Conv", "group=2", "4 channels"),
        ((3, 2, 1), "ConvTranspose", "group=1", "3 channels"),
        ((1, 1, 1), "Conv", "strides=[0,1]", "Conv"),
        ((1, 1, 1), "Conv", "dilations=[1,-1]", "Conv"),
        ((1, 1, 1), "Conv", "pads=[0,0,0,-1]", "Conv"),
        ((1, 1, 1), "Conv", "pads=[0,0]", "Conv"),
    ],
)
def test_windows_and_groups_that_cannot_be(shape: tuple[int, ...], operator: str, attributes: str, message: str) -> None:
    with pytest.raises(InvalidModelError, match=message):
        _compile(_CONV % (*shape, operator, attributes))


@pytest.mark.parametrize(
    ("attributes", "message"),
    [("kernel_shape=[0,2]", "1 is the least"), ("kernel_shape=[2,2], pads=[0,0,0,-1]", "0 is the least")],
)
def test_windows_of_pools_that_cannot_be(attributes: str, message: str) -> None:
    """onnx's inference has its own words for some of this, so that the rules are asked directly."""
    model = ir.from_onnx_text(_HEADER + f"main (float[1,1,4,4] x) => (float[A,B,C,D] y) {{ y = MaxPool<{attributes}>(x) }}")
    with pytest.raises(InvalidModelError, match=message):
        check_nodes(model)


@pytest.mark.parametrize(
    ("weights", "states", "message"),
    [
        ("float[1,16,3] w, float[1,16,4] r", "float[1,2,5] h, float[1,2,4] c", r"initial_h \[1, 2, 5\], where \[1, 2, 4\]"),
        ("float[1,16,3] w, float[1,16,4] r", "float[1,2,4] h, float[1,2,7] c", r"initial_c \[1, 2, 7\], where \[1, 2, 4\]"),
        ("float[1,16,5] w, float[1,16,4] r", "float[1,2,4] h, float[1,2,4] c", r"W \[1, 16, 5\], where \[1, 16, 3\]"),
        ("float[1,16,3] w, float[1,16,2] r", "float[1,2,4] h, float[1,2,4] c", r"R \[1, 16, 2\], where \[1, 16, 4\]"),
    ],
)
def test_recurrent_operands_that_do_not_fit(weights: str, states: str, message: str) -> None:
    """torch's exporter makes such an LSTM of one with projections."""
    operands = f"float[6,2,3] x, {weights}, {states}"
    with pytest.raises(InvalidModelError, match=message):
        _compile(f"main ({operands}) => (float[6,1,2,4] y) {{ y = LSTM<hidden_size=4>(x, w, r, , , h, c) }}")


def test_a_view_keeps_its_elements() -> None:
    with pytest.raises(InvalidModelError, match="6 elements into 5"):
        _compile("main (float[2,3] x) => (float[5] y) <int64[1] s = {5}> { y = Reshape(x, s) }")


def test_a_view_of_computed_sizes_keeps_its_elements() -> None:
    """They are known when passes have folded them: until then the checker of Plans took it for a fault of a pass."""
    shape = "s = Shape(x) t = Concat<axis=0>(k, s) a = Reshape(x, t) b = Softmax(a) y = Reshape(b, r)"
    with pytest.raises(InvalidModelError, match="6 elements into 12"):
        _compile(f"main (float[6] x) => (float[2,6] y) <int64[2] r = {{2,6}}, int64[1] k = {{-1}}> {{ {shape} }}")


def test_sizes_beyond_all_memory() -> None:
    with pytest.raises(UnsupportedModelError, match="64 TiB"):
        _compile("main (float[4294967296,4294967296,4] x) => (float[A,B,C] y) { y = Relu(x) }")


def test_negative_dimensions() -> None:
    with pytest.raises(InvalidModelError, match="negative dimension"):
        _compile("main (float[6] x) => (float[N] y, int64[N] i) <int64[1] k = {-1}> { y, i = TopK(x, k) }")


@pytest.mark.parametrize("operator", ["Div", "Mod"])
@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_no_integer_division_traps(operator: str, bits: int) -> None:
    """The quotient by zero is undefined; the least by -1 wraps around, as NumPy and C's compilers have it; nothing crashes."""
    least = np.iinfo(f"int{bits}").min
    net = _compile(f"main (int{bits}[4] x, int{bits}[4] d) => (int{bits}[4] y) {{ y = {operator}(x, d) }}")
    x, d = np.array([least, least, 7, -7], f"int{bits}"), np.array([-1, 0, 0, 2], f"int{bits}")
    assert callable(net)
    found = net(x, d)
    expected = [least, -3] if operator == "Div" else [0, 1]
    assert [found[0], found[3]] == expected


def test_functions_are_counted_before_they_are_inlined() -> None:
    with pytest.raises(UnsupportedModelError, match="into 1099511627776 nodes"):
        import_model(doubling_functions(40))
    small = import_model(doubling_functions(5))
    assert len(small.graph) == 32


def test_counting_calls_ends_on_a_circle() -> None:
    model = doubling_functions(3)
    model.functions[-1].node[0].op_type = "f0"
    assert inlined_nodes(ir.from_proto(model)) > 0


@pytest.mark.parametrize("kept", [1, 5])
def test_typed_data_of_the_wrong_length(kept: int) -> None:
    model = parser.parse_model(_HEADER + "main (float[3] x) => (float[3] y) <float[3] w = {1,2,3}> { y = Add(x, w) }")
    del model.graph.initializer[0].float_data[:]
    model.graph.initializer[0].float_data.extend([1.0] * kept)
    with pytest.raises(InvalidModelError, match=f"{kept} elements of 3"):
        import_model(model)


def test_packed_typed_data_is_taken() -> None:
    model = parser.parse_model('<ir_version: 10, opset_import: ["": 21]> main (float[3] x) => (float[3] y) { y = Relu(x) }')
    model.graph.initializer.append(onnx.helper.make_tensor("w", onnx.TensorProto.INT4, [3], [1, 2, 3]))
    assert import_model(model)


def test_initializers_of_one_name() -> None:
    model = parser.parse_model(_HEADER + "main (float[3] x) => (float[3] y) <float[3] w = {1,2,3}> { y = Add(x, w) }")
    model.graph.initializer.append(model.graph.initializer[0])
    with pytest.raises(InvalidModelError, match="one name: w"):
        import_model(model)


def test_a_branch_is_checked_when_it_is_taken() -> None:
    """Inference makes a part of -1 elements of it, which is no fault of a model that never takes the branch."""
    text = """main (float[4] x, int64[5] s) => (int64[1] y) {{
        p = Constant<value=bool {{{taken}}}>()
        y = If(p) <
            then_branch = t () => (int64[a] d) {{ a, b, c, d = Split<num_outputs=4>(s) }},
            else_branch = e () => (int64[1] f) {{ zero = Constant<value_ints=[0]>() f = Gather(s, zero) }}> }}"""
    program = _compile(text.format(taken=0))
    assert callable(program)
    assert list(program(np.zeros(4, np.float32), np.array([7, 1, 1, 1, 1]))) == [7]
    with pytest.raises(InvalidModelError, match="negative dimension"):
        _compile(text.format(taken=1))


@pytest.mark.parametrize("batch", ["N", "3"])
@pytest.mark.parametrize("condition", ["is_one", "given"])
def test_a_branch_may_not_fit_the_shapes_that_do_not_take_it(batch: str, condition: str) -> None:
    """What torch makes of x.squeeze(0) of a scripted module."""
    text = f"""main (float[{batch},4] x, bool given) => (float[M,K] y) {{
        s = Shape<start=0, end=1>(x)
        one = Constant<value_ints=[1]>()
        zero = Constant<value_ints=[0]>()
        ones = Equal(s, one)
        is_one = Squeeze(ones, zero)
        a = If({condition}) <
            then_branch = t () => (float[P,Q] d) {{ row = Squeeze(x, zero) d = Unsqueeze(row, zero) }},
            else_branch = e () => (float[P,Q] f) {{ f = Relu(x) }}>
        y = Neg(a) }}"""
    program = _compile(text)
    assert callable(program)
    x = np.arange(-6, 6, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(program(x, np.array(False)), -np.maximum(x, 0))
    if condition == "given":
        with pytest.raises(InvalidModelError, match="Squeeze"):
            program(x, np.array(True))
    elif batch == "N":
        np.testing.assert_array_equal(program(x[:1], np.array(False)), -x[:1])


def test_shapes_that_only_passes_find_are_checked_too() -> None:
    """The indices were 200 rows for 2 of data, which the kernel read."""
    text = """main (float[2,3] x) => (float[N,M] y) <int64[2] c = {100,1}, int64 z = {0}> {
        s = Shape(x) b = Mul(s, c) i = Expand(z, b) y = GatherElements<axis=1>(x, i) }"""
    with pytest.raises(InvalidModelError, match="beyond its data"):
        _compile(text)


_SPLIT = """main (float[2048] w, float[6] x) => (float[{first}] a, float[2] b) <int64[2] one = {{1,1}}> {{
    m = ReduceMax<keepdims=0>(w) n = Cast<to=7>(m) p = Mul(n, one) a, b = Split<axis=0>(x, p) }}"""


def test_parts_are_not_larger_than_their_whole() -> None:
    with pytest.raises(InvalidModelError, match="6 elements along its axis and parts of 1000002"):
        _compile(_SPLIT.format(first=1000000))


def test_a_shape_that_data_decides_is_not_believed() -> None:
    program = _compile(_SPLIT.format(first=4))
    assert callable(program)
    x = np.arange(6, dtype=np.float32)
    first, second = program(np.full(2048, 3, np.float32), x)
    np.testing.assert_array_equal(first, x[:3])
    np.testing.assert_array_equal(second, x[3:])
