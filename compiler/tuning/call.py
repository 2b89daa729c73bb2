"""`prefuse.tune`: its arguments checked, its model read."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.errors import InputError, OptionError
from ..programs.builder import Progress
from ..programs.options import check_names, parse_options
from ..programs.tuning_database import default_database

if TYPE_CHECKING:
    from .tuner import Tuned

_OPTIONS = ("pipeline", "threads", "weights")


def tune(
    model: object,
    *,
    seconds: float,
    target: str,
    precision: str,
    database: str | os.PathLike[str] | None,
    again: bool,
    progress: bool | Progress | None,
    options: Mapping[str, object],
) -> tuple[Tuned, ...]:
    """As `prefuse.tune` says.

    Raises:
        CompileError: the model or an option cannot be taken, or the database cannot be read or written.
    """
    check_names(options, _OPTIONS)
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise OptionError("seconds", f"{seconds!r} is no time", "give the seconds to measure, more than 0")
    if database is not None and not isinstance(database, (str, os.PathLike)):
        raise OptionError("database", f"{database!r} is no file", "give the path of a file, or leave it out")
    checked = parse_options(target, precision, {**options, "tuning": False})
    from ..api import reporter
    from ..frontend.dimensions import is_dynamic
    from ..frontend.importer import import_model
    from .tuner import tune_model

    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        raise OptionError("model", "a torch.nn.Module has no shapes", "tune torch.export.export(module, args), or an ONNX file")
    graph = import_model(model)
    if is_dynamic(graph):
        what = "has symbolic dimensions, and each shape has kernels of its own"
        raise InputError("model", what, "tune a model of concrete shapes, or prefuse tune --shape NAME=SIZES")
    path, tell = Path(database) if database else default_database(), reporter(progress)
    try:
        return tune_model(graph, checked, seconds=seconds, database=path, again=again, progress=tell)
    finally:
        if tell is not None:
            tell("done", 1.0)
