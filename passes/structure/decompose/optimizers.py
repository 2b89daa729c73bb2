"""Adagrad, Adam and Momentum of ai.onnx.preview.training, as the pseudo code of their specification says.

Inputs are R, T, and then of each of several kinds (X, G, ...) one for every tensor that is optimized. So are the outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from .body import Body
from .common import dtype_of
from .formula import Number

# Of one tensor: what it becomes, from R and T in float64 and the tensors of each kind.
Update = Callable[[Number, Number, list[Number]], list[Number]]


def adagrad(node: ir.Node) -> ir.Function:
    """X - r G' / (sqrt(H + G'^2) + epsilon), where r = R / (1 + T decay) and G' = norm X + G."""
    norm, decay, epsilon = (_float(node, *one) for one in (("norm_coefficient", 0.0), ("decay_factor", 0.0), ("epsilon", 1e-6)))

    def update(rate: Number, count: Number, tensors: list[Number]) -> list[Number]:
        x, g, h = tensors
        gradient = x * norm + g
        squares = h + gradient * gradient
        step = (rate / (count * decay + 1.0)).cast(x.dtype) * gradient / (squares.sqrt() + epsilon)
        return [x - step, squares]

    return _optimized(node, 3, update)


def adam(node: ir.Node) -> ir.Function:
    """(1 - post) (X - r V' / (sqrt(H') + epsilon)), where V' and H' are running means of G' = norm X + G and of its square."""
    alpha, beta, epsilon = (_float(node, *one) for one in (("alpha", 0.9), ("beta", 0.999), ("epsilon", 1e-6)))
    norm, post = _float(node, "norm_coefficient", 0.0), _float(node, "norm_coefficient_post", 0.0)

    def update(rate: Number, count: Number, tensors: list[Number]) -> list[Number]:
        x, g, v, h = tensors
        gradient = x * norm + g
        mean = v * alpha + gradient * (1 - alpha)
        squares = h * beta + gradient * gradient * (1 - beta)
        unbiased = rate * (count.like(1.0) - count.power(beta)).sqrt() / (count.like(1.0) - count.power(alpha))
        adjusted = (count > 0.0).where(unbiased, rate).cast(x.dtype)
        return [(x - adjusted * mean / (squares.sqrt() + epsilon)) * (1 - post), mean, squares]

    return _optimized(node, 4, update)


def momentum(node: ir.Node) -> ir.Function:
    """X - R V', or X - R (G' + alpha V') by Nesterov, where V' = alpha V + (beta if T > 0 else 1) G' and G' = norm X + G."""
    alpha, beta, norm = (_float(node, name, 0.0) for name in ("alpha", "beta", "norm_coefficient"))
    is_nesterov = node.attributes.get_string("mode") == "nesterov"

    def update(rate: Number, count: Number, tensors: list[Number]) -> list[Number]:
        x, g, v = tensors
        gradient = x * norm + g
        scale = (count > 0.0).where(count.like(beta), count.like(1.0)).cast(x.dtype)
        velocity = v * alpha + scale * gradient
        return [x - rate.cast(x.dtype) * (gradient + velocity * alpha if is_nesterov else velocity), velocity]

    return _optimized(node, 3, update)


def _optimized(node: ir.Node, kinds: int, update: Update) -> ir.Function:
    """The body that updates each tensor by itself."""
    body, count = Body(node), (len(node.inputs) - 2) // kinds
    numbers = [Number(body, body.input(at), dtype_of(value).numpy().name) for at, value in enumerate(node.inputs)]
    rate, step = (number.cast("float64") for number in numbers[:2])
    updated = [update(rate, step, numbers[2 + at :: count]) for at in range(count)]
    return body.function(*(one.value for kind in zip(*updated, strict=True) for one in kind))


def _float(node: ir.Node, name: str, default: float) -> float:
    return node.attributes.get_float(name, default)
