"""The example models, small, compiled for simulated GPUs, against ONNX Runtime.

`python -m tests.gpu.example_models [MODEL ...]`, at the repository's root, runs all of them in every precision: some minutes.
"""

from __future__ import annotations

import argparse
import time
from functools import cache
from typing import cast

import numpy as np
import onnxruntime
import prefuse
import torch
from prefuse.compiler.programs.specialize import SpecializedModel
from prefuse.examples.models import MODELS
from prefuse.runtime.precision import Precision

# What each promises of the norm of errors, relative to that of the results.
PRECISIONS: dict[Precision, float] = {"float32": 1e-5, "float32-fast": 2e-5, "bfloat16": 1e-2, "float16": 1e-2}
TARGETS = ("cuda-sim", "rocm-sim:gfx942", "rocm-sim:gfx1100")
CASES = tuple((name, precision, target) for target in TARGETS for name in MODELS for precision in PRECISIONS)


@cache
def _right(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], list[np.ndarray]]:
    """A small model, its inputs, and what ONNX Runtime says that its results are."""
    module, inputs = MODELS[name].build(small=True)
    module = module.eval()
    program = torch.onnx.export(module, inputs, dynamo=True, verbose=False)
    assert program is not None
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {one.name: np.asarray(x) for one, x in zip(session.get_inputs(), inputs, strict=True)}
    return module, inputs, [np.asarray(one) for one in session.run(None, feeds)]


def error_of(name: str, precision: Precision, target: str) -> float:
    """The largest error of a small model's results, each relative to its norm."""
    module, inputs, right = _right(name)
    net = prefuse.compile(module, inputs, target=target, precision=precision, cache=False)
    found = cast(SpecializedModel, net)(*inputs)
    results = found if isinstance(found, tuple) else (found,)
    return max(_error(np.asarray(got), want) for got, want in zip(results, right, strict=True))


def _error(got: np.ndarray, want: np.ndarray) -> float:
    exact = want.astype(np.float64)
    size = float(np.linalg.norm(exact))
    assert size > 0, "a result of zeros proves nothing"
    assert got.shape == want.shape
    return float(np.linalg.norm(got.astype(np.float64) - exact)) / size


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.example_models", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", choices=[[], *MODELS], help="all by default")
    parser.add_argument("--target", choices=TARGETS, help="every one by default")
    parser.add_argument("--precision", choices=PRECISIONS, help="every one by default")
    options = parser.parse_args()
    wrong = []
    for name, precision, target in CASES:
        wanted = options.models or MODELS, (options.precision or precision,), (options.target or target,)
        if not all(one in those for one, those in zip((name, precision, target), wanted, strict=True)):
            continue
        begin = time.monotonic()
        error = error_of(name, precision, target)
        verdict = "right" if error < PRECISIONS[precision] else f"WRONG: more than {PRECISIONS[precision]:.0e}"
        wrong += [f"{name} {precision} {target}"] if verdict != "right" else []
        print(f"{name:16} {precision:13} {target:16} {error:.1e} {verdict} ({time.monotonic() - begin:.0f} s)", flush=True)
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
