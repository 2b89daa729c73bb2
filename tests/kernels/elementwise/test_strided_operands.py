"""Pointwise groups that read parts of their operands where they lie: places, steps, ranks, types, chains, a tensor twice."""

from __future__ import annotations

import pytest
from prefuse.kernels.elementwise import elementwise
from prefuse.kernels.elementwise.strided_operands import through_views
from prefuse.kernels.template.contract import BuiltKernel, Refusal
from prefuse.runtime.target import Target

from ..harness import LEVELS, Case, check, check_in_turn, emitted, target_of
from .parts import Parts, random_case


@pytest.mark.parametrize("level", LEVELS)
def test_random_parts(level: str) -> None:
    check_in_turn([case for seed in range(66) if _has_parts(case := random_case(seed))], level)


def _has_parts(case: Case) -> bool:
    return sum(op.op_type not in ("Add", "Mul") for op in case.group.ops) > 1


def test_a_tensor_that_is_read_elsewhere_keeps_its_memory() -> None:
    """x[::-1] * x - x[::-1]: no result may be written over x, of whose elements others are still to be made."""
    parts = Parts(0)
    x = parts.input((100,), "float32")
    back = parts.slice(x, (99,), (-1,), (100,))
    again = parts.slice(x, (99,), (-1,), (100,))
    times = parts.op("Mul", (back, x), parts.values[back] * parts.values[x])
    result = parts.op("Sub", (times, again), parts.values[times] - parts.values[again])
    target = target_of("avx2")
    case = parts.case(result, "reversed")
    built = emitted(elementwise.plan, case.group, target)
    assert isinstance(built, BuiltKernel)
    assert not built.inplace
    check([case], target)


def test_neighbouring_dimensions_stay_one_loop() -> None:
    """Halves of channels of images: their planes are flat, and both halves are."""
    parts = Parts(0)
    x = parts.input((2, 8, 6, 6), "float32")
    one, two = (parts.slice(x, (0, begin, 0, 0), (1, 1, 1, 1), (2, 4, 6, 6)) for begin in (0, 4))
    result = parts.op("Mul", (one, two), parts.values[one] * parts.values[two])
    case = parts.case(result, "halves")
    found = through_views(case.group)
    assert not isinstance(found, Refusal)
    merged, views, _ = elementwise.merge_dimensions(*found)
    assert merged.types[result].shape == (2, 144)
    assert [(view.base, view.strides) for view in views.values()] == [(0, (288, 1)), (144, (288, 1))]


def test_what_is_refused() -> None:
    parts = Parts(0)
    x, y = parts.input((8, 16), "float32"), parts.input((8, 8), "float32")
    negative = parts.op("Neg", (x,), -parts.values[x])
    part = parts.slice(negative, (0, 0), (1, 1), (8, 8))
    result = parts.op("Add", (part, y), parts.values[part] + parts.values[y])
    refusal = elementwise.plan(parts.case(result, "computed").group, Target.parse("cpu:avx2"))
    assert refusal == Refusal("Slice reads what is computed")
    parts = Parts(0)
    x = parts.input((8, 16), "float32")
    part = parts.slice(x, (0, 0), (1, 1), (8, 8))
    result = parts.op("Neg", (part,), -parts.values[part])
    refusal = elementwise.plan(parts.case(result, "kept", part).group, Target.parse("cpu:avx2"))
    assert refusal == Refusal("a part of an operand is a result")
