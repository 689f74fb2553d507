"""The twin against queues whose answer is known, and against the rules that every run must keep."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from workbench.config import Config, LoadConfig, load_config, replace
from workbench.errors import ConfigError, LoadNotCarried, RecordError
from workbench.geometry import StreamGeometry
from workbench.measure.cost_table import TRAFFIC
from workbench.measure.loadgen import Schedule, build_schedule, run_record
from workbench.measure.twin import CostTable, _step_keys, simulate, twin_runner
from workbench.results import Record

GEOMETRY = StreamGeometry(56, 0)
CLIPS = [23_000, 40_000, 61_000]


def costs(per_batch: dict[int, float], spread: float = 1.0, **extra: Any) -> CostTable:
    """A table with p95 = spread × p50."""
    rows = [
        {"stage": "step", "batch": b, "shape": "steady", "ms_p50": ms, "ms_p95": spread * ms, **extra}
        for b, ms in per_batch.items()
    ]
    return CostTable.from_record(Record(kind="costs", rows=rows))


def configured(streams: int, seconds: float = 4.0, starts: str = "staggered", **batching: Any) -> Config:
    """Batching on, two arena rows per stream."""
    options = {
        "enabled": True, "max_batch_size": 8, "max_queue_delay_us": 0, "state_arena_slots": 2 * streams, **batching
    }  # fmt: skip
    return load_config(
        {"asr": {"batching": options}, "load": {"streams": streams, "seconds": seconds, "starts": starts}}
    )


def scheduled(config: Config, clips: list[int] | None = None) -> Schedule:
    """The schedule of the configuration's load."""
    return build_schedule(config.load, GEOMETRY, clips or CLIPS)


def completions(record: Record, name: str = "latency_ms") -> list[float]:
    """The stored latency distribution."""
    return [row[name] for row in record.rows]


def test_a_lone_stream_pays_the_delay_and_the_step_or_with_its_cohort_known_the_step_alone() -> None:
    config = configured(1, max_queue_delay_us=5000, state_arena_slots=8)
    schedule, table = scheduled(config, [64_000]), costs({1: 12.0})
    waiting = simulate(config, table, schedule)
    assert waiting.numbers["latency_p50_ms"] == pytest.approx(17.0)
    assert waiting.numbers["latency_p99_ms"] == pytest.approx(17.0)
    assert waiting.numbers["final_p50_ms"] == pytest.approx(12.0), "the end of an utterance waits for nobody"
    assert set(waiting.counters["reasons"]) == {"deadline", "cohort"}
    assert waiting.counters["reasons"]["cohort"] == waiting.numbers["final_n"]
    known = simulate(config, table, schedule, cohort=1)
    assert known.numbers["latency_p99_ms"] == pytest.approx(12.0)
    assert set(known.counters["reasons"]) == {"cohort"}


@pytest.mark.parametrize("enabled", [True, False])
def test_a_chunk_cut_by_the_end_shares_a_batch_with_full_ones_exactly_when_batching(enabled: bool) -> None:
    schedule = scheduled(configured(1), [7_000, 64_001])
    keys = {key for key in _step_keys(schedule, extend=enabled) if key is not None}
    assert schedule.cut.any()
    assert any(cut for _, _, cut in keys) == (not enabled)
    if enabled:
        assert {mel for mel, _, _ in keys} == {GEOMETRY.chunk(index).input_mel_frames for index in range(3)}


@pytest.mark.parametrize("extra_ms", [3.0, 11.0])
def test_a_step_slowed_by_a_known_amount_shows_up_in_every_percentile(extra_ms: float) -> None:
    config = configured(1)
    schedule = scheduled(config, [64_000])
    fast, slow = (simulate(config, costs({1: 10.0 + more}), schedule).numbers for more in (0.0, extra_ms))
    for name in ("latency_p50_ms", "latency_p95_ms", "latency_p99_ms", "final_p95_ms"):
        assert slow[name] - fast[name] == pytest.approx(extra_ms)


