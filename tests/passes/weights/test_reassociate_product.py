"""Chains in which one product reads another: what a rewrite takes away, no later one reads."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper, parser
from onnx.reference import ReferenceEvaluator
from prefuse.compiler.frontend.dimensions import bind_domain
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.constants import constant_array
from prefuse.compiler.pipeline import Context, run_pipeline
from prefuse.passes.weights.reassociate_product import ReassociateProduct
from prefuse.runtime.symbolic.sizes import Dim, Domain
from prefuse.runtime.target import Target

random = np.random.default_rng(3)


def model(text: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    found = parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')
    for name, shape in weights.items():
        found.graph.initializer.append(numpy_helper.from_array((random.standard_normal(shape) / 4).astype(np.float32), name))
    return found


def check(source: onnx.ModelProto) -> bool:
    """Run the pass, after which the IR's verifier looks at the graph; compare with the graph as it was. Whether it changed."""
    graph = import_model(source)
    before = len(list(graph.graph)), str(graph)
    run_pipeline(graph, [ReassociateProduct(launch_bytes=0)], Context(Target.parse("cpu")))
    inputs = {
        value.name: random.standard_normal([dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(np.float32)
        for value in source.graph.input
    }
    proto = ir.to_proto(graph)
    onnx.checker.check_model(proto)
    expected, found = (ReferenceEvaluator(one).run(None, inputs) for one in (source, proto))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)
    return (len(list(graph.graph)), str(graph)) != before


def operands_of(value: ir.Value) -> list[ir.Value]:
    """What a value is computed from."""
    node = value.producer()
    assert node is not None
    return [one for one in node.inputs if one is not None]


def test_a_sum_whose_weights_are_a_product_of_the_same_family() -> None:
    """Both products read sums of v by w, and the second's weights are what the first one gave: a dangling value."""
    body = "c = MatMul(p, v) d = MatMul(c, w) e = MatMul(d, v) f = MatMul(e, w)"
    assert check(model(f"g (float[64,6] p, float[6,8] v) => (float[64,6] f) {{ {body} }}", w=(8, 6)))


@pytest.mark.parametrize(("size", "is_rewritten"), [(20.0, False), (1.0, True), (np.nan, False)])
def test_float16_rows_whose_product_may_be_too_large(size: float, is_rewritten: bool) -> None:
    """512 products of 20 by 20 are 204,800, where weights that are small make sums that are not."""
    source = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float16[8,64] p) => (float16[8,16] y) { c = MatMul(p, s) y = MatMul(c, w) }'
    )
    for name, shape in (("s", (64, 512)), ("w", (512, 16))):
        source.graph.initializer.append(numpy_helper.from_array(np.full(shape, size, np.float16), name))
    graph = import_model(source)
    context = Context(Target.parse("cpu"))
    run_pipeline(graph, [ReassociateProduct(launch_bytes=0)], context)
    assert (operands_of(graph.graph.outputs[0])[0].name == "p") == is_rewritten
    assert any("too large" in str(remark) for remark in context.remarks) != is_rewritten


def test_computed_float16_rows() -> None:
    body = "c = MatMul(p, s) d = MatMul(q, s) y = MatMul(c, w) z = MatMul(d, w)"
    head = "float16[64,6] p, float16[64,6] q, float16[6,8] s, float16[8,4] w"
    source = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g ({head}) => (float16[64,4] y, float16[64,4] z) {{ {body} }}'
    )
    weight = source.graph.input.pop()
    source.graph.initializer.append(numpy_helper.from_array(np.ones((8, 4), np.float16), weight.name))
    graph = import_model(source)
    run_pipeline(graph, [ReassociateProduct(launch_bytes=0)], Context(Target.parse("cpu")))
    assert [operands_of(value)[0].name for value in graph.graph.outputs] == ["c", "d"]


