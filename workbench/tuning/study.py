"""Runs a study: Optuna proposes configurations, an injected function measures them, and every finished trial is kept.

    spec = load_study("studies/demo")
    result = tune(Config(), spec, twin_runner(costs, geometry, clip_samples), folder="runs/demo", measured_with=costs.digest())
    print(result.headline)

`evaluate(config) -> Record` is the twin or the device; the study knows no difference. Rules:
- The default configuration is the first trial. A point that was measured is not measured again: its result is shared.
- Repeat r of a trial runs with `load.seed` + r: all trials see equal traffic. How repeats become one judgement is in `rule`. With
  repeats, default, compared configurations and finalists are run again on fresh traffic, and that decides; the winner once more (A/A).
- A trial fails, with its reason, if `evaluate` raises or a number is missing or not finite. Nothing else is touched by it.
- Killed or interrupted at any moment, the study resumes where it was: call `tune` again with the same folder or storage.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from workbench.config import Config, build, to_dict
from workbench.errors import StudyError
from workbench.tuning.interrupt import Interrupts
from workbench.tuning.result import StudyResult, TrialRow, read_result
from workbench.tuning.rule import Evaluate, Outcome, Rule
from workbench.tuning.space import Space, value_at
from workbench.tuning.spec import StudySpec
from workbench.tuning.storage import (
    fail_dead_trials,
    load_optuna_study,
    open_study,
    requeue,
    shown,
    storage_url,
    worker_name,
)

# Repeats of the closing comparison use seeds that no trial used, and the A/A runs of its winner seeds of their own.
FRESH_SEEDS, AGAIN_SEEDS = 1000, 2000
# That many trials in a row that fail, and none that finished, is a broken set-up and not a bad region.
GIVE_UP_AFTER = 5


def tune(
    base: Config,
    spec: StudySpec,
    evaluate: Evaluate,
    *,
    folder: str | Path,
    progress: bool = True,
    measured_with: str = "",
) -> StudyResult:
    """Run or resume `spec` until its budget is spent, and return what was found.

    base: the user's configuration, over which the study's own `base:` is laid. folder: where the SQLite file goes. measured_with:
    a fingerprint of what `evaluate` rests on; a study begun with another one is refused, since their results do not compare.
    Raises ConfigError or StudyError for a study that cannot run, and KeyboardInterrupt after saying how to resume.
    """
    default_config = spec.configure(base)
    search = _Search(default_config, spec, evaluate)
    study = _begin(search, spec, folder, measured_with)
    with tqdm(
        total=spec.budget.trials,
        initial=min(_spent(study), spec.budget.trials),
        desc=f"tune {spec.name}",
        unit="trial",
        file=sys.stderr,
        disable=not progress,
        dynamic_ncols=True,
    ) as bar:
        try:
            left = spec.budget.trials - _spent(study)
            search.best = _best_so_far(spec, default_config, study)
            if left > 0:
                with search.interrupts:
                    study.optimize(
                        search.objective,
                        n_trials=left,
                        catch=(Exception,),
                        callbacks=[lambda study, trial: _after(search, study, trial, bar)],
                    )
            _confirm(search, study, read_result(spec, default_config, study), bar)
        except KeyboardInterrupt:
            _say_how_to_resume(bar, study, spec, folder)
            raise
    return read_result(spec, default_config, study)


def load_result(base: Config, spec: StudySpec, folder: str | Path) -> StudyResult:
    """The result of a study that was run before, as far as it got. Raises StudyError if it was never begun.

    The configuration is the one that the study was begun with; `base` counts only if it was killed before it wrote that down.
    """
    study = load_optuna_study(spec, folder)
    begun = study.user_attrs.get("definition", {}).get("configuration")
    return read_result(spec, spec.configure(base) if begun is None else build(Config, begun), study)


class _Search:
    """The objective: from a trial to its values, with everything that explains them stored on the trial."""

    def __init__(self, default_config: Config, spec: StudySpec, evaluate: Evaluate) -> None:
        self.config, self.spec, self.rule = default_config, spec, Rule(spec, evaluate)
        self.space = Space.parse(spec.space)
        self.default_point = self.space.labels(self.space.default(default_config))
        self.worker = worker_name()
        self.interrupts = Interrupts()
        self.best: float | None = None

    def objective(self, trial: optuna.Trial) -> tuple[float, ...]:
        """Measure one trial, or share the result of an equal one."""
        trial.set_user_attr("worker", self.worker)
        point = self.space.suggest(trial)
        if trial.params == self.default_point:
            trial.set_user_attr("default", True)
        try:
            with self.interrupts.welcome():
                known = self._measured(trial)
                found = known or self.rule.measure(self.spec.at(self.config, point), self.config.load.seed)
        except Exception as error:  # told, stored, and raised on: Optuna fails this trial and goes on
            trial.set_user_attr("failure", f"{type(error).__name__}: {error}")
            raise
        if known is not None:
            trial.set_user_attr("duplicate_of", known["trial"])
        trial.set_user_attr("outcome", {key: found[key] for key in ("numbers", "why", "excess")})
        for name, excess in found["excess"].items():
            trial.set_constraint(name, excess)
        return tuple(found["values"])

    def _measured(self, trial: optuna.Trial) -> dict[str, Any] | None:
        for other in trial.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
            if other.params == trial.params and "duplicate_of" not in other.user_attrs:
                return {"trial": other.number, "values": other.values, **other.user_attrs["outcome"]}
        return None


def _begin(search: _Search, spec: StudySpec, folder: str | Path, measured_with: str) -> optuna.Study:
    """Open the study with the default configuration as its first trial, and refuse to mix results that do not compare."""
    definition = {
        "space": spec.space,
        "objectives": [dataclasses.asdict(objective) for objective in spec.objectives],
        "constraints": [dataclasses.asdict(constraint) for constraint in spec.constraints],
        "repeats": spec.budget.repeats,
        "configuration": to_dict(search.config),
        "measured_with": measured_with,
    }
    study, created = open_study(spec, folder, optuna.samplers.TPESampler(seed=spec.budget.seed))
    if created:
        study.enqueue_trial(search.default_point, user_attrs={"default": True})
        for name, config in spec.compared(search.config).items():
            if search.space.holds(config):
                point = {parameter.path: value_at(config, parameter.path) for parameter in search.space.parameters}
                study.enqueue_trial(search.space.labels(point), user_attrs={"compare": name}, skip_if_exists=True)
        study.set_user_attr("definition", definition)
        return study
    # A resumed or joining worker draws on from another seed: the same one would propose the same first points again.
    study.sampler = optuna.samplers.TPESampler(seed=hash((spec.budget.seed, len(study.trials), os.getpid())) % 2**32)
    _await_creator(study)
    begun = study.user_attrs.get("definition")
    if begun is None:  # its creator was killed before it got that far
        study.enqueue_trial(search.default_point, user_attrs={"default": True}, skip_if_exists=True)
        study.set_user_attr("definition", definition)
    elif changed := [key for key, value in definition.items() if begun.get(key) != value]:
        raise StudyError(
            f"study {spec.name!r} in {shown(storage_url(spec, folder))} was begun with another {', '.join(changed)}; its trials do not compare "
            "with new ones: use a new name, or remove the old study"
        )
    fail_dead_trials(study)
    return study


def _await_creator(study: optuna.Study, seconds: float = 10.0) -> None:
    """The process that created the study queues the default first; whoever joins in that moment waits for it."""
    until = time.monotonic() + seconds
    while "definition" not in study.user_attrs and time.monotonic() < until:
        time.sleep(0.05)


def _ended(study: optuna.Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))


def _counts(trial: FrozenTrial) -> bool:
    """Whether a trial uses up the budget: it finished, or failed for a reason. One that lost its worker is run again instead."""
    return trial.state == TrialState.COMPLETE or "failure" in trial.user_attrs


def _spent(study: optuna.Study) -> int:
    return sum(map(_counts, _ended(study)))


def _after(search: _Search, study: optuna.Study, trial: FrozenTrial, bar: tqdm[Any]) -> None:
    """After each trial: tell a failure, move the bar, and stop where going on has no point."""
    objective, ended = search.spec.objectives[0], _ended(study)
    spent = sum(map(_counts, ended))
    bar.n = min(spent, search.spec.budget.trials)
    if failure := trial.user_attrs.get("failure"):
        bar.write(f"trial {trial.number} failed: {failure}", file=sys.stderr)
    elif trial.values and all(excess <= 0 for excess in trial.user_attrs["outcome"]["excess"].values()):
        better = min if objective.direction == "minimise" else max
        search.best = trial.values[0] if search.best is None else better(search.best, trial.values[0])
        bar.set_postfix({f"best {objective.number}": f"{search.best:.4g}"}, refresh=False)
    bar.refresh()
    hopeless = len(ended) >= GIVE_UP_AFTER and all("failure" in t.user_attrs for t in ended)
    points = search.space.points
    tried = {repr(sorted(t.params.items())) for t in ended} if points is not None else set()
    if hopeless or spent >= search.spec.budget.trials or (points is not None and len(tried) >= points):
        study.stop()


def _confirm(search: _Search, study: optuna.Study, result: StudyResult, bar: tqdm[Any]) -> None:
    """With repeats: run the default, the compared configurations and the best trials again on traffic that no trial saw, then the best of
    these once more."""
    spec, fresh_seed = search.spec, search.config.load.seed + FRESH_SEEDS
    if spec.budget.repeats < 2 or not (result.ranked or result.default):
        return
    finalists = list(result.ranked[: spec.budget.finalists])
    if result.default is not None and result.default.values is not None and result.default not in finalists:
        finalists.append(result.default)
    runs = dict(result.confirmation)
    for trial in finalists:
        if str(trial.number) not in runs:
            bar.set_postfix({"fresh traffic": f"trial {trial.number}"})
            runs[str(trial.number)] = _fresh(search, trial, fresh_seed)
            study.set_user_attr("confirmation", runs)
    compared = dict(result.compared)
    for name, config in spec.compared(search.config).items():
        if name not in compared:
            bar.set_postfix({"fresh traffic": name})
            compared[name] = _told(search.rule.judge(config, fresh_seed), spec)
            study.set_user_attr("compared", compared)
    best = read_result(spec, search.config, study).best
    if best is not None and result.again.get("trial") != best.number:
        bar.set_postfix({"A/A": f"trial {best.number}"})
        again = _fresh(search, best, search.config.load.seed + AGAIN_SEEDS)
        first = runs.get(str(best.number), again)["value"]
        study.set_user_attr(
            "again",
            {**again, "trial": best.number, "difference_share": again["value"] / first - 1 if first else None},
        )


def _fresh(search: _Search, trial: TrialRow, seed: int) -> Outcome:
    """The trial's configuration judged on the traffic of these seeds."""
    told = _told(search.rule.judge(search.spec.at(search.config, trial.params), seed), search.spec)
    drift = told["value"] / trial.values[0] - 1 if trial.values and trial.values[0] else None
    return {**told, "drift_share": drift}


