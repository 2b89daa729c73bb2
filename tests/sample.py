"""Which part of the long suites `make test` runs: another one each day, the same in all its processes, named in its last lines.

The commands (`python -m tests.conformance`, `tests.fuzz`, `tests.zoo`) run the whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

T = TypeVar("T")

VARIABLE = "PREFUSE_TEST_SAMPLE"  # of the environment: asks for the sample of this number


def sample_number() -> int:
    """The number asked for, else that of the day (UTC): all that a run draws by chance follows from it."""
    return int(os.environ.get(VARIABLE) or datetime.now(UTC).toordinal())


def every(stride: int, names: Sequence[T]) -> Sequence[T]:
    """Every `stride`-th of the names, so that `stride` samples in a row hold all of them."""
    return names[sample_number() % stride :: stride]
