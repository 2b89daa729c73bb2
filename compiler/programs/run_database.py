"""How long kernels took alone: a JSON file of the user, beside the results of `prefuse tune`.

It is a file of its own because every compilation reads those results, and none reads this. A run is that of one kernel: its key
has its problem and a digest of its code, so that a kernel that is written otherwise by another version is another one. Files are
replaced whole, under a lock, so that several processes may add to one; their keys are sorted.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

from ...runtime.errors import OptionError
from ...runtime.files.user_folder import user_folder
from ...runtime.measurement_file import MeasurementFile
from ...runtime.target import Target, host_cpu_model


@dataclass(frozen=True, slots=True)
class Place:
    """Where runs were measured: `cpu` is a CPU model, `target` the canonical text of a target with its threads."""

    cpu: str
    target: str

    @classmethod
    def here(cls, target: Target) -> Place:
        return cls(host_cpu_model(), str(target))


@dataclass(frozen=True, slots=True)
class Run:
    """Microseconds of a launch with its operands near (in the nearest caches that hold them) and far (beyond a core's own).

    `estimated_us` is what the cost model expected of it with constants far and activations near, 0 if nothing; `estimator` tells
    cost models apart. `template` wrote the kernel.
    """

    template: str
    near_us: float
    far_us: float
    estimated_us: float
    estimator: str = ""

    def lesser(self, other: Run) -> Run:
        """The shorter times of two measurements of one kernel: other work makes them only longer."""
        return replace(other, near_us=min(self.near_us, other.near_us), far_us=min(self.far_us, other.far_us))

    def between(self, share: float) -> float:
        """The time where so much of it is far, from 0 to 1. Noise may make the far launch the shorter one."""
        return self.near_us + share * max(self.far_us - self.near_us, 0.0)


@dataclass(frozen=True, slots=True)
class Measured:
    """All that is known of one place. `coldness` is the share of what is far in a program's launches; None where no program was
    measured."""

    runs: Mapping[str, Run] = field(default_factory=dict)
    coldness: float | None = None


RunDatabase: TypeAlias = Mapping[Place, Measured]


def default_run_file() -> Path:
    """The user's file, in the folder of the cache: $PREFUSE_CACHE or the platform's."""
    return user_folder() / "runs.json"


def known_runs(path: Path, place: Place) -> Measured:
    """What is known of a place; nothing where the file is not there. A file that is none of ours is none, with a warning."""
    try:
        return read_runs(path).get(place, Measured())
    except OptionError as error:
        warnings.warn(f"{path}: {error.what}; predicting without it", stacklevel=2)
        return Measured()


def read_runs(path: Path) -> RunDatabase:
    """All that a file holds; nothing where it is not there.

    Raises:
        OptionError: it cannot be read, or is no such file.
    """
    return _FILE.read(path) or {}


def add_runs(path: Path, place: Place, runs: Mapping[str, Run], coldness: float | None = None) -> None:
    """Put runs, and a share of coldness, into a file, made if need be, in the place of older ones. What is no such file is
    replaced.

    Raises:
        OptionError: the file cannot be written.
    """

    def changed(before: RunDatabase | None) -> RunDatabase:
        database = before or {}
        known = database.get(place, Measured())
        share = known.coldness if coldness is None else coldness
        return {**database, place: replace(known, runs={**known.runs, **runs}, coldness=share)}

    _FILE.change(path, changed, is_replaced=True)


def _parse(data: Any) -> RunDatabase:
    return {
        Place(cpu, target): Measured({key: _parse_run(run) for key, run in found["runs"].items()}, _share(found["coldness"]))
        for cpu, targets in data["places"].items()
        for target, found in targets.items()
    }


def _parse_run(data: Any) -> Run:
    run = Run(**data)
    times, texts = (run.near_us, run.far_us, run.estimated_us), (run.template, run.estimator)
    if not all(isinstance(text, str) for text in texts) or not all(map(_is_time, times)):
        raise TypeError("a run of wrong types")
    return run


def _share(value: Any) -> float | None:
    if value is not None and not (_is_time(value) and value <= 1):
        raise TypeError("a share of coldness that is none")
    return None if value is None else float(value)


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value >= 0


def _format(database: RunDatabase) -> Mapping[str, Any]:
    places: dict[str, Any] = {}
    for place, found in database.items():
        runs = {key: asdict(run) for key, run in found.runs.items()}
        places.setdefault(place.cpu, {})[place.target] = {"runs": runs, "coldness": found.coldness}
    return {"places": places}


_FILE = MeasurementFile("prefuse runs", 1, "prefuse predict", "delete the file, or name another one", _parse, _format)
