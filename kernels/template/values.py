"""Elements of a group's values as expressions: operands read through prologues and views, epilogues, and the kinds of groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from tvm import tirx

from ...runtime.precision import holds_sums
from ...runtime.symbolic.sizes import Size
from ..codegen.builder import Expr, Index, KernelBuilder, broadcast_index, int32_of, row_major
from ..codegen.dimensions import lower_number
from ..expressions import pointwise
from ..expressions.contraction import CONTRACTED, rounded_apart
from ..formats.minifloat import is_coded
from ..groups.group import Group, Op
from . import views
from .rounding import rounding_of

Reader = Callable[[Index], Expr]

NARROW_FLOATS, _BYTES = ("bfloat16", "float16"), ("uint8", "int8")
_CONVOLUTIONS = ("Conv", "ConvTranspose")
_PRODUCTS = (*_CONVOLUTIONS, "Gemm", "MatMul")
PANELS = "prefuse.panels"  # attribute of a Gather whose table lies in the panels that kernels of products read
# The operands that may be constant integers with scales, by operators whose kernels read such.
_WEIGHTS = {"Gather": (0,), "Gemm": (1,), "MatMul": (1,), "GRU": (1, 2), "LSTM": (1, 2), "RNN": (1, 2)}
PART = ".row"  # begins the names of values inside of an operator that a template has taken apart: no other operator reads these
_CHOSEN_PRODUCTS = ("LeakyRelu", "PRelu")  # x * slope or x, of which LLVM may make x * (slope or 1)
# By floating point type, the integer of its width whose sign bit alone is -0.0.
_SIGN_BIT = {
    "float64": ("int64", -(2**63)),
    "float32": ("int32", -(2**31)),
    "float16": ("int16", -(2**15)),
    "bfloat16": ("int16", -(2**15)),
}


class GroupValues:
    """Elements of a group's values, as expressions, at one place of the loop nest.

    `given` says how to read the values that the template computes itself: its anchor's output. Any other value is an input, a
    literal, the result of a pointwise operator, evaluated at the (broadcast) index, or a view, read at the index in its operand.
    Values with several readers are bound to a name, once per `GroupValues`, so make a new one in each loop body.
    """

    def __init__(self, group: Group, builder: KernelBuilder, given: dict[str, Reader] | None = None) -> None:
        self.group = group
        self.builder = builder
        self.given = given or {}
        self._bound: dict[tuple[str, str], Expr] = {}

    def read(self, name: str, index: Index) -> Expr:
        """The element of `name` at `index`, which has the rank of the value."""
        if name in self.given:
            return self._given(name, index)
        if (literal := self.group.literal(name)) is not None and literal.size == 1:
            return _constant(literal, self.group.types[name].dtype)
        producer = self.group.producers.get(name)
        if producer is None:
            return self.load(name, row_major(index, self.group.types[name].shape))
        if producer.op_type not in pointwise.POINTWISE:
            view = views.view_of(self.group, producer)
            assert view is not None, f"{producer.op_type} is no view"
            return self.read(producer.inputs[0], view.source(self.group, producer, name, index))
        if self.group.reader_counts[name] == 1:
            return self._apply(producer, index)
        key = (name, str(index))
        if key not in self._bound:
            self._bound[key] = self.builder.name(self._apply(producer, index))
        return self._bound[key]

    def _given(self, name: str, index: Index) -> Expr:
        value, producer = self.given[name](index), self.group.producers.get(name)
        is_made = producer is not None and producer.op_type not in pointwise.POINTWISE
        return rounded(self.group, self.builder, name, value) if is_made else value

    def load(self, name: str, offset: Expr) -> Expr:
        """The element of an input at a flat offset."""
        kind = self.group.types[name]
        buffer = self.builder.parameter(name, kind.elements, kind.dtype)
        return buffer[int32_of(offset)]

    def _apply(self, op: Op, index: Index) -> Expr:
        types = self.group.types
        if not self.builder.is_grid and (rounding := rounding_of(self.group, op)) is not None:
            value = self.builder.name(self.read(rounding.source, index))
            return rounding.apply(value, types[op.outputs[0]].dtype)
        names = op.inputs
        dtypes = [types[name].dtype if name else "" for name in names]
        shape = types[op.outputs[0]].shape
        places = [_scale_index(op, index, position, types[name].shape) if name else None for position, name in enumerate(names)]
        inputs = [
            None if not name else self.read(name, broadcast_index(index, shape, types[name].shape) if place is None else place)
            for name, place in zip(names, places, strict=True)
        ]
        dtype, builder = types[op.outputs[0]].dtype, self.builder
        made = pointwise.apply(
            op,
            inputs,
            dtypes,
            dtype,
            builder.name,
            builder.integer_bits,
            has_bfloat16=builder.has_bfloat16,
            is_rough=self.group.tolerance.may_round,
            is_grid=builder.is_grid,
        )
        return apart(self.group, builder, op, made)


def apart(group: Group, builder: KernelBuilder, op: Op, value: Expr) -> Expr:
    """The element of an operator's result, rounded before others add to it where LLVM would make a product of it."""
    is_product = isinstance(value, tirx.Mul) or op.op_type in _CHOSEN_PRODUCTS or any(name.startswith(PART) for name in op.inputs)
    return rounded(group, builder, op.outputs[0], value) if is_product else value


