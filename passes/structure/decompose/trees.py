"""TreeEnsemble, TreeEnsembleRegressor and TreeEnsembleClassifier of ai.onnx.ml.

Every row goes down every tree at once: a matrix of node numbers, [rows, trees], is replaced by that of their successors as many
times as the deepest tree has levels; leaves stay where they are.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from .body import Body, ints
from .common import dims, dtype_of
from .forest import MODES, Forest, forest_of_ensemble, forest_of_nodes
from .scores import TRANSFORMS, labelled, transformed

_COMPARISONS = dict(zip(MODES[:5], ("LessOrEqual", "Less", "GreaterOrEqual", "Greater", "Equal"), strict=True))
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")


def tree_ensemble(node: ir.Node) -> ir.Function | None:
    """The transformed sums, means, least or greatest weights of the leaves; in the type of x."""
    forest = forest_of_ensemble(node) if len(dims(node.inputs[0])) == 2 else None
    transform = TRANSFORMS[node.attributes.get_int("post_transform", 0)]
    aggregate = _AGGREGATES[node.attributes.get_int("aggregate_function", 1)]
    if forest is None:
        return None
    ensemble = _Ensemble(node, forest)
    results = transformed(ensemble.body, ensemble.scores(aggregate), transform)
    return None if results is None else ensemble.body.function(ensemble.body.cast(results, dtype_of(node.inputs[0])))


def tree_ensemble_regressor(node: ir.Node) -> ir.Function | None:
    """As TreeEnsemble, plus `base_values`, in float32."""
    targets = node.attributes.get_int("n_targets", 1)
    forest = forest_of_nodes(node, "target", targets) if len(dims(node.inputs[0])) == 2 else None
    if forest is None:
        return None
    ensemble = _Ensemble(node, forest)
    if ensemble.base.size not in (0, targets):
        return None
    scores = ensemble.scores(node.attributes.get_string("aggregate_function", "SUM"))
    results = transformed(ensemble.body, ensemble.with_base(scores), node.attributes.get_string("post_transform", "NONE"))
    return None if results is None else ensemble.body.function(ensemble.body.cast(results, "float32"))


def tree_ensemble_classifier(node: ir.Node) -> ir.Function | None:
    """The label of the greatest sum, and all transformed sums.

    The specification is silent on two classes of which the leaves weigh but one. ONNX Runtime: if that is the first, the scores
    are 1 - s and s where no weight is negative, else -s and s, and only LOGISTIC transforms them; if it is the second, 0 and s.
    The second class wins beyond 0.5 where no weight is negative, else beyond 0. Labels are integers.
    """
    labels = node.attributes.get_ints("classlabels_int64s", ())
    weighed = sorted(set(node.attributes.get_ints("class_ids", ())))
    is_taken = len(labels) > 1 and len(weighed) > 0 and len(dims(node.inputs[0])) == 2
    forest = forest_of_nodes(node, "class", len(labels)) if is_taken else None
    if forest is None:
        return None
    ensemble, transform = _Ensemble(node, forest), node.attributes.get_string("post_transform", "NONE")
    body, base = ensemble.body, ensemble.base
    if transform == "PROBIT" or (base.size not in (0, len(labels)) and (len(labels) > 2 or weighed != [0])):
        return None
    if len(labels) == 2 and base.size == 2 and len(weighed) == 1:
        return None  # nobody says which of them counts
    if len(labels) > 2 or len(weighed) == 2:
        scores = ensemble.with_base(ensemble.scores("SUM"))
        chosen, results = body.op("ArgMax", scores, axis=1, keepdims=0), transformed(body, scores, transform)
    else:
        chosen, results = ensemble.binary(weighed[0], transform)
    return None if results is None else body.function(labelled(body, chosen, labels), body.cast(results, "float32"))


class _Ensemble:
    """Writes the body of one operator, in float64 where x has that type, else in float32."""

    def __init__(self, node: ir.Node, forest: Forest) -> None:
        self.node, self.body, self.forest = node, Body(node), forest
        self.rows, self.trees = dims(node.inputs[0])[0], len(forest.roots)
        self.working = np.dtype(np.float64 if dtype_of(node.inputs[0]) == ir.DataType.DOUBLE else np.float32)
        tensor = node.attributes.get_tensor("base_values_as_tensor", None)
        base = np.array(node.attributes.get_floats("base_values", ())) if tensor is None else tensor.numpy()
        self.base = base.astype(self.working)
        self.x = self.body.cast(self.body.input(0), self.working.name)

    def scores(self, aggregate: str) -> ir.Value:
        """[rows, targets]; 0 for a target that no leaf has a weight for."""
        body, (leaves, weights) = self.body, (self._leaves(), self.forest.weights)
        target = self._targets_of_trees()
        if aggregate in ("SUM", "AVERAGE"):
            divisor = self.trees if aggregate == "AVERAGE" else 1
            if target is not None:
                own = body.op("Gather", np.nansum(weights, axis=1).astype(self.working), leaves)
                share = (target[:, None] == np.arange(weights.shape[1])).astype(self.working)
                total = body.op("MatMul", own, share)
            else:
                own = body.op("Gather", np.nan_to_num(weights, nan=0.0).astype(self.working), leaves)
                total = body.op("ReduceSum", own, ints([1]), keepdims=0)
            return total if divisor == 1 else body.op("Div", total, np.array(divisor, self.working))
        absent = np.inf if aggregate == "MIN" else -np.inf
        own = body.op("Gather", np.where(np.isnan(weights), absent, weights).astype(self.working), leaves)
        best = body.op("ReduceMin" if aggregate == "MIN" else "ReduceMax", own, ints([1]), keepdims=0)
        return body.op("Where", body.op("IsInf", best), np.array(0, self.working), best)

    def with_base(self, scores: ir.Value) -> ir.Value:
        return self.body.op("Add", scores, self.base) if self.base.size else scores

    def binary(self, weighed: int, transform: str) -> tuple[ir.Value, ir.Value | None]:
        """Whether the second of two classes wins, and both scores, where leaves weigh one class alone."""
        body, zero = self.body, np.array(0, self.working)
        score = body.op("Gather", self.scores("SUM"), ints([weighed]), axis=1)
        is_positive = bool(np.nanmin(self.forest.weights, initial=0.0) >= 0)
        if weighed == 1:
            other = body.op("Mul", score, zero)
        else:
            score = self.with_base(score)
            turned = zero if not is_positive or transform == "LOGISTIC" else np.array(1, self.working)
            other = body.op("Sub", turned, score)
            transform = transform if transform == "LOGISTIC" else "NONE"
        threshold = np.array(0.5 if is_positive else 0.0, self.working)
        chosen = body.op("Squeeze", body.cast(body.op("Greater", score, threshold), "int64"), ints([1]))
        return chosen, transformed(body, body.op("Concat", other, score, axis=1), transform)

    def _leaves(self) -> ir.Value:
        """The number of the leaf that each row reaches in each tree, [rows, trees]."""
        forest, body = self.forest, self.body
        yes, no = forest.yes.astype(np.int32), forest.no.astype(np.int32)
        at = body.op("Expand", forest.roots.astype(np.int32)[None], ints([self.rows, self.trees]))
        for _ in range(forest.depth):
            holds = self._holds(at)
            at = body.op("Where", holds, body.op("Gather", yes, at), body.op("Gather", no, at))
        return at

    def _holds(self, at: ir.Value) -> ir.Value:
        """What the comparisons of the nodes say."""
        body, forest, modes = self.body, self.forest, self.forest.used_modes
        value = body.op("GatherElements", self.x, body.op("Gather", forest.features.astype(np.int32), at), axis=1)
        split = body.op("Gather", forest.splits.astype(self.working), at)
        holds = self._compared(MODES[modes[0]], value, split, at)
        for mode in modes[1:]:
            is_mode = body.op("Gather", forest.modes == mode, at)
            holds = body.op("Where", is_mode, self._compared(MODES[mode], value, split, at), holds)
        if forest.missing.any():
            is_missing = body.op("And", body.op("IsNaN", value), body.op("Gather", forest.missing, at))
            holds = body.op("Or", holds, is_missing)
        return holds

    def _compared(self, mode: str, value: ir.Value, split: ir.Value, at: ir.Value) -> ir.Value:
        body = self.body
        if mode == "BRANCH_MEMBER":
            members = body.op("Gather", self.forest.members.astype(self.working), at)
            equal = body.op("Equal", body.op("Unsqueeze", value, ints([2])), members)
            found = body.op("ReduceMax", body.cast(equal, "int32"), ints([2]), keepdims=0)
            return body.cast(found, "bool")
        if mode == "BRANCH_NEQ":
            return body.op("Not", body.op("Equal", value, split))
        return body.op(_COMPARISONS[mode], value, split)

    def _targets_of_trees(self) -> np.ndarray | None:
        """The one target that the leaves of each tree have weights for; None where a tree has several."""
        forest, target = self.forest, np.zeros(self.trees, np.int64)
        if forest.weights.shape[1] == 1:
            return target
        for number, root in enumerate(forest.roots):
            reached = np.array([root])
            for _ in range(forest.depth):
                reached = np.unique(np.concatenate([forest.yes[reached], forest.no[reached]]))
            found = np.flatnonzero(~np.isnan(forest.weights[reached]).all(axis=0))
            if len(found) > 1:
                return None
            target[number] = found[0] if len(found) else 0
        return target
