"""The way of one concrete model to one program file: pipeline, groups, kernels, Plan, native code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import onnx_ir as ir

from ..kernels.groups.group import Group
from ..kernels.linalg.matmul_tiles import PLAIN, WEIGHTS
from ..kernels.problem import problem_of
from ..kernels.registry import build_kernel, candidates, stores_parts
from ..kernels.template.contract import BuiltKernel, Refusal
from ..runtime.archive import ConstantSource
from ..runtime.constants.shared import ConstantPool
from ..runtime.errors import MemoryLimitError, UnsupportedModelError
from ..runtime.hardware.memory_limit import MemoryLimit
from ..runtime.plan import DIMENSIONS, STORAGE, Plan, Role, planned_bytes
from ..runtime.precision import Precision
from ..runtime.program_file import SharedSource, write_program
from ..runtime.target import Target
from .descriptions import descriptions, remark_lowering
from .estimates.launches import predicted_us
from .estimates.tile_unit import target_without
from .feasible_limit import planned_within
from .frontend.shaping import forget_decided_shapes
from .interrupts import surfacing_interrupts
from .ir.aliases import Aliases, is_view, may_be_alias
from .ir.bounds import bounded_of, trim_of
from .ir.facts import has_static_type, infer_facts, source_of, tensor_type
from .ir.functions import computing_names, inline_function, is_fused
from .ir.shared_weights import declare_shared_weights
from .ir.states import check_states
from .ir.validity import check_lowered, check_nodes
from .lowering.groups import GroupReader
from .lowering.kernel_objects import KernelObjects
from .lowering.pitched_parts import inner_concats
from .lowering.plain_weights import with_plain_weights
from .lowering.planning import LoweredGroup, PlanDraft, aliases_of, draft_plan
from .lowering.program import build_library
from .lowering.result_copies import copy_shown_results
from .lowering.short_programs import without_small_regions
from .lowering.tvm_importer import TEMPLATE, import_kernel
from .pipeline import Context, PassRecord, Whole, parse_pipeline, run_pipeline, run_plan_pipeline
from .pipeline.pass_table import PASSES, named_pipeline
from .programs.cache import compiler_version
from .programs.contents import content_of
from .programs.options import Options
from .programs.tuning_database import Configurations

_WORTH_VECTORS = 0.95  # of the time of a program by tiles: below it vectors are taken
# By the keys of groups: a kernel's symbol, itself, and the names of its operands by their numbers; or why there is none.
Kernels: TypeAlias = dict[str, tuple[str, BuiltKernel, dict[int, str]] | str]
Progress = Callable[[str, float], None]  # what is being done, and the fraction of the whole that is behind


@dataclass(frozen=True)
class PlannedModel:
    """A model after all passes: its kernels in the order in which they run, what they need, and where every byte lies."""

    model: ir.Model
    lowered: list[LoweredGroup]
    draft: PlanDraft
    plan: Plan
    context: Context
    kernels: Whole


@surfacing_interrupts()
def compile_model(
    model: ir.Model,
    options: Options,
    *,
    name: str,
    output: Path,
    progress: Progress | None = None,
    constants: ConstantPool | None = None,
) -> None:
    """Compile a model whose shapes are all static, which may change it, and write the program file `output`.

    Args:
        constants: who has the constants that programs share ready, as of `write_program`; None: they are in the file.

    Raises:
        OptionError: the pipeline names an unknown pass or option.
        UnsupportedModelError: operators that no template takes; all of them at once.
        PassError: a pass broke the model: a bug of prefuse.
    """
    tell = progress or (lambda text, fraction: None)
    target = options.target
    planned = plan_model(model, options, tell)
    tell("generating code", 0.4)
    functions = {item.symbol: item.kernel.function for item in planned.lowered}
    objects = None if target.is_gpu else _kernel_objects(planned, output, constants)
    library = build_library(planned.plan, functions, target, profile=options.profile, objects=objects)
    tell("writing the program", 0.9)
    found = descriptions(planned.model, planned.lowered, planned.draft, planned.context, has_groups=options.profile)
    sources, shared = _constant_sources(planned), _shared_sources(planned)
    write_program(output, planned.plan, library, sources, {"name": name, **found}, shared, constants)
    tell("done", 1.0)


@surfacing_interrupts()
def plan_model(model: ir.Model, options: Options, progress: Progress | None = None, known: Kernels | None = None) -> PlannedModel:
    """All of a compilation that comes before native code, which takes most of its time. The model may be changed.

    Args:
        known: as of `lower_groups`.

    Raises:
        As `compile_model`.
    """
    tell, known = progress or (lambda text, fraction: None), {} if known is None else known
    if options.memory_limit is None:
        return _planned(model, options, tell, known)
    original = model.clone()  # each plan changes its graph
    whole = _planned(original.clone(), options, tell, known)
    plan = partial(_planned, options=options, tell=tell, known=known if whole.kernels.target == options.target else {})
    return planned_within(
        options.memory_limit,
        planned_bytes(whole.plan),
        lambda limit: plan(original.clone(), limit=limit, whole=whole.kernels),
        tell,
    )


def _planned(
    model: ir.Model,
    options: Options,
    tell: Progress,
    known: Kernels,
    limit: MemoryLimit | None = None,
    whole: Whole | None = None,
) -> PlannedModel:
    """The plan, within a limit in bytes if one is given. The model is changed.

    Args:
        whole: the program without a limit; None: this is that.

    Raises:
        MemoryLimitError: there is none.
    """
    target = options.target
    passes = parse_pipeline(named_pipeline(options.pipeline), PASSES)
    context = Context(target, precision=options.precision, weights=options.weights, memory_limit=limit, whole=whole)
    tell("inferring shapes", 0.0)
    if options.shares_weights:
        declare_shared_weights(model)
    forget_decided_shapes(model)
    infer_facts(model)
    check_nodes(model)
    check_states(model, is_final=False)

    def passed(record: PassRecord) -> None:
        tell(record.name, 0.05)

    run_pipeline(model, passes, context, on_pass=passed)
    check_lowered(model)
    check_states(model)  # the shapes of some are known only now
    copy_shown_results(model)
    tell("choosing kernels", 0.2)
    lowered, aliases, kernels_target = _lowered(model, options, known, whole)
    kernels = _kernels_of(model, lowered, kernels_target)
    if target.threads > 1:
        lowered = without_small_regions(lowered)
    remark_lowering(context, lowered, aliases)

    def placed(lowered: list[LoweredGroup], aliases: Aliases) -> PlannedModel:
        draft = draft_plan(model, lowered, target, aliases, is_limited=options.memory_limit is not None)
        if limit is not None:
            context.step_us = predicted_us(lowered, target)
        return PlannedModel(model, lowered, draft, run_plan_pipeline(draft.plan, passes, context), context, kernels)

    if limit is None:
        return placed(lowered, aliases)
    configurations = with_plain_weights(lowered, options.configurations)
    if configurations == options.configurations:
        return placed(lowered, aliases)
    plain, plain_aliases = lower_groups(model, kernels.target, options.precision, configurations)
    if target.threads > 1:
        plain = without_small_regions(plain)
    return _faster(lambda: placed(lowered, aliases), lambda: placed(plain, plain_aliases), plain, context)


def _lowered(
    model: ir.Model, options: Options, known: Kernels, whole: Whole | None
) -> tuple[list[LoweredGroup], Aliases, Target]:
    """The groups with their kernels, and the target these are for: that of the whole, else the options', or that without its tile
    unit for a program that would hardly use it, if that saves time."""
    target = options.target if whole is None else whole.target
    found = lower_groups(model, target, options.precision, options.configurations, known)
    if whole is not None or (vectors := target_without(found[0], target)) is None:
        return *found, target
    other = lower_groups(model, vectors, options.precision, options.configurations)
    by_tiles, by_vectors = (sum(predicted_us(lowered, target).values()) for lowered, _ in (found, other))
    return (*other, vectors) if by_vectors < _WORTH_VECTORS * by_tiles else (*found, target)


def _kernels_of(model: ir.Model, lowered: list[LoweredGroup], target: Target) -> Whole:
    made = {name: item.kernel for item in lowered for name in computing_names(model, item.node)}
    return Whole(target, {name: (one.template, one.estimate.unit) for name, one in made.items() if one.estimate is not None})


def _faster(
    best: Callable[[], PlannedModel], plainest: Callable[[], PlannedModel], plain: list[LoweredGroup], context: Context
) -> PlannedModel:
    """Within a memory limit, the plan of kernels as they are best, or that with plain weights, if it is predicted to be faster.

    Raises:
        MemoryLimitError: neither keeps within it.
    """
    before = len(context.remarks)
    try:
        first = best()
    except MemoryLimitError:
        del context.remarks[before:]
        _remark_plain_weights(plain, context)
        return plainest()
    if all(space.name != STORAGE for space in first.plan.spaces):  # all weights stay
        return first
    seconds, after = context.call_seconds, len(context.remarks)
    try:
        second = plainest()
    except MemoryLimitError:
        second = None
    if second is not None and context.call_seconds < seconds:
        del context.remarks[before:after]
        _remark_plain_weights(plain, context)
        return second
    del context.remarks[after:]
    context.call_seconds = seconds
    return first


def _remark_plain_weights(lowered: list[LoweredGroup], context: Context) -> None:
    kernels = [item for item in lowered if item.group.configuration.get(WEIGHTS) == PLAIN]
    context.remark("memory-limit", f"{len(kernels)} weights stay as they are, which kernels split: fewer bytes, the same bits")


@surfacing_interrupts()
def lower_groups(
    model: ir.Model,
    target: Target,
    precision: Precision = "float32",
    configurations: Configurations = MappingProxyType({}),
    known: Kernels | None = None,
) -> tuple[list[LoweredGroup], Aliases]:
    """A kernel for each node that computes something, in the graph's order, and where values lie that need none.

    Equal groups share a kernel. Empty tensors need none. A fused group that no template takes is taken apart, and its operators
    are lowered one by one; so what can do without a kernel is known when all others have theirs.

    Args:
        known: kernels that other graphs have got, by target and configurations equal to these; what is found is added.

    Raises:
        UnsupportedModelError: operators that no template takes; all of them at once.
    """
    lowering = _Lowering(model, target, precision, configurations, {} if known is None else known)
    lowering.lower_parts()
    lowering.lower(model.graph)
    aliases = aliases_of(model, target, frozenset(lowering.pitched))
    for node in model.graph:
        if may_be_alias(node) and node not in aliases.free and not _is_trivial(model, node):
            lowering.lower_node(node)
    if lowering.obstacles:
        count = len(lowering.obstacles)
        what = f"{count} operator{'s' * (count > 1)} cannot be compiled: " + "; ".join(dict.fromkeys(lowering.obstacles))
        raise UnsupportedModelError("model", what, "replace them, or add a template (docs/architecture.md says how)")
    return [lowering.groups[node] for node in model.graph if node in lowering.groups], aliases


class _Lowering:
    """The kernels found so far, by the structure of their groups, and the groups that they compute, by node."""

    def __init__(
        self, model: ir.Model, target: Target, precision: Precision, configurations: Configurations, known: Kernels
    ) -> None:
        self.model = model
        self.target = target
        self.reader = GroupReader(model, target, precision)
        self.configurations = configurations
        self.kernels = known
        self.groups: dict[ir.Node, LoweredGroup] = {}
        self.obstacles: list[str] = []
        self.pitched: set[ir.Value] = set()  # results that their kernels store as rows of a Concat

    def lower_parts(self) -> None:
        """Lower what makes the operands of a Concat along an inner axis, where all of it can be stored there."""
        for concat in inner_concats(self.model.graph) if not self.target.is_gpu else ():
            found = [self._lowered_part(node, concat.shape) for node in concat.makers]
            if all(found):
                self.groups |= {one.node: one for one in found if one is not None}
                self.pitched |= {value for node in concat.makers for value in node.outputs if value.name}

    def _lowered_part(self, node: ir.Node, shape: tuple[int, ...]) -> LoweredGroup | None:
        """A node with the kernel that would compute it otherwise, too, storing its result as a part of a tensor of some shape."""
        try:
            group = self.reader.group_of(node)
        except UnsupportedModelError:  # told of where it is lowered alone
            return None
        ranked, _ = candidates(group, self.target)
        if len(group.outputs) != 1 or not ranked or not stores_parts(ranked[0][0]):
            return None
        found = self._kernel_of(node, replace(group, enclosing={group.outputs[0]: shape}))
        return found if isinstance(found, LoweredGroup) and found.kernel.template == ranked[0][0] else None

    def lower(self, nodes: Iterable[ir.Node]) -> None:
        """Lower what certainly needs a kernel, and of groups taken apart likewise."""
        pending = list(reversed(list(nodes)))
        while pending:
            node = pending.pop()
            if node not in self.groups and not may_be_alias(node) and not _is_trivial(self.model, node):
                pending.extend(reversed(self.lower_node(node)))

    def lower_node(self, node: ir.Node) -> tuple[ir.Node, ...]:
        """Find the kernel of a node, or else the nodes that it becomes."""
        try:
            group = self.reader.group_of(node)
        except UnsupportedModelError as refusal:  # of its shapes
            self.obstacles.append(f"{node.op_type} at {refusal.where} ({refusal.what})")
            return ()
        found, bounded = self._kernel_of(node, group), bounded_of(self.model, node)
        if isinstance(found, LoweredGroup):
            self.groups[node] = found
        elif is_fused(node) and bounded is None:
            return inline_function(self.model, node)
        else:
            operator = node if bounded is None else bounded.operator
            self.obstacles.append(f"{operator.op_type} at {source_of(node)} ({found})")
        return ()

    def _kernel_of(self, node: ir.Node, group: Group) -> LoweredGroup | str:
        """A node with its kernel, which equal groups share; or why there is none."""
        if self.configurations:
            group = replace(group, configuration=self.configurations.get(problem_of(group), {}))
        key = group.key()
        if key not in self.kernels:
            self.kernels[key] = _build(self.model, node, group, self.target, len(self.kernels))
        found = self.kernels[key]
        if isinstance(found, str):
            return found
        symbol, kernel, numbers = found
        return LoweredGroup(node, group, _bind(kernel, numbers, group), symbol)


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
    renamed = {names[number]: name for name, number in numbers.items()} | {DIMENSIONS: DIMENSIONS}
    return replace(kernel, operands=tuple(replace(operand, name=renamed[operand.name]) for operand in kernel.operands))


def _kernel_objects(planned: PlannedModel, output: Path, constants: ConstantPool | None) -> KernelObjects:
    """Who keeps the code of our own kernels: what TVM's importer made depends on its whole graph."""
    is_kept = constants is not None and not constants.is_temporary
    keys = {item.symbol: item.group.key() for item in planned.lowered if item.kernel.template != TEMPLATE}
    return KernelObjects(compiler_version(), keys, output.parent if is_kept else None)


def _constant_sources(planned: PlannedModel) -> list[ConstantSource]:
    """The constants that lie in the program's own file."""
    offsets = {buffer.name: buffer.offset for buffer in planned.plan.buffers if buffer.role is Role.CONSTANT}
    return [
        ConstantSource(name, kind, offset, load)
        for name, (kind, load) in planned.draft.constants.items()
        if (offset := offsets[name]) is not None
    ]


def _shared_sources(planned: PlannedModel) -> list[SharedSource]:
    """The constants that other programs may have, too."""
    draft, found = planned.draft, []
    for name in planned.plan.shared:
        kind, load = draft.constants[name]
        found.append(SharedSource(name, content_of(*draft.parameters[name], kind), kind.size_bytes, load))
    return found
