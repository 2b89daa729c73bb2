"""Resize in every mode against onnx.reference, whose tables are float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from prefuse.kernels.groups.group import Group, Op
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.sampling.resampling import Resampling
from prefuse.kernels.sampling.sized_resampling import SizedResampling
from prefuse.runtime.symbolic.sizes import Dim, Domain

from ..harness import LEVELS, OPSET, Case, check, check_in_turn, followed, operator, run, target_of, type_of

rng = np.random.default_rng(5)
_UNITS = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-5, "float64": 1e-12}


def resize(
    shape: Sequence[int],
    scales: Sequence[float] | None = None,
    sizes: Sequence[int] | None = None,
    roi: Sequence[float] | None = None,
    dtype: str = "float32",
    data: np.ndarray | None = None,
    **attributes: Any,
) -> Case:
    """One Resize whose scales or sizes and region are constants."""
    x = (rng.standard_normal(shape) * 50).astype(dtype) if data is None else data
    operands = [
        None if roi is None else np.array(roi, np.float32),
        None if scales is None else np.array(scales, np.float32),
        None if sizes is None else np.array(sizes, np.int64),
    ]
    while operands[-1] is None:
        operands.pop()
    if x.dtype.name in ("bfloat16", "bool"):  # which the reference does not take
        wide = resize(shape, scales, sizes, roi, data=x.astype(np.float32), **attributes)
        attributes["expected"] = [wide.expected[0].astype(x.dtype)]
    ends = attributes.get("coordinate_transformation_mode") in ("align_corners", "tf_crop_and_resize")
    if ends and scales is not None:  # which the reference takes to be those of a length that is no whole number
        whole = [int(n * scale) for n, scale in zip(shape, scales, strict=True)]
        attributes["expected"] = resize(shape, sizes=whole, roi=roi, data=x, **attributes).expected
    # The reference computes cubic weights in the float32 of the attribute.
    unit = 1e-5 if (dtype, attributes.get("mode")) == ("float64", "cubic") else _UNITS.get(dtype, 0.0)
    case = operator("Resize", x, *operands, template="resize", rtol=unit, atol=50 * unit, **attributes)
    literals = {name: array for name, array in case.arrays.items() if name != "x0"}
    return replace(case, group=replace(case.group, constants=frozenset(literals), literals=literals))


def nearest() -> list[Case]:
    roundings = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    coordinates = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric")
    every: list[dict[str, Any]] = [
        {"nearest_mode": rounding, "coordinate_transformation_mode": how} for rounding, how in product(roundings, coordinates)
    ]
    cases = [resize((1, 2, 5, 19), (1.0, 1.0, 2.6, 1.7), **attributes) for attributes in every]
    cases += [resize((1, 2, 9, 23), (1.0, 1.0, 0.4, 0.55), **attributes) for attributes in every[::3]]
    return cases


def even() -> list[Case]:
    """Whole factors: strided copies."""
    asymmetric: dict[str, Any] = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return [
        resize((2, 3, 5, 21), (1, 1, 2, 2)),
        resize((1, 2, 4, 35), (1, 1, 3, 2), **asymmetric),
        resize((1, 2, 6, 36), (1, 1, 0.5, 0.25), **asymmetric),
        resize((3, 7, 5), sizes=(3, 14, 5)),
        resize((3, 7, 5), (1, 1, 1)),
        resize((2, 3, 1, 1), sizes=(2, 3, 4, 37)),
    ]


def repeated() -> list[Case]:
    """Whole factors of every width of element: repeated in registers, whole vectors and parts of them."""
    whole = np.arange(2 * 3 * 75).reshape(2, 3, 75)
    cases = [
        resize((2, 3, columns), (1, factors[0], factors[1]), dtype=dtype)
        for dtype, columns, factors in product(("float32", "float64"), (2, 3, 16, 37), ((1, 2), (2, 3), (1, 8), (1, 9)))
    ]
    cases += [
        resize(whole.shape, (1, 2, 3), dtype=dtype, data=(whole % 251).astype(dtype))
        for dtype in ("uint8", "int8", "int16", "float16", "bfloat16", "int64")
    ]
    return [*cases, resize(whole.shape, (1, 2, 2), data=whole % 3 == 0), resize((1, 2, 3, 5, 9), (1, 1, 2, 2, 2))]


def linear() -> list[Case]:
    coordinates = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric")
    cases = [
        resize((1, 2, 5, 19), scales, mode="linear", coordinate_transformation_mode=how)
        for how, scales in product(coordinates, ((1.0, 1.0, 2.0, 2.0), (1.0, 1.0, 0.6, 1.7)))
    ]
    return [
        *cases,
        resize((1, 2, 5, 19), sizes=(1, 2, 1, 1), mode="linear", coordinate_transformation_mode="pytorch_half_pixel"),
        resize((1, 2, 5, 19), sizes=(1, 2, 1, 1), mode="linear", coordinate_transformation_mode="align_corners"),
        resize((1, 2, 5, 19), sizes=(1, 2, 9, 40), mode="linear", exclude_outside=1),
        resize((2, 5, 7, 3), (1.0, 1.7, 2.0, 1.0), mode="linear"),
        resize((2, 3, 21), sizes=(2, 3, 50), mode="linear"),
        resize((1, 2, 3, 5, 9), (1.0, 1.0, 2.0, 1.5, 2.0), mode="linear"),
        resize((3, 4), (1.5, 2.5), mode="linear"),
        resize((5,), (3.0,), mode="linear"),
        resize((2, 1, 3, 5), sizes=(4, 3, 5, 7), mode="linear"),
    ]


def cubic() -> list[Case]:
    return [
        resize((1, 2, 6, 19), (1.0, 1.0, 2.0, 1.7), mode="cubic"),
        resize((1, 2, 6, 19), (1.0, 1.0, 0.8, 0.6), mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5),
        resize((1, 2, 6, 19), (1.0, 1.0, 2.0, 2.0), mode="cubic", coordinate_transformation_mode="align_corners"),
        resize((1, 2, 6, 19), (1.0, 1.0, 2.0, 2.0), mode="cubic", coordinate_transformation_mode="asymmetric"),
        resize((3, 5, 6, 7), (1.0, 1.3, 2.0, 1.7), mode="cubic"),
    ]


def antialias() -> list[Case]:
    cases = [
        resize((1, 2, 23, 41), scales, mode=mode, antialias=1, exclude_outside=outside)
        for mode, scales, outside in product(("linear", "cubic"), ((1.0, 1.0, 0.3, 0.21), (1.0, 1.0, 0.6, 1.5)), (0, 1))
    ]
    return [*cases, resize((2, 40, 3), (1.0, 0.11, 1.0), mode="cubic", antialias=1)]


def regions() -> list[Case]:
    crop: dict[str, Any] = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 10.0}
    return [
        resize((1, 2, 7, 19), sizes=(1, 2, 5, 21), roi=(0, 0, 0.4, 0.6, 1, 1, 0.6, 0.8), mode="linear", **crop),
        resize((1, 2, 7, 19), sizes=(1, 2, 5, 21), roi=(0, 0, -0.4, 0.6, 1, 1, 1.3, 1.8), mode="linear", **crop),
        resize((1, 2, 7, 19), sizes=(1, 2, 5, 21), roi=(0, 0, 0.4, -0.6, 1, 1, 0.6, 0.8), mode="cubic", **crop),
        resize((1, 2, 7, 19), sizes=(5, 21), roi=(0.4, -0.2, 0.6, 1.2), mode="nearest", axes=(2, 3), **crop),
        resize((1, 2, 7, 19), sizes=(1, 3), roi=(0.4, 0.2, 0.6, 0.9), mode="linear", axes=(2, 3), **crop),
    ]


def policies() -> list[Case]:
    cases = []
    for policy, sizes in product(("not_larger", "not_smaller"), ((9, 9), (20, 4))):
        cases += [
            resize((1, 2, 5, 7), sizes=sizes, axes=(3, 2), mode=mode, keep_aspect_ratio_policy=policy)
            for mode in ("nearest", "linear")
        ]
    mixed = resize((1, 2, 5, 7), (1.7, 2.2), axes=(3, 1), mode="linear")
    (op,) = mixed.group.ops  # negative axes, which the reference does not take
    from_behind = replace(mixed.group, ops=(replace(op, attributes={**op.attributes, "axes": (-1, -3)}),))
    return [*cases, mixed, replace(mixed, group=from_behind, got=[])]


def types() -> list[Case]:
    cases = [
        resize((1, 2, 5, 37), (1.0, 1.0, 1.7, 1.3), dtype=dtype, mode=mode)
        for dtype, mode in product(("float16", "bfloat16", "float64"), ("nearest", "linear", "cubic"))
    ]
    whole = np.arange(2 * 5 * 37, dtype=np.int64).reshape(1, 2, 5, 37)
    data = [(whole % 251 - 125 * (dtype[0] == "i")).astype(dtype) for dtype in ("int8", "uint8", "int16", "int32", "int64")]
    cases += [resize(x.shape, (1.0, 1.0, 1.7, 1.3), dtype=str(x.dtype), data=x, mode="cubic") for x in data]
    for x in (*data[:2], data[4], whole % 3 == 0):
        cases.append(resize(x.shape, (1.0, 1.0, 1.7, 1.3), dtype=str(x.dtype), data=x))
    return cases


ALL = (nearest, even, repeated, linear, cubic, antialias, regions, policies, types)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_resize(make: Callable[[], list[Case]], level: str) -> None:
    check_in_turn(make(), level)


def test_followers() -> None:
    check(
        [followed(case) for case in (*even(), *repeated()[:32:5], *linear(), *antialias()[:3], *nearest()[:4])], target_of("avx2")
    )


def test_a_follower_may_read_a_value_of_any_name() -> None:
    """As those of a module of a torch Sequential behind a Resize."""
    case = followed(resize((1, 2, 5, 6), (1.0, 1.0, 2.0, 1.5), mode="linear"))
    names = {"scale": "1.weight", "rest": "2.weight", "old": "2.index"}

    def named(name: str) -> str:
        return names.get(name, name)

    group = case.group
    ops = tuple(replace(op, inputs=tuple(map(named, op.inputs))) for op in group.ops)
    types = {named(name): one for name, one in group.types.items()}
    literals = {named(name): one for name, one in group.literals.items()}
    inputs, constants = tuple(map(named, group.inputs)), frozenset(map(named, group.constants))
    case.group = replace(group, ops=ops, inputs=inputs, types=types, literals=literals, constants=constants)
    case.arrays = {named(name): array for name, array in case.arrays.items()}
    check([case], target_of("avx2"))


def test_infinite_elements_spread_to_their_neighbours_alone() -> None:
    """Also those at the border and at positions of the input, whose neighbours have no weight."""
    data = rng.standard_normal((1, 1, 4, 9)).astype(np.float32)
    data[0, 0, 1, 2], data[0, 0, 3, 8] = np.inf, np.nan
    case = resize(data.shape, (1.0, 1.0, 2.0, 2.0), data=data, mode="linear", coordinate_transformation_mode="align_corners")
    still = resize(data.shape, sizes=(1, 1, 4, 18), data=data, mode="linear", coordinate_transformation_mode="asymmetric")
    run([case, still], target_of("avx2"))
    assert np.isinf(still.got[0][0, 0, 1, [3, 4, 5]]).all()
    assert np.isfinite(np.delete(still.got[0][0, 0, :3], np.s_[3:6], 1)).all()
    np.testing.assert_array_equal(still.got[0][0, 0, :, ::2], data[0, 0])


def test_runs_are_bitwise_the_same() -> None:
    one, other = (resize((3, 17, 40, 61), (1.0, 1.0, 1.7, 0.9), data=_LARGE, mode="cubic") for _ in range(2))
    run([one, other], target_of("avx2", threads=2))
    assert one.got[0].tobytes() == other.got[0].tobytes()


_LARGE = rng.standard_normal((3, 17, 40, 61)).astype(np.float32)


def test_to_one_element_by_pytorch_half_pixel() -> None:
    """It is the first one, as ONNX's text and ONNX Runtime have it; onnx.reference is half an element before it."""
    x = rng.standard_normal((1, 2, 5, 19)).astype(np.float32)
    how: dict[str, Any] = {"coordinate_transformation_mode": "pytorch_half_pixel", "expected": [x[:, :, :1, :1]]}
    check([resize(x.shape, sizes=(1, 2, 1, 1), data=x, mode=mode, **how) for mode in ("linear", "cubic")], target_of("avx2"))


