"""canonicalize: constants computed, nodes without effect dropped, and one spelling for everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ....compiler.pipeline import Context, Pass
from . import arithmetic, branches, folding, joins, no_ops, rotations, sequences, sizes, updates, views, windows
from .scope import Scope
from .walk import Family, RuleTable, Walk

# Rules in the order of trial at each node: what computes nothing and what is known before folding, spelling after it.
BEFORE_FOLDING: tuple[Family, ...] = (no_ops.RULES, folding.RULES, sizes.RULES, branches.RULES, sequences.RULES)
AFTER_FOLDING: tuple[Family, ...] = (views.RULES, joins.RULES, rotations.RULES, updates.RULES, windows.RULES, arithmetic.RULES)
_RULES = RuleTable.of(BEFORE_FOLDING, AFTER_FOLDING)


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Bring the graph to the form that later passes and lowering expect, in one walk from inputs to outputs.

    Before:  s = Shape(x); d = Gather(s, 0); t = Concat(d, [-1]); y = Reshape(x, t); z = Identity(y)
    After:   z = Reshape(x, [8, 12])

    Legal when the values read stay equal for every input, NaN and infinities included. Rounding may differ where constants are
    combined (batch normalisation), and the sign of a zero where 0 is added.
    """

    name: ClassVar[str] = "canonicalize"
    fold_limit_kib: int = 4096  # largest constant that folding may make bigger than what it is made from

    def run(self, model: ir.Model, context: Context) -> bool:
        scope = Scope.with_limit(model, self.fold_limit_kib * 1024)
        return Walk(scope, context, self.name, _RULES).run()
