"""Einsum in terms of matrix products, against NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from prefuse.passes.structure.decompose.contraction import parse_equation

from .expanding import compiled, evaluate, expanded, one_node, operators

EQUATIONS = {
    "ij,jk->ik": [(3, 4), (4, 5)],
    "ij,jk": [(3, 4), (4, 5)],
    "ij,jk->ki": [(3, 4), (4, 5)],
    "bhid,bhjd->bhij": [(2, 3, 4, 5), (2, 3, 6, 5)],
    "bhij,bhjd->bihd": [(2, 3, 4, 6), (2, 3, 6, 5)],
    "ij->ji": [(3, 4)],
    "ba": [(3, 4)],
    "ij->": [(3, 4)],
    "ij->j": [(3, 4)],
    "ii": [(4, 4)],
    "ii->i": [(4, 4)],
    "iij,jk->ik": [(3, 3, 4), (4, 5)],
    "aiia->ai": [(3, 4, 4, 3)],
    "iii": [(3, 3, 3)],
    "...ii->...i": [(2, 3, 4, 4)],
    "...ij,...jk": [(5, 2, 3, 4), (5, 1, 4, 6)],
    "...ij,jk->...ik": [(2, 3, 4), (4, 6)],
    "i...,i...->...": [(4, 1, 3), (4, 2, 3)],
    "...,...": [(2, 3), (1, 3)],
    "i,i": [(5,), (5,)],
    "i,j": [(5,), (3,)],
    "i,j->ji": [(5,), (3,)],
    "bi,bi->b": [(3, 4), (3, 4)],
    "bi,bj->bij": [(3, 4), (3, 5)],
    "ij,kl->": [(2, 3), (4, 5)],
    "ij,ij,ij->ij": [(2, 3), (2, 3), (2, 3)],
    "ab,bc,cd,de->ae": [(2, 9), (9, 3), (3, 8), (8, 2)],
    "ea,fb,abcd,gc,hd->efgh": [(3, 2), (3, 2), (2, 2, 2, 2), (3, 2), (3, 2)],
    ",": [(), ()],
    "->": [()],
    ",ij->ji": [(), (2, 3)],
    "ij,jk->ik ": [(0, 4), (4, 5)],
    "ij,jk-> ik": [(3, 0), (0, 5)],
    "bij,bjk->bik": [(1, 3, 4), (2, 4, 5)],
    "Ab,bA->Ab": [(2, 3), (3, 2)],
}


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS.items(), ids=EQUATIONS)
def test_einsum_is_numpys(equation: str, shapes: list[tuple[int, ...]]) -> None:
    generator = np.random.default_rng(0)
    inputs = {f"x{number}": generator.standard_normal(shape) for number, shape in enumerate(shapes)}
    model = expanded(one_node("Einsum", inputs, equation=equation))
    assert "Einsum" not in operators(model)
    (found,) = evaluate(model, inputs)
    np.testing.assert_allclose(found, np.einsum(equation, *inputs.values()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint16, np.int64])
def test_compiled_in_every_type(dtype: type) -> None:
    generator = np.random.default_rng(1)
    x: np.ndarray = (generator.standard_normal((2, 7, 5)) * 4).astype(dtype)
    y: np.ndarray = (generator.standard_normal((2, 3, 5)) * 4).astype(dtype)
    (found,) = compiled(one_node("Einsum", {"x": x, "y": y}, equation="bid,bjd->ijb"), x, y)
    exact = np.einsum("bid,bjd->ijb", *(v.astype(np.float64) for v in (x, y)))
    if np.dtype(dtype).kind in "iu":
        np.testing.assert_array_equal(found, exact.astype(np.int64).astype(dtype))
    else:
        unit = float(ml_dtypes.finfo(dtype).eps)
        np.testing.assert_allclose(found.astype(np.float64), exact, rtol=2 * unit, atol=4 * unit)


@pytest.mark.parametrize(
    ("equation", "ranks"), [("ij->i", [3]), ("ij,jk->ik", [2]), ("ij->k", [2]), ("ij->ii", [2]), ("ijk->i", [2])]
)
def test_an_equation_that_does_not_fit_is_none(equation: str, ranks: list[int]) -> None:
    assert parse_equation(equation, ranks) is None


def test_a_chain_is_contracted_from_its_narrow_end() -> None:
    """(a b) (b c) c: two products of a matrix and a vector, and none of two matrices."""
    inputs = {"x": np.ones((8, 8)), "y": np.ones((8, 8)), "z": np.ones(8)}
    model = onnx.shape_inference.infer_shapes(expanded(one_node("Einsum", inputs, equation="ab,bc,c->a")))
    sizes = {v.name: np.prod([d.dim_value for d in v.type.tensor_type.shape.dim]) for v in model.graph.value_info}
    products = [sizes[node.output[0]] for node in model.graph.node if node.op_type == "MatMul"]
    assert products == [8, 8]
