"""Groups of processes that are given no more than so much memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def control_group(limit_bytes: int) -> Iterator[Path | None]:
    """A group of processes that together take no more than so many bytes: what takes more is killed. None where the system
    lets nobody make one."""
    is_second_version = (_ROOT / "cgroup.controllers").exists()
    try:
        group = Path(tempfile.mkdtemp(prefix="prefuse-test-", dir=_ROOT if is_second_version else _ROOT / "memory"))
    except OSError:
        yield None
        return
    try:
        yield group if _limited(group, limit_bytes, is_second_version=is_second_version) else None
    finally:
        group.rmdir()


def _limited(group: Path, limit_bytes: int, *, is_second_version: bool) -> bool:
    """Set the limit of a group; whether the system has one for it."""
    try:
        (group / ("memory.max" if is_second_version else "memory.limit_in_bytes")).write_text(str(limit_bytes))
    except OSError:
        return False
    with suppress(OSError):  # else what takes more is swapped out, where there is room; the first version counts as here
        (group / "memory.swap.max").write_text("0")
    return True
