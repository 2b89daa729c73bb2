"""What the verbs share: options, models with concrete shapes, inputs, and how results are shown."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from ...runtime.errors import InputError, InvalidModelError, OptionError
from ...runtime.hardware import machine as machines
from ...runtime.precision import PRECISIONS, WEIGHTS
from ..api import build_graph, compile_ranges, drive, open_cache, quantizing
from ..pipeline.progress import ConsoleProgress
from ..programs.builder import Builder
from ..programs.options import MIXED, QUANTIZED, Options, parse_options

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

    from ...runtime.executor import CompiledModel
    from ...runtime.loading.load import Loaded
    from ...runtime.plan import Port
    from ...runtime.staged.staged import StagedPort
    from ...runtime.staged.staged_model import StagedModel
    from ..debugging.compilation import Compilation
    from ..programs.symbolic import SymbolicModel

_FILE_COLUMNS = 200  # of tables that no terminal shows

Shapes = dict[str, tuple[int, ...]]
Dims = dict[str, tuple[int, ...]]  # least, greatest and multiple of sizes by the name of a dimension


def _parse_shapes(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> Shapes:
    shapes: Shapes = {}
    for text in texts:
        name, _, sizes = text.rpartition("=")
        parts = sizes.split(",") if sizes else []
        if not name or not all(part.isdecimal() for part in parts):
            raise click.BadParameter(f"{text!r} is not NAME=SIZE,SIZE,...")
        shapes[name] = tuple(map(int, parts))
    return shapes


def _parse_dims(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> Dims:
    dims: Dims = {}
    for text in texts:
        name, _, numbers = text.rpartition("=")
        parts = numbers.split(":")
        if not name or not 1 <= len(parts) <= 3 or not all(part.isdecimal() for part in parts):
            raise click.BadParameter(f"{text!r} is not NAME=LEAST:GREATEST or NAME=LEAST:GREATEST:MULTIPLE")
        dims[name] = (int(parts[0]), int(parts[-1])) if len(parts) < 3 else tuple(map(int, parts))
    return dims


MODEL = click.argument("model", type=click.Path(path_type=Path))
INPUTS = click.option(
    "--inputs", "inputs_path", type=click.Path(path_type=Path), help="An .npz file with one array for each input."
)
SEED = click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0), help="Of the random inputs, where none are given."
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
SHAPES = click.option(
    "--shape", "shapes", multiple=True, callback=_parse_shapes, metavar="NAME=SIZES",
    help="Concrete shape of an input with symbolic dimensions, such as x=1,3,224,224. May be repeated.",
)  # fmt: skip


DIMS = click.option(
    "--dims", "dims", multiple=True, callback=_parse_dims, metavar="NAME=LEAST:GREATEST",
    help="Sizes that a symbolic dimension may have, such as T=1:512, or T=8:512:8 for multiples of 8: few programs serve them "
    "all. May be repeated.",
)  # fmt: skip


@dataclass(frozen=True)
class CompileArguments:
    """What the command line says of compiling."""

    target: str = "cpu"
    precision: str = "float32"
    threads: int | None = None
    random: bool = False
    pipeline: str | None = None
    no_cache: bool = False
    database: Path | None = None
    no_tuning: bool = False
    weights: str | None = None
    calibration: Path | None = None
    memory_limit: str | None = None
    bits: Path | None = None

    def options(self, *, profile: bool = False) -> Options:
        """Them as the compiler's options, for a program with counters if `profile`.

        Raises:
            OptionError: one is not what it should be.
        """
        extra = {
            "threads": self.threads,
            "random": self.random,
            "pipeline": self.pipeline,
            "profile": profile,
            "tuning": False if self.no_tuning else self.database,
            "weights": self.weights,
            "memory_limit": self.memory_limit,
        }
        given = {key: value for key, value in extra.items() if value is not None}
        if self.bits is not None and self.precision != "float32":
            raise OptionError("--bits", f"given beside --precision {self.precision}", "leave out one of them: a plan has formats")
        precision = self.precision if self.bits is None else MIXED
        options = parse_options(self.target, precision, given, quantizes=True)
        if self.calibration is not None and not options.quantization:
            what = f"data given for {self.precision}, which needs none"
            raise OptionError("--calibration", what, f"use --precision {' or '.join(QUANTIZED)}, or leave it out")
        return options

    def quantizing(self, builder: Builder) -> Builder:
        """A builder that quantizes as they say, or the same one where they do not."""
        if not builder.options.quantization:
            return builder
        return quantizing(builder, self.calibration, {} if self.bits is None else {"bits": self.bits})

    @property
    def tolerance(self) -> float:
        """The error, relative to the norm of an output, within which results agree with those of a float32 model."""
        return _COARSE if self.bits or self.weights else _TOLERANCES.get(self.precision, _COARSE)


TARGET = click.option(
    "--target",
    default="cpu",
    show_default=True,
    help="What to compile for: cpu (this machine), or a level that it has of cpu:avx2, cpu:avxvnni, cpu:avx512, cpu:avx512vnni, "
    "cpu:avx512bf16, cpu:amx; behind these ,threads=N and ,machine=NAME, the processor by which costs are estimated "
    f"({', '.join(machines.names())}); cuda, cuda:sm_90, rocm:gfx942; or GPUs that are simulated: cuda-sim, rocm-sim.",
)
_COARSE = 0.1  # for 8 bits and fewer
_TOLERANCES: dict[str, float] = {"float32": 1e-4, "float32-fast": 1e-3, "bfloat16": 3e-2, "float16": 1e-2}
TOLERANCE_TEXT = ", ".join(f"{error:g} for {precision}" for precision, error in _TOLERANCES.items()) + f", else {_COARSE:g}"
_EXACTNESS = (
    "How exactly to compute: float32-fast allows errors of about 2e-5 relative to the norm of an output; bfloat16 and float16 "
    "store what matrix products read in that type"
)
PRECISION = click.option(
    "--precision", type=click.Choice(PRECISIONS), default="float32", show_default=True, help=f"{_EXACTNESS}."
)
_ANY_PRECISION = click.option(
    "--precision",
    type=click.Choice((*PRECISIONS, *QUANTIZED)),
    default="float32",
    show_default=True,
    help=f"{_EXACTNESS}; int8 multiplies 8-bit numbers by ranges of --calibration, int8-rows by those of each row.",
)
_PIPELINE = click.option(
    "--pipeline",
    help="The passes to run, such as canonicalize,fuse-epilogue{max-ops=4}; or default, or no-fusion. See prefuse opt --list.",
)
DATABASE = click.option(
    "--database",
    type=click.Path(path_type=Path),
    help="File with results of prefuse tune; one in the cache's folder if left out.",
)
STORED_WEIGHTS = click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    help="Store float weights of matrix products, from 16,384 elements on, as int8 by columns, or int4 by blocks of 32 along k.",
)
THREADS = click.option("--threads", type=int, help="Threads of one call; all cores of this process if left out.")
_COMPILE_OPTIONS = (
    TARGET,
    _ANY_PRECISION,
    click.option(
        "--calibration",
        type=click.Path(path_type=Path),
        help="For int8, --bits and the convolutions of int8-rows, inputs like those that the model will see: an .npz file with "
        "an array for each input, of its shape or with one dimension more in front, which counts batches; or a folder of such "
        "files.",
    ),
    click.option(
        "--bits",
        type=click.Path(path_type=Path),
        help="A plan that prefuse bits has written: the format of each product. In place of --precision.",
    ),
    THREADS,
    click.option("--random", is_flag=True, help="Take a model that draws random numbers, whose calls differ."),
    _PIPELINE,
    click.option("--no-cache", is_flag=True, help="Neither use nor fill the cache of compiled programs."),
    DATABASE,
    STORED_WEIGHTS,
    click.option(
        "--memory-limit",
        metavar="SIZE",
        help="What weights and activations may take together, such as 600MiB, or 25% of what they take without a limit: weights "
        "beyond it stay in the program's file and are copied beside the kernels that run before they are read.",
    ),
    click.option("--no-tuning", is_flag=True, help="Use no results of prefuse tune, not even those that come with prefuse."),
)


def with_compile_arguments(function: Callable[..., None]) -> Callable[..., None]:
    """Give a verb the options of compiling, all in its argument `arguments`."""

    @wraps(function)
    def command(**given: Any) -> None:
        arguments = CompileArguments(**{field.name: given.pop(field.name) for field in fields(CompileArguments)})
        function(**given, arguments=arguments)

    for option in reversed(_COMPILE_OPTIONS):
        command = option(command)
    return command


def concrete_model(path: Path, shapes: Shapes, *, keeps_groups: bool = False) -> ir.Model:
    """The graph of an ONNX file with all its shapes known; `keeps_groups` as of `normalize`.

    Raises:
        CompileError: it cannot be read, or an input keeps a symbolic dimension.
    """
    from ..frontend.dimensions import bind_dimensions, is_dynamic
    from ..frontend.importer import import_model

    model = import_model(path, keeps_groups=keeps_groups)
    if shapes or is_dynamic(model):
        try:
            return bind_dimensions(model, shapes)
        except InputError as error:
            raise InputError(error.where, error.what, f"{error.fix}: --shape NAME=SIZE,SIZE,...") from None
    return model


def with_trace_arguments(function: Callable[..., None]) -> Callable[..., None]:
    """Give a verb that follows the passes the options `target`, `precision` and `pipeline`."""
    for option in (_PIPELINE, PRECISION, TARGET):
        function = option(function)
    return function


def trace_file(path: Path, shapes: Shapes, target: str, precision: str, pipeline: str | None) -> Compilation:
    """A compilation of an ONNX file that keeps what its passes did. Raises CompileError."""
    from ..debugging.compilation import trace_compilation

    options = parse_options(target, precision, {} if pipeline is None else {"pipeline": pipeline})
    model = concrete_model(path, shapes)
    return trace_compilation(model, options.target, options.pipeline, options.precision, options.configurations)


def compile_graph(
    graph: ir.Model, name: str, arguments: CompileArguments, *, profile: bool = False
) -> CompiledModel | StagedModel:
    """Compile a graph as the command line asks, with a progress bar."""
    builder = Builder(arguments.options(profile=profile), name, drive, open_cache(not arguments.no_cache), ConsoleProgress())
    with builder.reporting():
        return build_graph(graph, arguments.quantizing(builder))


def quantized(graph: ir.Model, name: str, arguments: CompileArguments) -> ir.Model:
    """The graph that is compiled in the place of one with static shapes: quantized, where the command line asks for that."""
    builder = Builder(arguments.options(), name, drive, progress=ConsoleProgress())
    if not builder.options.quantization:
        return graph
    with builder.reporting():
        return arguments.quantizing(builder).prepared(graph)


def warn_of_ignored(path: Path, arguments: CompileArguments, shapes: Shapes) -> None:
    """Say which options do nothing to a program that is compiled already."""
    names = [field.name for field in fields(arguments) if getattr(arguments, field.name) != field.default]
    names += ["shape"] if shapes else []
    if names:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in names)
        click.echo(f"warning: {path} is compiled already: {options} changes nothing; give the ONNX file", err=True)


def compile_dims(path: Path, dims: Dims, name: str, arguments: CompileArguments, *, profile: bool = False) -> SymbolicModel:
    """Compile an ONNX file for ranges of sizes as the command line asks, with a progress bar."""
    builder = Builder(arguments.options(profile=profile), name, drive, open_cache(not arguments.no_cache), ConsoleProgress())
    return compile_ranges(path, None, dims, builder)


def read_inputs(path: Path, types: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, by the names of the model's inputs, whose types are known or "".

    Raises:
        InputError: the file cannot be read, or has not exactly these names.
    """
    from ..programs.array_files import read_arrays, typed

    arrays = read_arrays(path)
    if arrays.keys() != types.keys():
        found = ", ".join(arrays) or "nothing"
        raise InputError(str(path), f"holds {found}", f"write one array for each input of the model: {', '.join(types)}")
    return {name: typed(array, types[name]) if types[name] else array for name, array in arrays.items()}


