"""What others make of an architecture in each type: how exact a precision has to be."""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import onnx_ir as ir
import torch
from prefuse.compiler.frontend.pytree import flatten, unflatten, unflatten_arguments
from torch import Tensor

from .architecture import Call

OPENVINO, AUTOCAST, TORCH = "OpenVINO", "torch's autocast", "torch"
_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_OPENVINO = {"bfloat16": ("BF16", "bf16"), "float16": ("FP16", "f16")}  # the capability, and the hint that asks for it


def peer_of(precision: str) -> str:
    """Who computes in the type here: torch in float32, but nobody where it is itself what results are held against. In a narrow
    type OpenVINO, if it is installed and does so on this CPU (elsewhere it takes float32,
    whatever is asked for), else torch's autocast, which rounds what products give, too.
    """
    if precision not in _TYPES:
        return TORCH if precision == "float32-fast" else ""
    try:
        import openvino
    except ModuleNotFoundError:
        return AUTOCAST
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return OPENVINO if _OPENVINO[precision][0] in capabilities else AUTOCAST


def peer_outputs(peer: str, call: Call, graph: ir.Model, precision: str) -> list[np.ndarray]:
    """The outputs of a call, from left to right, as float64; nothing where the peer cannot run the model, or is nobody.

    `graph` is the call's module as exported.
    """
    try:
        if peer == OPENVINO:
            return by_openvino(call, graph, _OPENVINO[precision][1])
        if peer == AUTOCAST:
            return by_autocast(call, _TYPES[precision])
        return by_torch(call) if peer else []
    except Exception:  # whatever the peer raises: there are architectures that are not made for narrow types
        return []


def by_torch(call: Call) -> list[np.ndarray]:
    """The outputs by torch."""
    module, positional, named = call
    leaves = flatten(module(*positional, **named))[1]
    return [leaf.double().numpy() for leaf in leaves if isinstance(leaf, Tensor)]


def in_float64(call: Call, expected: object) -> object:
    """The result of a call computed in float64, in structure and types as `expected`, which is torch's in float32; that itself,
    if some line of the module insists on float32.
    """
    module, *arguments = call
    structure, leaves = flatten(tuple(arguments))
    doubles = [leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
    positional, named = unflatten_arguments(structure, doubles)
    try:
        exact = flatten(deepcopy(module).double()(*positional, **named))[1]
    except Exception:  # whatever such a line raises
        return expected
    structure, leaves = flatten(expected)
    pairs = zip(exact, leaves, strict=True)
    return unflatten(structure, [a.to(b.dtype) if isinstance(a, Tensor) and isinstance(b, Tensor) else b for a, b in pairs])


def by_autocast(call: Call, dtype: torch.dtype) -> list[np.ndarray]:
    """The outputs by torch, products in a narrow type."""
    with torch.autocast("cpu", dtype=dtype):
        return by_torch(call)


def by_openvino(call: Call, graph: ir.Model, hint: str) -> list[np.ndarray]:
    """The outputs by OpenVINO, for a hint at the precision."""
    import openvino

    _, positional, named = call
    leaves = flatten((positional, named))[1]
    inputs = {value.name: np.asarray(leaf) for value, leaf in zip(graph.graph.inputs, leaves, strict=True)}
    core = openvino.Core()
    model = core.read_model(ir.to_proto(graph).SerializeToString())
    request = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": hint}).create_infer_request()
    return [np.asarray(output, np.float64) for output in request.infer(inputs).values()]
