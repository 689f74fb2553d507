"""Where the time of a step goes, computed from a torch.profiler trace on any machine, without torch.

    summary = analyse(load_trace("step.json.gz"))     # steps are the annotations "workbench.step", else "ProfilerStep#N"
    summary.numbers()["launches_per_step"], summary.numbers()["gpu_idle_share"]

A step is a window on the host's clock. The GPU is busy where at least one kernel, copy or fill of any stream runs: a union of
intervals, because overlapping work would be counted twice in a sum. Every idle interval has one cause:
  host_late   the call that launched the work after the gap began only when the work before the gap had ended
  kernel_gap  that work was already submitted: scheduling between kernels, or a wait for another stream
  end         nothing more of the step runs: synchronisation and the way back to the caller
Kernels are joined to calls N : 1 by correlation id, since all kernels of a graph launch carry the launch's id. A trace that
lost kernels is refused: its numbers would look plausible and be wrong. Definitions in full: docs/profiling.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from workbench.errors import RecordError
from workbench.measure.chrome_trace import DEVICE_CATEGORIES, Event, Trace, load_trace, save_trace
from workbench.measure.trace_gpu import (
    COPY_CALLS,
    FILL_CALLS,
    GRAPH_LAUNCHES,
    LAUNCHES,
    gpu_timeline,
    refuse_losses,
    running,
    within,
)

__all__ = [
    "CAUSES",
    "STEP",
    "Event",
    "Gap",
    "Row",
    "StepSummary",
    "Trace",
    "TraceSummary",
    "analyse",
    "load_trace",
    "save_trace",
]

STEP = "workbench.step"
Cause = Literal["host_late", "kernel_gap", "end"]
CAUSES: tuple[Cause, ...] = ("host_late", "kernel_gap", "end")
KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill", "cpu_op": "operator"}


@dataclass(frozen=True, slots=True)
class Gap:
    """An interval of a step in which nothing ran, and why."""

    start_us: float
    end_us: float
    cause: Cause


@dataclass(frozen=True)
class StepSummary:
    """One step. launches counts a graph launch as one; kernels, copies and fills are those that the step's calls submitted.

    operators: operator calls of the step's thread (CPU traces; there the GPU's counts are 0, and the reverse).
    calls: launch, copy and fill calls; work: whatever ran in the window (device work, or top-level operators).
    busy_us is the union of `work` inside the window, work_us its plain sum; busy_us + all gaps = the window.
    """

    name: str
    start_us: float
    end_us: float
    launches: int = 0
    graph_launches: int = 0
    copy_calls: int = 0
    fill_calls: int = 0
    kernels: int = 0
    copies: int = 0
    fills: int = 0
    operators: int = 0
    busy_us: float = 0.0
    work_us: float = 0.0
    gaps: tuple[Gap, ...] = field(default=(), repr=False)
    calls: tuple[Event, ...] = field(default=(), repr=False)
    work: tuple[Event, ...] = field(default=(), repr=False)

    @property
    def window_us(self) -> float:
        return self.end_us - self.start_us

    def idle_us(self, cause: Cause | None = None) -> float:
        """Idle time in µs, of one cause or of all."""
        return sum(gap.end_us - gap.start_us for gap in self.gaps if cause in (None, gap.cause))


@dataclass(frozen=True)
class Row:
    """Time of one name over all steps. kind: kernel, copy, fill, operator (self time) or stage (an annotation).

    For a stage, work_us is the device time of everything launched inside it (on the CPU: the time of its operators), host_us the
    time its thread spent inside, launches the launch calls made inside. A stage inside another counts in both.
    """

    kind: str
    name: str
    calls: int = 0
    work_us: float = 0.0
    host_us: float | None = None
    launches: int | None = None


@dataclass(frozen=True)
class TraceSummary:
    """device: 'cuda' or 'cpu'; clock_shift_us: what was added to the device's times; notes must be read with the numbers."""

    device: str
    steps: tuple[StepSummary, ...]
    top: tuple[Row, ...]
    stages: tuple[Row, ...]
    clock_shift_us: float = 0.0
    notes: tuple[str, ...] = ()

    def numbers(self) -> dict[str, float | int]:
        """Named scalars: counts as means per step, shares of the steps' total window; idle_*_share sum to the idle share.

        CUDA: {launches,graph_launches,copy_calls,fill_calls,kernels,copies,fills}_per_step, gpu_busy_ms_per_step, gpu_busy_share,
        gpu_idle_share. CPU: operators_per_step, thread_busy_ms_per_step, thread_busy_share, thread_idle_share.
        """
        owner, counted = ("thread", ["operators"])
        if self.device == "cuda":
            owner, counted = (
                "gpu",
                ["launches", "graph_launches", "copy_calls", "fill_calls", "kernels", "copies", "fills"],
            )
        window = sum(step.window_us for step in self.steps)
        out = {f"{name}_per_step": self._mean(name) for name in counted}
        out[f"{owner}_busy_ms_per_step"] = self._mean("busy_us") / 1e3
        out[f"{owner}_busy_share"] = sum(step.busy_us for step in self.steps) / window
        out[f"{owner}_idle_share"] = sum(step.idle_us() for step in self.steps) / window
        for cause in CAUSES:
            out[f"idle_{cause}_share"] = sum(step.idle_us(cause) for step in self.steps) / window
        return out

    def rows(self, limit: int = 20) -> list[dict[str, Any]]:
        """Stages, then the `limit` names with most time, as equal-keyed rows; share is of all device work (all operators)."""
        steps, total = len(self.steps), sum(row.work_us for row in self.top) or 1.0
        return [
            {
                "kind": row.kind,
                "name": row.name[:160],
                "calls_per_step": row.calls / steps,
                "ms_per_step": row.work_us / steps / 1e3,
                "share": row.work_us / total,
                "host_ms_per_step": None if row.host_us is None else row.host_us / steps / 1e3,
                "launches_per_step": None if row.launches is None else row.launches / steps,
            }
            for row in (*self.stages, *self.top[:limit])
        ]

    def _mean(self, name: str) -> float | int:
        values = [getattr(step, name) for step in self.steps]
        value: float | int = values[0] if len(set(values)) == 1 else sum(values) / len(values)
        return value


