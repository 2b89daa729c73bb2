"""Groups whose values lie in memory channels-last: the form in which choose-layout writes them, and how templates read it.

    Transpose(0,3,1,2) of an operand -> one operator and its followers, in ONNX's own order of dimensions -> Transpose(0,2,3,1)

A template sees the group without its transposes, asks for elements at ONNX's indices (image, channel, row, column), and gets
loads and stores whose neighbouring channels are neighbours in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..builder import Expr, Index, KernelBuilder, row_major
from ..group import Group, Op
from ..template import Refusal
from ..values import GroupValues, Reader, pointwise_obstacle, split_anchor

_TO_FIRST = (0, 3, 1, 2)
_TO_LAST = (0, 2, 3, 1)


@dataclass(frozen=True)
class ChannelsLast:
    """A group of one anchor and its followers, `inner`, among transposes.

    `operands` are the inputs of `inner` that lie channels-last, by the names that they have as parameters; the one output of
    `inner` is stored channels-last, as the parameter `result`.
    """

    outer: Group
    inner: Group
    anchor: Op
    operands: Mapping[str, str]
    result: str

    def readers(self, builder: KernelBuilder) -> dict[str, Reader]:
        """How to read the operands that lie channels-last."""
        return {name: self._reader(builder, parameter) for name, parameter in self.operands.items()}

    def _reader(self, builder: KernelBuilder, parameter: str) -> Reader:
        kind = self.outer.types[parameter]
        buffer = builder.parameter(parameter, kind.elements, kind.dtype)
        return lambda index: buffer[_offset(index, kind.shape)]

    def follow(self, builder: KernelBuilder, index: Index, value: Expr) -> None:
        """Store the result at an index of the anchor's output, whose element there is `value`."""
        made = self.anchor.outputs[0]
        if self.inner.reader_counts.get(made, 0) > 1:
            value = builder.name(value)
        values = GroupValues(self.inner, builder, {**self.readers(builder), made: lambda _: value})
        kind = self.outer.types[self.result]
        element = values.read(self.inner.outputs[0], index)
        builder.store(builder.parameter(self.result, kind.elements, kind.dtype), _offset(index, kind.shape), element)


def channels_last_form(group: Group) -> ChannelsLast | Refusal:
    """The group as templates of channels-last values see it."""
    moves = [op for op in group.ops if op.op_type == "Transpose"]
    operands = {op.outputs[0]: op.inputs[0] for op in moves if op.attribute("perm") == _TO_FIRST and op.inputs[0] in group.inputs}
    results = {op.outputs[0]: op.inputs[0] for op in moves if op.attribute("perm") == _TO_LAST and op.outputs[0] in group.outputs}
    if len(group.outputs) != 1 or len(results) != 1 or len(operands) + 1 != len(moves):
        return Refusal("its values do not lie channels-last")
    ((result, made),) = results.items()
    if group.reader_counts[made] != 1 or made in operands:
        return Refusal("its values do not lie channels-last")
    ops = tuple(op for op in group.ops if op.op_type != "Transpose")
    read = [name for op in ops for name in op.inputs if name and name not in {out for one in ops for out in one.outputs}]
    inner = replace(group, ops=ops, inputs=tuple(dict.fromkeys(read)), outputs=(made,))
    anchor, _ = split_anchor(inner)
    if anchor is None:
        return Refusal("has no anchor")
    if reason := pointwise_obstacle(inner):
        return Refusal(reason)
    return ChannelsLast(group, inner, anchor, operands, result)


def _offset(index: Index, shape: tuple[int, ...]) -> Expr:
    """Flat offset of an index (image, channel, row, column) in memory of this shape (image, row, column, channel)."""
    return row_major(tuple(index[axis] for axis in _TO_LAST), shape)
