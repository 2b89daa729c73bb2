"""Attention of few queries of heads that share keys, which the tile unit reads where they lie; against float64."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
from prefuse.kernels.attention import attention
from prefuse.kernels.attention.few_queries import Operands, operands_of
from prefuse.kernels.attention.pattern import Attention, attention_of
from prefuse.kernels.registry import build_kernel
from prefuse.kernels.template.contract import BuiltKernel, Refusal
from prefuse.runtime.target import AMX_EMULATED, Target

from ..harness import Case, check, run, target_of
from ..microkernels.amx_emulator import AMX, emulator
from .attention_cases import (
    Tape,
    attend,
    check_instructions,
    grouped_queries,
    guarded,
    halved_and_guarded,
    hidden,
    masked,
    plain,
    scaled_keys,
)

__all__ = ["emulator"]


def narrow(queries: int, *steps: object, keys: int = 64, depth: int = 32, **how: object) -> Case:
    return grouped_queries(queries, *steps, keys=keys, depth=depth, dtype="bfloat16", **how)  # type: ignore[arg-type]


def cases() -> list[Case]:
    """One to three queries of three heads; more steps of a query than registers hold, results in three runs; a mask for each
    head; a cache that is begun; a query that sees no key."""
    blind = np.zeros((2, 6, 1, 64))
    blind[1, 4] = -np.inf
    return [
        narrow(1),
        narrow(2, keys=96),
        narrow(3, depth=160),
        narrow(1, masked(np.random.default_rng(5).standard_normal((2, 6, 1, 64)))),
        narrow(1, hidden(np.arange(192) < 70), keys=192),
        narrow(1, masked(blind), weight_step=guarded),
    ]


def uses_tiles(case: Case, target: Target = AMX) -> bool:
    built = build_kernel(case.group, target)
    assert isinstance(built, BuiltKernel)
    return "tdpbf16ps" in str(built.function)


def found(case: Case) -> Operands | Refusal:
    form = attention_of(case.group)
    assert isinstance(form, Attention)
    return operands_of(form)


def test_attention() -> None:
    assert all(uses_tiles(case) for case in cases())
    check(cases(), target_of(AMX_EMULATED))


def test_the_instructions_give_the_bits_of_the_loops(emulator: ctypes.CDLL | None) -> None:
    check_instructions(cases(), 2, emulator)


def test_hidden_keys_are_not_read() -> None:
    """What nobody has written into a cache is NaN."""
    case = narrow(1, hidden(np.arange(192) < 70), keys=192)
    keys, values = (array for array in case.arrays.values() if array.shape == (2, 192, 64))
    keys[:, 128:], values[:, 128:] = np.nan, np.nan
    run([case], target_of(AMX_EMULATED))
    assert np.isfinite(case.got[0].astype(np.float32)).all()


def test_float32_is_rounded_only_where_that_is_allowed() -> None:
    """Queries of float32 by keys of bfloat16 in memory."""
    case = grouped_queries(2, key_step=plain, keys=64, depth=32)
    assert isinstance(found(case), Refusal)
    assert not uses_tiles(replace(case, group=replace(case.group, precision="bfloat16")))  # keys are float32


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (narrow(1, keys=48), "fill no tiles"),
        (narrow(1, depth=24), "fill no tiles"),
        (narrow(1, plain, scaled_keys), "several tensors"),
        (narrow(1, weight_step=halved_and_guarded), "weighed"),
        (grouped_queries(1, keys=64, depth=32), "may not be rounded"),
    ],
)
def test_refusals(case: Case, why: str) -> None:
    reason = found(case)
    assert isinstance(reason, Refusal)
    assert why in str(reason)


def test_one_key_for_all_places() -> None:
    """Keys that an Expand repeats are no distance apart; prefetches run ahead by bytes that are read, not by distances."""
    tape = Tape("bfloat16")

    def repeated(x: str) -> str:
        shape = (1, 2, 64, 32)
        return tape.add("Expand", [x, tape.literal(np.array(shape))], np.broadcast_to(tape.values[x], shape))

    q, k, v = tape.input((1, 2, 2, 32)), *(repeated(tape.input((1, 2, 1, 32))) for _ in range(2))
    weights = tape.softmax(tape.binary("MatMul", q, tape.transpose(k, 0, 1, 3, 2)))
    case = tape.case(tape.binary("MatMul", weights, v))
    operands, apart = found(case), found(narrow(1))
    assert isinstance(operands, Operands)
    assert isinstance(apart, Operands)
    assert (operands.keys.pitch, apart.keys.pitch) == (0, 64)
    assert operands.keys.ahead == apart.keys.ahead == 64
    check([case], target_of(AMX_EMULATED))


def test_keys_in_pages_have_no_pitch() -> None:
    """Of each head, 16 keys at a time lie behind each other."""
    tape = Tape("bfloat16")

    def paged(x: str) -> str:
        return tape.reshape(tape.transpose(x, 0, 2, 1, 3, 4), 1, 2, 64, 32)

    q, k, v = tape.input((1, 2, 2, 32)), *(paged(tape.input((1, 4, 2, 16, 32))) for _ in range(2))
    weights = tape.softmax(tape.binary("MatMul", q, tape.transpose(k, 0, 1, 3, 2)))
    reason = found(tape.case(tape.binary("MatMul", weights, v)))
    assert isinstance(reason, Refusal)
    assert "no lines" in str(reason)


def test_one_row_is_no_tile() -> None:
    """Memory is what one query of a head of its own waits for."""
    alone = attend((1, 2, 1, 64, 32, 32), "bfloat16")
    assert isinstance(found(alone), Operands)
    assert not uses_tiles(alone)
    assert uses_tiles(attend((1, 2, attention._TILED_ROWS_OF_FEW, 64, 32, 32), "bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lines_further_on_are_prefetched(dtype: str) -> None:
    """A line of a key and one of its value are each a cache line, or two."""
    built = build_kernel(attend((1, 2, 1, 64, 32, 32), dtype).group, target_of("avx2", 1))
    assert isinstance(built, BuiltKernel)
    lines = 32 * (4 if dtype == "float32" else 2) // 64
    assert str(built.function).count("prefetch") == 2 * lines
