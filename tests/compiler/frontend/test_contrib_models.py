"""Whole models as ONNX Runtime's optimizers and quantizers leave them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import prefuse
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.transformers.optimizer import optimize_model
from prefuse.tests.models.exports import Export, Exports

Feeds = dict[str, np.ndarray]
Files = Callable[[str], tuple[Path, Feeds]]


@pytest.fixture(scope="module")
def files(exports: Exports, tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Small models in files that ONNX Runtime's tools take, in folders of their own, and inputs."""
    return cache(lambda name: of_older_format(exports(name), tmp_path_factory.mktemp(name)))


def of_older_format(export: Export, folder: Path) -> tuple[Path, Feeds]:
    proto = onnx.load(export.path)
    proto.ir_version = 10
    onnx.save(proto, folder / "model.onnx")
    return folder / "model.onnx", export.inputs


def run(path: Path, feeds: Feeds, save: Path | None = None) -> list[np.ndarray]:
    """ONNX Runtime's results; the model with its extended optimizations is saved if asked for."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    if save is not None:
        options.optimized_model_filepath = str(save)
    return list(onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feeds))


def extended(path: Path, feeds: Feeds) -> Path:
    run(path, feeds, path.with_name("extended.onnx"))
    return path.with_name("extended.onnx")


def fused(path: Path, feeds: Feeds) -> Path:
    logging.getLogger("onnxruntime.transformers").setLevel(logging.CRITICAL)
    model = optimize_model(str(path), "bert", num_heads=4, hidden_size=32, opt_level=0)
    model.save_model_to_file(str(path.with_name("fused.onnx")))
    return path.with_name("fused.onnx")


def four_bits(path: Path, feeds: Feeds) -> Path:
    folded = extended(path, feeds)  # the quantizer takes weights without a Transpose
    quantizer = MatMulNBitsQuantizer(onnx.load(folded), block_size=16, is_symmetric=False)
    quantizer.process()
    quantizer.model.save_model_to_file(str(path.with_name("4bits.onnx")))
    return path.with_name("4bits.onnx")


def dynamic(path: Path, feeds: Feeds) -> Path:
    quantize_dynamic(path, path.with_name("dynamic.onnx"), weight_type=QuantType.QInt8)
    return extended(path.with_name("dynamic.onnx"), feeds)


@pytest.mark.parametrize(
    ("name", "change", "operators", "tolerance"),
    [
        ("lenet5", extended, {"FusedGemm"}, 1e-5),
        ("bert-base", extended, {"SkipLayerNormalization", "FusedGemm"}, 1e-5),
        ("bert-base", fused, {"Attention", "BiasGelu"}, 1e-5),
        ("gpt2", four_bits, {"MatMulNBits"}, 1e-4),
        ("bert-base", dynamic, {"DynamicQuantizeMatMul"}, 2e-2),  # a number may be rounded to the next integer
    ],
)
def test_models(name: str, change: Callable[[Path, Feeds], Path], operators: set[str], tolerance: float, files: Files) -> None:
    path, feeds = files(name)
    changed = change(path, feeds)
    found = {node.op_type for node in onnx.load(changed).graph.node if node.domain == "com.microsoft"}
    assert operators <= found
    result = prefuse.compile(changed, cache=False)(**feeds)
    for got, wanted in zip(result if isinstance(result, tuple) else (result,), run(changed, feeds), strict=True):
        assert np.linalg.norm(got - wanted) <= tolerance * np.linalg.norm(wanted)
