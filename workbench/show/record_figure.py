"""Any record as a figure: what `workbench show RECORD --figure out.png` draws.

    record_figure(Record.load("studies/h200/capacity.json")).savefig("capacity.png")

One function per kind of record, all from what the record holds. A kind without a drawing of its own gets bars of those of its numbers that
share a unit, or of its rows. Series differ by colour, line and marker or hatch (see `plots`), and passed and failed by filled and hollow markers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from workbench.errors import RecordError
from workbench.results import Record
from workbench.show.capacity_figure import capacity_figure
from workbench.show.plots import STYLES, bar_groups, batch_sizes, cost_curves, latency_curves, title
from workbench.show.step_figures import fast_table_figure, graphed_table_figure, some_rows, step_table_figure
from workbench.show.study_plots import history
from workbench.show.timeline import idle_bar_figure

# Levels further apart than this are drawn on a logarithmic axis.
WIDE_RANGE = 10
# What a run was asked for or found, not what it measured.
SETTINGS = ("seconds", "factor", "rounds", "repeats", "load_average", "most_waiting_s")
UNITS = ("_per_second", "_per_s", "_ms", "_us", "_s", "_mib", "_bytes", "_share")


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
    some_rows(record, rows)
    figure = Figure(figsize=(10.0, 1.4 + 0.36 * len(rows)), layout="constrained")
    labels = [f"{row['streams']} · {row['batching']}" for row in rows]
    for axes, point in zip(figure.subplots(1, 2), ("p50", "p95"), strict=True):
        series = {
            "real (paced run)": [row[f"latency_{point}_real_ms"] for row in rows],
            "twin (simulated)": [row[f"latency_{point}_twin_ms"] for row in rows],
        }
        differences = [f"{100 * row[f'latency_{point}_difference']:+.1f} %" for row in rows]
        bar_groups(axes, labels, series, differences)
        axes.set_xlabel(f"chunk latency {point}, ms")
    return figure


def bench_figure(record: Record) -> Figure:
    """Throughput against the number of callers; of one level alone, beside the same callers without batching where they were compared."""
    some_rows(record)
    if len(record.rows) == 1:
        return _one_level(record)
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    _lines(axes, [row["concurrency"] for row in record.rows], {"throughput": [row["rtfx"] for row in record.rows]})
    axes.set(xlabel="callers at once", ylabel="seconds of audio per second (RTFx)")
    axes.set_ylim(bottom=0)
    return figure


def _one_level(record: Record) -> Figure:
    row, numbers = record.rows[0], record.numbers
    bars = {f"{row['concurrency']} callers": row["rtfx"]}
    if numbers.get("unbatched_rtfx") is not None:
        bars = {
            f"{numbers['streams']} callers, batched": numbers["batched_rtfx"],
            f"{numbers['streams']} callers, one after the other": numbers["unbatched_rtfx"],
        }
    figure = Figure(figsize=(7.0, 1.0 + 0.34 * len(bars)), layout="constrained")
    axes = figure.subplots()
    bar_groups(axes, list(bars), {"throughput": list(bars.values())})
    axes.set_xlabel("seconds of audio per second (RTFx)")
    return figure


def transcribed_figure(record: Record) -> Figure:
    """How many texts of each run differ from those of NeMo's eager step in fp32."""
    some_rows(record)
    figure = Figure(figsize=(7.0, 1.0 + 0.34 * len(record.rows)), layout="constrained")
    axes = figure.subplots()
    labels = [f"{row['run'].replace('_', ' ')}, {80 * (row['context'][1] + 1)} ms" for row in record.rows]
    bar_groups(axes, labels, {"differ": [row["texts_unlike_eager_fp32"] for row in record.rows]})
    axes.set(xlabel="texts that differ from NeMo's eager step in fp32", xlim=(0, max(1, record.rows[0]["clips"])))
    axes.set_title(f"{record.rows[0]['clips']} clips a run", fontsize=10, loc="left")
    return figure


