"""What was measured of this machine's processor: a JSON file of the user, beside the results of `prefuse tune`.

A fit is for one CPU model and one width of vectors: another machine that has the user's folder finds none there, or its own.
Files are replaced whole, under a lock, so that several processes may add to one.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

from .errors import OptionError
from .user_folder import locked_file, replace_file, user_folder

_FORMAT, _VERSION = "prefuse machine", 1
_FIX = "delete the file, or name another folder by PREFUSE_CACHE"


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
        return _read(path).get(cpu_model, {}).get(str(lanes))
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
    return path.exists() and _change(path, cpu_model, lanes, None)


def _change(path: Path, cpu_model: str, lanes: int, fit: Fit | None) -> bool:
    """Put a fit into the file, or none; whether there was one before."""
    try:
        with locked_file(path):  # of two writers without it, one may lose a fit
            try:
                fits = _read(path)
            except OptionError:
                fits = {}
            before = fits.setdefault(cpu_model, {}).pop(str(lanes), None)
            if fit is not None:
                fits[cpu_model][str(lanes)] = fit
            replace_file(path, _format(fits))
    except OSError as error:
        raise OptionError(str(path), f"cannot be written: {error.strerror or error}", _FIX) from error
    return before is not None


def _read(path: Path) -> Fits:
    """All fits of a file; none where it is not there. Raises OptionError for one that cannot be read, or is none of ours."""
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise OptionError(str(path), f"cannot be read: {error.strerror or error}", _FIX) from error
    except ValueError as error:
        raise OptionError(str(path), f"is no JSON: {error}", _FIX) from error
    try:
        return _parse(data)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise OptionError(str(path), f"is no file of this version of prefuse doctor --fit: {error}", _FIX) from error


def _parse(data: Any) -> Fits:
    if data["format"] != _FORMAT or data["version"] != _VERSION:
        raise ValueError(f"format {data['format']!r}, version {data['version']!r}")
    return {cpu: {lanes: _parse_fit(fit) for lanes, fit in by_lanes.items()} for cpu, by_lanes in data["fits"].items()}


def _parse_fit(data: Any) -> Fit:
    fit = Fit(**data)
    rates = [*fit.numbers.values(), *fit.spread.values()]
    if not all(isinstance(rate, (int, float)) and not isinstance(rate, bool) and isfinite(rate) for rate in rates):
        raise TypeError("a fit of what is no number")
    if not all(isinstance(text, str) for text in (fit.measured, *fit.refused.values())):
        raise TypeError("a fit of wrong types")
    return fit


def _format(fits: Fits) -> str:
    found = {cpu: {lanes: asdict(fit) for lanes, fit in by_lanes.items()} for cpu, by_lanes in fits.items() if by_lanes}
    return json.dumps({"format": _FORMAT, "version": _VERSION, "fits": found}, indent=1, sort_keys=True) + "\n"
