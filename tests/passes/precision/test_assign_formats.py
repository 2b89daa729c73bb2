"""Programs of narrow precisions, against float64 on the rounded operands and against their own graph in ONNX Runtime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
import torch
from prefuse.compiler.ir.assignments.operand_formats import operand_formats
from prefuse.compiler.ir.facts import infer_facts, tensor_type
from prefuse.compiler.pipeline import Context, run_pipeline
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE
from prefuse.passes.precision.assign_formats import AssignFormats
from prefuse.passes.precision.place_casts import PlaceCasts
from prefuse.runtime.target import AMX_EMULATED, Target
from prefuse.tests.kernels.harness import target_of

LEVELS = ("avx2", "avx512", "avx512bf16", "amx", AMX_EMULATED)
WEIGHTS_ONLY = DEFAULT_PIPELINE.replace("assign-formats", "assign-formats{weights-only=true}")
BFLOAT16, FLOAT16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
rng = np.random.default_rng(11)


def rounded(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return array.astype(dtype).astype(np.float64)


def network(layers: list[np.ndarray], rows: int) -> ir.Model:
    """relu(x @ w) for each w but the last, whose product is the output."""
    values = [f"float[{','.join(map(str, w.shape))}] w{i} = {{{','.join(map(str, w.ravel()))}}}" for i, w in enumerate(layers)]
    lines, last = [], "x"
    for number in range(len(layers) - 1):
        lines += [f"h{number} = MatMul({last}, w{number})", f"r{number} = Relu(h{number})"]
        last = f"r{number}"
    lines.append(f"y = MatMul({last}, w{len(layers) - 1})")
    depth, columns = layers[0].shape[0], layers[-1].shape[1]
    return ir.from_onnx_text(
        f'<ir_version: 10, opset_import: ["": 21]> main (float[{rows},{depth}] x) => (float[{rows},{columns}] y)'
        f"<{', '.join(values)}> {{ {' '.join(lines)} }}"
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("precision", "dtype"), [("bfloat16", BFLOAT16), ("float16", FLOAT16)])
def test_products_of_rounded_operands(level: str, precision: str, dtype: np.dtype) -> None:
    """Rows are rounded where the CPU multiplies the type faster than float32, weights everywhere if that is asked for."""
    target = target_of(level)
    is_fast = precision == "bfloat16" and target.has("avx512_bf16")

    def rows(array: np.ndarray) -> np.ndarray:
        return rounded(array, dtype) if is_fast else array.astype(np.float64)

    first, second = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 130), (130, 50)))
    x = rng.standard_normal((33, 64)).astype(np.float32)
    hidden = np.maximum(rows(x) @ rounded(first, dtype), 0).astype(np.float32)
    expected = rows(hidden) @ rounded(second, dtype)
    pipeline = DEFAULT_PIPELINE if is_fast else WEIGHTS_ONLY
    net = prefuse.compile(network([first, second], 33), target=str(target), precision=precision, pipeline=pipeline, cache=False)
    found = np.asarray(net(x))
    # A hidden element that lies between two narrow numbers may be rounded the other way by a last bit of its sum.
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < (2e-4 if is_fast else 1e-6)
    assert found.dtype == np.float32


def test_weights_that_are_transformed_are_not_rounded() -> None:
    """Winograd's convolution of a rounded image takes float32 weights; elsewhere, and of volumes, they are rounded."""
    for places, is_transformed in (((28, 28), True), ((7, 7), False), ((1, 28, 28), False)):
        kernel, pads = ((3, 3), [1, 1]) if len(places) == 2 else ((1, 3, 3), [0, 1, 1])
        weights, x = rng.standard_normal((64, 64, *kernel)).astype(np.float32), rng.standard_normal((1, 64, *places))
        node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], pads=[*pads, *pads])
        image = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)
        result = onnx.helper.make_empty_tensor_value_info("y")
        graph = onnx.helper.make_graph([node], "one", [image], [result], [onnx.numpy_helper.from_array(weights, "w")])
        net = prefuse.compile(
            onnx.helper.make_model(graph), target=str(target_of("avx512bf16")), precision="bfloat16", cache=False
        )
        kept = weights.astype(np.float64) if is_transformed else rounded(weights, BFLOAT16)
        read = torch.from_numpy(rounded(x.astype(np.float32), BFLOAT16))
        convolve = torch.nn.functional.conv2d if len(places) == 2 else torch.nn.functional.conv3d
        expected = convolve(read, torch.from_numpy(kept), padding=pads).numpy()
        found = np.asarray(net(x.astype(np.float32)))
        assert ("winograd" in str(net.report())) == is_transformed
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < (1e-5 if is_transformed else 1e-6)


