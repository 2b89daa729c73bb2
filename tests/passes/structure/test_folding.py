"""Constants that are folded have the numbers that kernels compute, or are not folded where `onnx.reference` computes others."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import prefuse
import pytest
from prefuse.compiler.ir.facts import infer_facts
from prefuse.passes.structure.canonicalize.folding import is_misread


@pytest.mark.parametrize("reduction", ["ReduceMean<keepdims=0>(w, a)", "MatMul(o, v)", "Gather(c, last)"])
def test_sums_of_float16_are_rounded_once(reduction: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        main (float16[64] x) => (float16[64] y)
          <float16 one = {{15360}}, float16 share = {{3072}}, int64[2] s = {{4096, 64}}, int64[1] n = {{4096}},
           int64[1] a = {{0}}, int64 zero = {{0}}, int64 last = {{-1}}> {{
          w = Expand(one, s)
          o = Expand(one, n)
          v = Expand(share, s)
          c = CumSum(v, zero)
          m = {reduction}
          y = Add(x, m)
        }}"""
    y = np.asarray(prefuse.compile(onnx.parser.parse_model(text), cache=False)(np.zeros(64, np.float16)))
    np.testing.assert_array_equal(y, np.ones(64, np.float16))


@pytest.mark.parametrize(
    ("node", "output", "expected"),
    [
        ("OneHot(i, three, infinite)", "float[3,3]", [[0, -np.inf, -np.inf], [-np.inf, 0, -np.inf], [-np.inf] * 3]),
        ("OneHot(i, three, small)", "float[3,3]", [[1e-8, 1, 1], [1, 1e-8, 1], [1, 1, 1]]),
        ("LogSoftmax(far)", "float[3]", [-200, 0, -199]),
        ("ReduceLogSumExp<keepdims=0>(least)", "float", -np.inf),
        ("ReduceLogSumExp<keepdims=0>(greatest)", "float", np.inf),
        ("Erf(d)", "double", 0.5204998778130465),
        ("GatherElements(far, i)", "float[3]", [0, 200, 1]),
        ("Identity(dynamic)", "float", 1),
        ('Resize<mode="cubic", coordinate_transformation_mode="pytorch_half_pixel">(far, , , one)', "float[1]", [0]),
        (
            'Resize<mode="linear", coordinate_transformation_mode="align_corners">(far, , more)',
            "float[5]",
            [0, 100, 200, 100.5, 1],
        ),
        ('ScatterElements<reduction="max">(far, j, nan)', "float[3]", [np.nan, 200, 1]),
        ('ScatterElements<reduction="min">(far, j, nan)', "float[3]", [np.nan, 200, 1]),
    ],
)
def test_constants_that_the_reference_misreads_have_the_numbers_of_kernels(node: str, output: str, expected: object) -> None:
    """-inf, inf and NaN, which the text of a model cannot say, are quotients."""
    shape = output.partition("[")[2] or "]"
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        main ({output} x) => ({output} y)
          <int64[3] i = {{0, 1, 7}}, int64[1] j = {{0}}, int64 three = {{3}}, float[2] small = {{1, 0.00000001}},
           float[3] far = {{0, 200, 1}}, double d = {{0.5}}, float[3] plus = {{1, 1, 1}}, float[2] first = {{-1, 0}},
           float[3] zeros = {{0, 0, 0}}, float[2] ones = {{0, 1}}, float[1] zero = {{0}}, int64[1] one = {{1}},
           float[1] more = {{1.8}}> {{
          greatest = Div(plus, zeros)
          least = Neg(greatest)
          infinite = Div(first, ones)
          nan = Div(zero, zero)
          quantized, dynamic, middle = DynamicQuantizeLinear(zeros)
          m = {node}
          y = Add(x, m)
        }}"""
    model = onnx.parser.parse_model(text)
    kind = np.float64 if output == "double" else np.float32
    sizes = [int(n) for n in shape.rstrip("]").split(",") if n]
    y = np.asarray(prefuse.compile(model, cache=False)(np.zeros(sizes, kind)))
    np.testing.assert_allclose(y, np.array(expected, kind), rtol=1e-6 if kind == np.float32 else 1e-12)


@pytest.mark.parametrize(
    ("kind", "zero", "expected"), [("uint8", 5, [255, 255, 0, 0, 8]), ("int8", -5, [127, 127, -128, -128, -2])]
)
def test_quantized_constants_saturate(kind: str, zero: int, expected: list[int]) -> None:
    """The reference casts them to int32 first, which makes the least number of what is far beyond."""
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        main ({kind}[5] x) => ({kind}[5] y)
          <float[5] far = {{1e10, 1, -1e10, -1, 3}}, float[5] ones = {{1, 0, 1, 0, 1}}, float s = {{1}}, {kind} z = {{{zero}}}> {{
          c = Div(far, ones)
          q = QuantizeLinear(c, s, z)
          y = Add(x, q)
        }}"""
    y = np.asarray(prefuse.compile(onnx.parser.parse_model(text), cache=False)(np.zeros(5, kind)))
    np.testing.assert_array_equal(y, np.array(expected, kind))


@pytest.mark.parametrize(
    ("x", "scale", "attributes", "folds"),
    [
        ([[3, 1e9]], 1.0, "", True),
        ([[3, 1e9]], 0.1, "", False),
        ([[1e-9, 1e9]], [1e-12, 1.0], "", True),
        ([[1e-9, 1e9]], [1.0, 1e-12], "", False),
        ([[1e9], [1e-9]], [1.0, 1e-12], "<axis = 0>", True),
        ([[1e-9, 3e9]], [[1e-12]], "<block_size = 2>", False),
        ([[1e-9, 3e-9]], [[1e-12]], "<block_size = 2>", True),
    ],
)
def test_constants_are_quantized_at_once_where_their_quotients_are_small(
    x: object, scale: object, attributes: str, folds: bool
) -> None:
    arrays = {"w": np.array(x, np.float32), "s": np.array(scale, np.float32)}
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": 21]> main () => (uint8{list(arrays["w"].shape)} y)
        {{ y = QuantizeLinear{attributes}(w, s) }}""",
        initializers=[ir.tensor(array, name=name) for name, array in arrays.items()],
    )
    infer_facts(model)
    assert is_misread(model.graph[0], 21) is not folds


@pytest.mark.parametrize("is_byte", [False, True])
def test_zero_points_of_rows_are_those_of_rows(is_byte: bool) -> None:
    """Where there are as many columns, onnx.reference takes them for these."""
    product = "QLinearMatMul(a, one, z, a, one, none, half, none)" if is_byte else "MatMulInteger(a, a, z)"
    text = f"""<ir_version: 10, opset_import: ["": 21]>
        main (int32[2,2] x) => (int32[2,2] y)
          <uint8[2,2] a = {{6, 2, 3, 9}}, uint8[2] z = {{1, 2}}, float[2] one = {{1, 1}}, float half = {{0.5}},
           uint8 none = {{0}}> {{
          m = {product}
          c = Cast<to=6>(m)
          y = Add(x, c)
        }}"""
    a = np.array([[6, 2], [3, 9]])
    y = np.asarray(prefuse.compile(onnx.parser.parse_model(text), cache=False)(np.zeros((2, 2), np.int32)))
    np.testing.assert_array_equal(y, (a - [[1], [2]]) @ a * (2 if is_byte else 1))
