"""Which part of the long suites `make test` runs: another one each day, the same in all its processes, named in its last lines.

A run of all tests takes a quarter of the cases of each parametrized test in the dear folders, too, drawn anew each day; one of
files or names takes what it is given. The commands (`python -m tests.conformance`, `tests.fuzz`, `tests.kernels`,
`tests.zoo`) run the whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar
from zlib import crc32

DEAR = ("compiler", "golden", "gpu", "kernels", "passes", "programs")  # folders of tests whose parametrized cases are drawn

T = TypeVar("T")
W = TypeVar("W")

VARIABLE = "PREFUSE_TEST_SAMPLE"  # of the environment: asks for the sample of this number
WHOLE = "PREFUSE_TEST_WHOLE"  # of the environment: unless empty, every case runs in every way


def sample_number() -> int:
    """The number asked for, else that of the day (UTC): all that a run draws by chance follows from it."""
    return int(os.environ.get(VARIABLE) or datetime.now(UTC).toordinal())


def every(stride: int, names: Sequence[T]) -> Sequence[T]:
    """Every `stride`-th of the names, so that `stride` samples in a row hold all of them."""
    if os.environ.get(WHOLE):
        return names
    return names[sample_number() % stride :: stride]


def dealt(cases: Sequence[T], labels: Sequence[str], way: W, ways: Sequence[W]) -> list[T]:
    """Of the cases those that run in this one of several ways today: each in one of them, and in the next one tomorrow.

    Where a case stands and its label decide which, so that lists which differ in labels alone are dealt differently.
    """
    if os.environ.get(WHOLE):
        return list(cases)
    turns = [position + crc32(label.encode()) + sample_number() for position, label in enumerate(labels)]
    return [case for case, turn in zip(cases, turns, strict=True) if turn % len(ways) == ways.index(way)]


def share(function: str, cases: Sequence[T], names: Sequence[str]) -> list[T]:
    """A quarter of the cases of a test function, but two of three and more, and one of two, in their order.

    By chance, not in turns: cases may be dealt inside the function, too, and two rules that count days would never meet.
    """
    count = max(-(-len(cases) // 4), min(2, -(-len(cases) // 2)))
    drawn = sorted(range(len(cases)), key=lambda i: (crc32(f"{function} {names[i]} {sample_number()}".encode()), i))
    return [cases[i] for i in sorted(drawn[:count])]
