"""Groups as passes would make them: Casts of operands that lie in narrow types, Transposes of what lies channels-last."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ...kernels.groups.group import Group, Op
from ...runtime.plan import TensorType
from ..ir.assignments.kernel_choice import Variant


def with_variant(group: Group, node: ir.Node, variant: Variant) -> Group:
    """The group of `node` as `variant` says, with new names for the operands and results that lie otherwise."""
    for position, form in reversed(variant.formats):
        group = _with_format(group, _name(node, position), form)
    for position in reversed(variant.channels_last):
        group = _with_last_operand(group, _name(node, position))
    for name in group.outputs if variant.has_channels_last_results else ():
        group = _with_last_result(group, name)
    return group


def _name(node: ir.Node, position: int) -> str:
    value = node.inputs[position]
    assert value is not None, f"{node.op_type} has no operand {position}"
    return str(value.name)


def _with_format(group: Group, name: str, dtype: str) -> Group:
    """The group with a Cast to float32 of an operand of type `dtype` in the place of `name`."""
    narrow = f"{name}.{dtype}"
    cast = Op("Cast", (narrow,), (name,), {"to": int(ir.DataType.FLOAT)}, group.ops[0].version)
    return _reading(group, cast, TensorType(group.types[name].shape, dtype))


def _with_last_operand(group: Group, name: str) -> Group:
    """The group with an operand that lies channels-last, before whose readers a Transpose turns it.

    Where the operand is narrow, so is what is turned, and the Cast comes after.
    """
    cast = next((op for op in group.ops if op.op_type == "Cast" and op.outputs == (name,)), None)
    name = name if cast is None else cast.inputs[0]
    kind = group.types[name]
    rank = len(kind.shape)
    turn = Op("Transpose", (f"{name}.last",), (name,), {"perm": (0, rank - 1, *range(1, rank - 1))}, group.ops[0].version)
    return _reading(group, turn, TensorType(_last(kind.shape), kind.dtype))


def _reading(group: Group, op: Op, kind: TensorType) -> Group:
    """The group with an operator before all others that makes one of its inputs, of another one of type `kind`."""
    (source,), (name,) = op.inputs, op.outputs
    constants = group.constants - {name} | ({source} if name in group.constants else set())
    inputs = tuple(source if one == name else one for one in group.inputs)
    return replace(group, ops=(op, *group.ops), inputs=inputs, types={**group.types, source: kind}, constants=constants)


def _with_last_result(group: Group, name: str) -> Group:
    """The group whose result `name` is stored channels-last."""
    kind = group.types[name]
    last, rank = f"{name}.last", len(kind.shape)
    turn = Op("Transpose", (name,), (last,), {"perm": (0, *range(2, rank), 1)}, group.ops[0].version)
    outputs = tuple(last if one == name else one for one in group.outputs)
    types = {**group.types, last: TensorType(_last(kind.shape), kind.dtype)}
    return replace(group, ops=(*group.ops, turn), outputs=outputs, types=types)


def _last(shape: tuple[int, ...]) -> tuple[int, ...]:
    images, channels, *places = shape
    return (images, *places, channels)
