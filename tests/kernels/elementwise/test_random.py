"""Random numbers: those of a seed exactly, against Philox written with NumPy; those without one by what they must obey."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import ml_dtypes
import numpy as np
import onnx
import prefuse
import pytest

from ..harness import LEVELS, Case, check_in_turn, followed, operator

PI_WORDS = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
PI_KEY = (0xA4093822, 0x299F31D0)


def philox(counter: tuple[np.ndarray, ...], key: tuple[int, int]) -> list[np.ndarray]:
    """Ten rounds of Philox4x32, as in the paper's Random123 library."""
    c = [np.asarray(word, np.uint64) for word in counter]
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    low, high = key
    for _ in range(10):
        first, second = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [second >> shift ^ c[1] ^ np.uint64(low), second & mask, first >> shift ^ c[3] ^ np.uint64(high), first & mask]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return c


def test_the_reference_gives_the_known_answers() -> None:
    """Of Random123's kat_vectors."""
    words = philox(tuple(np.array(word) for word in PI_WORDS), PI_KEY)
    assert [int(word) for word in words] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def words_of(count: int, per_counter: int, key: tuple[int, int]) -> list[np.ndarray]:
    """The word, or the two words, of each of `count` elements: sixteen counters' first ones, then their second, and so on."""
    blocks = -(-count // (16 * per_counter))
    zero = np.zeros(blocks * 16, np.uint64)
    words = philox((np.arange(blocks * 16), zero, zero, zero), key)
    each = 4 // per_counter
    parts = [words[part::each] for part in range(each)]
    return [np.stack([word.reshape(blocks, 16) for word in part], 1).reshape(-1)[:count] for part in parts]


def key_of(seed: float) -> tuple[int, int]:
    return int(np.array(seed, np.float32).view(np.uint32)), 0


def uniform(count: int, key: tuple[int, int], dtype: str = "float32") -> np.ndarray:
    if dtype == "float32":
        return ((words_of(count, 4, key)[0] >> np.uint64(8)) * 2.0**-24).astype(np.float32)
    a, b = words_of(count, 2, key)
    return ((a >> np.uint64(5)) * 2.0**26 + (b >> np.uint64(6))) * 2.0**-53


def draws(op_type: str, shape: tuple[int, ...], expected: np.ndarray, **attributes: Any) -> Case:
    dtype = {"float16": 10, "float64": 11}.get(str(expected.dtype), 1)
    return operator(op_type, shape=shape, dtype=dtype, expected=[expected], rtol=1e-6, atol=1e-6, **attributes)


def normal(count: int, key: tuple[int, int]) -> np.ndarray:
    """Box and Muller, in float64: pairs of words are a radius and an angle, whose cosine and sine are two elements."""
    words = words_of(-(-count // 64) * 64, 4, key)[0].astype(np.float64).reshape(-1, 2, 2, 16)
    radius = np.sqrt(-2 * np.log(words[:, :, 0] * 2.0**-32 + 2.0**-33))
    angle = 2 * np.pi * words[:, :, 1] * 2.0**-32
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 2).reshape(-1)[:count].astype(np.float32)


def seeded() -> Iterator[Case]:
    for shape in ((1,), (7, 11), (3, 64), (2, 3000), ()):
        count = int(np.prod(shape))
        plain = uniform(count, key_of(2.5)).reshape(shape)
        yield draws("RandomUniform", shape, plain, seed=2.5)
        yield draws("RandomUniform", shape, uniform(count, key_of(-1.0), "float64").reshape(shape), seed=-1.0)
        yield draws("RandomUniform", shape, plain * 3 - 1, seed=2.5, low=-1.0, high=2.0)
        yield draws("RandomNormal", shape, normal(count, key_of(7.0)).reshape(shape) * 2 + 1, seed=7.0, mean=1.0, scale=2.0)
    x = np.zeros((5, 9), np.int32)
    yield operator("RandomUniformLike", x, dtype=1, seed=3.0, expected=[uniform(45, key_of(3.0)).reshape(5, 9)])
    half = uniform(45, key_of(3.0)).reshape(5, 9).astype(np.float16)
    yield operator("RandomUniformLike", x.astype(np.float16), seed=3.0, expected=[half])
    yield followed(draws("RandomUniform", (5, 70), uniform(350, key_of(0.0)).reshape(5, 70), seed=0.0))


def bernoulli() -> Iterator[Case]:
    chances = np.linspace(0, 1, 203).astype(np.float32)
    expected = uniform(203, key_of(1.0)) < chances
    yield operator("Bernoulli", chances, seed=1.0, expected=[expected.astype(np.float32)])
    yield operator("Bernoulli", chances, seed=1.0, dtype=9, expected=[expected])
    wide = uniform(203, key_of(1.0), "float64") < chances.astype(np.float64)
    yield operator("Bernoulli", chances.astype(np.float64), seed=1.0, dtype=7, expected=[wide.astype(np.int64)])
    sure = np.array([[0.0, 1.0, np.nan]] * 40, np.float32)
    yield operator("Bernoulli", sure, expected=[(sure == 1).astype(np.float32)])


def dropout() -> Iterator[Case]:
    x = np.linspace(-3, 3, 175, dtype=np.float32).reshape(5, 35)
    for seed, ratio in ((3, 0.25), (-(2**40) - 7, 0.75), (0, 0.0), (1, 1.0)):
        key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
        mask = (uniform(x.size, key) >= np.float32(ratio)).reshape(x.shape)
        with np.errstate(all="ignore"):
            y = np.where(mask, x / np.float32(1 - ratio), 0).astype(np.float32)
        scalar, yes, no = np.array(ratio, np.float32), np.array(True), np.array(False)
        for variables in ((), (1, 2)):
            operands: dict[str, Any] = {"seed": seed, "variables": variables, "rtol": 1e-6}
            yield operator("Dropout", x, scalar, yes, outputs=2, expected=[y, mask], **operands)
            yield operator("Dropout", x, scalar, no, outputs=2, expected=[x, np.ones_like(mask)], **operands)
        yield followed(operator("Dropout", x, scalar, yes, expected=[y], seed=seed, rtol=1e-6))
    half = x.astype(np.float16)
    kept = (uniform(x.size, (5, 0)) >= 0.5).reshape(x.shape)
    coded = x.astype(ml_dtypes.float8_e5m2)
    dropped = np.where(kept, coded.astype(np.float32) * 2, 0).astype(ml_dtypes.float8_e5m2)
    yield operator("Dropout", coded, None, np.array(True), seed=5, expected=[dropped])
    yield operator("Dropout", half, None, np.array(True), seed=5, expected=[np.where(kept, half * 2, 0).astype(np.float16)])


def multinomial() -> Iterator[Case]:
    rows, samples = 3, 500
    with np.errstate(divide="ignore"):
        logits = np.log(np.array([[1, 2, 0, 5, 2], [0, 0, 1, 0, 0], [3, 3, 3, 3, 3]], np.float32))
    a, b, _, _ = philox((np.arange(rows * samples), *[np.zeros(rows * samples)] * 3), key_of(4.0))
    numbers = (a * 2.0**-32 + (b >> np.uint64(16)) * 2.0**-48).reshape(rows, samples)
    totals = np.cumsum(np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True)), 1)
    expected = np.stack([np.searchsorted(t, u * t[-1], "right") for t, u in zip(totals, numbers, strict=True)])
    for dtype, code in ((np.int32, 6), (np.int64, 7)):
        yield operator("Multinomial", logits, sample_size=samples, seed=4.0, dtype=code, expected=[expected.astype(dtype)])
    one = np.zeros((2, 1), np.float64)
    yield operator("Multinomial", one, sample_size=9, expected=[np.zeros((2, 9), np.int32)])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("cases", [seeded, bernoulli, dropout, multinomial])
