"""Matrix products of bfloat16 by pairs, against float64 on the very numbers: only the additions round."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from prefuse.kernels.formats.bfloat16 import multiplies_words
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

from ..harness import Case, check_in_turn, run, target_of, type_of

LEVELS = ("avx2", "avx512", "avx512bf16")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
rng = np.random.default_rng(7)


def product(
    a_shape: tuple[int, ...],
    b_shape: tuple[int, ...],
    constants: str = "b",
    narrow: str = "ab",
    dtype: np.dtype = BFLOAT16,
    template: str = "matmul",
    stored: str = "float32",
    **attributes: int,
) -> Case:
    """MatMul, or Gemm where it has attributes, of Casts to float32; then y = (m + c) * r, in the end as `stored`.

    The operands in `narrow` are stored as `dtype`. The group is what place-casts and fuse-epilogue make.
    """
    wide = {"a": rng.standard_normal(a_shape).astype(np.float32), "b": rng.standard_normal(b_shape).astype(np.float32)}
    arrays = {name: array.astype(dtype) if name in narrow else array for name, array in wide.items()}
    a, b = (arrays[name].astype(np.float64) for name in "ab")
    exact = np.matmul(a.T if attributes.get("transA") else a, b.T if attributes.get("transB") else b)
    casts = tuple(Op("Cast", (name,), (f".{name}",), {"to": 1}) for name in narrow)
    read = tuple(f".{name}" if name in narrow else name for name in "ab")
    arrays |= {
        "c": rng.standard_normal(exact.shape[-1:]).astype(np.float32),
        "r": rng.standard_normal(exact.shape).astype(np.float32),
    }
    expected = (exact + arrays["c"].astype(np.float64)) * arrays["r"]
    ops = [*casts, Op("Gemm" if attributes else "MatMul", read, ("m",), attributes), Op("Add", ("m", "c"), ("s",))]
    ops += [Op("Mul", ("s", "r"), ("y",)), *([Op("Cast", ("y",), ("z",))] if stored != "float32" else [])]
    kind = TensorType(exact.shape, "float32")
    types = {name: type_of(array) for name, array in arrays.items()} | dict.fromkeys(("m", "s", "y"), kind)
    types |= {f".{name}": TensorType(types[name].shape, "float32") for name in narrow} | {"z": replace(kind, dtype=stored)}
    group = Group(tuple(ops), tuple(arrays), tuple(ops[-1].outputs), types, frozenset(constants))
    label = f"{a_shape} x {b_shape} constant {constants!r} narrow {narrow!r} {attributes}"
    unit = 3e-6 if stored == "float32" else 8e-3
    return Case(group, arrays, [expected], unit, unit * np.sqrt(a_shape[-1]), label, template)


@pytest.mark.parametrize("level", LEVELS)
def test_kernels_tell_which_of_them_multiply_pairs(level: str) -> None:
    """By an instruction of their own, which has another limit than multiply-adds of float32."""
    for narrow in ("ab", "b"):
        kernel = build_kernel(product((16, 64), (64, 32), narrow=narrow).group, Target("cpu", level, 1))
        assert isinstance(kernel, BuiltKernel)
        assert multiplies_words(kernel.function) == (level == "avx512bf16" and narrow == "ab")


def products() -> list[Case]:
    return [
        product((1, 8), (8, 1)),
        product((5, 2), (2, 17)),
        product((13, 78), (78, 50)),
        product((33, 130), (130, 100)),
        product((29, 130), (130, 100)),
        product((64, 64), (64, 128)),
        product((33, 30), (30, 100), ""),
        product((6, 8), (8, 5), ""),
        product((2, 3, 19, 8), (8, 21)),
        product((2, 3, 19, 8), (8, 21), ""),
        product((4, 3, 6), (4, 6, 18), "b"),
        product((2, 1, 7, 6), (3, 6, 19), ""),
        product((3, 6), (2, 6, 33), ""),
        product((6, 8), (8, 40), "ab"),
        product((0, 6), (6, 7)),
        product((9, 20), (33, 20), transB=1),
        product((5, 40), (40, 37), stored="bfloat16"),
        product((1, 64), (64, 130), narrow="b"),
        product((7, 30), (30, 19), narrow="b"),
        product((5, 7), (7, 17)),
        product((1, 1), (1, 3)),
        product((67, 131), (131, 70)),
        product((2, 3, 19, 33), (33, 21), stored="bfloat16"),
        product((3, 9, 63), (3, 63, 18)),
        product((9, 21), (33, 21), transB=1),
        product((7, 31), (31, 19), narrow="b"),
        product((0, 7), (7, 17)),
        *crowded_rows(),
    ]


def crowded_rows() -> list[Case]:
    """Rows that share sets of the first cache, which are copied. Their sums are long, and so are their errors."""
    cases = [product((66, 2048), (2048, 65)), product((66, 1024), (1024, 65), narrow="b")]
    return [replace(case, rtol=2e-5, atol=1e-3) for case in cases]


def unpaired() -> list[Case]:
    """What has no pairs, and float16, of which no instruction makes products."""
    return [
        product((5, 7), (7, 17), "", template="matmul"),
        product((20, 9), (20, 33), template="matmul", transA=1),
        product((9, 20), (33, 20), "", template="matmul", transB=1),
        product((9, 20), (20, 33), narrow="a", template="matmul"),
        product((9, 20), (20, 33), "", narrow="b", template="matmul"),
        product((13, 77), (77, 50), dtype=np.dtype(np.float16), template="matmul"),
        product((13, 77), (77, 50), dtype=np.dtype(np.float16), template="matmul", stored="float16"),
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_products_of_pairs(level: str) -> None:
    check_in_turn(products(), level, LEVELS)


@pytest.mark.parametrize("level", LEVELS)
def test_products_without_pairs(level: str) -> None:
    check_in_turn(unpaired(), level, LEVELS)


@pytest.mark.parametrize("level", LEVELS)
def test_threads_do_not_change_the_result(level: str) -> None:
    case = product((130, 200), (200, 333))
    results = []
    for threads in (1, 2, 2):
        run([case], target_of(level, threads))
        results.append(case.got[0])
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[1], results[2])


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_of_nan_stays_in_its_row(level: str) -> None:
    case = product((7, 6), (6, 21))
    case.arrays["a"][3, 5] = np.nan
    run([case], target_of(level))
    expected = np.zeros((7, 21), bool)
    expected[3] = True
    np.testing.assert_array_equal(np.isnan(case.got[0]), expected)


@pytest.mark.parametrize("shares", [False, True])
def test_pairs_of_one_row_are_asked_for_ahead_where_they_are_widened(shares: bool) -> None:
    """Five instructions a cache line leave a core too few lines in flight. Of shared weights a tile reads several panels."""
    group = replace(product((1, 768), (768, 4096), narrow="b").group, precision="bfloat16", shares_weights=shares)
    built = build_kernel(group, Target.parse("cpu:avx512bf16,threads=2,machine=sapphire-rapids"))
    assert isinstance(built, BuiltKernel)
    assert built.template == "matmul"
    assert "k_pack=2" in str(built.operands)
    assert built.function.script().count("prefetch") == 8  # 128 columns of pairs
