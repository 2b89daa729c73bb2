"""Which template computes a group: the first of a visible list that takes it, with the reasons of those passed over."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from functools import partial
from math import inf, prod

from ..runtime.symbolic.sizes import Domain, greatest_of
from ..runtime.target import Target
from .attention import attention, attention_decode_gpu, attention_gpu, attention_mma_gpu, linear_attention
from .attention.pattern import never_stored
from .codegen.builder import LargeWorkspaceError
from .codegen.grids import UncutError
from .codegen.rocm_limits import rocm_obstacle
from .convolution import (
    col2im,
    convolution,
    convolution_channels_last,
    convolution_tiles,
    depthwise_gpu,
    strassen_convolution,
    transposed_convolution_channels_last,
    transposed_convolution_tiles,
    winograd_channels_last,
)
from .convolution import convolution_gpu as gpu_convolution
from .convolution import convolution_mma_gpu as gpu_mma_convolution
from .convolution import transposed_convolution_mma_gpu as gpu_mma_transposed
from .elementwise import arange, elementwise, one_hot, random_numbers, trilu
from .elementwise.joined_results import JOINING
from .elementwise.strided_operands import AFFINE
from .groups.configuration import KEPT_TEMPLATE, TEMPLATE, Configuration, ignored
from .groups.group import Group
from .linalg import (
    dequantized_matmul,
    dequantized_rows,
    determinant,
    fixed_point_matmul,
    fixed_point_tiles,
    gathered_matmul,
    matmul,
    matmul_mma_gpu,
    matmul_tiles,
    matmul_wgmma_gpu,
    panel_gather,
    product_rows,
    strassen_matmul,
)
from .linalg import matmul_gpu as gpu_matmul
from .movement import gather, injective, scatter, sequence
from .pooling import pooling, pooling_channels_last, pooling_indices, regions
from .recurrent import recurrent, recurrent_gpu
from .reduction import arg_reduction, normalization, reduction, rows, rows_gpu, scan, scan_gpu
from .reduction import normalization_gpu as gpu_normalization
from .reduction import reduction_gpu as gpu_reduction
from .sampling import grid_sample, resize
from .sorting import selection, suppression, topk, topk_gpu, unique
from .symbolic import at_hint, domain_of, write_symbolic
from .template.contract import BuiltKernel, Candidate, Planner, Refusal, Template, at_floors
from .template.values import (
    anchors_of,
    has_epilogue_only,
    has_prologue_and_epilogue_only,
    pointwise_obstacle,
    read_narrow,
    read_weights,
)
from .versions import described, versions_of, with_versions

_MAX_ELEMENTS = 2**31 - 1
_MOST_TIMES = 3.0  # the least time predicted, beyond which a candidate is not measured
_PRODUCTS = frozenset(["MatMul", "Gemm"])
# Templates that take operands of any storage in the table of formats; all others take those that their types alone describe.
_READ_FORMATS = frozenset(
    ["matmul", "matmul_tiles", "convolution", "convolution_channels_last", "transposed_convolution_channels_last"]
)


def _channels_last(name: str, plan: Planner, anchors: Set[str]) -> Template:
    """One that reads and stores through transposes, and may store its result as a part of a Concat."""
    return Template(name, plan, frozenset(["Concat", *anchors]), has_surroundings=True, reads_narrow=True)


TEMPLATES: tuple[Template, ...] = (
    Template("elementwise", elementwise.plan),
    Template("injective", injective.plan, injective.OPERATORS, has_prologue=True),
    Template("trilu", at_floors(trilu.build), trilu.OPERATORS),
    Template("gather", gather.plan, gather.OPERATORS, has_prologue=True),
    Template("scan", scan.plan, scan.OPERATORS),
    Template("reduction", reduction.plan, reduction.OPERATORS, has_prologue=True),
    Template("arg_reduction", arg_reduction.plan, arg_reduction.OPERATORS),
    Template("normalization", normalization.plan, normalization.OPERATORS, has_prologue=True),
    Template("rows", rows.plan, rows.OPERATORS, has_surroundings=True),
    Template("pooling", pooling.plan, pooling.OPERATORS, has_prologue=True, reads_narrow=True),
    Template("grid_sample", at_floors(grid_sample.build, grid_sample.obstacle), grid_sample.OPERATORS),
    Template("resize", resize.plan, resize.OPERATORS),
    Template("pooling_indices", at_floors(pooling_indices.build, pooling_indices.obstacle), pooling_indices.OPERATORS),
    Template("regions", at_floors(regions.build, regions.obstacle), regions.OPERATORS),
    Template("col2im", at_floors(col2im.build, col2im.obstacle), col2im.OPERATORS),
    Template("sequence", at_floors(sequence.build), sequence.OPERATORS),
    Template("determinant", at_floors(determinant.build, determinant.obstacle), determinant.OPERATORS),
    Template("range", at_floors(arange.build, arange.obstacle), arange.OPERATORS),
    Template("one_hot", at_floors(one_hot.build), one_hot.OPERATORS),
    Template("scatter", at_floors(scatter.build, scatter.obstacle), scatter.OPERATORS),
    Template("random", at_floors(random_numbers.build, random_numbers.obstacle), random_numbers.OPERATORS),
    Template(
        "multinomial",
        at_floors(random_numbers.build_multinomial, random_numbers.multinomial_obstacle),
        frozenset(["Multinomial"]),
    ),
    Template("topk", at_floors(topk.build, topk.obstacle), topk.OPERATORS),
    Template("strassen_matmul", strassen_matmul.plan, _PRODUCTS, stores_parts=True),
    Template("matmul", matmul.plan, _PRODUCTS, reads_narrow=True, stores_parts=True),
    Template(
        "fixed_point_matmul",
        fixed_point_matmul.plan,
        _PRODUCTS,
        reads_narrow=True,
        reads_weights=True,
        stores_parts=True,
    ),
    Template(
        "dequantized_matmul",
        dequantized_matmul.plan,
        _PRODUCTS,
        reads_narrow=True,
        reads_weights=True,
        stores_parts=True,
    ),
    Template(
        "dequantized_rows",
        dequantized_rows.plan,
        _PRODUCTS,
        reads_narrow=True,
        reads_weights=True,
        stores_parts=True,
    ),
    Template("panel_gather", panel_gather.plan, frozenset(["Gather"]), reads_weights=True),
    Template("product_rows", product_rows.plan, product_rows.OPERATORS, has_surroundings=True),
    Template(
        "gathered_matmul",
        at_floors(gathered_matmul.build, gathered_matmul.obstacle),
        gathered_matmul.OPERATORS,
        has_surroundings=True,
    ),
    Template("attention", attention.plan, attention.ANCHORS, has_surroundings=True),
    _channels_last("winograd_channels_last", winograd_channels_last.plan, {"Conv"}),
    _channels_last("strassen_convolution", strassen_convolution.plan, {"Conv"}),
    _channels_last("convolution_channels_last", convolution_channels_last.plan, {"Conv"}),
    _channels_last("transposed_convolution_channels_last", transposed_convolution_channels_last.plan, {"ConvTranspose"}),
    _channels_last("pooling_channels_last", pooling_channels_last.plan, pooling.OPERATORS),
    Template("convolution", convolution.plan, frozenset(["Conv", "ConvTranspose"]), has_prologue=True, reads_narrow=True),
    Template("recurrent", recurrent.plan, recurrent.OPERATORS, has_surroundings=True, reads_narrow=True, reads_weights=True),
    Template("linear_attention", at_floors(linear_attention.build, linear_attention.obstacle), linear_attention.OPERATORS),
    Template("selection", at_floors(selection.build, selection.obstacle), selection.OPERATORS),
    Template("suppression", at_floors(suppression.build, suppression.obstacle), suppression.OPERATORS),
    Template("unique", at_floors(unique.build, unique.obstacle), unique.OPERATORS),
)

# On CPUs with AMX.
TILE_TEMPLATES: tuple[Template, ...] = (
    Template("matmul_tiles", matmul_tiles.plan, _PRODUCTS, reads_narrow=True, stores_parts=True),
    Template(
        "fixed_point_tiles",
        fixed_point_tiles.plan,
        _PRODUCTS,
        reads_narrow=True,
        reads_weights=True,
        stores_parts=True,
    ),
    _channels_last("convolution_tiles", convolution_tiles.plan, {"Conv"}),
    _channels_last("transposed_convolution_tiles", transposed_convolution_tiles.plan, {"ConvTranspose"}),
)

# What is worth a schedule of its own on a GPU; everything else is the CPU's loop nests, cut into grids.
GPU_TEMPLATES: tuple[Template, ...] = (
    Template("gpu_mma_attention", attention_mma_gpu.plan, attention.ANCHORS, has_surroundings=True),
    Template("gpu_decode_attention", attention_decode_gpu.plan, attention.ANCHORS, has_surroundings=True),
    Template("gpu_attention", attention_gpu.plan, attention.ANCHORS, has_surroundings=True),
    Template("gpu_wgmma_matmul", matmul_wgmma_gpu.plan, _PRODUCTS, reads_narrow=True),
    Template("gpu_mma_matmul", matmul_mma_gpu.plan, _PRODUCTS, reads_narrow=True),
    Template("gpu_matmul", gpu_matmul.plan, _PRODUCTS),
    Template("gpu_reduction", at_floors(gpu_reduction.build), reduction.OPERATORS),
    Template("gpu_normalization", at_floors(gpu_normalization.build), normalization.OPERATORS),
    Template("gpu_rows", rows_gpu.plan, rows.OPERATORS, has_surroundings=True),
    _channels_last("gpu_mma_convolution", gpu_mma_convolution.plan, {"Conv"}),
    _channels_last("gpu_mma_transposed", gpu_mma_transposed.plan, {"ConvTranspose"}),
    _channels_last("gpu_depthwise", depthwise_gpu.plan, {"Conv"}),
    Template("gpu_scan", at_floors(scan_gpu.build), scan.OPERATORS),
    Template("gpu_topk", at_floors(topk_gpu.build, topk.obstacle), topk.OPERATORS),
    Template("gpu_recurrent", recurrent_gpu.plan, recurrent.OPERATORS, has_surroundings=True),
    Template("gpu_convolution", gpu_convolution.plan, gpu_convolution.OPERATORS),
)
_OF_GPUS = frozenset(template.name for template in GPU_TEMPLATES)
# Which GPUs have others for: a thread would compute a line of an image.
_NOT_ON_GPUS = frozenset(["convolution_channels_last", "transposed_convolution_channels_last"])


def build_kernel(group: Group, target: Target) -> BuiltKernel | tuple[tuple[str, str], ...]:
    """The kernel of a group by the cheapest of the candidates for its anchor; where there is none, their names and reasons.

    What the group's configuration asks for and cannot have is in the kernel's `ignored`.
    """
    domain = domain_of(group)
    ranked, refused = candidates(group, target)
    for name, candidate in ranked:
        built = _emit(candidate, target) if domain is None else write_symbolic(partial(_written, name, group, target), domain)
        if isinstance(built, BuiltKernel):
            versions: dict[str, str] = {}
            if domain is not None and _wanted(group) is None:
                built, versions = _with_versions(built, name, group, target, domain, refused.keys())
            refused |= {other: _dearer(one, candidate, target) for other, one in ranked if other != name and other not in refused}
            refused |= versions
            ignored_choices = _ignored(group.configuration, built, refused)
            return replace(built, refused=tuple(refused.items()), ignored=ignored_choices, estimate=candidate.estimate)
        refused[name] = built.reason
    return tuple(refused.items())


def _with_versions(
    built: BuiltKernel, name: str, group: Group, target: Target, domain: Domain, refused: Set[str]
) -> tuple[BuiltKernel, dict[str, str]]:
    """A kernel with the versions of it that other sizes are worth, and what these are for, by their templates. Those that have
    `refused` to be for all sizes are none."""
    refused = frozenset(refused)

    def times_at() -> dict[str, float]:
        ranked, _ = candidates(group, target)
        return {other: one.estimate.wall_cycles(target.machine) for other, one in ranked if other not in refused}

    versions = versions_of(group, domain, name, times_at)
    if len(versions) == 1:
        return built, {}
    found = with_versions(built, group, target, domain, versions, lambda other: _written(other, group, target))
    return found, {} if found is built else described(versions, name)


def _written(name: str, group: Group, target: Target) -> BuiltKernel | Refusal:
    """What the template of a name writes for a group."""
    template = next(one for one in _templates_for(group, target) if one.name == name)
    planned = _plan(template, group, target)
    return planned if isinstance(planned, Refusal) else _emit(planned, target)


def candidates(group: Group, target: Target) -> tuple[list[tuple[str, Candidate]], dict[str, str]]:
    """What the templates for a group's anchor would do, by their names, and why others would not.

    Of a group whose sizes a call decides, where these are their hints.

    The one that the group's product or its configuration names comes first, then those of the fewest cycles, and last those whose
    cycles are floors alone; the order of the list breaks ties. On GPUs what is written for them comes before the loop nests of
    CPUs, of whose threads estimates know nothing.
    """
    if reason := _obstacle(group):
        return [], {"all": reason}
    group = group if domain_of(group) is None else at_hint(group)
    planned = {template.name: _plan(template, group, target) for template in _templates_for(group, target)}
    found = [(name, one) for name, one in planned.items() if isinstance(one, Candidate)]
    refused = {name: one.reason for name, one in planned.items() if isinstance(one, Refusal)}
    wanted = _wanted(group)
    times = {name: one.estimate.wall_cycles(target.machine) for name, one in found}

    def rank(one: tuple[str, Candidate]) -> tuple[bool, bool, float]:
        name, candidate = one
        is_last = name not in _OF_GPUS if target.is_gpu else candidate.estimate.is_floor
        return name != wanted, is_last, times[name]

    found.sort(key=rank)
    return found, refused


def stores_parts(name: str) -> bool:
    """Whether the template of a name stores results as parts of others."""
    return any(one.stores_parts for one in (*TEMPLATES, *TILE_TEMPLATES, *GPU_TEMPLATES) if one.name == name)


def _dearer(one: Candidate, taken: Candidate, target: Target) -> str:
    """Why a candidate was not written."""
    cycles, fewest = (candidate.estimate.wall_cycles(target.machine) for candidate in (one, taken))
    return f"would take {cycles:.0f} cycles, and what was taken {fewest:.0f}"


def measurable_templates(group: Group, target: Target) -> tuple[str, ...]:
    """The candidates that are worth measuring, in their order: those whose prediction is at most `_MOST_TIMES` the least.

    So are those whose cycles are floors alone, of which that is not known, and all on GPUs.
    """
    ranked, _ = candidates(replace(group, configuration={}), target)
    found = {name: one for name, one in ranked if isinstance(_emit(one, target), BuiltKernel)}
    if target.is_gpu:
        return tuple(found)
    estimates = {name: one.estimate for name, one in found.items()}
    times = {name: one.wall_cycles(target.machine) for name, one in estimates.items()}
    most = _MOST_TIMES * min((time for name, time in times.items() if not estimates[name].is_floor), default=inf)
    return tuple(name for name in found if estimates[name].is_floor or times[name] <= most)


def _obstacle(group: Group) -> str:
    """Why no kernel can compute a group; empty where one might."""
    sizes = {name: kind.elements for name, kind in group.types.items()} | {
        one: prod(shape) for one, shape in group.enclosing.items()
    }
    large = [name for name, elements in sizes.items() if greatest_of(elements) > _MAX_ELEMENTS]
    if large := large and [name for name in large if name not in never_stored(group)]:
        return f"{large[0]} has more than {_MAX_ELEMENTS} elements, which 32-bit indices cannot reach"
    if wide := [name for name, kind in group.types.items() if kind.dtype == "complex128"]:
        return f"{wide[0]} is complex128, which no machine word holds"
    return ""


def _templates_for(group: Group, target: Target) -> list[Template]:
    """The templates for the group's anchors: first the one that is wanted, then in the order of the list."""
    anchors = {op.op_type for op in anchors_of(group)}
    templates = (*(GPU_TEMPLATES if target.is_gpu else TILE_TEMPLATES if target.has_tiles else ()), *TEMPLATES)
    if target.is_gpu:
        templates = tuple(one for one in templates if one.name not in _NOT_ON_GPUS)
    is_pointwise = not anchors or (anchors <= AFFINE | JOINING and len(group.ops) > len(anchors))
    fitting = [t for t in templates if (bool(anchors) and anchors <= t.anchors if t.anchors else is_pointwise)]
    if _is_prologued(group):  # rows compute what comes before them once, the others where they read it
        fitting.sort(key=lambda template: not template.has_surroundings)
    wanted = _wanted(group)
    return sorted(fitting, key=lambda template: template.name != wanted)


