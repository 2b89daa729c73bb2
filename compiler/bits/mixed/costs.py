"""What each format of each unit takes, from programs of one format each that were measured step by step in the same run.

Of a program the steps that compute a unit are that unit's. Others belong to `REST`; but what such a step takes more in a program
of integers, as a normalization does that also rounds its rows, is paid by the units that read it. What it takes that neighbours
differ is a cast: the maker of a value stores it in each form in which somebody wants it (docs/prediction.md: casts are computed
in the stores and loads of groups), so that it is the bytes that are stored beside those of the program of one format.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import onnx_ir as ir

from ....runtime.profile import StepProfile
from ....runtime.target import Target
from ...ir.facts import origins_of
from ...ir.kinds import Kind, kind_of
from ...ir.matching import static_shape
from ...quantization.units import Unit
from ..problem import Cast
from .formats import FLOATS, INTEGERS, REST

_STORED_BYTES: Mapping[str, int] = {"float32-fast": 4, "bfloat16": 2, "int8": 1, "int8-rows": 1}  # of an element of activations
_POOLS = ("AveragePool", "MaxPool")

Times = Mapping[tuple[str, str], float]  # microseconds by unit and format


@dataclass(frozen=True)
class StepOwners:
    """Which units the steps of programs belong to, by the imported nodes that are in them.

    `work` is of each unit, by which a step is divided that computes several.
    """

    units: Mapping[str, str]  # the unit of an imported node
    readers: Mapping[str, tuple[str, ...]]  # of an imported node that is of no unit, the units that read it
    work: Mapping[str, float]

    @staticmethod
    def of(model: ir.Model, units: Sequence[Unit]) -> StepOwners:
        names = {unit.node: unit.name for unit in units}
        owners = {origin: name for node, name in names.items() for origin in _origins(node)}
        readers: dict[str, tuple[str, ...]] = {}
        for node in model.graph:
            found = dict.fromkeys(names[one] for value in node.outputs for one in value.consumers() if one in names)
            if node not in names and found:
                readers |= dict.fromkeys(_origins(node), tuple(found))
        return StepOwners(owners, readers, {unit.name: float(unit.weights.size) for unit in units})

    def owners(self, step: StepProfile) -> tuple[str, ...]:
        """The units that a step computes; without any, those whose operands it alone prepares: none for what is in `REST`."""
        found = dict.fromkeys(self.units[name] for name in step.group.computing if name in self.units)
        if not found and not step.group.computing:
            found = dict.fromkeys(self.units[name] for name in step.group.nodes if name in self.units)
        return tuple(found)

    def readers_of(self, step: StepProfile) -> tuple[str, ...]:
        """The units that read what a step of `REST` makes."""
        return tuple(dict.fromkeys(unit for name in step.group.nodes for unit in self.readers.get(name, ())))

    def times_us(self, steps: Sequence[StepProfile]) -> dict[str, float]:
        """Microseconds of units and of `REST` in one program."""
        found: dict[str, float] = defaultdict(float)
        for step in steps:
            units = self.owners(step) or (REST,)
            total = sum(self.work.get(name, 0.0) for name in units)
            for name in units:
                found[name] += step.time_us * (self.work[name] / total if total else 1 / len(units))
        return found


def unit_times(
    owners: StepOwners, choices: Mapping[str, tuple[str, ...]], steps: Mapping[str, Sequence[StepProfile]], rest: str
) -> dict[tuple[str, str], float]:
    """Microseconds of each format of each unit, and of `REST`.

    Args:
        choices: the formats of each unit.
        steps: of the program of each format.
        rest: the format of `REST` in programs of integers.
    """
    own = {form: owners.times_us(row) for form, row in steps.items()}
    beside = {form: _beside(row, owners) for form, row in steps.items()}
    times = {}
    for name, formats in choices.items():
        for form in formats:
            more = beside[form][name] - beside[rest][name] if form in INTEGERS and form in beside else 0.0
            if form in own:
                times[name, form] = max(own[form][name] + more, 0.0)
    return times


def _beside(steps: Sequence[StepProfile], owners: StepOwners) -> dict[str, float]:
    """Microseconds of the steps of `REST`, dealt to the units that read them."""
    found: dict[str, float] = defaultdict(float)
    for step in steps:
        readers = () if owners.owners(step) else owners.readers_of(step)
        for name in readers:
            found[name] += step.time_us / len(readers)
    return found


def casts(units: Sequence[Unit], choices: Mapping[str, tuple[str, ...]], target: Target) -> tuple[Cast, ...]:
    """What it takes to store values in other forms than those of their maker's program, in microseconds."""
    return tuple(_cast(maker, value, readers, choices, target) for maker, value, readers in _edges(units))


def _cast(maker: str, value: ir.Value, readers: tuple[str, ...], choices: Mapping[str, tuple[str, ...]], target: Target) -> Cast:
    elements, forms = prod(static_shape(value) or ()), (*FLOATS, *INTEGERS)

    def cost(made: str, wanted: str) -> float:
        if made == wanted:
            return 0.0
        saved = _STORED_BYTES[made] if len(readers) == 1 else 0  # of several readers another may want what is made
        size = elements * max(_STORED_BYTES[wanted] - saved, 0)
        return target.machine.read_cycles(size, threads=target.threads) / target.machine.ghz / 1e3

    table = tuple(tuple(cost(made, wanted) for wanted in forms) for made in choices[maker])
    wants = tuple(tuple(forms.index(form) for form in choices[reader]) for reader in readers)
    return Cast(maker, readers, {"time": table}, wants)


def _edges(units: Sequence[Unit]) -> Iterator[tuple[str, ir.Value, tuple[str, ...]]]:
    """A unit, a value that it makes with what is pointwise behind it, and the units that read this."""
    names = {unit.node: unit.name for unit in units}
    for unit in units:
        pending, seen = [unit.node.outputs[0]], set[ir.Value]()
        while pending:
            value = pending.pop()
            if value in seen:
                continue
            seen.add(value)
            readers = tuple(dict.fromkeys(names[node] for node, index in value.uses() if node in names and index == 0))
            if readers:
                yield unit.name, value, readers
            pending += [one.outputs[0] for one in value.consumers() if one not in names and _passes(one)]


def _passes(node: ir.Node) -> bool:
    return len(node.outputs) == 1 and (kind_of(node) <= Kind.VIEW or node.op_type in _POOLS)


def _origins(node: ir.Node) -> tuple[str, ...]:
    return origins_of(node.name, node.metadata_props)
