"""ai.onnx.ml on numbers, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import prefuse
import pytest
from onnx import numpy_helper
from prefuse.runtime.errors import InvalidModelError, UnsupportedModelError
from prefuse.runtime.executor import CompiledModel

from .expanding import compiled, expanded, one_node, operators
from .ml_oracle import agrees, ml_model

_X = np.random.default_rng(0).integers(-3, 4, (11, 5)).astype(np.float32)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(
    ("shape", "indices"), [((11, 5), [[4, 0, 4]]), ((2, 3, 5), [1]), ((9,), [8, 0]), ((9,), [[2, 1], [0, 0]]), ((9,), 3)]
)
def test_features_by_index(shape: tuple[int, ...], indices: object, is_compiled: bool) -> None:
    """ONNX infers no shape where the features are a vector, as the labels of skl2onnx's KNeighborsClassifier are."""
    features = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    inputs = {"x": features, "indices": np.array(indices, np.int64)}
    agrees("ArrayFeatureExtractor", inputs, is_compiled=is_compiled)


def _trees(
    trees: int, depth: int, targets: int, kind: str, *, modes: tuple[str, ...] = ("BRANCH_LEQ",), seed: int = 0, per_leaf: int = 1
) -> dict[str, Any]:
    """Attributes of full trees with random comparisons, leaves of random weights, and some leaves above the last level."""
    generator = np.random.default_rng(seed)
    nodes: dict[str, list[Any]] = {name: [] for name in ("treeids", "nodeids", "featureids", "modes", "values", "truenodeids")}
    nodes |= {"falsenodeids": [], "missing_value_tracks_true": []}
    leaves: dict[str, list[Any]] = {name: [] for name in ("treeids", "nodeids", "ids", "weights")}
    for tree in range(trees):
        for number in range(2 ** (depth + 1) - 1):
            is_leaf = number >= 2**depth - 1 or number == 1
            row = (tree, number, int(generator.integers(5)), str(generator.choice(modes)), float(generator.integers(-3, 4)))
            row = (*row[:3], "LEAF", 0.0) if is_leaf else row
            followers = (0, 0) if is_leaf else (2 * number + 1, 2 * number + 2)
            for name, value in zip(nodes, (*row, *followers, int(generator.integers(2))), strict=True):
                nodes[name].append(value)
            for target in generator.permutation(targets)[:per_leaf] if is_leaf else ():
                for name, value in zip(leaves, (tree, number, int(target), float(generator.standard_normal())), strict=True):
                    leaves[name].append(value)
    unreachable = set(range(3, 5)) if depth > 1 else set()
    keep = [at for at, number in enumerate(nodes["nodeids"]) if number not in unreachable and number not in _below(unreachable)]
    keep_leaf = [at for at, n in enumerate(leaves["nodeids"]) if n not in unreachable and n not in _below(unreachable)]
    result: dict[str, Any] = {f"nodes_{name}": [values[at] for at in keep] for name, values in nodes.items()}
    return result | {f"{kind}_{name}": [values[at] for at in keep_leaf] for name, values in leaves.items()}


def _below(numbers: set[int]) -> set[int]:
    found, edge = set(), set(numbers)
    while edge and max(edge) < 1024:
        edge = {child for number in edge for child in (2 * number + 1, 2 * number + 2)}
        found |= edge
    return found


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize(("targets", "per_leaf"), [(1, 1), (3, 1), (3, 2)])
def test_regressor(aggregate: str, targets: int, per_leaf: int) -> None:
    attributes = _trees(4, 3, targets, "target", per_leaf=per_leaf)
    attributes |= {"n_targets": targets, "aggregate_function": aggregate}
    agrees("TreeEnsembleRegressor", {"x": _X}, is_compiled=per_leaf == 2, **attributes)


