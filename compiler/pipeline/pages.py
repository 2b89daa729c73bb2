"""Drawings and pages that people look at instead of reading: PNG files, and HTML files that need nothing else."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = (
    "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}td,th{padding:2px 10px;text-align:right}"
    "td:first-child,td:last-child,th:first-child,th:last-child{text-align:left}tr:nth-child(even){background:#f4f4f4}"
    ".chosen{font-weight:bold}"
)


def check_installed() -> None:
    """Raise OptionError if what draws is not installed."""
    if find_spec("matplotlib") is None:
        raise OptionError("drawing", "the package matplotlib is not installed", "pip install matplotlib")


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file. Raises OptionError if it cannot be written."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    _write(path, buffer.getvalue())


def write_page(title: str, sentences: Iterable[str], figure: Figure, table: str, path: Path) -> None:
    """Write one page: sentences, the figure in it, and a table in HTML. Raises OptionError if it cannot be written."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    drawing = buffer.getvalue()
    said = "".join(f"<p>{html.escape(one)}</p>" for one in sentences)
    page = (
        f"<!doctype html><html><head><meta charset='utf-8'><title>{html.escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{said}{drawing[drawing.index('<svg') :]}{table}</body></html>\n"
    )
    _write(path, page.encode())


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OptionError("drawing", f"{path} cannot be written: {error.strerror or error}", "check the folder") from error