@pytest.mark.parametrize("stride", [1, 2])
def test_odd_channels_are_narrow(stride: int) -> None:
    """Through a MaxPool and a Concat, directly and by Winograd's convolution; its transformed weights are not rounded."""
    shapes = (1, 16, 30, 28), (37, 16, 1, 1), (33, 70, 3, 3)
    x, first, second = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    nodes = [
        onnx.helper.make_node("Conv", ["x", "v"], ["a"]),
        onnx.helper.make_node("Relu", ["a"], ["b"]),
        onnx.helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[3, 3], pads=[1] * 4),
        onnx.helper.make_node("Slice", ["b", "starts", "ends", "axes"], ["d"]),
        onnx.helper.make_node("Concat", ["c", "d"], ["e"], axis=1),
        onnx.helper.make_node("Conv", ["e", "w"], ["y"], pads=[1] * 4, strides=[stride] * 2),
    ]
    second = np.concatenate([second, second[:, :1] * 0.5], 1)
    ends = {name: np.array([value]) for name, value in (("starts", 3), ("ends", 37), ("axes", 1))}
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in {"v": first, "w": second, **ends}.items()]
    image = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)
    graph = onnx.helper.make_graph(nodes, "odd", [image], [onnx.helper.make_empty_tensor_value_info("y")], constants)
    net = prefuse.compile(onnx.helper.make_model(graph), target=str(target_of("avx512bf16")), precision="bfloat16", cache=False)
    hidden = torch.from_numpy(np.einsum("oi,nihw->nohw", rounded(first[..., 0, 0], BFLOAT16), rounded(x, BFLOAT16))).relu()
    hidden = hidden.bfloat16().double()
    joined = torch.cat([torch.nn.functional.max_pool2d(hidden, 3, 1, 1), hidden[:, 3:]], 1)
    kept = torch.from_numpy(rounded(second, BFLOAT16) if stride > 1 else second.astype(np.float64))
    expected = torch.nn.functional.conv2d(joined, kept, stride=stride, padding=1).numpy()
    found = np.asarray(net(x))
    assert ("winograd" in str(net.report())) == (stride == 1)
    assert "are no pairs" not in str(net.report())
    # A hidden element that lies between two narrow numbers may be rounded the other way by a last bit of its sum.
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 2e-4


def test_odd_channels_stay_float32_where_tiles_multiply_pairs() -> None:
    weights = onnx.numpy_helper.from_array(np.ones((75, 37, 3, 3), np.float32), "w")
    for level, is_narrow in (("avx512bf16", True), ("amx", False)):
        x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 37, 28, 28])
        node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], strides=[2, 2])
        graph = onnx.helper.make_graph([node], "main", [x], [onnx.helper.make_empty_tensor_value_info("y")], [weights])
        model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)]))
        infer_facts(model)
        run_pipeline(model, [AssignFormats(), PlaceCasts()], Context(Target("cpu", level), precision="bfloat16"))
        assert any(node.op_type == "Cast" for node in model.graph) == is_narrow