def test_batches_of_one_agree_with_the_recursion_of_a_single_server_queue() -> None:
    config = configured(6, seconds=8.0, max_batch_size=1)
    # 6 × 11 ms of every 80 ms: busy, and no chunk falls due before the one before it is done.
    schedule, service_s = scheduled(config, [128_000]), 0.011
    free_s, latency_ms = 0.0, []
    for due_s, mel, final in zip(schedule.due_s, schedule.mel_frames, schedule.final, strict=True):
        if mel:
            free_s = max(free_s, due_s) + service_s
            if not final:
                latency_ms.append((free_s - due_s) * 1e3)
    record = simulate(config, costs({1: 11.0}), schedule)
    for point in (50, 95, 99):
        assert record.numbers[f"latency_p{point}_ms"] == pytest.approx(np.percentile(latency_ms, point), rel=1e-6)
    assert record.numbers["busy_share"] == pytest.approx(6 * 11 / 80, abs=0.02)


def test_aligned_streams_share_one_batch_and_staggered_ones_do_not() -> None:
    table = costs({1: 5.0, 8: 8.0})
    together = configured(8, starts="aligned")
    record = simulate(together, table, scheduled(together, [48_000]))
    assert record.numbers["latency_p50_ms"] == pytest.approx(8.0)
    assert record.counters["batch_sizes"].keys() == {"8"}
    apart = configured(8, starts="staggered")
    sizes = simulate(apart, table, scheduled(apart, [48_000])).counters["batch_sizes"]
    assert sizes["1"] > sizes.get("8", 0)


def test_a_longer_delay_makes_larger_batches() -> None:
    sizes = []
    for delay_us in (0, 10_000, 40_000):
        config = configured(8, max_queue_delay_us=delay_us)
        stage = simulate(config, costs({1: 2.0, 8: 4.0}), scheduled(config)).counters
        sizes.append(stage["batch_size_mean_items"])
    assert sizes[0] < sizes[1] < sizes[2]


@settings(max_examples=60, deadline=None)
@given(
    streams=st.integers(1, 9),
    cap=st.integers(1, 12),
    delay_us=st.sampled_from([0, 500, 5000, 50_000, 300_000]),
    depth=st.sampled_from([64, 2048]),
    step_ms=st.sampled_from([0.5, 9.0, 45.0]),
    starts=st.sampled_from(["staggered", "aligned"]),
    seed=st.integers(0, 5),
)
def test_every_chunk_completes_once_in_the_order_of_its_stream(
    streams: int, cap: int, delay_us: int, depth: int, step_ms: float, starts: str, seed: int
) -> None:
    config = configured(streams, 2.0, starts, max_batch_size=cap, max_queue_delay_us=delay_us, max_queue_depth=depth)
    schedule = build_schedule(LoadConfig(streams=streams, seconds=2.0, starts=starts, seed=seed), GEOMETRY, CLIPS)  # type: ignore[arg-type]
    seen: dict[str, Any] = {}

    def keep(kind: str, config: Config, schedule: Schedule, times: Any, stage: Any, host: Any) -> Record:
        seen["completed"] = np.asarray(times[1])
        return run_record(kind, config, schedule, times, stage, host)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.measure.twin.run_record", keep)
        record = simulate(config, costs({1: step_ms, 8: 2 * step_ms}, spread=1.3), schedule)
    completed, stage = seen["completed"], record.counters
    for utterance in schedule.utterances:
        assert np.all(np.diff(completed[schedule.utterance == utterance.index]) >= 0)
    work = schedule.mel_frames > 0
    assert np.all(completed[work] - schedule.due_s[work] >= step_ms * 1e-3 - 1e-9)
    assert stage["items"] == work.sum() == sum(int(size) * count for size, count in stage["batch_sizes"].items())
    assert sum(stage["reasons"].values()) == stage["batches"] == stage["finished_batches"]
    assert stage["batch_size_max_items"] <= cap
    assert 0 < record.numbers["busy_share"] <= 1


