"""Hand-made traces with answers worked out on paper, properties against a brute-force count, and committed real traces."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import RecordError
from workbench.measure import chrome_trace
from workbench.measure.trace import CAUSES, Event, Trace, TraceSummary, analyse, load_trace, save_trace

DATA = Path(__file__).parent / "data" / "traces"
HOST = "1/1"


def step(start: float, duration: float, name: str = "workbench.step", thread: str = HOST) -> Event:
    return Event(name, "user_annotation", thread, start, duration)


def call(
    start: float, correlation: int, name: str = "cudaLaunchKernel", category: str = "cuda_runtime", duration: float = 1
) -> Event:
    return Event(name, category, HOST, start, duration, correlation)


def sync(start: float, end: float) -> Event:
    return Event("cudaDeviceSynchronize", "cuda_runtime", HOST, start, end - start, 999_999)


def kernel(
    start: float, duration: float, correlation: int, stream: int = 7, name: str = "k", category: str = "kernel"
) -> Event:
    return Event(name, category, f"0/{stream}", start, duration, correlation, stream, 0)


def operator(name: str, start: float, duration: float, thread: str = HOST) -> Event:
    return Event(name, "cpu_op", thread, start, duration)


def account(*events: Event, **options: object) -> TraceSummary:
    return analyse(Trace(events, "made"), **options)  # type: ignore[arg-type]


def gaps(summary: TraceSummary, index: int = 0) -> list[tuple[float, float, str]]:
    return [(gap.start_us, gap.end_us, gap.cause) for gap in summary.steps[index].gaps]


# --- counts, union and causes ----------------------------------------------------------------------------------------------


def test_every_cause_of_idle_time_in_one_eager_step() -> None:
    """Host: calls at 10, 20, 100. Kernels: 15–25, 28–60 (submitted at 20, so a kernel gap), 105–120 (launched after 60, so host)."""
    summary = account(
        step(0, 200),
        *(call(10, 1), call(20, 2), call(100, 3)),
        *(kernel(15, 10, 1), kernel(28, 32, 2), kernel(105, 15, 3)),
    )
    assert gaps(summary) == [(0, 15, "host_late"), (25, 28, "kernel_gap"), (60, 105, "host_late"), (120, 200, "end")]
    numbers = summary.numbers()
    assert (numbers["launches_per_step"], numbers["kernels_per_step"]) == (3, 3)
    assert numbers["gpu_busy_share"] == pytest.approx(57 / 200)
    assert numbers["gpu_busy_ms_per_step"] == pytest.approx(0.057)
    assert numbers["idle_host_late_share"] == pytest.approx(60 / 200)
    assert numbers["idle_kernel_gap_share"] == pytest.approx(3 / 200)
    assert numbers["idle_end_share"] == pytest.approx(80 / 200)


def test_overlap_on_one_and_on_several_streams_is_counted_once() -> None:
    """Stream 7: 10–40 and, launched to overlap it, 35–50; stream 13: 20–70. Union 10–70, sum 95."""
    summary = account(
        step(0, 100),
        *(call(1, 1), call(2, 2), call(3, 3)),
        *(kernel(10, 30, 1), kernel(35, 15, 2), kernel(20, 50, 3, stream=13)),
    )
    only = summary.steps[0]
    assert (only.busy_us, only.work_us, only.idle_us()) == (60, 95, 40)
    assert gaps(summary) == [(0, 10, "host_late"), (70, 100, "end")]


def test_a_gap_ended_by_two_streams_is_the_hosts_only_if_nothing_was_submitted() -> None:
    """Both kernels start at 60; the one of stream 13 was submitted at 5 and waited, so the GPU is responsible."""
    summary = account(
        step(0, 80),
        *(call(4, 1), call(5, 2), call(50, 3)),
        *(kernel(10, 20, 1), kernel(60, 5, 2, stream=13), kernel(60, 10, 3)),
    )
    assert gaps(summary)[1] == (30, 60, "kernel_gap")


@pytest.mark.parametrize("name,category", [("cudaGraphLaunch", "cuda_runtime"), ("cuGraphLaunch", "cuda_driver")])
def test_a_graph_launch_is_one_launch_and_all_of_its_kernels(name: str, category: str) -> None:
    """One replay of three nodes, 1.5 µs apart; all share the launch's id. Only the time before the first is the host's."""
    summary = account(
        step(0, 50),
        call(2, 7, name, category),
        *(
            kernel(10, 4, 7),
            kernel(15.5, 4, 7),
            kernel(21, 4, 7, category="gpu_memcpy", name="Memcpy DtoD"),
            kernel(26.5, 4, 7),
        ),
        nodes_per_replay=3,
    )
    only = summary.steps[0]
    assert (only.launches, only.graph_launches, only.kernels, only.copies) == (1, 1, 3, 1)
    assert [cause for _, _, cause in gaps(summary)] == ["host_late", "kernel_gap", "kernel_gap", "kernel_gap", "end"]
    assert only.idle_us("kernel_gap") == pytest.approx(4.5)


@pytest.mark.parametrize(
    "name,category",
    [
        ("cudaLaunchKernel", "cuda_runtime"),
        ("cudaLaunchKernelExC", "cuda_runtime"),
        ("cuLaunchKernel", "cuda_driver"),
        ("cuLaunchKernelEx", "cuda_driver"),
    ],
)
def test_every_way_to_launch_a_kernel_counts(name: str, category: str) -> None:
    assert account(step(0, 20), call(1, 1, name, category), kernel(5, 5, 1)).steps[0].launches == 1


def test_copies_and_fills_are_work_but_not_kernels() -> None:
    summary = account(
        step(0, 100),
        *(call(1, 1), call(2, 2, "cudaMemcpyAsync"), call(3, 3, "cudaMemsetAsync")),
        *(kernel(10, 10, 1), kernel(20, 10, 2, category="gpu_memcpy"), kernel(30, 10, 3, category="gpu_memset")),
    )
    only = summary.steps[0]
    assert (only.launches, only.copy_calls, only.fill_calls) == (1, 1, 1)
    assert (only.kernels, only.copies, only.fills, only.busy_us) == (1, 1, 1, 30)
    assert {row["kind"] for row in summary.rows()} == {"kernel", "copy", "fill"}


def test_a_driver_call_under_a_runtime_call_counts_once() -> None:
    summary = account(step(0, 20), call(1, 1), call(1.2, 1, "cuLaunchKernel", "cuda_driver", 0.5), kernel(5, 5, 1))
    assert summary.steps[0].launches == 1


def test_work_left_over_from_the_step_before_is_busy_time_but_not_this_steps_kernel() -> None:
    """Step 0 does not wait for its kernel 5–130, which runs 30 µs into step 1 (100–200)."""
    summary = account(
        *(step(0, 90), step(100, 100)),
        *(call(1, 1), call(110, 2)),
        *(kernel(5, 125, 1), kernel(150, 10, 2)),
    )
    assert [s.kernels for s in summary.steps] == [1, 1]
    assert [s.busy_us for s in summary.steps] == [85, 40]
    assert gaps(summary, 1) == [(130, 150, "kernel_gap"), (160, 200, "end")]


def test_kernels_whose_launch_is_not_in_the_trace_are_named_and_judged_by_their_successor() -> None:
    """The kernel 40–45 has no call. Its successor on the stream was launched at 38, after the work before had ended at 20."""
    summary = account(
        step(0, 100), *(call(1, 1), call(38, 3)), *(kernel(10, 10, 1), kernel(40, 5, 2), kernel(46, 4, 3))
    )
    assert (summary.steps[0].launches, summary.steps[0].kernels) == (2, 3)
    assert gaps(summary)[1:3] == [(20, 40, "host_late"), (45, 46, "kernel_gap")]
    assert any("1 kernels have no launch call" in note for note in summary.notes)


def test_top_rows_and_stages() -> None:
    """The encoder launches 10 + 20 µs of work in 30 µs of host time, the decoder 5 µs; a kernel outside of both takes 5."""
    summary = account(
        step(0, 100),
        *(step(5, 30, "workbench.encoder"), step(40, 10, "workbench.decoder"), step(40, 3, "other", thread="1/2")),
        *(call(6, 1), call(8, 2), call(41, 3), call(60, 4)),
        *(
            kernel(10, 10, 1, name="gemm"),
            kernel(20, 20, 2, name="gemm"),
            kernel(45, 5, 3, name="add"),
            kernel(65, 5, 4, name="add"),
        ),
    )
    rows = {row["name"]: row for row in summary.rows()}
    assert list(rows) == ["workbench.encoder", "workbench.decoder", "other", "gemm", "add"]
    encoder = rows["workbench.encoder"]
    assert (encoder["launches_per_step"], encoder["ms_per_step"], encoder["host_ms_per_step"]) == (2, 0.03, 0.03)
    assert encoder["share"] == pytest.approx(30 / 40) and rows["gemm"]["share"] == pytest.approx(30 / 40)
    assert (rows["other"]["launches_per_step"], rows["other"]["ms_per_step"]) == (0, 0)
    assert (rows["add"]["calls_per_step"], rows["add"]["ms_per_step"]) == (2, 0.01)
    assert len({frozenset(row) for row in summary.rows()}) == 1


# --- which windows ---------------------------------------------------------------------------------------------------------


def test_steps_are_ours_if_annotated_else_the_profilers_else_any_name_asked_for() -> None:
    work = (call(12, 1), kernel(15, 5, 1), call(52, 2), kernel(55, 5, 2))
    theirs = (step(0, 40, "ProfilerStep#3"), step(40, 40, "ProfilerStep#4"))
    assert [s.name for s in account(*theirs, *work).steps] == ["ProfilerStep#3", "ProfilerStep#4"]
    assert [s.window_us for s in account(*theirs, step(11, 20), *work).steps] == [20]
    assert [s.window_us for s in account(*theirs, step(10, 15, "mine"), *work, steps="mine").steps] == [15]


@pytest.mark.parametrize(
    "windows,message",
    [
        ([], "annotations found: none"),
        ([step(0, 50, "other")], "annotations found: other"),
        ([step(0, 50), step(30, 50)], "overlap"),
        ([step(0, 0)], "no duration"),
    ],
)
def test_windows_that_cannot_be_accounted_for(windows: list[Event], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        account(*windows, call(1, 1), kernel(5, 5, 1))


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(RecordError, match="'tpu'"):
        account(step(0, 10), device="tpu")


# --- lost kernels ----------------------------------------------------------------------------------------------------------

WHOLE = (step(0, 100), call(1, 1), call(2, 2, "cudaGraphLaunch"), kernel(10, 5, 1), kernel(20, 5, 2), kernel(30, 5, 2))


@pytest.mark.parametrize(
    "lost,message",
    [
        ({3, 4, 5}, "no kernels in a trace of a GPU"),
        ({3}, "1 of 1 launches have no kernel"),
        ({4, 5}, "1 of 1 graph replays ran 0 kernels"),
        ({5}, "1 of 1 graph replays ran 1 kernels, needed are 2"),
    ],
)
def test_lost_kernels_are_refused(lost: set[int], message: str) -> None:
    assert account(*WHOLE, nodes_per_replay=2).steps[0].kernels == 3
    with pytest.raises(RecordError, match=message):
        account(*(event for i, event in enumerate(WHOLE) if i not in lost), nodes_per_replay=2)


def test_a_graph_traced_as_a_whole_is_refused_even_if_the_node_count_is_unknown() -> None:
    with pytest.raises(RecordError, match="at least 1"):
        account(*WHOLE[:4])


def test_a_step_without_any_gpu_work_is_refused_although_others_have_some() -> None:
    with pytest.raises(RecordError, match="step 1: no kernels"):
        account(*WHOLE, step(200, 10))


def test_a_trace_said_to_be_of_a_gpu_must_hold_kernels() -> None:
    events = (step(0, 10), operator("aten::add", 1, 5))
    assert account(*events).device == "cpu"
    with pytest.raises(RecordError, match="no kernels"):
        account(*events, device="cuda")


def test_losses_outside_of_the_steps_do_not_matter() -> None:
    assert account(call(-50, 90), *WHOLE).steps[0].launches == 2


def test_varying_kernel_counts_are_noted() -> None:
    summary = account(*WHOLE, step(100, 50), call(101, 3), kernel(110, 5, 3))
    assert summary.numbers()["kernels_per_step"] == 2
    assert "kernels per step vary from 1 to 3" in summary.notes


def test_two_gpus_are_refused() -> None:
    other = Event("k", "kernel", "1/7", 40, 5, 5, 7, 1)
    with pytest.raises(RecordError, match=r"GPUs \[0, 1\]"):
        account(*WHOLE, call(3, 5), other)


# --- clocks ----------------------------------------------------------------------------------------------------------------


def test_a_gpu_clock_that_is_early_is_moved_to_the_launch() -> None:
    """The kernel seems to start 8 µs before its launch call at 20: everything moves by 8, the gap between kernels stays 3."""
    summary = account(step(0, 100), call(20, 1), call(22, 2), kernel(12, 10, 1), kernel(25, 10, 2))
    assert summary.clock_shift_us == 8
    assert gaps(summary) == [(0, 20, "host_late"), (30, 33, "kernel_gap"), (43, 100, "end")]
    assert any("+8.0 µs" in note for note in summary.notes)


def test_a_gpu_clock_that_is_late_is_moved_before_the_end_of_the_wait() -> None:
    """The synchronisation that waited for the kernel returned at 60, the kernel seems to end at 70."""
    summary = account(step(0, 80), call(5, 1), sync(10, 60), kernel(30, 40, 1))
    assert summary.clock_shift_us == -10
    assert gaps(summary) == [(0, 20, "host_late"), (60, 80, "end")]


def test_consistent_clocks_are_left_alone() -> None:
    summary = account(step(0, 80), call(5, 1), sync(10, 60), kernel(30, 20, 1))
    assert (summary.clock_shift_us, summary.notes) == (0, ())


@pytest.mark.parametrize("start", [-5000.0, 5000.0])
def test_clocks_that_were_never_aligned_are_refused(start: float) -> None:
    with pytest.raises(RecordError, match="clocks of host and GPU disagree"):
        account(step(0, 80), call(5, 1), sync(10, 60), kernel(start, 20, 1))


def test_a_drifting_clock_is_noted() -> None:
    """Kernel 1 starts 10 µs before its launch; kernel 2 ends 20 µs after the wait for it: no one shift mends both."""
    summary = account(
        *(step(0, 80), step(100, 100)),
        *(call(20, 1), sync(30, 60), call(110, 2), sync(120, 150)),
        *(kernel(10, 20, 1), kernel(140, 30, 2)),
    )
    assert any("drift by 30.0 µs" in note for note in summary.notes)


def test_order_of_the_file_does_not_matter() -> None:
    events = (
        step(0, 200),
        call(10, 1),
        call(20, 2),
        call(100, 3),
        kernel(15, 10, 1),
        kernel(28, 32, 2),
        kernel(105, 15, 3),
    )
    assert account(*reversed(events)) == account(*events)


def test_a_few_kernels_without_end_count_as_nothing_and_are_noted_many_are_refused() -> None:
    good = [event for i in range(200) for event in (call(i, i), kernel(1000 + 10 * i, 5, i))]
    bad = (call(500, 900), kernel(990, -40, 900))
    summary = account(step(0, 4000), *good, *bad)
    assert (summary.steps[0].kernels, summary.steps[0].busy_us, summary.steps[0].work_us) == (201, 1000, 1000)
    assert any("1 of 201" in note for note in summary.notes)
    with pytest.raises(RecordError, match="no end time"):
        account(step(0, 4000), *good[:20], *bad)


# --- CPU -------------------------------------------------------------------------------------------------------------------


def test_cpu_operators_instead_of_kernels() -> None:
    """linear 10–50 calls addmm 15–45; relu 60–70. Another thread's operators are not the step's."""
    summary = account(
        step(0, 100),
        step(5, 50, "workbench.encoder"),
        *(
            operator("linear", 10, 40),
            operator("addmm", 15, 30),
            operator("relu", 60, 10),
            operator("x", 20, 70, "1/2"),
        ),
    )
    assert gaps(summary) == [(0, 10, "host_late"), (50, 60, "host_late"), (70, 100, "end")]
    assert summary.numbers() == {
        "operators_per_step": 3,
        "thread_busy_ms_per_step": pytest.approx(0.05),
        "thread_busy_share": pytest.approx(0.5),
        "thread_idle_share": pytest.approx(0.5),
        "idle_host_late_share": pytest.approx(0.2),
        "idle_kernel_gap_share": 0,
        "idle_end_share": pytest.approx(0.3),
    }
    rows = {row["name"]: row["ms_per_step"] for row in summary.rows()}
    assert rows == {"workbench.encoder": 0.04, "addmm": 0.03, "linear": 0.01, "relu": 0.01}


def test_a_cpu_step_without_operators_is_refused() -> None:
    with pytest.raises(RecordError, match="step 0: no operators"):
        account(step(0, 100), operator("x", 20, 70, "1/2"))


# --- properties ------------------------------------------------------------------------------------------------------------


@st.composite
def gpu_steps(draw: st.DrawFn) -> tuple[list[Event], int]:
    """One step of integer µs with kernels anywhere in and around it, each launched at or before its start."""
    length = draw(st.integers(1, 120))
    events = [step(0, length), call(0, 0), kernel(draw(st.integers(0, 60)), draw(st.integers(0, 30)), 0)]
    for index in range(1, draw(st.integers(1, 12))):
        start, stream = draw(st.integers(-20, 130)), draw(st.sampled_from([7, 13, 20]))
        events.append(call(start - draw(st.integers(0, 40)), index))
        events.append(kernel(start, draw(st.integers(0, 40)), index, stream))
    return draw(st.permutations(events)), length


@settings(max_examples=200, deadline=None)
@given(gpu_steps())
def test_busy_is_the_union_and_idle_is_the_rest_by_cause(made: tuple[list[Event], int]) -> None:
    events, length = made
    summary = account(*events)
    only, numbers = summary.steps[0], summary.numbers()
    covered = {
        us for e in events if e.category == "kernel" for us in range(int(e.start_us), int(e.end_us)) if 0 <= us < length
    }
    assert only.busy_us == len(covered)
    assert only.busy_us + only.idle_us() == length
    assert only.busy_us <= only.work_us
    assert sum(only.idle_us(cause) for cause in CAUSES) == only.idle_us()
    assert numbers["gpu_busy_share"] + numbers["gpu_idle_share"] == pytest.approx(1)
    assert sum(numbers[f"idle_{cause}_share"] for cause in CAUSES) == pytest.approx(numbers["gpu_idle_share"])
    ends = [0.0, *(gap.end_us for gap in only.gaps)]
    assert all(
        gap.start_us >= before and gap.end_us > gap.start_us for gap, before in zip(only.gaps, ends, strict=False)
    )
    assert all(gap.cause != "end" for gap in only.gaps[:-1])


@settings(max_examples=100, deadline=None)
@given(gpu_steps(), st.integers(1, 999))
def test_a_constant_clock_error_changes_no_gap_between_kernels(made: tuple[list[Event], int], error_us: int) -> None:
    events, _ = made
    true = account(*events)
    skewed = [
        Event(e.name, e.category, e.thread, e.start_us - error_us, e.duration_us, e.correlation, e.stream, e.device)
        if e.category == "kernel"
        else e
        for e in events
    ]
    found = account(*skewed)
    slack = min(
        k.start_us - c.start_us
        for c in events
        for k in events
        if c.category == "cuda_runtime" and k.category == "kernel" and k.correlation == c.correlation
    )
    assert found.clock_shift_us == max(error_us - slack, 0)
    assert found.steps[0].kernels == true.steps[0].kernels


# --- files -----------------------------------------------------------------------------------------------------------------


def chrome(name: str, category: str, ts: object = 1.0, dur: object = 1.0, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args}


def write(path: Path, items: list[object], head: str = '"schemaVersion": 1, "host_name": "box"') -> Path:
    path.write_text(f'{{{head}, "traceEvents": [{", ".join(json.dumps(item) for item in items)}], "traceName": "x"}}')
    return path


def test_loading_keeps_work_calls_operators_and_annotations_only(tmp_path: Path) -> None:
    items: list[object] = [
        chrome("k", "kernel", 5.5, 2, correlation=3, stream=7, device=0),
        chrome("cudaLaunchKernel_v7000", "cuda_runtime", "4.25", 1, correlation=3),
        chrome("cudaGraphLaunch_ptsz_v10000", "cuda_runtime", 4.5, 1, correlation=4),
        chrome("aten::add", "cpu_op", 4),
        chrome("workbench.step", "user_annotation", 0),
        *(
            chrome(name, "cuda_sync", stream=7)
            for name in ("Event Sync", "Context Sync", "Stream Sync", "cudaDeviceSynchronize")
        ),
        *(chrome(name, "kernel", stream=7, device=0) for name in ("Event Sync", "Context Sync", "Stream Wait Event")),
        chrome("workbench.step", "gpu_user_annotation", stream=7),
        chrome("frame", "python_function"),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 3, "ts": 1},
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    ]
    trace = load_trace(write(tmp_path / "t.json", items))
    assert [event.name for event in trace.events] == [
        "workbench.step",
        "aten::add",
        "cudaLaunchKernel",
        "cudaGraphLaunch",
        "k",
    ]
    assert trace.events[-1] == Event("k", "kernel", "1/1", 5.5, 2.0, 3, 7, 0)
    assert trace.source == "t.json"


def test_sync_rows_on_gpu_tracks_change_nothing(tmp_path: Path) -> None:
    base: list[object] = [
        chrome("workbench.step", "user_annotation", 0, 100),
        chrome("cudaLaunchKernel", "cuda_runtime", 1, 1, correlation=1),
        chrome("k", "kernel", 10, 20, correlation=1, stream=7, device=0),
    ]
    rows: list[object] = [
        chrome(name, category, 0, 100, correlation=9, stream=7, device=0)
        for name in ("cudaDeviceSynchronize", "Event Sync", "Context Sync")
        for category in ("cuda_sync", "kernel")
    ]
    plain, with_rows = (load_trace(write(tmp_path / "t.json", items)) for items in (base, [*base, *rows]))
    assert analyse(with_rows) == analyse(plain)
    assert analyse(plain).steps[0].kernels == 1


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_saved_traces_load_equal(tmp_path: Path, suffix: str) -> None:
    trace = Trace(tuple(sorted(WHOLE, key=lambda event: event.start_us)), f"t{suffix}")
    path = save_trace(trace, tmp_path / "new" / f"t{suffix}")
    assert load_trace(path) == trace
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == (suffix == ".json.gz")


def test_events_are_found_wherever_the_buffer_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    awkward = 'void k<"a", int[]>(int*) ]}, {"traceEvents": [ µ \\ '
    path = write(tmp_path / "t.json", [chrome(awkward, "kernel", i, 1, correlation=i) for i in range(20)])
    whole = load_trace(path)
    assert [event.name for event in whole.events] == [awkward] * 20
    for size in (1, 7, 64):
        monkeypatch.setattr(chrome_trace, "CHUNK_CHARACTERS", size)
        assert load_trace(path) == whole


def test_a_bare_list_of_events_is_a_chrome_trace_too(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps([chrome("k", "kernel"), chrome("aten::add", "cpu_op")]))
    assert len(load_trace(tmp_path / "t.json").events) == 2


def test_memory_does_not_grow_with_what_is_not_needed(tmp_path: Path) -> None:
    ballast = {f"note {i}": "x" * 100 for i in range(40)}
    path = write(tmp_path / "t.json", [chrome("k", "kernel", i, 1, correlation=i, **ballast) for i in range(3000)])
    assert path.stat().st_size > 12e6
    tracemalloc.start()
    events = load_trace(path).events
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(events) == 3000 and peak < path.stat().st_size / 2


@pytest.mark.parametrize(
    "content,message",
    [
        (b"", "no traceEvents"),
        (b"RIFF....WAVE", "no traceEvents"),
        (b'{"kind": "profile"}', "no traceEvents"),
        (b'{"traceEvents": [{"ph": "X", "ca', "damaged or cut short"),
        (b'{"traceEvents": [{"ph": "X"}, ', "damaged or cut short"),
        (b'{"traceEvents": [1, 2]}', "allowed are JSON objects"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": null}]}', "lacks usable times"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": NaN}]}', "a finite time"),
        (gzip.compress(b'{"traceEvents": []}' * 50, mtime=0)[:-12], "cannot be read to its end|cut short"),
    ],
)
def test_files_that_are_no_trace_are_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message) as caught:
        load_trace(path)
    assert "bad.json" in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(RecordError, match=r"nowhere\.json: no such trace"):
        load_trace("nowhere.json")


def test_reading_a_trace_needs_no_torch() -> None:
    code = "import sys, workbench.measure.trace; sys.exit('torch' in sys.modules or 'nemo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", sorted(DATA.glob("*.json.gz")), ids=lambda path: path.name)
def test_committed_traces_give_the_numbers_beside_them(path: Path) -> None:
    expected = json.loads(path.with_name(path.name.replace(".json.gz", ".expected.json")).read_text())
    summary = analyse(load_trace(path), device=expected["device"])
    assert len(summary.steps) == expected["steps"]
    assert summary.numbers() == pytest.approx(expected["numbers"])


@pytest.mark.parametrize("name,graphed", [("trace_eager", False), ("trace_graphed", True)])
def test_traces_of_an_h200_give_the_row_of_their_record(name: str, graphed: bool, project: Path) -> None:
    path = project / "studies" / "h200" / "traces" / f"{name}.json.gz"
    assert path.stat().st_size <= 2 * 2**20
    record = json.loads((project / "studies" / "h200" / "profile_steps.json").read_text())
    row = next(row for row in record["rows"][:2] if row["graphed"] is graphed)
    numbers = analyse(load_trace(path), device="cuda").numbers()
    assert numbers["launches_per_step"] == (104 if graphed else 1335)
    assert numbers["kernels_per_step"] == 1335
    assert numbers["graph_launches_per_step"] == graphed
    assert numbers == pytest.approx({key: row[key] for key in numbers})
