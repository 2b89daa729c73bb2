"""A program within a memory limit beside the one without: the same bits, what it plans, and what the system says it takes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import prefuse
from prefuse.compiler.programs.memory_limit import parse_memory_limit
from prefuse.runtime.errors import CompileError
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.plan import COMPUTE, SCRATCH, Copy, planned_bytes
from prefuse.runtime.plan_checker import check_plan
from prefuse.runtime.report import size
from prefuse.tests.models.chains import product_chain

from .child import digest
from .control_group import control_group
from .graphs import random_graph

ABOVE_BYTES = 32 << 20  # that a process may take above its limit and what it took before it loaded the program
_TELLING_BYTES = 24 << 20  # that a limit saves: then the program without one takes more, by half of that at least
_LATE = 2  # calls whose reads come late
_AMOUNT = re.compile(r"\(([\d.]+ \w+) would do\)")  # in the error of a limit that is too small


@dataclass(frozen=True)
class Verdict:
    """`fault` is empty where all is right. Bytes are of the program within its limit; `taken` is the most that was resident
    above what was before it was loaded; None where it was not run in a process of its own."""

    name: str
    fault: str
    total: int = 0
    limit: int = 0
    planned: int = 0
    taken: int | None = None
    copies: int = 0
    spills: bool = False
    is_bounded: bool = False  # it has run in a control group that gives it no more
    detail: str = ""


@dataclass(frozen=True)
class Case:
    """A model, what it is called with in turns, how it is compiled, and what share of the whole it is given."""

    name: str
    model: Any
    calls: Sequence[dict[str, np.ndarray]]
    options: dict[str, Any]
    share: float


def judge_graph(task: tuple[int, int]) -> Verdict:
    """The random graph of a seed and a number."""
    graph = random_graph(*task)
    return judge(Case(f"graph {task[0]}:{task[1]}", graph.model, graph.calls, graph.options, graph.share))


def judge(case: Case) -> Verdict:
    """Compile a model with and without a limit, run both, and say what is wrong.

    Where the limit is too little, the error names one that would do: that has to do, and is taken.
    """
    free = _compiled(case.model, case.options)
    total = planned_bytes(free.plan)
    limit = max(int(case.share * total), 1)
    found, detail = _limited(case, limit), ""
    if isinstance(found, CompileError):
        least, detail = _named(found), str(found)
        if least < limit:
            return Verdict(case.name, f"less would do, but {found}", total, limit)
        limit = least
        found = _limited(case, limit)
    if isinstance(found, CompileError):
        return Verdict(case.name, f"{detail} BUT {found}", total, limit)
    verdict = _planned(case, free, found, total, limit, detail)
    return verdict if verdict.fault else _run(case, free, found, verdict)


def _limited(case: Case, limit: int) -> CompiledModel | CompileError:
    """The program within a limit, or the error that it is too little."""
    try:
        return _compiled(case.model, case.options, memory_limit=limit)
    except CompileError as error:
        if error.where != "memory_limit" or not error.what.startswith(f"{size(limit)} are too little"):
            raise
        return error


def _compiled(model: Any, options: dict[str, Any], **more: Any) -> CompiledModel:
    given = model.clone() if isinstance(model, ir.Model) else model
    net = prefuse.compile(given, cache=False, **options, **more)
    assert isinstance(net, CompiledModel)
    return net


def _named(error: CompileError) -> int:
    """The bytes that an error says would do, as a user would give them."""
    match = _AMOUNT.search(error.fix)
    assert match is not None, error
    limit = parse_memory_limit(match[1])
    assert limit is not None
    assert limit.size_bytes is not None
    return limit.size_bytes


def _planned(case: Case, free: CompiledModel, net: CompiledModel, total: int, limit: int, detail: str) -> Verdict:
    copies = sum(isinstance(step, Copy) and step.stream != COMPUTE for step in net.plan.steps)
    spills = any(space.name == SCRATCH for space in net.plan.spaces)
    faults = [str(fault) for plan in (free.plan, net.plan) for fault in check_plan(plan)]
    if planned_bytes(net.plan) > limit:
        faults.append(f"{planned_bytes(net.plan)} bytes are planned, {limit} allowed")
    return Verdict(case.name, "; ".join(faults), total, limit, planned_bytes(net.plan), None, copies, spills, False, detail)


def _run(case: Case, free: CompiledModel, net: CompiledModel, verdict: Verdict) -> Verdict:
    """Call the program in a process that is given no more memory than its limit."""
    expected = [digest(free(**feeds)) for feeds in case.calls]
    folder = Path(tempfile.mkdtemp(prefix="prefuse-memory-"))
    try:
        files = [folder / "small.prefuse", folder / "large.prefuse"]
        _small().save(files[0])
        net.save(files[1])
        for number, feeds in enumerate(case.calls):
            np.savez(folder / f"{number}.npz", **feeds)  # type: ignore[arg-type]
        calls = [str(folder / f"{number}.npz") for number in range(len(case.calls))]
        verdict = _measured([*map(str, files), str(_LATE), *calls], expected, verdict)
        if verdict.fault or verdict.taken is None or verdict.total - verdict.limit < _TELLING_BYTES:
            return verdict
        free.save(files[1])
        return _beside_free([*map(str, files), "0", *calls], verdict)
    finally:
        shutil.rmtree(folder)


_SMALL: list[CompiledModel] = []


def _small() -> CompiledModel:
    """A program that shows what a process takes before the one that is measured."""
    if not _SMALL:
        _SMALL.append(_compiled(product_chain(), {"threads": 2}, memory_limit="60%"))
    return _SMALL[0]


def _measured(arguments: Sequence[str], expected: Sequence[str], verdict: Verdict) -> Verdict:
    def told(fault: str, taken: int | None = None, *, is_bounded: bool = False) -> Verdict:
        return replace(verdict, fault=fault, taken=taken, is_bounded=is_bounded)

    free = child("", arguments)
    if free.returncode:
        return told(f"exit code {free.returncode}: {free.stderr[-500:]}")
    found = json.loads(free.stdout)
    taken = max(found["hwm"], found["maxrss"]) - found["before"]
    if found["digests"] != list(expected):
        same = [one == other for one, other in zip(found["digests"], expected, strict=True)]
        return told(f"other bits than without a limit, by calls: {same}", taken)
    if taken > verdict.limit + ABOVE_BYTES:
        return told(f"{size(taken)} are taken, {size(verdict.limit)} allowed", taken)
    with control_group(found["before"] + verdict.limit + ABOVE_BYTES) as group:
        if group is None:
            return told("", taken)
        bounded = child(str(group), arguments)
    if bounded.returncode:
        killed = "killed" if bounded.returncode == 128 + signal.SIGKILL else f"exit code {bounded.returncode}"
        return told(f"{killed} in a control group of its limit: {bounded.stderr[-500:]}", taken, is_bounded=True)
    if json.loads(bounded.stdout)["digests"] != list(expected):
        return told("other bits in a control group", taken, is_bounded=True)
    return told("", taken, is_bounded=True)


def _beside_free(arguments: Sequence[str], verdict: Verdict) -> Verdict:
    """Whether the limit is seen: what is allowed above it would hide small ones. `arguments` are of the program without one."""
    free = child("", arguments)
    if free.returncode:
        return replace(verdict, fault=f"without a limit: exit code {free.returncode}: {free.stderr[-500:]}")
    found = json.loads(free.stdout)
    taken, saved = max(found["hwm"], found["maxrss"]) - found["before"], verdict.total - verdict.limit
    assert verdict.taken is not None
    if verdict.taken < taken - saved // 2:
        return verdict
    what = f"{size(verdict.taken)} are taken, {size(taken)} without the limit, which should save {size(saved)}"
    return replace(verdict, fault=what)


def child(group: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A process that loads and calls programs, as `child.py` says."""
    # By a shell, which is small: what its parent had resident counts in a process's own ru_maxrss.
    command = ["/bin/sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-m", "prefuse.tests.memory.child", group, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