def test_of_nothing() -> None:
    """No element is made of it."""
    nothing, how = np.zeros((1, 1, 0, 8), np.float32), "half_pixel_symmetric"
    case = resize((1, 1, 0, 4), (1, 1, 2, 2), coordinate_transformation_mode=how, mode="linear", expected=[nothing])
    check([case], target_of("avx2"))
    types = dict(case.group.types) | {"y0": type_of(np.zeros((1, 1, 5, 8), np.float32))}
    assert build_kernel(replace(case.group, types=types), target_of("avx2")) == (("resize", "the operand has no elements"),)
    sized = SizedResampling(Domain((Dim("N", 0, 9),), {"N": 5}).size("N"), 4, None, "linear", "half_pixel", "floor", -0.75)
    assert "no elements" in sized.obstacle
    assert not replace(sized, inputs=Domain((Dim("N", 1, 9),), {"N": 5}).size("N")).obstacle


@pytest.mark.parametrize(("inputs", "outputs"), [(14, 18), (28, 18), (58, 30), (7, 29), (11, 25), (49, 49), (5, 1)])
@pytest.mark.parametrize("how", ["asymmetric", "align_corners"])
def test_whole_coordinates_by_sizes_are_whole(inputs: int, outputs: int, how: str) -> None:
    """A quotient of sizes that is rounded first falls short of them, and floor takes the element before; as onnx.reference's."""
    lost = int(how == "align_corners")
    expected = np.arange(outputs) * (inputs - lost) // max(outputs - lost, 1)
    axis = Resampling(inputs, outputs, outputs / inputs, "nearest", how, "floor")
    np.testing.assert_array_equal(axis.indices[0], expected)
    case = resize((1, inputs), sizes=(1, outputs), coordinate_transformation_mode=how, nearest_mode="floor")
    case.expected = [case.arrays["x0"][:, expected]]
    check([case], target_of("avx2"))


