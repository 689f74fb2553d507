"""Real runs of what a study found on the twin: default, compared configurations and finalists take turns on the device.

    host = LiveHost()
    record = confirm(result, host, ConfirmOptions(seconds=4, rounds=2), keep=lambda record: record.save("live.json"))
    record.rows      # one per run: label, streams, latency_p95_ms, …, kept

The winner runs twice a round, under two names (A/A): what differs between the two is noise. Every round goes through all of them in the other
direction, so that a slow half minute falls on all alike; the first has default and best at its front, should the time not be enough for more.

In a study of capacity each configuration has a search of its own (`level_search`): one that breaks a limit goes on with fewer streams in its next
turn, one that keeps all with more, until the level that it carries is known within a tenth. One whose load generator lagged, or for which the device
had no memory, goes on with fewer at once while nothing of it is measured. How soon a generator lags depends on how busy the configuration keeps the
interpreter, so it holds no other; the row says below which level it is held (`held_below_streams`). A configuration that is refused for what no
smaller level mends is a row with the reason and runs no more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.config import Config, replace, to_dict
from workbench.errors import ConfigError, DeviceMemoryError, GeneratorLagged, InputError, ModelError, StepTimeout
from workbench.results import Record, environment
from workbench.tuning.level_search import LevelSearch
from workbench.tuning.live_host import LiveHost, LiveRun
from workbench.tuning.live_plan import STEP_DOWN_LAGGED, STEP_DOWN_REFUSED, OfflinePlan, step_down
from workbench.tuning.result import StudyResult, TrialRow
from workbench.tuning.rule import MOST_STREAMS, derived
from workbench.tuning.spec import STREAMS, StudySpec, at_streams, with_rows

__all__ = ["AGAIN", "HELD", "ConfirmOptions", "LiveHost", "confirm", "contestants"]

# Traffic of the real runs: neither that of the trials nor that of their fresh comparison.
LIVE_SEEDS = 3000
AGAIN = "best_again"
# Of a configuration in a study of capacity: the load generator lagged at this level, so it may carry more than it was run with.
HELD = "held_below_streams"
# Rounds more for the configurations of a study of capacity whose level is not yet found.
EXTRA_ROUNDS = 8
# Runs in one turn until one is measured: on the way down to a level that can be spoken, or to recordings that can be done in time; at one load.
TRIES_DOWN, TRIES_EQUAL = 6, 2
# By the twin, where a study's trials do not say it: real time.
_UNKNOWN_RTFX = 1.0


@dataclass(frozen=True)
class ConfirmOptions:
    """seconds: of one run; rounds: turns of each configuration, of one that is still searching its level up to EXTRA_ROUNDS more; finalists: of the
    study, its best among them; budget_s: no run is begun that would not end within it, except the first; loading the model is not counted.
    most_streams: of any run, for a small machine."""

    seconds: float = 4.0
    rounds: int = 2
    finalists: int = 2
    budget_s: float = 600.0
    most_streams: int = 100_000


def confirm(
    result: StudyResult,
    host: LiveHost,
    options: ConfirmOptions | None = None,
    keep: Callable[[Record], object] = lambda record: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Record:
    """Run the contestants of a study for real. Runs that could not be measured are rows with the reason. keep: is given the record so far after
    every run."""
    confirmation = _Confirmation(result, host, options or ConfirmOptions(), keep, clock)
    confirmation.play()
    return confirmation.record()


class _Confirmation:
    """The rounds of one study as they go."""

    def __init__(
        self,
        result: StudyResult,
        host: LiveHost,
        options: ConfirmOptions,
        keep: Callable[[Record], object],
        clock: Callable[[], float],
    ) -> None:
        self.result, self.spec, self.host, self.options = result, result.spec, host, options
        self.keep, self.clock = keep, clock
        self.entered = {
            label: self._entered(config) for label, config in contestants(result, options.finalists).items()
        }
        self.searches = {label: self._search(config.load.streams) for label, config in self.entered.items()}
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        # Configurations that the device refuses: a further run would be told the same.
        self.refused: set[str] = set()
        self.loaded_notes = host.notes(result.default_config.asr)
        self.environment = environment()
        self.begun_s = clock()
        self.plan = self._planned()

    def play(self) -> None:
        """All rounds, as far as the budget goes."""
        spec, options = self.spec, self.options
        for number in range(options.rounds + (EXTRA_ROUNDS if spec.finds_capacity else 0)):
            left_out = [label for label in self._turn(number) if not self._take_turn(label, number)]
            if left_out:
                self._tell(f"round {number + 1} without {', '.join(left_out)}, and no further round: {self._spent()}")
                break
        for label in self.entered:
            if not any(row["label"] == label for row in self.rows):
                self.rows.append({"label": label, "round": 1, "kept": None, "why": f"not run: {self._spent()}"})
            self._tell_open(label)
        self.keep(self.record())

    def record(self) -> Record:
        """What there is so far."""
        measured = [row for row in self.rows if row["kept"] is not None]
        numbers = {
            "seconds": self.options.seconds,
            "rounds": max((row["round"] for row in measured), default=0),
            "budget_s": self.options.budget_s,
            "took_s": round(self._took_s(), 3),
            **({"recordings_per_set": self.plan.count} if self.plan is not None else {}),
        }
        return Record(
            kind="confirm",
            config=to_dict(self.result.default_config),
            numbers=numbers,
            rows=list(self.rows),
            counters={
                "study": self.spec.name,
                "params": {label: to_dict(config) for label, config in self.entered.items()},
            },
            notes=[*self.loaded_notes, *self._offline_notes(), *self.notes],
            environment=self.environment,
        )

    def _entered(self, config: Config) -> Config:
        options = self.options
        return replace(
            with_rows(config),
            **{
                "load.seconds": options.seconds if self.spec.offline is None else config.load.seconds,
                STREAMS: min(config.load.streams, options.most_streams),
            },
        )

    def _search(self, streams: int) -> LevelSearch:
        """From the level of the twin; only in a study of capacity is it ever left, and then for none that the twin would not try either."""
        return LevelSearch(streams, most=max(streams, min(self.options.most_streams, MOST_STREAMS)))

    def _planned(self) -> OfflinePlan | None:
        if self.spec.offline is None:
            return None
        found = {label: twin_numbers(self.result, label).get("rtfx") for label in self.entered}
        slowest = min((rtfx for rtfx in found.values() if rtfx), default=_UNKNOWN_RTFX)
        rtfx = {label: value or slowest for label, value in found.items()}
        return OfflinePlan.fitting(self.spec.offline, rtfx, self.options.rounds, self.options.budget_s)

    def _turn(self, number: int) -> list[str]:
        """Who runs in a round, and in which order; in the rounds beyond the last only who has not found its level."""
        labels = [
            label
            for label in self.entered
            if label not in self.refused and (number < self.options.rounds or not self.searches[label].closed)
        ]
        return labels[:: -1 if number % 2 else 1]

    def _take_turn(self, label: str, number: int) -> bool:
        """Runs of one configuration until one tells enough; False if there was no time for any."""
        tries = TRIES_DOWN if self.spec.finds_capacity or self.spec.offline is not None else TRIES_EQUAL
        for attempt in range(tries):
            if not self._fits(label):
                if attempt:
                    self._tell(f"{label}: not tried again: {self._spent()}")
                return attempt > 0
            if self._run(label, number):
                break
        return True

    def _run(self, label: str, number: int) -> bool:
        """One run and its row; False where the next one of the same turn may tell more."""
        begun_s = self.clock()
        row, error = self._measured(label, number)
        enough = (self._searched if self.spec.finds_capacity else self._at_one_load)(label, row, error)
        held = self.searches[label].held
        about = {} if held is None else {HELD: held}
        row = {**row, **about, "round": number + 1, "took_s": round(self.clock() - begun_s, 3)}
        self.rows.append(row)
        self.host.say(f"  {self.spec.name}: {label}: {_told(self.spec, row)}")
        self.keep(self.record())
        return enough

    def _searched(self, label: str, row: dict[str, Any], error: Exception | None) -> bool:
        """Where a configuration of a study of capacity goes on after this run; whether its turn ends."""
        search = self.searches[label]
        if error is None:
            search.ran("kept" if row["kept"] else "broke", step_down(self.spec, row))
            return True
        if isinstance(error, GeneratorLagged):
            search.ran("lagged", STEP_DOWN_LAGGED)
        elif isinstance(error, DeviceMemoryError) and search.level > 1:
            search.ran("refused", STEP_DOWN_REFUSED)
        else:
            self._refuse(label, error)
            return True
        return search.carried > 0 or search.closed

    def _at_one_load(self, label: str, row: dict[str, Any], error: Exception | None) -> bool:
        """The same of a study whose load is given, or offline."""
        if isinstance(error, StepTimeout) and self.plan is not None:
            if any(other["kept"] is not None for other in self.rows):
                return True  # the others have done this many: fewer would not compare
            self.plan = self.plan.fewer()
            return False
        self._refuse(label, error)
        return not isinstance(error, GeneratorLagged)

    def _refuse(self, label: str, error: Exception | None) -> None:
        if isinstance(error, ConfigError | ModelError):
            self.refused.add(label)

    def _measured(self, label: str, number: int) -> tuple[dict[str, Any], Exception | None]:
        """One run as a row; kept: whether it kept every limit that could be measured, None if nothing was, with the error that says why."""
        spec, seed = self.spec, self.entered[label].load.seed + LIVE_SEEDS + number
        config = at_streams(replace(self.entered[label], **{"load.seed": seed}), self.searches[label].level)
        row: dict[str, Any] = {"label": label, "kept": None, "why": ""}
        what = LiveRun()
        if spec.offline is not None and self.plan is not None:
            what = LiveRun(self.plan.work(), spec.offline.concurrency, self.plan.most_s[label])
        else:
            row["streams"] = config.load.streams
        try:
            record, graphs = self.host.run(config, what)
            _check_latency(record)
        except (InputError, StepTimeout) as error:
            return {**row, "why": str(error)}, error
        return {**row, **_judged(spec, record, graphs)}, None

    def _fits(self, label: str) -> bool:
        """Whether one more run of this configuration would end within the budget; the first always may."""
        return not self.rows or self._took_s() + self._expected_s(label) <= self.options.budget_s

    def _expected_s(self, label: str) -> float:
        """By the runs that were measured; of an offline run by the twin, as far off as it was for those."""
        measured = [row for row in self.rows if row["kept"] is not None]
        if self.plan is not None:
            ratios = [row["took_s"] / self.plan.seconds(row["label"]) for row in measured]
            return self.plan.seconds(label) * float(statistics.median(ratios or [1.0]))
        return float(statistics.median([row["took_s"] for row in measured] or [self.options.seconds]))

    def _took_s(self) -> float:
        return self.clock() - self.begun_s

    def _spent(self) -> str:
        return f"{self._took_s():.1f} s of the budget of {self.options.budget_s:.1f} s were spent"

    def _tell(self, note: str) -> None:
        self.notes.append(note)
        self.host.say(f"  {self.spec.name}: {note}")

    def _tell_open(self, label: str) -> None:
        search = self.searches[label]
        if search.carried and not search.closed:
            beyond = "more were not tried" if search.ceiling is None else f"{search.ceiling} were not"
            self._tell(
                f"{label}: {search.carried} streams were kept, {beyond}; its level was not narrowed down further"
            )

    def _offline_notes(self) -> list[str]:
        work = self.spec.offline
        if self.plan is None or work is None or self.plan.count == work.recordings:
            return []
        few = f"; {work.concurrency} in the works at once would fill larger batches" * (
            self.plan.count < work.concurrency
        )
        return [
            f"real runs: {self.plan.count} of {work.recordings} recordings of each set, the same for every configuration and distributed alike{few}"
        ]


def _check_latency(record: Record) -> None:
    """Raises ConfigError for a run without any chunk but the last of each utterance: no limit on latency could be broken by it."""
    if record.numbers.get("latency_n") == 0:
        run_s, chunk_s = record.numbers["load_s"], 1e-3 * record.numbers["chunk_ms"]
        raise ConfigError(
            f"seconds: got runs of {run_s:g} s, in which no chunk of {chunk_s:g} s but the last was spoken; allowed are longer ones"
        )


def contestants(result: StudyResult, finalists: int) -> dict[str, Config]:
    """By label, in the order of their worth: `default`, `best`, the compared configurations, further finalists (of several objectives, spread
    over the front) and `best_again`; in a study of capacity each at the streams that the twin gives it."""
    spec = result.spec
    found = {"default": _taken_to(result.default_config, result.confirmation.get(_number(result.default)))}
    if result.best is not None and not result.best.is_default:
        found["best"] = _finalist(result, result.best)
    for name, config in spec.compared(result.default_config).items():
        found[name] = _taken_to(config, result.compared.get(name))
    if result.best is not None:
        others = [trial for trial in chosen_finalists(result, finalists) if trial is not result.best]
        found |= {f"trial_{trial.number}": _finalist(result, trial) for trial in others if not trial.is_default}
        found[AGAIN] = _finalist(result, result.best)
    return found


def _finalist(result: StudyResult, trial: TrialRow) -> Config:
    config = result.spec.at(result.default_config, trial.params)
    judged = result.confirmation.get(str(trial.number))
    return _taken_to(config, judged) if result.spec.finds_capacity else config


def twin_numbers(result: StudyResult, label: str) -> dict[str, Any]:
    """What the twin said of a contestant, on fresh traffic if it was judged there."""
    if label in result.compared:
        return dict(result.compared[label]["numbers"])
    best = {"default": result.default, "best": result.best, AGAIN: result.best}
    trial = best.get(label) or next((t for t in result.trials if f"trial_{t.number}" == label), None)
    judged = result.confirmation.get(_number(trial), {})
    return dict(judged.get("numbers", {} if trial is None else trial.numbers))


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


def _judged(spec: StudySpec, record: Record, graphs: dict[str, Any]) -> dict[str, Any]:
    """A run's numbers, whether it kept every limit that could be measured, and why not."""
    numbers = {**derived(record), **graphs}
    for name in ("batch_size_mean_items", "padding_rows_share", "queue_wait_p95_ms", "execution_p50_ms"):
        numbers.setdefault(name, record.counters.get(name))
    limits = [c for c in spec.constraints if isinstance(numbers.get(c.number), int | float)]
    broken = [c.describe() for c in limits if c.excess(numbers[c.number]) > 0]
    reason = record.notes[0] if record.counters.get("not_carried") else "; ".join(f"breaks {b}" for b in broken)
    kept_numbers = {k: v for k, v in numbers.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return {**kept_numbers, "kept": not broken, "why": reason}


def _told(spec: StudySpec, row: dict[str, Any]) -> str:
    wanted = [objective.number for objective in spec.objectives]
    numbers = ", ".join(f"{name} {row[name]:.4g}" for name in wanted if name in row)
    level = f"{row['streams']} streams" if "streams" in row else ""
    return "; ".join(filter(None, [level, numbers, row["why"]]))
