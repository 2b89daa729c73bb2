"""Recurrent operators in 8 bits: what is placed, what other runtimes make of it, and the program."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import prefuse
import pytest
from prefuse.compiler.bits.error_budget import meet_budget
from prefuse.compiler.debugging.oracle import relative_error
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.assignments.pairs import keeps_pairs
from prefuse.compiler.ir.stored_weights import ROW_BITS, reads_integers
from prefuse.compiler.quantization.quantizer import uncalibrated
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.target import Target

GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
STEPS, BATCH, INPUTS, HIDDEN = 7, 5, 12, 24


def network(op: str, *, scale: float = 1.0, opset: int = 20, shared: bool = False) -> onnx.ModelProto:
    """A recurrence in both directions, and a product of its states; with `shared` one more recurrence by the same weights."""
    random, lines = np.random.default_rng(0), GATES[op] * HIDDEN
    shapes = {"w": (2, lines, INPUTS), "r": (2, lines, HIDDEN), "b": (2, 2 * lines), "v": (HIDDEN, 10)}
    arrays = {name: (random.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32) for name, shape in shapes.items()}
    arrays["r"][0, 0, 0] *= np.float32(scale)
    node = onnx.helper.make_node
    recurrent: dict[str, Any] = {"hidden_size": HIDDEN, "direction": "bidirectional"}
    nodes = [node(op, ["x", "w", "r", "b"], ["y", "last"], "recurrence", **recurrent)]
    if shared:
        nodes += [node(op, ["x", "w", "r"], ["other", ""], "again", **recurrent), node("Add", ["y", "other"], ["both"])]
    nodes += [node("MatMul", ["both" if shared else "y", "v"], ["z"], "product")]
    facts = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (("x", (STEPS, BATCH, INPUTS)), ("z", (STEPS, 2, BATCH, 10)), ("last", (2, BATCH, HIDDEN)))
    ]
    weights = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = onnx.helper.make_graph(nodes, "net", facts[:1], facts[1:], weights)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).standard_normal((STEPS, BATCH, INPUTS)).astype(np.float32)}


def outputs_of(net: CompiledModel) -> tuple[Any, ...]:
    outputs = net(**inputs())
    assert isinstance(outputs, tuple)
    return outputs


def recurrences(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type in GATES]


@pytest.mark.parametrize("op", GATES)
def test_program(op: str) -> None:
    """Integers reach the kernel, without data, and the error is that of 8 bits."""
    model = network(op)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = prefuse.compile(model, precision="int8-rows", cache=False, threads=2)
    assert isinstance(net, CompiledModel)
    report = net.report()
    target = Target.parse("cpu")
    has_pairs = target.multiplies_pairs or target.has_tiles  # or there is no other format to be chosen
    assert (f"{op} stays float32: its weights are integers" in report) == has_pairs
    exact = onnxruntime.InferenceSession(model.SerializeToString()).run(None, inputs())
    for found, expected in zip(outputs_of(net), exact, strict=True):
        assert 1e-4 < relative_error(np.asarray(found), expected) < 3e-2


@pytest.mark.parametrize(("level", "largest"), [("avx2", 112), ("avx512vnni", 127)])
def test_other_runtimes_run_what_is_written(level: str, largest: int) -> None:
    """With the same weights, and float rows. Without dot products of bytes pairs of weights are small."""
    model = network("LSTM")
    calibrated = uncalibrated(import_model(model), Target("cpu", level))
    placed = calibrated.place({"recurrence": "int8-rows"})
    (node,) = recurrences(placed)
    assert reads_integers(node) == (1, 2)
    assert node.metadata_props[ROW_BITS] == "8"
    written = ir.to_proto(placed)
    onnx.checker.check_model(written)
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in written.graph.initializer}
    floats = network("LSTM")
    for tensor in floats.graph.initializer:
        if tensor.name in "wr":
            numbers, scales = weights[f"{tensor.name}_int8"], weights[f"{tensor.name}_scale"]
            most = np.abs(numbers.astype(int)).max(2)
            assert most.max() == largest
            assert most.min() == (127 if largest == 127 else 64)
            assert keeps_pairs(numbers, -1) == (level == "avx2")
            tensor.CopyFrom(onnx.numpy_helper.from_array(numbers * scales, tensor.name))
    sessions = [onnxruntime.InferenceSession(one.SerializeToString()) for one in (written, floats)]
    got, expected = (session.run(None, inputs()) for session in sessions)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_budget_and_shared_weights() -> None:
    """Damage alone is that of the weights; what two recurrences read is quantized once."""
    calibrated = uncalibrated(import_model(network("GRU", shared=True)), Target.parse("cpu"))
    assert list(calibrated.uniform("int8-rows")) == ["product", "recurrence", "again"]
    outcome = meet_budget(calibrated, calibrated.uniform("int8-rows"), [inputs()], 1e-7)
    assert set(outcome.returned) == {"product", "recurrence", "again"}
    assert all(0 < damage < 1e-3 for damage in outcome.damage.values())
    placed = calibrated.place(calibrated.uniform("int8-rows"))
    assert sum(str(name).startswith("w_int8") for name in placed.graph.initializers) == 1
    assert all(reads_integers(node) == (1, 2) for node in recurrences(placed))


@pytest.mark.parametrize(("model", "reason"), [(network("GRU", scale=np.inf), "not finite"), (network("RNN", opset=17), "")])
def test_what_stays_float_says_why(model: onnx.ModelProto, reason: str) -> None:
    calibrated = uncalibrated(import_model(model), Target.parse("cpu"))
    assert reason in calibrated.left.get("recurrence", "")
    assert bool(reason) == ("recurrence" not in calibrated.uniform("int8-rows"))


def test_without_permission_rows_stay_float() -> None:
    """Dequantized weights alone are weights: a file that says nothing of rows is computed as it is written."""
    placed = uncalibrated(import_model(network("GRU")), Target.parse("cpu")).place({"recurrence": "int8-rows"})
    (node,) = recurrences(placed)
    del node.metadata_props[ROW_BITS]
    written = ir.to_proto(placed)
    net = prefuse.compile(written, cache=False, threads=2)
    assert isinstance(net, CompiledModel)
    expected = onnxruntime.InferenceSession(written.SerializeToString()).run(None, inputs())
    for found, other in zip(outputs_of(net), expected, strict=True):
        np.testing.assert_allclose(np.asarray(found), other, rtol=0, atol=1e-5)
