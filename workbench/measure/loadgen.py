"""Open-loop load as data: when every chunk of every live stream is due, and what a run's times say about latency.

Real callers speak in real time whether or not the recogniser keeps up. So a chunk is due when its last needed sample has been
spoken, and latency = completion - due, never completion - send: a slow generator or a full queue must not hide waiting time.

    schedule = build_schedule(LoadConfig(streams=32, seconds=60.0), geometry, clip_samples=[48000, 81000])
    for row in range(len(schedule)):        # in the order of schedule.due_s; a runner sleeps, pushes, and notes times
        ...                                 # push the utterance's samples up to schedule.stop_samples[row]; if final: finish()
    record = run_record("paced", config, schedule, (sent_s, completed_s), stages)    # refuses a run whose generator lagged

Every utterance has exactly one final row, due when its last sample was spoken; it carries the chunk that the end cuts short, or no
chunk at all (`mel_frames` 0) where everything had been ready before. Pure: numpy, no clock, no threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.config import Config, LoadConfig, to_dict
from workbench.errors import ConfigError, GeneratorLagged, RecordError
from workbench.geometry import StreamGeometry
from workbench.results import Record, environment, percentiles_ms

MIN_LATENESS_BOUND_S = 0.005
LATENESS_SHARE_OF_CHUNK = 0.05
# Shares at which a run's latency distribution is kept: enough to draw it, small enough to commit.
QUANTILES = (*(point / 100 for point in range(100)), 0.995, 0.999, 1.0)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Utterance:
    """One utterance of a stream: `samples` of clip number `clip`, spoken from `phase_s` + `first_sample` / rate on.

    cut: the load ended inside it, so `samples` is less than the clip's length and its transcript is not the clip's.
    """

    index: int
    stream: int
    clip: int
    phase_s: float
    first_sample: int
    samples: int
    cut: bool


@dataclass(frozen=True)
class Schedule:
    """Columns of equal length, one row per action of the generator, sorted by `due_s` (rows of a stream keep their order).

    due_s: seconds from the start of the load; stream, utterance: numbers from 0; chunk_index: within the utterance; final: the
    row ends its utterance; mel_frames, drop_encoded: what the encoder step is fed (0: nothing is left to compute); cut: the
    utterance ends inside this chunk; stop_samples: samples of the utterance that were spoken by then, what a runner pushes up to.
    """

    due_s: Floats
    stream: Ints
    utterance: Ints
    chunk_index: Ints
    final: Bools
    mel_frames: Ints
    drop_encoded: Ints
    cut: Bools
    stop_samples: Ints
    utterances: tuple[Utterance, ...]
    streams: int
    chunk_s: float
    seconds: float

    def __len__(self) -> int:
        return int(self.due_s.size)


def build_schedule(load: LoadConfig, geometry: StreamGeometry, clip_samples: Sequence[int]) -> Schedule:
    """The rows of `load.streams` live streams that speak clips back to back for `load.seconds`.

    Staggered starts are uniform over one chunk. Aligned starts put the beginning of every utterance on one common grid of chunks, so
    that all streams stay in step. Which clips a stream speaks, and its phase, depend on the seed and the stream's number
    only: more streams leave the earlier ones as they were. Raises ConfigError for no clips or a negative length.
    """
    if not clip_samples or min(clip_samples) < 0:
        raise ConfigError(f"clips: got {len(clip_samples)} clip lengths; needed is at least one, none negative")
    if max(clip_samples) == 0:
        raise ConfigError("clips: every clip is empty; a load needs audio")
    utterances: list[Utterance] = []
    for stream in range(load.streams):
        utterances += _speak(load, geometry, clip_samples, stream, len(utterances))
    chunks = _Chunks.of(geometry, max(clip_samples))
    blocks = [_rows(geometry, chunks, u.samples) for u in utterances]
    sizes = [block.shape[1] for block in blocks]
    chunk, mel, drop, stop, final, cut = np.concatenate(blocks, axis=1)
    # Samples are added as integers: sums of floats could swap the end of one utterance with the start of the next.
    spoken = np.repeat([u.first_sample for u in utterances], sizes) + stop
    due_s = np.repeat([u.phase_s for u in utterances], sizes) + spoken / geometry.sample_rate_hz
    order = np.argsort(due_s, kind="stable")
    return Schedule(
        due_s=due_s[order],
        stream=np.repeat([u.stream for u in utterances], sizes)[order],
        utterance=np.repeat(np.arange(len(utterances)), sizes)[order],
        chunk_index=chunk[order],
        final=final[order].astype(bool),
        mel_frames=mel[order],
        drop_encoded=drop[order],
        cut=cut[order].astype(bool),
        stop_samples=stop[order],
        utterances=tuple(utterances),
        streams=load.streams,
        chunk_s=geometry.chunk_s,
        seconds=load.seconds,
    )


def lateness_bound_s(chunk_s: float) -> float:
    """Largest p99 lateness of a generator whose run still counts: 5 ms, or 5 % of a chunk where that is more."""
    return max(MIN_LATENESS_BOUND_S, LATENESS_SHARE_OF_CHUNK * chunk_s)


def check_generator(lateness_s: Floats, bound_s: float) -> None:
    """Raises GeneratorLagged if 99 % of the chunks were not sent within `bound_s` of when they were due."""
    behind_s = float(np.percentile(lateness_s, 99))
    if behind_s > bound_s:
        raise GeneratorLagged(
            f"generator lagged: 99 % of chunks were sent within {behind_s * 1e3:.1f} ms of when they were due; allowed is "
            f"{bound_s * 1e3:.1f} ms. The latencies would be the generator's: lower load.streams or free a core"
        )


def summarise(
    schedule: Schedule, sent_s: ArrayLike, completed_s: ArrayLike, bound_s: float | None = None
) -> dict[str, Any]:
    """Numbers of one run from the seconds at which each row was sent and completed, on the schedule's time axis.

    `latency_*` covers rows inside an utterance, `final_*` the end of each utterance, both counted from the due time; `late_share` is
    the share of all rows that completed more than one chunk after they were due. A kind without rows has its `_n` = 0 and no
    percentiles. Raises RecordError if a row never completed, GeneratorLagged if the generator's p99 lateness exceeds `bound_s`.
    """
    sent, completed = _times(schedule, sent_s, "sent"), _times(schedule, completed_s, "completed")
    if np.any(completed < sent) or np.any(sent < schedule.due_s - 1e-3):
        raise RecordError("run: a chunk was sent before it was due or completed before it was sent; the clocks differ")
    lateness = np.maximum(sent - schedule.due_s, 0.0)
    bound = lateness_bound_s(schedule.chunk_s) if bound_s is None else bound_s
    check_generator(lateness, bound)
    latency = completed - schedule.due_s
    late = latency > schedule.chunk_s
    return {
        "streams": schedule.streams,
        "load_s": schedule.seconds,
        "chunk_ms": schedule.chunk_s * 1e3,
        "utterances": len(schedule.utterances),
        **_spread(latency[~schedule.final], "latency"),
        **_spread(latency[schedule.final], "final"),
        "late_chunks": int(late.sum()),
        "late_share": float(late.mean()),
        **percentiles_ms(lateness.tolist(), "generator_late", (50, 99)),
        "generator_late_max_ms": float(lateness.max()) * 1e3,
        "generator_bound_ms": bound * 1e3,
    }


def run_record(
    kind: str,
    config: Config,
    schedule: Schedule,
    times_s: tuple[ArrayLike, ArrayLike],
    stage: dict[str, Any],
    host: dict[str, Any] | None = None,
) -> Record:
    """The record of one run over a schedule; `paced` (real) and `twin` (simulated) runs get the same names from here.

    times_s: seconds sent and completed, per row. stage: `StageMetrics.snapshot()` of the batching stage. host: the
    environment, found anew if None. rows: the latency distribution, one row per quantile.
    """
    sent_s, completed_s = times_s
    numbers = summarise(schedule, sent_s, completed_s)
    latency_ms = (np.asarray(completed_s, dtype=np.float64) - schedule.due_s) * 1e3
    columns: dict[str, list[float | None]] = {"share": list(QUANTILES)}
    for name, mask in (("latency_ms", ~schedule.final), ("final_ms", schedule.final)):
        values = latency_ms[mask]
        columns[name] = np.quantile(values, QUANTILES).tolist() if values.size else [None] * len(QUANTILES)
    return Record(
        kind=kind,
        config=to_dict(config),
        numbers=numbers,
        rows=[dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
        counters=dict(stage),
        environment=environment() if host is None else host,
    )


def _speak(
    load: LoadConfig, geometry: StreamGeometry, clip_samples: Sequence[int], stream: int, first: int
) -> list[Utterance]:
    """The utterances of one stream: at least one, each with at least one chunk of time, the last one cut where the load ends."""
    rng = np.random.default_rng((load.seed, stream))
    aligned = load.starts == "aligned"
    phase_s = float(rng.uniform(0.0, geometry.chunk_s))
    grid = geometry.chunk_samples
    budget, at = max(1, round(load.seconds * geometry.sample_rate_hz)), 0
    out: list[Utterance] = []
    while not out or budget - at >= grid:
        clip = int(rng.integers(len(clip_samples)))
        samples = min(clip_samples[clip], budget - at)
        cut = samples < clip_samples[clip]
        out.append(Utterance(first + len(out), stream, clip, 0.0 if aligned else phase_s, at, samples, cut))
        at += -(-max(samples, 1) // grid) * grid if aligned else max(samples, grid)
    return out


@dataclass(frozen=True)
class _Chunks:
    """The chunks of an endless recording as columns; every utterance is a beginning of them plus its own last row."""

    stop_mel: Ints
    columns: Ints  # [6, chunk]: index, mel frames, drop, ready samples, final = 0, cut = 0

    @classmethod
    def of(cls, geometry: StreamGeometry, samples: int) -> _Chunks:
        found = [geometry.chunk(chunk.index) for chunk in geometry.chunks(samples)] or [geometry.chunk(0)]
        rows = [
            (c.index, c.input_mel_frames, c.drop_encoded, geometry.chunk_ready_samples(c.index), 0, 0) for c in found
        ]
        return cls(np.asarray([c.stop_mel for c in found], np.int64), np.asarray(rows, np.int64).T)


def _rows(geometry: StreamGeometry, chunks: _Chunks, samples: int) -> Ints:
    """Rows of one utterance as columns [6, row].

    A recogniser that does not know the end runs a full chunk once it is ready, and a cut one only when told to finish.
    """
    total = geometry.mel_frames(samples)
    full = int(np.searchsorted(chunks.stop_mel, total, side="right"))
    if full and chunks.columns[3, full - 1] > samples:
        full -= 1
    before = int(chunks.stop_mel[full - 1]) if full else 0
    last = (full, 0, 0, samples, 1, 0)
    if before < total:
        chunk = geometry.chunk(full, stop_mel=total)
        cut = chunk != geometry.chunk(full)
        last = (full, chunk.input_mel_frames, chunk.drop_encoded, samples, 1, int(cut))
    return np.concatenate([chunks.columns[:, :full], np.asarray([last], np.int64).T], axis=1)


def _times(schedule: Schedule, values: ArrayLike, name: str) -> Floats:
    times = np.asarray(values, dtype=np.float64)
    if times.shape != schedule.due_s.shape:
        raise RecordError(f"run: got {times.size} {name} times for {len(schedule)} scheduled chunks")
    lost = int(times.size - np.isfinite(times).sum())
    if lost:
        raise RecordError(
            f"run: {lost} of {times.size} chunks were never {name}; percentiles of the rest would flatter"
        )
    return times


def _spread(latency_s: Floats, prefix: str) -> dict[str, Any]:
    return percentiles_ms(latency_s.tolist(), prefix) if latency_s.size else {f"{prefix}_n": 0}
