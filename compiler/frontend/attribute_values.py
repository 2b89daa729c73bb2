"""The values that ONNX allows for attributes that are strings; its checker and its shape inference take any."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ...runtime.errors import InvalidModelError
from ..ir.facts import source_of

_PADDING = "NOTSET SAME_UPPER SAME_LOWER VALID"
_DIRECTIONS = "forward reverse bidirectional"
_ACTIVATIONS = """
    Affine Elu HardSigmoid LeakyRelu Relu ScaledTanh Sigmoid Softplus Softsign Tanh ThresholdedRelu"""
_ROUNDINGS = "up down nearest"
_LOSSES = "none sum mean"
_SCATTERINGS = "none add mul max min"
_BRANCHES = "BRANCH_LEQ BRANCH_LT BRANCH_GTE BRANCH_GT BRANCH_EQ BRANCH_NEQ LEAF"
_SCORES = "NONE SOFTMAX LOGISTIC SOFTMAX_ZERO PROBIT"
_SIMILARITIES = "LINEAR POLY RBF SIGMOID"

# Of "operator.attribute". A value that a later or an earlier opset has too, with the same meaning, is allowed in all: torch's
# exporter writes Pad's "wrap", which came with opset 19, into models of opset 18.
_LEGAL_VALUES: dict[str, str] = {
    "AveragePool.auto_pad": _PADDING,
    "BitShift.direction": "LEFT RIGHT",
    "Cast.round_mode": _ROUNDINGS,
    "CastLike.round_mode": _ROUNDINGS,
    "CastMap.cast_to": "TO_FLOAT TO_STRING TO_INT64",
    "CastMap.map_form": "DENSE SPARSE",
    "CausalConvWithState.activation": "none silu swish",
    "Conv.auto_pad": _PADDING,
    "ConvInteger.auto_pad": _PADDING,
    "ConvTranspose.auto_pad": _PADDING,
    "DepthToSpace.mode": "DCR CRD",
    "GRU.activations": _ACTIVATIONS,
    "GRU.direction": _DIRECTIONS,
    "Gelu.approximate": "none tanh",
    "GridSample.mode": "bilinear nearest bicubic",
    "GridSample.padding_mode": "zeros border reflection",
    "ImageDecoder.pixel_format": "RGB BGR Grayscale",
    "LSTM.activations": _ACTIVATIONS,
    "LSTM.direction": _DIRECTIONS,
    "LinearAttention.update_rule": "linear gated delta gated_delta",
    "LinearClassifier.post_transform": _SCORES,
    "LinearRegressor.post_transform": _SCORES,
    "LpPool.auto_pad": _PADDING,
    "MaxPool.auto_pad": _PADDING,
    "Momentum.mode": "nesterov standard",
    "NegativeLogLikelihoodLoss.reduction": _LOSSES,
    "Normalizer.norm": "MAX L1 L2",
    "Pad.mode": "constant reflect edge wrap",
    "QLinearConv.auto_pad": _PADDING,
    "RNN.activations": _ACTIVATIONS,
    "RNN.direction": _DIRECTIONS,
    "Resize.coordinate_transformation_mode": """
        half_pixel half_pixel_symmetric pytorch_half_pixel align_corners asymmetric tf_half_pixel_for_nn tf_crop_and_resize""",
    "Resize.keep_aspect_ratio_policy": "stretch not_larger not_smaller",
    "Resize.mode": "nearest linear cubic",
    "Resize.nearest_mode": "round_prefer_floor round_prefer_ceil floor ceil",
    "RoiAlign.coordinate_transformation_mode": "half_pixel output_half_pixel",
    "RoiAlign.mode": "avg max",
    "SVMClassifier.kernel_type": _SIMILARITIES,
    "SVMClassifier.post_transform": _SCORES,
    "SVMRegressor.kernel_type": _SIMILARITIES,
    "SVMRegressor.post_transform": _SCORES,
    "ScatterElements.reduction": _SCATTERINGS,
    "ScatterND.reduction": _SCATTERINGS,
    "SoftmaxCrossEntropyLoss.reduction": _LOSSES,
    "SpaceToDepth.mode": "DCR CRD",
    "StringNormalizer.case_change_action": "NONE LOWER UPPER",
    "TensorScatter.mode": "linear circular",
    "TfIdfVectorizer.mode": "TF IDF TFIDF",
    "TreeEnsembleClassifier.nodes_modes": _BRANCHES,
    "TreeEnsembleClassifier.post_transform": _SCORES,
    "TreeEnsembleRegressor.aggregate_function": "SUM AVERAGE MIN MAX",
    "TreeEnsembleRegressor.nodes_modes": _BRANCHES,
    "TreeEnsembleRegressor.post_transform": _SCORES,
}
_LEGAL_SINCE: dict[str, tuple[int, str]] = {"GridSample.mode": (20, "linear nearest cubic")}  # other words from an opset on
_ANY_CASE = ("activations",)  # attributes whose values ONNX lets one write in any case
_DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview.training")


def legal_values(operator: str, attribute: str, opset: int) -> tuple[str, ...] | None:
    """What ONNX allows an attribute to be, or each of its strings; None where that is no list of words."""
    key = f"{operator}.{attribute}"
    since, values = _LEGAL_SINCE.get(key, (0, ""))
    if not values or opset < since:
        values = _LEGAL_VALUES.get(key, "")
    return tuple(values.split()) or None


def check_attribute_values(model: ir.Model) -> None:
    """Raise `InvalidModelError` for the first attribute of a node, in branches and bodies too, that is none of its values."""
    for node in model.graph.all_nodes():
        if node.domain in _DOMAINS:
            _check_node(node, model.graph.opset_imports)


def _check_node(node: ir.Node, opsets: Mapping[str, int]) -> None:
    for attribute in node.attributes.values():
        legal = legal_values(node.op_type, attribute.name, opsets.get("", 0))
        if legal is None or attribute.is_ref():
            continue
        if attribute.type not in (ir.AttributeType.STRING, ir.AttributeType.STRINGS):
            found = [attribute.value]
        else:
            given = [attribute.value] if attribute.type == ir.AttributeType.STRING else attribute.value
            known = {word.lower() for word in legal} if attribute.name in _ANY_CASE else set(legal)
            found = [one for one in given if (one.lower() if attribute.name in _ANY_CASE else one) not in known]
        if found:
            what = f"{node.op_type} has {attribute.name} {found[0]!r}, where ONNX knows {', '.join(legal)}"
            raise InvalidModelError(source_of(node), what, "correct the model")
