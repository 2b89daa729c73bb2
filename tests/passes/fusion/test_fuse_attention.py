"""Attention in every spelling becomes one function, whose inlining gives back the very model, and one kernel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from hypothesis import HealthCheck, given, settings
from prefuse.compiler.debugging.oracle import Arrays, random_inputs, relative_error, run_model
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.functions import body_of, inline_all, is_fused
from prefuse.compiler.ir.kinds import Kind, kind_of
from prefuse.compiler.ir.printer import print_model
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE, PASSES
from prefuse.runtime.target import Target
from prefuse.tests.models.attention_models import attention_models
from prefuse.tests.models.exports import Exports
from prefuse.tests.scaling import assert_scales

slow = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
few = settings(slow, max_examples=8)


def run(model: ir.Model, pipeline: str = "fuse-attention", target: str = "cpu") -> list[str]:
    """Run passes; what they said."""
    context = Context(Target.parse(target))
    run_pipeline(model, parse_pipeline(pipeline, PASSES), context)
    return [str(remark) for remark in context.remarks]


def groups_of(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if is_fused(node)]


@slow
@given(model=attention_models())
def test_every_spelling_is_one_group(model: ir.Model) -> None:
    inputs = random_inputs(model)
    expected = run_model(model, inputs, "onnxruntime")

    assert run(model) == []

    assert [node.op_type for node in model.graph] == ["attention"]
    assert_bitwise_equal(run_model(model, inputs, "onnxruntime"), expected)


@slow
@given(model=attention_models(tapped=True))
def test_inlining_gives_back_what_was_fused(model: ir.Model) -> None:
    inputs = random_inputs(model)
    expected = run_model(model, inputs, "onnxruntime")
    nodes = [(node.op_type, [value.name for value in node.outputs]) for node in model.graph]

    said = run(model)

    assert groups_of(model) or said
    text = print_model(model)
    assert run(model) == ([] if groups_of(model) else said)
    assert print_model(model) == text
    inline_all(model)
    found = [(node.op_type, [value.name for value in node.outputs]) for node in model.graph]
    assert sorted(found) == sorted(nodes)
    assert_bitwise_equal(run_model(model, inputs, "onnxruntime"), expected)


@few
@given(model=attention_models())
def test_one_kernel_computes_every_spelling(model: ir.Model) -> None:
    inputs = random_inputs(model)
    (expected,) = run_model(model, inputs, "onnxruntime").values()
    assert_one_kernel_computes(model, inputs, expected)


@pytest.mark.parametrize("rank", [3, 4])
def test_one_kernel_computes_what_multiplies_from_the_left(rank: int) -> None:
    """A product by transposed probabilities, with values of fewer dimensions than they have."""
    batch, order = ("2,3,", "[0, 1, 3, 2]") if rank == 4 else ("3,", "[0, 2, 1]")
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": 21]>
        main (float[{batch}5,8] q, float[{batch}8,7] k, float[3,9,7] v) => (float[{batch}9,5] y) {{
          s = MatMul(q, k)
          p = Softmax<axis: int = -1>(s)
          t = Transpose<perm: ints = {order}>(p)
          y = MatMul(v, t)
        }}"""
    )
    inputs = random_inputs(model)
    assert_one_kernel_computes(model, inputs, run_model(model, inputs, "onnxruntime")["y"])


@pytest.mark.parametrize("name", ["bert-base", "roberta-base", "gpt2", "vit-b16"])
def test_every_layer_of_our_models_has_one(name: str, exports: Exports) -> None:
    model = import_model(exports(name).path)
    infer_facts(model)

    run(model, DEFAULT_PIPELINE.partition(",fuse-epilogue")[0])

    softmaxes = [node for node in model.graph if node.op_type == "Softmax"]
    assert softmaxes == []
    (group,) = [node for node in model.graph if is_fused(node) and node.op_type == "attention"]
    anchors = [node.op_type for node in body_of(model, group) if Kind.VIEW < kind_of(node) < Kind.OPAQUE]
    assert anchors == ["MatMul", "Softmax", "MatMul"]


@pytest.mark.parametrize("target", ["cuda:sm_90", "rocm:gfx942"])
def test_gpus_have_the_same_groups(target: str) -> None:
    model = layers(1)
    assert run(model, target=target) == []
    assert len(groups_of(model)) == 1


def test_twice_the_layers_take_twice_the_time() -> None:
    def prepare(count: int) -> Callable[[], object]:
        model = layers(count)
        return lambda: run(model)

    assert_scales(prepare, 100, 200, 2.6)


def layers(count: int) -> ir.Model:
    """Layers of attention with a mask and a bias of the scores' size that all of them share."""
    lines = ["b0 = Add(bias, mask)"]
    for i in range(count):
        lines += [
            f"k{i} = Transpose<perm: ints = [0, 2, 1]>(x{i})",
            f"s{i} = MatMul(x{i}, k{i})",
            f"m{i} = Add(s{i}, b0)",
            f"p{i} = Softmax<axis: int = -1>(m{i})",
            f"x{i + 1} = MatMul(p{i}, x{i})",
        ]
    head = f"main (float[2,4,8] x0, float[2,4,4] bias, float[4,4] mask) => (float[2,4,8] x{count}) {{"
    model = ir.from_onnx_text("\n".join(['<ir_version: 10, opset_import: ["": 21]>', head, *lines, "}"]))
    infer_facts(model)
    return model


def assert_bitwise_equal(actual: Arrays, expected: Arrays) -> None:
    assert list(actual) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array)


def assert_one_kernel_computes(model: ir.Model, inputs: Arrays, expected: np.ndarray) -> None:
    compiled = prefuse.compile(model, pipeline="fuse-attention,plan-memory", cache=False)
    assert len(compiled.plan.kernels) == 1
    actual = compiled(*inputs.values())
    assert isinstance(actual, np.ndarray)
    assert relative_error(actual, expected) < 1e-5
