"""ONNX forms of what torch does with images, rows and volumes where torch's own exporter has none, or a wrong one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ....runtime.errors import UnsupportedModelError

Translation = Callable[..., Any]


def images() -> dict[Callable[..., Any], Translation]:
    """The translation of each operator, for torch.onnx.export."""
    import torch

    aten = torch.ops.aten
    return {
        aten._adaptive_avg_pool3d.default: _adaptive_average,
        aten.adaptive_max_pool1d.default: _adaptive_maximum(1),
        aten.adaptive_max_pool2d.default: _adaptive_maximum(2),
        aten.adaptive_max_pool3d.default: _adaptive_maximum(3),
        aten.conv3d.default: _convolve_volume,
        aten.grid_sampler_3d.default: _sample_volume,
        aten.upsample_linear1d.default: _resampled_row,
        aten.upsample_bilinear2d.vec: _resampled("linear"),
        aten.upsample_trilinear3d.vec: _resampled("linear"),
        aten.upsample_bicubic2d.vec: _resampled("cubic"),
        **dict.fromkeys((getattr(aten, f"upsample_nearest{axes}d").vec for axes in (1, 2, 3)), _resampled_nearest),
        aten._upsample_bilinear2d_aa.default: _resampled_smoothly("linear"),
        aten._upsample_bicubic2d_aa.default: _resampled_smoothly("cubic"),
    }


def _adaptive_average(self: Any, output_size: Sequence[int]) -> Any:
    """Averages over boxes that cut each of the last axes into `output_size` parts, which overlap where sizes do not divide.

    The part `i` of `n` of an axis of `size` elements is [floor(i * size / n), ceil((i + 1) * size / n)). A box's average is that
    of the averages along each axis. Parts have as many elements as the largest, the others with zeros: products with a constant
    matrix would spread what is not finite over all boxes.
    """
    import numpy as np
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    result, rank = self, len(self.shape)
    for size in self.shape[rank - len(output_size) :]:
        if not isinstance(size, int):
            raise UnsupportedModelError("adaptive_avg_pool", f"an axis of {size} elements", "fix the size of what is pooled")
    for axis, parts in zip(range(rank - len(output_size), rank), output_size, strict=True):
        size = self.shape[axis]
        if size % parts == 0:
            boxes = op.Reshape(result, [*[0] * axis, parts, size // parts, *self.shape[axis + 1 :]])
            result = op.ReduceMean(boxes, op.Constant(value_ints=[axis + 1]), keepdims=0)
            continue
        begins = np.arange(parts) * size // parts
        counts = -(-(np.arange(parts) + 1) * size // parts) - begins
        widest, behind = counts.max(), [1] * (rank - axis - 1)
        offsets = np.arange(widest)
        places = np.minimum(begins[:, None] + offsets, size - 1)
        boxes = op.Gather(result, op.Constant(value=ir.tensor(places)), axis=axis)
        is_inside = (offsets < counts[:, None]).reshape(parts, widest, *behind)
        boxes = op.Where(op.Constant(value=ir.tensor(is_inside)), boxes, op.CastLike(0.0, self))
        means = op.ReduceMean(boxes, op.Constant(value_ints=[axis + 1]), keepdims=0)
        result = op.Mul(means, op.CastLike(op.Constant(value=ir.tensor((widest / counts).reshape(parts, *behind))), self))
    return result


def _adaptive_maximum(axes: int) -> Translation:
    """Maxima over the boxes of `_adaptive_average` of the last `axes` axes, and which elements of these, in a row, they are."""

    def translated(self: Any, output_size: Sequence[int]) -> Any:
        from onnxscript.onnx_opset import opset18 as op

        parts, lead = list(output_size) * (axes // len(output_size)), len(self.shape) - axes
        if set(parts) == {1}:  # of all elements, whose number a call may decide
            flat = _flat(self, lead)
            shape = [0] * lead + [1] * axes
            return op.Reshape(op.ReduceMax(flat, [-1]), shape), op.Reshape(op.ArgMax(flat, axis=-1), shape)
        boxes, places = _boxes(self, parts, lead)
        first = op.ArgMax(boxes, axis=-1)  # [..., parts]
        spread = op.Expand(places, op.Shape(boxes))
        return op.ReduceMax(boxes, [-1], keepdims=0), op.Squeeze(op.GatherElements(spread, first, axis=-1), [-1])

    return translated


def _flat(self: Any, lead: int) -> Any:
    """The tensor with all axes from `lead` on in one, of a number of elements where that is known: of an empty batch ONNX
    finds none itself."""
    from onnxscript.onnx_opset import opset18 as op

    sizes = self.shape[lead:]
    count = math.prod(sizes) if all(isinstance(size, int) for size in sizes) else -1
    return op.Reshape(self, [0] * lead + [count])


def _boxes(self: Any, parts: Sequence[int], lead: int) -> tuple[Any, Any]:
    """The elements of each box [..., parts, elements], and which of a plane they are [parts, elements]. Boxes have as many as the
    largest, its last ones more than once where there are fewer."""
    import numpy as np
    import onnx_ir as ir
    from onnxscript.onnx_opset import opset18 as op

    sizes = self.shape[lead:]
    if not all(isinstance(size, int) for size in sizes):
        raise UnsupportedModelError("adaptive_max_pool", f"a plane of {sizes} elements", "fix the size of what is pooled")
    places = np.zeros((1,) * (2 * len(sizes)), np.int64)
    for axis, (size, count) in enumerate(zip(sizes, parts, strict=True)):
        bounds = [(part * size // count, -(-(part + 1) * size // count)) for part in range(count)]
        widest = max(end - begin for begin, end in bounds)
        along = np.array([[min(begin + i, end - 1) for i in range(widest)] for begin, end in bounds])
        shape = [1] * (2 * len(sizes))
        shape[axis], shape[len(sizes) + axis] = count, widest
        places = places * size + along.reshape(shape)
    places = places.reshape(*parts, -1)
    return op.Gather(_flat(self, lead), op.Constant(value=ir.tensor(places)), axis=lead), op.Constant(value=ir.tensor(places))


def _convolve_volume(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Sequence[int] = (1, 1, 1),
    padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    groups: int = 1,
) -> Any:
    """A convolution of volumes, or of one without a batch. Where it has no bias, torch's exporter makes zeros [channels, 2]."""
    from onnxscript.onnx_opset import opset18 as op

    strides, pads, dilations = (list(sizes) * (3 // len(sizes)) for sizes in (stride, padding, dilation))
    is_alone = len(input.shape) == 4
    volumes = op.Unsqueeze(input, [0]) if is_alone else input
    operands = (volumes, weight) if bias is None else (volumes, weight, bias)
    result = op.Conv(*operands, strides=strides, pads=pads * 2, dilations=dilations, group=groups)
    return op.Squeeze(result, [0]) if is_alone else result


def _sample_volume(input: Any, grid: Any, interpolation_mode: int, padding_mode: int, align_corners: bool) -> Any:
    """A volume [N, C, D, H, W] at places [N, D', H', W', 3] in [-1, 1]."""
    from onnxscript.onnx_opset import opset20 as op

    mode, padding = ("linear", "nearest", "cubic")[interpolation_mode], ("zeros", "border", "reflection")[padding_mode]
    return op.GridSample(input, grid, mode=mode, padding_mode=padding, align_corners=int(align_corners))


def _resampled(mode: str, is_smooth: bool = False) -> Translation:
    """Images of given sizes, or of the whole numbers below `scale_factors` times their sizes. Where their corners are aligned,
    torch takes the quotient of the sizes for the scale, not what was given. An only pixel is in the middle, as by half_pixel,
    whereas ONNX's pytorch_half_pixel puts it at the beginning. Smooth ones are made of all elements that an element covers."""

    def translated(input: Any, output_size: Any, align_corners: bool, scale_factors: Sequence[float] | None) -> Any:
        import onnx_ir as ir
        from onnxscript.onnx_opset import opset18 as op

        how: dict[str, Any] = {
            "mode": mode,
            "coordinate_transformation_mode": "align_corners" if align_corners else "half_pixel",
        }
        how |= {"cubic_coeff_a": -0.5 if is_smooth else -0.75} if mode == "cubic" else {}
        how |= {"antialias": 1, "exclude_outside": 1} if is_smooth else {}
        if scale_factors is not None and not align_corners:
            scales = map(_single_scale, input.shape[2:], scale_factors)
            return op.Resize(input, None, op.Constant(value_floats=[1.0, 1.0, *scales]), **how)
        if scale_factors is None:
            sizes = op.Cast(output_size, to=ir.DataType.INT64)
        elif all(isinstance(size, int) for size in input.shape[2:]):
            scaled = [int(size * scale) for size, scale in zip(input.shape[2:], scale_factors, strict=True)]
            sizes = op.Constant(value_ints=scaled)
        elif all(scale == int(scale) for scale in scale_factors):
            sizes = op.Mul(op.Shape(input, start=2), op.Constant(value_ints=list(map(int, scale_factors))))
        else:
            scales = op.Cast(op.Constant(value_floats=list(scale_factors)), to=ir.DataType.DOUBLE)
            sizes = op.Cast(
                op.Floor(op.Mul(op.Cast(op.Shape(input, start=2), to=ir.DataType.DOUBLE), scales)), to=ir.DataType.INT64
            )
        return op.Resize(input, None, None, op.Concat(op.Shape(input, start=0, end=2), sizes, axis=0), **how)

    return translated


def _single_scale(size: Any, scale: float) -> float:
    """The float32 by which ONNX gives as many elements as torch by a double: of 5 by 1.4 these are 7, not 6."""
    import numpy as np

    found = np.float32(scale)
    if not isinstance(size, int):
        return float(found)
    wanted = int(size * scale)
    for _ in range(4):
        made = int(np.float32(size) * found), int(size * float(found))
        if made == (wanted, wanted):
            break
        found = np.nextafter(found, np.float32(0 if max(made) > wanted else np.inf))
    return float(found)


def _resampled_nearest(input: Any, output_size: Any = None, scale_factors: Sequence[float] | None = None) -> Any:
    from onnxscript.function_libs.torch_lib.ops import nn

    scales = None if scale_factors is None else list(map(_single_scale, input.shape[2:], scale_factors))
    return nn.aten_upsample_nearestnd_vec(input, output_size, scales)


def _resampled_smoothly(mode: str) -> Translation:
    def translated(
        self: Any, output_size: Any, align_corners: bool, scales_h: float | None = None, scales_w: float | None = None
    ) -> Any:
        if align_corners:  # torch scales by the quotient of the distances, but centres as if corners were not aligned
            raise UnsupportedModelError("interpolate", "antialias=True with align_corners=True", "pass align_corners=False")
        scales = None if scales_h is None or scales_w is None else [scales_h, scales_w]
        return _resampled(mode, is_smooth=True)(self, output_size, align_corners, scales)

    return translated


def _resampled_row(self: Any, output_size: Any, align_corners: bool, scales: float | None = None) -> Any:
    """As `_resampled`, of rows; their sizes are given in any case."""
    is_scaled = scales is not None and not align_corners
    return _resampled("linear")(self, output_size, align_corners, [scales] if is_scaled else None)
