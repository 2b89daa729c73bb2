"""What the error of a memory limit that is too small names: a limit that was tried, and does."""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir
import prefuse
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefuse.compiler.feasible_limit import feasible_limit
from prefuse.compiler.programs.memory_limit import parse_memory_limit
from prefuse.runtime.errors import CompileError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import planned_bytes
from prefuse.runtime.report import size, speakable_bytes


@given(st.integers(1, 1 << 45))
def test_bytes_are_what_a_user_reads(count: int) -> None:
    told = speakable_bytes(count)
    limit = parse_memory_limit(size(told)) if told < 1 << 33 else None  # no more than a machine has
    assert limit is None or limit.size_bytes == told
    assert count <= told <= count * 1.01 + 1
    assert speakable_bytes(told) == told


@given(st.integers(1, 1 << 30), st.integers(0, 1 << 30), st.sets(st.integers(0, 1 << 31), max_size=4), st.integers(0, 1 << 31))
def test_what_is_found_was_tried_or_is_the_whole(least: int, more: int, bad: set[int], start: int) -> None:
    whole, tried = least + more, {}

    def fits(limit: int) -> bool:
        tried[limit] = limit >= start and not any(abs(limit - one) < one // 8 for one in bad)
        return tried[limit]

    found = feasible_limit(fits, least, whole)
    assert tried.get(found, found == speakable_bytes(whole))
    assert least <= found <= speakable_bytes(whole)
    assert len(tried) <= 6
    if start <= least and not bad:
        assert found == min(speakable_bytes(least), speakable_bytes(whole))


def deep(columns: int) -> ir.Model:
    """Products of large weights whose activations are large, too."""
    random, lines, last = np.random.default_rng(0), [], "x"
    weights = {f"w{number}": random.standard_normal((columns, columns), np.float32) / 16 for number in range(3)}
    for number in range(3):
        lines.append(f"m{number} = MatMul({last}, w{number}) t{number} = Tanh(m{number}) s{number} = Add(t{number}, x)")
        last = f"s{number}"
    text = f'<ir_version: 8, opset_import: ["": 18]> main (float[64,{columns}] x) => (float[64,{columns}] y) {{ '
    text += " ".join(lines) + f" y = Neg({last}) }}"
    return ir.from_onnx_text(text, initializers=[ir.tensor(array, name=name) for name, array in weights.items()])


@pytest.mark.parametrize("limit", ["1%", "10%", 100_000])
@pytest.mark.parametrize("columns", [256, 640])
def test_the_limit_that_an_error_names_does(columns: int, limit: object) -> None:
    model = deep(columns)
    with pytest.raises(CompileError, match="are too little") as error:
        prefuse.compile(model.clone(), threads=2, cache=False, memory_limit=limit)
    match = re.search(r"raise the limit \((.*) would do\)", error.value.fix)
    assert match is not None
    net = prefuse.compile(model.clone(), threads=2, cache=False, memory_limit=match[1])
    assert isinstance(net, CompiledModel)
    parsed = parse_memory_limit(match[1])
    assert parsed is not None
    assert planned_bytes(net.plan) <= parsed.of(0)
