"""Tables of steps as figures: whole steps split into busy and idle, eager against graphed, and the fast step against its floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from workbench.errors import RecordError
from workbench.results import Record
from workbench.show.plots import STYLES, bar_groups

DTYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "bfloat16+int8": "bf16, int8 weights",
    "float32+int8": "fp32, int8 weights",
}


def step_label(row: Mapping[str, Any]) -> str:
    """`80 ms, batch 32, bf16` of a row of a table of steps."""
    parts = [f"{(row['context'][1] + 1) * 80} ms", f"batch {row['batch']}"]
    return ", ".join([*parts, DTYPES.get(row["dtype"], row["dtype"])] if "dtype" in row else parts)


def step_table_figure(record: Record) -> Figure:
    """Every step as a bar of its unprofiled p50, split into the time that the device was busy and the rest."""
    some_rows(record)
    labels = [f"{step_label(row)}, {'graphed' if row['graphed'] else 'eager'}" for row in record.rows]
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
    axes.margins(x=0.35)
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    return figure


def graphed_table_figure(record: Record) -> Figure:
    """Eager and graphed milliseconds of every row, with the speed-up."""
    some_rows(record)
    labels = [step_label(row) for row in record.rows]
    figure = Figure(figsize=(7.0, 1.2 + 0.5 * len(labels)), layout="constrained")
    axes = figure.subplots()
    series = {"eager": [r["eager_ms_p50"] for r in record.rows], "graphed": [r["graphed_ms_p50"] for r in record.rows]}
    bar_groups(axes, labels, series, [f"{row['speedup']:.1f}×" for row in record.rows])
    axes.set_xlabel("encoder step, ms (p50)")
    return figure


def fast_table_figure(record: Record) -> Figure:
    """NeMo's eager step, the bit-exact graph, the fast step and its floor of every row, logarithmic, with fast over floor."""
    some_rows(record)
    looks = {
        "eager_ms_p50": "NeMo, eager",
        "graphed_ms_p50": "bit-exact graph",
        "fast_ms_p50": "fast step",
        "floor_ms": "floor",
    }
    figure = Figure(figsize=(9.0, 1.2 + 0.72 * len(record.rows)), layout="constrained")
    axes = figure.subplots()
    bar_groups(
        axes,
        [step_label(row) for row in record.rows],
        {label: [row.get(name) for row in record.rows] for name, label in looks.items()},
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("encoder step, ms (p50, logarithmic)")
    return figure


def some_rows(record: Record, rows: Sequence[Any] | None = None) -> None:
    """Raises RecordError if a record has no rows, or none of those that are drawn."""
    if not (record.rows if rows is None else rows):
        raise RecordError(f"a record of kind {record.kind!r} without rows: there is nothing to draw")
