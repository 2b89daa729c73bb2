"""What a node permits: the layouts it can work in, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import onnx_ir as ir

from ....compiler.ir.assignments.kernel_choice import KernelChoice, NoKernel
from ....compiler.ir.facts import has_static_type, tensor_type
from ....compiler.ir.kinds import Kind, kind_of
from ....compiler.ir.matching import static_shape

RANKS = (3, 4, 5)  # of signals, images and volumes, of which everything said of images holds

# A window slides over images; others work on other axes; a mean, a flat and tokens have no result that is an image; what comes
# from tokens or from last is one that others have made channels-last.
Form = Literal["window", "other-axes", "mean", "flat", "tokens", "to-last", "from-tokens", "from-last"]
_ENDS = ("mean", "flat", "tokens", "to-last")


@dataclass(frozen=True, slots=True)
class WindowKernels:
    """What computes a convolution in each layout, and channels-last from an image that lies channels-first."""

    first: KernelChoice | NoKernel
    last: KernelChoice
    direct: KernelChoice | NoKernel


@dataclass(frozen=True, slots=True)
class Flexible:
    """A node that may compute channels-last: its operands at the positions `operands`, and what it makes, then lie so.

    `direct` are positions that it can also read channels-first when it is channels-last, at the cost of `direct_cycles`. Costs
    are cycles; what is the same in both layouts is left out of those of nodes that only move bytes. `kernels` are those of a
    convolution.
    """

    node: ir.Node
    form: Form
    operands: tuple[int, ...]
    direct: tuple[int, ...] = ()
    first_cycles: float = 0.0
    last_cycles: float = 0.0
    direct_cycles: float = 0.0
    kernels: WindowKernels | None = None

    @property
    def images(self) -> tuple[ir.Value, ...]:
        """The outputs that lie one way or the other."""
        return () if self.form in _ENDS else tuple(output for output in self.node.outputs if output.name)


def to_first(rank: int) -> tuple[int, ...]:
    """The permutation that moves the channels, the last dimension, to where ONNX has them; also where each axis lies then."""
    return (0, rank - 1, *range(1, rank - 1))


def to_last(rank: int) -> tuple[int, ...]:
    """The permutation that moves the channels behind all positions."""
    return (0, *range(2, rank), 1)


def is_image(value: ir.Value | None) -> bool:
    """Whether a value has the dimensions of a signal, an image or a volume, all known."""
    return value is not None and has_static_type(value) and len(tensor_type(value).shape) in RANKS


def is_laid(value: ir.Value) -> bool:
    """Whether the order of the dimensions of an image matters in memory: it has several channels and several positions."""
    shape = static_shape(value) or ()
    return len(shape) in RANKS and shape[1] > 1 and prod(shape[2:]) > 1


def conversion_bytes(value: ir.Value) -> int:
    """Bytes of a value that a kernel must move to give it the other layout."""
    return tensor_type(value).size_bytes if is_laid(value) else 0


def as_it_lies(value: ir.Value | None) -> ir.Value | None:
    """What a kernel reads for an operand: the narrow value of which a Cast makes float32."""
    producer = None if value is None else value.producer()
    return value if producer is None or kind_of(producer) is not Kind.OPERAND else producer.inputs[0]
