"""merge-parallel-matmul: products of one operand by several constants are one product by all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import add_constant, add_sizes, constant_array, constant_tensor, derived_tensor
from ....compiler.ir.facts import infer_node, tensor_type
from ....compiler.ir.names import fresh_name, release_name
from ....compiler.ir.rewriter import Rejection, copy_source, drop_unused_constants, graph_of, remove_nodes, replace_node
from ....compiler.ir.shared_weights import has_shared_weights
from ....compiler.pipeline import Context, Pass
from .families import Branch, Family, find_families, with_followers
from .worth import LAUNCH_BYTES, attention_groups, balance_of, branch_bytes, reading_attention

_SPLIT_INPUT_OPSET = 13  # from which on the sizes of Split are an input


@dataclass(frozen=True)
class MergeParallelMatmul(Pass):
    """Compute MatMuls, Gemms and ungrouped 1x1 convolutions of one operand as one, by their weights side by side.

    Before:  q = MatMul(x, wq);  a = Add(q, bq);  k = MatMul(x, wk);  b = Add(k, bk)
    After:   m = MatMul(x, wq|wk);  s = Add(m, bq|bk);  a, b = Split(s)

    Legal when the weights and biases are constants that nothing else reads, and the attributes are equal. Biases and pointwise
    nodes that follow in every branch are merged too. Worth it when the reads of the operand and the launches saved are more
    than what the readers of the parts pay: nothing where attention reads all parts through the Split or where the parts are
    contiguous; else a copy; and what the products' epilogues would have done comes in a kernel of its own.
    """

    name: ClassVar[str] = "merge-parallel-matmul"

    def run(self, model: ir.Model, context: Context) -> bool:
        if has_shared_weights(model):
            context.remark(self.name, "nothing merged: programs for other sizes read the weights, and might not merge them")
            return False
        families, rejections = find_families(model.graph)
        opset = model.opset_imports.get("", 1)
        groups = attention_groups(model.graph, opset) if families else {}
        chosen: list[Family] = []
        for part, is_read_through in [part for family in families for part in _by_attention(family, groups)]:
            found = _worthwhile(part, is_read_through)
            if isinstance(found, Rejection):
                rejections.append(found)
            else:
                chosen.append(found)
        products: dict[tuple[ir.Value, ...], set[ir.Node]] = defaultdict(set)  # by all the weights of their family
        for family in chosen:
            products[_weights(family)].update(branch.product for branch in family.branches)
        faults = [_shared_weight(family, products[_weights(family)]) for family in chosen]
        merged = [family for family, fault in zip(chosen, faults, strict=True) if fault is None]
        rejections += [fault for fault in faults if fault is not None]
        for rejection in rejections:
            context.reject(self.name, rejection)
        joined: dict[tuple[object, ...], ir.Value] = {}
        for family in merged:
            _merge(model, family, joined)
        return bool(merged)


def _by_attention(family: Family, groups: Mapping[ir.Node, int]) -> list[tuple[Family, bool]]:
    """The parts of a family that are judged apart, each with whether one attention reads all its results through a Split."""
    if family.is_contiguous:
        return [(with_followers(family), False)]
    by_reader: dict[int | None, list[Branch]] = defaultdict(list)
    for branch in family.branches:
        by_reader[reading_attention(branch.result, groups)].append(branch)
    parts = []
    for reader, branches in by_reader.items():
        if len(branches) > 1:
            part = replace(family, branches=tuple(branches))
            parts.append((part, True) if reader is not None else (with_followers(part), False))
    return parts


def _worthwhile(family: Family, is_read_through: bool) -> Family | Rejection:
    """The branches that gain from being merged, if all that is not more than offset."""
    source_bytes, is_contiguous = tensor_type(family.source).hinted.size_bytes, family.is_contiguous
    gain = source_bytes + LAUNCH_BYTES
    branches = [
        branch
        for branch in family.branches
        if branch_bytes(branch, is_read_through=is_read_through, is_contiguous=is_contiguous) < gain
    ]
    considered = branches if len(branches) > 1 else family.branches
    balance = balance_of(considered, source_bytes, is_read_through=is_read_through, is_contiguous=is_contiguous)
    if len(branches) > 1 and balance.is_worth_it:
        return replace(family, branches=tuple(branches))
    products = tuple(branch.product for branch in family.branches)
    return Rejection(f"{len(considered)} products of %{family.source.name} not merged: {balance}", products)


def _weights(family: Family) -> tuple[ir.Value, ...]:
    return tuple(branch.weight for branch in family.branches)


def _shared_weight(family: Family, products: Container[ir.Node]) -> Rejection | None:
    """Whether a large weight would exist twice, because somebody reads it besides `products`, merged with the same others."""
    for weight in _weights(family):
        others = [reader for reader in weight.consumers() if reader not in products]
        if others and tensor_type(weight).size_bytes > LAUNCH_BYTES:
            reason = f"products of %{family.source.name} not merged: %{weight.name} is also read by {others[0].op_type}"
            return Rejection(reason, tuple(branch.product for branch in family.branches))
    return None


def _merge(model: ir.Model, family: Family, joined: dict[tuple[object, ...], ir.Value]) -> None:
    """Put the merged product, what follows it, and a Split before the first branch, and take the branches out.

    `joined` has the constants that earlier families of the same weights joined.
    """
    first = family.branches[0]
    nodes = _merged_nodes(model, family, joined)
    for node in nodes:
        copy_source([one for branch in family.branches for one in branch.nodes], node)
        for output in node.outputs:
            output.name = fresh_name(model, f"{first.result.name}_merged")
    graph_of(first.product).insert_before(first.product, nodes)
    for node in nodes:
        infer_node(node, model)
    for branch, part in zip(family.branches, nodes[-1].outputs, strict=True):
        name, constants = branch.result.name, [value for node in branch.nodes for value in node.inputs]
        merged_name = str(part.name)
        replace_node(model, branch.nodes[-1], [], [part])
        remove_nodes(branch.nodes[:-1])
        part.name = name
        release_name(model, merged_name)
        drop_unused_constants(model, constants)


def _merged_nodes(model: ir.Model, family: Family, joined: dict[tuple[object, ...], ir.Value]) -> list[ir.Node]:
    first = family.branches[0]
    product = first.product
    columns = [tensor_type(branch.weight).shape[family.columns_axis] for branch in family.branches]
    weight = _joined(model, [branch.weight for branch in family.branches], family.columns_axis, joined)
    biases = [branch.bias for branch in family.branches]
    operands = [family.source, weight]
    bias = _joined_biases(model, biases, columns, joined) if any(one is not None for one in biases) else None
    if bias is not None and product.op_type != "MatMul":
        operands.append(bias)
    nodes = [ir.Node(product.domain, product.op_type, operands, product.attributes)]
    if bias is not None and product.op_type == "MatMul":
        nodes.append(ir.node("Add", [nodes[-1].outputs[0], bias]))
    for follower in first.nodes[len(first.nodes) - family.followers :]:
        inputs = [nodes[-1].outputs[0], *follower.inputs[1:]]
        nodes.append(ir.Node(follower.domain, follower.op_type, inputs, follower.attributes))
    return [*nodes, _split(model, nodes[-1].outputs[0], columns, family.axis)]


def _split(model: ir.Model, value: ir.Value, sizes: Sequence[int], axis: int) -> ir.Node:
    if model.opset_imports.get("", 1) < _SPLIT_INPUT_OPSET:
        return ir.node("Split", [value], {"axis": axis, "split": list(sizes)}, num_outputs=len(sizes))
    operand = add_sizes(model, sizes, "sizes")
    return ir.node("Split", [value, operand], {"axis": axis}, num_outputs=len(sizes))


def _joined(model: ir.Model, values: Sequence[ir.Value], axis: int, joined: dict[tuple[object, ...], ir.Value]) -> ir.Value:
    """One constant of several along an axis, which is not computed before it is read."""
    key = (axis, *values)
    if key not in joined:
        tensors = [tensor for value in values if (tensor := constant_tensor(value)) is not None]
        shape = list(tensors[0].shape.numpy())
        shape[axis] = sum(tensor.shape.numpy()[axis] for tensor in tensors)

        def join() -> np.ndarray:
            return np.concatenate([tensor.numpy() for tensor in tensors], axis)

        lazy = derived_tensor(("join", axis), tensors, join, tensors[0].dtype, shape)
        joined[key] = add_constant(model, lazy, f"{values[0].name}_merged")
    return joined[key]


def _joined_biases(
    model: ir.Model, values: Sequence[ir.Value | None], columns: Sequence[int], joined: dict[tuple[object, ...], ir.Value]
) -> ir.Value:
    """A vector of all biases, zeros for the absent ones."""
    key = ("bias", *columns, *values)
    if key not in joined:
        arrays = [None if value is None else constant_array(value) for value in values]
        dtype = next(array.dtype for array in arrays if array is not None)
        parts = [
            np.zeros(count, dtype) if array is None else array.reshape(-1) for array, count in zip(arrays, columns, strict=True)
        ]
        first = next(value for value in values if value is not None)
        joined[key] = add_constant(model, np.concatenate(parts), f"{first.name}_merged")
    return joined[key]
