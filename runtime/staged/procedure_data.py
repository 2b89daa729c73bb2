"""A Procedure as JSON values and back: the steps as they are, programs and constants as numbers in lists beside it.

A step is an object of its kind, under "step", and its fields. What is read may be anything: every field is checked here for its
form, and the whole by `procedure_checker` for its sense.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from math import prod
from typing import cast

import numpy as np

from ..executor import CompiledModel
from ..plan import TensorType
from ..plan_text import is_dtype
from .host_operators import OPERATORS, Attribute, HostFunction, HostOperator
from .procedure import BranchStep, HostStep, LoopStep, MapStep, Procedure, Program, ProgramStep, ScanStep, Step
from .staged import StagedPort, StagedProgram

DEEPEST = 64  # branches and bodies in one another
_LARGEST_BYTES = 1 << 62


class DataError(ValueError):
    """JSON values that are no procedure."""


class _Form(Enum):
    """What a field of a step holds."""

    TEXT = auto()
    NAMES = auto()
    INTS = auto()
    FLAGS = auto()
    SLICES = auto()  # shapes and element types of scan outputs
    BODY = auto()
    PROGRAM = auto()
    OPERATOR = auto()


_Fields = Mapping[str, _Form]
_STEPS: Mapping[str, tuple[Callable[..., Step], _Fields]] = {
    "program": (
        ProgramStep,
        {"name": _Form.TEXT, "program": _Form.PROGRAM, "reads": _Form.NAMES, "writes": _Form.NAMES},
    ),
    "host": (
        HostStep,
        {"source": _Form.TEXT, "function": _Form.OPERATOR, "reads": _Form.NAMES, "writes": _Form.NAMES},
    ),
    "if": (
        BranchStep,
        {
            "source": _Form.TEXT,
            "condition": _Form.TEXT,
            "then": _Form.BODY,
            "otherwise": _Form.BODY,
            "writes": _Form.NAMES,
        },
    ),
    "loop": (
        LoopStep,
        {
            "source": _Form.TEXT,
            "trips": _Form.TEXT,
            "condition": _Form.TEXT,
            "initial": _Form.NAMES,
            "body": _Form.BODY,
            "writes": _Form.NAMES,
            "scan_types": _Form.SLICES,
        },
    ),
    "scan": (
        ScanStep,
        {
            "source": _Form.TEXT,
            "initial": _Form.NAMES,
            "scanned": _Form.NAMES,
            "body": _Form.BODY,
            "writes": _Form.NAMES,
            "input_axes": _Form.INTS,
            "input_reversed": _Form.FLAGS,
            "output_axes": _Form.INTS,
            "output_reversed": _Form.FLAGS,
            "scan_types": _Form.SLICES,
        },
    ),
    "map": (
        MapStep,
        {"source": _Form.TEXT, "inputs": _Form.NAMES, "body": _Form.BODY, "writes": _Form.NAMES},
    ),
}


@dataclass
class ProcedureWriter:
    """Collects the programs and the constants of what it writes; one that several steps have, it collects once."""

    programs: list[CompiledModel] = field(default_factory=list)
    constants: list[np.ndarray] = field(default_factory=list)
    _places: dict[object, int] = field(default_factory=dict)  # of each program and constant in its list

    def model(self, model: StagedProgram) -> dict[str, object]:
        """A model whose programs are all `CompiledModel`s or `StagedProgram`s, and whose host steps are all ours."""
        return {
            "name": model.name,
            "inputs": [_port_data(port) for port in model.inputs],
            "outputs": [_port_data(port) for port in model.outputs],
            "procedure": self._procedure(model.procedure),
        }

    def _procedure(self, procedure: Procedure) -> dict[str, object]:
        return {
            "inputs": procedure.inputs,
            "captured": procedure.captured,
            "outputs": procedure.outputs,
            "constants": {name: self._constant(array) for name, array in procedure.constants.items()},
            "steps": [self._step(step) for step in procedure.steps],
        }

    def _step(self, step: Step) -> dict[str, object]:
        kind, fields = next((kind, fields) for kind, (make, fields) in _STEPS.items() if make is type(step))
        return {"step": kind, **{name: self._field(form, getattr(step, name)) for name, form in fields.items()}}

    def _field(self, form: _Form, value: object) -> object:
        if form is _Form.BODY:
            return self._procedure(cast("Procedure", value))
        if form is _Form.PROGRAM:
            return self.model(value) if isinstance(value, StagedProgram) else self._program(cast("CompiledModel", value))
        if form is _Form.OPERATOR:
            return self._operator(cast("HostOperator", value))
        return value

    def _operator(self, operator: HostOperator) -> dict[str, object]:
        attributes = {
            name: value if isinstance(value, int) else {"constant": self._constant(value)}
            for name, value in operator.attributes.items()
        }
        return {"name": operator.name, "attributes": attributes, "source": operator.source}

    def _program(self, program: CompiledModel) -> int:
        place = self._places.setdefault(program, len(self.programs))
        if place == len(self.programs):
            self.programs.append(program)
        return place

    def _constant(self, array: np.ndarray) -> int:
        content = tuple(array.flat) if array.dtype == object else hashlib.sha256(array.tobytes()).digest()
        place = self._places.setdefault((array.shape, array.dtype.name, content), len(self.constants))
        if place == len(self.constants):
            self.constants.append(array)
        return place


@dataclass(frozen=True)
class ProcedureReader:
    """Reads what a `ProcedureWriter` has written, given its programs and constants.

    Raises:
        DataError: the values are not of the form of a model.
    """

    programs: Sequence[CompiledModel]
    constants: Sequence[np.ndarray]

    def model(self, data: object, depth: int = 0) -> StagedProgram:
        """A model; its procedure is not checked for sense."""
        found = _object(data, "name", "inputs", "outputs", "procedure")
        inputs, outputs = (tuple(map(_port, _list(found[name]))) for name in ("inputs", "outputs"))
        return StagedProgram(_text(found["name"]), self._procedure(found["procedure"], depth + 1), inputs, outputs)

    def _procedure(self, data: object, depth: int) -> Procedure:
        if depth > DEEPEST:
            raise DataError(f"more than {DEEPEST} bodies in one another")
        found = _object(data, "inputs", "captured", "outputs", "constants", "steps")
        inputs, captured, outputs = (_texts(found[name]) for name in ("inputs", "captured", "outputs"))
        constants = {name: self._constant(index) for name, index in _mapping(found["constants"]).items()}
        steps = tuple(self._step(step, depth) for step in _list(found["steps"]))
        return Procedure(inputs, captured, outputs, constants, steps)

    def _step(self, data: object, depth: int) -> Step:
        kind = _mapping(data).get("step")
        if not isinstance(kind, str) or kind not in _STEPS:
            raise DataError(f"a step of kind {_shown(kind)}")
        make, fields = _STEPS[kind]
        found = _object(data, "step", *fields)
        return make(**{name: self._field(form, found[name], depth) for name, form in fields.items()})

    def _field(self, form: _Form, data: object, depth: int) -> object:
        if form is _Form.BODY:
            return self._procedure(data, depth + 1)
        if form is _Form.PROGRAM:
            return self._program(data, depth)
        if form is _Form.OPERATOR:
            return self._operator(data)
        return _PLAIN[form](data)

    def _program(self, data: object, depth: int) -> Program:
        return self.model(data, depth) if isinstance(data, dict) else self.programs[_index(data, self.programs)]

    def _constant(self, data: object) -> np.ndarray:
        return self.constants[_index(data, self.constants)]

    def _operator(self, data: object) -> HostFunction:
        found = _object(data, "name", "attributes", "source")
        name, given = _text(found["name"]), _mapping(found["attributes"])
        if name not in OPERATORS:
            raise DataError(f"the host has no operator {_shown(name)}")
        kinds = OPERATORS[name].attributes
        if unknown := given.keys() - kinds.keys():
            raise DataError(f"{name} has no attribute {_shown(min(unknown))}")
        attributes = {attribute: self._attribute(kinds[attribute], value) for attribute, value in given.items()}
        return HostOperator(name, attributes, _text(found["source"]))

    def _attribute(self, kind: type, data: object) -> Attribute:
        if kind is int:
            return _int(data)
        array = self._constant(_object(data, "constant")["constant"])
        if array.size != 1:
            raise DataError(f"an attribute of {array.size} elements")
        return array


def _port_data(port: StagedPort) -> dict[str, object]:
    kind = None if port.type is None else [port.type.shape, port.type.dtype]
    return {"name": port.name, "type": kind, "type_text": port.type_text}


def _port(data: object) -> StagedPort:
    found = _object(data, "name", "type", "type_text")
    kind = None if found["type"] is None else TensorType(*tensor_type(found["type"]))
    return StagedPort(_text(found["name"]), kind, _text(found["type_text"]))


def tensor_type(data: object, *others: str) -> tuple[tuple[int, ...], str]:
    """Shape and element type, which is a number's or among `others`. Raises DataError."""
    pair = _list(data)
    if len(pair) != 2:
        raise DataError(f"no shape and element type: {_shown(data)}")
    shape, dtype = _ints(pair[0]), _text(pair[1])
    if dtype not in others and not is_dtype(dtype):
        raise DataError(f"unknown element type {_shown(dtype)}")
    if (
        len(shape) > 32
        or min(shape, default=0) < 0
        or prod(max(dim, 1) for dim in shape) * np.dtype(dtype).itemsize > _LARGEST_BYTES
    ):
        raise DataError(f"no array has the shape {_shown(shape)}")
    return shape, dtype


