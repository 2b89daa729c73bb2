"""From a graph's nodes to the groups that kernel templates take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ...kernels.formats.format import SMALL_PAIRS, Storage
from ...kernels.groups.configuration import KEPT_TEMPLATE
from ...kernels.groups.group import Group, Op
from ...runtime.precision import Precision
from ...runtime.target import VNNI, Target
from ..ir.aliases import whole_of
from ..ir.assignments.kept_template import kept_template
from ..ir.assignments.node_precision import most_exact, precision_in
from ..ir.assignments.pairs import keeps_pairs
from ..ir.bounds import Bounded, bounded_of, trim_of
from ..ir.constants import constant_tensor
from ..ir.facts import tensor_type
from ..ir.functions import body_of, is_fused, metadata_of
from ..ir.kinds import Kind, kind_of
from ..ir.shared_weights import PANELS, has_shared_weights
from ..ir.states import state_inputs
from ..ir.stored_weights import PRODUCTS, ROW_BITS
from ..ir.symbolic.symbols import constant_sizes
from .product_chains import precise_products
from .residual_branches import convolutions_on_branches

_LITERAL_ELEMENTS = 64  # integer constants up to this size are parameters: axes, pads, permutations, steps

_PAIRS = "prefuse.pairs"
_SHAPED_BY_FLOATS = frozenset(["Resize"])


@dataclass(slots=True)
class GroupReader:
    """The groups of one graph's nodes, with what the whole graph, as it was when this was made, says of each.

    Nodes that are new since then keep `precision`, or what their metadata say, and are on no branch.
    """

    model: ir.Model
    target: Target
    precision: Precision
    precise: Mapping[ir.Node, Precision] = field(init=False)
    on_branches: frozenset[ir.Node] = field(init=False)
    states: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.precise = precise_products(self.model, self.target, self.precision)
        self.on_branches = convolutions_on_branches(self.model)
        self.states = state_inputs(self.model)

    def group_of(self, node: ir.Node) -> Group:
        """The group of a node, with its precision and its place.

        Raises:
            InvalidModelError: a value has no static type.
        """
        precision = _precision_of(self.model, node, self.precise.get(node, self.precision))
        found = group_of(self.model, node)
        return replace(
            found,
            formats=self._formats(found, node),
            precision=precision,
            is_on_branch=node in self.on_branches,
            shares_weights=has_shared_weights(self.model),
            updates_state=self._reads_state(node),
        )

    def _reads_state(self, node: ir.Node) -> bool:
        """Whether an operand is a state or a part of one."""
        return bool(self.states) and any(whole_of(value).name in self.states for value in node.inputs if value is not None)

    def _formats(self, group: Group, node: ir.Node) -> dict[str, Storage]:
        """The storage of constant weights of int8 whose neighbours along k are small enough for the multiplication by pairs of
        bytes, on CPUs that have none for all."""
        if self.target.is_gpu or self.target.has(VNNI):
            return {}
        values = {str(value.name): value for value in node.inputs if value is not None}
        found: dict[str, Storage] = {}
        for op in group.ops:
            positions, axes = _weights_of(op)
            for name in [_widened(group, op.inputs[position]) for position in positions]:
                kind = group.types.get(name)
                if name in group.constants and kind is not None and kind.dtype == "int8" and len(kind.shape) > 1:
                    found |= {name: SMALL_PAIRS} if _keeps_pairs(values[name], axes) else {}
        return found


def _weights_of(op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which inputs of a product are weights, and along which of their dimensions kernels may put neighbours into one word."""
    if op.op_type in ("GRU", "LSTM", "RNN"):
        return (1, 2), (-1,)
    if op.op_type == "Gemm":
        return (1,), (-1,) if op.attribute("transB", 0) else (-2,)
    axes = {"MatMul": (-2,), "Conv": (1, -1)}.get(op.op_type, ())
    return ((1,), axes) if axes else ((), ())


