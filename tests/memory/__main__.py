"""Programs within memory limits, at the root: `python -m tests.memory graphs --count 500`, or `models`, `plans`.

graphs: random graphs within random limits, beside the same without. models: our examples. plans: the checker of Plans, on right
ones and on mutants.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from prefuse.compiler.programs.cache import compiler_version
from prefuse.examples.models import MODELS

from ..worker_pool import Lost, run_apart
from .example_models import judge_model
from .judge import Verdict, judge_graph
from .plans import judge_planned_plans, judge_streamed_plan

TIMEOUT_S = 290.0
_PLANS = 100  # of a task


def main() -> int:
    arguments = _parser().parse_args()
    match arguments.what:
        case "graphs":
            numbers = range(arguments.first, arguments.first + arguments.count)
            tasks = {_name(f"graph {arguments.seed}:{number}"): (arguments.seed, number) for number in numbers}
            return _verdicts(tasks, judge_graph, arguments)
        case "models":
            cases = [(n, p, limit) for n in arguments.match for p in arguments.precisions for limit in arguments.limits]
            kind = "small" if arguments.small else "full-size"
            return _verdicts(
                {_name(f"{kind} {' '.join(case)}"): case for case in cases},
                partial(judge_model, small=arguments.small),
                arguments,
            )
        case _:
            firsts = range(arguments.first, arguments.first + arguments.count, _PLANS)
            return _counts([(arguments.seed, first) for first in firsts], _judge_plans, arguments.processes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.memory", description=__doc__)
    parser.add_argument("what", choices=["graphs", "models", "plans"])
    parser.add_argument("--count", type=int, default=500, help="random graphs or plans")
    parser.add_argument("--first", type=int, default=0, help="the number of the first of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--match", nargs="+", choices=MODELS, default=list(MODELS), help="models; all by default")
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--limits", nargs="+", default=["50%", "25%"])
    parser.add_argument("--small", action="store_true", help="the models in a small size")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, help="file of verdicts, one a line: what it has of this version is not run again, the rest added"
    )
    return parser


def _verdicts(tasks: dict[str, Any], judge: Callable[[Any], Verdict], arguments: argparse.Namespace) -> int:
    known = {name: one for name, one in _known(arguments.json).items() if name in tasks}
    names = {task: name for name, task in tasks.items() if name not in known}
    counts = Counter[str]()
    for name, one in known.items():
        counts.update(_kinds(one))
        if one.fault:
            print(f"{name}, known: {one.fault[:600]}", flush=True)
    for done in run_apart(list(names), partial(_judged, judge), processes=arguments.processes, timeout_s=TIMEOUT_S):
        verdict = done.result
        if isinstance(verdict, Lost):
            verdict = Verdict(names[done.task], f"{verdict.how}: {verdict.detail}")
        counts.update(_kinds(verdict))
        if verdict.fault:
            print(f"{verdict.name}: {verdict.fault[:600]}", flush=True)
        if arguments.json:
            with open(arguments.json, "a") as file:
                file.write(json.dumps({**asdict(verdict), "name": names[done.task], "seconds": done.seconds}) + "\n")
    print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
    return int(counts["faults"] > 0)


def _judged(judge: Callable[[Any], Verdict], task: Any) -> Verdict:
    """The verdict on a task; what is raised is a fault of it."""
    try:
        return judge(task)
    except Exception as error:
        return Verdict(str(task), f"{type(error).__name__}: {error}")


def _kinds(verdict: Verdict) -> Iterable[str]:
    yield "faults" if verdict.fault else "right"
    if verdict.copies:
        yield "with copies"
    if verdict.spills:
        yield "whose activations leave"
    if verdict.is_bounded:
        yield "in control groups"
    elif verdict.taken is not None:
        yield "not in control groups"
    if verdict.detail:
        yield "with another limit than asked for"


def _known(path: Path | None) -> dict[str, Verdict]:
    """Verdicts of earlier runs, by name."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path is not None and path.is_file() else []
    fields = Verdict.__dataclass_fields__
    return {row["name"]: Verdict(**{name: value for name, value in row.items() if name in fields}) for row in rows}


def _name(what: str) -> str:
    """Of a verdict: on this code, as another version may be right."""
    return f"{what}, version {compiler_version()[:8]}"


def _judge_plans(task: tuple[int, int]) -> Counter[str]:
    seed, first = task
    counts = judge_planned_plans((first, _PLANS))
    for number in range(first, first + _PLANS):
        counts += judge_streamed_plan((seed, number))
    return counts


def _counts(tasks: Sequence[tuple[int, int]], judge: Callable[[tuple[int, int]], Counter[str]], processes: int) -> int:
    counts = Counter[str]()
    for done in run_apart(tasks, judge, processes=processes, timeout_s=TIMEOUT_S):
        lost = done.result
        counts += Counter({f"FAULT {lost.how}: {done.task}: {lost.detail}": 1}) if isinstance(lost, Lost) else lost
    for what, count in sorted(counts.items()):
        print(f"{what}: {count}")
    return int(any(what.startswith("FAULT") for what in counts))


if __name__ == "__main__":
    raise SystemExit(main())
