"""Scatters on the simulators, into a copy and in place, where only the updates are written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prefuse.runtime.target import Target

from ...kernels.harness import Case, build, operator
from ...sample import dealt
from ..simulator import CUDA, RDNA, ROCM, check

rng = np.random.default_rng(23)


def cases() -> list[Case]:
    """Rows of a cache, at places of each sequence."""
    made = []
    cache, new = rng.standard_normal((2, 3, 8, 5)).astype(np.float32), rng.standard_normal((2, 3, 2, 5)).astype(np.float32)
    places = np.array([[3, 4], [0, 7]], np.int64)
    expected = cache.copy()
    for sequence, rows in enumerate(places):
        expected[sequence, :, rows] = new[sequence].swapaxes(0, 1)
    indices = np.broadcast_to(places[:, None, :, None], new.shape).copy()
    one = operator("ScatterElements", cache, indices, new, expected=[expected], axis=2)
    made.append(replace(one, group=replace(one.group, updates_state=True), label="renewed"))
    first = np.array([2, 6], np.int64)
    expected = cache.copy()
    for sequence, place in enumerate(first):
        expected[sequence, :, place : place + 2] = new[sequence]
    made.append(operator("TensorScatter", cache, new, first, opset=24, expected=[expected], axis=-2))
    return made


@pytest.mark.parametrize("target", [CUDA, ROCM, RDNA], ids=str)
def test_scatters(target: Target, tmp_path: Path) -> None:
    made = cases()
    for case in made:
        assert [pair[0] for pair in build(case, target).inplace] == [0]
    check(dealt(made, [case.label for case in made], target, [CUDA, ROCM, RDNA]), tmp_path, target)
