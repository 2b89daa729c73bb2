"""Sliding windows of convolutions and poolings: kernel, strides, dilations and padding, normalized from ONNX's attributes."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tvm import tirx

from ...runtime.symbolic.sizes import Size, maximum_of, minimum_of
from ..codegen.builder import Expr, KernelBuilder
from ..cost.convolution import share_met
from ..groups.group import Group, Op


@dataclass(frozen=True)
class Window:
    """Parameters of each spatial dimension; `begins` is the padding before the first element, `inputs`, `outputs` the extents."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Taps:
    """The taps that one product uses in one dimension: `count` of them, `first`, `first + step`, ...

    Tap i, for output position o, reads input position o * stride + at(i), where at(i) = `begin + i * pitch`.
    """

    first: int
    step: int
    count: int
    begin: int
    pitch: int

    def at(self, i: Expr) -> Expr:
        return i * self.pitch + self.begin

    @property
    def reach(self) -> tuple[int, int]:
        """Least and greatest at(i)."""
        ends = (self.begin, self.begin + (self.count - 1) * self.pitch) if self.count else (0, 0)
        return min(ends), max(ends)


def read_window(group: Group, op: Op) -> Window:
    """The window of a Conv, ConvTranspose or pooling operator; output extents are those of its inferred type."""
    inputs = group.types[op.inputs[0]].shape[2:]
    outputs = group.types[op.outputs[0]].shape[2:]
    rank = len(inputs)
    kernel = tuple(op.attribute("kernel_shape") or group.types[op.inputs[1]].shape[2:])
    strides = tuple(op.attribute("strides") or (1,) * rank)
    dilations = tuple(op.attribute("dilations") or (1,) * rank)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    auto = op.attribute("auto_pad", "NOTSET")
    if op.op_type == "ConvTranspose":
        begins = _transposed_begins(op, auto, inputs, outputs, strides, spans)
    elif auto in ("SAME_UPPER", "SAME_LOWER"):
        needs = [max((o - 1) * s + e - i, 0) for o, s, e, i in zip(outputs, strides, spans, inputs, strict=True)]
        begins = tuple(need // 2 if auto == "SAME_UPPER" else (need + 1) // 2 for need in needs)
    elif auto == "VALID":
        begins = (0,) * rank
    else:
        begins = tuple((op.attribute("pads") or (0,) * (2 * rank))[:rank])
    return Window(kernel, strides, dilations, begins, inputs, outputs)


def _transposed_begins(
    op: Op, auto: str, inputs: tuple[int, ...], outputs: tuple[int, ...], strides: tuple[int, ...], spans: list[int]
) -> tuple[int, ...]:
    """Padding of a transposed convolution: given, or what cuts its full output down to the asked shape (ONNX ConvTranspose)."""
    rank = len(inputs)
    if op.attribute("output_shape") is None and auto in ("NOTSET", ""):
        return tuple((op.attribute("pads") or (0,) * (2 * rank))[:rank])
    extra = op.attribute("output_padding") or (0,) * rank
    totals = [max((i - 1) * s + e + x - o, 0) for i, s, e, x, o in zip(inputs, strides, spans, extra, outputs, strict=True)]
    if auto == "VALID":
        return (0,) * rank
    return tuple(total // 2 if auto == "SAME_UPPER" else total - total // 2 for total in totals)


def share_of_padding(window: Window, dimension: int, run: int) -> float:
    """The part of the taps along a dimension that read only padding, for tiles of `run` output positions."""
    return 1 - share_met(
        window.inputs[dimension],
        window.outputs[dimension],
        window.kernel[dimension],
        window.strides[dimension],
        window.dilations[dimension],
        begin=window.begins[dimension],
        run=run,
    )


def transposed_taps(window: Window, axis: int, phase: int) -> Taps:
    """The taps that a transposed convolution uses for its output positions `u * stride + phase`; `Taps.at` then takes u for o.

    Output o uses tap w where o + pad - w * dilation is a multiple of the stride.
    """
    kernel, stride, dilation, pad = (v[axis] for v in (window.kernel, window.strides, window.dilations, window.begins))
    step = stride // gcd(stride, dilation)
    first = next((w for w in range(min(step, kernel)) if (phase + pad - w * dilation) % stride == 0), kernel)
    count = len(range(first, kernel, step))
    return Taps(first, step, count, (phase + pad - first * dilation) // stride, -(step * dilation) // stride)


def clipped_taps(
    builder: KernelBuilder, window: Window, dimension: int, corner: Expr, last: Expr | None = None
) -> tuple[Expr, Expr]:
    """The taps [begin, end) that lie in the input, of a window whose first tap is at `corner` of a dimension; with `last`, those
    that do for any window from `corner` to `last`.
    """
    dilation, kernel = window.dilations[dimension], window.kernel[dimension]
    before, behind = dilation - 1 - (corner if last is None else last), window.inputs[dimension] - corner + dilation - 1
    if isinstance(before, int | Size) and isinstance(behind, int | Size):  # at an edge they are numbers for all sizes
        first = minimum_of(maximum_of(before // dilation, 0), kernel)
        return builder.bind(first), builder.bind(maximum_of(minimum_of(behind // dilation, kernel), first))
    begin = builder.bind(tirx.min(tirx.max(tirx.floordiv(before, dilation), 0), kernel))
    return begin, builder.bind(tirx.max(tirx.min(tirx.floordiv(behind, dilation), kernel), begin))
