"""The arrays of .npz files."""

from __future__ import annotations

import zlib
from pathlib import Path
from zipfile import BadZipFile

import ml_dtypes  # noqa: F401  (registers bfloat16, float8 and int4 with NumPy)
import numpy as np

from ...runtime.errors import InputError

# What NumPy and zipfile raise of files that are damaged, encrypted, or something else.
_DAMAGED = (ValueError, TypeError, AttributeError, EOFError, KeyError, RuntimeError, MemoryError, BadZipFile, zlib.error)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, by their names.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except OSError as error:
        raise InputError(str(path), f"cannot be read: {error.strerror or error}", "give the path of an .npz file") from error
    except _DAMAGED as error:
        raise InputError(str(path), "is no .npz file of arrays", "write it with numpy.savez(path, **inputs)") from error
    if strange := [name for name, array in found.items() if not isinstance(array, np.ndarray)]:
        raise InputError(str(path), f"holds {strange[0]}, which is no array", "write it with numpy.savez(path, **inputs)")
    return found


def typed(array: np.ndarray, dtype: str) -> np.ndarray:
    """An array of a file as one of a type that NumPy writes as bytes without a type: bfloat16 and the like. Others stay."""
    wanted = np.dtype(dtype) if array.dtype.type is np.void and array.dtype.names is None else None
    return array if wanted is None or wanted.itemsize != array.dtype.itemsize else array.view(wanted)
