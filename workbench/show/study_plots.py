"""Figures of a tuning study, drawn from its record: the search over time, each key's effect, the front of two objectives.

    study = Record.load("demo/study.json")
    history(study).savefig("history.png");  parameter_slices(study);  pareto(study)

Trials far above those that keep the limits are drawn at the upper edge: one hopeless configuration would flatten all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from matplotlib.tri import Triangulation

from workbench.errors import RecordError
from workbench.results import Record
from workbench.show.plots import MUTED, STYLES, figure_axes, title

DEFAULT, BEST = "#D55E00", "#009E73"
# More points than this are drawn as pixels: as shapes they would make a report of megabytes.
MOST_SHAPES = 60


def history(study: Record, axes: Axes | None = None) -> Figure:
    """Every trial's first objective in order, the best so far, the default, and the trials that broke a limit or failed."""
    name, sign = _objective(study)
    finished = _finished(study)
    figure, axes = figure_axes(axes, (9.6, 3.4))
    colour, top = STYLES[0][0], _ceiling(study, name, finished)
    looks: dict[str, dict[str, Any]] = {
        "trial": {"marker": "o", "color": colour},
        "same point again": {"marker": "o", "facecolors": "none", "edgecolors": colour},
        "breaks a limit": {"marker": "x", "color": MUTED},
    }
    for label, look in looks.items():
        rows = [row for row in finished if _group(row) == label]
        if rows:
            heights = [min(row["values"][name], top) for row in rows]
            axes.scatter([r["trial"] for r in rows], heights, s=26, label=label, rasterized=_many(finished), **look)
    feasible = [row for row in finished if row["feasible"]]
    if feasible:
        best = np.minimum.accumulate([sign * row["values"][name] for row in feasible]) * sign
        axes.step(
            [r["trial"] for r in feasible], best, where="post", color=STYLES[1][0], linewidth=2, label="best so far"
        )
    for label, colour in (("default", DEFAULT), ("best", BEST)):
        value, at_limit = _judged(study, label, name)
        if value is not None and (label == "default" or at_limit):
            shown = f"{label} at its limit" if at_limit else label
            axes.axhline(value, color=colour, linewidth=1.2, linestyle=(0, (4, 3)), label=shown)
    failed = [row["trial"] for row in study.rows if row["failure"]]
    if failed:
        axes.scatter(failed, [top] * len(failed), marker="|", s=80, color=DEFAULT, label="failed")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="trial", ylabel=title(name))
    figure.legend(loc="outside upper center", frameon=False, fontsize=8, ncols=6)
    return figure


def parameter_slices(study: Record) -> Figure:
    """The first objective against each tuned key, one panel per key; default and best stand out. A key that is the objective itself has none."""
    name, _ = _objective(study)
    finished = [row for row in _finished(study) if row["duplicate_of"] is None]
    top = _ceiling(study, name, finished)
    keys = [
        key for key in study.counters["space"] if any(row["params"][key] != row["values"][name] for row in finished)
    ] or list(study.counters["space"])
    columns = min(len(keys), 2)
    rows_of_panels = -(-len(keys) // columns)
    figure = Figure(figsize=(max(5.0, 4.8 * columns), 3.6 * rows_of_panels), layout="constrained")
    grid = figure.subplots(rows_of_panels, columns, sharey=True, squeeze=False)
    panels = grid.flat[: len(keys)]
    for unused in grid.flat[len(keys) :]:
        unused.set_visible(False)
    marks = (
        ("default", study.numbers["default_trial"], {"marker": "s", "s": 60, "color": DEFAULT}),
        ("best", study.numbers["best_trial"], {"marker": "*", "s": 150, "color": BEST}),
    )
    for key, axes in zip(keys, panels, strict=True):
        options = study.counters["space"][key]
        _scale(axes, options)
        for label in ("trial", "breaks a limit"):
            look = (
                {"marker": "o", "color": STYLES[0][0], "alpha": 0.8}
                if label == "trial"
                else {"marker": "x", "color": MUTED}
            )
            rows = [row for row in finished if _group(row) == label]
            heights = [min(row["values"][name], top) for row in rows]
            if rows:
                places = [_place(options, row["params"][key]) for row in rows]
                axes.scatter(places, heights, s=24, label=label, rasterized=_many(finished), **look)
        for label, number, mark in marks:
            for row in (row for row in finished if row["trial"] == number):
                value, at_limit = _judged(study, label, name)
                height = min(value if at_limit else row["values"][name], top)
                place = _place(options, row["params"][key])
                axes.scatter([place], [height], label=label, zorder=3, **mark)
        axes.set_xlabel(_short(key) + (", sizes in it" if "subset" in options else ""))
    for first in grid[:, 0]:
        first.set_ylabel(title(name))
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper center", frameon=False, fontsize=8, ncols=4
    )
    return figure


