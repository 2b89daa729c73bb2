"""Groups of attention, written operator by operator, with what they are in float64; for the tests of its kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from prefuse.kernels.groups.group import Group, Op
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import AMX_EMULATED

from ..harness import Case, check, run, target_of, type_of
from ..microkernels.amx_emulator import AMX, running_amx

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


def hidden(keep: np.ndarray, least: float = -np.inf) -> Step:
    """Adds 0 where `keep`, else `least`."""
    return masked(np.where(keep, 0.0, least))


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


def replaced(tape: Tape, x: str) -> str:
    """Where(IsNaN(x), 0, another tensor)."""
    nan, other = tape.add("IsNaN", [x], np.isnan(tape.values[x])), tape.input(tape.values[x].shape)
    return tape.add("Where", [nan, tape.literal(np.float64(0)), other], np.where(tape.values[nan], 0.0, tape.values[other]))


def truncated(tape: Tape, x: str) -> str:
    """Without its fraction."""
    whole = tape.add("Cast", [x], np.trunc(tape.values[x]).astype(np.int32), to=6)
    return tape.add("Cast", [whole], tape.values[whole].astype(np.float64), to=1)


def inverted(tape: Tape, x: str) -> str:
    return tape.binary("Div", tape.literal(np.float64(1)), x)


def widened(queries: int, keys: int, dtype: str = "bfloat16") -> Case:
    """Operands of 16 bits, which float32 arithmetic reads."""
    tape = Tape(dtype)
    halves = [tape.input(shape) for shape in ((1, 2, queries, 16), (1, 2, 16, keys), (1, 2, keys, 16))]
    tape.dtype = "float32"
    q, k, v = (tape.add("Cast", [name], tape.values[name], to=1) for name in halves)
    weights = tape.softmax(tape.binary("MatMul", q, k))
    return tape.case(tape.binary("MatMul", weights, v), f"widened {dtype}, {queries}, {keys}")


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


def parts_of_wider_rows(beside: int, tokens: int, dtype: str = "float32", batch: int = 1) -> Case:
    """q, k and v of two heads of 8 columns are Slices of one product, behind which lie other columns, such as gates; batch and
    heads are one dimension of the products."""
    tape = Tape(dtype)
    joined, axis = tape.input((batch, tokens, 3 * 16 + beside)), tape.literal(np.array([2]))

    def part(number: int, *order: int) -> str:
        bounds = [tape.literal(np.array([at])) for at in (16 * number, 16 * (number + 1))]
        columns = tape.values[joined][..., 16 * number : 16 * (number + 1)]
        heads = heads_of(tape, tape.add("Slice", [joined, *bounds, axis], columns), 2, *order)
        return tape.reshape(heads, 2 * batch, *tape.types[heads].shape[2:])

    q, k, v = part(0, 0, 2, 1, 3), part(1, 0, 2, 3, 1), part(2, 0, 2, 1, 3)
    out = tape.binary("MatMul", tape.softmax(tape.binary("MatMul", q, k)), v)
    return tape.case(
        merged(tape, tape.reshape(out, batch, 2, tokens, 8)), f"{batch} of {tokens} rows with {beside} beside, {dtype}"
    )


def grouped_queries(
    queries: int,
    score_step: Step = plain,
    key_step: Step = plain,
    *,
    keys: int = 11,
    depth: int = 8,
    dtype: str = "float32",
    weight_step: Step = plain,
) -> Case:
    """Six query heads read two heads of keys and values, repeated by Expand and Reshape as HF does."""
    tape = Tape(dtype)
    q = heads_of(tape, tape.input((2, queries, 6 * depth)), 6, 0, 2, 1, 3)

    def repeated(x: str) -> str:
        shape = (2, 2, 3, keys, depth)
        apart = tape.reshape(x, 2, 2, 1, keys, depth)
        wide = tape.add("Expand", [apart, tape.literal(np.array(shape))], np.broadcast_to(tape.values[apart], shape))
        return tape.reshape(wide, 2, 6, keys, depth)

    k, v = (repeated(heads_of(tape, tape.input((2, keys, 2 * depth)), 2, 0, 2, 1, 3)) for _ in range(2))
    scores = score_step(tape, tape.binary("MatMul", q, tape.transpose(key_step(tape, k), 0, 1, 3, 2)))
    weights = weight_step(tape, tape.softmax(scores))
    return tape.case(merged(tape, tape.binary("MatMul", weights, v)), f"grouped, {queries}, {keys}, {depth}")


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


def scaled_keys(tape: Tape, x: str) -> str:
    """Heads that read the same keys, each at its own scale."""
    return tape.binary("Mul", x, tape.input((6, 1, 1)))


def check_instructions(tried: Sequence[Case], number: int, emulator: ctypes.CDLL | None) -> None:
    """Cases by the instructions of AMX, one of which must have the bits of the loops that stand for them."""
    run(tried[number : number + 1], target_of(AMX_EMULATED))
    loops = tried[number].got[0]
    with running_amx(emulator) as counts:
        check(tried, AMX)
    assert counts is None or counts["tdpbf16ps"] > counts["tilezero"] == counts["tilestored"] > 0
    np.testing.assert_array_equal(tried[number].got[0], loops)
