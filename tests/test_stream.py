"""Streams: equal to offline recognition at the same context, to NeMo's own loop, and to themselves however the audio is cut."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from workbench.config import load_config
from workbench.errors import ArenaFull, AudioError, QueueFull, StepTimeout, StreamClosed
from workbench.model.load import set_context
from workbench.runtime.offline import nemo_stream_labels, offline_labels
from workbench.runtime.recognizer import Recognizer


def recognizer_for(loaded, *overrides):
    return Recognizer(loaded, load_config({}, ["asr.model=tiny", *overrides]))


def streamed(recognizer, samples, cuts=()):
    with recognizer.stream() as stream:
        events = []
        for piece in np.split(samples, list(cuts)):
            stream.push(piece)
            events += stream.step()
        events += stream.finish()
    return stream, events


@pytest.fixture
def at_context(tiny_model):
    """The session's model at another context, set back afterwards."""

    def switch(context):
        return dataclasses.replace(tiny_model, geometry=set_context(tiny_model.model, context))

    yield switch
    set_context(tiny_model.model, (56, 0))


@pytest.mark.parametrize("context", [(56, 0), (56, 1), (56, 3), (56, 6), (56, 13)])
def test_streaming_equals_offline_token_for_token(at_context, noise, context):
    loaded = at_context(context)
    recognizer = recognizer_for(loaded)
    for seed, seconds in enumerate([0.02, 0.08, 0.1, 0.79, 1.12, 1.93, 4.7]):
        samples = noise(seconds, seed)
        stream, _ = streamed(recognizer, samples)
        assert stream.labels == offline_labels(loaded, samples), (context, seconds)


def test_streaming_equals_a_plain_nemo_loop(tiny_model, noise):
    samples = noise(3.21)
    stream, events = streamed(recognizer_for(tiny_model), samples)
    assert stream.labels == nemo_stream_labels(tiny_model, samples)
    assert len(events) == len(tiny_model.geometry.chunks(samples.size)) + 1


@pytest.mark.parametrize("enabled", [False, True])
def test_any_cutting_of_push_gives_the_same_events(tiny_model, noise, enabled):
    samples = noise(1.6, seed=3)
    with recognizer_for(
        tiny_model, f"asr.batching.enabled={str(enabled).lower()}", "asr.batching.max_queue_delay_us=0"
    ) as recognizer:
        whole, whole_events = streamed(recognizer, samples)
        rng = np.random.default_rng(1)
        for pieces in (2, 7, 60):
            cuts = np.sort(rng.integers(0, samples.size, pieces))
            cut, events = streamed(recognizer, samples, cuts)
            assert [(e.kind, e.labels, e.text, e.chunk) for e in events] == [
                (e.kind, e.labels, e.text, e.chunk) for e in whole_events
            ]
            assert cut.text == whole.text == recognizer.detokenizer.text(whole.labels)


def test_many_streams_batched_equal_each_alone(tiny_model, noise):
    clips = [noise(1.0 + 0.13 * i, seed=i) for i in range(9)]
    alone = [streamed(recognizer_for(tiny_model), clip)[0].labels for clip in clips]
    with recognizer_for(tiny_model, "asr.batching.enabled=true", "asr.batching.max_batch_size=4") as recognizer:
        streams = [recognizer.stream() for _ in clips]
        for stream, clip in zip(streams, clips, strict=True):
            stream.push(clip)
            stream.end()
        for stream in streams:
            stream.finish()
        assert [stream.labels for stream in streams] == alone
        counted = recognizer.metrics.snapshot()
        assert recognizer.arena.used == 0
    assert any(int(size) > 1 for size in counted["batch_sizes"]), counted


def test_threads_do_not_mix_streams(tiny_model, noise):
    clips = [noise(0.7 + 0.2 * i, seed=40 + i) for i in range(8)]
    alone = [streamed(recognizer_for(tiny_model), clip)[0].labels for clip in clips]
    got = [[] for _ in clips]
    with recognizer_for(tiny_model, "asr.batching.enabled=true", "asr.batching.max_queue_delay_us=2000") as recognizer:

        def drive(number):
            for _ in range(2):
                got[number].append(streamed(recognizer, clips[number], [5000, 9000])[0].labels)

        threads = [threading.Thread(target=drive, args=(i,), daemon=True) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads), "a stream hangs"
    assert got == [[labels, labels] for labels in alone]


