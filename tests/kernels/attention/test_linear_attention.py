"""LinearAttention: the definition step by step in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from prefuse.kernels.attention import linear_attention
from prefuse.kernels.groups.group import Group, Op

from ..harness import LEVELS, Case, check, check_in_turn, run, target_of, type_of

NAMES = ("query", "key", "value", "past", "decay", "beta")
Arrays = dict[str, np.ndarray]


def operands(batch: int, steps: int, heads: int, shared: int, rows: int, columns: int) -> Arrays:
    """Random operands of every name, keys of length 1; a test drops or cuts what it does not want."""
    random = np.random.default_rng(steps * 31 + rows)
    keys = random.standard_normal((batch, steps, heads, rows))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True) + 1e-9
    return {
        "query": random.standard_normal((batch, steps, heads * shared * rows)),
        "key": keys.reshape(batch, steps, heads * rows),
        "value": random.standard_normal((batch, steps, heads * columns)),
        "past": random.standard_normal((batch, heads, rows, columns)),
        "decay": -random.uniform(0, 1, (batch, steps, heads * rows)),
        "beta": random.uniform(0, 1, (batch, steps, heads)),
    }


def defined(arrays: Arrays, rule: str, heads: int, shared: int, scale: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Output and final state, as the specification of the operator defines them."""
    batch, steps, width = arrays["query"].shape
    rows, columns = width // (heads * shared), arrays["value"].shape[2] // heads
    query = arrays["query"].reshape(batch, steps, heads, shared, rows)
    key = arrays["key"].reshape(batch, steps, heads, rows)
    value = arrays["value"].reshape(batch, steps, heads, columns)
    state = arrays.get("past", np.zeros((batch, heads, rows, columns))).astype(np.float64)
    output = np.zeros((batch, steps, heads, shared, columns))
    for step in range(steps):
        if "gated" in rule:
            decay = np.exp(arrays["decay"][:, step].reshape(batch, heads, arrays["decay"].shape[2] // heads))
            state = state * np.broadcast_to(decay, (batch, heads, rows))[..., None]
        write = value[:, step]
        if "delta" in rule:
            beta = np.broadcast_to(arrays["beta"][:, step], (batch, heads))[..., None]
            write = beta * (write - np.einsum("bhrc,bhr->bhc", state, key[:, step]))
        state = state + key[:, step, :, :, None] * write[:, :, None]
        output[:, step] = np.einsum("bhsr,bhrc->bhsc", query[:, step], state) * (scale or 1 / np.sqrt(rows))
    return output.reshape(batch, steps, heads * shared * columns), state


def case(
    rule: str, arrays: Arrays, heads: int, shared: int, *, dtype: Any = np.float32, tolerance: float = 3e-6, scale: float = 0.0
) -> Case:
    """The operator on `arrays`, which are rounded to its type first."""
    rounded = {name: np.asarray(array, dtype) for name, array in arrays.items()}
    exact = {name: array.astype(np.float64) for name, array in rounded.items()}
    expected = [array.astype(dtype) for array in defined(exact, rule, heads, shared, scale)]
    attributes = {"update_rule": rule, "q_num_heads": heads * shared, "kv_num_heads": heads, "scale": scale}
    op = Op("LinearAttention", tuple(name if name in rounded else "" for name in NAMES), ("y", "state"), attributes, 27)
    types = {name: type_of(a) for name, a in rounded.items()} | {"y": type_of(expected[0]), "state": type_of(expected[1])}
    group = Group((op,), tuple(rounded), ("y", "state"), types)
    label = f"{rule} {[list(a.shape) for a in rounded.values()]} {np.dtype(dtype).name}"
    return Case(group, rounded, expected, tolerance, tolerance, label, "linear_attention")


@pytest.mark.parametrize("level", LEVELS)
def test_every_rule(level: str) -> None:
    """Columns that divide no vector, states shared by several queries, decay of each row and of each head."""
    cases = []
    for rule in ("linear", "gated", "delta", "gated_delta"):
        for sizes in ((2, 5, 3, 1, 4, 19), (1, 3, 2, 3, 7, 8), (2, 1, 1, 2, 1, 3)):
            arrays = operands(*sizes)
            cases.append(case(rule, arrays, *sizes[2:4]))
            of_head = {**arrays, "decay": arrays["decay"][..., : sizes[2]], "beta": arrays["beta"][..., :1]}
            cases.append(case(rule, {name: of_head[name] for name in of_head if name != "past"}, *sizes[2:4], scale=0.25))
    check_in_turn(cases, level)


def test_narrow_types() -> None:
    """The state is kept in float32, whatever the operands are."""
    sizes = (1, 9, 2, 2, 6, 10)
    half = case("gated_delta", operands(*sizes), 2, 2, dtype=np.float16, tolerance=1e-3)
    brain = case("gated_delta", operands(*sizes), 2, 2, dtype=ml_dtypes.bfloat16, tolerance=8e-3)
    check([half, brain], target_of("avx2"))


def test_empty() -> None:
    """No step leaves the state as it was; no batch leaves nothing."""
    check([case("gated_delta", operands(*sizes), 2, 1) for sizes in ((2, 0, 2, 1, 3, 5), (0, 4, 2, 1, 3, 5))], target_of("avx2"))


def test_threads_do_not_change_a_bit() -> None:
    sizes = (2, 16, 4, 1, 32, 40)
    alone, dealt = (case("gated_delta", operands(*sizes), 4, 1) for _ in range(2))
    run([alone], target_of("avx2", threads=1))
    run([dealt], target_of("avx2", threads=4))
    for one, other in zip(alone.got, dealt.got, strict=True):
        np.testing.assert_array_equal(one, other)


def test_infinities_and_nan() -> None:
    """A state that decays by e**-inf is gone; a NaN stays in its column."""
    arrays = operands(1, 3, 1, 1, 3, 9)
    arrays["decay"][0, 1] = -np.inf
    arrays["value"][0, 2, 4] = np.nan
    check([case("gated", arrays, 1, 1)], target_of("avx2"))


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"update_rule": "wkv"}, "no update rule 'wkv'"),
        ({"q_num_heads": 3}, "3 query heads for 2 heads of state"),
        ({"update_rule": "gated_delta"}, "without its input 4"),
    ],
)
def test_refusals(attributes: dict[str, Any], reason: str) -> None:
    arrays = operands(1, 2, 2, 1, 3, 4)
    whole = case("linear", {name: arrays[name] for name in ("query", "key", "value")}, 2, 1).group
    op = Op("LinearAttention", whole.ops[0].inputs, whole.outputs, {**whole.ops[0].attributes, **attributes}, 27)
    refused = linear_attention.obstacle(Group((op,), whole.inputs, whole.outputs, whole.types), target_of("avx2"))
    assert reason in refused
