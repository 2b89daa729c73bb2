"""fuse-norm: normalizations, softmax and activations that are spelled out become the operators that they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import onnx_ir as ir

from ....compiler.ir.opset_raise import raise_obstacle, raise_opset
from ....compiler.ir.rewriter import Rejection, Rule, apply_rules
from ....compiler.pipeline import Context, Pass
from .activations import activation
from .group_norm import group_norm
from .softmax import softmax
from .spelling import Family, Spelling
from .standardization import standardization

_FAMILIES: tuple[Family, ...] = (standardization, softmax, activation, group_norm)


@dataclass(frozen=True)
class FuseNorm(Pass):
    """Recognise the operators that exporters write as arithmetic.

    Before:  m = ReduceMean(x);  d = Sub(x, m);  v = ReduceMean(Mul(d, d));  y = Div(d, Sqrt(Add(v, 1e-5)))
    After:   y = LayerNormalization(x, 1)

    So for RMSNormalization, InstanceNormalization, GroupNormalization, Softmax, LogSoftmax, Gelu, Swish and HardSwish. Legal when
    nobody else reads what is computed on the way, and ONNX's operator computes the same but for rounding. Where the operator is
    newer than the model's opset, the model is raised to the one that has it, if no other operator changes its meaning with that.
    """

    name: ClassVar[str] = "fuse-norm"

    def run(self, model: ir.Model, context: Context) -> bool:
        rules: list[Rule] = [_FamilyRule(self.name, family, model) for family in _FAMILIES]
        return apply_rules(model, rules, context)


@dataclass(frozen=True, slots=True)
class _Found:
    """A spelling, with the opset that it needs at hand."""

    spelling: Spelling

    def rewrite(self, model: ir.Model) -> list[ir.Node]:
        raise_opset(model, self.spelling.since)
        return list(self.spelling.rewrite(model))


@dataclass(frozen=True)
class _FamilyRule:
    """One family of patterns in a model. What stands in the way of an opset is looked for once."""

    name: str
    family: Family
    model: ir.Model
    obstacles: dict[int, Rejection | None] = field(default_factory=dict)

    def match(self, node: ir.Node) -> _Found | Rejection | None:
        found = self.family(node)
        if found is None or isinstance(found, Rejection):
            return found
        if found.since not in self.obstacles:
            self.obstacles[found.since] = raise_obstacle(self.model, found.since)
        if (obstacle := self.obstacles[found.since]) is not None:
            return Rejection(f"no {found.op_type}: {obstacle.reason}", (node, *obstacle.nodes))
        return _Found(found)
