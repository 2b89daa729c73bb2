"""Tokens that the sampler chooses, against NumPy: the same noise, thresholds by sorting; and against the distribution itself."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from prefuse.compiler.lowering.generation_code import build_generation_library
from prefuse.kernels.generation.token_sampler import KEY_WORDS, STOPS
from prefuse.kernels.generation.token_sampler import SETTINGS as SETTING_NUMBERS
from prefuse.runtime.generation import request
from prefuse.runtime.generation.loop import GenerationLibrary
from prefuse.runtime.target import Target

_LARGE = 2003  # not a multiple of any vector's lanes


@dataclass
class Sampler:
    """The native sampler, and what it reads and writes."""

    library: GenerationLibrary
    batch: int
    vocabulary: int
    scratch: int

    @classmethod
    def of(cls, batch: int, vocabulary: int, target: str = "cpu", threads: int = 1) -> Sampler:
        parsed = Target.parse(target, threads)
        library, scratch = build_generation_library(batch, vocabulary, parsed)
        return cls(GenerationLibrary(library, threads), batch, vocabulary, scratch)

    def __call__(
        self,
        logits: np.ndarray,
        settings: Sequence[tuple[float, ...]],
        *,
        seed: int = 1,
        step: int = 0,
        runs: tuple[int, ...] | None = None,
        ends: tuple[int, ...] = (),
        pad: int = 0,
        places: Sequence[int] | None = None,
        most: Sequence[int] | None = None,
        bias: np.ndarray | None = None,
        seen: np.ndarray | None = None,
        logprobs: np.ndarray | None = None,
    ) -> tuple[list[int], list[int], int]:
        """Tokens, the renewed state, and how many sequences run; memory beyond the results stays as it is."""
        nothing = [0] * self.batch
        limits = [2**62] * self.batch if most is None else most
        state = np.array([step, *(runs or (1,) * self.batch), *(nothing if places is None else places), *limits], np.int64)
        token, alive = np.full(self.batch + 1, -7, np.int64), np.full(2, -7, np.int64)
        scratch = np.full(self.scratch + 1, np.nan, np.float32)
        numbers = np.array([[seed & 0xFFFFFFFF, seed >> 32, row] for row in range(self.batch)], np.uint32)
        given = np.tile(np.array([0, 0, 1, -np.inf, 1, bias is not None, logprobs is not None], np.float32), (self.batch, 1))
        for row, setting in enumerate(settings):
            given[row, : len(setting)] = setting
        unused = np.zeros(1, np.float32)
        more = (unused if one is None else one for one in (bias, seen, logprobs))
        stops = np.array([*ends, *[-1] * (STOPS - len(ends)), pad], np.int64)
        arrays = (
            np.ascontiguousarray(logits, np.float32), given, numbers, stops, state, scratch, token, alive, *more
        )  # fmt: skip
        table = (ctypes.c_int64 * len(arrays))(*(array.ctypes.data for array in arrays))
        self.library.prepare()
        self.library.sample(ctypes.byref(table))
        assert token[-1] == alive[-1] == -7
        assert np.isnan(scratch[-1])
        return token[:-1].tolist(), state[: 1 + self.batch].tolist(), int(alive[0])


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 of counters uint64 [4, n]: words [4, n]."""
    words, (low, high) = [word.astype(np.uint64) for word in counter], key
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (second >> np.uint64(32)) ^ words[1] ^ np.uint64(low), second & np.uint64(0xFFFFFFFF),
            (first >> np.uint64(32)) ^ words[3] ^ np.uint64(high), first & np.uint64(0xFFFFFFFF),
        ]  # fmt: skip
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return np.array(words)


