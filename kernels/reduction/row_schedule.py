"""The schedule of a group of reductions over rows with pointwise operators: which loop computes what. No code is written here.

A row is the trailing dimensions that all reductions are over. An element value has a number for each element of a row; a row
value has one for each row: a reduction's result, and what is computed from such alone. The level of a value is the length of the
longest chain of reductions that it depends on: loop k computes the element values of level k that a reduction needs or the group
returns.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np

from ...runtime.plan import TensorType
from ...runtime.symbolic.shapes import broadcast_shape, equal, is_one
from ...runtime.symbolic.sizes import SizeLike
from ..cost.operations import COSTLY
from ..expressions.pointwise import POINTWISE
from ..groups.group import Group, Op
from ..template.contract import Refusal
from .reduction import reduced_axes
from .row_lowering import COMPOSITES, EXP, FOLDS, expanded

_RECOMPUTED_COST = 2  # operations and operands from which keeping a value for a later loop is cheaper than computing it again


@dataclass(frozen=True)
class RowForm:
    """A group of folds and pointwise operators over rows of `row`, one for each index of `outer`.

    Values have one rank, that of (*outer, *row), with extents of 1 where they are broadcast; those named in `flat` have the rank
    of `outer`.
    """

    group: Group
    outer: tuple[int, ...]
    row: tuple[int, ...]
    levels: dict[str, int]
    elements: frozenset[str]  # element values that operators make
    flat: frozenset[str]
    kept: dict[str, int] = field(default_factory=dict)  # element values that later loops read again -> the loop that makes them

    @property
    def length(self) -> int:
        """Elements of a row."""
        return prod(self.row)

    @cached_property
    def folds(self) -> tuple[Op, ...]:
        return tuple(op for op in self.group.ops if op.op_type in FOLDS)

    @property
    def loops(self) -> int:
        """The number of loops over a row."""
        last = max((self.levels[name] for name in self.group.outputs if name in self.elements), default=-1)
        return max(last, *(self.levels[op.inputs[0]] for op in self.folds)) + 1

    def targets(self, loop: int) -> list[str]:
        """The element values that a loop must compute, in order."""
        read = {op.inputs[0] for op in self.folds if self.levels[op.inputs[0]] == loop}
        stored = {name for name in self.group.outputs if name in self.elements and self.levels[name] == loop}
        kept = {name for name, made in self.kept.items() if made == loop}
        return [name for op in self.group.ops for name in op.outputs if name in self.elements & (read | stored | kept)]

    def is_read_after(self, name: str, output: str) -> bool:
        """Whether an operand is read where the element of an output has been stored: for a later target, or in a later loop."""
        loop = self.levels[output]
        targets = self.targets(loop)
        later = targets[targets.index(output) + 1 :]
        known = {one for one, made in self.kept.items() if made <= loop}
        if self._reads(later, name, known | set(targets)):
            return True
        beyond = range(loop + 1, self.loops)
        return any(self._reads(self.targets(one), name, {n for n, made in self.kept.items() if made < one}) for one in beyond)

    def _reads(self, values: Sequence[str], name: str, known: Set[str]) -> bool:
        """Whether an operand is read to compute some values, others being `known`, as results of reductions are."""
        waiting, seen = list(values), set[str]()
        while waiting:
            value = waiting.pop()
            if value == name:
                return True
            op = self.group.producers.get(value)
            if op is not None and op.op_type not in FOLDS and value not in seen and (value in values or value not in known):
                seen.add(value)
                waiting += op.inputs
        return False

    @property
    def scratch(self) -> list[str]:
        """Kept values that are no outputs."""
        return [name for name in self.kept if name not in self.group.outputs]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch of one thread."""
        return sum(self.length * np.dtype(self.group.types[name].dtype).itemsize for name in self.scratch)


def row_form(group: Group, *, takes_one: bool = False) -> RowForm | Refusal:
    """The form of a group whose reductions are over the same rows, or why it has none. `takes_one`: also of one operator."""
    if other := next((op for op in group.ops if op.op_type not in POINTWISE and op.op_type not in COMPOSITES), None):
        return Refusal(f"{other.op_type} is no operator of rows")
    reductions = [op for op in group.ops if op.op_type in COMPOSITES]
    if len(reductions) == len(group.ops) == 1 and not takes_one:
        return Refusal("one operator alone has a template of its own")
    found = _rows_of(group, reductions)
    if isinstance(found, Refusal):
        return found
    shape, begin = found
    group = expanded(group, len(shape) - begin)
    elements, flat = _kinds(group, begin, shape)
    if reason := _obstacle(group, shape, begin, elements, flat):
        return Refusal(reason)
    form = _merged(group, shape, begin, elements, flat)
    return replace(form, kept=_kept(form))


