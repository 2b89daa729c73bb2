"""Winograd's convolution: its matrices exactly, its kernel against float64, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import prefuse
import pytest
import torch
from prefuse.compiler.debugging.oracle import relative_error
from prefuse.kernels.convolution import winograd_channels_last
from prefuse.kernels.convolution.winograd_transforms import PackScales, PackWinograd, winograd
from prefuse.kernels.cost.convolution import Convolution, channels_last_cycles
from prefuse.kernels.cost.winograd import WINOGRAD_HALF_OUTPUTS, tiles_along, winograd_choice
from prefuse.kernels.groups.group import Op
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel
from prefuse.runtime.hardware.machine import row
from prefuse.runtime.plan import TensorType
from prefuse.runtime.precision import TOLERANCES
from torch.nn import functional

from ..harness import LEVELS, Case, check, check_in_turn, run, target_of
from .channels_last_cases import convolution

ZEN5 = row("zen5", 16)  # that what stands here was measured on

_OUTPUTS = sorted({outputs for allowed in TOLERANCES.values() for outputs in allowed.winograd_outputs})
_RELATIVE = 6e-6  # of the largest element of the result, by tiles of up to 6
_LARGEST_TILES = 4.0  # so many times that by tiles of 7
_HALF_UNIT = 2.0**-8  # of bfloat16, relative
_HALF_ERROR = 1000  # times that of float32 weights: what rounding weights to bfloat16 would do


def fast(*arguments: Any, template: str = "winograd_channels_last", **options: Any) -> Case:
    """A convolution with followers, for precision float32-fast, or bfloat16 where operands are narrow."""
    case = convolution(*arguments, **options)
    largest = float(np.abs(case.expected[0]).max(initial=0))
    narrow = str(options.get("narrow", ""))
    group = replace(case.group, precision="bfloat16" if narrow else "float32-fast")
    return replace(case, group=group, rtol=_HALF_UNIT if "y" in narrow else 0.0, atol=_RELATIVE * largest, template=template)


def forced(case: Case, outputs: int | str) -> Case:
    """With tiles of this size, whatever it costs."""
    configuration = {"template": "winograd_channels_last", "outputs": str(outputs)}
    precision = case.group.precision if outputs in case.group.tolerance.winograd_outputs else "bfloat16"
    is_on_branch = "in pairs" in configuration["outputs"]
    group = replace(case.group, configuration=configuration, precision=precision, is_on_branch=is_on_branch)
    return replace(case, group=group, atol=case.atol * (_LARGEST_TILES if outputs == 7 else 1.0))


@pytest.mark.parametrize("outputs", _OUTPUTS)
def test_matrices_compute_a_convolution(outputs: int) -> None:
    method, generator = winograd(outputs), np.random.default_rng(outputs)
    builder: Any = SimpleNamespace(name=lambda value: value)
    data, weights = generator.standard_normal((method.extent, method.extent)), generator.standard_normal((3, 3))
    g = np.array(method.weights)

    def twice(transform: Any, matrix: np.ndarray) -> np.ndarray:
        """T matrix T^T, where `transform` is T times the columns."""
        return np.array(transform(builder, np.array(transform(builder, matrix)).T)).T

    found = twice(method.transform_result, g @ weights @ g.T * twice(method.transform_data, data))
    windows = np.lib.stride_tricks.sliding_window_view(data, (3, 3))
    np.testing.assert_allclose(found, np.einsum("ijkl,kl->ij", windows, weights), rtol=0, atol=1e-13)


def test_weights_are_packed_in_panels() -> None:
    pack, array = PackWinograd(2, 4, 16), np.random.default_rng(0).standard_normal((40, 3, 3, 3)).astype(np.float32)
    packed = pack(array)
    assert packed.shape == pack.packed_type(TensorType(array.shape, "float32")).shape == (2, 2, 36, 3, 16)
    g = np.array(winograd(4).weights)
    np.testing.assert_allclose(packed[1, 1, :, 2, 3].reshape(6, 6), g @ array[20 + 16 + 3, 2] @ g.T, rtol=1e-6)
    assert not packed[:, 1, :, :, 4:].any()


def test_weights_are_packed_in_pairs() -> None:
    """Neighbouring inputs side by side, of the numbers that are packed in float32."""
    array = np.random.default_rng(0).standard_normal((40, 6, 3, 3)).astype(np.float32)
    wide, narrow = PackWinograd(2, 2, 16), PackWinograd(2, 2, 16, "bfloat16")
    packed = narrow(array)
    assert packed.shape == narrow.packed_type(TensorType(array.shape, "float32")).shape == (2, 2, 16, 3, 16, 2)
    np.testing.assert_array_equal(packed[..., 1], wide(array)[:, :, :, 1::2].astype(packed.dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("number", [np.inf, np.nan, 3e38])
def test_odd_weights_are_packed_without_a_warning(number: float, dtype: str) -> None:
    array = np.ones((2, 3, 3, 3), np.float32)
    array[0, 1] = number
    packed = PackWinograd(1, 4, 16, dtype)(array)
    assert np.isfinite(packed[..., 1]).all()
    assert np.isfinite(packed[0, 0, :, 1, 0]).all() == (number == 3e38 and dtype == "float16")


def plain() -> list[Case]:
    """Planes and channels that do not divide a tile or a vector, and all kinds of padding."""
    return [
        fast((1, 16, 13, 11), 24, 3, 1, 1),
        fast((2, 17, 8, 9), 33, 3, 1, (0, 1, 2, 0)),
        fast((1, 1, 9, 10), 5, 3, 1, 2),
        fast((1, 5, 3, 3), 7, 3),
        fast((3, 8, 1, 1), 3, 3, 1, 1),
        fast((2, 4, 1, 6), 70, 3, 1, (1, 0, 1, 3)),
        fast((1, 3, 4, 4), 2, 3, 1, (5, 5, 0, 1)),
        fast((2, 6, 9, 11), 40, 3, 1, 1, group=2),
    ]


def dilated() -> list[Case]:
    """Phases of unequal numbers of rows, without any, and other ones of columns."""
    return [
        fast((1, 16, 13, 11), 24, 3, 1, 2, 2),
        fast((2, 17, 20, 9), 20, 3, 1, (3, 0, 1, 4), (3, 2)),
        fast((1, 5, 4, 23), 7, 3, 1, (7, 1, 8, 1), (7, 1)),
        fast((1, 6, 7, 3), 40, 3, 1, 12, 12, group=2),
    ]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("outputs", "threads"), list(zip(_OUTPUTS, cycle((1, 3)), strict=False)))
def test_dilated_convolutions(outputs: int, level: str, threads: int) -> None:
    check_in_turn([forced(case, outputs) for case in dilated()], level, threads=threads)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("outputs", _OUTPUTS)
def test_convolutions(outputs: int, level: str) -> None:
    check_in_turn([forced(case, outputs) for case in plain()], level)


@pytest.mark.parametrize("level", LEVELS)
def test_bfloat16(level: str) -> None:
    """Images and weights are read as they lie, one of them or both; sums are float32, and rounded once where they are stored."""
    cases = [fast((1, 17, 13, 11), 24, 3, 1, 1, narrow=narrow) for narrow in ("xw", "x", "xwr", "xwry")]
    cases.append(fast((2, 6, 9, 11), 40, 3, 1, (0, 1, 2, 0), group=2, narrow="xwy"))
    check_in_turn([forced(case, outputs) for case in cases for outputs in (4, 7)], level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("outputs", [2, 4, WINOGRAD_HALF_OUTPUTS])
def test_weights_in_float16(outputs: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the bytes of large weights, with errors as of direct products of bfloat16 ones."""
    monkeypatch.setattr(winograd_channels_last, "_WIDE_BYTES", 0)
    cases = [fast((1, 17, 13, 11), 24, 3, 1, 1, narrow="x"), fast((2, 6, 9, 11), 40, 3, 1, (0, 1, 2, 0), group=2, narrow="xw")]
    check_in_turn([replace(forced(case, outputs), atol=case.atol * _HALF_ERROR) for case in cases], level)


