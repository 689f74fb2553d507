"""The capacity search against engines whose limit is known, and NeMo's own loop against the recogniser."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ArenaFull, ConfigError, GeneratorLagged, LoadNotCarried, QueueFull, StepTimeout
from workbench.measure.capacity import (
    SAMPLES_FOR_P99,
    CapacityRule,
    LevelRun,
    SearchPlan,
    find_capacity,
    late_share_upper,
    next_level,
)
from workbench.results import Record

RULE = CapacityRule(seconds=120)


def outcome(late=0, chunks=1000, final_ms=100.0):
    """A record of one run."""
    numbers = {
        **{"late_chunks": late, "late_share": late / chunks, "latency_n": chunks - 10, "final_n": 10},
        **{"latency_p50_ms": 5.0, "latency_p95_ms": 9.0, "latency_p99_ms": 12.0, "final_p50_ms": 6.0},
        **{"final_p95_ms": final_ms, "generator_late_p99_ms": 0.1},
    }
    return Record("paced", numbers=numbers, counters={"batch_size_mean_items": 2.0}, environment={})


def limited(limit):
    """An engine that carries exactly `limit` streams."""
    return lambda streams: outcome(late=0 if streams <= limit else 500)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000))
def test_the_limit_is_found_exactly_from_any_start(limit, start):
    plan = SearchPlan(start=start, resolution=1e-9, repeats=1, most_runs=60)
    record = find_capacity(limited(limit), RULE, plan)
    assert record.numbers["capacity_streams"] == limit
    assert record.numbers["first_failed_streams"] == limit + 1
    assert len(record.rows) <= 2 * np.log2(5000) + 4
    assert record.counters["ended"] == "complete"


def test_the_resolution_ends_the_search_and_the_passing_level_is_run_again():
    asked = []

    def run_at(streams):
        asked.append(streams)
        return outcome(late=0 if streams <= 1000 else 500)

    record = find_capacity(run_at, RULE, SearchPlan(start=8, resolution=0.05, repeats=3))
    capacity, failed = record.numbers["capacity_streams"], record.numbers["first_failed_streams"]
    assert capacity <= 1000 < failed <= capacity * 1.05 + 1
    assert asked.count(capacity) == 3 == record.numbers["runs_at_capacity"]
    assert record.numbers["chunks_observed"] == 3000


def test_no_stream_at_all_and_more_than_is_allowed():
    record = find_capacity(limited(0), RULE, SearchPlan(start=8))
    assert record.numbers["capacity_streams"] == 0 and [row["streams"] for row in record.rows] == [8, 4, 2, 1]
    record = find_capacity(limited(10_000), RULE, SearchPlan(start=8, most_streams=50, repeats=1))
    assert record.numbers["capacity_streams"] == 50 and record.numbers["first_failed_streams"] is None
    assert record.counters["ended"] == "most_streams" and any("limit is not known" in note for note in record.notes)


def test_a_passing_level_that_fails_when_run_again_does_not_count():
    seen = dict[int, int]()

    def run_at(streams):
        seen[streams] = seen.get(streams, 0) + 1
        lucky = streams == 64 and seen[64] == 1
        return outcome(late=0 if streams <= 50 or lucky else 500)

    record = find_capacity(run_at, RULE, SearchPlan(start=32, resolution=0.02))
    assert record.numbers["capacity_streams"] == 50
    assert any(note.startswith("noise: 64") for note in record.notes)


@pytest.mark.parametrize("refusal", [QueueFull, ArenaFull, StepTimeout, LoadNotCarried])
def test_a_refused_level_has_failed_with_its_reason(refusal):
    def run_at(streams):
        if streams > 20:
            raise refusal("no room")
        return outcome()

    record = find_capacity(run_at, RULE, SearchPlan(start=8, resolution=0.01))
    assert record.numbers["capacity_streams"] == 20
    assert {row["why"] for row in record.rows if row["passed"] == "no"} == {f"{refusal.__name__}: no room"}


def test_a_lagging_generator_bounds_the_search_and_is_nobodys_failure():
    def run_at(streams):
        if streams > 20:
            raise GeneratorLagged("generator lagged: 30 ms")
        return outcome()

    record = find_capacity(run_at, RULE, SearchPlan(start=8))
    assert [row["streams"] for row in record.rows] == [8, 16, 32, 32]
    assert [row["passed"] for row in record.rows] == ["yes", "yes", "not measured", "not measured"]
    assert record.numbers["capacity_streams"] == 16 and record.numbers["first_failed_streams"] is None
    assert record.counters["ended"] == "generator" and any("is the generator's" in note for note in record.notes)
    record = find_capacity(run_at, RULE, SearchPlan(start=64))
    assert [row["streams"] for row in record.rows] == [64, 64, 32, 32, 16]
    assert record.numbers["capacity_streams"] == 16


def test_a_generator_that_lagged_once_is_asked_again():
    lagged = []

    def run_at(streams):
        if streams == 16 and not lagged:
            lagged.append(streams)
            raise GeneratorLagged("once")
        return outcome(late=0 if streams <= 20 else 500)

    assert find_capacity(run_at, RULE, SearchPlan(resolution=0.01)).numbers["capacity_streams"] == 20


def test_an_interrupted_or_stopped_search_keeps_its_levels():
    def run_at(streams):
        if streams == 32:
            raise KeyboardInterrupt
        return outcome()

    record = find_capacity(run_at, RULE)
    assert record.counters["ended"] == "interrupted" and [row["streams"] for row in record.rows] == [8, 16]
    assert record.numbers["capacity_streams"] == 16
    kept = []
    record = find_capacity(
        limited(90), RULE, on_level=lambda so_far, run: kept.append(so_far), go_on=lambda: len(kept) < 3
    )
    assert record.counters["ended"] == "budget" and len(kept) == 3 == len(record.rows)
    assert [len(so_far.rows) for so_far in kept] == [1, 2, 3]


def test_wrong_input_is_not_a_failed_level():
    def run_at(streams):
        raise ConfigError("asr.model: nonsense")

    with pytest.raises(ConfigError):
        find_capacity(run_at, RULE)
    for wrong in ({"start": 0}, {"resolution": 0.0}, {"repeats": 0}, {"start": 9, "most_streams": 8}):
        with pytest.raises(ConfigError):
            SearchPlan(**wrong)
    for wrong in ({"seconds": 0}, {"late_share_max": 1.0}, {"final_p95_max_ms": 0}):
        with pytest.raises(ConfigError):
            CapacityRule(**wrong)


def test_each_part_of_the_rule_can_fail_a_level():
    assert RULE.broken_by(outcome(late=1).numbers) == []
    assert "late by one chunk" in RULE.broken_by(outcome(late=2).numbers)[0]
    assert "final p95 1001 ms" in RULE.broken_by(outcome(final_ms=1001).numbers)[0]
    assert len(RULE.broken_by(outcome(late=2, final_ms=2000).numbers)) == 2


def test_a_short_run_says_so_and_the_record_is_json(tmp_path):
    record = find_capacity(limited(3), CapacityRule(seconds=10))
    assert any(note.startswith("short runs: 10 s") for note in record.notes)
    record.save(tmp_path / "capacity.json")
    assert json.loads((tmp_path / "capacity.json").read_text())["kind"] == "capacity"
    assert not any("short runs" in note for note in find_capacity(limited(3), RULE).notes)


def test_the_bound_on_the_late_share_is_the_exact_one():
    from scipy.stats import beta

    for late, chunks in ((0, SAMPLES_FOR_P99), (0, 10), (1, 1000), (7, 5000), (300, 100_000), (40, 41)):
        assert late_share_upper(late, chunks) == pytest.approx(beta.ppf(0.99, late + 1, chunks - late), rel=1e-6)
    assert late_share_upper(0, SAMPLES_FOR_P99) <= 0.01 < late_share_upper(0, SAMPLES_FOR_P99 - 1)
    assert late_share_upper(5, 5) == 1.0


def test_the_next_level_is_a_pure_function_of_the_runs():
    runs = [LevelRun(8, True), LevelRun(16, False)]
    assert next_level(runs, SearchPlan()) == next_level(runs, SearchPlan()) == 12


@pytest.fixture(scope="module")
def small():
    """A model whose blank wins about half of the frames, and clips of it."""
    from small_models import rnnt, shipped_clips

    return rnnt(), shipped_clips(3)


def test_nemos_own_loop_recognises_what_the_recogniser_does(small):
    from small_models import alone, recognizer_for

    from workbench.measure.nemo_loop import NemoLoop, nemo_model

    model, clips = small
    with recognizer_for(model, "asr.batching.state_arena_slots=4") as recognizer:
        expected = [alone(recognizer, clip)[0] for clip in clips]
    assert any(expected)
    with nemo_model(model, max_symbols=3, decoder_graphs=False):
        loop = NemoLoop(model, 4)
        speakers = [loop.speaker(clip) for clip in clips]
        while any(speaker.buffer.next_chunk() is not None for speaker in speakers):
            groups = {}
            for speaker in speakers:
                if speaker.buffer.next_chunk() is not None:
                    item = loop.item(speaker)
                    groups.setdefault(item.key, []).append((speaker, item))
            for group in groups.values():
                loop.step([speaker for speaker, _ in group], [item for _, item in group])
    found = [tuple(int(label) for label in speaker.hypothesis.y_sequence) for speaker in speakers]
    assert found == expected


@pytest.mark.parametrize("engine", ["pipeline", "nemo-loop"])
def test_a_level_of_each_engine_is_measured_by_the_same_names(small, engine):
    from workbench.config import load_config
    from workbench.measure.capacity_engines import EngineSpec, model_levels

    model, clips = small
    config = load_config({}, ["asr.model=tiny", "asr.max_symbols=3", "asr.device=cpu", "asr.batching.max_batch_size=4"])
    rule = CapacityRule(seconds=1.5, late_share_max=0.99)
    run_at = model_levels(EngineSpec(engine, config), rule, model, clips)
    record = find_capacity(run_at, rule, SearchPlan(start=1, most_streams=2, repeats=1))
    measured = [row for row in record.rows if row["passed"] != "not measured"]
    for row in measured:
        assert row["chunks"] > 10 and row["latency_p95_ms"] > 0 and row["batch_size_mean_items"] >= 1
    assert measured or all("generator lagged" in row["why"] for row in record.rows)


def test_an_overloaded_level_gives_up_and_leaves_the_model_usable(small):
    from workbench.config import load_config
    from workbench.measure.capacity_engines import EngineSpec, model_levels

    model, clips = small
    config = load_config({}, ["asr.model=tiny", "asr.device=cpu", "asr.batching.max_batch_size=1"])
    rule = CapacityRule(seconds=2.0)
    run_at = model_levels(EngineSpec("nemo-loop", config), rule, model, clips)
    with pytest.raises(LoadNotCarried, match="late by one chunk"):
        run_at(200)
    pipeline = model_levels(EngineSpec("pipeline", config), rule, model, clips)
    with pytest.raises((LoadNotCarried, GeneratorLagged)):
        pipeline(200)
    relaxed = CapacityRule(seconds=1.0, late_share_max=0.99)
    assert model_levels(EngineSpec("nemo-loop", config), relaxed, model, clips)(1).numbers["latency_n"] > 3