def _rows_of(group: Group, reductions: Sequence[Op]) -> tuple[tuple[int, ...], int] | Refusal:
    """The shape of element values, and its first dimension within the rows."""
    counts = set()
    for op in reductions:
        operand = group.types[op.inputs[0]]
        axes = row_axes(group, op)
        if "float" not in operand.dtype:
            return Refusal(f"{op.op_type} of {operand.dtype}")
        if axes is None or axes != tuple(range(len(operand.shape) - len(axes), len(operand.shape))) or not axes:
            return Refusal(f"{op.op_type} is not over the last dimensions")
        counts.add(len(axes))
    if len(counts) != 1:
        return Refusal("reductions are over different numbers of dimensions")
    (count,) = counts
    shape = max((group.types[op.inputs[0]].shape for op in reductions), key=lambda one: (len(one), prod(one)))
    for op in reductions:
        operand_shape = group.types[op.inputs[0]].shape
        if operand_shape[len(operand_shape) - count :] != shape[len(shape) - count :]:
            return Refusal(f"{op.op_type} is over rows of another shape")
        try:
            shape = broadcast_shape(shape, operand_shape)
        except ValueError:
            return Refusal("reductions are of shapes that do not broadcast")
    return shape, len(shape) - count


def row_axes(group: Group, op: Op) -> tuple[int, ...] | None:
    """The dimensions that an operator is over, counted from 0; None if they are known at run time only."""
    rank = len(group.types[op.inputs[0]].shape)
    if op.op_type.startswith("Reduce"):
        return reduced_axes(group, op)
    axis = op.attribute("axis", -1 if op.version >= 13 else 1) % max(rank, 1)
    if op.op_type in ("LogSoftmax", "Softmax") and op.version >= 13:
        return (axis,)
    return tuple(range(axis, rank))


def _kinds(group: Group, begin: int, shape: tuple[int, ...]) -> tuple[frozenset[str], frozenset[str]]:
    """Which values that operators make are element values, and which have lost the dimensions of the row."""
    made, flat, long = set[str](), set[str](), not is_one(prod(shape[begin:]))
    for op in group.ops:
        (result,) = op.outputs
        if op.op_type in FOLDS:
            if len(group.types[result].shape) < len(group.types[op.inputs[0]].shape):
                flat.add(result)
            continue
        if flat.intersection(op.inputs):
            flat.add(result)
        elif any(name in made or _is_element(group, name, len(shape) - begin, long) for name in op.inputs if name):
            made.add(result)
    return frozenset(made), frozenset(flat)


def _is_element(group: Group, name: str, count: int, long: bool) -> bool:
    """Whether an operand of the group has more than one number for a row; of rows of one element, any but a number has."""
    if name in group.producers or _is_number(group, name):
        return False
    shape = group.types[name].shape
    return not long or not is_one(prod(shape[max(len(shape) - count, 0) :]))


def _is_number(group: Group, name: str) -> bool:
    """Whether an operand is a scalar constant, an immediate in the code. Larger literals are in memory."""
    literal = group.literal(name)
    return literal is not None and literal.size == 1


def _obstacle(group: Group, shape: tuple[int, ...], begin: int, elements: frozenset[str], flat: frozenset[str]) -> str:
    """Why values cannot be computed row by row; empty if they can."""
    for op in group.ops:
        (result,) = op.outputs
        made = [name for name in op.inputs if name in group.producers]
        if op.op_type not in FOLDS and result in flat and any(name not in flat for name in made):
            return f"{op.op_type} combines values with and without the dimensions of the row"
        whole = shape[:begin] if result in flat else shape
        if not _broadcasts(group.types[result].shape, whole):
            return f"{op.op_type} has elements that are in no row"
        if op.op_type in FOLDS and op.inputs[0] not in elements and op.inputs[0] in group.producers:
            return f"{op.op_type} is of one number for each row"
    both = {name for op in group.ops if op.outputs[0] in flat and op.op_type not in FOLDS for name in op.inputs} - flat
    for op in group.ops:
        if op.outputs[0] not in flat and any(name in both and not _is_number(group, name) for name in op.inputs):
            return "an operand is read with and without the dimensions of the row"
    for name in group.outputs:
        wanted = shape if name in elements else shape[:begin]
        kind = group.types[name]
        if kind.elements != prod(wanted) or (name in elements and kind.shape != shape):
            return f"{name} has another shape than the rows"
    return ""


