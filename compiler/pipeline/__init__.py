"""Passes, the text that lists them, and the runner that verifies, times and blames them.

A pipeline is text: `canonicalize,fuse-epilogue{max-ops=4},plan-memory`. Graph passes come first, plan passes after them; the
options in braces are the fields of the pass's frozen dataclass, so that a pipeline round-trips through its text.
"""

from __future__ import annotations

import json
import re
import shlex
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from itertools import pairwise
from types import NoneType, UnionType
from typing import TYPE_CHECKING, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import onnx_ir as ir

from ...runtime.errors import CompileError, OptionError
from ...runtime.hardware.memory_limit import MemoryLimit
from ...runtime.plan import Plan
from ...runtime.plan_checker import check_plan
from ...runtime.precision import Precision, Weights
from ...runtime.symbolic.sizes import SymbolicSizeError
from ...runtime.target import Target
from ..ir.assignments.kernel_choice import Ask, KernelChoice, NoKernel
from ..ir.functions import fused_names, is_fused
from ..ir.printer import print_model
from ..ir.rewriter import Rejection
from ..ir.verifier import verify_model

if TYPE_CHECKING:
    from ..lowering.chooser import KernelChooser

PassTable = Mapping[str, str]  # name on the command line -> "module:Class"
OptionValue = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Remark:
    """What a pass has to say of some nodes, which it names (nodes may be gone by the time somebody reads this).

    `nodes` has the names of each: its own, then those of the nodes fused into it.
    """

    pass_name: str
    message: str
    nodes: tuple[tuple[str, ...], ...] = ()
    kind: Literal["remark", "rejection"] = "remark"

    def __str__(self) -> str:
        return f"{self.pass_name}: {self.message}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The kernel that a pass was told of for what it makes of a node: named as in `Remark.nodes`."""

    pass_name: str
    names: tuple[str, ...]
    choice: KernelChoice


@dataclass(frozen=True, slots=True)
class Whole:
    """The program without a memory limit, whose bits the one within it has: the target of its kernels, which may be that of the
    compilation without its tile unit; and template and unit of each, by the names of the nodes that it computes."""

    target: Target
    kernels: Mapping[str, tuple[str, str]]


@dataclass(slots=True)
class Context:
    """What the passes of one compilation share. `source` is how a reproducer refers to the model."""

    target: Target
    source: str = "model.onnx"
    precision: Precision = "float32"
    weights: Weights | None = None  # in which weights of products are to be stored, if the user says so
    memory_limit: MemoryLimit | None = None  # of weights and activations together
    limit_bytes: int | None = None  # that is, of the first plan that was to keep within it
    whole: Whole | None = None  # where there is a limit
    call_seconds: float = 0.0  # what a call is predicted to take within it
    step_us: Mapping[str, float] = field(default_factory=dict)  # what launches take, by their labels, where that is asked for
    remarks: list[Remark] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    known_choices: dict[str, KernelChoice | NoKernel] = field(default_factory=dict)  # by the structure of groups

    def kernels_of(self, model: ir.Model) -> Ask:
        """Who says which kernel computes a node of the model as it is now. TVM is loaded with the first question."""

        @cache
        def chooser() -> KernelChooser:
            from ..lowering.chooser import KernelChooser

            return KernelChooser(model, self.target, self.precision, self.known_choices)

        return lambda node, variant: chooser().choose(node, variant)

    def predict(self, pass_name: str, node: ir.Node, choice: KernelChoice) -> None:
        """Record which kernel a pass expects of what it makes of a node."""
        self.predictions.append(Prediction(pass_name, _names(node), choice))

    def remark(self, pass_name: str, message: str, nodes: Iterable[ir.Node] = ()) -> None:
        """Record something worth knowing that a pass did or saw."""
        self.remarks.append(Remark(pass_name, message, tuple(map(_names, nodes))))

    def reject(self, pass_name: str, rejection: Rejection) -> None:
        """Record why a rewrite was refused, for `prefuse why-not`."""
        self.remarks.append(Remark(pass_name, rejection.reason, tuple(map(_names, rejection.nodes)), "rejection"))


def _names(node: ir.Node) -> tuple[str, ...]:
    members = fused_names(node) if is_fused(node) else ()
    return tuple(dict.fromkeys((node.name or node.op_type, *members)))


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite of the graph. Subclasses are frozen dataclasses whose fields, all with defaults, are the options."""

    name: ClassVar[str]

    @abstractmethod
    def run(self, model: ir.Model, context: Context) -> bool:
        """Rewrite `model` in place, leaving it executable; return whether anything changed."""


@dataclass(frozen=True)
class PlanPass(ABC):
    """A rewrite of the Plan, with options as `Pass` has them."""

    name: ClassVar[str]

    @abstractmethod
    def run(self, plan: Plan, context: Context) -> Plan:
        """Return the new Plan; `plan` itself is immutable."""


AnyPass = Pass | PlanPass


def number(default: int, *, least: int = 0, multiple: int = 1) -> int:
    """The field of a pass's option that is a whole number from `least` on, of multiples; a plain int is one from 0 on."""
    found: int = field(default=default, metadata={"least": least, "multiple": multiple})
    return found