def noise(vocabulary: int, row: int, step: int, seed: int) -> np.ndarray:
    """Gumbel noise of each token, as the sampler says that it is made."""
    token = np.arange(vocabulary, dtype=np.uint64)
    block, place = token // np.uint64(64), token % np.uint64(64)
    rest = [np.full(vocabulary, word, np.uint64) for word in (row, step & 0xFFFFFFFF, step >> 32)]
    words = philox(np.array([block * np.uint64(16) + place % np.uint64(16), *rest]), (seed & 0xFFFFFFFF, seed >> 32))
    word = words[(place // np.uint64(16)).astype(int), np.arange(vocabulary)]
    uniform = ((word >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23
    found: np.ndarray = -np.log(-np.log(uniform))
    return found


def expected(logits: np.ndarray, row: int, setting: tuple[float, ...], seed: int, step: int) -> int:
    """The token by sorting, in float64."""
    temperature, top_k, top_p, min_p = (*setting, -np.inf)[:4]
    if temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / temperature
    below = scaled - scaled.max()
    order = np.argsort(-below, kind="stable")
    kept = np.zeros(len(logits), bool)
    kept[order[: int(top_k) or None]] = True
    weights = np.where(kept, np.exp(below), 0)
    mass = np.cumsum(weights[order]) / weights.sum()
    kept[order[1:][mass[:-1] >= top_p]] = False
    kept &= below >= min_p
    return int(np.where(kept, below + noise(len(logits), row, step, seed), -np.inf).argmax())


SETTINGS = [
    (0.0, 0, 1.0),
    (1.0, 0, 1.0),
    (0.7, 40, 1.0),
    (1.3, 0, 0.9),
    (0.9, 25, 0.8),
    (2.0, 1, 1.0),
    (1.0, 0, 1e-6),
    (5.0, 1999, 0.99),
    (1.0, 0, 1.0, float(np.log(0.2))),
    (3.0, 30, 0.9, float(np.log(0.05))),
]


@pytest.mark.parametrize("target", ["cpu", "cpu:avx2"])
def test_tokens_are_those_of_sorting(target: str) -> None:
    batch = len(SETTINGS)
    sampler, rng = Sampler.of(batch, _LARGE, target), np.random.default_rng(3)
    for step in (0, 1, 2**32 + 5):
        logits = 3 * rng.standard_normal((batch, _LARGE)).astype(np.float32)
        tokens, state, alive = sampler(logits, SETTINGS, seed=2**33 + 77, step=step)
        assert tokens == [expected(logits[row], row, setting, 2**33 + 77, step) for row, setting in enumerate(SETTINGS)]
        assert state == [step + 1, *[1] * batch]
        assert alive == batch


def test_threads_draw_the_same() -> None:
    """Each a sequence, or all of them parts of the vocabulary."""
    logits = np.random.default_rng(0).standard_normal((len(SETTINGS), 30_000)).astype(np.float32)
    for batch, settings in ((len(SETTINGS), SETTINGS), (1, SETTINGS[1:2]), (1, SETTINGS[4:5]), (2, SETTINGS[:2])):
        told = np.zeros((2, batch), np.float32)
        one, two = (
            Sampler.of(batch, 30_000, threads=threads)(logits[:batch], settings, logprobs=told[number : number + 1])
            for number, threads in enumerate((1, 3))
        )
        assert one == two
        np.testing.assert_array_equal(told[0], told[1])


def test_draws_follow_the_probabilities() -> None:
    """4,096 draws in 32 calls: the chi-squared of 8 tokens, which 24.3 bounds at 0.1%."""
    batch, vocabulary = 128, 8
    sampler, rng = Sampler.of(batch, vocabulary), np.random.default_rng(1)
    row = rng.standard_normal(vocabulary).astype(np.float32)
    drawn = [
        token for step in range(32) for token in sampler(np.tile(row, (batch, 1)), [(1.0, 0, 1.0)] * batch, seed=9, step=step)[0]
    ]
    chances = np.exp(row) / np.exp(row).sum() * len(drawn)
    assert ((np.bincount(drawn, minlength=vocabulary) - chances) ** 2 / chances).sum() < 24.3


def test_stop_tokens_end_a_sequence_and_the_rest_is_padded() -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[0, 2] = logits[1, 3] = logits[2, 4] = 1
    tokens, state, alive = Sampler.of(3, 5)(logits, [(0.0, 0, 1.0)] * 3, runs=(1, 1, 0), ends=(1, 3), pad=0)
    assert (tokens, state, alive) == ([2, 3, 0], [1, 1, 0, 0], 1)


@pytest.mark.parametrize("vocabulary", [1, 15, 64, 65])
def test_few_tokens_and_odd_logits(vocabulary: int) -> None:
    """Infinite logits, NaN and equal ones: always a token that there is."""
    sampler = Sampler.of(2, vocabulary)
    for fill in (0.0, -np.inf, np.nan):
        logits = np.full((2, vocabulary), fill, np.float32)
        logits[1, -1] = 5.0
        tokens, _, _ = sampler(logits, [(0.0, 0, 1.0), (1.0, 1, 0.5)])
        assert 0 <= tokens[0] < vocabulary
        assert tokens[1] == vocabulary - 1


@pytest.mark.parametrize("count", [1, 40, 200])
def test_nan_is_never_chosen(count: int) -> None:
    """Tokens are those where the logits that are NaN are -inf, in whatever block these lie; where all are, the first."""
    vocabulary, batch, rng = 200, len(SETTINGS), np.random.default_rng(count)
    sampler = Sampler.of(batch, vocabulary)
    for step in range(20):
        logits = 3 * rng.standard_normal((batch, vocabulary)).astype(np.float32)
        places = rng.choice(vocabulary, count, replace=False)
        results = []
        for odd in (np.nan, -np.inf):
            logits[:, places] = odd
            results.append(sampler(logits, SETTINGS, step=step)[0])
        assert results[0] == results[1]
        assert count < vocabulary or results[0] == [0] * batch


def test_infinite_logits_are_drawn_alike() -> None:
    batch = 64
    logits = np.zeros((batch, 70), np.float32)
    logits[:, [3, 69]] = np.inf
    sampler = Sampler.of(batch, 70)
    assert set(sampler(logits, [(1.0, 0, 1.0)] * batch)[0]) == {3, 69}
    assert set(sampler(logits, [(0.7, 2, 0.9)] * batch)[0]) == {3, 69}
    assert set(sampler(logits, [(0.0, 0, 1.0)] * batch)[0]) == {3}


def test_noise_is_of_the_place_in_the_text() -> None:
    """Step 3 of a text of 5 tokens draws as step 0 of one of 8; places beyond 32 bits, too."""
    batch = len(SETTINGS)
    sampler, logits = Sampler.of(batch, 300), np.random.default_rng(2).standard_normal((batch, 300)).astype(np.float32)
    for place in (8, 2**32 + 8):
        one = sampler(logits, SETTINGS, step=3, places=[place - 3] * batch)[0]
        assert one == sampler(logits, SETTINGS, places=[place] * batch)[0]
        assert one == [expected(logits[row], row, setting, 1, place) for row, setting in enumerate(SETTINGS)]


def test_each_sequence_ends_with_its_last_step() -> None:
    logits = np.zeros((3, 5), np.float32)
    _, state, alive = Sampler.of(3, 5)(logits, [(0.0,)] * 3, step=1, most=[1, 2, 3], ends=(4,))
    assert (state, alive) == ([2, 0, 0, 1], 1)


def test_biases_and_penalties_change_logits() -> None:
    batch, vocabulary, rng = len(SETTINGS), 333, np.random.default_rng(8)
    sampler, logits = Sampler.of(batch, vocabulary), 3 * rng.standard_normal((batch, vocabulary)).astype(np.float32)
    bias, seen = rng.standard_normal((batch, vocabulary)).astype(np.float32), rng.integers(0, 2, (batch, vocabulary), np.int8)
    bias[:, ::3] = -np.inf
    defaults = (0.0, 0, 1.0, -np.inf)
    for penalty in (0.5, 1.7):
        settings = [(*setting, *defaults[len(setting) :], penalty) for setting in SETTINGS]
        marks = seen.copy()
        tokens = sampler(logits, settings, bias=bias, seen=marks)[0]
        changed = logits + bias
        punished = np.where(changed > 0, changed / penalty, changed * penalty)
        changed = np.where(seen > 0, punished, changed)
        assert tokens == [expected(changed[row], row, setting, 1, 0) for row, setting in enumerate(SETTINGS)]
        seen[range(batch), tokens] = 1
        np.testing.assert_array_equal(marks, seen)
    assert not any(token % 3 == 0 for token in tokens)


@pytest.mark.parametrize("vocabulary", [1, 64, 333])
def test_log_probabilities_are_those_of_the_logits(vocabulary: int) -> None:
    """Whatever is drawn by whatever settings; of a later step, and of sequences that run."""
    batch, rng = len(SETTINGS), np.random.default_rng(4)
    logits = 5 * rng.standard_normal((batch, vocabulary)).astype(np.float32)
    told = np.full((3, batch), np.nan, np.float32)
    runs = (*[1] * (batch - 1), 0)
    tokens = Sampler.of(batch, vocabulary)(logits, SETTINGS, step=1, logprobs=told, runs=runs)[0]
    exact = logits.astype(np.float64)
    wanted = (exact - np.log(np.exp(exact).sum(1, keepdims=True)))[range(batch), tokens]
    np.testing.assert_allclose(told[1, :-1], wanted[:-1], rtol=1e-5, atol=1e-5)
    assert np.isnan(told[[0, 2]]).all()
    assert np.isnan(told[1, -1])


def test_calls_may_name_as_many_stops_as_the_sampler_compares() -> None:
    assert request.STOPS == STOPS
    assert (request.SETTINGS, request.KEY_WORDS) == (SETTING_NUMBERS, KEY_WORDS)
