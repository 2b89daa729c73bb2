"""The texts of a session without the rows of their caches that no token has: to copy, to save and to load.

A file is a zip of session.json, which says of which program the texts are, their tokens in the caches and those that wait; and of
NAME.npy for each state, caches cut to the longest text. NumPy reads these, bfloat16 and its like as unsigned integers.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..archive import COPY_AGAIN, check_members, new_archive, reading, write_member
from ..errors import ProgramFileError
from ..plan import State
from ..states import States

HEADER = "session.json"
_FORMAT = 2
_LARGEST_HEADER_BYTES = 1 << 16  # of an array in NumPy's file
_ROWS = 2  # the axis of a cache [batch, heads, rows, width]
UNKNOWN = -1  # a token of a text whose number nobody has told


@dataclass(frozen=True, slots=True)
class Texts:
    """Of each text the tokens that are in the caches, and those that wait to be read. All states by name, caches
    [batch, heads, rows, width] with as many rows as the longest text has tokens, zeros beyond the others."""

    states: Mapping[str, np.ndarray]
    read: list[list[int]]
    waiting: list[list[int]]


def rows_in_use(states: States, caches: Collection[str], lengths: Sequence[int]) -> dict[str, np.ndarray]:
    """A copy of all states, of `caches` with the rows in use alone."""
    return {state.name: _cut(states, state, offset, lengths if state.name in caches else None) for state, offset in _of(states)}


def set_rows(states: States, arrays: Mapping[str, np.ndarray]) -> None:
    """Set all states; rows of caches beyond those that are given stay as they are."""
    memory = states.memory()
    for state, offset in _of(states):
        array, whole = np.ascontiguousarray(arrays[state.name]), state.type.shape
        if array.shape == whole:
            memory.write(offset, array.reshape(-1).view(np.uint8))
            continue
        head_bytes = state.type.size_bytes // (whole[0] * whole[1])
        for head, rows in enumerate(array.reshape(whole[0] * whole[1], *array.shape[_ROWS:])):
            memory.write(offset + head * head_bytes, rows.reshape(-1).view(np.uint8))


def save_texts(path: str | os.PathLike[str], states: States, texts: Texts) -> None:
    """Write texts to a file, whole or not at all. Raises ProgramFileError."""
    header = {
        "format": _FORMAT,
        "program": states.digest,
        "states": _types(states),
        "read": texts.read,
        "waiting": texts.waiting,
    }
    with new_archive(Path(path)) as archive:
        write_member(archive, HEADER, json.dumps(header).encode())
        for name, array in texts.states.items():
            content = io.BytesIO()
            np.save(content, _plain(array), allow_pickle=False)
            write_member(archive, f"{name}.npy", content.getvalue())


def load_texts(
    path: str | os.PathLike[str], states: States, caches: Collection[str], length: str, max_tokens: int, vocabulary: int
) -> Texts:
    """Read texts that `save_texts` wrote for the program of these states; `length` is the state of the texts' lengths.

    Raises:
        ProgramFileError: no such file, a corrupt one, or one of another program.
    """
    with reading(path):
        try:
            with zipfile.ZipFile(path) as archive:
                check_members(archive, (HEADER,))
                if HEADER not in archive.namelist():
                    raise ProgramFileError(HEADER, "it holds no texts of a session", "give a file that session.save wrote")
                header = json.loads(archive.read(HEADER))
                _check_origin(header, states)
                arrays = {state.name: _loaded(archive, state, is_cut=state.name in caches) for state, _ in _of(states)}
            texts = Texts(arrays, header["read"], header["waiting"])
        except (TypeError, zlib.error, MemoryError) as error:
            raise ProgramFileError(HEADER, f"no sound texts of a session ({error})", COPY_AGAIN) from error
        _check(states, texts, caches, arrays[length].tolist(), max_tokens, vocabulary)
    return texts


def _of(states: States) -> list[tuple[State, int]]:
    return [(state, offset or 0) for state, offset in states.layout]


def _types(states: States) -> dict[str, str]:
    return {state.name: str(state.type) for state, _ in _of(states)}


def _cut(states: States, state: State, offset: int, lengths: Sequence[int] | None) -> np.ndarray:
    """A copy of a state, of which so many rows of each sequence are in use; None: all of it."""
    memory, kind = states.memory(), state.type
    if lengths is None:
        whole: np.ndarray = memory.read(offset, kind.size_bytes).view(kind.dtype).reshape(kind.shape)
        return whole
    batch, heads, rows, width = kind.shape
    used = [min(length, rows) for length in lengths]
    head_bytes = kind.size_bytes // (batch * heads)
    found = np.zeros((batch, heads, max(used, default=0), width), kind.dtype)
    for sequence, count in enumerate(used):
        for head in range(heads if count else 0):
            content = memory.read(offset + (sequence * heads + head) * head_bytes, head_bytes // rows * count)
            found[sequence, head, :count] = content.view(kind.dtype).reshape(count, width)
    return found


def _check_origin(header: Mapping[str, object], states: States) -> None:
    if header["format"] != _FORMAT:
        raise ProgramFileError(HEADER, f"texts in format {header['format']}, not {_FORMAT}", "save them again")
    own = _types(states)
    if header["states"] != own:
        listed = ", ".join(f"{name} {kind}" for name, kind in own.items())
        raise ProgramFileError(HEADER, f"it holds other states than {listed}", "load it with the generator that wrote it")
    if header["program"] != states.digest:
        raise ProgramFileError(HEADER, "it holds the texts of another program", "load it with the generator that wrote it")


def _check(states: States, texts: Texts, caches: Collection[str], lengths: list[int], max_tokens: int, vocabulary: int) -> None:
    """Kernels write behind the lengths, and look tokens up. Raises ProgramFileError."""
    if not all(0 <= length <= max_tokens for length in lengths):
        what = f"lengths {lengths}, where there is room for {max_tokens} tokens"
        raise ProgramFileError(HEADER, what, COPY_AGAIN)
    for state, _ in _of(states):
        rows, held = texts.states[state.name].shape[_ROWS:][:1], max(lengths)
        if state.name in caches and rows != (min(held, state.type.shape[_ROWS]),):
            raise ProgramFileError(f"{state.name}.npy", f"{rows[0]} rows for {held} tokens", COPY_AGAIN)
    for tokens, least in ((texts.read, UNKNOWN), (texts.waiting, 0)):
        is_text = isinstance(tokens, list) and len(tokens) == len(lengths) and all(isinstance(row, list) for row in tokens)
        if not is_text or not all(type(token) is int and least <= token < vocabulary for row in tokens for token in row):
            raise ProgramFileError(HEADER, "it tells no tokens that wait, for texts like these", COPY_AGAIN)
    if [len(row) for row in texts.read] != lengths:
        raise ProgramFileError(HEADER, f"it tells other tokens than the {lengths} in the caches", COPY_AGAIN)


def _loaded(archive: zipfile.ZipFile, state: State, *, is_cut: bool) -> np.ndarray:
    """The array of a state, or the first rows of a cache. Raises ProgramFileError, and what NumPy raises."""
    info, kind = archive.getinfo(f"{state.name}.npy"), state.type
    if info.file_size > kind.size_bytes + _LARGEST_HEADER_BYTES:
        raise ProgramFileError(info.filename, f"{info.file_size} bytes, where the state has {kind.size_bytes}", COPY_AGAIN)
    array = np.load(io.BytesIO(archive.read(info)), allow_pickle=False)
    wanted, found = list(kind.shape), list(getattr(array, "shape", ()))
    if is_cut and len(found) == len(wanted) and found[_ROWS] <= wanted[_ROWS]:
        wanted[_ROWS] = found[_ROWS]
    if not isinstance(array, np.ndarray) or found != wanted or array.dtype != _plain(np.empty(0, kind.dtype)).dtype:
        raise ProgramFileError(info.filename, f"it is no {kind}", COPY_AGAIN)
    return array.view(kind.dtype)


def _plain(array: np.ndarray) -> np.ndarray:
    """The same bytes as NumPy's files know them: of a type of its own, or as unsigned integers."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")
