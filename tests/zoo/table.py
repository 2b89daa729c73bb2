"""The table of results, as `docs/zoo.md`."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Mapping, Sequence

from prefuse.runtime.precision import PRECISIONS, Precision

from .architecture import Architecture
from .architectures import ZOO
from .judge import BOUND, DRAWS, FAST_BOUND, FAST_RATIO, MORE_DRAWS, PEER_RATIO, error_bound, is_compiled_only
from .result import Result

_VERSIONS = ("torch", "transformers", "onnx")
_NARROW: tuple[Precision, ...] = ("bfloat16", "float16")
_ERRORS = ("float32", "float32-fast", "bfloat16", "peer", "float16", "peer")
_COLUMNS = ("architecture", "class", "family", "result", *_ERRORS, "compile", "beside")


def table(results: Sequence[Result]) -> str:
    """A Markdown page: what was measured, the counts, and one row for each architecture; a shorter table a further target."""
    targets = list(dict.fromkeys(result.target for result in results))
    main = [result for result in results if result.target == targets[0]]
    lines = [*_head(main), *(_row(row) for row in _by_name(main).values())]
    for target in targets[1:]:
        section = _compiled_section if is_compiled_only(target) else _section
        lines += section(target, [result for result in results if result.target == target])
    return "\n".join(lines) + "\n"


def _head(results: Sequence[Result]) -> list[str]:
    peers = " and ".join(dict.fromkeys(result.peer for result in results if result.peer and result.precision in _NARROW))
    bounds = [f"{error_bound(precision, None):.0e}" for precision in _NARROW]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _VERSIONS)
    return [
        "# Model zoo",
        "",
        "Small configurations of Hugging Face transformers with random weights, and our examples: `prefuse.compile(module)`,",
        "called as a user would, beside torch. Written by `python -m tests.zoo --output docs/zoo.md`.",
        "",
        f"With {versions}, of those that torch can export:",
        "",
        *_counts(results),
        "",
        "*float32* is the largest difference from torch over all tensors of the result, relative to the largest element of",
        f"the tensor (allowed: {BOUND:.0e}); *float32-fast* the norm of the difference, relative to that of the tensor, from",
        f"torch in float64 where that from float32 is over the {FAST_BOUND:.0e} that are allowed, and {FAST_RATIO} times",
        "torch's in float32 where that is over it, too. *bfloat16* and *float16* are such norms, too, from float32,",
        "with products of any size in that type (`assign-formats{min-operations=0}`): by default",
        "those of so small models stay float32. Beside each stands the *peer's* on the same model,",
        f"that of {peers or 'nobody'}. Allowed are {PEER_RATIO} times as much, or what rounding the result would cost;",
        f"{' and '.join(bounds)} where the peer cannot run the model or has no numbers. Of what is over it the median of {DRAWS}",
        f"draws of weights is taken, or of {MORE_DRAWS}, beside the peer's of that draw. What is over the peer's has its ratio",
        "to it. *Compile* are the seconds from a module to a program in float32, torch's export included, on a machine that",
        "does other work too; *beside* names what computed a part of the result that no kernel of ours did.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        "|---" * len(_COLUMNS) + "|",
    ]


def _counts(results: Sequence[Result]) -> list[str]:
    """A line for each precision, with how many agree."""
    lines = []
    for precision in PRECISIONS:
        counts = Counter(result.outcome for result in results if result.precision == precision)
        exported = counts.total() - counts["not exported by torch"]
        said = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
        lines += [f"- {precision}: **{counts['agrees'] + counts['compiles']} of {exported}** ({said})"] if counts else []
    return lines


def _section(target: str, results: Sequence[Result]) -> list[str]:
    """The errors of some architectures on a further target."""
    precisions = [precision for precision in PRECISIONS if any(result.precision == precision for result in results)]
    titles = [title for precision in precisions for title in (precision, *(["peer"] if precision in _NARROW else []))]
    lines = ["", f"## With the target `{target}`", "", *_counts(results), ""]
    lines += [f"| architecture | result | {' | '.join(titles)} |", "|---" * (len(titles) + 2) + "|"]
    for name, row in _by_name(results).items():
        cells = [cell for precision in precisions for cell in _errors(row.get(precision), precision)]
        lines.append(f"| {name} | {_outcome(row)} | {' | '.join(cells)} |")
    return lines


def _compiled_section(target: str, results: Sequence[Result]) -> list[str]:
    """What became of architectures for a GPU that nobody had: in each precision the grids of a call, and seconds to compile."""
    precisions = [precision for precision in PRECISIONS if any(result.precision == precision for result in results)]
    titles = [title for precision in precisions for title in (precision, "seconds")]
    lines = ["", f"## Compiled for `{target}`", "", *_counts(results), ""]
    lines += ["With each precision the grids that a call launches; nothing of it has run on a GPU.", ""]
    lines += [f"| architecture | result | {' | '.join(titles)} | beside |", "|---" * (len(titles) + 3) + "|"]
    for name, row in _by_name(results).items():
        cells = [cell for precision in precisions for cell in _compiled(row.get(precision))]
        means = ", ".join(dict.fromkeys(way for result in row.values() for way in result.means))
        lines.append(f"| {name} | {_outcome(row)} | {' | '.join(cells)} | {means} |")
    return lines


def _compiled(result: Result | None) -> list[str]:
    """The cells of a precision's grids and seconds."""
    if result is None or result.compile_seconds is None:
        return ["", ""]
    return [str(result.grids), f"{result.compile_seconds:.0f}"]


