"""Searches for a capacity as figures: the levels of one search as curves, several searches as bars with the level that failed next.

Series differ by colour, line and marker or hatch (see `plots`); filled markers passed, hollow ones failed, crosses were not measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from workbench.errors import RecordError
from workbench.results import Record
from workbench.show.plots import MUTED, STYLES

Rows = Sequence[Mapping[str, Any]]
NO_LIMIT = 1 << 40


def capacity_figure(record: Record) -> Figure:
    """The levels of one search, or what several searches carried. Raises RecordError if no level was measured."""
    searches: dict[str, list[dict[str, Any]]] = {}
    for row in record.rows:
        searches.setdefault(str(row.get("search", record.config.get("engine", "capacity"))), []).append(row)
    if not any(row.get("late_share") is not None for row in record.rows):
        raise RecordError("capacity: no level was measured; there is nothing to draw")
    if len(searches) > 1:
        return _several(searches)
    figure = Figure(figsize=(10.0, 3.6), layout="constrained")
    late, latency = figure.subplots(1, 2)
    for name, rows in searches.items():
        _levels(late, rows, 0, ("late_share", 100.0), f"{name}: {_carried_text(rows)}")
        _levels(latency, rows, 0, ("latency_p95_ms", 1.0), None)
    _late_axes(late, record)
    _latency_axes(latency)
    late.legend(frameon=False, fontsize=8, title="carried streams", title_fontsize=8, loc="upper left")
    return figure


def _several(searches: Mapping[str, Rows]) -> Figure:
    """A row of panels per chunk length, since streams of another chunk length are another amount of work: carried streams, and p95."""
    groups: dict[str, list[str]] = {}
    for name in searches:
        found = re.search(r"(?:^|_)(\d+)ms", name)
        groups.setdefault(found[1] if found else "", []).append(name)
    groups = dict(sorted(groups.items(), key=lambda group: int(group[0] or 0)))
    looks = {short: number for number, short in enumerate(dict.fromkeys(map(_short, searches)))}  # one look an engine
    heights = [1.6 + 0.5 * len(names) for names in groups.values()]
    figure = Figure(figsize=(11.0, sum(heights)), layout="constrained")
    panels = figure.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
    for (chunk, names), (bars, latency) in zip(groups.items(), panels, strict=True):
        labels = [_short(name) for name in names]
        for number, (name, short) in enumerate(zip(names, labels, strict=True)):
            _carried_bar(bars, len(names) - 1 - number, searches[name], looks[short])
            _levels(latency, searches[name], looks[short], ("latency_p95_ms", 1.0), short, outside=False)
        bars.set_yticks(range(len(names) - 1, -1, -1), labels)
        known = any(_carried(searches[name]) or _failed(searches[name]) for name in names)
        bars.set(
            xscale="log" if known else "linear",
            xlabel="live streams carried; hollow: the first level above that failed",
        )
        bars.margins(y=0.12)
        bars.set_xlim(0.7, 60 * bars.get_xlim()[1])
        bars.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        bars.set_title(f"chunks of {chunk} ms" if chunk else "", fontsize=10, loc="left")
        _latency_axes(latency)
        latency.margins(x=0.12, y=0.2)
        latency.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _short(name: str) -> str:
    """The name of a search without its chunk."""
    return re.sub(r"_\d+ms", "", name).replace("_", " ")


def _carried_bar(axes: Axes, place: int, rows: Rows, number: int) -> None:
    colour, _, marker, hatch = STYLES[number % len(STYLES)]
    carried, failed = _carried(rows), min(_failed(rows), default=None)
    if carried:  # on a logarithmic axis nothing has no place
        axes.barh(place, carried, 0.6, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
    axes.annotate(
        _carried_text(rows) + (f" ({failed:,} failed)" if failed else ""),
        (max(carried, failed or 0, 1), place),
        xytext=(9, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )
    if failed:
        axes.plot([failed], [place], marker=marker, color=colour, markerfacecolor="white", linestyle="none")


def _failed(rows: Rows) -> list[int]:
    return [row["streams"] for row in rows if row["passed"] == "no"]


def _carried(rows: Rows) -> int:
    """The largest level that passed below every one that failed; 0 if none did."""
    limit = min(_failed(rows), default=NO_LIMIT)
    return max((row["streams"] for row in rows if row["passed"] == "yes" and row["streams"] < limit), default=0)


def _carried_text(rows: Rows) -> str:
    carried = _carried(rows)
    return f"{carried:,}{'' if _failed(rows) else ' or more'}" if carried else "none passed"


def _late_axes(late: Axes, record: Record) -> None:
    allowed = record.numbers.get("late_share_max")
    if allowed is not None:
        late.axhline(100 * allowed, color=MUTED, linewidth=0.9, linestyle=(0, (1, 2)))
        late.annotate(
            f"allowed {100 * allowed:g} %",
            (0.99, 100 * allowed),
            xycoords=("axes fraction", "data"),
            fontsize=8,
            ha="right",
            va="bottom",
        )
    late.set_yscale("symlog", linthresh=0.1)
    late.set_ylim(bottom=-0.02)
    late.set(xlabel="live streams", ylabel="chunks late by one chunk, %")
    _plain_ticks(late)


def _latency_axes(latency: Axes) -> None:
    latency.set(xlabel="live streams", ylabel="chunk latency p95, ms")
    if not any(len(line.get_xdata()) for line in latency.lines):  # a logarithmic axis needs something to span
        latency.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center", color=MUTED)
        return
    latency.set_yscale("log")
    _plain_ticks(latency)
    latency.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))  # 3 and 4, 8 and 9 would touch
    latency.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    latency.tick_params(axis="y", which="minor", labelsize=7)


def _plain_ticks(axes: Axes) -> None:
    axes.set_xscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _levels(
    axes: Axes, rows: Rows, number: int, value: tuple[str, float], label: str | None, outside: bool = True
) -> None:
    """A line through the measured levels of one search, a marker for each run; `outside`: those without the value at the upper edge."""
    name, factor = value
    colour, line, marker, _ = STYLES[number % len(STYLES)]
    found = sorted((row for row in rows if row.get(name) is not None), key=lambda row: row["streams"])
    points = [(row["streams"], factor * row[name]) for row in found]
    axes.plot(
        *(zip(*points, strict=True) if points else ((), ())),
        color=colour,
        linestyle=line,
        marker=marker,
        markersize=7,
        linewidth=1.6,
        label=label,
    )
    for row, (x, y) in zip(found, points, strict=True):
        inside = colour if row["passed"] == "yes" else "white"
        axes.plot([x], [y], marker=marker, color=colour, markerfacecolor=inside, markersize=7, linestyle="none")
    if not outside:
        return
    for row in rows:
        if row.get(name) is None or row["passed"] == "not measured":
            axes.plot(
                [row["streams"]],
                [1.0],
                marker="x" if row["passed"] == "not measured" else marker,
                color=colour,
                markerfacecolor="white",
                transform=axes.get_xaxis_transform(),
                clip_on=False,
            )
