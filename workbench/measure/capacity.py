"""How many live streams are carried under a stated rule: doubling to bracket the limit, bisection to find it.

    rule = CapacityRule(seconds=120)
    record = find_capacity(run_at, rule, SearchPlan(start=16))     # run_at(streams) -> record of one paced run
    record.numbers["capacity_streams"], record.numbers["late_share_upper_99"]

`run_at` may be anything that plays a load: the recogniser, the digital twin, NeMo's own loop, another engine. A level that is refused work or
falls behind has failed, with the reason in its row. A level whose load generator lagged was not measured: it is tried once more and then bounds the
search, since beyond it the generator would be measured; it is never counted as the engine's failure. The largest passing level is run again, and must pass again. Pure: no clock, no threads.

Confidence: with k of n chunks late, the share of late chunks is below `late_share_upper_99` with 99 % confidence (Clopper and Pearson, 1934).
That takes chunks to be independent, which neighbours in time are not; it is a floor on the doubt. A p99 needs 459 chunks with no miss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from workbench.errors import (
    ArenaFull,
    ConfigError,
    DeviceMemoryError,
    GeneratorLagged,
    LoadNotCarried,
    QueueFull,
    StepTimeout,
)
from workbench.results import Record, environment

SAMPLES_FOR_P99 = 459  # the least n with 0.99 ** n <= 0.01
COPIED = (
    *("late_share", "latency_p50_ms", "latency_p95_ms", "latency_p99_ms", "final_p50_ms", "final_p95_ms"),
    *("generator_late_p99_ms", "batch_size_mean_items"),
    *("labels_per_audio_s", "transcript_mismatches", "transcripts_compared"),
)
DEFAULT_SECONDS = 120.0
MOST_SECONDS = 86_400.0


@dataclass(frozen=True)
class CapacityRule:
    """What a level must keep: at most `late_share_max` of its chunks late by one chunk, and `final_p95_max_ms` for the p95 of the time
    from the last sample of an utterance to its final result. seconds, starts: the load of every level."""

    seconds: float = DEFAULT_SECONDS
    late_share_max: float = 0.001
    final_p95_max_ms: float = 1000.0
    starts: str = "staggered"

    def __post_init__(self) -> None:
        if not (0 < self.seconds <= MOST_SECONDS and 0 <= self.late_share_max < 1 and self.final_p95_max_ms > 0):
            raise ConfigError(
                f"rule: got {asdict(self)}; allowed are seconds above 0 to {MOST_SECONDS:g}, a share from 0 to below 1 and milliseconds > 0"
            )

    def broken_by(self, numbers: dict[str, Any]) -> list[str]:
        """Every part of the rule that a run broke, in words; empty if it passed."""
        found = []
        if numbers["late_share"] > self.late_share_max:
            found.append(f"{numbers['late_share']:.2%} of chunks late by one chunk; allowed {self.late_share_max:.2%}")
        final_ms = numbers.get("final_p95_ms")
        if final_ms is not None and final_ms > self.final_p95_max_ms:
            found.append(f"final p95 {final_ms:.0f} ms; allowed {self.final_p95_max_ms:.0f} ms")
        return found


@dataclass(frozen=True)
class SearchPlan:
    """start: first level; most_streams: never more than these; resolution: the gap between the levels that passed and failed, as a share of
    the former, at which the search ends; repeats: runs of the largest passing level; most_runs: bound on all runs."""

    start: int = 8
    most_streams: int = 16384
    resolution: float = 0.03
    repeats: int = 2
    most_runs: int = 30

    def __post_init__(self) -> None:
        if (
            not 1 <= self.start <= self.most_streams
            or not 0 < self.resolution < 1
            or min(self.repeats, self.most_runs) < 1
        ):
            raise ConfigError(
                f"search: got {asdict(self)}; allowed are 1 <= start <= most_streams, a resolution above 0 and below 1, repeats and most_runs "
                "from 1"
            )


@dataclass(frozen=True)
class LevelRun:
    """One run of a level. passed: None where nothing was measured (the generator lagged); why: what broke, or the reason."""

    streams: int
    passed: bool | None
    why: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The run as a row of the record."""
        chunks = self.numbers.get("latency_n", 0) + self.numbers.get("final_n", 0)
        late = self.numbers.get("late_chunks")
        upper = None if late is None or not chunks else late_share_upper(late, chunks)
        copied = {name: self.numbers.get(name) for name in COPIED}
        return {
            "streams": self.streams,
            "passed": {True: "yes", False: "no", None: "not measured"}[self.passed],
            "chunks": chunks,
            **copied,
            "late_share_upper_99": upper,
            "why": self.why,
        }


