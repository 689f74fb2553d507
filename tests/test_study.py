"""Studies that are started together, killed, interrupted, fed nonsense, or have nothing to search; and the space they draw from."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import yaml

from workbench.config import Config, load_config, replace
from workbench.errors import ConfigError, StudyError
from workbench.geometry import StreamGeometry
from workbench.measure.twin import CostTable, twin_runner
from workbench.results import Record
from workbench.tuning import storage
from workbench.tuning.result import StudyResult, best_yaml
from workbench.tuning.space import Space
from workbench.tuning.spec import StudySpec, load_study, parse_study
from workbench.tuning.storage import fail_dead_trials, open_study, shown
from workbench.tuning.study import load_result, tune

SIZE, DELAY = "asr.batching.max_batch_size", "asr.batching.max_queue_delay_us"
HOST = {"python": "test"}
SHIPPED_STUDY = Path(__file__).parents[1] / "studies" / "demo"


def spec_of(**changes: Any) -> StudySpec:
    """A two-key study with 12 trials."""
    data: dict[str, Any] = {
        "name": "try",
        "base": {"asr": {"batching": {"enabled": True}}},
        "space": {SIZE: {"int": [1, 1024], "log": True}, DELAY: {"int": [0, 20_000], "step": 500}},
        "budget": {"trials": 12},
    }
    return parse_study({**data, **changes})


def record(**numbers: Any) -> Record:
    """A run's record with these numbers and one batch."""
    return Record(
        kind="twin",
        numbers={"late_share": 0.0, **numbers},
        counters={
            "batch_sizes": {"1": 3},
            "reasons": {"drain": 3},
            "queue_wait_p95_ms": 1.5,
            "padding_rows_share": 0.0,
        },
        environment=HOST,
    )


def bowl(config: Config) -> Record:
    """Best at 32 items and 8 ms; the default (1024, 5 ms) is worse."""
    batching = config.asr.batching
    size, delay_ms = math.log2(batching.max_batch_size), batching.max_queue_delay_us / 1000
    return record(latency_p95_ms=20 + (size - 5) ** 2 + (delay_ms - 8) ** 2 / 4)


def run(spec: StudySpec, evaluate: Callable[[Config], Any], folder: Path, **options: Any) -> StudyResult:
    """Tune without a progress bar."""
    return tune(Config(), spec, evaluate, folder=folder, progress=False, **options)


def test_the_default_is_the_first_trial_and_the_gain_is_stated_against_it(tmp_path: Path) -> None:
    result = run(spec_of(budget={"trials": 20}), bowl, tmp_path)
    assert result.trials[0].is_default and result.trials[0].params == {SIZE: 1024, DELAY: 5000}
    assert result.default is result.trials[0] and result.default.values == (20 + 25 + 2.25,)
    assert result.best is not None and result.best.values is not None
    assert result.best.values[0] == min(t.values[0] for t in result.trials if t.values)
    assert result.gain == pytest.approx(1 - result.best.values[0] / 47.25) and result.gain > 0.3
    assert "less than the default's 47.25" in result.headline


def test_every_trial_keeps_why(tmp_path: Path) -> None:
    result = run(spec_of(budget={"trials": 3}), bowl, tmp_path)
    for trial in result.trials:
        assert trial.why == {
            "batch_sizes": {"1": 3},
            "reasons": {"drain": 3},
            "queue_wait_p95_ms": 1.5,
            "padding_rows_share": 0.0,
        }
        assert trial.numbers["late_share"] == 0.0


def test_the_best_yaml_loads_unchanged_under_asr_batching(tmp_path: Path) -> None:
    result = run(spec_of(), bowl, tmp_path)
    target = tmp_path / "best.yaml"
    target.write_text(best_yaml(result), encoding="utf-8")
    loaded = load_config(target)
    assert result.best is not None and result.best_config is not None
    assert loaded.asr == result.best_config.asr
    assert loaded.asr.batching.max_batch_size == result.best.params[SIZE] and loaded.asr.batching.enabled
    assert yaml.safe_load(target.read_text())["asr"]["batching"]["max_queue_delay_us"] == result.best.params[DELAY]


def test_a_default_that_nothing_beats_stays_the_best(tmp_path: Path) -> None:
    result = run(spec_of(), lambda config: record(latency_p95_ms=7.0), tmp_path)
    assert result.best is not None and result.best.is_default and result.gain == 0
    assert result.headline == "latency_p95_ms 7: no configuration was better than the default"


