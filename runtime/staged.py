"""Models that no single program can hold: programs with a static signature each, and what the host does between them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from .errors import OptionError
from .executor import CompiledModel
from .host_operators import Value
from .interchange import all_as_tensors, as_array, is_torch, number_array
from .plan import Plan, TensorType
from .procedure import Procedure, ProgramStep
from .sharing import Shared
from .signature import in_order


@dataclass(frozen=True, slots=True)
class StagedPort:
    """An input or output of a staged model: its name for the user, and its type where that is a tensor of static shape."""

    name: str
    type: TensorType | None
    type_text: str  # for people: "float32[4,?]", "sequence"


class StagedModel(Shared):
    """A model that runs in stages; calls as `CompiledModel` does. Threads may call it at the same time.

    Sequences are lists of arrays, optionals arrays or None, strings arrays of `str` objects.
    """

    def __init__(self, name: str, procedure: Procedure, inputs: tuple[StagedPort, ...], outputs: tuple[StagedPort, ...]) -> None:
        """`inputs` and `outputs` are those of the procedure, as the user knows them."""
        self._name = name
        self._procedure = procedure
        self._inputs = inputs
        self._outputs = outputs

    def __call__(self, *inputs: object, **named: object) -> object:
        """Run the model.

        Raises:
            InputError: the inputs are not those of the model, or break an operator's rules.
            CompileError: a stage cannot be compiled for the shapes of this run.
        """
        names = self.input_names
        given = in_order(names, inputs, named)
        arrays = tuple(_value(value, port) for value, port in zip(given, self._inputs, strict=True))
        results: list[object] = list(self._procedure.run(arrays, {}))
        if is_torch(given):
            results = all_as_tensors(results)
        return results[0] if len(results) == 1 else tuple(results)

    def context(self) -> StagedModel:
        """A caller of its own: the stages keep an arena for each call that runs at the same time."""
        return self

    @property
    def name(self) -> str:
        """What reports call the model."""
        return self._name

    @property
    def procedure(self) -> Procedure:
        """The steps, in order."""
        return self._procedure

    @property
    def plan(self) -> Plan:
        """No single plan describes the model: raises OptionError."""
        why = "the model runs in stages, whose shapes or number depend on the data of the run"
        raise OptionError("plan", why, "see report(): it lists the stages")

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the passes said while compiling the stages, each line once."""
        programs = (step.program for step in self._procedure.walk() if isinstance(step, ProgramStep))
        compiled = (program for program in programs if isinstance(program, CompiledModel))
        return tuple(dict.fromkeys(remark for program in compiled for remark in program.remarks))

    def profile(self, *inputs: object, runs: int = 20, **named: object) -> NoReturn:
        """No single program has the counters: raises OptionError."""
        raise OptionError("profile", "the model runs in stages, in several programs", "profile a model of static shapes")

    @property
    def inputs(self) -> tuple[StagedPort, ...]:
        """Names and types of the inputs, in order."""
        return self._inputs

    @property
    def outputs(self) -> tuple[StagedPort, ...]:
        """Names and types of the outputs, in order."""
        return self._outputs

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return tuple(port.name for port in self._inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in order."""
        return tuple(port.name for port in self._outputs)

    def report(self) -> str:
        """Inputs and outputs, and the steps in order: what is compiled, and what the host does between the programs."""
        ports = [("input", port) for port in self._inputs] + [("output", port) for port in self._outputs]
        types = (f"  {kind} {port.name}: {port.type_text}" for kind, port in ports)
        return "\n".join((f"{self._name}, in stages", *types, *(f"  {line}" for line in self._procedure.describe())))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a `.prefuse` file, whole or not at all.

        Raises:
            OptionError: a stage is compiled at run time, or a step needs onnx: no file could hold it.
            ProgramFileError: the file cannot be written.
        """
        from .staged_file import save_staged  # which knows this module

        save_staged(path, self)


def _value(value: object, port: StagedPort) -> Value:
    where = f"input {port.name!r}"
    if isinstance(value, (int, float)) and not isinstance(value, np.generic) and port.type is not None and not port.type.shape:
        return number_array(value, port.type.dtype, where)
    return _array_or_list(value, where)


def _array_or_list(value: object, where: str) -> Value:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return [_array_or_list(item, where) for item in value]
    return as_array(value, where)
