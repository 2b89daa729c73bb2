"""What tests share: torch's table of translations to ONNX."""

from __future__ import annotations

import sys
from functools import cache

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_table_of_translations() -> None:
    """torch makes the table anew at every export, from the sources of 500 functions: half the time that a small module takes."""
    if "torch" in sys.modules:
        _keep_table()


@cache
def _keep_table() -> None:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    made = cache(ONNXRegistry.from_torchlib)

    def copied(**options: int) -> ONNXRegistry:
        table, kept = ONNXRegistry(), made(**options)
        table._opset_version = kept._opset_version
        table.functions = {target: list(functions) for target, functions in kept.functions.items()}
        return table

    ONNXRegistry.from_torchlib = staticmethod(copied)  # type: ignore[assignment,method-assign]
