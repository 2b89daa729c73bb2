"""Damage as it is measured: each unit alone in each format, by running what stands behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ...ir.functions import inline_all
from ...quantization.formats import LARGEST
from ...quantization.units import Unit as Product
from .roundings import Array
from .sections import Section, Sections, operands_of
from .study import Batch, Range, Study, changes

Outputs = Mapping[str, Array]


@dataclass(slots=True)
class Distance:
    """Squared differences of outputs from those of the float model, and squares of these, summed up over batches."""

    differences: dict[str, float] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)

    def add(self, actual: Outputs, expected: Outputs) -> None:
        """One batch more. Outputs that `actual` lacks are as expected; elements that `expected` has not finite do not count."""
        for name, wanted in expected.items():
            found, reference = _as_wide(actual.get(name, wanted)), _as_wide(wanted)
            if not np.isfinite(square := _sum_of_squares(reference)):
                is_finite = np.isfinite(reference)
                found, reference = found[is_finite].astype(np.float64), reference[is_finite].astype(np.float64)
                square = _sum_of_squares(reference)
            with np.errstate(invalid="ignore", over="ignore"):
                difference = _sum_of_squares(found - reference) if name in actual else 0.0
            self.differences[name] = self.differences.get(name, 0.0) + (difference if np.isfinite(difference) else np.inf)
            self.squares[name] = self.squares.get(name, 0.0) + square

    @property
    def damage(self) -> float:
        """The largest squared relative error of an output; of an output of zeros, its squared error."""
        return max((found / (self.squares[name] or 1.0) for name, found in self.differences.items()), default=0.0)


def _as_wide(array: Array) -> Array:
    """Flat, and float32 at least."""
    return array.reshape(-1).astype(array.dtype if array.dtype in (np.float32, np.float64) else np.float32, copy=False)


def _sum_of_squares(array: Array) -> float:
    """In float64, where each product of float32 numbers is exact."""
    return float(np.einsum("i,i->", array, array, dtype=np.float64))


class Evaluator:
    """Runs a study's model whole, or from some unit on, with units in other formats."""

    def __init__(self, study: Study) -> None:
        self.study = study
        model = study.model.clone()
        inline_all(model)
        self.sections = Sections(model)
        self.products = Study(model, study.batches, study.units, study.formats).products
        self.ranges = {**self._observed(), **study.ranges}
        self._operands: dict[tuple[str, str], dict[str, Array]] = {}

    def reference(self, batches: Sequence[Batch]) -> list[Outputs]:
        """The outputs of the float model, of each batch."""
        section = self._whole(())
        return [section.run(batch, {}) for batch in batches]

    def damages(self, assignments: Sequence[Mapping[str, str]], batches: Sequence[Batch]) -> list[float]:
        """The damage of whole assignments (unit: format), others than those of a study too."""
        section, expected = self._whole(tuple(self.products.values())), self.reference(batches)
        found = []
        for assignment in assignments:
            formats = {name: form for unit, form in assignment.items() for name in self.study.units[unit]}
            operands: dict[str, Array] = {}
            for name, product in self.products.items():
                operands |= self._remembered(product, formats.get(name, "float32"))
            distance = Distance()
            for batch, wanted in zip(batches, expected, strict=True):
                distance.add(section.run(batch, operands), wanted)
            found.append(distance.damage)
        return found

    def before_products(self) -> Iterator[tuple[Product, list[dict[str, Array]]]]:
        """The products in the model's order, each with the values that live before it, of each batch."""
        places = [self.sections.places[name] for name in self.products]
        yield from zip(self.products.values(), self._before(places), strict=True)

    def alone(self) -> Iterator[tuple[str, str, float]]:
        """Unit, format and damage of each unit alone in each format that it can have, in the model's order."""
        study, sections = self.study, self.sections
        begins = {unit: min(sections.places[name] for name in names) for unit, names in study.units.items() if names}
        order, expected = sorted(begins, key=begins.__getitem__), self.reference(study.batches)
        for unit, states in zip(order, self._before([begins[unit] for unit in order]), strict=True):
            products = [self.products[name] for name in study.units[unit]]
            section = sections.section(begins[unit], len(sections.nodes), sections.ends, products)
            for form in study.formats:
                if study.can_have(unit, form):
                    yield unit, form, self.damage(section, form, states, expected)

    def damage(self, section: Section | None, form: str, states: Sequence[Outputs], expected: Sequence[Outputs]) -> float:
        """What a format of a section's products does to its outputs, from the values that live before it, of each batch."""
        if section is None or not changes(form):
            return 0.0
        operands = section.operands({product.name: form for product in section.products}, self.ranges, self.study.keeps_pairs)
        distance = Distance()
        for state, wanted in zip(states, expected, strict=True):
            distance.add(section.run(state, operands), wanted)
        return distance.damage

    def _before(self, places: Sequence[int]) -> Iterator[list[dict[str, Array]]]:
        """What lives at places in rising order, of each batch: carried on from one to the next."""
        states, last = [dict(batch) for batch in self.study.batches], 0
        for place in places:
            states, last = self._advanced(states, last, place), place
            yield states

    def _advanced(self, states: list[dict[str, Array]], start: int, stop: int) -> list[dict[str, Array]]:
        """What lives at a later place, of each batch."""
        live = self.sections.live(stop)
        section = self.sections.section(start, stop, live)
        names = {str(value.name) for value in live}
        found = []
        for state in states:
            made = {} if section is None else section.run(state, {})
            found.append({name: array for name, array in {**state, **made}.items() if name in names})
        return found

    def _whole(self, products: tuple[Product, ...]) -> Section:
        section = self.sections.section(0, len(self.sections.nodes), self.sections.ends, products)
        assert section is not None, "the model computes nothing"
        return section

    def _remembered(self, product: Product, form: str) -> dict[str, Array]:
        key = product.name, form
        if key not in self._operands:
            self._operands[key] = operands_of(product, form, self.ranges, self.study.keeps_pairs)
        return self._operands[key]

    def _observed(self) -> dict[str, Range]:
        """The least and greatest of the activations of all products over the batches; what is not finite counts as large."""
        values = list(dict.fromkeys(product.activations for product in self.products.values()))
        ends = [ir.node(operator, [value], {"keepdims": 0}) for value in values for operator in ("ReduceMin", "ReduceMax")]
        for number, node in enumerate(ends):
            node.outputs[0].name = f"end {number}"
        outputs = [node.outputs[0] for node in ends]
        section = self.sections.section(0, len(self.sections.nodes), outputs, more=ends)
        if section is None:
            return {}
        found = np.zeros(len(ends))
        for batch in self.study.batches:
            extremes = np.array([float(array) for array in section.run(batch, {}).values()])
            known = np.nan_to_num(extremes, nan=0.0, posinf=LARGEST, neginf=-LARGEST)
            found[::2] = np.minimum(found[::2], known[::2])
            found[1::2] = np.maximum(found[1::2], known[1::2])
        pairs = found.reshape(-1, 2).tolist()
        return {str(value.name): (low, high) for value, (low, high) in zip(values, pairs, strict=True)}


class MeasuredPerturbation:
    """Damage by running the model with one unit rounded at a time: exact for it alone, at a run for each unit, format and batch.

    Where only the graph is known this is the default. Few samples do: of a sentence encoder 8 predict the damage of 32 others
    (docs/bits.md).
    """

    name: ClassVar[str] = "measured"

    def damages(self, study: Study) -> Array:
        found = study.empty()
        units = list(study.units)
        for unit, form, damage in Evaluator(study).alone():
            found[units.index(unit), study.formats.index(form)] = damage
        return found
