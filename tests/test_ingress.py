"""Ingress cohorts with a hand-moved clock: who is waited for, until when, and that nobody else is."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workbench.batching.ingress import IngressCohorts, Wave
from workbench.config import BatchingConfig
from workbench.errors import StreamClosed

WINDOW_S = 0.020


def make(streams: str = "", cap: int = 64, window_us: int = 20_000) -> IngressCohorts:
    cohorts = IngressCohorts(BatchingConfig(max_batch_size=cap, ingress_cohort_delay_us=window_us))
    for stream in streams:
        cohorts.register(stream, 0.0)
    return cohorts


def test_a_lone_stream_never_waits() -> None:
    cohorts = make("a")
    for chunk in range(3):
        wave = cohorts.arrive("a", chunk * 0.08, audio_s=0.08)
        assert (wave.closed, wave.size, wave.reason) == (True, 1, "cohort")
    assert cohorts.next_deadline() is None


def test_the_wave_closes_when_everyone_has_arrived() -> None:
    cohorts = make("abc")
    first = cohorts.arrive("a", 0.0)
    assert not first.closed and cohorts.target == 3 and cohorts.next_deadline() == WINDOW_S
    assert cohorts.arrive("b", 0.005) is first and not first.closed
    assert cohorts.arrive("c", 0.010) is first and (first.reason, first.size) == ("cohort", 3)
    assert cohorts.target == 0
    assert cohorts.metrics.snapshot()["queue_wait_max_ms"] == 10.0


def test_three_of_eight_leave_one_window_after_the_first() -> None:
    cohorts = make("abcdefgh")
    waves = {cohorts.arrive(stream, when) for stream, when in (("a", 0.0), ("b", 0.005), ("c", 0.010))}
    assert cohorts.poll(0.0199) is None
    wave = cohorts.poll(WINDOW_S)
    assert waves == {wave} and wave is not None and (wave.size, wave.reason) == (3, "deadline")


def test_streams_that_missed_a_wave_are_idle_until_they_speak() -> None:
    cohorts = make("abc")
    cohorts.arrive("a", 0.0)
    cohorts.poll(WINDOW_S)
    assert cohorts.arrive("a", 0.08).closed, "b and c were waited for once"
    cohorts.arrive("b", 0.16)
    wave = cohorts.arrive("a", 0.161)
    assert (wave.size, wave.reason) == (2, "cohort"), "b spoke again and counts, c does not"


def test_streams_at_another_phase_are_not_waited_for() -> None:
    cohorts = make("abcd")
    start = 0.0
    for stream in "abcd":  # phases 25 ms apart: more than one window
        cohorts.arrive(stream, start, audio_s=0.1)
        cohorts.poll(start + WINDOW_S)
        start += 0.025
    for round_ in range(1, 4):
        for phase, stream in enumerate("abcd"):
            wave = cohorts.arrive(stream, round_ * 0.1 + phase * 0.025, audio_s=0.1)
            assert wave.closed and wave.size == 1


def test_streams_due_inside_the_window_are_waited_for() -> None:
    cohorts = make("ab")
    cohorts.arrive("a", 0.000, audio_s=0.08)
    cohorts.arrive("b", 0.010, audio_s=0.08)
    wave = cohorts.arrive("a", 0.080, audio_s=0.08)
    assert not wave.closed and cohorts.target == 2
    assert cohorts.arrive("b", 0.090, audio_s=0.08) is wave and wave.size == 2


@pytest.mark.parametrize("gone", ["unregister", "idle"])
def test_a_stream_that_leaves_is_not_waited_for(gone: str) -> None:
    cohorts = make("abc")
    wave = cohorts.arrive("a", 0.0)
    getattr(cohorts, gone)("b", 0.001)
    assert not wave.closed
    getattr(cohorts, gone)("c", 0.002)
    assert wave.closed and wave.size == 1 and cohorts.arrive("a", 0.08).closed


def test_the_cap_closes_a_wave_and_opens_another() -> None:
    cohorts = make("abcde", cap=2)
    first = [cohorts.arrive(stream, 0.0) for stream in "ab"]
    second = cohorts.arrive("c", 0.0)
    assert first[0] is first[1] and (first[0].size, first[0].reason) == (2, "capacity")
    assert second is not first[0] and not second.closed


def test_an_unexpected_stream_rides_along_and_takes_nobodys_place() -> None:
    cohorts = make("ab")
    wave = cohorts.arrive("a", 0.0)
    cohorts.register("c", 0.001)
    cohorts.idle("c", 0.001)
    assert cohorts.arrive("c", 0.002) is wave and not wave.closed
    cohorts.arrive("b", 0.003)
    assert wave.size == 3


def test_an_expired_wave_does_not_take_a_late_stream() -> None:
    cohorts = make("ab")
    first = cohorts.arrive("a", 0.0)
    second = cohorts.arrive("b", 0.025)  # nobody polled in between
    assert first.closed and first.size == 1 and second is not first


def test_arriving_twice_counts_once() -> None:
    cohorts = make("ab")
    assert cohorts.arrive("a", 0.0) is cohorts.arrive("a", 0.001)
    wave = cohorts.arrive("b", 0.002)
    assert wave.closed and wave.size == 2 and wave.arrivals == {"a": 0.0, "b": 0.002}


def test_no_window_means_no_wave() -> None:
    cohorts = make("ab", window_us=0)
    waves = [cohorts.arrive("a", 0.0), cohorts.arrive("b", 0.0)]
    assert (waves[0].size, waves[0].reason) == (1, "drain") and waves[1].closed


def test_a_cancelled_stream_leaves_no_open_wave_behind() -> None:
    cohorts = make("ab")
    wave = cohorts.arrive("a", 0.0)
    cohorts.unregister("a", 0.001)
    assert wave.closed and cohorts.next_deadline() is None
    assert cohorts.arrive("b", 0.002).size == 1


def test_close_lets_go_and_refuses() -> None:
    cohorts = make("ab")
    wave = cohorts.arrive("a", 0.0)
    cohorts.close(0.001)
    assert wave.reason == "shutdown"
    for late in (lambda: cohorts.arrive("b", 0.002), lambda: cohorts.register("c", 0.002)):
        with pytest.raises(StreamClosed):
            late()
    cohorts.unregister("a", 0.003)
    assert cohorts.live == 1


def test_registration_is_checked() -> None:
    cohorts = make("a")
    with pytest.raises(ValueError, match="already registered"):
        cohorts.register("a", 0.0)
    for stranger in (lambda: cohorts.arrive("x", 0.0), lambda: cohorts.idle("x", 0.0)):
        with pytest.raises(StreamClosed, match="not registered"):
            stranger()
    cohorts.unregister("x", 0.0)
    cohorts.unregister("a", 0.0)
    cohorts.unregister("a", 0.0)
    assert cohorts.live == 0


class Ingress(RuleBasedStateMachine):
    """Streams come, speak, pause and go; time moves in whole units and the window is three of them."""

    @initialize(cap=st.integers(1, 4))
    def start(self, cap: int) -> None:
        self.cohorts = IngressCohorts(BatchingConfig(max_batch_size=cap, ingress_cohort_delay_us=3_000_000))
        self.cap, self.now, self.opened = cap, 0.0, 0
        self.live: list[int] = []
        self.waiting: dict[Hashable, tuple[Wave, float]] = {}
        self.due: dict[Hashable, float | None] = {}  # None: idle or in the open wave
        self.next_due: dict[Hashable, float] = {}

    @rule(by=st.integers(1, 3))
    def time_passes(self, by: int) -> None:
        for _ in range(by):
            self.now += 1
            deadline = self.cohorts.next_deadline()
            closed = self.cohorts.poll(self.now)
            assert (closed is not None) == (deadline is not None and deadline <= self.now)
            self.settle(missed_until=deadline)

    @rule()
    def register(self) -> None:
        self.cohorts.register(self.opened, self.now)
        self.live.append(self.opened)
        self.due[self.opened] = self.now
        self.opened += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), audio_s=st.sampled_from([0.0, 2.0, 5.0]))
    def arrive(self, data: st.DataObject, audio_s: float) -> None:
        stream = data.draw(st.sampled_from(self.live))
        wave = self.cohorts.arrive(stream, self.now, audio_s)
        self.due[stream], self.next_due[stream] = None, self.now + audio_s
        self.waiting.setdefault(stream, (wave, self.now))
        assert self.waiting[stream][0] is wave
        self.settle()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), end=st.booleans())
    def pause_or_end(self, data: st.DataObject, end: bool) -> None:
        stream = data.draw(st.sampled_from(self.live))
        if end:
            self.live.remove(stream)
            waited = self.waiting.pop(stream, None)
            self.cohorts.unregister(stream, self.now)
            del self.due[stream]
            assert waited is None or waited[0].closed or waited[0].size
        else:
            self.cohorts.idle(stream, self.now)
            self.due[stream] = None
        self.settle()

    def settle(self, missed_until: float | None = None) -> None:
        """Move members of closed waves on; those that a wave expired without are idle."""
        closed = {wave for wave, _ in self.waiting.values() if wave.closed}
        for wave in closed:
            assert 1 <= wave.size <= self.cap
            if wave.reason == "deadline":
                for stream, due in self.due.items():
                    if due is not None and missed_until is not None and due <= missed_until:
                        self.due[stream] = None
        for stream, (wave, _) in list(self.waiting.items()):
            if wave in closed:
                del self.waiting[stream]
                self.due[stream] = self.next_due[stream]

    @invariant()
    def waits_are_for_somebody_and_bounded(self) -> None:
        if not hasattr(self, "cohorts"):
            return
        waves = {wave for wave, _ in self.waiting.values()}
        assert len(waves) <= 1, "one wave is open at a time"
        assert self.cohorts.live == len(self.live)
        for wave in waves:
            expected = [s for s, due in self.due.items() if due is not None and due <= wave.deadline]
            assert expected, "a wave is open only while a stream with audio due is missing"
            assert self.cohorts.target == min(self.cap, len(self.waiting) + len(expected))
            assert wave.deadline - 3.0 <= self.now < wave.deadline
        metrics = self.cohorts.metrics
        assert metrics.items == sum(size * count for size, count in metrics.batch_sizes.items())
        assert metrics.batches == sum(metrics.reasons.values())


TestIngress = Ingress.TestCase
TestIngress.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