def _slices(data: object) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple(tensor_type(one, "object") for one in _list(data))


def _mapping(data: object) -> dict[str, object]:
    if not isinstance(data, dict):
        raise DataError(f"{_shown(data)} is no object")
    return data


def _object(data: object, *fields: str) -> dict[str, object]:
    found = _mapping(data)
    if found.keys() != set(fields):
        raise DataError(f"an object with {_shown(list(found))}, not {', '.join(fields)}")
    return found


def _list(data: object) -> list[object]:
    if not isinstance(data, list):
        raise DataError(f"{_shown(data)} is no list")
    return data


def _text(data: object) -> str:
    if not isinstance(data, str):
        raise DataError(f"{_shown(data)} is no text")
    return data


def _int(data: object) -> int:
    if type(data) is not int or abs(data) > _LARGEST_BYTES:
        raise DataError(f"{_shown(data)} is no integer")
    return data


def _flag(data: object) -> bool:
    if not isinstance(data, bool):
        raise DataError(f"{_shown(data)} is neither true nor false")
    return data


def _texts(data: object) -> tuple[str, ...]:
    return tuple(map(_text, _list(data)))


def _ints(data: object) -> tuple[int, ...]:
    return tuple(map(_int, _list(data)))


def _flags(data: object) -> tuple[bool, ...]:
    return tuple(map(_flag, _list(data)))


def _index(data: object, items: Sequence[object]) -> int:
    index = _int(data)
    if not 0 <= index < len(items):
        raise DataError(f"number {index} of {len(items)}")
    return index


def _shown(data: object) -> str:
    text = repr(data) if isinstance(data, str | int | float | None) or not data else f"a {type(data).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."


_PLAIN: Mapping[_Form, Callable[[object], object]] = {
    _Form.TEXT: _text,
    _Form.NAMES: _texts,
    _Form.INTS: _ints,
    _Form.FLAGS: _flags,
    _Form.SLICES: _slices,
}
