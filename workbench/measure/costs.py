"""The cost table: milliseconds of a step by kind and batch size, measured on this machine; the digital twin computes with it.

    record = measure_costs(recognizer, clips, batches=(1, 2, 4, 8))
    record.rows[0]    # {"stage": "step", "shape": "steady", "mel_frames": 17, "batch": 1, "ms_p50": …, "samples_ms": […]}

Host clock around a whole stage call including the transfer of the results, since that is what a worker is busy for. Kinds and batch
sizes are measured in rounds, in a new seeded order each time: a slow minute of a shared machine then falls on all of them alike.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from workbench.config import to_dict
from workbench.encoder.graphed import attached_step
from workbench.errors import ConfigError
from workbench.measure.cost_table import CAPTURE
from workbench.measure.steps import KINDS, Kind, PreparedSteps
from workbench.model.speech import Samples
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer
from workbench.runtime.resident_stage import ResidentStage


def measure_costs(
    recognizer: Recognizer,
    clips: Sequence[Samples],
    batches: Sequence[int] = (1, 2, 4, 8, 16),
    repeats: int = 8,
    progress: Callable[[int, int], None] = lambda done, total: None,
    kinds: Sequence[Kind] = KINDS,
) -> Record:
    """Time `repeats` rounds of every kind × batch after one warm-up round. Batched streams never run the kind `cut`. Raises ConfigError if a batch exceeds the arena."""
    if not batches or min(batches) < 1 or max(batches) > recognizer.arena.rows:
        raise ConfigError(
            f"batches: got {list(batches)}; allowed are sizes from 1 to the arena's {recognizer.arena.rows} rows"
        )
    cells: list[tuple[Kind, int]] = [(kind, batch) for batch in sorted(set(batches)) for kind in kinds]
    times_s: dict[tuple[Kind, int], list[float]] = {cell: [] for cell in cells}
    rng = np.random.default_rng(0)
    with PreparedSteps(recognizer, clips, max(batches)) as steps:
        steps.fill()
        for round_number in range(repeats + 1):
            for done, position in enumerate(rng.permutation(len(cells)).tolist()):
                kind, batch = cells[position]
                items = steps.items(kind, batch)
                start_s = time.perf_counter()
                recognizer.stage.run(items)
                took_s = time.perf_counter() - start_s
                if round_number:
                    times_s[kind, batch].append(took_s)
                progress(round_number * len(cells) + done + 1, (repeats + 1) * len(cells))
    return Record(
        kind="costs",
        config=to_dict(recognizer.config),
        rows=[
            *(_row(recognizer, kind, batch, times_s[kind, batch]) for kind, batch in cells),
            *capture_rows(recognizer),
        ],
        numbers={"repeats": repeats, "chunk_ms": recognizer.loaded.geometry.chunk_ms},
        counters={"geometry": dataclasses.asdict(recognizer.loaded.geometry)},
        notes=list(recognizer.loaded.notes),
    )


def capture_rows(recognizer: Recognizer) -> list[dict[str, object]]:
    """Where the step is graphed, a row {stage: capture, batch, capture_ms, bytes, pool_bytes} per batch size of the ladder: all graphs of that
    size together; the pool is what all sizes share. Nothing is captured for it: it is what `warm_up` and the measurement took. None for a resident
    engine, even where NeMo's step was graphed before on the same model."""
    step, ladder = attached_step(recognizer.loaded.model.encoder), recognizer.stage.encoder.ladder
    if step is None or ladder is None or isinstance(recognizer.stage, ResidentStage):
        return []
    geometry = recognizer.loaded.geometry
    lengths = {geometry.chunk(index).input_mel_frames for index in range(3)}
    found: dict[int, dict[str, object]] = {}
    for graph in step.captures():
        batch, _, frames = graph["signal"]
        if batch in ladder and frames in lengths:
            row = found.setdefault(
                batch, {"stage": CAPTURE, "shape": "graphs", "batch": batch, "capture_ms": 0.0, "bytes": 0}
            )
            row["capture_ms"] = round(row["capture_ms"] + graph["capture_ms"], 3)  # type: ignore[operator]
            row["bytes"] += graph["bytes"]  # type: ignore[operator]
            row["pool_bytes"] = graph["pool_bytes"]
    return [found[batch] for batch in sorted(found)]


def _row(recognizer: Recognizer, kind: Kind, batch: int, times_s: list[float]) -> dict[str, object]:
    geometry = recognizer.loaded.geometry
    mel_frames = {
        "first": geometry.first_mel_frames,
        "second": geometry.chunk(1).input_mel_frames,
        "steady": geometry.steady_mel_frames,
        "cut": geometry.history_mel_frames + max(1, geometry.next_mel_frames // 2),
    }[kind]
    ms = np.asarray(times_s) * 1e3
    return {
        "stage": "step",
        "shape": kind,
        "mel_frames": mel_frames,
        "batch": batch,
        "ms_p50": round(float(np.percentile(ms, 50)), 4),
        "ms_p95": round(float(np.percentile(ms, 95)), 4),
        "samples_ms": [round(float(v), 4) for v in ms],
    }
