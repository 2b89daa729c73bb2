"""Convolutions and poolings of values that lie channels-last; against torch in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as nest
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from prefuse.kernels.cpu import convolution_channels_last
from prefuse.kernels.cpu.channels_last import channels_last_form
from prefuse.kernels.group import Group, Op
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template import BuiltKernel, Refusal
from prefuse.runtime.precision import Precision
from torch.nn import functional

from .harness import LEVELS, Case, check, operator, run, target_of, type_of

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_UNITS = {"float64": 1e-12, "float32": 1e-4, "float16": 2e-1}


def channels_last(case: Case, *, template: str, keep_first: tuple[str, ...] = ()) -> Case:
    """The same group among transposes: operands of the output's rank that are not constant, and the output, lie channels-last."""
    shape = case.expected[0].shape
    images = [
        name
        for name, array in case.arrays.items()
        if array.ndim == len(shape) and name not in (*case.group.constants, *keep_first)
    ]
    arrays, types = dict(case.arrays), dict(case.group.types)
    heads, names = [], {}
    for name in images:
        arrays[name] = np.ascontiguousarray(np.moveaxis(case.arrays[name], 1, -1))
        names[name] = f".{name}.first"
        types[name], types[names[name]] = type_of(arrays[name]), case.group.types[name]
        heads.append(Op("Transpose", (name,), (names[name],), {"perm": (0, len(shape) - 1, *range(1, len(shape) - 1))}))
    (out,) = case.group.outputs
    names[out] = ".out.first"
    expected = np.ascontiguousarray(np.moveaxis(case.expected[0], 1, -1))
    types[".out.first"], types[out] = types[out], replace(types[out], shape=expected.shape)
    body = [
        replace(op, inputs=tuple(names.get(i, i) for i in op.inputs), outputs=tuple(names.get(o, o) for o in op.outputs))
        for op in case.group.ops
    ]
    tail = Op("Transpose", (".out.first",), (out,), {"perm": (0, *range(2, len(shape)), 1)})
    group = replace(case.group, ops=(*heads, *body, tail), types=types)
    return replace(case, group=group, arrays=arrays, expected=[expected], label=f"{case.label} last", template=template)


def padded(x: torch.Tensor, pads: tuple[int, ...], value: float = 0.0) -> torch.Tensor:
    """With begins and then ends of the last dimensions, as ONNX has them."""
    rank = len(pads) // 2
    return functional.pad(x, tuple(pads[axis + side * rank] for axis in reversed(range(rank)) for side in (0, 1)), value=value)


