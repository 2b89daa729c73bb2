"""Matrix products: every way operands can lie, ragged edges, epilogues; against float64."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from prefuse.kernels.cost.register_tile import last_rows, share_sets
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.linalg import matmul
from prefuse.kernels.microkernels.register_tile import choose_tile
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.hardware.machine import row

from ..harness import LEVELS, Case, check, check_in_turn, emitted, followed, target_of, type_of
from ..symbolic import Dim, Domain, built_for, run_at, sized

ZEN5 = row("zen5", 16)  # that what stands here was measured on

rng = np.random.default_rng(1)


def product(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...], constants: str = "b", dtype: str = "float32", followers: bool = True
) -> Case:
    """MatMul, then y = (m + c) * r with c of the last dimension and r of the result's shape."""
    a, b = (rng.standard_normal(shape).astype(dtype) for shape in (a_shape, b_shape))
    exact = np.matmul(a.astype(np.float64), b.astype(np.float64))
    arrays, ops, out, expected = {"a": a, "b": b}, [Op("MatMul", ("a", "b"), ("m",))], "m", exact
    if followers and exact.ndim:
        arrays |= {"c": rng.standard_normal(exact.shape[-1]).astype(dtype), "r": rng.standard_normal(exact.shape).astype(dtype)}
        ops += [Op("Add", ("m", "c"), ("s",)), Op("Mul", ("s", "r"), ("y",))]
        out, expected = "y", (exact + arrays["c"].astype(np.float64)) * arrays["r"].astype(np.float64)
    kind = type_of(exact.astype(dtype))
    types = {name: type_of(array) for name, array in arrays.items()} | dict.fromkeys(("m", "s", "y"), kind)
    group = Group(tuple(ops), tuple(arrays), (out,), types, frozenset(constants) & arrays.keys())
    unit = {"float64": 1e-13, "float32": 2e-5, "float16": 4e-2, "bfloat16": 3e-1}.get(dtype, 0.0)
    unit *= max(1.0, a.shape[-1] ** 0.5 / 8)  # the rounding of a sum grows with its length
    label = f"{a_shape} x {b_shape} constant {constants!r} {dtype}"
    return Case(group, arrays, [expected.astype(np.float64)], unit / 10, unit, label, "matmul")


def gemm(m: int, n: int, k: int, constants: str, c_shape: tuple[int, ...] | None, **attributes: float) -> Case:
    a = rng.standard_normal((k, m) if attributes.get("transA") else (m, k)).astype(np.float32)
    b = rng.standard_normal((n, k) if attributes.get("transB") else (k, n)).astype(np.float32)
    exact = (a.T if attributes.get("transA") else a).astype(np.float64) @ (b.T if attributes.get("transB") else b)
    exact *= attributes.get("alpha", 1.0)
    arrays = {"a": a, "b": b}
    if c_shape is not None:
        arrays["c"] = rng.standard_normal(c_shape).astype(np.float32)
        exact = exact + attributes.get("beta", 1.0) * arrays["c"]
    types = {name: type_of(array) for name, array in arrays.items()} | {"y": type_of(exact.astype(np.float32))}
    group = Group((Op("Gemm", tuple(arrays), ("y",), attributes),), tuple(arrays), ("y",), types, frozenset(constants))
    return Case(group, arrays, [exact], 2e-6, 2e-5, f"Gemm {m}x{n}x{k} {attributes} constant {constants!r}", "matmul")


def read_twice(op_type: str = "MatMul", dtype: str = "float32", operands: str = "xw", template: str = "matmul") -> Case:
    """x w + w, or w x + w, of a constant w."""
    arrays = {name: rng.standard_normal((40, 40)).astype(dtype) for name in "xw"}
    a, b = tuple(operands)
    ops: tuple[Op, ...] = (Op("Gemm", (a, b, "w"), ("y",)),)
    if op_type == "MatMul":
        ops = (Op("MatMul", (a, b), ("m",)), Op("Add", ("m", "w"), ("y",)))
    expected = arrays[a].astype(np.float64) @ arrays[b].astype(np.float64) + arrays["w"].astype(np.float64)
    group = Group(ops, ("x", "w"), ("y",), dict.fromkeys("xwmy", type_of(arrays["x"])), frozenset("w"))
    unit = {"float32": 2e-5, "bfloat16": 1e-1}[dtype]
    return Case(group, arrays, [expected], unit, unit, f"{op_type} {operands} and w {dtype}", template)


