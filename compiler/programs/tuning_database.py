"""The results of `prefuse tune`: JSON files, one shipped with the package, one of the user.

An entry says for one problem (`kernels/problem.py`) on one CPU model, for one target and precision, which configuration won.
What a file says is advice: a template takes only what is legal, so a file may come from strangers. Files are replaced whole,
under a lock, so that several processes may add to one; their keys are sorted, so that equal results are equal bytes.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from ...runtime.errors import OptionError
from ...runtime.files.user_folder import user_folder
from ...runtime.measurement_file import MeasurementFile
from ...runtime.precision import Precision
from ...runtime.target import Target, host_cpu_model
from .digest import combine

Configurations: TypeAlias = Mapping[str, Mapping[str, str]]  # of problems
SHIPPED = Path(__file__).with_name("table.json")
_DEALING = frozenset(["block", "blocks", "split"])  # choices whose best option depends on the number of threads


@dataclass(frozen=True, slots=True)
class Section:
    """Where measurements hold: `cpu` is a CPU model, `target` the canonical text of a target."""

    cpu: str
    target: str
    precision: str

    @classmethod
    def here(cls, target: Target, precision: Precision) -> Section:
        return cls(host_cpu_model(), str(target), precision)


@dataclass(frozen=True, slots=True)
class Finding:
    """What measuring a problem has found.

    `configuration` is empty where nothing beats the choices that templates make by themselves, which take `own_time_us`, by
    enough. `is_complete` says that all alternatives were measured; else `tried` are those that were.
    """

    configuration: Mapping[str, str]
    time_us: float
    own_time_us: float
    is_complete: bool
    tried: tuple[str, ...] = ()


Database: TypeAlias = Mapping[Section, Mapping[str, Finding]]


def default_database() -> Path:
    """The user's file, in the folder of the cache: $PREFUSE_CACHE or the platform's."""
    return user_folder() / "tuning.json"


def known_configurations(tuning: object, target: Target, precision: Precision) -> Configurations:
    """The configurations for this machine: of the shipped table, and over them those of the user's file.

    Empty ones, which say that nothing is better than the model's own choices, are left out. For another processor that the target
    names there are none: what won here says nothing of it.

    Args:
        tuning: True for the default file, which need not exist; a path for another one; False for no configurations at all.

    Raises:
        OptionError: it is none of these, or no such file, or one that is no database.
    """
    if not isinstance(tuning, (bool, str, os.PathLike)):
        raise OptionError("tuning", f"{tuning!r} is neither a file nor True or False", "give the path of a file of prefuse tune")
    if tuning is False or not target.is_here:
        return {}
    known = {**_configurations(read_database(SHIPPED), target, precision), **_configurations(_users(tuning), target, precision)}
    return {problem: configuration for problem, configuration in sorted(known.items()) if configuration}


def _configurations(database: Database, target: Target, precision: Precision) -> Configurations:
    """Those for a target; where it was measured with one thread only, those, but for what deals work to threads."""
    alone = database.get(Section.here(replace(target, threads=1), precision), {})
    exact = database.get(Section.here(target, precision), {})
    return {
        **{problem: {k: v for k, v in found.configuration.items() if k not in _DEALING} for problem, found in alone.items()},
        **{problem: found.configuration for problem, found in exact.items()},
    }


def _users(tuning: bool | str | os.PathLike[str]) -> Database:
    if not isinstance(tuning, bool):
        return read_database(Path(tuning))
    path = default_database()
    try:
        return read_database(path) if os.path.exists(path) else {}
    except OptionError as error:
        warnings.warn(f"{path}: {error.what}; compiling without it", stacklevel=2)
        return {}


def digest_of(configurations: Configurations) -> str:
    """Equal for equal configurations of equal problems; empty for none."""
    if not configurations:
        return ""
    return combine(json.dumps({problem: dict(one) for problem, one in configurations.items()}, sort_keys=True))


def read_database(path: Path) -> Database:
    """All findings of a file.

    Raises:
        OptionError: it cannot be read, or is no database.
    """
    if (found := _FILE.read(path)) is None:
        raise OptionError(str(path), "cannot be read: no such file", "give a file of prefuse tune")
    return found


def _parse(data: Any) -> Database:
    return {
        Section(cpu, target, precision): {problem: _parse_finding(one) for problem, one in findings.items()}
        for cpu, targets in data["findings"].items()
        for target, precisions in targets.items()
        for precision, findings in precisions.items()
    }


def _parse_finding(data: Any) -> Finding:
    found = Finding(**data)
    found = replace(found, tried=tuple(found.tried))
    if not all(isinstance(text, str) for pair in found.configuration.items() for text in pair):
        raise TypeError("a configuration that does not map names to names")
    if not all(isinstance(text, str) for text in found.tried):
        raise TypeError("configurations that were tried are no texts")
    times = (found.time_us, found.own_time_us)
    if not isinstance(found.is_complete, bool) or not all(isinstance(time, (int, float)) for time in times):
        raise TypeError("a finding of wrong types")
    return found


def add_findings(path: Path, section: Section, findings: Mapping[str, Finding]) -> None:
    """Put findings into a file, made if need be, in the place of older ones for their problems.

    Raises:
        OptionError: the file cannot be written, or is there and no database.
    """

    def changed(before: Database | None) -> Database:
        database = before or {}
        return {**database, section: {**database.get(section, {}), **findings}}

    _FILE.change(path, changed)


def _format(database: Database) -> Mapping[str, Any]:
    findings: dict[str, Any] = {}
    for section, found in database.items():
        place = findings.setdefault(section.cpu, {}).setdefault(section.target, {}).setdefault(section.precision, {})
        place.update({problem: asdict(one) for problem, one in found.items()})
    return {"findings": findings}


_FILE = MeasurementFile("prefuse tuning", 1, "prefuse tune", "name another file, or delete this one", _parse, _format)
