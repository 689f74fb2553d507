"""Figures of runs and costs, drawn from records and nothing else (those of studies are in `study_plots`).

    runs = {"default": Record.load("demo/paced_default.json"), "best": Record.load("demo/paced_best.json")}
    latency_curves(runs).savefig("latency.png");  batch_sizes(runs);  cost_curves(Record.load("demo/costs.json"))

Every function returns a Figure made without pyplot; with `axes=` it draws into given axes instead, as a notebook wants it. Series differ
by colour (Okabe and Ito, "Color Universal Design", 2008), by line or hatch, and by marker, so a printer or colour blindness loses nothing.
Axes carry units. A record without what a figure needs raises RecordError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from workbench.errors import RecordError
from workbench.results import Record

# colour, line, marker, hatch of the 1st, 2nd, … series
STYLES = (
    ("#0072B2", "-", "o", ""),
    ("#E69F00", "--", "s", "////"),
    ("#009E73", "-.", "^", "...."),
    ("#CC79A7", ":", "D", "xxxx"),
    ("#56B4E9", (0, (6, 2, 1, 2, 1, 2)), "v", "\\\\\\\\"),
    ("#D55E00", (0, (1, 1)), "P", "++++"),
    ("#000000", (0, (8, 3)), "X", "oo"),
)
MUTED = "#808080"
POINTS = (50, 95, 99)


def latency_curves(runs: Mapping[str, Record], axes: Axes | None = None) -> Figure:
    """Share of chunks that were done within a latency, one line per run, with the p95 marked."""
    _some(runs)
    figure, axes = figure_axes(axes, (5.0, 3.4))
    for number, (label, record) in enumerate(runs.items()):
        colour, line, marker, _ = _style(number)
        shares, latency_ms = _distribution(label, record)
        p95 = float(np.interp(0.95, shares, latency_ms))
        axes.plot(
            latency_ms, shares * 100, color=colour, linestyle=line, linewidth=2, label=f"{label} (p95 {p95:.3g} ms)"
        )
        axes.plot([p95], [95], marker=marker, color=colour, markersize=7, linestyle="none")
    axes.axhline(95, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)))
    _spread_out(axes, [_distribution(label, record)[1] for label, record in runs.items()])
    axes.set(xlabel="chunk latency from its due time, ms", ylabel="chunks done, %", ylim=(0, 101))
    axes.legend(loc="lower right", frameon=False)
    return figure


def latency_bars(runs: Mapping[str, Record], axes: Axes | None = None) -> Figure:
    """p50, p95 and p99 of the chunk latency and p95 of the final result, a bar per run."""
    _some(runs)
    names = [*(f"latency_p{point}_ms" for point in POINTS), "final_p95_ms"]
    kept = [name for name in names if all(record.numbers.get(name) is not None for record in runs.values())]
    if not kept:
        raise RecordError(f"{', '.join(runs)}: no latency percentiles in every record")
    figure, axes = figure_axes(axes, (5.0, 3.4))
    width = 0.8 / len(runs)
    for number, (label, record) in enumerate(runs.items()):
        colour, _, _, hatch = _style(number)
        at = np.arange(len(kept)) + (number - (len(runs) - 1) / 2) * width
        values = [float(record.numbers[name]) for name in kept]
        bars = axes.bar(
            at, values, width * 0.92, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=label
        )
        axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=2, fontsize=8)
    axes.set_xticks(range(len(kept)), [title(name).removesuffix(", ms").removeprefix("latency ") for name in kept])
    axes.set_ylabel("latency from the due time, ms")
    axes.margins(y=0.12)
    axes.legend(frameon=False)
    return figure


def batch_sizes(runs: Mapping[str, Record], axes: Axes | None = None) -> Figure:
    """Share of the chunks that ran in batches of each size, a bar per run."""
    _some(runs)
    shares = {label: _sizes(label, record) for label, record in runs.items()}
    sizes = sorted({size for found in shares.values() for size in found})
    figure, axes = figure_axes(axes, (5.0, 3.4))
    width = 0.84 / len(runs)
    for number, (label, found) in enumerate(shares.items()):
        colour, _, _, hatch = _style(number)
        at = np.arange(len(sizes)) + (number - (len(runs) - 1) / 2) * width
        values = [100 * found.get(size, 0.0) for size in sizes]
        axes.bar(at, values, width * 0.94, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=label)
    step = -(-len(sizes) // 24)
    axes.set_xticks(range(0, len(sizes), step), [str(size) for size in sizes[::step]])
    axes.set(xlabel="chunks in a batch", ylabel="chunks in batches of this size, %")
    axes.legend(frameon=False)
    return figure


def cost_curves(costs: Record) -> Figure:
    """Milliseconds of a step against its batch size, and per chunk in it; lines are medians, the band reaches up to p95."""
    shapes: dict[str, list[dict[str, Any]]] = {}
    for row in costs.rows:
        if "ms_p50" not in row:  # what capturing a graph took is no cost of a step
            continue
        shapes.setdefault(str(row.get("shape", "step")), []).append(row)
    if costs.kind != "costs" or not shapes:
        raise RecordError(
            f"got a record of kind {costs.kind!r} with {len(costs.rows)} rows; needed is one of kind 'costs'"
        )
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    whole, each = figure.subplots(1, 2)
    order = sorted(shapes, key=lambda shape: shape != "steady")
    for number, shape in enumerate(order):
        rows = sorted(shapes[shape], key=lambda row: row["batch"])
        batch = np.asarray([row["batch"] for row in rows], dtype=float)
        p50, p95 = (np.asarray([row[name] for row in rows], dtype=float) for name in ("ms_p50", "ms_p95"))
        colour, line, marker, _ = _style(number)
        drawn = {"color": colour, "linestyle": line, "marker": marker, "markersize": 5, "linewidth": 1.8}
        whole.plot(batch, p50, label=shape, **drawn)
        each.plot(batch, p50 / batch, label=shape, **drawn)
        if shape == "steady":
            whole.fill_between(batch, p50, p95, color=colour, alpha=0.18, linewidth=0)
    for axes in (whole, each):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("chunks in a batch")
        axes.set_ylim(bottom=0)
    whole.set_ylabel("one step, ms")
    each.set_ylabel("one step / chunks in it, ms")
    offline = all(row.get("stage") == "offline" for rows in shapes.values() for row in rows)
    (each if offline else whole).legend(frameon=False, title="recordings of" if offline else "kind of step")
    if offline:
        for axes in (whole, each):
            axes.set_xlabel("recordings in a batch")
        whole.set_ylabel("one batch, ms")
        each.set_ylabel("one batch / recordings in it, ms")
    return figure


def twin_against_real(pairs: Mapping[str, tuple[Record, Record]], axes: Axes | None = None) -> Figure:
    """Per configuration the simulated and the measured p50 and p95, with the difference in per cent of the measured one."""
    if not pairs:
        raise RecordError("no pair of a simulated and a measured run")
    figure, axes = figure_axes(axes, (2.2 + 1.4 * len(pairs), 3.4))
    at, labels = 0.0, list[tuple[float, str]]()
    for label, (twin, real) in pairs.items():
        for point in (50, 95):
            name = f"latency_p{point}_ms"
            values = [_latency(label, record, name) for record in (twin, real)]
            for side, (value, (colour, _, _, hatch)) in enumerate(zip(values, STYLES, strict=False)):
                bar = axes.bar(at + side * 0.4, value, 0.37, color=colour, hatch=hatch, edgecolor="white", linewidth=0)
                bar.set_label(("twin (simulated)", "real (paced run)")[side] if not labels else "_")
            axes.text(at + 0.2, max(values), f"{(values[0] / values[1] - 1) * 100:+.0f} %", ha="center", va="bottom")
            labels.append((at + 0.2, f"{label}\np{point}"))
            at += 1.1
        at += 0.4
    axes.set_xticks([x for x, _ in labels], [text for _, text in labels])
    axes.set_ylabel("chunk latency, ms")
    axes.margins(y=0.15)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def bar_groups(
    axes: Axes,
    labels: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    notes: Sequence[str] | None = None,
) -> None:
    """Horizontal bars with their values, a group per label, the first label on top; None leaves a gap. A note stands right of its group."""
    height = 0.8 / len(series)
    places = np.arange(len(labels))[::-1]
    for number, (name, values) in enumerate(series.items()):
        colour, _, _, hatch = _style(number)
        at = places + ((len(series) - 1) / 2 - number) * height
        known = [(place, value) for place, value in zip(at, values, strict=True) if value is not None]
        bars = axes.barh(
            [place for place, _ in known],
            [value for _, value in known],
            height * 0.94,
            color=colour,
            hatch=hatch,
            edgecolor="white",
            linewidth=0,
            label=name,
        )
        axes.bar_label(bars, [_short(value) for _, value in known], padding=2, fontsize=8)
    for place, note, group in zip(places, notes or (), zip(*series.values(), strict=True), strict=False):
        longest = max(value for value in group if value is not None)
        axes.annotate(note, (longest, place), xytext=(42, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, labels)
    axes.margins(x=0.45 if notes else 0.25)
    if len(series) > 1:
        axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(series), fontsize=8)


def _short(value: float) -> str:
    """Three or four digits, and whole thousands with a separator instead of an exponent."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def figure_axes(axes: Axes | None, size: tuple[float, float]) -> tuple[Figure, Axes]:
    """The caller's axes and their figure, or those of a new figure of `size` inches."""
    if axes is not None:
        figure = axes.get_figure()
        assert isinstance(figure, Figure)
        return figure, axes
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots()


