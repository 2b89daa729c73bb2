"""The example models, small, compiled for simulated GPUs, against ONNX Runtime.

`python -m tests.gpu.example_models [MODEL ...]`, at the repository's root, runs all of them in every precision: some minutes.
"""

from __future__ import annotations

import argparse
import time
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
TARGETS = ("cuda-sim",)
CASES = tuple((name, precision) for name in MODELS for precision in PRECISIONS)


def error_of(name: str, precision: Precision, target: str) -> float:
    """The largest error of a small model's results, each relative to its norm; ONNX Runtime says what is right."""
    module, inputs = MODELS[name].build(small=True)
    module = module.eval()
    program = torch.onnx.export(module, inputs, dynamo=True, verbose=False)
    assert program is not None
    exported = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    feeds = {one.name: np.asarray(x) for one, x in zip(session.get_inputs(), inputs, strict=True)}
    net = prefuse.compile(module, inputs, target=target, precision=precision, cache=False)
    found = cast(SpecializedModel, net)(*inputs)
    results = found if isinstance(found, tuple) else (found,)
    return max(_error(np.asarray(got), want) for got, want in zip(results, session.run(None, feeds), strict=True))


def _error(got: np.ndarray, want: np.ndarray) -> float:
    exact = want.astype(np.float64)
    size = float(np.linalg.norm(exact))
    assert size > 0, "a result of zeros proves nothing"
    assert got.shape == want.shape
    return float(np.linalg.norm(got.astype(np.float64) - exact)) / size


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.example_models", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", choices=[[], *MODELS], help="all by default")
    parser.add_argument("--target", choices=TARGETS, default=TARGETS[0])
    parser.add_argument("--precision", choices=PRECISIONS, help="every one by default")
    options = parser.parse_args()
    wrong = []
    for name, precision in CASES:
        if name not in (options.models or MODELS) or precision != (options.precision or precision):
            continue
        begin = time.monotonic()
        error = error_of(name, precision, options.target)
        verdict = "right" if error < PRECISIONS[precision] else f"WRONG: more than {PRECISIONS[precision]:.0e}"
        wrong += [f"{name} {precision}"] if verdict != "right" else []
        print(f"{name:16} {precision:13} {error:.1e} {verdict} ({time.monotonic() - begin:.0f} s)", flush=True)
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
