"""Models written as ONNX text."""

from __future__ import annotations

import onnx_ir as ir
import prefuse
from prefuse.compiler.ir.facts import infer_facts
from prefuse.runtime.executor import CompiledModel


def read(text: str, opset: int = 21) -> ir.Model:
    """The model whose graph a text is, with facts."""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": {opset}]>\n{text}')
    infer_facts(model)
    return model


def compiled(text: str) -> CompiledModel:
    """The program of the model whose graph a text is."""
    net = prefuse.compile(ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 21]> {text}'), cache=False)
    assert isinstance(net, CompiledModel)
    return net
