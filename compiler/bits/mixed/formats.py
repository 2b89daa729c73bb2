"""The formats that products can have in a program, and graphs that say which each of them has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias, get_args

import onnx_ir as ir

from ....runtime.precision import Precision
from ....runtime.target import Target
from ...ir.assignments.node_precision import assign_precision
from ...ir.assignments.operand_formats import operand_formats
from ...pipeline import Context, parse_pipeline, run_pipeline
from ...pipeline.pass_table import PASSES
from ...quantization.quantizer import Calibrated
from ...quantization.units import Unit, UnitFormat, find_units
from ..indicators.roundings import UNCHANGED

FloatFormat: TypeAlias = Literal["float32-fast", "bfloat16"]
Formats: TypeAlias = Mapping[str, str]  # of units, by name, and of `REST`

FLOATS: tuple[FloatFormat, ...] = get_args(FloatFormat)
INTEGERS: tuple[UnitFormat, ...] = get_args(UnitFormat)
FORMATS: tuple[str, ...] = (*FLOATS, *INTEGERS)
EXACT: Literal["float32"] = "float32"  # that of the whole program where none of `FORMATS` keeps the error; plans may say it
WEIGHT_BYTES: Mapping[str, int] = {"float32-fast": 4, "bfloat16": 2, "int8": 1, "int8-rows": 1}
INDICATED: Mapping[str, str] = {"float32-fast": "float32", "bfloat16": "bfloat16", "int8": "int8", "int8-rows": "int8-rows"}
REST = "(all else)"  # what is in no unit: attention, recurrences, normalizations; it has one of `FLOATS`


def candidates(calibrated: Calibrated) -> dict[str, tuple[str, ...]]:
    """The formats that each unit can have, by its name, in the model's order; those of `REST` at last."""
    found = {unit.name: (*FLOATS, *_integers(calibrated, unit)) for unit in calibrated.units}
    return {**found, REST: FLOATS}


def uniform(choices: Mapping[str, tuple[str, ...]], form: str, program: Precision) -> dict[str, str]:
    """One format for all that can have it; what cannot has that of the program, or the first there is.

    "int8-rows" leaves to "int8" what has no rows. `REST` is as exact as the program where `form` is an integer format.
    """
    wanted = (form, "int8", program) if form in INTEGERS else (form,)
    return {name: next((one for one in wanted if one in legal), legal[0]) for name, legal in choices.items()}


def placed(calibrated: Calibrated, formats: Formats, program: Precision) -> ir.Model:
    """A copy of the calibrated model, weights shared, whose units have `formats`, to be compiled with the precision `program`.

    Integer formats are QuantizeLinear and DequantizeLinear in the graph; the others are metadata of nodes, where they are not
    that of the program.
    """
    integers: dict[str, UnitFormat] = {name: one for name, form in formats.items() for one in INTEGERS if one == form}
    model = calibrated.place(integers)
    for node in model.graph:
        form = formats.get(str(node.name), formats[REST])
        precision = next((one for one in _PRECISIONS if one == form), None)
        if precision is not None and precision != program:
            assign_precision(node, precision)
    return model


def narrow_roundings(calibrated: Calibrated, target: Target) -> dict[str, str]:
    """What the program of bfloat16 rounds of each unit, as formats of the indicators: as the pass says that assigns operands.

    Products that are too small stay float32, depthwise convolutions have float32 weights, and few rows are float32.
    """
    asked = calibrated.model.clone()
    run_pipeline(asked, parse_pipeline("assign-formats", PASSES), Context(target, precision="bfloat16"))
    return {unit.name: _rounding(unit, operand_formats(unit.node)) for unit in find_units(asked)}


def _rounding(unit: Unit, operands: Mapping[int, str]) -> str:
    if not operands:
        return UNCHANGED
    if 0 not in operands:
        return "w16"
    return "a16" if unit.is_depthwise and 1 not in operands else "bfloat16"


def weight_bytes(unit: Unit, form: str) -> int:
    """What the weights of a unit take, without their scales."""
    return int(unit.weights.size) * WEIGHT_BYTES[form]


def names_of(formats: Formats, form: str) -> Iterable[str]:
    """The units that have a format."""
    return (name for name, one in formats.items() if one == form and name != REST)


_PRECISIONS: tuple[Precision, ...] = (EXACT, *FLOATS)


def _integers(calibrated: Calibrated, unit: Unit) -> tuple[UnitFormat, ...]:
    return tuple(form for form in INTEGERS if not calibrated.fault(unit, form))
