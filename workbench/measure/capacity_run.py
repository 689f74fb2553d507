"""`workbench capacity` behind the command line: an engine by name, the rule, the search, and the record as it grows.

    record = capacity_configured(config, CapacityRun(engine="pipeline", rule=CapacityRule(seconds=30), plan=SearchPlan(start=8)))

The twin is handed in as a function of a configuration, so is any other engine: the search asks for no more than a record of one run.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from workbench.config import Config
from workbench.errors import ConfigError
from workbench.measure.capacity import CapacityRule, LevelRun, SearchPlan, find_capacity
from workbench.measure.capacity_engines import (
    ENGINES,
    EngineSpec,
    RunAt,
    level_config,
    levels_in_fresh_processes,
    levels_in_process,
)
from workbench.measure.progress import seconds_bar
from workbench.results import Record

ALONE = "twin"


@dataclass(frozen=True)
class CapacityRun:
    """engine: `pipeline`, `resident`, `nemo-loop` or `twin`; fresh: a new process for every level; audio: what streams speak; output: where the record is
    written after every level, so that nothing is lost with the process."""

    engine: str = "pipeline"
    rule: CapacityRule = field(default_factory=CapacityRule)
    plan: SearchPlan = field(default_factory=SearchPlan)
    fresh: bool = True
    audio: tuple[str, ...] | None = None
    output: Path | None = None


def capacity_configured(
    config: Config, run: CapacityRun, simulate: Callable[[Config], Record] | None = None, say: bool = True
) -> Record:
    """Search the capacity of an engine. simulate: one run of the twin, needed for that engine. say: a line per level on standard error."""
    if run.engine not in (*ENGINES, ALONE):
        raise ConfigError(f"--engine: got {run.engine!r}; allowed are {', '.join((*ENGINES, ALONE))}")
    if (run.engine == ALONE) != (simulate is not None):
        missing = "needs a cost record: add --costs FILE" if simulate is None else "takes no --costs: it runs for real"
        raise ConfigError(f"--engine {run.engine}: {missing}")

    def on_level(so_far: Record, level: LevelRun) -> None:
        if run.output is not None:
            _described(so_far, run).save(run.output)
        if say:
            print(f"{level.streams:6} streams: {_verdict(level)}", file=sys.stderr, flush=True)

    def search(run_at: RunAt) -> Record:
        return _described(find_capacity(run_at, run.rule, run.plan, on_level), run)

    if simulate is not None:
        return search(lambda streams: simulate(level_config(config, run.rule, streams)))
    most_rows = 1 if run.fresh else run.plan.most_streams
    spec = EngineSpec(run.engine, config, run.audio, most_rows=most_rows)
    if run.fresh:
        return search(levels_in_fresh_processes(spec, run.rule))
    with levels_in_process(spec, run.rule) as run_at:
        return search(_with_bar(run_at, run.rule))


def _with_bar(run_at: Callable[..., Record], rule: CapacityRule) -> RunAt:
    def shown(streams: int) -> Record:
        with seconds_bar(f"{streams} streams", rule.seconds) as progress:
            return run_at(streams, progress)

    return shown


def _described(record: Record, run: CapacityRun) -> Record:
    """Which engine, and whether levels shared a process."""
    where = (
        "simulated"
        if run.engine == ALONE
        else "a fresh process for every level"
        if run.fresh
        else "one process for all levels"
    )
    return dataclasses.replace(
        record, config={**record.config, "engine": run.engine, "fresh_processes": run.fresh and run.engine != ALONE},
        notes=[f"engine: {run.engine}, {where}", *record.notes],
    )  # fmt: skip


def _verdict(level: LevelRun) -> str:
    verdict = {True: "passed", False: "failed", None: "not measured"}[level.passed]
    p95 = level.numbers.get("latency_p95_ms")
    return verdict + (f", p95 {p95:.1f} ms" if p95 is not None else "") + (f": {level.why}" if level.why else "")
