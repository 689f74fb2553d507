"""How a study judges: confidence bounds, refused loads, capacity, compared configurations, subsets; and what it leaves in its folder."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_study import DELAY, HOST, SIZE, bowl, record, run, spec_of

from workbench.config import Config, load_config, replace
from workbench.errors import ConfigError, LoadNotCarried, StudyError
from workbench.results import Record
from workbench.show.study_report import write_study_report
from workbench.tuning.confidence import lower_bound, margin, student_95, upper_bound
from workbench.tuning.confirm import AGAIN, contestants
from workbench.tuning.outcome import Outcome, best_of, outcome_of_study, trials_csv, write_outcome
from workbench.tuning.rule import Rule, most_streams
from workbench.tuning.space import Space
from workbench.tuning.spec import StudySpec, load_study
from workbench.tuning.study import tune

STREAMS, SLOTS, BUCKETS = "load.streams", "asr.batching.state_arena_slots", "asr.batch_buckets"
STUDIES = Path(__file__).parents[1] / "studies"
SHIPPED = ("latency_80ms", "capacity_slo", "pareto", "offline_bucket", "graph_buckets")
EXAMPLE = {"asr": {"batching": {"max_batch_size": 32, "max_queue_delay_us": 5000}}}


def capacity_spec(**changes: Any) -> StudySpec:
    """The most streams under a p95 limit."""
    data: dict[str, Any] = {
        "space": {STREAMS: {"int": [2, 512], "log": True}, SIZE: {"int": [1, 1024], "log": True}},
        "base": {"asr": {"batching": {"enabled": True}}, "load": {"streams": 8}},
        "objectives": [{"number": "streams", "direction": "maximise"}],
        "constraints": [{"number": "latency_p95_ms", "at_most": 100}],
        "budget": {"trials": 30, "repeats": 2, "finalists": 2},
        "compare": {"document_example": EXAMPLE},
    }
    return spec_of(**{**data, **changes})


def crowd(config: Config) -> Record:
    """p95 grows with streams; 64 items in a batch carry most (200), the default's 1024 fewer (100), 32 items 160."""
    size, streams = config.asr.batching.max_batch_size, config.load.streams
    carried = {1024: 100, 32: 160, 64: 200}.get(size, 120)
    return record(latency_p95_ms=100.0 * streams / carried, streams=streams, chunk_ms=80.0)


def test_bounds_are_those_of_student() -> None:
    values = [98.0, 101.0, 99.5]
    assert upper_bound(values) == pytest.approx(99.5 + 2.920 * 1.5 / 3**0.5)
    assert lower_bound(values) == pytest.approx(99.5 - 2.920 * 1.5 / 3**0.5)
    assert margin([7.0]) == 0 and upper_bound([5.0, 5.0]) == 5.0
    assert student_95(15) == pytest.approx(1.753, abs=0.01) and student_95(100) == pytest.approx(1.660, abs=0.005)


def test_a_limit_is_kept_only_if_the_bound_of_the_repeats_keeps_it() -> None:
    limits = [{"number": "late_share", "at_most": 0.010}]
    rule = Rule(
        spec_of(budget={"repeats": 3}, constraints=limits),
        lambda config: record(latency_p95_ms=1.0, late_share=(0.008, 0.009, 0.0095)[config.load.seed]),
    )
    excess = rule.measure(Config(), 0)["excess"]["late_share <= 0.01"]
    assert 0 < excess < 0.001, "every run kept the limit, and yet it is not safe"


def test_a_first_run_that_misses_by_far_is_not_repeated() -> None:
    seeds: list[int] = []

    def late(config: Config) -> Record:
        seeds.append(config.load.seed)
        return record(latency_p95_ms=1.0, late_share=0.5)

    spec = spec_of(budget={"repeats": 3}, constraints=[{"number": "late_share", "at_most": 0.01}])
    assert Rule(spec, late).measure(Config(), 5)["excess"]["late_share <= 0.01"] == pytest.approx(0.49)
    assert seeds == [5]


def test_a_refused_load_is_the_worst_result_and_no_gap(tmp_path: Path) -> None:
    def refusing(config: Config) -> Record:
        if config.asr.batching.max_batch_size < 64:
            raise LoadNotCarried("load: QueueFull at 3.00 s; this configuration does not carry 4 streams")
        return bowl(config)

    limits = [{"number": "late_share", "at_most": 0.01}]
    result = run(spec_of(constraints=limits, budget={"trials": 20}), refusing, tmp_path)
    refused = [trial for trial in result.trials if trial.params[SIZE] < 64]
    assert refused and all(t.values == (10_000.0,) and not t.feasible and t.failure is None for t in refused)
    assert result.best is not None and result.best.params[SIZE] >= 64
    unknown = spec_of(objectives=[{"number": "padding_rows_share"}], budget={"trials": 1})
    failed = run(unknown, lambda config: refusing(replace(config, **{SIZE: 1})), tmp_path / "other").trials[0]
    assert "padding_rows_share: the record has no such number" in str(failed.failure)
    assert "QueueFull" in str(failed.failure)


