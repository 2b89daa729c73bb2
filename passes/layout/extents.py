"""The numbers of a convolution of the graph, as its costs are told by."""

from __future__ import annotations

from math import ceil, prod

import onnx_ir as ir

from ...compiler.ir.facts import tensor_type
from ...kernels.costs import Convolution
from .forms import as_it_lies


def convolution_extents(anchor: ir.Node) -> Convolution:
    """Of a Conv whose shapes are static."""
    source, weights, result = (
        tensor_type(value) for value in (*map(as_it_lies, anchor.inputs[:2]), anchor.outputs[0]) if value is not None
    )
    groups, ones = anchor.attributes.get_int("group", 1), (1,) * (len(source.shape) - 2)
    kernel, strides = weights.shape[2:], tuple(anchor.attributes.get_ints("strides", ones))
    dilations = tuple(anchor.attributes.get_ints("dilations", ones))
    reaches = [
        (out - 1) * stride + (taps - 1) * dilation + 1
        for out, stride, taps, dilation in zip(result.shape[2:], strides, kernel, dilations, strict=True)
    ]
    overhangs = any(reach > extent for reach, extent in zip(reaches, source.shape[2:], strict=True))
    (height, width), (rows, columns) = _as_plane(source.shape[2:]), _as_plane(result.shape[2:])
    return Convolution(
        images=source.shape[0],
        groups=groups,
        inputs=weights.shape[1],
        outputs=weights.shape[0] // max(groups, 1),
        height=height,
        width=width,
        rows=rows,
        columns=columns,
        kernel=_as_plane(kernel),
        strides=_as_plane(strides),
        dilations=_as_plane(dilations),
        depths=prod(kernel[:-2]),
        gaps=prod(result.shape[2:-2]) * (kernel[-2] - 1) if len(ones) > 2 else 0,
        is_padded=overhangs or any(anchor.attributes.get_ints("pads", ())),
        element_bytes=source.size_bytes // max(source.elements, 1),
    )


def _as_plane(extents: tuple[int, ...]) -> tuple[int, int]:
    """Extents of all dimensions but the last as one: lines of a volume cost what those of an image do."""
    return prod(extents[:-1]), extents[-1]


def phase_extents(anchor: ir.Node) -> Convolution:
    """A transposed convolution as what it is about: a convolution of stride 1 with as many times the outputs as it has phases."""
    source, weights, result = (
        tensor_type(value) for value in (*map(as_it_lies, anchor.inputs[:2]), anchor.outputs[0]) if value is not None
    )
    groups, strides = anchor.attributes.get_int("group", 1), numbers_of(anchor, "strides")
    (height, width), extents = _as_plane(source.shape[2:]), [ceil(n / s) for n, s in zip(result.shape[2:], strides, strict=True)]
    taps = [ceil(n / s) for n, s in zip(weights.shape[2:], strides, strict=True)]
    rows, columns = _as_plane(tuple(extents))
    return Convolution(
        images=source.shape[0],
        groups=groups,
        inputs=weights.shape[0] // max(groups, 1),
        outputs=weights.shape[1] * prod(strides),
        height=height,
        width=width,
        rows=rows,
        columns=columns,
        kernel=_as_plane(tuple(taps)),
        strides=(1, 1),
        is_padded=prod(taps) > 1 or (*extents,) != source.shape[2:] or any(anchor.attributes.get_ints("pads", ())),
        element_bytes=source.size_bytes // max(source.elements, 1),
    )


def numbers_of(anchor: ir.Node, name: str) -> tuple[int, ...]:
    """An attribute with a number for each spatial dimension, 1 where it is absent."""
    rank = len(tensor_type(anchor.outputs[0]).shape)
    return tuple(anchor.attributes.get_ints(name, (1,) * (rank - 2)))
