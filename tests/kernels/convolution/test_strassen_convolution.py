"""Strassen's products of positions by channels: the kernel against float64, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
from prefuse.compiler.debugging.oracle import relative_error
from prefuse.kernels.cost.strassen import STRASSEN_LEVELS
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel

from ..harness import LEVELS, Case, check_in_turn, run, target_of
from .channels_last_cases import convolution, joined

_RELATIVE = 3e-6  # of the largest element of the result


def fast(*arguments: Any, **options: Any) -> Case:
    """A convolution with followers, for precision float32-fast."""
    return allowed(convolution(*arguments, **options))


def allowed(case: Case) -> Case:
    """For precision float32-fast."""
    group = replace(case.group, precision="float32-fast")
    return replace(case, group=group, rtol=0.0, atol=_RELATIVE * float(np.abs(case.expected[0]).max(initial=0)))


def forced(case: Case, levels: int) -> Case:
    """With so many levels, whatever it costs."""
    configuration = {"template": "strassen_convolution", "levels": str(levels)}
    return replace(case, group=replace(case.group, configuration=configuration), template="strassen_convolution")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("levels", STRASSEN_LEVELS)
def test_shapes_that_do_not_divide(level: str, levels: int) -> None:
    cases = [
        fast((1, 16, 7, 7), 128, 1),
        fast((2, 17, 5, 6), 83, 1),
        fast((1, 9, 13, 11), 64, 1, 2),
        fast((3, 10, 8, 5), 70, 1, (3, 2)),
        fast((2, 37, 29), 66, 1),
        fast((1, 33, 31), 64, 1, 3),
        fast((2, 12, 3, 5, 4), 71, 1, (1, 2, 2)),
        allowed(joined(convolution((1, 16, 7, 6), 83, 1))),
    ]
    check_in_turn([forced(case, levels) for case in cases], level)


def test_threads_and_runs_make_the_same_bits() -> None:
    cases = [forced(fast((1, 37, 9, 7), 183, 1), 2) for _ in range(3)]
    for case, threads in zip(cases, (1, 2, 2), strict=True):
        run([case], target_of("avx2", threads))
    assert len({case.got[0].tobytes() for case in cases}) == 1


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (fast((1, 512, 14, 14), 512, 1, keep_first=("x",)), "channels-first"),
        (fast((1, 64, 14, 14), 64, 3, 2), "windows are not of one position"),
        (fast((1, 64, 14, 14), 64, 1, 1, 1), "windows are not of one position"),
        (fast((1, 64, 14, 14), 64, 1, 1, (0, 0, 0, 1)), "windows are not of one position"),
        (fast((1, 64, 14, 14), 64, 1, group=2), "windows are not of one position"),
        (fast((1, 64, 56, 56), 64, 1), "would take"),
        (fast((1, 512, 1, 1), 512, 1), "too small"),
        (fast((0, 512, 14, 14), 512, 1), "too small"),
        (fast((1, 64, 14, 14), 64, 1, dtype="float64"), "no fewer multiplications of float64"),
        (convolution((1, 512, 14, 14), 512, 1), "which precision float32 does not allow"),
    ],
)
def test_refusals(case: Case, reason: str) -> None:
    assert reason in refusal(case)


def test_weights_that_change_are_refused() -> None:
    case = fast((1, 512, 14, 14), 512, 1)
    assert "weights are not constant" in refusal(replace(case, group=replace(case.group, constants=frozenset("bs"))))


def refusal(case: Case) -> str:
    built = build_kernel(case.group, target_of("avx2"))
    assert isinstance(built, BuiltKernel)
    assert built.template == "convolution_channels_last"
    (reason,) = (reason for template, reason in built.refused if template == "strassen_convolution")
    return reason


def test_programs_take_it_where_the_user_allows_it() -> None:
    """A stretch of a residual network: positions by 1024 channels to 256 and back, added to what comes in."""
    generator = np.random.default_rng(0)
    shapes = (1, 14, 14, 1024), (256, 1024, 1, 1), (1024, 256, 1, 1)
    image, down, up = (generator.standard_normal(shape).astype(np.float32) for shape in shapes)
    node = onnx.helper.make_node
    nodes = [
        node("Transpose", ["x"], ["i"], perm=[0, 3, 1, 2]),
        node("Conv", ["i", "d"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "u"], ["c"]),
        node("Add", ["c", "i"], ["s"]),
        node("Transpose", ["s"], ["y"], perm=[0, 2, 3, 1]),
    ]
    shape = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, image.shape)
    constants = [onnx.numpy_helper.from_array(array, name) for array, name in ((down, "d"), (up, "u"))]
    graph = onnx.helper.make_graph(nodes, "two", [shape], [onnx.helper.make_empty_tensor_value_info("y")], constants)
    expected = np.maximum(image.astype(np.float64) @ down[:, :, 0, 0].T, 0) @ up[:, :, 0, 0].T + image
    for precision, is_taken in (("float32", False), ("float32-fast", True)):
        net = prefuse.compile(onnx.helper.make_model(graph), target="cpu:avx2", cache=False, precision=precision)
        assert ("strassen_convolution" in str(net.report())) == is_taken
        assert relative_error(np.asarray(net(image)), expected) < 3e-6
