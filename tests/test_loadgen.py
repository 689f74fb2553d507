"""The open-loop schedule against the geometry it is made from, and the numbers against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.config import LoadConfig
from workbench.errors import ConfigError, RecordError
from workbench.geometry import StreamGeometry
from workbench.measure.loadgen import Schedule, build_schedule, lateness_bound_s, summarise

GEOMETRIES = [StreamGeometry(56, r) for r in (0, 1, 3, 6, 13)]
loads = st.builds(
    LoadConfig,
    streams=st.integers(1, 6),
    seconds=st.floats(0.01, 8.0),
    starts=st.sampled_from(["staggered", "aligned"]),
    seed=st.integers(0, 50),
)
clip_sets = st.lists(st.integers(0, 60_000), min_size=1, max_size=5).filter(any)


def one(samples: int, right: int = 0, seconds: float = 100.0) -> Schedule:
    """The rows of the first utterance of an aligned single stream that speaks one clip."""
    return build_schedule(
        LoadConfig(streams=1, seconds=samples / 16000 or seconds, starts="aligned"),
        StreamGeometry(56, right),
        [samples],
    )


@settings(max_examples=150, deadline=None)
@given(load=loads, geometry=st.sampled_from(GEOMETRIES), clips=clip_sets)
def test_rows_are_the_geometrys_chunks_in_the_order_they_are_due(
    load: LoadConfig, geometry: StreamGeometry, clips: list[int]
) -> None:
    schedule = build_schedule(load, geometry, clips)
    assert np.all(np.diff(schedule.due_s) >= 0)
    assert set(schedule.stream.tolist()) == set(range(load.streams))
    for stream in range(load.streams):
        mine = np.flatnonzero(schedule.stream == stream)
        assert np.all(np.diff(schedule.due_s[mine]) >= 0)
        assert np.all(np.diff(schedule.utterance[mine]) >= 0)
    for utterance in schedule.utterances:
        rows = np.flatnonzero(schedule.utterance == utterance.index)
        assert schedule.final[rows].tolist() == [False] * (rows.size - 1) + [True]
        assert schedule.chunk_index[rows].tolist() == list(range(rows.size))
        assert schedule.stop_samples[rows[-1]] == utterance.samples
        with_work = rows[schedule.mel_frames[rows] > 0]
        chunks = geometry.chunks(utterance.samples)
        assert schedule.mel_frames[with_work].tolist() == [c.input_mel_frames for c in chunks]
        assert schedule.drop_encoded[with_work].tolist() == [c.drop_encoded for c in chunks]
        assert rows.size - with_work.size in (0, 1)
        assert schedule.cut[with_work].tolist() == [c != geometry.chunk(c.index) for c in chunks]
        due = utterance.phase_s + (utterance.first_sample + schedule.stop_samples[rows]) / geometry.sample_rate_hz
        assert np.allclose(schedule.due_s[rows], due, rtol=0, atol=1e-9)
        for row in rows[
            :-1
        ]:  # a chunk inside an utterance is due exactly when the samples that it needs have been spoken
            assert schedule.stop_samples[row] == geometry.chunk_ready_samples(int(schedule.chunk_index[row]))


@settings(max_examples=60, deadline=None)
@given(load=loads, geometry=st.sampled_from(GEOMETRIES), clips=clip_sets)
def test_a_stream_speaks_one_utterance_at_a_time_for_the_length_of_the_load(
    load: LoadConfig, geometry: StreamGeometry, clips: list[int]
) -> None:
    schedule = build_schedule(load, geometry, clips)
    for stream in range(load.streams):
        spoken = [u for u in schedule.utterances if u.stream == stream]
        ends = [u.first_sample + u.samples for u in spoken]
        assert spoken[0].first_sample == 0
        for end, after in zip(ends, spoken[1:], strict=False):
            assert 0 <= after.first_sample - end <= geometry.chunk_samples
        assert all(u.samples == clips[u.clip] for u in spoken if not u.cut)
        assert all(u.samples < clips[u.clip] for u in spoken if u.cut)
        left = round(load.seconds * geometry.sample_rate_hz) - ends[-1]
        assert 0 <= left < 2 * geometry.chunk_samples or len(spoken) == 1


def test_the_seed_decides_and_more_streams_leave_the_earlier_ones_alone() -> None:
    geometry, clips = StreamGeometry(56, 3), [20_000, 31_000, 55_000]
    small = build_schedule(LoadConfig(streams=3, seconds=9.0, seed=4), geometry, clips)
    again = build_schedule(LoadConfig(streams=3, seconds=9.0, seed=4), geometry, clips)
    large = build_schedule(LoadConfig(streams=8, seconds=9.0, seed=4), geometry, clips)
    other = build_schedule(LoadConfig(streams=3, seconds=9.0, seed=5), geometry, clips)
    assert np.array_equal(small.due_s, again.due_s)
    assert np.array_equal(small.due_s, large.due_s[large.stream < 3])
    assert not np.array_equal(small.due_s[:3], other.due_s[:3])


def test_staggered_phases_fill_one_chunk_and_aligned_streams_tick_together() -> None:
    geometry = StreamGeometry(56, 0)
    spread = build_schedule(LoadConfig(streams=400, seconds=1.0), geometry, [16_000])
    phases = np.sort([u.phase_s for u in spread.utterances if u.first_sample == 0])
    assert phases.size == 400 and phases[0] < 0.004 and 0.076 < phases[-1] < 0.08
    together = build_schedule(LoadConfig(streams=5, seconds=6.0, starts="aligned"), geometry, [12_345, 20_001])
    assert all(u.phase_s == 0.0 and u.first_sample % geometry.chunk_samples == 0 for u in together.utterances)
    inner = together.due_s[~together.final]
    assert np.unique(np.round(inner % 0.08, 9)).tolist() == [0.0125]  # 200 samples of look-ahead of the mel window


@pytest.mark.parametrize(
    ("samples", "mel_frames", "final"),
    [
        (1, [0], [True]),  # too short for a mel frame: nothing to compute, the utterance still ends
        (159, [0], [True]),
        (160, [1], [True]),  # mel frame 0 needs 200 samples while the stream goes on, so it is computed at the end
        (200, [1, 0], [False, True]),  # chunk 0 was ready before the end, the end has nothing left
        (320, [1, 2], [False, True]),
        (1440, [1, 9], [False, True]),
        (1480, [1, 9, 0], [False, False, True]),
    ],
)
def test_short_utterances(samples: int, mel_frames: list[int], final: list[bool]) -> None:
    rows = one(samples)
    assert rows.mel_frames.tolist() == mel_frames and rows.final.tolist() == final
    assert rows.due_s[-1] == pytest.approx(samples / 16000)


@pytest.mark.parametrize("clips", [[], [0], [0, 0], [-1, 5]])
def test_a_load_needs_audio(clips: list[int]) -> None:
    with pytest.raises(ConfigError, match="clip"):
        build_schedule(LoadConfig(), StreamGeometry(56, 0), clips)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), streams=st.integers(1, 5))
def test_percentiles_are_numpys_and_count_from_the_due_time(seed: int, streams: int) -> None:
    schedule = build_schedule(LoadConfig(streams=streams, seconds=4.0), StreamGeometry(56, 0), [15_000, 40_000])
    rng = np.random.default_rng(seed)
    sent = schedule.due_s + rng.uniform(0, 0.004, len(schedule))
    done = sent + rng.exponential(0.05, len(schedule))
    numbers = summarise(schedule, sent, done)
    latency_ms = (done - schedule.due_s) * 1e3
    for name, kind in (("latency", ~schedule.final), ("final", schedule.final)):
        for point in (50, 95, 99):
            assert numbers[f"{name}_p{point}_ms"] == pytest.approx(np.percentile(latency_ms[kind], point))
        assert numbers[f"{name}_n"] == kind.sum()
    assert numbers["late_chunks"] == (latency_ms > 80.0).sum()
    assert numbers["late_share"] == pytest.approx((latency_ms > 80.0).mean())
    assert numbers["generator_late_p99_ms"] == pytest.approx(np.percentile((sent - schedule.due_s) * 1e3, 99))
    assert numbers["generator_late_max_ms"] == pytest.approx(((sent - schedule.due_s) * 1e3).max())


def test_waiting_in_the_generator_counts_as_latency_until_it_is_refused() -> None:
    schedule = build_schedule(LoadConfig(streams=4, seconds=5.0), StreamGeometry(56, 0), [30_000])
    service_s = 0.010
    on_time = summarise(schedule, schedule.due_s, schedule.due_s + service_s)
    late = schedule.due_s + 0.004
    held = summarise(schedule, late, late + service_s)
    assert held["latency_p95_ms"] - on_time["latency_p95_ms"] == pytest.approx(4.0)
    lagging = schedule.due_s + 0.0051
    with pytest.raises(RecordError, match=r"generator lagged: .* 5\.1 ms .* allowed is 5\.0 ms"):
        summarise(schedule, lagging, lagging + service_s)
    assert summarise(schedule, lagging, lagging + service_s, bound_s=0.01)["generator_bound_ms"] == 10.0


def test_the_bound_of_the_generator_grows_with_the_chunk() -> None:
    assert lateness_bound_s(0.08) == 0.005
    assert lateness_bound_s(1.12) == pytest.approx(0.056)


def test_a_run_with_missing_or_impossible_times_is_refused() -> None:
    schedule = one(16_000)
    done = schedule.due_s + 0.01
    lost = done.copy()
    lost[2] = np.nan
    with pytest.raises(RecordError, match="1 of 14 chunks were never completed"):
        summarise(schedule, schedule.due_s, lost)
    with pytest.raises(RecordError, match="got 3 sent times for 14"):
        summarise(schedule, schedule.due_s[:3], done)
    with pytest.raises(RecordError, match="clocks differ"):
        summarise(schedule, schedule.due_s, schedule.due_s - 0.5)
    with pytest.raises(RecordError, match="before it was due"):
        summarise(schedule, schedule.due_s - 0.5, done)


def test_utterances_of_one_row_have_final_latency_only() -> None:
    schedule = one(150)
    numbers = summarise(schedule, schedule.due_s, schedule.due_s + 0.003)
    assert numbers["latency_n"] == 0 and "latency_p95_ms" not in numbers
    assert numbers["final_p95_ms"] == pytest.approx(3.0)
