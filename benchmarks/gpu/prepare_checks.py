"""Compile the checks: each tile of products by warpgroups and by mma.sync, attention, decode and bytes: TVM and nvcc."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import ModelProto, TensorProto, helper, numpy_helper

from ...compiler import driver
from ...compiler.api import compile_model
from ...compiler.programs.options import Options
from ...kernels.cost.gpu_product import ProductSize, tiled_products
from ...kernels.cost.gpu_warpgroup_product import warpgroup_ways
from ...kernels.groups.configuration import Configuration
from ...runtime.executor import CompiledModel
from ...runtime.hardware.gpu import gpu_machine
from ...runtime.target import Target
from .checks import Check

_WARPGROUPS, _MMA = "gpu_wgmma_matmul", "gpu_mma_matmul"
_LARGE = (0, 4104, 2056, 1032)  # more tiles than multiprocessors, of any tile, and no multiple of it; a row is whole 16 bytes
_FEW_ROWS = (0, 72, 264, 4104)  # few tiles, whose k is worth cutting
_BATCHED = (3, 514, 264, 328)


def checks(target: str) -> Iterator[Check]:
    """All for an architecture."""
    yield from _products(Target.parse(target).level)
    for dtype in ("bfloat16", "float32"):
        yield Check(f"attention-{dtype}", "attention", (4, 12, 500, 500, 64), dtype, "gpu_mma_attention")
        yield Check(f"decode-{dtype}", "attention", (4, 12, 1, 1000, 64), dtype, "gpu_decode_attention")
    yield Check("bytes", "product", (0, 2050, 1544, 1040), "uint8", _MMA, is_constant=True)
    yield Check("bytes-odd", "product", (0, 1030, 777, 1021), "uint8", _MMA, is_constant=True)


def _products(level: str) -> Iterator[Check]:
    machine = gpu_machine(level)
    ways = {_MMA: tiled_products} | ({_WARPGROUPS: warpgroup_ways} if machine.warpgroup_flops else {})
    for template, ways_of in ways.items():
        for way in ways_of(ProductSize(1, *_LARGE[1:]), machine):
            if way.splits > 1:
                continue
            tile = str(way)
            named = f"{template}-{tile.replace('/', '_')}"
            yield Check(f"{named}-packed", "product", _LARGE, "bfloat16", template, tile, is_constant=True)
            if template == _WARPGROUPS:
                turned = (False, True)  # the narrowest tiles have no operand along lines
                yield Check(f"{named}-mapped", "product", _LARGE, "bfloat16", template, tile, turned)
        pieces = [str(way) for way in ways_of(ProductSize(1, *_FEW_ROWS[1:]), machine) if way.splits > 1]
        for number, tile in enumerate(pieces[:2]):
            turned = (False, number > 0)
            yield Check(f"{template}-split{number}", "product", _FEW_ROWS, "bfloat16", template, tile, turned, number == 0)
        for is_turned in (False, True):  # a first operand along lines is transposed before
            named = f"{template}-{'k' if is_turned else 'lines'}"
            yield Check(named, "product", _LARGE, "float16", template, transposed=(False, is_turned))
        for is_constant in (False, True):
            named = f"{template}-batched{'-packed' * is_constant}"
            yield Check(named, "product", _BATCHED, "bfloat16", template, is_constant=is_constant)
    yield Check("float32", "product", _LARGE, "float32", _MMA, is_constant=True)


def prepare_checks(folder: Path, target: str, wanted: Sequence[Check]) -> None:
    """Write `checks/` into a folder.

    Raises:
        ValueError: a template or tile does not take its operation.
    """
    (folder / "checks").mkdir(parents=True, exist_ok=True)
    for one in wanted:
        print(one.name, flush=True)
        with TemporaryDirectory() as temporary:
            path = Path(temporary, "whole.prefuse")
            _compiled(one, target).save(path)
            one.write(path, folder / "checks" / f"{one.name}.zip")


class _Everywhere(dict[str, Configuration]):
    """One configuration for whatever problem there is."""

    def get(self, key: str, default: Any = None) -> Any:
        return self[""]


def _compiled(check: Check, target: str) -> CompiledModel:
    configuration = {"template": check.template} | ({"tile": check.tile} if check.tile else {})

    def forced(model: ir.Model, options: Options, **how: Any) -> None:
        options = replace(options, configurations=_Everywhere({"": configuration}))
        for item in driver.plan_model(model.clone(), options).lowered:
            if item.kernel.ignored:
                raise ValueError(f"{check.name}: {'; '.join(item.kernel.ignored)}")
        driver.compile_model(model, options, **how)

    net = compile_model(_model(check), target=target, name=check.name, cache=False, options={}, driver=forced)
    assert isinstance(net, CompiledModel)
    if (found := [kernel.template for kernel in net.plan.kernels]) != [check.template]:
        raise ValueError(f"{check.name}: computed by {', '.join(found)}")
    return net


def _model(check: Check) -> ModelProto:
    kind = getattr(TensorProto, check.dtype.upper())
    if check.kind == "attention":
        names, result = ["q", "k", "v"], kind
        scale = numpy_helper.from_array(np.array(check.shape[-1] ** -0.5).astype(np.dtype(check.dtype)), "scale")
        nodes = [
            helper.make_node("Transpose", ["k"], ["turned"], perm=[0, 1, 3, 2]),
            helper.make_node("MatMul", ["q", "turned"], ["products"]),
            helper.make_node("Mul", ["products", "scale"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["weights"], axis=-1),
            helper.make_node("MatMul", ["weights", "v"], ["y"]),
        ]
        constants = [scale]
    else:
        names, result = ["a", "b"], kind
        if check.dtype == "uint8":
            nodes, result = [helper.make_node("MatMulInteger", names, ["y"])], TensorProto.INT32
        elif any(check.transposed):
            left, right = map(int, check.transposed)
            nodes = [helper.make_node("Gemm", names, ["y"], transA=left, transB=right)]
        else:
            nodes = [helper.make_node("MatMul", names, ["y"])]
        constants = [numpy_helper.from_array(check.constant(), "b")] if check.is_constant else []
    given = [(name, shape) for name, shape in zip(names, check.operands, strict=True) if not (check.is_constant and name == "b")]
    inputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in given]
    graph = helper.make_graph(nodes, check.name, inputs, [helper.make_tensor_value_info("y", result, None)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
