"""The programs that predictions are held against: their graphs, how they are compiled, and where they are kept between steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import onnx_ir as ir
from prefuse.compiler.api import drive
from prefuse.compiler.bits.mixed.formats import REST, candidates, placed, uniform
from prefuse.compiler.driver import PlannedModel, plan_model
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.predictor.predictor import Predictor
from prefuse.compiler.programs.options import MIXED, Options, parse_options
from prefuse.compiler.quantization.quantizer import calibrate
from prefuse.runtime.executor import CompiledModel
from prefuse.runtime.program_file import read_program

from ..engines.calibration import calibration_batches
from ..engines.engine import Task
from ..reference import make_task

PRECISIONS = ("float32", "float32-fast", "bfloat16", "int8", "mixed")
_QUANTIZED = ("int8", "mixed")


@dataclass(frozen=True, slots=True)
class Case:
    """A program: a model in a precision for so many threads. What is made of it lies in `folder`."""

    model: str
    precision: str
    threads: int
    folder: Path
    small: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}{'-small' * self.small}-{self.precision}-{self.threads}"

    @property
    def path(self) -> Path:
        """Of the program."""
        return self.folder / f"{self.name.replace('/', '-')}.prefuse"

    @property
    def options(self) -> Options:
        """What it is compiled with; those of integers have the float precision that a search would give them."""
        is_quantized = self.precision in _QUANTIZED
        given = {"threads": self.threads, "profile": True}
        options = parse_options("cpu", MIXED if is_quantized else self.precision, given, quantizes=is_quantized)
        return replace(options, quantization="")  # which `graph` sees to

    def task(self) -> Task:
        """The model as ONNX, with its inputs."""
        return make_task(self.model, self.small, 1, self.threads, self.folder)[0]

    def graph(self) -> ir.Model:
        """What is compiled. "mixed" is no search: units have their formats in rotation, so that neighbours differ as often as
        they can."""
        task, options = self.task(), self.options
        model = import_model(task.onnx_path)
        if self.precision not in _QUANTIZED:
            return model
        calibrated = calibrate(model, calibration_batches(task), options.target)
        choices = candidates(calibrated)
        formats = uniform(choices, "int8", options.precision)
        if self.precision == "mixed":
            turns = cycle(range(4))
            formats = {name: legal[next(turns) % len(legal)] for name, legal in choices.items()} | {REST: options.precision}
        return placed(calibrated, formats, options.precision)

    def compiled(self) -> CompiledModel:
        """The program, with counters; compiled unless an earlier run has done so."""
        if not self.path.exists():
            drive(self.graph(), self.options, name=self.name, output=self.path)
        return CompiledModel(read_program(self.path))

    def planned(self, predictor: Predictor) -> PlannedModel:
        """Its plan, made without compiling."""
        return plan_model(self.graph(), self.options, predictor.progress, predictor.kernels)
