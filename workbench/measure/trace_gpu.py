"""The GPU's side of a trace: calls joined to the work they submitted, clocks made to agree, and lost work found out.

    gpu = gpu_timeline(events, "step.json.gz")
    gpu.submitted_in(window)          # the calls of a step, and the kernels, copies and fills that they ran

Kernels are joined to calls N : 1 by correlation id: all kernels of a graph launch carry the launch's id. Profilers are known to
lose kernels silently; a trace in which any launch of a step ran nothing is refused, because its numbers would look plausible.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from workbench.errors import RecordError
from workbench.measure.chrome_trace import CALL_CATEGORIES, DEVICE_CATEGORIES, Event

KERNEL_LAUNCHES = frozenset(
    {
        *("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel"),
        *("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel"),
    }
)
GRAPH_LAUNCHES = frozenset({"cudaGraphLaunch", "cuGraphLaunch"})
LAUNCHES = KERNEL_LAUNCHES | GRAPH_LAUNCHES
COPY_CALLS = ("cudaMemcpy", "cuMemcpy")
FILL_CALLS = ("cudaMemset", "cuMemset")

CLOCK_LIMIT_US = 1000.0  # further apart than this, the profiler did not align the two clocks and no gap has a cause
CLOCK_NOTE_US = 5.0
UNTIMED_LIMIT = 0.01  # share of device work without an end time above which busy time means nothing


@dataclass(frozen=True)
class GpuTimeline:
    """calls and work ordered by start, work already on the host's clock; submitted_us[i] is when work[i] was launched (−inf: unknown).

    ran: work by correlation id; orphans: work whose call is not in the trace; shift_us: what was added to device times.
    """

    calls: tuple[Event, ...]
    work: tuple[Event, ...]
    submitted_us: tuple[float, ...]
    ran: Mapping[int, Sequence[Event]]
    orphans: tuple[Event, ...]
    shift_us: float
    notes: tuple[str, ...]

    def submitted_in(self, window: Event) -> tuple[list[Event], list[Event]]:
        """The calls made in a window, and the work that they submitted plus any work there whose call is unknown."""
        called = within(self.calls, window)
        done = [event for call in called for event in self.ran.get(call.correlation, ())]
        return called, [*done, *within(self.orphans, window)]

    def device_us(self, call: Event) -> float:
        """Summed device time of the work that a call submitted, in µs."""
        return sum(event.duration_us for event in self.ran.get(call.correlation, ()))


def gpu_timeline(events: Sequence[Event], source: str) -> GpuTimeline:
    """Join, align and check the GPU side of events ordered by start. Raises RecordError where numbers would be wrong."""
    work = [event for event in events if event.category in DEVICE_CATEGORIES]
    notes = _refuse_unusable(work, source)
    calls = _calls(events)
    call_of = {call.correlation: call for call in calls if call.correlation >= 0}
    shift_us, clock_notes = _clock_shift(events, work, call_of, source)
    work = [replace(e, start_us=e.start_us + shift_us, duration_us=max(e.duration_us, 0.0)) for e in work]
    ran: dict[int, list[Event]] = defaultdict(list)
    for event in work:
        if event.correlation >= 0:
            ran[event.correlation].append(event)
    orphans = tuple(event for event in work if event.correlation not in call_of)
    submitted = tuple(_submit_times(work, call_of))
    return GpuTimeline(tuple(calls), tuple(work), submitted, dict(ran), orphans, shift_us, (*notes, *clock_notes))


def refuse_losses(where: str, gpu: GpuTimeline, window: Event, nodes_per_replay: int | None) -> None:
    """Every launch of a step must have run its kernels: one of an ordinary launch, `nodes_per_replay` (at least 1) of a graph's."""
    called, done = gpu.submitted_in(window)
    ran = [(call, sum(e.category == "kernel" for e in gpu.ran.get(call.correlation, ()))) for call in called]
    single = [kernels for call, kernels in ran if call.name in KERNEL_LAUNCHES]
    if lost := single.count(0):
        raise RecordError(
            f"{where}: {lost} of {len(single)} launches have no kernel; the profiler lost them, or the step captured a graph: "
            "profile again, once all graphs are captured"
        )
    replays = [kernels for call, kernels in ran if call.name in GRAPH_LAUNCHES]
    if wrong := [n for n in replays if (n == 0 if nodes_per_replay is None else n != nodes_per_replay)]:
        wanted = "at least 1" if nodes_per_replay is None else str(nodes_per_replay)
        raise RecordError(
            f"{where}: {len(wrong)} of {len(replays)} graph replays ran {wrong[0]} kernels, needed are {wanted}; the profiler lost "
            "kernels, or traced graphs as a whole"
        )
    if not any(event.category == "kernel" for event in done):
        raise RecordError(f"{where}: no kernels; the profiler lost them, or the step does nothing on the GPU")


