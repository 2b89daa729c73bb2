"""Channels-last groups whose epilogue does not ask which image and position a result is of: all positions as one dimension.

The result is then a matrix, positions by channels, whose offsets need no division.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ...runtime.plan import TensorType
from ..groups.group import Group
from .channels_last_form import ChannelsLast


def merge_positions(form: ChannelsLast) -> ChannelsLast | None:
    """The form with images and spatial dimensions as one, (1, channels, positions) and in memory (1, positions, channels); None
    where an operand of the epilogue spans some of them only.

    The types of the anchor's own operands stay as they are.
    """
    anchor = form.anchor
    shape = form.inner.types[anchor.outputs[0]].shape
    beside = {name for op in form.inner.ops if op is not anchor for name in (*op.inputs, *op.outputs) if name}
    first = {name: _merged(form.inner.types[name].shape, shape) for name in beside | {anchor.outputs[0]}}
    lying = {form.operands[name] for name in beside & form.operands.keys()}
    if any(one is None for one in first.values()) or not lying <= set(form.outer.inputs):
        return None
    last: dict[str, tuple[int, ...]] = {
        name: (1, *_positions_last(first[inner])) for inner, name in form.operands.items() if name in lying
    }
    for one in form.destinations:
        *places, channels = form.outer.types[one.parameter].shape
        last[one.parameter] = (1, prod(places), channels)
    inner = _retyped(form.inner, {name: one for name, one in first.items() if one is not None})
    return replace(form, inner=inner, outer=_retyped(form.outer, last))


def _merged(source: tuple[int, ...], shape: Sequence[int]) -> tuple[int, ...] | None:
    """The shape of what broadcasts to (images, channels, *spatial), with all but channels as one, the last."""
    padded = (1,) * (len(shape) - len(source)) + source
    images, channels, *places = padded
    if (images, *places) == (shape[0], *shape[2:]):
        return (1, channels, images * prod(places))
    return (1, channels, 1) if images * prod(places) == 1 else None


def _positions_last(shape: tuple[int, ...] | None) -> tuple[int, int]:
    assert shape is not None
    _, channels, positions = shape
    return positions, channels


def _retyped(group: Group, shapes: dict[str, tuple[int, ...]]) -> Group:
    types = dict(group.types)
    types |= {name: TensorType(shape, group.types[name].dtype) for name, shape in shapes.items()}
    return replace(group, types=types)
