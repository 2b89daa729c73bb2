"""Col2Im: blocks added up to an image where they overlap.

Each element of the image gathers its summands from the blocks, in the order of the taps, so results do not depend on threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm import tirx

from ...runtime.target import Target
from ..codegen.builder import Buffer, Expr, Index, KernelBuilder, row_major
from ..groups.group import Group, Op, literal_ints
from ..template.contract import BuiltKernel
from ..template.kernel import finish, new_builder
from ..template.loops import accumulator_type, nest, parallel_nest, store_epilogue, sweep
from ..template.values import anchor_of

OPERATORS = frozenset(["Col2Im"])
_RUN = 1024  # elements of an image row whose sums are on the stack at once


def obstacle(group: Group, target: Target) -> str:
    """Why the kernel cannot be written for a group; empty if it can."""
    anchor = anchor_of(group)
    if any(literal_ints(group, name) is None for name in anchor.inputs[1:3]):
        return "the image's or the block's shape is known only to a run"
    dtype = group.types[anchor.inputs[0]].dtype
    return f"no sums of {dtype}" if dtype == "bool" or dtype.startswith("complex") else ""


def build(group: Group, target: Target) -> BuiltKernel:
    """Takes one Col2Im whose image and block shapes are constant, with an epilogue."""
    anchor = anchor_of(group)
    image, block = (literal_ints(group, name) for name in anchor.inputs[1:3])
    assert image is not None
    assert block is not None
    builder = new_builder(target)
    joining = _Joining(group, builder, anchor, image, block)
    work = group.types[anchor.outputs[0]].elements * prod(block) * 4
    if work:
        joining.emit(work)
    return finish("col2im", builder, group, flops=work)


@dataclass(frozen=True)
class _Joining:
    """The loops of one Col2Im: rows of the image, tap after tap."""

    group: Group
    builder: KernelBuilder
    anchor: Op
    image: tuple[int, ...]
    block: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return accumulator_type(self.group.types[self.anchor.inputs[0]].dtype)

    @property
    def steps(self) -> tuple[tuple[int, int, int], ...]:
        """Stride, dilation and leading padding of each dimension."""
        rank = len(self.image)
        strides, dilations = (self.anchor.attribute(name) or (1,) * rank for name in ("strides", "dilations"))
        pads = self.anchor.attribute("pads") or (0,) * (2 * rank)
        return tuple(zip(strides, dilations, pads[:rank], strict=True))

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks along each dimension (ONNX Col2Im)."""
        rank = len(self.image)
        ends = (self.anchor.attribute("pads") or (0,) * (2 * rank))[rank:]
        sides = zip(self.image, self.block, self.steps, ends, strict=True)
        return tuple((n + low + high - (k - 1) * d - 1) // s + 1 for n, k, (s, d, low), high in sides)

    def emit(self, work: int) -> None:
        batch, channels = self.group.types[self.anchor.outputs[0]].shape[:2]
        *outer, columns = self.image
        lanes = self.builder.lanes(self.dtype)
        length = min(columns, _RUN)

        def row(index: Index) -> None:
            *place, piece = index
            first = self.builder.bind(tirx.min(piece * length, columns - length))
            sums = self.builder.local(length, self.dtype, "sums")
            sweep(self.builder, length, lanes, lambda j: self.builder.store(sums, j, tirx.const(0, self.dtype)))
            nest(self.builder, self.block, lambda tap: self._add(sums, tuple(place), first, length, tap))
            dtype = self.group.types[self.anchor.outputs[0]].dtype

            def store(j: Expr) -> None:
                value = sums[j] if dtype == self.dtype else tirx.Cast(dtype, sums[j])
                store_epilogue(self.group, self.builder, self.anchor, (*place, first + j), value)

            sweep(self.builder, length, lanes, store)

        parallel_nest(self.builder, [batch, channels, *outer, -(-columns // length)], work, row)

    def _add(self, sums: Buffer, place: Index, first: Expr, length: int, tap: Index) -> None:
        """Add the blocks' elements at one tap to a row of the image."""
        builder, counts = self.builder, self.counts
        kind = self.group.types[self.anchor.inputs[0]]
        source = builder.parameter(self.anchor.inputs[0], kind.elements, kind.dtype)
        found: list[Expr] = []
        fits: list[Expr] = []
        for at, t, (stride, dilation, pad), count in zip(place[2:], tap, self.steps, counts, strict=False):
            shifted = builder.bind(at + pad - t * dilation)
            found.append(builder.bind(tirx.floordiv(shifted, stride)))
            fits += [tirx.EQ(tirx.floormod(shifted, stride), 0), found[-1] >= 0, found[-1] < count]
        channel = place[0] * self.group.types[self.anchor.outputs[0]].shape[1] + place[1]
        depth = channel * prod(self.block) + row_major(tap, self.block)
        stride, dilation, pad = self.steps[-1]
        with builder.when(tirx.all(*fits) if fits else tirx.const(True, "bool")):
            base = builder.bind(depth * prod(counts) + row_major((*found, 0), counts))
            begin = builder.bind(first + pad - tap[-1] * dilation)

            def element(j: Expr) -> None:
                number = builder.name(tirx.floordiv(begin + j, stride))
                held = tirx.max(tirx.min(number, counts[-1] - 1), tirx.const(0, "int32"))
                value = source[base + held]
                value = value if kind.dtype == self.dtype else tirx.Cast(self.dtype, value)
                hit = tirx.And(tirx.And(number >= 0, number < counts[-1]), tirx.EQ(number * stride, begin + j))
                builder.store(sums, j, sums[j] + tirx.Select(hit, value, tirx.const(0, self.dtype)))

            sweep(builder, length, builder.lanes(self.dtype), element)
