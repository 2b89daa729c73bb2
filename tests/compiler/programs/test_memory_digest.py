"""Digests of arrays in memory: whatever is done to an array in place is seen."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from prefuse.compiler.ir.constants import derived_tensor
from prefuse.compiler.programs import memory_digest
from prefuse.compiler.programs.contents import tensor_digest
from prefuse.compiler.programs.digest import array_digest

ROWS, COLUMNS = 301, 257  # of floats: no whole number of blocks


def some() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)


def swap(array: np.ndarray) -> None:
    array[[5, 6]] = array[[6, 5]]


def swap_far(array: np.ndarray) -> None:
    array[[0, 256]] = array[[256, 0]]


def swap_signs(array: np.ndarray) -> None:
    """Two words that differ in their highest bit alone change places."""
    array.reshape(-1)[[101, 4197]] = array.reshape(-1)[[4197, 101]]


def negate(array: np.ndarray) -> None:
    array *= -1


def flip_a_bit(array: np.ndarray) -> None:
    array.reshape(-1).view(np.uint8)[12_345] ^= 128


def change_the_end(array: np.ndarray) -> None:
    array[-1, -1] += 1


def reverse(array: np.ndarray) -> None:
    array[:] = array[::-1].copy()


@pytest.mark.parametrize("change", [swap, swap_far, swap_signs, negate, flip_a_bit, change_the_end, reverse])
def test_changes_in_place_are_seen(change: Callable[[np.ndarray], None]) -> None:
    array = some()
    array.reshape(-1)[[100, 4196]] = 1.5
    array.reshape(-1)[[101, 4197]] = 2.0, -2.0
    before = array_digest(array)
    original = array.copy()
    change(array)
    assert array_digest(array) != before
    assert array_digest(array) == array_digest(array.copy())
    array[:] = original
    assert array_digest(array) == before


def test_an_array_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    array, hashed, digest = some(), list[int](), memory_digest._digest

    def counted(data: np.ndarray) -> str:
        hashed.append(data.size)
        return digest(data)

    monkeypatch.setattr(memory_digest, "_digest", counted)
    assert array_digest(array) == array_digest(array)
    assert array_digest(array.T) == array_digest(array.T)
    assert hashed == [array.nbytes]
    monkeypatch.setattr(memory_digest, "_MOST_KNOWN", 1)
    others = [some() for _ in range(3)]
    assert len({array_digest(other) for other in others}) == 1
    assert len(memory_digest._known) == 1


def test_what_was_looked_at_can_be_trusted() -> None:
    array, other = some(), some()
    with memory_digest.looking() as places:
        before = array_digest(array)
    other[0, 0] += 1
    array[0, 0] += 1
    with memory_digest.trusting(places):
        assert array_digest(array) == before  # nobody looks
        assert array_digest(other) != before
    assert array_digest(array) != before


def test_type_shape_and_order_count() -> None:
    array = some()
    square = array[:250, :250].copy()
    views = [
        array,
        array.reshape(COLUMNS, ROWS),
        array.view(np.int32),
        array[:-1],
        square,
        square.T,
        square.T.copy(),
        array[::-1],
    ]
    assert len({array_digest(view) for view in views}) == len(views)
    narrow = array.astype(ml_dtypes.bfloat16)
    assert array_digest(narrow) != array_digest(narrow.view(np.int16))
    assert array_digest(np.array(["a", "b"], object)) != array_digest(np.array(["a", "c"], object))


def test_derived_tensors_are_not_computed() -> None:
    def never() -> np.ndarray:
        raise AssertionError("computed")

    first, second = ir.tensor(some()), ir.tensor(some() + 1)

    def joined(axis: int, *sources: ir.TensorProtocol) -> str:
        return tensor_digest(derived_tensor(("join", axis), sources, never, ir.DataType.FLOAT, (1,)))

    found = [joined(0, first, second), joined(1, first, second), joined(0, second, first), joined(0, first)]
    assert len(set(found)) == len(found)
    assert joined(0, ir.tensor(some()), second) == found[0]
    assert tensor_digest(first) == tensor_digest(ir.tensor(some())) != tensor_digest(second)
