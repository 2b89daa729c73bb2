"""Folders for what is needed for a moment: a library while it is linked or loaded, a program that no cache keeps."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from .errors import CompileError

_PREFIX = "prefuse-"
_OURS = re.compile(_PREFIX + r"[a-z0-9_]{8}")  # as tempfile names them
_ABANDONED_SECONDS = 24 * 3600  # a folder this old belongs to nobody: it is there for seconds


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder, which is gone at the end with all that is in it.

    Raises:
        CompileError: there is no place for it.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)  # NFS keeps what is open
    except OSError as error:
        raise _unusable(tempfile.tempdir or "temporary folder", error) from error
    with made as folder:
        _remove_abandoned(Path(folder).parent)
        yield Path(folder)


def write_temporary(path: Path, content: bytes) -> None:
    """Write a file in a temporary folder.

    Raises:
        CompileError: it cannot hold the file.
    """
    try:
        path.write_bytes(content)
    except OSError as error:
        raise _unusable(str(path.parent.parent), error) from error


def _unusable(folder: str, error: OSError) -> CompileError:
    what = f"no place for temporary files: {error.strerror or error}"
    return CompileError(folder, what, "free space, or set TMPDIR to another folder")


@cache
def _remove_abandoned(folder: Path) -> None:
    """Remove what processes of this user that were killed have left there."""
    with suppress(OSError):
        for entry in os.scandir(folder):
            if _OURS.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                    shutil.rmtree(entry.path, ignore_errors=True)
