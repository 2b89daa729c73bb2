"""Attention in one kernel: views around it, masks, masked rows, types, blocks and threads; against float64."""

from __future__ import annotations

import numpy as np
import pytest
from prefuse.kernels import registry
from prefuse.kernels.attention import attention
from prefuse.kernels.attention.operands import Elements
from prefuse.kernels.attention.pattern import Attention, attention_of
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.microkernels.packed_gemm import tiles_options
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel, Refusal
from prefuse.kernels.template.kernel import new_builder
from prefuse.runtime.hardware.machine import Machine, gpu_thread, row
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

from ..harness import LEVELS, Case, check, check_in_turn, emitted, run, target_of
from .attention_cases import (
    Tape,
    attend,
    chosen,
    flat_heads,
    grouped_queries,
    guarded,
    guarded_by,
    halved_and_guarded,
    masked,
    one_matrix,
    packed_projections,
    plain,
    replaced,
    scaled,
    scaled_keys,
    shared_keys,
    split_projections,
    turned_values,
)


@pytest.mark.parametrize("level", LEVELS)
def test_sizes_that_divide_no_tile(level: str) -> None:
    sizes = [
        (1, 1, 1, 1, 1, 1),
        (2, 3, 1, 70, 8, 8),
        (1, 2, 2, 33, 20, 45),
        (1, 2, 5, 1, 20, 3),
        (1, 2, 17, 33, 64, 40),
        (2, 1, 33, 17, 20, 64),
        (1, 1, 100, 70, 64, 64),
        (1, 3, 3, 7, 5, 1),
        (1, 2, 8, 37, 20, 24),
        (1, 2, 9, 37, 20, 24),
    ]
    check_in_turn([attend(size) for size in sizes], level)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_heads_and_blocks_are_dealt_to_threads(threads: int) -> None:
    """One head in many blocks, heads that do not divide by the threads: work enough for a parallel loop."""
    check([attend((1, 1, 200, 60, 24, 24)), attend((1, 5, 70, 40, 16, 16))], target_of("avx2", threads))


def test_repeated_runs_and_other_threads_give_the_same_bits() -> None:
    first, again, alone = (attend((1, 3, 130, 65, 20, 24)) for _ in range(3))
    run([first, again], target_of("avx2", 2))
    run([alone], target_of("avx2", 1))
    np.testing.assert_array_equal(first.got[0], again.got[0])
    np.testing.assert_array_equal(first.got[0], alone.got[0])


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_types(dtype: str) -> None:
    mask = np.zeros((1, 1, 17, 21))
    mask[..., 9:] = -1e4
    cases = [attend((1, 2, 17, 21, 20, 12), dtype), attend((2, 1, 17, 21, 8, 8), dtype, masked(mask), guarded)]
    check(cases, target_of("avx2"))


def test_masks_of_every_broadcast_shape() -> None:
    random, cases = np.random.default_rng(3), []
    for shape in [(2, 3, 17, 21), (2, 1, 1, 21), (1, 1, 17, 21), (3, 1, 1), (17, 21), (17, 1), (21,), (1,)]:
        cases.append(attend((2, 3, 17, 21, 8, 8), score_step=masked(random.standard_normal(shape))))
        cases.append(attend((2, 3, 17, 21, 8, 8), score_step=chosen(random.random(shape) < 0.5, -100.0)))
    check(cases, target_of("avx2"))


def test_rows_without_a_key_are_nan_or_what_the_guard_says() -> None:
    keep = np.tril(np.ones((19, 23), bool), -2)
    bare = attend((1, 2, 19, 23, 8, 8), score_step=chosen(keep, -np.inf))
    assert np.isnan(bare.expected[0][:, :2]).all()
    steps = (guarded, guarded_by(0.25), halved_and_guarded)
    check([bare, *(attend((1, 2, 19, 23, 8, 8), "float32", chosen(keep, -np.inf), step) for step in steps)], target_of("avx2"))


def test_what_takes_the_place_of_probabilities() -> None:
    """No guard, though it looks like one."""
    check([attend((1, 2, queries, 23, 8, 8), weight_step=replaced) for queries in (2, 19)], target_of("avx2"))


