"""One step, timed and then profiled: how long it takes, what it launches, how idle the GPU is meanwhile and why.

    record = profile_steps(step, device=torch.device("cuda"), trace_path="studies/eager.json.gz")
    record.numbers["step_p50_ms"], record.numbers["launches_per_step"], record.numbers["gpu_idle_share"]

The order matters: latency is timed first and without any profiler, because a profiler slows the host down while it runs and the
process stays slower afterwards. Then the step runs a few times under torch.profiler, after warm-up steps whose events are thrown
away, and measure/trace.py accounts for the trace, which is kept. `step` takes and returns nothing, and may leave work in flight:
the clock is stopped after a synchronisation. On the CPU the same record holds operators where CUDA has kernels.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from workbench.errors import RecordError
from workbench.measure.trace import STEP, TraceSummary, analyse, load_trace
from workbench.results import Record, percentiles_ms

TIMED_STEPS = 60
ENOUGH_STEPS = 20  # below this a p95 is the slowest step
TIME_BOUND_S = 4.0
PROFILE_ATTEMPTS = 3  # a session can lose kernels while the next one does not

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
MATMUL_DTYPES = {"cuda": ("float32", "bfloat16"), "cpu": ("float32",)}
CEILING_BATCHES, CEILING_REPEATS = 5, {"cuda": 20, "cpu": 2}


def profile_steps(  # noqa: PLR0913 - all but the first by name
    step: Callable[[], None],
    *,
    device: torch.device | str,
    trace_path: str | Path,
    steps: int = 5,
    warmup: int = 3,
    nodes_per_replay: int | None = None,
    seconds: Sequence[float] | None = None,
) -> Record:
    """Time, then profile, `step` on `device`; a record of kind 'profile' whose rows are stages and the costliest kernels.

    steps: profiled steps; warmup: unrecorded steps before timing and before profiling; trace_path: where the Chrome trace is kept
    (.json or .json.gz); nodes_per_replay: kernels of each graph launch, checked where given; seconds: times from an earlier `time_steps`, where
    several steps are timed before the first is profiled. Raises RecordError for a trace that
    cannot be trusted, e.g. with lost kernels.
    """
    if steps < 1 or warmup < 1:
        raise RecordError(
            f"steps={steps}, warmup={warmup}: both must be at least 1; a first profiled step is far too slow"
        )
    device = _supported(device)
    seconds = time_steps(step, device=device, warmup=warmup) if seconds is None else seconds
    numbers = percentiles_ms(seconds, "step", (50, 95))
    notes = [f"p50 and p95 are of only {len(seconds)} steps"] if len(seconds) < ENOUGH_STEPS else []
    summary, attempts = _traced(step, device, Path(trace_path), (steps, warmup), nodes_per_replay)
    numbers |= summary.numbers()
    if device.type == "cuda":
        # The profiler stretches the host's part of a step, not the kernels: against the unprofiled time the share is the true one.
        numbers["gpu_idle_share_of_p50"] = max(0.0, 1 - numbers["gpu_busy_ms_per_step"] / numbers["step_p50_ms"])
    return Record(
        kind="profile",
        config={"device": device.type, "steps": steps, "warmup": warmup, "trace": Path(trace_path).name},
        numbers=numbers,
        rows=summary.rows(),
        counters={"timed_steps": len(seconds), "profiled_steps": len(summary.steps), "profiler_attempts": attempts},
        notes=[*notes, *summary.notes],
    )


def time_steps(
    step: Callable[[], None], *, device: torch.device | str, warmup: int = 3, bound_s: float = TIME_BOUND_S
) -> list[float]:
    """Seconds of each of up to 60 steps, fewer once `bound_s` is spent but at least 3, each with a synchronisation at its end."""
    device = _supported(device)
    for _ in range(warmup):
        step()
    _synchronise(device)
    seconds: list[float] = []
    stop_s = time.perf_counter() + bound_s
    while len(seconds) < TIMED_STEPS and (len(seconds) < 3 or time.perf_counter() < stop_s):
        begin_s = time.perf_counter()
        step()
        _synchronise(device)
        seconds.append(time.perf_counter() - begin_s)
    return seconds


@contextmanager
def annotate(modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Inside the context every call of a module is a stage of that name in the profile, e.g. {"workbench.encoder": model.encoder}.

    Works for whole stages and for single layers. A module that is replayed inside a CUDA graph is not called, so it has no stage.
    """
    handles, entered = [], dict[str, list[record_function]]()
    for name, module in modules.items():
        stack = entered.setdefault(name, [])

        def enter(_module: Any, _inputs: Any, name: str = name, stack: list[record_function] = stack) -> None:
            stack.append(record_function(name))
            stack[-1].__enter__()  # type: ignore[no-untyped-call]

        def leave(_module: Any, _inputs: Any, _output: Any, stack: list[record_function] = stack) -> None:
            stack.pop().__exit__(None, None, None)

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def measure_ceilings(device: torch.device | str) -> dict[str, float]:
    """What the device can do at best: `copy_gb_per_s` (bytes read + written) and `matmul_<dtype>_gflop_per_s` of a square product.

    float32 products use the precision that is set now (TF32 or not). The best of several batches: a ceiling is a maximum.
    """
    device = _supported(device)
    source = torch.ones(COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    found = {"copy_gb_per_s": 2 * source.nbytes / _best_s(partial(target.copy_, source), device) / 1e9}
    size = MATMUL_SIZE[device.type]
    for name in MATMUL_DTYPES[device.type]:
        left = torch.randn(size, size, device=device).to(getattr(torch, name))
        out = torch.empty_like(left)
        seconds = _best_s(partial(torch.mm, left, left, out=out), device)
        found[f"matmul_{name}_gflop_per_s"] = 2 * size**3 / seconds / 1e9
    return found


@dataclass(frozen=True)
class StepWork:
    """The least that a step must do: bytes moved (weights read once is a lower bound) and floating-point operations (2 per MAC).

    dtype names the ceiling that the operations are held against.
    """

    bytes_moved: int
    flops: float
    dtype: str = "float32"


def with_achieved(record: Record, work: StepWork, ceilings: Mapping[str, float]) -> Record:
    """A profile record with achieved bandwidth and FLOP/s, from the unprofiled p50, and as shares of the measured ceilings."""
    ceiling = f"matmul_{work.dtype}_gflop_per_s"
    if missing := [name for name in ("copy_gb_per_s", ceiling) if name not in ceilings]:
        raise RecordError(f"ceilings lack {', '.join(missing)}; measured are {', '.join(sorted(ceilings))}")
    seconds = record.numbers["step_p50_ms"] / 1e3
    gb_per_s, gflop_per_s = work.bytes_moved / seconds / 1e9, work.flops / seconds / 1e9
    achieved = {
        "step_bytes": work.bytes_moved,
        "step_gflop": work.flops / 1e9,
        "achieved_gb_per_s": gb_per_s,
        "achieved_gflop_per_s": gflop_per_s,
        "achieved_bandwidth_share": gb_per_s / ceilings["copy_gb_per_s"],
        "achieved_flops_share": gflop_per_s / ceilings[ceiling],
        "floor_ms": 1e3 * max(work.bytes_moved / ceilings["copy_gb_per_s"], work.flops / ceilings[ceiling]) / 1e9,
    }
    ceiling_numbers = {f"ceiling_{name}": value for name, value in ceilings.items()}
    return replace(record, numbers={**record.numbers, **achieved, **ceiling_numbers})


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of all parameters and buffers, each counted once: what a step must read at least."""
    tensors = {tensor.data_ptr(): tensor.nbytes for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensors.values())


def _traced(
    step: Callable[[], None], device: torch.device, path: Path, counts: tuple[int, int], nodes: int | None
) -> tuple[TraceSummary, int]:
    """The summary of a trace that can be trusted, and the number of profiler sessions that it took."""
    path.parent.mkdir(parents=True, exist_ok=True)
    read = partial(analyse, steps=STEP, device=device.type, nodes_per_replay=nodes)
    for attempt in range(1, PROFILE_ATTEMPTS):
        _profiled_run(step, device, path, *counts)
        with suppress(RecordError):  # the last attempt raises it
            return read(load_trace(path)), attempt
    _profiled_run(step, device, path, *counts)
    return read(load_trace(path)), PROFILE_ATTEMPTS


def _profiled_run(step: Callable[[], None], device: torch.device, path: Path, steps: int, warmup: int) -> None:
    # Kineto prints its progress on stderr, where it would break notebooks; what it loses is found by the analysis.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    plan = schedule(wait=0, warmup=warmup, active=steps, repeat=1)
    _synchronise(device)
    with profile(
        activities=activities, schedule=plan, on_trace_ready=lambda done: done.export_chrome_trace(str(path))
    ) as running:
        for _ in range(warmup + steps):
            with record_function(STEP):
                step()
                _synchronise(device)
            running.step()


def _best_s(operation: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one operation: the best batch of several, synchronised once a batch so that launches overlap with work."""
    repeats = CEILING_REPEATS[device.type]
    for _ in range(repeats):
        operation()
    best_s = float("inf")
    for _ in range(CEILING_BATCHES):
        _synchronise(device)
        begin_s = time.perf_counter()
        for _ in range(repeats):
            operation()
        _synchronise(device)
        best_s = min(best_s, (time.perf_counter() - begin_s) / repeats)
    return best_s


def _supported(device: torch.device | str) -> torch.device:
    found = torch.device(device)
    if found.type not in ("cuda", "cpu"):
        raise RecordError(f"device {found}: allowed are cuda and cpu")
    return found


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