@pytest.mark.parametrize("level", LEVELS)
def test_integers_times_fractions(level: str) -> None:
    """As ONNX's reference: in floating point, and then cut off."""
    a, b, c = (rng.integers(-50, 50, shape) for shape in ((5, 9), (9, 20), (20,)))
    cases = []
    for dtype, alpha, beta in (("int32", 0.5, 1.0), ("int64", 1.0, 0.75), ("int32", 1.5, -0.25), ("int32", 2.0, 3.0)):
        exact = np.trunc((a @ b) * alpha + c * beta).astype(dtype)
        arrays = {"a": a.astype(dtype), "b": b.astype(dtype), "c": c.astype(dtype)}
        types = {name: type_of(array) for name, array in arrays.items()} | {"y": type_of(exact)}
        op = Op("Gemm", ("a", "b", "c"), ("y",), {"alpha": alpha, "beta": beta}, 13)
        group = Group((op,), tuple(arrays), ("y",), types, frozenset("b"))
        cases.append(Case(group, arrays, [exact], label=f"{dtype} {alpha} {beta}", template="matmul"))
    check(cases, target_of(level))


def test_integers_wrap_around_times_factors_that_their_type_lacks() -> None:
    a, b, c = (rng.integers(0, 50, shape) for shape in ((5, 9), (9, 20), (20,)))
    cases = []
    for dtype, alpha, beta in (("uint32", -1.0, 1.0), ("uint64", 3.0, -2.0), ("int32", 3e9, 1.0), ("int64", 2.0, 2.0**70)):
        exact = ((a @ b).astype(object) * int(alpha) + c.astype(object) * int(beta)) % (1 << 64)
        arrays = {"a": a.astype(dtype), "b": b.astype(dtype), "c": c.astype(dtype)}
        expected = exact.astype("uint64").astype(dtype)
        types = {name: type_of(array) for name, array in arrays.items()} | {"y": type_of(expected)}
        op = Op("Gemm", ("a", "b", "c"), ("y",), {"alpha": alpha, "beta": beta}, 13)
        group = Group((op,), tuple(arrays), ("y",), types, frozenset("b"))
        cases.append(Case(group, arrays, [expected], label=f"{dtype} {alpha} {beta}", template="matmul"))
    check(cases, target_of("avx2"))


def products() -> list[Case]:
    return [
        product((1, 7), (7, 1)),
        product((5, 3), (3, 17)),
        product((13, 77), (77, 50)),
        product((1, 65), (65, 130)),
        product((33, 129), (129, 100)),
        product((29, 129), (129, 100)),
        product((33, 29), (29, 100), ""),
        product((6, 9), (9, 5), ""),
        product((17, 31), (31, 40), "a"),
        product((2, 3, 19, 8), (8, 21)),
        product((2, 3, 19, 8), (8, 21), ""),
        product((4, 3, 5), (4, 5, 18), "b"),
        product((2, 1, 7, 5), (3, 5, 19), ""),
        product((3, 5), (2, 5, 33), ""),
        product((3, 5), (2, 5, 33), "b"),
        product((5,), (5, 40)),
        product((2, 4, 5), (5,)),
        product((2, 3, 4, 5), (3, 5, 1), ""),
        product((5,), (5,), followers=False),
        product((0, 5), (5, 7)),
        product((3, 0), (0, 20)),
        product((13, 21), (21, 30), dtype="float64"),
        product((5, 40), (40, 37), dtype="float16"),
        product((4, 33), (33, 19), "", dtype=np.dtype(ml_dtypes.bfloat16).name),
        product((5, 9), (9, 20), "b", "int32"),
        product((5, 9), (9, 20), "", "int64"),
    ]


