"""Convolutions, plain and transposed, of one to three dimensions; against torch in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from prefuse.kernels.convolution.convolution import plan
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.template.contract import BuiltKernel, Refusal
from torch.nn import functional

from ..harness import LEVELS, Case, check_in_turn, emitted, followed, target_of, type_of

CONVOLVE = (functional.conv1d, functional.conv2d, functional.conv3d)
TRANSPOSE = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)


def convolution(
    shape: tuple[int, ...],
    channels: int,
    kernel: int | tuple[int, ...],
    strides: int | tuple[int, ...] = 1,
    pads: int | tuple[int, ...] = 0,
    dilations: int | tuple[int, ...] = 1,
    *,
    group: int = 1,
    transposed: bool = False,
    extra: int = 0,
    dtype: str = "float32",
) -> Case:
    """A convolution with bias, then y = relu(c * s + r) with s of the channels and r of the result's shape."""
    rank = len(shape) - 2
    k, s, p, d = (value if isinstance(value, tuple) else (value,) * rank for value in (kernel, strides, pads, dilations))
    generator = torch.Generator().manual_seed(len(shape) * 100 + channels)

    def draw(*extents: int) -> torch.Tensor:
        return torch.randn(*extents, generator=generator, dtype=torch.float64)

    weights = draw(shape[1], channels // group, *k) if transposed else draw(channels, shape[1] // group, *k)
    x, bias, scale = draw(*shape), draw(channels), draw(channels, *(1,) * rank)
    if transposed:
        exact = TRANSPOSE[rank - 1](x, weights, bias, s, p, extra, group, d)
    else:
        exact = CONVOLVE[rank - 1](x, weights, bias, s, p, d, group)
    residual = draw(*exact.shape)
    tensors = {"x": x, "w": weights, "b": bias, "s": scale, "r": residual}
    arrays = {name: tensor.numpy().astype(dtype) for name, tensor in tensors.items()}
    attributes = {"strides": s, "pads": (*p, *p), "dilations": d, "group": group}
    if transposed:
        attributes["output_padding"] = (extra,) * rank
    ops = (
        Op("ConvTranspose" if transposed else "Conv", ("x", "w", "b"), ("c",), attributes),
        Op("Mul", ("c", "s"), ("m",)),
        Op("Add", ("m", "r"), ("a",)),
        Op("Relu", ("a",), ("y",)),
    )
    types = {name: type_of(array) for name, array in arrays.items()}
    types |= dict.fromkeys(("c", "m", "a", "y"), types["r"])
    expected = torch.relu(exact * scale + residual).numpy()
    fused = Group(ops, tuple(arrays), ("y",), types, frozenset("wbs"))
    unit = {"float64": 1e-12, "float32": 1e-4, "float16": 2e-1}[dtype]
    label = f"{ops[0].op_type} {shape} {channels} {attributes} {dtype}"
    return Case(fused, arrays, [expected], unit / 10, unit, label, "convolution")


def plain() -> list[Case]:
    return [
        convolution((1, 16, 13, 13), 24, 1),
        convolution((1, 16, 13, 13), 24, 3, 1, 1),
        convolution((2, 3, 30, 27), 9, 7, 2, 3),
        convolution((1, 8, 9, 9), 5, 1, 2),
        convolution((1, 5, 20, 20), 7, 3),
        convolution((1, 12, 7, 7), 33, 3, 2, 1),
        convolution((2, 6, 9, 11), 4, 3, 2, 1, group=2),
        convolution((1, 8, 13, 13), 8, 3, 1, 1, group=8),
        convolution((1, 4, 19, 19), 6, 3, 1, 2, 2),
        convolution((1, 3, 20, 20), 5, 5, 3, 2),
        convolution((1, 3, 1, 1), 5, 1),
        convolution((1, 3, 2, 3), 5, (2, 3)),
        convolution((2, 5, 17), 7, 3, 1, 2, 2),
        convolution((1, 4, 5, 6, 7), 6, (2, 3, 3), (1, 2, 1), 1),
        convolution((1, 2, 4, 5, 6), 3, 1),
        convolution((0, 2, 8, 8), 3, 3),
        convolution((1, 7, 13, 13), 24, 3, 1, 1, dtype="float64"),
        convolution((1, 4, 8, 8), 6, 3, 1, 1, dtype="float16"),
    ]


def transposed() -> list[Case]:
    return [
        convolution((1, 32, 9, 9), 16, 2, 2, transposed=True),
        convolution((2, 6, 5, 7), 4, 3, 2, 1, transposed=True, extra=1),
        convolution((1, 4, 9), 6, 4, 3, 1, 2, group=2, transposed=True),
        convolution((1, 4, 5, 5), 6, 2, 3, transposed=True),
        convolution((1, 2, 3, 4, 3), 2, 3, 1, 1, transposed=True),
        convolution((1, 4, 6, 6), 4, 4, 2, 1, group=4, transposed=True),
    ]


def of_a_run() -> list[Case]:
    """Weights that are not constant: packed by the kernel."""
    cases = [
        convolution((1, 16, 13, 13), 24, 3, 1, 1),
        convolution((2, 6, 9, 11), 4, 3, 2, 1, group=2),
        convolution((1, 8, 13, 13), 8, 3, 1, 1, group=8),
        convolution((2, 5, 17), 7, 3, 1, 2, 2),
        convolution((1, 4, 8, 8), 6, 3, 1, 1, dtype="float16"),
        convolution((2, 6, 5, 7), 4, 3, 2, 1, transposed=True, extra=1),
        convolution((1, 4, 9), 6, 4, 3, 1, 2, group=2, transposed=True),
        convolution((1, 4, 5, 5), 6, 2, 3, transposed=True),
        convolution((1, 40, 33, 33), 30, 3, 1, 1),
    ]
    return [replace(case, group=replace(case.group, constants=frozenset())) for case in cases]


def of_ragged_rows() -> list[Case]:
    """Rows of the result that are a vector and a part of one, less than one, or several: the last part is stored with others."""
    widths = [convolution((1, 2, 5, width + 2), 3, 3) for width in (9, 15, 16, 17, 23, 28, 33)]
    return [*widths, convolution((1, 4, 7, 7), 5, 1), convolution((2, 3, 6, 37), 2, (3, 2), (1, 2), 1, group=1)]


def beside_their_input() -> list[Case]:
    """y = c + x, whose positions are one dimension of the result where the input is read in place."""
    cases = [
        convolution((1, 16, 13, 13), 16, 1),
        convolution((2, 16, 16, 8), 16, 1, group=16),
        convolution((2, 6, 17), 6, 1),
        convolution((1, 8, 9, 9), 8, 3, 1, 1),
    ]
    return [_beside_input(case) for case in cases]


def _beside_input(case: Case) -> Case:
    anchor, inputs = case.group.ops[0], {name: case.arrays[name] for name in ("x", "w", "b")}
    x, w, b = (torch.from_numpy(array).double() for array in inputs.values())
    convolve = CONVOLVE[x.ndim - 3]
    exact = convolve(x, w, b, padding=anchor.attribute("pads", ())[: x.ndim - 2], groups=anchor.attribute("group", 1)) + x
    ops = (anchor, Op("Add", ("c", "x"), ("y",)))
    group = replace(case.group, ops=ops, inputs=tuple(inputs), constants=frozenset("wb"))
    return replace(case, group=group, arrays=inputs, expected=[exact.numpy()], label=f"{case.label} + x")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cases", [plain, transposed, of_a_run, of_ragged_rows, beside_their_input])
def test_convolutions(cases: object, level: str) -> None:
    assert callable(cases)
    check_in_turn(cases(), level)


@pytest.mark.parametrize("level", LEVELS)
def test_results_in_place_of_what_is_added(level: str) -> None:
    cases = [*plain()[::4], *transposed()[::2], *of_ragged_rows()[::2]]
    check_in_turn([replace(case, group=replace(case.group, updates_state=True)) for case in cases], level)


@pytest.mark.parametrize("level", LEVELS)
def test_several_results_leave_the_tile(level: str) -> None:
    cases = [case for make in (plain, transposed) for case in make()[::3]]
    floats = [case for case in cases if case.group.types[case.group.outputs[0]].dtype == "float32"]
    assert floats
    check_in_turn([followed(case, keep_result=True) for case in floats], level)


@pytest.mark.parametrize("level", LEVELS)
def test_results_take_the_memory_of_what_the_epilogue_alone_reads(level: str) -> None:
    """So the last vector of a row computes no element again, whose operands are no longer there."""
    for case in of_ragged_rows()[:1]:
        kernel = emitted(plan, replace(case.group, updates_state=True), target_of(level))
        assert not isinstance(kernel, Refusal)
        assert [(output, kernel.operands[operand].name) for output, operand in kernel.inplace] == [(0, "r")]


@pytest.mark.parametrize(("shape", "kernel"), [((1, 4, 9, 1), (5, 1)), ((1, 4, 1, 9), (1, 5)), ((1, 4, 12, 7), (5, 1))])
def test_all_rows_of_an_image_are_work(shape: tuple[int, ...], kernel: tuple[int, int]) -> None:
    """Also of one as wide as its result, whose rows have nothing between them: by its work a kernel takes threads."""
    case = convolution(shape, 6, kernel)
    built = emitted(plan, case.group, target_of("avx2"))
    assert isinstance(built, BuiltKernel)
    assert built.flops == 2 * shape[1] * 5 * case.expected[0].size
