"""split-weights: within a memory limit, cut weights into pieces that pass through memory one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ....compiler.ir.assignments.kernel_choice import AS_IT_IS, Ask, KernelChoice
from ....compiler.ir.constants import add_constant, constant_array, constant_tensor
from ....compiler.ir.facts import infer_node
from ....compiler.ir.matching import input_at, is_constant, rank_of, static_shape
from ....compiler.ir.names import fresh_name
from ....compiler.ir.rewriter import Rejection, copy_source, drop_unused_constants, operation, remove_nodes, replace_node
from ....compiler.pipeline import Context, Pass
from ....runtime.hardware.memory_limit import LEAST_STREAMED_BYTES
from .directions import directions_of, join_directions, take_back, weight_bytes

_LARGE = 4  # a weight of more than the limit over this is cut
_PIECES = 8  # into pieces of at most the limit over this
_COLUMNS = 128  # of a piece, a multiple of them: whole panels of every kernel
_NARROW = ("bfloat16", "float16")  # precisions in which products read half the bytes of float32
_STORED = {"int8": 1 / 4 + 1 / 32, "int4": 1 / 8 + 1 / 32}  # of the bytes of float32, scales of blocks of 32 among them


@dataclass(frozen=True)
class SplitWeights(Pass):
    """Multiply by the columns of a large weight piece by piece, and gather those of a large table, where memory is limited.

    Before:  y = MatMul(x, w)                                              (w larger than a quarter of the limit)
    After:   a = MatMul(x, w_left);  b = MatMul(x, w_right);  y = Concat<axis=-1>(a, b)

    Legal for MatMul, for Gemm and for a Gather of rows, by constants of two dimensions that nothing else reads. Each column is
    computed as before. A recurrence of two directions becomes two of one. Without a limit, or with one that is told in bytes and
    not reached, nothing changes.
    """

    name: ClassVar[str] = "split-weights"

    def run(self, model: ir.Model, context: Context) -> bool:
        if context.memory_limit is None:
            return False
        constants = (constant_tensor(value) for value in model.graph.initializers.values())
        scale = _STORED.get(context.weights or "", 0.5 if context.precision in _NARROW else 1.0)
        total = int(scale * sum(tensor.nbytes for tensor in constants if tensor is not None))
        limit = context.memory_limit.of(total)
        if total <= limit:
            return False
        found = [site for node in model.graph if (site := _site(node, scale)) is not None and site.size_bytes > limit // _LARGE]
        cut = self._cut_directions(model, limit, context)
        for site in found:
            pieces = _pieces(site.columns, site.size_bytes, limit // _PIECES)
            if len(pieces) == 1:
                continue
            if _rewrite(model, site, pieces, context):
                cut = True
                context.remark(self.name, f"{site.weight.name} is cut into {len(pieces)} pieces")
            else:
                reason = f"another kernel would multiply by pieces of {site.weight.name}, and round otherwise"
                context.reject(self.name, Rejection(reason, (site.node,)))
        return cut

    def _cut_directions(self, model: ir.Model, limit: int, context: Context) -> bool:
        """Cut large recurrences of two directions; whether there was one."""
        cut = False
        for node in [one for one in model.graph if weight_bytes(one) > limit // _LARGE]:
            name, parts = str(node.name), directions_of(model, node)
            if _are_alike(node, parts, context.kernels_of(model)):
                join_directions(model, node, parts)
                cut = True
                context.remark(self.name, f"{name} is cut into its directions")
            else:
                take_back(model, parts)
                reason = "another kernel would compute its directions, and round otherwise"
                context.reject(self.name, Rejection(reason, (node,)))
        return cut


@dataclass(frozen=True, slots=True)
class _Site:
    """A node, its weight, the position of that among its inputs, the axis of its columns, and its bytes as kernels read it."""

    node: ir.Node
    weight: ir.Value
    position: int
    axis: int
    size_bytes: int

    @property
    def columns(self) -> int:
        shape = static_shape(self.weight)
        assert shape is not None
        return shape[self.axis]


def _site(node: ir.Node, scale: float) -> _Site | None:
    """What could be cut at a node."""
    if node.domain != "" or node.op_type not in ("MatMul", "Gemm", "Gather") or rank_of(node.outputs[0]) is None:
        return None
    position = 0 if node.op_type == "Gather" else 1
    weight = input_at(node, position)
    if weight is None or rank_of(weight) != 2 or not is_constant(weight) or len(weight.uses()) != 1 or weight.is_graph_output():
        return None
    tensor = constant_tensor(weight)
    assert tensor is not None
    if tensor.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        return None
    if node.op_type == "Gather":
        axis = node.attributes.get_int("axis", 0)
        return _Site(node, weight, position, 1, tensor.nbytes) if axis in (0, -2) else None
    bias = input_at(node, 2)
    if bias is not None and not is_constant(bias):
        return None
    is_transposed = node.op_type == "Gemm" and node.attributes.get_int("transB", 0) == 1
    return _Site(node, weight, position, 0 if is_transposed else 1, int(scale * tensor.nbytes))


def _pieces(columns: int, size_bytes: int, most: int) -> list[tuple[int, int]]:
    """Ranges of columns of at most `most` bytes, none too small to be copied: whole panels, and what the last one has more."""
    panel = -(-size_bytes * _COLUMNS // columns)  # bytes
    size = max(most // panel, -(-LEAST_STREAMED_BYTES // panel), 1) * _COLUMNS
    starts = list(range(0, max(columns - size, 0) + 1, size))
    return list(zip(starts, [*starts[1:], columns], strict=True))


def _rewrite(model: ir.Model, site: _Site, pieces: Sequence[tuple[int, int]], context: Context) -> bool:
    """Cut the weight of a site, if kernels multiply by the pieces as they do by the whole; whether that is so."""
    node, array = site.node, constant_array(site.weight)
    assert array is not None
    bias = input_at(node, 2) if node.op_type == "Gemm" else None
    parts = []
    for begin, end in pieces:
        columns = np.ascontiguousarray(np.take(array, range(begin, end), axis=site.axis))
        inputs = list(node.inputs)
        inputs[site.position] = add_constant(model, columns, f"{site.weight.name}_columns")
        if bias is not None:
            inputs[2] = _bias_part(model, bias, site.columns, begin, end)
        part = ir.Node("", node.op_type, inputs, [*node.attributes.values()], num_outputs=1)
        part.outputs[0].name = fresh_name(model, f"{node.outputs[0].name}_columns")
        copy_source((node,), part)
        parts.append(part)
    model.graph.insert_before(node, parts)
    for part in parts:
        infer_node(part, model)
    if not _are_alike(node, parts, context.kernels_of(model)):
        used = [value for part in parts for value in part.inputs]
        remove_nodes(parts)
        drop_unused_constants(model, used)
        return False
    joined = operation("Concat", [part.outputs[0] for part in parts], axis=-1)
    replace_node(model, node, [joined], joined.outputs)
    drop_unused_constants(model, [site.weight, bias])
    return True


def _are_alike(node: ir.Node, parts: Sequence[ir.Node], ask: Ask) -> bool:
    """Whether one template computes a node and its parts, by the same unit. What is gathered is copied by any."""
    if node.op_type == "Gather":
        return True
    choices = [ask(one, AS_IT_IS) for one in (node, *parts)]
    kinds = {(one.template, one.unit) if isinstance(one, KernelChoice) else None for one in choices}
    return len(kinds) == 1 and None not in kinds


def _bias_part(model: ir.Model, bias: ir.Value, columns: int, begin: int, end: int) -> ir.Value:
    """The part of a Gemm's third operand for some columns; itself where it is one for all."""
    array = constant_array(bias)
    assert array is not None
    if array.ndim == 0 or array.shape[-1] != columns:
        return bias
    return add_constant(model, np.ascontiguousarray(array[..., begin:end]), f"{bias.name}_columns")
