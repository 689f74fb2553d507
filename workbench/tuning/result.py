"""What a study found, as plain data: its trials, the best one, and the gain over the default configuration, told honestly.

    result = read_result(spec, default_config, study)
    result.headline                # "latency_p95_ms 41.2 ms: 23 % less than the default's 53.6 ms"
    result.best_config             # None if no trial kept every constraint; then result.closest has the least violating ones
    Path("best.yaml").write_text(best_yaml(result))
    result.record().save("studies/demo/results.json")

Ties go to the earlier trial, and the default is the first: a configuration is called better only if it is.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optuna
import yaml
from optuna.trial import FrozenTrial, TrialState

from workbench.config import Config, to_dict
from workbench.errors import StudyError
from workbench.results import Record
from workbench.tuning.space import Space
from workbench.tuning.spec import STREAMS, Objective, StudySpec

# Fewer trials than this say nothing about which key matters.
_FEW_TRIALS = 10
_GROUPS = 6


@dataclass(frozen=True)
class TrialRow:
    """One trial. values: per objective, None unless finished; excess: per constraint, zero or less keeps it; numbers: the record's
    scalars; why: batch histogram, release reasons, waiting and padding; duplicate_of: the trial whose result it shares."""

    number: int
    state: str
    params: dict[str, Any]
    values: tuple[float, ...] | None = None
    excess: dict[str, float] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    why: dict[str, Any] = field(default_factory=dict)
    duplicate_of: int | None = None
    failure: str | None = None
    is_default: bool = False

    @property
    def feasible(self) -> bool:
        """Finished, and every constraint kept."""
        return self.values is not None and all(value <= 0 for value in self.excess.values())


@dataclass(frozen=True)
class StudyResult:
    """trials: all that ended, in order; ranked: the feasible ones by the first objective, each point once; pareto: the feasible
    trials that no other beats in every objective; confirmation: by trial number the fresh runs of the finalists, if there were
    repeats; best: the best of the fresh runs, else of the trials; compared: by name the fresh runs of the compared configurations; again:
    the best once more on other traffic (A/A); importance: share of the first objective's variation that each key explains."""

    spec: StudySpec
    default_config: Config
    trials: tuple[TrialRow, ...]
    ranked: tuple[TrialRow, ...]
    best: TrialRow | None
    pareto: tuple[TrialRow, ...]
    notes: tuple[str, ...]
    confirmation: dict[str, Any] = field(default_factory=dict)
    compared: dict[str, Any] = field(default_factory=dict)
    again: dict[str, Any] = field(default_factory=dict)
    importance: dict[str, float] = field(default_factory=dict)

    @property
    def default(self) -> TrialRow | None:
        """The trial of the default configuration, if it ended."""
        finished = [trial for trial in self.trials if trial.is_default and trial.values is not None]
        return next(iter(finished), next((trial for trial in self.trials if trial.is_default), None))

    @property
    def best_config(self) -> Config | None:
        """The default configuration with the best trial's values."""
        return None if self.best is None else self.spec.at(self.default_config, self.best.params)

    @property
    def closest(self) -> tuple[TrialRow, ...]:
        """The finished trials by how far they miss the constraints, each miss as a share of its limit; the nearest first."""
        return _by_excess(self.spec, self.trials)

    @property
    def measured(self) -> tuple[float | None, float | None]:
        """The first objective of default and best, by the fresh runs if both have them; None for one that broke a limit or failed."""
        fresh = [self._fresh(trial) for trial in (self.default, self.best)]
        if all(fresh):
            return fresh[0]["value"] if self._fresh_feasible(self.default) else None, fresh[1]["value"]
        default, best = (
            t.values[0] if t is not None and t.values and t.feasible else None for t in (self.default, self.best)
        )
        return default, best

    @property
    def gain(self) -> float | None:
        """Improvement of the best over the default in the first objective, as a share of the default; None if either is missing."""
        default, best = self.measured
        if default is None or best is None or not default:
            return None
        return self._gain(default, best)

    @property
    def fresh_gains(self) -> tuple[float, ...]:
        """The gain in each fresh run of default and best on equal traffic, as a share of the default; empty without repeats."""
        runs = [self._fresh(trial).get("repeats", ()) for trial in (self.default, self.best)]
        return tuple(self._gain(default, best) for default, best in zip(*runs, strict=False) if default)

    @property
    def again_share(self) -> float | None:
        """How far two judgements of the best on different traffic lie apart (A/A), as a share; None without repeats."""
        apart = self.again.get("difference_share")
        return None if apart is None else abs(float(apart))

    def _gain(self, default: float, best: float) -> float:
        return 1 - best / default if self.spec.objectives[0].direction == "minimise" else best / default - 1

    def _fresh(self, trial: TrialRow | None) -> dict[str, Any]:
        found: dict[str, Any] = self.confirmation.get(str(trial.number), {}) if trial is not None else {}
        return found

    def _fresh_feasible(self, trial: TrialRow | None) -> bool:
        return all(excess <= 0 for excess in self._fresh(trial).get("excess", {}).values())

    @property
    def headline(self) -> str:
        """One sentence: what was found, against the default."""
        name, (default, best) = self.spec.objectives[0].number, self.measured
        if self.best is None or best is None:
            finished = sum(trial.values is not None for trial in self.trials)
            return (
                f"No configuration found: {finished} of {len(self.trials)} trials finished, none kept every constraint"
            )
        found, fresh = f"{name} {best:.4g}", self.fresh_gains
        where = " on fresh traffic" if fresh else ""
        if default is None:
            state = "failed" if self.default is None or self.default.values is None else "breaks a constraint"
            return f"{found}{where}; the default configuration {state}, so there is no gain to state"
        if self.best is self.default or not self.gain:
            return f"{found}{where}: no configuration was better than the default"
        word = "less" if self.spec.objectives[0].direction == "minimise" else "more"
        found += f": {self.gain * 100:.1f} % {word} than the default's {default:.4g}{where}"
        if not fresh:
            return found
        won, apart = sum(gain > 0 for gain in fresh), self.again_share
        noise = won < len(fresh) or (apart is not None and abs(self.gain) <= apart)
        verdict = ", which is within the noise" if noise else ""
        return f"{found}, better in {won} of {len(fresh)} runs ({_span(fresh)}){verdict}"

    def record(self) -> Record:
        """The study as one record: a row per trial, everything that charts and reports need."""
        names = [objective.number for objective in self.spec.objectives]
        numbers: dict[str, Any] = {
            "trials": len(self.trials),
            "trials_finished": sum(trial.values is not None for trial in self.trials),
            "trials_failed": sum(trial.failure is not None for trial in self.trials),
            "trials_pooled": sum(trial.duplicate_of is not None for trial in self.trials),
            "trials_infeasible": sum(trial.values is not None and not trial.feasible for trial in self.trials),
            "gain_share": self.gain,
            "fresh_runs": len(self.fresh_gains),
            "fresh_runs_better": sum(gain > 0 for gain in self.fresh_gains),
            "again_difference_share": self.again_share,
        }
        for label, trial, value in zip(("default", "best"), (self.default, self.best), self.measured, strict=True):
            numbers[f"{label}_trial"] = trial.number if trial else None
            numbers[f"compared_{label}_{names[0]}"] = value
            for position, name in enumerate(names):
                numbers[f"{label}_{name}"] = trial.values[position] if trial and trial.values else None
        return Record(
            kind="study",
            config=to_dict(self.best_config or self.default_config),
            numbers=numbers,
            rows=[self._row(trial, names) for trial in self.trials],
            counters={
                "name": self.spec.name,
                "headline": self.headline,
                "space": self.spec.space,
                "objectives": [{"number": o.number, "direction": o.direction} for o in self.spec.objectives],
                "constraints": [constraint.describe() for constraint in self.spec.constraints],
                "default_params": self.default.params if self.default else {},
                "best_params": self.best.params if self.best else {},
                "pareto_trials": [trial.number for trial in self.pareto],
                "confirmation": self.confirmation,
                "compared": self.compared,
                "again": self.again,
                "importance": self.importance,
            },
            notes=list(self.notes),
        )

    def _row(self, trial: TrialRow, names: Sequence[str]) -> dict[str, Any]:
        return {
            "trial": trial.number,
            "state": trial.state,
            "params": trial.params,
            "values": dict(zip(names, trial.values, strict=True)) if trial.values else {},
            "feasible": trial.feasible,
            "excess": trial.excess,
            "is_default": trial.is_default,
            "duplicate_of": trial.duplicate_of,
            "failure": trial.failure,
            "numbers": trial.numbers,
            "why": trial.why,
        }


