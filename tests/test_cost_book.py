"""Several cost records as one: which belongs to a configuration, what is refused, and what a simulated offline run owes to its costs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from workbench.config import load_config, replace
from workbench.errors import ConfigError, RecordError
from workbench.geometry import StreamGeometry
from workbench.measure.cost_book import CostBook
from workbench.measure.cost_table import TRAFFIC
from workbench.measure.offline_twin import OfflineCosts, long_tailed_lengths, simulate_offline
from workbench.results import Record

RATE = 16000


def costs(right: int = 0, ms: float = 5.0, stage: str = "step", mel_frames: int | None = None, **asr: Any) -> Record:
    """A record at [56, right] with one flat cost."""
    geometry = StreamGeometry(56, right)
    row = {"stage": stage, "shape": "steady", "batch": 1, "ms_p50": ms, "ms_p95": ms, "audio_s": 1.0}
    row |= {} if mel_frames is None else {"mel_frames": mel_frames}
    return Record(
        kind="costs",
        config={"asr": {"model": "tiny", "att_context_size": [56, right], "dtype": "float32", **asr}},
        rows=[row, {**row, "batch": 64}],
        counters={"geometry": dataclasses.asdict(geometry)},
        environment={},
    )


def asked(**changes: Any) -> Any:
    """Two streams, batching on."""
    base = {"asr": {"batching": {"enabled": True}}, "load": {"streams": 2, "seconds": 4}}
    return replace(load_config(base), **changes)


def test_every_configuration_gets_its_own_costs() -> None:
    book = CostBook([costs(0, 5.0), costs(13, 50.0), costs(0, 9.0, pipeline="staged")])
    run = book.runner([64_000])
    found = {}
    for name, changes in {
        "low": {"asr.att_context_size": [56, 0]},
        "high": {"asr.att_context_size": [56, 13]},
        "staged": {"asr.att_context_size": [56, 0], "asr.pipeline": "staged"},
    }.items():
        config = asked(**{"asr.model": "tiny", "asr.batching.max_queue_delay_us": 0, **changes})
        found[name] = run(config).numbers
    assert found["low"]["latency_p50_ms"] == pytest.approx(5.0) and found["low"]["chunk_ms"] == 80
    assert found["high"]["latency_p50_ms"] == pytest.approx(50.0) and found["high"]["chunk_ms"] == 1120
    assert found["staged"]["latency_p50_ms"] == pytest.approx(9.0)


def test_what_a_configuration_leaves_open_is_taken_from_the_one_record_that_fits() -> None:
    one = CostBook([costs(13, dtype="bfloat16")])
    fitted = one.fit(asked())
    assert (fitted.asr.model, fitted.asr.dtype, fitted.asr.att_context_size) == ("tiny", "bfloat16", (56, 13))
    two = CostBook([costs(0), costs(13)])
    assert two.fit(asked(**{"asr.att_context_size": [56, 13]})).asr.model == "tiny"
    with pytest.raises(ConfigError, match=r"asr\.att_context_size: got None; .* \[56, 0\] and \[56, 13\]: say which"):
        two.fit(asked())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"asr.model": "demo.nemo"}, "asr.model: got 'demo.nemo'; the costs were measured with 'tiny'"),
        ({"asr.dtype": "bfloat16"}, "asr.dtype: got 'bfloat16'; the costs were measured with 'float32'"),
    ],
)
def test_a_configuration_that_was_not_measured_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CostBook([costs()]).fit(asked(**changes))
    with pytest.raises(ConfigError, match="nothing was measured"):
        CostBook([costs(0), costs(13)]).fit(asked(**changes))


def test_a_key_that_is_searched_is_never_taken_for_another_value() -> None:
    staged = CostBook([costs(pipeline="staged")])
    assert staged.fit(asked()).asr.pipeline == "staged"
    with pytest.raises(ConfigError, match=r"asr\.pipeline: got 'fused'"):
        staged.fit(asked(), searched=["asr.pipeline"])
    with pytest.raises(ConfigError, match=r"nothing was measured|got 'fused'"):
        staged.runner([64_000])(asked(**{"asr.model": "tiny", "asr.att_context_size": [56, 0]}))


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [("numbers", name, value) for name in TRAFFIC for value in ("x", None, [1], -1.0, math.nan, math.inf)]
    + [("row", name, value) for name in ("ms_p50", "batch", "mel_frames", "samples_ms") for value in ("x", [None], {"a": 1})]
    + [("row", "batch", math.inf), ("row", "batch", 1e300), ("row", "shape", None), ("row", "audio_s", "x"), ("row", "audio_s", math.nan)]
    + [("geometry", "hop_samples", value) for value in (0, -1, 0.5, "x", [], math.inf, None)]
    + [("config", "asr", "x")],
)  # fmt: skip
def test_a_damaged_cost_record_is_named_as_such(part: str, key: str, value: Any) -> None:
    """Whatever stands where a number should: an error that says so, and neither a traceback nor a simulation of nonsense."""
    stage = "offline" if key == "audio_s" else "step"
    record = costs(stage=stage, mel_frames=8)
    place = {
        "numbers": record.numbers,
        "row": record.rows[0],
        "geometry": record.counters["geometry"],
        "config": record.config,
    }[part]
    place[key] = value
    if part == "row" and key == "shape":
        del place[key]
    with pytest.raises(RecordError, match=r"costs|geometry"):
        book = CostBook([record])
        if stage == "offline":
            OfflineCosts.from_record(record)
        book.runner([64_000])(book.fit(asked()))


def test_costs_of_native_weights_do_not_stand_for_int8() -> None:
    book = CostBook([costs(encoder="resident")])
    with pytest.raises(ConfigError, match=r"asr\.weights: got 'int8'"):
        book.fit(asked(**{"asr.encoder": "resident", "asr.weights": "int8"}))
    int8 = CostBook([costs(encoder="resident", weights="int8")])
    assert int8.fit(asked()).asr.weights == "int8"


def test_a_folder_is_read_as_a_book_and_other_records_in_it_are_left_alone(tmp_path: Any) -> None:
    costs(0).save(tmp_path / "a.json")
    costs(13).save(tmp_path / "b.json")
    Record(kind="paced", environment={}).save(tmp_path / "c.json")
    book = CostBook.load([tmp_path])
    assert len(book.measured) == 2
    assert book.digest() != CostBook.load([tmp_path / "a.json"]).digest()
    with pytest.raises(RecordError, match="kind 'paced'"):
        CostBook.load([tmp_path / "c.json"])
    with pytest.raises(RecordError, match="two records for model tiny"):
        CostBook([costs(0), costs(0, 6.0)])
    with pytest.raises(RecordError, match="got no record"):
        CostBook([])


def test_offline_rows_are_a_measurement_of_their_own() -> None:
    book = CostBook([costs(0), costs(0, stage="offline")])
    config = asked(**{"asr.model": "tiny", "asr.att_context_size": [56, 0]})
    assert book.pick(config, "offline") is not book.pick(config)
    with pytest.raises(ConfigError, match=r"asr.model: got|nothing was measured \(offline\)"):
        CostBook([costs(0)]).pick(config, "offline")


def offline_costs(fixed_ms: float = 30.0, per_second_ms: float = 1.0) -> OfflineCosts:
    """A batch costs a fixed part and a part per second of (padded) audio in it."""
    rows = [
        {"stage": "offline", "shape": f"{s:g} s", "audio_s": s, "batch": b, "ms_p50": ms, "ms_p95": ms}
        for s in (1.0, 4.0, 64.0)
        for b in (1, 64)
        for ms in [fixed_ms + per_second_ms * s * b]
    ]
    return OfflineCosts.from_record(Record(kind="costs", rows=rows, environment={}))


def run_offline(lengths_s: list[float], concurrency: int = 16, **batching: Any) -> Record:
    """Recognise recordings of these lengths."""
    options = {"enabled": True, "max_batch_size": 64, "max_queue_delay_us": 0, "state_arena_slots": 64, **batching}
    config = load_config({"asr": {"batching": options}})
    work = {"set": [round(seconds * RATE) for seconds in lengths_s]}
    return simulate_offline(config, offline_costs(), StreamGeometry(56, 0), work, concurrency)


def test_recordings_of_one_length_share_a_batch_and_the_time_is_that_of_the_batches() -> None:
    equal = run_offline([4.0] * 32, concurrency=32)
    assert equal.counters["batch_sizes"] == {"32": 1}
    assert equal.numbers["rtfx"] == pytest.approx(128 / ((30 + 4 * 32) / 1e3), rel=1e-6)
    alone = run_offline([4.0] * 32, enabled=False)
    assert alone.counters["batch_sizes"] == {"1": 32}
    assert alone.numbers["rtfx"] == pytest.approx(128 / (32 * (30 + 4) / 1e3), rel=1e-6)


def test_bucketing_trades_padding_for_company() -> None:
    lengths = np.random.default_rng(0).uniform(1.0, 9.0, 200).tolist()
    found = {ms: run_offline(lengths, offline_bucket_ms=ms) for ms in (0, 500, 2000)}
    shares = [record.numbers["padding_share"] for record in found.values()]
    means = [record.numbers["batch_mean_items"] for record in found.values()]
    assert shares[0] == 0 < shares[1] < shares[2] < 0.3 and means == sorted(means) and means[2] > 2 * means[0]
    for record in found.values():
        counters = record.counters
        assert counters["items"] == 200 == sum(int(size) * n for size, n in counters["batch_sizes"].items())
        assert counters["padding_samples"] == pytest.approx(
            record.numbers["padding_share"] / (1 - record.numbers["padding_share"]) * sum(lengths) * RATE, rel=1e-3
        )


def test_costs_between_lengths_are_interpolated_and_beyond_them_in_proportion() -> None:
    table = offline_costs()
    assert table.quantiles_ms(1, 2.5)[0] == pytest.approx(32.5)
    assert table.quantiles_ms(64, 34.0)[0] == pytest.approx(30 + 34 * 64)
    assert table.quantiles_ms(1, 128.0)[0] == pytest.approx(2 * (30 + 64))
    assert table.quantiles_ms(1, 0.2)[0] == pytest.approx(31.0)
    assert table.covers(8, 30.0) and not table.covers(8, 100.0) and not table.covers(65, 30.0)
    with pytest.raises(RecordError, match="no audio_s"):
        OfflineCosts.from_record(
            Record(kind="costs", rows=[{"stage": "offline", "shape": "x", "batch": 1, "ms_p50": 1.0, "ms_p95": 1.0}])
        )


def test_the_long_tail_is_long_and_the_same_every_time() -> None:
    lengths = np.asarray(long_tailed_lengths(1000)) / RATE
    assert long_tailed_lengths(50) == long_tailed_lengths(50)
    assert 3 < np.median(lengths) < 5 and lengths.max() > 40 and lengths.min() >= 0.5 and lengths.max() <= 60
    assert lengths.mean() > 1.3 * np.median(lengths)