def test_pairs_of_bfloat16() -> None:
    """Of integers whose transformed numbers bfloat16 has, so that nothing is rounded but the result."""
    shapes: list[tuple[tuple[int, ...], int, int | tuple[int, ...], int]] = [
        ((1, 32, 7, 7), 48, 1, 1),
        ((1, 18, 7, 5), 33, (0, 1, 2, 0), 1),
        ((1, 40, 8, 8), 70, 1, 2),
        ((2, 2, 3, 3), 5, 1, 1),
        ((1, 512, 6, 8), 50, 1, 1),
    ]
    cases = [fast(shape, out, 3, 1, pads, group=group, narrow="x", whole=True) for shape, out, pads, group in shapes]
    cases.append(fast((1, 32, 9, 7), 48, 3, 1, 2, 2, narrow="x", whole=True))
    check([forced(case, "2 in pairs") for case in cases], target_of("avx512bf16", 3))


def test_pairs_are_rounded_once_more() -> None:
    case = fast((1, 64, 7, 7), 64, 3, 1, 1, narrow="x")
    atol = 3 * _HALF_UNIT * float(np.abs(case.expected[0]).max())
    check([replace(forced(case, "2 in pairs"), atol=atol)], target_of("avx512bf16"))


def test_scales_fill_the_range_of_float16() -> None:
    generator = np.random.default_rng(0)
    sizes = np.array([1e-30, 1.0, 1e30, 0.0, np.inf, 1e-3])
    array = (generator.standard_normal((6, 5, 3, 3)) * sizes[:, None, None, None]).astype(np.float32)
    scales = PackScales(2, 4, 2)(array)
    assert scales.shape == PackScales(2, 4, 2).packed_type(TensorType(array.shape, "float32")).shape == (2, 2, 2)
    with np.errstate(invalid="ignore"):
        halves, wide = PackWinograd(2, 4, 2, "float16")(array), PackWinograd(2, 4, 2)(array)
    assert halves.dtype == np.float16
    for channel, size in enumerate(sizes):
        group, panel, column = channel // 3, channel % 3 // 2, channel % 3 % 2
        found, exact = halves[group, panel, ..., column].astype(np.float64), wide[group, panel, ..., column].astype(np.float64)
        if np.isfinite(size):
            np.testing.assert_allclose(
                found * scales[group, panel, column], exact, rtol=2.0**-11, atol=1e-7 * np.abs(exact).max()
            )
        else:
            assert not np.isfinite(found).any()
    assert (scales[:, 1, 1] == 1.0).all()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("is_shared", [False, True])
