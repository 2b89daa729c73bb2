"""Where we keep a user's files, and how several processes write them: whole, one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .whole_file import whole_file


def user_folder() -> Path:
    """$PREFUSE_CACHE, or the platform's folder for caches: on Linux $XDG_CACHE_HOME/prefuse, else ~/.cache/prefuse."""
    if named := os.environ.get("PREFUSE_CACHE"):
        return Path(named)
    from platformdirs import user_cache_path  # a hundredth of a second that a start with a folder of its own does without

    return user_cache_path("prefuse", appauthor=False)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock, a file made at `path`, which the kernel drops when the process ends, however it ends.

    Where the file system has no locks it is not held: two processes may do the same work, but files appear whole.
    """
    from filelock import FileLock  # which a warm start does without

    lock = FileLock(path, mode=0o600, fallback_to_soft=False)  # a soft lock would outlive a process that is killed
    with suppress(OSError):
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold the lock of a file that several processes read, change and replace, in a folder that is made if need be.

    Raises:
        OSError: the folder cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock")):
        yield


def replace_file(path: Path, text: str) -> None:
    """Give a file another content, whole or not at all.

    Raises:
        OSError: it cannot be written; what was there is there still.
    """
    with whole_file(path) as temporary:
        temporary.write_text(text)
