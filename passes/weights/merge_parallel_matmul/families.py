"""Products of one left operand by constants, and what follows each: the branches that may become one product."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

import onnx_ir as ir

from ....compiler.ir.aliases import is_view
from ....compiler.ir.constants import constant_array, constant_tensor
from ....compiler.ir.kinds import is_pointwise
from ....compiler.ir.matching import input_at, static_shape
from ....compiler.ir.rewriter import Rejection

_PRODUCTS = ("Conv", "Gemm", "MatMul")
_MAX_FOLLOWERS = 8  # pointwise nodes that branches may have in common


@dataclass(frozen=True, slots=True)
class Branch:
    """A product, the Add of its bias where that follows it, and pointwise nodes that its neighbours have too, in order."""

    nodes: tuple[ir.Node, ...]
    bias: ir.Value | None  # a constant with one element for each of the product's columns or channels

    @property
    def product(self) -> ir.Node:
        return self.nodes[0]

    @property
    def weight(self) -> ir.Value:
        weight = self.product.inputs[1]
        assert weight is not None
        return weight

    @property
    def result(self) -> ir.Value:
        return self.nodes[-1].outputs[0]


@dataclass(frozen=True, slots=True)
class Family:
    """Branches from one operand whose products have the same attributes, in order of the graph.

    `columns_axis` is the dimension of each weight that counts its columns or channels, `axis` that of each result.
    `followers` counts the pointwise nodes at the end of every branch, which are the same in all of them.
    """

    branches: tuple[Branch, ...]
    columns_axis: int
    axis: int
    followers: int = 0

    @property
    def source(self) -> ir.Value:
        source = self.branches[0].product.inputs[0]
        assert source is not None
        return source

    @property
    def is_contiguous(self) -> bool:
        """Whether the parts of the merged result are contiguous, so that a Split of it costs nothing."""
        shape = static_shape(self.branches[0].result)
        return shape is not None and prod(shape[: self.axis]) == 1 and not any(_reaches_caller(b.result) for b in self.branches)


def find_families(graph: ir.Graph) -> tuple[list[Family], list[Rejection]]:
    """Products that share their left operand, two at least together, and why others do not fit those."""
    by_source: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in graph:
        source = node.inputs[0] if node.inputs else None
        if node.op_type in _PRODUCTS and node.domain == "" and source is not None:
            by_source[source].append(node)
    families, rejections = [], []
    for products in by_source.values():
        if len(products) < 2:
            continue
        faults = {node: fault for node in products if (fault := _obstacle(node)) is not None}
        fitting: dict[object, list[ir.Node]] = defaultdict(list)
        for node in products:
            if node not in faults:
                fitting[_settings(node)].append(node)
        rejections += [
            Rejection(f"{node.op_type} not merged with its neighbours: {fault}", (node,))
            for node, fault in faults.items()
            if fault
        ]
        if len(fitting) > 1:
            singles = [nodes[0] for nodes in fitting.values() if len(nodes) == 1]
            text = "not merged with its neighbours: its attributes differ from theirs"
            rejections += [Rejection(f"{node.op_type} {text}", (node,)) for node in singles]
        families += [_family(nodes) for nodes in fitting.values() if len(nodes) > 1]
    return families, rejections


def with_followers(family: Family) -> Family:
    """The family with the pointwise nodes of one operand that follow in every branch, each the only reader of its value."""
    while family.followers < _MAX_FOLLOWERS:
        readers = [_only_reader(branch.result) for branch in family.branches]
        following = [reader for reader in readers if reader is not None and _is_unary(reader)]
        if len(following) < len(readers) or len({_pointwise_settings(node) for node in following}) > 1:
            break
        if any(node.inputs[0] is not branch.result for node, branch in zip(following, family.branches, strict=True)):
            break
        branches = [replace(b, nodes=(*b.nodes, node)) for b, node in zip(family.branches, following, strict=True)]
        family = replace(family, branches=tuple(branches), followers=family.followers + 1)
    return family


def _family(products: Iterable[ir.Node]) -> Family:
    branches = tuple(_branch(node) for node in products)
    product = branches[0].product
    weight, result = static_shape(branches[0].weight), static_shape(product.outputs[0])
    assert weight is not None
    assert result is not None
    if product.op_type == "Conv":
        return Family(branches, 0, 1)
    transposed = product.op_type == "Gemm" and product.attributes.get_int("transB", 0) == 1
    return Family(branches, 0 if transposed else 1, len(result) - 1)


def _branch(product: ir.Node) -> Branch:
    if product.op_type != "MatMul":
        return Branch((product,), input_at(product, 2))
    reader = _only_reader(product.outputs[0])
    shape = static_shape(product.outputs[0])
    if reader is None or reader.op_type != "Add" or reader.domain != "" or shape is None:
        return Branch((product,), None)
    bias = next((value for value in reader.inputs if value is not product.outputs[0]), None)
    fits = bias is not None and _is_bias(bias, shape[-1]) and len(bias.shape or ()) <= len(shape)
    return Branch((product, reader), bias) if fits else Branch((product,), None)


def _obstacle(node: ir.Node) -> str | None:
    """Why a product cannot be merged with any other, "" where nobody would expect it; None if it can."""
    weight, result = node.inputs[1], static_shape(node.outputs[0])
    shape = static_shape(weight)
    if weight is None or shape is None or result is None or static_shape(node.inputs[0]) is None:
        return "its shapes are not static"
    if node.op_type == "Conv" and prod(shape[2:]) > 1:
        return ""
    if constant_tensor(weight) is None or not weight.is_initializer():
        return f"%{weight.name} is not constant"
    if node.op_type == "Conv" and node.attributes.get_int("group", 1) != 1:
        return "it has groups"
    if node.op_type == "MatMul" and len(shape) != 2:
        return f"%{weight.name} is no matrix"
    if 0 in result:
        return ""
    bias = input_at(node, 2) if node.op_type != "MatMul" else None
    if bias is not None and not _is_bias(bias, result[1]):
        return f"%{bias.name} is not a constant for each of its columns"
    return None


def _is_bias(value: ir.Value, columns: int) -> bool:
    """Whether a constant has one element for each column and no other."""
    shape = static_shape(value)
    return shape is not None and shape[-1:] == (columns,) == (prod(shape),) and value.is_initializer() and _is_constant(value)


def _is_constant(value: ir.Value) -> bool:
    return constant_tensor(value) is not None


def _settings(node: ir.Node) -> object:
    """Equal for products that one product can compute."""
    attributes = node.attributes
    if node.op_type == "MatMul":
        return "MatMul"
    if node.op_type == "Gemm":
        numbers = [attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
        return ("Gemm", *numbers, *(attributes.get_int(name, 0) for name in ("transA", "transB")))
    rank = len(node.outputs[0].shape or ()) - 2
    strides, pads = attributes.get_ints("strides") or (1,) * rank, attributes.get_ints("pads") or (0,) * 2 * rank
    return ("Conv", tuple(strides), tuple(pads), attributes.get_string("auto_pad", "NOTSET"))


def _only_reader(value: ir.Value) -> ir.Node | None:
    """The node that alone reads a value, once, in its own graph."""
    producer, uses = value.producer(), tuple(value.uses())
    if len(uses) != 1 or value.is_graph_output() or producer is None or uses[0][0].graph is not producer.graph:
        return None
    return uses[0][0]


def _is_unary(node: ir.Node) -> bool:
    """Whether a pointwise node has one operand that is no constant of one element."""
    others = [value for value in node.inputs[1:] if value is not None]
    return is_pointwise(node) and all(value.is_initializer() and _scalar_key(value) is not None for value in others)


def _pointwise_settings(node: ir.Node) -> object:
    attributes = tuple(sorted((name, repr(attribute.value)) for name, attribute in node.attributes.items()))
    others = tuple(None if value is None else _scalar_key(value) for value in node.inputs[1:])
    return (node.op_type, node.domain, attributes, others)


def _scalar_key(value: ir.Value) -> object:
    """What a constant of one element is, with its type; None for any other value."""
    tensor = constant_tensor(value)
    array = None if tensor is None or tensor.size != 1 else constant_array(value)
    return None if array is None or array.ndim > 1 else (str(array.dtype), array.tobytes())


def _reaches_caller(value: ir.Value) -> bool:
    """Whether a value, or a view of it, is an output of the graph."""
    pending = [value]
    while pending:
        shown = pending.pop()
        if shown.is_graph_output():
            return True
        pending += [reader.outputs[0] for reader in shown.consumers() if is_view(reader)]
    return False
