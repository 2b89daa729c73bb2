"""Groups whose values lie channels-last, with what torch or onnx.reference has for them in float64; for their kernels' tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator
from prefuse.kernels.groups.group import Group, Op
from prefuse.runtime.precision import Precision
from torch.nn import functional

from ..harness import OPSET, Case, operator, type_of

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
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
    whole: bool = False,
) -> Case:
    """A convolution with bias, then relu(c * s + r) with s of the channels and r of the result's shape, all channels-last.

    Operands in `narrow` are bfloat16 in memory, and Casts make float32 of them; with "y" in it, so is the result. Those in
    `rounds` are float32 that the kernel rounds. With `whole`, image and weights are integers, these multiples of 4, of which
    Winograd's smallest tiles make others that bfloat16 has.
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
    if whole:
        image, filters = (8 * image).round().clamp(-8, 8), 4 * (2 * filters).round().clamp(-4, 4)
    x, weights = rounded("x", image), rounded("w", filters)
    bias, scale = draw(channels), draw(channels, *(1,) * rank)
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[rank - 1]
    exact = convolve(padded(x, p), weights, bias, s, 0, d, group)
    tensors = {"x": x, "w": weights, "b": bias, "s": scale, "r": rounded("r", draw(*exact.shape))}
    given = {**tensors, "x": image, "w": filters} if rounds else tensors
    expected = torch.relu(exact * scale + tensors["r"]).numpy()
    arrays = {name: tensor.numpy().astype(BFLOAT16 if name in narrow else dtype) for name, tensor in given.items()}
    attributes = {"strides": s, "pads": p, "dilations": d, "group": group}
    case = _convolution_case(arrays, expected, attributes, dtype, narrow, "bfloat16" if rounds else "float32")
    return channels_last(case, template="convolution_channels_last", keep_first=keep_first)


def _convolution_case(
    arrays: dict[str, np.ndarray],
    expected: np.ndarray,
    attributes: dict[str, Any],
    dtype: str,
    narrow: str,
    precision: Precision,
) -> Case:
    """The group of `convolution`, channels-first; `dtype` is what it computes with."""
    read = {name: f".{name}.wide" if name in narrow else name for name in arrays}
    ops = (
        *(Op("Cast", (name,), (read[name],), {"to": 1}) for name in arrays if name in narrow),
        Op("Conv", (read["x"], read["w"], "b"), ("c",), attributes),
        Op("Mul", ("c", "s"), ("m",)),
        Op("Add", ("m", read["r"]), ("a",)),
        Op("Relu", ("a",), (".y" if "y" in narrow else "y",)),
        *([Op("Cast", (".y",), ("y",))] if "y" in narrow else []),
    )
    types = {name: type_of(array) for name, array in arrays.items()}
    types |= {read[name]: replace(types[name], dtype=dtype) for name in arrays}
    types |= dict.fromkeys(("c", "m", "a", ".y", "y"), types[read["r"]])
    if "y" in narrow:
        types["y"] = replace(types["y"], dtype="bfloat16")
    unit = 4e-2 if "y" in narrow else _UNITS[dtype]  # half a unit of bfloat16 is 4e-3
    label = f"Conv {arrays['x'].shape} {arrays['w'].shape} {attributes} {dtype} narrow {narrow!r}"
    group = Group(ops, tuple(arrays), ("y",), types, frozenset("wbs"), precision=precision)
    return Case(group, arrays, [expected], unit / 10, unit, label)


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
    """The same group of float32 with what its last operator reads as another result, channels-last too."""
    *_, last, tail = case.group.ops
    before = last.inputs[0]
    (out,) = case.group.outputs
    more = Op("Transpose", (before,), ("before",), tail.attributes)
    types = {**case.group.types, "before": case.group.types[out]}
    group = replace(case.group, ops=(*case.group.ops, more), outputs=("before", out), types=types)
    nodes = [onnx.helper.make_node(op.op_type, op.inputs, op.outputs, **op.attributes) for op in group.ops]
    inputs = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, a.shape) for name, a in case.arrays.items()]
    graph = onnx.helper.make_graph(nodes, "several", inputs, [onnx.helper.make_empty_tensor_value_info("before")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)])
    exact: Any = ReferenceEvaluator(model).run(None, {name: array.astype(np.float64) for name, array in case.arrays.items()})
    return replace(case, group=group, expected=[*exact, *case.expected], label=f"{case.label} and before")


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
    arrays = {name: tensor.numpy().astype(BFLOAT16 if name in narrow else dtype) for name, tensor in tensors.items()}
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
