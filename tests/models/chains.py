"""A chain of matrix products whose weights are most of what it takes: what a memory limit is for."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

ROWS, COLUMNS, LINKS = 3, 256, 6


def product_chain(links: int = LINKS, columns: int = COLUMNS) -> ir.Model:
    """y = relu(... relu(x W0) ... Wn), seeded; the last weight is that of the first product too."""
    rng = np.random.default_rng(7)
    lines = []
    for index in range(links):
        source = "x" if index == 0 else f"h{index - 1}"
        lines += [f"p{index} = MatMul({source}, w{index % (links - 1)})", f"h{index} = Relu(p{index})"]
    text = (
        f"<ir_version: 8, opset_import: ['' : 18]> chain (float[{ROWS},{columns}] x) => (float[{ROWS},{columns}] h{links - 1}) "
    )
    text = text.replace("'", '"') + "{" + "\n".join(lines) + "}"
    scale = np.float32(columns**-0.5)
    weights = {f"w{index}": scale * rng.standard_normal((columns, columns), np.float32) for index in range(links - 1)}
    model = ir.from_onnx_text(text, initializers=[ir.tensor(array, name=name) for name, array in weights.items()])
    assert isinstance(model, ir.Model)
    return model


def chain_input(columns: int = COLUMNS) -> np.ndarray:
    return np.random.default_rng(8).standard_normal((ROWS, columns), np.float32)
