"""What was measured of this machine's processor: a JSON file of the user, beside the results of `prefuse tune`.

A fit is for one CPU model and one width of vectors: another machine that has the user's folder finds none there, or its own.
Files are replaced whole, under a lock, so that several processes may add to one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

from .errors import OptionError
from .files.user_folder import user_folder
from .measurement_file import MeasurementFile


@dataclass(frozen=True, slots=True)
class Fit:
    """Numbers by their names in `Machine.as_fit`, and when they were measured (UTC, ISO 8601).

    `spread` is how far apart two estimates of a number were, as a part of it. `refused` says of what was measured and is not
    believed why; it is not in `numbers`.
    """

    measured: str
    numbers: Mapping[str, float]
    spread: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


Fits: TypeAlias = dict[str, dict[str, Fit]]  # by CPU model, by lanes as text


def default_fit_file() -> Path:
    """The user's file, in the folder of the cache: $PREFUSE_CACHE or the platform's."""
    return user_folder() / "machine.json"


def find_fit(cpu_model: str, lanes: int, path: Path | None = None) -> Fit | None:
    """The fit of a processor for vectors of `lanes` float32; None where there is none.

    A file that is no such file, or of another version, is none either, with a warning.
    """
    path = path or default_fit_file()
    try:
        return (_FILE.read(path) or {}).get(cpu_model, {}).get(str(lanes))
    except OptionError as error:
        warnings.warn(f"{path}: {error.what}; costs are estimated without what was measured", stacklevel=2)
        return None


def keep_fit(fit: Fit, cpu_model: str, lanes: int, path: Path | None = None) -> None:
    """Put a fit into the file, made if need be, in the place of an older one of its processor. What is no such file is replaced.

    Raises:
        OptionError: the file cannot be written.
    """
    _change(path or default_fit_file(), cpu_model, lanes, fit)


def forget_fit(cpu_model: str, lanes: int, path: Path | None = None) -> bool:
    """Take a processor's fit out of the file; whether there was one. What is no such file is replaced.

    Raises:
        OptionError: the file cannot be written.
    """
    path = path or default_fit_file()
    return os.path.exists(path) and _change(path, cpu_model, lanes, None)


def _change(path: Path, cpu_model: str, lanes: int, fit: Fit | None) -> bool:
    """Put a fit into the file, or none; whether there was one before."""
    before = None

    def changed(fits: Fits | None) -> Fits:
        nonlocal before
        fits = fits or {}
        before = fits.setdefault(cpu_model, {}).pop(str(lanes), None)
        if fit is not None:
            fits[cpu_model][str(lanes)] = fit
        return fits

    _FILE.change(path, changed, is_replaced=True)
    return before is not None


def _parse(data: Any) -> Fits:
    return {cpu: {lanes: _parse_fit(fit) for lanes, fit in by_lanes.items()} for cpu, by_lanes in data["fits"].items()}


def _parse_fit(data: Any) -> Fit:
    fit = Fit(**data)
    rates = [*fit.numbers.values(), *fit.spread.values()]
    if not all(isinstance(rate, (int, float)) and not isinstance(rate, bool) and isfinite(rate) for rate in rates):
        raise TypeError("a fit of what is no number")
    if not all(isinstance(text, str) for text in (fit.measured, *fit.refused.values())):
        raise TypeError("a fit of wrong types")
    return fit


def _format(fits: Fits) -> Mapping[str, Any]:
    return {"fits": {cpu: {lanes: asdict(fit) for lanes, fit in by_lanes.items()} for cpu, by_lanes in fits.items() if by_lanes}}


_FILE = MeasurementFile(
    "prefuse machine", 1, "prefuse doctor --fit", "delete the file, or name another folder by PREFUSE_CACHE", _parse, _format
)
