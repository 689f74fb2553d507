"""Ingress cohorts: network streams that speak at about the same time are let in together, so that their work batches without queueing.

    cohorts = IngressCohorts(BatchingConfig(ingress_cohort_delay_us=20_000))
    cohorts.register("a"); cohorts.register("b")
    wave = cohorts.arrive("a", now=0.000, audio_s=0.08)      # open: b has audio due
    cohorts.arrive("b", now=0.004, audio_s=0.08).closed      # True, for both; wave.size is 2

Opting in is `register`; whoever does not register never waits here. A wave closes when every live stream with audio due inside its window has
arrived, when it is as large as a batch may be, or one window after its first arrival. A stream has audio due when the audio that it
sent last has been spoken (`audio_s` after that arrival); a stream that lets a wave expire without it is idle until it speaks
again. So idle streams, and streams that speak at another phase, are not waited for, and a lone stream never waits.
A stream's last flush does not arrive here: unregister it first. Time is an argument in seconds; there is no thread and no clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Hashable

from workbench.batching.metrics import Reason, StageMetrics
from workbench.config import BatchingConfig
from workbench.errors import StreamClosed

_Due = tuple[float, int, Hashable]


class Wave:
    """Streams let in together. `reason` is None while it is open; then `size` is the cohort for the work that follows.

    arrivals: stream → arrival in seconds; deadline: when it closes at the latest, in seconds.
    """

    __slots__ = ("arrivals", "deadline", "reason")

    def __init__(self, deadline: float) -> None:
        self.arrivals: dict[Hashable, float] = {}
        self.deadline = deadline
        self.reason: Reason | None = None

    @property
    def closed(self) -> bool:
        """Whether its streams may go on."""
        return self.reason is not None

    @property
    def size(self) -> int:
        """Streams in it."""
        return len(self.arrivals)


class IngressCohorts:
    """The barrier of all coordinated streams of one recogniser."""

    def __init__(self, batching: BatchingConfig, metrics: StageMetrics | None = None) -> None:
        self.cap = batching.max_batch_size
        self.window_s = batching.ingress_cohort_delay_us * 1e-6
        self.metrics = metrics if metrics is not None else StageMetrics("ingress")
        self.closed = False
        self._registered = 0
        # Live streams: their entry in `_due`, or None while idle or in the open wave. `_due` is sorted by time.
        self._streams: dict[Hashable, _Due | None] = {}
        self._due: list[_Due] = []
        self._numbers: dict[Hashable, int] = {}
        self._wave: Wave | None = None
        self._next_due: dict[Hashable, float] = {}

    @property
    def live(self) -> int:
        """Registered streams, idle ones included."""
        return len(self._streams)

    @property
    def target(self) -> int:
        """Streams that the open wave waits for, those that have arrived included; 0 with no open wave."""
        if self._wave is None:
            return 0
        return min(self.cap, self._wave.size + self._pending(self._wave))

    def register(self, stream: Hashable, now: float) -> None:
        """A stream opts in. It opened in order to speak, so it has audio due from `now` until it lets one wave expire.

        Raises StreamClosed after `close`, ValueError for a stream that is registered.
        """
        self._check_open()
        if stream in self._streams:
            raise ValueError(f"stream {stream!r} is already registered")
        self._numbers[stream] = self._registered
        self._registered += 1
        self._streams[stream] = None
        self._expect(stream, now)

    def unregister(self, stream: Hashable, now: float) -> None:
        """A stream ended, was cancelled, or is about to flush: nobody waits for it. Unknown streams are ignored, so it may run twice."""
        if stream not in self._streams:
            return
        self._forget(stream)
        del self._streams[stream], self._numbers[stream]
        wave = self._wave
        if wave is not None and wave.arrivals.pop(stream, None) is not None:
            self._next_due.pop(stream)
            if not wave.arrivals:
                # Whoever still looks at the wave of a cancelled stream must not wait for a deadline that nobody polls.
                wave.reason, self._wave = "shutdown", None
        self._close_if_complete(now)

    def idle(self, stream: Hashable, now: float) -> None:
        """A live stream will not send for a while (its client paused): nobody waits for it until it arrives again."""
        self._check_registered(stream)
        self._forget(stream)
        self._close_if_complete(now)

    def arrive(self, stream: Hashable, now: float, audio_s: float = 0.0) -> Wave:
        """A stream has `audio_s` seconds of new audio; it goes on once the returned wave is closed, perhaps at once.

        `audio_s` tells when its next audio is due; 0 means that it is always due. Raises StreamClosed after `close` or for a stream
        that is not registered.
        """
        self._check_open()
        self._check_registered(stream)
        self.poll(now)
        self._forget(stream)
        if self._wave is None:
            self._wave = Wave(now + self.window_s)
        wave = self._wave
        wave.arrivals.setdefault(stream, now)
        self._next_due[stream] = now + audio_s
        self._close_if_complete(now)
        return wave

    def poll(self, now: float) -> Wave | None:
        """Close the open wave if its window is over, and return it then. The streams that it waited for in vain are idle from here on."""
        wave = self._wave
        if wave is None or now < wave.deadline:
            return None
        for _, _, stream in self._due[: self._pending(wave)]:
            self._forget(stream)
        return self._close(wave, now, "deadline")

    def next_deadline(self) -> float | None:
        """When `poll` closes the open wave at the latest, in seconds; None with no open wave."""
        return None if self._wave is None else self._wave.deadline

    def close(self, now: float) -> None:
        """Refuse arrivals and let the open wave go on."""
        self.closed = True
        if self._wave is not None:
            self._close(self._wave, now, "shutdown")

    def _pending(self, wave: Wave) -> int:
        """Streams outside the wave whose audio is due before it must close: the length of a prefix of `_due`."""
        return bisect_right(self._due, wave.deadline, key=lambda entry: entry[0])

    def _close_if_complete(self, now: float) -> None:
        wave = self._wave
        if wave is None:
            return
        if wave.size >= self.cap:
            self._close(wave, now, "capacity")
        elif not self._pending(wave):
            self._close(wave, now, "cohort")
        elif not self.window_s:
            self._close(wave, now, "drain")

    def _close(self, wave: Wave, now: float, reason: Reason) -> Wave:
        wave.reason, self._wave = reason, None
        for stream in wave.arrivals:
            self._expect(stream, self._next_due.pop(stream))
        waited_s = tuple(max(0.0, now - arrived_at) for arrived_at in wave.arrivals.values())
        self.metrics.dispatched(reason, waited_s, wave.size, self.live)
        return wave

    def _expect(self, stream: Hashable, due_at: float) -> None:
        entry = self._streams[stream] = (due_at, self._numbers[stream], stream)
        insort(self._due, entry)

    def _forget(self, stream: Hashable) -> None:
        entry = self._streams[stream]
        if entry is not None:
            del self._due[bisect_left(self._due, entry)]
            self._streams[stream] = None

    def _check_open(self) -> None:
        if self.closed:
            raise StreamClosed("ingress: closed; streams are accepted only before close")

    def _check_registered(self, stream: Hashable) -> None:
        if stream not in self._streams:
            raise StreamClosed(f"stream {stream!r} is not registered: it ended, or never opted in")
