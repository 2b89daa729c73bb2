"""Files from strangers, at the root: `python -m tests.fuzz [--mutations N] [--misfits N] [--models N] [--seed N]`."""

from __future__ import annotations

import argparse
import os
from collections import Counter

from ..worker_pool import Lost, run_apart
from .broken import broken_files
from .generated import Generated, generated_models
from .judge import GOOD, Sample, Verdict, judge
from .misfits import misfits
from .mutations import mutations
from .oracle import judge_generated

TIMEOUT_S, MEMORY_BYTES = 30.0, 6 << 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--mutations", type=int, default=1000, help="mutated models and programs")
    parser.add_argument("--misfits", type=int, default=500, help="ONNX's node cases with an input of another shape")
    parser.add_argument("--models", type=int, default=2000, help="generated models")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    samples = [
        *broken_files(),
        *mutations(arguments.mutations, arguments.seed),
        *misfits(arguments.misfits, arguments.seed),
        *generated_models(arguments.models, arguments.seed),
    ]
    counts: Counter[str] = Counter()
    faults = 0
    for done in run_apart(samples, judge_any, processes=arguments.processes, timeout_s=TIMEOUT_S, memory_bytes=MEMORY_BYTES):
        verdict = Verdict(done.result.how, done.result.detail) if isinstance(done.result, Lost) else done.result
        counts[verdict.outcome] += 1
        if not is_good(done.task, verdict):
            faults += 1
            print(f"{verdict.outcome}: {done.task.name}: {verdict.detail[:300]}", flush=True)
    print(", ".join(f"{outcome} {count}" for outcome, count in counts.most_common()))
    return int(faults > 0)


def is_good(sample: Sample, verdict: Verdict) -> bool:
    """Generated models are valid, so that a refusal is a fault."""
    return verdict.outcome == "accepted" if isinstance(sample, Generated) else verdict.outcome in GOOD


def judge_any(sample: Sample) -> Verdict:
    """Generated models come with numbers, and are judged by what they compute."""
    return judge_generated(sample) if isinstance(sample, Generated) else judge(sample)


if __name__ == "__main__":
    raise SystemExit(main())
