"""What strangers write into places that passes believe, and other words that no exporter writes."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import prefuse
import pytest
from onnx import TensorProto, parser
from prefuse.compiler.frontend.dimensions import bind_dimensions
from prefuse.compiler.frontend.importer import import_model
from prefuse.runtime.errors import CompileError, InvalidModelError

_HEADER = '<ir_version: 10, opset_import: ["": 21]>\n'
_PRODUCT = _HEADER + "main (float[4,4] x, float[4,4] w) => (float[4,4] y) { y = MatMul(x, w) }"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("prefuse.nodes", "{"),
        ("prefuse.origins", "{"),
        ("prefuse.origins", "[" * 100_000),
        ("prefuse.origins", "7"),
        ("prefuse.panels", "zz"),
        ("prefuse.table", "1"),
    ],
)
def test_words_of_passes_in_a_file_are_dropped(key: str, text: str) -> None:
    model = parser.parse_model(_PRODUCT)
    entry = model.graph.node[0].metadata_props.add()
    entry.key, entry.value = key, text
    assert key not in import_model(model).graph[0].metadata_props


def test_a_file_with_broken_origins_compiles() -> None:
    model = parser.parse_model(_PRODUCT)
    entry = model.graph.node[0].metadata_props.add()
    entry.key, entry.value = "prefuse.origins", "{"
    assert prefuse.compile(model, cache=False)


@pytest.mark.parametrize("text", ["{", "[1]", '{"y": "nope"}', '{"nope": "x"}', '{"y": ["x"]}'])
def test_states_that_are_none(text: str) -> None:
    model = parser.parse_model(_PRODUCT)
    entry = model.metadata_props.add()
    entry.key, entry.value = "prefuse.states", text
    with pytest.raises(InvalidModelError, match=r"prefuse\.states names no outputs"):
        import_model(model)


def test_a_dimension_that_is_a_call_of_nothing() -> None:
    model = import_model(parser.parse_model(_HEADER + "main (float[N] x) => (float[M] y) { y = Relu(x) z = Neg(x) }"))
    model.graph.outputs[0].shape = ir.Shape(["floor()"])
    assert bind_dimensions(model, {"x": (3,)})


def test_a_norm_of_power_zero() -> None:
    with pytest.raises(CompileError, match="GlobalLpPool"):
        prefuse.compile(
            parser.parse_model(_HEADER + "main (float[1,2,3,3] x) => (float[1,2,1,1] y) { y = GlobalLpPool<p=0>(x) }")
        )


def test_an_external_tensor_of_negative_dimensions(tmp_path: Path) -> None:
    model = parser.parse_model(_HEADER + "main (float[100] x) => (float[100] y) <float[1] w = {1}> { y = Add(x, w) }")
    tensor = model.graph.initializer[0]
    tensor.ClearField("float_data")
    tensor.ClearField("dims")
    tensor.dims.extend([-2, -50])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    (tmp_path / "w.bin").write_bytes(b"\0" * 400)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(InvalidModelError, match=r"w has the shape \[-2,-50\]"):
        import_model(tmp_path / "m.onnx")
