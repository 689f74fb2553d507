"""Two explorers for JupyterLab: one step of a profiler trace with zoom, and the charts and trials of a study.

    timeline_panel("demo/trace_eager.json.gz")        # which step, which part of it, and what took longest there
    study_panel("demo/study.json")                    # charts, and why a trial is what it is

Pictures are SVG in the colour of the page; the bars of a timeline, thousands of them, are pixels inside it. A slider redraws when it is let go.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text

from workbench.measure.trace import Trace, analyse, load_trace
from workbench.results import Record
from workbench.show import study_plots
from workbench.show.plots import title
from workbench.show.timeline import timeline_figure
from workbench.tuning.report import svg

# A colour that no figure uses: it is replaced by the page's own text colour.
_PLACEHOLDER, _MID_GREY = "#010203", "#7f7f7f"


def timeline_panel(trace: Trace | str | Path) -> Any:
    """Look around in a trace: which step, and which part of it."""
    found = trace if isinstance(trace, Trace) else load_trace(trace)
    summary = analyse(found)
    longest_ms = max(step.window_us for step in summary.steps) / 1e3
    step = widgets.IntSlider(0, 0, len(summary.steps) - 1, description="step", continuous_update=False)
    part = widgets.FloatRangeSlider(
        value=(0.0, longest_ms), min=0.0, max=longest_ms, step=longest_ms / 200, description="part, ms", continuous_update=False,
        readout_format=".1f", layout=widgets.Layout(width="520px", max_width="100%"),
    )  # fmt: skip
    picture, table = widgets.HTML(), widgets.HTML()

    def draw(_: Any = None) -> None:
        figure = timeline_figure(found, step.value)
        axes = figure.axes[0]
        axes.set_xlim(*part.value)
        for bars in axes.collections:  # thousands of bars: as pixels they are a hundredth of the size
            bars.set_rasterized(True)
            if np.asarray(bars.get_facecolor())[:, :3].max(initial=0.0) < 0.2:
                bars.set(facecolor=_MID_GREY, edgecolor=_MID_GREY)
        for patch in (patch for legend in figure.legends for patch in legend.get_patches()):
            if max(patch.get_facecolor()[:3]) < 0.2:
                patch.set_facecolor(_MID_GREY)
        picture.value = _page_svg(figure)
        table.value = _costliest(summary.steps[step.value], part.value)

    step.observe(draw, "value")
    part.observe(draw, "value")
    draw()
    controls = widgets.HBox([step, part], layout=widgets.Layout(flex_flow="row wrap"))
    return widgets.VBox([controls, picture, table])


def _costliest(step: Any, part_ms: tuple[float, float]) -> str:
    """What took longest in the shown part."""
    begin_us, end_us = (step.start_us + ms * 1e3 for ms in part_ms)
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in step.work:
        inside_us = min(event.end_us, end_us) - max(event.start_us, begin_us)
        if inside_us > 0:
            spent[event.name] += inside_us
            calls[event.name] += 1
    rows = [(name, calls[name], f"{us / 1e3:.3f}") for name, us in spent.most_common(8)]
    return _table(("costliest in this part", "calls", "time, ms"), rows)


def study_panel(study: Record | str | Path) -> Any:
    """Look around in a study: its charts, and each trial with its numbers and the reasons behind them."""
    record = study if isinstance(study, Record) else Record.load(study)
    charts = {"history": study_plots.history, "each key": study_plots.parameter_slices}
    if len(record.counters["objectives"]) == 2:
        charts["front"] = study_plots.pareto
    chart = widgets.ToggleButtons(options=list(charts), style={"button_width": "110px"})
    marks = {record.numbers["default_trial"]: " (default)", record.numbers["best_trial"]: " (best)"}
    options = [(f"{row['trial']}{marks.get(row['trial'], '')}", index) for index, row in enumerate(record.rows)]
    best = next((index for index, row in enumerate(record.rows) if row["trial"] == record.numbers["best_trial"]), 0)
    trial = widgets.Dropdown(options=options, value=best, description="trial")
    head = widgets.HTML(f"<b>{html.escape(record.counters['headline'])}</b>")
    picture, table = widgets.HTML(), widgets.HTML()

    def draw_chart(_: Any = None) -> None:
        picture.value = _page_svg(charts[chart.value](record))

    def draw_trial(_: Any = None) -> None:
        table.value = _trial_table(record.rows[trial.value])

    chart.observe(draw_chart, "value")
    trial.observe(draw_trial, "value")
    draw_chart()
    draw_trial()
    return widgets.VBox([head, chart, picture, trial, table])


def _trial_table(row: Mapping[str, Any]) -> str:
    lines: list[tuple[str, str]] = [(key, str(value)) for key, value in row["params"].items()]
    lines += [(title(name), f"{value:.4g}") for name, value in row["values"].items()]
    lines += [
        (f"over the limit {name}", f"{value:+.4g}" if value > 0 else "no") for name, value in row["excess"].items()
    ]
    if row["duplicate_of"] is not None:
        lines.append(("same point as trial", str(row["duplicate_of"])))
    if row["failure"]:
        lines.append(("failed", row["failure"]))
    for name, value in row["why"].items():
        shown = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, Mapping) else value
        lines.append((title(name), f"{shown:.4g}" if isinstance(shown, float) else str(shown)))
    return _table(("of this trial", ""), lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cell = 'style="padding: 1px 14px 1px 0; text-align: left; line-height: 1.5; font-variant-numeric: tabular-nums"'
    lines = ["".join(f"<th {cell}>{html.escape(str(name))}</th>" for name in head)]
    lines += ["".join(f"<td {cell}>{html.escape(str(value))}</td>" for value in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _page_svg(figure: Figure) -> str:
    """A figure as SVG inside a page: in the page's text colour, never wider than the page."""
    for words in figure.findobj(Text):
        words.set_color(_PLACEHOLDER)
    text = svg(figure, _PLACEHOLDER).decode().replace(_PLACEHOLDER, "currentColor")
    return text[text.index("<svg") :].replace("<svg ", '<svg style="max-width: 100%; height: auto" ', 1)