@pytest.mark.parametrize("start", [1, 7, 100, 777, 5000])
@pytest.mark.parametrize("limit", [0, 1, 2, 99, 640, 1000])
def test_the_most_streams_are_found_from_anywhere(start: int, limit: int) -> None:
    asked: list[int] = []

    def kept(streams: int) -> bool:
        asked.append(streams)
        return streams <= limit

    found = most_streams(kept, start, most=1000)
    assert limit - max(1, limit * 0.01) <= found <= limit and len(asked) <= 24 and len(set(asked)) == len(asked)


def test_a_capacity_study_takes_default_example_and_finalists_to_their_own_limit(tmp_path: Path) -> None:
    result = run(capacity_spec(space={**capacity_spec().space, SIZE: {"choices": [32, 64, 1024]}}), crowd, tmp_path)
    assert result.default is not None and result.default.values == (8.0,), "the trial itself ran at the load of base:"
    assert result.confirmation["0"]["value"] == pytest.approx(100, abs=1)
    assert result.compared["document_example"]["value"] == pytest.approx(160, abs=2)
    assert result.best is not None and result.best.params[SIZE] == 64
    assert result.confirmation[str(result.best.number)]["value"] == pytest.approx(200, abs=2)
    assert result.gain == pytest.approx(1.0, abs=0.03) and "more than the default's" in result.headline
    assert result.best_config is not None
    assert result.best_config.asr.batching.state_arena_slots >= 2 * result.best.params[STREAMS]
    entered = contestants(result, 2)
    assert [entered[name].load.streams for name in ("default", "document_example", "best", AGAIN)] == pytest.approx(
        [100, 160, 200, 200], abs=2
    )