def _told(outcome: Outcome, spec: StudySpec) -> Outcome:
    numbers = dict(outcome["numbers"])
    repeats = numbers.pop("repeats", {}).get(spec.objectives[0].number, outcome["values"][:1])
    repeats = outcome["values"][:1] if spec.finds_capacity else repeats  # one search, whatever runs it took
    return {
        "value": outcome["values"][0],
        "values": outcome["values"],
        "repeats": repeats,
        "excess": outcome["excess"],
        "numbers": numbers,
        "why": outcome["why"],
    }


def _best_so_far(spec: StudySpec, default_config: Config, study: optuna.Study) -> float | None:
    best = read_result(spec, default_config, study).best
    return None if best is None or best.values is None else best.values[0]


def _say_how_to_resume(bar: tqdm[Any], study: optuna.Study, spec: StudySpec, folder: str | Path) -> None:
    """Put the interrupted trial back into the queue and tell where everything is."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.FAIL, TrialState.RUNNING)):
        if trial.user_attrs.get("worker") == worker_name() and "failure" not in trial.user_attrs:
            if trial.state == TrialState.RUNNING:
                study.tell(trial.number, state=TrialState.FAIL)
            requeue(study, trial)
    bar.write(
        f"interrupted after {_spent(study)} of {spec.budget.trials} trials; all are kept in {shown(storage_url(spec, folder))}. "
        "Run the same command again to go on",
        file=sys.stderr,
    )
