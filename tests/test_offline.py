"""Whole recordings: batched equals alone, bucketing changes neither text nor times, long ones are streamed, bad ones are named."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
from small_models import recognizer_for, rnnt, shipped_clips, tdt

from workbench.geometry import StreamGeometry
from workbench.model.speech import find_audio
from workbench.runtime.offline import offline_batch, offline_labels
from workbench.runtime.offline_batches import bucketed_samples


@pytest.fixture(scope="module")
def model():
    return rnnt(context=(56, 13))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Seven recordings of different lengths, one of them empty, and one file that is no audio."""
    path = tmp_path_factory.mktemp("clips")
    for number, clip in enumerate(shipped_clips(6)):
        soundfile.write(path / f"{number}.wav", clip[: 16000 + 700 * number], 16000, subtype="FLOAT")
    soundfile.write(path / "short.wav", np.full(100, 0.1, np.float32), 16000, subtype="FLOAT")
    (path / "7.wav").write_text("not audio")
    return path


@pytest.mark.parametrize("make", [lambda: rnnt(context=(56, 13)), lambda: tdt(context=(56, 1))])
def test_a_padded_batch_equals_each_alone(make):
    import torch

    loaded = make()
    clips = [clip[: 9000 + 3100 * i] for i, clip in enumerate(shipped_clips(4))] + [np.zeros(50, np.float32)]
    block = np.zeros((len(clips), max(map(len, clips)) + 4000), np.float32)
    for row, clip in zip(block, clips, strict=True):
        row[: clip.size] = clip
    found = offline_batch(loaded, torch.from_numpy(block), [clip.size for clip in clips])
    assert [labels for labels, _ in found] == [offline_labels(loaded, clip) for clip in clips]
    assert all(len(labels) == len(frames) for labels, frames in found) and found[-1] == ((), ())
    assert any(labels for labels, _ in found)


@pytest.mark.parametrize("bucket_ms", [0, 500])
@pytest.mark.parametrize("enabled", [False, True])
def test_transcribe_in_order_with_or_without_batching_and_buckets(model, folder, bucket_ms, enabled):
    overrides = (f"asr.batching.enabled={str(enabled).lower()}", f"asr.batching.offline_bucket_ms={bucket_ms}")
    with recognizer_for(model, *overrides) as recognizer:
        items = find_audio([folder]).items
        rows = list(recognizer.transcribe(items))
        assert [row.path for row in rows] == [str(item.path) for item in items]
        by_name = {row.path.rsplit("/", 1)[1]: row for row in rows}
        assert "7.wav" in by_name["7.wav"].error and by_name["7.wav"].text is None
        for number in range(6):
            row, samples = by_name[f"{number}.wav"], soundfile.read(folder / f"{number}.wav", dtype="float32")[0]
            assert row.text == recognizer.detokenizer.text(offline_labels(model, samples))
            assert row.duration_s == round(samples.size / 16000, 3), "the recording's own duration, not the bucket's"
            assert " ".join(word.text for word in row.words) == row.text
            assert all(0 <= word.start_s <= word.end_s <= samples.size / 16000 for word in row.words)
        stage = next(stage for stage in recognizer.stage_metrics() if stage.name == "offline")
    lengths = [16000 + 700 * n for n in range(6)] + [100]
    buckets = [-(-n // 8000) * 8000 for n in lengths]
    assert stage.items == 7
    assert stage.padding_samples == (sum(buckets) - sum(lengths) if bucket_ms else 0)
    assert max(stage.batch_sizes) == (5 if enabled and bucket_ms else 1)


def test_bucket_arithmetic():
    geometry = StreamGeometry(left_frames=56, right_frames=13)
    cases = [(1, 8000), (7999, 8000), (8000, 8000), (8001, 16000), (160000, 160000)]
    assert [bucketed_samples(samples, 500, geometry, 5000) for samples, _ in cases] == [padded for _, padded in cases]
    assert bucketed_samples(8001, 0, geometry, 5000) == 8001
    limit = 10 * geometry.frame_samples
    assert bucketed_samples(limit - 10, 500, geometry, 10) == limit - 10, "padding past the position limit is left out"


def test_beyond_the_position_limit_a_recording_is_streamed(model, folder):
    with recognizer_for(model, "asr.batching.enabled=true") as recognizer:
        recognizer.offline.most_frames = 14
        rows = {row.path.rsplit("/", 1)[1]: row for row in recognizer.transcribe(find_audio([folder]).items)}
        samples = soundfile.read(folder / "5.wav", dtype="float32")[0]
        with recognizer.stream() as stream:
            stream.push(samples)
            stream.finish()
        assert rows["5.wav"].text == stream.text and stream.text
        assert rows["5.wav"].words[-1].end_s <= rows["5.wav"].duration_s
        assert recognizer.metrics.items > 0 and recognizer.arena.used == 0


def test_a_full_queue_is_waited_for(model, folder):
    overrides = ("asr.batching.enabled=true", "asr.batching.max_queue_depth=1", "asr.batching.max_queue_delay_us=1000")
    with recognizer_for(model, *overrides) as recognizer:
        rows = list(recognizer.transcribe(find_audio([folder]).items, concurrency=6))
        assert sum(row.error is None for row in rows) == 7
        assert recognizer.offline.metrics.rejected_items > 0


def test_a_failing_batch_is_raised_and_the_next_call_works(model, folder):
    with recognizer_for(model, "asr.batching.enabled=true") as recognizer:
        items, recognise = find_audio([folder / "1.wav"]).items, recognizer.offline._recognise
        recognizer.offline._recognise = lambda tasks: 1 / 0
        with pytest.raises(ZeroDivisionError):
            list(recognizer.transcribe(items))
        recognizer.offline._recognise = recognise
        assert next(recognizer.transcribe(items)).text