def test_a_full_queue_ends_the_run_as_it_does_live() -> None:
    config = configured(8, starts="aligned", max_batch_size=4, max_queue_depth=4)
    with pytest.raises(RecordError, match=r"QueueFull at .* does not carry 8 streams"):
        simulate(config, costs({1: 5.0, 8: 8.0}), scheduled(config, [48_000]))
    deeper = configured(8, starts="aligned", max_batch_size=4, max_queue_depth=8)
    assert simulate(deeper, costs({1: 5.0, 8: 8.0}), scheduled(deeper, [48_000])).counters["rejected_items"] == 0


def test_the_same_inputs_give_the_same_record_and_the_seed_changes_the_draws() -> None:
    config = configured(4)
    schedule, table = scheduled(config), costs({1: 10.0, 8: 15.0}, spread=1.5)
    first, again = simulate(config, table, schedule), simulate(config, table, schedule)
    assert first.numbers == again.numbers and first.rows == again.rows and first.counters == again.counters
    other = load_config({"asr": {"batching": {"enabled": True}}, "load": {"streams": 4, "seconds": 4.0, "seed": 1}})
    assert simulate(other, table, schedule).numbers["latency_p50_ms"] != first.numbers["latency_p50_ms"]


def test_batching_off_is_one_stream_at_a_time_with_no_wait() -> None:
    config = configured(4, enabled=False, max_queue_delay_us=50_000)
    stage = simulate(config, costs({1: 3.0}), scheduled(config)).counters
    assert stage["batch_sizes"].keys() == {"1"} and stage["queue_wait_p50_ms"] < 3.0


