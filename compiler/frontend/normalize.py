"""One dialect for everything behind the frontend.

After `normalize` a model has opset 18 or newer, no model-local functions except our own, no initializer that is also an input,
and outputs that are distinct values, each made by a node.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

from ...runtime.errors import InvalidModelError, UnsupportedModelError
from ..ir.constants import add_constant
from ..ir.facts import infer_facts
from ..ir.names import fresh_name

OLDEST_OPSET, DIALECT_OPSET = 1, 18
_OUR_DOMAIN = "prefuse"
_NUMPY_SLOPES_OPSET = 7  # from here on the slopes of PRelu broadcast as NumPy does
_FREE_INITIALIZERS_IR = 4  # the first file format whose initializers need not be inputs too; the converter looks there
_LARGEST_KEPT_BYTES = 1024  # constants that ONNX's converter may have to see: axes, shapes, scales


def normalize(model: ir.Model, where: str) -> ir.Model:
    """Bring a model, which may be changed, into the dialect; `where` names it in errors.

    Raises:
        InvalidModelError: it has no ONNX opset, or functions that call each other in a circle.
        UnsupportedModelError: its opset is newer than the installed onnx knows, or it cannot be upgraded.
    """
    _import_default_domain(model, where)
    if any(function.domain != _OUR_DOMAIN for function in model.functions.values()):
        _inline_functions(model, where)
    for value in [value for value in model.graph.inputs if value.is_initializer()]:
        model.graph.inputs.remove(value)
    opset = model.graph.opset_imports[""]
    if opset < DIALECT_OPSET:
        model = _upgrade(model, where)
    if opset < _NUMPY_SLOPES_OPSET:
        _spread_slopes(model, where)
    _separate_outputs(model.graph)
    return model


def _import_default_domain(model: ir.Model, where: str) -> None:
    """Spell the default domain one way, and check its version."""
    imports = model.graph.opset_imports
    if "ai.onnx" in imports:
        imports[""] = imports.pop("ai.onnx")
    for node in model.graph.all_nodes():
        if node.domain == "ai.onnx":
            node.domain = ""
    newest = onnx.defs.onnx_opset_version()
    version = imports.setdefault("", newest)
    if not OLDEST_OPSET <= version <= newest:
        raise UnsupportedModelError(
            where,
            f"opset {version}",
            f"export it with an opset between {OLDEST_OPSET} and {newest}, the newest that onnx {onnx.__version__} knows",
        )


def _inline_functions(model: ir.Model, where: str) -> None:
    try:
        InlinePass(criteria=lambda function: function.domain != _OUR_DOMAIN)(model)
    except (ir.passes.PreconditionError, ir.passes.PassError) as error:
        raise InvalidModelError(
            where, f"its functions cannot be inlined: {error.__cause__ or error}", "correct the model"
        ) from error
    for identifier in [name for name in model.functions if name[0] != _OUR_DOMAIN]:
        del model.functions[identifier]


def _upgrade(model: ir.Model, where: str) -> ir.Model:
    """Convert an old opset to the dialect's with ONNX's own converter, which gets to see small constants only."""
    large = {
        name: value.const_value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes > _LARGEST_KEPT_BYTES
    }
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor) and value.name not in large:  # the converter reads no files
            value.const_value = ir.tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=value.name)
    model.ir_version = max(model.ir_version or 0, _FREE_INITIALIZERS_IR)
    for name in large:
        value = model.graph.initializers.pop(name)
        model.graph.inputs.append(value)
        value.const_value = None
    try:
        proto = onnx.version_converter.convert_version(ir.to_proto(model), DIALECT_OPSET)
    except Exception as error:  # ConvertError, RuntimeError and what its adapters raise
        version = model.graph.opset_imports[""]
        raise UnsupportedModelError(
            where, f"opset {version} cannot be upgraded: {error}", f"export it with opset {DIALECT_OPSET} or newer"
        ) from error
    upgraded = ir.from_proto(proto)
    upgraded.meta.update(model.meta)
    for value in [value for value in upgraded.graph.inputs if value.name in large]:
        upgraded.graph.inputs.remove(value)
        value.const_value = large[str(value.name)]
        upgraded.graph.register_initializer(value)
    return upgraded


def _spread_slopes(model: ir.Model, where: str) -> None:
    """Give the slopes of old PRelu nodes, one a channel, the channel's place, which ONNX's converter leaves undone."""
    nodes = [node for node in model.graph.all_nodes() if node.op_type == "PRelu" and node.domain == ""]
    if nodes:
        infer_facts(model)
    for node in nodes:
        data, slope = node.inputs[:2]
        if data is None or slope is None or data.shape is None or slope.shape is None:
            raise UnsupportedModelError(where, f"PRelu of opset 6 or older at {node.name} with unknown shapes", "export it anew")
        if len(slope.shape) != 1 or slope.shape[0] == 1 or len(data.shape) < 3:
            continue
        axes = add_constant(model, np.arange(1, len(data.shape) - 1), f"{slope.name}_axes")
        spread = ir.Node("", "Unsqueeze", [slope, axes], name=fresh_name(model, f"{slope.name}_spread"))
        spread.outputs[0].name = spread.name
        assert node.graph is not None
        node.graph.insert_before(node, spread)
        node.replace_input_with(1, spread.outputs[0])


def _separate_outputs(graph: ir.Graph) -> None:
    """Give each output a value of its own, made by a node: no input, constant or other output stands there itself."""
    seen: set[ir.Value] = set()
    for index, value in enumerate(graph.outputs):
        if value.producer() is None or value in seen:
            name = fresh_name(graph, f"{value.name}_output")
            node = ir.Node("", "Identity", [value], outputs=[ir.Value(name=name, shape=value.shape, type=value.type)], name=name)
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
        seen.add(value)
