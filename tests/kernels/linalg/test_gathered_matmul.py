"""Products by chosen matrices, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.target import Target

from ..harness import LEVELS, Case, check_in_turn, target_of, type_of

rng = np.random.default_rng(1)


def product(
    chosen: list[int], count: int, rows: int, depth: int, columns: int, constants: str = "w", dtype: str = "float32"
) -> Case:
    """y[s] = a[s] @ w[indices[s]] for s rows of matrices; an index counts from the end where negative, and is held in range."""
    indices = np.array(chosen, np.int64)
    a, w = (rng.standard_normal(shape).astype(dtype) for shape in ((len(chosen), rows, depth), (count, depth, columns)))
    held = np.clip(np.where(indices < 0, indices + count, indices), 0, count - 1)
    exact = a.astype(np.float64) @ w.astype(np.float64)[held]
    arrays = {"w": w, "i": indices, "a": a}
    types = {name: type_of(array) for name, array in arrays.items()}
    types |= {"m": type_of(w[held]), "y": type_of(exact.astype(dtype))}
    group = Group(
        (Op("Gather", ("w", "i"), ("m",)), Op("MatMul", ("a", "m"), ("y",))),
        ("w", "i", "a"),
        ("y",),
        types,
        frozenset(name for name in ("w",) if name in constants),
    )
    unit = 1e-13 if dtype == "float64" else 2e-5
    label = f"{chosen} of {count} x {rows}x{depth}x{columns} constant {constants!r} {dtype}"
    return Case(group, arrays, [exact], unit, unit, label, "gathered_matmul")


@pytest.mark.parametrize("level", LEVELS)
def test_products_by_chosen_matrices(level: str) -> None:
    cases = [
        product([0, 0, 2, 1, 2], 3, 1, 7, 37),
        product([0, 0, 2, 1, 2], 3, 1, 7, 37, constants=""),
        product([3, 3, 3, 0], 4, 5, 33, 130),
        product([3, 3, 3, 0], 4, 5, 33, 130, constants=""),
        product([-1, 5, -9, 1], 3, 1, 4, 3),
        product([-1, 5, -9, 1], 3, 1, 4, 3, constants=""),
        product([1], 2, 1, 1, 1),
        product([1, 0], 2, 2, 0, 5),
        product([1, 0, 1], 2, 3, 9, 18, dtype="float64"),
        product(rng.integers(0, 8, 40).tolist(), 8, 1, 160, 96),
    ]
    check_in_turn(cases, level)


@pytest.mark.parametrize("target", ["cuda:sm_90", "rocm:gfx942"])
def test_gpus_take_the_two_operators_apart(target: str) -> None:
    refused = build_kernel(product([0, 1], 2, 1, 4, 4).group, Target.parse(target))
    assert refused == (("gathered_matmul", "is for CPUs"),)


def test_other_products_are_refused() -> None:
    target = target_of("avx2")
    case = product([0, 1], 2, 1, 4, 4)
    kinds = dict(case.group.types)
    gather, matmul = case.group.ops
    others = [
        (Op("Gather", ("w", "i"), ("m",), {"axis": 1}), matmul),
        (gather, Op("MatMul", ("m", "a"), ("y",))),
    ]
    for ops in others:
        assert not isinstance(build_kernel(Group(ops, case.group.inputs, ("y",), kinds), target), BuiltKernel)