@pytest.mark.parametrize("modes", [("BRANCH_LT", "BRANCH_GTE", "BRANCH_NEQ"), ("BRANCH_LEQ", "BRANCH_GT", "BRANCH_EQ")])
def test_comparisons_and_missing_values(modes: tuple[str, ...]) -> None:
    x = _X.copy()
    x[::3, ::2] = np.nan
    attributes = _trees(6, 3, 1, "target", modes=modes)
    agrees("TreeEnsembleRegressor", {"x": x}, is_compiled=True, n_targets=1, base_values=[0.5], **attributes)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO"])
def test_classifier_of_many(transform: str) -> None:
    attributes = _trees(5, 3, 3, "class", per_leaf=2)
    for dtype in (np.float32, np.float64, np.int64) if transform == "NONE" else (np.float32,):
        inputs = {"x": _X.astype(dtype)}
        agrees("TreeEnsembleClassifier", inputs, 2, post_transform=transform, classlabels_int64s=[7, 5, 9], **attributes)


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC"])
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize(("weighed", "base"), [(0, 0), (1, 0), (0, 1)])
def test_classifier_of_two_by_one(transform: str, positive: bool, weighed: int, base: int) -> None:
    attributes = _trees(3, 3, 1, "class")
    if positive:
        attributes["class_weights"] = [abs(w) / 5 for w in attributes["class_weights"]]
    attributes["class_ids"] = [weighed] * len(attributes["class_ids"])
    attributes |= {"base_values": [0.25]} if base else {}
    agrees("TreeEnsembleClassifier", {"x": _X}, 2, post_transform=transform, classlabels_int64s=[3, 8], **attributes)


def test_classifier_of_two_by_both() -> None:
    """The scores are ONNX Runtime's. The label is that of the greater, there the second's if positive."""
    attributes = _trees(3, 3, 2, "class", per_leaf=2)
    model = ml_model("TreeEnsembleClassifier", {"x": _X}, 2, classlabels_int64s=[4, 2], **attributes)
    _, scores = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": _X})
    labels, found = compiled(model, _X)
    np.testing.assert_allclose(found, scores, rtol=1e-5)
    np.testing.assert_array_equal(labels, np.where(scores[:, 1] > scores[:, 0], 2, 4))


@pytest.mark.parametrize(
    "attributes",
    [
        {"base_values": [0.1], "class_ids": "second"},
        {"base_values": [0.1, 0.2]},
        {"post_transform": "PROBIT"},
        {"nodes_truenodeids": "circle"},
    ],
    ids=str,
)
def test_what_the_specification_leaves_open_is_refused(attributes: dict[str, Any]) -> None:
    trees = _trees(1, 2, 1, "class")
    if attributes.get("class_ids"):
        attributes = attributes | {"class_ids": [1] * len(trees["class_ids"])}
    if attributes.get("nodes_truenodeids"):
        attributes = {"nodes_truenodeids": [0] * len(trees["nodes_modes"])}
    model = ml_model("TreeEnsembleClassifier", {"x": _X}, 2, **{**trees, "classlabels_int64s": [0, 1], **attributes})
    assert "TreeEnsembleClassifier" in operators(expanded(model))


_STRINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "trees": ("TreeEnsembleClassifier", _trees(3, 3, 3, "class", per_leaf=2)),
    "trees by the first": ("TreeEnsembleClassifier", _trees(3, 3, 1, "class") | {"post_transform": "LOGISTIC"}),
    "linear": ("LinearClassifier", {"coefficients": [0.5, -1.0, 0.25, 1.0, 0.1] * 3, "intercepts": [0.2, 0.1, 0.0]}),
    "linear of one": ("LinearClassifier", {"coefficients": [0.5, -1.0, 0.25, 1.0, 0.1], "intercepts": [0.2]}),
    "vectors": (
        "SVMClassifier",
        {
            "support_vectors": [0.5, -1.0, 0.25, 1.0, 0.1] * 3,
            "coefficients": [1.0, -0.5, -0.5],
            "vectors_per_class": [1, 2],
            "rho": [0.1],
            "kernel_params": [0.1, 0.0, 3.0],
            "kernel_type": "RBF",
        },
    ),
}


