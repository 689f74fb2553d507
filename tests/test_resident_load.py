"""The load on a resident engine: blocks hold what was spoken and nothing else, every chunk runs once, and labels are those of the clip alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import alone, recognizer_for, rnnt, shipped_clips

from workbench.config import LoadConfig, load_config
from workbench.errors import ConfigError, LoadNotCarried
from workbench.geometry import StreamGeometry
from workbench.measure.loadgen import build_schedule
from workbench.measure.resident_load import ResidentOptions, ResidentRun, labels_alone, run_resident
from workbench.measure.resident_plan import NO_WORK, Lane, LoadPlan, SpokenClips
from workbench.runtime.encoding import step_item
from workbench.runtime.frontend import AudioBuffer
from workbench.runtime.resident_engine import ResidentEngine

PREEMPHASIS, N_FFT = 0.97, 512


def lanes_of(plan, speech, most):
    sizes = [(mel - 1) * speech.geometry.hop_samples + N_FFT for mel, _ in plan.kinds]
    return [
        Lane(plan, speech, number, [torch.full((most, size), torch.nan) for _ in range(2)])
        for number, size in enumerate(sizes)
    ]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60_000), min_size=1, max_size=3),
    right=st.sampled_from([0, 1, 3, 13]),
    seconds=st.floats(0.1, 6.0),
    starts=st.sampled_from(["staggered", "aligned"]),
)
def test_a_block_is_what_a_live_buffer_gives_from_the_samples_spoken_by_then(sizes, right, seconds, starts):
    geometry = StreamGeometry(56, right)
    clips = [np.random.default_rng(n).normal(size=size).astype(np.float32) for n, size in enumerate(sizes)]
    schedule = build_schedule(LoadConfig(streams=2, seconds=seconds, starts=starts), geometry, sizes)
    speech = SpokenClips(clips, geometry, PREEMPHASIS, N_FFT)
    plan = LoadPlan.of(schedule, speech, geometry)
    lanes = lanes_of(plan, speech, 2)
    for utterance in schedule.utterances:
        buffer, pushed = AudioBuffer(geometry, PREEMPHASIS, N_FFT), 0
        for row in np.flatnonzero(schedule.utterance == utterance.index):
            stop = int(schedule.stop_samples[row])
            buffer.push(clips[utterance.clip][pushed:stop])
            pushed = stop
            if schedule.final[row]:
                buffer.end()
            if plan.kind[row] == NO_WORK:
                assert buffer.next_chunk() is None
                continue
            chunk = buffer.next_chunk()
            item = step_item(geometry, 0, chunk, buffer.peek(chunk), extend=True)
            buffer.consume(chunk)
            lane = lanes[plan.kind[row]]
            lane.offer(np.array([row]))
            rows, blocks = lane.take()
            assert rows.tolist() == [row] and np.array_equal(blocks[0].numpy(), item.block)
            assert lane.kind == (item.key.input_mel_frames, item.key.drop_encoded)
            assert plan.mel_frames[row] == chunk.input_mel_frames


def test_a_lane_gives_the_oldest_first_in_batches_that_fit():
    geometry = StreamGeometry(56, 0)
    clip = np.arange(1, 40_001, dtype=np.float32)
    schedule = build_schedule(LoadConfig(streams=1, seconds=2.5), geometry, [clip.size])
    speech = SpokenClips([clip], geometry, None, N_FFT)
    lane = lanes_of(LoadPlan.of(schedule, speech, geometry), speech, 3)[2]
    lane.offer(np.array([9, 4]))
    lane.stage()
    lane.offer(np.array([7, 3, 8]))
    assert lane.size == 5 and lane.head() == 3
    rows, blocks = lane.take()
    assert rows.tolist() == [4, 9, 3] and blocks.shape[0] == 3 and not blocks.isnan().any()
    kept = blocks.clone()
    lane.stage()
    assert lane.head() == 7 and torch.equal(blocks, kept)
    assert lane.take()[0].tolist() == [7, 8] and lane.size == 0


@pytest.fixture(scope="module")
def model():
    return rnnt(layers=1, context=(56, 3))


@pytest.fixture(scope="module")
def clips():
    return [clip[: clip.size - 1501 * n] for n, clip in enumerate(shipped_clips(4, most_s=1.2))]


def config_of(streams, seconds):
    return load_config({}, ["asr.model=tiny", f"load.streams={streams}", f"load.seconds={seconds}"])


def engine_of(model, rows):
    engine = ResidentEngine(model, rows=rows, ladder=(1, 2, 4, 8), max_symbols=3)
    engine.encoder.rings.kv.fill_(float("nan"))
    engine.encoder.rings.conv.fill_(float("nan"))
    engine.decoder.rings.h.fill_(float("nan"))
    return engine


def test_every_chunk_runs_once_and_labels_are_those_of_the_clip_alone(model, clips):
    """Rows are taken over by the next utterance without a reset: the first chunk makes them fresh."""
    engine, config = engine_of(model, rows=7), config_of(6, 4.0)
    record = run_resident(engine, clips, config)
    numbers, counters = record.numbers, record.counters
    schedule = build_schedule(config.load, model.geometry, [clip.size for clip in clips])
    assert numbers["latency_n"] + numbers["final_n"] == len(schedule)
    assert (
        counters["items"]
        == (schedule.mel_frames > 0).sum()
        == sum(int(n) * k for n, k in counters["batch_sizes"].items())
    )
    assert counters["padding_rows"] >= 0 and counters["batch_size_max_items"] <= 8
    assert numbers["transcript_mismatches"] == 0 and numbers["clips_compared"] == 4
    assert numbers["transcripts_compared"] == sum(not u.cut for u in schedule.utterances) > 12
    assert numbers["labels_per_audio_s"] > 0 and 0 < numbers["busy_share"] <= 1
    assert numbers["generator_late_p99_ms"] == 0 <= numbers["seen_late_p50_ms"]
    assert any("clock" in note for note in record.notes)


def test_a_clip_alone_is_what_the_recogniser_gives(model, clips):
    engine = engine_of(model, rows=1)
    expected = [alone(recognizer_for(model), clip)[0] for clip in clips]
    assert any(expected)
    assert [tuple(labels_alone(engine, clip).tolist()) for clip in clips] == expected


def test_labels_by_row_follow_the_schedule(model, clips):
    engine = engine_of(model, rows=3)
    schedule = build_schedule(config_of(3, 2.5).load, model.geometry, [clip.size for clip in clips])
    speech = SpokenClips(clips, model.geometry, engine.frontend.preemphasis, engine.frontend.n_fft)
    run = ResidentRun(engine, schedule, speech, ResidentOptions())
    run.play()
    rows, labels = run.labels_by_row()
    assert (run.started_s >= schedule.due_s).all() and (run.completed_s >= run.started_s).all()
    assert np.all(np.diff(rows) >= 0) and labels.size == sum(int(out.counts.sum()) for _, out in run.results)
    whole = [u for u in schedule.utterances if not u.cut]
    for u in whole:
        said = [labels[rows == row] for row in np.flatnonzero(schedule.utterance == u.index)]
        assert np.array_equal(np.concatenate(said), labels_alone(engine, clips[u.clip]))


def test_more_streams_than_rows_are_refused(model, clips):
    with pytest.raises(ConfigError, match=r"engine rows: got 2 for load.streams = 3"):
        run_resident(engine_of(model, rows=2), clips, config_of(3, 1.0))


def test_a_run_that_falls_behind_is_given_up(model, clips):
    with pytest.raises(LoadNotCarried, match="late by one chunk"):
        options = ResidentOptions(most_late_share=0.001)
        run_resident(engine_of(rnnt(layers=1, context=(56, 0)), rows=200), clips, config_of(200, 3.0), options=options)
