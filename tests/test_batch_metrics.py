"""Stage metrics: quantiles within their stated error, sums that agree, and exports that a parser accepts."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.batching.metrics import REASONS, Durations, StageMetrics, prometheus, table

SECONDS = st.floats(0.0, 1e4, allow_nan=False) | st.floats(1e-6, 1.0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(SECONDS, max_size=20), min_size=1, max_size=20), st.sampled_from([0.0, 0.5, 0.95, 0.99, 1.0]))
def test_quantiles_are_within_one_percent(groups: list[list[float]], share: float) -> None:
    durations = Durations()
    for group in groups:
        durations.add(group)
    values = sorted(value for group in groups for value in group)
    assert durations.count == len(values)
    assert durations.sum_s == pytest.approx(math.fsum(values), abs=1e-12)
    found = durations.quantile_s(share)
    if not values:
        assert found is None
        return
    exact = values[max(1, math.ceil(share * len(values))) - 1]
    assert found == pytest.approx(exact, rel=0.0101, abs=1e-6)
    assert values[0] <= found <= values[-1]


def test_quantiles_do_not_depend_on_when_they_are_read() -> None:
    values = np.random.default_rng(0).lognormal(-6, 1, 10_000)
    read_often, read_once = Durations(), Durations()
    for start in range(0, 10_000, 7):
        read_often.add(values[start : start + 7].tolist())
        read_often.quantile_s(0.5)
        read_once.add(values[start : start + 7].tolist())
    assert read_often.numbers_ms("x") == read_once.numbers_ms("x")
    assert read_once.quantile_s(0.95) == pytest.approx(np.percentile(values, 95), rel=0.011)


def test_memory_is_bounded() -> None:
    durations = Durations()
    for _ in range(100):
        durations.add(np.random.default_rng(1).lognormal(-6, 5, 5000).tolist())
    assert len(durations._recent) < 5000 and durations._buckets.size < 1200
    assert durations.count == 500_000


def test_values_beyond_the_scale_keep_exact_ends() -> None:
    durations = Durations()
    durations.add([0.0, 1e-9, 1e6])
    assert durations.quantile_s(1.0) is not None and durations.numbers_ms("x")["x_max_ms"] == 1e9


def filled() -> StageMetrics:
    metrics = StageMetrics('enc "1"')
    metrics.dispatched("cohort", (0.004, 0.002, 0.0), compatible=3, ready=7)
    metrics.dispatched("deadline", (0.005,), compatible=1, ready=1)
    metrics.finished(0.010)
    metrics.rejected()
    metrics.cancelled()
    metrics.padded(rows=1, samples=160)
    return metrics


def test_snapshot() -> None:
    found = json.loads(json.dumps(filled().snapshot(), allow_nan=False))
    assert found["items"] == sum(int(size) * count for size, count in found["batch_sizes"].items()) == 4
    assert found["batches"] == sum(found["reasons"].values()) == 2
    assert found["reasons"] == {"cohort": 1, "deadline": 1} and found["finished_batches"] == 1
    assert (found["batch_size_mean_items"], found["batch_size_max_items"]) == (2.0, 3)
    assert (found["compatible_mean_items"], found["ready_mean_items"]) == (2.0, 4.0)
    assert (found["rejected_items"], found["cancelled_items"]) == (1, 1)
    assert (found["padding_rows"], found["padding_rows_share"], found["padding_samples"]) == (1, 0.2, 160)
    assert found["queue_wait_max_ms"] == 5.0 and found["queue_wait_p50_ms"] == pytest.approx(2.0, rel=0.01)
    assert found["execution_p99_ms"] == pytest.approx(10.0, rel=0.01)


def test_an_unused_stage_has_no_percentiles() -> None:
    found = json.loads(json.dumps(StageMetrics("idle").snapshot(), allow_nan=False))
    assert found["queue_wait_p95_ms"] is None and found["execution_p50_ms"] is None
    assert (found["batches"], found["batch_size_mean_items"], found["padding_rows_share"]) == (0, 0, 0)


def test_table_has_one_aligned_line_per_stage() -> None:
    lines = table([filled(), StageMetrics("idle")]).splitlines()
    assert len(lines) == 3 and lines[0].startswith("stage")
    column = lines[0].index("reasons")
    assert lines[1][column:] == "cohort=1 deadline=1" and lines[2][column:] == "-"


def test_prometheus_text() -> None:
    text = prometheus([filled(), StageMetrics("idle")])
    sample = re.compile(r'^(\w+)\{(\w+="(?:[^"\\]|\\.)*",?)+\} -?[\d.e+-]+$')
    samples = [line for line in text.splitlines() if not line.startswith("#")]
    assert text.endswith("\n") and all(sample.match(line) for line in samples)
    typed = re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M)
    assert len({name for name, _ in typed}) == len(typed) == len(re.findall(r"^# HELP", text, re.M))
    named = {sample.match(line)[1] for line in samples}  # type: ignore[index]
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in named} == {name for name, _ in typed}
    assert 'workbench_items_total{stage="enc \\"1\\""} 4' in samples
    assert 'workbench_batch_size_items_bucket{stage="enc \\"1\\"",le="1"} 1' in samples
    assert 'workbench_batch_size_items_bucket{stage="enc \\"1\\"",le="4"} 2' in samples
    assert 'workbench_batch_size_items_bucket{stage="enc \\"1\\"",le="+Inf"} 2' in samples
    assert 'workbench_queue_wait_seconds_count{stage="idle"} 0' in samples
    assert sum(line.startswith("workbench_releases_total") for line in samples) == 2 * len(REASONS)
