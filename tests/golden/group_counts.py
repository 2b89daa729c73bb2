"""The groups that the default pipeline makes of a model at full size, as text, without any weights or kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import torch
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.ir.aliases import is_view
from prefuse.compiler.ir.functions import is_fused
from prefuse.compiler.ir.kinds import Kind, kind_of
from prefuse.compiler.lowering.planning import aliases_of
from prefuse.compiler.pipeline import Context, Remark, parse_pipeline, run_pipeline
from prefuse.compiler.pipeline.grouping import Rejections, anchor_of, lone_groups, members_of, neighbours
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE, PASSES
from prefuse.examples.models import MODELS
from prefuse.runtime.target import Target
from torch import Tensor, nn

FOLDER = Path(__file__).parent / "groups"
# Whatever machine this runs on. Those of GPUs are the same, and lie in a folder of their own.
TARGETS = {"cpu": Target.parse("cpu:avx512,threads=2"), "cuda": Target.parse("cuda:sm_90"), "rocm": Target.parse("rocm:gfx942")}
_ROW = 4096  # random numbers that all elements of a large parameter are copies of


def golden_file(name: str, kind: str = "cpu") -> Path:
    """Where the text of a model is kept, for a kind of target."""
    return (FOLDER / "gpu" if TARGETS[kind].is_gpu else FOLDER) / f"{name}.txt"


@dataclass(frozen=True)
class Grouped:
    """A model after the default pipeline, and what the passes said. `nodes` are those that take a kernel."""

    model: ir.Model
    nodes: tuple[ir.Node, ...]
    remarks: tuple[Remark, ...]

    @property
    def lone(self) -> tuple[ir.Node, ...]:
        """The groups of one node."""
        return tuple(node for node in self.nodes if not is_fused(node))

    def text(self) -> str:
        """How many groups of each name there are, then those of one node by why they are alone."""
        counts = Counter(re.sub(r"_\d+$", "", node.op_type) for node in self.nodes)
        reasons = lone_groups(self.model, self.lone, self.remarks)
        why = Counter(f"{node.op_type}: {_plain(reasons[str(node.name)])}" for node in self.lone)
        head = [f"{len(self.nodes)} groups", *_table(counts), "", f"{len(self.lone)} of one node", *_table(why)]
        return "\n".join(head) + "\n"

    def unexplained(self) -> list[str]:
        """Groups of one node beside which stands a pointwise one, before or behind views, without a pass saying why."""
        rejections = Rejections(self.remarks)
        return [
            f"{node.name} ({node.op_type}) and {other.name} ({other.op_type})"
            for node in self.lone
            for other in neighbours(node)
            if min(kind_of(node), kind_of(anchor_of(self.model, other))) <= Kind.BROADCAST
            and not rejections.between(members_of(node), members_of(other))
        ]


def grouped(name: str, kind: str = "cpu") -> Grouped:
    """A full-size model, fused for a kind of target."""
    target = TARGETS[kind]
    model, context = full_size_graph(name), Context(target)
    run_pipeline(model, parse_pipeline(DEFAULT_PIPELINE, PASSES), context)
    free = aliases_of(model, target).free
    nodes = tuple(node for node in model.graph if not is_view(node) and node not in free)
    return Grouped(model, nodes, tuple(context.remarks))


def full_size_graph(name: str) -> ir.Model:
    """The graph of a full-size model whose large parameters are one random row again and again, so that they take no memory."""
    with torch.device("meta"):
        module, inputs = MODELS[name].full()
    generator = torch.Generator().manual_seed(0)
    _materialize(module.eval().requires_grad_(False), generator)
    examples = tuple(torch.zeros(one.shape, dtype=one.dtype) for one in inputs)
    return import_model(torch.export.export(module, examples, strict=False))


def _materialize(module: nn.Module, generator: torch.Generator) -> None:
    """Give every parameter and buffer elements, all different from one tensor to the other: equal ones would be merged."""
    shared: dict[Tensor, Tensor] = {}

    def numbers(old: Tensor) -> Tensor:
        if old not in shared:
            shared[old] = _numbers(old, generator)
        return shared[old]

    for layer in module.modules():
        for key, parameter in layer.named_parameters(recurse=False):
            setattr(layer, key, nn.Parameter(numbers(parameter), requires_grad=False))
        for key, buffer in layer.named_buffers(recurse=False):
            layer.register_buffer(key, numbers(buffer))


def _numbers(old: Tensor, generator: torch.Generator) -> Tensor:
    if not old.is_floating_point():
        return torch.zeros(old.shape, dtype=old.dtype)
    if old.numel() <= _ROW or old.shape[-1] > _ROW:
        return torch.rand(old.shape, generator=generator) + 0.5
    return (torch.rand(old.shape[-1:], generator=generator) + 0.5).expand(old.shape)


def _plain(reasons: Iterable[str]) -> str:
    """Reasons without the names of values, which differ from layer to layer."""
    return "; ".join(dict.fromkeys(re.sub(r"%[^\s,;:]+", "%value", reason) for reason in reasons))


def _table(counts: Counter[str]) -> Iterator[str]:
    for text, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield f"{count:5} {text}"