def test_integers_wrap_around_as_their_products_do() -> None:
    """In float64 these would lose their last bits."""
    source = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (int64[8,4] p) => (int64[8,4] y) { c = MatMul(p, s) y = MatMul(c, w) }'
    )
    numbers = {"s": random.integers(-(2**62), 2**62, (4, 16)), "w": random.integers(-(2**62), 2**62, (16, 4))}
    for name, array in numbers.items():
        source.graph.initializer.append(numpy_helper.from_array(array, name))
    graph = import_model(source)
    run_pipeline(graph, [ReassociateProduct(launch_bytes=0)], Context(Target.parse("cpu")))
    rows, product = operands_of(graph.graph.outputs[0])
    assert rows.name == "p"
    np.testing.assert_array_equal(constant_array(product), numbers["s"] @ numbers["w"])


@pytest.mark.parametrize("seed", range(40))
def test_random_chains(seed: int) -> None:
    """Products of a few square matrices, computed and constant, joined and read again at random, some of them outputs."""
    choose = np.random.default_rng(seed)
    rows, width = int(choose.choice([1, 4, 48])), 6
    lines, values = ["v1 = MatMul(p, v)"], ["p", "v1"]
    for number in range(2, 11):
        name, left = f"v{number}", values[-int(choose.integers(1, min(len(values), 4) + 1))]
        kind = choose.integers(4)
        if kind == 0:
            lines.append(f"j{number} = Concat<axis=1>({left}, {values[-1]}) {name} = MatMul(j{number}, w2)")
        elif kind == 1:
            lines.append(f"{name} = Gemm({left}, w, b)")
        else:
            lines.append(f"{name} = MatMul({left}, {choose.choice(['v', 'w', 'u'])})")
        values.append(name)
    outputs = [name for name in values[1:] if name == values[-1] or choose.random() < 0.2]
    results = ", ".join(f"float[{rows},{width}] {name}" for name in outputs)
    head = f"g (float[{rows},{width}] p, float[{width},{width}] v) => ({results})"
    check(model(f"{head} {{ {' '.join(lines)} }}", w=(width, width), u=(width, width), w2=(2 * width, width), b=(width,)))


def test_recurrences_that_share_weights_have_their_own_biases() -> None:
    """All had the bias of the first one."""
    lines = "zero = Constant<value_ints=[0]>() "
    for name, bias in (("p", "b"), ("q", "d"), ("o", "")):
        lines += f"""c{name} = MatMul({name}, s) j{name} = Concat<axis=1>(a, c{name}) x{name} = Unsqueeze(j{name}, zero)
            y{name}, h{name} = GRU<hidden_size=4, linear_before_reset=1>(x{name}, w, r{bias and ", " + bias}) """
    head = "g (float[1,4] p, float[1,4] q, float[1,4] o, float[1,2] a) => (float[1,1,4] hp, float[1,1,4] hq, float[1,1,4] ho)"
    assert check(model(f"{head} {{ {lines} }}", s=(4, 16), w=(1, 12, 18), r=(1, 12, 4), b=(1, 24), d=(1, 24)))


def test_a_sum_that_branches_read() -> None:
    """What branches read of it is no part of the graph, and stays."""
    branches = (
        "then_branch = g1 () => (float[1,8] t) { t = MatMul(v, w) }, else_branch = g2 () => (float[1,8] e) { e = MatMul(v, w) }"
    )
    head = "float[1,64] p, float[64,512] s, bool c"
    source = model(f"g ({head}) => (float[1,8] y) {{ v = MatMul(p, s) y = If (c) <{branches}> }}", w=(512, 8))
    graph = import_model(source)
    run_pipeline(graph, [ReassociateProduct(launch_bytes=0)], Context(Target.parse("cpu")))
    assert [node.op_type for node in graph.graph] == ["MatMul", "If"]


def test_costs_take_the_hint() -> None:
    """Whether an order is cheaper differs from size to size, and cuts no sizes off."""
    source = model("g (float[T,1024] x) => (float[T,1024] y) { h = MatMul(x, a) y = MatMul(h, b) }", a=(1024, 64), b=(64, 1024))
    domain = Domain((Dim("T", 1, 2048),), {"T": 64})
    graph = bind_domain(import_model(source), domain, {})
    run_pipeline(graph, [ReassociateProduct()], Context(Target.parse("cpu")))
    assert len(list(graph.graph)) == 2
    assert not domain.cuts
