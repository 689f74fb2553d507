"""Costs in traffic: what the workers were busy for, not what a lone loop takes; and the twin beside real runs."""

from __future__ import annotations

import dataclasses
import math
import time
from types import SimpleNamespace

import pytest
from small_models import recognizer_for, rnnt, shipped_clips

from workbench.config import LoadConfig, load_config
from workbench.errors import ConfigError, GeneratorLagged, RecordError, StepTimeout
from workbench.geometry import StreamGeometry
from workbench.measure.cost_table import CostTable
from workbench.measure.costs import measure_costs
from workbench.measure.loadgen import build_schedule
from workbench.measure.paced import PacedOptions, run_paced
from workbench.measure.traffic_costs import ENOUGH, UNTOLD, TrafficWatch, traffic_costs
from workbench.measure.twin import simulate
from workbench.measure.twin_check import Batching, TwinCheck, check_twin
from workbench.results import Record
from workbench.runtime.encoding import step_key

BATCHED = ("asr.batching.enabled=true", "asr.batching.max_queue_delay_us=0", "asr.batching.state_arena_slots=8")
KINDS = ("first", "second", "steady")


@pytest.fixture(scope="module")
def model():
    return rnnt()


@pytest.fixture(scope="module")
def clips():
    return shipped_clips(3)


@pytest.fixture(scope="module")
def lone(model, clips):
    """Costs of the small model in a lone loop."""
    with recognizer_for(model, *BATCHED, slots=1) as recognizer:
        return measure_costs(recognizer, clips, (1, 2), 4, kinds=KINDS)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_step_slowed_in_traffic_costs_more_by_that_much(model, clips, lone, slots):
    slow_s = 0.03
    with recognizer_for(model, *BATCHED, slots=slots) as recognizer:
        plain = recognizer.stage.run

        def slowed(items):
            time.sleep(slow_s)
            return plain(items)

        recognizer.stage.run = slowed
        costs = traffic_costs(recognizer, clips, lone, [LoadConfig(streams=1, seconds=3.0)])
        assert recognizer.pipeline.workers.watch is None
    rows = {(row["shape"], row["batch"]): row for row in costs.rows}
    assert set(rows) == {(row["shape"], row["batch"]) for row in lone.rows}
    measured = rows["steady", 1]
    assert min(measured["samples_ms"]) > 1e3 * slow_s and len(measured["samples_ms"]) >= ENOUGH
    assert costs.numbers["traffic_over_lone"] > 1
    unseen, before = rows["steady", 2], next(r for r in lone.rows if (r["shape"], r["batch"]) == ("steady", 2))
    assert unseen["ms_p50"] == pytest.approx(before["ms_p50"] * costs.numbers["traffic_over_lone"], rel=1e-3)
    assert (costs.numbers["wake_us_per_item"] > 0) == (slots > 1)
    assert costs.numbers["dispatch_us"] > 0
    assert (costs.numbers["handover_us"] > 0) == (UNTOLD not in costs.notes)
    # On a busy machine the generator may lag, which the record then says.
    assert (costs.numbers["arrival_delay_us"] > 0) == (UNTOLD not in costs.notes)
    assert CostTable.from_record(costs).wake_s == pytest.approx(1e-6 * costs.numbers["wake_us_per_item"])


def test_costs_in_traffic_need_batching_and_batches(model, clips, lone):
    with recognizer_for(model) as recognizer, pytest.raises(ConfigError, match="batching workers"):
        traffic_costs(recognizer, clips, lone, [LoadConfig(streams=1, seconds=1.0)])
    with recognizer_for(model, *BATCHED) as recognizer, pytest.raises(ConfigError, match="often enough"):
        traffic_costs(recognizer, clips, lone, [])


def test_callers_of_one_batch_learn_of_it_one_after_the_other():
    rows = [{"stage": "step", "batch": 1, "shape": "steady", "ms_p50": 10.0, "ms_p95": 10.0}]
    batching = {"enabled": True, "max_queue_delay_us": 0}
    load = {"streams": 4, "starts": "aligned", "seconds": 2.0}
    config = load_config({"asr": {"batching": batching}, "load": load})
    schedule = build_schedule(config.load, StreamGeometry(56, 0), [32_000])
    p99 = []
    for numbers in ({}, {"wake_us_per_item": 500.0}, {"arrival_delay_us": 700.0}, {"after_idle_us": 900.0}):
        costs = CostTable.from_record(Record("costs", numbers=numbers, rows=rows))
        p99.append(simulate(config, costs, schedule).numbers["latency_p99_ms"])
    assert p99[1] - p99[0] == pytest.approx(4 * 0.5)
    assert p99[2] - p99[0] == pytest.approx(0.7)
    assert p99[3] - p99[0] == pytest.approx(0.9)  # one batch a chunk: the worker was idle before each


