"""Raising a model's opset, where every operator keeps its meaning."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest
from prefuse.compiler.debugging.oracle import random_inputs, relative_error, run_model
from prefuse.compiler.ir.facts import infer_facts
from prefuse.compiler.ir.functions import fuse_into_function, inline_function
from prefuse.compiler.ir.opset_raise import NEWEST, OLDEST, SUPERSETS, raise_obstacle, raise_opset


def versions(name: str) -> list[onnx.defs.OpSchema]:
    return [onnx.defs.get_schema(name, version, "") for version in range(OLDEST, NEWEST + 1)]


def parse(text: str) -> ir.Model:
    model = ir.from_onnx_text(text)
    infer_facts(model)
    return model


@pytest.mark.parametrize("name", sorted(SUPERSETS))
def test_a_listed_operator_has_only_grown(name: str) -> None:
    """Inputs, outputs, attributes and their defaults stay; what is new is optional."""
    before, *later = versions(name)
    for after in later:
        old, new = ([(one.name, one.option) for one in schema.inputs] for schema in (before, after))
        assert new[: len(old)] == old
        assert all(option == onnx.defs.OpSchema.FormalParameterOption.Optional for _, option in new[len(old) :])
        assert [one.name for one in after.outputs] == [one.name for one in before.outputs]
        for key, attribute in before.attributes.items():
            assert after.attributes[key].default_value == attribute.default_value, key
        assert not any(after.attributes[key].required for key in after.attributes.keys() - before.attributes.keys())
        before = after


def test_no_listed_operator_is_without_need() -> None:
    """An operator of one version needs no line; one that ONNX does not have is a slip of the pen."""
    assert all(len({schema.since_version for schema in versions(name)}) > 1 for name in SUPERSETS)


MODEL = """<ir_version: 10, opset_import: ["": 18]>
main (float[2,3,8] x, float[2,1,8] mask) => (float[2,3,2,4] y, float[2,3,8] z)
<int64[4] shape = {2, 3, 2, 4}, int64[1] last = {-1}, float[3] w = {1, 2, 3}> {
  p = Pad <mode = "reflect"> (x, pads)
  t = Transpose <perm = [0, 1, 2]> (p)
  m = ReduceMean (t, last)
  s = Sub (t, m)
  y = Reshape (s, shape)
  c = Cast <to = 9> (mask)
  k = Elu (x)
  z = Where (c, k, x)
}""".replace("float[3] w = {1, 2, 3}", "int64[6] pads = {0, 0, 0, 0, 0, 0}")


def test_a_raised_model_computes_the_same() -> None:
    """In ONNX Runtime, which takes each operator at its new version."""
    model = parse(MODEL)
    inputs = random_inputs(model)
    before = run_model(model, inputs, "onnxruntime")
    assert raise_obstacle(model, 24) is None
    raise_opset(model, 24)
    assert model.graph.opset_imports[""] == 24
    after = run_model(model, inputs, "onnxruntime")
    assert all(relative_error(after[name], array) == 0 for name, array in before.items())


def test_functions_are_raised_with_their_model() -> None:
    """Else they could not be inlined any more."""
    model = parse(MODEL)
    elu, where = (node for node in model.graph if node.op_type in ("Elu", "Where"))
    call = fuse_into_function(model, [elu, where], "elu_where")
    raise_opset(model, 23)
    assert {function.opset_imports[""] for function in model.functions.values()} == {23}
    inline_function(model, call)
    assert [node.op_type for node in model.graph][-2:] == ["Elu", "Where"]


def test_an_operator_of_another_meaning_is_named() -> None:
    model = parse("""<ir_version: 10, opset_import: ["": 18]>
    main (float[1,1,4,4] x, float[1,4,4,2] grid) => (float[1,1,4,4] y) { y = GridSample <mode = "bilinear"> (x, grid) }""")
    assert raise_obstacle(model, 19) is None
    found = raise_obstacle(model, 20)
    assert found is not None
    assert found.reason == "GridSample means something else in opset 20 than in 18"
    assert [node.op_type for node in found.nodes] == ["GridSample"]


@pytest.mark.parametrize("ceil", [False, True])
def test_pools_that_round_up_stay(ceil: bool) -> None:
    model = parse(f"""<ir_version: 10, opset_import: ["": 18]>
    main (float[1,1,5,5] x) => (float[1,1,H,W] y) {{ y = AveragePool <kernel_shape = [2, 2], ceil_mode = {int(ceil)}> (x) }}""")
    assert (raise_obstacle(model, 24) is None) != ceil


def test_it_is_looked_for_in_subgraphs_and_functions() -> None:
    body = 'g = GridSample <mode = "bilinear"> (x, grid)'
    model = parse(f"""<ir_version: 10, opset_import: ["": 18]>
    main (float[1,1,4,4] x, float[1,4,4,2] grid, bool c) => (float[1,1,4,4] y) {{
      y = If (c) <then_branch = a () => (g) {{ {body} }}, else_branch = b () => (n) {{ n = Neg(x) }}>
    }}""")
    assert raise_obstacle(model, 24) is not None
    model = parse(f"""<ir_version: 10, opset_import: ["": 18]>
    main (float[1,1,4,4] x, float[1,4,4,2] grid) => (float[1,1,4,4] y) {{ {body} y = Neg(g) }}""")
    fuse_into_function(model, list(model.graph), "sample")
    assert raise_obstacle(model, 24) is not None


@pytest.mark.parametrize(("have", "want"), [(17, 20), (24, NEWEST + 1)])
def test_opsets_that_were_not_compared_are_refused(have: int, want: int) -> None:
    model = parse(f'<ir_version: 10, opset_import: ["": {have}]> main (float[2] x) => (float[2] y) {{ y = Neg(x) }}')
    assert raise_obstacle(model, want) is not None
    assert raise_obstacle(model, have) is None
