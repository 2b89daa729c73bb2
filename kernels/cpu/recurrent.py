"""GRU: the input's share of all steps in one product, then the steps, each with its gates' arithmetic in the tile store.

The recurrent weights are packed so that one panel holds the columns of all three gates of the same hidden units: a tile
finishes those units' new state by itself. Directions run on threads of their own; a single one deals its units to the threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from tvm import tirx

from ...runtime.plan import TensorType
from ...runtime.target import Target
from .. import math
from ..builder import Buffer, Expr, Index
from ..group import Group, Op
from ..template import BuiltKernel, Operand, Refusal
from .common import finish, new_builder
from .tile_product import PackPanels, Plane, Tile, TileProduct, choose_tile, emit, sum_tile

_GATES = 3  # update, reset, hidden: the order of ONNX
_DTYPE = "float32"


def build(group: Group, target: Target) -> BuiltKernel | Refusal:
    """Takes one float32 GRU with constant weights, its default activations, and all sequences of full length."""
    if len(group.ops) != 1 or group.ops[0].op_type != "GRU":
        return Refusal("is no GRU")
    op = group.ops[0]
    x, w, r, bias, lengths, _ = (*op.inputs, "", "", "")[:6]
    directions = group.types[w].shape[0]
    if group.types[x].dtype != _DTYPE:
        return Refusal(f"no GRU of {group.types[x].dtype}")
    if any(name and name not in group.constants for name in (w, r, bias)):
        return Refusal("weights are not constant")
    if lengths:
        return Refusal("sequences have lengths of their own")
    if op.attribute("layout", 0) or op.attribute("clip") is not None:
        return Refusal("layout 1 and clip are not supported")
    if not op.attribute("linear_before_reset", 0):
        return Refusal("linear_before_reset=0 is not supported")
    if tuple(op.attribute("activations") or ()) not in ((), ("Sigmoid", "Tanh") * directions):
        return Refusal(f"activations {op.attribute('activations')}")
    return _Gru(group, op, target).build()


@dataclass(frozen=True)
class PackGates:
    """R [directions, 3 * hidden, hidden] as [directions, panels, hidden (k), 3, columns], filled up with zeros."""

    columns: int

    def packed_type(self, source: TensorType) -> TensorType:
        directions, _, hidden = source.shape
        return TensorType((directions, ceil(hidden / self.columns), hidden, _GATES, self.columns), source.dtype)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        directions, _, hidden = array.shape
        panels = ceil(hidden / self.columns)
        padded = np.zeros((directions, _GATES, panels * self.columns, hidden), array.dtype)
        padded[:, :, :hidden] = array.reshape(directions, _GATES, hidden, hidden)
        return np.ascontiguousarray(padded.reshape(directions, _GATES, panels, self.columns, hidden).transpose(0, 2, 4, 1, 3))


class _Gru:
    """One kernel being built. Shapes: x [steps, batch, inputs], y [steps, directions, batch, hidden]."""

    def __init__(self, group: Group, op: Op, target: Target) -> None:
        self.group, self.op, self.target = group, op, target
        self.builder = new_builder(target)
        self.x, self.w, self.r, self.bias, _, self.initial = (*op.inputs, "", "", "")[:6]
        self.steps, self.batch, self.inputs = group.types[self.x].shape
        self.directions, _, self.hidden = group.types[self.r].shape
        self.reverse = op.attribute("direction", "forward") == "reverse"
        self.lanes = self.builder.lanes(_DTYPE)
        self.rows = min(self.batch, 8 if target.vector_registers == 32 else 4)
        self.vectors = 2 if self.rows == 1 else 1  # of one gate: enough sums in flight to hide the latency of the multiply-add
        self.columns = self.vectors * self.lanes
        self.tile = Tile(self.rows, _GATES * self.vectors, self.lanes)
        self.packed: dict[str, Operand] = {}

    def build(self) -> BuiltKernel:
        builder, state_size = self.builder, self.directions * self.batch * self.hidden
        projected = builder.workspace(self.directions * self.steps * self.batch * _GATES * self.hidden, _DTYPE)
        states = builder.workspace(2 * state_size, _DTYPE)
        flops = self._project(projected)
        pack = PackGates(self.columns)
        kind = pack.packed_type(self.group.types[self.r])
        self.packed[self.r] = Operand(self.r, pack)
        weights = builder.parameter(self.r, kind.elements, _DTYPE)
        self._set_initial_state(states, state_size)
        panels = ceil(self.hidden / self.columns)
        work = 2 * self.batch * _GATES * self.hidden * self.hidden // 16
        if self.directions > 1:
            with (
                builder.chunks(self.directions, work * self.steps) as d,
                builder.loop(self.steps, name="step") as step,
                builder.loop(panels, name="panel") as panel,
            ):
                self._step(d, step, panel, projected, states, weights)
        else:
            with builder.loop(self.steps, name="step") as step, builder.chunks(panels, work) as panel:
                self._step(0, step, panel, projected, states, weights)
        self._store_last(states, state_size)
        flops += 2 * self.steps * self.directions * self.batch * _GATES * self.hidden * self.hidden
        return finish("gru", builder, self.group, flops=flops, packed=self.packed)

    def _project(self, projected: Buffer) -> int:
        """projected[direction, step, batch, gate, hidden] = x W^T + the biases that do not pass the reset gate."""
        builder, columns, rows = self.builder, _GATES * self.hidden, self.steps * self.batch
        tile = choose_tile(
            rows, columns, self.inputs, self.lanes, self.target.vector_registers, shifted_loads=False, b_padded=True
        )
        pack = PackPanels((self.directions, columns, self.inputs), (0, 1, 2), 1, 1, tile.columns)
        self.packed[self.w] = Operand(self.w, pack)
        weights = builder.parameter(self.w, pack.packed_type(self.group.types[self.w]).elements, _DTYPE)
        x = builder.parameter(self.x, self.group.types[self.x].elements, _DTYPE)
        panels = ceil(columns / tile.columns)

        def a(batch: Expr, panel: Expr, start: Expr, row: int, ks: Index) -> Expr:
            return x[(start + row) * self.inputs + ks[0]]

        def b(batch: Expr, panel: Expr, start: Expr, column: Expr, ks: Index) -> Expr:
            return weights[((batch * panels + panel) * self.inputs + ks[0]) * tile.columns + column]

        def store(batch: Expr, m: Expr, r: Expr, column: Expr, value: Expr) -> None:
            if self.bias:
                value = value + self._bias(batch, 0, column)
                recurrent = self._bias(batch, 1, column)
                value = value + tirx.Select(column < 2 * self.hidden, recurrent, tirx.const(0, _DTYPE))
            builder.store(projected, (batch * rows + m) * columns + column, value)

        plane = Plane(columns, columns, columns)
        product = TileProduct(
            self.directions, rows, plane, (self.inputs,), tile, _DTYPE, a, b, store, a_padded=False, b_padded=True
        )
        emit(builder, product, a_bytes=self.group.types[self.x].size_bytes, b_bytes=self.group.types[self.w].size_bytes)
        return product.flops

    def _bias(self, direction: Expr, part: int, column: Expr) -> Expr:
        """Element of B [directions, 2 (input, recurrent), 3 * hidden]."""
        buffer = self.builder.parameter(self.bias, self.group.types[self.bias].elements, _DTYPE)
        return buffer[(direction * 2 + part) * _GATES * self.hidden + column]

    def _set_initial_state(self, states: Buffer, size: int) -> None:
        builder = self.builder
        if self.initial:
            source = builder.parameter(self.initial, size, _DTYPE)
            builder.vector_loop(size, self.lanes, lambda i: builder.store(states, i, source[i]))
        else:
            builder.vector_loop(size, self.lanes, lambda i: builder.store(states, i, tirx.const(0, _DTYPE)))

    def _step(self, direction: Expr, step: Expr, panel: Expr, projected: Buffer, states: Buffer, weights: Buffer) -> None:
        """New state of the hidden units of one panel, for all rows of the batch."""
        builder, size = self.builder, self.batch * self.hidden
        parity = builder.bind(tirx.floormod(step, 2))
        old = builder.bind((parity * self.directions + direction) * size)
        new = builder.bind(((1 - parity) * self.directions + direction) * size)
        backwards = self.steps - 1 - step
        forwards = backwards if self.reverse else step
        time = builder.bind(tirx.Select(direction == 1, backwards, forwards) if self.directions == 2 else forwards)
        panels = ceil(self.hidden / self.columns)
        with builder.loop(ceil(self.batch / self.rows), name="rows") as tile:
            begin = builder.bind(tile * self.rows)
            start = builder.bind(tirx.min(begin, self.batch - self.rows))
            origin = builder.bind((direction * panels + panel) * self.hidden * self.tile.columns)
            finished = sum_tile(
                builder,
                self.tile,
                _DTYPE,
                (self.hidden,),
                lambda row, ks: states[old + (start + row) * self.hidden + ks[0]],
                lambda column, ks: weights[origin + ks[0] * self.tile.columns + column],
            )
            with builder.loop(builder.bind(tirx.min(self.rows, self.batch - begin)), name="row") as row:
                b = builder.bind(begin + row)
                first = builder.bind(panel * self.columns)
                first = builder.bind(panel * self.columns)
                gates = builder.bind((b - start) * self.tile.columns - first)
                share = builder.bind(((direction * self.steps + time) * self.batch + b) * _GATES * self.hidden)
                place = builder.bind(((time * self.directions + direction) * self.batch + b) * self.hidden)
                state = builder.bind(b * self.hidden)

                def unit(j: Expr) -> None:
                    value = self._unit(direction, j, finished, gates, projected, share, states[old + state + j])
                    builder.store(states, new + state + j, value)
                    if y := self.op.outputs[0]:
                        builder.store(builder.parameter(y, self.group.types[y].elements, _DTYPE), place + j, value)

                builder.dynamic_vector_loop(first, tirx.min(first + self.columns, self.hidden), self.lanes, unit)

    def _unit(self, direction: Expr, j: Expr, sums: Buffer, gates: Expr, projected: Buffer, share: Expr, old: Expr) -> Expr:
        """h' = (1 - z) n + z h, with z and r the gates and n = tanh(x_n + r (h_n + bias))."""
        builder = self.builder
        z = builder.name(math.sigmoid(builder.name, projected[share + j] + sums[gates + j]))
        r = math.sigmoid(builder.name, projected[share + self.hidden + j] + sums[gates + self.columns + j])
        hidden = sums[gates + 2 * self.columns + j]
        if self.bias:
            hidden = hidden + self._bias(direction, 1, 2 * self.hidden + j)
        n = math.tanh(builder.name, projected[share + 2 * self.hidden + j] + r * hidden)
        return builder.name((tirx.const(1, _DTYPE) - z) * n + z * old)

    def _store_last(self, states: Buffer, size: int) -> None:
        builder = self.builder
        if len(self.op.outputs) > 1 and self.op.outputs[1]:
            last = builder.parameter(self.op.outputs[1], size, _DTYPE)
            offset = (self.steps % 2) * size
            builder.vector_loop(size, self.lanes, lambda i: builder.store(last, i, states[offset + i]))
