"""Whether a file of Python code is as its distribution installed it, by the RECORD that the installer left.

RECORD has the SHA-256 of every installed file, so the digest of RECORD, with a file's name in it, stands for the code of a whole
distribution. Believed is the file system: a file whose bytes have the digest in RECORD is the file that was installed.
"""

from __future__ import annotations

import hashlib
import sys
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def installed_as(file: str) -> str | None:
    """The distribution (name, version, digest of its RECORD) that installed a file, and the file's place in it.

    None if no distribution beside the file names it, as for a user's own code and an editable install, or if the file has
    changed since.
    """
    try:
        stat = Path(file).stat()
    except (OSError, ValueError):
        return None
    return _installed_as(file, stat.st_mtime_ns, stat.st_size)


@cache
def _installed_as(file: str, _mtime_ns: int, _size: int) -> str | None:
    path = Path(file)
    for folder in path.parents:
        if str(folder) in sys.path:
            place = path.relative_to(folder).as_posix()
            for record in _records(folder, place.partition("/")[0]):
                name, recorded = _read_record(record, record.stat().st_mtime_ns)
                if place in recorded:
                    return f"{name} {place}" if recorded[place] == _digest(path.read_bytes()) else None
    return None


def _records(folder: Path, package: str) -> Iterator[Path]:
    """The RECORD files of a folder that may name files of a package, that of the distribution of its name first."""
    found = _all_records(folder)
    yield from (path for path in found if path.parent.name.startswith(f"{package}-"))
    yield from (path for path in found if not path.parent.name.startswith(f"{package}-") and _mentions(path, package))


@cache
def _all_records(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob("*.dist-info/RECORD")))


@cache
def _mentions(record: Path, package: str) -> bool:
    return f"\n{package}" in f"\n{record.read_text()}"


@cache
def _read_record(record: Path, _mtime_ns: int) -> tuple[str, dict[str, str]]:
    """The name, version and digest of RECORD, and the digest of each file in it that has one."""
    content = record.read_bytes()
    rows = (line.rsplit(",", 2) for line in content.decode().splitlines())
    recorded = {row[0]: row[1].removeprefix("sha256=") for row in rows if len(row) == 3 and row[1].startswith("sha256=")}
    return f"{record.parent.stem} {_digest(content)}", recorded


def _digest(content: bytes) -> str:
    """A digest as RECORD writes it."""
    return urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
