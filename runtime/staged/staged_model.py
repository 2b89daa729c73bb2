"""Models that run in stages, as the user calls them."""

from __future__ import annotations

import os
from typing import NoReturn

import numpy as np

from ..errors import InputError, OptionError
from ..executor import CompiledModel, Shared
from ..interchange import OUT, all_as_tensors, as_array, copied_results, is_torch, number_array, taken_out
from ..plan import Plan
from ..signature import in_order
from .host_operators import Value
from .ownership import arrays_of, owned
from .procedure import ProgramStep
from .staged import StagedPort, StagedProgram
from .staged_file import save_staged
from .strings import with_str_objects


class StagedModel(Shared):
    """A model that runs in stages; calls as `CompiledModel` does. Threads may call it at the same time.

    Sequences are lists of arrays, optionals arrays or None, strings arrays of `str` objects.
    """

    def __init__(self, program: StagedProgram) -> None:
        self._program = program
        self._constants = tuple(program.procedure.all_constants())

    def __call__(self, /, *inputs: object, **named: object) -> object:
        """Run the model. `out` is what it is for `CompiledModel`, but that results are copied there.

        Raises:
            InputError: the inputs or `out` are not those of the model, or break an operator's rules.
            CompileError: a stage cannot be compiled for the shapes of this run.
        """
        names = self.input_names
        named, out = taken_out(named, OUT in names)
        given = in_order(names, inputs, named)
        arrays = tuple(_value(value, port) for value, port in zip(given, self._program.inputs, strict=True))
        held = (*arrays_of(arrays), *self._constants)
        results: list[object] = [*owned(self._program.procedure.run(arrays, {}), held)]
        if is_torch(given):
            results = all_as_tensors(results)
        if out is not None:
            return copied_results(tuple(results), out, self.output_names)
        return results[0] if len(results) == 1 else tuple(results)

    def context(self) -> StagedModel:
        """A caller of its own: the stages keep an arena for each call that runs at the same time."""
        return self

    @property
    def name(self) -> str:
        """What reports call the model."""
        return self._program.name

    @property
    def program(self) -> StagedProgram:
        """The steps, in order, between the inputs and outputs."""
        return self._program

    @property
    def plan(self) -> Plan:
        """No single plan describes the model: raises OptionError."""
        why = "the model runs in stages, whose shapes or number depend on the data of the run"
        raise OptionError("plan", why, "see report(): it lists the stages")

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the passes said while compiling the stages, each line once."""
        programs = (step.program for step in self._program.procedure.walk() if isinstance(step, ProgramStep))
        compiled = (program for program in programs if isinstance(program, CompiledModel))
        return tuple(dict.fromkeys(remark for program in compiled for remark in program.remarks))

    def profile(self, /, *inputs: object, runs: int = 20, **named: object) -> NoReturn:
        """No single program has the counters: raises OptionError."""
        raise OptionError("profile", "the model runs in stages, in several programs", "profile a model of static shapes")

    @property
    def inputs(self) -> tuple[StagedPort, ...]:
        """Names and types of the inputs, in order."""
        return self._program.inputs

    @property
    def outputs(self) -> tuple[StagedPort, ...]:
        """Names and types of the outputs, in order."""
        return self._program.outputs

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return tuple(port.name for port in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in order."""
        return tuple(port.name for port in self.outputs)

    def report(self) -> str:
        """Inputs and outputs, and the steps in order: what is compiled, and what the host does between the programs."""
        return self._program.report()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to a `.prefuse` file, whole or not at all.

        Raises:
            OptionError: a stage is compiled at run time, or a step needs onnx: no file could hold it.
            ProgramFileError: the file cannot be written.
        """
        save_staged(path, self._program)


def _value(value: object, port: StagedPort) -> Value:
    where = f"input {port.name!r}"
    if isinstance(value, (int, float)) and not isinstance(value, np.generic) and port.type is not None and not port.type.shape:
        return number_array(value, port.type.dtype, where)
    given = _array_or_list(value, where)
    if isinstance(given, np.ndarray):
        _check(given, port, where)
    return given


def _check(array: np.ndarray, port: StagedPort, where: str) -> None:
    """Raise InputError for an array of another element type or shape than the port's, as far as these are known."""
    dtype, _, shape = port.type_text.partition("[")
    if not shape:  # a sequence, an optional, or nothing is known
        return
    kind = "string" if array.dtype == object else array.dtype.name
    sizes = [] if shape == "]" else shape.removesuffix("]").split(",")
    if kind != dtype:
        fix = f"convert it to {dtype}"
    elif shape == "...]" or (len(sizes) == array.ndim and all(map(_may_be, sizes, array.shape))):
        return
    else:
        fix = (
            f"give {len(sizes)} dimensions, not {array.ndim}" if len(sizes) != array.ndim else "compile the model for this shape"
        )
    found = f"{kind}[{','.join(map(str, array.shape))}]"
    raise InputError(where, f"{found} given, the model takes {port.type_text}", fix)


def _may_be(text: str, size: int) -> bool:
    """Whether a dimension, of which a type says so much, may have a size."""
    return not text.isdecimal() or int(text) == size


def _array_or_list(value: object, where: str) -> Value:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return [_array_or_list(item, where) for item in value]
    try:
        return with_str_objects(as_array(value, where))
    except UnicodeDecodeError as error:
        raise InputError(where, f"bytes that are no string: {error}", "give strings, or their bytes in UTF-8") from error
