"""Matrix products with reductions over the rows of their result, against NumPy in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.linalg.product_rows import plan
from prefuse.kernels.template.contract import Refusal
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

from ..harness import LEVELS, OPSET, Case, check, check_in_turn, target_of, type_of

rng = np.random.default_rng(5)
ROUNDING = 3e-5


def normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def normalized(x: np.ndarray, mean: np.ndarray | float) -> np.ndarray:
    """Of mean 0, if that is its mean, and variance 1 over the last dimension."""
    return np.asarray((x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5))


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def projected(a: tuple[int, ...], columns: int, outputs: str = "y", gemm: dict[str, Any] | None = None) -> Case:
    """What ends a block of a transformer: product, bias, residual, normalization; s is the sum, t the means of the rows of y."""
    shape = (*(a if not gemm or not gemm.get("transA") else a[::-1])[:-1], columns)
    depth = a[0] if gemm and gemm.get("transA") else a[-1]
    b = (columns, depth) if gemm and gemm.get("transB") else (depth, columns)
    arrays = {"a": normal(*a), "b": normal(*b), "bias": normal(columns), "r": normal(*shape), "w": normal(columns)}
    left, right = (array.astype(np.float64) for array in (arrays["a"], arrays["b"]))
    if gemm is None:
        product = Op("MatMul", ("a", "b"), ("p",), {}, OPSET)
        p = left @ right
    else:
        product = Op("Gemm", ("a", "b", "bias"), ("p",), gemm, OPSET)
        p = (left.T if gemm.get("transA") else left) @ (right.T if gemm.get("transB") else right)
        p = gemm.get("alpha", 1.0) * p + gemm.get("beta", 1.0) * arrays["bias"]
    s = p + arrays["bias"] + arrays["r"]
    y = normalized(s, s.mean(-1, keepdims=True)) * arrays["w"] + arrays["bias"]
    values = {"p": p, "q": p + arrays["bias"], "s": s, "y": y, "t": y.mean(-1)}
    ops = [
        product,
        Op("Add", ("p", "bias"), ("q",), {}, OPSET),
        Op("Add", ("r", "q"), ("s",), {}, OPSET),
        Op("LayerNormalization", ("s", "w", "bias"), ("y",), {"axis": -1}, OPSET),
        Op("ReduceMean", ("y",), ("t",), {"axes": (-1,), "keepdims": 0}, OPSET),
    ]
    return finished(ops if "t" in outputs else ops[:-1], arrays, values, outputs, f"{a} {columns} {gemm}")


def alone(rows: int, depth: int, columns: int, op_type: str) -> Case:
    """One operator of rows right after the product."""
    arrays = {"a": normal(rows, depth), "b": normal(depth, columns), "w": normal(columns)}
    p = arrays["a"].astype(np.float64) @ arrays["b"].astype(np.float64)
    found = {
        "Softmax": softmax(p),
        "RMSNormalization": normalized(p, 0.0) * arrays["w"],
        "ReduceSum": p.sum(-1, keepdims=True),
    }
    inputs = ("p", "w") if op_type == "RMSNormalization" else ("p",)
    attributes: dict[str, Any] = {"axes": (-1,)} if op_type == "ReduceSum" else {"axis": -1}
    ops = [Op("MatMul", ("a", "b"), ("p",), {}, OPSET), Op(op_type, inputs, ("y",), attributes, OPSET)]
    if op_type != "RMSNormalization":
        del arrays["w"]
    return finished(ops, arrays, {"p": p, "y": found[op_type]}, "y", f"{op_type} of {rows} {depth} {columns}")


def finished(ops: list[Op], arrays: dict[str, np.ndarray], values: dict[str, np.ndarray], outputs: str, label: str) -> Case:
    types = {name: type_of(array) for name, array in arrays.items()}
    types |= {name: TensorType(array.shape, "float32") for name, array in values.items()}
    names = tuple(outputs.split())
    group = Group(tuple(ops), tuple(arrays), names, types, frozenset(["b", "w", "bias"]) & frozenset(arrays))
    expected = [values[name].astype(np.float32) for name in names]
    return Case(group, arrays, expected, ROUNDING, 3 * ROUNDING, label, "product_rows")


@pytest.mark.parametrize("level", LEVELS)
def test_sizes_that_do_not_divide_the_tile(level: str) -> None:
    """Few rows, several batches, columns that fill no vector, and rows of several blocks: 3000 columns are 43 rows of one."""
    cases = [projected((rows, 7), columns) for rows in (1, 2, 29, 61) for columns in (3, 17, 100)]
    cases += [projected((3, 5, 11), 33, "s y"), projected((2, 2, 13, 4), 16, "t y s"), projected((5,), 24), projected((9, 1), 1)]
    cases += [projected((131, 9), 3000, "s y"), projected((400, 50), 70)]
    check_in_turn(cases, level)


def test_rows_that_share_sets_of_the_cache() -> None:
    check([projected((67, 1024), 65)], target_of("avx512", 3))


def test_more_threads_than_tiles_of_rows() -> None:
    check([projected((23, 64), 100), projected((7, 300), 64), projected((97, 31), 40, "s y")], target_of("avx2", threads=5))


def test_operators_right_after_the_product() -> None:
    check([alone(37, 12, 50, name) for name in ("Softmax", "RMSNormalization", "ReduceSum")], target_of("avx2"))


def test_gemm_adds_its_bias() -> None:
    forms: list[dict[str, Any]] = [{"transB": 1}, {"transA": 1, "alpha": 0.5}, {"alpha": 2.0, "beta": 0.25}]
    check([projected((19, 24), 40, gemm=form) for form in forms], target_of("avx2"))


def test_nothing_to_add_up() -> None:
    check([projected((5, 0), 20)], target_of("avx2"))


def refusal(group: Group, target: str = "cpu:avx512") -> str:
    built = plan(group, Target.parse(target, None if target.startswith("cuda") else 2))
    assert isinstance(built, Refusal)
    return built.reason


def test_refusals() -> None:
    group = projected((40, 8), 24).group
    assert "thread" in refusal(group, "cuda:sm_90")
    assert "has 1 products before 0" in refusal(replace(group, ops=group.ops[:1], outputs=("p",)))
    assert "right operand alone" in refusal(replace(group, constants=frozenset()))
    assert "read by others" in refusal(replace(group, outputs=("p", "y")))
    assert "not float32" in refusal(replace(group, types={**group.types, "b": TensorType((8, 24), "float64")}))
    chained = (replace(group.ops[0], inputs=("h", "b")), Op("Neg", ("a",), ("h",), {}, OPSET), *group.ops[1:])
    made = replace(group, ops=chained, types={**group.types, "h": group.types["a"]})
    assert "computed in the group" in refusal(made)
    assert "KiB of scratch" in refusal(projected((2, 1), 40_000).group)


def test_rows_of_two_dimensions_are_not_those_of_the_product() -> None:
    group = projected((3, 5, 8), 24).group
    whole = (*group.ops[:3], Op("ReduceSum", ("s",), ("y",), {"axes": (1, 2), "keepdims": 0}, OPSET))
    assert "3 rows of 120" in refusal(replace(group, ops=whole, types={**group.types, "y": TensorType((3,), "float32")}))


def test_a_batch_of_products_is_refused() -> None:
    group = projected((3, 5, 8), 24).group
    assert "batch of products" in refusal(replace(group, types={**group.types, "b": TensorType((3, 8, 24), "float32")}))
