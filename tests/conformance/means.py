"""What computed a result: compiled programs, the compiler while compiling, or the host's reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import Copy, Launch, Plan, Role
from prefuse.runtime.staged.procedure import HostStep, ProgramStep
from prefuse.runtime.staged.staged import StagedProgram
from prefuse.runtime.staged.staged_model import StagedModel

Means = Literal["compiled", "folded", "host"]
MEANS: tuple[Means, ...] = ("compiled", "folded", "host")


@dataclass(frozen=True)
class Account:
    """What computed the results of a model that has run.

    `means` is "host" if an operator ran in `onnx.reference`; "folded" if nothing was left to compute at run time, as all results
    are constants that `onnx.reference` computed for the compiler; else "compiled". `ways` are the kernel templates of what
    was compiled, and "stages" where the host decides or keeps sequences between programs.
    """

    means: Means
    ways: tuple[str, ...]


def account_of(model: object) -> Account:
    """The account of all programs of a model."""
    parts = list(_parts(model))
    found = {part.means for part in parts}
    means: Means = "host" if "host" in found else "compiled" if "compiled" in found or not found else "folded"
    return Account(means, tuple(sorted({way for part in parts for way in part.ways})))


def grids_of(model: object) -> int:
    """The grids that one run of all programs of a model launches on a GPU, those of a loop once."""
    return sum(_grids_of_plan(one.plan) for one in _programs(model) if isinstance(one, CompiledModel))


def _grids_of_plan(plan: Plan) -> int:
    grids = {kernel.symbol: len(kernel.grids) for kernel in plan.kernels}
    return sum(grids[step.kernel] for step in plan.steps if isinstance(step, Launch))


def _programs(model: object) -> Iterator[CompiledModel | StagedProgram]:
    """The programs of a model, those in stages before the programs of theirs."""
    if isinstance(model, SpecializedModel):
        for program in model.programs:
            yield from _programs(program)
        return
    if isinstance(model, CompiledModel):
        yield model
        return
    stages = model.program if isinstance(model, StagedModel) else model
    assert isinstance(stages, StagedProgram), type(stages)
    yield stages
    for step in stages.procedure.walk():
        if isinstance(step, ProgramStep):
            yield from _programs(step.program)


def _parts(model: object) -> Iterator[Account]:
    for one in _programs(model):
        if isinstance(one, CompiledModel):
            yield _account_of_plan(one.plan, "onnx.reference computed" in one.report())
            continue
        yield Account("compiled", ("stages",))  # control flow, sequences and moves of bytes are ours
        for step in one.procedure.walk():
            if isinstance(step, HostStep) and step.is_reference:
                yield Account("host", ())


def _account_of_plan(plan: Plan, has_reference: bool) -> Account:
    constants = {buffer.name for buffer in plan.buffers if buffer.role is Role.CONSTANT}
    copies = [step for step in plan.steps if isinstance(step, Copy)]
    launched = {step.kernel for step in plan.steps if isinstance(step, Launch)}
    templates = {kernel.template for kernel in plan.kernels if kernel.symbol in launched}
    is_folded = has_reference and bool(copies) and not launched and all(step.source.buffer in constants for step in copies)
    return Account("folded" if is_folded else "compiled", tuple(sorted(templates)))
