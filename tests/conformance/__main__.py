"""ONNX's conformance suite: `python -m tests.conformance [--match REGEX] [--every N] [--json FILE]`, at the repository's root."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .cases import OUTCOMES, node_cases
from .workers import Result, run_cases


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--match", default="", help="only cases whose name has this regular expression in it")
    parser.add_argument("--every", type=int, default=1, help="only every Nth case")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for one case")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    names = [name for name in node_cases() if re.search(arguments.match, name)][:: arguments.every]
    results = sorted(run_cases(names, arguments.processes, arguments.timeout), key=lambda result: result.name)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    print(summary(results))
    return int(any(result.outcome in ("wrong", "crash", "hang") for result in results))


def summary(results: Sequence[Result]) -> str:
    """Counts by outcome; what refuses most; all that went wrong."""
    counts = Counter(result.outcome for result in results)
    lines = [f"{outcome:8} {counts[outcome]:5}" for outcome in OUTCOMES]
    refused = Counter(result.operator for result in results if result.outcome == "refused")
    lines += ["", "refused: " + ", ".join(f"{name} {count}" for name, count in refused.most_common(40))]
    lines += [
        f"{result.outcome}: {result.name}: {result.detail.splitlines()[0][:160]}"
        for result in results
        if result.outcome not in ("pass", "refused")
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
