"""Architectures of Hugging Face transformers and our examples beside torch: `python -m tests.zoo`, at the repository's root."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from .architectures import ZOO
from .judge import judge_apart
from .table import table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--match", default="", help="only architectures in whose names this regular expression is found")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one architecture")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--output", type=Path, help="file for the table, as docs/zoo.md")
    arguments = parser.parse_args()
    names = [name for name in ZOO if re.search(arguments.match, name)]
    found = {}
    for result in judge_apart(names, arguments.processes, arguments.timeout):
        found[result.name] = result
        error = "" if result.error is None else f" {result.error:.1e} in {result.compile_seconds:.0f} s"
        print(f"{result.name}: {result.outcome}{error} {' '.join([*result.means, *result.detail.split()])[:400]}", flush=True)
    results = [found[name] for name in names]
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    if arguments.output:
        arguments.output.write_text(table(results))
    print(", ".join(f"{count} {outcome}" for outcome, count in Counter(result.outcome for result in results).most_common()))
    return int(any(result.outcome not in ("agrees", "not exported by torch") for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
