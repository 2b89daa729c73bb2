"""MaxPool with its second output, the flat indices of the greatest elements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, row_major
from ..convolution.window import Window, read_window
from ..groups.group import Group, Op
from ..template.contract import BuiltKernel
from ..template.kernel import finish, new_builder
from ..template.loops import nest, parallel_nest, sweep

OPERATORS = frozenset(["MaxPool"])
_RUN = 512  # outputs of one run: their greatest elements and indices stay in L1


def obstacle(group: Group, target: Target) -> str:
    """Why the kernel cannot be written for a group; empty if it can."""
    has_indices = len(group.ops) == 1 and len(group.ops[0].outputs) > 1 and bool(group.ops[0].outputs[1])
    return "" if has_indices else "no indices are asked for"


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes one MaxPool with indices, alone."""
    (anchor,) = group.ops
    window = read_window(group, anchor)
    builder = new_builder(target)
    work = 4 * group.types[anchor.outputs[0]].elements * int(np.prod(window.kernel))
    if work:
        _IndexedPooling(group, builder, anchor, window).emit(work)
    return finish("pooling_indices", builder, group, flops=work)


@dataclass(frozen=True)
class _IndexedPooling:
    """The loops of one pooling: for a run of outputs, tap after tap."""

    group: Group
    builder: KernelBuilder
    anchor: Op
    window: Window

    def emit(self, work: int) -> None:
        batch, channels = self.group.types[self.anchor.inputs[0]].shape[:2]
        *outer, columns = self.window.outputs
        parallel_nest(self.builder, [batch, channels, *outer, -(-columns // _RUN)], work, self._run)

    def _run(self, index: Index) -> None:
        builder, columns = self.builder, self.window.outputs[-1]
        *place, piece = index
        length = min(columns, _RUN)
        first = builder.bind(tirx.min(piece * length, columns - length))
        kind = self.group.types[self.anchor.inputs[0]]
        least = -np.inf if "float" in kind.dtype else int(np.iinfo(kind.dtype).min)
        lanes = min(builder.lanes(kind.dtype), builder.lanes("int32"))
        best, at = builder.local(length, self._working(kind.dtype), "best"), builder.local(length, "int32", "at")

        def begin(j: Expr) -> None:
            builder.store(best, j, tirx.const(least, self._working(kind.dtype)))
            builder.store(at, j, tirx.const(-1, "int32"))

        sweep(builder, length, lanes, begin)
        nest(builder, self.window.kernel, lambda tap: self._compare(best, at, tuple(place), first, (length, lanes), tap))
        self._store(best, at, tuple(place), first, (length, lanes))

    @staticmethod
    def _working(dtype: str) -> str:
        """The type in which elements are compared."""
        return "float32" if dtype == "bfloat16" else dtype

    def _compare(self, best: Buffer, at: Buffer, place: Index, first: Expr, run: tuple[int, int], tap: Index) -> None:
        """Replace lesser elements of a run by those that one tap reads; the first of equal ones stays."""
        builder, window = self.builder, self.window
        kind = self.group.types[self.anchor.inputs[0]]
        source = builder.parameter(self.anchor.inputs[0], kind.elements, kind.dtype)
        starts = zip((*place[2:], first), window.strides, tap, window.dilations, window.begins, strict=True)
        *outer, column = [builder.bind(o * s + t * d - b) for o, s, t, d, b in starts]
        inside = [condition for a, n in zip(outer, window.inputs, strict=False) for condition in (a >= 0, a < n)]
        width, step = window.inputs[-1], window.strides[-1]
        place_of_row = row_major((*place[:2], *outer), kind.shape[:-1]) * width

        def element(j: Expr) -> None:
            where = builder.name(column + j * step)
            element = source[row + tirx.max(tirx.min(where, width - 1), tirx.const(0, "int32"))]
            x = builder.name(element if str(best.dtype) == kind.dtype else tirx.Cast(str(best.dtype), element))
            wins = tirx.Or(x > best[j], at[j] < 0)
            if "float" in kind.dtype:
                wins = tirx.Or(wins, tirx.And(tirx.isnan(x), tirx.Not(tirx.isnan(best[j]))))
            one, zero = tirx.const(1, "int32"), tirx.const(0, "int32")
            taken = builder.name(tirx.Select(tirx.And(tirx.And(where >= 0, where < width), wins), one, zero))
            builder.store(best, j, tirx.Select(taken > 0, x, best[j]))
            builder.store(at, j, tirx.Select(taken > 0, row + where, at[j]))

        with builder.when(tirx.all(*inside) if inside else tirx.const(True, "bool")):
            row = builder.bind(place_of_row)
            sweep(builder, *run, element)

    def _store(self, best: Buffer, at: Buffer, place: Index, first: Expr, run: tuple[int, int]) -> None:
        builder = self.builder
        value, indices = (self.group.types[name] for name in self.anchor.outputs[:2])
        values = builder.parameter(self.anchor.outputs[0], value.elements, value.dtype)
        wheres = builder.parameter(self.anchor.outputs[1], indices.elements, indices.dtype)
        base = builder.bind(row_major((*place, first), value.shape))

        def element(j: Expr) -> None:
            builder.store(values, base + j, best[j] if str(best.dtype) == value.dtype else tirx.Cast(value.dtype, best[j]))
            builder.store(wheres, base + j, tirx.Cast(indices.dtype, self._index(at[j])))

        sweep(builder, *run, element)

    def _index(self, at: Expr) -> Expr:
        """ONNX's index of a flat offset; with storage_order 1 in column-major order of the spatial dimensions."""
        if not self.anchor.attribute("storage_order", 0):
            return at
        extents = self.window.inputs
        size = int(np.prod(extents))
        plane, rest = tirx.floordiv(at, size), tirx.floormod(at, size)
        reverse: Expr = 0
        for extent in reversed(extents):
            reverse = reverse * extent + tirx.floormod(rest, extent)
            rest = tirx.floordiv(rest, extent)
        return tirx.Select(at < 0, at, plane * size + reverse)