def convolution(
    shape: tuple[int, ...],
    channels: int,
    kernel: int | tuple[int, ...],
    strides: int | tuple[int, ...] = 1,
    pads: int | tuple[int, ...] = 0,
    dilations: int | tuple[int, ...] = 1,
    *,
    group: int = 1,
    dtype: str = "float32",
    keep_first: tuple[str, ...] = (),
    narrow: str = "",
    rounds: str = "",
) -> Case:
    """A convolution with bias, then relu(c * s + r) with s of the channels and r of the result's shape, all channels-last.

    Operands in `narrow` are bfloat16 in memory, and Casts make float32 of them; with "y" in it, so is the result. Those in
    `rounds` are float32 that the kernel rounds.
    """
    rank = len(shape) - 2
    k, s, d = (value if isinstance(value, tuple) else (value,) * rank for value in (kernel, strides, dilations))
    p = pads if isinstance(pads, tuple) else (pads,) * (2 * rank)
    generator = torch.Generator().manual_seed(sum(shape) + channels)

    def draw(*extents: int) -> torch.Tensor:
        return torch.randn(*extents, generator=generator, dtype=torch.float64)

    def rounded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.bfloat16().double() if name in narrow + rounds else tensor

    image, filters = draw(*shape), draw(channels, shape[1] // group, *k)
    x, weights = rounded("x", image), rounded("w", filters)
    bias, scale = draw(channels), draw(channels, *(1,) * rank)
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    exact = convolve(padded(x, p), weights, bias, s, 0, d, group)
    tensors = {"x": x, "w": weights, "b": bias, "s": scale, "r": rounded("r", draw(*exact.shape))}
    given = {**tensors, "x": image, "w": filters} if rounds else tensors
    arrays = {name: tensor.numpy().astype(_BFLOAT16 if name in narrow else dtype) for name, tensor in given.items()}
    attributes = {"strides": s, "pads": p, "dilations": d, "group": group}
    read = {name: f".{name}.wide" if name in narrow else name for name in tensors}
    ops = (
        *(Op("Cast", (name,), (read[name],), {"to": 1}) for name in tensors if name in narrow),
        Op("Conv", (read["x"], read["w"], "b"), ("c",), attributes),
        Op("Mul", ("c", "s"), ("m",)),
        Op("Add", ("m", read["r"]), ("a",)),
        Op("Relu", ("a",), (".y" if "y" in narrow else "y",)),
        *([Op("Cast", (".y",), ("y",))] if "y" in narrow else []),
    )
    types = {name: type_of(array) for name, array in arrays.items()}
    types |= {read[name]: replace(types[name], dtype=dtype) for name in tensors}
    types |= dict.fromkeys(("c", "m", "a", ".y", "y"), types[read["r"]])
    if "y" in narrow:
        types["y"] = replace(types["y"], dtype="bfloat16")
    expected = torch.relu(exact * scale + tensors["r"]).numpy()
    unit = 4e-2 if "y" in narrow else _UNITS[dtype]  # half a unit of bfloat16 is 4e-3
    label = f"Conv {shape} {channels} {k} {attributes} {dtype} narrow {narrow!r}"
    precision: Precision = "bfloat16" if rounds else "float32"
    group_of = Group(ops, tuple(arrays), ("y",), types, frozenset("wbs"), precision=precision)
    case = Case(group_of, arrays, [expected], unit / 10, unit, label)
    return channels_last(case, template="convolution_channels_last", keep_first=keep_first)


def joined(case: Case) -> Case:
    """The same result as the middle of a Concat of channels, between a crop of one value with every other column and another."""
    (out,), (expected,) = case.group.outputs, case.expected
    images, *heights, width, _ = expected.shape
    generator = np.random.default_rng(0)
    shapes = ((images, *(height + 3 for height in heights), 2 * width, 7), (images, *heights, width, 20))
    crop, whole = (generator.standard_normal(shape).astype(case.group.types[out].dtype) for shape in shapes)
    starts, ends = [*(2 for _ in heights), 1], [*(height + 2 for height in heights), 2 * width]
    steps = [*(1 for _ in heights), 2]
    places = {"starts": starts, "ends": ends, "axes": [*range(1, expected.ndim - 1)], "steps": steps}
    literals = {name: np.array(numbers) for name, numbers in places.items()}
    arrays = {**case.arrays, "crop": crop, "whole": whole, **literals}
    cropped = crop[:, *(slice(2, height + 2) for height in heights), 1::2]
    result = np.concatenate([cropped, expected, whole], axis=-1)
    cut = Op("Slice", ("crop", *places), (".cut",))
    join = Op("Concat", (".cut", out, "whole"), ("joined",), {"axis": expected.ndim - 1})
    types = dict(case.group.types) | {name: type_of(array) for name, array in arrays.items()}
    types |= {
        "joined": type_of(result.astype(types[out].dtype)),
        ".cut": replace(types["crop"], shape=cropped.shape),
    }
    group = Group(
        (*case.group.ops, cut, join),
        (*case.group.inputs, "crop", "whole", *places),
        ("joined",),
        types,
        case.group.constants | set(places),
        literals,
    )
    return replace(case, group=group, arrays=arrays, expected=[result], label=f"{case.label} joined")


def of_several_results(case: Case) -> Case:
    """The same group with what its last operator reads as another result, channels-last too."""
    *_, last, tail = case.group.ops
    before = last.inputs[0]
    (out,) = case.group.outputs
    more = Op("Transpose", (before,), ("before",), tail.attributes)
    types = {**case.group.types, "before": case.group.types[out]}
    group = replace(case.group, ops=(*case.group.ops, more), outputs=("before", out), types=types)
    return replace(case, group=group, label=f"{case.label} and before")


def transposed(
    shape: tuple[int, ...],
    channels: int,
    kernel: int | tuple[int, ...],
    strides: int | tuple[int, ...] = 1,
    pads: int | tuple[int, ...] = 0,
    dilations: int | tuple[int, ...] = 1,
    extra: int | tuple[int, ...] = 0,
    *,
    group: int = 1,
    dtype: str = "float32",
    keep_first: tuple[str, ...] = (),
    is_constant: bool = True,
    narrow: str = "",
) -> Case:
    """A transposed convolution with bias, then relu(c + r), all channels-last. `narrow` as for `convolution`."""
    rank = len(shape) - 2
    k, s, p, d, e = (v if isinstance(v, tuple) else (v,) * rank for v in (kernel, strides, pads, dilations, extra))
    generator = torch.Generator().manual_seed(sum(shape) + channels)

    def draw(*extents: int) -> torch.Tensor:
        return torch.randn(*extents, generator=generator, dtype=torch.float64)

    x, weights, bias = draw(*shape), draw(shape[1], channels // group, *k), draw(channels)
    x, weights = (tensor.bfloat16().double() if name in narrow else tensor for name, tensor in (("x", x), ("w", weights)))
    convolve = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[rank - 1]
    exact = convolve(x, weights, bias, s, p, e, group, d)
    tensors = {"x": x, "w": weights, "b": bias, "r": draw(*exact.shape)}
    arrays = {name: tensor.numpy().astype(_BFLOAT16 if name in narrow else dtype) for name, tensor in tensors.items()}
    attributes = {"strides": s, "pads": (*p, *p), "dilations": d, "output_padding": e, "group": group}
    read = {name: f".{name}.wide" if name in narrow else name for name in "xw"}
    casts = [Op("Cast", (name,), (read[name],), {"to": 1}) for name in narrow]
    anchor = Op("ConvTranspose", (read["x"], read["w"], "b"), ("c",), attributes)
    ops = (*casts, anchor, Op("Add", ("c", "r"), ("a",)), Op("Relu", ("a",), ("y",)))
    types = {name: type_of(array) for name, array in arrays.items()}
    types |= {read[name]: replace(types[name], dtype=dtype) for name in narrow}
    types |= dict.fromkeys(("c", "a", "y"), types["r"])
    expected, unit = torch.relu(exact + tensors["r"]).numpy(), _UNITS[dtype]
    constants = frozenset("wb" if is_constant else "")
    label = f"ConvTranspose {shape} {channels} {k} {attributes} {dtype}"
    case = Case(Group(ops, tuple(arrays), ("y",), types, constants), arrays, [expected], unit / 10, unit, label)
    if not is_constant:
        keep_first = (*keep_first, "w")
    return channels_last(case, template="transposed_convolution_channels_last", keep_first=keep_first)


def transposed_plain() -> list[Case]:
    """Kernels that are as long as their stride, shorter and longer; phases that read alike, and such that do not."""
    return [
        transposed((1, 64, 7, 7), 64, 2, 2),
        transposed((2, 17, 6, 5), 33, 2, 2),
        transposed((1, 8, 5, 6), 20, 4, 2, 1),
        transposed((2, 5, 5, 4), 3, 3, 2, 1, extra=1),
        transposed((1, 16, 9, 9), 40, 3),
        transposed((1, 6, 4, 5), 9, (2, 3), (3, 2), (0, 1), extra=(2, 1)),
        transposed((1, 4, 6, 7), 6, 3, 2, 2, (2, 3)),
        transposed((1, 4, 5, 5), 18, 3, 3, 1, 2),
        transposed((1, 3, 4, 4), 2, 16, 8, 4),
        transposed((1, 7, 3, 3), 4, 1, 5),
        transposed((3, 8, 1, 1), 24, 4),
        transposed((2, 8, 1, 5), 32, 2, 2),
        transposed((1, 3, 2, 2), 5, 2, 2, 1),
        transposed((0, 2, 4, 4), 3, 2, 2),
        transposed((1, 300, 5, 5), 70, 2, 2),
    ]


def transposed_others() -> list[Case]:
    """Groups, other formats, inputs that lie channels-first and weights of a run."""
    return [
        transposed((2, 6, 5, 6), 9, 3, 2, 1, group=3),
        transposed((1, 64, 6, 6), 68, 2, 2, group=4),
        transposed((1, 12, 5, 5), 12, 4, 2, 1, group=12),
        transposed((1, 17, 9, 9), 24, 2, 2, dtype="float64"),
        transposed((1, 16, 8, 8), 6, 3, 2, 1, dtype="float16"),
        transposed((2, 16, 6, 7), 40, 2, 2, keep_first=("x",)),
        transposed((2, 16, 6, 7), 40, 4, 2, 1, keep_first=("x",)),
        transposed((1, 16, 6, 7), 24, 3, 2, 1, is_constant=False),
        transposed((2, 8, 4, 5), 20, 4, 4, group=2, is_constant=False),
    ]


def plain() -> list[Case]:
    """Channels and positions that do not divide a tile, windows with strides and holes."""
    return [
        convolution((1, 64, 7, 7), 64, 1),
        convolution((2, 17, 13, 11), 33, 1),
        convolution((2, 1, 9, 10), 17, 3, 1, 1),
        convolution((1, 3, 30, 27), 9, 7, 2, 3),
        convolution((1, 17, 14, 14), 64, 3, 1, 1),
        convolution((2, 64, 7, 9), 17, 3, 2, 1),
        convolution((1, 8, 9, 9), 5, 1, 2),
        convolution((1, 8, 9, 9), 5, 1, 1, (1, 0, 2, 0)),
        convolution((1, 4, 19, 19), 6, 3, 1, 2, 2),
        convolution((1, 16, 12, 15), 40, (2, 3), (2, 1), (0, 1, 2, 3), (1, 2)),
        convolution((3, 5, 1, 1), 7, 1),
        convolution((2, 8, 1, 1), 32, 1),
        convolution((3, 8, 1, 5), 32, 1),
        convolution((1, 4, 1, 1), 3, 1, 10, (5, 5, 0, 0)),
        convolution((1, 3, 2, 3), 5, (2, 3)),
        convolution((1, 300, 5, 5), 3, 1),
        convolution((0, 2, 8, 8), 3, 3),
        convolution((1, 17, 13, 13), 24, 3, 1, 1, dtype="float64"),
        convolution((1, 16, 8, 8), 6, 3, 1, 1, dtype="float16"),
    ]


def grouped() -> list[Case]:
    return [
        convolution((2, 6, 9, 11), 4, 3, 2, 1, group=2),
        convolution((1, 64, 9, 9), 68, 3, 1, 1, group=4),
        convolution((1, 6, 8, 8), 12, 1, group=3),
        convolution((2, 17, 13, 13), 17, 3, 1, 1, group=17),
        convolution((1, 64, 14, 15), 64, 5, 2, 2, group=64),
        convolution((1, 32, 12, 12), 32, 3, 1, (0, 1, 2, 0), 2, group=32),
        convolution((1, 16, 3, 3), 16, 7, 1, 3, group=16),
        convolution((2, 40, 8, 8), 40, 2, group=40),
        convolution((1, 20, 9, 9), 20, 3, 1, 1, group=20, dtype="float64"),
    ]


def volumes() -> list[Case]:
    """Three spatial dimensions: what holds for two, and lines that lie in planes."""
    return [
        convolution((1, 16, 5, 6, 7), 33, 3, 1, 1),
        convolution((2, 3, 6, 9, 8), 17, (3, 5, 4), (1, 2, 2), (1, 2, 1, 1, 0, 2)),
        convolution((1, 8, 9, 5, 7), 5, (2, 1, 3), 1, (2, 0, 1, 0, 0, 1), (3, 1, 2)),
        convolution((2, 64, 2, 3, 3), 70, 1),
        convolution((1, 12, 4, 4, 6), 9, 1, (2, 1, 3)),
        convolution((1, 8, 1, 2, 1), 16, 3, 1, 1),
        convolution((1, 6, 4, 5, 5), 4, 3, 2, 1, group=2),
        convolution((1, 20, 4, 6, 9), 20, 3, 1, 1, group=20),
        convolution((2, 33, 5, 4, 8), 33, (1, 3, 5), (1, 2, 1), (0, 1, 2, 0, 1, 2), group=33),
        convolution((1, 3, 4, 9, 9), 20, (3, 7, 7), (1, 2, 2), (1, 3, 3, 1, 3, 3), keep_first=("x",)),
        convolution((1, 5, 3, 4, 5), 8, 3, 1, 1, dtype="float64"),
        convolution((1, 6, 3, 4, 9), 16, 3, 1, 1, narrow="xw"),
        convolution((0, 4, 3, 4, 5), 8, 3, 1, 1),
        *_of_a_run([convolution((1, 4, 5, 5, 5), 9, 3, 2, 1)]),
    ]


def signals() -> list[Case]:
    """One spatial dimension: a line of positions, whose transposes are their own inverses."""
    return [
        convolution((1, 64, 37), 70, 3, 2),
        convolution((2, 17, 29), 33, 5, 1, (4, 0)),
        convolution((2, 20, 31), 9, 3, 1, (8, 0), 4),
        convolution((1, 48, 19), 20, 3, 1, (12, 6), 6),
        convolution((3, 12, 9), 40, 1),
        convolution((1, 1, 50), 33, 10, 5, keep_first=("x",)),
        convolution((2, 6, 23), 18, 4, 3, 2, keep_first=("x",)),
        convolution((2, 6, 11), 4, 3, 2, 1, group=2),
        convolution((1, 40, 45), 40, 9, 1, 4, group=40),
        convolution((2, 17, 6), 17, 7, 2, 3, group=17),
        convolution((1, 5, 1), 8, 3, 1, 1),
        convolution((1, 10, 21), 12, 3, 1, 1, dtype="float64"),
        convolution((1, 6, 17), 16, 3, 1, 1, narrow="xw"),
        convolution((2, 34, 14), 20, 2, 2, narrow="xwry"),
        convolution((0, 4, 5), 8, 3, 1, 1),
        *_of_a_run([convolution((1, 4, 15), 9, 3, 2, 1)]),
    ]


def transposed_signals() -> list[Case]:
    """The same: phases of one dimension."""
    return [
        transposed((1, 64, 13), 40, 16, 8, 4),
        transposed((2, 17, 9), 33, 4, 2, 1),
        transposed((2, 5, 6), 3, 3, 2, 1, extra=1),
        transposed((1, 6, 7), 9, 3, 1, 2, 2),
        transposed((1, 12, 5), 12, 4, 2, 1, group=12),
        transposed((2, 16, 8), 24, 2, 2, keep_first=("x",)),
        transposed((1, 16, 7), 24, 3, 2, 1, is_constant=False),
        transposed((2, 8, 5), 20, 4, 2, 1, narrow="xw"),
        transposed((0, 2, 4), 3, 2, 2),
    ]


def transposed_volumes() -> list[Case]:
    """The same: phases of planes, too, and lines that lie in them."""
    return [
        transposed((1, 64, 3, 4, 5), 40, 2, 2),
        transposed((2, 17, 3, 2, 5), 33, 2, 2),
        transposed((1, 8, 2, 4, 3), 20, 4, 2, 1),
        transposed((2, 5, 3, 2, 4), 3, 3, 2, 1, extra=1),
        transposed((1, 16, 4, 3, 5), 40, 3),
        transposed((1, 6, 3, 4, 5), 9, (2, 3, 1), (3, 2, 1), (0, 1, 0), extra=(2, 1, 0)),
        transposed((1, 6, 3, 4, 5), 9, (1, 3, 4), (1, 1, 3), (0, 2, 1)),
        transposed((1, 4, 3, 6, 4), 6, 3, 2, 2, (2, 1, 3)),
        transposed((1, 4, 2, 5, 3), 18, 2, 1, 0, (1, 2, 3)),
        transposed((1, 7, 2, 3, 2), 4, 1, (4, 1, 2)),
        transposed((3, 8, 1, 1, 1), 24, (2, 4, 3)),
        transposed((2, 8, 2, 1, 5), 32, 2, 2),
        transposed((2, 6, 3, 2, 4), 9, 3, 2, 1, group=3),
        transposed((1, 8, 2, 3, 4), 8, 2, 2, group=8),
        transposed((2, 16, 3, 2, 7), 40, 2, 2, keep_first=("x",)),
        transposed((1, 16, 3, 2, 7), 24, 4, 2, 1, keep_first=("x",)),
        transposed((1, 12, 2, 3, 5), 24, 3, 2, 1, is_constant=False),
        transposed((2, 8, 2, 2, 3), 20, (1, 4, 2), (1, 4, 2), group=2, is_constant=False),
        transposed((1, 9, 3, 2, 4), 24, 2, 2, dtype="float64"),
        transposed((1, 16, 2, 3, 4), 6, 3, 2, 1, dtype="float16"),
        transposed((0, 2, 2, 3, 4), 3, 2, 2),
    ]


def over_padding() -> list[Case]:
    """Taps that only meet padding, of lines and of stretches of a line; all of those of some lines, too."""
    return [
        convolution((2, 40, 9, 19), 24, 3, 1, (4, 12, 4, 12), (4, 12)),
        convolution((2, 33, 7, 8), 20, 5, 2, (2, 3, 3, 2)),
        convolution((1, 36, 4, 30), 17, (3, 4), (3, 1), (5, 9, 6, 9), (1, 6)),
        convolution((1, 34, 6, 5), 9, 3, 1, (2, 7, 8, 1), 3, keep_first=("x",)),
        convolution((2, 64, 5, 6), 12, (3, 1), 1, (1, 0, 1, 0)),
        convolution((2, 66, 7, 5), 10, 3, 1, 1, group=2),
        convolution((1, 64, 5, 6), 12, 3, 1, 2, 2, narrow="xw"),
        convolution((1, 32, 2, 3, 9), 20, 3, 1, (1, 1, 4, 1, 1, 4), (1, 1, 4)),
    ]


def from_first() -> list[Case]:
    """The input lies channels-first."""
    return [
        convolution((1, 3, 37, 33), 20, 7, 2, 3, keep_first=("x",)),
        convolution((2, 1, 12, 13), 33, 3, keep_first=("x",)),
        convolution((2, 4, 9, 9), 17, 1, keep_first=("x",)),
        convolution((2, 32, 1, 1), 8, 1, keep_first=("x",)),
        convolution((2, 3, 9, 8), 16, 3, 1, (1, 0, 0, 2), keep_first=("x",)),
    ]


def clipped() -> list[Case]:
    """Clip, whose bounds are constants inside the group and no inputs of it."""
    cases = [convolution((1, 16, 9, 9), 24, 3, 1, 1), convolution((1, 32, 9, 9), 32, 3, 2, 1, group=32)]
    return [_clipped(case) for case in cases]


def _clipped(case: Case) -> Case:
    bounds = {".low": np.zeros((), np.float32), ".high": np.array(1.5, np.float32)}
    ops = [replace(op, op_type="Clip", inputs=(*op.inputs, *bounds)) if op.op_type == "Relu" else op for op in case.group.ops]
    types = {**case.group.types, **{name: type_of(bound) for name, bound in bounds.items()}}
    group = replace(case.group, ops=tuple(ops), types=types, literals=bounds)
    return replace(case, group=group, expected=[np.minimum(case.expected[0], 1.5)], label=f"{case.label} Clip")


def of_a_run() -> list[Case]:
    """Weights that are not constant: packed by the kernel."""
    return _of_a_run([convolution((1, 16, 13, 13), 24, 3, 1, 1), convolution((2, 6, 9, 11), 4, 3, 2, 1, group=2)])


def _of_a_run(cases: list[Case]) -> list[Case]:
    return [replace(case, group=replace(case.group, constants=frozenset())) for case in cases]


@pytest.mark.parametrize("threads", [1, 3])
def test_results_are_joined_with_others(threads: int) -> None:
    cases = [
        convolution((2, 8, 6, 7), 20, 3, 1, 1),
        convolution((1, 16, 9, 9), 16, 3, 1, 1, group=16),
        transposed((2, 16, 5, 6), 24, 2, 2),
        transposed((1, 8, 5, 6), 7, 3, 2, 1),
        pooling("MaxPool", (1, 17, 9, 9), kernel_shape=(3, 3), pads=(1, 1, 1, 1)),
        convolution((2, 8, 3, 4, 5), 20, 3, 1, 1),
        convolution((2, 8, 9), 20, 3, 1, 1),
        transposed((2, 16, 6), 24, 2, 2),
        transposed((2, 16, 2, 3, 5), 24, 2, 2),
    ]
    check([joined(case) for case in cases], target_of("avx2", threads))


@pytest.mark.parametrize("case", [convolution((2, 8, 6, 7), 20, 3, 1, 1), transposed((2, 16, 5, 6), 24, 2, 2)])
def test_groups_have_several_results(case: Case) -> None:
    target = target_of("avx2")
    several = replace(of_several_results(case), expected=[case.expected[0]] * 2)
    run([several], target)
    before, after = several.got
    np.testing.assert_allclose(after, case.expected[0], case.rtol, case.atol)
    np.testing.assert_array_equal(np.maximum(before, 0), after)
    assert (before < 0).any()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "cases",
    [
        plain,
        grouped,
        signals,
        volumes,
        over_padding,
        clipped,
        from_first,
        of_a_run,
        transposed_plain,
        transposed_others,
        transposed_signals,
        transposed_volumes,
    ],
)
def test_convolutions(cases: Any, level: str) -> None:
    check(cases(), target_of(level))


@pytest.mark.parametrize("threads", [1, 3])
def test_work_is_shared_among_threads(threads: int) -> None:
    cases = [
        convolution((1, 64, 30, 29), 70, 1),
        convolution((1, 32, 23, 21), 66, 3, 1, 1),
        convolution((1, 200, 7, 7), 300, 3, 1, 1),
        convolution((1, 64, 40, 40), 64, 3, 1, 1, group=64),
        convolution((1, 20, 5, 11, 9), 66, 3, 1, 1),
        convolution((1, 40, 5, 17, 9), 40, 3, 1, 1, group=40),
        transposed((1, 64, 30, 29), 70, 2, 2),
        transposed((1, 64, 19, 17), 40, 4, 2, 1),
        pooling("MaxPool", (1, 64, 33, 33), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
        convolution((1, 64, 300), 66, 5, 1, 2),
        convolution((1, 64, 331), 64, 9, 1, 4, group=64),
        convolution((2, 64, 90), 64, 31, 2, 15, group=64),
        transposed((1, 64, 130), 40, 4, 2, 1),
        transposed((1, 64, 5, 9, 7), 40, 2, 2),
        transposed((1, 20, 5, 9, 7), 36, 3, 2, 1),
        pooling("MaxPool", (1, 64, 633), kernel_shape=(3,), strides=(2,), pads=(1, 1)),
    ]
    check(cases, target_of("avx2", threads))


def pooling(op_type: str, shape: tuple[int, ...], **attributes: Any) -> Case:
    """One pooling, alone and without the reference's known faults: torch has none of them."""
    x = torch.from_numpy(np.random.default_rng(sum(shape)).standard_normal(shape))
    k = attributes["kernel_shape"]
    s, d = (attributes.get(name, (1,) * len(k)) for name in ("strides", "dilations"))
    pads = attributes.get("pads", (0, 0) * len(k))
    greatest = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[len(k) - 1]
    average = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[len(k) - 1]
    if op_type == "MaxPool":
        exact = greatest(padded(x, pads, -np.inf), k, s, 0, d)
    else:
        ones = padded(torch.ones_like(x), pads, float(attributes.get("count_include_pad", 0)))
        exact = average(padded(x, pads), k, s) / average(ones, k, s)
    expected = [exact.numpy().astype(np.float32)]
    case = operator(op_type, x.numpy().astype(np.float32), expected=expected, rtol=1e-5, atol=1e-5, **attributes)
    return channels_last(case, template="pooling_channels_last")


def poolings() -> list[Case]:
    return [
        pooling("MaxPool", (1, 64, 13, 13), kernel_shape=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1)),
        pooling("MaxPool", (2, 17, 9, 8), kernel_shape=(2, 2), strides=(2, 2)),
        pooling("MaxPool", (1, 3, 9, 12), kernel_shape=(3, 2), dilations=(2, 3), pads=(2, 1, 0, 2)),
        pooling("MaxPool", (1, 1, 5, 5), kernel_shape=(5, 5)),
        pooling("AveragePool", (2, 17, 9, 11), kernel_shape=(3, 3), strides=(2, 1), pads=(0, 1, 2, 1)),
        pooling("AveragePool", (1, 33, 8, 8), kernel_shape=(3, 3), pads=(1, 1, 1, 1), count_include_pad=1),
        pooling("AveragePool", (1, 40, 6, 6), kernel_shape=(2, 3)),
        pooling("AveragePool", (1, 20, 13, 15), kernel_shape=(11, 12), strides=(1, 2)),
        pooling("MaxPool", (2, 20, 14, 15), kernel_shape=(13, 13), pads=(6, 6, 6, 6), strides=(3, 2)),
        pooling("MaxPool", (2, 20, 15), kernel_shape=(3,), strides=(2,), pads=(1, 0)),
        pooling("AveragePool", (1, 17, 14), kernel_shape=(4,), strides=(3,), pads=(1, 2)),
        pooling("MaxPool", (1, 20, 5, 6, 7), kernel_shape=(3, 2, 3), strides=(2, 2, 1), pads=(1, 0, 1, 1, 1, 1)),
        pooling("AveragePool", (2, 17, 4, 5, 6), kernel_shape=(2, 3, 3), strides=(1, 2, 2), pads=(0, 1, 1, 1, 0, 1)),
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_poolings(level: str) -> None:
    check(poolings(), target_of(level))


def test_other_groups_are_refused() -> None:
    """Each for the reason that its form is not this one."""
    case = convolution((1, 8, 5, 5), 8, 1)
    *rest, tail = case.group.ops
    turned = replace(tail, attributes={"perm": (0, 3, 2, 1)})
    assert isinstance(channels_last_form(replace(case.group, ops=(*rest, turned))), Refusal)
    built = build_kernel(replace(case.group, ops=(*rest, turned)), target_of("avx2"))
    assert isinstance(built, tuple)
    assert ("convolution_channels_last", "its values do not lie channels-last") in built
    integers = {name: replace(kind, dtype="int32") for name, kind in case.group.types.items()}
    built = build_kernel(replace(case.group, types=integers), target_of("avx2"))
    assert isinstance(built, tuple)
    assert ("convolution_channels_last", "no convolution of int32") in built


def narrow_convolutions() -> list[Case]:
    """Pairs of channels; and what has none: an odd number of them, images that lie channels-first, float32 images."""
    return [
        convolution((1, 64, 9, 9), 64, 3, pads=1, narrow="xw"),
        convolution((2, 6, 7, 5), 9, 3, 2, 1, narrow="xwr"),
        convolution((1, 32, 14, 14), 70, 1, narrow="xwry"),
        convolution((3, 18, 6, 7), 33, 1, 2, narrow="xw"),
        convolution((1, 8, 9, 9), 17, 3, 1, 2, 2, narrow="xwy"),
        convolution((1, 12, 6, 5), 21, (1, 3), narrow="xw", group=3),
        convolution((1, 2, 5, 5), 3, 2, narrow="xw"),
        convolution((1, 16, 1, 1), 40, 1, narrow="xwr"),
        convolution((0, 4, 5, 5), 3, 2, narrow="xw"),
        convolution((1, 5, 6, 7), 9, 3, 1, 1, narrow="xw"),
        convolution((1, 9, 6, 7), 12, 3, 1, 1, narrow="xw", group=3),
        convolution((1, 8, 6, 7), 9, 3, 1, 1, narrow="xw", keep_first=("x",)),
        convolution((1, 8, 6, 7), 9, 3, 1, 1, narrow="w"),
        convolution((1, 24, 6, 7), 24, 3, 1, 1, narrow="xw", group=24),
        convolution((2, 18, 23), 33, 3, 2, 1, narrow="xw"),
        convolution((1, 18, 4, 5, 6), 33, 3, 1, 1, narrow="xwry"),
        convolution((2, 6, 3, 4, 9), 17, 3, (1, 2, 2), 1, narrow="xwry"),
        convolution((1, 10, 3, 5, 6), 15, (3, 1, 1), 1, (2, 0, 0, 2, 0, 0), (2, 1, 1), group=5, narrow="xw"),
        convolution((1, 4, 3, 5, 6), 4, 3, 1, 1, group=4, narrow="xwy"),
    ]


@pytest.mark.parametrize("level", ["avx2", "avx512bf16"])
def test_weights_that_are_asked_for_ahead(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_channels_last, "_FAR_BYTES", 0)
    cases = [convolution((1, 18, 7, 7), 33, 3, 1, 1), convolution((1, 18, 7, 7), 33, 3, 2, 1, narrow="xw")]
    check([*cases, convolution((2, 34, 5, 5), 70, 1, narrow="xw")], target_of(level))


def rounded_rows() -> list[Case]:
    """Pairs of neighbouring taps: kernels of an even and of an odd width, in either layout, strided, grouped, over padding."""
    return [
        convolution((1, 3, 37, 33), 20, 7, 2, 3, keep_first=("x",), rounds="xw"),
        convolution((2, 1, 12, 13), 33, 3, keep_first=("x",), rounds="xw"),
        convolution((2, 3, 9, 8), 16, 2, 1, (1, 0, 0, 2), keep_first=("x",), rounds="xw", narrow="y"),
        convolution((2, 5, 9, 8), 16, (3, 5), 3, (1, 2, 0, 2), (2, 1), rounds="xw"),
        convolution((1, 9, 7, 6), 12, 3, 1, 1, group=3, rounds="xw"),
        convolution((1, 33, 3, 5), 9, 3, 1, 2, rounds="xw"),
        convolution((1, 3, 4, 6, 5), 9, 3, 1, 1, rounds="xw"),
        convolution((1, 1, 3, 4), 5, (2, 4), rounds="xw"),
        convolution((2, 3, 37), 20, 5, 2, 3, rounds="xw"),
    ]


@pytest.mark.parametrize("threads", [1, 3])
def test_pairs_of_neighbouring_taps(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_channels_last, "_LEAST_ROUNDED", 0)
    check(rounded_rows(), target_of("avx512bf16", threads))


def test_what_no_tap_reads_may_be_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of an odd width reads one element more, whose weight is zero."""
    monkeypatch.setattr(convolution_channels_last, "_LEAST_ROUNDED", 0)
    case = convolution((1, 1, 5, 9), 4, 3, rounds="xw", keep_first=("x",))
    spoiled = case.arrays["x"].copy()
    spoiled[..., 5:] = np.inf
    case = replace(case, arrays={**case.arrays, "x": spoiled})
    run([case], target_of("avx512bf16"))
    np.testing.assert_allclose(case.got[0][:, :, :3].astype(np.float64), case.expected[0][:, :, :3], 1e-3, 1e-3)


def test_taps_are_paired_where_that_is_exact_enough_and_pays() -> None:
    """Not in float32, nor pairs of channels, nor taps that are no neighbours, nor what is too small."""
    size = (1, 3, 64, 64)
    cases = {
        True: [convolution(size, 64, 3, rounds="xw")],
        False: [
            convolution(size, 64, 3),
            convolution((1, 4, 64, 64), 64, 3, rounds="xw"),
            convolution(size, 64, 3, 1, 0, 2, rounds="xw"),
            convolution(size, 64, (3, 1), rounds="xw"),
            convolution((1, 3, 16, 16), 64, 3, rounds="xw"),
            convolution(size, 64, 3, rounds="xw", narrow="x"),
        ],
    }

    def are_paired(case: Case, level: str) -> bool:
        built = build_kernel(case.group, target_of(level))
        assert isinstance(built, BuiltKernel), built
        return any(",rounded" in str(operand.pack) for operand in built.operands)

    for expected, some in cases.items():
        for case in some:
            assert are_paired(case, "avx512bf16") == expected, case.label
    assert not are_paired(cases[True][0], "avx512")


def narrow_transposed() -> list[Case]:
    """Phases by pairs of channels, alone and as a copy with zeros; odd channels and wide weights go without pairs."""
    return [
        transposed((1, 64, 7, 7), 64, 2, 2, narrow="xw"),
        transposed((2, 18, 6, 5), 33, 2, 2, narrow="xw"),
        transposed((1, 8, 5, 6), 20, 4, 2, 1, narrow="xw"),
        transposed((1, 6, 4, 5), 9, (2, 3), (3, 2), (0, 1), extra=(2, 1), narrow="xw"),
        transposed((2, 12, 5, 6), 9, 3, 2, 1, group=3, narrow="xw"),
        transposed((1, 7, 6, 6), 9, 3, 2, 1, narrow="xw"),
        transposed((1, 8, 6, 6), 9, 3, 2, 1, narrow="w"),
        transposed((1, 64, 3, 2, 5), 64, 2, 2, narrow="xw"),
        transposed((2, 18, 2, 3, 5), 33, 2, 2, narrow="xw"),
        transposed((1, 6, 3, 2, 5), 9, (2, 3, 4), (3, 2, 2), (0, 1, 1), extra=(2, 1, 0), narrow="xw"),
        transposed((2, 12, 2, 3, 4), 9, 3, 2, 1, group=3, narrow="xw"),
        transposed((1, 7, 2, 3, 4), 9, 3, 2, 1, narrow="xw"),
    ]


@pytest.mark.parametrize("level", [*LEVELS, "avx512bf16"])
def test_convolutions_of_bfloat16(level: str) -> None:
    check([*narrow_convolutions(), *narrow_transposed()], target_of(level))


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
def test_poolings_of_bfloat16(op_type: str) -> None:
    """They read images as they lie, for results in float32 and rounded ones, in either layout."""
    cases = []
    for rank, result in nest((2, 3), ("float32", "bfloat16")):
        x = np.random.default_rng(0).standard_normal((2, 37, 9, 8, 5)[: rank + 2]).astype(_BFLOAT16)
        pool = getattr(functional, f"{'max' if op_type == 'MaxPool' else 'avg'}_pool{rank}d")
        exact = pool(torch.from_numpy(x.astype(np.float64)), 2, 2).numpy()
        names = ("y",) if result == "float32" else (".y", "y")
        anchor = Op(op_type, (".x",), names[:1], {"kernel_shape": (2,) * rank, "strides": (2,) * rank})
        ops = (
            Op("Cast", ("x",), (".x",), {"to": 1}),
            anchor,
            *([Op("Cast", names, ("y",), {"to": 16})] if len(names) > 1 else []),
        )
        ops = tuple(replace(op, inputs=op.inputs[:1]) for op in ops)
        wide = replace(type_of(x), dtype="float32")
        types = {"x": type_of(x), ".x": wide, ".y": replace(wide, shape=exact.shape)}
        types["y"] = replace(types[".y"], dtype=result)
        unit = 0.0 if op_type == "MaxPool" else 2.0**-8 if result == "bfloat16" else 1e-6
        case = Case(Group(ops, ("x",), ("y",), types), {"x": x}, [exact], unit, unit / 10, f"{op_type} {result}", "pooling")
        cases += [case, channels_last(case, template="pooling_channels_last")]
    check(cases, target_of("avx2"))
