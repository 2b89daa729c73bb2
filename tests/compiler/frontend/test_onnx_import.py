"""ONNX in every form becomes one dialect; what is corrupt or cannot be taken is one clear error."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
from onnx import external_data_helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator
from onnxruntime import InferenceSession
from prefuse.compiler.debugging.oracle import run_model
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.frontend.onnx_import import EXTERNAL_FILES
from prefuse.runtime.errors import CompileError, InvalidModelError, OptionError, UnsupportedModelError

TEXT = """<ir_version: 8, opset_import: ["": %d]> main (float[N,4] x) => (float[N,4] y) <float[4] w = {1,2,3,4}> {
  a = Add(x, w)
  y = Relu(a)
}"""


def proto(opset: int = 18) -> onnx.ModelProto:
    return parser.parse_model(TEXT % opset)


def with_external_data(folder: Path, weights: np.ndarray) -> Path:
    path = folder / "model.onnx"
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 18]> main (float[512] x) => (float[512] y) { y = Add(x, w) }')
    model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path


def test_operators_that_nothing_takes_are_refused_when_read() -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 18, "ai.onnx.ml": 3]> main (string[2] x) => (int64[2] y) '
        '{ y = ai.onnx.ml.CategoryMapper <cats_int64s = [1, 2], cats_strings = ["a", "b"]> (x) }'
    )
    with pytest.raises(UnsupportedModelError, match=r"ai\.onnx\.ml\.CategoryMapper: nothing here computes it"):
        import_model(parser.parse_model(text))


def test_every_form_gives_the_same_graph(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(proto(), path)
    forms = [path, str(path), path.read_bytes(), proto(), ir.from_proto(proto())]
    texts = {str([(node.op_type, str(node.outputs[0].shape)) for node in import_model(form).graph]) for form in forms}
    assert texts == {"[('Add', '[N,4]'), ('Relu', '[N,4]')]"}


def test_a_model_given_as_an_object_is_not_changed() -> None:
    model = ir.from_proto(
        parser.parse_model('<ir_version: 8, opset_import: ["": 12]> g (float[2] x) => (float[2] y) {y = Softmax(x)}')
    )
    before = ir.to_proto(model).SerializeToString()
    import_model(model)
    assert ir.to_proto(model).SerializeToString() == before


@pytest.mark.parametrize("opset", [11, 12, 13, 17, 18, 20, onnx.defs.onnx_opset_version()])
def test_opsets(opset: int) -> None:
    model = import_model(proto(opset))
    assert model.graph.opset_imports[""] == max(opset, 18)


def test_upgrading_keeps_the_meaning_and_the_large_weights() -> None:
    text = """<ir_version: 7, opset_import: ["": 11]> main (float[2,3,400] x) => (float[2,3] y) {
      s = Softmax(x)
      m = Mul(s, w)
      r = ReduceSum<axes=[2], keepdims=0>(m)
      u = Unsqueeze<axes=[0]>(r)
      y = Squeeze<axes=[0]>(u)
    }"""
    old = parser.parse_model(text)
    weights = np.random.default_rng(0).normal(size=(3, 400)).astype(np.float32)
    old.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    new = import_model(old)
    x = np.random.default_rng(1).normal(size=(2, 3, 400)).astype(np.float32)
    expected = InferenceSession(old.SerializeToString()).run(None, {"x": x})[0]
    found = np.asarray(ReferenceEvaluator(ir.to_proto(new)).run(None, {"x": x}))
    np.testing.assert_allclose(found, [expected], rtol=1e-5)
    assert [value.name for value in new.graph.inputs] == ["x"]
    assert "w" in new.graph.initializers


@pytest.mark.parametrize("opset", [0, onnx.defs.onnx_opset_version() + 1])
def test_opsets_that_cannot_be_taken(opset: int) -> None:
    model = proto()
    model.opset_import[0].version = opset
    with pytest.raises(UnsupportedModelError, match=f"opset {opset}"):
        import_model(model)


def test_outputs_are_distinct_values_made_by_nodes() -> None:
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) {y = Relu(x)}')
    model.graph.output.append(model.graph.output[0])
    model.graph.output.append(model.graph.input[0])
    graph = import_model(model).graph
    assert len(set(graph.outputs)) == 3
    assert all(value.producer() is not None for value in graph.outputs)
    assert graph.outputs[0].name == "y"


def test_initializers_that_are_inputs_become_constants() -> None:
    model = proto()
    model.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [4]))
    assert [value.name for value in import_model(model).graph.inputs] == ["x"]


def test_functions_of_the_model_are_inlined() -> None:
    text = """<ir_version: 8, opset_import: ["": 18, "mine": 1]> g (float[2] x) => (float[2] y) {y = mine.twice(x)}
    <domain: "mine", opset_import: ["": 18]> twice (a) => (b) {b = Add(a, a)}"""
    model = import_model(parser.parse_model(text))
    assert [node.op_type for node in model.graph] == ["Add"]
    assert not model.functions


def test_strings_in_an_external_file_are_refused(tmp_path: Path) -> None:
    path = with_external_data(tmp_path, np.zeros(512, np.float32))
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].data_type = onnx.TensorProto.STRING
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InvalidModelError, match="tensor w is of strings"):
        import_model(path)


def test_external_data_is_mapped_not_read(tmp_path: Path) -> None:
    weights = np.arange(512, dtype=np.float32)
    model = import_model(with_external_data(tmp_path, weights))
    tensor = model.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.ExternalTensor)
    np.testing.assert_array_equal(tensor.numpy(), weights)


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/passwd", "a/../../weights.bin"])
def test_external_data_outside_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "a").mkdir()
    (tmp_path / "weights.bin").write_bytes(bytes(2048))
    path = with_external_data(folder, np.zeros(512, np.float32))
    model = onnx.load(path, load_external_data=False)
    model.graph.initializer[0].external_data[0].value = location
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InvalidModelError, match="outside the model's folder"):
        import_model(path)


def test_external_data_through_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    path = with_external_data(folder, np.zeros(512, np.float32))
    (folder / "weights.bin").rename(tmp_path / "weights.bin")
    (folder / "weights.bin").symlink_to(tmp_path / "weights.bin")
    with pytest.raises(InvalidModelError, match="outside the model's folder"):
        import_model(path)


def test_the_layout_of_a_model_hub(tmp_path: Path) -> None:
    """Files lie under their hashes in one folder, and links with their names in another."""
    folder, blobs = tmp_path / "snapshots" / "1", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    weights = np.arange(512, dtype=np.float32)
    path = with_external_data(folder, weights)
    for name in (path.name, "weights.bin"):
        (folder / name).rename(blobs / f"hash of {name}")
        (folder / name).symlink_to(f"../../blobs/hash of {name}")
    model = import_model(path)
    np.testing.assert_array_equal(initializer(model).numpy(), weights)
    assert model.meta[EXTERNAL_FILES] == ["weights.bin"]
    (folder / "weights.bin").unlink()
    (tmp_path / "elsewhere.bin").write_bytes(weights.tobytes())
    (folder / "weights.bin").symlink_to("../../elsewhere.bin")
    with pytest.raises(InvalidModelError, match="outside the model's folder"):
        import_model(path)


def test_hard_links_to_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.arange(512, dtype=np.float32)
    path = with_external_data(tmp_path, weights)
    (tmp_path / "again.bin").hardlink_to(tmp_path / "weights.bin")
    np.testing.assert_array_equal(initializer(import_model(path)).numpy(), weights)
    monkeypatch.chdir(tmp_path)
    model = import_model("model.onnx")
    monkeypatch.chdir("/")
    np.testing.assert_array_equal(initializer(model).numpy(), weights)


def test_external_data_of_an_attribute(tmp_path: Path) -> None:
    text = "main (float[4] x) => (float[4] y) { w = Constant<value = float[4] {0.0, 0.0, 0.0, 0.0}>() y = Add(x, w) }"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> {text}')
    model.graph.node[0].attribute[0].t.CopyFrom(numpy_helper.from_array(np.arange(4, dtype=np.float32)))
    external_data_helper.convert_model_to_external_data(model, True, "weights.bin", 0, convert_attribute=True)
    onnx.save(model, tmp_path / "m.onnx")
    (tmp_path / "again.bin").hardlink_to(tmp_path / "weights.bin")
    net = prefuse.compile(tmp_path / "m.onnx", cache=False)
    np.testing.assert_array_equal(net(np.ones(4, np.float32)), np.array([1, 2, 3, 4], np.float32))


def initializer(model: ir.Model) -> ir.TensorProtocol:
    tensor = model.graph.initializers["w"].const_value
    assert tensor is not None
    return tensor


def test_missing_and_short_external_data(tmp_path: Path) -> None:
    path = with_external_data(tmp_path, np.zeros(512, np.float32))
    (tmp_path / "weights.bin").write_bytes(bytes(2047))
    with pytest.raises(InvalidModelError, match="tensor w needs 2048 bytes"):
        import_model(path)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(InvalidModelError, match="No such file"):
        import_model(path)


def test_a_device_is_not_read() -> None:
    with pytest.raises(InvalidModelError, match="/dev/zero: is a device"):
        import_model("/dev/zero")


def test_a_file_cut_short_anywhere_is_one_error(tmp_path: Path) -> None:
    content = proto().SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(CompileError):
            import_model(path)


def test_flipped_bytes_are_an_error_or_a_model() -> None:
    content = bytearray(proto().SerializeToString())
    for place in range(len(content)):
        broken = bytes(content[:place]) + bytes([content[place] ^ 0xFF]) + bytes(content[place + 1 :])
        try:
            import_model(broken)
        except CompileError:
            continue


def test_tensor_with_too_few_bytes() -> None:
    model = proto()
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.ones(4, np.float32), "w"))
    model.graph.initializer[0].raw_data = bytes(15)
    with pytest.raises(InvalidModelError, match="15 bytes of 16"):
        import_model(model)


@pytest.mark.parametrize("place", ["initializer", "attribute", "branch", "function"])
@pytest.mark.parametrize("data_type", [onnx.TensorProto.UNDEFINED, 99])
def test_tensor_of_a_type_that_is_none(place: str, data_type: int) -> None:
    branches = "then_branch = t () => (float[2] a) { a = Neg(x) }, else_branch = e () => (float[2] b) { b = Add(x, w) }"
    node = {"branch": f"If(c)<{branches}>", "function": "f.g(x)"}.get(place, "Add(x, w)")
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18, "f": 1]> main (float[2] x, bool c) => (float[2] y) {{ y = {node} }}'
        ' <domain: "f", opset_import: ["": 18]> g (x) => (y) { y = Add(x, w) }'
    )
    nodes = {"function": model.functions[0].node, "branch": model.graph.node[0].attribute}.get(place, model.graph.node)
    nodes = nodes[1].g.node if place == "branch" else nodes
    tensor = numpy_helper.from_array(np.ones(2, np.float32), "w")
    tensor.data_type = data_type
    if place == "initializer":
        model.graph.initializer.append(tensor)
    else:
        constant = onnx.helper.make_node("Constant", [], ["w"])
        constant.attribute.append(onnx.AttributeProto(name="value", type=onnx.AttributeProto.TENSOR, t=tensor))
        nodes.insert(0, constant)
    is_read = (place, data_type) == ("initializer", 99)  # by onnx_ir, before we see it
    with pytest.raises(InvalidModelError, match="is no valid" if is_read else f"data type {data_type}, which ONNX does not"):
        import_model(model)


def test_all_unsupported_operators_are_named_at_once() -> None:
    text = """<ir_version: 8, opset_import: ["": 18, "com.acme": 1]> g (float[2] x) => (float[2] y) {
      a = Reluu(x)
      b = com.acme.Magic(a)
      y = Relu(b)
    }"""
    with pytest.raises(UnsupportedModelError) as caught:
        import_model(parser.parse_model(text))
    assert "2 parts" in str(caught.value)
    assert "com.acme.Magic" in str(caught.value)
    assert "the nearest is Relu" in str(caught.value)


@pytest.mark.parametrize("opset", [6, 7, 13])
def test_slopes_of_old_models_belong_to_channels(opset: int) -> None:
    """Before opset 7 one slope a channel; from then on NumPy's broadcasting, here along the last axis."""
    text = f'<ir_version: 3, opset_import: ["": {opset}]> g (float[2,3,3] x, float[3] s) => (float[2,3,3] y) {{y = PRelu(x, s)}}'
    x, slopes = np.random.default_rng(0).standard_normal((2, 3, 3)).astype(np.float32), np.array([0.1, 0.5, 2.0], np.float32)
    model = parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(slopes, "s"))
    (found,) = run_model(import_model(model), {"x": x}, "reference").values()
    placed = slopes[:, None] if opset < 7 else slopes
    np.testing.assert_allclose(found, np.where(x < 0, x * placed, x), rtol=1e-6)


