"""Any record as a figure: what `workbench show RECORD --figure out.png` draws.

    record_figure(Record.load("studies/h200/capacity.json")).savefig("capacity.png")

One function per kind of record, all from what the record holds. A kind without a drawing of its own gets bars of those of its numbers that
share a unit, or of its rows. Series differ by colour, line and marker or hatch (see `plots`), and passed and failed by filled and hollow markers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from workbench.errors import RecordError
from workbench.results import Record
from workbench.show.plots import MUTED, STYLES, batch_sizes, cost_curves, latency_curves, title
from workbench.show.study_plots import history
from workbench.show.timeline import idle_bar_figure

UNITS = ("_ms", "_us", "_s", "_mib", "_bytes", "_share", "_per_second", "_per_s")


def record_figure(record: Record) -> Figure:
    """The figure of a record. Raises RecordError if it holds nothing that can be drawn."""
    return FIGURES.get(record.kind, number_bars)(record)


def run_figure(record: Record) -> Figure:
    """A paced or simulated run: its latency distribution and, where batching was on, its batch sizes."""
    if not record.counters.get("batch_sizes"):
        return latency_curves({record.kind: record})
    figure = Figure(figsize=(10.0, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    latency_curves({record.kind: record}, left)
    batch_sizes({record.kind: record}, right)
    return figure


def capacity_figure(record: Record) -> Figure:
    """Late chunks and latency against live streams, a line per search; hollow markers failed, crosses were not measured."""
    searches: dict[str, list[dict[str, Any]]] = {}
    for row in record.rows:
        searches.setdefault(str(row.get("search", record.config.get("engine", "capacity"))), []).append(row)
    if not any(row.get("late_share") is not None for row in record.rows):
        raise RecordError("capacity: no level was measured; there is nothing to draw")
    groups: dict[str, list[str]] = {}
    for name in searches:  # searches of another chunk length go into another row: their streams are of another size
        groups.setdefault(name.rpartition("_")[2] if name.endswith("ms") else "", []).append(name)
    figure = Figure(figsize=(10.0, 3.6 * len(groups)), layout="constrained")
    for (chunk, names), (late, latency) in zip(
        groups.items(), figure.subplots(len(groups), 2, squeeze=False), strict=True
    ):
        for number, name in enumerate(names):
            _levels(late, searches[name], number, ("late_share", 100.0), _labelled(name, searches[name]))
            _levels(latency, searches[name], number, ("latency_p95_ms", 1.0), None)
        _capacity_axes(late, latency, record)
        late.set_title(f"chunks of {chunk}" if chunk else "", fontsize=10, loc="left")
        late.legend(frameon=False, fontsize=8, title="carried streams", title_fontsize=8, loc="upper left")
    return figure


def _capacity_axes(late: Axes, latency: Axes, record: Record) -> None:
    allowed = record.numbers.get("late_share_max", _rule(record).get("late_share_max"))
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
    latency.set_yscale("log")
    latency.set(xlabel="live streams", ylabel="chunk latency p95, ms")
    for axes in (late, latency):
        axes.set_xscale("log", base=2)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    latency.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    latency.tick_params(axis="y", which="minor", labelsize=7)


def levels_figure(record: Record) -> Figure:
    """Percentiles of the chunk latency and of the final result against live streams."""
    rows = sorted(record.rows, key=lambda row: row["streams"])
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    names = ("latency_p50_ms", "latency_p95_ms", "latency_p99_ms", "final_p95_ms")
    _lines(
        axes, [row["streams"] for row in rows], {title(n).removesuffix(", ms"): [r.get(n) for r in rows] for n in names}
    )
    axes.set(xlabel="live streams", ylabel="latency from the due time, ms")
    axes.set_ylim(bottom=0)
    return figure


def twin_check_figure(record: Record) -> Figure:
    """Measured and simulated p50 and p95 of every pair, with the difference in per cent of the measured one."""
    rows = [row for row in record.rows if row.get("latency_p50_real_ms") is not None]
    _some(record, rows)
    figure = Figure(figsize=(10.0, 2.4 + 0.12 * len(rows)), layout="constrained")
    labels = [f"{row['streams']} · {row['batching']}" for row in rows]
    for axes, point in zip(figure.subplots(1, 2), ("p50", "p95"), strict=True):
        series = {
            "real (paced run)": [row[f"latency_{point}_real_ms"] for row in rows],
            "twin (simulated)": [row[f"latency_{point}_twin_ms"] for row in rows],
        }
        differences = [f"{100 * row[f'latency_{point}_difference']:+.0f} %" for row in rows]
        _bars(axes, labels, series, differences)
        axes.set_xlabel(f"chunk latency {point}, ms")
    return figure


def step_table_figure(record: Record) -> Figure:
    """Every step as a bar of its unprofiled p50, split into the time that the device was busy and the rest."""
    _some(record, record.rows)
    labels = [
        f"[{r['context'][0]}, {r['context'][1]}] × {r['batch']} {'graphed' if r['graphed'] else 'eager'}"
        for r in record.rows
    ]
    total = np.asarray([row["step_p50_ms"] for row in record.rows], dtype=float)
    on_gpu = all("gpu_busy_ms_per_step" in row for row in record.rows)
    name = "gpu_busy_ms_per_step" if on_gpu else "thread_busy_ms_per_step"
    busy = np.minimum(total, [row.get(name, 0.0) for row in record.rows])
    figure = Figure(figsize=(8.0, 1.2 + 0.36 * len(labels)), layout="constrained")
    axes, places = figure.subplots(), np.arange(len(labels))[::-1]
    colour, other = STYLES[0], STYLES[1]
    axes.barh(places, busy, 0.7, color=colour[0], label="GPU busy" if on_gpu else "operators")
    axes.barh(
        places,
        total - busy,
        0.7,
        left=busy,
        color=other[0],
        hatch=other[3],
        edgecolor="white",
        linewidth=0,
        label="idle" if on_gpu else "Python",
    )
    launches = [row.get("launches_per_step") for row in record.rows]
    for place, value, count in zip(places, total, launches, strict=True):
        axes.text(
            value,
            place,
            f" {value:.3g} ms" + (f", {count:.0f} launches" if count is not None else ""),
            va="center",
            fontsize=8,
        )
    axes.set_yticks(places, labels)
    axes.set_xlabel("one step, ms (unprofiled p50)")
    axes.margins(x=0.25)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def graphed_table_figure(record: Record) -> Figure:
    """Eager and graphed milliseconds of every row, with the speed-up."""
    _some(record, record.rows)
    labels = [f"[{r['context'][0]}, {r['context'][1]}] × {r['batch']} {r['dtype']}" for r in record.rows]
    figure = Figure(figsize=(7.0, 1.2 + 0.5 * len(labels)), layout="constrained")
    axes = figure.subplots()
    series = {"eager": [r["eager_ms_p50"] for r in record.rows], "graphed": [r["graphed_ms_p50"] for r in record.rows]}
    _bars(axes, labels, series, [f"{row['speedup']:.1f}×" for row in record.rows])
    axes.set_xlabel("encoder step, ms (p50)")
    return figure


def bench_figure(record: Record) -> Figure:
    """Throughput against the number of callers."""
    _some(record, record.rows)
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    _lines(axes, [row["concurrency"] for row in record.rows], {"throughput": [row["rtfx"] for row in record.rows]})
    axes.set(xlabel="callers at once", ylabel="seconds of audio per second (RTFx)")
    axes.set_ylim(bottom=0)
    return figure


def number_bars(record: Record) -> Figure:
    """Bars of those numbers that share the most frequent unit."""
    plain = {k: float(v) for k, v in record.numbers.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    if not plain:
        return row_bars(record)
    units = Counter(_unit(name) for name in plain)
    unit = units.most_common(1)[0][0]
    shown = {name: value for name, value in plain.items() if _unit(name) == unit}
    figure = Figure(figsize=(7.0, 1.0 + 0.34 * len(shown)), layout="constrained")
    axes = figure.subplots()
    _bars(
        axes,
        [title(name).rpartition(", ")[0] or title(name) for name in shown],
        {record.kind: list(shown.values())},
        None,
    )
    axes.set_xlabel(title(f"value{unit}").partition(", ")[2] or unit.replace("_", " ").strip() or "count")
    return figure


def row_bars(record: Record) -> Figure:
    """A bar per row: its last column of milliseconds (of any fractions if there is none), labelled with what is not a fraction."""
    measured = [name for row in record.rows for name, value in row.items() if isinstance(value, float)]
    if not measured:
        raise RecordError(f"a record of kind {record.kind!r} without numbers: there is nothing to draw")
    name = next((name for name in reversed(measured) if name.endswith("_ms")), measured[-1])
    rows = [row for row in record.rows if isinstance(row.get(name), float)]
    labels = [" ".join(str(value)[:24] for value in row.values() if not isinstance(value, float)) for row in rows]
    figure = Figure(figsize=(9.0, 1.0 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    _bars(axes, labels, {name: [row[name] for row in rows]}, None)
    axes.set_xlabel(title(name))
    return figure


def _unit(name: str) -> str:
    return next((unit for unit in UNITS if name.endswith(unit)), "")


def _rule(record: Record) -> Mapping[str, Any]:
    """The rule of a record of one or of several searches."""
    configs = [record.config, *(value for value in record.config.values() if isinstance(value, dict))]
    return next((config["rule"] for config in configs if isinstance(config.get("rule"), dict)), {})


def _labelled(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    failed = [row["streams"] for row in rows if row["passed"] == "no"]
    passed = [
        row["streams"] for row in rows if row["passed"] == "yes" and row["streams"] < min(failed, default=1 << 40)
    ]
    return f"{name}: {max(passed) if passed else 'none passed'}{'' if failed or not passed else ' or more'}"


def _levels(
    axes: Axes, rows: Sequence[Mapping[str, Any]], number: int, value: tuple[str, float], label: str | None
) -> None:
    """A line through the measured levels of one search, and a marker for each run."""
    name, factor = value
    colour, line, marker, _ = STYLES[number % len(STYLES)]
    found = sorted((row for row in rows if row.get(name) is not None), key=lambda row: row["streams"])
    points = [(row["streams"], factor * row[name]) for row in found]
    axes.plot(
        *(zip(*points, strict=True) if points else ((), ())), color=colour, linestyle=line, linewidth=1.6, label=label
    )
    for row, (x, y) in zip(found, points, strict=True):
        inside = colour if row["passed"] == "yes" else "white"
        axes.plot([x], [y], marker=marker, color=colour, markerfacecolor=inside, markersize=7, linestyle="none")
    for row in rows:
        if row.get(name) is None and row["passed"] == "no":
            axes.plot(
                [row["streams"]],
                [1.0],
                marker=marker,
                color=colour,
                markerfacecolor="white",
                transform=axes.get_xaxis_transform(),
                clip_on=False,
            )
        elif row["passed"] == "not measured":
            axes.plot(
                [row["streams"]], [1.0], marker="x", color=colour, transform=axes.get_xaxis_transform(), clip_on=False
            )


def _lines(axes: Axes, xs: Sequence[float], series: Mapping[str, Sequence[float | None]]) -> None:
    for number, (label, values) in enumerate(series.items()):
        colour, line, marker, _ = STYLES[number % len(STYLES)]
        points = [(x, y) for x, y in zip(xs, values, strict=True) if y is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=line, marker=marker, label=label)
    axes.legend(frameon=False)


def _bars(
    axes: Axes, labels: Sequence[str], series: Mapping[str, Sequence[float]], notes: Sequence[str] | None
) -> None:
    """Horizontal bars, a group per label, the first label on top."""
    height = 0.8 / len(series)
    places = np.arange(len(labels))[::-1]
    for number, (name, values) in enumerate(series.items()):
        colour, _, _, hatch = STYLES[number % len(STYLES)]
        at = places + ((len(series) - 1) / 2 - number) * height
        bars = axes.barh(
            at, values, height * 0.94, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=name
        )
        axes.bar_label(bars, [f"{value:.4g}" for value in values], padding=2, fontsize=8)
    for place, note, values in zip(places, notes or (), zip(*series.values(), strict=True), strict=False):
        axes.annotate(note, (max(values), place), xytext=(38, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, labels)
    axes.margins(x=0.25)
    if len(series) > 1:
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(series), fontsize=8)


def _some(record: Record, rows: Sequence[Any]) -> None:
    if not rows:
        raise RecordError(f"a record of kind {record.kind!r} without rows: there is nothing to draw")


FIGURES: dict[str, Callable[[Record], Figure]] = {
    "paced": run_figure,
    "twin": run_figure,
    "costs": cost_curves,
    "capacity": capacity_figure,
    "paced_levels": levels_figure,
    "twin_check": twin_check_figure,
    "profile": lambda record: idle_bar_figure({str(record.config.get("device", "step")): record}),
    "profile_table": step_table_figure,
    "graphed_table": graphed_table_figure,
    "bench": bench_figure,
    "study": history,
}
