"""Compile what is carried to a machine with a GPU: `python -m benchmarks.gpu.prepare`, where TVM and nvcc are.

Small models come with weights, inputs and what ONNX would have them give; kernels of each template and tile with weights by a
formula; full-size models without weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from ... import compile as compile_program
from ...compiler.programs.specialize import SpecializedModel
from ...examples.models import MODELS
from ...runtime.executor import CompiledModel
from ...runtime.program_file import read_program
from .checks import Check
from .prepare_checks import checks, prepare_checks
from .stripped import strip_program

FULL = ("resnet50", "bert-base", "gpt2", "vit-b16")
BATCHES = (1, 8, 64)
MOST_BYTES = 64 << 20  # that may be carried
_PRECISIONS = ("float32", "bfloat16")


def prepare(
    folder: Path,
    target: str,
    small: Sequence[str],
    full: Sequence[str],
    batches: Sequence[int],
    precisions: Sequence[str],
    wanted_checks: Sequence[Check] = (),
) -> int:
    """Write `small/`, `checks/` and `full/` into a folder; returns the bytes of all."""
    prepare_checks(folder, target, wanted_checks)
    for name in ("small", "full"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in small:
        module, inputs = MODELS[name].build(small=True)
        with torch.no_grad():
            wanted = module.double()(*(x.double() if x.is_floating_point() else x for x in inputs))
        module.float()
        results = wanted if isinstance(wanted, tuple) else (wanted,)
        given: dict[str, Any] = {f"input{i}": x.numpy() for i, x in enumerate(inputs)}
        given |= {f"result{i}": y.numpy() for i, y in enumerate(results)}
        np.savez(folder / "small" / f"{name}.npz", **given)
        for precision in precisions:
            compiled(name, inputs, module, target, precision).save(folder / "small" / f"{name}-{precision}.prefuse")
    for name in full:
        module, inputs = MODELS[name].build()
        for batch in batches:
            repeated = tuple(x.repeat(batch, *(1 for _ in x.shape[1:])) for x in inputs)
            for precision in precisions:
                print(f"{name} {precision} batch {batch}", flush=True)
                with TemporaryDirectory() as temporary:
                    path = Path(temporary, "whole.prefuse")
                    compiled(name, repeated, module, target, precision).save(path)
                    strip_program(read_program(path), folder / "full" / f"{name}-{precision}-b{batch}.zip")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def compiled(name: str, inputs: tuple[torch.Tensor, ...], module: torch.nn.Module, target: str, precision: str) -> CompiledModel:
    """The program of an example model for inputs of these shapes, with what profiles need."""
    how: dict[str, Any] = {"target": target, "precision": precision, "name": name, "profile": True, "cache": False}
    specialized = compile_program(module, inputs, **how)
    assert isinstance(specialized, SpecializedModel)
    net = specialized.specialize(*inputs)
    assert isinstance(net, CompiledModel)
    return net


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.prepare", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("build/gpu"))
    parser.add_argument("--target", default="cuda:sm_90")
    options = parser.parse_args()
    size_bytes = prepare(options.folder, options.target, tuple(MODELS), FULL, BATCHES, _PRECISIONS, list(checks(options.target)))
    print(f"{options.folder}: {size_bytes / 2**20:.1f} MiB")
    if size_bytes > MOST_BYTES:
        raise SystemExit(f"more than {MOST_BYTES >> 20} MiB, which is what may be carried")


if __name__ == "__main__":
    main()
