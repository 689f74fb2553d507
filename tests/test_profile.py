"""A real step on the CPU, timed and profiled; on a GPU the same step eager and as a CUDA graph."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import workbench.measure.profile as profiling
from workbench.errors import RecordError
from workbench.measure.profile import (
    StepWork,
    annotate,
    measure_ceilings,
    profile_steps,
    time_steps,
    weight_bytes,
    with_achieved,
)
from workbench.measure.trace import Trace, analyse, load_trace, save_trace
from workbench.results import Record

LAYERS = 3


@pytest.fixture(scope="module")
def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(LAYERS)]
    return torch.nn.Sequential(*blocks).eval()


@pytest.fixture(scope="module")
def profiled(network: torch.nn.Sequential, tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Path]:
    path = tmp_path_factory.mktemp("traces") / "new" / "cpu.json.gz"
    x = torch.randn(8, 64)
    stages = {"workbench.encoder": network, **{f"layer.{i}": block for i, block in enumerate(network)}}
    with torch.inference_mode(), annotate(stages):
        return profile_steps(lambda: network(x), device="cpu", steps=4, warmup=2, trace_path=path), path


def test_the_record_on_the_cpu(profiled: tuple[Record, Path], tmp_path: Path) -> None:
    record, path = profiled
    numbers = record.numbers
    assert record.kind == "profile"
    assert record.config == {"device": "cpu", "steps": 4, "warmup": 2, "trace": "cpu.json.gz"}
    assert numbers["step_p50_ms"] <= numbers["step_p95_ms"]
    assert record.counters == {"timed_steps": numbers["step_n"], "profiled_steps": 4, "profiler_attempts": 1}
    shares = [numbers[f"idle_{cause}_share"] for cause in ("host_late", "kernel_gap", "end")]
    assert sum(shares) == pytest.approx(numbers["thread_idle_share"])
    assert numbers["thread_busy_share"] + numbers["thread_idle_share"] == pytest.approx(1)
    assert not any(name.startswith(("gpu_", "kernels")) for name in numbers)
    assert Record.load(record.save(tmp_path / "r.json")).numbers == numbers
    assert analyse(load_trace(path)).numbers().items() <= numbers.items()


def test_operators_are_the_ones_that_torch_counts(network: torch.nn.Sequential, profiled: tuple[Record, Path]) -> None:
    x = torch.randn(8, 64)
    with (
        torch.inference_mode(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as own,
    ):
        network(x)
    record, _ = profiled
    assert record.numbers["operators_per_step"] == len(own.events())
    calls = {row["name"]: row["calls_per_step"] for row in record.rows}
    assert calls["aten::linear"] == calls["aten::relu"] == LAYERS


def test_stages_and_layers_split_the_step(profiled: tuple[Record, Path]) -> None:
    rows = {row["name"]: row for row in profiled[0].rows if row["kind"] == "stage"}
    assert list(rows) == ["workbench.encoder", *(f"layer.{i}" for i in range(LAYERS))]
    layers = [rows[f"layer.{i}"] for i in range(LAYERS)]
    assert rows["workbench.encoder"]["share"] == pytest.approx(1)
    assert sum(layer["share"] for layer in layers) == pytest.approx(1)
    assert sum(layer["host_ms_per_step"] for layer in layers) < rows["workbench.encoder"]["host_ms_per_step"]


def test_a_small_copy_of_the_trace_gives_the_same_numbers(profiled: tuple[Record, Path], tmp_path: Path) -> None:
    path = profiled[1]
    small = save_trace(load_trace(path), tmp_path / "small.json.gz")
    assert analyse(load_trace(small)).numbers() == analyse(load_trace(path)).numbers()
    assert small.stat().st_size < path.stat().st_size


def test_annotations_are_removed_and_survive_an_exception(network: torch.nn.Sequential) -> None:
    with pytest.raises(RuntimeError), annotate({"workbench.encoder": network}):
        network(torch.randn(2, 3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as own:
        network(torch.randn(2, 64))
    assert "workbench.encoder" not in {event.name for event in own.events()}


def test_steps_are_timed_before_the_profiler_runs(tmp_path: Path) -> None:
    """Under a profiler a step would see it running; every timed step must not."""
    seen: list[bool] = []

    def step() -> None:
        seen.append(torch.autograd._profiler_enabled())
        torch.ones(1).add_(1)

    record = profile_steps(step, device="cpu", steps=2, warmup=1, trace_path=tmp_path / "t.json")
    timed = 1 + record.counters["timed_steps"]
    assert record.counters["timed_steps"] == profiling.TIMED_STEPS
    assert not any(seen[:timed]) and sum(seen[timed:]) >= 2


def test_a_slow_step_is_timed_at_least_three_times_and_the_note_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    assert time_steps(lambda: None, device="cpu", bound_s=4) == [10.0, 10.0, 10.0]
    record = profile_steps(
        lambda: torch.ones(1).add_(1), device="cpu", steps=1, warmup=1, trace_path=tmp_path / "t.json"
    )
    assert record.notes[0] == "p50 and p95 are of only 3 steps"
    assert record.numbers["step_p50_ms"] == 10_000


def test_a_trace_that_cannot_be_trusted_is_taken_again_and_at_last_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lossy(losses: int) -> None:
        left = [losses]

        def load(path: Path) -> Trace:
            left[0] -= 1
            return Trace((), path.name) if left[0] >= 0 else load_trace(path)

        monkeypatch.setattr(profiling, "load_trace", load)

    def record() -> Record:
        return profile_steps(
            lambda: torch.ones(1).add_(1), device="cpu", steps=1, warmup=1, trace_path=tmp_path / "t.json"
        )

    lossy(2)
    assert record().counters["profiler_attempts"] == 3
    lossy(3)
    with pytest.raises(RecordError, match=r"t\.json: no step annotated"):
        record()


@pytest.mark.parametrize("steps,warmup", [(0, 3), (5, 0)])
def test_counts_that_cannot_be_profiled_are_refused(steps: int, warmup: int, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="at least 1"):
        profile_steps(lambda: None, device="cpu", steps=steps, warmup=warmup, trace_path=tmp_path / "t.json")


def test_other_devices_are_refused() -> None:
    with pytest.raises(RecordError, match="allowed are cuda and cpu"):
        measure_ceilings("meta")


def test_ceilings_are_measured_and_a_step_is_held_against_them() -> None:
    """100 MB and 1 GFLOP in 10 ms are 10 GB/s and 100 GFLOP/s; at 40 GB/s and 400 GFLOP/s both floors are 2.5 ms."""
    measured = measure_ceilings("cpu")
    assert set(measured) == {"copy_gb_per_s", "matmul_float32_gflop_per_s"}
    assert all(value > 0 for value in measured.values())
    record = Record(kind="profile", numbers={"step_p50_ms": 10.0}, environment={}, command="")
    ceilings = {"copy_gb_per_s": 40.0, "matmul_float32_gflop_per_s": 400.0}
    numbers = with_achieved(record, StepWork(bytes_moved=10**8, flops=1e9), ceilings).numbers
    assert numbers["achieved_gb_per_s"] == pytest.approx(10)
    assert numbers["achieved_gflop_per_s"] == pytest.approx(100)
    assert numbers["achieved_bandwidth_share"] == numbers["achieved_flops_share"] == pytest.approx(0.25)
    assert numbers["floor_ms"] == pytest.approx(2.5)
    assert numbers["ceiling_copy_gb_per_s"] == 40
    with pytest.raises(RecordError, match="matmul_bfloat16_gflop_per_s"):
        with_achieved(record, StepWork(1, 1, "bfloat16"), ceilings)


def test_weights_are_counted_once_even_if_shared(network: torch.nn.Sequential) -> None:
    each = (64 * 64 + 64) * 4
    assert weight_bytes(network) == LAYERS * each
    assert weight_bytes(torch.nn.Sequential(network[0], network[0])) == each
    assert weight_bytes(torch.nn.BatchNorm1d(8).half()) == 4 * 8 * 2 + 8


@pytest.mark.gpu
def test_a_graph_replay_is_one_launch_with_the_kernels_of_the_eager_step(
    network: torch.nn.Sequential, tmp_path: Path
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    gpu = network.cuda()
    x = torch.randn(8, 64, device="cuda")
    with torch.inference_mode():
        eager = profile_steps(lambda: gpu(x), device="cuda", trace_path=tmp_path / "eager.json.gz")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gpu(x)
        kernels = eager.numbers["kernels_per_step"]
        graphed = profile_steps(
            graph.replay, device="cuda", trace_path=tmp_path / "g.json.gz", nodes_per_replay=kernels
        )
    network.cpu()
    assert kernels >= eager.numbers["launches_per_step"] >= LAYERS
    assert (graphed.numbers["launches_per_step"], graphed.numbers["graph_launches_per_step"]) == (1, 1)
    assert graphed.numbers["kernels_per_step"] == kernels
    with pytest.raises(RecordError, match="graph replays"):
        profile_steps(graph.replay, device="cuda", trace_path=tmp_path / "g.json.gz", nodes_per_replay=kernels + 1)
