"""fuse-prologue against the kernels: what the pass groups, a template takes, and the numbers are those of ONNX Runtime."""

from __future__ import annotations

import random

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from prefuse.compiler.debugging.oracle import random_inputs, relative_error, run_model
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.functions import is_fused
from prefuse.compiler.lowering.groups import group_of
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE, PASSES
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.target import Target

SHAPES = ((2, 4, 6, 9), (1, 8, 5, 5), (1, 2, 20, 33), (3, 4, 1, 1))
UNARY = ("Tanh", "Neg", "Sigmoid", "Abs", "Relu")
BINARY = ("Add", "Sub", "Mul", "Max")
ANCHORS = (
    "Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> ({0}, w3)",
    "Conv <kernel_shape = [1, 1]> ({0}, w1)",
    "MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> ({0})",
    "AveragePool <kernel_shape = [1, 1]> ({0})",
    "InstanceNormalization ({0}, s1, s1)",
    "Softmax <axis = 1> ({0})",
    "Pad ({0}, pads)",
    "Gather <axis = 1> ({0}, order)",
    "GatherElements <axis = 1> ({0}, places)",
    "Transpose <perm = [0, 1, 2, 3]> ({0})",
)


def random_images(seed: int) -> ir.Model:
    """A random DAG over one shape of images: anchors that keep the shape, Concats and their halves, sums, and pointwise nodes."""
    chance = random.Random(seed)
    shape = chance.choice(SHAPES)
    channels = shape[1]
    whole, small, lines = ["x", "r"], ["s"], list[str]()
    for number in range(chance.randint(4, 14)):
        name = f"v{number}"
        match chance.randrange(8):
            case 0:
                lines.append(f"{name} = {chance.choice(UNARY)}({chance.choice(whole)})")
            case 1 | 2:
                operand = chance.choice([*whole, *small, "c"])
                lines.append(f"{name} = {chance.choice(BINARY)}({chance.choice(whole)}, {operand})")
            case 3:
                operand = chance.choice([*small, "c"])
                lines.append(f"{name} = {chance.choice(BINARY)}({chance.choice(small)}, {operand})")
                small.append(name)
                continue
            case 4:
                axis, half = chance.choice([1, 3]), chance.choice(whole)
                lines.append(f"{name}a = Concat <axis = {axis}> ({chance.choice(whole)}, {half})")
                lines.append(f"{name} = ReduceMax <keepdims = 1> ({name}a, a{axis})")
                lines.append(f"{name}b = Add({name}, {half})")
                name = f"{name}b"
            case 5:  # the difference of neighbours on both sides
                lines.append(f'{name}a = Pad <mode = "edge"> ({chance.choice(whole)}, sides)')
                lines.append(f"{name}b = Slice ({name}a, zero1, width, a3)  {name}c = Slice ({name}a, two1, width2, a3)")
                lines.append(f"{name} = {chance.choice(BINARY)}({name}c, {name}b)")
            case _:
                lines.append(f"{name} = {chance.choice(ANCHORS).format(chance.choice(whole))}")
        whole.append(name)
    read = " ".join(line.split("=", 1)[1] for line in lines)
    results = [name for name in whole[2:] if f"{name})" not in read and f"{name}," not in read]
    results = list(dict.fromkeys([*results, whole[-1]]))
    dims, rng = list(shape), np.random.default_rng(seed)
    outputs = ", ".join(f"float{dims} {name}" for name in results)
    text = f"""<ir_version: 10, opset_import: ["": 23]>
    main (float{dims} x, float{dims} r, float[{channels},1,1] s, float[{channels}] s1, int64{dims} index) => ({outputs})
    <int64[8] pads = {{0, 0, 0, 0, 0, 0, 0, 0}}, int64[8] sides = {{0, 0, 0, 1, 0, 0, 0, 1}}, int64[1] zero1 = {{0}},
     int64[1] two1 = {{2}}, int64[1] width = {{{shape[3]}}}, int64[1] width2 = {{{shape[3] + 2}}},
     int64[1] a1 = {{1}}, int64[1] a3 = {{3}}, float c = {{0.25}}, int64 zero = {{0}},
     float[{channels},{channels},3,3] w3 = {{{numbers(rng.standard_normal(channels * channels * 9) / 3)}}},
     float[{channels},{channels},1,1] w1 = {{{numbers(rng.standard_normal(channels * channels))}}},
     int64[{channels}] order = {{{numbers(rng.permutation(channels))}}}>
    {{ places = Mul(index, zero) {"  ".join(lines)} }}"""
    model = ir.from_onnx_text(text)
    infer_facts(model)
    return model


