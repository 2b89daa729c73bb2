"""Conv of signals, images and volumes by AMX, NHWC: positions are rows of tiles, channels are columns."""

from __future__ import annotations

from dataclasses import replace

from ...runtime.target import Target
from ..cost.amx import joined_columns
from ..groups.group import Group
from ..microkernels.amx_packing import LINES
from ..microkernels.amx_unit import tile_dot_of
from ..microkernels.packing import PackPanels
from ..template.contract import Candidate, Refusal
from .amx_input import TiledImage, WindowProduct, as_planes
from .channels_last_form import ChannelsLast, channels_last_form, extents_of
from .implicit_gemm_amx import TiledWindows, in_bands, tile_format, tiles_estimate, tiles_obstacle
from .window import Taps, Window, read_window

_TEMPLATE = "convolution_tiles"


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one Conv of float32, bfloat16 or bytes with constant weights whose result, float32 or the sums, is transposed to
    NHWC."""
    form = channels_last_form(group, may_join=True)
    if isinstance(form, Refusal):
        return form
    if form.anchor.op_type != "Conv":
        return Refusal("has no convolution for the tile unit")
    if reason := tiles_obstacle(form, target):
        return Refusal(reason)
    window = as_planes(read_window(form.inner, form.anchor))
    image = image_of(form, window, target)
    kernel = (*window.kernel[:2], 1 if image.joined > 1 else window.kernel[2])
    taps = tuple(Taps(0, 1, count, 0, dilation) for count, dilation in zip(kernel, window.dilations, strict=True))
    product = WindowProduct(taps, window.outputs, _weights(form), 1, lambda _, position: position)
    image = in_bands(form, image, [product], target)
    estimate = tiles_estimate(form, target, image)
    return Candidate(estimate, lambda: TiledWindows(form, target, image).build(_TEMPLATE, [product]))


def image_of(form: ChannelsLast, window: Window, target: Target) -> TiledImage:
    """The layout of the input that the kernel reads."""
    source, groups, one = form.inner.types[form.anchor.inputs[0]], form.anchor.attribute("group", 1), tile_format(form, target)
    product = tile_dot_of(one)
    joined = joined_columns(extents_of(form), product.k_pack)
    last = [(taps - 1) * dilation for taps, dilation in zip(window.kernel, window.dilations, strict=True)]
    if joined > 1:
        last[2] = 0
    taps = [range(0, end + 1, dilation) for end, dilation in zip(last, window.dilations, strict=True)]
    places = [[divmod(tap, stride) for tap in some] for some, stride in zip(taps, window.strides, strict=True)]
    phases = tuple(max(phase for _, phase in some) + 1 for some in places)
    extents = tuple(count + max(ahead for ahead, _ in some) for count, some in zip(window.outputs, places, strict=True))
    image = TiledImage(source, window.strides, window.begins, phases, extents, one.terms, groups, joined, product=product)
    return replace(image, in_place=image.lies_in_place(form, [window.outputs]))


def _weights(form: ChannelsLast) -> PackPanels:
    groups = form.anchor.attribute("group", 1)
    outputs, inputs, *kernel = form.inner.types[form.anchor.inputs[1]].shape
    shape = (groups, outputs // groups, inputs, *kernel)
    return PackPanels(shape, (0, 1, *range(3, len(shape)), 2), 1, 1, LINES)