def test_sparse_tensors_are_unsupported() -> None:
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) {y = Relu(x)}')
    model.graph.input[0].type.CopyFrom(onnx.helper.make_sparse_tensor_type_proto(onnx.TensorProto.FLOAT, [2]))
    with pytest.raises(UnsupportedModelError, match="neither a dense tensor"):
        import_model(model)


def test_numbers_of_six_bits_are_not_handed_on() -> None:
    text = '<ir_version: 13, opset_import: ["": 28]> g (float[4] x) => (float[4] y) {y = OptionalGetElement(x)}'
    model = parser.parse_model(text)
    for value in (model.graph.input[0], model.graph.output[0]):
        value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT6E2M3
    with pytest.raises(UnsupportedModelError, match="OptionalGetElement: numbers of 6 bits"):
        import_model(model)


@pytest.mark.parametrize(("attributes", "is_taken"), [("", False), (", output_shape=[5]", True), (", strides=[3]", False)])
def test_a_transposed_convolution_of_two_sizes_is_refused(attributes: str, is_taken: bool) -> None:
    """By ONNX's text the result has as many elements as the input, times the stride; by its shape inference one more."""
    text = f"""<ir_version: 8, opset_import: ["": 18]> g (float[1,1,4] x, float[1,1,3] w) => (float[1,1,n] y)
        {{ y = ConvTranspose <auto_pad="SAME_UPPER", output_padding=[1]{attributes}> (x, w) }}"""
    if is_taken:
        import_model(parser.parse_model(text))
        return
    with pytest.raises(UnsupportedModelError, match="differ in the size"):
        import_model(parser.parse_model(text))