def test_the_same_seed_gives_the_same_trials_and_another_seed_others(tmp_path: Path) -> None:
    def points(folder: str, seed: int) -> list[dict[str, Any]]:
        spec = spec_of(budget={"trials": 14, "seed": seed})
        return [trial.params for trial in run(spec, bowl, tmp_path / folder).trials]

    assert points("a", 3) == points("b", 3) != points("c", 4)


def test_a_point_that_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []

    def evaluate(config: Config) -> Record:
        calls.append((config.asr.batching.max_batch_size, config.asr.batching.max_queue_delay_us))
        return bowl(config)

    spec = spec_of(
        space={SIZE: {"choices": [8, 1024]}, DELAY: {"int": [5000, 6500], "step": 500}}, budget={"trials": 40}
    )
    result = run(spec, evaluate, tmp_path)
    assert len(calls) == len(set(calls)) <= 8
    assert [t for t in result.trials if t.duplicate_of is not None]
    by_number = {trial.number: trial for trial in result.trials}
    for trial in result.trials:
        if trial.duplicate_of is not None:
            first = by_number[trial.duplicate_of]
            assert (trial.params, trial.values, trial.why) == (first.params, first.values, first.why)
    assert len(result.trials) < 40 or len(set(calls)) < 8  # a finite space that is used up ends the study


