"""A step as a picture: what the host launched, what each stream ran, and why the rest of the time was idle.

    timeline_figure(load_trace("studies/eager.json.gz"), step=2).savefig("step.png")
    idle_bar_figure({"eager": Record.load("eager.json"), "graphed": Record.load("graphed.json")})

Causes of idle time are told apart by colour, by brightness and by hatching, so the pictures survive a printer and colour
blindness (hues from Okabe and Ito, "Color Universal Design", 2008). Figures are made without pyplot: nothing global is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from workbench.errors import RecordError
from workbench.measure.trace import CAUSES, Event, StepSummary, Trace, analyse
from workbench.measure.trace_gpu import COPY_CALLS, FILL_CALLS, GRAPH_LAUNCHES
from workbench.results import Record

BUSY, HATCH = "#222222", "#555555"
CAUSE_STYLE = {  # cause → colour, hatch, what the legend says
    "host_late": ("#E69F00", "////", "idle: host late with the launch"),
    "kernel_gap": ("#0072B2", "", "idle: gap before submitted work"),
    "end": ("#E0E0E0", "...", "idle: end of step, synchronisation"),
}
CPU_LABELS = {"host_late": "idle: between operators (Python)", "end": "idle: end of step"}
WORK_STYLE = {  # category → colour, hatch, legend
    "kernel": (BUSY, "", "kernel"),
    "gpu_memcpy": ("#56B4E9", "\\\\\\\\", "copy"),
    "gpu_memset": ("#F0E442", "xxxx", "fill"),
    "cpu_op": (BUSY, "", "operator"),
}
CALL_STYLE = {
    "launch": ("#009E73", "", "launch call"),
    "graph": ("#CC79A7", "||||", "graph launch call"),
    "copy": ("#56B4E9", "\\\\\\\\", "copy or fill call"),
}


def timeline_figure(trace: Trace, step: int = 0, *, steps: str | None = None) -> Figure:
    """Step number `step` (from 0) of a trace: a row of calls per host thread, a row per stream, and the idle gaps by cause.

    steps: name of the annotation around a step, as for `analyse`. Raises RecordError if the trace has no such step.
    """
    summary = analyse(trace, steps=steps)
    if not 0 <= step < len(summary.steps):
        raise RecordError(f"step {step}: {trace.source} has the steps 0 to {len(summary.steps) - 1}")
    shown = summary.steps[step]
    rows = _rows(shown)
    figure = Figure(figsize=(11, 1.6 + 0.45 * (len(rows) + 1)), layout="constrained")
    axes = figure.subplots()
    drawn: dict[str, Patch] = {}
    for index, (_, bars) in enumerate(rows):
        for style in dict.fromkeys(style for style, _ in bars):
            _bars(axes, index, [event for mine, event in bars if mine is style], shown, style)
            drawn.setdefault(style[2], _patch(style))
    for cause in CAUSES:
        style = _cause_style(cause, summary.device)
        spans = [
            ((gap.start_us - shown.start_us) / 1e3, (gap.end_us - gap.start_us) / 1e3)
            for gap in shown.gaps
            if gap.cause == cause
        ]
        if spans:
            axes.broken_barh(
                spans, (len(rows) - 0.4, 0.8), facecolor=style[0], hatch=style[1], edgecolor=HATCH, linewidth=0
            )
            drawn[style[2]] = _patch(style)
    axes.set_yticks(range(len(rows) + 1), [*(label for label, _ in rows), "idle, by cause"])
    axes.set_ylim(len(rows) + 0.6, -0.6)
    axes.set_xlim(0, shown.window_us / 1e3)
    axes.set_xlabel("time since the start of the step (ms), as profiled")
    axes.set_title(_title(shown, summary.device), loc="left", fontsize=10)
    figure.legend(handles=list(drawn.values()), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def idle_bar_figure(records: Mapping[str, Record]) -> Figure:
    """One bar per profile record, by label: the busy share of a step and the idle shares by cause, with launches and p50 beside it."""
    if not records:
        raise RecordError("no records; at least one of kind 'profile' is needed")
    figure = Figure(figsize=(11, 1.4 + 0.5 * len(records)), layout="constrained")
    axes = figure.subplots()
    on_gpu = any("gpu_busy_share" in record.numbers for record in records.values())
    for index, (label, record) in enumerate(records.items()):
        left = 0.0
        for name, style in (
            ("busy", (BUSY, "", "busy")),
            *((c, _cause_style(c, "cuda" if on_gpu else "cpu")) for c in CAUSES),
        ):
            width = 100 * _share(label, record, name)
            bar = axes.barh(
                index, width, left=left, height=0.6, color=style[0], hatch=style[1], edgecolor=HATCH, linewidth=0
            )
            bar.set_label(style[2] if index == 0 and (on_gpu or name != "kernel_gap") else "_")
            left += width
        axes.text(101, index, _beside(record), va="center", fontsize=8)
    axes.set_yticks(range(len(records)), list(records))
    axes.set_ylim(len(records) - 0.4, -0.6)
    axes.set_xlim(0, 100)
    axes.set_xlabel(f"share of the profiled step ({'GPU' if on_gpu else 'CPU thread'}), %")
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _rows(step: StepSummary) -> list[tuple[str, list[tuple[tuple[str, str, str], Event]]]]:
    """Label and styled bars of each row: host threads first, then the streams (on the CPU the operators' thread)."""
    rows: dict[tuple[int, str], list[tuple[tuple[str, str, str], Event]]] = {}
    for call in step.calls:
        kind = (
            "graph"
            if call.name in GRAPH_LAUNCHES
            else "copy"
            if call.name.startswith(COPY_CALLS + FILL_CALLS)
            else "launch"
        )
        rows.setdefault((0, f"host thread {call.thread.rpartition('/')[2]}"), []).append((CALL_STYLE[kind], call))
    for event in step.work:
        label = "operators" if event.category == "cpu_op" else f"stream {event.stream}"
        rows.setdefault((1, label), []).append((WORK_STYLE[event.category], event))
    order = sorted(rows, key=lambda key: (key[0], len(key[1]), key[1]))  # stream 7 before stream 13
    return [(key[1], rows[key]) for key in order]


def _bars(axes: Axes, row: int, events: Sequence[Event], step: StepSummary, style: tuple[str, str, str]) -> None:
    """Bars in ms from the start of the step, cut to it; a hair of outline keeps a 2 µs kernel visible in a 40 ms step."""
    spans = []
    for event in events:
        start_us, end_us = max(event.start_us, step.start_us), min(event.end_us, step.end_us)
        spans.append(((start_us - step.start_us) / 1e3, (end_us - start_us) / 1e3))
    edge = HATCH if style[1] else style[0]
    axes.broken_barh(spans, (row - 0.35, 0.7), facecolor=style[0], hatch=style[1], edgecolor=edge, linewidth=0.3)


def _cause_style(cause: str, device: str) -> tuple[str, str, str]:
    colour, hatch, label = CAUSE_STYLE[cause]
    return colour, hatch, CPU_LABELS.get(cause, label) if device == "cpu" else label


def _patch(style: tuple[str, str, str]) -> Patch:
    return Patch(facecolor=style[0], hatch=style[1], edgecolor=HATCH, label=style[2], linewidth=0)


def _title(step: StepSummary, device: str) -> str:
    busy = f"busy {100 * step.busy_us / step.window_us:.0f} % of {step.window_us / 1e3:.2f} ms"
    if device == "cpu":
        return f"{step.operators} operator calls · thread {busy}"
    return f"{step.launches} launch calls → {step.kernels} kernels · GPU {busy}"


def _share(label: str, record: Record, name: str) -> float:
    keys = ("gpu_busy_share", "thread_busy_share") if name == "busy" else (f"idle_{name}_share",)
    for key in keys:
        if key in record.numbers:
            return float(record.numbers[key])
    raise RecordError(f"{label}: a record of kind {record.kind!r} without {keys[0]}; needed is one of kind 'profile'")


def _beside(record: Record) -> str:
    numbers = record.numbers
    counted = "launches" if "launches_per_step" in numbers else "operators"
    return f"{numbers[f'{counted}_per_step']:.0f} {counted}\np50 {numbers['step_p50_ms']:.3g} ms"
