"""RandomUniform, RandomNormal (and Like), Bernoulli, Dropout and Multinomial.

With the attribute `seed` each run of a program draws the same numbers, on every target and with any number of threads. Without
it, each run draws its key from the operating system: no state is kept, so neither threads nor copies of a program, nor
processes that one of them forks, can see the same numbers again.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, KernelBuilder, row_major, unravel
from ..expressions import math
from ..expressions.philox import Key, normal, philox, seed_key, uniform
from ..expressions.pointwise import narrowed, widened, working_type
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel
from ..template.kernel import finish, new_builder, pointwise_cost
from ..template.loops import merge_sections, store_epilogue
from ..template.values import GroupValues, anchor_of

_GENERATORS = frozenset(["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"])
OPERATORS = _GENERATORS | {"Bernoulli", "Dropout"}
_COUNTERS = 16  # of one block: its elements are the first words of all counters, then the second ones, ...
_COST = 40  # scalar operations of one element


def obstacle(group: Group, target: Target) -> str:
    """Why the kernel cannot be written for a group; empty if it can."""
    anchor = anchor_of(group)
    return "without a seed, which a GPU cannot draw" if target.is_gpu and _needs_entropy(group, anchor) else ""


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes one operator whose elements are random numbers or chosen by them, with an epilogue."""
    anchor = anchor_of(group)
    builder = new_builder(target)
    result = next(name for name in anchor.outputs if name)
    shape = group.types[result].shape
    elements = prod(shape)
    work = elements * (_COST + pointwise_cost(group))
    if elements:
        draw = _Dropout(group, anchor, builder) if anchor.op_type == "Dropout" else _Draw(group, anchor, builder)
        draw.each_block(elements, work)
    return finish("random", builder, group, flops=work)


def _needs_entropy(group: Group, op: Op) -> bool:
    """Whether some run may have to draw a key: there is no seed, nor is this a Dropout that never trains."""
    if op.op_type == "Dropout":
        training = (*op.inputs, "", "")[2]
        literal = group.literal(training)
        if not training or (literal is not None and not literal.item()):
            return False
    return op.attribute("seed") is None


def _draw_key(builder: KernelBuilder, group: Group, op: Op) -> Key:
    """The key of an operator: its seed, or bytes of the operating system; of the CPU's clock, if that has none to give."""
    if not _needs_entropy(group, op):
        seed = op.attribute("seed", 0)
        return seed_key(int(seed) if op.op_type == "Dropout" else int(np.array(seed, np.float32).view(np.uint32)))
    words = builder.local(2, "uint32", "key")
    clock = builder.bind(tirx.call_llvm_intrin("int64", "llvm.readcyclecounter"))
    builder.store(words, 0, tirx.Cast("uint32", clock))
    builder.store(words, 1, tirx.Cast("uint32", clock >> tirx.const(32, "int64")))
    builder.emit(tirx.Evaluate(tirx.call_extern("int32", "getentropy", tirx.address_of(words[0]), tirx.const(8, "int64"))))
    return Key(builder.bind(words[0]), builder.bind(words[1]))