def analyse(
    trace: Trace, *, steps: str | None = None, device: str = "auto", nodes_per_replay: int | None = None
) -> TraceSummary:
    """Account for every step of a trace.

    steps: name of the annotation around a step (default "workbench.step", else "ProfilerStep#N"); device: 'cuda' or 'cpu' says what the
    trace must hold, 'auto' looks; nodes_per_replay: kernels that every graph launch must have run, where known.
    Raises RecordError if there is no step, kernels were lost, the clocks disagree or there is more than one GPU.
    """
    if device not in ("auto", "cuda", "cpu"):
        raise RecordError(f"device {device!r}: allowed are 'auto', 'cuda', 'cpu'")
    events = sorted(trace.events, key=lambda event: (event.start_us, -event.duration_us))
    windows = _windows(events, steps, trace.source)
    on_gpu = any(event.category in DEVICE_CATEGORIES or event.name in LAUNCHES for event in events)
    if device == "cpu" or (device == "auto" and not on_gpu):
        return _analyse_cpu(events, windows, trace.source)
    return _analyse_cuda(events, windows, nodes_per_replay, trace.source)


def _windows(events: Sequence[Event], steps: str | None, source: str) -> list[Event]:
    """The annotations that delimit the steps, in order; they must not overlap."""
    notes = [event for event in events if event.category == "user_annotation"]
    names = {event.name for event in notes}
    wanted = steps or (STEP if STEP in names else "ProfilerStep#")
    windows = [
        event
        for event in notes
        if event.name == wanted or (wanted == "ProfilerStep#" and event.name.startswith(wanted))
    ]
    if not windows:
        seen = ", ".join(sorted(names)[:8]) or "none"
        raise RecordError(
            f"{source}: no step annotated {steps or f'{STEP} or ProfilerStep#N'}; annotations found: {seen}"
        )
    if any(window.duration_us <= 0 for window in windows):
        raise RecordError(f"{source}: a step annotated {wanted} has no duration")
    if any(after.start_us < before.end_us for before, after in pairwise(windows)):
        raise RecordError(f"{source}: steps annotated {wanted} overlap; one step at a time can be accounted for")
    return windows


def _analyse_cuda(events: Sequence[Event], windows: Sequence[Event], nodes: int | None, source: str) -> TraceSummary:
    gpu = gpu_timeline(events, source)
    for number, window in enumerate(windows):
        refuse_losses(f"{source}, step {number}", gpu, window, nodes)
    steps, mine = [], list[Event]()
    for window, overlapping in zip(windows, running(gpu, windows), strict=True):
        called, done = gpu.submitted_in(window)
        mine.extend(done)
        counts = Counter(event.category for event in done)
        step = StepSummary(
            name=window.name,
            start_us=window.start_us,
            end_us=window.end_us,
            launches=sum(call.name in LAUNCHES for call in called),
            graph_launches=sum(call.name in GRAPH_LAUNCHES for call in called),
            copy_calls=sum(call.name.startswith(COPY_CALLS) for call in called),
            fill_calls=sum(call.name.startswith(FILL_CALLS) for call in called),
            kernels=counts["kernel"],
            copies=counts["gpu_memcpy"],
            fills=counts["gpu_memset"],
            calls=tuple(called),
        )
        steps.append(_with_time(step, overlapping))
    notes, known = list(gpu.notes), {call.correlation for call in gpu.calls}
    if lone := sum(event.category == "kernel" and event.correlation not in known for event in mine):
        notes.append(
            f"{lone} kernels have no launch call in the trace: they count as kernels, launches are a lower bound"
        )
    counts_seen = sorted({step.kernels for step in steps})
    if len(counts_seen) > 1:
        notes.append(f"kernels per step vary from {counts_seen[0]} to {counts_seen[-1]}")
    spent = [(call, gpu.device_us(call)) for call in gpu.calls]
    return TraceSummary("cuda", tuple(steps), _top(mine), _stages(events, windows, spent), gpu.shift_us, tuple(notes))