def test_upward_steps_of_volumes_are_narrow() -> None:
    """A transposed convolution writes rounded numbers to its place in what the next convolution reads."""
    shapes = ((1, 32, 3, 5, 4), (1, 16, 6, 10, 8), (32, 16, 2, 2, 2), (20, 32, 3, 3, 3))
    x, s, up, weights = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    nodes = [
        onnx.helper.make_node("ConvTranspose", ["x", "up"], ["a"], strides=[2, 2, 2]),
        onnx.helper.make_node("Relu", ["s"], ["r"]),
        onnx.helper.make_node("Concat", ["a", "r"], ["c"], axis=1),
        onnx.helper.make_node("Conv", ["c", "w"], ["y"], pads=[1] * 6),
    ]
    images = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in zip("xs", shapes[:2], strict=True)
    ]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in (("up", up), ("w", weights))]
    graph = onnx.helper.make_graph(nodes, "step", images, [onnx.helper.make_empty_tensor_value_info("y")], constants)
    net = prefuse.compile(onnx.helper.make_model(graph), target=str(target_of("avx512bf16")), precision="bfloat16", cache=False)
    narrow = [torch.from_numpy(rounded(array, BFLOAT16)) for array in (x, np.maximum(s, 0), up, weights)]
    joined = torch.cat([torch.nn.functional.conv_transpose3d(narrow[0], narrow[2], stride=2).bfloat16().double(), narrow[1]], 1)
    expected = torch.nn.functional.conv3d(joined, narrow[3], padding=1).numpy()
    found = np.asarray(net(x, s))
    assert "transposed_convolution_channels_last" in str(net.report())
    # A hidden element that lies between two narrow numbers may be rounded the other way by a last bit of its sum.
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 2e-4


def test_few_rows_round_weights_alone() -> None:
    weights, x = rng.standard_normal((512, 300)).astype(np.float32), rng.standard_normal((2, 512)).astype(np.float32)
    net = prefuse.compile(network([weights], 2), precision="bfloat16", cache=False)
    expected = x.astype(np.float64) @ rounded(weights, BFLOAT16)
    np.testing.assert_allclose(np.asarray(net(x)), expected, 1e-5, 5e-5)  # sums of 512 numbers of about 1 in float32


def test_nothing_is_rounded_in_float32() -> None:
    weights, x = rng.standard_normal((64, 130)).astype(np.float32), rng.standard_normal((33, 64)).astype(np.float32)
    net = prefuse.compile(network([weights], 33), cache=False)
    np.testing.assert_allclose(np.asarray(net(x)), x.astype(np.float64) @ weights, 1e-5, 2e-5)


def test_recurrent_weights_are_rounded_alone_where_pairs_are_not_multiplied() -> None:
    steps, batch, inputs, hidden = 5, 9, 40, 24
    w, r = (0.2 * rng.standard_normal((1, 3 * hidden, n)).astype(np.float32) for n in (inputs, hidden))
    x = rng.standard_normal((steps, batch, inputs)).astype(np.float32)

    def model(w: np.ndarray, r: np.ndarray) -> ir.Model:
        parameters = ", ".join(
            f"float[{','.join(map(str, array.shape))}] {name} = {{{','.join(f'{v:.9g}' for v in array.ravel().tolist())}}}"
            for name, array in (("w", w), ("r", r))
        )
        return ir.from_onnx_text(
            f'<ir_version: 10, opset_import: ["": 21]> main (float[{steps},{batch},{inputs}] x)'
            f" => (float[{steps},1,{batch},{hidden}] y) <{parameters}> {{ y = GRU<hidden_size={hidden}>(x, w, r) }}"
        )

    expected = prefuse.compile(model(*(rounded(array, BFLOAT16) for array in (w, r))), cache=False)(x)
    net = prefuse.compile(model(w, r), target="cpu:avx2", precision="bfloat16", pipeline=WEIGHTS_ONLY, cache=False)
    np.testing.assert_allclose(np.asarray(net(x)), np.asarray(expected), 1e-5, 1e-6)
    assert np.abs(np.asarray(net(x)) - np.asarray(prefuse.compile(model(w, r), cache=False)(x))).max() > 1e-5


