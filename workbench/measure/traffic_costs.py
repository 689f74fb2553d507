"""Step costs as live traffic pays them: the cost table of a lone loop, corrected by what the worker was busy for in paced runs.

    lone = measure_costs(recognizer, clips, (1, 2, 4, 8))
    costs = traffic_costs(recognizer, clips, lone, [LoadConfig(streams=6, seconds=5)])

Why: beside live traffic a step costs more than in a loop that does nothing else. The load generator and the callers that are woken want the
interpreter and, on a CPU, the caches and cores; between batches lie the settling of results and the wake-up of callers. Here the workers' own
times are taken while real runs play. Sizes seen often enough replace the row of the lone loop; the others are scaled by the same factor. Also taken:
how long after it was due a chunk is queued (`arrival_delay_us`: the generator's waking up and the handing over), how long after a batch may leave a
worker begins with it, one that was idle (`dispatch_us`) and one that was busy until then (`turnaround_us`), how much longer a step takes on a worker that
was idle (`after_idle_us`; the rows are without it), what telling one caller takes (`wake_us_per_item`), and how long a caller's thread computes for a
chunk that it hands over (`handover_us`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workbench.batching.buckets import bucket_for
from workbench.config import LoadConfig
from workbench.errors import ConfigError, GeneratorLagged, LoadNotCarried, StepTimeout
from workbench.measure.cost_table import IDLE_S
from workbench.measure.paced import PacedOptions, run_paced
from workbench.model.speech import Samples
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer

ENOUGH = 8  # batches of one size for a row of their own
_KEPT = 400  # samples per row in the record
Times = tuple[float, float, float, float]
Cell = tuple[str, int]
UNTOLD = "arrival_delay_us: taken as 0, since no load was played to its end by a generator that kept its times"


@dataclass(frozen=True, order=True)
class _Seen:
    """One batch: begun and ended (when its worker was free again), its kind and padded size, the seconds of one wake-up, and the earliest and the
    latest time at which it may have been ready to leave; all in seconds."""

    begun: float
    ended: float
    cell: Cell
    wake_s: float
    ready: tuple[float, float]


def traffic_costs(
    recognizer: Recognizer, clips: Sequence[Samples], lone: Record, loads: Sequence[LoadConfig]
) -> Record:
    """Play `loads` and return `lone` (a record of kind `costs`) corrected; `numbers` has `traffic_over_lone` and what `CostTable` reads of traffic.

    A load that was not carried or whose generator lagged still tells what its batches cost. Raises ConfigError without batching or where no
    size was seen often enough.
    """
    watch = TrafficWatch(recognizer)
    watch.play(clips, loads)
    return watch.corrected(lone)


class TrafficWatch:
    """What a recogniser's workers are seen to need while loads are played: busy seconds per kind and (padded) batch size, seconds per wake-up."""

    def __init__(self, recognizer: Recognizer) -> None:
        """Raises ConfigError where batching is off."""
        if recognizer.pipeline is None:
            raise ConfigError("asr.batching.enabled: got false; costs in traffic are those of the batching workers")
        self._recognizer, self._workers = recognizer, recognizer.pipeline.workers
        geometry = recognizer.loaded.geometry
        self._ladder, self.alone = recognizer.stage.encoder.ladder, self._workers.slots == 1
        # Where steady and second chunks have one shape they share batches, and the table calls them steady.
        self._kinds = {geometry.chunk(number).input_mel_frames: kind for number, kind in ((1, "second"), (2, "steady"))}
        self.sent_late_s: list[float] = []
        self.handover_s: list[float] = []
        self._delay_s = 1e-6 * recognizer.config.asr.batching.max_queue_delay_us
        # Workers tell of their batches from several threads, the next one's sometimes before that of the one before: here in no order.
        self._batches: list[_Seen] = []

    def play(self, clips: Sequence[Samples], loads: Sequence[LoadConfig]) -> None:
        """Play `loads` and watch; further calls add to what was seen."""
        self._workers.watch = self
        options = PacedOptions(compare=False, most_late_share=0.5)
        try:
            for load in loads:
                try:
                    numbers = run_paced(self._recognizer, clips, load, options=options).numbers
                except (GeneratorLagged, LoadNotCarried, StepTimeout):
                    continue
                self.sent_late_s.append(1e-3 * (numbers["generator_late_p50_ms"] + numbers["push_p50_ms"]))
                self.handover_s.append(1e-6 * numbers["push_cpu_us"])
        finally:
            self._workers.watch = None

    def add(self, other: TrafficWatch) -> None:
        """Count what another watch of the same recogniser saw as seen."""
        self._batches.extend(other._batches)
        self.sent_late_s.extend(other.sent_late_s)
        self.handover_s.extend(other.handover_s)

    def corrected(self, lone: Record) -> Record:
        """`lone` as `traffic_costs` returns it, by all that was seen. Raises ConfigError where no size was seen often enough."""
        return _corrected(lone, self.told(), self.alone)

    def told(self) -> Told:
        """What the batches say of their workers, in the order in which they began."""
        told = Told(sent_late_s=list(self.sent_late_s), handover_s=list(self.handover_s))
        free_at = math.nan  # what came before the very first is not known
        for batch in sorted(self._batches):
            idle = batch.begun - free_at > IDLE_S
            told.steps.setdefault(batch.cell, []).append((batch.ended - batch.begun, idle))
            told.wake_s.append(batch.wake_s)
            # Clocks are read outside the lock: a worker may begin a few microseconds before the one before it says that it is free.
            earliest, latest = batch.ready
            if latest <= free_at:
                told.turnaround_s.append(max(0.0, batch.begun - free_at))
            elif earliest > free_at and earliest == latest:
                told.dispatch_s.append(max(0.0, batch.begun - latest))
            free_at = batch.ended
        return told

    def __call__(self, lane: str, batch: Any, times: Times) -> None:
        if lane != "step":
            return
        begun, _, lane_free, thread_free = times
        key, size = batch.key, len(batch.items)
        kind = self._kinds.get(key.input_mel_frames, "steady") if key.drop_encoded else "first"
        if self._ladder is not None and not key.cut:
            size = bucket_for(size, self._ladder)
        # With one thread the next batch waits for the wake-ups, with several it does not.
        ended = thread_free if self.alone else lane_free
        wake_s = (thread_free - lane_free) / len(batch.items)
        self._batches.append(_Seen(begun, ended, (kind, size), wake_s, self._ready_at(batch)))

    def _ready_at(self, batch: Any) -> tuple[float, float]:
        """The earliest and the latest time at which the batch may have become ready: complete, or as old as its oldest item may become.

        Which item of a cohort made it complete is not known: others may have joined until it left.
        """
        oldest, newest = batch.formed_at - batch.waited_s[0], batch.formed_at - batch.waited_s[-1]
        latest = min(newest if batch.reason in ("capacity", "cohort") else math.inf, oldest + self._delay_s)
        return (min(oldest, latest) if batch.reason == "cohort" else latest), latest