def rounded(group: Group, builder: KernelBuilder, name: str, value: Expr) -> Expr:
    """The element of a value that operators of the group read, rounded before they do, not with what they add to it."""
    is_read = not name.startswith(PART) and any(name in op.inputs for op in group.ops)
    if builder.is_grid or str(value.ty) not in CONTRACTED or not is_read:
        return value
    return rounded_apart(builder.name(value))  # of a call of an expression TVM makes no vector


def _scale_index(op: Op, index: Index, position: int, shape: tuple[int, ...]) -> Index | None:
    """Where a DequantizeLinear of scales along an axis, or of blocks, reads these; None for what broadcasts."""
    if op.op_type != "DequantizeLinear" or position == 0 or not shape:
        return None
    axis, block = op.attribute("axis", 1) % len(index), op.attribute("block_size", 0)
    if not block:
        return (index[axis],) if len(shape) == 1 and shape != (1,) else None
    return tuple(tirx.floordiv(i, block) if d == axis else i for d, i in enumerate(index))


def source_offset(group: Group, name: str, index: tuple[int, ...]) -> int:
    """Flat offset of the input element that an element is read from; the largest, of one computed from several."""
    while (op := group.producers.get(name)) is not None:
        if op.op_type in pointwise.POINTWISE:
            source = max((value for value in op.inputs if value), key=lambda value: group.types[value].elements)
            index = broadcast_index(index, group.types[name].shape, group.types[source].shape)
        else:
            view = views.view_of(group, op)
            assert view is not None, f"{op.op_type} is no view"
            source, index = op.inputs[0], view.source(group, op, name, index)
        name = source
    return int(row_major(index, group.types[name].shape))


def anchors_of(group: Group) -> tuple[Op, ...]:
    """The operators that decide which template takes a group: all that are neither pointwise nor views, or a view alone."""
    others = tuple(op for op in group.ops if op.op_type not in pointwise.POINTWISE)
    return others if len(others) == 1 else tuple(op for op in others if views.view_of(group, op) is None)


def _constant(literal: np.ndarray, dtype: str) -> Expr:
    """A number as an expression.

    A zero is written by way of the bits of -0.0: TVM folds 0.0 * x and 0.0 / x to 0, also where x is not finite.
    """
    if is_coded(dtype):
        return tirx.const(literal.view("uint8").item(), "uint8")
    value = literal.item()
    if isinstance(value, Size):
        return tirx.Cast(dtype, lower_number(value))
    if dtype not in _SIGN_BIT or value != 0:
        return tirx.const(value, dtype)
    integer, bit = _SIGN_BIT[dtype]
    negative = tirx.reinterpret(dtype, tirx.const(bit, integer))
    return negative if np.signbit(literal).item() else tirx.const(0.0, dtype) - negative


def anchor_of(group: Group) -> Op:
    """The one anchor of a group that has one, as templates for single anchors are shown."""
    anchors = anchors_of(group)
    assert len(anchors) == 1, f"a group has one anchor, this has {[op.op_type for op in anchors]}"
    return anchors[0]


def followers_of(group: Group) -> tuple[Op, ...]:
    """The pointwise operators of a group."""
    return tuple(op for op in group.ops if op.op_type in pointwise.POINTWISE)


def read_narrow(group: Group) -> Group:
    """The group without what makes float32 of bfloat16 and float16 that only anchors read: these load such operands directly. So
    do products of two operands of 8 bits, which subtract their `zero_points`."""
    anchors = anchors_of(group)
    read_by_anchors = [name for op in anchors for name in op.inputs]
    widened = {
        op.outputs[0]: op
        for op in group.ops
        if op.op_type in ("Cast", "DequantizeLinear")
        and group.types[op.inputs[0]].dtype in (*NARROW_FLOATS, *_BYTES)
        and group.types[op.outputs[0]].dtype == "float32"
        and _is_unscaled(group, op)
        and group.reader_counts.get(op.outputs[0]) == read_by_anchors.count(op.outputs[0])
    }
    bytes_of = {name: op for name, op in widened.items() if group.types[op.inputs[0]].dtype in _BYTES}
    readers = [op for op in anchors if not bytes_of.keys().isdisjoint(op.inputs)]
    if not all(_multiplies_bytes(group, op, bytes_of) for op in readers):
        widened = {name: op for name, op in widened.items() if name not in bytes_of}
    if not widened:
        return group
    sources = {name: op.inputs[0] for name, op in widened.items()}
    ops = tuple(
        replace(op, inputs=tuple(sources.get(name, name) for name in op.inputs)) if any(op is one for one in anchors) else op
        for op in group.ops
        if not widened.keys() & set(op.outputs)
    )
    zeros = {op.inputs[0]: op.inputs[2] for op in widened.values() if len(op.inputs) > 2 and op.inputs[2]}
    return replace(group, ops=ops, zero_points={**group.zero_points, **zeros})


