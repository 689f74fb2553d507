"""Places: who has begun is not refused, newcomers are; and what a refusal leaves behind is nothing."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
from small_models import alone, recognizer_for, rnnt, shipped_clips

from workbench.batching.metrics import StageMetrics
from workbench.batching.places import Places
from workbench.errors import ConfigError, InputError, QueueFull

BOUND_S = 30.0
PIPELINES = pytest.mark.parametrize("pipeline", ["fused", "staged"])


@pytest.fixture(scope="module")
def model():
    return rnnt()


@pytest.fixture(scope="module")
def clip():
    return shipped_clips(1)[0][:12000]


@pytest.fixture(scope="module")
def expected(model, clip):
    return alone(recognizer_for(model), clip)[0]


def opened(model, pipeline, depth):
    return recognizer_for(
        model, f"asr.pipeline={pipeline}", "asr.batching.enabled=true", f"asr.batching.max_queue_depth={depth}"
    )


class Gate:
    """Holds the lane that a pipeline's chunks begin in, until it is opened."""

    def __init__(self, recognizer, pipeline):
        lanes = {lane.name: lane for lane in recognizer.pipeline.workers.lanes}
        lane = lanes["step" if pipeline == "fused" else "frontend"]
        self.entered, self.open, self.audio, run = threading.Event(), threading.Event(), [], lane.run

        def gated(batch):
            self.audio += [weakref.ref(task.item.block) for task in batch.items]
            self.entered.set()
            assert self.open.wait(BOUND_S)
            return run(batch)

        lane.run = gated


def test_places_are_counted_and_refusals_too():
    metrics = StageMetrics("step")
    places = Places(2, metrics)
    places.take()
    places.take()
    with pytest.raises(
        QueueFull, match=r"step: 2 streams have work in it; allowed is 2 \(asr.batching.max_queue_depth\)"
    ):
        places.take()
    assert metrics.rejected_items == 1
    places.give_back()
    places.take()
    assert places.taken == 2


def test_wrong_use_of_places_is_an_error():
    with pytest.raises(ConfigError, match="depth: got 0"):
        Places(0, StageMetrics("step"))
    with pytest.raises(ValueError, match="nobody had"):
        Places(1, StageMetrics("step")).give_back()


@PIPELINES
def test_a_recording_that_has_begun_is_completed_without_being_asked_again(model, clip, expected, pipeline):
    with opened(model, pipeline, depth=1) as recognizer:
        gate, ended = Gate(recognizer, pipeline), threading.Event()
        begun = recognizer.stream(lambda event: ended.set() if event.kind == "final" else None)
        begun.push(clip)
        begun.end()
        assert gate.entered.wait(BOUND_S)
        newcomer = recognizer.stream()
        newcomer.push(clip)
        with pytest.raises(QueueFull):
            newcomer.end()
        gate.open.set()
        assert ended.wait(BOUND_S) and begun.labels == expected
        newcomer.finish()
        assert newcomer.labels == expected
        assert recognizer.pipeline._places.taken == 0


@PIPELINES
@pytest.mark.parametrize("executing", [False, True])
def test_a_cancelled_stream_gives_its_place_back(model, clip, expected, pipeline, executing):
    with opened(model, pipeline, depth=2) as recognizer:
        gate = Gate(recognizer, pipeline)
        first, second = recognizer.stream(), recognizer.stream()
        first.push(clip)
        first.end()
        assert gate.entered.wait(BOUND_S)
        second.push(clip)
        second.end()
        (first if executing else second).cancel()
        gate.open.set()
        left = second if executing else first
        left.finish()
        assert left.labels == expected
        deadline = time.monotonic() + BOUND_S
        while recognizer.pipeline._places.taken and time.monotonic() < deadline:
            time.sleep(0.001)
        assert recognizer.pipeline._places.taken == 0 and recognizer.arena.used == 0


@PIPELINES
def test_a_stream_between_its_chunks_holds_no_place(model, clip, expected, pipeline):
    with opened(model, pipeline, depth=1) as recognizer:
        streams = [recognizer.stream() for _ in range(3)]
        for start in range(0, clip.size, 2000):
            for stream in streams:
                stream.push(clip[start : start + 2000])
                stream.step()
        for stream in streams:
            stream.finish()
        assert [stream.labels for stream in streams] == [expected] * 3


@PIPELINES
def test_push_holds_a_caller_to_what_may_wait_and_loses_nothing(model, clip, expected, pipeline):
    """One chunk is held in execution: of what follows, `most_waiting_s` is taken and the rest refused until it has run."""
    with opened(model, pipeline, depth=1) as recognizer:
        gate, rate_hz = Gate(recognizer, pipeline), recognizer.loaded.geometry.sample_rate_hz
        stream, at, refusals = recognizer.stream(most_waiting_s=0.3), 0, 0
        while not stream.done:
            try:
                if at < clip.size:
                    stream.push(clip[at : at + 800])
                    at = min(at + 800, clip.size)
                    stream.submit()
                else:
                    stream.end()
                    time.sleep(0.001)
            except QueueFull as full:
                assert "of audio would wait; allowed is 0.3 s" in str(full)
                refusals += 1
                if not gate.open.is_set():
                    taken = recognizer.loaded.geometry.chunk_ready_samples(0)
                    assert 0.3 * rate_hz - 800 < at - taken + 800 <= 0.3 * rate_hz + taken + 800
                gate.open.set()
                stream.step()
        assert refusals and stream.labels == expected


def test_a_piece_is_taken_whatever_its_length_where_nothing_could_run_before_it(model, clip, expected):
    recognizer = recognizer_for(model)
    with recognizer.stream(most_waiting_s=0.001) as stream:
        stream.push(clip)
        with pytest.raises(QueueFull, match="step first"):
            stream.push(clip)
        stream.finish()
        assert stream.labels == expected
    for wrong in (0, -1, float("nan"), "1", None, True):
        with pytest.raises(InputError, match=f"most_waiting_s: got {wrong!r}; allowed is more than 0"):
            recognizer.stream(most_waiting_s=wrong)


@PIPELINES
def test_refused_and_completed_streams_are_gone_without_the_cycle_collector(model, clip, pipeline):
    """An exception that is kept keeps frames, these keep batches, and these their audio: hundreds of MiB before the collector comes."""
    with opened(model, pipeline, depth=1) as recognizer:
        gate = Gate(recognizer, pipeline)
        streams = [recognizer.stream(coordinated=number > 0) for number in range(4)]
        gone = [weakref.ref(stream) for stream in streams]
        gc.collect()
        gc.disable()
        try:
            streams[0].push(clip)
            streams[0].end()
            assert gate.entered.wait(BOUND_S)
            for stream in streams[1:]:  # one ingress wave, which meets the full pipeline in a worker's thread
                stream.push(clip)
                stream.submit()
            deadline = time.monotonic() + BOUND_S
            while any(stream._at_barrier for stream in streams) and time.monotonic() < deadline:
                time.sleep(0.001)
            for stream in streams[1:]:
                assert stream._refused is not None
            gate.open.set()
            streams.pop().cancel()
            for stream in streams:  # the refusal of before is no longer true, so it is not raised
                stream.finish()
            streams.clear()
            del stream
            deadline = time.monotonic() + BOUND_S
            while any(ref() is not None for ref in [*gone, *gate.audio]) and time.monotonic() < deadline:
                time.sleep(0.001)
            assert len(gate.audio) > 20
            assert [ref() for ref in gone] == [None] * 4 and not any(ref() is not None for ref in gate.audio)
        finally:
            gc.enable()