def test_a_region_of_one_output_is_read_in_its_middle() -> None:
    """Whatever the rounding of 1 / inputs."""
    for inputs in (48, 49):
        axis = Resampling(inputs, 1, 1 / inputs, "linear", "tf_crop_and_resize", roi=(0.25, 0.75))
        np.testing.assert_array_equal(axis.positions(), [0.25 * (inputs - 1) + 0.25 * (inputs - 1)])


def test_ends_by_scales_are_those_of_the_result() -> None:
    """As ONNX's text has it, ONNX Runtime and torch, also where the scale makes no whole number of elements."""
    corners = Resampling(7, 9, 1.4, "linear", "align_corners")
    np.testing.assert_allclose(corners.positions(), np.linspace(0, 6, 9), rtol=1e-12)
    region = Resampling(10, 7, 0.73, "linear", "tf_crop_and_resize", roi=(0.25, 0.85))
    np.testing.assert_allclose(region.positions(), np.linspace(2.25, 7.65, 7), rtol=1e-12)


def test_tables_are_the_same_in_blocks() -> None:
    axis = Resampling(70_000, 140_000, 2.0, "cubic")
    middle = slice(65_500, 65_600)
    np.testing.assert_array_equal(axis.weights[:, middle], np.tile(axis.weights[:, 100:102], 50))
    np.testing.assert_array_equal(np.diff(axis.indices[:, middle][:, ::2]), 1)


