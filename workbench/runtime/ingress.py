"""The barrier of coordinated streams at run time: chunks of one ingress wave are started together.

    size = gate.arrive(stream, launch, key, audio_s)     # a number: go on now; None: `launch(cohort)` is called when the wave closes

The rules are `IngressCohorts`; here its waves are watched by the workers like any other lane, and each stream of a closed wave is started with
the number of its companions that have the same key, so that their step leaves as soon as they are all there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from workbench.batching.ingress import IngressCohorts, Wave
from workbench.batching.metrics import StageMetrics
from workbench.batching.microbatcher import Batch
from workbench.config import BatchingConfig
from workbench.runtime.workers import Lane, Wake, Workers


@dataclass(frozen=True)
class _Arrival:
    stream: Hashable
    launch: Callable[[int], None]
    key: Hashable
    wave: Wave


class IngressGate:
    """One recogniser's barrier; also the machine of its own lane."""

    def __init__(self, batching: BatchingConfig) -> None:
        self._cohorts = IngressCohorts(batching)
        self._held: list[_Arrival] = []
        self._workers: Workers | None = None
        self._registered_once = False
        self.lane = Lane("ingress", self, self._run, self._settle)

    def attach(self, workers: Workers) -> None:
        """The workers whose lock and clock it shares."""
        self._workers = workers

    def register(self, stream: Hashable) -> None:
        """A stream opts in."""
        workers = self._attached()
        with workers.changed:
            self._registered_once = True
            self._cohorts.register(stream, workers.now())

    def unregister(self, stream: Hashable) -> None:
        """A stream ends or is about to flush: nobody waits for it, and it waits no longer. Safe to call twice."""
        workers = self._attached()
        with workers.changed:
            self._cohorts.unregister(stream, workers.now())
            self._held = [arrival for arrival in self._held if arrival.stream is not stream]
            workers.poke()

    def arrive(self, stream: Hashable, launch: Callable[[int], None], key: Hashable, audio_s: float) -> int | None:
        """A chunk of `audio_s` seconds is ready: how many start with it if it may go on at once, else None and `launch` is called later."""
        workers = self._attached()
        with workers.changed:
            wave = self._cohorts.arrive(stream, workers.now(), audio_s)
            if wave.closed and wave.size == 1:
                return 1
            self._held.append(_Arrival(stream, launch, key, wave))
            workers.poke()
            return None

    def stages(self) -> list[StageMetrics]:
        """Its metrics, once any stream opted in."""
        return [self._cohorts.metrics] if self._registered_once else []

    @property
    def open(self) -> int:
        """Chunks at the barrier."""
        return len(self._held)

    def next_batch(self, now: float) -> Batch[_Arrival] | None:
        """The arrivals of closed waves."""
        if not self._held:
            return None
        self._cohorts.poll(now)
        ready = tuple(arrival for arrival in self._held if arrival.wave.closed)
        if not ready:
            return None
        self._held = [arrival for arrival in self._held if not arrival.wave.closed]
        return Batch(ready, "ingress", ready[0].wave.reason or "cohort", now, (), len(ready), len(ready))

    def next_deadline(self) -> float | None:
        """When the open wave closes; at once when one is closed."""
        if any(arrival.wave.closed for arrival in self._held):
            return 0.0
        return self._cohorts.next_deadline() if self._held else None

    def finish(self, batch: Batch[_Arrival], now: float) -> None:
        """Nothing to account for: a wave's metrics are written when it closes."""

    def close(self, now: float) -> None:
        """Let go whoever waits, refuse arrivals."""
        self._cohorts.close(now)

    def _run(self, batch: Batch[_Arrival]) -> Sequence[None]:
        return [None] * len(batch.items)

    def _settle(self, batch: Batch[_Arrival], outcomes: Any, now: float) -> tuple[list[Wake], list[Wake]]:
        together = Counter(arrival.key for arrival in batch.items)
        return [partial(arrival.launch, together[arrival.key]) for arrival in batch.items], []

    def _attached(self) -> Workers:
        if self._workers is None:
            raise RuntimeError("the gate is not attached to workers")
        return self._workers
