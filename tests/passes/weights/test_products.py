"""merge-parallel-matmul, concat-to-split-weight, order-concats, reassociate-product beyond one pattern: GPUs, steps, time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from prefuse.compiler.debugging.oracle import random_inputs, relative_error, run_model
from prefuse.compiler.ir.facts import infer_facts, tensor_type
from prefuse.compiler.ir.verifier import verify_model
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.runtime.target import Target
from prefuse.tests.scaling import assert_scales

ATTENTION = """
  q = MatMul(x, a)
  k = MatMul(x, b)
  v = MatMul(x, c)
  t = Transpose<perm=[0,2,1]>(k)
  s = MatMul(q, t)
  p = Softmax(s)
  y = MatMul(p, v)"""


def constant(name: str, *shape: int) -> ir.Value:
    generator = np.random.default_rng([ord(letter) for letter in name])
    tensor = ir.Tensor(generator.standard_normal(shape).astype(np.float32), name=name)
    return ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape), const_value=tensor)


def model_of(signature: str, body: str, constants: list[ir.Value]) -> ir.Model:
    """A model in ONNX's text whose last inputs become the constants."""
    names = {str(value.name): value for value in constants}
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]>\nmain {signature} {{{body}\n}}')
    for node in model.graph:
        for index, value in enumerate(node.inputs):
            if value is not None and value.name in names:
                node.replace_input_with(index, names[str(value.name)])
    for value in list(model.graph.inputs):
        if value.name in names:
            model.graph.inputs.remove(value)
    for value in constants:
        model.graph.register_initializer(value)
    infer_facts(model)
    return model


def run(model: ir.Model, pipeline: str, target: str = "cpu") -> list[str]:
    context = Context(Target.parse(target))
    run_pipeline(model, parse_pipeline(pipeline, PASSES), context)
    return [remark.message for remark in context.remarks]


def attention() -> ir.Model:
    parameters = "(float[2,4,8] x, float[8,6] a, float[8,6] b, float[8,3] c) => (float[2,4,3] y)"
    return model_of(parameters, ATTENTION, [constant("a", 8, 6), constant("b", 8, 6), constant("c", 8, 3)])


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90"])
def test_attention_reads_through_a_split(target: str) -> None:
    """Queries, keys and values are one product, whose parts nobody copies."""
    model = attention()
    run(model, "merge-parallel-matmul", target)
    operators = [node.op_type for node in model.graph]
    assert operators.count("Split") == 1
    assert operators.count("MatMul") == 3
    large = attention_of_rows(4000)
    assert not run(large, "merge-parallel-matmul", target)
    assert [node.op_type for node in large.graph].count("MatMul") == 3


def attention_of_rows(rows: int) -> ir.Model:
    parameters = f"(float[2,{rows},8] x, float[8,6] a, float[8,6] b, float[8,3] c) => (float[2,{rows},3] y)"
    return model_of(parameters, ATTENTION, [constant("a", 8, 6), constant("b", 8, 6), constant("c", 8, 3)])


def unrolled(steps: int) -> ir.Model:
    """A recurrent cell whose gates are products of the state by weights of all steps."""
    lines = []
    state = "x"
    for step in range(steps):
        lines += [f"g{step}{gate} = MatMul({state}, w{gate})" for gate in range(3)]
        lines += [f"r{step} = Sigmoid(g{step}0)", f"p{step} = Mul(r{step}, g{step}1)"]
        lines += [f"n{step} = Add(p{step}, g{step}2)", f"s{step} = Tanh(n{step})"]
        state = f"s{step}"
    weights = "".join(f", float[90,90] w{gate}" for gate in range(3))
    signature = f"(float[1,90] x{weights}) => (float[1,90] s{steps - 1})"
    return model_of(signature, "\n".join(["", *lines]), [constant(f"w{gate}", 90, 90) for gate in range(3)])


def decoder(steps: int) -> ir.Model:
    """Each step joins two vectors twice, in two orders, and multiplies by the weights of all steps."""
    lines = []
    state = "x"
    for step in range(steps):
        lines += [f"e{step} = Tanh({state})", f"f{step} = Softmax({state})", f"c{step} = Concat<axis=1>(e{step}, f{step})"]
        lines += [f"h{step} = MatMul(c{step}, v)", f"d{step} = Concat<axis=1>(h{step}, f{step}, e{step})"]
        lines += [f"s{step} = MatMul(d{step}, w)"]
        state = f"s{step}"
    signature = f"(float[1,30] x, float[60,40] v, float[100,30] w) => (float[1,30] s{steps - 1})"
    return model_of(signature, "\n".join(["", *lines]), [constant("v", 60, 40), constant("w", 100, 30)])


