"""The table of results, as `docs/zoo.md`."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Sequence

from .architecture import Architecture
from .architectures import ZOO
from .judge import BOUND, Result

_VERSIONS = ("torch", "transformers", "onnx")


def table(results: Sequence[Result]) -> str:
    """A Markdown page: what was measured, the counts, and one row for each architecture."""
    counts = Counter(result.outcome for result in results)
    exported = len(results) - counts["not exported by torch"]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _VERSIONS)
    lines = [
        "# Model zoo",
        "",
        "Small configurations of Hugging Face transformers with random weights, and our examples: `prefuse.compile(module)`,",
        "called as a user would, beside torch. Written by `python -m tests.zoo --output docs/zoo.md`.",
        "",
        f"With {versions}: **{counts['agrees']} of {exported}** that torch can export agree with it to {BOUND:.0e}",
        f"({', '.join(f'{count} {outcome}' for outcome, count in counts.most_common())}).",
        "",
        "*Error* is the largest difference over all tensors of the result, relative to the largest element of the tensor, and",
        "*compile* the seconds from a module to a program, torch's export included, on a machine that does other work too;",
        "*beside* names what computed a part of the result that no kernel of ours did.",
        "",
        "| architecture | class | family | result | error | compile | beside |",
        "|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *map(_row, results)]) + "\n"


def _row(result: Result) -> str:
    one = ZOO[result.name]
    kind = one.model if isinstance(one, Architecture) else f"examples.models: {one.model}"
    said = "agrees" if result.outcome == "agrees" else f"**{result.outcome}**: {_short(result.detail)}"
    error = "" if result.error is None else f"{result.error:.1e}"
    seconds = "" if result.compile_seconds is None else f"{result.compile_seconds:.0f}"
    return f"| {result.name} | {kind} | {one.family} | {said} | {error} | {seconds} | {', '.join(result.means)} |"


def _short(text: str, limit: int = 200) -> str:
    """A message on one line, without folders, fit for a cell."""
    words = [word if "/" not in word else word.rpartition("site-packages/")[2] for word in text.split()]
    line = " ".join(words).replace("|", "\\|")
    return line if len(line) <= limit else line[: limit - 1] + "…"
