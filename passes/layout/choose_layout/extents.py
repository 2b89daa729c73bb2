"""The numbers of a convolution of the graph, as its costs are told by."""

from __future__ import annotations

import onnx_ir as ir

from ....compiler.ir.facts import tensor_type
from ....kernels.cost.convolution import Convolution
from .forms import as_it_lies


def convolution_extents(anchor: ir.Node) -> Convolution:
    """Of a Conv whose shapes are static."""
    source, weights, result = (
        tensor_type(value) for value in (*map(as_it_lies, anchor.inputs[:2]), anchor.outputs[0]) if value is not None
    )
    groups, ones = anchor.attributes.get_int("group", 1), (1,) * (len(source.shape) - 2)
    return Convolution.of_dimensions(
        (source.shape[0], groups, weights.shape[1], weights.shape[0] // max(groups, 1)),
        source.shape[2:],
        result.shape[2:],
        weights.shape[2:],
        anchor.attributes.get_ints("strides", ones),
        anchor.attributes.get_ints("dilations", ones),
        has_pads=any(anchor.attributes.get_ints("pads", ())),
        element_bytes=source.size_bytes // max(source.elements, 1),
    )


def phase_extents(anchor: ir.Node) -> Convolution:
    """A transposed convolution as what it is about."""
    source, weights, result = (
        tensor_type(value) for value in (*map(as_it_lies, anchor.inputs[:2]), anchor.outputs[0]) if value is not None
    )
    groups = anchor.attributes.get_int("group", 1)
    return Convolution.of_phases(
        (source.shape[0], groups, weights.shape[0] // max(groups, 1), weights.shape[1]),
        source.shape[2:],
        result.shape[2:],
        weights.shape[2:],
        numbers_of(anchor, "strides"),
        has_pads=any(anchor.attributes.get_ints("pads", ())),
        element_bytes=source.size_bytes // max(source.elements, 1),
    )


def numbers_of(anchor: ir.Node, name: str) -> tuple[int, ...]:
    """An attribute with a number for each spatial dimension, 1 where it is absent."""
    rank = len(tensor_type(anchor.outputs[0]).shape)
    return tuple(anchor.attributes.get_ints(name, (1,) * (rank - 2)))