def test_blocks_of_tiles(is_shared: bool, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks, the last of which has fewer tiles; threads take blocks, or panels of all blocks."""
    monkeypatch.setattr(winograd_channels_last, "_LEAST_TILES", 1000 if is_shared else 1)
    monkeypatch.setattr(winograd_channels_last, "_NEAR_BYTES", 4 * 36 * 80 * 20)
    target = target_of("avx2", threads)
    monkeypatch.setattr(winograd_channels_last, "_FAR_SHARE", 4 * 36 * 40 * 37 / target.machine.l3.size_bytes)
    monkeypatch.setattr(winograd_channels_last, "_PRODUCT_BYTES", 4 * 36 * 32 * 15)
    cases = [fast((2, 36, 30, 29), 70, 3, 1, 1), fast((1, 36, 50, 21), 68, 3, 1, 0, group=2)]
    check([forced(case, 4) for case in cases], target)


def test_runs_are_equal_bit_for_bit() -> None:
    case, again = (fast((2, 64, 21, 18), 48, 3, 1, 1) for _ in range(2))
    run([case], target_of("avx2"))
    run([again], target_of("avx2"))
    assert case.got[0].tobytes() == again.got[0].tobytes()


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (fast((1, 64, 28, 28), 64, 3, 2, 1, template=""), "without strides"),
        (fast((1, 64, 28, 28), 64, 3, 1, 20, 20, template=""), "would take"),
        (fast((1, 64, 28, 28), 64, (3, 1), template=""), "not of 3x3 windows"),
        (fast((1, 1, 28, 28), 64, 3, template=""), "would take"),
        (fast((1, 64, 3, 3), 64, 3, template=""), "would take"),
        (fast((1, 64, 28, 28), 64, 3, 1, 1, group=64, template=""), "would take"),
        (fast((1, 64, 9, 9), 64, 3, dtype="float64", template=""), "no fast convolution of float64"),
        (fast((1, 64, 28, 28), 64, 3, keep_first=("x",), template=""), "channels-first"),
        (fast((0, 64, 28, 28), 64, 3, template=""), "is empty"),
        (convolution((1, 64, 28, 28), 64, 3), "which precision float32 does not allow"),
    ],
)
def test_refusals(case: Case, reason: str) -> None:
    assert reason in refusal(case)


def test_weights_of_a_run_are_refused() -> None:
    case = fast((1, 64, 28, 28), 64, 3)
    assert "weights are not constant" in refusal(replace(case, group=replace(case.group, constants=frozenset())))


def test_an_input_that_is_computed_is_refused() -> None:
    case = fast((1, 64, 28, 28), 64, 3, 1, 1)
    (head, *others), types = case.group.ops, case.group.types
    before = Op("Relu", head.inputs, (".relu",))
    group = replace(case.group, ops=(before, replace(head, inputs=(".relu",)), *others), types={**types, ".relu": types["x"]})
    assert "its input is computed" in refusal(replace(case, group=group))


def refusal(case: Case) -> str:
    built = build_kernel(case.group, target_of("avx2"))
    assert isinstance(built, BuiltKernel)
    assert built.template == "convolution_channels_last"
    (reason,) = (reason for template, reason in built.refused if template == "winograd_channels_last")
    return reason


def test_pairs_of_bfloat16_count_half() -> None:
    """Where half the products of a direct convolution are fewer than Winograd's with its larger weights, it stays direct."""
    shape = (1, 512, 7, 7)
    templates = []
    for case in (fast(shape, 512, 3, 1, 1), fast(shape, 512, 3, 1, 1, narrow="xw")):
        built = build_kernel(case.group, target_of("avx512bf16"))
        assert isinstance(built, BuiltKernel)
        templates.append(built.template)
    assert templates == ["winograd_channels_last", "convolution_channels_last"]


def test_tiles_are_chosen_by_their_cost() -> None:
    """Few large tiles where weights and image are small; smaller ones where either would be most of the bytes."""
    large = Convolution(1, 1, 64, 64, 224, 224, 224, 224, (3, 3), (1, 1), is_padded=True)
    middle = replace(large, height=40, width=40, rows=40, columns=40)
    small = replace(large, inputs=512, outputs=512, height=14, width=14, rows=14, columns=14)
    chosen = [winograd_choice(one, ZEN5, "float32-fast") for one in (large, middle, small)]
    assert [choice.outputs for choice in chosen if choice] == [4, 5, 4]
    assert winograd_choice(large, ZEN5, "float32") is None


def test_dilated_tiles_are_those_of_all_phases() -> None:
    """Where phases have few results, or windows meet padding, tiles that are not whole cost more than they save."""
    sizes = (33, 33), (33, 33), (3, 3), (1, 1)
    few, many = (
        Convolution.of_dimensions((1, 1, 512, 512), *sizes, (step, step), has_pads=True, element_bytes=4) for step in (18, 4)
    )
    assert many.met == pytest.approx((91 / 99) * 1.0)
    assert few.met == pytest.approx((63 / 99) * (7 / 9))
    assert tiles_along(many, 4) == (12, 12)
    best = [winograd_choice(one, ZEN5, "float32-fast") for one in (few, many)]
    is_taken = [choice.cycles < channels_last_cycles(one, ZEN5) for choice, one in zip(best, (few, many), strict=True) if choice]
    assert is_taken == [False, True]


def test_larger_tiles_only_where_their_errors_are_allowed() -> None:
    one = Convolution(1, 1, 64, 64, 56, 56, 56, 56, (3, 3), (1, 1), is_padded=True)
    deep = replace(one, inputs=256, outputs=256)  # whose weights would be 21 MB
    cases = ((one, "bfloat16"), (one, "float32-fast"), (deep, "bfloat16"))
    chosen = [winograd_choice(one, ZEN5, precision) for one, precision in cases]
    assert [choice.outputs for choice in chosen if choice] == [7, 4, 4]


@pytest.mark.parametrize(("images", "whose"), [(1, "all"), (4, "thread")])
def test_tiles_of_many_images_go_by_blocks_of_their_own(images: int, whose: str) -> None:
    """Their transformed inputs would come back from the third cache for each panel; those of one image stay in the second."""
    built = build_kernel(forced(fast((images, 128, 28, 28), 128, 3, 1, 1, narrow="x"), 7).group, target_of("avx512"))
    assert isinstance(built, BuiltKernel)
    assert {choice.name: choice.taken for choice in built.choices}["blocks"] == whose


@pytest.mark.parametrize(("threads", "whose"), [(1, "thread"), (2, "all")])
def test_threads_share_tiles_that_are_less_than_weights(threads: int, whose: str) -> None:
    """Each would read all weights, which are 3.6 MB, for 4 or 5 tiles."""
    built = build_kernel(forced(fast((1, 192, 14, 14), 192, 3, 1, 1, narrow="x"), 5).group, target_of("avx512", threads))
    assert isinstance(built, BuiltKernel)
    assert {choice.name: choice.taken for choice in built.choices}["blocks"] == whose


@pytest.mark.parametrize(("is_on_branch", "outputs"), [(False, "5"), (True, "2 in pairs")])
def test_branches_may_round_more(is_on_branch: bool, outputs: str) -> None:
    group = replace(fast((1, 256, 14, 14), 256, 3, 1, 1, narrow="x").group, is_on_branch=is_on_branch)
    built = build_kernel(group, target_of("avx512bf16"))
    assert isinstance(built, BuiltKernel)
    assert {choice.name: choice.taken for choice in built.choices}["outputs"] == outputs


def test_pairs_are_for_few_tiles_of_bfloat16() -> None:
    one = Convolution(1, 1, 512, 512, 7, 7, 7, 7, (3, 3), (1, 1), is_padded=True, element_bytes=2)
    cases = (one, replace(one, rows=9, height=9), replace(one, element_bytes=4), replace(one, inputs=511), replace(one, images=8))
    chosen = [winograd_choice(case, ZEN5, "bfloat16", paired_tiles=16) for case in cases]
    assert [choice.has_pairs for choice in chosen if choice] == [True, False, False, False, True]
    for precision, paired_tiles in (("bfloat16", 0), ("float16", 16), ("float32-fast", 16)):
        choice = winograd_choice(one, ZEN5, precision, paired_tiles=paired_tiles)
        assert choice is not None
        assert not choice.has_pairs


def test_programs_take_it_where_the_user_allows_it() -> None:
    generator = np.random.default_rng(0)
    weights, image = generator.standard_normal((64, 64, 3, 3)), generator.standard_normal((1, 64, 28, 28)).astype(np.float32)
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    shape = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, image.shape)
    constant = onnx.numpy_helper.from_array(weights.astype(np.float32), "w")
    graph = onnx.helper.make_graph([node], "one", [shape], [onnx.helper.make_empty_tensor_value_info("y")], [constant])
    exact = functional.conv2d(torch.from_numpy(image).double(), torch.from_numpy(weights.astype(np.float32)).double(), padding=1)
    for precision, is_taken in (("float32", False), ("float32-fast", True), ("float16", True)):
        net = prefuse.compile(onnx.helper.make_model(graph), target="cpu:avx2", cache=False, precision=precision)
        assert ("winograd" in str(net.report())) == is_taken
        assert relative_error(np.asarray(net(image)), exact.numpy()) < (1e-3 if precision == "float16" else 4e-6)
