"""Activations with a bias or a scale, and sums of three."""

from __future__ import annotations

import onnx_ir as ir

from .call import AttributeValue, Call, RefusedNodeError

Results = tuple[ir.Value | None, ...]

# The numbers that each function of a fused activation takes, in order: ONNX's attributes, or None for inputs of Clip.
_PARAMETERS: dict[str, tuple[str, ...]] = {
    "": (),
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Selu": ("alpha", "gamma"),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "ThresholdedRelu": ("alpha",),
}


def activate(call: Call, x: ir.Value, name: str, parameters: tuple[float, ...]) -> ir.Value:
    """`name`(x), an activation that ONNX Runtime fused into the operator before it; "" is none."""
    if name == "Clip" and len(parameters) == 2:
        return call.op("Clip", x, *(call.like(x, bound) for bound in parameters))
    if name not in _PARAMETERS or len(parameters) > len(_PARAMETERS[name]):
        raise RefusedNodeError(f"activation {name}{list(parameters)} is not taken")
    attributes: dict[str, AttributeValue] = dict(zip(_PARAMETERS[name], parameters, strict=False))
    return call.op(name, x, **attributes) if name else x


def named_parameters(call: Call, name: str) -> tuple[float, ...]:
    """The numbers of a fused activation that lie in attributes activation_alpha, _beta and _gamma."""
    if name == "Clip":
        return call.number("activation_alpha"), call.number("activation_beta")
    given = call.forwarded(*(f"activation_{one}" for one in ("alpha", "beta", "gamma")))
    wanted = [f"activation_{one}" for one in _PARAMETERS.get(name, ())]
    return tuple(given[one].as_float() for one in wanted if one in given)


def add_all(call: Call, first: ir.Value, *others: ir.Value | None) -> ir.Value:
    """The sum of `first` and those of the others that are there, from left to right."""
    for other in others:
        if other is not None:
            first = call.op("Add", first, other)
    return first


def gelu(call: Call) -> Results:
    """Gelu(x), exact."""
    return (call.op("Gelu", call.input(0)),)


def bias_gelu(call: Call) -> Results:
    """Gelu(a + b), exact."""
    return (call.op("Gelu", call.op("Add", call.input(0), call.input(1))),)


def fast_gelu(call: Call) -> Results:
    """Gelu(x + bias) by tanh."""
    return (call.op("Gelu", add_all(call, call.input(0), call.optional(1)), approximate="tanh"),)


def quick_gelu(call: Call) -> Results:
    """x * sigmoid(alpha * x)"""
    return (call.op("Swish", call.input(0), alpha=call.number("alpha", 1.702)),)


def scaled_silu(call: Call) -> Results:
    """Swish(scale * x), where the scale is an input or alpha."""
    x, scale, alpha = call.input(0), call.optional(1), call.number("alpha", 1.0)
    factor = call.like(x, alpha) if scale is None else call.op("Cast", scale, to=int(call.dtype(x)))
    return (call.op("Swish", call.op("Mul", x, factor)),)


def bias_add(call: Call) -> Results:
    """x + bias + skip"""
    return (add_all(call, call.input(0), call.input(1), call.input(2)),)


def bias_split_gelu(call: Call) -> Results:
    """left * Gelu(right), for the halves of x + bias along the last axis."""
    left, right = call.ops(2, "Split", call.op("Add", call.input(0), call.input(1)), axis=-1, num_outputs=2)
    return (call.op("Mul", left, call.op("Gelu", right)),)


def gated_add(call: Call) -> Results:
    """x + y * gate"""
    return (call.op("Add", call.input(0), call.op("Mul", call.input(1), call.input(2))),)


def bias_dropout(call: Call) -> Results:
    """data + bias + residual: dropout does nothing outside of training."""
    call.ignore("seed")
    call.optional(3)
    training = call.optional(4)
    if training is not None and call.known(training, "training_mode").any():
        raise RefusedNodeError("training_mode is on")
    return (add_all(call, call.input(0), call.input(1), call.optional(2)), None)