def test_what_a_step_takes_longer_on_an_idle_worker_is_told_apart(model, lone):
    """Two batches of one stream in a row, the first on an idle worker: 12 ms, then 10 ms; in the record both are 10 ms."""
    with recognizer_for(model, *BATCHED, slots=1) as recognizer:
        watch = TrafficWatch(recognizer)
        key = step_key(model.geometry, model.geometry.chunk(5))
    for number in range(2 * ENOUGH):
        begun_s = 0.08 * number
        for busy_s in (0.012, 0.010):
            batch = SimpleNamespace(key=key, items=[object()], reason="drain", formed_at=begun_s, waited_s=[0.0])
            watch("step", batch, (begun_s, 0.0, begun_s + busy_s, begun_s + busy_s))
            begun_s += busy_s
    costs = watch.corrected(lone)
    # The very first begins on a worker whose past is not known.
    assert costs.numbers["after_idle_us"] == pytest.approx(2000.0)
    steady = next(row for row in costs.rows if (row["shape"], row["batch"]) == ("steady", 1))
    assert steady["ms_p50"] == pytest.approx(10.0)
    assert CostTable.from_record(costs).after_idle_s == pytest.approx(0.002)


def test_what_a_worker_takes_to_begin_is_told_apart_by_what_it_did_before(model, lone):
    """In turn a batch that arrives at an idle worker (begun 0.4 ms later) and one that waited while it was busy (begun 0.1 ms after it)."""
    config = recognizer_for(model, *BATCHED, "asr.batching.max_queue_delay_us=5000", slots=1)
    with config as recognizer:
        watch = TrafficWatch(recognizer)
        key = step_key(model.geometry, model.geometry.chunk(5))

    def play(reason, waited_s, begun_s):
        batch = SimpleNamespace(key=key, items=waited_s, reason=reason, formed_at=begun_s, waited_s=waited_s)
        watch("step", batch, (begun_s, 0.0, begun_s + 0.010, begun_s + 0.010))

    for number in range(2 * ENOUGH):
        at_s = 0.08 * number
        play("deadline", [0.0054], at_s)  # its delay of 5 ms was over 0.4 ms ago
        play("capacity", [0.009, 0.004], at_s + 0.0101)  # full since 6.1 ms after the one before began
    assert watch.told().dispatch_s == pytest.approx(
        [0.0004] * (2 * ENOUGH - 1)
    )  # the past of the very first is not known
    assert watch.told().turnaround_s == pytest.approx([0.0001] * (2 * ENOUGH))
    other = TrafficWatch(recognizer)
    other.add(watch)
    numbers = other.corrected(lone).numbers
    assert numbers["dispatch_us"] == pytest.approx(400.0) and numbers["turnaround_us"] == pytest.approx(100.0)
    table = CostTable.from_record(other.corrected(lone))
    assert (table.dispatch_s, table.turnaround_s) == (pytest.approx(0.0004), pytest.approx(0.0001))


@pytest.fixture
def play(model):
    """(watch, tell): tell the watch of a batch that began when, took `busy_s`, whose items had waited so long when it was formed."""
    with recognizer_for(model, *BATCHED, "asr.batching.max_queue_delay_us=5000", slots=1) as recognizer:
        watch, geometry = TrafficWatch(recognizer), model.geometry

    def tell(begun_s, waited_s=(0.005,), reason="deadline", busy_s=0.010, chunk=5):
        key = step_key(geometry, geometry.chunk(chunk))
        batch = SimpleNamespace(key=key, items=waited_s, reason=reason, formed_at=begun_s, waited_s=list(waited_s))
        watch("step", batch, (begun_s, 0.0, begun_s + busy_s, begun_s + busy_s))

    return watch, tell


