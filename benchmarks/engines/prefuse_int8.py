"""prefuse in 8 bits: by ranges of tensors with and without scales moved into weights, and by ranges of rows."""

from __future__ import annotations

from pathlib import Path

import prefuse
from prefuse.compiler.bits.error_budget import meet_budget
from prefuse.compiler.frontend.importer import import_model
from prefuse.compiler.programs.cache import compiler_version
from prefuse.compiler.programs.digest import combine
from prefuse.compiler.quantization.held_out import Split
from prefuse.compiler.quantization.quantizer import Settings, calibrate, uncalibrated
from prefuse.runtime.target import Target

from .calibration import calibration_batches, kept_path
from .engine import Outputs, Ready, Task


def prepare(task: Task) -> Ready:
    """See `Engine`."""
    return _prepare(task, "int8")


def prepare_plain(task: Task) -> Ready:
    """With the scales of activations where they are."""
    return _prepare(task, "int8-plain")


def prepare_rows(task: Task) -> Ready:
    """By ranges of rows; convolutions by those of tensors."""
    return _prepare(task, "int8-rows")


def prepare_within(task: Task) -> Ready:
    """By ranges of rows, without the products that damage most where the error would be beyond `task.max_error`."""
    return _prepare(task, f"int8-within-{task.max_error:g}")


def _prepare(task: Task, how: str) -> Ready:
    target = Target.parse("cpu", task.threads)
    made_by = combine(compiler_version(), repr(target.machine))[:8]  # the machine as fitted chooses kernels
    path = kept_path(task, how, ".prefuse", f"{task.threads}t", made_by)
    if not (is_kept := path.exists()):
        _compile(task, how, path, target)
    compiled = prefuse.load(path)
    inputs = tuple(task.inputs.values())

    def run() -> Outputs:
        outputs = compiled(*inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    return Ready(run, is_kept=is_kept)


def _compile(task: Task, how: str, path: Path, target: Target) -> None:
    model = import_model(task.onnx_path)
    has_convolutions = any(node.op_type == "Conv" for node in model.graph)
    by_rows, batches = how not in ("int8", "int8-plain"), calibration_batches(task)
    if by_rows and not has_convolutions:
        calibrated = uncalibrated(model, target)
    else:
        calibrated = calibrate(model, batches, target, Settings(is_smooth=how != "int8-plain"))
    rows = calibrated.uniform("int8-rows") if by_rows else {}
    static = calibrated.uniform() if not by_rows or has_convolutions else {}
    assignment = {**static, **rows}
    if how.startswith("int8-within"):
        quantized = meet_budget(calibrated, assignment, Split(batches).held_out(), task.max_error).model
    else:
        quantized = calibrated.place(assignment)
    beside = "bfloat16" if target.has("avx512_bf16") or target.has_tiles else "float32-fast"
    prefuse.compile(quantized, cache=False, precision=beside, threads=task.threads).save(path)