def attentive(steps: int, operator: str = "GRU", batch: int = 1) -> ir.Model:
    """A decoder that looks at four rows at every step, and whose cell, without a bias, and output read what it has seen."""
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[operator]
    lines, state = [], "x"
    for step in range(steps):
        lines += [f"m{step} = MatMul({state}, k)", f"p{step} = Softmax(m{step})", f"c{step} = MatMul(p{step}, s)"]
        lines += [f"j{step} = Concat<axis=1>(c{step}, x)", f"l{step} = Unsqueeze(j{step}, zero)"]
        lines += [f"y{step}, h{step} = {operator}<hidden_size=90>(l{step}, w, r)", f"o{step} = Squeeze(h{step}, zero)"]
        state = f"o{step}"
    shapes = {"k": (90, 4), "w": (1, gates * 90, 180), "r": (1, gates * 90, 90)}
    operands = "".join(f", float[{','.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    signature = f"(float[{batch},90] x, float[4,90] s, int64[1] zero{operands}) => (float[{batch},90] {state})"
    zero = ir.Tensor(np.zeros(1, np.int64), name="zero")
    axis = ir.Value(name="zero", type=ir.TensorType(zero.dtype), shape=ir.Shape((1,)), const_value=zero)
    return model_of(signature, "\n".join(["", *lines]), [axis, *(constant(name, *shape) for name, shape in shapes.items())])


@pytest.mark.parametrize("operator", ["GRU", "LSTM", "RNN"])
def test_sums_of_the_same_rows_reach_cells_through_their_bias(operator: str) -> None:
    model = attentive(4, operator)
    original = model.clone()
    assert not run(model, "reassociate-product{launch-bytes=0},eliminate-dead")
    verify_model(model)
    assert [node.op_type for node in model.graph].count("MatMul") == 4 + 1 + 4  # scores, the rows once, shares
    inputs = random_inputs(original)
    (one,), (two,) = (list(run_model(each, inputs).values()) for each in (model, original))
    assert relative_error(one, two) < 1e-4  # sums of 180 large products, whose last bits a step hands on


def test_cells_of_two_rows_have_one_bias_for_both() -> None:
    model = attentive(4, batch=2)
    assert not run(model, "reassociate-product{launch-bytes=0}")
    assert "Gemm" not in {node.op_type for node in model.graph}
    assert [node.op_type for node in model.graph].count("MatMul") == 4 + 4


def test_weights_of_unrolled_steps_are_joined_once() -> None:
    model = unrolled(3)
    original = model.clone()
    assert not run(model, "merge-parallel-matmul")
    verify_model(model)
    assert [list(value.shape or ()) for value in model.graph.initializers.values() if value.dtype == ir.DataType.FLOAT] == [
        [90, 270]
    ]
    inputs = random_inputs(original)
    (one,), (two,) = (list(run_model(each, inputs).values()) for each in (model, original))
    assert relative_error(one, two) < 1e-6


def test_weights_of_unrolled_steps_follow_one_order() -> None:
    model = decoder(3)
    original = model.clone()
    run(model, "order-concats")
    verify_model(model)
    joined = [[str(v.name)[0] for v in node.inputs if v is not None] for node in model.graph if node.op_type == "Concat"]
    assert joined == [["e", "f"], ["h", "e", "f"]] * 3
    assert sorted(tensor_type(value).shape for value in model.graph.initializers.values()) == [(60, 40), (100, 30)]
    inputs = random_inputs(original)
    (one,), (two,) = (list(run_model(each, inputs).values()) for each in (model, original))
    assert relative_error(one, two) < 1e-6


STEPS = [
    (unrolled, "merge-parallel-matmul"),
    (decoder, "order-concats"),
    (decoder, "concat-to-split-weight"),
    (attentive, "reassociate-product"),
]


@pytest.mark.parametrize(("make", "name"), STEPS)
def test_time_is_near_linear(make: Callable[[int], ir.Model], name: str) -> None:
    def prepare(steps: int) -> Callable[[], object]:
        model = make(steps)
        return lambda: run(model, name)

    assert_scales(prepare, 60, 120, 2.8)


@pytest.mark.parametrize(("dtype", "is_split"), [("float16", False), ("bfloat16", True), ("float", True)])
def test_sums_of_parts_may_be_too_large_for_float16(dtype: str, is_split: bool) -> None:
    """Of 64 products of 40 by 40, and of as many of -40 by 40, both sums are infinite, and that of all is 0."""
    head = f"({dtype}[512,64] a, {dtype}[512,64] b, {dtype}[128,8] w) => ({dtype}[512,8] y)"
    weight = constant("w", 128, 8)
    assert weight.const_value is not None
    named = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16, "float": ir.DataType.FLOAT}[dtype]
    weight.const_value = ir.tensor(weight.const_value.numpy().astype(named.numpy()), name="w")
    weight.dtype = named
    model = model_of(head, "c = Concat<axis=1>(a, b) y = MatMul(c, w)", [weight])
    messages = run(model, "concat-to-split-weight")
    assert all(node.op_type != "Concat" for node in model.graph) == is_split
    assert any("float16" in message for message in messages) != is_split
