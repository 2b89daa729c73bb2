"""Binding symbolic dimensions to numbers."""

import onnx
import onnx_ir as ir
import pytest
from onnx import parser
from prefuse.compiler.frontend.dimensions import bind_dimensions, is_dynamic
from prefuse.compiler.frontend.importer import import_model
from prefuse.runtime.errors import InputError

TEXT = """<ir_version: 10, opset_import: ["": 20]> main (float[N,3] x, float[N,M] y, float[2] z) => (float[A,B] c, float[2] d) {
  c = Concat<axis=1>(x, y)
  d = Relu(z)
}"""


@pytest.fixture
def model() -> ir.Model:
    return import_model(parser.parse_model(TEXT))


def test_symbols_are_replaced_everywhere(model: ir.Model) -> None:
    bound = bind_dimensions(model, {"x": (5, 3), "y": (5, 4)})
    assert is_dynamic(model)
    assert not is_dynamic(bound)
    assert [list(value.shape) for value in bound.graph.outputs if value.shape is not None] == [[5, 7], [2]]
    assert all(value.shape is not None and value.shape.is_static() for node in bound.graph for value in node.outputs)


def test_the_model_itself_stays_symbolic(model: ir.Model) -> None:
    bind_dimensions(model, {"x": (5, 3), "y": (5, 4)})
    assert str(model.graph.inputs[0].shape) == "[N,3]"


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": (5, 3), "y": (6, 4)}, r"dimension 0 must be N = 5"),
        ({"x": (5, 2), "y": (5, 4)}, r"dimension 1 must be 3"),
        ({"x": (5, 3, 1), "y": (5, 4)}, r"rank 3"),
        ({"x": (5, 3)}, r"input y: its shape .* is not concrete"),
        ({"x": (5, 3), "y": (5, 4), "w": (1,)}, r"no such input"),
        ({"x": (5, 3), "y": (5, 4), "z": (3,)}, r"dimension 0 must be 2"),
    ],
)
def test_shapes_that_do_not_fit(model: ir.Model, shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bind_dimensions(model, shapes)


def test_dimensions_of_minus_one_are_unknown() -> None:
    """As Paddle's exporter writes them, of inputs, outputs and the values between."""
    source = parser.parse_model(TEXT.replace("Relu(z)", "Neg(z)\n  e = Relu(d)"))
    inner = onnx.helper.make_tensor_value_info("e", onnx.TensorProto.FLOAT, [-1])
    source.graph.value_info.append(inner)
    for value in (*source.graph.input, *source.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    model = import_model(source)
    assert [next(iter(value.shape or ())) for value in model.graph.inputs] == [ir.SymbolicDim(None)] * 3
    bound = bind_dimensions(model, {"x": (5, 3), "y": (5, 4), "z": (2,)})
    assert all(value.shape is not None and value.shape.is_static() for node in bound.graph for value in node.outputs)
    assert [list(value.shape) for value in bound.graph.outputs if value.shape is not None] == [[5, 7], [2]]


@pytest.mark.parametrize("name", ["?", "a b", "N*", "(", "", "x[0]", "1abc", "N/0", "名", "9**9**9**9", "a" * 5000])
def test_names_of_dimensions_are_any_text(name: str) -> None:
    """In files that follow no grammar, names are no expressions; and none of them takes long."""
    source = parser.parse_model(TEXT.replace("Relu(z)", "Neg(z)\n  e = Relu(d)"))
    source.graph.value_info.append(onnx.helper.make_tensor_value_info("e", onnx.TensorProto.FLOAT, [name]))
    for value in (*source.graph.input, *source.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = name
    bound = bind_dimensions(import_model(source), {"x": (5, 3), "y": (5, 4), "z": (5,)})
    assert all(value.shape is not None and value.shape.is_static() for node in bound.graph for value in node.outputs)


def test_a_question_mark_is_no_name() -> None:
    source = parser.parse_model(TEXT)
    x, y, _ = source.graph.input
    for dim in (x.type.tensor_type.shape.dim[0], *y.type.tensor_type.shape.dim):
        dim.dim_param = "?"
    bind_dimensions(import_model(source), {"x": (5, 3), "y": (5, 4), "z": (2,)})
