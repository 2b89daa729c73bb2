"""Ensembles of decision trees in one form, whichever operator they come from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ....compiler.ir.facts import source_of
from ....runtime.errors import InvalidModelError
from .common import dims

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER")
_MEMBER = MODES.index("BRANCH_MEMBER")
_FIX = "export the model again"
_MAX_DEPTH = 512  # steps from a root to a leaf, each of which is a dozen operators


@dataclass(frozen=True)
class Forest:
    """Trees whose nodes are numbered through; a leaf is its own successor.

    Of each node: the number in MODES of its comparison, the feature it reads, what it compares with (for BRANCH_MEMBER a row of
    `members`, filled up with NaN), its successors, and whether a missing feature counts as true. Of each leaf: its weight for
    every target, NaN where it has none. `depth` is the longest way from a root.
    """

    modes: np.ndarray
    features: np.ndarray
    splits: np.ndarray
    members: np.ndarray
    yes: np.ndarray
    no: np.ndarray
    missing: np.ndarray
    weights: np.ndarray
    roots: np.ndarray
    depth: int

    @property
    def used_modes(self) -> list[int]:
        """The modes of the nodes that compare."""
        inner = self.yes != np.arange(len(self.yes))
        return sorted({int(mode) for mode in self.modes[inner]}) or [0]


def forest_of_ensemble(node: ir.Node) -> Forest | None:
    """The trees of a TreeEnsemble, whose leaves come after its inner nodes here; None where they are no trees."""
    ints = {
        name: _ints(node, f"nodes_{name}") for name in ("featureids", "truenodeids", "falsenodeids", "trueleafs", "falseleafs")
    }
    inner, targets, roots = len(ints["featureids"]), _ints(node, "leaf_targetids"), _ints(node, "tree_roots")
    modes, splits, leaf_weights = (_tensor(node, name) for name in ("nodes_modes", "nodes_splits", "leaf_weights"))
    if modes is None or splits is None or leaf_weights is None:
        return None
    missing = _ints(node, "nodes_missing_value_tracks_true")
    missing = missing if len(missing) else np.zeros(inner, np.int64)
    _check_lengths(node, *ints.values(), modes, splits, missing)
    _check_lengths(node, targets, leaf_weights)
    count = node.attributes.get_int("n_targets", int(targets.max(initial=0)) + 1)
    itself = inner + np.arange(len(targets))
    weights = np.full((inner + len(targets), count), np.nan)
    _check_range(node, "leaf_targetids", targets, count)
    _check_range(node, "nodes_modes", modes, len(MODES))
    weights[itself, targets] = leaf_weights
    return _checked(
        node,
        Forest(
            _with_leaves(modes.astype(np.int64), targets),
            _with_leaves(ints["featureids"], targets),
            _with_leaves(splits.astype(np.float64), targets),
            _members(modes, _tensor(node, "membership_values"), inner + len(targets)),
            np.concatenate([ints["truenodeids"] + inner * ints["trueleafs"], itself]),
            np.concatenate([ints["falsenodeids"] + inner * ints["falseleafs"], itself]),
            _with_leaves(missing, targets).astype(bool),
            weights,
            roots,
            0,
        ),
    )


def forest_of_nodes(node: ir.Node, kind: str, count: int) -> Forest | None:
    """The trees of a TreeEnsembleRegressor (`kind` "target") or Classifier ("class") with `count` of these."""
    modes = [str(mode) for mode in node.attributes.get_strings("nodes_modes", ())]
    trees, numbers, values = _ints(node, "nodes_treeids"), _ints(node, "nodes_nodeids"), _floats(node, "nodes_values")
    others = (_ints(node, f"nodes_{name}") for name in ("featureids", "truenodeids", "falsenodeids"))
    missing = _ints(node, "nodes_missing_value_tracks_true")
    missing = missing if len(missing) else np.zeros(len(modes), np.int64)
    _check_lengths(node, trees, numbers, np.array(modes), values, missing, *others)
    place = {key: at for at, key in enumerate(zip(trees.tolist(), numbers.tolist(), strict=True))}
    if len(place) != len(modes):
        return None
    itself = np.arange(len(modes))
    is_leaf = np.array([mode == "LEAF" for mode in modes], bool)

    def successors(name: str) -> np.ndarray:
        keys = zip(trees.tolist(), _ints(node, name).tolist(), strict=True)
        return np.array(
            [at if leaf else place.get(key, -1) for at, leaf, key in zip(itself, is_leaf, keys, strict=True)], np.int64
        )

    yes, no = successors("nodes_truenodeids"), successors("nodes_falsenodeids")
    weights = _weights(node, kind, count, place)
    roots = np.setdiff1d(itself, np.concatenate([yes[~is_leaf], no[~is_leaf]]))
    if sorted(trees[roots].tolist()) != np.unique(trees).tolist():
        return None
    return _checked(
        node,
        Forest(
            np.array([MODES.index(mode) if mode in MODES else 0 for mode in modes], np.int64),
            np.where(is_leaf, 0, _ints(node, "nodes_featureids")),
            np.where(is_leaf, 0.0, values),
            np.zeros((len(modes), 0)),
            yes,
            no,
            missing.astype(bool),
            weights,
            roots,
            0,
        ),
    )


def _weights(node: ir.Node, kind: str, count: int, place: dict[tuple[int, int], int]) -> np.ndarray:
    """What each node of the ensemble adds to each of `count` targets or classes, NaN where it says nothing of them."""
    entries = [*(_ints(node, f"{kind}_{what}") for what in ("treeids", "nodeids", "ids")), _floats(node, f"{kind}_weights")]
    _check_lengths(node, *entries)
    _check_range(node, f"{kind}_ids", entries[2], count)
    weights = np.full((len(place), count), np.nan)
    for tree, number, target, value in zip(*(entry.tolist() for entry in entries), strict=True):
        at = place.get((tree, number))
        if at is None:
            raise InvalidModelError(
                source_of(node), f"{node.op_type} weighs node {number} of tree {tree}, which is not there", _FIX
            )
        weights[at, target] = value if np.isnan(weights[at, target]) else weights[at, target] + value
    return weights


def _check_lengths(node: ir.Node, *parallel: np.ndarray) -> None:
    """Raise InvalidModelError unless these attributes have one length."""
    if len({len(one) for one in parallel}) > 1:
        raise InvalidModelError(source_of(node), f"attributes of {node.op_type} that belong together differ in length", _FIX)


def _check_range(node: ir.Node, name: str, numbers: np.ndarray, count: int) -> None:
    """Raise InvalidModelError unless all numbers are below `count`."""
    if len(numbers) and not (numbers.min() >= 0 and numbers.max() < count):
        raise InvalidModelError(source_of(node), f"{name} of {node.op_type} has a number that is not below {count}", _FIX)


def _checked(node: ir.Node, forest: Forest) -> Forest | None:
    """The forest with its depth; None where a successor is out of range, or ways run in circles or too deep."""
    _check_range(node, "nodes_featureids", forest.features, dims(node.inputs[0])[-1])
    count = len(forest.yes)
    reached, depth = np.unique(forest.roots), 0
    while True:
        if len(reached) and not (reached.min() >= 0 and reached.max() < count):
            return None
        inner = reached[(forest.yes[reached] != reached) | (forest.no[reached] != reached)]
        if not len(inner):
            break
        depth += 1
        if depth > _MAX_DEPTH:
            return None
        reached = np.unique(np.concatenate([forest.yes[inner], forest.no[inner]]))
    return replace(forest, depth=depth)


def _members(modes: np.ndarray, values: np.ndarray | None, count: int) -> np.ndarray:
    """A row of members for each node, NaN where there are no more; sets are in the order of their nodes, each ended by a NaN."""
    nodes = np.flatnonzero(modes == _MEMBER)
    if values is None or not len(nodes):
        return np.zeros((count, 0))
    ends = np.flatnonzero(np.isnan(values)).tolist()
    starts = [0, *(end + 1 for end in ends)]
    if len(starts) == len(nodes):
        ends.append(len(values))  # the last set may lack its NaN
    rows = np.full((count, max(end - start for start, end in zip(starts, ends, strict=False))), np.nan)
    for at, start, end in zip(nodes, starts, ends, strict=False):
        rows[at, : end - start] = values[start:end]
    return rows


def _with_leaves(inner: np.ndarray, leaves: np.ndarray) -> np.ndarray:
    return np.concatenate([inner, np.zeros(len(leaves), inner.dtype)])


def _ints(node: ir.Node, name: str) -> np.ndarray:
    return np.array(node.attributes.get_ints(name, ()), np.int64)


def _floats(node: ir.Node, name: str) -> np.ndarray:
    tensor = _tensor(node, f"{name}_as_tensor")
    return np.array(node.attributes.get_floats(name, ()), np.float64) if tensor is None else tensor.astype(np.float64)


def _tensor(node: ir.Node, name: str) -> np.ndarray | None:
    tensor = node.attributes.get_tensor(name, None)
    return None if tensor is None else tensor.numpy()
