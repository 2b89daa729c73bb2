"""fuse-rows against its kernel: what the pass groups, the template takes, and the numbers are those of ONNX Runtime."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
from prefuse.compiler.debugging.oracle import random_inputs, relative_error, run_model
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.functions import is_fused
from prefuse.compiler.lowering.groups import group_of
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.kernels.groups.configuration import TEMPLATE
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import Target

SHAPES = ((6, 17), (2, 3, 40), (1, 9), (2, 2, 3, 8))
PRODUCT_SHAPES = ((128, 17), (2, 64, 40))  # as many rows as a product is computed with
TWO_THREADS = Target.parse("cpu:avx512", threads=2)
UNARY = ("Tanh", "Neg", "Sigmoid", "Abs", "Erf")
BINARY = ("Add", "Sub", "Mul", "Max")
REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceLogSumExp", "ReduceSumSquare")
NORMALIZATIONS = ("Softmax", "LogSoftmax", "RMSNormalization", "LayerNormalization")


def random_rows(seed: int, *, of_product: bool = False) -> ir.Model:
    """A random DAG over one shape: reductions that keep their dimension or lose it, normalizations, and pointwise nodes.

    `of_product`: one of its operands is the product of a constant.
    """
    chance = random.Random(seed)
    shape = chance.choice(PRODUCT_SHAPES if of_product else SHAPES)
    whole, kept, flat = ["x", "r", "e"], list[str](), list[str]()
    lines = ["x = MatMul(a, m)"] * of_product + ["e = Mul(x, w)"]
    for number in range(chance.randint(3, 12)):
        name = f"v{number}"
        match chance.randrange(6):
            case 0:
                lines.append(f"{name} = {chance.choice(UNARY)}({chance.choice(whole)})")
                whole.append(name)
            case 1:
                lines.append(
                    f"{name} = {chance.choice(BINARY)}({chance.choice(whole)}, {chance.choice([*whole, *kept, 'w', 'c'])})"
                )
                whole.append(name)
            case 2:
                keepdims = chance.randrange(2)
                lines.append(f"{name} = {chance.choice(REDUCTIONS)} <keepdims = {keepdims}> ({chance.choice(whole)}, last)")
                (kept if keepdims else flat).append(name)
            case 3:
                operator = chance.choice(NORMALIZATIONS)
                weight = ", w" if "Norm" in operator else ""
                lines.append(f"{name} = {operator} <axis = -1> ({chance.choice(whole)}{weight})")
                whole.append(name)
            case 4 if kept:
                lines.append(f"{name} = {chance.choice(BINARY)}({chance.choice(kept)}, {chance.choice([*kept, 'c'])})")
                kept.append(name)
            case _ if flat:
                lines.append(f"{name} = {chance.choice(UNARY)}({chance.choice(flat)})")
                flat.append(name)
    read = " ".join(line.split("(")[1] for line in lines)
    results = [name for name in whole[2:] + kept + flat if f"{name})" not in read and f"{name}," not in read]
    results += [name for name in whole[3:] if name not in results and chance.random() < 0.2]
    dims = {"whole": list(shape), "kept": [*shape[:-1], 1], "flat": list(shape[:-1])}
    kinds = {**dict.fromkeys(whole, "whole"), **dict.fromkeys(kept, "kept"), **dict.fromkeys(flat, "flat")}
    outputs = ", ".join(f"float{dims[kinds[name]]} {name}" for name in results)
    operand = f"{[*shape[:-1], 1]} a" if of_product else f"{list(shape)} x"
    weights = f", float[1, {shape[-1]}] m = {{{', '.join(str(chance.randint(-4, 4)) for _ in range(shape[-1]))}}}" * of_product
    text = f"""<ir_version: 10, opset_import: ["": 23]>
    main (float{operand}, float{list(shape)} r, float[{shape[-1]}] w) => ({outputs})
    <int64[1] last = {{-1}}, float c = {{0.25}}{weights}> {{ {"  ".join(lines)} }}"""
    model = ir.from_onnx_text(text)
    infer_facts(model)
    return model


def fuse(model: ir.Model, target: str = "cpu") -> Context:
    context = Context(Target.parse(target))
    run_pipeline(model, parse_pipeline("eliminate-dead,fuse-rows", PASSES), context)
    return context


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_the_template_takes_what_the_pass_groups(first: int) -> None:
    groups = 0
    for seed in range(first, first + 20):
        model = random_rows(seed)
        inputs = random_inputs(model)
        expected = run_model(model, inputs, "onnxruntime")
        fuse(model)
        for node in model.graph:
            if is_fused(node):
                group = replace(group_of(model, node), configuration={TEMPLATE: "rows"})  # another may be cheaper
                built = build_kernel(group, Target.parse("cpu"))
                assert isinstance(built, BuiltKernel), f"seed {seed}: {built}"
                assert (built.template, built.ignored) == ("rows", ())
                groups += 1
        actual = run_model(model, inputs, "onnxruntime")
        assert all(relative_error(actual[name], array) < 1e-6 for name, array in expected.items()), f"seed {seed}"
    assert groups > 10


@pytest.mark.parametrize("seed", [3, 8, 21, 34, 55])
def test_compiled_groups_compute_the_same(seed: int, tmp_path: Path) -> None:
    model = random_rows(seed)
    inputs = random_inputs(model)
    expected = run_model(model, inputs, "onnxruntime")
    compiled = prefuse.compile(model, cache=False, pipeline="eliminate-dead,fuse-rows,plan-memory")
    results = compiled(*inputs.values())
    for (name, array), result in zip(expected.items(), results if isinstance(results, tuple) else (results,), strict=True):
        np.testing.assert_allclose(np.asarray(result), array, rtol=2e-5, atol=2e-5, err_msg=name)


def test_the_template_takes_the_products_that_the_pass_groups() -> None:
    products = 0
    for seed in range(24):
        model = random_rows(seed, of_product=True)
        context = Context(TWO_THREADS)
        run_pipeline(model, parse_pipeline("eliminate-dead,fuse-rows", PASSES), context)
        for group in (group_of(model, node) for node in model.graph if is_fused(node)):
            has_product = any(op.op_type == "MatMul" for op in group.ops)
            template = "product_rows" if has_product else "rows"
            built = build_kernel(replace(group, configuration={TEMPLATE: template}), TWO_THREADS)
            assert isinstance(built, BuiltKernel), f"seed {seed}: {built}"
            assert (built.template, built.ignored) == (template, ())
            products += has_product
    assert products > 5


@pytest.mark.parametrize("seed", [1, 5, 9])
def test_compiled_products_with_their_rows_compute_the_same(seed: int) -> None:
    model = random_rows(seed, of_product=True)
    inputs = random_inputs(model)
    expected = run_model(model, inputs, "onnxruntime")
    compiled = prefuse.compile(model, cache=False, target="cpu:avx2", threads=2, pipeline="eliminate-dead,fuse-rows,plan-memory")
    results = compiled(*inputs.values())
    for (name, array), result in zip(expected.items(), results if isinstance(results, tuple) else (results,), strict=True):
        np.testing.assert_allclose(np.asarray(result), array, rtol=5e-5, atol=5e-5, err_msg=name)


def normalized_product(rows: int, transposed: int = 0) -> ir.Model:
    """A LayerNormalization of x w, or of x^T w, of so many rows; w is 768 x 768."""
    width = 768
    node, floats = onnx.helper.make_node, onnx.TensorProto.FLOAT
    nodes = [node("Gemm", ["x", "w"], ["h"], transA=transposed), node("LayerNormalization", ["h", "s"], ["y"])]
    arrays = {"w": np.ones((width, width), np.float32), "s": np.ones(width, np.float32)}
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    source = onnx.helper.make_tensor_value_info("x", floats, (width, rows) if transposed else (rows, width))
    result = onnx.helper.make_tensor_value_info("y", floats, (rows, width))
    graph = onnx.helper.make_graph(nodes, "one", [source], [result], constants)
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 23)]))
    infer_facts(model)
    return model


def test_the_tile_unit_computes_its_products_itself() -> None:
    model = normalized_product(128)
    context = fuse(model, "cpu:amx")
    assert any("matmul_tiles computes it faster alone" in str(remark) for remark in context.remarks)
    assert not any(is_fused(node) for node in model.graph)


def test_products_too_small_for_the_tile_unit_are_computed_with_their_rows() -> None:
    model = random_rows(0, of_product=True)
    fuse(model, "cpu:amx,threads=2")
    groups = [group_of(model, node) for node in model.graph if is_fused(node)]
    assert any(op.op_type == "MatMul" for group in groups for op in group.ops)


@pytest.mark.parametrize(
    ("rows", "transposed", "precision", "is_alone"),
    [
        (128, 0, "float32-fast", True),
        (128, 0, "float32", False),
        (128, 1, "float32-fast", False),  # which Strassen's kernel does not read
        (64, 0, "float32-fast", True),
        (16, 0, "float32-fast", False),  # rows too few for so many weights
    ],
)
def test_products_by_strassens_algorithm_are_made_alone(rows: int, transposed: int, precision: Precision, is_alone: bool) -> None:
    model = normalized_product(rows, transposed)
    context = Context(Target.parse("cpu:avx512", threads=1), precision=precision)
    run_pipeline(model, parse_pipeline("fuse-rows", PASSES), context)
    assert any("strassen_matmul computes it faster alone" in str(remark) for remark in context.remarks) == is_alone
    has_product = [is_fused(node) for node in model.graph]
    assert has_product == ([False, False] if is_alone or rows == 16 else [True])


def test_a_gpu_has_the_same_groups_but_for_products() -> None:
    model, other = random_rows(3), random_rows(3)
    fuse(model, "cuda:sm_90")
    fuse(other)
    assert any(is_fused(node) for node in model.graph)
    assert [node.op_type for node in model.graph] == [node.op_type for node in other.graph]