def _multiplies_bytes(group: Group, anchor: Op, bytes_of: Mapping[str, Op]) -> bool:
    """Whether kernels multiply the 8-bit numbers that both operands of an anchor are made of: they subtract one zero point of
    each, of convolutions that of the image alone, and 32 bits hold the sums. One of a value that both operands are made of."""
    names = anchor.inputs[:2]
    is_product = anchor.op_type in _PRODUCTS and bytes_of.keys() >= set(names) and bytes_of.keys().isdisjoint(anchor.inputs[2:])
    if not is_product:
        return False
    zeros = [op.inputs[2] if len(op.inputs) > 2 else "" for op in (bytes_of[name] for name in names)]
    if any(zero and group.types[zero].shape != () for zero in zeros) or (zeros[1] and anchor.op_type in _CONVOLUTIONS):
        return False
    sources = [bytes_of[name].inputs[0] for name in names]
    if sources[0] == sources[1] and zeros[0] != zeros[1]:
        return False
    shapes = [group.types[name].shape for name in names]
    is_wide = bool(zeros[1]) or group.types[sources[1]].dtype == "uint8"
    return holds_sums(anchor.op_type, *shapes, is_turned=bool(anchor.attribute("transA", 0)), is_wide=is_wide)


def _is_unscaled(group: Group, op: Op) -> bool:
    """Whether what an operator makes are the numbers that it reads, but for their zero point."""
    if op.op_type != "DequantizeLinear":
        return True
    scale = group.literals.get(op.inputs[1])
    return scale is not None and bool((scale == 1).all())


def read_weights(group: Group) -> Group:
    """The group without the DequantizeLinear of constants that its kernel loads as they lie, integers and scales: a right operand
    of a product, the weights of a recurrence, or a Gather's table in panels. `weights` of the group tells it."""
    anchors = anchors_of(group)
    if len(anchors) != 1:
        return group
    (anchor,) = anchors
    if anchor.op_type == "Gather" and PANELS not in anchor.attributes:
        return group
    read = [anchor.inputs[position] for position in _WEIGHTS.get(anchor.op_type, ()) if position < len(anchor.inputs)]
    found = {name: op for name in read if (op := group.producers.get(name)) is not None and _is_dequantized(group, name, op)}
    if not found:
        return group
    direct = replace(anchor, inputs=tuple(found[name].inputs[0] if name in found else name for name in anchor.inputs))
    ops = tuple(direct if op is anchor else op for op in group.ops if all(op is not scaling for scaling in found.values()))
    return replace(group, ops=ops, weights={scaling.inputs[0]: scaling for scaling in found.values()})


def _is_dequantized(group: Group, name: str, producer: Op) -> bool:
    """Whether a value is a dequantized constant that is read once."""
    is_constant = producer.op_type == "DequantizeLinear" and producer.inputs[0] in group.constants
    return is_constant and group.reader_counts[name] == 1


def surroundings(group: Group) -> tuple[Op, ...]:
    """The views around a group's anchors and the pointwise operators of their prologues, which only some templates allow."""
    anchors = anchors_of(group)
    before, waiting = set[str](), [name for op in anchors for name in op.inputs if name in group.producers]
    while waiting:
        name = waiting.pop()
        if name not in before:
            before.add(name)
            waiting += [other for other in group.producers[name].inputs if other in group.producers]
    beside = [op for op in group.ops if all(op is not anchor for anchor in anchors)]
    return tuple(op for op in beside if op.op_type not in pointwise.POINTWISE or not before.isdisjoint(op.outputs))


def has_epilogue_only(group: Group) -> bool:
    """Whether a group is one anchor with nothing but an epilogue, which may be empty."""
    if len(group.ops) == 1:
        return True
    anchors = anchors_of(group)
    if len(anchors) != 1 or surroundings(group):
        return False
    elements = group.types[anchors[0].outputs[0]].elements
    return all(group.types[name].elements == elements for name in group.outputs)


def has_prologue_and_epilogue_only(group: Group) -> bool:
    """Whether a group is one anchor with an epilogue, and a prologue of its first operand (of any operand of a Concat)."""
    anchors = anchors_of(group)
    if len(anchors) != 1 or any(op.op_type not in pointwise.POINTWISE for op in surroundings(group)):
        return False
    (anchor,) = anchors
    if anchor.op_type != "Concat" and any(name in group.producers for name in anchor.inputs[1:]):
        return False
    elements = group.types[anchors[0].outputs[0]].elements
    return all(group.types[name].elements == elements for name in group.outputs)


def pointwise_obstacle(group: Group) -> str:
    """Why some pointwise operator of the group cannot be expressed; empty if all can."""
    for op in group.ops:
        if op.op_type in pointwise.POINTWISE:
            dtypes = [group.types[name].dtype for name in op.inputs if name]
            if reason := pointwise.supports(op, dtypes, group.types[op.outputs[0]].dtype):
                return reason
    return ""