def read_result(spec: StudySpec, default_config: Config, study: optuna.Study) -> StudyResult:
    """The result of a study as it stands; trials that wait, run, or lost their worker are left out."""
    space = Space.parse(spec.space)
    ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))
    trials = tuple(row for trial in ended if (row := _trial_row(space, trial)) is not None)
    sign = 1 if spec.objectives[0].direction == "minimise" else -1
    feasible = [trial for trial in trials if trial.values and trial.feasible and trial.duplicate_of is None]
    ranked = tuple(sorted(feasible, key=lambda trial: (_signed(trial, spec.objectives)[0], trial.number)))
    pareto = tuple(t for t in feasible if not any(_dominates(other, t, spec.objectives) for other in feasible))
    runs = study.user_attrs.get("confirmation", {})
    kept = [t for t in feasible if (run := runs.get(str(t.number))) and all(e <= 0 for e in run["excess"].values())]
    best = min(kept, key=lambda t: (sign * runs[str(t.number)]["value"], t.number), default=next(iter(ranked), None))
    notes = _notes(spec, space, trials, best)
    if runs and not kept and best is not None:
        notes.append("No finalist kept every limit on fresh traffic; the best is the best of the trials alone")
    told = (runs, study.user_attrs.get("compared", {}), study.user_attrs.get("again", {}), _importance(space, trials))
    return StudyResult(spec, default_config, trials, ranked, best, pareto, tuple(notes), *told)


