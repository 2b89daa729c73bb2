"""What full-size programs are predicted to take on a GPU, by template: `python -m benchmarks.gpu.predict`.

TVM and nvcc are needed and no GPU, as nothing is measured: these are the sums of the cost model's clocks of kernels that run one
after the other, each with its launch.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...examples.models import MODELS
from ...runtime.executor import CompiledModel
from ...runtime.hardware.gpu import GpuMachine, gpu_machine
from ...runtime.plan import Launch
from ...runtime.profile import descriptions_of
from ...runtime.target import Target
from .prepare import FULL, compiled

_BATCHES = (1, 64)
_PRECISIONS = ("bfloat16", "float32")


def predictions(
    target: str, models: Sequence[str], batches: Sequence[int], precisions: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each model, batch and precision."""
    for name in models:
        module, inputs = MODELS[name].build()
        for batch in batches:
            repeated = tuple(x.repeat(batch, *(1 for _ in x.shape[1:])) for x in inputs)
            for precision in precisions:
                row = {"model": name, "batch": batch, "precision": precision, "target": target}
                yield row | predicted(compiled(name, repeated, module, target, precision), precision)


def predicted(net: CompiledModel, precision: str) -> dict[str, Any]:
    """Launches and grids of a call, its microseconds, and of each template how often it is launched, its time and its rate. The
    share of peak of products is that of the unit that each of their templates uses in this precision."""
    groups, kernels = descriptions_of(net.program), {kernel.symbol: kernel for kernel in net.plan.kernels}
    templates: dict[str, dict[str, float]] = defaultdict(lambda: {"launches": 0, "us": 0.0, "gflop": 0.0})
    grids = 0
    for step in net.plan.steps:
        if not isinstance(step, Launch):
            continue
        kernel = kernels[step.kernel]
        grids += len(kernel.grids)
        one = templates[kernel.template]
        one["launches"] += 1
        one["us"] += groups[step.label].predicted_us
        one["gflop"] += kernel.flops / 1e9
    products = {name: one for name, one in templates.items() if "matmul" in name}
    gflop, us = (sum(one[key] for one in products.values()) for key in ("gflop", "us"))
    machine = gpu_machine(Target.parse(net.plan.target).level)
    least_us = sum(one["gflop"] * 1e6 / peak_gflops(machine, name, precision) for name, one in products.items())
    return {
        "launches": sum(int(one["launches"]) for one in templates.values()),
        "grids": grids,
        "predicted_us": round(sum(one["us"] for one in templates.values()), 1),
        "products_tflops": round(gflop / us * 1e3, 4) if us else 0.0,
        "products_share_of_peak": round(least_us / us, 4) if us else 0.0,
        "templates": {name: {key: round(value, 3) for key, value in one.items()} for name, one in templates.items()},
    }


def peak_gflops(machine: GpuMachine, template: str, precision: str) -> float:
    """Operations a second, in 1e9, of the unit that a template of products uses: float32 has no matrix unit of 16-bit floats, and
    only wgmma has its rate."""
    if precision.startswith("float32"):
        flops = machine.float_flops or machine.fma_flops
    else:
        flops = (machine.warpgroup_flops if "wgmma" in template else 0) or machine.half_flops
    return machine.multiprocessors * flops * machine.ghz


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.predict", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}; {', '.join(FULL)} by default")
    parser.add_argument("--target", default="cuda:sm_90")
    parser.add_argument("--batch", type=int, action="append", help="1 and 64 by default")
    parser.add_argument("--precision", choices=_PRECISIONS, action="append", help="both by default")
    parser.add_argument("--json", type=Path, help="write all rows there")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"unknown models {', '.join(sorted(unknown))}")
    rows = []
    wanted = options.models or FULL, options.batch or _BATCHES, options.precision or _PRECISIONS
    for row in predictions(options.target, *wanted):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
