"""Strassen's products: the tables exactly, the kernel against float64, and where it is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import prefuse
import pytest
from prefuse.compiler.debugging.oracle import relative_error
from prefuse.kernels.cost.product import product_estimate
from prefuse.kernels.cost.strassen import STRASSEN_LEVELS, strassen_choices
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.linalg import strassen_product
from prefuse.kernels.linalg.strassen_tables import Bilinear, PackBilinear, nest, strassen
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.hardware.machine import row
from prefuse.runtime.plan import TensorType

from ..harness import LEVELS, Case, check, check_in_turn, run, target_of, type_of

ZEN5 = row("zen5", 16)  # that what stands here was measured on

_RELATIVE = 3e-6  # of the largest element of the result


def multiplied(
    a_shape: tuple[int, ...], columns: int, *, scale: float = 1.0, constants: str = "b", dtype: str = "float32", **attributes: int
) -> Case:
    """MatMul, or Gemm where it has attributes, and y = (m + c) * r, for precision float32-fast.

    With `scale` some rows and columns are so many times larger than others.
    """
    generator = np.random.default_rng(columns)
    depth = a_shape[0 if attributes.get("transA") else -1]
    a, b = (generator.standard_normal(s) for s in (a_shape, (columns, depth) if attributes.get("transB") else (depth, columns)))
    a[..., ::3, :] *= scale
    arrays = {"a": a.astype(dtype), "b": b.astype(dtype)}
    a, b = (arrays[name].astype(np.float64) for name in "ab")
    exact = np.matmul(a.T if attributes.get("transA") else a, b.T if attributes.get("transB") else b)
    arrays |= {"c": generator.standard_normal(columns).astype(dtype), "r": generator.standard_normal(exact.shape).astype(dtype)}
    expected = (exact + arrays["c"].astype(np.float64)) * arrays["r"]
    ops = (Op("Gemm" if attributes else "MatMul", ("a", "b"), ("m",), attributes), Op("Add", ("m", "c"), ("s",)))
    types = {name: type_of(array) for name, array in arrays.items()}
    types |= dict.fromkeys(("m", "s", "y"), TensorType(exact.shape, dtype))
    group = Group((*ops, Op("Mul", ("s", "r"), ("y",))), tuple(arrays), ("y",), types, frozenset(constants))
    label = f"{a_shape} x {columns} {attributes}"
    return Case(
        replace(group, precision="float32-fast"), arrays, [expected], 0.0, _RELATIVE * np.abs(expected).max(initial=0), label
    )


def forced(case: Case, levels: int, **configuration: str) -> Case:
    """With so many levels, whatever it costs."""
    configuration |= {"template": "strassen_matmul", "levels": str(levels)}
    return replace(case, group=replace(case.group, configuration=configuration), template="strassen_matmul")


def tensor(one: Bilinear) -> np.ndarray:
    """What an algorithm adds to each block of the result for each pair of blocks of A and B."""
    return np.asarray(np.einsum("pa,pb,pc->abc", one.left, one.right, one.result))


_HALVES = Bilinear(1, 2, 1, ((1, 0), (0, 1)), ((1, 0), (0, 1)), ((1,), (1,)))  # a sum in two parts


@pytest.mark.parametrize(
    ("one", "products"),
    [(strassen(1), 7), (strassen(2), 49), (nest(strassen(1), _HALVES), 14), (nest(_HALVES, strassen(1)), 14)],
)
def test_tables_multiply_matrices(one: Bilinear, products: int) -> None:
    """In whole numbers: blocks of A and B add to a block of C where they meet, once, and nowhere else."""
    expected = np.zeros((one.rows, one.depth, one.depth, one.columns, one.rows, one.columns), int)
    for i, j, k in np.ndindex(one.rows, one.depth, one.columns):
        expected[i, j, j, k, i, k] = 1
    np.testing.assert_array_equal(tensor(one), expected.reshape(tensor(one).shape))
    assert one.products == products


def test_weights_are_added_up_as_the_tables_say() -> None:
    array = np.random.default_rng(0).standard_normal((9, 37)).astype(np.float32)
    one, filled = strassen(1), np.zeros((10, 48))
    filled[:9, :24], filled[:9, 24:37] = array[:, :24], array[:, 24:]
    blocks = filled.reshape(2, 5, 2, 24).swapaxes(1, 2).reshape(4, 5, 24)
    sums = np.einsum("pb,bkn->pkn", one.right, blocks)
    expected = np.pad(sums, ((0, 0), (0, 0), (0, 8))).reshape(7, 5, 2, 16).transpose(2, 0, 1, 3)
    for pack, matrix in (
        (PackBilinear(one, 9, 37, True, (5, 24), 16), array),
        (PackBilinear(one, 9, 37, False, (5, 24), 16), np.ascontiguousarray(array.T)),
    ):
        packed = pack(matrix)
        np.testing.assert_array_equal(packed, expected.astype(np.float32))
        assert pack.packed_type(TensorType(matrix.shape, "float32")) == TensorType(packed.shape, "float32")


@pytest.mark.parametrize("number", [np.inf, np.nan, 3e38])
def test_odd_weights_are_packed_without_a_warning(number: float) -> None:
    array = np.ones((8, 64), np.float32)
    array[1, 2], array[5, 34] = number, number
    array[5, 2] = -number
    packed = PackBilinear(strassen(1), 8, 64, True, (4, 32), 16)(array)
    assert not np.isfinite(packed[0, :, 1, 2]).all()
    assert np.isfinite(packed[..., 3]).all()


def test_an_infinity_spoils_its_place_in_all_blocks_alone() -> None:
    """Rows and columns that lie there in other blocks may become NaN, all others keep their numbers (docs/semantics.md)."""
    for levels, blocks in ((1, 2), (2, 4)):
        plain = forced(multiplied((24, 32), 64), levels)
        odd = {name: array.copy() for name, array in plain.arrays.items()}
        odd["a"][4, 3], odd["b"][2, 5] = np.inf, np.nan
        case = replace(plain, arrays=odd, got=[])
        run([plain, case], target_of("avx2"))
        clean = np.ones((24, 64), bool)
        clean[4 % (24 // blocks) :: 24 // blocks] = False
        clean[:, 5 % (64 // blocks) :: 64 // blocks] = False
        np.testing.assert_array_equal(case.got[0][clean], plain.got[0][clean])
        assert not np.isfinite(case.got[0][4]).any()
        assert not np.isfinite(case.got[0][:, 5]).any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("levels", STRASSEN_LEVELS)
def test_shapes_that_do_not_divide(level: str, levels: int) -> None:
    cases = [
        multiplied((64, 64), 128),
        multiplied((61, 47), 83),
        multiplied((4, 4), 128),
        multiplied((7, 9), 64),
        multiplied((2, 3, 17, 33), 70),
        multiplied((50, 35), 90, transB=1),
        multiplied((33, 4104), 65),  # sums in blocks
        multiplied((40, 40), 96, scale=1e4),
    ]
    check_in_turn([forced(case, levels) for case in cases], level)


def test_what_follows_reads_the_weights_as_they_lie() -> None:
    """Not the sums of blocks that the product reads."""
    plain = multiplied((64, 64), 64)
    ops = (Op("MatMul", ("a", "b"), ("m",)), Op("Add", ("m", "b"), ("y",)))
    group = replace(plain.group, ops=ops, inputs=("a", "b"))
    a, b = (plain.arrays[name] for name in "ab")
    expected = a.astype(np.float64) @ b + b
    case = replace(plain, group=group, arrays={"a": a, "b": b}, expected=[expected])
    check([forced(case, 1)], target_of("avx2"))


def test_parts_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are more than the second cache holds are multiplied by a panel part by part."""
    target = target_of("avx2", 3)
    monkeypatch.setattr(strassen_product, "_NEAR_SHARE", 4 * 7 * 16 * 12 / target.machine.l2.size_bytes)
    cases = [forced(multiplied((rows, 40), 70), 1, tile="6x2") for rows in (97, 140)]
    check(cases, target)


