"""Attention in one kernel: views around it, masks, masked rows, types, blocks and threads; against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from prefuse.kernels.cpu import attention
from prefuse.kernels.cpu.attention_elements import Elements
from prefuse.kernels.cpu.attention_form import Attention, attention_of
from prefuse.kernels.cpu.common import new_builder
from prefuse.kernels.cpu.panel_product import tiles_options
from prefuse.kernels.group import Group, Op
from prefuse.kernels.template import BuiltKernel, Refusal
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

from .harness import LEVELS, Case, check, run, target_of, type_of

Step = Callable[["Tape", str], str]  # from a value to one that is made of it
TOLERANCE = {"float64": 1e-12, "float32": 3e-6, "float16": 4e-3, "bfloat16": 3e-2}


class Tape:
    """A group that is written operator by operator, each computed at once, floats in float64."""

    def __init__(self, dtype: str = "float32") -> None:
        self.dtype, self.random = dtype, np.random.default_rng(7)
        self.arrays: dict[str, np.ndarray] = {}
        self.literals: dict[str, np.ndarray] = {}
        self.types: dict[str, TensorType] = {}
        self.values: dict[str, np.ndarray] = {}
        self.ops: list[Op] = []

    def input(self, array: np.ndarray | tuple[int, ...]) -> str:
        """An operand: an array of any type but float, or one that is rounded to the group's type; normal numbers of a shape."""
        given = self.random.standard_normal(array) if isinstance(array, tuple) else array
        held = given.astype(self.dtype) if given.dtype.kind == "f" else given
        name = f"x{len(self.arrays)}"
        self.arrays[name], self.types[name] = held, type_of(held)
        self.values[name] = held.astype(np.float64) if given.dtype.kind == "f" else held
        return name

    def literal(self, value: Any) -> str:
        array = np.asarray(value)
        name = self.input(array)
        self.literals[name] = self.arrays[name]
        return name

    def add(self, op_type: str, inputs: list[str], result: np.ndarray, dtype: str = "", **attributes: Any) -> str:
        name = f"t{len(self.values)}"
        self.values[name] = result
        self.types[name] = TensorType(result.shape, dtype or (self.dtype if result.dtype.kind == "f" else str(result.dtype)))
        self.ops.append(Op(op_type, tuple(inputs), (name,), attributes, 23))
        return name

    def transpose(self, name: str, *perm: int) -> str:
        return self.add("Transpose", [name], self.values[name].transpose(perm), perm=perm)

    def reshape(self, name: str, *shape: int) -> str:
        return self.add("Reshape", [name, self.literal(shape)], self.values[name].reshape(shape))

    def binary(self, op_type: str, a: str, b: str) -> str:
        function = {"MatMul": np.matmul, "Mul": np.multiply, "Add": np.add, "Div": np.divide}[op_type]
        return self.add(op_type, [a, b], function(self.values[a], self.values[b]))

    def softmax(self, name: str) -> str:
        with np.errstate(invalid="ignore"):
            grown = np.exp(self.values[name] - self.values[name].max(-1, keepdims=True))
        return self.add("Softmax", [name], grown / grown.sum(-1, keepdims=True), axis=-1)

    def group(self, output: str) -> Group:
        return Group(tuple(self.ops), tuple(self.arrays), (output,), self.types, frozenset(self.literals), self.literals)

    def case(self, output: str, label: str = "") -> Case:
        tolerance = TOLERANCE[self.dtype]
        return Case(self.group(output), self.arrays, [self.values[output]], tolerance, tolerance, label, "attention")


