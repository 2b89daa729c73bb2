"""Quantize a model in several ways with typical inputs, compare errors and sizes, and keep what was compiled."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import prefuse
import torch
from torch import nn


def main() -> None:
    """A small net of random weights. For ONNX files `prefuse quantize` and `prefuse bits` keep within an error."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval()
    calibration = [torch.randn(32, 256) for _ in range(8)]  # inputs like those to come; some dozens of real ones
    x = torch.randn(32, 256)
    with torch.no_grad():
        expected = module(x).numpy()

    ways: dict[str, dict[str, Any]] = {
        "float32": {},
        "int8": {"precision": "int8", "calibration": calibration},  # ranges of tensors, from the data
        "int8-rows": {"precision": "int8-rows"},  # ranges of rows, found while it runs
        "weights in int8": {"weights": "int8"},  # products in float32, a quarter of the bytes
    }
    with TemporaryDirectory() as folder:
        for name, options in ways.items():
            path = Path(folder, f"{name}.prefuse")
            prefuse.compile(module, (x,), threads=1, **options).save(path)
            found = np.asarray(prefuse.load(path)(x))
            error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
            print(f"{name:15} error {error:.1e}, {path.stat().st_size / 1024:5.0f} KiB with code and weights")
            assert error < (1e-5 if name == "float32" else 0.1)


if __name__ == "__main__":
    main()
