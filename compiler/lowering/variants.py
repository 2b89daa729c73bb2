"""Groups as passes would make them: operands that lie in narrow types, as integers with scales, or channels-last."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from ...kernels.groups.group import Group, Op
from ...runtime.plan import TensorType
from ..ir.assignments.kernel_choice import Variant
from ..ir.assignments.stored_form import StoredForm
from ..ir.facts import dtype_name


def with_variant(group: Group, node: ir.Node, variant: Variant) -> Group:
    """The group of `node` as `variant` says, with new names for the operands and results that lie otherwise."""
    for position, form in reversed(variant.formats):
        group = _with_format(group, _name(node, position), form)
    for position, stored in reversed(variant.stored):
        group = _with_integers(group, _name(node, position), stored)
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


def _with_integers(group: Group, name: str, form: StoredForm) -> Group:
    """The group with a DequantizeLinear of constant integers, scales and perhaps zero points in the place of `name`."""
    integers, scale, zero = f"{name}.integers", f"{name}.scale", f"{name}.zero"
    attributes = {"axis": form.axis} | ({"block_size": form.block} if form.block else {})
    read = (integers, scale, zero) if form.has_zeros else (integers, scale)
    dequantize = Op("DequantizeLinear", read, (name,), attributes, group.ops[0].version)
    dtype = dtype_name(form.dtype)
    types = {integers: TensorType(form.shape, dtype), scale: TensorType(form.scales, "float32")}
    types |= {zero: TensorType(form.scales, dtype)} if form.has_zeros else {}
    inputs = tuple(one for whole in group.inputs for one in (read if whole == name else (whole,)))
    constants = group.constants - {name} | set(read)
    return replace(
        group, ops=(dequantize, *group.ops), inputs=inputs, types={**group.types, **types}, constants=frozenset(constants)
    )


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
