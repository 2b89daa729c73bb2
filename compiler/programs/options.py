"""What a user may ask of a compilation, checked once and printable."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ...runtime.errors import OptionError
from ...runtime.precision import PRECISIONS, Precision
from ...runtime.target import Target
from .tuning_database import Configurations, digest_of, known_configurations

EXTRA_OPTIONS = ("pipeline", "profile", "random", "threads", "tuning")


@dataclass(frozen=True, slots=True)
class Options:
    """Everything beside the model that decides the compiled program. `pipeline` None is the default pipeline.

    `random` says that the model may draw random numbers, `profile` that the program shall have counters; `configurations` are
    what is known to be best for some problems.
    """

    target: Target
    precision: Precision = "float32"
    pipeline: str | None = None
    random: bool = False
    profile: bool = False
    configurations: Configurations = field(default_factory=dict)

    def __str__(self) -> str:
        flags = " random" * self.random + " profile" * self.profile
        flags += f" tuning={digest_of(self.configurations)}" if self.configurations else ""
        return (
            f"target={self.target} {self.target.machine} precision={self.precision} pipeline={self.pipeline or 'default'}{flags}"
        )


def parse_options(target: str, precision: str, extra: Mapping[str, object]) -> Options:
    """Check what the user asked for.

    Raises:
        OptionError: an unknown option, or a value that an option does not take.
    """
    for name in extra:
        if name not in EXTRA_OPTIONS:
            raise OptionError(name, "unknown option", suggest(name, (*EXTRA_OPTIONS, *_ARGUMENTS)))
    if not isinstance(target, str):
        raise OptionError("target", f"{target!r} is not a string", 'use "cpu"')
    threads, pipeline = extra.get("threads"), extra.get("pipeline")
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool)):
        raise OptionError("threads", f"{threads!r} is not a whole number", "give the number of threads of one call")
    random = _flag(extra, "random", "say whether the model may draw random numbers")
    profile = _flag(extra, "profile", "say whether the program shall have counters")
    if pipeline is not None:
        pipeline = _check_pipeline(pipeline)
    exactness = parse_precision(precision)
    parsed = Target.parse(target, threads)
    if profile and parsed.is_gpu:
        raise OptionError(
            "profile", f"programs for {parsed} have no counters", "leave it out, and time them with the GPU's tools"
        )
    configurations = known_configurations(extra.get("tuning", True), parsed, exactness)
    return Options(parsed, exactness, pipeline, random, profile, configurations)


def parse_precision(text: str) -> Precision:
    """The precision that a user names. Raises OptionError for an unknown one."""
    for known in PRECISIONS:
        if text == known:
            return known
    raise OptionError("precision", f"unknown precision {text!r}", suggest(str(text), PRECISIONS))


def _flag(extra: Mapping[str, object], name: str, fix: str) -> bool:
    value = extra.get(name, False)
    if not isinstance(value, bool):
        raise OptionError(name, f"{value!r} is neither True nor False", fix)
    return value


def suggest(name: str, known: Iterable[str]) -> str:
    """What to do about an unknown name: the nearest known one, else all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(names)}"


_ARGUMENTS = ("args", "kwargs", "target", "precision", "name", "cache", "progress")


def _check_pipeline(pipeline: object) -> str:
    """The canonical text of a pipeline."""
    from ..pipeline import format_pipeline, parse_pipeline
    from ..pipeline.pass_table import PASSES, named_pipeline

    if not isinstance(pipeline, str):
        raise OptionError("pipeline", f"{pipeline!r} is not a string", 'write it as "canonicalize,fuse-epilogue{max-ops=4}"')
    return format_pipeline(parse_pipeline(named_pipeline(pipeline), PASSES))
