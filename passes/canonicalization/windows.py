"""One spelling for windows: the padding of convolutions and pools as numbers."""

from __future__ import annotations

import onnx_ir as ir

from .scope import Replacement, Rule, Scope, respelled, static_shape


def pad_explicitly(node: ir.Node, scope: Scope) -> Replacement | None:
    """`auto_pad` of a convolution or pool becomes `pads`: in all, what makes the output length ceil(input / stride)."""
    mode, dims = node.attributes.get_string("auto_pad", "NOTSET"), static_shape(node.inputs[0])
    weights = static_shape(node.inputs[1]) if node.op_type == "Conv" else None
    kernel = tuple(node.attributes.get_ints("kernel_shape") or ()) or (weights or ())[2:]
    if mode == "NOTSET" or not kernel or (dims is None and mode != "VALID"):
        return None
    before, after = _same_pads(node, mode, dims[2:], kernel) if dims is not None and mode != "VALID" else ([0] * len(kernel),) * 2
    attributes = {name: attribute for name, attribute in node.attributes.items() if name != "auto_pad"}
    return respelled(node, node.inputs, {**attributes, "pads": ir.AttrInt64s("pads", [*before, *after])})


def _same_pads(node: ir.Node, mode: str, lengths: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Padding before and after each spatial axis; an odd one goes to the end (SAME_UPPER) or the beginning (SAME_LOWER)."""
    ones = (1,) * len(kernel)
    strides = node.attributes.get_ints("strides") or ones
    dilations = node.attributes.get_ints("dilations") or ones
    before, after = [], []
    for length, window, stride, dilation in zip(lengths, kernel, strides, dilations, strict=True):
        outputs = -(-length // stride)
        total = max(0, (outputs - 1) * stride + (window - 1) * dilation + 1 - length)
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return before, after


RULES: dict[str, tuple[Rule, ...]] = dict.fromkeys(("AveragePool", "Conv", "LpPool", "MaxPool"), (pad_explicitly,))
