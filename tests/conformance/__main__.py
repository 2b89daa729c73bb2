"""ONNX's conformance suite, at the repository's root: `python -m tests.conformance [--set SET] [--match REGEX] [--json FILE]`."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .cases import OUTCOMES, SETS, SOUND, Result, cases, run_cases
from .chance import is_chance
from .means import MEANS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--set", choices=(*SETS, "all"), default="node", help="which of onnx's sets of cases")
    parser.add_argument("--match", default="", help="only cases whose name has this regular expression in it")
    parser.add_argument("--every", type=int, default=1, help="only every Nth case")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for one case")
    parser.add_argument("--json", type=Path, help="file for the results")
    arguments = parser.parse_args()
    kinds = SETS if arguments.set == "all" else (arguments.set,)
    known = [name if kind == "node" else f"{kind}/{name}" for kind in kinds for name in cases(kind)]
    names = [name for name in known if re.search(arguments.match, name)][:: arguments.every]
    results = sorted(run_cases(names, arguments.processes, arguments.timeout), key=lambda result: result.name)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    print(summary(results))
    return int(any(result.outcome not in (*SOUND, "refused") for result in results))


def summary(results: Sequence[Result]) -> str:
    """Counts by outcome; what refuses most; all that went wrong."""
    counts = Counter(result.outcome for result in results)
    lines = [f"{outcome:8} {counts[outcome]:5}" for outcome in OUTCOMES]
    means = Counter(result.account.means for result in results if result.account)
    lines += ["", "passed by: " + ", ".join(f"{name} {means[name]}" for name in MEANS)]
    for name in ("host", "folded"):
        lines.append(f"{name}: " + " ".join(r.name for r in results if r.account and r.account.means == name))
    lines.append("judged as random: " + " ".join(result.name for result in results if is_chance(result.name)))
    refused = Counter(result.operator for result in results if result.outcome == "refused")
    lines += ["", "refused: " + ", ".join(f"{name} {count}" for name, count in refused.most_common(40))]
    lines += [
        f"{result.outcome}: {result.name}: {result.detail.splitlines()[0][:160]}"
        for result in results
        if result.outcome not in (*SOUND, "refused")
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