@pytest.mark.parametrize("name", _STRINGS)
def test_labels_of_classifiers_may_be_strings(name: str) -> None:
    """Scores as for integers, of which onnx.reference gets some of two classes wrong."""
    op_type, attributes = _STRINGS[name]
    labels = ["no", "yes"] if name.endswith(("first", "one", "vectors")) else ["no", "yes", "möglich"]
    model = ml_model(op_type, {"x": _X}, 2, classlabels_strings=labels, **attributes)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": _X})
    net: Any = prefuse.compile(model, cache=False)
    named, scores = net(_X)
    assert "onnx.reference" not in net.report()
    np.testing.assert_array_equal(named, expected[0])
    np.testing.assert_allclose(scores, expected[1], rtol=1e-5, atol=1e-6)


def test_labels_that_nobody_reads_are_not_looked_up() -> None:
    op_type, attributes = _STRINGS["linear"]
    model = ml_model(op_type, {"x": _X}, 2, classlabels_strings=["a", "b", "c"], **attributes)
    del model.graph.output[0]
    assert isinstance(prefuse.compile(model, cache=False), CompiledModel)


_ENCODERS: dict[str, tuple[dict[str, Any], type]] = {
    "ints": ({"keys_int64s": [3, -1, 2], "values_floats": [0.5, 1.5, 2.5]}, np.int64),
    "floats": ({"keys_floats": [2.0, float("nan")], "values_int64s": [7, 9]}, np.float32),
    "default": ({"keys_int64s": [3], "values_int64s": [1], "default_int64": 42}, np.int64),
}


@pytest.mark.parametrize("name", _ENCODERS)
def test_label_encoder(name: str) -> None:
    attributes, dtype = _ENCODERS[name]
    x = _X.copy()
    if dtype == np.float32:
        x[0, :3] = np.nan
    agrees("LabelEncoder", {"x": x.astype(dtype)}, **attributes)


def test_the_last_of_equal_keys_counts() -> None:
    """As the specification says; ONNX Runtime takes the first."""
    x = np.array([3, 4, 5], np.int64)
    model = ml_model("LabelEncoder", {"x": x}, keys_int64s=[3, 4, 3], values_int64s=[1, 2, 7])
    np.testing.assert_array_equal(compiled(model, x)[0], [7, 2, -1])


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC"])
def test_linear(transform: str) -> None:
    weights = np.random.default_rng(1).standard_normal(15).tolist()
    common: dict[str, Any] = {"coefficients": weights, "intercepts": [0.1, -0.2, 0.3], "post_transform": transform}
    agrees("LinearRegressor", {"x": _X}, targets=3, **common)
    agrees("LinearClassifier", {"x": _X}, 2, classlabels_ints=[4, 2, 6], **common)


