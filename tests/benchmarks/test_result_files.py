"""Files of results and pages name each other: no figure without a file that is there, no file that nobody reads."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
_NAME = re.compile(r"2026-\d\d-\d\d-[\w.*-]+\.json")


def named() -> dict[str, str]:
    """Names of files, or patterns of several, and a page that has each."""
    return {name: str(page.relative_to(ROOT)) for page in PAGES for name in _NAME.findall(page.read_text())}


def test_files_that_pages_name_exist() -> None:
    names = {path.name for path in RESULTS.iterdir()}
    assert [(name, page) for name, page in named().items() if not any(fnmatch(one, name) for one in names)] == []


def test_each_file_is_named_by_a_page() -> None:
    patterns = named()
    assert [path.name for path in sorted(RESULTS.iterdir()) if not any(fnmatch(path.name, one) for one in patterns)] == []
