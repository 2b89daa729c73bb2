"""The contract between a kernel template and those who choose and call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from ...runtime.plan import TensorType
from ...runtime.target import Target
from ..cost.estimate import Estimate, floors
from ..groups.configuration import Choice
from ..groups.group import Group


@dataclass(frozen=True)
class Refusal:
    """Why a template does not take a group."""

    reason: str


class Pack(Protocol):
    """Rearranges a constant operand, at compile time, into the layout that a kernel loads.

    A frozen dataclass, so that equal packs of one constant are stored once.
    """

    def __call__(self, array: np.ndarray) -> np.ndarray:
        """The packed copy, C-contiguous."""
        ...

    def packed_type(self, source: TensorType) -> TensorType:
        """Type of the result, known without the data."""
        ...


@dataclass(frozen=True)
class Operand:
    """An input of the group that the kernel reads, packed first if `pack` is given."""

    name: str
    pack: Pack | None = None


def packed_name(name: str, part: str = "") -> str:
    """What a kernel calls a constant that it reads packed: no value's name, as what follows may read the constant as it lies."""
    return f"{name}\0{part}"


@dataclass(frozen=True)
class BuiltKernel:
    """A kernel and how to call it: pointers of `operands`, then of the group's outputs, then the workspace and
    the barrier of a grid whose blocks meet, if they have bytes.

    `inplace` pairs (output index, operand index) may share one address. `refused` says why other templates were passed over,
    `choices` what was decided beside, and `ignored` what the group's configuration asked for in vain. `multiplies` is that of the
    Plan's Kernel, `work` an estimate of the scalar operations of its longest loop that may be parallel, 0 where none may, and
    `estimate` what its template expected.
    """

    template: str
    function: Any  # tirx.PrimFunc
    operands: tuple[Operand, ...]
    workspace_bytes: int = 0
    barrier_bytes: int = 0
    inplace: tuple[tuple[int, int], ...] = ()
    flops: int = 0
    multiplies: str = "float32"
    work: int = 0
    refused: tuple[tuple[str, str], ...] = ()
    choices: tuple[Choice, ...] = ()
    ignored: tuple[str, ...] = ()
    estimate: Estimate | None = None


@dataclass(frozen=True)
class Candidate:
    """What a template would do for a group: what that would take, and how to write it.

    Of several candidates the cheapest is written. Those for GPUs may refuse as late as `emit`. With
    `transforms_weights` it multiplies by other numbers than its weights, whose rounding then saves no multiplication.
    `stored_runs`: neighbouring elements of the result that it stores at a time, of each of its parts in turn, where those may
    fill no vectors.
    """

    estimate: Estimate
    emit: Callable[[], BuiltKernel | Refusal]
    transforms_weights: bool = False
    stored_runs: tuple[int, ...] = ()


Planner = Callable[[Group, Target], "Candidate | Refusal"]
Obstacle = Callable[[Group, Target], str]  # why a template does not take a group; empty if it does


def at_floors(build: Callable[[Group, Target], BuiltKernel | Refusal], obstacle: Obstacle | None = None) -> Planner:
    """The plan of a template that has no model of its own: the floors of the group's operators, or a Refusal by `obstacle`."""

    def plan(group: Group, target: Target) -> Candidate | Refusal:
        if obstacle is not None and (reason := obstacle(group, target)):
            return Refusal(reason)
        return Candidate(floors(group, target.machine), partial(build, group, target))

    return plan


@dataclass(frozen=True)
class Template:
    """One way to compute a kind of group. `plan` returns a Refusal where the group does not fit.

    Only groups whose operators that are neither pointwise nor views are among `anchors` are shown to it; groups without one, or
    of one view and pointwise operators, if that is empty. `has_surroundings`: it reads its operands through views and prologues
    and stores its result through views; else groups of its anchors with such operators are not for it. `has_prologue`: it
    computes a prologue of its first operand where it reads it. `reads_narrow`: it loads bfloat16 and float16 operands directly;
    it is shown the group without the Casts to float32.
    `reads_weights`: it loads constant integers with scales directly; it is shown the group without their DequantizeLinear.
    `stores_parts`: it stores a result as a part of the tensor that encloses it.
    """

    name: str
    plan: Planner
    anchors: frozenset[str] = frozenset()
    has_surroundings: bool = False
    reads_narrow: bool = False
    has_prologue: bool = False
    reads_weights: bool = False
    stores_parts: bool = False
