"""fold-batchnorm: scales and shifts of whole channels become part of the weights beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from ....compiler.ir.constants import constant_tensor
from ....compiler.ir.matching import is_read
from ....compiler.ir.names import release_name
from ....compiler.ir.rewriter import Rejection
from ....compiler.pipeline import Context, Pass
from .anchors import anchor_of
from .chains import chain_after, chain_before
from .folds import Fold, fold_of


@dataclass(frozen=True)
class FoldBatchnorm(Pass):
    """Fold batch normalisation, and arithmetic with one constant a channel, into products and convolutions.

    Before:  h = Conv(x, w);  m = Mul(h, scale);  y = Add(m, shift)
    After:   y = Conv(x, w * scale, shift)

    Legal behind an anchor, and before it where a shift reaches all that a window reads; through views and pools that commute;
    where nobody else reads what changes, and all numbers stay finite. Numbers are computed in float64 and rounded once, weights
    when they are read. A weight with other readers is stored a second time only if it is small.

    x - m is exact, or nearly so, where x is near m; folded, it is the difference of two sums, x W - m W, each rounded. So the
    operand of a product is taken for one of the order of 1, and ahead of it only shifts by up to 4 are folded, which costs two
    bits (those of images by ImageNet's means and deviations are 2.1). By 402, as of years (2010 +- 5), it would be all bits of
    bfloat16, and 9 of float32. Beyond 4 neither shifts nor scales ahead are folded, so that the operand stays as it is.
    """

    name: ClassVar[str] = "fold-batchnorm"
    max_copy_kib: int = 64  # largest weight that may be stored twice, once folded
    keeps_inputs: bool = False  # whether what scales inputs of the graph stays: it makes columns alike, for one 8-bit range

    def run(self, model: ir.Model, context: Context) -> bool:
        folds = self._affordable(_find(model, context, self.keeps_inputs), context)
        made: dict[Hashable, ir.Value] = {}
        for fold in folds:
            key = fold.weight_key()
            if key not in made:
                made[key] = fold.weight(model)
            replaced = [value for node in (*fold.nodes, fold.anchor.node) for value in node.inputs if value is not None]
            fold.rewrite(model, made[key])
            _drop_unread(model, replaced)
        return bool(folds)

    def _affordable(self, found: Sequence[Fold], context: Context) -> list[Fold]:
        """The folds that store no large weight more often than before."""
        keys: defaultdict[ir.Value, list[Hashable]] = defaultdict(list)
        for fold in found:
            keys[fold.anchor.weight].append(fold.weight_key())
        affordable = []
        for fold in found:
            weight, tensor = fold.anchor.weight, constant_tensor(fold.anchor.weight)
            alike = keys[weight]
            is_shared = weight.is_graph_output() or len(weight.uses()) > len(alike) or len(set(alike)) > 1
            if fold.factors and is_shared and tensor is not None and tensor.nbytes > self.max_copy_kib * 1024:
                reason = f"%{weight.name} has other readers, and its {tensor.nbytes} bytes would be stored twice"
                context.reject(self.name, fold.rejection(reason))
            else:
                affordable.append(fold)
        return affordable


def _find(model: ir.Model, context: Context, keeps_inputs: bool) -> list[Fold]:
    """All that can be folded. What lies between two anchors belongs to the first."""
    anchors = [anchor for node in model.graph if (anchor := anchor_of(node)) is not None]
    behind = [chain_after(anchor) for anchor in anchors]
    claimed = {node for chain, _ in behind if chain is not None for node in chain.nodes}
    folds = []
    for anchor, (chain, rejection) in zip(anchors, behind, strict=True):
        ahead, other_rejection = chain_before(anchor, claimed, keeps_inputs=keeps_inputs)
        fold = fold_of(anchor, ahead, chain)
        for found in (rejection, other_rejection, fold):
            if isinstance(found, Rejection):
                context.reject(FoldBatchnorm.name, found)
        if isinstance(fold, Fold):
            folds.append(fold)
    return folds


def _drop_unread(model: ir.Model, values: Sequence[ir.Value]) -> None:
    """Forget constants that nothing reads any more."""
    for value in dict.fromkeys(values):
        if value.is_initializer() and not value.is_graph_input() and not is_read(value):
            del model.graph.initializers[str(value.name)]
            release_name(model, str(value.name))
