"""Which kernel computes a node, as passes ask it: the question and the answer, in terms that know nothing of templates.

The registry answers (`compiler/lowering/chooser.py`); passes reach it through their Context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir

from .operand_formats import Format
from .stored_form import StoredForm


@dataclass(frozen=True, slots=True)
class Variant:
    """A node or group as a pass would make it, told by positions of its operands.

    Operands in `formats` lie in memory in a narrow type, and Casts make float32 of them. Those in `stored` lie as integers, and a
    DequantizeLinear makes float32 of them. Those at `channels_last` lie
    channels-last, and so do all results with `has_channels_last_results`; Transposes around the node keep ONNX's order for it.
    """

    formats: tuple[tuple[int, Format], ...] = ()
    channels_last: tuple[int, ...] = ()
    has_channels_last_results: bool = False
    stored: tuple[tuple[int, StoredForm], ...] = ()


AS_IT_IS = Variant()


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The template that would compute a group, and its cycles on one core, its operands' bytes with them.

    `unit` is what makes its products: "fma", "dot", "tile" or "vector". With `transforms_weights` it multiplies by other numbers
    than its weights, so that rounding these saves no multiplication. `stored_runs`: neighbouring elements that it stores at a
    time, of each part of the result in turn; none are told of where vectors are full in any case, or where it is not known.
    `stores_parts`: a Concat along any axis of such results, read by it alone, is no copy.
    """

    template: str
    cycles: float
    unit: str
    transforms_weights: bool = False
    stored_runs: tuple[int, ...] = ()
    stores_parts: bool = False


@dataclass(frozen=True, slots=True)
class NoKernel:
    """Why no template computes a group: names and reasons."""

    refused: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "; ".join(f"{template}: {reason}" for template, reason in self.refused) or "no template is for its operators"


Ask: TypeAlias = Callable[[ir.Node, Variant], KernelChoice | NoKernel]
