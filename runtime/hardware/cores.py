"""How many cores this process may use: those that its system lets it run on, and of these what its container is granted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from math import ceil
from pathlib import Path

_CONTROLLER = "cpu"


def usable_cores() -> int:
    """Cores that threads of this process can keep busy: more threads than that wait for each other."""
    granted = _granted_here()
    cores = len(os.sched_getaffinity(0))
    return cores if granted is None else min(cores, granted)


@cache
def _granted_here() -> int | None:
    return granted_cores(Path("/"))


def granted_cores(root: Path) -> int | None:
    """The time that Linux's control groups grant this process, in whole cores, rounded up; None where they set no limit.

    `root` is that of the file system. The least of the group and of those that it is in counts; what a container cannot see of
    them is left out.
    """
    quotas = [quota for folder in _groups(root) if (quota := _quota(folder)) is not None]
    return max(ceil(min(quotas)), 1) if quotas else None


def _groups(root: Path) -> Iterator[Path]:
    """The folders of the group of this process and of those above it, of both versions of control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        mounts = ["", "unified"] if (number, controllers) == ("0", "") else [controllers, _CONTROLLER]
        if number == "0" or _CONTROLLER in controllers.split(","):
            for mount in mounts:
                top = root / "sys/fs/cgroup" / mount
                group = Path(os.path.normpath(top / path.lstrip("/")))
                yield from [one for one in (group, *group.parents) if one.is_relative_to(top)] or [top]


def _quota(folder: Path) -> float | None:
    """The cores that a group may use; None where it says nothing, or that there is no limit."""
    try:
        if os.path.exists(folder / "cpu.max"):
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = (folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text()
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        return None
    return cores if cores > 0 else None