def test_things_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match="no such file"):
        import_model(tmp_path / "absent.onnx")
    (tmp_path / "empty.onnx").touch()
    with pytest.raises(InvalidModelError, match="empty"):
        import_model(tmp_path / "empty.onnx")
    with pytest.raises(InvalidModelError, match="cannot be read"):
        import_model(tmp_path)
    with pytest.raises(OptionError, match="is no model"):
        import_model(42)


def test_graph_that_breaks_single_assignment() -> None:
    model = proto()
    model.graph.node[0].output[0] = "y"
    with pytest.raises(InvalidModelError, match="is no valid ONNX model"):
        import_model(model)


def test_upgrading_reads_small_external_data(tmp_path: Path) -> None:
    text = '<ir_version: 7, opset_import: ["": 12]> main (float[4] x) => (float[4] y) { y = Add(x, w) }'
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.arange(4, dtype=np.float32), "w"))
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    tensor = import_model(tmp_path / "m.onnx").graph.initializers["w"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), np.arange(4))


@pytest.mark.parametrize(
    ("result", "body"),
    [
        (
            "float[3,4]",
            """start = Constant<value: tensor = int64[1] {-1}>()
            end = Constant<value: tensor = int64[1] {-9223372036854775807}>()
            axis = Constant<value: tensor = int64[1] {1}>()
            y = Slice(x, start, end, axis, start)""",
        ),
        (
            "float[5,4]",
            """five = Constant<value: tensor = int64[1] {5}>()
            shape = Shape<start: int = 1>(x)
            sizes = Concat<axis: int = 0>(five, shape)
            y = Resize(x, , , sizes)""",
        ),
    ],
    ids=["Slice", "Resize"],
)
def test_recorded_outputs_of_operands_that_nothing_is_recorded_of(result: str, body: str) -> None:
    """As torch's older exporter writes them: ONNX's inference takes axes and sizes of unknown shape for absent ones."""
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> main (float[3,4] x) => ({result} y) {{ {body} }}')
    assert f"float{import_model(model).graph.outputs[0].shape}" == result


@pytest.mark.parametrize("after", ["", "y = Neg(c)  z = Neg(a)"])
def test_a_part_that_is_left_out_has_its_place(after: str) -> None:
    """Of a Split into three, whose second part nothing reads."""
    a, c = ("z", "y") if after else ("a", "c")
    parsed = parser.parse_model(f"""<ir_version: 9, opset_import: ["": 18]>
        main (float[6,2] x) => (float[2,2] {a}, float[2,2] {c}) {{
          a, b, c = Split<axis = 0, num_outputs = 3>(x)
          {after}
        }}""")
    parsed.graph.node[0].output[1] = ""
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    found = prefuse.compile(parsed, cache=False)(x)
    assert isinstance(found, tuple)
    first, last = found
    sign = -1 if after else 1
    np.testing.assert_array_equal(first, sign * x[:2])
    np.testing.assert_array_equal(last, sign * x[4:])