@dataclass
class Told:
    """Seconds: `steps` of each kind and (padded) size, with whether the worker was idle before; `wake_s` to tell one caller; `dispatch_s` and
    `turnaround_s` to begin with a batch; one per load: `sent_late_s` from when a chunk is due until it is queued, `handover_s` that its caller computes
    for it."""

    steps: dict[Cell, list[tuple[float, bool]]] = field(default_factory=dict)
    wake_s: list[float] = field(default_factory=list)
    dispatch_s: list[float] = field(default_factory=list)
    turnaround_s: list[float] = field(default_factory=list)
    sent_late_s: list[float] = field(default_factory=list)
    handover_s: list[float] = field(default_factory=list)


def _corrected(lone: Record, told: Told, alone: bool) -> Record:
    median_ms = {(row["shape"], row["batch"]): row["ms_p50"] for row in lone.rows if row.get("stage") == "step"}
    frames = {row["shape"]: row["mel_frames"] for row in lone.rows if "mel_frames" in row}
    steps = {cell: np.asarray(found) for cell, found in told.steps.items() if len(found) >= ENOUGH}
    after_idle_ms = _after_idle_ms(steps)
    seen = {
        cell: _without_idle(1e3 * found[:, 0], found[:, 1] > 0, after_idle_ms)
        for cell, found in steps.items()
        if cell in median_ms or cell[0] in frames
    }
    factors = [float(np.median(ms)) / median_ms[cell] for cell, ms in seen.items() if cell in median_ms]
    if not factors:
        raise ConfigError("traffic: no batch size of the cost table was seen often enough; play longer or other loads")
    factor = float(np.median(factors))
    rows = [_scaled(row, factor) for row in lone.rows if (row.get("shape"), row.get("batch")) not in seen]
    rows += [_row(shape, batch, seen[shape, batch], frames) for shape, batch in sorted(seen)]
    wake_us = 0.0 if alone else float(np.median(told.wake_s)) * 1e6
    arrival_us, dispatch_us, turnaround_us, handover_us = (
        float(np.median(seconds)) * 1e6 if seconds else 0.0
        for seconds in (told.sent_late_s, told.dispatch_s, told.turnaround_s, told.handover_s)
    )
    note = f"costs in traffic: {len(seen)} of {len(rows)} rows from the workers of paced runs, the others those of a lone loop × {factor:.2f}"
    return dataclasses.replace(
        lone,
        rows=rows,
        numbers={
            **lone.numbers,
            "traffic_over_lone": factor,
            "arrival_delay_us": arrival_us,
            "dispatch_us": dispatch_us,
            "turnaround_us": turnaround_us,
            "handover_us": handover_us,
            "after_idle_us": 1e3 * after_idle_ms,
            "wake_us_per_item": wake_us,
        },
        notes=[*lone.notes, note, *([] if told.sent_late_s else [UNTOLD])],
    )


