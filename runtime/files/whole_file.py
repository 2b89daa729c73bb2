"""Files that others see whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path, *, keeps_link: bool = True) -> Iterator[Path]:
    """Yields a path to write to; what is there takes the place of `path` at the end, or if something goes wrong, nothing does.

    A link stays one, unless `keeps_link` is False: what it leads to is replaced. What cannot be replaced (a device, a pipe) is
    itself what is yielded.

    Raises:
        OSError: the file cannot be put there.
    """
    if is_special(path):
        yield path
        return
    real = Path(os.path.realpath(path)) if keeps_link else path
    temporary = real.with_name(f".{real.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(real)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def is_special(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
