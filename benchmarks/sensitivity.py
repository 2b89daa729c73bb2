"""How well indicators rank what formats damage: `python -m benchmarks.sensitivity`.

Truth is the damage on held-out data: of each unit alone in each format, and of random assignments of formats to all units, whose
prediction is the sum over the units. An indicator is good if it ranks assignments (Spearman), and useful for budgets if the
prediction is near the measured damage.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
from prefuse.compiler.bits.indicators.choice import INDICATORS
from prefuse.compiler.bits.indicators.measured import Evaluator
from prefuse.compiler.bits.indicators.study import Study, TorchModule
from prefuse.compiler.quantization.units import find_units
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr

from .record import plain, record
from .trained_nets import TrainedNet, digits_lenet, digits_mlp, minilm

FORMATS = ("float32", "bfloat16", "int8", "int8-rows", "w8", "w4")
NETS = {"mlp": digits_mlp, "lenet": digits_lenet, "minilm": minilm}
WEIGHTS = ((1, 1, 1, 1, 1, 1), (3, 3, 1, 1, 1, 1), (1, 3, 6, 1, 1, 1), (1, 4, 2, 4, 3, 0))  # of formats in random assignments
_WIDTH = 110


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one indicator: ranks over single damages and over assignments, and predicted by measured damage of the latter."""

    name: str
    units: float
    assignments: float
    ratios: np.ndarray
    seconds: float

    @property
    def near(self) -> float:
        """The share of assignments that are predicted within a factor of 2."""
        return float(((self.ratios >= 0.5) & (self.ratios <= 2)).mean())


def study_of(net: TrainedNet, formats: Sequence[str] = FORMATS) -> Study:
    """Each product a unit."""
    units = {product.name: (product.name,) for product in find_units(net.model)}
    return Study(net.model, net.calibration, units, tuple(formats), torch=TorchModule.of(net.module, net.model))


def random_assignments(study: Study, count: int, seed: int = 0) -> list[dict[str, str]]:
    """Formats that units can have, by several distributions in turns."""
    rng, found = np.random.default_rng(seed), []
    for number in range(count):
        weights = dict(zip(FORMATS, WEIGHTS[number % len(WEIGHTS)], strict=True))
        assignment = {}
        for unit in study.units:
            legal = [form for form in study.formats if study.can_have(unit, form)]
            shares = np.array([weights[form] for form in legal], float)
            assignment[unit] = str(rng.choice(legal, p=shares / shares.sum()))
        found.append(assignment)
    return found


def verdicts(
    net: TrainedNet, study: Study, names: Sequence[str], count: int, *, with_units: bool = True
) -> tuple[list[Verdict], float]:
    """Of each indicator; and Spearman's rank of the sum of single damages, which is the truth of additivity itself."""
    evaluator = Evaluator(study)
    assignments = random_assignments(study, count)
    measured = np.array(evaluator.damages(assignments, net.held_out))
    truth = _alone(study, evaluator, net) if with_units else None
    found = []
    for name in names:
        start = time.perf_counter()
        damages = INDICATORS[name]().damages(study)
        seconds = time.perf_counter() - start
        sums = _sums(study, damages, assignments)
        units = 0.0
        if truth is not None:
            counted = np.isfinite(damages) & (truth > 0)
            units = float(spearmanr(damages[counted], truth[counted])[0])
        found.append(Verdict(name, units, float(spearmanr(sums, measured)[0]), sums / measured, seconds))
    own = 0.0 if truth is None else float(spearmanr(_sums(study, truth, assignments), measured)[0])
    return found, own


def _alone(study: Study, evaluator: Evaluator, net: TrainedNet) -> np.ndarray:
    """Damage on held-out data of each unit alone, [unit][format]."""
    pairs = [(unit, form) for unit in study.units for form in study.formats if form != "float32" and study.can_have(unit, form)]
    damages = dict(zip(pairs, evaluator.damages([{unit: form} for unit, form in pairs], net.held_out), strict=True))
    return np.array([[damages.get((unit, form), 0.0) for form in study.formats] for unit in study.units])


def _sums(study: Study, damages: np.ndarray, assignments: Sequence[Mapping[str, str]]) -> np.ndarray:
    columns = {form: column for column, form in enumerate(study.formats)}
    return np.array([sum(damages[row, columns[one[unit]]] for row, unit in enumerate(study.units)) for one in assignments])


@click.command()
@click.argument("nets", nargs=-1, type=click.Choice(list(NETS)))
@click.option("--assignments", default=40, show_default=True, type=click.IntRange(min=3), help="Random assignments.")
@click.option("--indicators", default=",".join(INDICATORS), show_default=True, help="Names, separated by commas.")
@click.option("--alone/--no-alone", default=True, show_default=True, help="Also rank single damages, which takes the longest.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Add the results to this file.")
def main(nets: tuple[str, ...], assignments: int, indicators: str, alone: bool, json_path: Path | None) -> None:
    """Compare indicators on NETS, by default on all."""
    kept = record(json_path, 1, {"assignments": assignments, "alone": alone}, key=("net", "name"))
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    names = indicators.split(",")
    if unknown := [name for name in names if name not in INDICATORS]:
        raise click.UsageError(f"unknown indicator {unknown[0]!r}; use {', '.join(INDICATORS)}")
    for name in nets or tuple(NETS):
        net = NETS[name]()
        study = study_of(net)
        found, own = verdicts(net, study, names, assignments, with_units=alone)
        console.print(f"{net.name}: {len(study.units)} units; sums of held-out single damages rank assignments {own:.3f}")
        table = Table("indicator", "rank alone", "rank of sums", "predicted / measured, 10 % 50 % 90 %", "within 2", "seconds")
        for one in found:
            spread = " ".join(f"{value:.3g}" for value in np.percentile(one.ratios, (10, 50, 90)))
            table.add_row(one.name, f"{one.units:.3f}", f"{one.assignments:.3f}", spread, f"{one.near:.0%}", f"{one.seconds:.1f}")
        console.print(table)
        kept.add(*({"net": net.name, "sums": own, **plain(one)} for one in found))


if __name__ == "__main__":
    main()