def _after_idle_ms(steps: dict[Cell, Any]) -> float:
    """What an idle worker's step takes longer: the median over the kinds and sizes that were seen often enough both ways; not below 0."""
    found = []
    for times in steps.values():
        ms, idle = 1e3 * times[:, 0], times[:, 1] > 0
        if min(idle.sum(), (~idle).sum()) >= ENOUGH:
            found.append(float(np.median(ms[idle]) - np.median(ms[~idle])))
    return max(0.0, float(np.median(found))) if found else 0.0


def _without_idle(ms: Any, idle: Any, after_idle_ms: float) -> Any:
    """Times without what an idle worker takes longer. That is one number for all sizes: of a short step at most half counts as that."""
    return np.where(idle, np.maximum(ms - after_idle_ms, ms / 2), ms)


def _scaled(row: dict[str, Any], factor: float) -> dict[str, Any]:
    if row.get("stage") != "step":
        return row
    timed = {name: round(factor * row[name], 4) for name in ("ms_p50", "ms_p95")}
    samples = {"samples_ms": [round(factor * ms, 4) for ms in row["samples_ms"]]} if "samples_ms" in row else {}
    return {**row, **timed, **samples}


def _row(shape: str, batch: int, ms: Any, frames: dict[str, int]) -> dict[str, Any]:
    kept = np.quantile(ms, np.linspace(0, 1, _KEPT)) if ms.size > _KEPT else np.sort(ms)
    return {
        "stage": "step",
        "shape": shape,
        **({"mel_frames": frames[shape]} if shape in frames else {}),
        "batch": batch,
        "ms_p50": round(float(np.percentile(ms, 50)), 4),
        "ms_p95": round(float(np.percentile(ms, 95)), 4),
        "samples_ms": [round(float(value), 4) for value in kept],
    }