def _broadcasts(source: Sequence[SizeLike], shape: Sequence[SizeLike]) -> bool:
    tail = shape[len(shape) - len(source) :] if source else ()
    return len(source) <= len(shape) and all(is_one(a) or equal(a, b) for a, b in zip(source, tail, strict=True))


def _merged(group: Group, shape: tuple[int, ...], begin: int, elements: frozenset[str], flat: frozenset[str]) -> RowForm:
    """The form over fewer, longer dimensions: neighbours merge where every value spans both or neither."""
    beside = {name for op in group.ops if op.outputs[0] in flat and op.op_type not in FOLDS for name in op.inputs} | flat
    padded = {}
    for name in {name for op in group.ops for name in (*op.inputs, *op.outputs) if name}:
        dims = group.types[name].shape
        padded[name] = (1,) * ((begin if name in beside else len(shape)) - len(dims)) + dims
    runs: list[tuple[int, ...]] = []
    outer = 0
    for axis in range(len(shape)):
        run = (*runs[-1], axis) if runs and axis != begin else (axis,)
        if len(run) > 1 and all(_spans_all_or_none(dims, run, shape) for dims in padded.values()):
            runs[-1] = run
        else:
            runs.append((axis,))
            outer += axis < begin
    extents = tuple(prod(shape[axis] for axis in run) for run in runs)
    types = dict(group.types)
    for name, dims in padded.items():
        sizes = [prod(dims[axis] for axis in run if axis < len(dims)) for run in runs[: outer if name in beside else None]]
        types[name] = TensorType(tuple(sizes), group.types[name].dtype)
    merged = replace(group, types=types)
    return RowForm(merged, extents[:outer], extents[outer:], _levels(group), elements, frozenset(beside))


def _spans_all_or_none(dims: tuple[int, ...], run: Sequence[int], shape: tuple[int, ...]) -> bool:
    return len({is_one(dims[axis]) for axis in run if axis < len(dims) and not is_one(shape[axis])}) <= 1


def _levels(group: Group) -> dict[str, int]:
    levels = dict.fromkeys(group.inputs, 0) | dict.fromkeys(group.literals, 0)
    for op in group.ops:
        level = max((levels.get(name, 0) for name in op.inputs if name), default=0)
        levels[op.outputs[0]] = level + (op.op_type in FOLDS)
    return levels


def _kept(form: RowForm) -> dict[str, int]:
    """The element values that are stored for a later loop: those that cost more to compute again than to read, and outputs."""
    kept = {name: form.levels[name] for name in form.group.outputs if name in form.elements}
    computed: dict[str, int] = {}

    def visit(name: str, loop: int) -> None:
        if name not in form.elements or kept.get(name, loop) < loop:
            return
        if computed.setdefault(name, loop) < loop and form.group.types[name].dtype != "bool":
            weight, operands = _cost(form, name, kept, loop)
            if weight + len(operands) - 1 >= _RECOMPUTED_COST:
                kept[name] = computed[name]
                return
        for source in form.group.producers[name].inputs:
            visit(source, loop)

    for loop in range(form.loops):
        for name in form.targets(loop):
            visit(name, loop)
    return kept


def _cost(form: RowForm, name: str, kept: dict[str, int], loop: int) -> tuple[int, set[str]]:
    """Operations for one more element of a value, and the operands that are read for it."""
    if name in form.elements and kept.get(name, loop) >= loop:
        op = form.group.producers[name]
        weight, operands = 12 if op.op_type in COSTLY or op.op_type == EXP else int(op.op_type != "Identity"), set[str]()
        for source in op.inputs:
            more, read = _cost(form, source, kept, loop)
            weight, operands = weight + more, operands | read
        return weight, operands
    along = form.group.types[name].shape[len(form.outer) :] if name else ()
    return 0, {name} if name in form.elements or not is_one(prod(along)) else set()
