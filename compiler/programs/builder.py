"""From a graph to a loaded program, through the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ...runtime.constants.shared import ConstantPool
from ...runtime.errors import OptionError
from ...runtime.executor import CompiledModel
from .cache import ProgramCache, build_uncached, compiler_version
from .digest import combine
from .options import Options

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...runtime.staged.staged_model import StagedModel

Progress = Callable[[str, float], None]  # the stage, and how much of the whole is done, from 0 to 1


class CompileModel(Protocol):
    """The driver: writes the program of a model with static shapes, which it changes, to `output`.

    `constants` has those that programs share ready, beside the file; without, they are in it.
    """

    def __call__(
        self,
        model: ir.Model,
        options: Options,
        *,
        name: str,
        output: Path,
        progress: Progress | None = None,
        constants: ConstantPool | None = None,
    ) -> None: ...


class BuildStages(Protocol):
    """Makes what a model becomes: one program, or where it needs several, those. `key` is its cache key.

    The inputs of the model have static types where they are tensors of numbers.

    Raises:
        CompileError: the model cannot be compiled.
    """

    def __call__(self, builder: Builder, key: str, model: Callable[[], ir.Model]) -> CompiledModel | StagedModel: ...


@dataclass(frozen=True, slots=True)
class Builder:
    """How the programs of one `compile` call are made. `cache` None keeps none of them.

    `quantize` makes of an imported model the one to compile; how, `options.quantization` says, so that keys depend on it.
    `is_for_shapes`: of a model whose shapes are all static, so that symbolic ones are bound before.
    """

    options: Options
    name: str
    compile_model: CompileModel
    cache: ProgramCache | None = None
    progress: Progress | None = None
    quantize: Callable[[ir.Model, Progress | None], ir.Model] | None = None
    is_for_shapes: bool = False

    def prepared(self, model: ir.Model) -> ir.Model:
        """The model to compile in the place of an imported one, which stays as it is.

        Raises:
            CompileError: it cannot be quantized as the options say.
        """
        return model if self.quantize is None else self.quantize(model, self.progress)

    def key(self, *content: str) -> str:
        """The cache key of a program that depends on `content` beside the options and the compiler."""
        return combine(compiler_version(), str(self.options), self.name, *content)

    def check_target(self) -> None:
        """Raise OptionError if this machine could not load a program for the target."""
        if missing := self.options.target.missing_features():
            what = f"this CPU lacks {', '.join(missing)}, which {self.options.target} needs"
            raise OptionError("target", what, 'compile on the machine that shall run the program, or for this one: "cpu"')

    def recall(self, key: str) -> CompiledModel | None:
        """The program of `key` if the cache has it."""
        program = None if self.cache is None else self.cache.find(key)
        return None if program is None else CompiledModel(program)

    def build_program(self, key: str, model: Callable[[], ir.Model]) -> CompiledModel:
        """The program of `key`: from the cache, else compiled from `model()`, whose shapes are static.

        Raises:
            CompileError: the model cannot be compiled.
        """
        pool = ConstantPool(is_temporary=self.cache is None)  # holds what is found until the program is loaded

        def write(output: Path) -> None:
            self.report("prepare", 0.0)
            graph = model().clone()  # the driver changes it, and where the cache fails this is called again
            self.compile_model(graph, self.options, name=self.name, output=output, progress=self.progress, constants=pool)

        program = build_uncached(write) if self.cache is None else self.cache.load(key, write)
        return CompiledModel(program)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Tell the user how it ends what is done inside."""
        try:
            yield
        except BaseException:
            self.report("failed", 1.0)
            raise
        self.report("done", 1.0)

    def report(self, stage: str, fraction: float) -> None:
        """Tell the user how far it has come."""
        if self.progress is not None:
            self.progress(stage, fraction)