def _widened(group: Group, name: str) -> str:
    """The value that a product's operand is made of by a change of type alone."""
    while (op := group.producers.get(name)) is not None and op.op_type in ("Cast", "DequantizeLinear"):
        name = op.inputs[0]
    return name


def _keeps_pairs(value: ir.Value, axes: tuple[int, ...]) -> bool:
    """Whether a constant's pairs are small enough. That is kept with the value, as many passes ask, and with the tensor that was
    looked at, as a value may get another one."""
    key, tensor = f"{_PAIRS}{axes}", constant_tensor(value)
    assert tensor is not None
    seen, known = value.meta.get(key, (None, False))
    if seen is not tensor:
        array = tensor.numpy()
        known = all(keeps_pairs(array, axis) for axis in axes)
        value.meta[key] = tensor, known
    return bool(known)


def _precision_of(model: ir.Model, node: ir.Node, program: Precision) -> Precision:
    """How exactly a kernel computes a node or a fused group: the most exact precision that is asked for of its products.

    What is beside products goes with them. Without products what the nodes say decides, else the program's precision.
    """
    assigned = [precision_in(metadata) for metadata in metadata_of(node)]
    if not any(assigned):
        return program
    nodes = body_of(model, node) if is_fused(node) else (node,)
    products = [found or program for one, found in zip(nodes, assigned, strict=True) if kind_of(one) is Kind.OUTPUT_FUSABLE]
    return most_exact(products or assigned) or program


def group_of(model: ir.Model, node: ir.Node) -> Group:
    """The group of a node: the body of a fused call, or the operator alone.

    Values keep the names that they have outside; inner values of a call get names of their own. A bounded call is its operator
    alone, with results of the largest size, and the size that a run finds after them, as an int64[1]. Its attribute "padded" says
    that zeros must stand behind what is found, because somebody reads them; else nobody looks there.

    Raises:
        InvalidModelError: a value has no static type.
    """
    if not is_fused(node):
        return _group(model, (node,), node, {})
    if (bounded := bounded_of(model, node)) is not None:
        return _bounded_group(model, node, bounded)
    body = body_of(model, node)
    names: dict[ir.Value, str] = {}
    for inner, outer in zip(body.inputs, node.inputs, strict=False):
        if outer is not None:
            names[inner] = str(outer.name)
    for inner, outer in zip(body.outputs, node.outputs, strict=True):
        names[inner] = str(outer.name)
    dots = "."
    while any(name.startswith(dots) for name in names.values()):
        dots += "."
    for number, value in enumerate(value for child in body for value in child.outputs if value.name):
        names.setdefault(value, f"{dots}{number}")
    return _group(model, tuple(body), node, names)


def _bounded_group(model: ir.Model, node: ir.Node, bounded: Bounded) -> Group:
    operator, body = bounded.operator, body_of(model, node)
    names = {inner: str(outer.name) for inner, outer in zip(body.inputs, node.inputs, strict=True) if outer is not None}
    inputs = tuple("" if value is None else names[value] for value in operator.inputs)
    results = (*bounded.results, bounded.count)
    outputs = tuple("" if position is None else str(node.outputs[position].name) for position in results)
    types = {str(value.name): tensor_type(value) for value in (*node.inputs, *node.outputs) if value is not None}
    literals, constants = _literals(node)
    padded = any(trim_of(model, reader) is None for value in node.outputs for reader in value.consumers())
    attributes = {**dict(_attributes(operator)), "padded": int(padded)}
    op = Op(operator.op_type, inputs, outputs, attributes, _version(model, operator))
    return Group((op,), tuple(names.values()), tuple(str(value.name) for value in node.outputs), types, constants, literals)


