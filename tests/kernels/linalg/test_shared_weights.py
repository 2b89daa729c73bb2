"""Weights that kernels for any number of rows read: right, and packed alike by all of them; and their rows as a table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.linalg import matmul_tiles
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.kernels.template.values import PANELS
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import AMX_EMULATED, Target

from ..harness import LEVELS, Case, check, in_turn, run, target_of, type_of
from .test_matmul import gemm, product
from .test_paired_product import product as narrow_product
from .test_stored_weights import case_of, weights_of

ROWS = (1, 3, 8, 33, 70)
TILES = Target("cpu", AMX_EMULATED, 2)
rng = np.random.default_rng(11)


def shared(case: Case, template: str = "") -> Case:
    return replace(case, group=replace(case.group, shares_weights=True), template=template, got=[])


def packs_of(cases: list[Case], target: Target) -> set[str]:
    """How the kernels of some cases pack the weights, which are operand "b" or "w"."""
    found = set()
    for case in cases:
        kernel = build_kernel(case.group, target)
        assert isinstance(kernel, BuiltKernel)
        found |= {str(operand.pack) for operand in kernel.operands if operand.name in ("b", "w")}
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_float32(level: str) -> None:
    for k, n in ((70, 50), (129, 100)):
        cases = [shared(product((rows, k), (k, n))) for rows in ROWS]
        assert len(packs_of(cases, target_of(level))) == 1
        check(in_turn(cases, level, LEVELS), target_of(level))


@pytest.mark.parametrize("precision", ["float32", "float32-fast"])
def test_float32_on_tiles(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread splits panels; rows that L2 holds, and more."""
    monkeypatch.setattr(matmul_tiles, "tile_product_cycles", lambda *sizes, **how: -1e9)
    unit = 1e-5 if precision == "float32-fast" else 1e-6
    for k, n in ((70, 50), (96, 64)):
        few, *many = [shared(product((rows, k), (k, n))) for rows in ROWS]
        many = [replace(one, template="matmul_tiles", rtol=0.0, atol=unit * float(np.abs(one.expected[0]).max())) for one in many]
        many = [replace(one, group=replace(one.group, precision=precision)) for one in many]
        turned = shared(gemm(40, n, k, "b", None, transB=1.0))
        check([*many, replace(turned, rtol=0.0, atol=1e-5 * k)], TILES)
        assert packs_of([few], target_of("avx512")) == packs_of(many, TILES)


def test_bfloat16_on_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles are read where panels lie; of a depth of no whole steps they are not."""
    monkeypatch.setattr(matmul_tiles, "tile_product_cycles", lambda *sizes, **how: -1e9)
    cases = [shared(narrow_product((rows, 96), (96, 50)), template="matmul_tiles") for rows in ROWS]
    check(cases, TILES)
    vectors = [shared(narrow_product((rows, 96), (96, 50), narrow="b")) for rows in (1, 5)]
    assert packs_of(vectors, target_of("avx512bf16")) == packs_of(cases, TILES)
    ragged = shared(narrow_product((40, 70), (70, 50)), template="matmul")
    check([ragged], Target("cpu", AMX_EMULATED, 2))


@pytest.mark.parametrize("dtype", ["int8", "uint4"])
@pytest.mark.parametrize("level", ["avx2", "avxvnni", "avx512vnni"])
def test_integers(dtype: str, level: str) -> None:
    for k, n, block in ((300, 40, 0), (77, 33, 16), (512, 20, 256)):
        inputs = [rng.standard_normal((rows, k)).astype(np.float32) for rows in ROWS]
        cases = [shared(case_of(x, dtype, n, block, has_zero=bool(block), is_turned=True)) for x in inputs]
        assert len(packs_of(cases, target_of(level))) == 1
        check(in_turn(cases, level, ("avx2", "avxvnni", "avx512vnni")), target_of(level))


def embedding(table: dict[str, np.ndarray], expected: np.ndarray, tokens: np.ndarray, ops: tuple[Op, ...]) -> Case:
    """Rows of a table in panels, plus 1."""
    arrays = {**table, "tokens": tokens}
    result = expected[np.where(tokens < 0, tokens + len(expected), tokens)].astype(np.float32) + np.float32(1)
    types = {name: type_of(array) for name, array in arrays.items()}
    kinds = {"wide": TensorType(expected.shape, "float32"), "rows": type_of(result), "y": type_of(result)}
    kinds["chosen"] = TensorType(result.shape, str(table["w"].dtype))
    one = np.array(1, np.float32)
    whole = (*ops, Op("Add", ("rows", "one"), ("y",), {}, 23))
    types |= kinds | {"one": type_of(one)}
    literals = {"one": one}
    group = Group(whole, (*arrays, "one"), ("y",), types, frozenset([*table, "one"]), literals, shares_weights=True)
    return Case(group, {**arrays, "one": one}, [result], 1e-6, 1e-6, str(table["w"].dtype), "panel_gather")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_rows_of_tables(level: str, shape: tuple[int, ...]) -> None:
    """Every format, of a ragged number of rows and elements; the same bytes as the product by the transposed table."""
    tokens = rng.integers(-75, 75, shape)
    attributes, cases = {"axis": 0, PANELS: 1}, []
    table = rng.standard_normal((75, 90)).astype(np.float32)
    cases.append(embedding({"w": table}, table, tokens, (Op("Gather", ("w", "tokens"), ("rows",), attributes, 23),)))
    narrow = table.astype(ml_dtypes.bfloat16)
    widened = (Op("Gather", ("w", "tokens"), ("chosen",), attributes, 23), Op("Cast", ("chosen",), ("rows",), {"to": 1}, 23))
    cases.append(embedding({"w": narrow}, narrow.astype(np.float32), tokens, widened))
    for dtype, block in (("int8", 0), ("int4", 16), ("int4", 0)):
        stored, exact = weights_of(dtype, 90, 75, block, has_zero=False)
        stored = {name: np.ascontiguousarray(array.T) for name, array in stored.items()}
        scaling = {"axis": 1, "block_size": block} if block else {"axis": 0}
        read = Op("Gather", ("wide", "tokens"), ("rows",), attributes, 23)
        cases.append(embedding(stored, exact.T, tokens, (Op("DequantizeLinear", ("w", "s"), ("wide",), scaling, 23), read)))
    check(in_turn(cases, level, LEVELS), target_of(level))
    multiplied = shared(gemm(3, 75, 90, "b", None, transB=1.0))
    assert packs_of(cases[:1], target_of(level)) == packs_of([multiplied], target_of(level))


def test_an_index_out_of_range_reads_inside_the_table() -> None:
    table = rng.standard_normal((40, 33)).astype(np.float32)
    ops = (Op("Gather", ("w", "tokens"), ("rows",), {"axis": 0, PANELS: 1}, 23),)
    case = embedding({"w": table}, table, np.array([0, 39]), ops)
    case.arrays["tokens"][:] = 1 << 40, -(1 << 40)
    run([case], target_of("avx512"))
    np.testing.assert_allclose(case.got[0], table[[39, 0]] + 1, rtol=1e-6)