def test_more_streams_than_rows_are_refused_with_the_key() -> None:
    config = configured(5, state_arena_slots=9)
    with pytest.raises(ConfigError, match=r"state_arena_slots: got 9 for load\.streams = 5; allowed is at least 10"):
        simulate(config, costs({1: 1.0}), scheduled(config))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"streams": 100_000}, "allowed is at least 200000"),
        ({"streams": 30_000, "seconds": 3600.0}, "the twin simulates at most"),
    ],
)
def test_a_load_beyond_reason_is_refused_before_its_schedule_is_built(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.measure.twin.build_schedule", lambda *_: pytest.fail("a schedule was built"))
    config = load_config({"asr": {"batching": {"state_arena_slots": 65536}}, "load": changes})
    with pytest.raises(ConfigError, match=message):
        twin_runner(costs({1: 1.0}), GEOMETRY, CLIPS)(config)


def graphed(streams: int, buckets: list[int] | None, **options: Any) -> Config:
    """The steady step as CUDA graphs of these batch sizes."""
    return replace(configured(streams, **options), **{"asr.cuda_graphs": True, "asr.batch_buckets": buckets})


def test_a_graphed_batch_costs_its_bucket_and_the_padding_is_counted() -> None:
    table = costs({1: 2.0, 8: 9.0})
    config = graphed(3, [8], seconds=6.0, starts="aligned")
    schedule = scheduled(config, [96_000])
    padded = simulate(config, table, schedule)
    exact = simulate(graphed(3, [1, 2, 3, 8], seconds=6.0, starts="aligned"), table, schedule)
    eager = simulate(configured(3, seconds=6.0, starts="aligned"), table, schedule)
    assert padded.numbers["latency_p50_ms"] == pytest.approx(9.0) and padded.counters["padding_rows"] > 0
    assert exact.numbers["latency_p50_ms"] == pytest.approx(4.0) == eager.numbers["latency_p50_ms"]
    assert exact.counters["padding_rows"] == 0 == eager.counters["padding_rows"]
    steady = padded.counters["items"] - 3  # the first chunk of each stream never runs as a graph
    assert padded.numbers["padding_rows_share"] == pytest.approx(5 / 8 * steady / (3 / 8 * 3 + steady), rel=0.05)
    assert (padded.numbers["graphs"], exact.numbers["graphs"]) == (1, 4) and "graphs" not in eager.numbers
    with pytest.raises(ConfigError, match="batch ladder: got a top of 4; allowed is 8"):
        simulate(graphed(4, [1, 4]), table, schedule)


def test_what_capturing_the_ladder_takes_is_told_where_it_was_measured() -> None:
    rows: list[dict[str, Any]] = [{"stage": "step", "batch": 1, "shape": "steady", "ms_p50": 1.0, "ms_p95": 1.0}]
    rows += [
        {"stage": "capture", "batch": b, "capture_ms": 100.0 + b, "bytes": b * 2**20, "pool_bytes": 2**23}
        for b in (1, 4, 8)
    ]
    table = CostTable.from_record(Record(kind="costs", rows=rows))
    config = graphed(2, [1, 2, 16], seconds=2.0)
    numbers = simulate(config, table, scheduled(config)).numbers
    assert numbers["graph_memory_mib"] == pytest.approx(1 + 2 + 16 + 2 * 8)
    assert numbers["graph_capture_ms"] == pytest.approx(101 + 102 + 2 * 108)
    assert "graph_memory_mib" not in simulate(config, costs({1: 1.0}), scheduled(config)).numbers
    assert table.digest() != costs({1: 1.0}).digest()


@pytest.mark.parametrize("name", TRAFFIC)
def test_costs_that_differ_in_what_traffic_adds_are_not_pooled(name: str) -> None:
    rows = [{"stage": "step", "batch": 1, "shape": "steady", "ms_p50": 1.0, "ms_p95": 1.0}]
    found = [
        CostTable.from_record(Record(kind="costs", rows=rows, numbers={name: us})).digest() for us in (0.0, 1.0, 2.0)
    ]
    assert len(set(found)) == 3 and found[0] == costs({1: 1.0}).digest()


def handed_over(ms: float, **microseconds: float) -> CostTable:
    """One step whatever the batch, and what handing a batch over takes a worker."""
    rows = [{"stage": "step", "batch": b, "shape": "steady", "ms_p50": ms, "ms_p95": ms} for b in (1, 8)]
    return CostTable.from_record(Record(kind="costs", rows=rows, numbers=microseconds))


def test_an_idle_worker_begins_a_dispatch_after_a_batch_may_leave_and_takes_who_came_meanwhile() -> None:
    config = configured(1)
    schedule = scheduled(config, [64_000])
    assert simulate(config, handed_over(10.0, dispatch_us=700.0), schedule).numbers["latency_p99_ms"] == pytest.approx(
        10.7
    )
    waiting = replace(config, **{"asr.batching.max_queue_delay_us": 5000})
    assert simulate(waiting, handed_over(10.0, dispatch_us=700.0), schedule).numbers["latency_p99_ms"] == pytest.approx(
        15.7
    )
    crowd = configured(6, seconds=8.0)
    alike = scheduled(crowd, [128_000])
    sizes = [
        simulate(crowd, handed_over(1.0, dispatch_us=us), alike).counters["batch_size_mean_items"]
        for us in (0.0, 20_000.0)
    ]
    assert sizes[1] > 1.5 * sizes[0]


def test_a_busy_worker_turns_around_before_its_next_batch_and_an_idle_one_does_not() -> None:
    """Two streams due at the same moment, one a batch: the second waits for the first, and for the worker to come back."""
    config = configured(2, starts="aligned", max_batch_size=1)
    schedule = scheduled(config, [64_000])
    table = handed_over(10.0, dispatch_us=300.0, turnaround_us=2000.0)
    found = np.asarray(completions(simulate(config, table, schedule)))
    assert found.min() == pytest.approx(10.3) and found.max() == pytest.approx(10.3 + 2.0 + 10.0)


def test_callers_take_turns_so_that_one_interpreter_bounds_the_chunks_a_second_whatever_the_device_does() -> None:
    """Steps that take no time: a chunk is done when its caller had its turn, which a recursion over the due times tells."""
    config = configured(8, max_batch_size=1)
    schedule, table = scheduled(config, [64_000]), handed_over(1e-6, handover_us=4000.0)
    turns, handed_s = [], -1.0
    for due in schedule.due_s.tolist():
        handed_s = max(due, handed_s + 0.004)
        turns.append(handed_s - due)
    waited_ms = 1e3 * np.asarray(turns)[~schedule.final]
    assert waited_ms.max() > 1.0
    found = simulate(config, table, schedule).numbers
    assert found["latency_p95_ms"] == pytest.approx(float(np.percentile(waited_ms, 95)), abs=1e-3)
    # 100 chunks a second of 4 ms leave room; of 11 ms, or of 4 ms and 7 ms for each result, they do not.
    late = [
        simulate(config, handed_over(1e-6, **taken), schedule).numbers["late_share"]
        for taken in (
            {"handover_us": 4000.0},
            {"handover_us": 11_000.0},
            {"handover_us": 4000.0, "wake_us_per_item": 7000.0},
        )
    ]
    assert late[0] == 0.0 and min(late[1:]) > 0.5
    alone = simulate(
        replace(config, **{"asr.batching.enabled": False, "load.streams": 1}), table, scheduled(configured(1))
    )
    assert alone.numbers["latency_p99_ms"] < 0.1  # without batching the caller is the worker


@given(
    streams=st.integers(1, 6),
    delay_us=st.sampled_from([0, 3000, 20_000]),
    dispatch_us=st.floats(0, 3000),
    turnaround_us=st.floats(0, 3000),
    cap=st.integers(1, 8),
)
@settings(max_examples=40, deadline=None)
def test_handing_over_loses_nothing_and_never_makes_a_lone_stream_faster(
    streams: int, delay_us: int, dispatch_us: float, turnaround_us: float, cap: int
) -> None:
    config = configured(streams, seconds=2.0, max_queue_delay_us=delay_us, max_batch_size=cap)
    schedule = scheduled(config)
    plain = simulate(config, handed_over(4.0), schedule)
    found = simulate(config, handed_over(4.0, dispatch_us=dispatch_us, turnaround_us=turnaround_us), schedule)
    assert found.counters["items"] == plain.counters["items"]
    assert found.numbers["latency_n"] == plain.numbers["latency_n"] and min(completions(found)) >= 4.0 - 1e-6
    if streams == 1:
        assert all(a >= b - 1e-6 for a, b in zip(completions(found), completions(plain), strict=True))


@given(
    streams=st.integers(1, 8),
    seconds=st.sampled_from([0.01, 0.5, 1.5]),
    options=st.fixed_dictionaries(
        {
            "max_queue_delay_us": st.sampled_from([0, 3000, 200_000]),
            "max_batch_size": st.integers(1, 8),
            "max_queue_depth": st.sampled_from([1, 8, 64]),
            "ingress_cohort_delay_us": st.sampled_from([0, 40_000]),
            "enabled": st.booleans(),
        }
    ),
    dispatch_us=st.sampled_from([0, 300, 10_000_000]),
    turnaround_us=st.sampled_from([0, 300, 10_000_000]),
    handover_us=st.sampled_from([0, 300, 10_000_000]),
    wake_us_per_item=st.sampled_from([0, 300, 10_000_000]),
    coordinated=st.booleans(),
    aligned=st.booleans(),
    cohort=st.integers(0, 4),
)
@example(
    streams=4, seconds=0.5, dispatch_us=0, turnaround_us=0, handover_us=0, wake_us_per_item=10_000_000, coordinated=False, aligned=False, cohort=0,
    options={"max_queue_delay_us": 3000, "max_batch_size": 2, "max_queue_depth": 8, "ingress_cohort_delay_us": 0, "enabled": True},
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_however_long_handing_over_takes_a_run_ends_and_every_row_in_its_order(
    streams: int, seconds: float, options: dict[str, Any], dispatch_us: float, turnaround_us: float,
    handover_us: float, wake_us_per_item: float, coordinated: bool, aligned: bool, cohort: int,
) -> None:  # fmt: skip
    config = configured(streams, seconds, "aligned" if aligned else "staggered", **options)
    config = replace(config, **{"load.coordinated": coordinated})
    schedule, seen = scheduled(config), dict[str, Any]()

    def keep(kind: str, config: Config, schedule: Schedule, times: Any, stage: Any, host: Any) -> Record:
        seen["completed"] = np.asarray(times[1])
        return run_record(kind, config, schedule, times, stage, host)

    table = handed_over(
        4.0,
        dispatch_us=dispatch_us,
        turnaround_us=turnaround_us,
        handover_us=handover_us,
        wake_us_per_item=wake_us_per_item,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("workbench.measure.twin.run_record", keep)
        try:
            record = simulate(config, table, schedule, cohort)
        except LoadNotCarried as refused:
            assert "QueueFull at" in str(refused)
            return
    completed = seen["completed"]
    assert np.all(completed >= schedule.due_s) and record.counters["items"] == np.sum(schedule.mel_frames > 0)
    for utterance in schedule.utterances:
        assert np.all(np.diff(completed[schedule.utterance == utterance.index]) >= 0)


def test_coordinated_streams_wait_for_each_other_and_lone_ones_do_not() -> None:
    table = costs({1: 2.0, 8: 3.0})
    alone = replace(configured(1, ingress_cohort_delay_us=30_000), **{"load.coordinated": True})
    assert simulate(alone, table, scheduled(alone, [96_000])).numbers["latency_p99_ms"] == pytest.approx(2.0)
    config = configured(6, seconds=8.0, ingress_cohort_delay_us=40_000)
    schedule = scheduled(config, [128_000])
    apart = simulate(config, table, schedule)
    together = simulate(replace(config, **{"load.coordinated": True}), table, schedule)
    assert together.counters["batch_size_mean_items"] > 1.5 * apart.counters["batch_size_mean_items"]
    assert together.numbers["latency_p95_ms"] > apart.numbers["latency_p95_ms"]
    assert together.numbers["latency_p99_ms"] <= 40.0 + 6 * 3.0, "the window bounds the wait"
    assert together.counters["ingress_reasons"] and "ingress_reasons" not in apart.counters
    assert together.counters["items"] == apart.counters["items"]


def test_a_run_has_the_names_of_every_run_and_says_what_was_guessed() -> None:
    config = configured(8, max_queue_delay_us=80_000, max_batch_size=16)
    schedule = scheduled(config)
    record = simulate(config, costs({1: 2.0, 2: 3.0}), schedule)
    real = run_record("paced", config, schedule, (schedule.due_s, schedule.due_s + 0.01), {})
    assert real.numbers.keys() <= record.numbers.keys() and real.rows[0].keys() == record.rows[0].keys()
    assert record.kind == "twin" and record.config["load"]["streams"] == 8
    assert 0 < record.numbers["extrapolated_share"] < 1
    assert "beyond the measured batch sizes" in record.notes[0]
    assert completions(record) == sorted(completions(record))


def test_costs_between_measured_sizes_are_interpolated_and_beyond_them_extended() -> None:
    table = costs({2: 10.0, 4: 14.0, 8: 16.0})
    middle = {batch: float(table.quantiles_ms("steady", batch)[128]) for batch in (1, 2, 3, 4, 6, 8, 16)}
    assert middle == pytest.approx({1: 8.0, 2: 10.0, 3: 12.0, 4: 14.0, 6: 15.0, 8: 16.0, 16: 20.0})
    assert [table.covers("steady", batch) for batch in (1, 2, 5, 8, 9)] == [False, True, True, True, False]
    falling = costs({4: 10.0, 8: 9.0})  # noise: never cheaper than the largest measured batch
    assert falling.quantiles_ms("steady", 64)[0] == pytest.approx(9.0)
    single = costs({4: 10.0})
    assert single.quantiles_ms("steady", 8)[0] == pytest.approx(20.0)
    assert single.quantiles_ms("steady", 1)[0] == pytest.approx(10.0)


def test_the_spread_of_the_samples_is_kept() -> None:
    samples = np.random.default_rng(0).gamma(4.0, 2.0, 500)
    table = costs({1: 1.0, 2: 1.0}, samples_ms=samples.tolist())
    assert np.percentile(table.quantiles_ms("steady", 1), [5, 50, 95]) == pytest.approx(
        np.percentile(samples, [5, 50, 95]), rel=0.02
    )
    config = configured(1, seconds=60.0)
    numbers = simulate(config, table, scheduled(config)).numbers
    assert numbers["latency_p50_ms"] == pytest.approx(np.percentile(samples, 50), rel=0.1)
    assert numbers["latency_p95_ms"] == pytest.approx(np.percentile(samples, 95), rel=0.1)
    percentiles_only = costs({1: 10.0}, spread=1.9).quantiles_ms("steady", 1)
    assert np.quantile(percentiles_only, [0.1, 0.5, 0.95]) == pytest.approx([10.0, 10.0, 19.0], rel=1e-3)


def test_the_kind_of_a_step_decides_its_cost() -> None:
    shapes = {"first": 1, "second": 9, "steady": 17, "cut": 13}
    rows = [
        {"stage": "step", "batch": 1, "shape": shape, "mel_frames": mel, "ms_p50": 1.0, "ms_p95": 1.0}
        for shape, mel in shapes.items()
    ]
    table = CostTable.from_record(Record(kind="costs", rows=rows))
    schedule = build_schedule(LoadConfig(streams=2, seconds=3.0), GEOMETRY, [20_000])
    seen = {
        table.shape_for((mel, drop, cut))
        for mel, drop, cut in zip(
            schedule.mel_frames.tolist(), schedule.drop_encoded.tolist(), schedule.cut.tolist(), strict=True
        )
        if mel
    }
    assert seen == set(shapes)
    assert table.shape_for((9, 1, False)) == "second" and table.shape_for((9, 1, True)) == "cut"
    later = CostTable(table.curves, {**shapes, "second": 41, "steady": 41})  # r = 3: the second step is a steady one
    assert later.shape_for((41, 2, False)) == "steady" and later.shape_for((25, 0, False)) == "first"
    assert {costs({1: 1.0}).shape_for(key) for key in ((1, 0, False), (14, 2, True))} == {"steady"}
    only_first = CostTable({"first": table.curves["first"]}, {})
    assert only_first.shape_for((14, 2, True)) == "first"


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("paced", {}, "kind 'paced'"),
        ("costs", {"stage": "decoder"}, "no rows of stage 'step'; the record has decoder"),
        ("costs", {"ms_p50": 0.0, "ms_p95": 0.0}, "not positive"),
        ("costs", {"samples_ms": [1.0, float("nan")]}, "not positive"),
        ("costs", {"batch": 0}, "not positive"),
    ],
)
def test_a_record_that_is_no_cost_table_is_refused(kind: str, row: dict[str, Any], message: str) -> None:
    whole = {"stage": "step", "batch": 1, "shape": "steady", "ms_p50": 1.0, "ms_p95": 1.0, **row}
    with pytest.raises(RecordError, match=message):
        CostTable.from_record(Record(kind=kind, rows=[whole]))


def test_a_fingerprint_changes_with_any_measurement() -> None:
    assert costs({1: 1.0, 2: 2.0}).digest() == costs({1: 1.0, 2: 2.0}).digest()
    assert costs({1: 1.0, 2: 2.0}).digest() != costs({1: 1.0, 2: 2.1}).digest()


@pytest.mark.parametrize("module", ["measure.loadgen", "measure.twin"])
def test_no_gpu_library_is_loaded(module: str) -> None:
    code = f"import sys, workbench.{module}; print([m for m in ('torch', 'nemo', 'matplotlib', 'optuna') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
