"""The arena over time, and the streams beside each other, as pictures."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...runtime.report import size
from ..pipeline.pages import check_installed, write_page, write_png
from .memory_view import KINDS, Bar, MemoryView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = {
    "activation": "tab:blue",
    "workspace": "tab:purple",
    "weight": "tab:orange",
    "kernel": "tab:blue",
    "copy": "tab:orange",
    "stall": "tab:red",
}
_SIZE_INCHES = (12.0, 8.0)
_LANES = {"kernel": 0, "stall": 0, "copy": 1}
_ROWS = 200  # buffers of the table, the largest


def draw_png(view: MemoryView, path: Path) -> None:
    """Draw a view into a PNG file. Raises OptionError if matplotlib is missing, or the file cannot be written."""
    write_png(figure(view), path)


def draw_html(view: MemoryView, path: Path) -> None:
    """Write a view as one page, drawings in it. Raises OptionError if matplotlib is missing, or it cannot be written."""
    write_page("memory", view.sentences(), figure(view), _table(view), path)


def figure(view: MemoryView) -> Figure:
    """Above, the arena: who has which bytes when. Below, kernels, copies and waits: as predicted, then as measured.

    Raises:
        OptionError: matplotlib is not installed.
    """
    check_installed()
    from matplotlib.figure import Figure

    drawn = Figure(figsize=_SIZE_INCHES, layout="constrained")
    timelines = [("predicted", view.predicted)] + ([("measured", view.measured)] if view.measured else [])
    arena, *below = drawn.subplots(1 + len(timelines), 1, height_ratios=[5, *[1.2] * len(timelines)])
    _draw_arena(arena, view)
    end = max((bar.end_us for _, bars in timelines for bar in bars), default=1.0)
    for axes, (title, bars) in zip(below, timelines, strict=True):
        _draw_timeline(axes, title, bars)
    for axes in (arena, *below):
        axes.set_xlim(0, end / 1e3)
    below[-1].set_xlabel("ms from the beginning of a call")
    return drawn


def _draw_arena(axes: Any, view: MemoryView) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Patch, Rectangle

    shown = []
    for kind in KINDS:
        of_kind = [one for one in view.rectangles if one.kind == kind]
        patches = [
            Rectangle((one.begin_us / 1e3, one.offset / 2**20), (one.end_us - one.begin_us) / 1e3, one.size_bytes / 2**20)
            for one in of_kind
        ]
        if patches:
            colour = _COLOURS[kind]
            axes.add_collection(PatchCollection(patches, facecolor=colour, edgecolor="white", linewidth=0.3, alpha=0.8))
            shown.append(Patch(color=colour, label=f"{kind}s: {len(patches)}"))
    shown.append(axes.axhline(view.bound_bytes / 2**20, color="black", linestyle=":", label="the lower bound"))
    axes.set_ylim(0, 1.05 * max(view.arena_bytes, 1) / 2**20)
    axes.set_ylabel("MiB of the arena")
    axes.set_title(view.sentences()[0], fontsize=10)
    axes.legend(handles=shown, fontsize=8, loc="upper right")


def _draw_timeline(axes: Any, title: str, bars: Sequence[Bar]) -> None:
    for kind, lane in _LANES.items():
        spans = [(bar.begin_us / 1e3, (bar.end_us - bar.begin_us) / 1e3) for bar in bars if bar.kind == kind]
        axes.broken_barh(spans, (lane - 0.4, 0.8), facecolor=_COLOURS[kind], edgecolor="white", linewidth=0.2)
    axes.set_yticks([0, 1], ["kernels", "copies"])
    axes.set_ylim(1.6, -0.6)
    axes.set_title(f"{title}; red: waiting for a copy", fontsize=9, loc="left")


def _table(view: MemoryView) -> str:
    lines = []
    for one in sorted(view.rectangles, key=lambda one: -one.size_bytes)[:_ROWS]:
        cells = f"<td>{one.offset}</td><td>{size(one.size_bytes)}</td><td>{one.first} to {one.last}</td>"
        lines.append(f"<tr><td>{html.escape(one.name)}</td>{cells}<td>{one.kind}</td></tr>")
    head = "<tr><th>buffer</th><th>offset</th><th>size</th><th>steps</th><th>kind</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"
