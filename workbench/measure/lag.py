"""When a paced run is lost to its own load generator: as soon as no end of it could bring the lateness back under the bound.

    watch = LagWatch(len(schedule), lateness_bound_s(schedule.chunk_s))
    watch.sent(0.007)                   # seconds behind its due time, once per chunk
    if watch.lost: raise watch.refusal(due_s, schedule.seconds)

The p99 of n values (numpy's, linear between ranks) is never below the value of rank floor(0.99 (n - 1)). Once so many values exceed the bound
that this rank must be one of them, whatever is still to come, the run's p99 exceeds it too. Pure: no clock.
"""

from __future__ import annotations

from workbench.errors import GeneratorLagged


class LagWatch:
    """Counts the chunks that were sent later than `bound_s` after they were due, of `chunks` in all."""

    def __init__(self, chunks: int, bound_s: float) -> None:
        self.chunks, self.bound_s, self.late = chunks, bound_s, 0
        # Integers: 0.99 as a float could round a rank up.
        self.enough = chunks - 99 * (chunks - 1) // 100

    @property
    def lost(self) -> bool:
        """Whether the p99 of all chunks is certain to exceed the bound."""
        return self.late >= self.enough

    def sent(self, behind_s: float) -> None:
        """Count one chunk, sent `behind_s` after it was due."""
        self.late += behind_s > self.bound_s

    def refusal(self, due_s: float, seconds: float) -> GeneratorLagged:
        """The error that says so, `due_s` into a load of `seconds`."""
        return GeneratorLagged(
            f"generator lagged: {self.late} of {self.chunks} chunks had been sent more than {self.bound_s * 1e3:.1f} ms after they were due "
            f"within {due_s:.1f} s of {seconds:g} s; 99 % in time could not be reached any more. The latencies would be the generator's: "
            "lower load.streams or free a core"
        )
