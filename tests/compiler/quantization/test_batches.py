"""Calibration data in all forms, and what is said of bad ones."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
from prefuse.compiler.quantization.batches import Batches, data_digest
from prefuse.runtime.errors import InputError

X, Y = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([1, 2], np.int64)


def value(name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


INPUTS = [value("x", ir.DataType.FLOAT, "N", 3), value("y", ir.DataType.INT64, 2)]


def generator() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for _ in range(3):
        yield X, Y


@pytest.mark.parametrize(
    "data",
    [
        [{"x": X, "y": Y}] * 3,
        [(X, Y)] * 3,
        ([torch.from_numpy(X), torch.from_numpy(Y)] for _ in range(3)),
        generator(),
    ],
)
def test_iterables(data: object) -> None:
    """Also those of an iterator can be gone through twice."""
    batches = Batches(data, INPUTS)
    for _ in range(2):
        found = list(batches)
        assert len(found) == 3
        for batch in found:
            assert np.array_equal(batch["x"], X)
            assert np.array_equal(batch["y"], Y)


def test_one_input_may_stand_alone() -> None:
    assert [len(batch["x"]) for batch in Batches([X, X[:1]], INPUTS[:1])] == [2, 1]


def test_files(tmp_path: Path) -> None:
    """One batch a file, or several with a dimension more; a folder of files."""
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    np.savez(tmp_path / "b.npz", x=np.stack([X, X + 1]), y=np.stack([Y, Y]))
    assert len(list(Batches(tmp_path / "a.npz", INPUTS))) == 1
    assert len(list(Batches(str(tmp_path / "b.npz"), INPUTS))) == 2
    assert [float(batch["x"][0, 0]) for batch in Batches(tmp_path, INPUTS)] == [0.0, 0.0, 1.0]


def test_bad_files(tmp_path: Path) -> None:
    np.savez(tmp_path / "names.npz", x=X)
    np.savez(tmp_path / "counts.npz", x=np.stack([X, X]), y=np.stack([Y]))
    np.savez(tmp_path / "mixed.npz", x=np.stack([X, X]), y=Y)
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "empty").mkdir()
    for name, what in (
        ("names.npz", "holds x; write one array for each input"),
        ("counts.npz", "same number of batches"),
        ("mixed.npz", "same number of batches"),
        ("text.npz", "no .npz file"),
        ("gone.npz", "cannot be read"),
        ("empty", "without .npz files"),
    ):
        with pytest.raises(InputError, match=what):
            list(Batches(tmp_path / name, INPUTS))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ([], "there are no batches"),
        (iter(()), "there are no batches"),
        (3, "int given"),
        ({"x": X, "y": Y}, "dict given"),
        (X, "ndarray given"),
        ([(X,)], "batch 0: has 1 arrays; the inputs are x, y"),
        ([(X, Y), {"x": X, "z": Y}], "batch 1: has x, z; the inputs are x, y"),
        ([(X[:, :2], Y)], r"input 'x': shape \[2, 2\]"),
        ([(X[0], Y)], r"input 'x': shape \[3\]"),
        ([(X.astype(np.float64), Y)], "input 'x': is of type float64; give float32"),
        ([(np.full((2, 3), np.nan, np.float32), Y)], "input 'x': has NaN or infinities"),
        ([(np.full((2, 3), np.inf, np.float32), Y)], "input 'x': has NaN or infinities"),
    ],
)
def test_bad_data(data: object, what: str) -> None:
    with pytest.raises(InputError, match=what):
        list(Batches(data, INPUTS))


def test_digests_tell_data_apart(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    kinds = [[(X, Y)], [(X, Y), (X, Y)], [(X + 1, Y)], [{"x": X, "y": Y}], [{"y": X, "x": Y}], tmp_path / "a.npz"]
    assert len({data_digest(data) for data in kinds}) == len(kinds)
    assert data_digest([(X, Y)]) == data_digest([(torch.from_numpy(X.copy()), Y)])
    with pytest.raises(InputError, match="int given"):
        data_digest(3)


def test_an_iterator_may_fill_one_array_again_and_again() -> None:
    def filled() -> Iterator[dict[str, object]]:
        x, y = np.zeros((2, 3), np.float32), torch.zeros(2, dtype=torch.int64)
        for number in range(3):
            x[:] = number
            y[:] = number
            yield {"x": x, "y": y}

    for _ in range(2):
        found = Batches(filled(), INPUTS)
        assert [(float(batch["x"][0, 0]), int(batch["y"][1])) for batch in found] == [(0, 0), (1, 1), (2, 2)]


class Shuffled:
    """Batches in another order each time."""

    def __init__(self, step: int) -> None:
        self.first, self.step = 0, step

    def __iter__(self) -> Iterator[np.ndarray]:
        for number in range(4):
            yield X + (number + self.first) % 4
        self.first += self.step


def test_other_batches_each_time_are_refused() -> None:
    same = Batches(Shuffled(0), INPUTS[:1])
    assert len(list(same)) == len(list(same)) == 4
    shuffled = Batches(Shuffled(1), INPUTS[:1])
    assert len(list(shuffled)) == 4
    with pytest.raises(InputError, match="batch 0: is another one each time"):
        list(shuffled)


def test_damaged_files(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "whole.npz", x=np.zeros((40, 3), np.float32))
    content = bytearray((tmp_path / "whole.npz").read_bytes())
    begin = content.index(b"x.npy") + len("x.npy") + 20
    content[begin : begin + 30] = b"\xff" * 30
    (tmp_path / "packed.npz").write_bytes(content)
    with zipfile.ZipFile(tmp_path / "text.npz", "w") as archive:
        archive.writestr("x", "no array")
    header = b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1152921504606846975,), }"
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("x.npy", header.ljust(127) + b"\n")
    for name in ("packed", "text", "huge"):
        with pytest.raises(InputError, match=r"is no \.npz file of arrays|which is no array"):
            list(Batches(tmp_path / f"{name}.npz", INPUTS[:1]))


def test_types_that_numpy_has_no_name_for(tmp_path: Path) -> None:
    wanted = X.astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "x.npz", x=wanted)
    for data in (tmp_path / "x.npz", [wanted], [torch.from_numpy(X).bfloat16()]):
        (batch,) = Batches(data, [value("x", ir.DataType.BFLOAT16, 2, 3)])
        assert batch["x"].dtype == ml_dtypes.bfloat16
        assert np.array_equal(batch["x"], wanted)
    with pytest.raises(InputError, match="is of type bfloat16; give float16"):
        list(Batches([wanted], [value("x", ir.DataType.FLOAT16, 2, 3)]))


def test_lists_that_are_no_arrays() -> None:
    with pytest.raises(InputError, match="input 'x': is no array"):
        list(Batches([{"x": [[1.0], [1.0, 2.0]]}], INPUTS[:1]))
    with pytest.raises(InputError, match="is no array"):
        data_digest([{"x": [[1.0], [1.0, 2.0]]}])
