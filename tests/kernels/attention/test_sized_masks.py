"""Attention whose lengths a call decides leaves out the keys that a mask hides, as that of known lengths does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from prefuse.runtime.symbolic.sizes import Dim, Domain
from prefuse.tests.sample import every

from ..harness import Case, target_of
from ..symbolic import built_for, run_at, shape_at, sized
from .attention_cases import Step, Tape, chosen, masked
from .test_attention_mask import LEAST, causal

_HINT = 101  # a length that no other extent is
_LENGTHS = (1, 2, 7, 32, 33, 64, 97, 129, 200)
_BATCH, _HEADS, _DEPTH, _WIDTH = 1, 2, 16, 24


def attend(length: int, score_step: Step) -> Case:
    """Queries, keys and values of one length."""
    tape = Tape()
    queries, keys, values = (tape.input((_BATCH, _HEADS, length, size)) for size in (_DEPTH, _DEPTH, _WIDTH))
    scores = score_step(tape, tape.binary("MatMul", queries, tape.transpose(keys, 0, 1, 3, 2)))
    case = tape.case(tape.binary("MatMul", tape.softmax(scores), values))
    return replace(case, expected=[array.astype(np.float32) for array in case.expected])  # as the kernel writes them


def hidden_from_all(keep: np.ndarray, shown: int) -> np.ndarray:
    return np.where(keep & (np.arange(len(keep)) < shown), 0.0, -np.inf)


def blind(length: int) -> np.ndarray:
    """A row that sees nothing, among causal ones."""
    keep = causal(length, length)
    keep[length // 2] = False
    return keep


_STEPS = {
    "causal": lambda t: chosen(causal(t, t), -np.inf),
    "added": lambda t: masked(np.where(causal(t, t), 0.0, LEAST)),
    "all": lambda t: masked(np.zeros((t, t))),
    "short": lambda t: masked(hidden_from_all(np.ones((t, t), bool), 40)),
    "blind": lambda t: chosen(blind(t), LEAST),
    "window": lambda t: chosen(causal(t, t) & ~np.tri(t, k=-9, dtype=bool), LEAST),
}


def run_all(step: str, lengths: tuple[int, ...], level: str = "avx512") -> dict[int, Case]:
    """One kernel for all lengths, held against float64 at each."""
    target, domain = target_of(level), Domain((Dim("T", 1, 200),), {"T": _HINT})
    hint = attend(_HINT, _STEPS[step](_HINT))
    shapes = {
        name: tuple("T" if extent == _HINT else extent for extent in kind.shape)
        for name, kind in hint.group.types.items()
        if _HINT in kind.shape
    }
    kernel = built_for(sized(hint, shapes, domain), target)
    cases = {length: attend(length, _STEPS[step](length)) for length in lengths}
    for length, case in cases.items():
        assert all(case.group.types[name].shape == shape_at(shape, {"T": length}) for name, shape in shapes.items())
        if step == "short":
            for name, array in case.arrays.items():
                if name in ("x1", "x2"):
                    array[:, :, 64:] = np.nan
    run_at(kernel, target, domain, {length: (case, {"T": length}) for length, case in cases.items()})
    return cases


@pytest.mark.parametrize("step", every(2, list(_STEPS)))
def test_masks(step: str) -> None:
    run_all(step, _LENGTHS)


def test_hidden_keys_are_not_read() -> None:
    """Keys and values behind those that are seen are NaN."""
    for length, case in run_all("short", (60, 97, 129, 200)).items():
        assert np.isfinite(case.got[0]).all(), length
