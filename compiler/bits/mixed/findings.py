"""What a search for formats has found: the assignment, what each choice costs, and the programs that were measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import onnx_ir as ir

from ....runtime.precision import Precision
from ....runtime.report import size
from ...ir.assignments.node_precision import CHOICES_KEY
from ...quantization.quantizer import Calibrated
from ..solver import Solution
from .choice import Measured, Objective, Table
from .formats import REST, Formats, placed
from .metrics import Metric
from .plan import BitsPlan


@dataclass(frozen=True, slots=True)
class Row:
    """A unit (or `REST`) with what its formats cost, the one it got, and why. `damage` is squared relative error, predicted."""

    name: str
    operator: str
    depth: int
    time_us: Mapping[str, float]
    damage: Mapping[str, float]
    size_bytes: Mapping[str, int]
    choice: str
    why: str


@dataclass(frozen=True)
class Findings:
    """The formats that were found, and the evidence.

    `error` is what was measured of the program on `held_out` batches; `programs` are all that were measured in one run. `front`
    has what the objective costs at other budgets. `is_kept`: the error is within `max_error`. `is_timed`: times were measured,
    and are not those of the cost model.
    """

    calibrated: Calibrated
    formats: Formats
    name: str
    reason: str
    error: float
    max_error: float
    metric: Metric
    objective: Objective
    table: Table
    programs: tuple[Measured, ...]
    pinned: Formats
    predicted_us: float
    front: tuple[Solution, ...]
    batches: int
    held_out: int
    is_split: bool
    is_timed: bool
    seconds: float

    @property
    def is_kept(self) -> bool:
        return self.error <= self.max_error

    @property
    def chosen(self) -> Measured:
        """The program that was taken."""
        return next(one for one in self.programs if one.name == self.name)

    def model(self, program: Precision) -> ir.Model:
        """The graph with these formats, to be compiled with the precision `program`. It says in its metadata how it was found."""
        model = placed(self.calibrated, self.formats, program)
        model.metadata_props[CHOICES_KEY] = "\n".join(self.sentences())
        return model

    def plan(self) -> BitsPlan:
        """The formats as a plan to be saved, with what was measured."""
        notes: dict[str, object] = {
            "program": self.name,
            "reason": self.reason,
            self.metric.name: self.error,
            "max_error": self.max_error,
            "time_us": round(self.chosen.time_us, 2),
            "programs": {one.name: {"error": one.error, "time_us": round(one.time_us, 2)} for one in self.programs},
        }
        return BitsPlan(dict(self.formats), {}, notes)

    def sentences(self) -> list[str]:
        """What was found, in a few lines."""
        chosen = self.chosen
        counts = Counter(form for name, form in self.formats.items() if name != REST)
        mixture = ", ".join(f"{count} in {form}" for form, count in counts.most_common())
        where = "held-out batches" if self.is_split else "batches, those calibrated with, as they are few"
        measured = "measured" if self.is_timed else "by the cost model, as a simulator measures no time"
        allowed = f"{self.max_error:.3g} {'are allowed' if self.is_kept else 'WERE ALLOWED'}"
        return [
            f"{self.name}: {mixture}; all else in {self.formats[REST]}",
            f"{self.metric.name} error {self.error:.3g} on {self.held_out} {where}; {allowed}",
            self.reason,
            f"{chosen.time_us / 1e3:.3f} ms a call {measured}, {self.predicted_us / 1e3:.3f} predicted",
            *(
                f"{'  taken: ' if one is chosen else '  '}{one.name}: {one.time_us / 1e3:.3f} ms, error {one.error:.3g}, "
                f"{size(one.size_bytes)} of weights"
                for one in sorted(self.programs, key=lambda one: one.time_us)
            ),
        ]

    def rows(self) -> list[Row]:
        """The units in the model's order, then `REST`."""
        operators = {unit.name: unit.node.op_type for unit in self.calibrated.units}
        return [
            self._row(depth, name, operators.get(name, ""))
            for depth, name in enumerate([*operators, REST])
            if name in self.table.choices
        ]

    def _row(self, depth: int, name: str, operator: str) -> Row:
        table, forms = self.table, self.table.choices[name]
        return Row(
            name,
            operator,
            depth,
            {form: table.time_us[name, form] for form in forms},
            {form: table.damage[name, form] for form in forms},
            {form: int(table.size_bytes[name, form]) for form in forms},
            self.formats[name],
            self._why(name, forms),
        )

    def _why(self, name: str, forms: tuple[str, ...]) -> str:
        """In words, why a unit has its format."""
        choice, budget = self.formats[name], self.metric.damage(self.max_error)
        if name in self.pinned:
            return "as the plan says"
        left = self.calibrated.left.get(name)
        if len(forms) == 1:
            return left or "the only format there is"
        costs = self.table.time_us if self.objective == "latency" else self.table.size_bytes
        if choice not in forms:
            return "computed exactly"
        best = min(forms, key=lambda form: costs[name, form])
        if costs[name, best] >= costs[name, choice]:
            return f"{'fastest' if self.objective == 'latency' else 'smallest'}" + (f"; not int8: {left}" if left else "")
        damage = self.table.damage[name, best]
        if not isfinite(damage):
            return f"{best} would ruin the outputs"
        if damage > self.table.damage[name, choice]:
            return f"{best} would take {damage / budget:.1%} of the budget" if budget else f"{best} is not exact"
        return (
            f"{best} gains too little, neighbours counted" if self.name.startswith("mixed") else "one format for all was better"
        )
