"""Programs whose weights stay integers of few bits: MatMulNBits, blocked DequantizeLinear, and float models on request."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
import torch
from onnx import helper, numpy_helper
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.compiler.programs.symbolic import SymbolicModel
from prefuse.compiler.quantization.formats import group_scales
from prefuse.runtime.errors import OptionError
from prefuse.runtime.executor import CompiledModel
from torch import nn

STORED = {"fixed_point_matmul", "dequantized_matmul", "dequantized_rows"}
rng = np.random.default_rng(4)


def model_of(
    nodes: list[onnx.NodeProto],
    x: tuple[Any, ...],
    y: tuple[Any, ...],
    *,
    dtype: type[np.floating] = np.float32,
    **constants: np.ndarray,
) -> onnx.ModelProto:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    ports = [helper.make_tensor_value_info(name, kind, shape) for name, shape in (("x", x), ("y", y))]
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], weights)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def compiled(model: onnx.ModelProto, **options: Any) -> CompiledModel:
    program = prefuse.compile(model, cache=False, threads=2, **options)
    assert isinstance(program, CompiledModel)
    return program


def constant_bytes(program: CompiledModel) -> int:
    return program.plan.weights_bytes


@pytest.mark.parametrize(
    ("bits", "block", "level", "has_zero", "dtype"),
    [
        (4, 32, 0, False, np.float32),
        (4, 16, 4, True, np.float32),
        (8, 64, 4, False, np.float32),
        (4, 32, 0, False, np.float16),
        (4, 32, 0, True, np.float16),
    ],
)
def test_matmul_n_bits(bits: int, block: int, level: int, has_zero: bool, dtype: type[np.floating]) -> None:
    """As ONNX Runtime at the same accuracy level, which is that of its own arithmetic; and no larger than the file's weights."""
    ort = pytest.importorskip("onnxruntime")
    k, n = 232, 40  # k is no multiple of a block
    blocks = -(-k // block)
    constants = {
        "q": rng.integers(0, 256, (n, blocks, block * bits // 8), np.uint8),
        "s": rng.uniform(0.01, 0.02, n * blocks).astype(dtype),
    }
    if has_zero:
        constants["z"] = rng.integers(0, 256, n * -(-blocks * bits // 8), np.uint8)
    node = helper.make_node(
        "MatMulNBits", ["x", *constants], ["y"], domain="com.microsoft",
        K=k, N=n, bits=bits, block_size=block, accuracy_level=level,
    )  # fmt: skip
    model = model_of([node], (3, k), (3, n), dtype=dtype, **constants)
    x = rng.normal(size=(3, k)).astype(dtype)
    program = compiled(model)
    assert {kernel.template for kernel in program.plan.kernels} <= {
        "fixed_point_matmul",
        "dequantized_matmul",
        "dequantized_rows",
    }
    most = 1.35 if dtype == np.float32 else 1.5  # columns fill whole vectors, and scales become float32
    assert constant_bytes(program) <= most * sum(array.nbytes for array in constants.values())
    (expected,) = ort.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    rounded = level == 4 and program.plan.kernels[0].template == "fixed_point_matmul"
    error = np.linalg.norm((np.asarray(program(x)) - expected).astype(np.float64)) / np.linalg.norm(expected.astype(np.float64))
    assert error < (1e-3 if rounded or level == 0 else 2e-2)


def mlp(rows: int | str) -> tuple[onnx.ModelProto, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Two products of float32, the first with an epilogue; and its weights."""
    w, u = (rng.normal(size=shape).astype(np.float32) / 16 for shape in ((256, 512), (512, 256)))
    b = rng.normal(size=512).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Add", ["m", "b"], ["a"]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("MatMul", ["r", "u"], ["y"]),
    ]
    return model_of(nodes, (rows, 256), (rows, 256), w=w, u=u, b=b), (w, b, u)


def relative_error(found: object, x: np.ndarray, weights: tuple[np.ndarray, np.ndarray, np.ndarray]) -> float:
    w, b, u = weights
    exact = np.maximum(x.astype(np.float64) @ w + b, 0) @ u
    return float(np.linalg.norm(np.asarray(found) - exact) / np.linalg.norm(exact))


ERRORS = [("int8", 0.27, 1.5e-2), ("int4", 0.2, 0.2)]


@pytest.mark.parametrize(("weights", "share", "error"), ERRORS)
def test_float_models(weights: str, share: float, error: float) -> None:
    """Less memory, and the error of the weights' rounding; the epilogue stays in the product's kernel."""
    model, arrays = mlp(4)
    x = rng.normal(size=(4, 256)).astype(np.float32)
    program = compiled(model, weights=weights)
    assert len(program.plan.kernels) == 2
    assert constant_bytes(program) < share * (arrays[0].nbytes + arrays[2].nbytes)
    assert 1e-5 < relative_error(program(x), x, arrays) < error


class Layers(nn.Module):
    """Products with and without a bias, between pointwise operators."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 512, bias=False), nn.Linear(256, 256)

    def forward(self, input: torch.Tensor) -> Any:
        gate, value = self.first(input).chunk(2, -1)
        return self.second(torch.relu(gate) * value) + input


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_modules_in_narrow_types(dtype: torch.dtype, weights: str, rows: int) -> None:
    """Their products read integers, too: their weights stayed as they were, and nothing said so."""
    torch.manual_seed(0)
    module = Layers().eval().to(dtype)
    program = prefuse.compile(module, cache=False, threads=2, weights=weights)
    assert isinstance(program, SpecializedModel)
    x = torch.randn(rows, 256).to(dtype)
    found: Any = program(x)
    assert found.dtype == dtype
    own = program.specialize(x)
    assert isinstance(own, CompiledModel)
    templates = {kernel.template for kernel in own.plan.kernels}
    assert templates & {"fixed_point_tiles", *STORED}, templates
    assert "matmul" not in templates
    assert constant_bytes(own) < 1.4 * (1 if weights == "int8" else 0.5) * (256 * 512 + 256 * 256)
    reference = copy.deepcopy(module).double()
    for parameter in (reference.first.weight, reference.second.weight):
        numbers = parameter.detach().float().numpy()
        scales = (
            np.repeat(group_scales(numbers, 32, 4, 1), 32, 1)
            if weights == "int4"
            else np.abs(numbers).max(1, keepdims=True) / 127
        )
        parameter.data = torch.from_numpy(np.rint(numbers / scales) * scales).double()
    with torch.no_grad():
        exact = reference(x.double())
    error = float((found.double() - exact).norm() / exact.norm())
    assert error < (8e-3 if dtype == torch.bfloat16 else 1e-3), error


@pytest.mark.parametrize(("weights", "share", "error"), ERRORS)
def test_float_models_of_any_size(weights: str, share: float, error: float) -> None:
    """The same kernels by programs for ranges, which read one copy of the integers."""
    model, arrays = mlp("N")
    net = prefuse.compile(model, cache=False, threads=2, weights=weights, dims={"N": (1, 40)})
    assert isinstance(net, SymbolicModel)
    assert all("one program" in note for note in net.notes), net.notes
    for rows in (1, 5, 33, 40):
        x = rng.normal(size=(rows, 256)).astype(np.float32)
        assert 1e-5 < relative_error(net(x), x, arrays) < error
        program = net.specialize(x)
        assert isinstance(program, CompiledModel)
        assert len(program.plan.kernels) == 2
        assert {kernel.template for kernel in program.plan.kernels} <= {
            "fixed_point_matmul",
            "dequantized_matmul",
            "dequantized_rows",
        }
        assert constant_bytes(program) < share * (arrays[0].nbytes + arrays[2].nbytes)


def test_without_fusion() -> None:
    """Where nothing is fused, weights are dequantized by a kernel of their own."""
    numbers, scales = rng.integers(-8, 8, (2, 64, 24)), rng.uniform(0.1, 1, (2, 24)).astype(np.float32)
    w = numbers[0].astype(np.int8)
    node = helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=0, block_size=32)
    model = model_of([node, helper.make_node("MatMul", ["x", "d"], ["y"])], (2, 64), (2, 24), w=w, s=scales)
    x = rng.normal(size=(2, 64)).astype(np.float32)
    exact = x.astype(np.float64) @ (w * np.repeat(scales, 32, 0))
    for pipeline in ("default", "no-fusion"):
        np.testing.assert_allclose(np.asarray(compiled(model, pipeline=pipeline)(x)), exact, rtol=0, atol=2e-4)


def test_unknown_weights() -> None:
    with pytest.raises(OptionError, match="int8"):
        prefuse.compile(model_of([helper.make_node("Relu", ["x"], ["y"])], (1,), (1,)), weights="int7")
