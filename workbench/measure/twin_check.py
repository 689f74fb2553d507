"""The digital twin held against real paced runs: the same configurations and loads, p50 and p95 side by side.

    record = check_twin(loaded, config, costs, TwinCheck(streams=(8, 16, 24), seconds=10))
    record.numbers["p50_difference_max"], record.numbers["p95_difference_max"]     # shares of the measured value

A pair is several short runs in real time, each beside the twin on the same schedule; p50 and p95 are means over the runs. The twin's costs are those
of a lone loop corrected in traffic (`traffic_costs`): before every real run a run of as many seconds with other phases and an eighth fewer or more
streams, in turn, since what a step takes drifts within seconds by more than the twin may be off. What the uncorrected costs would have given stands
beside it. A real run whose generator lagged is no measurement: it is run again, and at last its pair is listed without a comparison, as is one that
was not carried or whose traffic showed too few batches.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

from workbench.config import Config, load_config, replace, to_dict
from workbench.errors import ConfigError, GeneratorLagged, RecordError, StepTimeout
from workbench.measure import cost_table
from workbench.measure.capacity_engines import still_collector
from workbench.measure.cost_table import CostTable
from workbench.measure.loadgen import build_schedule
from workbench.measure.paced import PacedOptions, run_paced
from workbench.measure.quiet import OtherLoad, wait_until_quiet
from workbench.measure.traffic_costs import TrafficWatch
from workbench.measure.twin import simulate
from workbench.model.load import LoadedModel
from workbench.model.speech import Samples
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer

ATTEMPTS, PATIENT_ATTEMPTS = 2, 12  # at a real run whose generator may not lag; where the machine must be quiet as well
QUIET_TIMEOUT_S = 180.0
MOST_SECONDS = 86_400.0
T = TypeVar("T")
# Far beyond what is carried, latency is the length of the run: such a pair compares nothing and takes long to drain.
PACED = PacedOptions(compare=False, most_late_share=0.5, drain_timeout_s=20.0)
TRAFFIC = ("traffic_over_lone", *cost_table.TRAFFIC)
POINTS = ("latency_p50_ms", "latency_p95_ms")


@dataclass(frozen=True)
class Batching:
    """One configuration of the batching to compare at."""

    name: str
    max_batch_size: int
    max_queue_delay_us: int


@dataclass(frozen=True)
class TwinCheck:
    """streams: the loads; seconds: of each pair's real runs together, run_s: of one of them; batchings: the configurations; most_other_cores: a run
    while other programs used more of the machine is waited for and run again (None: not looked at). Raises ConfigError for what cannot be run."""

    streams: tuple[int, ...]
    seconds: float = 10.0
    run_s: float = 2.0
    most_other_cores: float | None = None
    batchings: tuple[Batching, ...] = (
        Batching("at once", 256, 0),
        Batching("wait 10 ms", 256, 10_000),
        Batching("small batches", 4, 2_000),
    )

    def __post_init__(self) -> None:
        if not self.streams or min(self.streams) < 1:
            raise ConfigError(f"streams: got {list(self.streams)}; allowed are one or more numbers from 1")
        for name, value in (("seconds", self.seconds), ("run_s", self.run_s)):
            if not 0 < value <= MOST_SECONDS:
                raise ConfigError(f"{name}: got {value}; allowed is more than 0 and at most {MOST_SECONDS:g}")
        if self.most_other_cores is not None and not 0 <= self.most_other_cores < math.inf:
            raise ConfigError(f"most_other_cores: got {self.most_other_cores}; allowed is a finite number from 0")
        if not self.batchings:
            raise ConfigError("batchings: got none; allowed is one or more")


def check_configured(config: Config, check: TwinCheck, batches: Sequence[int], repeats: int = 16) -> Record:
    """`check_twin` on a configured model, with costs measured just before."""
    from workbench.measure.costs import measure_costs
    from workbench.measure.progress import count_bar
    from workbench.measure.steps import speech_clips
    from workbench.model.load import load_configured

    chosen = _configured(config, check.batchings[0], check)
    slots = max([*batches, chosen.asr.batching.state_arena_slots])
    chosen = replace(chosen, **{"asr.batching.state_arena_slots": slots})
    loaded = load_configured(config.asr)
    _check_length(chosen, loaded)
    clips = speech_clips(loaded.geometry.sample_rate_hz)
    with (
        still_collector(),
        Recognizer(loaded, chosen) as recognizer,
        count_bar("costs") as progress,
    ):
        recognizer.warm_up()
        kinds = ("first", "second", "steady")
        costs, _ = undisturbed(lambda: measure_costs(recognizer, clips, batches, repeats, progress, kinds=kinds), check)
    record = check_twin(loaded, config, costs, clips, check, lambda line: print(line, file=sys.stderr, flush=True))
    record.numbers["twin_1000_streams_60_s_took_s"] = _simulation_s(loaded, clips)
    return record


def _simulation_s(loaded: LoadedModel, clips: Sequence[Samples]) -> float:
    """Seconds to simulate 1,000 streams of 60 s, the schedule included, with a step that keeps the worker half busy."""
    half_ms = loaded.geometry.chunk_ms / 2
    rows = [
        {"stage": "step", "batch": n, "shape": "steady", "ms_p50": ms, "ms_p95": ms}
        for n, ms in ((1, 5.0), (1000, half_ms))
    ]
    batching = {"enabled": True, "max_queue_delay_us": 0, "max_queue_depth": 65536, "state_arena_slots": 2000}
    config = load_config({"asr": {"batching": batching}, "load": {"streams": 1000, "seconds": 60.0}})
    start_s = time.perf_counter()
    schedule = build_schedule(config.load, loaded.geometry, [clip.size for clip in clips])
    simulate(config, CostTable.from_record(Record("costs", rows=rows)), schedule)
    return time.perf_counter() - start_s


def check_twin(
    loaded: LoadedModel,
    config: Config,
    costs: Record,
    clips: Sequence[Samples],
    check: TwinCheck,
    report: Callable[[str], None] = lambda line: None,
) -> Record:
    """Rows with the measured and the simulated p50 and p95, their relative difference, and by what the costs were corrected; the largest differences
    as numbers.

    costs: of a lone loop; kept in `counters["costs"]`. Raises RecordError where no pair could be compared.
    """
    CostTable.from_record(costs)
    _check_length(_configured(config, check.batchings[0], check), loaded)
    rows, notes = list[dict[str, Any]](), list(costs.notes)
    for batching in check.batchings:
        chosen = _configured(config, batching, check)
        with still_collector(), Recognizer(loaded, chosen) as recognizer:
            recognizer.warm_up()
            for streams in check.streams:
                level = replace(chosen, **{"load.streams": streams})
                row: dict[str, Any] = {"batching": batching.name, "streams": streams}
                try:
                    row |= _pair(recognizer, level, costs, clips, check)
                    report(str(row))
                except (RecordError, StepTimeout) as reason:
                    notes.append(f"{batching.name}, {streams} streams: not compared: {reason}")
                    report(notes[-1])
                rows.append(row)
    compared = [row for row in rows if "latency_p50_difference" in row]
    if not compared:
        raise RecordError("no run could be compared: " + "; ".join(notes))
    worst = {
        f"{point}_difference_max": max(abs(row[f"latency_{point}_difference"]) for row in compared)
        for point in ("p50", "p95")
    }
    return Record(
        kind="twin_check",
        config=to_dict(_configured(config, check.batchings[0], check)),
        rows=rows,
        numbers={
            **worst,
            "compared": len(compared),
            "seconds": check.seconds,
            "chunk_ms": loaded.geometry.chunk_ms,
        },
        counters={"costs": costs.rows},
        notes=notes,
    )


def undisturbed(measure: Callable[[], T], check: TwinCheck) -> tuple[T, float | None]:
    """The result of a measurement and the cores that other programs used meanwhile; run again if they were too many or the generator lagged.

    Raises what the last attempt raised; a last attempt that was disturbed counts as one that lagged.
    """
    limit = check.most_other_cores
    attempts = ATTEMPTS if limit is None else PATIENT_ATTEMPTS
    for attempt in range(1, attempts + 1):
        if limit is not None:
            wait_until_quiet(limit, QUIET_TIMEOUT_S)
        meter = OtherLoad()
        try:
            found, cores = measure(), meter.cores()
        except GeneratorLagged:
            if attempt == attempts:
                raise
            continue
        if limit is None or cores is None or cores <= limit:
            return found, cores
    raise GeneratorLagged(f"other programs used {cores:.2f} cores; allowed is {limit}")


def _configured(config: Config, batching: Batching, check: TwinCheck) -> Config:
    rows = max(2 * max(check.streams), config.asr.batching.state_arena_slots)
    return replace(
        config,
        **{
            "asr.batching.enabled": True,
            "asr.batching.max_batch_size": batching.max_batch_size,
            "asr.batching.max_queue_delay_us": batching.max_queue_delay_us,
            "asr.batching.state_arena_slots": rows,
            "load.seconds": min(check.run_s, check.seconds),
        },
    )


def _check_length(config: Config, loaded: LoadedModel) -> None:
    """Shorter runs have nothing but ends of utterances, which no latency counts. Raises ConfigError."""
    run_s, chunk_s = config.load.seconds, loaded.geometry.chunk_s
    if run_s <= chunk_s:
        raise ConfigError(f"seconds: got runs of {run_s:g} s for chunks of {chunk_s:g} s; allowed are longer ones")


@dataclass(frozen=True)
class _Round:
    """One real run, what the workers showed in the traffic before it, and the recogniser's counters around it."""

    config: Config
    real: Record
    watch: TrafficWatch
    batches: int
    items: int


