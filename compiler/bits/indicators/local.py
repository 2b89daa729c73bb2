"""Baselines that look at each product alone: the error of its output, and the variance of uniform rounding errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from .measured import Evaluator
from .roundings import ROUNDINGS, UNCHANGED, Array
from .study import Study


@dataclass(frozen=True, slots=True)
class LocalError:
    """Squared error of each product's output over its square (the inverse of SQNR), the sum over a unit's products."""

    name: ClassVar[str] = "sqnr"

    def damages(self, study: Study) -> Array:
        found = study.empty()
        evaluator = Evaluator(study)
        units = unit_of_products(study)
        for product, states in evaluator.before_products():
            if product.name not in units:
                continue
            place = evaluator.sections.places[product.name]
            section = evaluator.sections.section(place, place + 1, product.node.outputs, [product])
            assert section is not None, "a product makes its output"
            expected = [section.run(state, section.operands({}, evaluator.ranges)) for state in states]
            damages = [evaluator.damage(section, form, states, expected) for form in study.formats]
            found[units[product.name]] += damages
        return found


@dataclass(frozen=True, slots=True)
class RoundingVariance:
    """The variance of a product's output if rounding errors were independent and uniform: QSync's indicator, forward part.

    With operands x and w, and steps s: (|w|^2 n_x s_x^2 + |x|^2 n_w s_w^2) / 6, and for bfloat16 steps by the operands' exponents
    (Zhao et al., QSync: Quantization-Minimized Synchronous Distributed Training Across Hybrid Devices, IPDPS 2024, section 4.2).
    It is no squared relative error of anything.
    """

    name: ClassVar[str] = "qsync"

    def damages(self, study: Study) -> Array:
        found = study.empty()
        evaluator = Evaluator(study)
        units = unit_of_products(study)
        for product, states in evaluator.before_products():
            if product.name not in units:
                continue
            name, w = str(product.activations.name), product.weights
            squares = sum(float((state[name].astype(np.float64) ** 2).sum()) for state in states)
            count = sum(state[name].size for state in states)
            largest = max(map(abs, evaluator.ranges[name]))
            for column, form in enumerate(study.formats):
                x_step, w_step = _steps(form, np.sqrt(squares / max(count, 1)), largest, w)
                weights = float((w.astype(np.float64) ** 2).sum())
                found[units[product.name], column] += (weights * count * x_step**2 + squares * w.size * w_step**2) / 6
        return found


def unit_of_products(study: Study) -> dict[str, int]:
    """The number of each product's unit, by the name of its node."""
    return {name: number for number, names in enumerate(study.units.values()) for name in names}


def _steps(form: str, root_mean_square: float, largest: float, w: Array) -> tuple[float, float]:
    """The distances of neighbouring numbers of activations and of weights."""
    if form == UNCHANGED:
        return 0.0, 0.0
    if form == "bfloat16":
        size = float(np.sqrt((w.astype(np.float64) ** 2).mean()))
        return _exponent_step(root_mean_square), _exponent_step(size)
    rounds_activations = ROUNDINGS[form].activations != "none"
    return largest / 127 * rounds_activations, float(np.abs(w).max(initial=0.0)) / (7 if form == "w4" else 127)


def _exponent_step(size: float) -> float:
    return float(2.0 ** (np.floor(np.log2(size + 1e-30)) - 8))