def test_more_scores_than_indices_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """They never lie in memory; a view of them counts their places."""
    target, shape = target_of("avx2"), (1, 32, 8192, 64)
    types = {"q": shape, "k": (1, 32, 64, 8192), "v": shape, "y": shape} | dict.fromkeys("sp", (1, 32, 8192, 8192))
    ops = (Op("MatMul", ("q", "k"), ("s",)), Op("Softmax", ("s",), ("p",), {"axis": -1}, 23), Op("MatMul", ("p", "v"), ("y",)))
    prefill = Group(ops, ("q", "k", "v"), ("y",), {name: TensorType(one, "float32") for name, one in types.items()})
    assert isinstance(build_kernel(prefill, target), BuiltKernel)
    assert isinstance(build_kernel(prefill, Target("cuda", "sm_90")), BuiltKernel)
    monkeypatch.setattr(registry, "_MAX_ELEMENTS", 1000)
    check([attend((1, 2, 30, 40, 8, 8))], target)
    monkeypatch.setattr(registry, "_MAX_ELEMENTS", 450)
    refused = build_kernel(flat_heads().group, target)
    assert isinstance(refused, tuple)
    assert "32-bit indices" in refused[0][1]


def test_nan_and_infinities_stay_in_their_row() -> None:
    bias = np.zeros((1, 1, 9, 12))
    bias[0, 0, 2, 3], bias[0, 0, 4, 5], bias[0, 0, 6, 7] = np.nan, np.inf, -np.inf
    case = attend((1, 2, 9, 12, 8, 8), score_step=masked(bias))
    assert np.isnan(case.expected[0]).any(axis=(0, 2)).nonzero()[0].tolist() == [2, 4]
    check([case], target_of("avx2"))


@pytest.fixture
def few_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache so small that keys come in blocks of a vector or two."""
    monkeypatch.setattr(attention, "_CACHE_SHARE", 1 / 256)


def lopsided(rows: int, keys: int) -> np.ndarray:
    """A mask with rows that see nothing in the first blocks, in the last, in any; rows whose scores grow and shrink; a NaN."""
    mask = np.zeros((1, 1, rows, keys))
    mask[..., 0, : keys // 2], mask[..., 1, keys // 3 :], mask[..., 2, :] = -np.inf, -np.inf, -np.inf
    mask[..., 3, :], mask[..., 4, :] = np.linspace(-80, 80, keys), np.linspace(80, -80, keys)
    mask[..., 5, keys - 1], mask[..., 6, keys // 2] = np.nan, np.inf
    return mask


@pytest.mark.usefixtures("few_keys_at_once")
@pytest.mark.parametrize("level", LEVELS)
def test_keys_in_blocks(level: str) -> None:
    cases = [attend((1, 2, 33, keys, 20, 24), score_step=masked(lopsided(33, keys))) for keys in (64, 70, 97)]
    cases += [attend((2, 1, 60, 65, 8, 8)), attend((1, 1, 9, 70, 8, 8), "float64"), attend((1, 1, 9, 70, 8, 8), "float16")]
    check_in_turn([*cases, attend((1, 1, 9, 70, 8, 8), weight_step=guarded)], level)


@pytest.mark.usefixtures("few_keys_at_once")
def test_blocks_of_keys_and_runs_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread keeps results of so many queries only; threads change no bit."""
    monkeypatch.setattr(attention, "_RUNNING_ROWS", 64)
    alone, dealt = (attend((1, 2, 150, 70, 16, 16)) for _ in range(2))
    check([alone], target_of("avx2", 1))
    check([dealt], target_of("avx2", 2))
    np.testing.assert_array_equal(alone.got[0], dealt.got[0])


def test_large_scores_do_not_overflow() -> None:
    check([attend((1, 1, 5, 40, 16, 16), score_step=scaled(200.0))], target_of("avx2"))


@pytest.mark.parametrize("level", LEVELS)
def test_views_and_operators_around(level: str) -> None:
    cases = [packed_projections(), split_projections(), grouped_queries(7), flat_heads(), one_matrix()]
    check_in_turn([*cases, *(make(queries) for make in (shared_keys, turned_values) for queries in (2, 9))], level)


@pytest.mark.parametrize("level", LEVELS)
def test_few_queries_of_heads_that_share_keys(level: str) -> None:
    """One, two and three queries for each of three heads; a mask for each head; keys that are not the same after all."""
    cases = [grouped_queries(queries) for queries in (1, 2, 3)]
    cases.append(grouped_queries(2, keys=37, depth=32))  # six rows by keys that are transposed
    cases.append(grouped_queries(1, masked(np.random.default_rng(5).standard_normal((2, 6, 1, 11)))))
    check_in_turn([*cases, grouped_queries(2, plain, scaled_keys)], level)


