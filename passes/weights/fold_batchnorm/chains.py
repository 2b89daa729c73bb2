"""Runs of scales and shifts next to a product or convolution, as one scale and one shift for each of its channels."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ....compiler.ir.kinds import Kind, kind_of
from ....compiler.ir.matching import is_constant
from ....compiler.ir.rewriter import Rejection
from .anchors import Anchor
from .channels import Channels, after, before
from .operators import Affine, affine_of

LARGEST_SHIFT = 4.0  # of an operand, taken for one of the order of 1, that may become a shift of the result


@dataclass(frozen=True, slots=True)
class Chain:
    """What the nodes next to an anchor do to each channel of its operand or result, in float64."""

    affines: tuple[Affine, ...]
    scale: np.ndarray
    shift: np.ndarray

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        return tuple(affine.node for affine in self.affines)


@dataclass(slots=True)
class _Search:
    """The walk away from an anchor, through what commutes, until something does not."""

    anchor: Anchor
    channels: Channels
    scale: np.ndarray
    shift: np.ndarray
    affines: list[Affine] = field(default_factory=list)
    rejection: Rejection | None = None

    @classmethod
    def along(cls, anchor: Anchor, dim: int, axis: int) -> _Search:
        count = anchor.channels(dim)
        return cls(anchor, Channels.along(axis, count), np.ones(count), np.zeros(count))

    def reject(self, affine: Affine, reason: str) -> None:
        anchor = self.anchor.node
        self.rejection = Rejection(f"{affine.node.op_type} not folded into {anchor.op_type}: {reason}", (affine.node, anchor))

    def take(self, affine: Affine, compose: Callable[[np.ndarray, np.ndarray], None]) -> bool:
        """Add the node to the chain by `compose`, given its scale and shift; else say why not."""
        found = affine.coefficients(self.channels)
        if isinstance(found, str):
            self.reject(affine, found)
            return False
        scale, shift = found
        if (pool := self.channels.monotone) is not None and (scale < 0).any():
            self.reject(affine, f"{pool.op_type} lies between, and a scale is negative")
        elif (pool := self.channels.linear) is not None and shift.any():
            self.reject(affine, f"{pool.op_type} lies between, which counts its padding")
        elif not (np.isfinite(scale).all() and np.isfinite(shift).all()):
            self.reject(affine, "a number would not be finite")
        else:
            self.affines.append(affine)
            with np.errstate(all="ignore"):
                compose(scale, shift)
            return True
        return False

    def chain(self) -> Chain | None:
        return Chain(tuple(self.affines), self.scale, self.shift) if self.affines else None


def chain_after(anchor: Anchor) -> tuple[Chain | None, Rejection | None]:
    """The scales and shifts of an anchor's result, and why the walk ended where a further one is near."""
    search = _Search.along(anchor, anchor.output_dim, anchor.output_axis)

    def compose(scale: np.ndarray, shift: np.ndarray) -> None:
        index = search.channels.index
        search.scale[index] *= scale
        search.shift[index] = search.shift[index] * scale + shift

    value = anchor.node.outputs[0]
    while True:
        readers = value.consumers()
        affines = [affine for reader in readers if (affine := affine_of(reader)) is not None and affine.data is value]
        if (blame := _other_reader(value, anchor)) or not readers:
            if affines:
                search.reject(affines[0], blame)
            break
        (reader,) = readers
        if affines:
            if not search.take(affines[0], compose):
                break
        else:
            channels = after(reader, search.channels) if reader.inputs[0] is value else None
            if channels is None:
                break
            search.channels = channels
        value = reader.outputs[0]
    return search.chain(), search.rejection


def chain_before(anchor: Anchor, claimed: Set[ir.Node], *, keeps_inputs: bool) -> tuple[Chain | None, Rejection | None]:
    """The scales and shifts of an anchor's operand that are not `claimed`, and why the walk ended where a further one is near.

    All or none of them: none where together they shift by more than `LARGEST_SHIFT`, or, with `keeps_inputs`, where they scale
    what pointwise operators and moves make of inputs of the graph.
    """
    search = _Search.along(anchor, 1 - anchor.output_dim, anchor.input_axis)

    def compose(scale: np.ndarray, shift: np.ndarray) -> None:
        index = search.channels.index
        full_scale, full_shift = (numbers[index] if len(numbers) > 1 else numbers for numbers in (scale, shift))
        search.shift += full_shift * search.scale
        search.scale *= full_scale

    value: ir.Value | None = anchor.data
    while (
        value is not None
        and (producer := value.producer()) is not None
        and producer not in claimed
        and value is producer.outputs[0]
    ):
        affine, blame = affine_of(producer), _other_reader(value, anchor)
        if affine is None:
            channels = None if blame else before(producer, search.channels)
            if channels is None:
                break
            search.channels, value = channels, producer.inputs[0]
            continue
        if reason := blame or ("" if affine.is_scale else anchor.fault_of_shift()):
            search.reject(affine, reason)
        elif search.take(affine, compose):
            value = affine.data
            continue
        break
    if (largest := np.abs(search.shift).max(initial=0.0)) > LARGEST_SHIFT:
        shifting = next(affine for affine in reversed(search.affines) if not affine.is_scale)
        search.reject(shifting, f"a shift by {largest:.3g} of the operand is exact, one of the result is not")
    elif keeps_inputs and search.affines and _is_given(value):
        search.reject(search.affines[0], "it scales inputs of the graph")
    else:
        return search.chain(), search.rejection
    return None, search.rejection


def _is_given(value: ir.Value | None) -> bool:
    """Whether pointwise operators and moves alone make a value of inputs of the graph."""
    waiting, seen, is_found = [value], set[ir.Value](), False
    while waiting:
        one = waiting.pop()
        if one is None or one in seen or is_constant(one):
            continue
        seen.add(one)
        if (node := one.producer()) is None:
            is_found = True
            continue
        kind = kind_of(node)
        if kind > Kind.VIEW:
            return False
        is_moved = kind >= Kind.INJECTIVE and node.op_type != "Concat"
        waiting += node.inputs[:1] if is_moved else node.inputs
    return is_found


def _other_reader(value: ir.Value, anchor: Anchor) -> str:
    """Who but one node of the anchor's graph reads a value; empty if nobody does."""
    readers = value.uses()
    if value.is_graph_output():
        return f"%{value.name} is an output of the graph"
    if len(readers) > 1:
        return f"%{value.name} has {len(readers)} readers"
    if any(reader.graph is not anchor.node.graph for reader, _ in readers):
        return f"%{value.name} is read in a subgraph"
    return ""
