"""prefuse: a graph compiler for neural networks.

    net = prefuse.compile(model)      # an nn.Module, an ONNX path, ModelProto, onnx_ir.Model or torch ExportedProgram
    y = net(x)                        # torch in, torch out; numpy in, numpy out
    net.save("model.prefuse")
    net = prefuse.load("model.prefuse")

Importing it loads neither torch nor TVM; they load when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .runtime.errors import (
    ArenaMemoryError,
    CompileError,
    DeviceError,
    InputError,
    InvalidModelError,
    MemoryLimitError,
    OptionError,
    ProgramFileError,
    ScratchFileError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from .compiler.predictor.prediction import Prediction
    from .compiler.programs.specialize import SpecializedModel
    from .compiler.tuning.tuner import Tuned
    from .runtime.executor import CompiledModel
    from .runtime.generation.generator import Generator
    from .runtime.loading.load import Loaded
    from .runtime.staged.staged_model import StagedModel

__version__ = "0.1.0"
__all__ = [
    "ArenaMemoryError",
    "CompileError",
    "DeviceError",
    "InputError",
    "InvalidModelError",
    "MemoryLimitError",
    "OptionError",
    "ProgramFileError",
    "ScratchFileError",
    "UnsupportedModelError",
    "__version__",
    "compile",
    "compile_generation",
    "load",
    "load_generator",
    "predict",
    "tune",
]


def compile(
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
    progress: bool | Callable[[str, float], None] | None = None,
    **options: object,
) -> CompiledModel | StagedModel | SpecializedModel:
    """Compile a model into something that can be called like it.

    Args:
        model: an `nn.Module`, compiled as in evaluation mode at its first call, once per input signature, or at once if `args`
            is given; an ONNX file, its bytes, a `ModelProto`, an `onnx_ir.Model` or an `ExportedProgram`, compiled at once, or
            once per input shape where it has symbolic dimensions. The weights are read now: later changes do not count.
        args, kwargs: example positional and keyword inputs.
        target: "cpu" (this machine), "cpu:avx2" or so; "cuda" (this GPU), "cuda:sm_90", "rocm:gfx942"; "cuda-sim", "rocm-sim".
        precision: "float32", whose error against float64 is at most twice that of ONNX Runtime in float32; "float32-fast", at
            most 2e-5, relative to the norm of each output; "bfloat16" and "float16", in which products read their operands;
            "int8", "int8-rows": ranges of tensors by `calibration`, or of rows (docs/quantization.md); "mixed" (docs/bits.md).
        calibration: batches of inputs like those of later calls: an iterable of mappings by name, tuples, or arrays, or the path
            of an .npz file or folder. Without it "int8" and "mixed" assume random ones; "int8-rows" leaves convolutions float.
        states: {output: input}: what sessions keep from call to call (docs/memory.md), as buffers that a module changes.
        name: what reports call the program.
        cache: whether compiled programs are kept on disk: True is $PREFUSE_CACHE or the platform's folder for caches.
        progress: True shows a bar; a function is called with the stage and the fraction done.
        options: `threads` (int), of one call; `pipeline` (str), the passes to run instead of the default ones; `random` (bool),
            whether the model may draw random numbers: without it, such a model is refused; `profile` (bool), whether the program
            shall have the counters that `profile` on the result needs; `tuning` (bool or path), the file of `tune` whose findings
            are used: True is the default one, False uses none at all; `weights` ("int8" or "int4"), what large float32 weights of
            products are stored as; `memory_limit` ("25%"); `dims` (docs/shapes.md); `max_error`, `metric`, `objective`, `bits`.

    Returns:
        A callable: inputs in order or by name, NumPy arrays or torch tensors. An `nn.Module` gives its own output structure,
        everything else one array or a tuple of them, where a sequence is a list of arrays and an empty optional None. A model
        whose control flow or shapes depend on the data of a run is compiled in stages; `report()` lists them.

    Raises:
        CompileError: the model, an option or an input cannot be taken; it says where, what, and what to do.
    """
    from .compiler.api import compile_model

    return compile_model(
        model,
        args,
        kwargs,
        target=target,
        precision=precision,
        calibration=calibration,
        states=states,
        name=name,
        cache=cache,
        progress=progress,
        options=options,
    )


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
    progress: bool | Callable[[str, float], None] | None = None,
    **options: object,
) -> Generator:
    """Compile a language model into something that continues texts (docs/generation.md).

    Args:
        model: a causal language model of transformers, such as `GPT2LMHeadModel`, with keys and values or recurrent states; or an
            ONNX decoder (path, bytes, `ModelProto`) with inputs input_ids, attention_mask, position_ids and past_key_values.N.key
            and .value, and outputs logits and present.N.key and .value. The weights are read now: later changes do not count.
        max_tokens: that a sequence may have, prompt and new ones; memory for their keys and values is taken by each session.
        prefill: how many tokens of a prompt are read at once: a program each. A rest is filled up to the next of them,
            or, where a model has recurrent states, read one by one.
        batch: sequences of a call, of any lengths each.
        target: "cpu" (this machine), or a level such as "cpu:avx2".
        precision: "float32", "float32-fast", "bfloat16" or "float16", as for `compile`.
        name, cache, progress: as for `compile`.
        options: `threads`, `weights` ("int8" or "int4"), `pipeline`, `profile` and `tuning`, as for `compile`.

    Returns:
        A generator: `generate(tokens, n)` gives n new tokens of each sequence, `session()` a text that grows from call to call.

    Raises:
        CompileError: the model or an option cannot be taken; it says where, what, and what to do.
    """
    from .compiler.generation.api import compile_generation

    return compile_generation(
        model,
        max_tokens=max_tokens,
        prefill=prefill,
        batch=batch,
        target=target,
        precision=precision,
        name=name,
        cache=cache,
        progress=progress,
        options=options,
    )


def tune(
    model: object,
    *,
    seconds: float = 60.0,
    target: str = "cpu",
    precision: str = "float32",
    database: str | os.PathLike[str] | None = None,
    again: bool = False,
    progress: bool | Callable[[str, float], None] | None = None,
    **options: object,
) -> tuple[Tuned, ...]:
    """Measure alternatives for the kernels of a model on this machine; later compilations use what is faster.

    Findings are kept as soon as they are there, for the kernels that take longest first: called again, it goes on where it was.

    Args:
        model: an ONNX file, its bytes, a `ModelProto`, an `onnx_ir.Model` or a `torch.export.ExportedProgram`, of static shapes
            and without control flow that needs several programs.
        seconds: how long to measure.
        target: the one to compile for later, as for `compile`, on this machine's CPU.
        precision: likewise.
        database: the file of findings: `tuning` of `compile`. None is one in the folder of the cache, which is used by default.
        again: measure also what has been measured before.
        progress: as for `compile`.
        options: `threads` and `pipeline`, as for `compile`.

    Returns:
        What is known now of the kernels that can be computed in several ways, those found now first.

    Raises:
        CompileError: the model or an option cannot be taken, or the database cannot be read or written.
    """
    from .compiler.tuning.call import tune

    return tune(
        model,
        seconds=seconds,
        target=target,
        precision=precision,
        database=database,
        again=again,
        progress=progress,
        options=options,
    )


def predict(
    model: object,
    *,
    target: str = "cpu",
    precision: str = "float32",
    measure: bool = False,
    again: bool = False,
    database: str | os.PathLike[str] | None = None,
    progress: bool | Callable[[str, float], None] | None = None,
    **options: object,
) -> Prediction:
    """Say how long a call of a model will take, and what memory, without compiling it.

    A program's time is that of its kernels, each measured alone on this machine, or where nobody has, estimated; the result says
    which is which. Its memory is exact: the planner itself places all bytes.

    Args:
        model: an ONNX file, its bytes, a `ModelProto`, an `onnx_ir.Model` or a `torch.export.ExportedProgram`, of static shapes
            and without control flow that needs several programs.
        target: as for `compile`. One that names another machine, as "cpu:avx512,machine=zen4", is estimated.
        precision: as for `compile`.
        measure: whether to measure the kernels that were not measured before, about a second each; all later predictions know
            them.
        again: whether to measure those, too, that were measured before; the shorter times count.
        database: the file of what was measured. None is one in the folder of the cache.
        progress: as for `compile`.
        options: `threads`, `pipeline`, `random`, `tuning` and `memory_limit`, as for `compile`.

    Returns:
        The time of a call among many in microseconds, its memory, and its steps with the source of each time.

    Raises:
        CompileError: the model or an option cannot be taken, or the database cannot be written.
    """
    from .compiler.predictor.call import predict

    return predict(
        model,
        target=target,
        precision=precision,
        measure=measure,
        again=again,
        database=database,
        progress=progress,
        options=options,
    )


def load(path: str | os.PathLike[str]) -> Loaded:
    """Load a `.prefuse` file, without torch or a compiler.

    It holds native code that runs with your rights: load only files that you trust, and exchange ONNX with strangers.

    Args:
        path: a file that `save` or `prefuse compile` has written.

    Raises:
        CompileError: no such file, a corrupt one, or one for another CPU or version; or a package that programs need is missing.
    """
    try:
        from .runtime.loading.load import load
    except ModuleNotFoundError as error:
        what = f"the package {error.name} is not installed"
        raise CompileError("load", what, "programs need numpy, ml_dtypes and apache-tvm, for TVM's runtime library") from error
    return load(path)


def load_generator(path: str | os.PathLike[str]) -> Generator:
    """Load a file that `save` of a generator has written, without torch or a compiler; what `load` says holds for it, too.

    Raises:
        CompileError: no such file, a corrupt one, or one for another CPU or version.
    """
    from .runtime.generation.generator import load_generator

    return load_generator(path)
