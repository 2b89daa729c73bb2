"""split-weights: pieces of large weights give the bits of the whole, and only a limit asks for them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from prefuse.compiler.ir.assignments.kept_template import kept_template
from prefuse.compiler.ir.assignments.kernel_choice import AS_IT_IS, KernelChoice
from prefuse.compiler.ir.facts import infer_facts, tensor_type
from prefuse.compiler.ir.verifier import verify_model
from prefuse.compiler.pipeline import Context
from prefuse.passes.weights.split_weights import SplitWeights
from prefuse.passes.weights.split_weights.directions import directions_of, join_directions, weight_bytes
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.hardware.memory_limit import MemoryLimit
from prefuse.runtime.plan import Launch, planned_bytes
from prefuse.runtime.precision import Precision
from prefuse.runtime.target import Target

BODIES = {
    "MatMul": "y = MatMul(x, w)",
    "Gemm": "y = Gemm(x, w, b)",
    "transposed Gemm": "y = Gemm<transB = 1, alpha = 0.5>(x, w, b)",
    "Gemm of one bias": "y = Gemm(x, w, c)",
}


def product(body: str, rows: int, k: int, columns: int) -> ir.Model:
    rng = np.random.default_rng(0)
    shape = (columns, k) if "transB" in body else (k, columns)
    arrays = {"w": rng.standard_normal(shape, np.float32)}
    if "b)" in body or "c)" in body:
        arrays |= {"b": rng.standard_normal(columns, np.float32)} if "b)" in body else {"c": np.ones(1, np.float32)}
    text = f'<ir_version: 8, opset_import: ["": 18]> main (float[{rows},{k}] x) => (float[{rows},{columns}] y) {{ {body} }}'
    model = ir.from_onnx_text(text, initializers=[ir.tensor(array, name=name) for name, array in arrays.items()])
    infer_facts(model)
    return model


def split(model: ir.Model, percent: float | None, target: str = "cpu") -> tuple[bool, Context]:
    limit = None if percent is None else MemoryLimit(percent=percent)
    context = Context(Target.parse(target, threads=None if target.startswith("cuda") else 2), memory_limit=limit)
    changed = SplitWeights().run(model, context)
    verify_model(model)
    return changed, context


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize(("rows", "k", "columns"), [(1, 300, 1000), (5, 257, 1300), (130, 500, 1536)])
def test_pieces_give_the_bits_of_the_whole(body: str, rows: int, k: int, columns: int) -> None:
    model = product(body, rows, k, columns)
    changed, context = split(model.clone(), 50)
    if not changed:  # on some processors the whole's kernel takes no pieces
        assert "no kernel would multiply" in str(context.remarks[0])
        return
    x = np.random.default_rng(1).standard_normal((rows, k), np.float32)
    free = prefuse.compile(model, threads=2, cache=False)
    limited = prefuse.compile(model, threads=2, cache=False, memory_limit="60%")
    assert isinstance(free, CompiledModel)
    assert isinstance(limited, CompiledModel)
    assert planned_bytes(limited.plan) <= 0.6 * planned_bytes(free.plan)
    np.testing.assert_array_equal(limited(x), free(x))


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_pieces_of_stored_weights_are_large_enough_to_be_copied(weights: str) -> None:
    """Cut by the bytes of float32 they were smaller than what a schedule copies, and all of them stayed."""
    random = np.random.default_rng(0)
    arrays = {f"w{number}": random.standard_normal((512, 512), np.float32) / 16 for number in range(4)}
    body = "a = MatMul(x, w0) b = Tanh(a) c = MatMul(b, w1) d = Tanh(c) e = MatMul(d, w2) f = Tanh(e) y = MatMul(f, w3)"
    text = f'<ir_version: 8, opset_import: ["": 18]> main (float[16,512] x) => (float[16,512] y) {{ {body} }}'
    model = ir.from_onnx_text(text, initializers=[ir.tensor(array, name=name) for name, array in arrays.items()])
    free = prefuse.compile(model, threads=1, cache=False, weights=weights)
    limited = prefuse.compile(model, threads=1, cache=False, weights=weights, memory_limit="60%")
    assert isinstance(free, CompiledModel)
    assert isinstance(limited, CompiledModel)
    assert planned_bytes(limited.plan) <= 0.6 * planned_bytes(free.plan)
    x = random.standard_normal((16, 512), np.float32)
    np.testing.assert_array_equal(limited(x), free(x))


def chain(arrays: dict[str, np.ndarray], body: str, rows: int, k: int) -> ir.Model:
    text = f'<ir_version: 10, opset_import: ["": 21]> main (float[{rows},{k}] x) => (float[{rows},{k}] y) {{ {body} }}'
    return ir.from_onnx_text(text, initializers=[ir.tensor(array, name=name) for name, array in arrays.items()])


def assert_pieces_give_equal_bits(model: ir.Model, x: np.ndarray, **options: object) -> CompiledModel:
    free = prefuse.compile(model, threads=2, cache=False, **options)  # type: ignore[arg-type]
    limited = prefuse.compile(model, threads=2, cache=False, memory_limit="60%", **options)  # type: ignore[arg-type]
    assert isinstance(free, CompiledModel)
    assert isinstance(limited, CompiledModel)
    assert planned_bytes(limited.plan) <= 0.6 * planned_bytes(free.plan)
    assert "is cut into" in str(limited.report())
    np.testing.assert_array_equal(limited(x), free(x))
    return limited


@pytest.mark.parametrize("rows", [3, 96])
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_pieces_are_narrow_where_the_whole_is(precision: str, rows: int) -> None:
    """Cut before formats were assigned, small pieces stayed float32 where the whole was rounded."""
    random = np.random.default_rng(2)
    arrays: dict[str, np.ndarray] = {f"w{number}": random.standard_normal((384, 384), np.float32) / 16 for number in range(3)}
    arrays |= {f"b{number}": random.standard_normal(384, np.float32) for number in range(3)}
    body = "a = Gemm(x, w0, b0) b = Tanh(a) c = Gemm(b, w1, b1) d = Tanh(c) y = Gemm(d, w2, b2)"
    x = random.standard_normal((rows, 384), np.float32)
    assert_pieces_give_equal_bits(chain(arrays, body, rows, 384), x, precision=precision)


@pytest.mark.parametrize(("dtype", "block"), [("uint8", 32), ("int8", 0)])
def test_integers_are_cut_with_their_scales_and_zero_points(dtype: str, block: int) -> None:
    random = np.random.default_rng(3)
    arrays: dict[str, np.ndarray] = {}
    body, read = "", "x"
    for number in range(3):
        scales = (512 // block, 512) if block else (512,)
        low, high = (0, 256) if dtype == "uint8" else (-128, 128)
        arrays[f"w{number}"] = random.integers(low, high, (512, 512)).astype(dtype)
        arrays[f"s{number}"] = random.uniform(1e-3, 2e-3, scales).astype(np.float32)
        arrays[f"z{number}"] = random.integers(low, high, scales).astype(dtype)
        attributes = f"axis = 0, block_size = {block}" if block else "axis = 1"
        body += (
            f"d{number} = DequantizeLinear<{attributes}>(w{number}, s{number}, z{number}) m{number} = MatMul({read}, d{number}) "
        )
        body, read = body + (f"t{number} = Tanh(m{number}) " if number < 2 else ""), f"t{number}"
    model = chain(arrays, body + "y = Neg(m2)", 7, 512)
    assert_pieces_give_equal_bits(model, random.standard_normal((7, 512), np.float32))


def test_pieces_have_the_kernel_of_the_whole() -> None:
    """The cheapest for few columns may sum in another order."""
    model = product(BODIES["MatMul"], 60, 500, 1536)
    asked = []

    class Choosing(Context):
        def kernels_of(self, model: ir.Model):  # type: ignore[no-untyped-def]
            def choose(node: ir.Node, variant: object) -> KernelChoice:
                asked.append(kept_template(node.metadata_props))
                return KernelChoice(asked[-1] or "matmul", 1.0, "fma")

            return choose

    assert SplitWeights().run(model, Choosing(Target.parse("cpu:avx2", threads=1), memory_limit=MemoryLimit(percent=50)))
    assert asked[0] is None
    assert set(asked[1:]) == {"matmul"}
    assert [kept_template(node.metadata_props) for node in model.graph] == ["matmul"] * (len(model.graph) - 1) + [None]


def test_tables_are_gathered_by_columns() -> None:
    rng = np.random.default_rng(0)
    text = '<ir_version: 8, opset_import: ["": 18]> main (int64[2,7] x) => (float[2,7,640] y) { y = Gather(table, x) }'
    table = rng.standard_normal((900, 640), np.float32)
    model = ir.from_onnx_text(text, initializers=[ir.tensor(table, name="table")])
    x = rng.integers(-900, 900, (2, 7))
    net = prefuse.compile(model, threads=2, cache=False, memory_limit="50%")
    assert isinstance(net, CompiledModel)
    assert planned_bytes(net.plan) <= 0.5 * table.nbytes
    np.testing.assert_array_equal(net(x), table[x])


@pytest.mark.parametrize("rows", [1, 2, 48, 96, 1000])
def test_large_results_are_joined_some_rows_at_a_time(rows: int) -> None:
    """Pieces of GPT-2's logits of 1,024 tokens took 206 MB beside their copy, to save 112 MB of the weight: all at once."""
    model = product("y = MatMul(x, w)", rows, 64, 65536)
    changed, context = split(model, 50, "cuda:sm_80")  # whose kernels store whole results
    assert changed
    joins = [node for node in model.graph if node.op_type == "Concat" and node.attributes.get_int("axis") == -1]
    widest = max(tensor_type(node.outputs[0]).size_bytes for node in joins)
    assert widest <= max(64 * 65536 * 4 / 2 / 4, 65536 * 4)
    assert ("parts of the rows" in str(context.remarks[0])) == (len(joins) > 1)


