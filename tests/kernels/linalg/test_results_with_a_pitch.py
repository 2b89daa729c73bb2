"""Products stored as parts of larger tensors: with their own bits, and nothing written between their rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.linalg import matmul_tiles
from prefuse.kernels.registry import build_kernel, stores_parts
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import AMX_EMULATED

from ..harness import LEVELS, Case, check, check_in_turn, followed, in_turn, target_of
from . import test_matmul, test_paired_product, test_stored_weights, test_strassen_matmul


def within(case: Case, axis: int = -1, extra: int = 13) -> Case | None:
    """The case, stored in a tensor that is longer along one dimension; None without such a dimension, or of several results."""
    kind = case.group.types[case.group.outputs[0]]
    if len(kind.shape) < max(axis + 1, -axis) or len(case.group.outputs) > 1:
        return None
    shape = list(kind.shape)
    shape[axis] += extra
    group = replace(case.group, enclosing={case.group.outputs[0]: tuple(shape)})
    return replace(case, group=group, label=f"{case.label} in {shape}", got=[])


def all_within(cases: list[Case]) -> Iterator[Case]:
    for number, case in enumerate(cases):
        for axis in (-1, -2) if number % 3 == 0 else (-1,):
            if (one := within(case, axis)) is not None:
                yield one


@pytest.mark.parametrize("level", LEVELS)
def test_products(level: str) -> None:
    check_in_turn([*all_within([*test_matmul.products(), *test_matmul.gemms()])], level)


@pytest.mark.parametrize("level", LEVELS)
def test_products_of_pairs(level: str) -> None:
    check_in_turn([*all_within(test_paired_product.products())], level)


@pytest.mark.parametrize("level", LEVELS)
def test_strassens_products(level: str) -> None:
    cases = [test_strassen_matmul.multiplied(*sizes) for sizes in (((61, 47), 83), ((2, 3, 17, 33), 70))]
    check_in_turn([*all_within([test_strassen_matmul.forced(case, 1) for case in cases])], level)


@pytest.mark.parametrize("level", test_stored_weights.TEMPLATES)
@pytest.mark.parametrize("dtype", ["int8", "uint4"])
def test_products_of_stored_weights(dtype: str, level: str) -> None:
    sizes = ((1, 64, 17, 32), (5, 77, 33, 16), (37, 300, 40, 0))
    made = [test_stored_weights.case_of(test_stored_weights.rows_of(m, k), dtype, n, block) for m, k, n, block in sizes]
    cases = in_turn([*all_within([*made, followed(made[1])])], level, tuple(test_stored_weights.TEMPLATES))
    check(test_stored_weights.by_template(cases, level), target_of(level))


@pytest.mark.parametrize("level", ["amx", AMX_EMULATED])
def test_products_on_tiles(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_tiles, "tile_product_cycles", lambda *sizes, **how: -1e9)  # small ones, too
    shapes = [((40, 70), (70, 50)), ((64, 96), (96, 64)), ((2, 3, 19, 40), (40, 33)), ((4, 35, 33), (4, 33, 40))]
    cases = [replace(test_matmul.product(a, b), template="matmul_tiles", rtol=0.0, atol=1e-4) for a, b in shapes]
    check([*all_within(cases)], target_of(level))


def test_only_those_that_can_are_asked() -> None:
    types = {name: TensorType((4, 8, 8), "float32") for name in "xy"}
    group = Group((Op("Softmax", ("x",), ("y",), {}, 23),), ("x",), ("y",), types, enclosing={"y": (4, 8, 16)})
    refused = build_kernel(group, target_of("avx2"))
    assert not isinstance(refused, BuiltKernel)
    assert {reason for _, reason in refused} == {"stores whole results"}
    assert not stores_parts("normalization")
    assert stores_parts("matmul")


def test_kernels_of_other_pitches_are_others() -> None:
    case = test_matmul.product((40, 70), (70, 50))
    keys = {one.group.key() for one in (case, within(case), within(case, extra=14), within(case, -2)) if one is not None}
    assert len(keys) == 4
