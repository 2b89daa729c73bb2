"""The registry's answer to which kernel computes a node as a pass would make it, before the graph has it."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ...kernels.groups.group import Group
from ...kernels.registry import candidates, stores_parts
from ...runtime.precision import Precision
from ...runtime.target import Target
from ..ir.assignments.kernel_choice import KernelChoice, NoKernel, Variant
from .groups import GroupReader
from .variants import with_variant

Known = dict[str, KernelChoice | NoKernel]


@dataclass(frozen=True, slots=True)
class KernelEstimate:
    """What a template would take for a group on one core; `unit` makes its products, or all else. `is_floor`: no less than so."""

    template: str
    time_us: float
    cycles: float
    bytes_moved: int
    operations: int
    unit: str
    is_floor: bool


def estimates_of(group: Group, target: Target) -> tuple[KernelEstimate, ...]:
    """Of all candidates for a group, in the order in which they are tried; none on GPUs, whose costs are not estimated."""
    ranked, _ = candidates(group, target)
    found = []
    for template, candidate in ranked if not target.is_gpu else ():
        one, cycles = candidate.estimate, candidate.estimate.wall_cycles(target.machine)
        time_us = cycles / target.machine.ghz / 1e3
        found.append(KernelEstimate(template, time_us, cycles, one.bytes_moved, one.operations, one.unit, one.is_floor))
    return tuple(found)


@dataclass(slots=True)
class KernelChooser:
    """Answers for the nodes of one graph. Those to equal groups are `known`, which several graphs on one target may share.

    Answers are the templates' own: what a tuning database prefers is known to those alone who build kernels.
    """

    model: ir.Model
    target: Target
    precision: Precision
    known: Known = field(default_factory=dict)
    reader: GroupReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = GroupReader(self.model, self.target, self.precision)

    def choose(self, node: ir.Node, variant: Variant) -> KernelChoice | NoKernel:
        """What `build_kernel` would write for the group of a node, and its cycles; or why it would write nothing.

        Raises:
            InvalidModelError: a value has no static type.
        """
        group = with_variant(self.reader.group_of(node), node, variant)
        key = group.key()
        if key not in self.known:
            ranked, refused = candidates(group, self.target)
            self.known[key] = NoKernel(tuple(refused.items()))
            if ranked:
                template, best = ranked[0]
                cycles, unit = best.estimate.wall_cycles(self.target.machine), best.estimate.unit
                parts = stores_parts(template) and not self.target.is_gpu
                self.known[key] = KernelChoice(template, cycles, unit, best.transforms_weights, best.stored_runs, parts)
        return self.known[key]
