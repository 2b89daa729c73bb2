"""OneHot."""

from __future__ import annotations

import onnx_ir as ir

from .common import dims

_INT64 = int(ir.DataType.INT64)
_MAX_CLASSES = 4096  # of a OneHot, which become a constant


def one_hot(node: ir.Node) -> str | None:
    """Whether each class is the index, counted from the end where that is negative; an index out of range is no class."""
    indices, result = dims(node.inputs[0]), node.outputs[0]
    if result.shape is None or not result.shape.is_static():
        return None
    axis = node.attributes.get_int("axis", -1) % len(result.shape)
    depth = int(result.shape.numpy()[axis])
    if not 0 < depth <= _MAX_CLASSES:
        return None
    column = [depth if d == axis else 1 for d in range(len(indices) + 1)]
    return f"""row = Constant<value_ints={list(range(depth))}>()
        column = Constant<value_ints={column}>() classes = Reshape(row, column)
        axis = Constant<value_ints=[{axis}]>() spread = Unsqueeze(i0, axis) index = Cast<to={_INT64}>(spread)
        zero = Constant<value_int=0>() one = Constant<value_int=1>() depth = Constant<value_int={depth}>()
        negative = Less(index, zero) turned = Add(index, depth) found = Where(negative, turned, index) hit = Equal(found, classes)
        off = Gather(i2, zero) on = Gather(i2, one) y = Where(hit, on, off)"""
