"""A compilation that keeps what it did: the graph after each pass, the remarks, the groups and their kernels; no native code."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from types import MappingProxyType

import onnx_ir as ir

from ...runtime.errors import CompileError, InputError
from ...runtime.precision import Precision
from ...runtime.target import Target
from ..driver import lower_groups
from ..ir.facts import infer_facts
from ..ir.validity import check_lowered, check_nodes
from ..lowering.planning import LoweredGroup
from ..pipeline import Context, PassRecord, parse_pipeline, run_pipeline
from ..pipeline.pass_table import PASSES, named_pipeline
from ..programs.options import suggest
from ..programs.tuning_database import Configurations
from .history import IMPORT, LOWERING, History, NodeState

_NUMBERED = re.compile(r"([\w.]+)#(\d+)")
_LINE = re.compile(r".*:\d+")


@dataclass(frozen=True)
class Compilation:
    """`model` is the graph as it was lowered; `failure` says why it could not be, and then `lowered` is empty."""

    model: ir.Model
    history: History
    context: Context
    lowered: tuple[LoweredGroup, ...] = ()
    failure: str = ""
    _groups: dict[str, LoweredGroup] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._groups.update((str(item.node.name), item) for item in self.lowered)

    @property
    def lone_nodes(self) -> tuple[ir.Node, ...]:
        """The nodes of the groups of one operator."""
        return tuple(item.node for item in self.lowered if len(item.group.ops) == 1)

    def group_of(self, node: NodeState) -> LoweredGroup | None:
        """The group that a node of the last snapshot became; None for a view, which needs no kernel."""
        return self._groups.get(node.name)

    def find(self, text: str) -> list[tuple[int, str]]:
        """Snapshot and name of the nodes that a user means: by node name, output (with or without %), "MatMul#0" (the first
        MatMul of the imported graph), or source ("model.py:12", or a longer path). The first snapshot that has any counts.

        Raises:
            InputError: there is none, with the nearest name.
        """
        for number, snapshot in enumerate(self.history.snapshots):
            if found := _matches(snapshot.nodes, text):
                return [(number, name) for name in found]
        first = self.history.snapshots[0].nodes
        names = [name for node in first for name in (*node.members, *node.outputs)]
        ways = "name a node, an output, an operator with its number (MatMul#0) or a source line (model.py:12)"
        raise InputError(f"node {text!r}", "the model has no such node, before or after any pass", _nearest(text, names) or ways)


def trace_compilation(
    model: ir.Model,
    target: Target,
    pipeline: str | None = None,
    precision: Precision = "float32",
    configurations: Configurations = MappingProxyType({}),
) -> Compilation:
    """Run the graph passes on a copy of a model whose shapes are static, and choose kernels, keeping all that happens.

    Raises:
        OptionError: the pipeline names an unknown pass or option.
        PassError: a pass broke the model.
    """
    model = model.clone()
    passes = parse_pipeline(named_pipeline(pipeline), PASSES)
    infer_facts(model)
    check_nodes(model)
    context, history = Context(target, precision=precision), History()
    history.take(IMPORT, -1, model)
    position = 0

    def passed(record: PassRecord) -> None:
        nonlocal position
        if record.changed:
            history.take(record.name, position, model)
        position += 1

    run_pipeline(model, passes, context, on_pass=passed)
    check_lowered(model)
    try:
        lowered, aliases = lower_groups(model, target, precision, configurations)
    except CompileError as error:
        return Compilation(model, history, context, failure=str(error))
    history.take(LOWERING, position, model)
    for rejection in aliases.rejections:
        context.reject("alias", rejection)
    return Compilation(model, history, context, tuple(lowered))


def _matches(nodes: tuple[NodeState, ...], text: str) -> list[str]:
    """Names of the nodes that `text` means; of several ways to read it, the first that finds any."""
    value = text.removeprefix("%")
    ways = (
        (name for node in nodes for name in node.members if name == text),
        (node.members[-1] for node in nodes if value in node.outputs),
        _numbered(nodes, text),
        (node.members[-1] for node in nodes if _LINE.fullmatch(text) and _is_at(node.source, text)),
    )
    return next((found for way in ways if (found := list(dict.fromkeys(way)))), [])


def _numbered(nodes: tuple[NodeState, ...], text: str) -> list[str]:
    match = _NUMBERED.fullmatch(text)
    if match is None:
        return []
    same = [node for node in nodes if node.operator == match[1]]
    return [same[int(match[2])].members[-1]] if int(match[2]) < len(same) else []


def _is_at(source: str, text: str) -> bool:
    """Whether one of the joined lines of a source is `text`, or ends in it."""
    return any(line == text or line.endswith(f"/{text}") for line in source.split(", "))


def _nearest(text: str, names: list[str]) -> str:
    advice = suggest(text.removeprefix("%"), dict.fromkeys(names))
    return advice if advice.startswith("did you mean") else ""