def _group(model: ir.Model, nodes: tuple[ir.Node, ...], call: ir.Node, names: dict[ir.Value, str]) -> Group:
    def name(value: ir.Value | None) -> str:
        return "" if value is None else names.get(value, str(value.name))

    types = {str(v.name): tensor_type(v) for v in (*call.inputs, *call.outputs) if v is not None and v.name}
    types |= {
        name(value): tensor_type(value) for node in nodes for value in node.outputs if value.name and name(value) not in types
    }
    literals, constants = _literals(call)
    literals |= _shaping_floats(call, nodes, name)
    ops = []
    for node, metadata in zip(nodes, metadata_of(call), strict=True):
        if node.op_type == "Constant" and node.domain == "":
            array = constant_tensor(node.outputs[0])
            assert array is not None
            literals[name(node.outputs[0])] = array.numpy()
            continue
        inputs = tuple(name(value) for value in node.inputs)
        outputs = tuple(name(value) for value in node.outputs)
        attributes = dict(_attributes(node)) | _row_bits(metadata) | _panels(node, metadata) | _template(node, metadata)
        ops.append(Op(node.op_type, inputs, outputs, attributes, _version(model, node)))
    inputs = tuple(dict.fromkeys(str(v.name) for v in call.inputs if v is not None))
    return Group(tuple(ops), inputs, tuple(str(v.name) for v in call.outputs if v.name), types, constants, literals)


def _row_bits(metadata: Mapping[str, str]) -> dict[str, int]:
    """The attribute that tells kernels how far they may round the rows of a product, where a user allowed it."""
    return {ROW_BITS: int(metadata[ROW_BITS])} if metadata.get(ROW_BITS, "").isdecimal() else {}


def _panels(node: ir.Node, metadata: Mapping[str, str]) -> dict[str, int]:
    """The attribute that tells kernels that a table lies in panels."""
    return {PANELS: int(metadata[PANELS])} if node.op_type == "Gather" and PANELS in metadata else {}


def _template(node: ir.Node, metadata: Mapping[str, str]) -> dict[str, str]:
    """The attribute that tells which template computes a product, whatever is cheaper."""
    template = kept_template(metadata) if node.op_type in PRODUCTS and node.domain == "" else None
    return {} if template is None else {KEPT_TEMPLATE: template}


def _literals(call: ir.Node) -> tuple[dict[str, np.ndarray], frozenset[str]]:
    """Values of the small constants that a node reads, and the names of all its constants."""
    literals: dict[str, np.ndarray] = {}
    constants: set[str] = set()
    for value in call.inputs:
        tensor = None if value is None else constant_tensor(value)
        if value is not None and (sizes := constant_sizes(value)) is not None:
            literals[str(value.name)] = sizes
        if value is None or tensor is None:
            continue
        constants.add(str(value.name))
        if tensor.size == 1 or (tensor.size <= _LITERAL_ELEMENTS and tensor.dtype in (ir.DataType.INT64, ir.DataType.INT32)):
            literals[str(value.name)] = tensor.numpy()
    return literals, frozenset(constants)


def _shaping_floats(call: ir.Node, nodes: tuple[ir.Node, ...], name: Callable[[ir.Value | None], str]) -> dict[str, np.ndarray]:
    """Values of the constant floating point operands that say where a result's elements come from."""
    wanted = {name(value) for node in nodes for value in node.inputs[1:] if node.op_type in _SHAPED_BY_FLOATS}
    tensors = {str(value.name): constant_tensor(value) for value in call.inputs if value is not None and value.name in wanted}
    return {one: tensor.numpy() for one, tensor in tensors.items() if tensor is not None}


def _attributes(node: ir.Node) -> Iterator[tuple[str, Any]]:
    for attribute in node.attributes.values():
        value = attribute.value
        if isinstance(value, ir.TensorProtocol):
            value = value.numpy()
        elif isinstance(value, list | tuple):
            value = tuple(value)
        yield attribute.name, value


def _version(model: ir.Model, node: ir.Node) -> int:
    return node.version or model.opset_imports.get(node.domain, 0)
