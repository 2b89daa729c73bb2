"""Products of 8-bit integers: exactly, of signed and unsigned activations with any zero point, padding included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from prefuse.kernels.groups.group import Group, Op
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target
from torch.nn import functional

from ..codegen.test_registers import assembly_of
from ..convolution.channels_last_cases import channels_last
from ..harness import Case, check_in_turn, type_of

LEVELS = ("avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16-emulated")
rng = np.random.default_rng(8)


# Channels, extent of a window, padding, stride, groups.
SHAPES = ((12, 1, 0, 1, 1), (8, 3, 1, 1, 1), (16, 3, 1, 2, 2), (6, 3, 2, 1, 1), (20, 5, 0, 2, 1))

# Channels before and behind, extent of a window, padding, stride, dilation, groups; the last reaches some results with no tap.
TRANSPOSED = (
    *((16, 32, 2, 0, 2, 1, 1), (12, 18, 4, 1, 2, 1, 1), (8, 5, 3, 1, 2, 1, 1), (20, 33, 3, 0, 1, 2, 1), (24, 12, 2, 0, 2, 1, 2)),
    *((6, 7, 2, 0, 2, 1, 1), (64, 16, 3, 0, 3, 1, 1), (8, 8, 1, 0, 3, 1, 1)),
)


def case_of(op: str, a: np.ndarray, b: np.ndarray, zero: int | None, exact: np.ndarray, **attributes: Any) -> Case:
    """The group that multiplies what an offset and a Cast make of bytes, by weights that are constant."""
    zeros = {} if zero is None else {"z": np.array(zero, a.dtype)}
    widen = Op("Cast", ("a",), ("x",), {"to": 1}, 23)
    if zeros:
        widen = Op("DequantizeLinear", ("a", "one", "z"), ("x",), {}, 23)
        zeros["one"] = np.array(1, np.float32)
    ops = (widen, Op("Cast", ("b",), ("w",), {"to": 1}, 23), Op(op, ("x", "w"), ("y",), attributes, 23))
    arrays = {"a": a, "b": b, **zeros}
    result = exact.astype(np.float32)
    types = {name: type_of(array) for name, array in arrays.items()}
    types |= {"x": TensorType(a.shape, "float32"), "w": TensorType(b.shape, "float32"), "y": type_of(result)}
    literals = {"one": arrays["one"]} if zeros else {}
    group = Group(ops, tuple(arrays), ("y",), types, frozenset({"b", "one"} & arrays.keys()), literals)
    return Case(group, arrays, [result], label=f"{op} {a.dtype} {a.shape} x {b.shape} zero {zero}")


def extremes(dtype: str, *shape: int) -> np.ndarray:
    """Random bytes, many of them the least or the greatest there is."""
    info = np.iinfo(dtype)
    some = rng.integers(info.min, info.max + 1, shape, dtype)
    return np.where(rng.random(shape) < 0.4, np.where(rng.random(shape) < 0.5, info.min, info.max), some).astype(dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "zero"), [("uint8", None), ("uint8", 128), ("uint8", 255), ("int8", None), ("int8", -128)])
def test_products(dtype: str, zero: int | None, level: str) -> None:
    cases = []
    for m, k, n in ((5, 8, 17), (33, 77, 50), (1, 3, 9), (3, 1, 1), (7, 1030, 40), (2, 4, 16)):
        a, b = extremes(dtype, m, k), extremes("int8", k, n)
        cases.append(case_of("MatMul", a, b, zero, (a.astype(np.int64) - (zero or 0)) @ b.astype(np.int64)))
    a, b = extremes(dtype, 2, 3, 6, 12), extremes("int8", 2, 1, 12, 20)
    cases.append(case_of("MatMul", a, b, zero, (a.astype(np.int64) - (zero or 0)) @ b.astype(np.int64)))
    check_in_turn(cases, level, LEVELS)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "zero"), [("uint8", None), ("uint8", 3), ("int8", None), ("int8", 77)])
def test_convolutions(dtype: str, zero: int | None, level: str) -> None:
    """Padding is zero, which stands as the zero point in memory."""
    cases = []
    for shape in SHAPES:
        one = convolution_case(dtype, zero, *shape)
        cases += [one, channels_last(one, template="convolution_channels_last")]
    check_in_turn(cases, level, LEVELS)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "zero"), [("uint8", None), ("uint8", 114), ("int8", 0), ("int8", -128)])
def test_taps_as_words(dtype: str, zero: int | None, level: str) -> None:
    """Channels that fill no words: neighbouring taps of a row do, of images in either layout."""
    cases = []
    for shape in ((3, 7, 3, 2, 1), (1, 5, 2, 1, 1), (2, 2, 0, 1, 1), (10, 3, 1, 1, 2), (7, 4, 2, 3, 1)):
        one = convolution_case(dtype, zero, *shape)
        cases += [channels_last(one, template="convolution_channels_last")]
        cases += [channels_last(one, template="convolution_channels_last", keep_first=("a",))] if shape[0] == 3 else []
    check_in_turn(cases, level, LEVELS)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "zero"), [("uint8", None), ("uint8", 114), ("int8", None), ("int8", -128)])
def test_depthwise(dtype: str, zero: int | None, level: str) -> None:
    """Taps in the padding are skipped: they are the zero point."""
    cases = [
        channels_last(convolution_case(dtype, zero, *shape, outputs=shape[0]), template="convolution_channels_last")
        for shape in ((18, 3, 1, 1, 18), (37, 3, 1, 2, 37), (5, 5, 2, 1, 5), (64, 2, 0, 1, 64))
    ]
    for shape, plane in (((20, 5, 2, 1, 20), (5, 41)), ((17, 3, 0, 2, 17), (7, 60)), ((16, 9, 4, 1, 16), (9, 33))):
        wide = convolution_case(dtype, zero, *shape, outputs=shape[0], plane=plane)  # several strips of a row
        cases.append(channels_last(wide, template="convolution_channels_last"))
    check_in_turn(cases, level, LEVELS)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("dtype", "zero"), [("uint8", None), ("uint8", 3), ("uint8", 255), ("int8", None), ("int8", 77)])
def test_transposed_convolutions(dtype: str, zero: int | None, level: str) -> None:
    """What lies around the image is zero, which stands as the zero point in memory."""
    cases = []
    for shape in TRANSPOSED:
        one = transposed_case(dtype, zero, *shape)
        cases += [one, channels_last(one, template="transposed_convolution_channels_last")]
    check_in_turn(cases, level, LEVELS)


def test_vectors_of_eight_words_without_avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    """AVX_VNNI has the instruction in the encoding of AVX; it is what "cpu" means where there is no AVX-512."""
    flags = frozenset(["avx2", "fma", "f16c", "bmi2", "avx_vnni"])
    monkeypatch.setattr("prefuse.runtime.target.host_cpu_flags", lambda: flags)
    target = Target.parse("cpu", threads=1)
    assert target.level == "avxvnni"
    assert (target.vector_lanes, target.missing_features()) == (8, ())
    assert Target("cpu", "avx2", 1).missing_features() == ()
    assert "avx512f" in Target("cpu", "avx512vnni", 1).missing_features()
    a, b = extremes("uint8", 33, 77), extremes("int8", 77, 50)
    group = case_of("MatMul", a, b, None, a.astype(np.int64) @ b.astype(np.int64)).group
    assembly = assembly_of(group, target, "matmul")
    dots = [line for line in assembly if "vpdpbusd" in line]
    assert dots
    assert all("{vex}" in line for line in dots)
    assert not any("%zmm" in line or "vpmaddwd" in line for line in assembly)


def transposed_case(dtype: str, zero: int | None, channels: int, outputs: int, *window: int) -> Case:
    """A transposed convolution of extremes with a window of (extent, padding, stride, dilation, groups)."""
    kernel, pad, stride, dilation, groups = window
    a, b = extremes(dtype, 2, channels, 5, 6), extremes("int8", channels, outputs // groups, kernel, kernel)
    exact = functional.conv_transpose2d(
        torch.from_numpy(a.astype(np.float64) - (zero or 0)),
        torch.from_numpy(b.astype(np.float64)),
        stride=stride,
        padding=pad,
        groups=groups,
        dilation=dilation,
    ).numpy()
    attributes = {"pads": (pad,) * 4, "strides": (stride,) * 2, "dilations": (dilation,) * 2, "group": groups}
    return case_of("ConvTranspose", a, b, zero, exact, **attributes)


def convolution_case(
    dtype: str,
    zero: int | None,
    channels: int,
    *window: int,
    outputs: int = 18,
    plane: tuple[int, int] = (9, 7),
    weights: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> Case:
    """A convolution of extremes with a window of (extent, padding, stride, groups), by what `weights` makes of extremes."""
    kernel, pad, stride, groups = window
    a, b = extremes(dtype, 2, channels, *plane), weights(extremes("int8", outputs, channels // groups, kernel, kernel))
    padded = np.pad(a.astype(np.int64) - (zero or 0), ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (kernel, kernel), (2, 3))[:, :, ::stride, ::stride]
    parts = zip(np.split(windows, groups, 1), np.split(b.astype(np.int64), groups), strict=True)
    exact = np.concatenate([np.einsum("nchwij,ocij->nohw", part, w) for part, w in parts], 1)
    return case_of("Conv", a, b, zero, exact, pads=(pad,) * 4, strides=(stride,) * 2, group=groups)
