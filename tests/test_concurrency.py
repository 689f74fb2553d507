"""Many callers at once: threads, event loops, waves; failure, cancellation, closing and overload reach exactly whom they should."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from small_models import alone, recognizer_for, rnnt, shipped_clips, tdt

from workbench.errors import ArenaFull, QueueFull, StreamClosed
from workbench.runtime.stream import _waker

WATCHDOG_S = 60
BATCHED = ("asr.batching.enabled=true", "asr.batching.state_arena_slots=64")


@pytest.fixture(scope="module")
def model():
    return rnnt()


@pytest.fixture(scope="module")
def tdt_model():
    return tdt(context=(56, 0))


@pytest.fixture(scope="module")
def clips():
    return [clip[:12000] for clip in shipped_clips(6)]


@pytest.fixture(scope="module")
def expected(model, clips):
    return [alone(recognizer_for(model), clip)[0] for clip in clips]


def in_threads(functions):
    """Run all at once; a thread that does not end within the watchdog's bound fails the test. Returns what each raised, or None."""
    raised = [None] * len(functions)

    def guarded(number, function):
        try:
            function()
        except BaseException as error:
            raised[number] = error

    threads = [threading.Thread(target=guarded, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + WATCHDOG_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a caller hangs"
    return raised


def spoken(recognizer, clip, seed, **options):
    """Labels of one stream whose audio comes in random pieces."""
    rng = np.random.default_rng(seed)
    with recognizer.stream(**options) as stream:
        for piece in np.split(clip, np.sort(rng.integers(0, clip.size, 4))):
            stream.push(piece)
            stream.step()
        stream.finish()
        return stream.labels


@pytest.mark.parametrize("options", [{}, {"coordinated": True}])
@pytest.mark.parametrize("pipeline", ["fused", "staged"])
def test_eight_threads_of_mixed_audio(model, clips, expected, pipeline, options):
    with recognizer_for(model, f"asr.pipeline={pipeline}", *BATCHED) as recognizer:

        def caller(number):
            for turn in range(2):
                which = (number + turn) % len(clips)
                assert spoken(recognizer, clips[which], seed=number, **options) == expected[which]

        assert in_threads([lambda n=n: caller(n) for n in range(8)]) == [None] * 8
        stages = {stage.name: stage for stage in recognizer.stage_metrics()}
        assert recognizer.arena.used == 0
        assert max(recognizer.metrics.batch_sizes) > 1
    if options:
        assert stages["ingress"].batches and stages["ingress"].items >= stages["ingress"].batches


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
def test_sixty_asyncio_tasks_on_one_loop(tdt_model, clips, pipeline):
    found = [alone(recognizer_for(tdt_model), clip)[0] for clip in clips]

    async def speak(recognizer, number):
        clip, events = clips[number % len(clips)][:8000], []
        with recognizer.stream() as stream:
            for piece in np.array_split(clip, 3):
                stream.push(piece)
                events += await stream.astep()
            events += await stream.afinish()
            assert events[-1].kind == "final" and events[-1].text == stream.text
            return stream.labels

    async def everybody(recognizer):
        return await asyncio.wait_for(asyncio.gather(*(speak(recognizer, n) for n in range(60))), WATCHDOG_S)

    short = [alone(recognizer_for(tdt_model), clip[:8000])[0] for clip in clips]
    with recognizer_for(tdt_model, f"asr.pipeline={pipeline}", *BATCHED) as recognizer:
        assert asyncio.run(everybody(recognizer)) == [short[n % len(clips)] for n in range(60)]
    assert any(found)


def test_asyncio_with_batching_off_does_not_block_the_loop(model, clips, expected):
    recognizer, ticks = recognizer_for(model), []

    async def tick():
        while True:
            ticks.append(None)
            await asyncio.sleep(0)

    async def speak():
        ticking = asyncio.create_task(tick())
        with recognizer.stream() as stream:
            stream.push(clips[0])
            await stream.astep()
            await stream.afinish()
        ticking.cancel()
        return stream.labels

    assert asyncio.run(speak()) == expected[0]
    assert len(ticks) > 2


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
def test_batching_off_runs_in_the_callers_thread(model, clips, pipeline):
    recognizer, threads = recognizer_for(model, f"asr.pipeline={pipeline}"), set()
    run, before = recognizer.stage.run, threading.active_count()
    recognizer.stage.run = lambda items: (threads.add(threading.current_thread()), run(items))[1]
    alone(recognizer, clips[0])
    assert threads == {threading.current_thread()} and threading.active_count() == before


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
def test_a_lone_coordinated_stream_and_the_end_wait_for_nobody(model, clips, expected, pipeline):
    """With the longest delays: whatever waited for one would be counted."""
    overrides = ("asr.batching.max_queue_delay_us=10000000", "asr.batching.ingress_cohort_delay_us=10000000")
    with recognizer_for(model, f"asr.pipeline={pipeline}", *BATCHED, *overrides) as recognizer:
        assert spoken(recognizer, clips[0], seed=1, coordinated=True) == expected[0]
        with recognizer.stream() as stream, recognizer.stream():
            stream.push(clips[2][:1000])
            stream.finish()
        waited = {stage.name: stage.reasons["deadline"] for stage in recognizer.stage_metrics()}
        assert set(waited.values()) == {0}, waited


def test_coordinated_streams_start_together_and_idle_ones_are_not_waited_for(model, clips, expected):
    with recognizer_for(model, *BATCHED, "asr.batching.ingress_cohort_delay_us=200000") as recognizer:
        streams = [recognizer.stream(coordinated=True) for _ in range(5)]
        for turn in range(3):
            for stream in streams[:4]:
                stream.push(clips[0][turn * 1280 + 500 * (turn > 0) : (turn + 1) * 1280 + 500])
                stream.submit()
            for stream in streams[:4]:
                stream.step()
        waves = next(stage for stage in recognizer.stage_metrics() if stage.name == "ingress")
        assert waves.batch_sizes == {4: 3}
        # Only the first wave waited for the fifth stream, which never spoke.
        assert {reason: n for reason, n in waves.reasons.items() if n} == {"deadline": 1, "cohort": 2}
        for stream in streams[:4]:
            stream.push(clips[0][3 * 1280 + 500 :])
            stream.end()
        for stream in streams[:4]:
            stream.finish()
        assert [stream.labels for stream in streams[:4]] == [expected[0]] * 4


@pytest.mark.parametrize("operation", ["run", "mel", "encode", "decode"])
def test_a_failing_batch_reaches_exactly_its_members(model, clips, expected, operation):
    pipeline = "fused" if operation == "run" else "staged"
    with recognizer_for(model, f"asr.pipeline={pipeline}", *BATCHED) as recognizer:
        healthy, poisoned = getattr(recognizer.stage, operation), set()

        def rows(arguments):
            work = arguments[1] if operation == "decode" else arguments[0]
            return {getattr(item, "item", item).row for item in work}

        def failing(*arguments):
            if rows(arguments) & poisoned:
                raise FloatingPointError("planted")
            return healthy(*arguments)

        setattr(recognizer.stage, operation, failing)
        assert spoken(recognizer, clips[0], seed=0) == expected[0]
        bad = recognizer.stream()
        poisoned.add(bad.row)
        bad.push(clips[0])
        with pytest.raises(FloatingPointError, match="planted"):
            bad.step()
        with pytest.raises(FloatingPointError):
            bad.finish()
        poisoned.clear()
        assert spoken(recognizer, clips[1], seed=0) == expected[1], "the workers go on, and the row is clean again"
        assert recognizer.arena.used == 0
        poisoned |= set(range(64))
        raised = in_threads([lambda n=n: spoken(recognizer, clips[n], seed=n) for n in range(6)])
        assert all(isinstance(error, FloatingPointError) for error in raised)
        assert recognizer.arena.used == 0


@pytest.mark.parametrize("error", [KeyError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("pipeline", ["fused", "staged"])
def test_a_callers_own_callback_fails_only_its_stream(model, clips, expected, pipeline, error):
    """Whatever it raises: a slot that died of it would leave every other stream waiting."""

    def broken(event):
        raise error("mine")

    with recognizer_for(model, f"asr.pipeline={pipeline}", *BATCHED) as recognizer:
        bad = recognizer.stream(on_event=broken)
        bad.push(clips[0])
        with pytest.raises(error, match="mine"):
            bad.step(timeout_s=5.0)
        assert spoken(recognizer, clips[0], seed=0) == expected[0]
        assert recognizer.arena.used == 0


def test_a_callback_that_waits_for_its_own_stream_is_told_so(model, clips, expected):
    """It runs in the slot that would have to do the work: waiting there would hold up everybody for the whole bound."""
    with recognizer_for(model, *BATCHED) as recognizer:
        bad = recognizer.stream(on_event=lambda event: bad.step())
        bad.push(clips[0])
        with pytest.raises(RuntimeError, match="on_event"):
            bad.step(timeout_s=5.0)
        assert spoken(recognizer, clips[0], seed=0) == expected[0]


def test_an_event_loop_that_closes_while_it_is_woken_hurts_nobody():
    class Closing:
        def is_closed(self):
            return False

        def call_soon_threadsafe(self, callback):
            raise RuntimeError("Event loop is closed")

    _waker(Closing(), asyncio.Event())()


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
def test_cancelling_at_any_moment_frees_the_row_and_disturbs_nobody(model, clips, expected, pipeline):
    with recognizer_for(model, f"asr.pipeline={pipeline}", *BATCHED) as recognizer:
        rng = np.random.default_rng(5)
        doomed = []

        def quitter(number):
            for _ in range(4):
                stream = recognizer.stream(coordinated=bool(number % 2))
                doomed.append(stream)
                stream.push(clips[number % len(clips)])
                stream.submit()
                time.sleep(float(rng.random()) * 0.01)
                stream.cancel()
                stream.cancel()

        def stayer(number):
            assert spoken(recognizer, clips[number], seed=number) == expected[number]

        functions = [lambda n=n: quitter(n) for n in range(6)] + [lambda n=n: stayer(n) for n in range(3)]
        assert in_threads(functions) == [None] * 9
        deadline = time.monotonic() + WATCHDOG_S
        while recognizer.arena.used and time.monotonic() < deadline:
            time.sleep(0.01)
        assert recognizer.arena.used == 0
        for stream in doomed:
            with pytest.raises(StreamClosed):
                stream.step()
        assert all(lane.machine.open == 0 for lane in recognizer.pipeline.workers.lanes)


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
def test_closing_completes_what_is_queued_and_wakes_everybody(model, clips, pipeline):
    overrides = ("asr.batching.max_queue_delay_us=9000000", "asr.batching.ingress_cohort_delay_us=9000000")
    recognizer = recognizer_for(model, f"asr.pipeline={pipeline}", *BATCHED, *overrides)
    events = []
    queued = [recognizer.stream(events.append, coordinated=number > 3) for number in range(6)]
    idle = recognizer.stream(coordinated=True)
    for stream in queued:
        stream.push(clips[0][:3000])
    waiting = [lambda s=s: s.step(timeout_s=30) for s in queued]

    def closer():
        time.sleep(0.3)
        recognizer.close(timeout_s=30)

    raised = in_threads([*waiting, closer])
    assert not recognizer.pipeline.workers.alive
    assert all(error is None or isinstance(error, StreamClosed) for error in raised), raised
    assert [event.chunk for event in events].count(0) == 6, "the first chunk of each was accepted, so it completed"
    assert recognizer.arena.used == 0 and idle.done
    with pytest.raises(StreamClosed):
        recognizer.stream()


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
def test_overload_refuses_some_completes_what_it_accepted_and_recovers(model, clips, expected, pipeline):
    """Far more callers than the queue holds, each sending faster than it is served, for about two seconds."""
    accepted, refused, rows, stop = [], [], [], time.monotonic() + 2.0
    with recognizer_for(
        model, f"asr.pipeline={pipeline}", "asr.batching.enabled=true", "asr.batching.max_queue_depth=4",
        "asr.batching.state_arena_slots=24", "asr.batching.max_batch_size=4",
    ) as recognizer:  # fmt: skip

        def caller(number):
            turn = number
            while time.monotonic() < stop:
                turn += 1
                which = turn % len(clips)
                try:
                    accepted.append(spoken(recognizer, clips[which], seed=turn) == expected[which])
                except (QueueFull, ArenaFull) as full:
                    refused.append(full)

        assert in_threads([lambda n=n: caller(n) for n in range(32)]) == [None] * 32
        rows.append(recognizer.arena.used)
        assert {type(error) for error in refused} >= {QueueFull, ArenaFull}
        assert accepted and all(accepted), "what is accepted completes, and correctly"
        assert rows == [0] and all(lane.machine.open == 0 for lane in recognizer.pipeline.workers.lanes)
        assert sum(stage.rejected_items for stage in recognizer.stage_metrics()) > 0
        assert spoken(recognizer, clips[0], seed=0) == expected[0]