def _wanted(group: Group) -> str | None:
    """The template that is to compute a group before all others: that whose bits it must have, else its configuration's."""
    kept = (op.attribute(KEPT_TEMPLATE) for op in group.ops)
    return next((str(name) for name in kept if name is not None), group.configuration.get(TEMPLATE))


def _is_prologued(group: Group) -> bool:
    """Whether a group has a prologue beyond Casts of bfloat16 and float16 operands to float32."""
    is_bare = not anchors_of(group) or any(map(has_epilogue_only, (group, read_narrow(group), read_weights(read_narrow(group)))))
    return not is_bare and has_prologue_and_epilogue_only(group)


def _plan(template: Template, group: Group, target: Target) -> Candidate | Refusal:
    """What a template would do for a group as it sees it."""
    if group.formats and template.name not in _READ_FORMATS:
        return Refusal("reads operands without scales")
    if group.enclosing and not template.stores_parts:
        return Refusal("stores whole results")
    seen = read_narrow(group) if template.reads_narrow else group
    seen = read_weights(seen) if template.reads_weights else seen
    is_bare = not template.anchors or has_epilogue_only(seen)
    takes_prologue = template.has_prologue and _is_prologued(group)
    if not is_bare and not template.has_surroundings and not takes_prologue:
        return Refusal("computes one operator, and reads its operands through no others")
    if template.anchors and (reason := pointwise_obstacle(seen)):
        return Refusal(reason)
    return template.plan(seen, target)


def _emit(candidate: Candidate, target: Target) -> BuiltKernel | Refusal:
    try:
        built = candidate.emit()
    except UncutError as reason:
        return Refusal(f"no grids of threads: {reason}")
    except LargeWorkspaceError as reason:
        return Refusal(str(reason))
    if target.kind == "rocm" and isinstance(built, BuiltKernel) and (obstacle := rocm_obstacle(built.function)):
        return Refusal(obstacle)
    return built


def _ignored(configuration: Configuration, built: BuiltKernel, refused: Mapping[str, str]) -> tuple[str, ...]:
    """What the configuration asks for that the kernel is not, and why."""
    wanted = configuration.get(TEMPLATE, built.template)
    if wanted != built.template:
        return (f"{TEMPLATE}={wanted} ignored: {refused.get(wanted, 'is no template for it')}",)
    return ignored({name: option for name, option in configuration.items() if name != TEMPLATE}, built.choices)


__all__ = ["TEMPLATES", "Refusal", "build_kernel", "candidates", "measurable_templates"]