@pytest.mark.parametrize("shape", [(150, 512), (1, 1, 131, 512), (3, 50, 512)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_rows_of_large_results_keep_their_bits(shape: tuple[int, ...], precision: Precision) -> None:
    """Also where they are in several dimensions, and their number is no multiple of the parts'."""
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    dims = ",".join(map(str, shape))
    header = f'<ir_version: 8, opset_import: ["": 18]> main (float[{dims}] x) => (float[{",".join(map(str, shape[:-1]))},8192] y)'
    w = np.random.default_rng(1).standard_normal((512, 8192), np.float32)
    graphs = [ir.from_onnx_text(f"{header} {{ y = MatMul(x, w) }}", initializers=[ir.tensor(w, name="w")]) for _ in range(2)]
    whole = prefuse.compile(graphs[0], threads=2, cache=False, precision=precision)
    limited = prefuse.compile(graphs[1], threads=2, cache=False, precision=precision, memory_limit="60%")
    assert isinstance(limited, CompiledModel)
    assert isinstance(whole, CompiledModel)
    assert planned_bytes(limited.plan) <= 0.6 * planned_bytes(whole.plan)
    assert len(limited.plan.steps) > 20
    np.testing.assert_array_equal(limited(x), whole(x))


def test_a_bias_of_every_row_keeps_rows_together() -> None:
    rng = np.random.default_rng(0)
    text = '<ir_version: 8, opset_import: ["": 18]> main (float[60,512] x) => (float[60,8192] y) { y = Gemm(x, w, b) }'
    arrays = {"w": rng.standard_normal((512, 8192), np.float32), "b": rng.standard_normal((60, 8192), np.float32)}
    models = [ir.from_onnx_text(text, initializers=[ir.tensor(one, name=name) for name, one in arrays.items()]) for _ in range(3)]
    infer_facts(models[0])
    changed, context = split(models[0], 30)
    assert changed
    assert "parts of the rows" not in str(context.remarks[0])
    x = rng.standard_normal((60, 512), np.float32)
    limited = prefuse.compile(models[1], threads=2, cache=False, memory_limit="50%")
    np.testing.assert_array_equal(limited(x), prefuse.compile(models[2], threads=2, cache=False)(x))


def test_rows_as_large_as_the_weight_are_no_reason_to_cut_it() -> None:
    changed, context = split(product("y = MatMul(x, w)", 2, 1, 1 << 20), 50, "cuda:sm_80")
    assert not changed
    assert "joined by a copy" in str(context.remarks[0])


def test_pieces_of_large_results_are_stored_side_by_side() -> None:
    """Where kernels can, no row of the weight is read twice, and nothing is joined by a copy."""
    model = product("y = MatMul(x, w)", 96, 64, 65536)
    changed, context = split(model.clone(), 50, "cpu:avx2")
    assert changed
    assert "parts of the rows" not in str(context.remarks[0])
    free = prefuse.compile(model.clone(), target="cpu:avx2", threads=2, cache=False)
    limited = prefuse.compile(model.clone(), target="cpu:avx2", threads=2, cache=False, memory_limit="30%")
    assert isinstance(free, CompiledModel)
    assert isinstance(limited, CompiledModel)
    launches = [step for step in limited.plan.steps if isinstance(step, Launch)]
    assert len(launches) > 4
    assert all(region.rows == 96 for step in launches for region in step.writes)
    assert planned_bytes(limited.plan) <= 0.3 * planned_bytes(free.plan)
    x = np.random.default_rng(1).standard_normal((96, 64), np.float32)
    np.testing.assert_array_equal(limited(x), free(x))


def test_without_a_limit_nothing_is_cut() -> None:
    model = product(BODIES["MatMul"], 5, 257, 1300)
    assert not split(model, None)[0]
    assert not split(model, 100)[0]
    assert [node.op_type for node in model.graph] == ["MatMul"]


def test_what_another_kernel_would_compute_stays_whole() -> None:
    model = product(BODIES["Gemm"], 5, 257, 1300)
    choices = iter(["first", *["second"] * 20])

    class Choosing(Context):
        def kernels_of(self, model: ir.Model):  # type: ignore[no-untyped-def]
            return lambda node, variant: KernelChoice(next(choices), 1.0, "fma")

    context = Choosing(Target.parse("cpu:avx2", threads=1), memory_limit=MemoryLimit(percent=50))
    names = set(model.graph.initializers)
    assert not SplitWeights().run(model, context)
    verify_model(model)
    assert [node.op_type for node in model.graph] == ["Gemm"]
    assert set(model.graph.initializers) == names
    assert "would multiply by pieces of w" in str(context.remarks[0])


def test_products_by_strassens_algorithm_stay_whole() -> None:
    """They add columns that a cut would part: pieces would have other bits."""
    model = product(BODIES["MatMul"], 128, 512, 1024)
    context = Context(Target.parse("cpu:avx512", threads=1), precision="float32-fast", memory_limit=MemoryLimit(percent=50))
    choice = context.kernels_of(model)(model.graph[0], AS_IT_IS)
    assert isinstance(choice, KernelChoice)
    assert choice.template == "strassen_matmul"
    assert not SplitWeights().run(model, context)
    assert [node.op_type for node in model.graph] == ["MatMul"]
    assert "would multiply by pieces of w" in str(context.remarks[0])


@pytest.mark.parametrize("operator", ["GRU", "LSTM", "RNN"])
def test_directions_without_a_bias(operator: str) -> None:
    gates = {"GRU": 3, "LSTM": 4, "RNN": 1}[operator] * 4
    model = ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["": 18]> main (float[6,2,3] x) => (float[6,2,2,4] y)
        {{ y = {operator}<hidden_size=4, direction="bidirectional">(x, w, r) }}""",
        initializers=[ir.tensor(np.ones((2, gates, width), np.float32), name=name) for name, width in (("w", 3), ("r", 4))],
    )
    infer_facts(model)
    (node,) = model.graph
    join_directions(model, node, directions_of(model, node))
    verify_model(model)
    assert [node.op_type for node in model.graph] == [operator, operator, "Concat"]


@pytest.mark.parametrize(("parameters", "is_cut"), [("", True), (", activation_alpha=[0.3,0.2]", False)])
def test_whose_an_activations_parameter_is_may_not_be_told(parameters: str, is_cut: bool) -> None:
    """Lists of them have one for each activation that takes it, so that their middle is not between the directions."""
    names = '["HardSigmoid","HardSigmoid","Tanh","Tanh"]'
    model = ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["": 18]> main (float[6,2,3] x) => (float[6,2,2,4] y)
        {{ y = GRU<hidden_size=4, direction="bidirectional", activations={names}{parameters}>(x, w, r) }}""",
        initializers=[ir.tensor(np.zeros((2, 12, width), np.float32), name=name) for name, width in (("w", 3), ("r", 4))],
    )
    assert (weight_bytes(model.graph[0]) > 0) is is_cut