def test_threads_and_runs_make_the_same_bits() -> None:
    cases = [forced(multiplied((61, 47), 183), 2) for _ in range(3)]
    for case, threads in zip(cases, (1, 2, 2), strict=True):
        run([case], target_of("avx2", threads))
    assert len({case.got[0].tobytes() for case in cases}) == 1


@pytest.mark.parametrize("depth", [768, 3072, 4096])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_errors_are_far_below_what_is_promised(depth: int, scale: float) -> None:
    for levels in STRASSEN_LEVELS:
        case = forced(multiplied((16, depth), 64, scale=scale), levels)
        run([case], target_of("avx2"))
        assert relative_error(case.got[0], case.expected[0]) < 4e-6


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (multiplied((16, 768), 768), "would take"),
        (multiplied((1, 768), 768), "too small"),
        (multiplied((256, 8), 768), "would take"),
        (multiplied((0, 768), 768), "too small"),
        (multiplied((256, 768), 768, constants="a"), "not of activations by constant weights"),
        (multiplied((256, 768), 768, constants="ab"), "not of activations by constant weights"),
        (multiplied((256, 768), 768, transA=1), "row after row"),
        (multiplied((256, 768), 768, dtype="float64"), "no fewer multiplications of float64"),
    ],
)
def test_refusals(case: Case, reason: str) -> None:
    assert reason in refusal(case)


