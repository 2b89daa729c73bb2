"""Operands that pointwise operators compute where a template reads them, against the operator on the computed operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prefuse.kernels.convolution import convolution_channels_last
from prefuse.kernels.groups.group import Op
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel, Refusal
from prefuse.runtime.plan import TensorType
from prefuse.runtime.target import Target

from ..harness import LEVELS, OPSET, Case, check_in_turn, emitted, followed, operator, type_of

rng = np.random.default_rng(7)
_NARROW = {"float64": "float32"}


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    return (rng.standard_normal(shape) * 2 + 0.5).astype(dtype)


def preceded(case: Case, raw: np.ndarray, scale: np.ndarray, template: str, position: int = 0) -> Case:
    """The case, whose operand x<position> is max(raw * scale + 0.5, 0) * raw, with the operators that compute it so."""
    name = f"x{position}"
    half, zero = np.array(0.5, raw.dtype), np.array(0, raw.dtype)
    ops = (
        Op("Mul", ("raw", "factor"), (".p0",), {}, OPSET),
        Op("Add", (".p0", "half"), (".p1",), {}, OPSET),
        Op("Max", (".p1", "zero"), (".p2",), {}, OPSET),
        Op("Mul", (".p2", "raw"), (name,), {}, OPSET),
    )
    group, kind = case.group, type_of(raw)
    given = {"raw": raw, "factor": scale, "half": half, "zero": zero}
    types = {**group.types, **{one: type_of(array) for one, array in given.items()}, **dict.fromkeys((".p0", ".p1", ".p2"), kind)}
    inputs = (*given, *(one for one in group.inputs if one != name))
    literals = {**group.literals, "half": half, "zero": zero}
    if scale.size == 1:
        literals["factor"] = scale
    arrays = {**{one: array for one, array in case.arrays.items() if one != name}, **given}
    whole = replace(
        group, ops=(*ops, *group.ops), inputs=inputs, types=types, constants=group.constants | set(literals), literals=literals
    )
    return Case(whole, arrays, case.expected, max(case.rtol, 1e-5), max(case.atol, 1e-5), f"{case.label} preceded", template)


def computed(raw: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """What `preceded` computes of them, in float64."""
    wide = raw.astype(np.float64)
    return np.asarray(np.maximum(wide * scale + 0.5, 0) * wide)


def exact(op_type: str, *inputs: np.ndarray | None, **options: Any) -> Case:
    """An operator of float32, and what float64 gives for it."""
    wide = [one if one is None or one.dtype.kind != "f" else one.astype(np.float64) for one in inputs]
    case = operator(op_type, *wide, **options)
    arrays = {name: _narrow(array) for name, array in case.arrays.items()}
    literals = {name: _narrow(array) for name, array in case.group.literals.items()}
    types = {name: replace(kind, dtype=_NARROW.get(kind.dtype, kind.dtype)) for name, kind in case.group.types.items()}
    return replace(case, group=replace(case.group, types=types, literals=literals), arrays=arrays)


def _narrow(array: np.ndarray) -> np.ndarray:
    return array.astype(_NARROW.get(str(array.dtype), array.dtype))


def flat_cases() -> list[Case]:
    """Templates that read by flat offsets: all other operands have one element."""
    scale = np.array(1.5, np.float32)
    cases = []

    def add(
        template: str, op_type: str, raw: np.ndarray, *others: np.ndarray | None, follow: bool = False, **options: Any
    ) -> None:
        case = exact(op_type, computed(raw, scale), *others, **options)
        case = followed(case) if follow else case
        cases.append(preceded(case, raw, scale, template))

    rows = np.array([[3, -1], [0, 4]])
    add("gather", "Gather", normal(5, 37), rows, variables=(1,), follow=True)
    add("gather", "Gather", normal(3, 5, 1), rows, axis=1, variables=(1,))
    add("gather", "GatherElements", normal(5, 7), np.array([[1, 0, -2, 4, 1, 0, 3]]), variables=(1,))
    add("gather", "GatherND", normal(3, 5, 19), np.array([[1, 4], [2, -1]]), variables=(1,))
    loose: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
    add("reduction", "ReduceSum", normal(3, 37, 19), np.array([1]), follow=True, **loose)
    add("reduction", "ReduceLogSumExp", normal(5, 67), np.array([0]), **loose)
    add("reduction", "GlobalAveragePool", normal(2, 3, 5, 7), **loose)
    add("normalization", "Softmax", normal(3, 21, 18), axis=1, **loose)
    add("normalization", "InstanceNormalization", normal(2, 3, 5, 7), normal(3), normal(3), epsilon=1e-2, rtol=1e-4, atol=1e-4)
    add("pooling", "MaxPool", normal(2, 3, 9, 37), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    add("pooling", "AveragePool", normal(1, 2, 19), kernel_shape=[4], **loose)
    add("injective", "Pad", normal(5, 19), np.array([1, 2, 0, 3]))
    add("injective", "Pad", normal(5, 19), np.array([1, 2, 0, 3]), mode="reflect")
    add("injective", "Slice", normal(7, 40), np.array([1]), np.array([30]), np.array([1]), np.array([2]), follow=True)
    add("injective", "Tile", normal(3, 17), np.array([2, 2]))
    for position in (0, 1):
        pieces = [normal(4, 19), normal(4, 21)]
        raw = pieces[position]
        pieces[position] = computed(raw, scale)
        cases.append(preceded(exact("Concat", *pieces, axis=1), raw, scale, "injective", position))
    return cases


def convolution_cases(channels_last: bool = False) -> list[Case]:
    """The padded copy is made of what is computed; scales are of channels."""
    cases = []
    options: Sequence[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
        ((2, 5, 9, 18), (7, 5, 3, 3), {"pads": [1, 1, 1, 1]}),
        ((1, 6, 8, 20), (4, 3, 3, 2), {"pads": [2, 0, 1, 1], "strides": [2, 1], "group": 2}),
        ((2, 4, 7, 11), (4, 1, 3, 3), {"pads": [1, 1, 1, 1], "group": 4}),
    ]
    for shape, weights, attributes in options:
        raw, scale = normal(*shape), normal(shape[1], 1, 1)
        case = exact("Conv", computed(raw, scale), normal(*weights), rtol=1e-4, atol=1e-3, **attributes)
        if channels_last:
            cases.append(laid_last(case, raw, scale))
        else:
            cases.append(preceded(case, raw, scale, "convolution"))
    return cases


def laid_last(case: Case, raw: np.ndarray, scale: np.ndarray, template: str = "convolution_channels_last") -> Case:
    """The same with all images channels-last, and the computed operand before its Transpose."""
    there, back = (0, 2, 3, 1), (0, 3, 1, 2)
    one = preceded(case, raw.transpose(there), np.ascontiguousarray(scale.reshape(-1)), template)
    ops = [op for op in one.group.ops if op.op_type != case.group.ops[0].op_type]
    ops[-1] = replace(ops[-1], outputs=("last",))
    (result,) = case.group.outputs
    expected = np.ascontiguousarray(case.expected[0].transpose(there))
    kind = TensorType(expected.shape, case.group.types[result].dtype)
    types = {**one.group.types, "last": type_of(raw.transpose(there)), "z": kind}
    group = replace(
        one.group,
        ops=(*ops, Op("Transpose", ("last",), ("x0",), {"perm": back}, OPSET), *case.group.ops,
             Op("Transpose", (result,), ("z",), {"perm": there}, OPSET)),
        outputs=("z",),
        types=types,
    )  # fmt: skip
    return replace(one, group=group, expected=[expected])


def pooling_last_cases() -> list[Case]:
    raw, scale = normal(2, 5, 9, 8), normal(5, 1, 1)
    case = exact("AveragePool", computed(raw, scale), kernel_shape=[3, 2], pads=[1, 0, 1, 1], rtol=1e-5, atol=1e-5)
    return [laid_last(case, raw, scale, "pooling_channels_last")]


@pytest.mark.parametrize("level", LEVELS)
def test_operands_read_by_flat_offsets(level: str) -> None:
    check_in_turn(flat_cases(), level)


@pytest.mark.parametrize("level", LEVELS)
def test_operands_read_by_index(level: str) -> None:
    check_in_turn([*convolution_cases(), *convolution_cases(channels_last=True), *pooling_last_cases()], level)


def refusal(case: Case) -> str:
    built = build_kernel(case.group, Target.parse("cpu:avx2"))
    assert not isinstance(built, BuiltKernel)
    return "; ".join(reason for _, reason in built)


def test_what_spans_some_dimensions_needs_an_index() -> None:
    raw, scale = normal(5, 37), normal(37)
    case = preceded(exact("Gather", computed(raw, scale), np.array([1, 2]), variables=(1,)), raw, scale, "")
    assert "spans only some of its dimensions" in refusal(case)


def test_other_operands_lie_in_memory() -> None:
    raw, scale = normal(3), np.array(1.5, np.float32)
    case = exact("InstanceNormalization", normal(2, 3, 5, 7), computed(raw, scale), normal(3))
    assert "reads its operands through no others" in refusal(preceded(case, raw, scale, "", 1))


def test_a_convolution_channels_last_without_a_copy_computes_nothing() -> None:
    raw, scale = normal(1, 8, 5, 6), normal(8, 1, 1)
    case = exact("Conv", computed(raw, scale), normal(4, 8, 1, 1), rtol=1e-4, atol=1e-4)
    built = emitted(convolution_channels_last.plan, laid_last(case, raw, scale).group, Target.parse("cpu:avx2"))
    assert isinstance(built, Refusal)
    assert "read in place" in built.reason
