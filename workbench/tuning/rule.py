"""How one configuration is judged: repeats on equal traffic, medians for objectives, confidence bounds for limits, or the most streams carried.

    rule = Rule(spec, evaluate)
    rule.measure(config, first_seed=0)        # {"values": [...], "excess": {limit: ...}, "numbers": {...}, "why": {...}}
    rule.judge(config, first_seed=1000)       # the same; in a study of capacity, at the most streams that keep every limit

Repeat r runs with seed `first_seed` + r, so configurations meet equal traffic. A limit is kept if the 95 % confidence bound of its repeats keeps
it; one whose first run misses by more than half of it is not repeated. A run that was refused work counts as one whose every chunk was late by
the whole load: worse than any other, and no gap in the data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from workbench.config import Config, replace, to_dict
from workbench.errors import LoadNotCarried, StudyError
from workbench.results import Record
from workbench.tuning.confidence import lower_bound, upper_bound
from workbench.tuning.spec import STREAMS, Constraint, StudySpec, with_rows

Evaluate = Callable[[Config], Record]
Outcome = dict[str, Any]

WHY = (
    "batch_sizes",
    "batch_size_mean_items",
    "reasons",
    "queue_wait_p50_ms",
    "queue_wait_p95_ms",
    "execution_p50_ms",
    "execution_p95_ms",
    "padding_rows",
    "padding_rows_share",
    "padding_samples",
    "rejected_items",
    "ingress_reasons",
    "ingress_wait_p95_ms",
)
# The search for the most streams ends where a level that is kept and one that is not are this close.
RESOLUTION = 0.01
# A first run that misses a limit by more than this share of it is not repeated.
HOPELESS_SHARE = 0.5
MOST_STREAMS = 30_000
_LATE = ("latency_p50_ms", "latency_p95_ms", "latency_p99_ms", "final_p50_ms", "final_p95_ms", "final_p99_ms")


class Rule:
    """The judgement of one study."""

    def __init__(self, spec: StudySpec, evaluate: Evaluate) -> None:
        self.spec, self.evaluate = spec, evaluate

    def measure(self, config: Config, first_seed: int) -> Outcome:
        """Values, excess over each limit, numbers and reasons of one configuration. Raises StudyError for unusable numbers."""
        records = [self._run(config, first_seed)]
        if not self._hopeless(records[0]):
            records += [self._run(config, first_seed + repeat) for repeat in range(1, self.spec.budget.repeats)]
        return outcome_of(self.spec, records)

    def judge(self, config: Config, first_seed: int) -> Outcome:
        """`measure`, or in a study of capacity the measurement at the most streams that keep every limit."""
        if not self.spec.finds_capacity:
            return self.measure(config, first_seed)
        seen: dict[int, Outcome] = {}

        def kept(streams: int) -> bool:
            seen[streams] = self.measure(with_rows(replace(config, **{STREAMS: streams})), first_seed)
            return feasible(seen[streams])

        found = most_streams(kept, config.load.streams)
        return seen[found] if found else seen[min(seen)]

    def _hopeless(self, record: Record) -> bool:
        """Whether a first run misses a limit by more than half of it: repeating it would tell nothing."""
        missed = ((c, c.excess(number_of(record, c.number))) for c in self.spec.constraints)
        return any(excess > HOPELESS_SHARE * abs(c.limit) > 0 for c, excess in missed)

    def _run(self, config: Config, seed: int) -> Record:
        config = replace(config, **{"load.seed": seed})
        try:
            record = self.evaluate(config)
        except LoadNotCarried as refused:
            return not_carried(config, str(refused))
        if not isinstance(record, Record):
            raise StudyError(f"evaluate returned {record!r}; needed is a Record")
        return record


def outcome_of(spec: StudySpec, records: list[Record]) -> Outcome:
    """What the repeats of one configuration say: medians, bounds against the limits, and the numbers of the run in the middle."""
    objectives = [[number_of(record, o.number) for record in records] for o in spec.objectives]
    excess = {c.describe(): excess_of(c, [number_of(record, c.number) for record in records]) for c in spec.constraints}
    middle = records[objectives[0].index(statistics.median_low(objectives[0]))]
    numbers = {k: v for k, v in derived(middle).items() if not isinstance(v, float) or math.isfinite(v)}
    if len(records) > 1:
        numbers["repeats"] = {o.number: v for o, v in zip(spec.objectives, objectives, strict=True)}
    return {
        "values": [statistics.median(values) for values in objectives],
        "excess": excess,
        "numbers": numbers,
        "why": {key: middle.counters[key] for key in WHY if key in middle.counters},
    }


def excess_of(constraint: Constraint, values: list[float]) -> float:
    """How far the confidence bound of the repeats is beyond the limit; zero or less keeps it."""
    return constraint.excess((upper_bound if constraint.at_most is not None else lower_bound)(values))


def feasible(outcome: Outcome) -> bool:
    """Whether every limit is kept."""
    return all(excess <= 0 for excess in outcome["excess"].values())


def most_streams(kept: Callable[[int], bool], start: int, most: int = MOST_STREAMS) -> int:
    """The largest level that is kept, within RESOLUTION: doubling or halving from `start` to bracket it, then bisection; 0 if not even 1 is."""
    low, high, level = 0, most + 1, max(1, min(start, most))
    while not (low and high <= most):
        if kept(level):
            low, level = level, min(2 * level, most)
            if low == most:
                return most
        else:
            high, level = level, level // 2
            if high == 1:
                return 0
    while high - low > max(1, low * RESOLUTION):
        level = (low + high) // 2
        low, high = (level, high) if kept(level) else (low, level)
    return low


def derived(record: Record) -> dict[str, Any]:
    """The record's numbers and `chunk_to_text_p95_ms`: from the first sample of a chunk to its text, what a longer look-ahead costs a listener."""
    numbers = record.numbers
    if "latency_p95_ms" in numbers and "chunk_ms" in numbers:
        return {**numbers, "chunk_to_text_p95_ms": numbers["chunk_ms"] + numbers["latency_p95_ms"]}
    return numbers


def number_of(record: Record, name: str) -> float:
    """A finite number of a record. Raises StudyError saying what it has instead."""
    numbers = derived(record)
    if name not in numbers:
        reason = f" ({record.notes[0]})" if record.counters.get("not_carried") else ""
        raise StudyError(f"{name}: the record has no such number; it has {', '.join(sorted(numbers))}{reason}")
    value = numbers[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise StudyError(f"{name}: got {value!r}; needed is a finite number")
    return float(value)


def not_carried(config: Config, reason: str) -> Record:
    """The record of a run that was refused work: every chunk late, by the length of the load."""
    load = config.load
    late = dict.fromkeys(_LATE, load.seconds * 1e3)
    return Record(
        kind="not_carried",
        config=to_dict(config),
        numbers={**late, "late_share": 1.0, "streams": load.streams, "load_s": load.seconds, "chunk_ms": 0.0},
        counters={"not_carried": 1},
        notes=[reason],
        environment={},
    )
