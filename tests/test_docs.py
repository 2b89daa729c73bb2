"""The documentation names what is there: every relative link leads somewhere, and every path of ours that a page names exists.

What is listed is listed whole: passes in their order, and what results can do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import prefuse
import pytest
from prefuse.compiler.pipeline.pass_table import DEFAULT_PIPELINE, PASSES

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", RESULTS / "README.md", *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("benchmarks", "compiler", "docs", "examples", "kernels", "passes", "runtime", "tests")

_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(rf"(?:(?:{'|'.join(FOLDERS)})/[\w./-]*|[\w./-]+\.py)")
_FILE_IN_FIGURE = re.compile(rf"(?<![\w/])(?:{'|'.join(FOLDERS)})/[\w/]+\.py")
_RULE = re.compile(r"\s*\|(?:\s*:?-+:?\s*\|)+\s*")
_BORDER = re.compile(r"(?<!\\)\|")


def page_names(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """Text of a page without its fenced blocks, which hold output and examples."""
    return _FENCED.sub("", page.read_text())


def links(page: Path) -> Iterator[str]:
    """Targets of a page's relative links."""
    yield from (link for link in _LINK.findall(prose(page)) if "://" not in link and not link.startswith("mailto:"))


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub makes of a page's headings."""
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(prose(page)))
    return {heading.strip().replace(" ", "-") for heading in kept}


def missing_target(page: Path, link: str) -> bool:
    """Whether a relative link leads to no file, or to no heading of a page."""
    name, _, fragment = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists():
        return True
    return bool(fragment) and fragment not in anchors(target)


def paths(page: Path) -> Iterator[str]:
    """Paths of ours that a page names, from the root: in code marks, Python files of any folder; our files in figures."""
    yield from (token for token in _CODE.findall(prose(page)) if _PATH.fullmatch(token))
    for figure in _FENCED.findall(page.read_text()):
        yield from _FILE_IN_FIGURE.findall(figure)


def headless_tables(page: Path) -> Iterator[str]:
    """First rows of tables without a rule below, or right behind a paragraph: they would be shown as text."""
    before = ""
    lines = prose(page).splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        is_first = line.lstrip().startswith("|") and not before.lstrip().startswith("|")
        if is_first and (before.strip() or not _RULE.fullmatch(after)):
            yield line
        before = line


def ragged_rows(page: Path) -> Iterator[str]:
    """Rows with another number of cells than the heading of their table: what is too much would not be shown."""
    cells = 0
    for line in prose(page).splitlines():
        found = len(_BORDER.findall(line)) if line.lstrip().startswith("|") else 0
        if cells and found and found != cells:
            yield line
        cells = found and (cells or found)


@pytest.mark.parametrize("page", PAGES, ids=page_names)
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in links(page) if missing_target(page, link)] == []


@pytest.mark.parametrize("page", PAGES, ids=page_names)
def test_named_paths_exist(page: Path) -> None:
    assert [path for path in paths(page) if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_names)
def test_rows_fit_their_tables(page: Path) -> None:
    assert list(ragged_rows(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=page_names)
def test_tables_have_heads(page: Path) -> None:
    assert list(headless_tables(page)) == []


def test_passes_are_described_in_their_order() -> None:
    table = (ROOT / "docs" / "architecture.md").read_text().partition("| pass | what it does |")[2].partition("\n\n")[0]
    described = [name for row in table.splitlines()[2:] for name in _CODE.findall(row.split("|")[1])]
    run = [name for name in dict.fromkeys(re.findall(r"[\w-]+", DEFAULT_PIPELINE)) if name in PASSES]
    assert described == run


def test_results_have_the_methods_that_are_listed() -> None:
    """Each class has what the page says of it, and of the rest of the table nothing."""
    table = (ROOT / "docs" / "api.md").read_text().partition("| method |")[2].partition("\n\n")[0]
    head, _, *rows = table.splitlines()
    classes = [getattr(prefuse, name) for name in _CODE.findall(head)]
    for row in rows:
        method, *cells = row.split("|")[1:-1]
        for code in _CODE.findall(method.partition(":")[0]):
            name = code.partition("(")[0]
            said = [one.__name__ for one, cell in zip(classes, cells, strict=True) if cell.strip()]
            assert said == [one.__name__ for one in classes if hasattr(one, name)], name


def test_broken_references_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    lines = (
        "# One page",
        "[a](#one-page) [b](#two) [c](gone.md) [d](page.md)",
        "`kernels/gone.py` `gone.py` `passes/`",
        "```",
        "passes/gone.py",
        "```",
    )
    page.write_text("\n".join(lines))
    assert [link for link in links(page) if missing_target(page, link)] == ["#two", "gone.md"]
    assert [path for path in paths(page) if not (ROOT / path).exists()] == ["kernels/gone.py", "gone.py", "passes/gone.py"]


def test_ragged_tables_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| a | b |\n|---|---|\n| `x \\| y` | 2 |\n| 1 | 2 | 3 |\n\n| one |\n|---|\n")
    assert list(ragged_rows(page)) == ["| 1 | 2 | 3 |"]
    assert list(headless_tables(page)) == []
    page.write_text("text\n| a | b |\n|---|---|\n\n| c | d |\n| e | f |\n")
    assert list(headless_tables(page)) == ["| a | b |", "| c | d |"]
