"""Constants by content: once in memory, once on disk, and never other bytes than were written."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from prefuse.runtime.constants import shared
from prefuse.runtime.constants.mapping import map_file
from prefuse.runtime.constants.shared import ConstantError, ConstantPool, alive, load, path_of, write

BYTES = 100_001  # no multiple of anything


@pytest.fixture
def content(request: pytest.FixtureRequest) -> Iterator[str]:
    """A name that no other test has; nothing of it is alive at the end."""
    name = f"{abs(hash(request.node.nodeid)):064x}"
    yield name
    gc.collect()
    assert alive(name, BYTES) is None


def some(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, BYTES, dtype=np.uint8)


@pytest.mark.parametrize("is_copied", [False, True])
def test_a_constant_is_in_memory_once(tmp_path: Path, content: str, is_copied: bool) -> None:
    write(tmp_path, content, some().data)
    first, second = (load(tmp_path, {content: BYTES}, is_copied=is_copied)[content] for _ in range(2))
    assert first is second
    assert first.data.tobytes() == some().tobytes()
    assert first.data.ctypes.data % 64 == 0
    assert not first.data.flags.writeable


def test_a_copy_serves_who_would_map(tmp_path: Path, content: str) -> None:
    write(tmp_path, content, some().data)
    mapped = load(tmp_path, {content: BYTES})[content]
    copied = load(tmp_path, {content: BYTES}, is_copied=True)[content]
    assert copied is not mapped
    assert load(tmp_path, {content: BYTES})[content] is copied


def test_copies_lie_side_by_side(tmp_path: Path, content: str) -> None:
    other = content[::-1]
    write(tmp_path, content, some().data)
    write(tmp_path, other, some(1)[:70_000].data)
    found = load(tmp_path, {content: BYTES, other: 70_000}, is_copied=True)
    assert found[other].data.tobytes() == some(1)[:70_000].tobytes()
    assert found[content].data.tobytes() == some().tobytes()
    distance = found[other].data.ctypes.data - found[content].data.ctypes.data
    assert distance == -(-BYTES // 64) * 64


def test_what_is_deleted_stays_mapped(tmp_path: Path, content: str) -> None:
    write(tmp_path, content, some().data)
    held = load(tmp_path, {content: BYTES})[content]
    path_of(tmp_path, content).unlink()
    assert held.data.tobytes() == some().tobytes()
    assert load(tmp_path, {content: BYTES})[content] is held


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("damage", ["truncated", "extended", "flipped", "checksum", "empty"])
def test_damaged_files_are_removed(tmp_path: Path, content: str, damage: str, is_copied: bool) -> None:
    write(tmp_path, content, some().data)
    path = path_of(tmp_path, content)
    whole = bytearray(path.read_bytes())
    flipped, checked = whole.copy(), whole.copy()
    flipped[BYTES // 2] ^= 4
    checked[-1] ^= 1
    damaged = {"truncated": whole[:-1], "extended": whole + b"0", "flipped": flipped, "checksum": checked, "empty": bytearray()}
    path.write_bytes(damaged[damage])
    with pytest.raises(ConstantError, match=content):
        load(tmp_path, {content: BYTES}, is_copied=is_copied)
    assert not path.exists()
    with pytest.raises(ConstantError, match="No such file"):
        load(tmp_path, {content: BYTES}, is_copied=is_copied)


def test_a_pool_makes_what_is_nowhere(tmp_path: Path, content: str) -> None:
    made = []

    def make() -> np.ndarray:
        made.append(content)
        return some()

    for _ in range(2):
        ConstantPool().provide(tmp_path, content, BYTES, make)
    assert made == [content]
    path_of(tmp_path, content).write_bytes(b"damaged")
    ConstantPool().provide(tmp_path, content, BYTES, make)
    assert len(made) == 2
    held = load(tmp_path, {content: BYTES})[content]
    path_of(tmp_path, content).unlink()  # another process has made room
    ConstantPool().provide(tmp_path, content, BYTES, make)
    assert len(made) == 2  # it was written from memory
    assert path_of(tmp_path, content).read_bytes()[:BYTES] == held.data.tobytes()


def test_a_temporary_pool_holds_what_is_in_memory(tmp_path: Path, content: str) -> None:
    write(tmp_path, content, some().data)
    held = load(tmp_path, {content: BYTES})[content]
    path_of(tmp_path, content).unlink()
    pool = ConstantPool(is_temporary=True)
    pool.provide(tmp_path, content, BYTES, some)
    assert list(tmp_path.iterdir()) == []
    del held
    gc.collect()
    assert alive(content, BYTES) is not None
    del pool


def test_a_full_disk_leaves_no_file(tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, content, some().data)
    assert list(tmp_path.iterdir()) == []


@contextmanager
def open_files() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before


def test_mappings_keep_no_file_open(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(some().tobytes())
    with open_files(), open(path, "rb") as file:
        mappings = [map_file(file.fileno(), BYTES)[number:] for number in range(3)]
        file.close()
        assert [mapping[0] for mapping in mappings] == some()[:3].tolist()
    with open(path, "rb") as file:
        assert map_file(file.fileno(), 0).size == 0


def test_only_digests_name_contents() -> None:
    assert shared.is_content("0" * 63 + "a")
    for name in ("0" * 63, "../" + "0" * 61, "0" * 64 + "\n", 5, None):
        assert not shared.is_content(name)
