"""A recurrent operator's shapes and operands: offsets under either layout, and packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np
from tvm import tirx

from ...runtime.plan import TensorType
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, row_major
from ..groups.group import Group, Op
from ..template.contract import Operand
from ..template.loops import accumulator_type
from ..template.views import permutation, result_of


@dataclass(frozen=True)
class PackGates:
    """Pack weights [directions, of * hidden, depth] into [directions, panels, parts, depth (k), gates / parts, columns].

    `gates` are those of the `of` gates that are packed; a panel has the same `columns` hidden units of each of them, in `parts`
    equal parts, padded with zeros. With `k_pack` > 1 numbers k, k + ceil(depth / k_pack), ... lie side by side, or neighbours
    along k if `joins_neighbours`: a last dimension.
    """

    of: int
    gates: tuple[int, ...]
    columns: int
    k_pack: int = 1
    parts: int = 1
    joins_neighbours: bool = False

    def packed_type(self, source: TensorType) -> TensorType:
        directions, lines, depth = source.shape
        panels, gates = ceil(lines // self.of / self.columns), len(self.gates) // self.parts
        steps, word = ceil(depth / self.k_pack), (self.k_pack,) if self.k_pack > 1 else ()
        return TensorType((directions, panels, self.parts, steps, gates, self.columns, *word), source.dtype)

    def __call__(self, array: np.ndarray) -> np.ndarray:
        directions, lines, depth = array.shape[0], array.shape[1] // self.of, array.shape[2]
        panels, parts, gates = ceil(lines / self.columns), self.parts, len(self.gates) // self.parts
        padded = np.zeros((directions, parts * gates, panels * self.columns, depth + -depth % self.k_pack), array.dtype)
        padded[:, :, :lines, :depth] = array.reshape(directions, self.of, lines, depth)[:, list(self.gates)]
        packed = padded.reshape(directions, parts, gates, panels, self.columns, -1).transpose(0, 3, 1, 5, 2, 4)
        if self.joins_neighbours:
            words = packed.reshape(*packed.shape[:3], -1, self.k_pack, *packed.shape[4:])
            return np.ascontiguousarray(np.moveaxis(words, 4, -1))
        return np.stack(np.split(packed, self.k_pack, 3), -1) if self.k_pack > 1 else np.ascontiguousarray(packed)


def order_obstacle(group: Group, op: Op) -> str:
    """Why X cannot be read, or Y not stored, as the group's other operators order them; empty if they can.

    Before the operator only a Transpose of X may be, which exchanges steps and batch. Behind it each alone reads the one before,
    and the units of a step stay neighbours.
    """
    before, behind = _orders(group, op)
    if len(before) > 1 or any(not _exchanges(group, one, op) for one in before):
        return f"{before[0].op_type} does not only exchange steps and batch of what it alone reads"
    name, hidden = op.outputs[0], group.types[op.inputs[2]].shape[2]
    for one in behind:
        result = result_of(group, one)
        if result is None or one.inputs[0] != name or group.reader_counts.get(name) != 1:
            return f"{one.op_type} is no other order of a sequence that it alone reads"
        rank, name = len(group.types[name].shape), one.outputs[0]
        shape = group.types[name].shape
        second = result(group, one, (*[0] * (rank - 1), 1))  # the place of a unit behind one in the first place of all
        if hidden > 1 and (second != (*[0] * (len(shape) - 1), 1) or shape[-1] % hidden):
            return f"{one.op_type} puts others between the units of a step"
    return f"{behind[-1].op_type} is not what the group gives" if behind and name not in group.outputs else ""


def _exchanges(group: Group, one: Op, op: Op) -> bool:
    """Whether an operator gives X alone, by exchanging its first two dimensions."""
    x = op.inputs[0]
    is_read_alone = one.outputs[0] == x and group.reader_counts.get(x) == 1 and x not in group.outputs
    return is_read_alone and one.op_type == "Transpose" and permutation(group, one) == (1, 0, 2)


def _orders(group: Group, op: Op) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
    """The group's other operators before and behind the recurrent one."""
    place = next(i for i, one in enumerate(group.ops) if one is op)
    return group.ops[:place], group.ops[place + 1 :]


