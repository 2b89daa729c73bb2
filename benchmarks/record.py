"""What a file of results says of where its numbers are from, and how it is written: as JSON that every parser takes.

A file has `runs` (commit, date, machine, versions, the fit of costs, command and settings) and `rows`, each with the number of
its run: so rows of several days and machines may stand in one file. A new row takes the place of the one of the same key, threads
and settings.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from math import isfinite
from pathlib import Path
from typing import Any

import click
import numpy as np
from prefuse.compiler.cli.doctor import cpu_name
from prefuse.compiler.programs.cache import compiler_version
from prefuse.runtime.errors import OptionError
from prefuse.runtime.files.whole_file import whole_file
from prefuse.runtime.fit_file import find_fit
from prefuse.runtime.hardware.cores import usable_cores
from prefuse.runtime.target import Target, host_cpu_flags, host_cpu_model

_ROOT = Path(__file__).parents[1]
_OURS = ("prefuse", "apache-tvm", "numpy", "torch", "onnx")
_DIGITS = 16  # of digests
_FLAGS = ("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
Row = Mapping[str, object]


@dataclass(frozen=True)
class Record:
    """A file of results to which one run adds rows; without a path nothing is written."""

    path: Path | None
    run: Row
    key: tuple[str, ...]  # the fields by which a row is the same as another one

    def add(self, *rows: object) -> None:
        """Add rows, dataclasses or mappings, and write the file whole: a run that is cut leaves what it has."""
        if self.path is None:
            return
        document = _document(self.path)
        runs, kept, run = document["runs"], document["rows"], plain(self.run)
        if run not in runs:
            runs.append(run)
        number = runs.index(run)
        added = [{"run": number, **_mapping(row)} for row in rows]
        taken = {self._name(row, runs) for row in added}
        kept = [row for row in kept if self._name(row, runs) not in taken] + added
        write_json(self.path, _without_unused({"runs": runs, "rows": kept}))

    def _name(self, row: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
        """Equal for rows of which the later one counts."""
        run = runs[row["run"]]
        return json.dumps([run.get("threads"), run.get("settings"), *(row.get(field) for field in self.key)], sort_keys=True)


def record(
    path: Path | None,
    threads: int,
    settings: Mapping[str, object],
    distributions: Iterable[str] = (),
    key: Sequence[str] = ("model",),
) -> Record:
    """The record of this run; `distributions` are those of the peers that it measures.

    Raises:
        click.BadParameter: the file is there and is none of this form.
    """
    if path is not None:
        _document(path)
    run = {**provenance(threads, distributions), "settings": plain(dict(settings))} if path is not None else {}
    return Record(path, run, tuple(key))


def provenance(threads: int, distributions: Iterable[str] = ()) -> dict[str, object]:
    """Which code, machine and moment numbers are of; `distributions` are those whose versions count beside our own."""
    model, flags = host_cpu_model(), host_cpu_flags()
    return {
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "cpu": {"name": cpu_name(), "model": model, "flags": [name for name in _FLAGS if name in flags], "cores": usable_cores()},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "governor": _GOVERNOR.read_text().strip() if _GOVERNOR.is_file() else None,
        "python": platform.python_version(),
        "threads": threads,
        "target": _target(threads),
        "versions": {name: installed(name) for name in dict.fromkeys((*_OURS, *distributions))},
        "fit": _fit(model),
    }


def installed(distribution: str) -> str:
    """The version of a distribution, for people."""
    try:
        return version_of(distribution)
    except PackageNotFoundError:
        return "not installed"


def plain(value: object) -> Any:
    """The value in what JSON has: null in the place of infinities and NaN, which it does not have."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(one) for one in value]
    if isinstance(value, (np.integer, np.floating)):
        value = value.item()
    if isinstance(value, float):
        return value if isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def write_json(path: Path, document: object) -> None:
    """Write a file, whole or not at all."""
    text = json.dumps(plain(document), indent=1, allow_nan=False) + "\n"
    with whole_file(path) as waiting:
        waiting.write_text(text)


def _document(path: Path) -> dict[str, Any]:
    """What a file holds, nothing where there is none."""
    if not path.exists():
        return {"runs": [], "rows": []}
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or not found.keys() >= {"runs", "rows"}:
        what = f"{path} is of an older form, which rows cannot be added to: give another file"
        raise click.BadParameter(what, param_hint="--json")
    return found


def _without_unused(document: dict[str, Any]) -> dict[str, Any]:
    """The document without the runs that all rows have left."""
    used = sorted({row["run"] for row in document["rows"]})
    rows = [{**row, "run": used.index(row["run"])} for row in document["rows"]]
    return {"runs": [document["runs"][number] for number in used], "rows": rows}


def _mapping(row: object) -> dict[str, Any]:
    found = plain(row)
    assert isinstance(found, dict)
    return found


def _commit() -> str:
    """The commit, "-dirty" behind it where files differ; of an installed package a digest of its files."""
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", f"--abbrev={_DIGITS}", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return f"files {compiler_version()[:_DIGITS]}"


def _command() -> list[str]:
    """The module and its arguments, without the folders of this machine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name if spec is not None else Path(sys.argv[0]).name
    return [module, *(_short(one) for one in sys.argv[1:])]


def _short(argument: str) -> str:
    """An argument; of an absolute path its last part."""
    name, sign, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return f"{name}{sign}{Path(value).name}" if value.startswith(("/", "~")) else argument


def _target(threads: int) -> str | None:
    try:
        return str(Target.parse("cpu", threads))
    except OptionError:
        return None


def _fit(model: str) -> dict[str, object] | None:
    """The numbers of `prefuse doctor --fit` that costs are estimated by, as a digest; they choose kernels."""
    try:
        fit = find_fit(model, Target.parse("cpu").vector_lanes)
    except OptionError:
        return None
    if fit is None:
        return None
    text = json.dumps(dict(fit.numbers), sort_keys=True)
    return {"measured": fit.measured, "digest": hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}