def _style(number: int) -> tuple[str, Any, str, str]:
    return STYLES[number % len(STYLES)]


def _some(runs: Mapping[str, Record]) -> None:
    if not runs:
        raise RecordError("no runs; at least one record is needed")


def title(number: str) -> str:
    """`latency_p95_ms` → `latency p95, ms`."""
    name, _, unit = number.rpartition("_")
    units = {"ms": "ms", "us": "µs", "s": "s", "bytes": "bytes", "share": "share of 1"}
    return f"{name.replace('_', ' ')}, {units[unit]}" if name and unit in units else number.replace("_", " ")


def _distribution(label: str, record: Record) -> tuple[Any, Any]:
    """Shares 0…1 and the latency in ms at each: the stored quantiles, or what percentiles there are."""
    rows = [
        (row["share"], row["latency_ms"]) for row in record.rows if row.get("latency_ms") is not None and "share" in row
    ]
    if not rows:
        known = [(point / 100, record.numbers.get(f"latency_p{point}_ms")) for point in POINTS]
        rows = [(share, value) for share, value in known if value is not None]
    if not rows:
        raise RecordError(f"{label}: a record of kind {record.kind!r} without chunk latencies")
    shares, latency_ms = np.asarray(sorted(rows), dtype=float).T
    return shares, latency_ms


def _spread_out(axes: Axes, values: Sequence[Any]) -> None:
    """A logarithmic axis where one run is far slower than another; else from zero to just beyond the slowest p99."""
    medians = [float(np.median(found)) for found in values]
    if max(medians) > 8 * max(min(medians), 1e-3):
        axes.set_xscale("log")
    else:
        axes.set_xlim(0, 1.15 * max(float(np.quantile(found, 0.97)) for found in values))


def _latency(label: str, record: Record, name: str) -> float:
    if record.numbers.get(name) is None:
        raise RecordError(f"{label}: a record of kind {record.kind!r} without {name}")
    return float(record.numbers[name])


def _sizes(label: str, record: Record) -> dict[int, float]:
    counts = {int(size): int(size) * count for size, count in record.counters.get("batch_sizes", {}).items()}
    if not counts:
        raise RecordError(f"{label}: a record of kind {record.kind!r} without batch_sizes; was batching on?")
    total = sum(counts.values())
    return {size: count / total for size, count in counts.items()}