def test_a_reused_row_equals_a_fresh_one(tiny_model, noise):
    recognizer = recognizer_for(tiny_model, "asr.batching.state_arena_slots=1")
    samples = noise(1.2, seed=5)
    first, _ = streamed(recognizer, samples)
    streamed(recognizer, noise(0.9, seed=6))
    recognizer.arena.channel.fill_(float("nan"))
    recognizer.arena.time.fill_(float("nan"))
    again, _ = streamed(recognizer, samples)
    assert again.labels == first.labels
    assert again.row == first.row == 0


def test_errors_are_typed_and_nothing_is_lost(tiny_model, noise):
    recognizer = recognizer_for(tiny_model, "asr.batching.state_arena_slots=1")
    stream = recognizer.stream()
    with pytest.raises(ArenaFull):
        recognizer.stream()
    for bad in (np.zeros((2, 5)), np.array([np.nan])):
        with pytest.raises(AudioError):
            stream.push(bad)
    with pytest.raises(AudioError, match="8000 Hz"):
        stream.push(np.zeros(10, np.float32), rate_hz=8000)
    stream.push(np.zeros(0, np.float32))
    assert stream.step() == []
    assert [e.kind for e in stream.finish()] == ["final"]
    assert stream.finish() == [], "finishing twice gives nothing"
    for call in (lambda: stream.push(noise(0.1)), stream.step):
        with pytest.raises(StreamClosed):
            call()
    other = recognizer.stream()
    other.cancel()
    other.cancel()
    with pytest.raises(StreamClosed):
        other.finish()
    recognizer.close()
    with pytest.raises(StreamClosed):
        recognizer.stream()


def test_a_failing_batch_reaches_exactly_its_streams(tiny_model, noise):
    with recognizer_for(tiny_model, "asr.batching.enabled=true") as recognizer:
        run, poisoned = recognizer.stage.run, set()

        def failing(items):
            if any(item.row in poisoned for item in items):
                raise FloatingPointError("planted")
            return run(items)

        recognizer.stage.run = failing
        bad, good = recognizer.stream(), recognizer.stream()
        poisoned.add(bad.row)
        bad.push(noise(1.0))
        with pytest.raises(FloatingPointError, match="planted"):
            bad.step()
        with pytest.raises(FloatingPointError):
            bad.finish()
        good.push(noise(1.0))
        assert good.finish()[-1].kind == "final"
        assert recognizer.arena.used == 0
        recognizer.stage.run = lambda items: []
        short = recognizer.stream()
        short.push(noise(1.0))
        with pytest.raises(RuntimeError, match="gave 0 results"):
            short.step()


def test_a_step_has_a_bound_and_a_full_queue_keeps_the_audio(tiny_model, noise):
    with recognizer_for(
        tiny_model, "asr.batching.enabled=true", "asr.batching.max_queue_depth=2", "asr.batching.max_queue_delay_us=300000",
        "asr.batching.max_batch_size=1024",
    ) as recognizer:  # fmt: skip
        run, gate = recognizer.stage.run, threading.Event()

        def gated(items):
            gate.wait(30)
            return run(items)

        recognizer.stage.run = gated
        held, queued, refused = (recognizer.stream() for _ in range(3))
        clip = noise(0.4, seed=8)
        held.push(clip)
        held.submit()
        with pytest.raises(StepTimeout):
            held.step(timeout_s=0.05)
        while recognizer.pipeline._batcher.queued:
            threading.Event().wait(0.005)
        queued.push(clip)
        queued.submit()
        refused.push(clip)
        with pytest.raises(QueueFull):
            refused.submit()
        gate.set()
        texts = []
        for stream in (held, queued, refused):
            while not stream.done:
                try:
                    stream.finish()
                except QueueFull:
                    continue
            texts.append(stream.labels)
        assert len(set(texts)) == 1


def test_close_completes_queued_work(tiny_model, noise):
    recognizer = recognizer_for(tiny_model, "asr.batching.enabled=true", "asr.batching.max_queue_delay_us=9000000")
    stream = recognizer.stream()
    stream.push(noise(0.02))
    stream.submit()
    recognizer.close(timeout_s=20)
    assert not recognizer.pipeline.workers.alive
    assert len(stream.labels) >= 0 and stream.done


def test_a_long_stream_keeps_its_text_and_its_state_size(tiny_model, noise):
    recognizer = recognizer_for(tiny_model)
    with recognizer.stream() as stream:
        for second in range(12):
            stream.push(noise(1.0, seed=second))
            stream.step()
        assert len(stream._growing._open) < 200 < len(stream.labels)
        assert stream.text == recognizer.detokenizer.text(stream.labels)
