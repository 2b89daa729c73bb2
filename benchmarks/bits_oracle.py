"""HAWQ-V3's published bit configurations, by our solver: `python -m benchmarks.bits_oracle FILE`.

A file holds models: of each layer the trace of its Hessian, the squared error of its weights at each width, its parameters (in
millions), operations and measured latencies; layers that must have the same width; and cases with their optimum. The objective is
omega, the sum over layers of trace times squared error (Yao et al., HAWQ-V3, ICML 2021, equation 6). A budget lies at a fraction
of the way from all layers at the least width to all at the largest.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import click
from prefuse.compiler.bits.problem import Problem, Unit
from prefuse.compiler.bits.solver import Solution, solve
from prefuse.compiler.bits.ties import tied
from rich.console import Console
from rich.table import Table

TOLERANCE = 1e-9  # of omega
MOST_SECONDS = 1.0
_WIDTH = 110
Costs: TypeAlias = dict[int, list[float]]  # by width, of each layer


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case as it was solved; `faults` says what is not as it is stated."""

    model: str
    constraint: str
    fraction: float
    omega: float
    stated: float
    equal_bits: bool
    seconds: float
    faults: tuple[str, ...]


def outcomes(path: Path) -> Iterator[Outcome]:
    """Every case of every model of a file.

    Raises:
        ValueError: the file is not of the form.
    """
    try:
        models = json.loads(path.read_text())["models"]
        for name, model in models.items():
            for case in model["cases"]:
                yield _outcome(name, model, case)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no oracle of bits: {type(error).__name__} {error}") from error


def _outcome(name: str, model: Mapping[str, Any], case: Mapping[str, Any]) -> Outcome:
    problem = problem_of(model, str(case["constraint"]), float(case["fraction"]))
    solution = solve(problem, exact=True)
    formats = solution.by_member(problem)
    bits = [int(formats[f"layer {layer}"]) for layer in range(len(formats))]
    stated = [int(one) for one in case["optimum_bits"]]
    faults = tuple(_faults(problem, solution, float(case["optimum_omega"]), stated, bits))
    omega = solution.objective
    return Outcome(
        name, case["constraint"], case["fraction"], omega, case["optimum_omega"], bits == stated, solution.seconds, faults
    )


def _faults(problem: Problem, solution: Solution, omega: float, stated: Sequence[int], bits: Sequence[int]) -> Iterator[str]:
    if solution.status != "optimal":
        yield f"the solver ended with {solution.status}"
    if abs(solution.objective - omega) > TOLERANCE:
        yield f"omega differs by {solution.objective - omega:.3g}"
    if bits != stated:
        totals = problem.totals({unit.name: str(stated[int(unit.name.split()[1])]) for unit in problem.units})
        if not problem.keeps(totals) or abs(totals["omega"] - solution.objective) > TOLERANCE:
            yield "other bits, and these are no tie"
    if solution.seconds >= MOST_SECONDS:
        yield f"{solution.seconds:.2f} s are not below {MOST_SECONDS:g}"


def problem_of(model: Mapping[str, Any], constraint: str, fraction: float) -> Problem:
    """A case of a model: a unit for each set of tied layers, with their widths as formats."""
    omega, spent = _omega(model), _spent(model, constraint)
    widths = sorted(omega)
    least, most = (sum(spent[width]) for width in (widths[0], widths[-1]))
    layers = range(len(model["Hutchinson_trace"]))
    units = tuple(
        Unit(
            f"layer {layer}",
            tuple(map(str, widths)),
            {
                "omega": tuple(omega[width][layer] for width in widths),
                constraint: tuple(spent[width][layer] for width in widths),
            },
        )
        for layer in layers
    )
    budgets = {constraint: least + (most - least) * fraction}
    return tied(Problem(units, "omega", budgets), [[f"layer {one}" for one in tie] for tie in model["ties"]])


def _omega(model: Mapping[str, Any]) -> Costs:
    traces = model["Hutchinson_trace"]
    return {
        width: [trace * error for trace, error in zip(traces, errors, strict=True)]
        for width, errors in _by_width(model, r"delta_weights_(\d+)bit_square").items()
    }


def _spent(model: Mapping[str, Any], constraint: str) -> Costs:
    """What each width takes: bits of weights, bit operations (width times width), or measured milliseconds."""
    widths = _by_width(model, r"delta_weights_(\d+)bit_square")
    if constraint == "size":
        return {width: [float(count) * width for count in model["parameters"]] for width in widths}
    if constraint == "bops":
        return {width: [float(count) * width * width for count in model["bops"]] for width in widths}
    if constraint in ("lat", "latency"):
        return _by_width(model, r"latency_int(\d+)")
    raise KeyError(f"constraint {constraint!r}")


def _by_width(model: Mapping[str, Any], pattern: str) -> Costs:
    return {int(found[1]): list(map(float, model[key])) for key in model if (found := re.fullmatch(pattern, key))}


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(file: Path) -> None:
    """Solve all cases of FILE, and fail if one is not at its stated optimum."""
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    table = Table("model", "constraint", "fraction", "omega", "stated", "bits", "seconds")
    try:
        found = list(outcomes(file))
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    for one in found:
        bits = "equal" if one.equal_bits else "other" if one.faults else "a tie"
        numbers = (f"{one.fraction:g}", f"{one.omega:.12f}", f"{one.stated:.12f}", bits, f"{one.seconds:.3f}")
        table.add_row(one.model, one.constraint, *numbers)
    console.print(table)
    for one in found:
        for fault in one.faults:
            console.print(f"{one.model}, {one.constraint} at {one.fraction:g}: {fault}", markup=False, soft_wrap=True)
    good = sum(not one.faults for one in found)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    console.print(f"{good} of {len(found)} cases at the stated optimum; {file.name} has sha256 {digest}", markup=False)
    sys.exit(good < len(found) or not found)


if __name__ == "__main__":
    main()
