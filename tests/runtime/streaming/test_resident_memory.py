"""What streamed programs take of a machine's memory: as planned, a context as its arena, and no more where no more is given."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import prefuse
import pytest
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import limit_of, planned_bytes
from prefuse.tests.memory.control_group import control_group
from prefuse.tests.models.chains import product_chain

_COLUMNS, _LINKS = 1536, 12  # 11 weights of 9 MiB
_CONTEXTS = (1, 2, 4)
_ABOVE_BYTES = 64 << 20  # that a process may take above its limit and what it took before

# Joins a control group, loads a small program and calls it, then a large one; tells the growth of resident memory by contexts.
_CHILD = """
import os, sys
small, large, group, *counts = sys.argv[1:]
if group:
    with open(group + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
import gc, hashlib, numpy as np, prefuse
from prefuse.tests.memory.child import resident

def held():
    gc.collect()
    return resident("VmRSS")

first, columns = prefuse.load(small), 1536
first(np.ones((3, 256), np.float32))
before = held()
net, x = prefuse.load(large), np.ones((3, columns), np.float32)
calls = [net]
for count in map(int, counts):
    calls += [net.context() for _ in range(count - len(calls))]
    results = {hashlib.sha256(call(x).tobytes()).hexdigest() for call in calls for _ in range(2)}
    print(held() - before, *results)
print(before)
"""


@dataclass(frozen=True, slots=True)
class Programs:
    small: Path
    large: Path

    def run(self, group: Path | None, *counts: int) -> subprocess.CompletedProcess[str]:
        arguments = [str(self.small), str(self.large), str(group or ""), *map(str, counts)]
        return subprocess.run([sys.executable, "-c", _CHILD, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def programs(limited_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    net = prefuse.compile(product_chain(_LINKS, _COLUMNS), threads=2, cache=False, memory_limit="60%")
    assert isinstance(net, CompiledModel)
    path = tmp_path_factory.mktemp("large") / "large.prefuse"
    net.save(path)
    return Programs(limited_file, path)


def plan_of(path: Path) -> tuple[int, int]:
    """The bytes of a program's weights in memory, and of the arena of a context."""
    net = prefuse.load(path)
    assert isinstance(net, CompiledModel)
    return net.plan.weights_bytes, net.plan.space("arena").size_bytes


def test_each_context_takes_its_arena_and_weights_are_there_once(programs: Programs) -> None:
    weights, arena = plan_of(programs.large)
    child = programs.run(None, *_CONTEXTS)
    assert child.returncode == 0, child.stderr
    lines = [line.split() for line in child.stdout.splitlines()[:-1]]
    assert len({digest for _, *digests in lines for digest in digests}) == 1
    for count, (taken, *_) in zip(_CONTEXTS, lines, strict=True):
        assert int(taken) == pytest.approx(weights + count * arena, rel=0.02)


def test_it_lives_where_no_more_than_its_limit_is_given(programs: Programs) -> None:
    """And where half of its arena is all there is, it is killed: so such a group does limit it."""
    free = programs.run(None, 1)
    assert free.returncode == 0, free.stderr
    (_, digest), (before,) = (line.split() for line in free.stdout.splitlines())
    net = prefuse.load(programs.large)
    assert isinstance(net, CompiledModel)
    limit = limit_of(net.plan)
    assert limit is not None
    assert planned_bytes(net.plan) <= limit
    with control_group(int(before) + limit + _ABOVE_BYTES) as group:
        if group is None:
            pytest.skip("no control group with a memory limit can be made")
        limited = programs.run(group, 1)
    assert limited.returncode == 0, limited.stderr
    assert limited.stdout.split()[1] == digest
    _, arena = plan_of(programs.large)
    with control_group(arena // 2) as group:
        killed = programs.run(group, 1)
    assert killed.returncode == -signal.SIGKILL