def best_yaml(result: StudyResult, headline: str | None = None, config: Config | None = None) -> str:
    """A configuration file that `load_config` reads unchanged; config: instead of the best trial's as it ran on the twin. Raises StudyError if no trial
    kept every constraint."""
    config = config or result.best_config
    if config is None:
        raise StudyError(f"study {result.spec.name}: {result.headline}; {'; '.join(result.notes)}")
    best = result.best
    sentences = (
        f"Best configuration of study {result.spec.name}, trial {best.number if best else 0}.",
        f"{headline or result.headline}.",
        _found_under(result, config),
    )
    comment = "".join(f"# {line}\n" for sentence in sentences for line in textwrap.wrap(sentence, 100))
    return comment + yaml.safe_dump({"asr": to_dict(config)["asr"]}, sort_keys=False)


def _found_under(result: StudyResult, config: Config) -> str:
    work, load = result.spec.offline, result.default_config.load
    if work is not None:
        return (
            f"Found with {work.recordings} recordings of each of {', '.join(work.lengths)}, {work.concurrency} at once."
        )
    streams = "a searched number of" if STREAMS in result.spec.space else load.streams
    found = f"Found under {streams} live streams, {load.starts} starts, {load.seconds:g} s."
    rows = f" Its arena has rows for {config.load.streams} live streams." if result.spec.finds_capacity else ""
    return found + rows


def _trial_row(space: Space, trial: FrozenTrial) -> TrialRow | None:
    failure = trial.user_attrs.get("failure")
    if trial.state == TrialState.FAIL and failure is None:
        return None
    outcome = trial.user_attrs.get("outcome", {})
    values = tuple(trial.values) if trial.state == TrialState.COMPLETE else None
    return TrialRow(
        number=trial.number,
        state=trial.state.name.lower(),
        params=space.point(trial.params),
        values=values,
        excess=dict(outcome.get("excess", {})),
        numbers=dict(outcome.get("numbers", {})),
        why=dict(outcome.get("why", {})),
        duplicate_of=trial.user_attrs.get("duplicate_of"),
        failure=failure,
        is_default=bool(trial.user_attrs.get("default")),
    )


