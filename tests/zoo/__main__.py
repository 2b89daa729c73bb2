"""Architectures of Hugging Face transformers and our examples beside torch: `python -m tests.zoo`, at the repository's root."""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from prefuse.runtime.precision import PRECISIONS

from .architectures import ZOO
from .judge import judge_apart
from .result import Result, append_results, read_results
from .table import table

_TARGETS = 'as of prefuse.compile, such as "cpu:avx512bf16-emulated"; for GPUs such as "cuda:sm_90" they are compiled alone'


def main() -> int:
    arguments = _parser().parse_args()
    known = read_results(arguments.json) if arguments.json else []
    names = [name for name in ZOO if re.search(arguments.match, name)]
    there = Counter(one.name for one in known if one.target == arguments.target and one.precision in arguments.precisions)
    due = [name for name in names if there[name] < len(arguments.precisions)]
    found = list(known)
    for results in judge_apart(due, arguments.processes, arguments.timeout, arguments.precisions, arguments.target):
        found += results
        print(_line(results), flush=True)
        if arguments.json:
            append_results(arguments.json, results)
    found.sort(key=lambda result: list(ZOO).index(result.name))
    if arguments.output:
        arguments.output.write_text(table(found))
    print(", ".join(f"{count} {outcome}" for outcome, count in Counter(result.outcome for result in found).most_common()))
    return int(not all(result.is_good for result in found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--match", default="", help="only architectures in whose names this regular expression is found")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="all by default")
    parser.add_argument("--target", default="cpu", help=_TARGETS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one architecture")
    parser.add_argument("--json", type=Path, help="file of results, one a line: what it has is not run again, the rest added")
    parser.add_argument("--output", type=Path, help="file for the table, as docs/zoo.md")
    return parser


def _line(results: Sequence[Result]) -> str:
    """An architecture on one line."""
    words = [f"{results[0].name}:"]
    for result in results:
        words += [f"{result.precision} {result.outcome}", *([] if result.error is None else [f"{result.error:.1e}"])]
        words += [*([] if result.ratio is None else [f"({result.ratio:.2f} x)"]), *result.means]
    words += [" ".join(detail.split())[:400] for detail in dict.fromkeys(result.detail for result in results) if detail]
    return " ".join([*words, f"in {sum(result.compile_seconds or 0 for result in results):.0f} s"])


if __name__ == "__main__":
    raise SystemExit(main())
