"""Real runs of what a study found on the twin: default, compared configurations and finalists take turns on the device.

    host = LiveHost()
    record = confirm(result, host, ConfirmOptions(seconds=4, rounds=2))
    record.rows      # one per run: label, streams, latency_p95_ms, …, kept

The winner runs twice a round, under two names (A/A): what differs between the two is noise. Every round goes through all of them in the other
direction, so that a slow half minute falls on all alike. In a study of capacity a configuration that breaks a limit goes on with fewer streams. One host serves many studies: a model is loaded once, its graphs go on to serve the next recogniser.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from workbench.config import AsrConfig, Config, replace, to_dict
from workbench.encoder.graphed import set_streaming_cuda_graphs
from workbench.errors import GeneratorLagged, LoadNotCarried, StepTimeout
from workbench.measure.cost_table import Captures
from workbench.measure.costs import capture_rows
from workbench.measure.offline_run import run_offline
from workbench.measure.paced import PacedOptions, run_paced
from workbench.measure.steps import speech_clips
from workbench.model.load import LoadedModel, load_configured, set_context, with_label_rate
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer
from workbench.tuning.result import StudyResult, TrialRow
from workbench.tuning.rule import derived, not_carried
from workbench.tuning.run import work_lengths
from workbench.tuning.spec import STREAMS, StudySpec, with_rows

# Traffic of the real runs: neither that of the trials nor that of their fresh comparison.
LIVE_SEEDS = 3000
AGAIN = "best_again"
# Of its streams, what a configuration that broke a limit goes on with: by how far it missed, within these.
STEP_DOWN_LEAST, STEP_DOWN_MOST, STEP_DOWN_LAGGED = 0.9, 0.5, 0.7
# Rounds more for the configurations of a study of capacity whose last run was above what they carry.
EXTRA_ROUNDS = 4
_DRAIN_S = 10.0
_TRIES = 2


@dataclass(frozen=True)
class ConfirmOptions:
    """seconds: of one run; rounds: runs of each configuration; finalists: of the study, its best among them; budget_s: no round is begun that
    would not end within it, except the first. most_streams: of any run, for trying things out on a small machine."""

    seconds: float = 4.0
    rounds: int = 2
    finalists: int = 2
    budget_s: float = 600.0
    most_streams: int = 100_000


class LiveHost:
    """The device: a model at a time, moved to another look-ahead where that is all that changes, and the recordings that are spoken."""

    def __init__(self, say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)) -> None:
        self.say = say
        self._loaded: LoadedModel | None = None
        self._key: Any = None

    @cached_property
    def clips(self) -> list[Any]:
        """Recordings at 16 kHz."""
        return speech_clips(16000)

    def model(self, asr: AsrConfig) -> LoadedModel:
        """The model of a configuration, loaded only if the one at hand is another."""
        key = (asr.model, asr.device, asr.dtype, asr.max_symbols)
        if self._loaded is None or self._key != key:
            begun = time.perf_counter()
            self._loaded, self._key = load_configured(asr), key
            self.say(f"  loaded {asr.model} on {self._loaded.device} in {time.perf_counter() - begun:.1f} s")
        loaded, wanted = self._loaded, asr.att_context_size
        if wanted is not None and (loaded.geometry.left_frames, loaded.geometry.right_frames) != tuple(wanted):
            loaded = dataclasses.replace(loaded, geometry=set_context(loaded.model, wanted))
            self._loaded = loaded if asr.label_rate_hz is None else with_label_rate(loaded, asr.label_rate_hz)
        return self._loaded

    def run(self, config: Config, spec: StudySpec) -> tuple[Record, dict[str, Any]]:
        """One real run on a fresh recogniser, warmed up; with it what its graphs are. A load that was refused is a record that says so."""
        if not config.asr.cuda_graphs:
            set_streaming_cuda_graphs(self.model(config.asr).model, False)
        with Recognizer(self.model(config.asr), config) as recognizer:
            recognizer.warm_up()
            graphs = _graphs(recognizer)
            if spec.offline is not None:
                work = work_lengths(spec.offline)
                return run_offline(recognizer, work, self.clips, spec.offline.concurrency, config.load), graphs
            options = PacedOptions(compare=False, drain_timeout_s=_DRAIN_S)
            for left in reversed(range(_TRIES)):
                try:
                    return run_paced(recognizer, self.clips, config.load, options=options), graphs
                except (LoadNotCarried, StepTimeout) as refused:
                    return not_carried(config, str(refused)), graphs
                except GeneratorLagged as lagged:
                    self.say(f"  not counted: {lagged}")
                    if not left:
                        raise
        raise AssertionError("unreachable")


def confirm(result: StudyResult, host: LiveHost, options: ConfirmOptions | None = None) -> Record:
    """Run the contestants of a study for real. Runs that could not be measured are rows with the reason."""
    options = options or ConfirmOptions()
    spec, begun = result.spec, time.perf_counter()
    entered = {
        label: replace(
            with_rows(config),
            **{
                "load.seconds": options.seconds if spec.offline is None else config.load.seconds,
                STREAMS: min(config.load.streams, options.most_streams),
            },
        )
        for label, config in contestants(result, options.finalists).items()
    }
    streams = {label: config.load.streams for label, config in entered.items()}
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds + (EXTRA_ROUNDS if spec.finds_capacity else 0)):
        turn = _turn(list(entered), rows, number, options.rounds)
        took_s = time.perf_counter() - begun
        if rows and took_s * (1 + len(turn) / len(rows)) > options.budget_s:
            host.say(f"  {spec.name}: {number} rounds; the next would pass {options.budget_s:g} s")
            break
        for label in turn:
            row = _row(spec, host, label, _at(entered[label], streams[label], number))
            rows.append({**row, "round": number + 1})
            host.say(f"  {spec.name}: {label}: {_told(spec, row)}")
            if spec.finds_capacity and row["kept"] is False:
                streams[label] = max(1, int(streams[label] * _step_down(spec, row)))
            elif spec.finds_capacity and row["kept"] is None:  # more than this machine's load generator can speak
                streams[label] = max(1, int(streams[label] * STEP_DOWN_LAGGED))
    loaded = host.model(next(iter(entered.values())).asr)
    return Record(
        kind="confirm",
        config=to_dict(result.default_config),
        numbers={"seconds": options.seconds, "rounds": max((row["round"] for row in rows), default=0)},
        rows=rows,
        counters={"study": spec.name, "params": {label: to_dict(config) for label, config in entered.items()}},
        notes=list(loaded.notes),
    )


def contestants(result: StudyResult, finalists: int) -> dict[str, Config]:
    """By label: `default`, the compared configurations, `best`, further finalists (of several objectives, spread over the front) and
    `best_again`; in a study of capacity each at the streams that the twin gives it."""
    spec, found = result.spec, dict[str, Config]()
    found["default"] = _taken_to(result.default_config, result.confirmation.get(_number(result.default)))
    for name, config in spec.compared(result.default_config).items():
        found[name] = _taken_to(config, result.compared.get(name))
    if result.best is None:
        return found
    others = [trial for trial in chosen_finalists(result, finalists) if trial is not result.best]
    trials = [("best", result.best), *((f"trial_{trial.number}", trial) for trial in others), (AGAIN, result.best)]
    for label, trial in trials:
        if not trial.is_default or label == AGAIN:
            config = spec.at(result.default_config, trial.params)
            found[label] = (
                _taken_to(config, result.confirmation.get(str(trial.number))) if spec.finds_capacity else config
            )
    return found


def chosen_finalists(result: StudyResult, count: int) -> list[TrialRow]:
    """The best trials; with several objectives, evenly along the front from the best of the first objective on."""
    if len(result.spec.objectives) == 1 or not result.pareto:
        confirmed = [t for t in result.ranked if str(t.number) in result.confirmation and t is not result.best]
        return ([result.best] if result.best else []) + confirmed[: count - 1]
    front = sorted(result.pareto, key=lambda trial: trial.values or ())
    places = {round(step * (len(front) - 1) / max(1, count - 1)) for step in range(count)}
    return [front[place] for place in sorted(places)]


def _taken_to(config: Config, judged: dict[str, Any] | None) -> Config:
    """The configuration at the streams that it was judged to carry."""
    streams = (judged or {}).get("numbers", {}).get("streams")
    return config if streams is None else with_rows(replace(config, **{STREAMS: int(streams)}))


def _number(trial: TrialRow | None) -> str:
    return "" if trial is None else str(trial.number)


def _at(config: Config, streams: int, number: int) -> Config:
    return with_rows(replace(config, **{STREAMS: streams, "load.seed": config.load.seed + LIVE_SEEDS + number}))


def _row(spec: StudySpec, host: LiveHost, label: str, config: Config) -> dict[str, Any]:
    """One run as a row; kept: whether it kept every limit that could be measured, None if nothing was measured."""
    row: dict[str, Any] = {"label": label, "kept": None, "why": ""}
    if spec.offline is None:
        row["streams"] = config.load.streams
    try:
        record, graphs = host.run(config, spec)
    except GeneratorLagged as lagged:
        return {**row, "why": str(lagged)}
    numbers = {**derived(record), **graphs}
    for name in ("batch_size_mean_items", "padding_rows_share", "queue_wait_p95_ms", "execution_p50_ms"):
        numbers.setdefault(name, record.counters.get(name))
    limits = [c for c in spec.constraints if isinstance(numbers.get(c.number), int | float)]
    broken = [c.describe() for c in limits if c.excess(numbers[c.number]) > 0]
    reason = record.notes[0] if record.counters.get("not_carried") else "; ".join(f"breaks {b}" for b in broken)
    kept_numbers = {k: v for k, v in numbers.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {**row, **kept_numbers, "kept": not broken, "why": reason}


def _turn(labels: list[str], rows: list[dict[str, Any]], number: int, rounds: int) -> list[str]:
    """Who runs in a round, and in which order; in the rounds beyond the last only who has not found its level."""
    last = {row["label"]: row["kept"] for row in rows}
    return [label for label in labels if number < rounds or last.get(label) is not True][:: -1 if number % 2 else 1]


def _step_down(spec: StudySpec, row: dict[str, Any]) -> float:
    """What share of its streams a configuration goes on with: what it missed its upper limits by, if that says anything."""
    shares = [c.limit / row[c.number] for c in spec.constraints if c.at_most and row.get(c.number, 0) > c.limit]
    return min(STEP_DOWN_LEAST, max(STEP_DOWN_MOST, min(shares, default=STEP_DOWN_LEAST)))


def _graphs(recognizer: Recognizer) -> dict[str, float]:
    """What the graphs of this recogniser's ladder took to capture and hold, by the same rule as the twin's."""
    ladder, captures = recognizer.stage.encoder.ladder, Captures.from_rows(capture_rows(recognizer))
    if ladder is None:
        return {}
    return {"graphs": len(ladder), **(captures.numbers(ladder) if captures else {})}


def _told(spec: StudySpec, row: dict[str, Any]) -> str:
    wanted = [objective.number for objective in spec.objectives]
    numbers = ", ".join(f"{name} {row[name]:.4g}" for name in wanted if name in row)
    level = f"{row['streams']} streams" if "streams" in row else ""
    return "; ".join(filter(None, [level, numbers, row["why"]]))