def numbers(array: np.ndarray) -> str:
    return ", ".join(map(str, array.round(3).tolist()))


def fuse(model: ir.Model, pipeline: str = DEFAULT_PIPELINE, target: str = "cpu") -> Context:
    context = Context(Target.parse(target))
    run_pipeline(model, parse_pipeline(pipeline, PASSES), context)
    return context


PIPELINES = ("eliminate-dead,fuse-prologue", "eliminate-dead,fuse-epilogue,choose-layout,fuse-prologue", DEFAULT_PIPELINE)


@pytest.mark.parametrize("first", range(0, 90, 30))
def test_a_template_takes_what_the_pass_groups(first: int) -> None:
    groups = 0
    for seed in range(first, first + 30):
        model = random_images(seed)
        inputs = random_inputs(model)
        expected = run_model(model, inputs, "onnxruntime")
        before = set(model.graph)
        fuse(model, PIPELINES[seed % 3])
        for node in model.graph:
            if is_fused(node) and node not in before:
                built = build_kernel(group_of(model, node), Target.parse("cpu"))
                assert isinstance(built, BuiltKernel), f"seed {seed}: {node.op_type} {built}"
                groups += 1
        actual = run_model(model, inputs, "onnxruntime")
        assert all(relative_error(actual[name], array) < 1e-5 for name, array in expected.items()), f"seed {seed}"
    assert groups > 30


@pytest.mark.parametrize("seed", [1, 2, 5, 10, 17, 24])
def test_compiled_groups_compute_the_same(seed: int) -> None:
    model = random_images(seed)
    inputs = random_inputs(model)
    expected = run_model(model, inputs, "onnxruntime")
    compiled = prefuse.compile(model, cache=False, pipeline=f"{PIPELINES[seed % 3].removesuffix(',plan-memory')},plan-memory")
    results = compiled(*inputs.values())
    for (name, array), result in zip(expected.items(), results if isinstance(results, tuple) else (results,), strict=True):
        assert relative_error(np.asarray(result), array) < 1e-4, name


@pytest.mark.parametrize(
    ("kind", "reader", "copied"),
    [("complex64", "y = Where(c, p, q)", 2), ("float", "y = Add(p, q)", 0), ("bool", "y = And(p, q)", 0)],
)
def test_parts_of_complex_numbers_are_copied_first(kind: str, reader: str, copied: int) -> None:
    """Kernels choose them as bits alone: whatever is grouped has a kernel."""
    model = ir.from_onnx_text(f"""<ir_version: 10, opset_import: ["": 23]>
    main ({kind}[4,40] x, bool[4,16] c) => ({kind}[4,16] y)
    <int64[1] a = {{0}}, int64[1] b = {{16}}, int64[1] d = {{20}}, int64[1] e = {{36}}, int64[1] one = {{1}}>
    {{ p = Slice(x, a, b, one)  q = Slice(x, d, e, one)  {reader} }}""")
    infer_facts(model)
    fuse(model, "fuse-prologue")
    assert sum(node.op_type == "Slice" for node in model.graph) == copied
    for node in model.graph:
        assert isinstance(build_kernel(group_of(model, node), Target.parse("cpu")), BuiltKernel)


def test_on_a_gpu_only_what_follows_an_anchor_takes_more() -> None:
    text = """<ir_version: 10, opset_import: ["": 23]>
    main (float[64,512] x, int64[1] i, float[512] b, float[512] d) => (float[1,512] y)
    { e = Exp(x)  g = Gather(e, i)  s = Mul(b, d)  y = Add(g, s) }"""
    model = ir.from_onnx_text(text)
    infer_facts(model)
    context = fuse(model, "fuse-epilogue,fuse-prologue", "cuda:sm_90")
    assert [node.op_type for node in model.graph] == ["Exp", "mul_gather_add"]
    assert any("on a GPU kernels read the operands" in str(remark) for remark in context.remarks)
