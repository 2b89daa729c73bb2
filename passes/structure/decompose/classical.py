"""Operators of ai.onnx.ml on numbers without trees or support vectors, as in ONNX Runtime where their text says too little."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from .body import Body, ints
from .common import MAX_COMPARISONS, dims, dtype_of
from .scores import labelled, transformed


def array_feature_extractor(node: ir.Node) -> ir.Function:
    """Elements of the last axis; a vector counts as a matrix of one row."""
    body, shape, count = Body(node), dims(node.inputs[0]), prod(dims(node.inputs[1]))
    picked = body.op("Gather", body.input(0), body.reshape(body.input(1), [count]), axis=-1)
    return body.function(picked if len(shape) > 1 else body.reshape(picked, [1, count]))


def binarizer(node: ir.Node) -> ir.Function:
    """1 where x > threshold, else 0, in the type of x; integers are compared in float64."""
    body, dtype = Body(node), dtype_of(node.inputs[0])
    working = dtype if dtype.is_floating_point() else ir.DataType.DOUBLE
    threshold = np.array(node.attributes.get_float("threshold", 0.0), working.numpy())
    return body.function(body.cast(body.op("Greater", body.cast(body.input(0), working), threshold), dtype))


def feature_vectorizer(node: ir.Node) -> ir.Function | None:
    """Matrices side by side, in float32; a vector is a row."""
    body, wanted = Body(node), node.attributes.get_ints("inputdimensions", ())
    shapes = [shape if len(shape) > 1 else (1, *shape) for shape in (dims(value) for value in node.inputs)]
    if any(len(shape) != 2 for shape in shapes) or list(wanted) != [shape[1] for shape in shapes]:
        return None
    parts = [body.cast(body.reshape(body.input(at), shape), "float32") for at, shape in enumerate(shapes)]
    return body.function(body.op("Concat", *parts, axis=1))


def imputer(node: ir.Node) -> ir.Function | None:
    """x, and the imputed value of its column where it equals the replaced one."""
    body, dtype = Body(node), dtype_of(node.inputs[0])
    if dtype.is_floating_point():
        values: object = node.attributes.get_floats("imputed_value_floats", ())
        replaced: float = node.attributes.get_float("replaced_value_float", 0.0)
    else:
        values = node.attributes.get_ints("imputed_value_int64s", ())
        replaced = node.attributes.get_int("replaced_value_int64", 0)
    imputed = np.array(values, dtype.numpy())
    if imputed.size not in (1, *dims(node.inputs[0])[-1:]):
        return None
    is_nan = isinstance(replaced, float) and np.isnan(replaced)
    found = body.op("IsNaN", body.input(0)) if is_nan else body.op("Equal", body.input(0), np.array(replaced, dtype.numpy()))
    return body.function(body.op("Where", found, imputed, body.input(0)))


def label_encoder(node: ir.Node) -> ir.Function | None:
    """The value of the last key that equals x, NaN included; the default where none does. None where strings are involved."""
    found, values, default = _keys(node), _values(node), _default(node)
    shape, dtype = dims(node.inputs[0]), dtype_of(node.inputs[0])
    if found is None or values is None or len(found) != len(values) or prod(shape) * len(found) > MAX_COMPARISONS:
        return None
    body, keys = Body(node), found.astype(dtype.numpy())
    apart = body.op("Unsqueeze", body.input(0), ints([-1]))
    equal = body.op("Equal", apart, keys)
    if dtype.is_floating_point() and np.isnan(keys).any():
        equal = body.op("Or", equal, body.op("And", body.op("IsNaN", apart), np.isnan(keys)))
    places = body.op("Where", equal, np.arange(1, len(keys) + 1, dtype=np.int32), np.array(0, np.int32))
    last = body.op("ReduceMax", places, ints([-1]), keepdims=0)
    table = np.concatenate([np.array([default], values.dtype), values])
    return body.function(body.op("Gather", table, last))


def linear_classifier(node: ir.Node) -> ir.Function | None:
    """The label of the greatest of x W^T + b, and all of them transformed.

    One score s and two labels are two scores, 1 - s and s; as in ONNX Runtime, softmaxes leave these as they are.
    """
    labels = node.attributes.get_ints("classlabels_ints", ())
    scores, body, count = _linear(node, max(len(node.attributes.get_floats("intercepts", ())), 1))
    transform = node.attributes.get_string("post_transform", "NONE")
    if scores is None or not labels or (count > 1 and len(labels) != count) or (count == 1 and len(labels) != 2):
        return None
    if count > 1:
        results = transformed(body, scores, transform)
        chosen = body.op("ArgMax", scores, axis=1, keepdims=0)
    else:
        chosen = body.op("Squeeze", body.cast(body.op("Greater", scores, np.array(0, np.float32)), "int64"), ints([1]))
        score = transformed(body, scores, transform) if transform in ("LOGISTIC", "PROBIT") else scores
        results = None if score is None else body.op("Concat", body.op("Sub", np.array(1, np.float32), score), score, axis=1)
    return None if results is None else body.function(labelled(body, chosen, labels), results)


def linear_regressor(node: ir.Node) -> ir.Function | None:
    """x W^T + b, transformed, in float32."""
    scores, body, _ = _linear(node, node.attributes.get_int("targets", 1))
    results = None if scores is None else transformed(body, scores, node.attributes.get_string("post_transform", "NONE"))
    return None if results is None else body.function(results)


def normalizer(node: ir.Node) -> ir.Function | None:
    """Rows divided by their greatest element, by the sum of their magnitudes or by their length, in float32; not by zero."""
    body, shape, norm = Body(node), dims(node.inputs[0]), node.attributes.get_string("norm", "MAX")
    operator = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}.get(norm)
    if operator is None or len(shape) not in (1, 2):
        return None
    x = body.cast(body.input(0), "float32")
    size = body.op(operator, x, ints([len(shape) - 1]), keepdims=1)
    is_zero = body.op("Equal", size, np.array(0, np.float32))
    return body.function(body.op("Div", x, body.op("Where", is_zero, np.array(1, np.float32), size)))


def one_hot_encoder(node: ir.Node) -> ir.Function | None:
    """Whether each category is x, in float32. None where an unknown category must be an error."""
    body, categories = Body(node), node.attributes.get_ints("cats_int64s", ())
    if not categories or not node.attributes.get_int("zeros", 1):
        return None
    apart = body.op("Unsqueeze", body.cast(body.input(0), "int64"), ints([-1]))
    return body.function(body.cast(body.op("Equal", apart, ints(categories)), "float32"))


def scaler(node: ir.Node) -> ir.Function | None:
    """(x - offset) * scale in float32; float64 is cast at the end."""
    body, dtype = Body(node), dtype_of(node.inputs[0])
    working = "float64" if dtype == ir.DataType.DOUBLE else "float32"
    offset, scale = (np.array(node.attributes.get_floats(name, ()), working) for name in ("offset", "scale"))
    if offset.size != scale.size or offset.size not in (1, *dims(node.inputs[0])[-1:]):
        return None
    centred = body.op("Sub", body.cast(body.input(0), working), offset)
    return body.function(body.cast(body.op("Mul", centred, scale), "float32"))


def _linear(node: ir.Node, count: int) -> tuple[ir.Value | None, Body, int]:
    """x W^T + b in float32, [rows, count]; None where the sizes do not fit."""
    body, shape = Body(node), dims(node.inputs[0])
    weights, bias = (np.array(node.attributes.get_floats(name, ()), np.float32) for name in ("coefficients", "intercepts"))
    if len(shape) not in (1, 2) or weights.size != count * shape[-1] or bias.size not in (0, count):
        return None, body, count
    x = body.reshape(body.cast(body.input(0), "float32"), [prod(shape[:-1]), shape[-1]])
    product = body.op("MatMul", x, np.ascontiguousarray(weights.reshape(count, -1).T))
    return body.op("Add", product, bias) if bias.size else product, body, count


def _keys(node: ir.Node) -> np.ndarray | None:
    tensor = node.attributes.get_tensor("keys_tensor", None)
    if tensor is not None:
        return tensor.numpy() if tensor.dtype != ir.DataType.STRING else None
    keys = node.attributes.get_ints("keys_int64s", ()) or node.attributes.get_floats("keys_floats", ())
    return np.array(keys) if keys else None


def _values(node: ir.Node) -> np.ndarray | None:
    tensor = node.attributes.get_tensor("values_tensor", None)
    if tensor is not None:
        return tensor.numpy() if tensor.dtype != ir.DataType.STRING else None
    if integers := node.attributes.get_ints("values_int64s", ()):
        return np.array(integers, np.int64)
    numbers = node.attributes.get_floats("values_floats", ())
    return np.array(numbers, np.float32) if numbers else None


def _default(node: ir.Node) -> float | int:
    tensor = node.attributes.get_tensor("default_tensor", None)
    if tensor is not None and tensor.dtype != ir.DataType.STRING:
        number: float | int = tensor.numpy().reshape(()).item()
        return number
    values = _values(node)
    if values is None or values.dtype.kind == "i":
        return node.attributes.get_int("default_int64", -1)
    return node.attributes.get_float("default_float", -0.0)