def test_batches_that_are_told_in_another_order_than_they_began_say_the_same(play, lone):
    watch, tell = play
    begun = [0.04 * pair + later for pair in range(ENOUGH) for later in (0.0, 0.0101)]
    for first, second in zip(
        begun[::2], begun[1::2], strict=True
    ):  # the thread of the first was still waking its callers
        tell(second, (0.009,))
        tell(first)
    told = watch.told()
    assert told.turnaround_s == pytest.approx([0.0001] * ENOUGH)
    assert [idle for _, idle in told.steps["steady", 1]] == [False, False, *[True, False] * (ENOUGH - 1)]


def test_several_workers_may_tell_at_once(play, lone):
    import threading

    watch, tell = play
    threads = [threading.Thread(target=lambda: [tell(0.02 * n) for n in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(watch.told().steps["steady", 1]) == 2000
    assert CostTable.from_record(watch.corrected(lone)).turnaround_s == 0.0, "never less than no time"


def test_a_cohort_that_others_joined_while_the_worker_was_idle_does_not_say_when_it_was_complete(play):
    watch, tell = play
    for number in range(ENOUGH):
        tell(0.08 * number, (0.0003, 0.0001), "cohort")
    assert watch.told().dispatch_s == [] == watch.told().turnaround_s
    tell(0.08 * ENOUGH, (0.0003,), "cohort")
    assert watch.told().dispatch_s == pytest.approx([0.0003])
    tell(0.08 * ENOUGH + 0.0102, (0.009, 0.008), "cohort")
    assert watch.told().turnaround_s == pytest.approx([0.0002])


def test_a_short_step_never_costs_less_than_nothing_for_having_been_idle(play, lone):
    """Steady steps take 10 ms longer on an idle worker, first ones, seen on an idle worker alone, 4 ms in all."""
    watch, tell = play
    for number in range(2 * ENOUGH):
        at_s = 0.2 * number
        tell(at_s, busy_s=0.020)
        tell(at_s + 0.0201, busy_s=0.010)
        tell(at_s + 0.1, busy_s=0.004, chunk=0)
    costs = watch.corrected(lone)
    assert costs.numbers["after_idle_us"] == pytest.approx(10_000)
    table = CostTable.from_record(costs)
    assert table.quantiles_ms("first", 1)[128] == pytest.approx(2.0)
    assert table.quantiles_ms("steady", 1)[128] == pytest.approx(10.0)


def test_rows_that_do_not_say_their_frames_are_corrected_too(play, lone):
    bare = Record("costs", rows=[{k: v for k, v in row.items() if k != "mel_frames"} for row in lone.rows])
    watch, tell = play
    for number in range(ENOUGH):
        tell(0.08 * number)
    rows = watch.corrected(bare).rows
    assert {(r["shape"], r["batch"]) for r in rows} == {(r["shape"], r["batch"]) for r in bare.rows}
    seen = next(row for row in rows if (row["shape"], row["batch"]) == ("steady", 1))
    assert seen["ms_p50"] == pytest.approx(10.0)


@pytest.mark.parametrize("why", [ConfigError("not often enough"), StepTimeout("the backlog did not drain")])
def test_a_pair_that_cannot_be_compared_is_listed_and_the_others_go_on(model, clips, lone, monkeypatch, why):
    from workbench.measure import twin_check

    plain, told = twin_check._round, list[str]()

    def rounds(recognizer, config, *rest):
        if config.load.streams == 2 and isinstance(why, StepTimeout):
            raise why
        done = plain(recognizer, config, *rest)
        return done if config.load.streams == 1 else dataclasses.replace(done, watch=TrafficWatch(recognizer))

    monkeypatch.setattr(twin_check, "_round", rounds)
    config = load_config({}, ["asr.model=tiny", "asr.device=cpu", "asr.max_symbols=3"])
    check = TwinCheck((2, 1), seconds=2.0, batchings=(Batching("at once", 8, 0),))
    try:
        record = check_twin(model, config, lone, clips, check, told.append)
    except RecordError as refused:  # a machine too busy to pace
        assert "generator lagged" in str(refused)
        return
    assert record.rows[0] == {"batching": "at once", "streams": 2} and record.numbers["compared"] == 1
    assert "at once, 2 streams: not compared: " in told[0] and told[0] in record.notes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streams": ()}, r"streams: got \[\]"),
        ({"streams": (2, 0)}, r"streams: got \[2, 0\]; allowed are one or more numbers from 1"),
        *[
            ({name: value}, f"{name}: got {value}")
            for name in ("seconds", "run_s")
            for value in (0.0, math.nan, math.inf, 1e9)
        ],
        *[({"most_other_cores": value}, f"most_other_cores: got {value}") for value in (-1.0, math.nan)],
        ({"batchings": ()}, "batchings: got none"),
    ],
)
def test_a_check_that_cannot_be_run_is_refused_at_once(options, message):
    with pytest.raises(ConfigError, match=message):
        TwinCheck(**{"streams": (1,), **options})


def test_runs_shorter_than_a_chunk_are_refused_before_anything_is_measured(model, lone):
    config = load_config({}, ["asr.model=tiny", "asr.device=cpu"])
    with pytest.raises(ConfigError, match=r"seconds: got runs of 0\.05 s for chunks of 0\.08 s; allowed are longer"):
        check_twin(model, config, lone, [], TwinCheck((1,), seconds=0.05))


def test_the_twin_is_held_against_real_runs(model, clips, lone):
    config = load_config({}, ["asr.model=tiny", "asr.device=cpu", "asr.max_symbols=3"])
    check = TwinCheck((1, 2), seconds=4.0, run_s=2.0, batchings=(Batching("at once", 8, 0), Batching("wait", 8, 8000)))
    try:
        record = check_twin(model, config, lone, clips, check)
    except RecordError as refused:  # a machine too busy to pace
        assert "generator lagged" in str(refused)
        return
    assert [(row["batching"], row["streams"]) for row in record.rows] == [
        ("at once", 1), ("at once", 2), ("wait", 1), ("wait", 2),
    ]  # fmt: skip
    compared = [row for row in record.rows if "latency_p50_difference" in row]
    assert len(compared) == record.numbers["compared"] > 0
    for row in compared:
        expected = row["latency_p95_twin_ms"] / row["latency_p95_real_ms"] - 1
        assert row["latency_p95_difference"] == pytest.approx(expected)
    worst = max(abs(row["latency_p50_difference"]) for row in compared)
    assert record.numbers["p50_difference_max"] == pytest.approx(worst)
    assert all(row["traffic_over_lone"] > 0 and row["dispatch_us"] + row["turnaround_us"] > 0 for row in compared)
    assert record.counters["costs"] == lone.rows
    assert {row["runs"] for row in compared} == {2} and record.numbers["seconds"] == 4.0


def test_a_step_slowed_by_a_known_amount_shows_up_in_every_paced_latency(model, clips):
    """From one side only: what other load on the machine adds is not known (the twin's test knows both sides)."""
    with recognizer_for(model, *BATCHED, slots=1) as recognizer:
        plain = recognizer.stage.run
        recognizer.stage.run = lambda items: (time.sleep(0.025), plain(items))[1]
        try:
            load = LoadConfig(streams=1, seconds=2.0)
            record = run_paced(recognizer, clips, load, options=PacedOptions(compare=False))
        except GeneratorLagged:
            pytest.skip("a machine too busy to pace")
    assert min(row["latency_ms"] for row in record.rows) > 25.0
    assert "transcript_mismatches" not in record.numbers


def test_a_disturbed_measurement_is_taken_again_and_at_last_refused(monkeypatch):
    from workbench.measure import twin_check

    seen = iter([0.9, 0.05])
    monkeypatch.setattr(twin_check.OtherLoad, "cores", lambda self: next(seen))
    monkeypatch.setattr(twin_check, "wait_until_quiet", lambda cores, timeout_s: True)
    taken = []
    check = TwinCheck((1,), most_other_cores=0.1)
    assert twin_check.undisturbed(lambda: taken.append(1) or len(taken), check) == (2, 0.05)
    monkeypatch.setattr(twin_check.OtherLoad, "cores", lambda self: 0.9)
    with pytest.raises(GeneratorLagged, match=r"other programs used 0\.90 cores; allowed is 0\.1"):
        twin_check.undisturbed(lambda: taken.append(1), check)
    assert len(taken) == 2 + twin_check.PATIENT_ATTEMPTS
    assert twin_check.undisturbed(lambda: "unwatched", TwinCheck((1,))) == ("unwatched", 0.9)


def test_other_load_is_that_of_other_programs():
    import subprocess
    import sys

    from workbench.measure.quiet import OtherLoad

    meter = OtherLoad()
    if meter.cores() is None:
        pytest.skip("this system does not tell")
    spin = "import time\nwhile time.process_time() < 0.6: pass\nprint(flush=True); input()"
    start_s = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        used_s = meter.cores() * (time.perf_counter() - start_s)
        child.stdin.close()
    assert used_s > 0.5
