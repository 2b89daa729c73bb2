"""Keys that no query of a block sees: where a mask makes minus infinity of their scores, nothing need be computed from them.

What a block leaves out is found at each run, in the mask's own numbers, from the last key on: half of all scores in causal
attention, and what fills up the shorter sequences of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tvm import tirx

from ..codegen.builder import Buffer, Expr, KernelBuilder
from ..groups.group import Op
from .pattern import Attention, values_after

_HIDDEN = -1e38  # a score of less, such as the least float32, has no weight beside one that any model computes
_NONE = tirx.const(0, "float32")  # of keys that are seen
_STEPS = frozenset(["Add", "Cast", "Div", "Mul", "Sub", "Tanh", "Where"])  # what is -inf of a score of 0 is it of each finite one
Score = Callable[[Expr, Expr], Expr]  # of (row, key), of a product that is 0


def may_hide_keys(form: Attention) -> bool:
    """Whether a mask that heads share may hide keys: something is added to the scores, or chosen in their place."""
    group, score = form.group, form.scores.outputs[0]
    reached = values_after(group, score)
    steps = [op for op in group.ops if op is not form.scores and not reached.isdisjoint(op.outputs)]
    steps = [op for op in steps if op.op_type != "Reshape"]
    if form.dtype != "float32" or any(op.op_type not in _STEPS for op in steps):
        return False
    if any(op.op_type == "Div" and op.inputs[1] in reached for op in steps):
        return False
    if any("float" not in group.types[op.outputs[0]].dtype for op in steps):  # whether a score is 0 may decide on others
        return False
    shape = group.types[score].shape
    shared = [op for op in steps if op.op_type in ("Add", "Where") and _is_shared(form, op, reached, shape)]
    return bool(shared)


def _is_shared(form: Attention, op: Op, reached: set[str], shape: tuple[int, ...]) -> bool:
    """Whether an operand beside the scores has a number for each key, and fewer than there are scores."""
    heads = max(shape[-3:-2], default=1)
    beside = (form.group.types[name] for name in op.inputs if name not in reached)
    return any(kind.shape[-1:] == shape[-1:] and kind.elements * heads <= form.score_count for kind in beside)


def visible_keys(builder: KernelBuilder, score: Score, rows: Expr, first: Expr, keys: int, step: int, extent: int) -> Expr:
    """How many of `keys` keys from `first` on may be seen by `rows` queries: a multiple of `step`, or `extent` for all.

    All, where a query does not even see the very first key: it may see none, and then its probabilities are equal.
    """
    seen, end = builder.local(1, "float32", "seen"), builder.local(1, "int32", "end")
    whole, rest = divmod(keys, step)
    zero = tirx.const(0, "int32")

    def look(begin: Expr, columns: int) -> None:
        builder.store(seen, zero, _any_seen(builder, score, rows, first + begin, columns))

    builder.store(end, zero, tirx.const(extent, "int32"))
    builder.store(seen, zero, tirx.const(0, "float32"))
    if rest:
        look(whole * step, rest)
        with builder.when(tirx.EQ(seen[0], _NONE)):
            builder.store(end, zero, tirx.const(whole * step, "int32"))
    with builder.while_true(tirx.And(tirx.EQ(seen[0], _NONE), end[0] > zero)):
        begin = builder.bind(tirx.min(end[0], whole * step) - step)
        look(begin, step)
        with builder.when(tirx.EQ(seen[0], _NONE)):
            builder.store(end, zero, begin)
    return end[0]


def sees_first_key(builder: KernelBuilder, score: Score, rows: Expr) -> Expr:
    """Whether each of `rows` queries sees the very first key, for sure: not where its score is NaN."""
    seen, zero = builder.local(1, "float32", "seen"), tirx.const(0, "int32")
    builder.store(seen, zero, tirx.const(1, "float32"))
    with builder.loop(rows, name="row") as row:
        is_seen = builder.name(score(row, 0)) > tirx.const(_HIDDEN, "float32")
        builder.store(seen, zero, tirx.Select(is_seen, seen[0], _NONE))
    return tirx.NE(seen[0], _NONE)


def _any_seen(builder: KernelBuilder, score: Score, rows: Expr, first: Expr, columns: int) -> Expr:
    """1 where some of these rows may see one of these columns, else 0.

    A NaN is seen: a comparison with it is false, while the greatest of it and another number may be either.
    """
    lanes = builder.lanes("float32")
    seen = builder.local(lanes, "float32", "seen")
    with builder.loop(lanes, "vectorized", "lane") as lane:
        builder.store(seen, lane, _NONE)
    with builder.loop(rows, name="row") as row:
        for begin, count, width in _vectors(columns, lanes):
            with builder.loop(count, name="v") as v:
                column = builder.bind(first + begin + v * width)
                with builder.loop(width, "vectorized", "lane") as lane:
                    is_hidden = builder.name(score(row, column + lane)) < tirx.const(_HIDDEN, "float32")
                    builder.store(seen, lane, tirx.Select(is_hidden, seen[lane], tirx.const(1, "float32")))
    return _folded(builder, seen, lanes)


def _vectors(columns: int, lanes: int) -> Iterator[tuple[int, int, int]]:
    """Whole vectors, then ever shorter ones: first column, number, width."""
    done = 0
    while done < columns:
        while lanes > columns - done:
            lanes //= 2
        count = (columns - done) // lanes
        yield done, count, lanes
        done += count * lanes


def _folded(builder: KernelBuilder, seen: Buffer, lanes: int) -> Expr:
    while lanes > 1:
        lanes //= 2
        with builder.loop(lanes, "vectorized", "lane") as lane:
            builder.store(seen, lane, tirx.max(seen[lane], seen[lanes + lane]))
    return seen[tirx.const(0, "int32")]
