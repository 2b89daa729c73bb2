"""What passes are told of kernels is what the registry says of the groups that they make."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx_ir as ir
import pytest
from prefuse.compiler.ir.assignments.kernel_choice import AS_IT_IS, KernelChoice, NoKernel, Variant
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.lowering.groups import GroupReader
from prefuse.compiler.lowering.variants import with_variant
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import Target

MODEL = """
<ir_version: 10, opset_import: ["": 21]>
main (float[1,256,14,14] x, float[1,256,14,14] r, float[256,256,3,3] w) => (float[1,256,14,14] y) {
  c = Conv<pads = [1, 1, 1, 1]>(x, w)
  a = Add(c, r)
  y = Relu(a)
}
"""


def model_after(pipeline: str, target: Target, precision: Precision = "float32") -> tuple[ir.Model, Context]:
    """The model with constant weights, and the context that its passes ran in."""
    model = ir.from_onnx_text(MODEL)
    weights = model.graph.inputs.pop()
    weights.const_value = ir.tensor(np.zeros((256, 256, 3, 3), np.float32))
    model.graph.register_initializer(weights)
    infer_facts(model)
    context = Context(target, precision=precision)
    run_pipeline(model, parse_pipeline(pipeline, PASSES), context)
    return model, context


def test_a_channels_last_variant_is_the_group_that_choose_layout_writes() -> None:
    target = Target.parse("cpu:avx512,threads=1")
    before, _ = model_after("fuse-epilogue", target, "float32-fast")
    after, _ = model_after("fuse-epilogue,choose-layout", target, "float32-fast")
    (node,), written = before.graph, next(node for node in after.graph if node.domain == "prefuse")
    images = tuple(i for i, value in enumerate(node.inputs) if value is not None and value.name in ("x", "r"))
    variant = Variant(channels_last=images, has_channels_last_results=True)
    asked = with_variant(GroupReader(before, target, "float32-fast").group_of(node), node, variant)
    assert asked.label == "transpose_transpose_conv_add_relu_transpose"
    assert asked.key() == GroupReader(after, target, "float32-fast").group_of(written).key()


def test_a_narrow_variant_is_the_group_that_place_casts_writes() -> None:
    target, pipeline = Target.parse("cpu:avx512bf16,threads=1"), "assign-formats,place-casts,fuse-epilogue"
    before, _ = model_after("eliminate-dead", target, "bfloat16")
    after, _ = model_after(pipeline, target, "bfloat16")
    node = before.graph[0]
    variant = Variant(formats=((0, "bfloat16"),))  # Winograd's convolution makes float32 numbers of the weights
    asked = with_variant(GroupReader(before, target, "bfloat16").group_of(node), node, variant)
    written = next(one for one in after.graph if "conv" in one.op_type)
    made = GroupReader(after, target, "bfloat16").group_of(written)
    kinds, wanted = (
        [(op.op_type, [str(group.types[name]) for name in op.inputs if name]) for op in group.ops[:2]] for group in (asked, made)
    )
    assert kinds == wanted
    assert {str(asked.types[name]) for name in asked.constants} == {str(made.types[name]) for name in made.constants}


@pytest.mark.parametrize("level", ["avx2", "avx512bf16", "amx"])
@pytest.mark.parametrize("precision", ["float32", "float32-fast", "bfloat16"])
def test_what_is_told_is_what_is_written(level: str, precision: Precision) -> None:
    target = Target("cpu", level, 1)
    model, context = model_after("fuse-epilogue", target, precision)
    (node,) = model.graph
    reader, ask = GroupReader(model, target, precision), context.kernels_of(model)
    for variant in (AS_IT_IS, Variant(channels_last=(0,), has_channels_last_results=True), Variant((), (), True)):
        told = ask(node, variant)
        built = build_kernel(with_variant(reader.group_of(node), node, variant), target)
        assert isinstance(told, KernelChoice) == isinstance(built, BuiltKernel)
        if isinstance(told, KernelChoice) and isinstance(built, BuiltKernel):
            assert built.estimate is not None
            assert (told.template, told.cycles) == (built.template, built.estimate.wall_cycles(target.machine))


def test_where_there_is_no_kernel_the_reasons_are_told() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["": 21]>
        main (float[1,64,7,7] x, float[64,64,5,5] w) => (float[1,64,59,59] y) {
          y = ConvTranspose<strides = [5, 5], dilations = [7, 7]>(x, w)
        }""")
    infer_facts(model)
    told = Context(Target.parse("cpu:avx2")).kernels_of(model)(model.graph[0], AS_IT_IS)
    assert isinstance(told, NoKernel)
    assert "convolution: 25 phases of output positions, more than 16" in str(told)


def test_a_context_loads_tvm_with_the_first_question() -> None:
    program = (
        "import sys; import onnx_ir as ir; from prefuse.compiler.pipeline import Context; "
        "from prefuse.passes.layout.choose_layout import ChooseLayout; from prefuse.runtime.target import Target; "
        "text = '<ir_version: 10, opset_import: [\"\": 21]> main (float[2] x) => (float[2] y) { y = Neg(x) }'; "
        "model = ir.from_onnx_text(text); "
        "ChooseLayout().run(model, Context(Target.parse('cpu:avx2'))); print('tvm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_kernels_of_gpus_store_whole_results() -> None:
    """Loop nests of CPUs, too, where they are written for one: lowering stores no parts there."""
    text = '<ir_version: 10, opset_import: ["": 21]> main (int32[8,16] x, int32[16,8] w) => (int32[8,8] y) { y = MatMul(x, w) }'
    model = ir.from_onnx_text(text)
    infer_facts(model)
    for target, stores_parts in (("cuda:sm_80", False), ("cpu:avx2", True)):
        choice = Context(Target.parse(target)).kernels_of(model)(model.graph[0], AS_IT_IS)
        assert isinstance(choice, KernelChoice)
        assert choice.stores_parts == stores_parts