def find_capacity(
    run_at: Callable[[int], Record],
    rule: CapacityRule,
    plan: SearchPlan | None = None,
    on_level: Callable[[Record, LevelRun], None] = lambda so_far, run: None,
    go_on: Callable[[], bool] = lambda: True,
) -> Record:
    """Search, and return a record of kind `capacity`: a row per run, `capacity_streams` (0 if not even one stream passed, None if unknown).

    on_level: called with the record so far after every run; go_on: asked before every run, False ends the search early. A KeyboardInterrupt
    ends it too; `counters["ended"]` says how it ended. Raises what `run_at` raises besides the typed outcomes of a load.
    """
    plan = plan or SearchPlan()
    runs: list[LevelRun] = []
    host, config, ended = environment(), dict[str, Any](), "complete"
    while (streams := next_level(runs, plan)) is not None:
        if not go_on():
            ended = "budget"
            break
        try:
            run, about = _run(run_at, streams, rule)
        except KeyboardInterrupt:
            ended = "interrupted"
            break
        host, config = (about.environment, about.config) if about is not None else (host, config)
        runs.append(run)
        on_level(_record(runs, rule, plan, "running", (host, config)), run)
    else:
        ended = _ended(runs, plan)
    return _record(runs, rule, plan, ended, (host, config))


