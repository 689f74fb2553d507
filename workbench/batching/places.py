"""Places in a pipeline: at most `depth` streams have work in it, and a stream that has begun is never refused half-way.

    places = Places(depth=8, metrics)
    places.take()            # a stream brings its first chunk; QueueFull when all places are taken
    places.give_back()       # it has no further chunk that is ready, or it ended

A stream keeps its place from one chunk to the next as long as audio waits for it. So a newcomer cannot take the place of a stream whose
recording is half recognised, and what is in the works is bounded by `depth` recordings however many rows there are: after an overload it
is gone as soon as those are done. Each stream has one chunk in the works at most, so no queue behind the places ever holds more than `depth`.
Nothing here locks: take and give back under the pipeline's lock.
"""

from __future__ import annotations

from workbench.batching.metrics import StageMetrics
from workbench.errors import ConfigError, QueueFull


class Places:
    """`depth` places; refusals are counted in `metrics`."""

    def __init__(self, depth: int, metrics: StageMetrics) -> None:
        if depth < 1:
            raise ConfigError(f"depth: got {depth}; allowed is 1 or more")
        self.depth, self.taken = depth, 0
        self._metrics = metrics

    def take(self) -> None:
        """A stream without a place brings work. Raises QueueFull."""
        if self.taken >= self.depth:
            self._metrics.rejected()
            raise QueueFull(
                f"{self._metrics.name}: {self.taken} streams have work in it; allowed is {self.depth} (asr.batching.max_queue_depth)"
            )
        self.taken += 1

    def give_back(self) -> None:
        """A stream with a place has nothing more to run. Raises ValueError where no place is taken."""
        if not self.taken:
            raise ValueError("a place was given back that nobody had")
        self.taken -= 1
