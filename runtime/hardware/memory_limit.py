"""How much memory a program may take."""

from __future__ import annotations

import os
from dataclasses import dataclass

LEAST_STREAMED_BYTES = 1 << 16  # smaller constants stay in memory under any limit: a copy of one would be all latency


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes, or `percent` of what the weights and activations of a program take without a limit. One of them is given.

    `whole_bytes` is that, where it is known.
    """

    size_bytes: int | None = None
    percent: float | None = None
    whole_bytes: int | None = None

    def of(self, total_bytes: int) -> int:
        """The bytes that a program may take that takes `total_bytes` without a limit."""
        return self.size_bytes if self.size_bytes is not None else int(total_bytes * (self.percent or 0.0) / 100)

    def __str__(self) -> str:
        """As a user would say it; others for other limits."""
        if self.size_bytes is not None:
            return f"{self.size_bytes}B"
        return f"{float(self.percent or 0.0)!r}".removesuffix(".0") + "%"


def machine_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