def test_a_precision_that_forbids_it_is_named() -> None:
    case = multiplied((256, 768), 768)
    assert "which precision float32 does not allow" in refusal(replace(case, group=replace(case.group, precision="float32")))


def refusal(case: Case) -> str:
    built = build_kernel(case.group, target_of("avx2"))
    assert isinstance(built, BuiltKernel)
    assert built.template == "matmul"
    (reason,) = (reason for template, reason in built.refused if template == "strassen_matmul")
    return reason


def test_sums_that_would_take_too_much_memory_are_not_made() -> None:
    """Nor those that 32-bit indices do not reach: a quarter of a million tokens, whose weights two levels make three times."""
    by_rows = [[one.levels for one in strassen_choices(rows, 4096, 4096, ZEN5)] for rows in (4096, 8192, 1 << 15)]
    assert by_rows == [[1, 2], [1], []]
    by_columns = [[one.levels for one in strassen_choices(128, columns, 4096, ZEN5)] for columns in (32_000, 128_256, 256_000)]
    assert by_columns == [[2, 1], [1], []]


def test_levels_are_chosen_by_their_cost() -> None:
    """Few rows make too little of the larger weights; many rows of sums of two levels leave the second cache."""
    sizes = [(rows, 3072, 768, ZEN5) for rows in (16, 64, 128, 512)]
    best = [strassen_choices(*size)[0] for size in sizes]
    made = [(choice.estimate, product_estimate(*size)) for choice, size in zip(best, sizes, strict=True)]
    gains = [strassen.wall_cycles(ZEN5) / plain.wall_cycles(ZEN5) for strassen, plain in made]
    assert gains[0] > 1 > gains[1] > gains[2]
    assert [choice.levels for choice in best] == [1, 1, 2, 1]


@pytest.mark.parametrize(
    ("size", "is_taken"),
    [
        ((196, 1024, 256), True),
        ((784, 1024, 256), False),  # the same product where sums leave the second cache
        ((784, 2304, 768), True),
        ((784, 512, 128), False),
        ((49, 2048, 512), True),  # 0.95 of the time on one core of Zen 5, 0.92 on Zen 3
        ((16, 3072, 768), False),  # whose weights take longer than its multiplications
    ],
)
def test_sums_pay_where_the_sizes_of_weights_are_large_and_those_of_rows_are_not(
    size: tuple[int, int, int], is_taken: bool
) -> None:
    strassen, plain = strassen_choices(*size, ZEN5)[0].estimate, product_estimate(*size, ZEN5)
    assert (strassen.wall_cycles(ZEN5) < plain.wall_cycles(ZEN5)) == is_taken


def test_programs_take_it_where_the_user_allows_it() -> None:
    generator = np.random.default_rng(0)
    weights, rows = (generator.standard_normal(shape).astype(np.float32) for shape in ((768, 768), (256, 768)))
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    shape = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, rows.shape)
    constant = onnx.numpy_helper.from_array(weights, "w")
    graph = onnx.helper.make_graph([node], "one", [shape], [onnx.helper.make_empty_tensor_value_info("y")], [constant])
    for precision, is_taken in (("float32", False), ("float32-fast", True)):
        net = prefuse.compile(onnx.helper.make_model(graph), target="cpu:avx2", cache=False, precision=precision)
        assert ("strassen_matmul" in str(net.report())) == is_taken
        assert relative_error(np.asarray(net(rows)), rows.astype(np.float64) @ weights) < 3e-6
