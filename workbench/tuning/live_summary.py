"""What the real runs of a study say of each configuration: medians of its numbers, whether it keeps the limits, and why it carries no more.

live_summary(result, Record.load("studies/pareto/live.json"))["best"]      # {"runs": 1, "keeps_limits": True, "streams": 2977, ...}
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from workbench.results import Record
from workbench.tuning.confirm import HELD
from workbench.tuning.level_search import carried_level
from workbench.tuning.result import StudyResult
from workbench.tuning.rule import excess_of

# Besides objectives and limits, what a reader wants to know of a configuration.
SHOWN = (
    *("streams", "latency_p50_ms", "latency_p95_ms", "latency_p99_ms", "final_p95_ms", "late_share", "busy_share"),
    *(
        "batch_mean_items",
        "batch_size_mean_items",
        "padding_rows_share",
        "graphs",
        "graph_capture_ms",
        "graph_memory_mib",
    ),
    *(
        "rtfx",
        "rtfx_shipped",
        "rtfx_long_tailed",
        "padding_share",
        "padding_share_shipped",
        "padding_share_long_tailed",
    ),
    *("recordings", "recordings_per_s", "extrapolated_share", "queue_wait_p95_ms", "execution_p50_ms"),
)


def live_summary(result: StudyResult, live: Record | None) -> dict[str, dict[str, Any]]:
    """Per label of the real runs: medians of their numbers, whether the bounds keep every limit (in a study of capacity: whether a level is carried),
    the single values of the first objective, and in a study of capacity, at the level that is carried or else the lowest that was measured, why no more streams; `runs` 0 and why, if nothing
    was measured."""
    found: dict[str, dict[str, Any]] = {}
    for label in dict.fromkeys(row["label"] for row in (live.rows if live is not None else ())):
        rows = [row for row in (live.rows if live is not None else ()) if row["label"] == label]
        measured = [row for row in rows if row["kept"] is not None]
        if not measured:
            found[label] = {"runs": 0, "why": _why_nothing(rows)}
            continue
        bound: dict[str, Any] = {}
        if result.spec.finds_capacity:
            # A level is carried if every run of it kept the limits: a bound over two runs would only count against one that was repeated.
            carried = carried_level((row["streams"], row["kept"]) for row in measured)
            level, keeps = carried or min(row["streams"] for row in measured), carried > 0
            bound = _bound(carried, rows)
            measured = [row for row in measured if row["streams"] == level]
        else:
            keeps = _keeps(result, measured)
        first = result.spec.objectives[0].number
        found[label] = {
            **bound,
            "runs": len(measured),
            "keeps_limits": keeps,
            "single_runs": [row[first] for row in measured if first in row],
            **shown(result, {name: _median(measured, name) for name in measured[0]}),
        }
    return found


def _why_nothing(rows: list[dict[str, Any]]) -> str:
    """Why none of these runs was measured, with the levels that were tried."""
    tried = dict.fromkeys(str(row["streams"]) for row in rows if "streams" in row)
    return f"at {', '.join(tried)} streams: {rows[-1]['why']}" if tried else str(rows[-1]["why"])


def _bound(carried: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Why a configuration is not said to carry more: the lowest level above that was not kept, or the load generator's."""
    beyond = [row for row in rows if row["kept"] is not True and row.get("streams", 0) > carried]
    if not carried:  # its own limits, wherever else a generator lagged
        beyond = [row for row in beyond if row["kept"] is False]
    lowest = min(beyond, key=lambda row: row["streams"], default=None)
    held = min((row[HELD] for row in rows if row.get(HELD, 0) > carried), default=None)
    if carried and held is not None and (lowest is None or held <= lowest["streams"]):
        return {HELD: held, "why": f"the load generator lagged at {held} streams, so this one may carry more"}
    return {"why": "more were not tried" if lowest is None else f"at {lowest['streams']} streams: {lowest['why']}"}


def shown(result: StudyResult, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Of all numbers those that a reader of this study wants to see, rounded."""
    spec = result.spec
    wanted = dict.fromkeys([*(o.number for o in spec.objectives), *(c.number for c in spec.constraints), *SHOWN])
    found = {name: numbers[name] for name in wanted if isinstance(numbers.get(name), int | float)}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in found.items()}


def _keeps(result: StudyResult, rows: list[dict[str, Any]]) -> bool:
    limits = [c for c in result.spec.constraints if all(c.number in row for row in rows)]
    return all(excess_of(limit, [row[limit.number] for row in rows]) <= 0 for limit in limits)


def _median(rows: list[dict[str, Any]], name: str) -> Any:
    values = [row.get(name) for row in rows]
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return statistics.median(values) if numeric else None
