"""How much memory a program may take, as a user says it: "600MiB", "25%" of what it takes without a limit, or bytes."""

from __future__ import annotations

import re
import sys

from ...runtime.errors import OptionError
from ...runtime.hardware.memory_limit import MemoryLimit, machine_bytes
from ...runtime.interchange import is_integer

_UNITS = {"B": 1} | {f"{prefix}iB": 1 << 10 * power for power, prefix in enumerate("KMGT", 1)}
_UNITS |= {f"{prefix}B": 10 ** (3 * power) for power, prefix in enumerate(("K", "M", "G", "T"), 1)}
_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(%|[A-Za-z]*)\s*")
_FIX = 'give bytes, such as 600_000_000, "600MiB" or "1.5GB", or a share of what the program takes, such as "25%"'


def parse_memory_limit(value: object) -> MemoryLimit | None:
    """What a user gives as a limit; None is none.

    Raises:
        OptionError: it is no amount of memory, nothing at all, or more than there is.
    """
    if value is None or isinstance(value, MemoryLimit):
        return value
    if is_integer(value):
        return _of_bytes(int(value), value)
    match = _TEXT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise OptionError("memory_limit", f"{value!r} is no amount of memory", _FIX)
    number, unit = float(match[1]), match[2] or "B"
    if unit == "%":
        if not 0 < number <= 100:
            raise OptionError("memory_limit", f"{value!r} is no share of the whole", "give more than 0% and at most 100%")
        return MemoryLimit(percent=number)
    scale = {name.lower(): size for name, size in _UNITS.items()}.get(unit.lower())
    if scale is None:
        raise OptionError("memory_limit", f"{value!r}: unknown unit {unit!r}", f"use one of {', '.join(_UNITS)}, or %")
    return _of_bytes(int(min(number * scale, sys.float_info.max)), value)


def _of_bytes(size_bytes: int, value: object) -> MemoryLimit:
    if size_bytes <= 0:
        raise OptionError("memory_limit", f"{value!r} leaves no memory at all", _FIX)
    if size_bytes > (there := machine_bytes()):
        what = f"{value!r} is more than this machine has, {there / 2**30:.1f} GiB"
        raise OptionError("memory_limit", what, "give less, or leave the limit out")
    return MemoryLimit(size_bytes)
