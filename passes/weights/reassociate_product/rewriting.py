"""The nodes of reassociated products: the rows by their part of the constant, and what each weighted sum adds to the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import onnx_ir as ir

from ....compiler.ir.constants import add_constant, add_sizes, constant_array, constant_tensor
from ....compiler.ir.facts import infer_node
from ....compiler.ir.matching import input_at, static_shape
from ....compiler.ir.names import fresh_name
from ....compiler.ir.rewriter import copy_source, drop_unused_constants, graph_of, literal_shape, replace_node
from ...structure.canonicalize.scope import respelled
from .readers import Reader

_BIAS = 3  # which input it is of a recurrent operator


@dataclass(frozen=True, slots=True)
class _Parts:
    """What all readers of a family share: `rows` [terms, columns], the rest of the weight, and the halves of recurrent biases,
    of which each reader may have another."""

    rows: ir.Value
    rest: ir.Value | None
    halves: dict[ir.Value | None, tuple[ir.Value | None, ir.Value]] = field(default_factory=dict)


@dataclass(slots=True)
class Rewriter:
    """What has been made so far, so that it is made once."""

    model: ir.Model
    _joined: dict[tuple[ir.Node, int], ir.Value] = field(default_factory=dict)
    _shapes: dict[tuple[int, ...], ir.Value] = field(default_factory=dict)

    def rewrite(self, family: Sequence[Reader]) -> None:
        """Readers of sums of the same values by the same constant, in the graph's order."""
        parts = self._parts(family[0])
        replaced = [family[0].weight, *(input_at(reader.node, _BIAS) for reader in family if reader.is_recurrent)]
        for reader in family:
            if reader.is_stale:  # its weights were the product of the reader before: the next round finds what they are now
                continue
            weights = self._reshaped(reader.node, reader.source.weights, (reader.source.rows, reader.source.terms))
            if reader.is_recurrent:
                self._rewrite_recurrent(reader, weights, parts)
            elif reader.node.op_type == "Gemm":
                self._rewrite_gemm(reader, weights, parts)
            else:
                self._rewrite_matmul(reader, weights, parts)
        drop_unused_constants(self.model, replaced)

    def _parts(self, reader: Reader) -> _Parts:
        weight, axis, begin, end = reader.weight, reader.depth_axis, reader.begin, reader.end
        taken_shape = (end - begin, reader.columns)

        def taken(array: np.ndarray) -> np.ndarray:
            return np.ascontiguousarray(np.moveaxis(array, axis, 0)[begin:end].reshape(taken_shape))

        def left(array: np.ndarray) -> np.ndarray:
            return np.delete(array, slice(begin, end), axis)

        rows = self._constant_rows(reader, taken) if reader.source.is_of_constants else None
        if rows is None:
            source = self._reshaped(reader.node, reader.source.values, (reader.source.terms, reader.source.depth))
            is_whole = reader.concat is None and axis == 0
            part = weight if is_whole else self._made_of(weight, taken, taken_shape)
            rows = self._node(reader.node, "MatMul", [source, part])
        if reader.concat is None:
            return _Parts(rows, None)
        shape = list(static_shape(weight) or ())
        shape[axis] -= end - begin
        return _Parts(rows, self._made_of(weight, left, tuple(shape)))

    def _constant_rows(self, reader: Reader, taken: Callable[[np.ndarray], np.ndarray]) -> ir.Value:
        """Constant rows by what is taken of the weight, not computed before they are read, and rounded once."""
        source, values = reader.source, constant_tensor(reader.source.values)
        assert values is not None

        def product(weight: np.ndarray) -> np.ndarray:
            kind = weight.dtype if weight.dtype.kind in "iu" else np.dtype(np.float64)  # integers wrap around
            rows = values.numpy().reshape(source.terms, source.depth).astype(kind)
            return np.asarray(rows @ taken(weight).astype(kind)).astype(weight.dtype)

        return self._made_of(reader.weight, product, (source.terms, reader.columns))

    def _biases(self, reader: Reader) -> tuple[ir.Value | None, ir.Value]:
        """Of a recurrent operator: what is added to the input's share, and the other half, [1, columns]."""
        bias, columns = constant_array(input_at(reader.node, _BIAS)), reader.columns
        if bias is None:
            dtype = reader.weight.dtype
            assert dtype is not None
            return None, add_constant(self.model, np.zeros((1, columns), dtype.numpy()), "recurrent_bias")
        halves = np.ascontiguousarray(bias[0, :columns]), np.ascontiguousarray(bias[:, columns:])
        return add_constant(self.model, halves[0], "input_bias"), add_constant(self.model, halves[1], "recurrent_bias")

    def _rewrite_recurrent(self, reader: Reader, weights: ir.Value, parts: _Parts) -> None:
        """The share of the weighted sum comes as a part of the bias."""
        node = reader.node
        given = input_at(node, _BIAS)
        if given not in parts.halves:
            parts.halves[given] = self._biases(reader)
        input_bias, recurrent_bias = parts.halves[given]
        share = self._product(node, weights, parts.rows, input_bias)
        bias = self._node(node, "Concat", [share, recurrent_bias], axis=1)
        inputs = [self._rest_of(reader), parts.rest, node.inputs[2], bias, *node.inputs[_BIAS + 1 :]]
        replacement = respelled(node, inputs, node.attributes)
        replace_node(self.model, node, replacement.nodes, replacement.outputs)

    def _rewrite_gemm(self, reader: Reader, weights: ir.Value, parts: _Parts) -> None:
        node = reader.node
        bias = input_at(node, 2)
        if reader.concat is None:
            new = ir.node("MatMul", [weights, parts.rows]) if bias is None else ir.node("Gemm", [weights, parts.rows, bias])
        else:
            share = self._product(node, weights, parts.rows, bias)
            new = ir.Node("", "Gemm", [self._rest_of(reader), parts.rest, share], node.attributes)
        replace_node(self.model, node, [new], new.outputs)

    def _rewrite_matmul(self, reader: Reader, weights: ir.Value, parts: _Parts) -> None:
        node = reader.node
        shape = static_shape(node.outputs[0]) or ()
        share = self._reshaped(node, self._product(node, weights, parts.rows, None), shape)
        if reader.concat is None:
            replace_node(self.model, node, [], [share])
            return
        rest = ir.node("MatMul", [self._rest_of(reader), parts.rest])
        total = ir.node("Add", [rest.outputs[0], share])
        replace_node(self.model, node, [rest, total], total.outputs)

    def _rest_of(self, reader: Reader) -> ir.Value:
        """What else the product reads, side by side, in the shape of its operand."""
        concat, source = reader.concat, reader.node.inputs[0]
        assert concat is not None
        assert source is not None
        ends = np.cumsum([(static_shape(piece) or (0,))[-1] for piece in concat.inputs]).tolist()
        pieces = [piece for piece, end in zip(concat.inputs, ends, strict=True) if not reader.begin < end <= reader.end]
        joined = self._together(concat, reader.begin, pieces)
        *lines, width = static_shape(source) or ()
        return self._reshaped(reader.node, joined, (*lines, width - (reader.end - reader.begin)))

    def _together(self, concat: ir.Node, begin: int, pieces: Sequence[ir.Value | None]) -> ir.Value:
        """What a Concat joins without the piece that begins in column `begin`. One piece alone is looked up each time: another
        rewrite may put another value in its place."""
        if len(pieces) == 1:
            assert pieces[0] is not None
            return pieces[0]
        if (concat, begin) not in self._joined:
            rank = len(static_shape(concat.outputs[0]) or ())
            self._joined[concat, begin] = self._node(concat, "Concat", pieces, axis=rank - 1)
        return self._joined[concat, begin]

    def _product(self, place: ir.Node, weights: ir.Value, rows: ir.Value, bias: ir.Value | None) -> ir.Value:
        if bias is None:
            return self._node(place, "MatMul", [weights, rows])
        return self._node(place, "Gemm", [weights, rows, bias])

    def _reshaped(self, place: ir.Node, value: ir.Value, shape: tuple[int, ...]) -> ir.Value:
        if static_shape(value) == shape:
            return value
        assert prod(static_shape(value) or ()) == prod(shape)
        if shape not in self._shapes:
            self._shapes[shape] = add_sizes(self.model, shape, f"{value.name}_shape")
        return self._node(place, "Reshape", [value, self._shapes[shape]], **literal_shape(shape))

    def _node(self, place: ir.Node, op_type: str, inputs: Sequence[ir.Value | None], **attributes: int) -> ir.Value:
        """The output of a new node before `place`."""
        node = ir.node(op_type, inputs, attributes)
        output = node.outputs[0]
        output.name = fresh_name(self.model, str(place.outputs[-1].name or place.op_type.lower()))
        copy_source((place,), node)
        graph_of(place).insert_before(place, node)
        infer_node(node, self.model)
        return output

    def _made_of(self, weight: ir.Value, cut: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...]) -> ir.Value:
        """A constant that is not computed before it is read."""
        tensor = constant_tensor(weight)
        assert tensor is not None
        lazy = ir.LazyTensor(lambda: ir.tensor(cut(tensor.numpy())), dtype=tensor.dtype, shape=ir.Shape(shape))
        return add_constant(self.model, lazy, f"{weight.name}_part")
