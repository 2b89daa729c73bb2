"""JSON files of measurements that a user keeps: read whole, checked, and replaced whole under a lock.

They come from other versions, other machines and strangers: what is not of the stated kind and version is an error that names the
file, and nothing of it is believed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from .errors import OptionError
from .files.user_folder import locked_file, replace_file

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MeasurementFile(Generic[T]):
    """One kind of such files: how it names itself, and how its contents become a value.

    `parse` gets the whole JSON object and may raise TypeError, ValueError, KeyError, AttributeError or OverflowError; `format`
    gives the part behind format and version. `written_by` is the command that writes it, `fix` what to do about a file that is
    none.
    """

    name: str
    version: int
    written_by: str
    fix: str
    parse: Callable[[Any], T]
    format: Callable[[T], Mapping[str, Any]]

    def read(self, path: Path) -> T | None:
        """What a file holds; None where it is not there.

        Raises:
            OptionError: it cannot be read, or is no such file.
        """
        try:
            data = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OptionError(str(path), f"cannot be read: {error.strerror or error}", self.fix) from error
        except (ValueError, RecursionError) as error:
            raise OptionError(str(path), f"is no JSON: {error}", self.fix) from error
        try:
            if data["format"] != self.name or data["version"] != self.version:
                raise ValueError(f"format {data['format']!r}, version {data['version']!r}")
            return self.parse(data)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:  # integers that are no floats
            raise OptionError(str(path), f"is no file of this version of {self.written_by}: {error}", self.fix) from error

    def change(self, path: Path, changed: Callable[[T | None], T], *, is_replaced: bool = False) -> None:
        """Write what `changed` makes of a file's contents, or of None where there is none. `is_replaced`: what is no such file is
        written over, too.

        Raises:
            OptionError: the file cannot be written; what was there is there still. Or it is there and none of these.
        """
        try:
            with locked_file(path):  # of two writers without it, one may lose what it adds
                try:
                    found = self.read(path)
                except OptionError as error:
                    if isinstance(error.__cause__, OSError):  # who knows what is in it
                        what = f"cannot be written, as what is there {error.what}"
                        raise OptionError(str(path), what, "name another file") from error
                    if not is_replaced:
                        raise
                    found = None
                body = self.format(changed(found))
                data = {"format": self.name, "version": self.version, **body}
                replace_file(path, json.dumps(data, indent=1, sort_keys=True) + "\n")
        except OSError as error:
            raise OptionError(str(path), f"cannot be written: {error.strerror or error}", "name another file") from error
