"""Offline recognition on a virtual clock: what bucketing the lengths of whole recordings saves in steps and costs in padding.

    costs = OfflineCosts.from_record(Record.load("costs.json"))          # rows of stage "offline"
    work = {"shipped": shipped_lengths(), "long_tailed": long_tailed_lengths(256)}
    simulate_offline(config, costs, geometry, work, concurrency=64).numbers["rtfx"]

As live: a caller keeps `concurrency` recordings in the works and collects them in order; recordings of one padded length share a batch, by the
same micro-batcher; one batch runs at a time and costs what its size and its padded length were measured to cost. Not modelled: decoding files.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from workbench.batching.buckets import MOST_BATCH_S, bucketed_samples
from workbench.batching.metrics import StageMetrics
from workbench.batching.microbatcher import MicroBatcher
from workbench.config import Config, effective_batch_cap, to_dict
from workbench.errors import RecordError
from workbench.geometry import StreamGeometry
from workbench.measure.cost_table import CostTable, Floats, sound_costs
from workbench.results import Record, environment

OFFLINE = "offline"
# Positions of the model's table of offsets: longer recordings are not extended.
MOST_FRAMES = 5000


@dataclass(frozen=True)
class OfflineCosts:
    """Costs of a batch by its size and the seconds of its recordings: a curve over batch sizes for each measured length, ascending."""

    table: CostTable
    lengths_s: tuple[float, ...]
    shapes: tuple[str, ...]

    @classmethod
    def from_record(cls, record: Record) -> OfflineCosts:
        """Read rows {stage: offline, shape, audio_s, batch, ms_p50, …}. Raises RecordError if there are none, or one lacks its length."""
        table = CostTable.from_record(record, OFFLINE)
        rows = [row for row in record.rows if row.get("stage") == OFFLINE]
        if any("audio_s" not in row for row in rows):
            raise RecordError("costs: a row of stage 'offline' has no audio_s")
        with sound_costs():
            lengths = sorted({(float(row["audio_s"]), str(row["shape"])) for row in rows})
        if not all(0 < audio_s < math.inf for audio_s, _ in lengths):
            raise RecordError(f"costs: got audio_s {[s for s, _ in lengths]}; allowed are seconds above 0")
        return cls(table, tuple(s for s, _ in lengths), tuple(shape for _, shape in lengths))

    def quantiles_ms(self, batch: int, audio_s: float) -> Floats:
        """Quantiles of the cost: linear between measured lengths; beyond the longest in proportion, below the shortest as the shortest."""
        lengths = self.lengths_s
        high = min(int(np.searchsorted(lengths, audio_s)), len(lengths) - 1)
        upper = self.table.quantiles_ms(self.shapes[high], batch)
        if high == 0 or audio_s >= lengths[-1]:
            return np.asarray(upper * max(1.0, audio_s / lengths[high]))
        lower = self.table.quantiles_ms(self.shapes[high - 1], batch)
        weight = (audio_s - lengths[high - 1]) / (lengths[high] - lengths[high - 1])
        return np.asarray((1 - weight) * lower + weight * upper)

    def covers(self, batch: int, audio_s: float) -> bool:
        """Whether a batch lies between measured sizes and lengths."""
        longest = self.table.covers(self.shapes[-1], batch) or self.table.covers(self.shapes[0], batch)
        return longest and audio_s <= self.lengths_s[-1]


def long_tailed_lengths(count: int, sample_rate_hz: int = 16000, seed: int = 0) -> list[int]:
    """Lengths in samples of `count` recordings, most of a few seconds and some of a minute: log-normal, median 4 s, cut to 0.5 to 60 s."""
    seconds = np.random.default_rng((seed, 7)).lognormal(mean=np.log(4.0), sigma=1.0, size=count)
    return [int(value) for value in np.clip(seconds, 0.5, 60.0) * sample_rate_hz]


def simulate_offline(
    config: Config,
    costs: OfflineCosts,
    geometry: StreamGeometry,
    work: Mapping[str, Sequence[int]],
    concurrency: int,
) -> Record:
    """Recognise the recordings of each set once. numbers: rtfx (audio seconds per second), padding_share (zeros in what is computed),
    batch_mean_items and recordings_per_s, over all sets, and the first two per set. The seed of the load orders the recordings."""
    numbers: dict[str, Any] = {}
    metrics = StageMetrics(OFFLINE)
    total = _Pass(0.0, 0, 0, 0)
    beyond = 0
    for name, lengths in work.items():
        order = np.random.default_rng((config.load.seed, len(lengths))).permutation(len(lengths))
        run = _Run(config, costs, geometry, metrics)
        done = run.play([lengths[index] for index in order.tolist()], concurrency)
        beyond += run.extrapolated
        numbers.update(done.numbers(geometry.sample_rate_hz, f"_{name}"))
        total = _Pass(*(a + b for a, b in zip(dataclasses.astuple(total), dataclasses.astuple(done), strict=True)))
    counters = metrics.snapshot()
    numbers = {
        **total.numbers(geometry.sample_rate_hz),
        **numbers,
        "recordings": total.recordings,
        "recordings_per_s": total.recordings / total.took_s,
        "batch_mean_items": counters["batch_size_mean_items"],
        "extrapolated_share": beyond / max(1, metrics.batches),
    }
    notes = [f"{beyond} of {metrics.batches} batches lay beyond what was measured: linear guess"] if beyond else []
    return Record(
        kind="offline_twin",
        config=to_dict(config),
        numbers=numbers,
        counters=counters,
        notes=notes,
        environment=environment(),
    )


@dataclass(frozen=True)
class _Pass:
    took_s: float
    samples: int
    padding_samples: int
    recordings: int

    def numbers(self, rate_hz: int, suffix: str = "") -> dict[str, float]:
        return {
            f"rtfx{suffix}": self.samples / rate_hz / self.took_s,
            f"padding_share{suffix}": self.padding_samples / (self.samples + self.padding_samples),
        }


class _Run:
    """One caller, one device."""

    def __init__(self, config: Config, costs: OfflineCosts, geometry: StreamGeometry, metrics: StageMetrics) -> None:
        batching = config.asr.batching
        self._costs, self._rate_hz, self._enabled = costs, geometry.sample_rate_hz, batching.enabled
        self._geometry, self._bucket_ms = geometry, batching.offline_bucket_ms
        most = int(MOST_BATCH_S * geometry.sample_rate_hz)
        self._batcher: MicroBatcher[int] = MicroBatcher(
            max_batch_size=effective_batch_cap(batching)[0],
            max_queue_delay_s=batching.max_queue_delay_us * 1e-6 if batching.enabled else 0.0,
            max_queue_depth=batching.max_queue_depth,
            metrics=metrics,
            cap_for=lambda key: max(1, most // max(1, int(str(key)))),
        )
        self._rng = np.random.default_rng((config.load.seed, 2))
        self._now = 0.0
        self._done: set[int] = set()
        self._quantiles: dict[tuple[int, int], list[float]] = {}
        self.extrapolated = 0

    def play(self, lengths: Sequence[int], concurrency: int) -> _Pass:
        """Keep up to `concurrency` recordings in the works (one without batching), collect them in order."""
        window = max(1, min(concurrency, self._batcher.max_queue_depth)) if self._enabled else 1
        pending: deque[int] = deque()
        padding = 0
        for number, samples in enumerate(lengths):
            while len(pending) >= window:
                self._await(pending.popleft())
            padded = bucketed_samples(samples, self._bucket_ms, self._geometry, MOST_FRAMES)
            padding += padded - samples
            self._batcher.submit(number, padded, self._now)
            pending.append(number)
        while pending:
            self._await(pending.popleft())
        self._batcher.metrics.padded(samples=padding)
        return _Pass(self._now, sum(lengths), padding, len(lengths))

    def _await(self, number: int) -> None:
        while number not in self._done:
            batch = self._batcher.next_batch(self._now)
            if batch is None:
                self._now = max(self._now, self._batcher.next_deadline() or self._now)
                continue
            self._now += self._cost_s(len(batch.items), int(str(batch.key)))
            self._batcher.finish(batch, self._now)
            self._done.update(batch.items)

    def _cost_s(self, batch: int, samples: int) -> float:
        audio_s = samples / self._rate_hz
        spread = self._quantiles.get((batch, samples))
        if spread is None:
            spread = self._quantiles[batch, samples] = self._costs.quantiles_ms(batch, audio_s).tolist()
        self.extrapolated += not self._costs.covers(batch, audio_s)
        return spread[int(self._rng.random() * len(spread))] * 1e-3