def number_bars(record: Record) -> Figure:
    """Bars of those numbers that share the most frequent unit; logarithmic where they differ by more than a thousand."""
    plain = {k: float(v) for k, v in record.numbers.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    if not plain:
        return row_bars(record)
    plain = {name: value for name, value in plain.items() if name not in SETTINGS} or plain
    units = Counter(_unit(name) for name in plain)
    unit = units.most_common(1)[0][0]
    shown = {name: value for name, value in plain.items() if _unit(name) == unit}
    figure = Figure(figsize=(7.0, 1.0 + 0.34 * len(shown)), layout="constrained")
    axes = figure.subplots()
    bar_groups(
        axes,
        [title(name).rpartition(", ")[0] or title(name) for name in shown],
        {record.kind: list(shown.values())},
    )
    positive = [value for value in shown.values() if value > 0]
    if positive and max(positive) > 1000 * min(positive) and min(shown.values()) >= 0:
        axes.set_xscale("symlog", linthresh=min(positive))
        axes.set_xlim(0, 10 * max(positive))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axes.set_xlabel(title(f"value{unit}").partition(", ")[2] or unit.replace("_", " ").strip() or "count")
    return figure


def overload_figure(record: Record) -> Figure:
    """What became of the recordings that were offered, and how soon it was over."""
    fates = ("offered", "refused_queue_full", "refused_arena_full", "accepted", "completed", "cut_short", "mismatches")
    after = {"recovery_s": "work off what is owed", "new_stream_recovery_s": "serve a new stream as when idle"}
    numbers = record.numbers
    found = [name for name in fates if numbers.get(name) is not None]
    if not found:
        return number_bars(record)
    figure = Figure(figsize=(11.0, 1.2 + 0.34 * len(found)), layout="constrained")
    left, right = figure.subplots(1, 2)
    bar_groups(left, [name.replace("_", " ") for name in found], {"recordings": [numbers[name] for name in found]})
    left.set_xlabel(
        f"recordings in {numbers.get('seconds', 0):g} s at {numbers.get('factor', 0):g} × the sustained rate"
    )
    taken = {told: numbers[name] for name, told in after.items() if numbers.get(name) is not None}
    bar_groups(right, list(taken), {"after": list(taken.values())})
    right.set_xlabel("after the load's end, s")
    return figure


def row_bars(record: Record) -> Figure:
    """A bar per row: its first median in ms (else its last column of ms, else of fractions), labelled with what is not a fraction."""
    measured = [name for row in record.rows for name, value in row.items() if isinstance(value, float)]
    if not measured:
        raise RecordError(f"a record of kind {record.kind!r} without numbers: there is nothing to draw")
    medians = [name for name in measured if "p50" in name and "ms" in name.split("_")]
    in_ms = [name for name in measured if name.endswith("_ms")]
    name = (medians or in_ms[::-1] or measured[::-1])[0]
    rows = [row for row in record.rows if isinstance(row.get(name), float)]
    labels = [" ".join(_row_label(row)) for row in rows]
    figure = Figure(figsize=(9.0, 1.0 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    bar_groups(axes, labels, {name: [row[name] for row in rows]})
    axes.set_xlabel(title(name))
    return figure


def _row_label(row: Mapping[str, Any]) -> list[str]:
    """What tells a row: everything but fractions, switches and sample counts, cut to 24 characters each."""
    kept = {k: v for k, v in row.items() if not isinstance(v, float | bool) and not k.endswith("_n")}
    return [str(value) if len(str(value)) <= 24 else f"{str(value)[:23]}…" for value in kept.values()]


def _unit(name: str) -> str:
    """The unit within a name, as `_ms` in `step_p50_ms_early`."""
    return next((unit for unit in UNITS if f"{unit}_" in f"{name}_"), "")


def _lines(axes: Axes, xs: Sequence[float], series: Mapping[str, Sequence[float | None]]) -> None:
    for number, (label, values) in enumerate(series.items()):
        colour, line, marker, _ = STYLES[number % len(STYLES)]
        points = [(x, y) for x, y in zip(xs, values, strict=True) if y is not None]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=line, marker=marker, label=label)
    axes.legend(frameon=False)


def confirm_figure(record: Record) -> Figure:
    """Every real run of the finalists of a study: RTFx of recordings, streams where runs differ in them, else p95. Hollow: broke a limit; crossed, of
    streams: not measured, since the load generator lagged or there was no memory."""
    rows, measured = record.rows, [row for row in record.rows if row.get("kept") is not None]
    if not measured:
        raise RecordError("confirm: no run was measured; there is nothing to draw")
    name = "rtfx" if any("rtfx" in row for row in measured) else "latency_p95_ms"
    if len({row.get("streams") for row in measured}) > 1:
        name = "streams"
    drawn = [row for row in (rows if name == "streams" else measured) if row.get(name) is not None]
    labels = list(dict.fromkeys(row["label"] for row in rows))
    figure = Figure(figsize=(7.0, 1.2 + 0.4 * len(labels)), layout="constrained")
    axes = figure.subplots()
    colour = STYLES[0][0]
    for row in drawn:
        style = (
            {"marker": "x"}
            if row["kept"] is None
            else {"marker": "o", "markerfacecolor": colour if row["kept"] else "white"}
        )
        axes.plot(row[name], labels.index(row["label"]), color=colour, linestyle="", **style)
    axes.set_yticks(range(len(labels)), [label.replace("_", " ") for label in labels])
    axes.set_ylim(len(labels) - 0.5, -0.5)
    values = [row[name] for row in drawn]
    if name == "streams" and max(values) > WIDE_RANGE * min(values):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(left=0)
    said = {False: "; hollow: broke a limit", None: "; crossed: not measured"}
    axes.set_xlabel(
        f"{title(name)}, a dot a run" + "".join(said[k] for k in said if any(row["kept"] is k for row in drawn))
    )
    return figure


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
    "fast_table": fast_table_figure,
    "transcribed_speech": transcribed_figure,
    "bench": bench_figure,
    "overload": overload_figure,
    "confirm": confirm_figure,
    "study": history,
}
