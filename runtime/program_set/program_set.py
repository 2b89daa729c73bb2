"""The programs of one model for different sizes of its inputs, as the user calls them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeAlias

import numpy as np

from ..errors import InputError, OptionError
from ..executor import CompiledModel, Context, Shared
from ..interchange import OUT, all_as_tensors, as_array, copied_results, in_output_order, is_torch, number_array, taken_out
from ..plan import Plan, Port
from ..profile import Profile
from ..signature import in_order
from .member import Member, differences
from .program_set_file import save_set

Shapes: TypeAlias = tuple[tuple[int, ...], ...]
_MOST_KNOWN = 1024  # shapes of calls whose member is remembered
_MOST_NAMED = 6  # programs in an error


class ProgramSet(Shared):
    """Programs of one model, of which each call runs the one for the sizes of its inputs. Threads may call it at the same time.

    Inputs are given in order or by name, as NumPy arrays or torch tensors; the result is one array, or a tuple of them. All
    programs have the same inputs and outputs but for their shapes, and none keeps states.
    """

    def __init__(self, name: str, members: Sequence[Member]) -> None:
        assert members, "a set of no programs"
        assert not (faults := differences(members)), faults
        self._name = name
        self._members = tuple(sorted(members, key=lambda member: member.reach))
        largest = max(members, key=lambda member: sum(port.type.size_bytes for port in member.model.inputs)).model
        self._inputs, self._outputs = largest.inputs, largest.outputs
        self._input_names = tuple(port.name for port in self._inputs)
        self._known: dict[tuple[tuple[int, ...], ...], Member] = {}

    def __call__(self, /, *inputs: object, **named: object) -> object:
        """Run the program for the sizes of these inputs. `out` is what it is for `CompiledModel`.

        Raises:
            InputError: the inputs or `out` are not those of the model, or no program is for their sizes.
            ArenaMemoryError: there is no memory for the activations.
        """
        return self.run(lambda model: model, inputs, named)

    def run(
        self, callee_of: Callable[[CompiledModel], Callable[..., object]], inputs: Sequence[object], named: dict[str, object]
    ) -> object:
        """Call the program for the sizes of these inputs, or a context of it; of nothing there is nothing to compute.

        Raises:
            InputError: as a call.
        """
        named, out = taken_out(named, OUT in self.input_names)
        if isinstance(out, Mapping):  # by our names: the program's own may be others
            out = in_output_order(out, self.output_names)
        tensors, shapes = self._ordered(inputs, named)
        member = self._member(shapes)
        if member is not None:
            return member.run(callee_of(member.model), tensors, out)
        empty = next((found for one in self._members if (found := one.nothing(shapes)) is not None), None)
        if empty is None:
            raise self._refusal(shapes)
        results: Sequence[object] = all_as_tensors(empty) if is_torch(tensors) else empty
        return copied_results(tuple(results), [None] * len(results) if out is None else out, self.output_names)

    def find(self, inputs: Sequence[object], named: dict[str, object]) -> tuple[Member, Sequence[object]]:
        """The program for a call, and its inputs in order. Raises InputError."""
        tensors, shapes = self._ordered(inputs, named)
        member = self._member(shapes)
        if member is None:
            raise self._refusal(shapes)
        return member, tensors

    def _ordered(self, inputs: Sequence[object], named: dict[str, object]) -> tuple[list[object], Shapes]:
        """The inputs of a call in order, and their shapes. Raises InputError."""
        given = in_order(self.input_names, inputs, named)
        tensors = [self._tensor(*one) for one in zip(self.inputs, given, strict=True)]
        return tensors, tuple(tuple(getattr(value, "shape", ())) for value in tensors)

    def _member(self, shapes: Shapes) -> Member | None:
        """The program for inputs of these shapes, if there is one."""
        found = self._known.get(shapes)
        if found is None:
            found = next((member for member in self._members if member.serves(shapes)), None)
            if found is not None:
                if len(self._known) >= _MOST_KNOWN:
                    self._known.clear()
                self._known[shapes] = found
        return found

    def specialize(self, /, *inputs: object, **named: object) -> CompiledModel:
        """The program for inputs like these; of longer ones, if theirs are padded."""
        return self.find(inputs, named)[0].model

    def context(self) -> ProgramSetContext:
        """A caller of its own, with arenas that no other call uses."""
        return ProgramSetContext(self)

    def profile(self, /, *inputs: object, runs: int = 20, **named: object) -> Profile:
        """The times of each step in `runs` calls with these inputs. Raises as `CompiledModel.profile`, and OptionError."""
        member, tensors = self.find(inputs, named)
        if not member.serves_exactly([tuple(getattr(tensor, "shape", ())) for tensor in tensors]):
            what = "these sizes are padded to those of a program"
            raise OptionError("profile", what, f"give inputs of {', '.join(port.type_text for port in member.model.inputs)}")
        return member.model.profile(*tensors, runs=runs)

    @property
    def name(self) -> str:
        """What reports call the model."""
        return self._name

    @property
    def members(self) -> tuple[Member, ...]:
        """The programs and their sizes; a call runs the first that serves it."""
        return self._members

    @property
    def plan(self) -> Plan:
        """No single plan describes the model: raises OptionError."""
        raise OptionError("plan", f"the file holds {len(self._members)} programs", "choose one: net.specialize(...).plan")

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Names and types of the inputs, in order, those of the program for the largest ones."""
        return self._inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        """Names and types of the outputs, in order, of the program for the largest inputs."""
        return self._outputs

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the inputs, in order."""
        return self._input_names

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the outputs, in order."""
        return tuple(port.name for port in self.outputs)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the passes said while compiling the programs, each line once."""
        return tuple(dict.fromkeys(remark for member in self._members for remark in member.model.remarks))

    def report(self) -> str:
        """The sizes of each program, and its report."""
        listed = [f"program {number}: {', '.join(member.types)}{_note(member)}" for number, member in enumerate(self._members, 1)]
        return "\n\n".join(["\n".join(listed), *(member.model.report() for member in self._members)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all programs to a `.prefuse` file, whole or not at all. Raises ProgramFileError."""
        save_set(path, self._name, self._members)

    def _tensor(self, port: Port, value: object) -> object:
        if isinstance(value, (int, float)) and not isinstance(value, np.generic) and not port.type.shape:
            return number_array(value, port.type.dtype, f"input {port.name!r}")
        return value if is_torch((value,)) else as_array(value, f"input {port.name!r}")

    def _refusal(self, shapes: Sequence[Sequence[int]]) -> InputError:
        given = ", ".join(f"{name} {list(shape)}" for name, shape in zip(self.input_names, shapes, strict=True))
        known = [f"({', '.join(member.types)})" for member in self._members[:_MOST_NAMED]]
        known += ["..."] * (len(self._members) > _MOST_NAMED)
        fix = f"its programs are for {', '.join(known)}; compile the model for more sizes"
        return InputError("inputs", f"no program of {self._name} is for {given}", fix)


class ProgramSetContext:
    """One caller of a set: an arena for each program. Not to be called from two threads at once."""

    def __init__(self, programs: ProgramSet) -> None:
        self._programs = programs
        self._contexts: dict[CompiledModel, Context] = {}

    def __call__(self, /, *inputs: object, **named: object) -> object:
        """Run the program for the sizes of these inputs, as `ProgramSet` does."""
        return self._programs.run(self._context, inputs, named)

    def _context(self, model: CompiledModel) -> Context:
        if model not in self._contexts:
            self._contexts[model] = model.context()
        return self._contexts[model]

    @property
    def states(self) -> NoReturn:
        """There are none: raises OptionError."""
        raise OptionError("states", "the model keeps none", "compile it with states={output: input}")


def _note(member: Member) -> str:
    padded = ", ".join(f"{dim.name}={dim.sizes[-1]}" for dim in member.padded)
    return f", padded to {padded}" if padded else ""