def test_numbers_of_a_seed(cases: object, level: str) -> None:
    assert callable(cases)
    check_in_turn(list(cases()), level)


def test_without_a_seed_each_run_and_each_operator_draws_its_own() -> None:
    text = """<ir_version: 10, opset_import: ["": 22]>
        main (float[1] x) => (float[4096] a, double[4096] b, float[4096] c, float[4096] d) {
          a = RandomUniform<shape=[4096]>()
          b = RandomUniform<shape=[4096], dtype=11>()
          c = RandomNormal<shape=[4096]>()
          d = RandomUniform<shape=[4096]>()
        }"""
    model = prefuse.compile(onnx.parser.parse_model(text), cache=False, random=True)
    x = np.zeros(1, np.float32)
    runs = [cast(tuple[np.ndarray, ...], model(x)) for _ in range(2)]
    first, second = ([np.asarray(value, np.float64) for value in run] for run in runs)
    for one, other in zip([*first, first[0]], [*second, first[3]], strict=True):
        assert np.mean(one == other) < 0.01
    for one in (first[0], first[1], first[3]):
        assert one.min() >= 0
        assert one.max() < 1
        np.testing.assert_allclose([one.mean(), one.var()], [1 / 2, 1 / 12], atol=0.03)  # six standard deviations
    np.testing.assert_allclose([first[2].mean(), first[2].var()], [0, 1], atol=0.15)


def test_with_a_seed_each_run_draws_the_same() -> None:
    text = """<ir_version: 10, opset_import: ["": 22]>
        main (float[99] x) => (float[99] y) {
          t = Constant<value = bool {1}>()
          y = Dropout<seed = 5>(x, , t)
        }"""
    model = prefuse.compile(onnx.parser.parse_model(text), cache=False, random=True)
    x = np.ones(99, np.float32)
    np.testing.assert_array_equal(model(x), model(x))
    np.testing.assert_array_equal(model(x), 2 * (uniform(99, (5, 0)) >= 0.5))
