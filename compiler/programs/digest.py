"""What makes two models the same model: SHA-256 over everything that the compiler reads of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from .memory_digest import known_digest

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


def combine(*parts: str | bytes) -> str:
    """One key for several parts, in order; the lengths keep ("ab", "c") apart from ("a", "bc")."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def arrays_digest(loaders: Iterable[tuple[str, Callable[[], np.ndarray]]]) -> str:
    """Digest of named arrays: names, types, shapes and elements. Arrays are loaded one at a time and hashed on all cores."""
    return combine(*(f"{name}:{array_digest(load())}" for name, load in loaders))


def array_digest(array: np.ndarray) -> str:
    """Digest of the type, shape and elements of an array.

    Of an array whose axes lie in memory in another order, such as a transposed one, it is that of what lies in memory, and of the
    order.
    """
    if array.dtype == object:  # strings
        return f"{array.dtype}{array.shape}{combine(*(repr(item) for item in array.ravel()))}"
    order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    turned = array.transpose(order)
    if order == sorted(order) or not turned.flags.c_contiguous:
        return f"{array.dtype}{array.shape}{known_digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8))}"
    return f"{array.dtype}{array.shape}{order}{known_digest(turned.reshape(-1).view(np.uint8))}"


def model_digest(model: ir.Model) -> str:
    """Digest of a graph with its weights. Documentation and source lines do not count: they change no program."""
    import onnx_ir as ir

    from ..ir.states import STATES_KEY

    graph = model.graph
    parts = [f"opset {domain} {version}" for domain, version in sorted(graph.opset_imports.items())]
    parts += [f"{value.name} {value.type} {value.shape}" for value in (*graph.inputs, *graph.outputs)]
    parts += [f"states {model.metadata_props[STATES_KEY]}"] if STATES_KEY in model.metadata_props else []
    nodes = [_node_bytes(ir.serde.serialize_node(node)) for node in graph]
    functions = [_function_bytes(ir.serde.serialize_function(function)) for function in model.functions.values()]
    weights = arrays_digest(_weights(graph))
    bodies = (graph, *(function.graph for function in model.functions.values()))
    elsewhere = arrays_digest((str(tensor.name), tensor.numpy) for body in bodies for tensor in _inner_files(body))
    return combine(*parts, weights, elsewhere, *nodes, "functions", *functions)


def _weights(graph: ir.Graph) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    for name, value in graph.initializers.items():
        if value.const_value is not None:
            yield name, value.const_value.numpy


def _inner_files(graph: ir.Graph) -> Iterator[ir.ExternalTensor]:
    """The tensors of attributes and of subgraphs whose contents are in other files: nodes hold no more than their places."""
    import onnx_ir as ir

    for node in graph.all_nodes():
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                yield attribute.value
    for subgraph in graph.subgraphs():
        for value in subgraph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value


def _node_bytes(node: onnx.NodeProto) -> bytes:
    from ..ir.assignments.node_precision import PRECISION_KEY
    from ..ir.stored_weights import ROW_BITS

    kept = [entry for entry in node.metadata_props if entry.key in (ROW_BITS, PRECISION_KEY)]  # how exact a program is
    del node.metadata_props[:]
    node.metadata_props.extend(kept)
    node.ClearField("doc_string")
    return bytes(node.SerializeToString(deterministic=True))


def _function_bytes(function: onnx.FunctionProto) -> bytes:
    function.ClearField("metadata_props")
    function.ClearField("doc_string")
    for node in function.node:
        _node_bytes(node)
    return bytes(function.SerializeToString(deterministic=True))
