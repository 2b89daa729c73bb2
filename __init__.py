"""prefuse: a graph compiler for neural networks.

    net = prefuse.compile(model)      # an nn.Module, an ONNX path, ModelProto, onnx_ir.Model or torch ExportedProgram
    y = net(x)                        # torch in, torch out; numpy in, numpy out
    net.save("model.prefuse")
    net = prefuse.load("model.prefuse")

Importing it loads neither torch nor TVM; they load when they are needed. Pages named here, as docs/api.md, are in the repository.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
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
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from .compiler.predictor.prediction import Prediction
    from .compiler.programs.specialize import SpecializedModel
    from .compiler.tuning.tuner import Tuned
    from .runtime.executor import CompiledModel
    from .runtime.generation.generator import Generator
    from .runtime.generation.session import Session
    from .runtime.loading.load import Loaded
    from .runtime.program_set.program_set import ProgramSet
    from .runtime.staged.staged_model import StagedModel

__version__ = "0.1.0"
__all__ = [
    "ArenaMemoryError",
    "CompileError",
    "CompiledModel",
    "DeviceError",
    "Generator",
    "InputError",
    "InvalidModelError",
    "MemoryLimitError",
    "OptionError",
    "ProgramFileError",
    "ProgramSet",
    "ScratchFileError",
    "Session",
    "SpecializedModel",
    "StagedModel",
    "UnsupportedModelError",
    "__version__",
    "compile",
    "compile_generation",
    "load",
    "load_generator",
    "predict",
    "tune",
]
# The types of results, by the module that has each: imported when they are asked for.
_RESULTS = {
    "CompiledModel": ".runtime.executor",
    "Generator": ".runtime.generation.generator",
    "ProgramSet": ".runtime.program_set.program_set",
    "Session": ".runtime.generation.session",
    "SpecializedModel": ".compiler.programs.specialize",
    "StagedModel": ".runtime.staged.staged_model",
}


if not TYPE_CHECKING:  # to which any name would be known

    def __getattr__(name: str) -> object:
        if name in _RESULTS:
            return getattr(import_module(_RESULTS[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    """Compile a model into something that can be called like it; docs/api.md says more of options, errors and results.

    Args:
        model: an `nn.Module`, compiled as in evaluation mode at its first call, once per input signature, or at once if `args`
            is given; an ONNX file, its bytes, a `ModelProto`, an `onnx_ir.Model` or an `ExportedProgram`, compiled at once, or
            once per input shape where it has symbolic dimensions. If weights change then, compile it again (docs/shapes.md).
        args, kwargs: example positional and keyword inputs.
        target: "cpu" (this machine), "cpu:avx2" or so; "cuda" (this GPU), "cuda:sm_90", "rocm:gfx942"; "cuda-sim", "rocm-sim".
        precision: "float32", whose error against float64 is at most twice that of ONNX Runtime in float32; "float32-fast", about
            2e-5 of an output's norm (docs/semantics.md); "bfloat16", "float16", in which products read their operands; "int8",
            "int8-rows", by ranges of tensors, or of rows (docs/quantization.md); "mixed". Which to choose: docs/performance.md.
        calibration: batches of inputs like those of later calls: an iterable of mappings by name, tuples, or arrays, or the path
            of an .npz file or folder. Without it "int8" and "mixed" assume random ones; "int8-rows" leaves convolutions float.
        states: {output: input}: what sessions keep from call to call (docs/memory.md), as buffers that a module changes.
        name: what reports call the program.
        cache: whether compiled programs are kept on disk: True is $PREFUSE_CACHE or the platform's folder for caches.
        progress: True shows a bar; a function is called with the stage and the fraction done.
        options: `threads` (int) of a call, also of a file that is loaded; left out: all cores. `profile` (bool), counters: False.
            `weights` ("int8", "int4"), of products from 16,384 elements on: as they come. `pipeline` (str), passes: "default".
            `memory_limit` (bytes, "600MiB", "25%"), of weights and activations of one caller: none.
            `dims` ({"N": (1, 64)}), a few programs for ranges of sizes (docs/shapes.md): a program for each size.
            `random` (bool), may draw random numbers: False. `tuning` (bool or path), findings of `tune`: True, the default file.
            Of "mixed": `max_error` (float): 1e-2. `metric`: "relative". `objective`: "latency". `bits` (a plan): none.

    Returns:
        A callable: inputs in order or by name, NumPy arrays or torch tensors. An `nn.Module` gives its own output structure,
        everything else one array or a tuple of them, where a sequence is a list of arrays and an empty optional None.

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
            and .value, and outputs logits and present.N.key and .value. The weights are read now: later changes do not count. So
            are the tokens that end a text, of a module's generation_config.
        max_tokens: that a sequence may have, prompt and new ones; memory for their keys and values is taken by each session,
            on a CPU page by page as its text grows where that is more than 32 MiB (docs/generation.md).
        prefill: how many tokens of a prompt may be read at once: a program each. The last piece of a prompt is filled up, or,
            where a model has recurrent states, read one by one.
        batch: sequences of a call, of any lengths each.
        target: as for `compile`.
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
        precision: "float32", "float32-fast", "bfloat16" or "float16"; to tune a quantized model, quantize it before (`prefuse
            quantize`).
        database: the file of findings: `tuning` of `compile`. None is one in the folder of the cache, which is used by default.
        again: measure also what has been measured before.
        progress: as for `compile`.
        options: `threads`, `weights` and `pipeline`, as for `compile`.

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
        precision: likewise "float32", "float32-fast", "bfloat16" or "float16"; quantize a model before, or use `prefuse predict`.
        measure: whether to measure the kernels that were not measured before, about a second each; all later predictions know
            them.
        again: whether to measure those, too, that were measured before; the shorter times count.
        database: the file of what was measured. None is one in the folder of the cache.
        progress: as for `compile`.
        options: `threads`, `weights`, `pipeline`, `random`, `tuning` and `memory_limit`, as for `compile`.

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

    It holds native code that runs with your rights: load only files that you trust, and exchange ONNX with strangers. It runs
    where its target's features are, in as many threads as it was compiled for, with the very version of apache-tvm that made it
    (docs/deployment.md). Weights are read from the file as they are needed: put another in its place by a rename, as `save` does.

    Args:
        path: a file that `save` or `prefuse compile` has written.

    Raises:
        CompileError: no such file, a corrupt one, or one for another CPU or version; or a package that programs need is missing.
    """
    with _naming_packages():
        from .runtime.loading.load import load
    return load(path)


def load_generator(path: str | os.PathLike[str]) -> Generator:
    """Load a file that `save` of a generator has written, without torch or a compiler; what `load` says holds for it, too.

    Raises:
        CompileError: as for `load`.
    """
    with _naming_packages():
        from .runtime.generation.generator import load_generator
    return load_generator(path)


@contextmanager
def _naming_packages() -> Iterator[None]:
    """Raise CompileError where what is imported inside needs a package that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        what = f"the package {error.name} is not installed"
        raise CompileError("load", what, "programs need numpy, ml_dtypes and apache-tvm, for TVM's runtime library") from error