def heads_of(tape: Tape, x: str, heads: int, *order: int) -> str:
    """[batch, tokens, heads * depth] to the order of [batch, tokens, heads, depth] that is asked for."""
    batch, tokens, width = tape.types[x].shape
    return tape.transpose(tape.reshape(x, batch, tokens, heads, width // heads), *order)


def merged(tape: Tape, x: str) -> str:
    """[batch, heads, tokens, depth] to [batch, tokens, heads * depth]."""
    batch, heads, tokens, depth = tape.types[x].shape
    return tape.reshape(tape.transpose(x, 0, 2, 1, 3), batch, tokens, heads * depth)


def plain(tape: Tape, x: str) -> str:
    return x


def scaled(factor: float) -> Step:
    return lambda tape, x: tape.binary("Mul", x, tape.literal(np.float64(factor)))


def masked(mask: np.ndarray) -> Step:
    return lambda tape, x: tape.binary("Add", x, tape.input(mask))


def chosen(keep: np.ndarray, otherwise: float) -> Step:
    """Where(keep, scores, otherwise)."""

    def step(tape: Tape, x: str) -> str:
        result = np.where(keep, tape.values[x], otherwise)
        return tape.add("Where", [tape.input(keep), x, tape.literal(np.float64(otherwise))], result)

    return step


def guarded_by(value: float) -> Step:
    """Where(IsNaN(x), value, x)."""

    def step(tape: Tape, x: str) -> str:
        nan = tape.add("IsNaN", [x], np.isnan(tape.values[x]))
        return tape.add("Where", [nan, tape.literal(np.float64(value)), x], np.nan_to_num(tape.values[x], nan=value))

    return step


guarded = guarded_by(0.0)  # which torch's exporter writes for rows without a key


def halved_and_guarded(tape: Tape, x: str) -> str:
    """Computes more from a probability than a guard does."""
    return guarded(tape, tape.binary("Mul", x, tape.literal(np.float64(0.5))))


def attend(
    sizes: tuple[int, int, int, int, int, int],
    dtype: str = "float32",
    score_step: Step | None = None,
    weight_step: Step = plain,
    result_step: Step = merged,
) -> Case:
    """Heads split, scores, softmax, values, heads merged, for sizes (batch, heads, queries, keys, depth, width)."""
    batch, heads, queries, keys, depth, width = sizes
    tape = Tape(dtype)
    q = heads_of(tape, tape.input((batch, queries, heads * depth)), heads, 0, 2, 1, 3)
    k = heads_of(tape, tape.input((batch, keys, heads * depth)), heads, 0, 2, 3, 1)
    v = heads_of(tape, tape.input((batch, keys, heads * width)), heads, 0, 2, 1, 3)
    scores = (score_step or scaled(depth**-0.5))(tape, tape.binary("MatMul", q, k))
    weights = weight_step(tape, tape.softmax(scores))
    return tape.case(result_step(tape, tape.binary("MatMul", weights, v)), f"{sizes} {dtype}")


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
    ]
    check([attend(size) for size in sizes], target_of(level))


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


def test_nan_and_infinities_stay_in_their_row() -> None:
    bias = np.zeros((1, 1, 9, 12))
    bias[0, 0, 2, 3], bias[0, 0, 4, 5], bias[0, 0, 6, 7] = np.nan, np.inf, -np.inf
    case = attend((1, 2, 9, 12, 8, 8), score_step=masked(bias))
    assert np.isnan(case.expected[0]).any(axis=(0, 2)).nonzero()[0].tolist() == [2, 4]
    check([case], target_of("avx2"))


@pytest.fixture
def few_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache so small that keys come in blocks of a vector or two."""
    monkeypatch.setattr(attention, "_CACHE_BYTES", 4096)


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
    check([*cases, attend((1, 1, 9, 70, 8, 8), weight_step=guarded)], target_of(level))


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


def packed_projections() -> Case:
    """q, k and v are parts of one product: Split, and Slice and Gather of a [3, ...] view; scale on q and bias before."""
    tape = Tape()
    batch, tokens, heads, depth = 2, 19, 3, 8
    joined = tape.binary("Add", tape.input((batch, tokens, 3 * heads * depth)), tape.input((3 * heads * depth,)))
    stacked = tape.transpose(tape.reshape(joined, batch, tokens, 3, heads, depth), 2, 0, 3, 1, 4)
    q = tape.add("Gather", [stacked, tape.literal(np.int64(0))], tape.values[stacked][0], axis=0)
    bounds = [tape.literal(np.array(x)) for x in ([1], [2], [0])]
    k = tape.add("Slice", [stacked, *bounds], tape.values[stacked][1:2])
    k = tape.transpose(tape.add("Squeeze", [k, tape.literal(np.array([0]))], tape.values[k][0]), 0, 1, 3, 2)
    v = tape.add("Gather", [stacked, tape.literal(np.int64(-1))], tape.values[stacked][-1], axis=0)
    scores = tape.binary("MatMul", scaled(depth**-0.5)(tape, q), k)
    return tape.case(merged(tape, tape.binary("MatMul", tape.softmax(scores), v)), "packed")


def split_projections() -> Case:
    tape = Tape()
    joined = tape.input((2, 9, 3 * 16))
    parts = np.split(tape.values[joined], 3, axis=-1)
    names = [tape.add("Split", [joined], part, axis=-1, num_outputs=3) for part in parts]
    op = Op("Split", (joined,), tuple(names), {"axis": -1, "num_outputs": 3}, 23)
    tape.ops = [op]
    q, v = (heads_of(tape, names[i], 2, 0, 2, 1, 3) for i in (0, 2))
    scores = tape.binary("MatMul", q, heads_of(tape, names[1], 2, 0, 2, 3, 1))
    return tape.case(merged(tape, tape.binary("MatMul", tape.softmax(scores), v)), "split")


def grouped_queries(queries: int, score_step: Step = plain, key_step: Step = plain) -> Case:
    """Six query heads read two heads of keys and values, repeated by Expand and Reshape as HF does."""
    tape = Tape()
    q = heads_of(tape, tape.input((2, queries, 6 * 8)), 6, 0, 2, 1, 3)

    def repeated(x: str) -> str:
        shape = (2, 2, 3, 11, 8)
        apart = tape.reshape(x, 2, 2, 1, 11, 8)
        wide = tape.add("Expand", [apart, tape.literal(np.array(shape))], np.broadcast_to(tape.values[apart], shape))
        return tape.reshape(wide, 2, 6, 11, 8)

    k, v = (repeated(heads_of(tape, tape.input((2, 11, 2 * 8)), 2, 0, 2, 1, 3)) for _ in range(2))
    scores = score_step(tape, tape.binary("MatMul", q, tape.transpose(key_step(tape, k), 0, 1, 3, 2)))
    return tape.case(merged(tape, tape.binary("MatMul", tape.softmax(scores), v)), f"grouped, {queries}")


def flat_heads() -> Case:
    """Batch and heads are one dimension of the products, two of the mask: reshapes on both sides of the softmax."""
    tape = Tape()
    q, v = (tape.reshape(heads_of(tape, tape.input((2, 9, 24)), 3, 0, 2, 1, 3), 6, 9, 8) for _ in range(2))
    k = tape.reshape(heads_of(tape, tape.input((2, 9, 24)), 3, 0, 2, 3, 1), 6, 8, 9)
    scores = tape.reshape(tape.binary("MatMul", q, k), 2, 3, 9, 9)
    weights = tape.softmax(masked(tape.random.standard_normal((2, 1, 9, 9)))(tape, scores))
    result = tape.binary("MatMul", tape.reshape(weights, 6, 9, 9), v)
    return tape.case(merged(tape, tape.reshape(result, 2, 3, 9, 8)), "flat")


def shared_keys(queries: int) -> Case:
    """Keys and values of one batch and head for all queries, as they lie; a division between; a residual after the merge."""
    tape = Tape()
    q, k, v = (tape.input(shape) for shape in ((2, 3, queries, 8), (1, 1, 8, 21), (1, 21, 8)))
    scores = tape.binary("Div", tape.binary("MatMul", q, k), tape.literal(np.float64(3)))
    out = merged(tape, tape.binary("MatMul", tape.softmax(scores), v))
    return tape.case(tape.binary("Add", out, tape.input((2, queries, 24))), f"shared by {queries}")


def turned_values(queries: int) -> Case:
    """Values that lie column by column."""
    tape = Tape()
    q, k, v = (tape.input(shape) for shape in ((1, 2, queries, 8), (1, 2, 8, 21), (1, 2, 5, 21)))
    weights = tape.softmax(tape.binary("MatMul", q, k))
    return tape.case(tape.binary("MatMul", weights, tape.transpose(v, 0, 1, 3, 2)), f"turned values, {queries}")


def one_matrix() -> Case:
    tape = Tape()
    q, k, v = (tape.input(shape) for shape in ((9, 8), (8, 10), (10, 5)))
    return tape.case(tape.binary("MatMul", tape.softmax(tape.binary("MatMul", q, k)), v), "matrices")


@pytest.mark.parametrize("level", LEVELS)
def test_views_and_operators_around(level: str) -> None:
    cases = [packed_projections(), split_projections(), grouped_queries(7), flat_heads(), one_matrix()]
    check([*cases, *(make(queries) for make in (shared_keys, turned_values) for queries in (2, 9))], target_of(level))


def scaled_keys(tape: Tape, x: str) -> str:
    """Heads that read the same keys, each at its own scale."""
    return tape.binary("Mul", x, tape.input((6, 1, 1)))


@pytest.mark.parametrize("level", LEVELS)
def test_few_queries_of_heads_that_share_keys(level: str) -> None:
    """One, two and three queries for each of three heads; a mask for each head; keys that are not the same after all."""
    cases = [grouped_queries(queries) for queries in (1, 2, 3)]
    cases.append(grouped_queries(1, masked(np.random.default_rng(5).standard_normal((2, 6, 1, 11)))))
    check([*cases, grouped_queries(2, plain, scaled_keys)], target_of(level, threads=2))


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


def test_only_a_block_of_scores_is_ever_in_memory() -> None:
    built = attention.build(attend((1, 1, 2000, 100, 16, 16)).group, target_of("avx2", 1))
    assert isinstance(built, BuiltKernel)
    assert built.workspace_bytes < 2000 * 100


@pytest.mark.parametrize(("lanes", "registers"), [(8, 16), (16, 32), (1, 16)])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (128, 64, 128), (197, 64, 197), (5, 20, 1000)])
def test_tiles_fit_the_registers_and_are_equally_high(sizes: tuple[int, int, int], lanes: int, registers: int) -> None:
    queries, depth, keys = sizes
    options = tiles_options(queries, [(depth, keys), (keys, depth)], lanes, 4, registers)
    assert len(options) == min(queries, 14)
    for name, (scores, result) in options.items():
        assert int(name) == scores.rows == result.rows
        for tile in (scores, result):
            assert tile.rows * tile.vectors + tile.vectors < registers


def softmax_across(tape: Tape, x: str) -> str:
    return tape.transpose(scaled(1.0)(tape, x), 0, 1, 3, 2)


def with_row_sum(tape: Tape, x: str) -> str:
    """Adds the diagonal's neighbour: a value that meets itself at another place."""
    return tape.binary("Add", x, tape.transpose(x, 0, 1, 3, 2))


def grown(tape: Tape, x: str) -> str:
    return tape.binary("Add", x, tape.input((2, 2, 9, 9)))


def refused(case: Case, reason: str) -> None:
    result = attention.build(case.group, Target("cpu", "avx2", 2))
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
    result = attention.build(attend((1, 2, 9, 9, 8, 8)).group, Target("cuda", "sm_90"))
    assert result == Refusal("is for CPUs")
