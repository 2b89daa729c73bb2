"""What no single program can hold: programs with a static signature each, and what the host does between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from ..plan import TensorType
from .host_operators import Value
from .procedure import Procedure


@dataclass(frozen=True, slots=True)
class StagedPort:
    """An input or output of a staged program: its name for the user, and its type where that is a tensor of static shape."""

    name: str
    type: TensorType | None
    type_text: str  # for people: "float32[4,?]", "sequence"


@dataclass(frozen=True, slots=True)
class StagedProgram:
    """A program in stages. `inputs` and `outputs` are those of the procedure, as the user knows them."""

    name: str  # what reports call it
    procedure: Procedure
    inputs: tuple[StagedPort, ...]
    outputs: tuple[StagedPort, ...]

    def __call__(self, *inputs: object) -> object:
        """The only output, or a tuple of them. Inputs, all of them in order, are values as steps have them.

        Raises:
            InputError: the inputs break an operator's rules.
            CompileError: a stage cannot be compiled for the shapes of this run.
        """
        results = self.procedure.run(cast("tuple[Value, ...]", inputs), {})
        return results[0] if len(results) == 1 else tuple(results)

    def report(self) -> str:
        """Inputs and outputs, and the steps in order: what is compiled, and what the host does between the programs."""
        ports = [("input", port) for port in self.inputs] + [("output", port) for port in self.outputs]
        types = (f"  {kind} {port.name}: {port.type_text}" for kind, port in ports)
        return "\n".join((f"{self.name}, in stages", *types, *(f"  {line}" for line in self.procedure.describe())))