def next_level(runs: list[LevelRun], plan: SearchPlan) -> int | None:
    """The level to run next, None when the search is over. A level passes if all its runs passed; passes above a failed level do not count."""
    if not runs:
        return plan.start
    if len(runs) >= plan.most_runs:
        return None
    if runs[-1].passed is None and runs[-1].streams != _unmeasurable(runs):  # the generator lagged: once more
        return runs[-1].streams
    passed, failed = _bracket(runs)
    beyond = _unmeasurable(runs)
    if beyond is not None and (failed is None or beyond < failed):
        if passed is not None:
            return None
        failed = beyond
    if passed is None:
        assert failed is not None
        return None if failed == 1 else max(1, failed // 2)
    if failed is None and passed < plan.most_streams:
        return min(2 * passed, plan.most_streams)
    if failed is not None and failed - passed > max(1, math.floor(plan.resolution * passed)):
        return (passed + failed) // 2
    return passed if sum(run.streams == passed for run in runs) < plan.repeats else None


def late_share_upper(late: int, chunks: int, confidence: float = 0.99) -> float:
    """Clopper and Pearson's one-sided upper bound on a share, from `late` of `chunks`: the share at which so few would be this unlikely."""
    if late >= chunks:
        return 1.0
    if late == 0:
        return float(-math.expm1(math.log1p(-confidence) / chunks))
    counts = np.arange(late + 1)
    log_choose = np.asarray(
        [math.lgamma(chunks + 1) - math.lgamma(k + 1) - math.lgamma(chunks - k + 1) for k in counts.tolist()]
    )
    low, high = late / chunks, 1.0
    for _ in range(60):
        share = (low + high) / 2
        log_terms = log_choose + counts * math.log(share) + (chunks - counts) * math.log1p(-share)
        low, high = (share, high) if np.exp(log_terms).sum() > 1 - confidence else (low, share)
    return high


def _run(run_at: Callable[[int], Record], streams: int, rule: CapacityRule) -> tuple[LevelRun, Record | None]:
    try:
        record = run_at(streams)
    except GeneratorLagged as lagged:
        return LevelRun(streams, None, str(lagged)), None
    except (LoadNotCarried, QueueFull, ArenaFull, StepTimeout, DeviceMemoryError) as refused:
        return LevelRun(streams, False, f"{type(refused).__name__}: {refused}"), None
    numbers = {**record.numbers, "batch_size_mean_items": record.counters.get("batch_size_mean_items")}
    broken = rule.broken_by(numbers)
    return LevelRun(streams, not broken, "; ".join(broken), numbers), record


def _bracket(runs: list[LevelRun]) -> tuple[int | None, int | None]:
    """The largest level that passed below the smallest that failed, and the latter."""
    failed = min((run.streams for run in runs if run.passed is False), default=None)
    passed = [run.streams for run in runs if run.passed and (failed is None or run.streams < failed)]
    return max(passed, default=None), failed


def _unmeasurable(runs: list[LevelRun]) -> int | None:
    """The smallest level at which the generator lagged twice."""
    lagged = [run.streams for run in runs if run.passed is None]
    return min((streams for streams in lagged if lagged.count(streams) > 1), default=None)


def _ended(runs: list[LevelRun], plan: SearchPlan) -> str:
    """Why there is no further level."""
    failed, beyond = _bracket(runs)[1], _unmeasurable(runs)
    if len(runs) >= plan.most_runs:
        return "most_runs"
    if beyond is not None and (failed is None or beyond < failed):
        return "generator"
    return "complete" if failed is not None else "most_streams"


def _record(
    runs: list[LevelRun], rule: CapacityRule, plan: SearchPlan, ended: str, about: tuple[dict[str, Any], dict[str, Any]]
) -> Record:
    passed, failed = _bracket(runs)
    best = [run.numbers for run in runs if run.passed and run.streams == passed]
    late = sum(numbers["late_chunks"] for numbers in best)
    chunks = sum(numbers.get("latency_n", 0) + numbers.get("final_n", 0) for numbers in best)
    numbers = {
        "capacity_streams": passed if passed is not None else 0 if failed == 1 else None,
        "first_failed_streams": failed,
        "runs_at_capacity": len(best),
        "chunks_observed": chunks,
        "late_chunks_observed": late,
        "late_share_upper_99": late_share_upper(late, chunks) if chunks else None,
        "seconds": rule.seconds,
        "late_share_max": rule.late_share_max,
        "final_p95_max_ms": rule.final_p95_max_ms,
    }
    return Record(
        kind="capacity",
        config={**about[1], "rule": asdict(rule), "search": asdict(plan)},
        numbers=numbers,
        rows=[run.row() for run in runs],
        counters={"ended": ended, "runs": len(runs)},
        notes=_notes(runs, rule, ended, (passed, failed), chunks),
        environment=about[0],
    )


def _notes(
    runs: list[LevelRun], rule: CapacityRule, ended: str, bracket: tuple[int | None, int | None], chunks: int
) -> list[str]:
    failed = bracket[1]
    notes = [
        f"rule: {rule.starts} starts, {rule.seconds:g} s, at most {rule.late_share_max:.2%} of chunks late by one chunk, p95 of the final "
        f"result at most {rule.final_p95_max_ms:g} ms"
    ]
    if rule.seconds < DEFAULT_SECONDS:
        notes.append(
            f"short runs: {rule.seconds:g} s instead of {DEFAULT_SECONDS:g} s show less of what happens rarely"
        )
    if chunks:
        enough = "enough" if chunks >= SAMPLES_FOR_P99 else "too few"
        notes.append(
            f"the claim rests on {chunks} chunks; a p99 at 99 % confidence needs {SAMPLES_FOR_P99} with no miss: {enough}"
        )
    reasons = {
        "generator": f"ended: at {_unmeasurable(runs)} streams the load generator lagged twice, so nothing was measured there; the limit "
        "found is the generator's, not the engine's",
        "budget": "ended early: the time set for the search was used up; the limit lies between the levels that passed and failed",
        "running": "unfinished: the levels so far",
        "interrupted": "interrupted: the levels so far; the limit may be higher",
        "most_runs": "ended early: the number of runs set for the search was used up",
        "most_streams": "ended at the largest level allowed, which passed: the limit is not known",
    }
    notes += [reasons[ended]] if ended in reasons else []
    odd = sorted({run.streams for run in runs if run.passed and failed is not None and run.streams >= failed})
    if odd:
        notes.append(
            f"noise: {', '.join(map(str, odd))} streams also passed once, but {failed} failed; the lower level counts"
        )
    return notes
