"""`prefuse.compile_generation`: from a causal language model to a generator."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ...runtime.errors import OptionError, UnsupportedModelError
from ...runtime.executor import CompiledModel
from ...runtime.generation.generator import Generator
from ...runtime.generation.generator_file import Parts
from ...runtime.generation.loop import GenerationLibrary
from ...runtime.generation.request import STOPS
from ...runtime.generation.session import Limits
from ...runtime.interchange import is_integer
from ...runtime.precision import PRECISIONS
from ...runtime.target import Target
from ..api import compile_model
from ..programs.builder import Progress
from ..programs.options import QUANTIZATIONS, check_names
from ..programs.specialize import SpecializedModel

if TYPE_CHECKING:
    import torch

    from ...runtime.staged.staged_model import StagedModel
    from .onnx_step import Decoder

Noted: TypeAlias = tuple[dict[int, CompiledModel], tuple[str, ...]]  # programs by their tokens, and what is slow about them

_OPTIONS = ("pipeline", "profile", "threads", "tuning", "weights")
_ARGUMENTS = ("max_tokens", "prefill", "batch", "target", "precision", "name", "cache", "progress")
_MOST_TOKENS = 1 << 24  # of a sequence
_COPIES = "slow: attention reads copies of its caches, as the model counts keys from the end of a cache"
_CHECKED = 7  # tokens that a file with recurrent states is given at once
_HOST = "cpu:avx2,threads=1"  # what chooses tokens that a GPU's program makes the logits of


def compile_generation(
    model: object,
    *,
    max_tokens: int,
    prefill: Sequence[int] = (16, 64, 256),
    batch: int = 1,
    target: str = "cpu",
    precision: str = "float32",
    name: str | None = None,
    cache: bool | str | os.PathLike[str] = True,
    progress: bool | Progress | None = None,
    options: Mapping[str, object],
) -> Generator:
    """Compile the programs of a generator; `prefuse.compile_generation` says what the arguments mean.

    Raises:
        CompileError: the model or an option cannot be taken.
    """
    most = _count("max_tokens", max_tokens, _MOST_TOKENS)
    sequences = _count("batch", batch, 1 << 12)
    counts = _counts(prefill, most)
    if options.get("memory_limit") is not None:
        raise OptionError("memory_limit", "a step of generation reads all weights", "leave it out, or use weights='int8'")
    check_names(options.keys() - {"memory_limit"}, _OPTIONS, _ARGUMENTS)
    if precision in QUANTIZATIONS:
        what = f"no generator is made in {precision!r}, whose ranges are found without a past"
        raise OptionError("precision", what, f"use weights='int8', with one of {', '.join(map(repr, PRECISIONS))}")
    if options.get("weights") is not None and Target.parse(target).is_gpu:
        raise OptionError("weights", f"no kernel for {target} reads weights of few bits", "leave it out, or compile for a CPU")
    given = _Request(sequences, most, counts, target, precision, name or _name_of(model), cache, progress, options)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        programs, notes = _programs_of_module(model, given)
        return assembled(programs, most, given.name, _ends_of(model), notes)
    programs, notes = _programs_of_onnx(model, given)
    return assembled(programs, most, given.name, (), notes)


@dataclass(frozen=True, slots=True)
class _Request:
    """What programs are wanted, checked, and how they are compiled."""

    batch: int
    max_tokens: int
    counts: list[int]
    target: str
    precision: str
    name: str
    cache: bool | str | os.PathLike[str]
    progress: bool | Progress | None
    options: Mapping[str, object]

    def compile(self, model: object, states: Mapping[str, str] | None = None) -> CompiledModel | StagedModel | SpecializedModel:
        """Compile one form of the model, whose weights all programs share."""
        return compile_model(
            model,
            target=self.target,
            precision=self.precision,
            states=states,
            name=self.name,
            cache=self.cache,
            progress=self.progress,
            options=self.options,
            shares_weights=True,
        )

    def single(self, program: CompiledModel | StagedModel | SpecializedModel) -> CompiledModel:
        """What was compiled, which must be one program."""
        if not isinstance(program, CompiledModel):
            raise UnsupportedModelError(self.name, "its control flow depends on the data of a run", "trace it without branches")
        return program


def _programs_of_module(model: torch.nn.Module, given: _Request) -> Noted:
    import torch

    from .causal_step import fitting_step
    from .pieces import takes_pieces

    modes = {part: part.training for part in model.modules()}
    try:
        step = fitting_step(model, given.batch, given.max_tokens)
        net = given.compile(step)
        assert isinstance(net, SpecializedModel)
        examples = {
            count: (torch.zeros(given.batch, count, dtype=torch.int64), torch.zeros(given.batch, dtype=torch.int64))
            for count in (given.counts if takes_pieces(step) else [1])
        }
        notes = _notes(given.counts, list(examples)) + (_COPIES,) * step.is_left_padded
        return {count: given.single(net.specialize(*arguments)) for count, arguments in examples.items()}, notes
    finally:
        for part, is_training in modes.items():
            part.training = is_training


def _ends_of(model: object) -> tuple[int, ...]:
    """The tokens that end a text by the model's generation_config, as many as a call may have."""
    given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = given if isinstance(given, (list, tuple)) else [given]
    return tuple(int(token) for token in listed if is_integer(token) and token >= 0)[:STOPS]


