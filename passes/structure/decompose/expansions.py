"""Bodies of operators that ONNX defines by prose alone: what `decompose` puts in their place.

A body is ONNX's text, whose inputs are i0, i1, ... and whose results are y, y1, ..., or a function written by `Body`.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx_ir as ir

from ....compiler.ir.symbolic.symbols import sizes_of
from . import classical, support_vectors, trees
from .contraction import einsum
from .encoding import hardmax
from .fourier import dft, stft
from .grams import tfidf_vectorizer
from .grids import affine_grid
from .images import batch_normalization, conv_transpose, deform_conv, eye_like, global_lp_pool, max_unpool
from .integer_products import conv_integer, matmul_integer, qlinear_conv, qlinear_matmul
from .normalization import lp_normalization, lrn, mean_variance_normalization
from .optimizers import adagrad, adam, momentum
from .quantization import dequantize_linear, dynamic_quantize_linear, quantize_linear

_SIZED_OPERATORS = """
    BatchNormalization ConvInteger DequantizeLinear DynamicQuantizeLinear Einsum GlobalLpPool Hardmax LRN LpNormalization
    MatMulInteger MeanVarianceNormalization QLinearConv QLinearMatMul QuantizeLinear"""
SIZED = frozenset(_SIZED_OPERATORS.split())  # operators whose bodies may have sizes that a call decides
_BODIES: dict[str, Callable[[ir.Node], str | ir.Function | None]] = {
    "AffineGrid": affine_grid,
    "BatchNormalization": batch_normalization,
    "ConvInteger": conv_integer,
    "ConvTranspose": conv_transpose,
    "DFT": dft,
    "DeformConv": deform_conv,
    "DequantizeLinear": dequantize_linear,
    "DynamicQuantizeLinear": dynamic_quantize_linear,
    "Einsum": einsum,
    "EyeLike": eye_like,
    "GlobalLpPool": global_lp_pool,
    "Hardmax": hardmax,
    "LRN": lrn,
    "LpNormalization": lp_normalization,
    "MatMulInteger": matmul_integer,
    "MaxUnpool": max_unpool,
    "MeanVarianceNormalization": mean_variance_normalization,
    "QLinearConv": qlinear_conv,
    "QLinearMatMul": qlinear_matmul,
    "QuantizeLinear": quantize_linear,
    "STFT": stft,
    "TfIdfVectorizer": tfidf_vectorizer,
    "ai.onnx.ml.ArrayFeatureExtractor": classical.array_feature_extractor,
    "ai.onnx.ml.Binarizer": classical.binarizer,
    "ai.onnx.ml.FeatureVectorizer": classical.feature_vectorizer,
    "ai.onnx.ml.Imputer": classical.imputer,
    "ai.onnx.ml.LabelEncoder": classical.label_encoder,
    "ai.onnx.ml.LinearClassifier": classical.linear_classifier,
    "ai.onnx.ml.LinearRegressor": classical.linear_regressor,
    "ai.onnx.ml.Normalizer": classical.normalizer,
    "ai.onnx.ml.OneHotEncoder": classical.one_hot_encoder,
    "ai.onnx.ml.Scaler": classical.scaler,
    "ai.onnx.ml.SVMClassifier": support_vectors.svm_classifier,
    "ai.onnx.ml.SVMRegressor": support_vectors.svm_regressor,
    "ai.onnx.ml.TreeEnsemble": trees.tree_ensemble,
    "ai.onnx.ml.TreeEnsembleClassifier": trees.tree_ensemble_classifier,
    "ai.onnx.ml.TreeEnsembleRegressor": trees.tree_ensemble_regressor,
    "ai.onnx.preview.training.Adagrad": adagrad,
    "ai.onnx.preview.training.Adam": adam,
    "ai.onnx.preview.training.Momentum": momentum,
}

PARTLY_EXPANDED = frozenset(["ConvTranspose"])  # operators that lowering knows, of which some are better expanded


def expansion_of(node: ir.Node, opset: int) -> ir.Function | None:
    """A body for this node; None where there is none for its operator, types or shapes."""
    write = _BODIES.get(f"{node.domain}.{node.op_type}" if node.domain else node.op_type)
    node.version = node.version or opset  # defaults of attributes depend on it
    body = None if write is None or not _has_shapes(node) else write(node)
    if body is None:
        return None
    if isinstance(body, ir.Function):
        body.opset_imports[""] = opset
        return body
    names = ", ".join(f"i{position}" for position in range(len(node.inputs)))
    results = ", ".join(["y", *(f"y{position}" for position in range(1, len(node.outputs)))])
    text = f'<domain: "prefuse.expansions", opset_import: ["": {opset}]> {node.op_type} ({names}) => ({results}) {{ {body} }}'
    return ir.serde.deserialize_function(onnx.parser.parse_function(text))


def _has_shapes(node: ir.Node) -> bool:
    """Whether all operands have types and dimensions that its body can be written for."""
    is_sized = node.op_type in SIZED and node.domain == ""
    for value in filter(None, node.inputs):
        sizes = sizes_of(value)
        if value.dtype is None or sizes is None or not (is_sized or all(isinstance(size, int) for size in sizes)):
            return False
    return True