@pytest.mark.parametrize(
    ("case", "most", "shared"),
    [
        (grouped_queries(1), 8, 3),
        (grouped_queries(1), 2, 1),
        (grouped_queries(1, plain, scaled_keys), 8, 1),
        (attend((1, 4, 1, 9, 8, 8)), 8, 1),
        (shared_keys(1), 8, 3),
        (one_matrix(), 8, 1),
    ],
)
def test_heads_that_share_keys(case: Case, most: int, shared: int) -> None:
    form = attention_of(case.group)
    assert isinstance(form, Attention)
    assert Elements(form, new_builder(target_of("avx2"))).shared_heads(most) == shared


@pytest.mark.parametrize(("threads", "shared"), [(1, 8), (2, 4), (4, 2), (8, 1), (64, 1)])
def test_few_heads_that_share_keys_are_tasks_for_all_threads(threads: int, shared: int) -> None:
    """Eight heads on one head of keys, one query: one task was one thread's, however many there are."""
    tape = Tape()
    q, k, v = (tape.input(shape) for shape in ((1, 8, 1, 64), (1, 1, 64, 1024), (1, 1024, 64)))
    group = tape.case(tape.binary("MatMul", tape.softmax(tape.binary("MatMul", q, k)), v), "one head of keys").group
    form, target = attention_of(group), target_of("avx2", threads)
    assert isinstance(form, Attention)
    assert attention._Kernel(form, new_builder(target), target).shared == shared


def test_threads_take_fewer_heads_that_share_keys() -> None:
    """Six heads on one of keys, for two threads three at once, and for six one each."""
    cases = [shared_keys(1), shared_keys(1)]
    for case, threads in zip(cases, (2, 6), strict=True):
        check([case], target_of("avx2", threads))
    assert cases[0].got[0].tobytes() == cases[1].got[0].tobytes()


def test_only_a_block_of_scores_is_ever_in_memory() -> None:
    built = emitted(attention.plan, attend((1, 1, 2000, 100, 16, 16)).group, target_of("avx2", 1))
    assert isinstance(built, BuiltKernel)
    assert built.workspace_bytes < 2000 * 100


@pytest.mark.parametrize("machine", [row("zen3", 8), row("generic", 16), gpu_thread()], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (128, 64, 128), (197, 64, 197), (5, 20, 1000)])
def test_tiles_fit_the_registers_and_are_equally_high(sizes: tuple[int, int, int], machine: Machine) -> None:
    queries, depth, keys = sizes
    options = tiles_options(queries, [(depth, keys), (keys, depth)], machine)
    assert len(options) == min(queries, 14)
    for name, (scores, result) in options.items():
        assert int(name) == scores.rows == result.rows
        for tile in (scores, result):
            assert tile.rows * tile.vectors + tile.vectors < machine.registers


def softmax_across(tape: Tape, x: str) -> str:
    return tape.transpose(scaled(1.0)(tape, x), 0, 1, 3, 2)


def with_row_sum(tape: Tape, x: str) -> str:
    """Adds the diagonal's neighbour: a value that meets itself at another place."""
    return tape.binary("Add", x, tape.transpose(x, 0, 1, 3, 2))


def grown(tape: Tape, x: str) -> str:
    return tape.binary("Add", x, tape.input((2, 2, 9, 9)))


def refused(case: Case, reason: str) -> None:
    result = attention.plan(case.group, Target("cpu", "avx2", 2))
    assert isinstance(result, Refusal)
    assert reason in result.reason


def test_refusals() -> None:
    square = (1, 2, 9, 9, 8, 8)
    refused(attend(square, score_step=softmax_across), "rows of scores do not stay rows")
    refused(attend(square, score_step=with_row_sum), "two places")
    refused(attend(square, score_step=grown), "broadcasts")
    refused(attend((1, 2, 0, 9, 8, 8)), "no elements")
    case = attend(square)
    ops = tuple(Op("Softmax", op.inputs, op.outputs, {"axis": 2}, 23) if op.op_type == "Softmax" else op for op in case.group.ops)
    other = Group(ops, case.group.inputs, case.group.outputs, case.group.types, case.group.constants, case.group.literals)
    refused(Case(other, case.arrays, case.expected), "not along the last dimension")
    more = Group(case.group.ops, case.group.inputs, (ops[-3].outputs[0], *case.group.outputs), case.group.types)
    refused(Case(more, case.arrays, case.expected), "more than the product")


def test_gpus_are_refused() -> None:
    result = attention.plan(attend((1, 2, 9, 9, 8, 8)).group, Target("cuda", "sm_90"))
    assert result == Refusal("is for CPUs")
