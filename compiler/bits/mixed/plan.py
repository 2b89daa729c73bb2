"""Plans of bits: which format each unit has, as a file that can be edited, and what users say in the place of one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from ....runtime.errors import OptionError
from ....runtime.files.user_folder import replace_file
from ...ir.facts import origins_of
from ...programs.options import suggest
from ...quantization.units import Unit
from .formats import EXACT, FORMATS, REST, Formats

VERSION = 1
_KNOWN = (*FORMATS, EXACT)
_VERSION_KEY, _UNITS, _OVERRIDES, _NOTES = "prefuse_bits", "units", "overrides", "notes"
_SCOPES = "pkg.torch.onnx.name_scopes"  # metadata of a node: the modules around it
_WILD = "*?["


@dataclass(frozen=True, slots=True)
class BitsPlan:
    """The format of each unit by its name, and of `REST`; what it leaves out is searched for.

    `overrides` are formats by patterns of names, as in "*attention*": they come after `units`, later ones after earlier ones.
    `notes` are for people: what was measured when the plan was made.
    """

    units: Formats
    overrides: Formats = field(default_factory=dict)
    notes: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, formats in ((_UNITS, self.units), (_OVERRIDES, self.overrides)):
            for name, form in formats.items():
                if form not in _KNOWN:
                    raise OptionError(f"bits, {what}, {name!r}", f"unknown format {form!r}", suggest(str(form), _KNOWN))

    def as_text(self) -> str:
        """JSON that `plan_of` reads."""
        parts = {_VERSION_KEY: VERSION, _NOTES: dict(self.notes), _UNITS: dict(self.units), _OVERRIDES: dict(self.overrides)}
        return json.dumps(parts, indent=1) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, whole or not at all. Raises OptionError if that cannot be."""
        try:
            replace_file(Path(path), self.as_text())
        except OSError as error:
            raise OptionError("bits", f"{path} cannot be written: {error.strerror or error}", "check the folder") from error

    def formats(self, units: Iterable[Unit], choices: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
        """What the plan says of the units of a model, `choices` being the formats that these can have.

        A pattern sets those of the units it matches that can have the format.

        Raises:
            OptionError: a name that no unit has, or a format that its unit, or none of a pattern's units, can have.
        """
        found: dict[str, str] = {}
        for name, form in self.units.items():
            if name not in choices:
                raise OptionError(f"bits, unit {name!r}", "the model has no such unit", suggest(name, choices))
            _check_legal(f"bits, unit {name!r}", form, [choices[name]])
            found[name] = form
        names = {unit.name: _known_names(unit) for unit in units} | {REST: (REST,)}
        for pattern, form in self.overrides.items():
            matched = [name for name, known in names.items() if _matches(pattern, known)]
            if not matched:
                raise OptionError(f"bits, pattern {pattern!r}", "no unit matches it", suggest(pattern, choices))
            _check_legal(f"bits, pattern {pattern!r}", form, [choices[name] for name in matched])
            found |= {name: form for name in matched if form == EXACT or form in choices[name]}
        return found


def plan_of(bits: object) -> BitsPlan:
    """The plan that a user gives: a plan, the path of one, a mapping of patterns to formats, or None, which says nothing.

    Raises:
        OptionError: it is none of these, or the file is no plan.
    """
    if bits is None:
        return BitsPlan({})
    if isinstance(bits, BitsPlan):
        return bits
    if isinstance(bits, (str, os.PathLike)):
        return _from_parts(_read(Path(bits)), str(bits))
    if isinstance(bits, Mapping):
        return _from_parts(bits, "bits")
    raise OptionError(
        "bits", f"{type(bits).__name__} given", "give a plan, the path of one, or formats by patterns of node names"
    )


def _read(path: Path) -> Mapping[object, object]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise OptionError("bits", f"{path} cannot be read: {error.strerror or error}", "give the path of a plan") from error
    except (ValueError, RecursionError) as error:
        raise OptionError("bits", f"{path} is no JSON: {error}", "write a plan with prefuse bits -o") from error
    if not isinstance(found, Mapping):
        raise OptionError("bits", f"{path} holds no plan", "write a plan with prefuse bits -o")
    return found


def _from_parts(parts: Mapping[object, object], where: str) -> BitsPlan:
    if _VERSION_KEY not in parts and _UNITS not in parts:
        return BitsPlan({}, _formats(parts, where))
    if (version := parts.get(_VERSION_KEY, VERSION)) != VERSION:
        raise OptionError("bits", f"{where} is a plan of version {version!r}", f"this prefuse reads version {VERSION}")
    notes = parts.get(_NOTES, {})
    units, overrides = (_formats(parts.get(key, {}), f"{where}, {key}") for key in (_UNITS, _OVERRIDES))
    return BitsPlan(units, overrides, {str(key): value for key, value in notes.items()} if isinstance(notes, Mapping) else {})


def _formats(given: object, where: str) -> dict[str, str]:
    if not isinstance(given, Mapping) or not all(isinstance(one, str) for pair in given.items() for one in pair):
        raise OptionError("bits", f"{where} holds no formats by names", 'write them as {"name or pattern": "int8"}')
    return {str(name): str(form) for name, form in given.items()}


def _check_legal(where: str, form: str, choices: Iterable[tuple[str, ...]]) -> None:
    if form not in _KNOWN:
        raise OptionError(where, f"unknown format {form!r}", suggest(form, _KNOWN))
    legal = dict.fromkeys(one for row in choices for one in row)
    if form != EXACT and form not in legal:
        raise OptionError(where, f"it cannot be {form} on this target", f"it can be {', '.join(legal)}")


def _known_names(unit: Unit) -> tuple[str, ...]:
    """What patterns may match of a unit: its name, those of the imported nodes behind it, and of the torch modules around it."""
    metadata = unit.node.metadata_props
    return (unit.name, *origins_of(unit.name, metadata), metadata.get(_SCOPES, ""))


def _matches(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern matches a name: as in file names; without wildcards it is the whole name."""
    is_wild = any(mark in pattern for mark in _WILD)
    return any(fnmatchcase(name, pattern) if is_wild else name == pattern for name in names)
