"""`prefuse.compile_generation`: from a causal language model to a generator."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from ...runtime.errors import OptionError, UnsupportedModelError
from ...runtime.executor import CompiledModel
from ...runtime.generation.generator import Generator
from ...runtime.generation.generator_file import Parts
from ...runtime.generation.loop import GenerationLibrary
from ...runtime.generation.session import Limits
from ...runtime.target import Target
from ..api import compile_model
from ..programs.builder import Progress
from ..programs.specialize import SpecializedModel

_MOST_TOKENS = 1 << 24  # of a sequence


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
    if Target.parse(target).is_gpu:
        raise OptionError("target", f"programs for {target} keep no states", 'compile for "cpu"')
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        fix = "give a causal language model of transformers"
        raise UnsupportedModelError(type(model).__name__, "no text is generated with this kind of model yet", fix)
    from .causal_step import CausalStep, check_step

    step = CausalStep(model, sequences, most).eval()
    check_step(step)
    named = name or type(model).__name__
    net = compile_model(
        step,
        target=target,
        precision=precision,
        name=named,
        cache=cache,
        progress=progress,
        options=options,
        shares_weights=True,
    )
    assert isinstance(net, SpecializedModel)
    programs: dict[int, CompiledModel] = {}
    for count in counts:
        arguments = torch.zeros(sequences, count, dtype=torch.int64), torch.zeros(sequences, dtype=torch.int64)
        program = net.specialize(*arguments)
        if not isinstance(program, CompiledModel):
            raise UnsupportedModelError(named, "its control flow depends on the data of a run", "trace it without branches")
        programs[count] = program
    return assembled(programs, most, named)


def assembled(programs: Mapping[int, CompiledModel], max_tokens: int, name: str) -> Generator:
    """A generator of programs: tokens [batch, count], counts [batch] -> logits [batch, vocabulary]."""
    from ..lowering.generation_code import build_generation_library

    batch, vocabulary = programs[1].outputs[0].type.shape
    target = Target.parse(programs[1].plan.target)
    code, scratch = build_generation_library(batch, vocabulary, target)
    library = GenerationLibrary(code, target.threads)
    return Generator(Parts(name, Limits(batch, max_tokens, vocabulary, scratch), dict(sorted(programs.items())), library))


def _count(name: str, given: object, most: int) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= most:
        raise OptionError(name, f"{given!r} given", f"give a whole number from 1 to {most}")
    return given


def _counts(prefill: object, most: int) -> list[int]:
    """How many tokens programs take: 1, and the lengths that prompts are read in, longer than which no sequence is."""
    if isinstance(prefill, (str, bytes)) or not isinstance(prefill, Sequence):
        raise OptionError("prefill", f"{prefill!r} given", "give the lengths that prompts are read in, such as (16, 64, 256)")
    lengths = [_count("prefill", one, _MOST_TOKENS) for one in prefill]
    return sorted({1, *(min(one, most) for one in lengths)})
