"""Files of results and pages name each other: no figure without a file that is there, no file that the list leaves out."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LIST = RESULTS / "README.md"
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), LIST]
_NAME = re.compile(r"2026-\d\d-\d\d-[\w.*-]+\.json")


def named() -> dict[str, str]:
    """Names of files, or patterns of several, and a page that has each."""
    return {name: str(page.relative_to(ROOT)) for page in PAGES for name in _NAME.findall(page.read_text())}


def test_files_that_pages_name_exist() -> None:
    names = {path.name for path in RESULTS.iterdir()}
    assert [(name, page) for name, page in named().items() if not any(fnmatch(one, name) for one in names)] == []


def test_each_file_is_in_the_list_once() -> None:
    assert sorted(_NAME.findall(LIST.read_text())) == sorted(path.name for path in RESULTS.glob("*.json"))
