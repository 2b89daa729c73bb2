"""1x1 convolutions, NHWC, by Strassen's algorithm, where the precision allows its larger errors.

Rows of A are positions, columns of B output channels. Strides skip rows of A, which is read in place.
"""

from __future__ import annotations

from math import prod

from ...runtime.target import Target
from ..codegen.builder import Expr, row_major, unravel
from ..groups.group import Group
from ..linalg.matmul import Side
from ..linalg.strassen_product import StrassenProduct, strassen_obstacle
from ..template.contract import Candidate, Refusal
from ..template.kernel import new_builder
from ..template.values import GroupValues
from .channels_last_form import ChannelsLast, channels_last_form
from .window import Window, read_window

_TEMPLATE = "strassen_convolution"


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one float32 1x1 Conv in NHWC form, with its epilogue, large enough to be cut into blocks."""
    form = channels_last_form(group, may_join=True)
    if isinstance(form, Refusal):
        return form
    anchor, inner = form.anchor, form.inner
    if anchor.op_type != "Conv":
        return Refusal("has no convolution")
    window = read_window(inner, anchor)
    if reason := strassen_obstacle(group, inner, anchor, target) or _obstacle(form, window):
        return Refusal(reason)
    image, weights, *biases = anchor.inputs
    images, channels, *_ = inner.types[image].shape
    builder = new_builder(target, group.configuration)
    a = Side(form.operands[image], (), images * prod(window.outputs), channels, lines_last=False)
    b = Side(weights, (), inner.types[weights].shape[0], channels, lines_last=False)

    def begin(row: Expr) -> Expr:
        number, *place = unravel(row, (images, *window.outputs))
        places = (i * stride for i, stride in zip(place, window.strides, strict=True))
        return row_major((number, *places), (images, *window.inputs)) * channels

    def store(row: Expr, column: Expr, value: Expr) -> None:
        number, *place = unravel(row, (images, *window.outputs))
        for bias in filter(None, biases):
            value = value + GroupValues(inner, builder).read(bias, (column,))
        form.store_epilogue(builder, (number, column, *place), value)

    inplace = form.same_place_operands(builder)
    product = StrassenProduct(_TEMPLATE, group, anchor, target, builder, a, b, begin=begin, store=store, inplace=inplace)
    return product.plan(inner, lambda: form.copy_pieces(builder))


def _obstacle(form: ChannelsLast, window: Window) -> str:
    image, weights, *_ = form.anchor.inputs
    if image not in form.operands:
        return "its input lies channels-first"
    if form.is_computed():
        return "its input is computed"
    if weights not in form.inner.constants:
        return "its weights are not constant"
    ends = ((count - 1) * stride for count, stride in zip(window.outputs, window.strides, strict=True))
    is_inside = not any(window.begins) and all(end < extent for end, extent in zip(ends, window.inputs, strict=True))
    is_product = form.anchor.attribute("group", 1) == 1 and prod(window.kernel) == 1 and is_inside
    return "" if is_product else "its windows are not of one position of the image and all of its channels"