def test_the_objective_itself_is_not_called_its_own_reason(tmp_path: Path) -> None:
    result = tune(Config(), capacity_spec(), crowd, folder=tmp_path, progress=False)
    assert STREAMS not in result.importance and set(result.importance) <= {SIZE}
    latency = run(spec_of(budget={"trials": 30}), bowl, tmp_path / "latency")
    assert set(latency.importance) <= {SIZE, DELAY} and latency.importance


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"objectives": [{"number": "latency_p95_ms"}]},
            r"space\.load\.streams: got a key of the load; .* lightest load",
        ),
        ({"objectives": [{"number": "streams"}]}, "direction: maximise"),
        ({"constraints": []}, "a study that maximises streams needs a limit"),
        ({"space": {"load.seed": {"int": [0, 9]}}}, r"space\.load\.seed: .* changes what is measured"),
        ({"offline": {"recordings": 4}}, "an offline study has none"),
        (
            {"compare": {"example": {"asr": {"batching": {"max_batch": 3}}}}},
            r"compare\.example\.asr\.batching\.max_batch: unknown",
        ),
        ({"space": {BUCKETS: {"subset": [1, 2], "always": []}}}, "neither empty"),
        ({"space": {BUCKETS: {"subset": [1, 2], "always": [2]}}}, "all different"),
        ({"space": {SIZE: {"int": [1, "1e3"]}}}, "YAML reads 1e3 as text, write 1000"),
    ],
)
def test_a_study_that_would_mislead_does_not_begin(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        capacity_spec(**changes)


def test_the_command_line_wins_over_the_base_of_a_study() -> None:
    spec = spec_of(base={"asr": {"batching": {"enabled": True, "max_queue_delay_us": 1000}}, "load": {"streams": 9}})
    user = load_config({"asr": {"dtype": "bfloat16", "batching": {"max_queue_delay_us": 2000}}})
    assert spec.configure(user).asr.batching.max_queue_delay_us == 1000, "the file lies below the study"
    config = spec.overridden(["asr.batching.max_queue_delay_us=5000", "load.streams=3"]).configure(user)
    assert (config.asr.batching.max_queue_delay_us, config.load.streams, config.asr.dtype) == (5000, 3, "bfloat16")
    assert spec.base["load"]["streams"] == 9, "the study itself is untouched"


def test_a_subset_is_searched_choice_by_choice_and_read_back(tmp_path: Path) -> None:
    space = Space.parse({BUCKETS: {"subset": [1, 2, 4, 8], "always": [16]}})
    assert space.points == 16 and space.parameters[0].contains([2, 16]) and not space.parameters[0].contains([16, 2])
    assert not space.parameters[0].contains([1, 2]) and not space.parameters[0].contains(None)
    labels = space.labels({BUCKETS: [1, 8, 16]})
    assert labels == {f"{BUCKETS}[{n}]": n in (1, 8) for n in (1, 2, 4, 8)} and space.point(labels) == {
        BUCKETS: [1, 8, 16]
    }

    def cheap(config: Config) -> Record:
        assert config.asr.batch_buckets is not None
        return record(latency_p95_ms=10.0 + len(config.asr.batch_buckets) - 5 * (4 in config.asr.batch_buckets))

    spec = spec_of(
        space={BUCKETS: {"subset": [1, 2, 4, 8], "always": [16]}},
        base={"asr": {"batch_buckets": [1, 2, 16], "batching": {"enabled": True, "max_batch_size": 16}}},
        budget={"trials": 60},
    )
    result = run(spec, cheap, tmp_path)
    assert result.best is not None and result.best.params == {BUCKETS: [4, 16]} and result.trials[0].is_default
    assert len({json.dumps(t.params) for t in result.trials}) == len(result.trials) - sum(
        t.duplicate_of is not None for t in result.trials
    )
    assert yaml.safe_load(trials_csv(result).splitlines()[1].split(",", 5)[5].split('"')[1]) == [1, 2, 16]


def test_a_compared_configuration_is_also_a_trial_where_the_space_holds_it(tmp_path: Path) -> None:
    result = run(spec_of(compare={"document_example": EXAMPLE}), bowl, tmp_path)
    assert result.trials[1].params == {SIZE: 32, DELAY: 5000}
    outside = spec_of(compare={"far": {"asr": {"batching": {"max_queue_delay_us": 90_000}}}})
    assert len(run(outside, bowl, tmp_path / "b").trials) == 12


def lived(result: Any, **p95: list[float]) -> Record:
    """Real runs with these values of the first objective."""
    rows = [
        {
            "label": label,
            "round": number + 1,
            "streams": 4,
            "kept": True,
            "why": "",
            "latency_p95_ms": value,
            "late_share": 0.0,
        }
        for label, values in p95.items()
        for number, value in enumerate(values)
    ]
    return Record(
        kind="confirm", rows=rows, counters={"study": result.spec.name}, notes=["untrained weights"], environment=HOST
    )


def test_results_say_default_example_best_and_gain_with_units(tmp_path: Path) -> None:
    spec = spec_of(compare={"document_example": EXAMPLE}, budget={"trials": 20, "repeats": 2, "finalists": 3})
    result = run(spec, bowl, tmp_path)
    data = Outcome.of(result).data
    assert data["default"]["configuration"][SIZE] == 1024 and data["document_example"]["configuration"][SIZE] == 32
    assert data["default"]["twin"]["latency_p95_ms"] == pytest.approx(47.25) and data["best"]["live"] is None
    assert data["gain"]["twin_over_default_share"] == pytest.approx(
        1 - data["best"]["twin"]["latency_p95_ms"] / 47.25, abs=1e-4
    )
    assert data["headline"].startswith("On the digital twin: ") and data["noise"]["twin_again_difference_share"] == 0
    live = lived(
        result, default=[50.0, 52.0], document_example=[45.0, 45.0], best=[41.0, 39.0], best_again=[42.0, 40.0]
    )
    data = Outcome.of(result, live).data
    assert data["best"]["live"]["latency_p95_ms"] == 40 and data["best"]["live"]["single_runs"] == [41.0, 39.0]
    assert data["gain"]["live_over_default_share"] == pytest.approx(1 - 40 / 51, abs=1e-5)
    assert data["headline"] == (
        "In real runs: latency_p95_ms 40: 21.6 % less than default's 51, 11.1 % less than document example's 45"
    )
    assert data["noise"]["live_again_difference_share"] == pytest.approx(0.025)


def test_the_real_runs_choose_among_the_finalists_and_call_noise_noise(tmp_path: Path) -> None:
    result = run(spec_of(budget={"trials": 20, "repeats": 2, "finalists": 3}), bowl, tmp_path)
    second = next(t for t in result.ranked if t is not result.best)
    other = f"trial_{second.number}"
    live = lived(result, default=[50.0, 50.0], best=[49.0, 49.4], best_again=[46.0, 46.0], **{other: [44.0, 44.0]})
    outcome = Outcome.of(result, live)
    assert outcome.result.best is second and outcome.data["best"]["live"]["latency_p95_ms"] == 44
    worse = Outcome.of(result, lived(result, default=[50.0, 50.0], best=[52.0, 52.0], best_again=[52.0, 52.0]))
    assert (
        worse.result.best is result.default and "no configuration was better than the default" in worse.data["headline"]
    )
    same = Outcome.of(result, lived(result, default=[50.0, 50.0], best=[49.5, 49.5], best_again=[47.0, 47.0]))
    assert "no different from default's 50 within the noise" in same.data["headline"]
    foreign = lived(result, best=[1.0])
    foreign.counters["study"] = "another"
    assert Outcome.of(result, foreign).data["best"]["live"] is None


def test_a_study_leaves_results_trials_report_and_a_configuration_that_loads(tmp_path: Path) -> None:
    spec = spec_of(compare={"document_example": EXAMPLE}, budget={"trials": 25, "repeats": 2, "finalists": 2})
    (tmp_path / "study.yaml").write_text(
        yaml.safe_dump({"name": "try", "base": spec.base, "space": spec.space, "compare": spec.compare})
    )
    user = load_config({"asr": {"dtype": "bfloat16"}})
    result = tune(user, spec, bowl, folder=tmp_path, progress=False)
    lived(result, default=[50.0], best=[40.0], best_again=[40.5]).save(tmp_path / "live.json")
    outcome = outcome_of_study(tmp_path)
    assert outcome.data["best"]["live"]["latency_p95_ms"] == 40.0
    write_outcome(outcome, tmp_path)
    page = write_study_report(outcome, tmp_path).read_text(encoding="utf-8")
    saved = json.loads((tmp_path / "results.json").read_text())
    assert {"default", "document_example", "best", "gain", "load", "environment", "command"} <= saved.keys()
    rows = list(csv.DictReader(io.StringIO((tmp_path / "trials.csv").read_text())))
    assert len(rows) == len(result.trials) and rows[0]["default"] == "yes" and float(rows[0]["latency_p95_ms"]) == 47.25
    loaded = load_config(tmp_path / "best.yaml")
    assert loaded.asr.dtype == "bfloat16", "the configuration that the study was begun with, not that of who asks"
    assert best_of(tmp_path) == (tmp_path / "best.yaml").read_text()
    for text in (
        "In real runs: latency_p95_ms 40",
        "document example",
        "The real runs",
        "trials.csv",
        "max_batch_size",
    ):
        assert text in page
    (tmp_path / "study.db").unlink()
    assert best_of(tmp_path) == (tmp_path / "best.yaml").read_text(), "without its database, what was committed"
    (tmp_path / "best.yaml").unlink()
    with pytest.raises(StudyError, match="run it first"):
        best_of(tmp_path)


def test_where_nothing_keeps_the_limits_the_files_say_so(tmp_path: Path) -> None:
    late = spec_of(constraints=[{"number": "late_share", "at_most": 0.01}], budget={"trials": 6})
    result = run(late, lambda config: record(latency_p95_ms=5.0, late_share=0.2), tmp_path)
    outcome = Outcome.of(result)
    assert [path.name for path in write_outcome(outcome, tmp_path)] == ["results.json", "trials.csv"]
    assert outcome.data["best"] is None and outcome.data["default"]["twin"]["keeps_limits"] is False
    assert "none kept every constraint" in write_study_report(outcome, tmp_path).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_study_is_sound_and_compares_the_example(name: str) -> None:
    spec = load_study(STUDIES / name)
    default = spec.configure(Config())
    example = spec.compared(default)["document_example"].asr.batching
    assert (example.max_batch_size, example.max_queue_delay_us, example.ingress_cohort_delay_us) == (32, 5000, 20000)
    assert (example.max_queue_depth, example.offline_bucket_ms) == (2048, 1000)
    assert spec.budget.repeats >= 3 and spec.budget.trials >= 300 and spec.constraints
    assert default.asr.batching.state_arena_slots >= 2 * default.load.streams
    assert all(Path(costs).parent.resolve() == (STUDIES / "h200").resolve() for costs in spec.costs)


def test_one_study_names_its_costs_beside_itself(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(
        yaml.safe_dump({"name": "x", "space": {SIZE: {"int": [1, 1024]}}, "costs": ["../c.json"]})
    )
    assert load_study(tmp_path).costs == [str(tmp_path / "../c.json")]


def test_real_runs_without_streams_and_runs_that_were_not_measured_are_in_the_report(tmp_path: Path) -> None:
    result = run(spec_of(budget={"trials": 12, "repeats": 2, "finalists": 1}), bowl, tmp_path)
    live = lived(result, default=[50.0], best=[40.0])
    rows = [{key: value for key, value in row.items() if key != "streams"} for row in live.rows]
    rows.append({"label": "best_again", "round": 1, "kept": None, "why": "generator lagged: 9 ms"})
    live = Record(kind="confirm", rows=rows, counters=live.counters, environment=HOST)
    outcome = Outcome.of(result, live)
    assert outcome.data["noise"]["live_again_difference_share"] is None
    assert "generator lagged: 9 ms" in write_study_report(outcome, tmp_path).read_text(encoding="utf-8")
