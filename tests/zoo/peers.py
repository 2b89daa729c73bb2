"""What others make of an architecture in bfloat16 and float16: how exact a narrow precision has to be."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from prefuse.compiler.frontend.pytree import flatten
from torch import Tensor

from .architecture import Call

OPENVINO, AUTOCAST = "OpenVINO", "torch's autocast"
_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_OPENVINO = {"bfloat16": ("BF16", "bf16"), "float16": ("FP16", "f16")}  # the capability, and the hint that asks for it


def peer_of(precision: str) -> str:
    """Who computes in a narrow type here: OpenVINO if it is installed and does so on this CPU (elsewhere it takes float32,
    whatever is asked for), else torch's autocast, which rounds what products give, too. Nobody for float32.
    """
    if precision not in _TYPES:
        return ""
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
        return by_autocast(call, _TYPES[precision]) if peer else []
    except Exception:  # whatever the peer raises: there are architectures that are not made for narrow types
        return []


def by_autocast(call: Call, dtype: torch.dtype) -> list[np.ndarray]:
    """The outputs by torch, products in a narrow type."""
    module, positional, named = call
    with torch.autocast("cpu", dtype=dtype):
        leaves = flatten(module(*positional, **named))[1]
    return [leaf.double().numpy() for leaf in leaves if isinstance(leaf, Tensor)]


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
