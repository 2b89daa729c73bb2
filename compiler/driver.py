"""The way of one concrete model to one program file: pipeline, groups, kernels, Plan, native code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from ..kernels.group import Group
from ..kernels.registry import build_kernel
from ..kernels.template import BuiltKernel, Refusal
from ..runtime.errors import UnsupportedModelError
from ..runtime.plan import Role
from ..runtime.program_file import ConstantSource, write_program
from ..runtime.target import Target
from .ir.bounds import bounded_of, trim_of
from .ir.facts import has_static_type, infer_facts, source_of, tensor_type
from .ir.functions import inline_function, is_fused
from .ir.validity import check_nodes
from .lowering.gpu.device_code import few_threads
from .lowering.groups import group_of
from .lowering.planning import LoweredGroup, PlanDraft, draft_plan, is_view
from .lowering.program import build_library
from .lowering.tvm_importer import TEMPLATE, import_kernel
from .pass_table import DEFAULT_PIPELINE, PASSES
from .pipeline import Context, PassRecord, parse_pipeline, run_pipeline, run_plan_pipeline

_REMARKS = 200  # lines kept of each list of the report
Progress = Callable[[str, float], None]  # what is being done, and the fraction of the whole that is behind


def compile_model(
    model: ir.Model,
    target: Target,
    *,
    pipeline: str | None = None,
    name: str,
    output: Path,
    progress: Progress | None = None,
) -> None:
    """Compile a model whose shapes are all static, changing it, and write the program file `output`.

    Raises:
        OptionError: the pipeline names an unknown pass or option.
        UnsupportedModelError: operators that no template takes; all of them at once.
        PassError: a pass broke the model: a bug of prefuse.
    """
    tell = progress or (lambda text, fraction: None)
    passes = parse_pipeline(pipeline or DEFAULT_PIPELINE, PASSES)
    context = Context(target)
    tell("inferring shapes", 0.0)
    infer_facts(model)
    check_nodes(model)

    def passed(record: PassRecord) -> None:
        tell(record.name, 0.05)

    run_pipeline(model, passes, context, on_pass=passed)
    tell("choosing kernels", 0.2)
    lowered = lower_groups(model, target)
    draft = draft_plan(model, lowered, target)
    plan = run_plan_pipeline(draft.plan, passes, context)
    tell("generating code", 0.4)
    functions = {item.symbol: item.kernel.function for item in lowered}
    library = build_library(plan, functions, target)
    tell("writing the program", 0.9)
    sources = _constant_sources(draft, {b.name: b.offset for b in plan.buffers if b.role is Role.CONSTANT})
    write_program(output, plan, library, sources, {"name": name, "report": _report(lowered, context)})
    tell("done", 1.0)


def lower_groups(model: ir.Model, target: Target) -> list[LoweredGroup]:
    """A kernel for each node that computes something, in the graph's order; equal groups share one.

    Views and empty tensors need none.

    A fused group that no template takes is taken apart, and its operators are lowered one by one.
    """
    kernels: dict[str, tuple[str, BuiltKernel, dict[int, str]] | str] = {}
    lowered: list[LoweredGroup] = []
    obstacles: list[str] = []
    pending = [node for node in reversed(list(model.graph)) if not _is_trivial(model, node)]
    while pending:
        node = pending.pop()
        try:
            group = group_of(model, node)
        except UnsupportedModelError as refusal:  # of its shapes
            obstacles.append(f"{node.op_type} at {refusal.where} ({refusal.what})")
            continue
        key = group.key()
        if key not in kernels:
            kernels[key] = _build(model, node, group, target, len(kernels))
        found, bounded = kernels[key], bounded_of(model, node)
        if not isinstance(found, str):
            symbol, kernel, numbers = found
            lowered.append(LoweredGroup(node, group, _bind(kernel, numbers, group), symbol))
        elif is_fused(node) and bounded is None:
            pending.extend(reversed([part for part in inline_function(model, node) if not _is_trivial(model, part)]))
        else:
            operator = node if bounded is None else bounded.operator
            obstacles.append(f"{operator.op_type} at {source_of(node)} ({found})")
    if obstacles:
        what = f"{len(obstacles)} operators cannot be compiled: " + "; ".join(dict.fromkeys(obstacles))
        raise UnsupportedModelError("model", what, "replace them, or add a template (docs/architecture.md says how)")
    return lowered


def _is_trivial(model: ir.Model, node: ir.Node) -> bool:
    """Whether no byte needs computing. The caller of a program cuts what is trimmed."""
    named = [value for value in node.outputs if value.name]
    if is_view(node) or trim_of(model, node) is not None:
        return True
    return all(has_static_type(value) and tensor_type(value).elements == 0 for value in named)


def _build(
    model: ir.Model, node: ir.Node, group: Group, target: Target, number: int
) -> tuple[str, BuiltKernel, dict[int, str]] | str:
    """Our own template, else TVM's default for an operator alone; where neither is, the reasons."""
    built = build_kernel(group, target)
    if not isinstance(built, BuiltKernel) and not is_fused(node) and not target.is_gpu:
        imported = import_kernel(model, node, group)
        refused = built
        built = (*refused, (TEMPLATE, imported.reason)) if isinstance(imported, Refusal) else replace(imported, refused=refused)
    if isinstance(built, BuiltKernel):
        return f"k{number}_{group.label}", built, {number: name for name, number in group.value_order().items()}
    return "; ".join(f"{template}: {reason}" for template, reason in built) or f"no template computes it on {target}"


def _bind(kernel: BuiltKernel, names: dict[int, str], group: Group) -> BuiltKernel:
    """The kernel of an equal group with this group's names for its operands."""
    numbers = group.value_order()
    renamed = {names[number]: name for name, number in numbers.items()}
    return replace(kernel, operands=tuple(replace(operand, name=renamed[operand.name]) for operand in kernel.operands))


def _constant_sources(draft: PlanDraft, offsets: dict[str, int | None]) -> list[ConstantSource]:
    sources = []
    for name, (kind, load) in draft.constants.items():
        offset = offsets[name]
        assert offset is not None
        sources.append(ConstantSource(name, kind, offset, load))
    return sources


def _report(lowered: list[LoweredGroup], context: Context) -> dict[str, object]:
    """What `CompiledModel.report` shows beyond the Plan: where the program is slow, and what the passes refused, with reasons."""
    reasons = {
        **{item.symbol: f"{TEMPLATE}{_reasons(item.kernel.refused)}" for item in lowered if item.kernel.template == TEMPLATE},
        **{item.symbol: few for item in lowered if (few := few_threads(item.kernel))},
    }
    slow = [
        f"{item.node.op_type} at {source_of(item.node)}: {reasons[item.symbol]}" for item in lowered if item.symbol in reasons
    ]
    return {"slow_paths": slow or "none", "remarks": [str(remark) for remark in context.remarks[:_REMARKS]]}


def _reasons(refused: tuple[tuple[str, str], ...]) -> str:
    return "".join(f", not {template}: {reason}" for template, reason in refused)
