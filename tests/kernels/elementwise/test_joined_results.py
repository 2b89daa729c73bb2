"""Pointwise groups whose results a Concat puts together: by rows, in turns, of any rank and type; operands that lie in turns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prefuse.kernels.elementwise import elementwise
from prefuse.kernels.elementwise.interleaved import can_interleave
from prefuse.kernels.elementwise.joined_results import through_concat
from prefuse.kernels.template.contract import BuiltKernel, Refusal
from prefuse.runtime.target import Target

from ..harness import LEVELS, check, check_in_turn, emitted, target_of
from .parts import Parts, joined_case


@pytest.mark.parametrize("level", LEVELS)
def test_random_concats(level: str) -> None:
    check_in_turn([joined_case(seed) for seed in range(44)], level)


def rotation(pairs: int, *rows: int) -> tuple[Parts, str]:
    """Pairs of numbers, turned by angles of their columns: (a c - b s, a s + b c), which lie in turns."""
    parts = Parts(pairs)
    x = parts.input((*rows, 2 * pairs), "float32")
    ones, ends = (1,) * len(rows), (0,) * len(rows)
    a, b = (parts.slice(x, (*ends, turn), (*ones, 2), (*rows, pairs)) for turn in (0, 1))
    c, s = parts.input((pairs,), "float32"), parts.input((pairs,), "float32")
    v = parts.values
    ac, bs = parts.op("Mul", (a, c), v[a] * v[c]), parts.op("Mul", (b, s), v[b] * v[s])
    as_, bc = parts.op("Mul", (a, s), v[a] * v[s]), parts.op("Mul", (b, c), v[b] * v[c])
    real, imaginary = parts.op("Sub", (ac, bs), v[ac] - v[bs]), parts.op("Add", (as_, bc), v[as_] + v[bc])
    axis = len(rows) + 1
    places = parts.integers(axis)
    columns = [parts.op("Unsqueeze", (name, places), v[name][..., None]) for name in (real, imaginary)]
    return parts, parts.op("Concat", tuple(columns), np.concatenate([v[name] for name in columns], axis), axis=axis)


@pytest.mark.parametrize("level", LEVELS)
def test_rotations_of_pairs(level: str) -> None:
    """Vectors that rows do not divide: the last of a row overlaps the one before it. Rows below a vector go one by one."""
    cases = []
    for pairs, *rows in ((32, 3, 5), (9, 7), (8, 2), (16, 1), (17,), (3, 4), (100, 2, 2)):
        parts, result = rotation(pairs, *rows)
        case = parts.case(result, f"{rows} x {pairs} pairs")
        largest = max(float(np.abs(value).max()) for value in case.expected)
        case.atol = 2 * float(np.finfo(np.float32).eps) * largest  # differences of products that are all as large
        cases.append(case)
    check_in_turn(cases, level)


def test_pairs_are_stored_in_turns() -> None:
    parts, result = rotation(32, 4)
    found = through_concat(parts.case(result, "pairs").group)
    assert not isinstance(found, Refusal)
    _, joins = found
    assert [(one.base, one.strides) for one in joins] == [(0, (64, 2)), (1, (64, 2))]
    assert can_interleave(joins)


def test_operands_in_turns_keep_their_memory() -> None:
    """Overlapping vectors are computed twice: nothing may be written over what they read."""
    parts = Parts(0)
    x, y = parts.input((5, 22), "float32"), parts.input((5, 11), "float32")
    even = parts.slice(x, (0, 0), (1, 2), (5, 11))
    result = parts.op("Add", (even, y), parts.values[even] + parts.values[y])
    case = parts.case(result, "even")
    case.group = replace(case.group, configuration={"template": "elementwise"})
    target = target_of("avx2")
    built = emitted(elementwise.plan, case.group, target)
    assert isinstance(built, BuiltKernel)
    assert not built.inplace
    check([case], target)


def test_what_is_refused() -> None:
    parts = Parts(0)
    x, y = parts.input((4, 8), "float32"), parts.input((4, 8), "float32")
    negative = parts.op("Neg", (x,), -parts.values[x])
    v = parts.values
    part = parts.op("Concat", (negative, y), np.concatenate([v[negative], v[y]], 1), axis=1)
    target = Target.parse("cpu:avx2")
    refusal = elementwise.plan(parts.case(part, "an operand").group, target)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "a part of a Concat is no result"
    twice = parts.op("Concat", (negative, negative), np.concatenate([v[negative], v[negative]], 1), axis=1)
    group = parts.case(twice, "twice").group
    refusal = elementwise.plan(replace(group, ops=group.ops[:1] + group.ops[2:]), target)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "a Concat has a part twice"