class PassError(Exception):
    """A pass crashed or left a broken program: a bug of prefuse, with the command that shows it again."""

    def __init__(self, pass_name: str, position: int, reproducer: str, cause: BaseException) -> None:
        super().__init__(f"pass {pass_name} (number {position} of the pipeline) failed: {cause}\nreproduce with: {reproducer}")
        self.pass_name = pass_name
        self.position = position  # from 0, in the whole pipeline
        self.reproducer = reproducer


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One run of one pass. The texts are kept only when asked for: printing is not free."""

    name: str
    changed: bool
    seconds: float
    before_text: str | None = None
    after_text: str | None = None


# ---------------------------------------------------------------------------------------------------------------- text

_ITEM = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?:\{((?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*)\})?\s*(,|$)")
_OPTION = re.compile(r"\s*([A-Za-z][\w-]*)\s*=\s*(\"(?:[^\"\\]|\\.)*\"|[^\s,\"]+)\s*(?:,|\s|$)")
_PLAIN = re.compile(r"[^\s,{}\"=]+")


def parse_pipeline(text: str, table: PassTable) -> tuple[AnyPass, ...]:
    """Build the passes that `text` lists, e.g. "canonicalize,fuse-epilogue{max-ops=4}".

    Raises:
        OptionError: bad syntax, an unknown pass or option (with the nearest known name), a value of the wrong type, or a graph
            pass after a plan pass.
    """
    passes: list[AnyPass] = []
    position, more = 0, bool(text.strip())
    while more:
        match = _ITEM.match(text, position)
        if not match:
            raise OptionError("pipeline", f"cannot read {text[position:]!r}", "write name{option=value,...} separated by commas")
        passes.append(_build(match[1], match[2] or "", table))
        position, more = match.end(), match[3] == ","
    for first, second in pairwise(passes):
        if isinstance(first, PlanPass) and isinstance(second, Pass):
            raise OptionError("pipeline", f"graph pass {second.name} follows plan pass {first.name}", "put graph passes first")
    return tuple(passes)


def format_pipeline(passes: Iterable[AnyPass], *, with_defaults: bool = False) -> str:
    """The text of `passes`; options at their defaults are left out, or not."""
    return ",".join(_format(one, with_defaults) for one in passes)


def unknown_name(where: str, name: str, known: Iterable[str]) -> OptionError:
    """The error for a name that is not among `known`, with the nearest one that is."""
    names = sorted(known)
    near = get_close_matches(name, names, 1)
    fix = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names) or 'none'}"
    return OptionError(where, f"unknown name {name!r}", fix)


def _build(name: str, options: str, table: PassTable) -> AnyPass:
    if name not in table:
        raise unknown_name("pipeline", name, table)
    module, _, class_name = table[name].partition(":")
    cls = getattr(import_module(module), class_name)
    known = {item.name.replace("_", "-"): item for item in fields(cls)}
    types = _option_types(cls)
    values: dict[str, OptionValue] = {}
    position = 0
    while options[position:].strip():
        match = _OPTION.match(options, position)
        if not match:
            raise OptionError(name, f"cannot read option {options[position:]!r}", "write option=value")
        option, position = match[1], match.end()
        if option not in known:
            raise unknown_name(f"options of {name}", option, known)
        item, where = known[option], f"{name}{{{option}}}"
        values[item.name] = value = _parse_value(where, match[2], types[item.name])
        if isinstance(value, int) and not isinstance(value, bool):
            _check_range(where, value, item.metadata.get("least", 0), item.metadata.get("multiple", 1))
    built: AnyPass = cls(**values)
    return built


@cache
def _option_types(cls: type[AnyPass]) -> Mapping[str, object]:
    """The types of a pass's options. They are evaluated from text, 0.3 ms for each pass of a pipeline."""
    return get_type_hints(cls)


def _parse_value(where: str, text: str, annotation: object) -> OptionValue:
    """Read an option's text as the type its field declares: bool, int, float, str, Literal, or one of them | None."""
    try:
        value = json.loads(text) if text.startswith('"') else text
    except ValueError as error:
        raise OptionError(where, f"{text} is no string of JSON: {error}") from None
    if get_origin(annotation) in (Union, UnionType):
        members = get_args(annotation)
        if NoneType in members and text == "none":
            return None
        annotation = next(member for member in members if member is not NoneType)
    if get_origin(annotation) is Literal:
        choices = {str(choice): choice for choice in get_args(annotation)}
        if value not in choices:
            raise unknown_name(where, value, choices)
        chosen: OptionValue = choices[value]
        return chosen
    if annotation is bool:
        if value not in ("true", "false"):
            raise OptionError(where, f"{value!r} is not a boolean", "write true or false")
        return bool(value == "true")
    if annotation in (int, float):
        try:
            return int(value) if annotation is int else float(value)
        except ValueError:
            raise OptionError(where, f"{value!r} is not {'an integer' if annotation is int else 'a number'}") from None
    assert annotation is str, f"{where}: an option cannot have type {annotation}"
    return str(value)