def within(events: Sequence[Event], window: Event) -> list[Event]:
    """The events that start inside a window, from events ordered by start."""
    low = bisect_left(events, window.start_us, key=lambda event: event.start_us)
    high = bisect_left(events, window.end_us, key=lambda event: event.start_us)
    return list(events[low:high])


def running(gpu: GpuTimeline, windows: Sequence[Event]) -> list[list[tuple[Event, float]]]:
    """Per window, the work that overlaps it (of any step, on any stream) with the time it was submitted, ordered by start."""
    starts, latest = [event.start_us for event in gpu.work], list(accumulate((event.end_us for event in gpu.work), max))
    found = []
    for window in windows:
        span = range(bisect_right(latest, window.start_us), bisect_left(starts, window.end_us))
        overlapping = [(gpu.work[i], gpu.submitted_us[i]) for i in span if gpu.work[i].end_us > window.start_us]
        found.append(sorted(overlapping, key=lambda pair: (pair[0].start_us, pair[1])))
    return found


def _calls(events: Sequence[Event]) -> list[Event]:
    """Launch, copy and fill calls. A runtime call and the driver call beneath it share an id and count once."""
    found = [
        event
        for event in events
        if event.category in CALL_CATEGORIES
        and (event.name in LAUNCHES or event.name.startswith(COPY_CALLS + FILL_CALLS))
    ]
    first: dict[int, Event] = {}
    return [call for call in found if call.correlation < 0 or first.setdefault(call.correlation, call) is call]


def _refuse_unusable(work: Sequence[Event], source: str) -> list[str]:
    devices = sorted({event.device for event in work})
    untimed = sum(event.duration_us < 0 for event in work)
    if not any(event.category == "kernel" for event in work):
        raise RecordError(
            f"{source}: no kernels in a trace of a GPU; the profiler lost them, profile again in a fresh process"
        )
    if len(devices) > 1:
        raise RecordError(f"{source}: work of the GPUs {devices}; one GPU at a time can be accounted for")
    if untimed > UNTIMED_LIMIT * len(work):
        raise RecordError(f"{source}: {untimed} of {len(work)} pieces of device work have no end time; allowed is 1 %")
    return [f"{untimed} of {len(work)} pieces of device work have no end time and count as 0 ms"] if untimed else []


def _clock_shift(
    events: Sequence[Event], work: Sequence[Event], call_of: Mapping[int, Event], source: str
) -> tuple[float, list[str]]:
    """µs to add to device times so that no work starts before its call or ends after a synchronisation that waited for it.

    0 where the trace is consistent as it is. One constant for the whole trace, so gaps between kernels never change.
    """
    pairs = sorted(
        ((call_of[e.correlation].start_us, e) for e in work if e.correlation in call_of), key=lambda pair: pair[0]
    )
    least = max((called_us - event.start_us for called_us, event in pairs), default=0.0)
    called_at, latest = [called_us for called_us, _ in pairs], list(accumulate((e.end_us for _, e in pairs), max))
    syncs = [e for e in events if e.name == "cudaDeviceSynchronize" and e.category in CALL_CATEGORIES]
    waited_for = ((sync, bisect_left(called_at, sync.start_us)) for sync in syncs)
    most = min((sync.end_us - latest[count - 1] for sync, count in waited_for if count), default=float("inf"))
    shift_us = max(least, 0.0) or min(most, 0.0)
    if abs(shift_us) > CLOCK_LIMIT_US:
        raise RecordError(
            f"{source}: the clocks of host and GPU disagree by {abs(shift_us):.0f} µs (work starts before its launch, or ends after "
            f"the wait for it); allowed are {CLOCK_LIMIT_US:.0f} µs"
        )
    notes = (
        [f"device times moved by {shift_us:+.1f} µs to agree with the host's"] if abs(shift_us) > CLOCK_NOTE_US else []
    )
    if least - most > CLOCK_NOTE_US:
        notes.append(f"the clocks drift by {least - most:.1f} µs within the trace; smaller gaps have no certain cause")
    return shift_us, notes


def _submit_times(work: Sequence[Event], call_of: Mapping[int, Event]) -> list[float]:
    """When each piece of work was submitted. One without a call in the trace is taken to come with its successor on the stream."""
    times, upcoming = [float("-inf")] * len(work), dict[int, float]()
    for index in range(len(work) - 1, -1, -1):
        event = work[index]
        if event.correlation in call_of:
            upcoming[event.stream] = call_of[event.correlation].start_us
        times[index] = upcoming.get(event.stream, float("-inf"))
    return times