def test_a_recurrent_operator_may_lack_its_first_output() -> None:
    steps, batch, size = 6, 4, 48
    w, r = (0.2 * rng.standard_normal((1, 3 * size, size)).astype(np.float32) for _ in range(2))
    x = rng.standard_normal((steps, batch, size)).astype(np.float32)
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        main (float[{steps},{batch},{size}] x, float[1,{3 * size},{size}] w, float[1,{3 * size},{size}] r)
        => (float[1,{batch},{size}] h) {{ y, h = GRU<hidden_size={size}>(x, w, r) }}"""

    def run(precision: str) -> np.ndarray:
        model = ir.from_onnx_text(text)
        (gru,) = model.graph
        gru.outputs[0].name = ""
        for value, array in zip(list(model.graph.inputs[1:]), (w, r), strict=True):
            model.graph.inputs.remove(value)
            value.const_value = ir.tensor(array)
            model.graph.register_initializer(value)
        return np.asarray(prefuse.compile(model, precision=precision, pipeline=WEIGHTS_ONLY, cache=False)(x))

    narrow, exact = run("bfloat16"), run("float32")
    assert 0 < np.linalg.norm(narrow - exact) / np.linalg.norm(exact) < 1e-2


@pytest.mark.parametrize("operator", ["MatMul", "GRU"])
def test_weights_are_rounded_where_that_is_faster(operator: str) -> None:
    """Of few rows, where the bytes of weights are all that takes time; of many, making float32 of them takes longer."""
    for rows, is_narrow in ((1, True), (256, False)):
        weights = "float[512,768] w" if operator == "MatMul" else "float[1,768,512] w, float[1,768,256] r"
        shape, call = ((rows, 512), "MatMul(x, w)") if operator == "MatMul" else ((9, rows, 512), "GRU<hidden_size=256>(x, w, r)")
        model = ir.from_onnx_text(
            f'<ir_version: 10, opset_import: ["": 21]> main (float{list(shape)} x, {weights}) => (float y) {{ y = {call} }}'
        )
        for value in list(model.graph.inputs[1:]):
            model.graph.inputs.remove(value)
            value.const_value = ir.tensor(np.zeros(tensor_type(value).shape, np.float32))
            model.graph.register_initializer(value)
        model.graph.outputs[0].shape = None
        infer_facts(model)
        context = Context(Target.parse("cpu:avx2,machine=zen3"), precision="bfloat16")
        run_pipeline(model, [AssignFormats()], context)
        assert any(operand_formats(node) for node in model.graph) == is_narrow
        assert is_narrow or any("with narrow weights" in remark.message for remark in context.remarks)


@pytest.mark.parametrize(("kind", "kernel"), [("Conv", (16, 2, 1, 1)), ("ConvTranspose", (2, 16, 2, 2))])
def test_what_stays_on_vectors_stays_float32_where_they_multiply_pairs_slowly(kind: str, kernel: tuple[int, ...]) -> None:
    """CPUs with a tile unit have a slow instruction for pairs; their tiles do not pay for 2 channels."""
    weights = onnx.numpy_helper.from_array(np.ones(kernel, np.float32), "w")
    shapes: tuple[tuple[str, list[int] | None], ...] = ("x", [1, 2, 128, 128]), ("y", None)
    x, y = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes)
    node = onnx.helper.make_node(kind, ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([node], "main", [x], [y], [weights])
    opset = [onnx.helper.make_opsetid("", 21)]
    for level, is_narrow in (("avx512bf16", True), ("amx", False)):
        model = ir.from_proto(onnx.helper.make_model(graph, ir_version=10, opset_imports=opset))
        infer_facts(model)
        run_pipeline(model, [AssignFormats(), PlaceCasts()], Context(Target("cpu", level), precision="bfloat16"))
        assert any(node.op_type == "Cast" for node in model.graph) == is_narrow
