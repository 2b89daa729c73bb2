"""What computed a result: compiled programs, the compiler while compiling, or the host's reference."""

from __future__ import annotations

from typing import Literal

from prefuse.compiler.specialize import SpecializedModel
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Copy, Launch, Plan, Role
from prefuse.runtime.staged import HostStep, ProgramStep, StagedModel

Means = Literal["compiled", "folded", "host"]
MEANS: tuple[Means, ...] = ("compiled", "folded", "host")


def means_of(model: object) -> Means:
    """What computed the results of a model that has run.

    "host": an operator ran in `onnx.reference`; "folded": nothing of it was left to compute at run time, all of its results are
    constants of the program (the constants of a fold come from `onnx.reference` too); else "compiled".
    """
    found = set(_means(model))
    return "host" if "host" in found else "compiled" if "compiled" in found or not found else "folded"


def _means(model: object) -> list[Means]:
    if isinstance(model, SpecializedModel):
        return [means for program in model.programs for means in _means(program)]
    if isinstance(model, StagedModel):
        found: list[Means] = ["compiled"]  # control flow and sequences, which are ours
        for step in model.procedure.walk():
            if isinstance(step, ProgramStep):
                found += _means(step.program)
            elif isinstance(step, HostStep) and step.is_reference:
                found.append("host")
        return found
    assert isinstance(model, CompiledModel), type(model)
    return [_means_of_plan(model.plan)]


def _means_of_plan(plan: Plan) -> Means:
    constants = {buffer.name for buffer in plan.buffers if buffer.role is Role.CONSTANT}
    copies = [step for step in plan.steps if isinstance(step, Copy)]
    is_folded = bool(copies) and all(step.source.buffer in constants for step in copies)
    return "folded" if is_folded and not any(isinstance(step, Launch) for step in plan.steps) else "compiled"
