"""What the manifest of a program says of its compilation: where it is slow, what stayed alone, what was refused, its weights."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ..runtime.profile import ASSUMED_RATE, GroupDescription, describe_groups
from ..runtime.report import size
from .estimates.launches import predicted_us
from .frontend.dimensions import SIZES_KEY
from .ir.aliases import Aliases
from .ir.assignments.node_precision import CHOICES_KEY
from .ir.facts import source_of, tensor_type
from .ir.functions import computing_names, original_names
from .lowering.gpu.device_code import few_threads
from .lowering.planning import LoweredGroup, PlanDraft, launch_label
from .lowering.tvm_importer import TEMPLATE
from .pipeline import Context
from .pipeline.grouping import lone_groups

_REMARKS = 1000  # lines kept of each list of the report
_FORMS = 10  # weights of several forms that the report names, the largest


def remark_lowering(context: Context, lowered: list[LoweredGroup], aliases: Aliases) -> None:
    """Why values are no aliases, and which kernels are as a database says."""
    for rejection in aliases.rejections:
        context.reject("alias", rejection)
    for symbol, item in {item.symbol: item for item in lowered if item.group.configuration}.items():
        context.remark("tuning", _tuning_remark(symbol, item), [item.node])


def descriptions(
    model: ir.Model, lowered: list[LoweredGroup], draft: PlanDraft, context: Context, *, has_groups: bool
) -> dict[str, object]:
    """What the program's manifest says of the compilation, and of its groups, which a profile names."""
    target = context.target
    alone = lone_groups(model, [item.node for item in lowered if len(item.group.ops) == 1], context.remarks)
    report = {**_sizes(model), **_weights(draft), **_choices(model), **_report(lowered, context, alone)}
    found: dict[str, object] = {"report": report}
    if has_groups:
        times = predicted_us(lowered, target)
        if not target.is_gpu:  # whose limits nobody measures
            found[ASSUMED_RATE] = target.machine.flops_per_second * target.threads
        found["groups"] = describe_groups(
            {
                label: _description(model, item, alone, times.get(label, 0.0))
                for item in lowered
                for label in (launch_label(item),)
            }
        )
    return found


def _description(model: ir.Model, item: LoweredGroup, alone: Mapping[str, tuple[str, ...]], time_us: float) -> GroupDescription:
    reasons = alone.get(str(item.node.name), ())
    names, computing = original_names(item.node), computing_names(model, item.node)
    return GroupDescription(names, source_of(item.node), item.kernel.refused, reasons, computing, time_us)


def _weights(draft: PlanDraft) -> dict[str, object]:
    """What weights take as they were given and as kernels read them, and which of them lie in memory in several forms."""
    planned = {buffer.name: buffer.size_bytes for buffer in draft.plan.buffers if buffer.name in draft.parameters}
    forms: dict[str, list[int]] = {}
    given = {}
    for name, (parameter, _) in draft.parameters.items():
        forms.setdefault(str(parameter.name), []).append(planned[name])
        given[parameter] = tensor_type(parameter).size_bytes
    if not forms:
        return {}
    lines = [f"{size(sum(given.values()))} as they come to kernels, {size(sum(planned.values()))} as these read them"]
    several = sorted((item for item in forms.items() if len(item[1]) > 1), key=lambda item: -sum(item[1]))
    lines += [f"{name} lies there in {len(sizes)} forms: {', '.join(map(size, sizes))}" for name, sizes in several[:_FORMS]]
    return {"weights": lines}


def _sizes(model: ir.Model) -> dict[str, object]:
    """For which sizes the model was exported."""
    text = model.metadata_props.get(SIZES_KEY)
    return {"sizes": text} if text else {}


def _choices(model: ir.Model) -> dict[str, object]:
    """How the formats of a mixed program were chosen, line by line."""
    text = model.metadata_props.get(CHOICES_KEY)
    return {"bits": text.splitlines()} if text else {}


def _tuning_remark(symbol: str, item: LoweredGroup) -> str:
    """What a configuration from a database has done to a kernel."""
    wanted = " ".join(f"{name}={option}" for name, option in sorted(item.group.configuration.items()))
    return f"{symbol} as measured: {wanted}" + "".join(f"; {reason}" for reason in item.kernel.ignored)


def _report(lowered: list[LoweredGroup], context: Context, alone: Mapping[str, tuple[str, ...]]) -> dict[str, object]:
    """What `CompiledModel.report` shows beyond the Plan: where the program is slow, what stayed alone, and what was refused."""
    reasons = {
        **{item.symbol: f"{TEMPLATE}{_reasons(item.kernel.refused)}" for item in lowered if item.kernel.template == TEMPLATE},
        **{item.symbol: few for item in lowered if (few := few_threads(item.kernel))},
    }
    slow = [
        f"{item.node.op_type} at {source_of(item.node)}: {reasons[item.symbol]}" for item in lowered if item.symbol in reasons
    ]
    lone = [
        f"{item.node.op_type} at {source_of(item.node)}: {'; '.join(why)}"
        for item in lowered
        if (why := alone.get(str(item.node.name)))
    ]
    remarks = list(dict.fromkeys(map(str, context.remarks)))
    return {"slow_paths": slow or "none", "groups_of_one_node": lone[:_REMARKS], "remarks": remarks[:_REMARKS]}


def _reasons(refused: tuple[tuple[str, str], ...]) -> str:
    return "".join(f", not {template}: {reason}" for template, reason in refused)
