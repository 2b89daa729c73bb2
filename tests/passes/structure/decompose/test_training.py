"""The optimizers of ai.onnx.preview.training, against their pseudo code in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import prefuse
import pytest
from prefuse.runtime.errors import UnsupportedModelError

from .expanding import compiled, evaluate, expanded, one_node

_DOMAIN = "ai.onnx.preview.training"
_SHAPES = ((3, 4), (5,))
State = list[np.ndarray]


def _adagrad(rate: float, t: int, x: np.ndarray, g: np.ndarray, h: np.ndarray) -> State:
    g = 0.01 * x + g
    h = h + g * g
    return [x - rate / (1 + t * 0.1) * g / (np.sqrt(h) + 1e-3), h]


def _adam(rate: float, t: int, x: np.ndarray, g: np.ndarray, v: np.ndarray, h: np.ndarray) -> State:
    g = 0.01 * x + g
    v, h = 0.8 * v + 0.2 * g, 0.95 * h + 0.05 * g * g
    r = rate * np.sqrt(1 - 0.95**t) / (1 - 0.8**t) if t > 0 else rate
    return [(1 - 0.02) * (x - r * v / (np.sqrt(h) + 1e-3)), v, h]


def _momentum(nesterov: bool) -> Callable[..., State]:
    def update(rate: float, t: int, x: np.ndarray, g: np.ndarray, v: np.ndarray) -> State:
        g = 0.01 * x + g
        v = 0.9 * v + (0.5 if t > 0 else 1.0) * g
        return [x - rate * (g + 0.9 * v if nesterov else v), v]

    return update


_MOMENTUM = {"alpha": 0.9, "beta": 0.5, "norm_coefficient": 0.01}
_ADAM = {"alpha": 0.8, "beta": 0.95, "epsilon": 1e-3, "norm_coefficient": 0.01, "norm_coefficient_post": 0.02}
CASES: dict[str, tuple[str, int, Callable[..., State], dict[str, Any]]] = {
    "adagrad": ("Adagrad", 3, _adagrad, {"norm_coefficient": 0.01, "decay_factor": 0.1, "epsilon": 1e-3}),
    "adam": ("Adam", 4, _adam, _ADAM),
    "momentum": ("Momentum", 3, _momentum(False), {"mode": "standard", **_MOMENTUM}),
    "nesterov": ("Momentum", 3, _momentum(True), {"mode": "nesterov", **_MOMENTUM}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_two_tensors_at_once(name: str, step: int, dtype: type) -> None:
    op_type, kinds, update, attributes = CASES[name]
    generator = np.random.default_rng(0)
    tensors: list[State] = [[generator.random(shape).astype(dtype) for shape in _SHAPES] for _ in range(kinds)]
    inputs = {"r": np.array(0.1, dtype), "t": np.array(step, np.int64)}
    inputs |= {f"x{kind}{n}": array for kind, row in enumerate(tensors) for n, array in enumerate(row)}
    outputs = (kinds - 1) * len(_SHAPES)
    model = one_node(op_type, inputs, outputs, domain=_DOMAIN, **attributes)
    found = evaluate(expanded(model), inputs)
    exact = [update(float(inputs["r"]), step, *(row[n].astype(np.float64) for row in tensors)) for n in range(len(_SHAPES))]
    for a, b in zip(found, [one for kind in zip(*exact, strict=True) for one in kind], strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(a, b, rtol=1e-5)  # attributes are float32 numbers
    if name == "adam" and dtype == np.float32:
        for a, b in zip(compiled(model, *inputs.values()), found, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_gradient_is_refused() -> None:
    inputs = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    model = one_node("Gradient", inputs, domain=_DOMAIN, xs=["a", "b"], y="c")
    with pytest.raises(UnsupportedModelError, match="export the gradient's own operators"):
        prefuse.compile(model, cache=False)
