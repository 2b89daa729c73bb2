"""Conv and ConvTranspose of any rank on a GPU, by implicit GEMM: B is read from the input in place.

Row m of a product is an output channel of one group, column n an output position of one image, k an input channel and a tap of
the kernel. Where a group has few output channels, as in depthwise convolutions, tiles would be mostly empty: there each thread
computes one output.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tvm import tirx

from ...runtime.hardware.gpu import gpu_machine
from ...runtime.target import Target
from ..codegen.builder import Expr, Index, row_major, unravel
from ..codegen.gpu_builder import GpuBuilder
from ..cost.estimate import Estimate, with_bytes
from ..groups.group import Group, Op
from ..microkernels.gpu_block_tile import GpuProduct, emit_product, product_clocks
from ..template.contract import BuiltKernel, Candidate, Refusal
from ..template.kernel import finish, new_builder
from ..template.loops import accumulator_type, bound_unravel, store_epilogue
from ..template.values import GroupValues, anchor_of
from .window import Window, read_window

OPERATORS = frozenset(["Conv", "ConvTranspose"])
_FEW_ROWS = 8
_OPERATIONS = 40  # of an element of a window: its place by divisions, and whether it is in the image
_TYPES = ("float32", "float64", "float16", "bfloat16")


def plan(group: Group, target: Target) -> Candidate | Refusal:
    """Takes one Conv or ConvTranspose with an epilogue of pointwise operators of its output's shape."""
    anchor = anchor_of(group)
    source = group.types[anchor.inputs[0]]
    if source.dtype not in _TYPES:
        return Refusal(f"no convolution of {source.dtype}")
    if len(source.shape) < 3:
        return Refusal("has no spatial dimension")
    builder = new_builder(target)
    assert isinstance(builder, GpuBuilder)
    convolution = _Convolution(group, anchor, read_window(group, anchor), builder)
    product, machine = convolution.product(), gpu_machine(target.level)
    if product.m < _FEW_ROWS:
        operations = _OPERATIONS * product.flops // 2
        return Candidate(with_bytes(Estimate(operations, product.flops), group), lambda: convolution.build(product))
    clocks = product_clocks(product, machine, _OPERATIONS)
    return Candidate(Estimate(clocks, product.flops, is_parallel=False), lambda: convolution.build(product))


@dataclass(frozen=True)
class _Convolution:
    """The operands of one convolution, seen as matrices."""

    group: Group
    anchor: Op
    window: Window
    builder: GpuBuilder

    @property
    def dtype(self) -> str:
        return accumulator_type(self.group.types[self.anchor.inputs[0]].dtype)

    @property
    def groups(self) -> int:
        return int(self.anchor.attribute("group", 1))

    @property
    def channels(self) -> tuple[int, int]:
        """Input and output channels of one group."""
        source, result = (self.group.types[name].shape[1] for name in (self.anchor.inputs[0], self.anchor.outputs[0]))
        return source // self.groups, result // self.groups

    def product(self) -> GpuProduct:
        images = self.group.types[self.anchor.inputs[0]].shape[0]
        incoming, outgoing = self.channels
        depth = incoming * prod(self.window.kernel)
        columns = images * prod(self.window.outputs)
        is_transposed = self.anchor.op_type == "ConvTranspose"
        return GpuProduct(
            self.groups, outgoing, columns, depth, self.dtype, self.weight, self.element, self.store, not is_transposed, False
        )

    def build(self, product: GpuProduct) -> BuiltKernel:
        if product.m < _FEW_ROWS:
            self.emit_outputs(product)
        else:
            emit_product(self.builder, product)
        return finish("gpu_convolution", self.builder, self.group, flops=product.flops)

    def emit_outputs(self, product: GpuProduct) -> None:
        """A thread for each output element."""
        builder, extents = self.builder, (product.batch, product.m, product.n)
        if prod(extents) == 0:
            return
        with builder.chunks(prod(extents), product.flops) as chunk:
            batch, m, n = bound_unravel(builder, chunk, extents)
            total = builder.local(1, self.dtype)
            zero = tirx.const(0, "int32")
            builder.store(total, zero, tirx.const(0, self.dtype))
            with builder.loop(product.depth, name="k") as k:
                builder.store(total, zero, total[zero] + self.weight(batch, m, k) * self.element(batch, k, n))
            self.store(batch, m, n, total[zero])

    def weight(self, batch: Expr, m: Expr, k: Expr) -> Expr:
        incoming, outgoing = self.channels
        taps = prod(self.window.kernel)
        if self.anchor.op_type == "Conv":  # [group * outgoing, incoming, taps]
            return self._load(self.anchor.inputs[1], (batch * outgoing + m) * (incoming * taps) + k)
        channel, tap = tirx.floordiv(k, taps), tirx.floormod(k, taps)  # [group * incoming, outgoing, taps]
        return self._load(self.anchor.inputs[1], ((batch * incoming + channel) * outgoing + m) * taps + tap)

    def element(self, batch: Expr, k: Expr, n: Expr) -> Expr:
        """B[k, n]: the input element that channel and tap `k` of output position `n` read; zero in the padding."""
        window, (incoming, _) = self.window, self.channels
        image, *outputs = unravel(n, (0, *window.outputs))
        channel, *taps = unravel(k, (incoming, *window.kernel))
        reads = [self._position(d, o, t) for d, (o, t) in enumerate(zip(outputs, taps, strict=True))]
        place = (image, batch * incoming + channel, *(position for position, _ in reads))
        shape = self.group.types[self.anchor.inputs[0]].shape
        value = self._load(self.anchor.inputs[0], row_major(place, shape))
        conditions = [condition for _, conditions in reads for condition in conditions]
        return tirx.if_then_else(tirx.all(*conditions), value, tirx.const(0, self.dtype)) if conditions else value

    def _position(self, d: int, output: Expr, tap: Expr) -> tuple[Expr, list[Expr]]:
        """The input position of an output's tap in one dimension, and the conditions under which it is in the input."""
        window = self.window
        stride, dilation, begin, extent = (v[d] for v in (window.strides, window.dilations, window.begins, window.inputs))
        if self.anchor.op_type == "Conv":
            position = output * stride + tap * dilation - begin
            last = (window.outputs[d] - 1) * stride + (window.kernel[d] - 1) * dilation - begin
            low, high = begin > 0, last >= extent
            return position, [*([position >= 0] if low else []), *([position < extent] if high else [])]
        numerator = output + begin - tap * dilation  # input * stride + tap * dilation = output + begin
        position = tirx.floordiv(numerator, stride)
        divides = [tirx.EQ(tirx.floormod(numerator, stride), 0)] if stride > 1 else []
        return position, [*divides, numerator >= 0, position < extent]

    def store(self, batch: Expr, m: Expr, n: Expr, value: Expr) -> None:
        _, outgoing = self.channels
        result = self.anchor.outputs[0]
        image, *outputs = unravel(n, (0, *self.window.outputs))
        channel = batch * outgoing + m
        index: Index = (image, channel, *outputs)
        values = GroupValues(self.group, self.builder)
        if len(self.anchor.inputs) > 2 and self.anchor.inputs[2]:
            value = value + tirx.Cast(self.dtype, values.read(self.anchor.inputs[2], (channel,)))
        store_epilogue(self.group, self.builder, self.anchor, index, tirx.Cast(self.group.types[result].dtype, value))

    def _load(self, name: str, offset: Expr) -> Expr:
        kind = self.group.types[name]
        value = self.builder.parameter(name, kind.elements, kind.dtype)[offset]
        return value if kind.dtype == self.dtype else tirx.Cast(self.dtype, value)
