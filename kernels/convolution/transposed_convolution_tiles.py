"""ConvTranspose of signals, images and volumes by AMX, NHWC.

Its phases are convolutions of stride 1 (transposed_phases.py): a 2x2 kernel with stride 2 is four products of the same rows with
weights of their own, whose results interleave.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ...runtime.target import Target
from ..codegen.builder import Expr, Index, unravel
from ..groups.group import Group
from ..microkernels.amx_packing import LINES
from ..microkernels.amx_unit import tile_dot_of
from ..template.contract import Candidate, Refusal
from .amx_input import TiledImage, WindowProduct, as_volume
from .channels_last_form import ChannelsLast, channels_last_form
from .implicit_gemm_amx import TiledWindows, in_bands, tile_format, tiles_estimate, tiles_obstacle
from .transposed_phases import PackPhases, PhaseProduct, phase_products, reaches_of
from .window import Taps, Window, read_window

_TEMPLATE = "transposed_convolution_tiles"
_MAX_PRODUCTS = 16  # each has code of its own
_NOTHING = Taps(0, 1, 1, 0, 0)  # the taps of a missing dimension


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one ConvTranspose of float32, bfloat16 or bytes with constant weights whose result is transposed to NHWC."""
    form = channels_last_form(group, may_join=True)
    if isinstance(form, Refusal):
        return form
    if form.anchor.op_type != "ConvTranspose":
        return Refusal("has no transposed convolution for the tile unit")
    if reason := tiles_obstacle(form, target):
        return Refusal(reason)
    window = read_window(form.inner, form.anchor)
    phases = phase_products(window)
    if len(phases) > _MAX_PRODUCTS:
        return Refusal(f"{len(phases)} different phases of output positions, more than {_MAX_PRODUCTS}")
    if not all(one.count for product in phases for one in product.taps):
        return Refusal("some phases of output positions are the bias alone")
    leads, reaches = reaches_of(phases)
    image = _image(form, phases, leads, reaches, target)
    parts = [_product(form, window, one, leads) for one in phases]
    image = in_bands(form, image, parts, target)
    return Candidate(tiles_estimate(form, target, image), lambda: TiledWindows(form, target, image).build(_TEMPLATE, parts))


def _image(form: ChannelsLast, phases: list[PhaseProduct], leads: list[int], reaches: list[int], target: Target) -> TiledImage:
    """The layout of the input that the kernel reads."""
    source, groups, one = form.inner.types[form.anchor.inputs[0]], form.anchor.attribute("group", 1), tile_format(form, target)
    ones = (1, 1, 1)
    image = TiledImage(
        source, ones, as_volume(leads, 0), ones, as_volume(reaches, 1), one.terms, groups, product=tile_dot_of(one)
    )
    return replace(image, in_place=image.lies_in_place(form, [as_volume(one.positions, 1) for one in phases]))


def _product(form: ChannelsLast, window: Window, phases: PhaseProduct, leads: list[int]) -> WindowProduct:
    groups = form.anchor.attribute("group", 1)
    inputs, outputs, *kernel = form.inner.types[form.anchor.inputs[1]].shape
    pack = PackPhases((groups, inputs // groups, outputs, *kernel), phases.phases, phases.places, LINES)
    taps = [replace(one, begin=one.begin + lead) for one, lead in zip(phases.taps, leads, strict=True)]

    def place(phase: Expr, position: Index) -> Index:
        parts = zip(position, window.strides, phases.runs, unravel(phase, phases.phases), strict=True)
        return tuple(u * stride + run.first + part for u, stride, run, part in parts)

    return WindowProduct(as_volume(taps, _NOTHING), as_volume(phases.positions, 1), pack, prod(phases.phases), place)