def test_a_space_of_one_point_is_measured_once_and_says_so(tmp_path: Path) -> None:
    calls: list[Config] = []
    spec = spec_of(space={SIZE: {"int": [1024, 1024]}, DELAY: {"choices": [5000]}}, budget={"trials": 20})
    result = run(spec, lambda config: calls.append(config) or bowl(config), tmp_path)
    assert len(calls) == len(result.trials) == 1
    assert any("one point" in note for note in result.notes)
    assert load_config(yaml.safe_load(best_yaml(result))).asr.batching.max_batch_size == 1024


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: record(latency_p95_ms=float("nan")), "got nan; needed is a finite number"),
        (lambda: record(latency_p95_ms=float("inf")), "got inf; needed is a finite number"),
        (lambda: record(latency_p95_ms=None), "got None; needed is a finite number"),
        (lambda: record(latency_p95_ms="12"), "got '12'"),
        (lambda: record(p95=1.0), "the record has no such number; it has late_share, p95"),
        (lambda: None, "evaluate returned None"),
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda: record(latency_p95_ms=1.0, late_share=float("nan")), "late_share: got nan"),
    ],
)
def test_a_measurement_that_is_none_fails_its_trial_and_no_other(
    bad: Callable[[], Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def evaluate(config: Config) -> Any:
        calls.append(1)
        return bad() if len(calls) % 3 == 0 else bowl(config)

    spec = spec_of(constraints=[{"number": "late_share", "at_most": 0.5}], budget={"trials": 6})
    result = run(spec, evaluate, tmp_path)
    failed = [trial for trial in result.trials if trial.failure]
    assert len(result.trials) == 6 and len(failed) == 2
    assert all(message in str(t.failure) and t.values is None and t.state == "fail" for t in failed)
    assert result.best is not None and math.isfinite(result.best.values[0])  # type: ignore[index]
    assert any("2 of 6 trials failed" in note for note in result.notes)
    assert f"trial {failed[0].number} failed: {failed[0].failure}" in capsys.readouterr().err
    result.record().save(tmp_path / "results.json")


def test_a_study_in_which_nothing_works_stops_early_and_tells_the_reason(tmp_path: Path) -> None:
    def broken(config: Config) -> Record:
        raise FileNotFoundError("costs.json")

    result = run(spec_of(budget={"trials": 200}), broken, tmp_path)
    assert len(result.trials) == 5 and result.best is None and result.gain is None
    assert "5 of 5 trials failed; trial 0: FileNotFoundError: costs.json" in result.notes[0]
    with pytest.raises(StudyError, match="0 of 5 trials finished"):
        best_yaml(result)


def test_a_failed_default_leaves_no_gain_to_state(tmp_path: Path) -> None:
    result = run(
        spec_of(),
        lambda config: bowl(config) if config.asr.batching.max_batch_size < 1024 else record(),
        tmp_path,
    )
    assert result.best is not None and result.gain is None
    assert "the default configuration failed, so there is no gain to state" in result.headline


def test_where_nothing_is_feasible_the_least_violating_trials_are_reported(tmp_path: Path) -> None:
    def late(config: Config) -> Record:
        return record(latency_p95_ms=5.0, late_share=0.1 + config.asr.batching.max_batch_size / 2048)

    result = run(spec_of(constraints=[{"number": "late_share", "at_most": 0.01}]), late, tmp_path)
    assert result.best is None and result.best_config is None and not result.pareto
    smallest = min(trial.params[SIZE] for trial in result.trials)
    assert result.closest[0].params[SIZE] == smallest
    assert f"the closest is trial {result.closest[0].number} (late_share <= 0.01 missed by" in result.notes[0]
    with pytest.raises(StudyError, match="none kept every constraint"):
        best_yaml(result)


def test_the_best_keeps_the_constraints_even_if_a_breaker_is_faster(tmp_path: Path) -> None:
    def evaluate(config: Config) -> Record:
        size = config.asr.batching.max_batch_size
        return record(latency_p95_ms=float(size), late_share=0.2 if size < 40 else 0.0)

    spec = spec_of(constraints=[{"number": "late_share", "at_most": 0.01}], budget={"trials": 16})
    result = run(spec, evaluate, tmp_path)
    assert result.best is not None and result.best.params[SIZE] >= 40
    assert min(trial.params[SIZE] for trial in result.trials) < 40
    study, _ = open_study(spec, tmp_path, optuna.samplers.RandomSampler())
    assert study.best_trial.number == result.best.number  # optuna's own view agrees


def test_several_objectives_give_the_front(tmp_path: Path) -> None:
    def evaluate(config: Config) -> Record:
        size = config.asr.batching.max_batch_size
        return record(latency_p95_ms=10.0 + size, streams=float(size * 3))

    objectives = [{"number": "latency_p95_ms"}, {"number": "streams", "direction": "maximise"}]
    result = run(spec_of(objectives=objectives, budget={"trials": 15}), evaluate, tmp_path)
    measured = [trial for trial in result.trials if trial.duplicate_of is None]
    assert {trial.params[SIZE] for trial in result.pareto} == {trial.params[SIZE] for trial in measured}
    assert result.best is not None and result.best.params[SIZE] == min(trial.params[SIZE] for trial in measured)
    study, _ = open_study(result.spec, tmp_path, optuna.samplers.RandomSampler())
    assert {t.params[SIZE] for t in study.best_trials} == {t.params[SIZE] for t in result.pareto}


def test_repeats_use_equal_traffic_take_the_median_and_end_with_a_fresh_comparison(tmp_path: Path) -> None:
    seeds: list[int] = []
    noise = np.random.default_rng(0).normal(0, 0.5, 5000)

    def noisy(config: Config) -> Record:
        seeds.append(config.load.seed)
        return record(latency_p95_ms=bowl(config).numbers["latency_p95_ms"] + noise[config.load.seed])

    spec = spec_of(budget={"trials": 12, "repeats": 3, "finalists": 2})
    result = run(spec, noisy, tmp_path)
    assert set(seeds[:-12]) == {0, 1, 2} and seeds[-12:-3] == [1000, 1001, 1002] * 3  # two finalists and the default
    assert seeds[-3:] == [2000, 2001, 2002] and result.again["trial"] == result.best.number  # A/A of the winner
    assert result.again_share == abs(result.again["value"] / result.confirmation[str(result.best.number)]["value"] - 1)
    middle = float(np.median(noise[:3]))
    assert result.default is not None and result.default.values == (pytest.approx(47.25 + middle),)
    assert len(result.fresh_gains) == 3 and all(gain > 0.2 for gain in result.fresh_gains)
    assert "on fresh traffic, better in 3 of 3 runs" in result.headline and "noise" not in result.headline
    again = run(spec, noisy, tmp_path)  # nothing left to do: neither trials nor the comparison are run again
    assert len(seeds) == 3 * sum(t.duplicate_of is None for t in result.trials) + 12
    assert again.confirmation == result.confirmation and again.best == result.best


def test_fresh_traffic_decides_between_the_finalists(tmp_path: Path) -> None:
    def lucky(config: Config) -> Record:
        """512 wins on the trials' traffic by luck; on any other traffic 64 does."""
        size, fresh = config.asr.batching.max_batch_size, config.load.seed >= 1000
        return record(latency_p95_ms={64: 9.0, 512: 11.0 if fresh else 8.0, 1024: 10.0}[size])

    spec = spec_of(space={SIZE: {"choices": [64, 512, 1024]}}, budget={"trials": 12, "repeats": 2})
    result = run(spec, lucky, tmp_path)
    assert {trial.params[SIZE] for trial in result.ranked} == {64, 512, 1024} and result.ranked[0].params[SIZE] == 512
    assert result.best is not None and result.best.params[SIZE] == 64
    assert (
        result.gain == pytest.approx(0.1) and "9: 10.0 % less than the default's 10 on fresh traffic" in result.headline
    )
    assert result.record().numbers["compared_best_latency_p95_ms"] == 9.0


def test_a_gain_that_not_every_fresh_run_shows_is_called_noise(tmp_path: Path) -> None:
    def wavering(config: Config) -> Record:
        better = config.asr.batching.max_batch_size == 512 and config.load.seed % 2 == 0
        return record(latency_p95_ms=8.0 if better else 10.0)

    spec = spec_of(space={SIZE: {"choices": [512, 1024]}}, budget={"trials": 8, "repeats": 2})
    result = run(spec, wavering, tmp_path)
    assert result.best is not None and result.best.params[SIZE] == 512
    assert "better in 1 of 2 runs (+0.0 to +20.0 %), which is within the noise" in result.headline


def test_a_finalist_that_breaks_a_limit_on_fresh_traffic_is_not_the_best(tmp_path: Path) -> None:
    def fragile(config: Config) -> Record:
        size, fresh = config.asr.batching.max_batch_size, config.load.seed >= 1000
        return record(latency_p95_ms=float(size), late_share=0.5 if size == 64 and fresh else 0.0)

    limits = [{"number": "late_share", "at_most": 0.01}]
    spec = spec_of(space={SIZE: {"choices": [64, 512, 1024]}}, budget={"trials": 12, "repeats": 2}, constraints=limits)
    result = run(spec, fragile, tmp_path)
    assert result.ranked[0].params[SIZE] == 64 and result.best is not None and result.best.params[SIZE] == 512


def test_a_resumed_study_goes_on_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    first = run(spec_of(), bowl, tmp_path, measured_with="costs 1")
    more = spec_of(budget={"trials": 16})
    longer = run(more, bowl, tmp_path, measured_with="costs 1")
    assert [t.params for t in longer.trials[:12]] == [t.params for t in first.trials] and len(longer.trials) == 16
    assert load_result(Config(), more, tmp_path).best == longer.best
    with pytest.raises(StudyError, match=r"begun with another measured_with.*use a new name"):
        run(more, bowl, tmp_path, measured_with="costs 2")
    with pytest.raises(StudyError, match="begun with another space, configuration"):
        changed = spec_of(space={SIZE: {"int": [1, 1024]}}, base={"asr": {"dtype": "bfloat16"}})
        run(changed, bowl, tmp_path, measured_with="costs 1")
    with pytest.raises(StudyError, match="has the objectives"):
        run(spec_of(objectives=[{"number": "latency_p95_ms", "direction": "maximise"}]), bowl, tmp_path)
    with pytest.raises(StudyError, match="run it first"):
        load_result(Config(), more, tmp_path / "elsewhere")


def test_an_interrupt_keeps_what_is_finished_says_how_to_resume_and_repeats_the_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[dict[str, Any]] = []

    def interrupted(config: Config) -> Record:
        calls.append({SIZE: config.asr.batching.max_batch_size, DELAY: config.asr.batching.max_queue_delay_us})
        if len(calls) == 6:
            raise KeyboardInterrupt
        return bowl(config)

    with pytest.raises(KeyboardInterrupt):
        run(spec_of(), interrupted, tmp_path)
    told = capsys.readouterr().err
    assert "interrupted after 5 of 12 trials" in told and "study.db" in told and "Run the same command again" in told
    result = run(spec_of(), interrupted, tmp_path)
    assert len(result.trials) == 12 and calls[6] == calls[5]
    assert [t.number for t in result.trials[:5]] == [0, 1, 2, 3, 4] and not any(t.failure for t in result.trials)


WORKER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_study import bowl, run, spec_of
def slow(config):
    time.sleep({pause})
    return bowl(config)
run(spec_of(budget={{"trials": {trials}, "seed": {seed}}}), slow, Path(sys.argv[1]))
"""


def start_worker(folder: Path, trials: int, pause: float, seed: int = 0) -> subprocess.Popen[str]:
    """A process that runs the study in `folder`."""
    code = WORKER.format(tests=str(Path(__file__).parent), trials=trials, pause=pause, seed=seed)
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], stderr=subprocess.PIPE, text=True)


def test_kill_9_loses_no_finished_trial_and_the_running_one_is_run_again(tmp_path: Path) -> None:
    spec = spec_of(budget={"trials": 400})
    worker = start_worker(tmp_path, 400, pause=0.15)
    try:
        finished = _wait_for_trials(spec, tmp_path, 3, worker)
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    study, created = open_study(spec, tmp_path, optuna.samplers.RandomSampler())
    running = study.get_trials(states=(optuna.trial.TrialState.RUNNING,))
    assert not created and len(running) <= 1
    kept = load_result(Config(), spec, tmp_path)
    assert len(kept.trials) >= len(finished)
    total = len(kept.trials) + 4
    result = run(spec_of(budget={"trials": total}), bowl, tmp_path)
    assert result.trials[: len(kept.trials)] == kept.trials and len(result.trials) == total
    # The kill may fall into the instant before the trial has a point, or a worker's name: then there is nothing to run again.
    point = (running[0].params or running[0].system_attrs.get("fixed_params")) if running else None
    if point and "worker" in running[0].user_attrs:
        assert result.trials[len(kept.trials)].params == point
    left = open_study(spec, tmp_path, optuna.samplers.RandomSampler())[0].get_trials(
        states=(optuna.trial.TrialState.RUNNING,)
    )
    assert not [trial for trial in left if "worker" in trial.user_attrs]


def test_a_trial_killed_before_it_had_a_name_is_failed_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(budget={"trials": 2})
    study, _ = open_study(spec, tmp_path, optuna.samplers.RandomSampler())
    study.ask()
    assert fail_dead_trials(study) == 0, "its worker may be about to name itself"
    monkeypatch.setattr(storage, "UNNAMED_AT_MOST", timedelta(0))
    assert fail_dead_trials(study) == 1


def _wait_for_trials(spec: StudySpec, folder: Path, count: int, worker: subprocess.Popen[str]) -> list[Any]:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert worker.poll() is None, worker.stderr.read() if worker.stderr else ""
        if (folder / "study.db").exists():
            try:
                trials = list(load_result(Config(), spec, folder).trials)
            except StudyError:
                trials = []
            if len(trials) >= count:
                return trials
        time.sleep(0.05)
    raise AssertionError("the worker finished no trial in a minute")


def test_eight_processes_start_one_study_together(tmp_path: Path) -> None:
    workers = [start_worker(tmp_path, 16, pause=0.05, seed=number) for number in range(8)]
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 8, "\n".join(errors)
    assert not any(errors), errors
    result = load_result(Config(), spec_of(), tmp_path)
    assert 16 <= len(result.trials) <= 16 + 7 and not any(trial.failure for trial in result.trials)
    assert result.trials[0].is_default and result.trials[0].number == 0
    assert len({trial.number for trial in result.trials}) == len(result.trials)


def test_the_shipped_study_runs_on_the_twin_with_the_real_scheduler(tmp_path: Path) -> None:
    rows = [{"stage": "step", "batch": b, "shape": "steady", "ms_p50": 6.0 + b, "ms_p95": 8.0 + b} for b in (1, 4, 16)]
    costs = CostTable.from_record(Record(kind="costs", rows=rows, environment=HOST))
    spec = load_study(SHIPPED_STUDY)
    spec = dataclasses.replace(spec, budget=dataclasses.replace(spec.budget, trials=10, repeats=1))
    base = replace(Config(), **{"load.streams": costs.busy_streams(0.08, 0.2), "load.seconds": 4.0})
    assert base.load.streams == 10  # 6 + 10 ms are 20 % of a chunk
    evaluate = twin_runner(costs, StreamGeometry(56, 0), [30_000, 52_000])
    result = run(spec, evaluate, tmp_path, measured_with=costs.digest())
    assert result.best is not None and len(result.trials) == 10
    assert all(
        {"batch_sizes", "reasons", "queue_wait_p95_ms", "padding_rows_share"} <= t.why.keys() for t in result.trials
    )
    saved = Record.load(result.record().save(tmp_path / "results.json"))
    assert saved.numbers["best_latency_p95_ms"] <= saved.numbers["default_latency_p95_ms"]
    assert [row["params"] for row in saved.rows] == [trial.params for trial in result.trials]


def test_a_database_that_cannot_be_used_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"sqlite:////nowhere/x\.db.*cannot be used"):
        run(spec_of(storage="sqlite:////nowhere/x.db"), bowl, tmp_path)
    with pytest.raises(StudyError, match="cannot be used"):
        run(spec_of(storage="not a url"), bowl, tmp_path)
    assert "secret" not in shown("postgresql://user:secret@host/db")


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"asr.batching.max_batch_sise": {"int": [1, 2]}}, "did you mean max_batch_size"),
        ({SIZE: {"int": [0, 8]}}, r"space\.asr\.batching\.max_batch_size: got 0 .* greater than or equal to 1"),
        ({SIZE: {"int": [8, 1]}}, "low first"),
        ({SIZE: {"int": [1, 8.5]}}, "two whole numbers"),
        ({SIZE: {"float": [1.0, 8.0]}}, r"max_batch_size: got .*1\.0.*whole numbers"),
        ({SIZE: {"int": [1, 8], "log": True, "step": 2}}, "none beside log"),
        ({DELAY: {"int": [0, 8], "log": True}}, "above 0 with log"),
        ({SIZE: {"int": [1, 8], "step": 2}}, "plus a multiple of the step 2"),
        ({SIZE: {"int": [1, 8], "lgo": True}}, "got 'lgo'; allowed is the options int, log, step"),
        ({SIZE: {"choices": [4, 4]}}, "different values"),
        ({"asr.dtype": {"choices": ["float32", "fp8"]}}, r"asr\.dtype: got 'fp8'"),
        ({SIZE: [1, 8]}, "allowed is {int:"),
        ({}, "at least one dotted key"),
    ],
)
def test_a_space_that_could_fail_half_way_does_not_begin(space: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Space.parse(space)


def test_the_default_must_lie_in_the_space() -> None:
    narrow = spec_of(space={SIZE: {"int": [1, 64]}})
    with pytest.raises(
        ConfigError, match=r"space\.asr\.batching\.max_batch_size: the default 1024 is not in \[1, 64\]"
    ):
        narrow.configure(Config())
    moved = spec_of(space={SIZE: {"int": [1, 64]}}, base={"asr": {"batching": {"max_batch_size": 32}}})
    assert moved.configure(Config()).asr.batching.max_batch_size == 32


def test_lists_are_choices_too(tmp_path: Path) -> None:
    space = {"asr.att_context_size": {"choices": [[56, 0], [56, 3]]}, "load.seconds": {"float": [5.0, 20.0]}}
    longer = [{"number": "latency_p95_ms"}, {"number": "load_s", "direction": "maximise"}]
    base = {"asr": {"att_context_size": [56, 0]}}
    spec = spec_of(space=space, base=base, objectives=longer, budget={"trials": 12})
    assert Space.parse(space).points is None

    def evaluate(config: Config) -> Record:
        assert config.asr.att_context_size is not None
        seconds = config.load.seconds
        return record(latency_p95_ms=10.0 - config.asr.att_context_size[1] + seconds / 100, load_s=seconds)

    result = run(spec, evaluate, tmp_path)
    assert result.best is not None and result.best.params["asr.att_context_size"] == [56, 3]
    assert load_config(yaml.safe_load(best_yaml(result))).asr.att_context_size == (56, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": {"trails": 3}}, r"budget\.trails: unknown key; did you mean trials"),
        ({"objectives": []}, "objectives"),
        ({"constraints": [{"number": "late_share"}]}, "exactly one of at_most and at_least"),
        ({"objectives": [{"number": "a"}, {"number": "a"}]}, "named twice"),
        ({"name": "a/b"}, "name: got 'a/b'"),
        ({"base": {"asr": {"batching": {"max_batch_sise": 3}}}}, r"base\.asr\.batching\.max_batch_sise: unknown key"),
    ],
)
def test_a_study_file_is_read_strictly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(**change).configure(Config())


def test_a_missing_study_says_what_a_study_is(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"a study is a folder with a study\.yaml"):
        load_study(tmp_path)