def test_a_large_dimension_that_stays_needs_no_table() -> None:
    axis = Resampling(2**40, 2**40, 1.0, coordinates="asymmetric")
    assert axis.is_identity
    assert not axis.overhangs


def test_sizes_of_a_run_and_means_of_booleans_are_refused() -> None:
    x, sizes = np.zeros((1, 4), np.float32), np.array([1, 8])
    types = {"x": type_of(x), "sizes": type_of(sizes), "y": type_of(np.zeros((1, 8), np.float32))}
    group = Group((Op("Resize", ("x", "", "", "sizes"), ("y",), {}, OPSET),), ("x", "sizes"), ("y",), types)
    assert build_kernel(group, target_of("avx2")) == (("resize", "the sizes are known only to a run"),)
    flags = {"x": type_of(x > 0), "y": type_of(np.zeros((1, 8), bool)), "sizes": types["sizes"]}
    known = replace(group, types=flags, constants=frozenset(["sizes"]), literals={"sizes": sizes})
    linear = replace(known, ops=(replace(known.ops[0], attributes={"mode": "linear"}),))
    assert build_kernel(linear, target_of("avx2")) == (("resize", "no means of bool"),)


@pytest.mark.parametrize("scale", [0.13, 0.5, 1.0, 1.7])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_weights_of_every_output_add_up_to_one(mode: str, scale: float) -> None:
    axis = Resampling(23, int(23 * scale), scale, mode, antialias=True)
    np.testing.assert_allclose(axis.weights.sum(0), 1, rtol=1e-12)
    assert (axis.weights != 0).all()
    assert ((axis.indices >= 0) & (axis.indices < 23)).all()
