"""Attention that sees a window of its keys, in front of which and behind which nothing is read; against float64 and itself."""

from __future__ import annotations

import numpy as np
import pytest
from prefuse.kernels.attention import attention
from prefuse.runtime.target import AMX_EMULATED

from ..harness import LEVELS, Case, check_in_turn, run, target_of
from .attention_cases import attend, chosen, grouped_queries, guarded, hidden
from .test_attention_mask import LEAST
from .test_paired_attention import LEVEL as PAIRS
from .test_paired_attention import paired


def window(queries: int, keys: int, first: int, width: int) -> np.ndarray:
    """Each query sees `width` keys up to its own, which is `first` for the first query."""
    behind = np.arange(keys) - (first + np.arange(queries))[:, None]
    return (behind <= 0) & (behind > -width)


def cases() -> list[Case]:
    """Few queries and many; a window at the end of the keys, that no step divides; a query that sees no key; one that sees the
    first; windows that are apart."""
    blind, apart, sink = window(3, 512, 300, 20), window(40, 500, 200, 30), window(30, 300, 200, 9)
    blind[1], apart[20:], sink[-1, 0] = False, window(20, 500, 440, 9), True
    return [
        attend((1, 2, 1, 1088, 16, 16), score_step=hidden(window(1, 1088, 700, 64))),
        attend((1, 2, 1, 2144, 16, 16), score_step=hidden(window(1, 2144, 2100, 700))),
        attend((1, 1, 4, 320, 16, 8), score_step=chosen(window(4, 320, 310, 3), LEAST)),
        attend((1, 1, 3, 512, 16, 8), score_step=chosen(blind, LEAST)),
        attend((1, 1, 3, 512, 16, 8), score_step=chosen(blind, -np.inf), weight_step=guarded),
        attend((1, 2, 30, 333, 16, 24), score_step=hidden(window(30, 333, 303, 40))),
        attend((1, 2, 60, 700, 16, 24), score_step=chosen(window(60, 700, 600, 2), -np.inf)),
        attend((1, 1, 40, 500, 16, 16), score_step=chosen(apart, LEAST)),
        attend((1, 1, 30, 300, 16, 16), score_step=hidden(sink, LEAST)),
    ]


@pytest.mark.parametrize("level", LEVELS)
def test_windows(level: str) -> None:
    check_in_turn(cases(), level)


@pytest.mark.parametrize("level", LEVELS)
def test_windows_of_keys_in_blocks(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that end in one block of keys and begin in an earlier one; rows that see no key of some blocks, or of any."""
    monkeypatch.setattr(attention, "_CACHE_SHARE", 1 / 128)
    blind = window(70, 600, 400, 100)
    blind[33] = False
    more = [attend((1, 1, 70, 600, 16, 16), score_step=chosen(blind, least)) for least in (LEAST, -1e9)]
    check_in_turn([*cases(), *more], level)


def poisoned(case: Case, seen: np.ndarray) -> Case:
    """With NaN for all keys and values but those seen."""
    *_, keys, values = (name for name, array in case.arrays.items() if array.ndim == 3)
    case.arrays[keys][:, ~seen], case.arrays[values][:, ~seen] = np.nan, np.nan
    return case


def read(keep: np.ndarray, step: int) -> np.ndarray:
    """The keys that some query sees, in whole steps."""
    at = np.flatnonzero(keep.any(0))
    seen = np.zeros(keep.shape[1], bool)
    seen[at[0] // step * step : -(-(at[-1] + 1) // step) * step] = True
    return seen


def check_poisoned(sizes: tuple[int, int], keep: np.ndarray, step: int, level: str, *, in_pairs: bool = False) -> None:
    """The results have the bits that they have where all keys are numbers."""
    results = []
    for seen in (np.ones(keep.shape[1], bool), read(keep, step)):
        case = poisoned(attend((1, 2, *keep.shape, *sizes), score_step=hidden(keep, LEAST)), seen)
        case = paired(case) if in_pairs else case
        run([case], target_of(level))
        results.append(case.got[0])
    assert np.isfinite(results[0].astype(np.float32)).all()
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("queries", "keys", "first", "step"), [(1, 512, 300, 32), (4, 512, 0, 32), (1, 1088, 900, 544), (8, 96, 80, 32)]
)
def test_few_queries_read_their_window(queries: int, keys: int, first: int, step: int, level: str) -> None:
    check_poisoned((16, 16), window(queries, keys, first, 40), step, level)


@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("share", [None, 1 / 128])
@pytest.mark.parametrize("first", [0, 450])
def test_blocks_of_queries_read_their_windows(
    first: int, share: float | None, in_pairs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether keys come in blocks or not."""
    if share is not None:
        monkeypatch.setattr(attention, "_CACHE_SHARE", share)
    level = PAIRS if in_pairs else LEVELS[0]
    check_poisoned((16, 24), window(50, 520, first, 70), 2 * target_of(level).machine.lanes, level, in_pairs=in_pairs)


def test_the_tile_unit_reads_a_window() -> None:
    results = []
    for read_begin, read_end in ((0, 320), (192, 288)):
        keep = window(1, 320, 270, 70)
        case = grouped_queries(1, hidden(keep[0]), keys=320, depth=32, dtype="bfloat16")
        for array in case.arrays.values():
            if array.shape[:2] == (2, 320):
                array[:, :read_begin], array[:, read_end:] = np.nan, np.nan
        run([case], target_of(AMX_EMULATED))
        results.append(case.got[0].astype(np.float32))
    assert np.isfinite(results[0]).all()
    np.testing.assert_array_equal(results[0], results[1])
