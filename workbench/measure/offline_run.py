"""Whole recordings, measured: the cost of an offline batch by its size and length, and a run of many recordings through the offline stage.

    rows = offline_cost_rows(recognizer, clips, batches=(1, 8, 32), lengths_s=(2.0, 8.0, 32.0))
    run_offline(recognizer, {"shipped": thinned(lengths, 128)}, clips, concurrency=64).numbers["rtfx_shipped"]

The first feeds the offline twin, the second confirms what a study found on it. Host clock around calls whose results arrive on the host.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from workbench.batching.buckets import MOST_BATCH_S
from workbench.config import LoadConfig, replace, to_dict
from workbench.errors import StepTimeout
from workbench.measure.offline_twin import OFFLINE
from workbench.model.speech import Samples
from workbench.results import Record
from workbench.runtime.offline import offline_batch
from workbench.runtime.offline_batches import OfflineTask
from workbench.runtime.recognizer import Recognizer

_MOST_S = 600.0


def offline_cost_rows(
    recognizer: Recognizer,
    clips: Sequence[Samples],
    batches: Sequence[int],
    lengths_s: Sequence[float],
    repeats: int = 3,
) -> list[dict[str, Any]]:
    """Rows of a cost record, stage `offline`: every length × batch size whose audio fits one batch, after one warm-up of each."""
    rate_hz = recognizer.loaded.geometry.sample_rate_hz
    cells = [(s, b) for s in sorted(set(lengths_s)) for b in sorted(set(batches)) if b == 1 or s * b <= MOST_BATCH_S]
    times_ms: dict[tuple[float, int], list[float]] = {cell: [] for cell in cells}
    rng = np.random.default_rng(0)
    for round_number in range(repeats + 1):
        for position in rng.permutation(len(cells)).tolist():
            seconds, batch = cells[position]
            samples = int(seconds * rate_hz)
            signal = torch.from_numpy(np.stack([speech_of(clips, samples, number) for number in range(batch)]))
            start_s = time.perf_counter()
            with recognizer.stage.device_lock:
                offline_batch(recognizer.loaded, signal, [samples] * batch)
            if round_number:
                times_ms[seconds, batch].append((time.perf_counter() - start_s) * 1e3)
    return [
        {
            "stage": OFFLINE,
            "shape": f"{seconds:g} s",
            "audio_s": seconds,
            "batch": batch,
            "ms_p50": round(float(np.percentile(ms, 50)), 4),
            "ms_p95": round(float(np.percentile(ms, 95)), 4),
            "samples_ms": [round(value, 4) for value in ms],
        }
        for (seconds, batch), ms in times_ms.items()
    ]


def offline_costs(
    recognizer: Recognizer,
    clips: Sequence[Samples],
    batches: Sequence[int],
    lengths_s: Sequence[float],
    repeats: int = 3,
) -> Record:
    """A cost record of offline rows alone."""
    return Record(
        kind="costs",
        config=to_dict(recognizer.config),
        rows=offline_cost_rows(recognizer, clips, batches, lengths_s, repeats),
        numbers={"repeats": repeats},
        counters={"geometry": dataclasses.asdict(recognizer.loaded.geometry)},
        notes=list(recognizer.loaded.notes),
    )


def run_offline(
    recognizer: Recognizer,
    work: Mapping[str, Sequence[int]],
    clips: Sequence[Samples],
    concurrency: int,
    load: LoadConfig | None = None,
    most_s: float = _MOST_S,
) -> Record:
    """Recognise recordings of these lengths, `concurrency` in the works at once, each set once in the order of the load's seed.

    The longest is recognised once beforehand, alone and uncounted: the first run of a process pays for more than its recordings. numbers as of
    `simulate_offline`. Raises StepTimeout if not all are done within `most_s` seconds; none is begun after them.
    """
    load = load or recognizer.config.load
    rate_hz = recognizer.loaded.geometry.sample_rate_hz
    longest = speech_of(clips, max(max(lengths) for lengths in work.values()), 0)
    with recognizer.stage.device_lock:
        offline_batch(recognizer.loaded, torch.from_numpy(longest[None]), [longest.size])
    end_s = time.perf_counter() + most_s
    numbers: dict[str, Any] = {}
    total_s, total_samples, total_padding = 0.0, 0, 0
    for name, lengths in work.items():
        order = np.random.default_rng((load.seed, len(lengths))).permutation(len(lengths))
        recordings = [speech_of(clips, lengths[index], index) for index in order.tolist()]
        start_s = time.perf_counter()
        padding = _play(recognizer, recordings, concurrency, end_s)
        took_s, samples = time.perf_counter() - start_s, sum(lengths)
        numbers[f"rtfx_{name}"] = samples / rate_hz / took_s
        numbers[f"padding_share_{name}"] = padding / (samples + padding)
        total_s, total_samples, total_padding = total_s + took_s, total_samples + samples, total_padding + padding
    recordings_n = sum(map(len, work.values()))
    numbers = {
        "rtfx": total_samples / rate_hz / total_s,
        "padding_share": total_padding / (total_samples + total_padding),
        **numbers,
        "recordings": recordings_n,
        "recordings_per_s": recordings_n / total_s,
    }
    config = replace(recognizer.config, **{"load.seed": load.seed})
    return Record(
        kind="offline_run",
        config=to_dict(config),
        numbers=numbers,
        counters=recognizer.offline.metrics.snapshot(),
        notes=list(recognizer.loaded.notes),
    )


def speech_of(clips: Sequence[Samples], samples: int, number: int) -> Samples:
    """`samples` of speech: clip `number`, repeated from a place of its own until it is long enough."""
    clip = clips[number % len(clips)]
    return np.resize(np.roll(clip, -(997 * number) % max(1, clip.size)), samples).astype(np.float32, copy=False)


def thinned(lengths: Sequence[int], count: int) -> list[int]:
    """`count` of these lengths, or all if there are no more, ascending: evenly spaced among the sorted ones, so distributed alike."""
    ordered, n = sorted(lengths), len(lengths)
    return ordered if count >= n else [ordered[(2 * place + 1) * n // (2 * count)] for place in range(count)]


def _play(recognizer: Recognizer, recordings: Sequence[Samples], concurrency: int, end_s: float) -> int:
    """Samples of padding. end_s: on the clock of `time.perf_counter`."""
    pending: deque[OfflineTask] = deque()
    padding = 0
    depth = recognizer.config.asr.batching.max_queue_depth
    window = min(concurrency, depth) if recognizer.pipeline is not None else 1
    for number, samples in enumerate(recordings):
        while len(pending) >= window:
            _collect(pending.popleft(), end_s)
        if time.perf_counter() > end_s:
            raise StepTimeout(f"offline: time was up when {number} of {len(recordings)} recordings had been begun")
        task = recognizer.offline.submit(samples)
        padding += task.padded_samples - samples.size
        pending.append(task)
    while pending:
        _collect(pending.popleft(), end_s)
    return padding


def _collect(task: OfflineTask, end_s: float) -> None:
    if not task.done.wait(max(0.0, end_s - time.perf_counter())):
        raise StepTimeout("offline: time was up before every recording was recognised")
    if task.error is not None:
        raise task.error