class RecurrentOperands:
    """Inputs and outputs of a GRU, LSTM or RNN. Names are "" where they are absent; `outputs` are Y, Y_h, Y_c. Y is stored in the
    order of the group's operators behind it, if there are any.

    `dtype` is the type of the arithmetic; operands of bfloat16 or float16 are converted when they are read. With `batch_first`
    (layout 1) the batch is the first dimension of Y and the states, else steps and directions come before it; with
    `x_batch_first` it is that of X, which is read before a Transpose, if the group has one.
    """

    def __init__(self, group: Group, op: Op, builder: KernelBuilder) -> None:
        self.group, self.op, self.builder = group, op, builder
        names = (*op.inputs, *[""] * 8)
        self.x, self.w, self.r, self.bias = names[:4]
        self.lengths, self.initial, self.peepholes = names[4], names[5:7], names[7]
        before, self.orders = _orders(group, op)
        if before:
            self.x = before[0].inputs[0]
        outputs = (self.orders[-1].outputs[0], *op.outputs[1:]) if self.orders else op.outputs
        self.outputs = (*outputs, "", "", "")[:3]
        self.batch_first = bool(op.attribute("layout", 0))
        self.x_batch_first = self.batch_first != bool(before)
        first, second, self.inputs = group.types[self.x].shape
        self.steps, self.batch = (second, first) if self.x_batch_first else (first, second)
        self.directions, lines, self.hidden = group.types[self.r].shape
        self.gates = lines // max(self.hidden, 1)
        self.reverse = op.attribute("direction", "forward") == "reverse"
        self.dtype = accumulator_type(group.types[self.x].dtype)
        known = group.literal(self.lengths)
        if known is not None and (known == self.steps).all():
            self.lengths = ""
        self.packed: dict[str, Operand] = {}

    def zero(self) -> Expr:
        return tirx.const(0, self.dtype)

    def load(self, name: str, offset: Expr) -> Expr:
        """An element of an operand read in place, in the type of the arithmetic."""
        return tirx.Cast(self.dtype, self._buffer(name)[offset])

    def store(self, name: str, offset: Expr, value: Expr) -> None:
        """Write an element of an output; nothing if that is absent."""
        if name:
            self.builder.store(self._buffer(name), offset, tirx.Cast(self.group.types[name].dtype, value))

    def bias_of(self, direction: Expr, part: int, column: Expr) -> Expr:
        """Element of B [directions, 2 (input, recurrent), gates * hidden]."""
        return self.load(self.bias, (direction * 2 + part) * self.gates * self.hidden + column)

    def length_of(self, b: Expr) -> Expr:
        """Steps of a row of the batch; lengths out of range are clamped, so that no access is out of bounds."""
        if not self.lengths:
            return self.steps
        return tirx.Cast("int32", tirx.max(tirx.min(self._buffer(self.lengths)[b], self.steps), 0))

    def time_of(self, direction: Expr, step: Expr, length: Expr) -> Expr:
        """The element of the sequence that a step computes; beyond its length, the element of Y that it fills with zeros."""
        if self.directions == 1 and not self.reverse:
            return step
        backwards = length - 1 - step
        if self.lengths:
            backwards = tirx.Select(step < length, backwards, step)
        return backwards if self.directions == 1 else tirx.Select(tirx.EQ(direction, 1), backwards, step)

    def x_line(self, time: Expr, b: Expr) -> Expr:
        """Number of a row of X, and of its input projection."""
        return b * self.steps + time if self.x_batch_first else time * self.batch + b

    def y_offset(self, direction: Expr, time: Expr, b: Expr) -> Expr:
        """Offset of unit 0 of a step in Y."""
        index: Index = (time, direction, b, 0)
        shape: tuple[int, ...] = (self.steps, self.directions, self.batch, self.hidden)
        if self.batch_first:
            index, shape = (b, time, direction, 0), (self.batch, self.steps, self.directions, self.hidden)
        for one in self.orders:
            result = result_of(self.group, one)
            assert result is not None, "refused before"
            index, shape = result(self.group, one, index), self.group.types[one.outputs[0]].shape
        return row_major(index, shape)

    def state_offset(self, direction: Expr, b: Expr) -> Expr:
        """Offset in the operator's initial and last states."""
        return (b * self.directions + direction if self.batch_first else direction * self.batch + b) * self.hidden

    def is_quantized(self, name: str) -> bool:
        """Whether weights lie as int8 with a scale for each line, so that rows are rounded to 8 bits, too."""
        return name in self.group.weights

    def weights(self, name: str, pack: PackGates) -> Buffer:
        """Packed weights: at compile time if they are constant, else by the kernel; int32 elements for a `k_pack` above 1."""
        kind = pack.packed_type(self.group.types[name])
        if name not in self.group.constants:
            return self._stage(name, pack, kind)
        key = f"{name}:{pack}"
        self.packed[key] = Operand(name, pack)
        return self.builder.parameter(key, kind.elements // pack.k_pack, "int32" if pack.k_pack > 1 else kind.dtype)

    def _stage(self, name: str, pack: PackGates, kind: TensorType) -> Buffer:
        """The layout of `pack`, written by the kernel to the workspace."""
        builder, (directions, panels, parts, depth, gates, columns) = self.builder, kind.shape
        lines = self.group.types[name].shape[1] // pack.of
        staged = builder.workspace(kind.elements, self.dtype)
        with builder.chunks(directions * panels, kind.elements) as chunk:
            direction, panel = builder.bind(tirx.floordiv(chunk, panels)), builder.bind(tirx.floormod(chunk, panels))
            with builder.loop(depth, name="k") as k, builder.loop(columns, name="column") as column:
                line = panel * columns + column
                for number, gate in enumerate(pack.gates):
                    part, position = divmod(number, gates)
                    source = (direction * pack.of + gate) * lines + tirx.min(line, lines - 1)
                    value = builder.masked(line < lines, self.load(name, source * depth + k), self.zero())
                    place = (((chunk * parts + part) * depth + k) * gates + position) * columns + column
                    builder.store(staged, place, value)
        return staged

    def _buffer(self, name: str) -> Buffer:
        kind = self.group.types[name]
        return self.builder.parameter(name, kind.elements, kind.dtype)
