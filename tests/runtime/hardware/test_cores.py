"""Cores that a container is granted."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefuse.runtime.hardware import cores
from prefuse.runtime.target import Target


def system(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A file system with these lines of /proc/self/cgroup and files in /sys/fs/cgroup."""
    for name, text in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "granted"),
    [
        ("0::/", {}, None),
        ("0::/", {"cpu.max": "max 100000\n"}, None),
        ("0::/", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/", {"cpu.max": "5000 100000\n"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2),
        ("0::/a/b", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "200000 100000"}, 1),
        ("0::/a", {"b/cpu.max": "100000 100000"}, None),
        ("0::/../../other", {"cpu.max": "150000 100000"}, 2),
        ("4:cpu,cpuacct:/d", {"cpu,cpuacct/d/cpu.cfs_quota_us": "200000", "cpu,cpuacct/d/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpuset:/\n3:cpu:/docker/x", {"cpu/cpu.cfs_quota_us": "350000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ("3:cpu:/\n0::/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuacct:/", {"cpuacct/cpu.cfs_quota_us": "100000", "cpuacct/cpu.cfs_period_us": "100000"}, None),
        ("odd", {"cpu.max": "100000"}, None),
    ],
)
def test_quotas_of_groups(tmp_path: Path, groups: str, files: dict[str, str], granted: int | None) -> None:
    assert cores.granted_cores(system(tmp_path, groups, files)) == granted


def test_a_system_without_groups(tmp_path: Path) -> None:
    assert cores.granted_cores(tmp_path) is None


def test_programs_take_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(cores, "_granted_here", lambda: 3)
    assert Target.parse("cpu:avx2").threads == 3
    monkeypatch.setattr(cores, "_granted_here", lambda: None)
    assert Target.parse("cpu:avx2").threads == 64
