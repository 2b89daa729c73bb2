"""Whether a staged program that a file holds makes sense: what is read is there, and bodies and programs fit their steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..executor import CompiledModel
from .host_operators import OPERATORS, HostOperator
from .procedure import BranchStep, HostStep, LoopStep, MapStep, Procedure, ProgramStep, ScanStep, Step
from .staged import StagedProgram


def check_staged(program: StagedProgram) -> Iterator[str]:
    """Faults of a program, each one line."""
    procedure = program.procedure
    yield from _unequal("the model: inputs", len(program.inputs), len(procedure.inputs))
    yield from _unequal("the model: outputs", len(program.outputs), len(procedure.outputs))
    if len({port.name for port in program.inputs}) != len(program.inputs):
        yield "the model: two inputs of one name"
    yield from _check(procedure, ())


def _check(procedure: Procedure, outer: Collection[str]) -> Iterator[str]:
    """Faults of a procedure inside of which the values of `outer` are there."""
    yield from (f"{name!r} is captured and not there" for name in procedure.captured if name not in outer)
    known = {*procedure.constants, *procedure.captured, *procedure.inputs}
    for step in procedure.steps:
        is_optional = isinstance(step, HostStep)
        yield from (f"{_label(step)}: reads {name!r}, which is not there" for name in step.reads
                    if name not in known and not (is_optional and not name))  # fmt: skip
        for body in step.bodies:
            yield from _check(body, known)
        yield from (f"{_label(step)}: {fault}" for fault in _misfits(step))
        known.update(name for name in step.writes if name)
    yield from (f"output {name!r} is not there" for name in procedure.outputs if name not in known)


def _misfits(step: Step) -> Iterator[str]:
    """What does not fit in a step: numbers of inputs and outputs."""
    match step:
        case ProgramStep():
            yield from _program(step)
        case HostStep():
            yield from _host(step)
        case BranchStep():
            for branch in step.bodies:
                yield from _unequal("inputs of a branch", len(branch.inputs), 0)
                yield from _fewer("outputs of a branch", len(branch.outputs), len(step.writes))
        case LoopStep():
            if "" in step.initial:
                yield "a carried value left out"
            yield from _unequal("inputs of the body", len(step.body.inputs), 2 + len(step.initial))
            yield from _unequal("outputs of the body", len(step.body.outputs), 1 + len(step.initial) + len(step.scan_types))
            yield from _fewer("outputs", len(step.initial) + len(step.scan_types), len(step.writes))
        case ScanStep():
            yield from _scan(step)
        case MapStep():
            yield from _unequal("inputs of the body", len(step.body.inputs), len(step.inputs))
            yield from _fewer("outputs of the body", len(step.body.outputs), len(step.writes))


def _program(step: ProgramStep) -> Iterator[str]:
    program = step.program
    assert isinstance(program, CompiledModel | StagedProgram)
    yield from _unequal("inputs", len(program.inputs), len(step.reads))
    yield from _unequal("outputs", len(program.outputs), len(step.writes))
    if isinstance(program, StagedProgram):
        yield from check_staged(program)


def _host(step: HostStep) -> Iterator[str]:
    operator = step.function
    assert isinstance(operator, HostOperator)
    fewest, most = OPERATORS[operator.name].inputs
    if len(step.reads) < fewest or (most is not None and len(step.reads) > most):
        yield f"{len(step.reads)} inputs"
    if operator.name != "Split":
        yield from _unequal("outputs", int(operator.attributes.get("outputs", 1)), len(step.writes))


def _scan(step: ScanStep) -> Iterator[str]:
    slices = len(step.scan_types)
    if not step.scanned:
        yield "nothing to scan"
    yield from _unequal("inputs of the body", len(step.body.inputs), len(step.initial) + len(step.scanned))
    yield from _unequal("outputs of the body", len(step.body.outputs), len(step.initial) + slices)
    yield from _fewer("outputs", len(step.initial) + slices, len(step.writes))
    for values, number in (
        (step.input_axes, len(step.scanned)),
        (step.input_reversed, len(step.scanned)),
        (step.output_axes, slices),
        (step.output_reversed, slices),
    ):
        yield from _unequal("axes and directions", len(values), number)


def _unequal(what: str, found: int, wanted: int) -> Iterator[str]:
    if found != wanted:
        yield f"{what}: {found}, not {wanted}"


def _fewer(what: str, found: int, wanted: int) -> Iterator[str]:
    if found < wanted:
        yield f"{what}: {found}, not {wanted} or more"


def _label(step: Step) -> str:
    return step.name if isinstance(step, ProgramStep) else str(getattr(step, "source", ""))
