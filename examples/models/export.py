"""PyTorch to an ONNX file, as the demo, the benchmarks and the tests of the models do it."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import torch
from torch import nn

from .spec import Inputs


def export_onnx(module: nn.Module, inputs: Inputs, path: Path) -> list[str]:
    """Write a module for these inputs to `path`, its weights in a file beside it; returns the names of the inputs.

    What torch's exporter has no form of, such as attention over five dimensions, is written as prefuse writes it.
    """
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns of packages that no model here needs
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own code
            try:
                program = torch.onnx.export(module, inputs, dynamo=True, optimize=False, verbose=False)
            except torch.onnx.OnnxExporterError:
                from ...compiler.frontend.torch_forms.operators import translations  # needs onnxscript, which few models do

                program = torch.onnx.export(
                    module, inputs, dynamo=True, optimize=False, verbose=False, custom_translation_table=translations()
                )
    finally:
        logger.setLevel(level)
    assert program is not None
    program.save(path, external_data=True)
    return [str(value.name) for value in program.model.graph.inputs]