class _Draw:
    """The statements of an operator, block by block: first the numbers, into registers, then the elements."""

    def __init__(self, group: Group, anchor: Op, builder: KernelBuilder) -> None:
        self.group = group
        self.anchor = anchor
        self.builder = builder
        self.key = _draw_key(builder, group, anchor)
        self.values = GroupValues(group, builder)
        self.shape = next(group.types[name].shape for name in anchor.outputs if name)
        self.merged, runs = merge_sections(group, self.shape, [range(len(self.shape))])
        self.extents = [prod(self.shape[axis] for axis in run) for run in runs[0]]

    @property
    def dtype(self) -> str:
        """The type of the random numbers."""
        name = self.anchor.inputs[0] if self.anchor.op_type == "Bernoulli" else self.anchor.outputs[0]
        return working_type(self.group.types[name].dtype)

    def each_block(self, elements: int, work: int) -> None:
        builder, dtype = self.builder, self.dtype
        size = _COUNTERS * (4 if dtype == "float32" else 2)
        with builder.chunks(-(-elements // size), work) as block:
            numbers = builder.local(size, dtype, "numbers")
            self._fill(numbers, block)
            begin = builder.bind(block * size)
            count = builder.bind(tirx.min(elements - begin, size))
            lanes = min(builder.lanes(self.group.types[name].dtype) for name in self.group.outputs)
            builder.dynamic_vector_loop(0, count, lanes, lambda j: self.element(begin + j, numbers[j]))

    def _fill(self, numbers: Buffer, block: Expr) -> None:
        """The numbers of a block."""
        builder, dtype = self.builder, self.dtype
        is_normal = self.anchor.op_type.startswith("RandomNormal")
        with builder.loop(_COUNTERS, "vectorized", "lane") as lane:
            words = philox(block * _COUNTERS + lane, self.key, builder.name)
            drawn = normal(words, dtype, builder.name) if is_normal else uniform(words, dtype)
            for number, value in enumerate(drawn):
                builder.store(numbers, number * _COUNTERS + lane, value)

    def element(self, place: Expr, number: Expr) -> None:
        """Store the element at a flat offset, for which this number was drawn."""
        anchor, dtype = self.anchor, self.dtype
        if anchor.op_type == "Bernoulli":
            chance = self.values.load(anchor.inputs[0], place)
            value = number < tirx.Cast(dtype, chance)
        else:
            value = _placed(anchor, number, dtype)
        self._store(place, value)

    def _store(self, place: Expr, value: Expr) -> None:
        """Store the first output's element at a flat offset, and what follows it."""
        result = self.group.types[self.anchor.outputs[0]].dtype
        value = narrowed(value, result, self.anchor, self.builder.name)
        store_epilogue(self.merged, self.builder, self.anchor, unravel(place, self.extents), value)


class _Dropout(_Draw):
    """y = x / (1 - ratio) where the number is at least the ratio, else 0; y = x and a mask of ones when not in training."""

    def __init__(self, group: Group, anchor: Op, builder: KernelBuilder) -> None:
        super().__init__(group, anchor, builder)
        given = [*anchor.inputs, "", ""]
        self.working = working_type(group.types[given[0]].dtype)
        self.ratio = self._scalar(given[1], self.working, 0.5)
        kept = builder.name(tirx.const(1, self.working) - self.ratio)
        # Where none is kept nothing is scaled; TVM does not fold a quotient by zero.
        self.scale = builder.name(tirx.const(1, self.working) / tirx.max(kept, tirx.const(1e-30, self.working)))
        self.threshold = builder.bind(tirx.Cast("float32", self.ratio))
        self.trains = self._scalar(given[2], "bool", 0.0)

    @property
    def dtype(self) -> str:
        return "float32"

    def _scalar(self, name: str, dtype: str, default: float) -> Expr:
        """An operand of one element; a name for it, or a constant."""
        if not name:
            return tirx.const(default, dtype)
        kind, name_it = self.group.types[name], self.builder.name
        value = widened(self.values.read(name, (0,) * len(kind.shape)), kind.dtype, name_it)
        return self.builder.bind(value if str(value.ty) == dtype else tirx.Cast(dtype, value))

    def element(self, place: Expr, number: Expr) -> None:
        builder, (result, *masks) = self.builder, self.anchor.outputs
        is_kept = builder.name(tirx.Or(tirx.Not(self.trains), number >= self.threshold))
        index = unravel(place, self.extents)
        for mask in masks:
            if mask:
                kind = self.group.types[mask]
                builder.store(builder.parameter(mask, kind.elements, kind.dtype), row_major(index, self.extents), is_kept)
        if result:
            operand = self.anchor.inputs[0]
            x = builder.name(widened(self.values.load(operand, place), self.group.types[operand].dtype, builder.name))
            scaled = tirx.Select(is_kept, x * self.scale, tirx.const(0, self.working))
            self._store(place, tirx.Select(self.trains, scaled, x))


def _placed(op: Op, number: Expr, dtype: str) -> Expr:
    """A number of [0, 1) or of the standard normal distribution where the attributes want it."""
    if op.op_type.startswith("RandomNormal"):
        return number * tirx.const(op.attribute("scale", 1.0), dtype) + tirx.const(op.attribute("mean", 0.0), dtype)
    low, high = op.attribute("low", 0.0), op.attribute("high", 1.0)
    return number * tirx.const(high - low, dtype) + tirx.const(low, dtype)


def multinomial_obstacle(group: Group, target: Target) -> str:
    """Why Multinomial cannot be computed; empty if it can."""
    (op,) = group.ops
    if target.is_gpu and _needs_entropy(group, op):
        return "without a seed, which a GPU cannot draw"
    has_classes = bool(group.types[op.inputs[0]].shape[1])
    return "" if has_classes or not group.types[op.outputs[0]].elements else "there are no classes to draw from"


def build_multinomial(group: Group, target: Target) -> BuiltKernel:
    """Takes Multinomial alone: classes drawn by their unnormalised logarithmic probabilities, row by row."""
    (op,) = group.ops
    kind, result = group.types[op.inputs[0]], group.types[op.outputs[0]]
    (rows, classes), samples = kind.shape, result.shape[1]
    builder = new_builder(target)
    work = rows * (classes * 20 + samples * (_COST + 4 * classes.bit_length()))
    if result.elements:
        key = _draw_key(builder, group, op)
        totals = builder.workspace(rows * classes, "float64")
        out = builder.parameter(op.outputs[0], result.elements, result.dtype)
        with builder.chunks(rows, work) as row:
            begin = builder.bind(row * classes)
            total = _accumulate(builder, builder.parameter(op.inputs[0], kind.elements, kind.dtype), totals, begin, classes)
            with builder.loop(samples, name="sample") as sample:
                place = builder.bind(row * samples + sample)
                words = philox(place, key, builder.name)
                # 48 bits: a product with the total is below it, so that some class lies above.
                number = tirx.Cast("float64", words[0]) * tirx.const(2.0**-32, "float64")
                number = number + tirx.Cast("float64", words[1] >> tirx.const(16, "uint32")) * tirx.const(2.0**-48, "float64")
                found = _search(builder, totals, begin, classes, builder.bind(number * total))
                builder.store(out, place, tirx.Cast(result.dtype, found))
    return finish("multinomial", builder, group, flops=work)


def _accumulate(builder: KernelBuilder, source: Buffer, totals: Buffer, begin: Expr, classes: int) -> Expr:
    """Write the running sums of exp(x - max) of a row; the last of them."""
    state = builder.local(2, "float64", "state")
    builder.store(state, 0, tirx.const(-np.inf, "float64"))
    builder.store(state, 1, tirx.const(0, "float64"))

    def each(body: Callable[[Expr, Expr], None]) -> None:
        with builder.loop(classes, name="class") as i:
            body(i, builder.name(tirx.Cast("float64", source[begin + i])))

    each(lambda i, x: builder.store(state, 0, math.maximum(builder.name(state[0]), x)))
    greatest = builder.bind(state[0])

    def add(i: Expr, x: Expr) -> None:
        builder.store(state, 1, state[1] + tirx.exp(x - greatest))
        builder.store(totals, begin + i, state[1])

    each(add)
    return builder.bind(state[1])


def _search(builder: KernelBuilder, totals: Buffer, begin: Expr, classes: int, bound: Expr) -> Expr:
    """The first class whose running sum is above the bound; the last one if that is none's."""
    low, high = builder.local(1, "int32", "low"), builder.local(1, "int32", "high")
    builder.store(low, 0, tirx.const(0, "int32"))
    builder.store(high, 0, tirx.const(classes - 1, "int32"))
    with builder.loop((classes - 1).bit_length(), name="halving"):
        middle = builder.bind(tirx.floordiv(low[0] + high[0], 2))
        is_above = builder.name(totals[begin + middle] > bound)
        builder.store(high, 0, tirx.Select(is_above, middle, high[0]))
        builder.store(low, 0, tirx.Select(is_above, low[0], tirx.min(middle + 1, high[0])))
    return builder.bind(low[0])
