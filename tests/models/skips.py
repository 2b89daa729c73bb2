"""A chain of products whose early results are used again at its end, as those of a U-Net are: what leaves memory meanwhile."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

DEPTH, ROWS, COLUMNS = 5, 1024, 64


def skip_chain(depth: int = DEPTH, rows: int = ROWS, columns: int = COLUMNS) -> ir.Model:
    """r0 = relu(x W0), ... up to `depth` of them; then s = s U + r in reverse, seeded. Activations are most of what it takes."""
    rng = np.random.default_rng(7)
    lines, weights, value = list[str](), dict[str, np.ndarray](), "x"

    def product(name: str, weight: str) -> str:
        weights[weight] = np.float32(columns**-0.5) * rng.standard_normal((columns, columns), np.float32)
        return f"{name} = MatMul({value}, {weight})"

    for index in range(depth):
        lines += [product(f"p{index}", f"w{index}"), f"r{index} = Relu(p{index})"]
        value = f"r{index}"
    for index in reversed(range(depth - 1)):
        lines += [product(f"q{index}", f"u{index}"), f"s{index} = Add(q{index}, r{index})"]
        value = f"s{index}"
    kind = f"float[{rows},{columns}]"
    text = f'<ir_version: 8, opset_import: ["": 18]> skips ({kind} x) => ({kind} {value}) {{ ' + "\n".join(lines) + "}"
    model = ir.from_onnx_text(text, initializers=[ir.tensor(array, name=name) for name, array in weights.items()])
    assert isinstance(model, ir.Model)
    return model


def skip_input(seed: int = 8, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
