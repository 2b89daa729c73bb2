"""Findings as pictures and as a page: the Pareto front, sensitivity by depth, and the table of choices."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...pipeline.pages import check_installed, write_page, write_png
from .findings import Findings, Row
from .formats import FORMATS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = dict(zip(FORMATS, ("tab:blue", "tab:green", "tab:orange", "tab:red"), strict=True))
_SIZE_INCHES = (11.0, 8.0)


def draw_png(findings: Findings, path: Path) -> None:
    """Draw the findings into a PNG file. Raises OptionError if matplotlib is missing, or the file cannot be written."""
    write_png(figure(findings), path)


def draw_html(findings: Findings, path: Path) -> None:
    """Write the findings as one page, drawings in it. Raises OptionError if matplotlib is missing, or it cannot be written."""
    write_page("bits", findings.sentences(), figure(findings), _table(findings), path)


def figure(findings: Findings) -> Figure:
    """Above, what the objective costs at each error, with the programs that were measured; below, what formats damage by depth.

    Raises:
        OptionError: matplotlib is not installed.
    """
    check_installed()
    from matplotlib.figure import Figure

    drawn = Figure(figsize=_SIZE_INCHES, layout="constrained")
    above, below = drawn.subplots(2, 1)
    _draw_front(above, findings)
    _draw_depth(below, findings)
    return drawn


def _draw_front(axes: Any, findings: Findings) -> None:
    is_latency = findings.objective == "latency"
    unit = 1e3 if is_latency else 2**20
    front = [(findings.metric.error(one.totals["damage"]), one.objective / unit) for one in findings.front]
    axes.plot(*zip(*front, strict=True), "o-", color="tab:gray", label="predicted mixtures")
    for one in findings.programs:
        value = (one.time_us if is_latency else one.size_bytes) / unit
        axes.plot(
            one.error, value, "s" if one.is_uniform else "*", markersize=8, color="tab:blue" if one.is_uniform else "tab:red"
        )
        axes.annotate(one.name, (one.error, value), textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.axvline(findings.max_error, color="black", linestyle=":", label="the error that is allowed")
    axes.set_xlabel(f"{findings.metric.name} error")
    axes.set_ylabel("ms a call" if is_latency else "MiB of weights")
    axes.legend(fontsize=8)


def _draw_depth(axes: Any, findings: Findings) -> None:
    rows = findings.rows()
    for form, colour in _COLOURS.items():
        points = [(row.depth, row.damage[form]) for row in rows if row.damage.get(form, 0.0) > 0]
        if points:
            axes.plot(*zip(*points, strict=True), "o", markersize=3, color=colour, alpha=0.5, label=form)
        chosen = [(row.depth, row.damage[form]) for row in rows if row.choice == form and row.damage.get(form, 0.0) > 0]
        if chosen:
            axes.plot(*zip(*chosen, strict=True), "o", markersize=8, fillstyle="none", color=colour)
    axes.set_yscale("log")
    axes.set_xlabel("units in the model's order; those circled were chosen")
    axes.set_ylabel("damage of the outputs")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _table(findings: Findings) -> str:
    forms = [form for form in FORMATS if any(form in row.time_us for row in findings.rows())]
    head = "".join(f"<th>{form}: us</th><th>damage</th>" for form in forms)
    lines = []
    for row in findings.rows():
        cells = "".join(_cells(row, form) for form in forms)
        names = f"<td>{html.escape(row.name)}</td><td>{row.operator}</td>"
        lines.append(f"<tr>{names}{cells}<td class='chosen'>{row.choice}</td><td>{html.escape(row.why)}</td></tr>")
    return f"<table><tr><th>unit</th><th></th>{head}<th>choice</th><th>why</th></tr>{''.join(lines)}</table>"


def _cells(row: Row, form: str) -> str:
    if form not in row.time_us:
        return "<td></td><td></td>"
    mark = " class='chosen'" if form == row.choice else ""
    return f"<td{mark}>{row.time_us[form]:.1f}</td><td{mark}>{row.damage[form]:.1e}</td>"