def _by_name(results: Sequence[Result]) -> dict[str, dict[str, Result]]:
    """For each architecture its results by precision."""
    found: dict[str, dict[str, Result]] = {}
    for result in results:
        found.setdefault(result.name, {})[result.precision] = result
    return found


def _row(results: Mapping[str, Result]) -> str:
    first = next(iter(results.values()))
    one = ZOO[first.name]
    kind = one.model if isinstance(one, Architecture) else f"examples.models: {one.model}"
    errors = [cell for precision in PRECISIONS for cell in _errors(results.get(precision), precision)]
    seconds = "" if first.compile_seconds is None else f"{first.compile_seconds:.0f}"
    means = ", ".join(dict.fromkeys(way for result in results.values() for way in result.means))
    return f"| {first.name} | {kind} | {one.family} | {_outcome(results)} | {' | '.join(errors)} | {seconds} | {means} |"


def _outcome(results: Mapping[str, Result]) -> str:
    """ "agrees" or "compiles", or what is said of the precisions that do not; once, where it is true of all."""
    good = next((one.outcome for one in results.values() if one.outcome in ("agrees", "compiles")), "")
    said = {precision: f"**{one.outcome}**: {_short(one.detail)}" for precision, one in results.items() if one.outcome != good}
    if not said:
        return good
    if len(said) == len(results) and len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{precision} {text}" for precision, text in said.items())


def _errors(result: Result | None, precision: str) -> list[str]:
    """The cell of a precision's error, with the ratio to the peer's where it is more; in a narrow type also the peer's."""
    error = "" if result is None or result.error is None else f"{result.error:.1e}"
    if precision not in _NARROW:
        return [error]
    if result is not None and result.ratio is not None and result.ratio > 1:
        error += f" ({result.ratio:.2f} x)"
    return [error, "" if result is None or result.peer_error is None else f"{result.peer_error:.1e}"]


def _short(text: str, limit: int = 200) -> str:
    """A message on one line, without folders, fit for a cell."""
    words = [word if "/" not in word else word.rpartition("site-packages/")[2] for word in text.split()]
    line = " ".join(words).replace("|", "\\|")
    return line if len(line) <= limit else line[: limit - 1] + "…"