@pytest.mark.parametrize("transform", ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"])
def test_linear_classifier_of_one_score(transform: str) -> None:
    attributes: dict[str, Any] = {"coefficients": [0.5, -1.0, 0.25, 1.0, 0.1], "intercepts": [0.2], "post_transform": transform}
    agrees("LinearClassifier", {"x": _X}, 2, classlabels_ints=[4, 2], **attributes)


_SIMPLE: dict[str, tuple[str, dict[str, Any]]] = {
    "scaler": ("Scaler", {"scale": [1.0, 2.0, 3.0, 4.0, 5.0], "offset": [0.5] * 5}),
    "scaler of one": ("Scaler", {"scale": [0.3], "offset": [-0.7]}),
    "max": ("Normalizer", {"norm": "MAX"}),
    "l1": ("Normalizer", {"norm": "L1"}),
    "l2": ("Normalizer", {"norm": "L2"}),
    "imputer": ("Imputer", {"imputed_value_floats": [1.0, 2.0, 3.0, 4.0, 5.0], "replaced_value_float": -2.0}),
    "imputer of nan": ("Imputer", {"imputed_value_floats": [1.5], "replaced_value_float": float("nan")}),
    "binarizer": ("Binarizer", {"threshold": 1.0}),
    "one hot": ("OneHotEncoder", {"cats_int64s": [1, -1, 3], "zeros": 1}),
}


@pytest.mark.parametrize("name", _SIMPLE)
def test_simple(name: str) -> None:
    op_type, attributes = _SIMPLE[name]
    x = _X.copy()
    x[2] = 0
    if "nan" in name:
        x[1::2, 1] = np.nan
    agrees(op_type, {"x": x}, **attributes)


def test_feature_vectorizer() -> None:
    agrees("FeatureVectorizer", {"a": _X, "b": _X[:, :2].astype(np.float32)}, inputdimensions=[5, 2])


def _small_ensemble(**changes: Any) -> onnx.ModelProto:
    """Two trees: x0 in {1, 2} ? (x1 > 0.5 ? 10 : 20) : 30, and x2 in {3} ? 1 : 2, for two targets."""
    attributes: dict[str, Any] = {
        "n_targets": 2,
        "tree_roots": [0, 2],
        "nodes_modes": numpy_helper.from_array(np.array([6, 3, 6], np.uint8)),
        "nodes_splits": numpy_helper.from_array(np.array([0.0, 0.5, 0.0], np.float32)),
        "nodes_featureids": [0, 1, 2],
        "nodes_truenodeids": [1, 0, 3],
        "nodes_falsenodeids": [2, 1, 4],
        "nodes_trueleafs": [0, 1, 1],
        "nodes_falseleafs": [1, 1, 1],
        "nodes_missing_value_tracks_true": [0, 1, 0],
        "leaf_targetids": [0, 0, 0, 1, 1],
        "leaf_weights": numpy_helper.from_array(np.array([10, 20, 30, 1, 2], np.float32)),
        "membership_values": numpy_helper.from_array(np.array([1, 2, np.nan, 3, np.nan], np.float32)),
    }
    x = np.zeros((5, 3), np.float32)
    return one_node("TreeEnsemble", {"x": x}, domain="ai.onnx.ml", **{**attributes, **changes})


def test_ensemble_of_version_5() -> None:
    """Members of sets, a missing value that counts as true, an inner node before a leaf, and trees of one target each."""
    x = np.array([[1, 0.75, 3], [2, 0.25, 0], [2, np.nan, 3], [0, 9, 2], [np.nan, 1, np.nan]], np.float32)
    (found,) = compiled(_small_ensemble(), x)
    np.testing.assert_array_equal(found, [[10, 1], [20, 2], [10, 1], [30, 2], [30, 2]])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes_featureids": [0, 1]}, "must have 3 elements"),  # ONNX's own inference
        ({"nodes_featureids": [0, 1, 3]}, "not below 3"),
        ({"leaf_targetids": [0, 0, 0, 1, 2]}, "not below 2"),
    ],
)
def test_a_broken_ensemble_is_the_models_fault(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidModelError, match=message):
        expanded(_small_ensemble(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes_values": [0.0]}, "differ in length"),
        ({"target_nodeids": [99] * 6}, "weighs node 99 of tree 0"),
        ({"target_ids": [0, 0, 0, 1, 0, 0]}, "not below 1"),
        ({"nodes_featureids": [7] * 10}, "not below 5"),
    ],
)
def test_broken_trees_are_the_models_fault(changes: dict[str, Any], message: str) -> None:
    attributes = _trees(2, 2, 1, "target")
    with pytest.raises(InvalidModelError, match=message):
        expanded(ml_model("TreeEnsembleRegressor", {"x": _X}, **{**attributes, **changes}))


def test_ways_that_never_end_are_left() -> None:
    assert "TreeEnsemble" in operators(expanded(_small_ensemble(nodes_truenodeids=[0, 0, 3])))


def test_a_map_is_refused_by_name() -> None:
    model = ml_model("LinearRegressor", {"x": _X}, coefficients=[1.0] * 5)
    of_map = onnx.helper.make_map_type_proto(
        onnx.TensorProto.INT64, onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [])
    )
    model.graph.output.append(onnx.helper.make_value_info("z", onnx.helper.make_sequence_type_proto(of_map)))
    with pytest.raises(UnsupportedModelError, match="value z is a map"):
        prefuse.compile(model, cache=False)