def _importance(space: Space, trials: Sequence[TrialRow]) -> dict[str, float]:
    """Per key the share of the variance of the first objective that its value alone explains, scaled to a sum of 1. A key that is the
    objective itself, as streams in a study of capacity, explains nothing and is left out."""
    rows = [trial for trial in trials if trial.values and trial.feasible and trial.duplicate_of is None]
    if len(rows) < _FEW_TRIALS:
        return {}
    heights = np.asarray([(trial.values or (0.0,))[0] for trial in rows])
    found = {
        p.path: _explained(np.asarray([_ordinal(p.choices, trial.params[p.path]) for trial in rows]), heights)
        for p in space.parameters
        if any(trial.params[p.path] != height for trial, height in zip(rows, heights.tolist(), strict=True))
    }
    total = sum(found.values())
    return {path: value / total for path, value in found.items()} if total > 0 else {}


def _explained(places: Any, heights: Any) -> float:
    """Adjusted correlation ratio: variance between groups of like values over all of it, less what chance gives; groups are the values
    themselves or, where those are many, sextiles."""
    groups = np.unique(places, return_inverse=True)[1]
    if groups.max() >= _GROUPS:
        edges = np.quantile(places, np.linspace(0, 1, _GROUPS + 1)[1:-1])
        groups = np.unique(np.searchsorted(edges, places, side="right"), return_inverse=True)[1]
    counts = np.bincount(groups)
    whole = float(((heights - heights.mean()) ** 2).sum())
    if whole <= 1e-18 * heights.size * float(np.max(heights**2)) or counts.size == 1 or counts.size == heights.size:
        return 0.0
    means = np.bincount(groups, heights) / counts
    between = float((counts * (means - heights.mean()) ** 2).sum()) / whole
    return max(0.0, 1 - (1 - between) * (heights.size - 1) / (heights.size - counts.size))


def _ordinal(choices: Sequence[Any], value: Any) -> float:
    if isinstance(value, list) and value not in choices:
        return float(len(value))
    return float(choices.index(value)) if choices else float(value)


def _signed(trial: TrialRow, objectives: Sequence[Objective]) -> tuple[float, ...]:
    """Objective values with small being good."""
    values = trial.values or ()
    return tuple(v if o.direction == "minimise" else -v for v, o in zip(values, objectives, strict=True))


def _dominates(one: TrialRow, other: TrialRow, objectives: Sequence[Objective]) -> bool:
    ours, theirs = _signed(one, objectives), _signed(other, objectives)
    if ours == theirs:
        return one.number < other.number
    return all(a <= b for a, b in zip(ours, theirs, strict=True))


def _span(gains: Sequence[float]) -> str:
    low, high = f"{min(gains) * 100:+.1f}", f"{max(gains) * 100:+.1f}"
    return f"{low} %" if low == high else f"{low} to {high} %"


def _by_excess(spec: StudySpec, trials: Sequence[TrialRow]) -> tuple[TrialRow, ...]:
    limits = {constraint.describe(): abs(constraint.limit) or 1.0 for constraint in spec.constraints}
    finished = [trial for trial in trials if trial.values is not None and trial.duplicate_of is None]
    return tuple(
        sorted(finished, key=lambda t: sum(max(0.0, excess) / limits[name] for name, excess in t.excess.items()))
    )


def _notes(spec: StudySpec, space: Space, trials: Sequence[TrialRow], best: TrialRow | None) -> list[str]:
    notes = []
    if space.points == 1:
        notes.append("The space has one point, the default configuration: there was nothing to search")
    failed = [trial for trial in trials if trial.failure]
    if failed:
        notes.append(f"{len(failed)} of {len(trials)} trials failed; trial {failed[0].number}: {failed[0].failure}")
    finished = [trial for trial in trials if trial.values is not None]
    if finished and best is None:
        closest = _by_excess(spec, trials)[0]
        missed = ", ".join(f"{name} missed by {excess:.4g}" for name, excess in closest.excess.items() if excess > 0)
        notes.append(
            f"No trial kept every constraint; the closest is trial {closest.number} ({missed}) at {closest.params}"
        )
    size = "asr.batching.max_batch_size"
    if best is not None and size in best.params and (sizes := best.why.get("batch_sizes")):
        largest = max(map(int, sizes))
        if largest < best.params[size]:
            notes.append(
                f"The best trial's max_batch_size {best.params[size]} limited nothing: its largest batch had {largest} chunks"
            )
    if spec.budget.repeats == 1 and finished:
        notes.append("Each point was measured once; repeats: 2 or more would separate a gain from noise")
    return notes