def _check_range(where: str, value: int, least: int, multiple: int) -> None:
    """Raise OptionError for a number that is too small, or no multiple."""
    if value < least or value % multiple:
        of = f", a multiple of {multiple}" if multiple > 1 else ""
        raise OptionError(where, f"{value} given", f"give a number from {least} on{of}")


def _format(one: AnyPass, with_defaults: bool) -> str:
    values = [(item, getattr(one, item.name)) for item in fields(one)]
    shown = [(item.name.replace("_", "-"), value) for item, value in values if with_defaults or value != item.default]
    options = [f"{name}={_format_value(value)}" for name, value in shown]
    return one.name + (f"{{{','.join(options)}}}" if options else "")


def _format_value(value: OptionValue) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) and value != "none" else json.dumps(value)
    return repr(value)


# -------------------------------------------------------------------------------------------------------------- runner


def run_pipeline(
    model: ir.Model,
    passes: Sequence[AnyPass],
    context: Context,
    *,
    verify: bool = True,
    on_pass: Callable[[PassRecord], None] | None = None,
    start: str | int | None = None,
    stop: str | int | None = None,
    keep_texts: bool = False,
) -> tuple[PassRecord, ...]:
    """Run the graph passes among `passes` on `model` in place, verifying it after each that says that it has changed it, and at
    the end.

    Args:
        on_pass: called with each record as soon as its pass is done.
        start: the first pass to run, by name (its first occurrence) or position; None: from the beginning.
        stop: the last pass to run, likewise (by name: the first occurrence not before `start`).
        keep_texts: fill `before_text` and `after_text` of the records.

    Raises:
        PassError: a pass crashed or broke the model.
        CompileError: a pass found a fault of the user's; raised as it is.
        OptionError: `start` or `stop` is not in the pipeline.
    """
    graph_passes = [one for one in passes if isinstance(one, Pass)]
    first = _find(graph_passes, start, 0)
    last = _find(graph_passes, stop, first, default=len(graph_passes) - 1)
    records = []
    text = print_model(model) if keep_texts else None
    for position in range(first, last + 1):
        one = graph_passes[position]
        begin = time.perf_counter()
        with _blame(graph_passes[first : position + 1], position, context):
            changed = one.run(model, context)
        seconds = time.perf_counter() - begin
        if verify and (changed or position == last):  # the last one for passes that say falsely that they have changed nothing
            with _blame(graph_passes[first : position + 1], position, context):
                verify_model(model)
        record = PassRecord(one.name, changed, seconds)
        if keep_texts:
            before, text = text, print_model(model)
            record = replace(record, before_text=before, after_text=text)
        records.append(record)
        if on_pass:
            on_pass(record)
    return tuple(records)


def run_plan_pipeline(
    plan: Plan,
    passes: Sequence[AnyPass],
    context: Context,
    *,
    verify: bool = True,
    on_pass: Callable[[PassRecord], None] | None = None,
) -> Plan:
    """Run the plan passes among `passes`, checking the Plan after each, and return the last Plan.

    Raises:
        PassError: a pass crashed or made a Plan that the checker faults.
        CompileError: a pass found a fault of the user's, such as too small a capacity; raised as it is.
    """
    for position, one in enumerate(passes):
        if not isinstance(one, PlanPass):
            continue
        begin = time.perf_counter()
        with _blame(passes[: position + 1], position, context):
            new_plan = one.run(plan, context)
            seconds = time.perf_counter() - begin
            if verify and (faults := check_plan(new_plan)):
                raise AssertionError("; ".join(map(str, faults[:5])))
        changed, plan = new_plan != plan, new_plan
        if on_pass:
            on_pass(PassRecord(one.name, changed, seconds))
    return plan


@contextmanager
def _blame(run: Sequence[AnyPass], position: int, context: Context) -> Iterator[None]:
    """Turn what escapes from the last pass of `run` into a PassError, except faults of the user's."""
    try:
        yield
    except CompileError:
        raise
    except SymbolicSizeError as error:
        raise SymbolicSizeError(f"pass {run[-1].name} needs numbers: {error}") from error
    except Exception as error:
        command = shlex.join(["prefuse", "opt", context.source, "--pipeline", format_pipeline(run)])
        raise PassError(run[-1].name, position, command, error) from error


def _find(passes: Sequence[Pass], place: str | int | None, begin: int, default: int = 0) -> int:
    """Position of the pass that `place` names, at or after `begin`."""
    if place is None:
        return default
    if isinstance(place, int):
        if not begin <= place < len(passes):
            raise OptionError("pipeline", f"no pass at position {place}", f"positions are {begin} to {len(passes) - 1}")
        return place
    for position in range(begin, len(passes)):
        if passes[position].name == place:
            return position
    raise unknown_name("pipeline", place, {one.name for one in passes[begin:]})
