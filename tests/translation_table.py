"""torch's table of translations to ONNX, made once in a process."""

from __future__ import annotations

from functools import cache


@cache
def keep_translation_table() -> None:
    """From here on every export copies a table that is in memory.

    torch makes it anew at every export, from the sources of 500 functions: half the time that a small module takes.
    """
    from torch.onnx._internal.exporter._constants import TORCHLIB_OPSET
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    made = cache(ONNXRegistry.from_torchlib)

    def copied(opset_version: int = TORCHLIB_OPSET) -> ONNXRegistry:
        table, kept = ONNXRegistry(), made(opset_version)
        table._opset_version = kept._opset_version
        table.functions = {target: list(functions) for target, functions in kept.functions.items()}
        return table

    ONNXRegistry.from_torchlib = staticmethod(copied)  # type: ignore[method-assign]