def _analyse_cpu(events: Sequence[Event], windows: Sequence[Event], source: str) -> TraceSummary:
    """Operators instead of kernels, on the step's thread; time outside of them is Python's, or the end of the step."""
    steps, spent = [], list[tuple[Event, float]]()
    for number, window in enumerate(windows):
        operators = [e for e in within(events, window) if e.category == "cpu_op" and e.thread == window.thread]
        if not operators:
            raise RecordError(
                f"{source}, step {number}: no operators; the profiler lost them, or they ran on another thread"
            )
        operators = [replace(event, duration_us=max(event.duration_us, 0.0)) for event in operators]
        self_us, outermost = _self_times(operators)
        spent.extend(zip(operators, self_us, strict=True))
        step = StepSummary(window.name, window.start_us, window.end_us, operators=len(operators))
        steps.append(_with_time(step, [(event, event.start_us) for event in outermost]))
    top = _top(replace(event, duration_us=self_us) for event, self_us in spent)
    return TraceSummary("cpu", tuple(steps), top, _stages(events, windows, spent))


def _with_time(step: StepSummary, work: Sequence[tuple[Event, float]]) -> StepSummary:
    """A step with busy time and idle gaps. work: (what ran, when it was submitted in µs), ordered by start; it may overlap."""
    at, busy_us, work_us, gaps = step.start_us, 0.0, 0.0, list[Gap]()
    for event, submitted_us in work:
        if event.start_us > at:
            gaps.append(Gap(at, event.start_us, "host_late" if submitted_us >= at else "kernel_gap"))
            at = event.start_us
        end_us = min(event.end_us, step.end_us)
        work_us += end_us - max(event.start_us, step.start_us)
        if end_us > at:
            busy_us, at = busy_us + (end_us - at), end_us
    if at < step.end_us:
        gaps.append(Gap(at, step.end_us, "end"))
    return replace(step, busy_us=busy_us, work_us=work_us, gaps=tuple(gaps), work=tuple(event for event, _ in work))


def _self_times(operators: Sequence[Event]) -> tuple[list[float], list[Event]]:
    """Each operator's µs outside the operators that it calls, and the operators that no other calls."""
    self_us, outermost, open_ = [event.duration_us for event in operators], list[Event](), list[int]()
    for index, event in enumerate(operators):
        while open_ and operators[open_[-1]].end_us <= event.start_us:
            open_.pop()
        if open_:
            self_us[open_[-1]] = max(self_us[open_[-1]] - event.duration_us, 0.0)
        else:
            outermost.append(event)
        open_.append(index)
    return self_us, outermost


def _top(events: Iterable[Event]) -> tuple[Row, ...]:
    """Time by kind and name, most first."""
    calls, spent_us = defaultdict[tuple[str, str], int](int), defaultdict[tuple[str, str], float](float)
    for event in events:
        key = (KINDS[event.category], event.name)
        calls[key] += 1
        spent_us[key] += event.duration_us
    order = sorted(calls, key=lambda key: (-spent_us[key], key))
    return tuple(Row(*key, calls=calls[key], work_us=spent_us[key]) for key in order)


def _stages(events: Sequence[Event], windows: Sequence[Event], spent: Sequence[tuple[Event, float]]) -> tuple[Row, ...]:
    """The annotations inside the steps, in order of appearance. spent: (call or operator, µs of work that it stands for)."""
    rows: dict[str, Row] = {}
    by_thread: dict[str, list[tuple[Event, float]]] = {}
    for event, us in spent:
        by_thread.setdefault(event.thread, []).append((event, us))
    for window in windows:
        for note in within(events, window):
            if note.category != "user_annotation" or note is window or note.name.startswith("ProfilerStep#"):
                continue
            mine = by_thread.get(note.thread, [])
            low, high = (
                bisect_left(mine, at, key=lambda pair: pair[0].start_us) for at in (note.start_us, note.end_us)
            )
            inside = mine[low:high]
            row = rows.get(note.name, Row("stage", note.name, host_us=0.0, launches=0))
            rows[note.name] = replace(
                row,
                calls=row.calls + 1,
                work_us=row.work_us + sum(us for _, us in inside),
                host_us=(row.host_us or 0.0) + note.duration_us,
                launches=(row.launches or 0) + sum(event.name in LAUNCHES for event, _ in inside),
            )
    return tuple(rows.values())
