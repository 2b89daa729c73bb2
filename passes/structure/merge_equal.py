"""merge-equal: what is computed or stored twice, once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import ClassVar

import numpy as np
import onnx
import onnx_ir as ir

from ...compiler.ir.assignments.node_precision import precision_in
from ...compiler.ir.constants import constant_array, contiguous
from ...compiler.ir.facts import schema_of
from ...compiler.ir.kinds import Kind, kind_of
from ...compiler.ir.rewriter import Rejection, replace_node
from ...compiler.ir.scopes import subgraphs_of
from ...compiler.ir.stored_weights import ROW_BITS
from ...compiler.ir.structure import attributes_key
from ...compiler.ir.symbolic.symbols import SizeTensor
from ...compiler.pipeline import Context, Pass
from .determinism import is_deterministic

_Seen = dict[Hashable, ir.Node]
_COMMUTATIVE = frozenset({"Add", "And", "Equal", "Mul", "Or", "Xor"})
_SAMPLE_BYTES = 256  # tensors are read whole only where the first bytes and the last are equal


@dataclass(frozen=True)
class MergeEqual(Pass):
    """Merge nodes with the same operator, inputs and attributes, and initializers with the same type and bytes.

    Before:  a = Exp(x);  b = Exp(x);  y = Add(a, b)
    After:   a = Exp(x);  y = Add(a, a)

    Legal when the operator is known to be deterministic. Nodes with subgraphs are not compared, but what their subgraphs
    compute is merged with equal nodes before them.
    """

    name: ClassVar[str] = "merge-equal"

    def run(self, model: ir.Model, context: Context) -> bool:
        changed = _merge_initializers(model.graph)
        return _Merge(model, context).visit(model.graph, ()) or changed


@dataclass(frozen=True, slots=True)
class _Merge:
    model: ir.Model
    context: Context

    def visit(self, graph: ir.Graph, outer: tuple[_Seen, ...]) -> bool:
        """Merge the nodes of a graph, with those of the graphs around it in reach."""
        changed = False
        seen: _Seen = {}
        for node in tuple(graph):
            subgraphs = tuple(subgraphs_of(node))
            for subgraph in subgraphs:
                changed |= self.visit(subgraph, (seen, *outer))
            if subgraphs or node.op_type == "Identity":  # an Identity is there to name an output
                continue
            if kind_of(node) is Kind.OPERAND:  # which the kernel of its reader does in its loads
                continue
            key = self._key(node)
            first = next((found for table in (seen, *outer) if (found := table.get(key))), None)
            if first is None:
                seen[key] = node
            elif is_deterministic(node, self.model):
                replace_node(self.model, node, (), [None if output.name == "" else output for output in first.outputs])
                changed = True
            else:
                self.context.reject(MergeEqual.name, Rejection(f"{node.op_type} not merged: it may be random", (node, first)))
        return changed

    def _key(self, node: ir.Node) -> Hashable:
        """Equal for nodes that compute the same, as exactly; an attribute at its default is as good as none."""
        schema = schema_of(node, self.model.graph.opset_imports)
        attributes = attributes_key(node)
        if schema is not None and node.attributes:
            defaults = _default_attributes(schema.name, schema.since_version, schema.domain)
            attributes = tuple(one for one in attributes if one not in defaults)
        inputs = frozenset(Counter(node.inputs).items()) if node.op_type in _COMMUTATIVE else node.inputs
        exactness = (precision_in(node.metadata_props), node.metadata_props.get(ROW_BITS))
        return node.op_identifier(), inputs, tuple(output.name == "" for output in node.outputs), attributes, exactness


@cache
def _default_attributes(op_type: str, version: int, domain: str) -> frozenset[Hashable]:
    """The attributes of an operator at their defaults, as `attributes_key` has them."""
    schema = onnx.defs.get_schema(op_type, version, domain)
    defaults = [
        one.default_value for one in schema.attributes.values() if one.default_value.type != onnx.AttributeProto.UNDEFINED
    ]
    return frozenset(attributes_key(ir.Node(domain, op_type, (), [ir.serde.deserialize_attribute(one) for one in defaults])))


def _merge_initializers(graph: ir.Graph) -> bool:
    """Make the readers of equal constants read the first of them."""
    changed = False
    candidates = [value for value in graph.initializers.values() if not value.is_graph_input() and not value.is_graph_output()]
    for alike in _groups(candidates, _type_key):
        for similar in _groups(alike, _sample_key):
            for first, *rest in _groups(similar, _content_key):
                for value in rest:
                    value.replace_all_uses_with(first)
                    del graph.initializers[str(value.name)]
                    changed = True
    return changed


def _groups(values: Iterable[ir.Value], key: Callable[[ir.Value], Hashable]) -> list[list[ir.Value]]:
    """Values with equal keys, in groups of two or more. A key of None is equal to no other."""
    groups: defaultdict[Hashable, list[ir.Value]] = defaultdict(list)
    for value in values:
        if (found := key(value)) is not None:
            groups[found].append(value)
    return [group for group in groups.values() if len(group) > 1]


def _type_key(value: ir.Value) -> Hashable:
    tensor = value.const_value
    is_array = tensor is not None and tensor.dtype != ir.DataType.STRING and not isinstance(tensor, SizeTensor)
    return None if tensor is None or not is_array else (tensor.dtype, tuple(tensor.shape))


def _sample_key(value: ir.Value) -> Hashable:
    array = constant_array(value)
    assert array is not None
    count = max(_SAMPLE_BYTES // array.itemsize, 1)
    return array.flat[:count].tobytes(), array.flat[-count:].tobytes()  # copies these elements alone, of transposed views too


def _content_key(value: ir.Value) -> Hashable:
    return blake2b(_bytes_of(value).data, digest_size=16).digest()


def _bytes_of(value: ir.Value) -> np.ndarray:
    """The content of a constant as bytes, without a copy where it is contiguous."""
    array = constant_array(value)
    assert array is not None
    return contiguous(array).reshape(-1).view(np.uint8)