def _notes(wanted: Sequence[int], taken: Sequence[int]) -> tuple[str, ...]:
    """What is slow about reading prompts by programs of other lengths than wanted."""
    if dropped := [count for count in wanted if count not in taken]:
        rest = "token by token" if len(taken) == 1 else f"by {max(taken)} tokens at most"
        lost = ", ".join(map(str, dropped))
        return (f"slow: prompts are read {rest}, as by pieces of {lost} the states are others, or a loop over tokens makes them",)
    return ()


def _programs_of_onnx(model: object, given: _Request) -> Noted:
    from ..frontend.importer import import_model
    from .onnx_step import find_decoder

    decoder = find_decoder(import_model(model))
    if len(given.counts) == 1 and not decoder.has_positions and not decoder.recurrent:
        what = "the file has no position_ids, so that a step and a prompt must be compared"
        raise OptionError("prefill", what, "give at least one length above 1")
    is_here = not Target.parse(given.target).is_gpu
    checked = _checked_programs(decoder, given if is_here else replace(given, target="cpu"))  # of the file: here may be no GPU
    programs = checked if is_here else _decoder_programs(decoder, replace(given, counts=sorted(checked)))
    return programs, _notes(given.counts, sorted(checked))


def _decoder_programs(decoder: Decoder, given: _Request) -> dict[int, CompiledModel]:
    from .onnx_step import step_model
    from .position_tables import check_position_tables

    programs, target = {}, Target.parse(given.target)
    for count in given.counts:
        step = step_model(decoder, target, given.batch, count, given.max_tokens, given.counts[-1])
        if count == 1:
            check_position_tables(step, given.max_tokens, target)
        programs[count] = given.single(given.compile(step.model, step.states))
    return programs


def _checked_programs(decoder: Decoder, given: _Request) -> dict[int, CompiledModel]:
    """Programs for a CPU, which have run; with recurrent states those that agree."""
    from .check import agreeing_programs, check_pieces, check_programs, check_singles
    from .onnx_step import whole_model

    programs, whole = _decoder_programs(decoder, given), None
    is_float32 = given.precision == "float32" and not given.options.get("weights") and not decoder.is_narrow
    if decoder.recurrent or len(programs) == 1:
        model = whole_model(decoder, Target.parse(given.target), given.batch, min(_CHECKED, given.max_tokens))
        whole = given.single(given.compile(model))
        check_singles(programs[1], whole, is_float32=is_float32)
        return agreeing_programs(programs, given.max_tokens, is_float32=is_float32) if decoder.recurrent else programs
    if not decoder.has_positions:  # which the file counts by the mask, or wrongly by the length of its past
        count = given.counts[1]
        whole = given.single(given.compile(whole_model(decoder, Target.parse(given.target), given.batch, count)))
    check_programs(programs, given.max_tokens, whole)
    check_pieces(programs, given.max_tokens, is_float32=is_float32)
    return programs


def _name_of(model: object) -> str:
    """What a generator is called whose user does not say: the stem of the file, or the model's class."""
    return Path(model).stem if isinstance(model, (str, os.PathLike)) else type(model).__name__


def assembled(
    programs: Mapping[int, CompiledModel], max_tokens: int, name: str, ends: Sequence[int], notes: tuple[str, ...]
) -> Generator:
    """A generator of programs: tokens [batch, count], counts [batch] -> logits [batch, vocabulary]."""
    from ..lowering.generation_code import build_generation_library

    batch, vocabulary = programs[1].outputs[0].type.shape
    target = Target.parse(programs[1].plan.target)
    if target.is_gpu:
        target = Target.parse(_HOST)
    code, scratch = build_generation_library(batch, vocabulary, target)
    library = GenerationLibrary(code, target.threads)
    limits = Limits(batch, max_tokens, vocabulary, scratch, tuple(token for token in ends if token < vocabulary))
    return Generator(Parts(name, limits, dict(sorted(programs.items())), library, notes))


def _count(name: str, given: object, most: int) -> int:
    if not is_integer(given) or not 1 <= given <= most:
        raise OptionError(name, f"{given!r} given", f"give a whole number from 1 to {most}")
    return int(given)


def _counts(prefill: object, most: int) -> list[int]:
    """How many tokens programs take: 1, and the lengths that prompts are read in, longer than which no sequence is."""
    if isinstance(prefill, (str, bytes)) or not isinstance(prefill, Sequence):
        raise OptionError("prefill", f"{prefill!r} given", "give the lengths that prompts are read in, such as (16, 64, 256)")
    lengths = [_count("prefill", one, _MOST_TOKENS) for one in prefill]
    return sorted({1, *(min(one, most) for one in lengths)})
