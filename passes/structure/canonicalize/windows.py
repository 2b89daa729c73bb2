"""One spelling for windows: the padding of convolutions and pools as numbers of their own, no taps that only meet padding, one
window as a global pool, transposed convolutions of one position as products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import constant_array
from ....compiler.ir.matching import input_at, int_constants, is_constant, is_read, rank_of, static_shape, uniform_constant
from ....compiler.ir.rewriter import operation
from ....runtime.symbolic.sizes import Size, greatest_of, maximum_of
from .scope import Replacement, Rule, Scope, respelled, spelled

_GLOBAL_TYPES = (ir.DataType.DOUBLE, ir.DataType.FLOAT, ir.DataType.FLOAT16)  # of global pools in every opset


def pad_explicitly(node: ir.Node, scope: Scope) -> Replacement | None:
    """`auto_pad` of a convolution or pool becomes `pads`: in all, what makes the output length ceil(input / stride).

    Where a call decides how many these are, as of odd and even lengths with strides, they become a Pad.
    """
    mode, dims = node.attributes.get_string("auto_pad", "NOTSET"), static_shape(node.inputs[0])
    weights = static_shape(node.inputs[1]) if node.op_type == "Conv" else None
    kernel = tuple(node.attributes.get_ints("kernel_shape") or ()) or (weights or ())[2:]
    if mode == "NOTSET" or not kernel or (dims is None and mode != "VALID"):
        return None
    before, after = _same_pads(node, mode, dims[2:], kernel) if dims is not None and mode != "VALID" else ([0] * len(kernel),) * 2
    attributes = {name: attribute for name, attribute in node.attributes.items() if name != "auto_pad"}
    if any(isinstance(pad, Size) for pad in (*before, *after)):
        return _pad_apart(node, scope, before, after, attributes)
    return respelled(node, node.inputs, {**attributes, "pads": ir.AttrInt64s("pads", [*before, *after])})


def _pad_apart(
    node: ir.Node, scope: Scope, before: Sequence[int], after: Sequence[int], attributes: Mapping[str, ir.Attr]
) -> Replacement | None:
    """A window without padding behind a Pad; None of averages, whose counts leave padding out, and where places are asked for."""
    x = node.inputs[0]
    if node.op_type not in ("Conv", "LpPool", "MaxPool") or x is None or x.dtype is None or any(map(is_read, node.outputs[1:])):
        return None
    operands = [x, scope.ints((0, 0, *before, 0, 0, *after), f"{x.name}_pads")]
    if node.op_type == "MaxPool":
        least = -np.inf if x.dtype.is_floating_point() else np.iinfo(x.dtype.numpy()).min
        operands.append(scope.constant(np.array(least, x.dtype.numpy()), f"{x.name}_least"))
    pad = operation("Pad", operands)
    window = respelled(node, (pad.outputs[0], *node.inputs[1:]), attributes)
    return Replacement((pad, *window.nodes), window.outputs)


def take_padding(node: ir.Node, scope: Scope) -> Replacement | None:
    """A convolution pads by itself what a Pad of zeros around its positions does before it."""
    source = node.inputs[0]
    pad = None if source is None else source.producer()
    if pad is None or pad.op_type != "Pad" or pad.domain or node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    rank = rank_of(source)
    added = None if rank is None else _zeros_around(pad, rank)
    if rank is None or added is None:
        return None
    own = node.attributes.get_ints("pads") or (0,) * (2 * rank - 4)
    pads = [a + b for a, b in zip(own, (*added[2:rank], *added[rank + 2 :]), strict=True)]
    return respelled(node, (pad.inputs[0], *node.inputs[1:]), {**node.attributes, "pads": ir.AttrInt64s("pads", pads)})


def drop_taps_of_padding(node: ir.Node, scope: Scope) -> Replacement | None:
    """A convolution has no taps at the ends of its window that meet zeros alone: 3x3 with 24 positions between the taps is 1x1 on
    20x20 positions, and so is 3x3 on one position.
    """
    dims, outputs, weights = (static_shape(value) for value in (node.inputs[0], node.outputs[0], node.inputs[1]))
    pads = node.attributes.get_ints("pads") or ()
    if dims is None or outputs is None or weights is None or not any(pads) or 0 in (*dims, *outputs, *weights):
        return None
    if node.attributes.get_string("auto_pad", "NOTSET") != "NOTSET":
        return None
    rank = len(dims) - 2
    strides, dilations = (node.attributes.get_ints(name) or (1,) * rank for name in ("strides", "dilations"))
    geometry = zip(dims[2:], outputs[2:], weights[2:], strides, dilations, pads[:rank], pads[rank:], strict=True)
    # Of sizes that a call decides: at the largest, where a tap meets the input that does so anywhere.
    ranges = [_taps_of_input(greatest_of(length), greatest_of(count), *axis) for length, count, *axis in geometry]
    kept = (slice(None), slice(None), *(slice(begin, end) for begin, end in ranges))
    if ranges == [(0, taps) for taps in weights[2:]] or (array := constant_array(node.inputs[1])) is None:
        return None
    if not np.isfinite(array.astype(np.float64)).all():  # which times zero is not zero
        return None
    before = [pad - begin * step for pad, (begin, _), step in zip(pads[:rank], ranges, dilations, strict=True)]
    after = [
        pad - (taps - end) * step for pad, taps, (_, end), step in zip(pads[rank:], weights[2:], ranges, dilations, strict=True)
    ]
    smaller = scope.constant(np.ascontiguousarray(array[kept]), node.inputs[1].name if node.inputs[1] else None)
    attributes = {name: attribute for name, attribute in node.attributes.items() if name != "kernel_shape"}
    attributes["pads"] = ir.AttrInt64s("pads", [*before, *after])
    return respelled(node, (node.inputs[0], smaller, *node.inputs[2:]), attributes)


def spread_one_position(node: ir.Node, scope: Scope) -> Replacement | None:
    """A transposed convolution of one position, as a generator's first, is a product by its window: 1x1 to 4x4 by 4x4 taps would
    multiply 16 times as much, most of it zeros. Its channels lie last. Scales and shifts behind it are folded into weights first.
    """
    x, weights, bias = node.inputs[0], node.inputs[1], input_at(node, 2)
    dims, outputs, window = (static_shape(value) for value in (x, node.outputs[0], weights))
    if dims is None or outputs is None or window is None or 0 in (*dims, *outputs) or set(dims[2:]) != {1}:
        return None
    attributes, rank = node.attributes, len(dims) - 2
    is_plain = attributes.get_string("auto_pad", "NOTSET") == "NOTSET" and "output_shape" not in attributes
    if not is_plain or attributes.get_int("group", 1) != 1 or set(attributes.get_ints("dilations") or (1,)) != {1}:
        return None
    if any(attributes.get_ints("output_padding") or ()) or any(map(_is_folded, node.outputs[0].consumers())):
        return None
    array, shift = constant_array(weights), None if bias is None else constant_array(bias)
    if array is None or (bias is not None and shift is None):
        return None
    begins = (attributes.get_ints("pads") or (0,) * rank)[:rank]
    cut = (slice(None), slice(None), *(slice(b, b + length) for b, length in zip(begins, outputs[2:], strict=True)))
    taps = np.moveaxis(array[cut], 1, -1)
    matrix = scope.constant(np.ascontiguousarray(taps.reshape(dims[1], -1)), weights.name if weights else None)
    row = operation("Reshape", [x, scope.ints(dims[:2], f"{node.outputs[0].name}_row")])
    operands = [row.outputs[0], matrix]
    if shift is not None:
        operands.append(scope.constant(np.tile(shift, prod(outputs[2:])), bias.name if bias else None))
    product = operation("MatMul" if shift is None else "Gemm", operands)
    shape = scope.ints((dims[0], *outputs[2:], outputs[1]), f"{node.outputs[0].name}_image")
    image = operation("Reshape", [product.outputs[0], shape])
    return spelled(row, product, image, operation("Transpose", image.outputs, perm=[0, rank + 1, *range(1, rank + 1)]))


def _is_folded(user: ir.Node) -> bool:
    """Whether a node is one that fold-batchnorm may take into the weights before it."""
    is_affine = user.op_type in ("Add", "Mul") and any(map(is_constant, user.inputs))
    return user.domain == "" and (is_affine or user.op_type == "BatchNormalization")


def _taps_of_input(length: int, outputs: int, taps: int, stride: int, dilation: int, before: int, after: int) -> tuple[int, int]:
    """The taps [begin, end) of a window along one axis, without those at its ends that no window lays on the input. As many are
    left as padding cannot be given up for, and one at least.
    """

    def meets_input(tap: int) -> bool:
        start = tap * dilation - before  # where it lies in the first window
        window = max(0, -(start // stride))  # the first one that it does not lie before the input in
        return window < outputs and window * stride + start < length

    begin, end = 0, taps
    while begin < end - 1 and not meets_input(begin) and before >= (begin + 1) * dilation:
        begin += 1
    while end - 1 > begin and not meets_input(end - 1) and after >= (taps - end + 1) * dilation:
        end -= 1
    return begin, end


def _zeros_around(pad: ir.Node, rank: int) -> list[int] | None:
    """How many zeros a Pad puts before each axis and then after each; None where it does something else."""
    operands = [*pad.inputs[1:], None, None, None][:3]
    fill = operands[1]
    is_zero = pad.attributes.get_float("value", 0.0) == 0 if fill is None else uniform_constant(fill) == 0
    given = pad.attributes.get_ints("pads") if operands[0] is None else int_constants(operands[0])
    axes = tuple(range(rank)) if operands[2] is None else int_constants(operands[2])
    if pad.attributes.get_string("mode", "constant") != "constant" or not is_zero or given is None or axes is None:
        return None
    added = [0] * (2 * rank)
    for place, count in enumerate(given):
        added[axes[place % len(axes)] % rank + rank * (place >= len(axes))] = count
    is_spatial = not any((*added[:2], *added[rank : rank + 2]))
    return added if is_spatial and min(added) >= 0 else None


def pool_globally(node: ir.Node, scope: Scope) -> Replacement | None:
    """A pool of one window that holds all positions is the global one. With `ceil_mode` it may reach beyond them, as the pool of
    EfficientNet's 1280 channels does, of 1280x1280 positions: what lies there does not count.
    """
    dims, outputs = static_shape(node.inputs[0]), static_shape(node.outputs[0])
    kernel = node.attributes.get_ints("kernel_shape") or ()
    if dims is None or outputs is None or node.outputs[0].dtype not in _GLOBAL_TYPES:
        return None
    if set(outputs[2:]) != {1} or any(is_read(output) for output in node.outputs[1:]):
        return None
    is_plain = not any(node.attributes.get_ints("pads") or ()) and set(node.attributes.get_ints("dilations") or (1,)) == {1}
    if not is_plain or any(window < extent for window, extent in zip(kernel, dims[2:], strict=True)):
        return None
    return spelled(operation(f"Global{node.op_type}", [node.inputs[0]]))


def _same_pads(node: ir.Node, mode: str, lengths: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Padding before and after each spatial axis; an odd one goes to the end (SAME_UPPER) or the beginning (SAME_LOWER)."""
    ones = (1,) * len(kernel)
    strides = node.attributes.get_ints("strides") or ones
    dilations = node.attributes.get_ints("dilations") or ones
    before, after = [], []
    for length, window, stride, dilation in zip(lengths, kernel, strides, dilations, strict=True):
        outputs = -(-length // stride)
        total = maximum_of(0, (outputs - 1) * stride + (window - 1) * dilation + 1 - length)
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return before, after


RULES: dict[str, tuple[Rule, ...]] = {
    "LpPool": (pad_explicitly,),
    **dict.fromkeys(("AveragePool", "MaxPool"), (pad_explicitly, pool_globally)),
    "Conv": (pad_explicitly, take_padding, drop_taps_of_padding),
    "ConvTranspose": (spread_one_position,),
}