def input_types(net: Loaded) -> dict[str, str]:
    """The element types of a program's inputs by their names; "" where it is not known."""
    ports: Sequence[Port | StagedPort] = net.inputs
    return {port.name: "" if port.type is None else port.type.dtype for port in ports}


def random_arrays(net: Loaded, graph: ir.Model | None, seed: int) -> dict[str, np.ndarray]:
    """Normal floats; integers that are safe as indices: those that the graph allows, or 0 where only the program is there."""
    import numpy as np

    from ..engines.random_inputs import not_made_up, random_inputs

    if graph is not None:
        return random_inputs(graph, seed)
    generator = np.random.default_rng(seed)
    arrays = {}
    ports: Sequence[Port | StagedPort] = net.inputs
    for port in ports:
        if port.type is None:
            raise not_made_up(port.name, port.type_text)
        dtype = np.dtype(port.type.dtype)
        is_float = dtype.kind not in "biu"
        arrays[port.name] = generator.normal(size=port.type.shape).astype(dtype) if is_float else np.zeros(port.type.shape, dtype)
    return arrays


def show(as_json: bool, data: Mapping[str, object], *parts: str | Table) -> None:
    """Print `data` as JSON, or the parts for people."""
    if as_json:
        click.echo(json.dumps(_json_value(data), indent=2, allow_nan=False))
        return
    width = None if sys.stdout.isatty() else _FILE_COLUMNS
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False, width=width)
    for part in parts:
        console.print(part)


def _json_value(value: object) -> object:
    """The value with null in the place of infinities and NaN, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _json_value(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A table for people: the first column is text, numbers stand to the right."""
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        result.add_row(*map(str, row))
    return result


def size_text(size_bytes: int) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 10_000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def is_program(path: Path) -> bool:
    """Whether a path names a compiled program rather than a model."""
    return path.suffix == ".prefuse"


def refuse_program(path: Path, verb: str) -> None:
    """Raise InvalidModelError if `path` is a compiled program: `verb` needs the model that it was made from."""
    if is_program(path):
        raise InvalidModelError(str(path), f"is a compiled program; {verb} needs a model", "give the ONNX file")