def importance(study: Record, axes: Axes | None = None) -> Figure:
    """How much of the first objective's variation each key explains alone, largest first."""
    name, _ = _objective(study)
    shares = sorted(study.counters.get("importance", {}).items(), key=lambda pair: pair[1])
    if not shares:
        raise RecordError("study: too few trials kept the limits to say which key matters")
    figure, axes = figure_axes(axes, (5.4, 0.9 + 0.42 * len(shares)))
    bars = axes.barh(
        [_short(key) for key, _ in shares], [100 * share for _, share in shares], color=STYLES[0][0], height=0.6
    )
    axes.bar_label(bars, [f"{100 * share:.0f} %" for _, share in shares], padding=3, fontsize=8)
    axes.set(xlabel=f"explained variation of {title(name).partition(',')[0]}, %", xlim=(0, 112))
    return figure


def contour(study: Record, axes: Axes | None = None) -> Figure:
    """The first objective over the two keys that matter most, interpolated between the trials that kept the limits, which are drawn."""
    name, _ = _objective(study)
    ranked = sorted(study.counters.get("importance", {}).items(), key=lambda pair: -pair[1])
    keys = [key for key, _ in ranked if "choices" not in study.counters["space"][key]][:2]
    rows = [row for row in _finished(study) if row["feasible"] and row["duplicate_of"] is None]
    spaces = [study.counters["space"][key] for key in keys]
    places = [
        np.asarray([_place(options, row["params"][key]) for row in rows])
        for key, options in zip(keys, spaces, strict=True)
    ]
    if len(keys) < 2 or len(rows) < 10 or any(np.unique(axis).size < 3 for axis in places):
        raise RecordError("study: a contour needs two keys that vary, and ten trials that kept the limits")
    figure, axes = figure_axes(axes, (5.4, 4.2))
    scaled = [np.log2(axis) if options.get("log") else axis for axis, options in zip(places, spaces, strict=True)]
    spans = [np.ptp(axis) or 1.0 for axis in scaled]
    heights = np.asarray([row["values"][name] for row in rows])
    if np.ptp(heights) <= 1e-9 * abs(heights).max():
        raise RecordError(f"study: {name} was the same in every trial")
    top = float(np.quantile(heights, 0.9))
    triangles = Triangulation(scaled[0] / spans[0], scaled[1] / spans[1])
    drawn = Triangulation(places[0], places[1], triangles.triangles)
    filled = axes.tricontourf(drawn, np.minimum(heights, top), levels=10, cmap="viridis")
    filled.set_rasterized(_many(rows))
    axes.scatter(*places, s=9, color="white", edgecolors="black", linewidths=0.4, rasterized=_many(rows))
    for axis, options, setter in zip((axes.xaxis, axes.yaxis), spaces, (axes.set_xscale, axes.set_yscale), strict=True):
        if options.get("log"):
            setter("log", base=2)
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set(xlabel=_short(keys[0]), ylabel=_short(keys[1]))
    figure.colorbar(filled, ax=axes, label=title(name))
    return figure


