"""Which part of the long suites `make test` runs: another one each day, the same in all its processes, named in its last lines.

A run of all tests comes to those in the dear folders by turns: to each of them, and to each case of its parameters, on one day in
DAYS, and then to all that it has. A run of files or names takes all of theirs; where that would compile for minutes, the tests
themselves divide what they have by days (`every`, `dealt`). The commands (`python -m tests.conformance`, `tests.fuzz`,
`tests.kernels`, `tests.zoo`) run the whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar
from zlib import crc32

DAYS = 7  # runs of all tests, each on another day, in which each of the dear tests runs once
DEAR = (  # what the paths of their files begin with, in the folder of all tests
    "benchmarks/",
    "compiler/bits/",
    "compiler/frontend/",
    "compiler/lowering/",
    "compiler/predictor/",
    "compiler/quantization/",
    "compiler/test_compile_memory.py",
    "compiler/test_feasible_limit.py",
    "compiler/test_scaling.py",
    "compiler/test_torch_backend",
    "compiler/tuning/",
    "conformance/",
    "examples/",
    "golden/",
    "gpu/",
    "kernels/",
    "memory/",
    "passes/",
    "programs/",
    "runtime/memory/",
    "runtime/streaming/",
    "runtime/test_cpu_device.py",
    "runtime/test_plan_text.py",
    "runtime/test_state_checker.py",
    "runtime/threads/",
    "zoo/",
)
DAILY = ("programs/test_end_to_end.py",)  # though it lies there

T = TypeVar("T")
W = TypeVar("W")

VARIABLE = "PREFUSE_TEST_SAMPLE"  # of the environment: asks for the sample of this number
WHOLE = "PREFUSE_TEST_WHOLE"  # of the environment: unless empty, every case runs in every way
SHARES = "PREFUSE_TEST_SHARES"  # of the environment of a run's processes: "1" where the run takes a share of the cases
EXAMPLES = "PREFUSE_TEST_EXAMPLES"  # of the environment: how many random examples a test draws


def sample_number() -> int:
    """The number asked for, else that of the day (UTC): all that a run draws by chance follows from it."""
    return int(os.environ.get(VARIABLE) or datetime.now(UTC).toordinal())


def examples(whole: int) -> int:
    """How many random examples a test draws, others each day: as many as asked for, else `whole` of them, of which a run of all
    tests has its share."""
    return int(os.environ.get(EXAMPLES) or (-(-whole // DAYS) if os.environ.get(SHARES) else whole))


def is_dear(path: str) -> bool:
    """Whether the tests of a file take turns, unless one is marked `daily`."""
    return path.startswith(DEAR) and path not in DAILY


def today(units: Sequence[T]) -> set[T]:
    """Those of the units, which are in the order of the tests, whose turn it is: neighbours cost alike, so days do, too."""
    return set(units if os.environ.get(WHOLE) else units[sample_number() % DAYS :: DAYS])


def every(stride: int, names: Sequence[T]) -> Sequence[T]:
    """Every `stride`-th of the names, so that `stride` samples in a row hold all of them; all where tests take turns, unless a
    week holds fewer."""
    if os.environ.get(WHOLE) or (os.environ.get(SHARES) and stride <= DAYS + 1):
        return names
    return names[sample_number() % stride :: stride]


def dealt(cases: Sequence[T], labels: Sequence[str], way: W, ways: Sequence[W]) -> list[T]:
    """Of the cases those that run in this one of several ways today: each in one of them, and in the next one tomorrow.

    Where a case stands and its label decide which, so that lists which differ in labels alone are dealt differently.
    """
    if os.environ.get(WHOLE) or os.environ.get(SHARES):
        return list(cases)
    turns = [position + crc32(label.encode()) + sample_number() for position, label in enumerate(labels)]
    return [case for case, turn in zip(cases, turns, strict=True) if turn % len(ways) == ways.index(way)]
