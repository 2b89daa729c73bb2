"""What a user may ask of a compilation, checked once and printable."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...runtime.errors import OptionError
from ...runtime.hardware.memory_limit import MemoryLimit
from ...runtime.interchange import is_integer
from ...runtime.precision import PRECISIONS, WEIGHTS, Precision, Weights
from ...runtime.target import Target
from .memory_limit import parse_memory_limit
from .tuning_database import Configurations, digest_of, known_configurations

# Precisions beside those of float programs: ranges of tensors, from calibration data; ranges of rows, found while a program runs.
QUANTIZED = ("int8", "int8-rows")
MIXED = "mixed"  # each product has the format that makes the program best
QUANTIZATIONS = (*QUANTIZED, MIXED)
MIXED_OPTIONS = ("bits", "max_error", "metric", "objective")  # of precision="mixed", which parse_options leaves to others
EXTRA_OPTIONS = ("dims", "memory_limit", "pipeline", "profile", "random", "threads", "tuning", "weights")


@dataclass(frozen=True, slots=True)
class Options:
    """Everything beside the model that decides the compiled program. `pipeline` None is the default pipeline.

    `random` says that the model may draw random numbers, `profile` that the program shall have counters; `configurations` are
    what is known to be best for some problems. `weights`: what large weights of products are stored as, if not as they come.
    `quantization`, where it is not empty, tells how the model is quantized before anything else is done with it; `precision` is
    then that of what is not quantized. `memory_limit` is what weights and activations of one context may take together.
    `states` are the outputs that the user says renew inputs, and those inputs. `shares_weights`: programs for other sizes of the
    model read its weights, so that these are packed in a form that does not depend on sizes.
    """

    target: Target
    precision: Precision = "float32"
    pipeline: str | None = None
    random: bool = False
    profile: bool = False
    configurations: Configurations = field(default_factory=dict)
    weights: Weights | None = None
    quantization: str = ""
    memory_limit: MemoryLimit | None = None
    states: tuple[tuple[str, str], ...] = ()
    shares_weights: bool = False

    def __str__(self) -> str:
        flags = " random" * self.random + " profile" * self.profile + (f" weights={self.weights}" if self.weights else "")
        flags += f" tuning={digest_of(self.configurations)}" if self.configurations else ""
        flags += f" quantization={self.quantization}" if self.quantization else ""
        flags += f" memory_limit={self.memory_limit}" if self.memory_limit else ""
        flags += f" states={self.states}" if self.states else ""
        flags += " shares_weights" * self.shares_weights
        return (
            f"target={self.target} {self.target.machine} precision={self.precision} pipeline={self.pipeline or 'default'}{flags}"
        )


def parse_options(target: str, precision: str, extra: Mapping[str, object], *, quantizes: bool = False) -> Options:
    """Check what the user asked for. `quantizes`: the precision may be of `QUANTIZATIONS`, which the caller then sees to.

    Raises:
        OptionError: an unknown option, or a value that an option does not take.
    """
    check_names(extra, EXTRA_OPTIONS, _ARGUMENTS)
    if not isinstance(target, str):
        raise OptionError("target", f"{target!r} is not a string", 'use "cpu"')
    threads, pipeline = extra.get("threads"), extra.get("pipeline")
    if threads is not None and not is_integer(threads):
        raise OptionError("threads", f"{threads!r} is not a whole number", "give the number of threads of one call")
    random = _flag(extra, "random", "say whether the model may draw random numbers")
    profile = _flag(extra, "profile", "say whether the program shall have counters")
    if pipeline is not None:
        pipeline = _check_pipeline(pipeline)
    quantization = precision if quantizes and precision in QUANTIZATIONS else ""
    exactness = "float32" if quantization else parse_precision(precision)
    parsed = Target.parse(target, None if threads is None else int(threads))
    if quantization:
        exactness = _precision_beside_int8(parsed)
    configurations = known_configurations(extra.get("tuning", True), parsed, exactness)
    weights = parse_weights(extra.get("weights"), parsed)
    limit = parse_memory_limit(extra.get("memory_limit"))
    return Options(parsed, exactness, pipeline, random, profile, configurations, weights, quantization, limit)


def check_names(given: Iterable[str], known: Sequence[str], others: Sequence[str] = ()) -> None:
    """Check the names of options; `others` are arguments that the caller takes by themselves, which a user may have misspelt.

    Raises:
        OptionError: one is not known here, though perhaps elsewhere.
    """
    for name in given:
        if name not in known:
            if name in EXTRA_OPTIONS or name in _ARGUMENTS:
                raise OptionError(name, "is no option here", f"leave it out; there are {', '.join(known)}")
            raise OptionError(name, "unknown option", suggest(name, (*known, *others)))


def _precision_beside_int8(target: Target) -> Precision:
    """How exactly to compute what is not quantized: the fastest way that is more exact than 8 bits."""
    if not target.multiplies_bytes:
        what = f"programs for {target} are not quantized, whose matrix unit, if it has one, is not known to multiply bytes"
        raise OptionError("precision", what, 'compile in "float16", or in "float32"')
    is_faster = target.is_gpu or target.has("avx512_bf16") or target.has_tiles
    return "bfloat16" if is_faster else "float32-fast"


def parse_precision(text: str) -> Precision:
    """The precision that a user names. Raises OptionError for an unknown one."""
    for known in PRECISIONS:
        if text == known:
            return known
    if text in QUANTIZED:
        raise OptionError("precision", "the model is not quantized here", "quantize it before: prefuse quantize MODEL")
    if text == MIXED:
        raise OptionError("precision", "no formats are searched for here", "use prefuse.compile, or prefuse bits MODEL")
    raise OptionError("precision", f"unknown precision {text!r}", suggest(str(text), (*PRECISIONS, *QUANTIZATIONS)))


def parse_weights(wanted: object, target: Target) -> Weights | None:
    """What weights are to be stored as, by the user. Raises OptionError for what is unknown, or what the target cannot read."""
    if wanted is None:
        return None
    found = next((known for known in WEIGHTS if wanted == known), None)
    if found is None:
        raise OptionError("weights", f"unknown weights {wanted!r}", suggest(str(wanted), WEIGHTS))
    if target.is_gpu:
        raise OptionError("weights", f"no kernel for {target} reads weights of few bits", "leave it out, or compile for a CPU")
    return found


def parse_states(states: object) -> tuple[tuple[str, str], ...]:
    """The outputs that renew inputs, and those inputs. Raises OptionError where they are no mapping of names."""
    if states is None:
        return ()
    if not isinstance(states, Mapping) or not all(isinstance(name, str) for pair in states.items() for name in pair):
        raise OptionError("states", f"{states!r} is no mapping of names", 'give {"output": "input"}')
    return tuple(states.items())


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


_ARGUMENTS = ("args", "calibration", "kwargs", "target", "precision", "states", "name", "cache", "progress", *MIXED_OPTIONS)


def _check_pipeline(pipeline: object) -> str:
    """The canonical text of a pipeline."""
    from ..pipeline import format_pipeline, parse_pipeline
    from ..pipeline.pass_table import PASSES, named_pipeline

    if not isinstance(pipeline, str):
        raise OptionError("pipeline", f"{pipeline!r} is not a string", 'write it as "canonicalize,fuse-epilogue{max-ops=4}"')
    return format_pipeline(parse_pipeline(named_pipeline(pipeline), PASSES))
