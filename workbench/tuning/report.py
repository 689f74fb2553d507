"""One self-contained HTML page from sections of text, tables and charts; nothing is fetched when it is opened.

    report = Report(title="Demo", verdict="p95 41 ms, 23 % below the default", sections=(Section("Latency", charts=(Chart(figure, "…"),)),))
    write_report("demo/report.html", report)

Charts are matplotlib figures; each is embedded as SVG twice, with dark ink and with light, and the reader's colour scheme picks one. What must
be read with the numbers (`warnings`, such as untrained weights) stands above them.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Patch

INK_LIGHT, INK_DARK = "#1f2328", "#d7dce2"
TEMPLATE = "report.html.j2"
# Wider charts do not stand beside another.
WIDE_INCHES = 6.0
# Of the parts of a chart that are drawn as pixels.
PIXELS_PER_INCH = 110
# Bars darker than this would vanish on a dark page; they are drawn in ink.
NEARLY_BLACK = 0.2


@dataclass(frozen=True)
class Fact:
    """A number of the headline: its value with unit, and a line below it."""

    label: str
    value: str
    detail: str = ""


@dataclass(frozen=True)
class Words:
    """A cell that marks words: pairs of (kind, text) with the kinds `same`, `wrong`, `added`, `missing`."""

    spans: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Table:
    """Columns carry the units. Cells are text, numbers, None (a dash), truth values, lists, or `Words`; marked: rows to set off."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Chart:
    """A figure and what to see in it."""

    figure: Figure
    caption: str


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, charts, tables and preformatted text, in this order; folded: the tables open on demand."""

    title: str
    text: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    code: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Report:
    """A page. verdict: the finding in one sentence; lead: what else to know at once. environment and sources (one row per record: what, command, made at) say where the numbers come from."""

    title: str
    verdict: str
    lead: str = ""
    facts: tuple[Fact, ...] = ()
    warnings: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    sources: Sequence[Sequence[str]] = ()


def write_report(path: str | Path, report: Report) -> Path:
    """Write the page, replacing an older one in one step, and return its path."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        numeric_columns=_numeric_columns, cell=cell_text, picture=_picture, anchor=_anchor, flat=_flat
    )
    environment.tests.update(words=lambda value: isinstance(value, Words))
    text = environment.get_template(TEMPLATE).render(report=report)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(target)
    return target


def cell_text(value: Any) -> str:
    """A table cell as text: four significant digits, a dash for nothing."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(cell_text, value))
    return str(value)


def svg(figure: Figure, ink: str) -> bytes:
    """The figure as SVG on no background, its text and frame in `ink`; glyphs are paths, so that it looks the same everywhere."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "workbench"}):
        for axes in figure.axes:
            _ink(axes, ink)
        for legend in figure.legends:
            _ink_legend(legend, ink)
        for patch in figure.findobj(Patch):
            if patch.get_fill() and max(to_rgb(patch.get_facecolor())) < NEARLY_BLACK:
                patch.set_facecolor(ink)
        figure.savefig(
            buffer, format="svg", dpi=PIXELS_PER_INCH, transparent=True, metadata={"Date": None, "Creator": None}
        )
    return buffer.getvalue()


def _ink(axes: Axes, ink: str) -> None:
    axes.tick_params(which="both", colors=ink)
    for part in (axes.xaxis.label, axes.yaxis.label, axes.title, *axes.texts):
        part.set_color(ink)
    for name, spine in axes.spines.items():
        spine.set_edgecolor(ink)
        spine.set_visible(name in ("left", "bottom"))
    legend = axes.get_legend()
    if legend is not None:
        _ink_legend(legend, ink)


def _ink_legend(legend: Legend, ink: str) -> None:
    for text in (*legend.get_texts(), legend.get_title()):
        text.set_color(ink)


def _picture(chart: Chart) -> dict[str, Any]:
    """Data URIs of a chart for light and dark pages, its width in CSS pixels, and whether it needs a row of its own."""
    uris = {
        name: "data:image/svg+xml;base64," + base64.b64encode(svg(chart.figure, ink)).decode()
        for name, ink in (("light", INK_LIGHT), ("dark", INK_DARK))
    }
    width = chart.figure.get_figwidth()
    return {**uris, "width": f"{width * 96:.0f}", "wide": width > WIDE_INCHES}


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _flat(mapping: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Nested plain data as (dotted key, text)."""
    out: list[tuple[str, str]] = []
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            out += [(f"{key}.{below}", text) for below, text in _flat(value)]
        else:
            out.append((key, cell_text(value)))
    return out


def _numeric_columns(table: Table) -> list[bool]:
    """Per column whether it holds numbers, apart from dashes, truth values and the like."""
    return [any(_numeric(row[place]) for row in table.rows) for place in range(len(table.columns))]


def _numeric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