def _round(recognizer: Recognizer, config: Config, clips: Sequence[Samples], number: int) -> _Round:
    load, watch = config.load, TrafficWatch(recognizer)
    step = max(1, load.streams // 8)
    beside = max(1, load.streams + (step if number % 2 else -step))
    watch.play(clips, [dataclasses.replace(load, streams=beside, seed=load.seed + 1000 + number)])
    config = replace(config, **{"load.seed": load.seed + number})
    before = recognizer.metrics.snapshot()
    real = run_paced(recognizer, clips, config.load, options=PACED)
    after = recognizer.metrics.snapshot()
    return _Round(config, real, watch, after["batches"] - before["batches"], after["items"] - before["items"])


def _pair(
    recognizer: Recognizer, config: Config, costs: Record, clips: Sequence[Samples], check: TwinCheck
) -> dict[str, Any]:
    rounds, others, watch = list[_Round](), list[float](), TrafficWatch(recognizer)
    for number in range(max(1, round(check.seconds / config.load.seconds))):
        found, cores = undisturbed(partial(_round, recognizer, config, clips, number), check)
        rounds.append(found)
        watch.add(found.watch)
        others += [] if cores is None else [cores]
    try:
        corrected = watch.corrected(costs)
    except ConfigError as few:
        raise RecordError(str(few)) from few
    if not all(name in done.real.numbers for done in rounds for name in POINTS):
        raise RecordError(f"runs of {config.load.seconds:g} s had no chunk but the last of each utterance")
    geometry, samples = recognizer.loaded.geometry, [clip.size for clip in clips]
    schedules = [build_schedule(done.config.load, geometry, samples) for done in rounds]
    twin, lone = (
        [
            simulate(done.config, CostTable.from_record(table), schedule)
            for done, schedule in zip(rounds, schedules, strict=True)
        ]
        for table in (corrected, costs)
    )
    row: dict[str, Any] = {
        "runs": len(rounds),
        "batch_mean_real": sum(done.items for done in rounds) / max(1, sum(done.batches for done in rounds)),
        "batch_mean_twin": fmean(run.counters["batch_size_mean_items"] for run in twin),
        "busy_share_twin": fmean(run.numbers["busy_share"] for run in twin),
        "generator_late_p50_ms": fmean(done.real.numbers["generator_late_p50_ms"] for done in rounds),
        "other_cores": max(others, default=None),
        **{name: corrected.numbers[name] for name in TRAFFIC},
    }
    for name in POINTS:
        measured = fmean(done.real.numbers[name] for done in rounds)
        simulated, uncorrected = (fmean(run.numbers[name] for run in runs) for runs in (twin, lone))
        row |= {
            f"{name.removesuffix('_ms')}_real_ms": measured,
            f"{name.removesuffix('_ms')}_twin_ms": simulated,
            f"{name.removesuffix('_ms')}_difference": simulated / measured - 1,
            f"{name.removesuffix('_ms')}_difference_lone_costs": uncorrected / measured - 1,
        }
    return row
