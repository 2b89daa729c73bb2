"""`prefuse.compile`: one call from any kind of model to something that can be called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache as memoize
from pathlib import Path
from typing import TYPE_CHECKING

from ..runtime.errors import InputError, OptionError
from ..runtime.executor import CompiledModel
from ..runtime.files.user_folder import user_folder
from ..runtime.staged.staged_model import StagedModel
from .collection import paused_collection
from .frontend.pytree import is_tensor
from .programs.builder import Builder, CompileModel, Progress
from .programs.cache import ProgramCache
from .programs.digest import model_digest
from .programs.file_memory import FileMemory
from .programs.options import MIXED, MIXED_OPTIONS, QUANTIZATIONS, Options, parse_options, parse_states
from .programs.sources import GraphSource, ModuleSource
from .programs.specialize import SpecializedModel

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..runtime.constants.shared import ConstantPool
    from .bits.mixed.quantizer import MixedQuantizer
    from .programs.symbolic import SymbolicModel
    from .quantization.uniform import UniformQuantizer
    from .quantization.units import UnitFormat


def drive(
    model: ir.Model,
    options: Options,
    *,
    name: str,
    output: Path,
    progress: Progress | None = None,
    constants: ConstantPool | None = None,
) -> None:
    """The real driver, imported at the first compilation: it needs TVM, which takes seconds to import."""
    from . import driver

    driver.compile_model(model, options, name=name, output=output, progress=progress, constants=constants)


def compile_model(
    model: object,
    args: object = None,
    kwargs: Mapping[str, object] | None = None,
    *,
    target: str = "cpu",
    precision: str = "float32",
    calibration: object | None = None,
    states: Mapping[str, str] | None = None,
    name: str | None = None,
    cache: bool | str | os.PathLike[str] = True,
    progress: bool | Progress | None = None,
    options: Mapping[str, object],
    driver: CompileModel = drive,
    shares_weights: bool = False,
) -> CompiledModel | StagedModel | SpecializedModel:
    """Compile a model of any kind; `prefuse.compile` says what the arguments mean, and `Options` what `shares_weights` does.

    Raises:
        CompileError: the model, an option or an input cannot be taken.
    """
    mixed = {name: value for name, value in options.items() if name in MIXED_OPTIONS}
    checked = parse_options(target, precision, {name: options[name] for name in options.keys() - mixed}, quantizes=True)
    checked = replace(checked, states=parse_states(states), shares_weights=shares_weights)
    if checked.states and checked.quantization:
        fix = 'use precision="bfloat16", or weights="int8"'
        raise OptionError("states", f"precision {precision!r} has none: its ranges are found without a past", fix)
    if calibration is not None and not checked.quantization:
        fix = f"use precision={' or '.join(map(repr, QUANTIZATIONS))}, or leave it out"
        raise OptionError("calibration", f"data given for {precision}, which needs none", fix)
    if mixed and checked.quantization != MIXED:
        name_of, given = next(iter(mixed.items()))
        raise OptionError(name_of, f"{given!r} given for precision {precision!r}", 'use precision="mixed", or leave it out')
    if name is not None and (not isinstance(name, str) or not name):
        raise OptionError("name", f"{name!r} is no name", "give a string, or leave it out")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise OptionError("kwargs", f"{kwargs!r} is no dictionary", "give the keyword inputs by name")
    builder = Builder(checked, name or _default_name(model), driver, open_cache(cache), reporter(progress))
    if checked.quantization:
        builder = quantizing(builder, calibration, mixed)
    inputs = None if args is None and not kwargs else (_as_tuple(args), dict(kwargs or {}))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        if checked.states:
            fix = "register them as buffers and change these in forward(): the buffers that it changes are states"
            raise OptionError("states", "a module has no names for its outputs", fix)
        if options.get("dims") is None:
            return _specialized(SpecializedModel(ModuleSource(model, builder, build)), inputs)
    if options.get("dims") is not None:
        return compile_ranges(model, inputs, options["dims"], builder)
    return _compile_graph(model, inputs, builder)


def compile_ranges(
    model: object, inputs: tuple[tuple[object, ...], dict[str, object]] | None, dims: object, builder: Builder
) -> SymbolicModel:
    """Few programs for all sizes of some dimensions. Raises OptionError for what has no such programs."""
    from .programs.dims_option import parse_axis_dims, parse_dims
    from .programs.symbolic import SymbolicModel, SymbolicSource

    given = builder.options
    unfit = {
        f"target {given.target}": ("kernels of GPUs are written for one size", given.target.is_gpu),
        f"precision {given.quantization}": ("scales are found for the sizes of the data", bool(given.quantization)),
        "states": ("sessions keep them in memory that is planned for one size", bool(given.states)),
        "memory_limit": ("weights are scheduled by bytes and times of one size", given.memory_limit is not None),
    }
    for what, (reason, is_given) in unfit.items():
        if is_given:
            raise OptionError(
                "dims", f"there are no programs for ranges of sizes with {what}: {reason}", "leave out dims, or that"
            )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from .programs.module_ranges import ModuleRanges

        found = SymbolicModel(ModuleRanges(model, builder, build, parse_axis_dims(dims)))
        _specialized(found, inputs)
        return found
    with builder.reporting():
        graph, ranges = parse_dims(dims, _import(model, builder))
        source = SymbolicSource(graph, builder, build, ranges)
        source.compile_ahead()
    found = SymbolicModel(source)
    _specialized(found, inputs)
    return found


def _compile_graph(
    model: object, inputs: tuple[tuple[object, ...], dict[str, object]] | None, builder: Builder
) -> CompiledModel | StagedModel | SpecializedModel:
    memory = _file_memory(model, builder) if inputs is None else None
    known = None if memory is None else memory.recall()
    with builder.reporting():
        if known is not None and (program := builder.recall(known)) is not None:  # without importing onnx, a third of a second
            return program
        graph = _import(model, builder)
        if builder.options.states:
            from .ir.states import declare_states

            if inputs is not None:
                graph, inputs = _with_shapes_of(graph, *inputs), None
            declare_states(graph, dict(builder.options.states))
        return _compile_imported(graph, inputs, builder, memory)


def _with_shapes_of(graph: ir.Model, args: Sequence[object], kwargs: Mapping[str, object]) -> ir.Model:
    """The graph for inputs of the shapes of examples: states among them have one shape, as sessions keep them.

    Raises:
        InputError: they do not fit the inputs.
    """
    from .frontend.dimensions import bind_dimensions

    names = [str(value.name) for value in graph.graph.inputs]
    if len(args) > len(names):
        raise InputError("inputs", f"{len(args)} given", f"give at most {len(names)}: {', '.join(names)}")
    given = dict(zip(names, args, strict=False))
    if twice := [name for name in kwargs if name in given]:
        raise InputError(f"input {twice[0]}", "given twice", "give it in order or by name")
    return bind_dimensions(graph, {name: tuple(getattr(value, "shape", ())) for name, value in {**given, **kwargs}.items()})


def _compile_imported(
    graph: ir.Model,
    inputs: tuple[tuple[object, ...], dict[str, object]] | None,
    builder: Builder,
    memory: FileMemory | None,
) -> CompiledModel | StagedModel | SpecializedModel:
    from .frontend.dimensions import is_dynamic
    from .frontend.onnx_import import EXTERNAL_FILES
    from .frontend.shaping import shaping_inputs
    from .ir.states import state_inputs

    if shaping_states := state_inputs(graph) & set(shaping_inputs(graph)):
        what = f"{', '.join(sorted(shaping_states))} decides shapes, which a state cannot"
        raise OptionError("states", what, "let it be an input, or compute the shapes from the shapes of inputs")
    if is_dynamic(graph) or shaping_inputs(graph) or inputs is not None:
        return _specialized(SpecializedModel(GraphSource(graph, builder, build)), inputs)
    key = graph_key(graph, builder)
    compiled = build(builder, key, lambda: builder.prepared(graph))
    if memory is not None:
        memory.remember(graph.meta[EXTERNAL_FILES], key)
    return compiled


def quantizing(builder: Builder, calibration: object | None, mixed: Mapping[str, object] | None = None) -> Builder:
    """A builder that quantizes with this calibration data, if any, what it compiles; `mixed` are the options of mixed formats.

    Raises:
        InputError: it is no calibration data.
        OptionError: what is given for mixed formats is not what it should be.
    """
    quantizer: UniformQuantizer | MixedQuantizer
    if builder.options.quantization == MIXED:
        from .bits.mixed.quantizer import MixedQuantizer
        from .bits.mixed.request import request_of

        quantizer = MixedQuantizer(calibration, builder.options, request_of(**(mixed or {})), builder.compile_model)
    else:
        from .quantization.uniform import UniformQuantizer

        form: UnitFormat = "int8-rows" if builder.options.quantization == "int8-rows" else "int8"
        quantizer = UniformQuantizer(calibration, builder.options.target, form)
    options = replace(builder.options, quantization=f"{builder.options.quantization} {quantizer.digest}")
    return replace(builder, options=options, quantize=quantizer, is_for_shapes=builder.options.quantization == MIXED)


def _file_memory(model: object, builder: Builder) -> FileMemory | None:
    """The memory of files, if there is one and the model is a file that can be read again: no pipe."""
    if builder.cache is None or not isinstance(model, (str, os.PathLike)):
        return None
    try:
        return FileMemory(Path(model), builder) if os.path.isfile(model) else None
    except OSError:
        return None


def _import(model: object, builder: Builder) -> ir.Model:
    from .frontend.importer import import_model

    builder.report("import", 0.0)
    return import_model(model)


def build_graph(graph: ir.Model, builder: Builder) -> CompiledModel | StagedModel:
    """The program of a graph with static inputs, quantized where the builder does that.

    Raises:
        CompileError: it cannot be compiled.
    """
    return build(builder, graph_key(graph, builder), lambda: builder.prepared(graph))


def build(builder: Builder, key: str, model: Callable[[], ir.Model]) -> CompiledModel | StagedModel:
    """The program of `key`, or where a model needs several, those: from the cache, else compiled from `model()`.

    The inputs of the model have static types where they are tensors of numbers.

    Raises:
        OptionError: this machine could not load a program for the target.
        CompileError: the model cannot be compiled.
    """
    builder.check_target()
    if (known := builder.recall(key)) is not None:
        return known
    from .staging.build import build_model  # imports onnx, which a warm start does without

    with paused_collection():
        return build_model(builder, key, model())


def graph_key(graph: ir.Model, builder: Builder) -> str:
    """The cache key of a graph with static shapes; nothing where nothing is kept."""
    return "" if builder.cache is None else builder.key("graph", model_digest(graph))


def _specialized(model: SpecializedModel, inputs: tuple[tuple[object, ...], dict[str, object]] | None) -> SpecializedModel:
    """The model, compiled at once if example inputs are there."""
    if inputs is not None:
        model.specialize(*inputs[0], **inputs[1])
    return model


def open_cache(option: bool | str | os.PathLike[str]) -> ProgramCache | None:
    """The cache that an option names: True is $PREFUSE_CACHE or the platform's folder, a path is itself, False is none.

    Raises:
        OptionError: it is neither.
    """
    if option is False:
        return None
    if option is True:
        return _cache_at(user_folder())
    if not isinstance(option, (str, os.PathLike)):
        raise OptionError("cache", f"{option!r} is neither a folder nor True or False", "give the path of a folder")
    return _cache_at(Path(option))


@memoize
def _cache_at(folder: Path) -> ProgramCache:
    """One object a folder, so that each is warned of once."""
    return ProgramCache(folder)


def reporter(progress: bool | Progress | None) -> Progress | None:
    """What `progress` means to a user: True is a bar, a function itself.

    Raises:
        OptionError: it is neither.
    """
    if progress is None or progress is False:
        return None
    if progress is True:
        from .pipeline.progress import ConsoleProgress

        return ConsoleProgress()
    if not callable(progress):
        raise OptionError("progress", f"{progress!r} cannot be called", "give True or a function of (stage, fraction)")
    return progress


def _as_tuple(args: object) -> tuple[object, ...]:
    """Positional inputs: one tensor may stand for itself."""
    if args is None:
        return ()
    if is_tensor(args):
        return (args,)
    if isinstance(args, (tuple, list)):
        return tuple(args)
    raise OptionError("args", f"{type(args).__name__} given", "give a tuple of the positional inputs")


def _default_name(model: object) -> str:
    """What a program is called whose user does not say: the stem of the file, the name of the graph or of the class."""
    if isinstance(model, (str, os.PathLike)):
        return Path(model).stem or "model"
    graph = getattr(model, "graph", None)
    name = getattr(graph, "name", None) if graph is not None else type(model).__name__
    return name if isinstance(name, str) and name else "model"
