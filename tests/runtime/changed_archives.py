"""Files whose members are not what was written, though nothing of the archive is broken."""

from __future__ import annotations

import io
import struct
import zipfile
from zlib import crc32


def with_text(content: bytes, old: bytes, new: bytes) -> bytes:
    """An archive of stored members in which a text is another one of its length, at its place and with the right checksums."""
    assert len(old) == len(new)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [archive.read(name) for name in archive.namelist()]
    changed = content.replace(old, new)
    assert changed != content
    for member in members:
        before, after = (struct.pack("<I", crc32(one)) for one in (member, member.replace(old, new)))
        changed = changed.replace(before, after)
    return changed
