"""One dialect for everything behind the frontend.

After `normalize` a model has opset 18 or newer, no operators of com.microsoft but those that are refused, no model-local
functions, except our own where somebody asks for them, no initializer that is also an input, states excepted, and outputs that
are distinct values, each made by a node of the same graph.
"""

from __future__ import annotations

from itertools import chain

import onnx
import onnx_ir as ir

from ...runtime.errors import UnsupportedModelError
from ..ir.facts import set_constant_facts
from ..ir.names import fresh_name
from ..ir.scopes import subgraphs_of
from ..ir.states import state_inputs
from .contrib.rewrite import needed_opset, rewrite_contrib
from .inlining import inline_functions
from .metadata import check_metadata
from .old_operators import respell_after_conversion, respell_before_conversion
from .string_labels import number_labels

OLDEST_OPSET, DIALECT_OPSET = 1, 18
_FREE_INITIALIZERS_IR = 4  # the first file format whose initializers need not be inputs too; the converter looks there
_LARGEST_KEPT_BYTES = 1024  # constants that ONNX's converter may have to see: axes, shapes, scales
_ANY_SIZE = ("", "?", "-1", "None", "unknown")  # names of dimensions


def normalize(model: ir.Model, where: str, *, keeps_groups: bool = False) -> ir.Model:
    """Bring a model, which may be changed, into the dialect; `where` names it in errors.

    Args:
        keeps_groups: leave fused groups that a file has, and what passes say in it. Nothing that a stranger wrote may be
            compiled so: their shapes are believed.

    Raises:
        InvalidModelError: it has no ONNX opset, or functions that call each other in a circle.
        UnsupportedModelError: its opset is newer than the installed onnx knows, or it cannot be upgraded.
    """
    _import_default_domain(model, where)
    check_metadata(model, where, keeps_groups=keeps_groups)
    inline_functions(model, where, keeps_groups=keeps_groups)
    kept = state_inputs(model)
    for value in [value for value in model.graph.inputs if value.is_initializer() and value.name not in kept]:
        model.graph.inputs.remove(value)
    _forget_unknown_dimensions(model)
    opset = model.graph.opset_imports[""]
    needed = needed_opset(model)
    oldest = max(DIALECT_OPSET, needed or 0)
    if opset < oldest:
        respell_before_conversion(model, oldest)
        model = _upgrade(model, oldest, where)
        respell_after_conversion(model, opset, where)
    if needed is not None:
        rewrite_contrib(model)
    number_labels(model)
    _name_parts(model)
    _separate_outputs(model.graph, model.graph)
    return model


def _import_default_domain(model: ir.Model, where: str) -> None:
    """Spell the default domain one way, and check its version."""
    imports = model.graph.opset_imports
    if "ai.onnx" in imports:
        imports[""] = imports.pop("ai.onnx")
    for function in model.functions.values():
        if "ai.onnx" in function.opset_imports:
            function.opset_imports[""] = function.opset_imports.pop("ai.onnx")
    for node in chain(model.graph.all_nodes(), *(function.all_nodes() for function in model.functions.values())):
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


def _forget_unknown_dimensions(model: ir.Model) -> None:
    """Make dimensions unknown that say no more: those below zero, and names that mean any size (Paddle's exporter writes both).

    Two inputs need not agree on such a name.
    """
    nodes = list(model.graph.all_nodes())
    results = (value for node in nodes for value in node.outputs)
    parameters = (value for node in nodes for graph in subgraphs_of(node) for value in graph.inputs)
    for value in chain(model.graph.inputs, parameters, results):
        if value.shape is not None and any(map(_says_nothing, value.shape)):
            value.shape = ir.Shape([None if _says_nothing(dim) else dim for dim in value.shape])


def _says_nothing(dim: int | ir.SymbolicDim) -> bool:
    return dim < 0 if isinstance(dim, int) else dim.value is not None and dim.value.strip() in _ANY_SIZE


def _upgrade(model: ir.Model, opset: int, where: str) -> ir.Model:
    """Convert an older opset to this one with ONNX's own converter, which gets to see small constants only."""
    metadata = {str(node.outputs[0].name): dict(node.metadata_props) for node in model.graph.all_nodes() if node.outputs}
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
        set_constant_facts(value)
        model.graph.inputs.append(value)
        value.const_value = None
    try:
        proto = onnx.version_converter.convert_version(ir.to_proto(model), opset)
    except Exception as error:  # ConvertError, RuntimeError and what its adapters raise
        version = model.graph.opset_imports[""]
        raise UnsupportedModelError(
            where, f"opset {version} cannot be upgraded: {error}", f"export it with opset {opset} or newer"
        ) from error
    upgraded = ir.from_proto(proto)
    upgraded.meta.update(model.meta)
    upgraded.metadata_props.update(model.metadata_props)
    declared: dict[str | None, ir.Shape | None] = {}
    for value in (value for node in model.graph.all_nodes() for value in node.outputs):
        is_one = value.shape == declared.setdefault(value.name, value.shape)  # branches may have values of one name
        declared[value.name] = value.shape if is_one else None
    for node in upgraded.graph.all_nodes():
        for value in node.outputs:  # what the converter's own inference adds is not always right
            value.shape = declared.get(value.name)
        if node.outputs:
            node.metadata_props.update(metadata.get(str(node.outputs[0].name), {}))  # which the converter drops
    for value in [value for value in upgraded.graph.inputs if value.name in large]:
        upgraded.graph.inputs.remove(value)
        value.const_value = large[str(value.name)]
        upgraded.graph.register_initializer(value)
    return upgraded


def _name_parts(model: ir.Model) -> None:
    """Give all parts of a Split names: where one is left out, the next does not begin in its place."""
    for node in model.graph.all_nodes():
        if node.op_type == "Split" and node.domain == "":
            for part in node.outputs:
                if not part.name:
                    part.name = fresh_name(model, "unread_part")


def _separate_outputs(main: ir.Graph, graph: ir.Graph) -> None:
    """Give each output a value of its own, made by a node: no input, constant or other output stands there itself.

    In the subgraphs too, whose outputs may not be values of the graphs around them either. `main` knows all names.
    """
    seen: set[ir.Value] = set()
    for index, value in enumerate(graph.outputs):
        producer = value.producer()
        if producer is None or producer.graph is not graph or value in seen:
            name = fresh_name(main, f"{value.name}_output")
            node = ir.Node("", "Identity", [value], outputs=[ir.Value(name=name, shape=value.shape, type=value.type)], name=name)
            graph.append(node)
            graph.outputs[index] = node.outputs[0]
        seen.add(value)
    for node in graph:
        for subgraph in subgraphs_of(node):
            _separate_outputs(main, subgraph)
