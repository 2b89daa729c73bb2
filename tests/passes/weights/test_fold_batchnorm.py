"""fold-batchnorm on random chains around random anchors, in the numbers of every float type, and on weights that fill memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from prefuse.compiler.debugging.oracle import random_inputs, relative_error, run_model
from prefuse.compiler.frontend.dimensions import bind_domain
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.constants import add_constant, constant_array
from prefuse.compiler.ir.facts import infer_node
from prefuse.compiler.ir.names import fresh_name
from prefuse.compiler.pipeline import Context, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.pass_table import PASSES
from prefuse.runtime.symbolic.sizes import Dim, Domain
from prefuse.runtime.target import Target
from prefuse.tests.scaling import assert_scales

_CHAINS = 120
_TOLERANCE = 2e-6  # of the largest number of the result


@dataclass
class Draft:
    """A graph that grows node by node behind its one input; every value has static facts."""

    generator: np.random.Generator
    model: ir.Model
    value: ir.Value

    @classmethod
    def of(cls, seed: int, shape: tuple[int, ...], dtype: ir.DataType = ir.DataType.FLOAT) -> Draft:
        x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape(shape))
        graph = ir.Graph([x], [], nodes=[], opset_imports={"": 21}, name="main")
        return cls(np.random.default_rng(seed), ir.Model(graph, ir_version=10), x)

    @property
    def shape(self) -> tuple[int, ...]:
        assert self.value.shape is not None
        return tuple(self.value.shape.numpy())

    def numbers(self, *shape: int) -> ir.Value:
        """A constant between 0.5 and 1.5, either sign."""
        array = self.generator.uniform(0.5, 1.5, shape) * self.generator.choice([-1, 1], shape)
        assert self.value.dtype is not None
        return add_constant(self.model, array.astype(self.value.dtype.numpy()), "c")

    def ints(self, *numbers: int) -> ir.Value:
        return add_constant(self.model, np.array(numbers, np.int64), "i")

    def add(self, op_type: str, *inputs: ir.Value | None, **attributes: object) -> None:
        """A node of `inputs`, None standing for the value so far, and the next value."""
        node = ir.node(op_type, [self.value if value is None else value for value in inputs], attributes)  # type: ignore[arg-type]
        self.model.graph.append(node)
        node.outputs[0].name = fresh_name(self.model, "v")
        infer_node(node, self.model)
        self.value = node.outputs[0]

    def finished(self) -> ir.Model:
        self.model.graph.outputs.append(self.value)
        return self.model


def anchor(draft: Draft, axis: int) -> int:
    """A product or convolution by a constant that reads its channels at `axis`; the axis of its result's channels."""
    rank, channels = len(draft.shape), draft.shape[axis]
    out, kernel = int(draft.generator.integers(1, 4)) * 2, [1] * (rank - 2)
    groups = 2 if channels % 2 == 0 and draft.generator.random() < 0.5 else 1
    if axis == 1 and rank >= 3:
        kernel = [int(draft.generator.integers(1, min(3, dim) + 1)) for dim in draft.shape[2:]]
        pads = [int(draft.generator.integers(0, 2))] * (2 * len(kernel))
        if draft.generator.random() < 0.5:
            draft.add("Conv", None, draft.numbers(out, channels // groups, *kernel), draft.numbers(out), group=groups, pads=pads)
        else:
            draft.add("ConvTranspose", None, draft.numbers(channels, out // groups, *kernel), group=groups)
        return 1
    if rank == 2 and axis == 1 and draft.generator.random() < 0.5:
        draft.add("Gemm", None, draft.numbers(out, channels), draft.numbers(out), transB=1)
    elif axis == rank - 1:
        draft.add("MatMul", None, draft.numbers(channels, out))
    else:
        draft.add("Transpose", None, perm=[*(a for a in range(rank) if a != axis), axis])
        draft.add("MatMul", None, draft.numbers(channels, out))
    return len(draft.shape) - 1


def step(draft: Draft, axis: int) -> int:
    """Something that a chain may go through, or must stop at; the axis of the channels behind it."""
    generator, rank, shape = draft.generator, len(draft.shape), draft.shape
    by_channel = [shape[axis], *[1] * (rank - 1 - axis)]
    choice = int(generator.integers(9))
    if choice < 3:
        draft.add(("Mul", "Add", "Div")[choice], None, draft.numbers(*by_channel))
    elif choice == 3:
        draft.add("Sub", draft.numbers(*([1] if generator.random() < 0.5 else by_channel)), None)
    elif choice == 4:
        draft.add("Add", draft.numbers(*shape[int(generator.integers(rank)) :]), None)  # not always one number a channel
    elif choice == 5:
        order = list(generator.permutation(rank))
        draft.add("Transpose", None, perm=[int(one) for one in order])
        return order.index(axis)
    elif choice == 6 and shape[axis] > 2:
        starts = draft.ints(*[shape[axis] - 1 if generator.random() < 0.5 else 0])
        backward = constant_array(starts)[0] > 0  # type: ignore[index]
        draft.add(
            "Slice",
            None,
            starts,
            draft.ints(0 if backward else shape[axis] - 1),
            draft.ints(axis),
            draft.ints(-1 if backward else 1),
        )
    elif choice == 7 and rank == 4 and min(shape[2:]) > 1:
        kind = ("MaxPool", "AveragePool")[int(generator.integers(2))]
        pads = {"pads": [1, 1, 0, 0], "count_include_pad": int(generator.integers(2))} if kind == "AveragePool" else {}
        draft.add(kind, None, kernel_shape=[2, 2], **pads)
    elif choice == 8:
        axes = sorted({axis, axis + 1 if axis + 1 < rank else axis})
        flat = [*shape[: axes[0]], int(np.prod([shape[one] for one in axes])), *shape[axes[-1] + 1 :]]
        draft.add("Reshape", None, draft.ints(*flat))
        if len(axes) > 1 and generator.random() < 0.7:
            draft.add("Reshape", None, draft.ints(*shape))
    return axis


def chain(seed: int) -> ir.Model:
    """Steps, an anchor, steps, an anchor, steps."""
    generator = np.random.default_rng(seed)
    draft = Draft.of(seed, tuple(int(dim) for dim in generator.integers(2, 5, int(generator.integers(2, 5)))))
    axis = int(generator.integers(len(draft.shape)))
    for part in range(5):
        for _ in range(int(generator.integers(0, 4))):
            axis = step(draft, axis)
        if part % 2:
            axis = anchor(draft, axis)
    return draft.finished()


def fold(model: ir.Model) -> bool:
    """Run the pass; whether it changed something."""
    (record,) = run_pipeline(model, parse_pipeline("fold-batchnorm", PASSES), Context(Target.parse("cpu")))
    return record.changed


def test_random_chains_keep_their_results() -> None:
    """Against ONNX Runtime; most of them have something to fold, and a second run finds nothing."""
    changed = 0
    for seed in range(_CHAINS):
        model = chain(seed)
        original = model.clone()
        if not fold(model):
            continue
        changed += 1
        inputs = random_inputs(original)
        ((name, expected),) = run_model(original, inputs).items()
        actual = run_model(model, inputs)[name]
        assert actual.shape == expected.shape, f"seed {seed}"
        assert np.abs(actual - expected).max() <= _TOLERANCE * np.abs(expected).max(), f"seed {seed}"
        assert not fold(model), f"seed {seed}"
    assert changed > _CHAINS // 3


@pytest.mark.parametrize("dtype", [ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_other_float_types(dtype: ir.DataType) -> None:
    """The weight is the float64 product, rounded once to the type."""
    draft = Draft.of(0, (2, 8), dtype)
    weight, scale = draft.numbers(8, 4), draft.numbers(4)
    draft.add("MatMul", None, weight)
    draft.add("Mul", None, scale)
    model = draft.finished()
    expected = [constant_array(value).astype(np.float64) for value in (weight, scale)]  # type: ignore[union-attr]
    assert fold(model)
    (product,) = model.graph
    actual = constant_array(product.inputs[1])
    assert actual is not None
    assert actual.dtype == dtype.numpy()
    np.testing.assert_array_equal(actual, (expected[0] * expected[1]).astype(dtype.numpy()))


def test_integers_stay() -> None:
    """Integers wrap around, and have no folded weights."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([2, 3]))
    model = ir.Model(ir.Graph([x], [], nodes=[], opset_imports={"": 21}), ir_version=10)
    draft = Draft(np.random.default_rng(0), model, x)
    draft.add("MatMul", None, add_constant(model, np.ones((3, 2), np.int32), "w"))
    draft.add("Mul", None, add_constant(model, np.array([2, 3], np.int32), "c"))
    assert not fold(draft.finished())


def test_rounding_is_that_of_one_operation() -> None:
    """Scales of many nodes are multiplied in float64: the error against exact arithmetic does not grow with their number."""
    draft = Draft.of(1, (4, 16))
    weight = draft.numbers(16, 8)
    draft.add("MatMul", None, weight)
    scales = [draft.numbers(8) for _ in range(40)]
    for scale in scales:
        draft.add("Mul", None, scale)
    arrays = [constant_array(value).astype(np.float64) for value in (weight, *scales)]  # type: ignore[union-attr]
    exact = arrays[0] * np.prod(arrays[1:], axis=0)
    model = draft.finished()
    assert fold(model)
    (product,) = model.graph
    folded = constant_array(product.inputs[1])
    assert folded is not None
    assert relative_error(folded, exact) < 2**-24


def test_weights_are_not_held() -> None:
    """A folded weight is computed when it is read, and nothing keeps it."""
    draft = Draft.of(2, (4, 64))
    for _ in range(3):
        draft.add("MatMul", None, draft.numbers(64, 64))
        draft.add("Mul", None, draft.numbers(64))
    model = draft.finished()
    assert fold(model)
    weights = [value.const_value for value in model.graph.initializers.values()]
    assert len(weights) == 3
    assert all(isinstance(weight, ir.LazyTensor) and not weight.cache for weight in weights)


def test_time_is_linear() -> None:
    """Twice the layers take twice the time."""

    def prepare(count: int) -> Callable[[], object]:
        draft = Draft.of(3, (1, 4))
        weight, scale = draft.numbers(4, 4), draft.numbers(4)
        for _ in range(count):
            draft.add("MatMul", None, weight)
            draft.add("Mul", None, scale)
            draft.add("Relu", None)
        return lambda: fold(draft.finished())

    assert_scales(prepare, 300, 600, 2.8)


@pytest.mark.parametrize(("scale", "folds"), [(2.0**-9, True), (2.0**-10, False)])
def test_float16_weights_that_would_be_subnormal_stay(scale: float, folds: bool) -> None:
    draft = Draft.of(0, (4, 8), ir.DataType.FLOAT16)
    weight, factor = (
        add_constant(draft.model, np.full(shape, size, np.float16), "c") for shape, size in (((8, 3), 2.0**-5), ((3,), scale))
    )
    draft.add("MatMul", None, weight)
    draft.add("Mul", None, factor)
    model = draft.finished()
    context = Context(Target.parse("cpu"))
    run_pipeline(model, parse_pipeline("fold-batchnorm", PASSES), context)
    assert [node.op_type for node in model.graph] == ["MatMul", "Mul"][: 1 if folds else 2]
    assert any("subnormal" in str(remark) for remark in context.remarks) != folds


@pytest.mark.parametrize(("mean", "folds"), [(2.0, True), (-4.0, True), (4.5, False), (2010.0, False)])
def test_differences_of_large_numbers_stay_ahead(mean: float, folds: bool) -> None:
    """Rows around a mean, in deviations of 1: folded, they lose as many bits as the mean has. A second run changes nothing."""
    draft = Draft.of(0, (8, 64))
    draft.add("Sub", None, add_constant(draft.model, np.full(64, mean * 0.5, np.float32), "mean"))
    draft.add("Div", None, add_constant(draft.model, np.full(64, 0.5, np.float32), "deviation"))
    draft.add("MatMul", None, draft.numbers(64, 16))
    model = draft.finished()
    x = (0.5 * (mean + draft.generator.standard_normal((8, 64)))).astype(np.float32)
    ((_, exact),) = run_model(model, {"x": x}).items()
    assert fold(model) == folds
    assert not fold(model)
    ((_, found),) = run_model(model, {"x": x}).items()
    assert relative_error(found, exact) < 1e-6


def test_operands_of_any_size_are_no_weights() -> None:
    """An array of as many numbers as such an operand has channels cannot be made, and cut the sizes to one."""
    head = '<ir_version: 10, opset_import: ["": 21]> main (float[T,64] x, float[U,64] z) => (float[T,U] y)'
    model = import_model(onnx.parser.parse_model(f"{head} {{ g = Gemm<transB = 1>(x, z) y = Neg(g) }}"))
    domain = Domain((Dim("T", 2, 64), Dim("U", 2, 64)), {"T": 8, "U": 8})
    bound = bind_domain(model, domain, {})
    run_pipeline(bound, parse_pipeline("fold-batchnorm", PASSES), Context(Target.parse("cpu")))
    assert not domain.cuts
    assert [node.op_type for node in bound.graph] == ["Gemm", "Neg"]