def pareto(study: Record, axes: Axes | None = None) -> Figure:
    """Two objectives against each other, the front joined."""
    objectives = study.counters["objectives"]
    if len(objectives) != 2:
        raise RecordError(f"study: a front needs two objectives; this one has {len(objectives)}")
    first, second = (objective["number"] for objective in objectives)
    finished = [row for row in study.rows if row["values"]]
    front = sorted(
        (row["values"][first], row["values"][second])
        for row in finished
        if row["trial"] in study.counters["pareto_trials"]
    )
    figure, axes = figure_axes(axes, (5.4, 4.2))
    kept = [row["values"] for row in finished if row["feasible"]] or [row["values"] for row in finished]
    edges = {number: _edges([values[number] for values in kept]) for number in (first, second)}
    for feasible, marker, colour in ((True, "o", STYLES[0][0]), (False, "x", MUTED)):
        rows = [row["values"] for row in finished if row["feasible"] is feasible]
        if rows:
            label = "trial" if feasible else "breaks a limit"
            x, y = (np.clip([r[number] for r in rows], *edges[number]) for number in (first, second))
            axes.scatter(x, y, s=24, marker=marker, color=colour, label=label, rasterized=_many(finished))
    axes.plot(
        *np.asarray(front).reshape(-1, 2).T, color=STYLES[1][0], linewidth=2, marker="s", markersize=4, label="front"
    )
    axes.set(xlabel=title(first), ylabel=title(second))
    axes.legend(frameon=False)
    return figure


def _objective(study: Record) -> tuple[str, int]:
    if study.kind != "study":
        raise RecordError(f"got a record of kind {study.kind!r}; needed is one of kind 'study'")
    objective = study.counters["objectives"][0]
    return objective["number"], 1 if objective["direction"] == "minimise" else -1


def _judged(study: Record, label: str, name: str) -> tuple[Any, bool]:
    """The objective of `default` or `best`, and whether it is what the configuration carries at most and not what its trial ran at."""
    carried = study.numbers.get(f"compared_{label}_{name}") if name == "streams" else None
    return (study.numbers.get(f"{label}_{name}"), False) if carried is None else (carried, True)


def _finished(study: Record) -> list[dict[str, Any]]:
    finished = [row for row in study.rows if row["values"]]
    if not finished:
        raise RecordError("study: no trial finished, so there is nothing to draw")
    return finished


def _group(row: Mapping[str, Any]) -> str:
    if not row["feasible"]:
        return "breaks a limit"
    return "trial" if row["duplicate_of"] is None else "same point again"


def _ceiling(study: Record, name: str, finished: Sequence[Mapping[str, Any]]) -> float:
    """Where a panel ends upwards: just above the trials that keep the limits, so that a hopeless one does not flatten the others."""
    kept = [row["values"][name] for row in finished if row["feasible"]] or [row["values"][name] for row in finished]
    kept += [value for label in ("default", "best") if (value := _judged(study, label, name)[0]) is not None]
    spread = max(kept) - min(kept)
    return float(max(kept) + 0.12 * (spread or abs(max(kept)) or 1.0))


def _edges(values: Sequence[float]) -> tuple[float, float]:
    """Where a panel ends: a little beyond the trials that keep the limits; others are drawn at its edge."""
    spread = (max(values) - min(values)) or abs(max(values)) or 1.0
    return min(values) - 0.08 * spread, max(values) + 0.08 * spread


def _many(rows: Sequence[Any]) -> bool:
    return len(rows) > MOST_SHAPES


def _scale(axes: Axes, options: Mapping[str, Any]) -> None:
    """A key's axis: one place per choice, powers of two for a logarithmic range."""
    if "choices" in options:
        axes.set_xticks(range(len(options["choices"])), [str(choice) for choice in options["choices"]])
    elif options.get("log"):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))


def _short(key: str) -> str:
    return key.removeprefix("asr.").removeprefix("batching.")


def _place(options: Mapping[str, Any], value: Any) -> float:
    if "subset" in options:
        return float(len(value))
    return float(options["choices"].index(value)) if "choices" in options else float(value)
