"""From a graph to a loaded program, through the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from ..runtime.executor import CompiledModel
from ..runtime.precision import Precision
from ..runtime.target import Target
from .cache import ProgramCache, build_uncached, compiler_version
from .digest import combine
from .options import Options
from .tuning.database import Configurations

if TYPE_CHECKING:
    import onnx_ir as ir

    from ..runtime.staged import StagedModel

Progress = Callable[[str, float], None]  # the stage, and how much of the whole is done, from 0 to 1


class CompileModel(Protocol):
    """The driver: writes the program of a model with static shapes, which it changes, to `output`."""

    def __call__(
        self,
        model: ir.Model,
        target: Target,
        *,
        precision: Precision = "float32",
        pipeline: str | None = None,
        name: str,
        output: Path,
        progress: Progress | None = None,
        profile: bool = False,
        configurations: Configurations = MappingProxyType({}),
    ) -> None: ...


def drive(
    model: ir.Model,
    target: Target,
    *,
    precision: Precision = "float32",
    pipeline: str | None = None,
    name: str,
    output: Path,
    progress: Progress | None = None,
    profile: bool = False,
    configurations: Configurations = MappingProxyType({}),
) -> None:
    """The real driver, imported at the first compilation: it needs TVM, which takes seconds to import."""
    from .driver import compile_model

    compile_model(
        model,
        target,
        precision=precision,
        pipeline=pipeline,
        name=name,
        output=output,
        progress=progress,
        profile=profile,
        configurations=configurations,
    )


@dataclass(frozen=True, slots=True)
class Builder:
    """How the programs of one `compile` call are made. `cache` None keeps none of them."""

    options: Options
    name: str
    cache: ProgramCache | None = None
    progress: Progress | None = None
    compile_model: CompileModel = drive

    def key(self, *content: str) -> str:
        """The cache key of a program that depends on `content` beside the options and the compiler."""
        return combine(compiler_version(), str(self.options), self.name, *content)

    def recall(self, key: str) -> CompiledModel | None:
        """The program of `key` if the cache has it."""
        program = None if self.cache is None else self.cache.find(key)
        return None if program is None else CompiledModel(program)

    def build(self, key: str, model: Callable[[], ir.Model]) -> CompiledModel | StagedModel:
        """The program of `key`, or where a model needs several, those: from the cache, else compiled from `model()`.

        The inputs of the model have static types where they are tensors of numbers.

        Raises:
            CompileError: the model cannot be compiled.
        """
        if (known := self.recall(key)) is not None:
            return known
        from .ir.randomness import check_repeatable  # imports onnx, which a warm start does without
        from .staging.build import build_model

        graph = model()
        if not self.options.random:
            check_repeatable(graph)
        return build_model(self, key, graph)

    def build_program(self, key: str, model: Callable[[], ir.Model]) -> CompiledModel:
        """The program of `key`: from the cache, else compiled from `model()`, whose shapes are static.

        Raises:
            CompileError: the model cannot be compiled.
        """

        def write(output: Path) -> None:
            self.report("prepare", 0.0)
            options = self.options
            graph = model().clone()  # the driver changes it, and where the cache fails this is called again
            self.compile_model(
                graph,
                options.target,
                precision=options.precision,
                pipeline=options.pipeline,
                name=self.name,
                output=output,
                progress=self.progress,
                profile=options.profile,
                configurations=options.configurations,
            )

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