def crowded_rows() -> list[Case]:
    """Rows whose neighbouring elements fall into one set of the first cache, if there are many: they are copied."""
    cases = [
        product((67, 1024), (1024, 70)),
        product((2, 3, 64, 1023), (3, 1023, 65)),
        product((64, 1024), (1024, 64), ""),
        product((65, 512), (512, 66), dtype="float64"),
        product((63, 1024), (1024, 70)),
    ]
    return [replace(case, rtol=2e-5, atol=5e-4) for case in cases]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_rows_that_share_sets_of_the_cache(level: str, threads: int) -> None:
    check_in_turn(crowded_rows(), level, threads=threads)


def test_a_copy_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than that are read where they lie."""
    sizes = []
    for most in (67 * 4096, 67 * 4096 - 1):
        monkeypatch.setattr(matmul, "_SPREAD_BYTES", most)
        built = emitted(matmul.plan, product((67, 1024), (1024, 70)).group, target_of("avx512"))
        assert isinstance(built, BuiltKernel)
        sizes.append(built.workspace_bytes)
    assert sizes[0] >= 67 * 4096
    assert not sizes[1]


def test_rows_share_sets_of_the_first_cache() -> None:
    """Where fourteen of them lie within a line of each other, multiples of 4 KiB apart."""
    assert [size for size in range(4, 12300, 4) if share_sets(size, ZEN5)] == [
        near + at for near in (4096, 8192, 12288) for at in (-4, 0, 4)
    ]


def gemms() -> list[Case]:
    return [
        gemm(7, 33, 20, "b", (33,), transB=1),
        gemm(7, 33, 20, "b", (7, 1), transB=1, alpha=0.5, beta=2.0),
        gemm(9, 21, 5, "", (21,), transA=1),
        gemm(9, 21, 5, "", (), transA=1, transB=1),
        gemm(18, 40, 5, "a", (18, 40), transA=1, beta=0.0),
        gemm(18, 40, 5, "a", (1, 40)),
        gemm(3, 4, 5, "b", None),
    ]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cases", [products, gemms])
def test_matrix_products(cases: object, level: str) -> None:
    assert callable(cases)
    check_in_turn(cases(), level)


def test_two_runs_are_bitwise_equal_and_threads_do_not_change_the_result() -> None:
    first, second = product((130, 200), (200, 333)), None
    second = Case(first.group, first.arrays, first.expected, label=first.label)
    third = Case(first.group, first.arrays, first.expected, label=first.label)
    level = "avx2"
    check([first], target_of(level, threads=1))
    check_equal = target_of(level, threads=2)
    for again in (second, third):
        again.rtol, again.atol = first.rtol, first.atol
        check([again], check_equal)
        np.testing.assert_array_equal(again.got[0], first.got[0])


def along_k() -> list[Case]:
    """By a B that is no constant and lies along k, which is turned by squares where it is no smaller than A."""
    smaller = gemm(90, 21, 37, "", None, transB=1)
    sizes = [(1, 16, 8), (5, 70, 50), (9, 33, 16), (40, 40, 133), (5, 70, 3)]
    typed = []
    for dtype in ("float64", "int32", "float16"):
        one = gemm(5, 70, 37, "", None, transB=1)
        a, b = (np.rint(one.arrays[name] * 9).astype(dtype) for name in "ab")
        types = {"a": type_of(a), "b": type_of(b), "y": type_of(a @ b.T)}
        exact = a.astype(np.float64) @ b.T.astype(np.float64)
        typed.append(replace(one, group=replace(one.group, types=types), arrays={"a": a, "b": b}, expected=[exact], rtol=1e-3))
    return [smaller, *(gemm(m, n, k, "", (n,), transB=1, alpha=0.5) for m, n, k in sizes), *typed]


@pytest.mark.parametrize("level", LEVELS)
def test_a_computed_right_operand_along_k(level: str) -> None:
    check_in_turn(along_k(), level)


@pytest.mark.parametrize(("configuration", "rows"), [({}, 3), ({"split": "m"}, 90), ({"order": "m n", "split": "m"}, 40)])
def test_panels_of_a_thread_are_made_once(configuration: dict[str, str], rows: int) -> None:
    """All rows meet a panel before the next one is made, whatever is asked for."""
    case = gemm(rows, 200, 50, "", None, transB=1)
    case.group = replace(case.group, configuration=configuration)
    kernel = emitted(matmul.plan, case.group, target_of("avx2", threads=2))
    assert isinstance(kernel, BuiltKernel)
    assert kernel.workspace_bytes < 200 * 50 * 4
    check([case], target_of("avx2", threads=2))


def test_a_right_operand_along_k_of_sizes_that_a_call_decides() -> None:
    target, domain = target_of("avx2"), Domain((Dim("N", 8, 90), Dim("K", 8, 70)), {"N": 64, "K": 32})
    sizes = [(64, 32), (8, 8), (33, 9), (90, 70), (50, 15)]
    points = {i: (gemm(7, n, k, "", None, transB=1), {"N": n, "K": k}) for i, (n, k) in enumerate(sizes)}
    kernel = built_for(sized(points[0][0], {"a": (7, "K"), "b": ("N", "K"), "y": (7, "N")}, domain), target)
    run_at(kernel, target, domain, points)


@pytest.mark.parametrize("level", LEVELS)
def test_several_results_leave_the_tile(level: str) -> None:
    cases = [case for make in (products, gemms) for case in make()[::3]]
    floats = [case for case in cases if case.group.types[case.group.outputs[0]].dtype == "float32"]
    assert floats
    check_in_turn([followed(case, keep_result=True) for case in floats], level)


@pytest.mark.parametrize(("rows", "constants", "asks"), [(2, "b", False), (3, "b", True), (3, "", False)])
def test_weights_are_asked_for_ahead_where_several_rows_use_them(rows: int, constants: str, asks: bool) -> None:
    kernel = emitted(matmul.plan, product((rows, 64), (64, 128), constants).group, target_of("avx512"))
    assert isinstance(kernel, BuiltKernel)
    assert ("prefetch" in kernel.function.script()) == asks


@pytest.mark.parametrize(
    ("m", "rows", "last"), [(128, 13, 11), (128, 8, 8), (129, 13, 13), (130, 13, 13), (1000, 14, 14), (27, 14, 13), (5, 5, 5)]
)
def test_the_last_tile_of_rows_is_shorter_where_that_saves_a_hundredth(m: int, rows: int, last: int) -> None:
    assert last_rows(m, rows) == last


@pytest.mark.parametrize("order", ["n m", "m n"])
@pytest.mark.parametrize("split", ["n", "m"])
def test_a_shorter_last_tile_of_rows_in_every_order(order: str, split: str) -> None:
    case = product((35, 200), (200, 100))
    case.group = replace(case.group, configuration={"tile": "13x2", "order": order, "split": split})
    kernel = emitted(matmul.plan, case.group, target_of("avx512", threads=2))
    assert isinstance(kernel, BuiltKernel)
    assert {"tile": "13x2", "order": order, "split": split}.items() <= {c.name: c.taken for c in kernel.choices}.items()
    check([case], target_of("avx512", threads=2))


def test_panels_beyond_the_first_cache_have_tiles_of_many_rows() -> None:
    """Each of a panel's vectors is loaded by every tile: 4x6 of 128 rows took 10% longer than 8x3, that 1% longer than 13x2."""
    near, far = (choose_tile(128, 768, depth, ZEN5, shifted_loads=False, b_padded=True, streams_b=True) for depth in (64, 768))
    assert (near.rows, near.vectors) == (4, 6)
    assert (far.rows, far.vectors) == (13, 2)


def test_tiles_have_fewer_rows_where_these_share_a_set_of_the_cache() -> None:
    """512x1024x512 took 2.44 ms by 14x2, whose rows lie 4 KiB apart, and 2.32 by 12x2."""
    tiles = [
        choose_tile(512, 512, 1024, ZEN5, shifted_loads=False, b_padded=True, streams_b=True, row_bytes=apart)
        for apart in (4000, 4096)
    ]
    assert [(tile.rows, tile.vectors) for tile in tiles] == [(14, 2), (12, 2)]


@pytest.mark.parametrize("level", [*LEVELS, "avx512bf16"])
def test_a_constant_that_the_epilogue_reads_too(level: str) -> None:
    """The product reads it packed, what follows as it lies."""
    check([read_twice(), read_twice("Gemm"), read_twice(operands="wx"), read_twice(dtype="bfloat16")], target_of(level))
