"""The table of the graphed encoder step: time, streams, launches, idle share and memory, eager and graphed, for chosen shapes.

    record = run_graphed_table("nemotron-0.6b")                     # the rows of the original feature's tables, and bf16
    record = run_graphed_table("tiny", table_cells([(56, 0)], [1, 8], ["float32"]))
    print(markdown_table(record))

What is timed is the encoder step of streams in steady state: caches full, every step fed by the caches of the one before, fresh mel
frames, host clock with a synchronisation at the end. `bare_replay` launches the same captured work and nothing else: the difference to
`graphed` is the cost of copying inputs in and outputs out, of the key and of the guards. Every row is first checked for equality by
`torch.equal`. Everything is timed before anything is profiled, since a process stays slower after profiling. Streams are
batch × chunk duration / p50, an upper bound that leaves out decoding, audio and scheduling.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from workbench.encoder.graphed import GraphOptions, attach, detach
from workbench.encoder.key import StepInputs
from workbench.encoder.nemo_hooks import install_if_loaded
from workbench.encoder.steady import StepShape, steady_call
from workbench.errors import RecordError
from workbench.measure.profile import profile_steps, time_steps
from workbench.model.shapes import SHAPES, build_model
from workbench.results import Record, percentiles_ms

FRAME_MS = 80
FRESH_INPUTS = 4  # different mel inputs, taken in turn
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Cell:
    """One row to measure."""

    context: tuple[int, int]
    batch: int
    dtype: str = "float32"


DOCUMENT_CELLS = tuple(Cell((56, right), batch) for right, batch in ((0, 1), (0, 32), (3, 8), (3, 32), (13, 32)))
HALF_CELLS = tuple(
    Cell((56, right), batch, "bfloat16") for right, batch in ((0, 1), (0, 32), (0, 128), (0, 256), (3, 32), (13, 64))
)


def table_cells(
    contexts: Iterable[tuple[int, int]], batches: Sequence[int], dtypes: Sequence[str] = ("float32",)
) -> tuple[Cell, ...]:
    """Every combination, grouped by dtype."""
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise RecordError(f"dtypes: got {', '.join(unknown)}; allowed are {', '.join(DTYPES)}")
    product = itertools.product(dtypes, list(contexts), batches)
    return tuple(Cell(tuple(context), batch, dtype) for dtype, context, batch in product)


def default_cells(model: str) -> tuple[Cell, ...]:
    """The rows of the original tables and bf16, with the left context of this shape and the look-aheads that it has."""
    lefts = {right: left for left, right in SHAPES[model].contexts}
    wanted = (*DOCUMENT_CELLS, *HALF_CELLS)
    return tuple(
        replace(cell, context=(lefts[cell.context[1]], cell.context[1])) for cell in wanted if cell.context[1] in lefts
    )


def run_graphed_table(
    model: str = "nemotron-0.6b",
    cells: Sequence[Cell] | None = None,
    *,
    profiled: Sequence[Cell] | None = None,
    trace_folder: str | Path | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Record:
    """Measure the rows (`default_cells` by default) on the current CUDA device with TF32 allowed, as the original tables were.

    profiled: the rows to profile as well, all by default. trace_folder: where to keep the profiler's traces; they are thrown away
    without it. report: called with each finished row.
    Raises RecordError without a GPU or where graphed and eager differ.
    """
    if not torch.cuda.is_available():
        raise RecordError("the graphed table needs a CUDA GPU; a recorded one is studies/h200/graphed_step.json")
    if model not in SHAPES:
        raise RecordError(f"model: got {model!r}; allowed are {', '.join(SHAPES)}")
    cells = default_cells(model) if cells is None else cells
    install_if_loaded()
    encoder = build_model(model).encoder.cuda()
    ordered = sorted(cells, key=lambda cell: DTYPES.index(cell.dtype))
    rows = {}
    with _tf32(), torch.inference_mode(), TemporaryDirectory() as temporary:
        for cell in ordered:
            _prepare(encoder, cell)
            rows[cell] = _timed_row(encoder, cell)
            report(str(rows[cell]))
        for cell in reversed([cell for cell in ordered if profiled is None or cell in profiled]):
            _prepare(encoder, cell)
            rows[cell] |= _profiled_row(encoder, cell, Path(trace_folder or temporary))
            report(str(rows[cell]))
    return Record(
        kind="graphed_table",
        config={"model": model, "what": "encoder step", "tf32": True, "frame_ms": FRAME_MS},
        rows=[rows[cell] for cell in cells],
        notes=[
            "untrained weights: only timing and memory are meaningful",
            "the encoder step alone, without prompt, decoder and frontend",
        ],
    )


class _SteadyStream:
    """Streams with full caches; every step takes the caches that the last one returned."""

    def __init__(self, encoder: Any, batch: int) -> None:
        calls = [steady_call(encoder, StepShape(batch=batch)) for _ in range(FRESH_INPUTS)]
        self.fresh = itertools.cycle([call.inputs[:2] for call in calls])
        self.state = calls[0].inputs[2:]

    def step_with(self, function: Callable[..., Any]) -> tuple[Any, ...]:
        outputs = function(*next(self.fresh), *self.state, False)
        self.state = outputs[2:]
        return tuple(outputs)


def _eager(encoder: Any) -> Callable[..., Any]:
    return lambda *inputs: type(encoder).cache_aware_stream_step(encoder, *inputs)


def _prepare(encoder: Any, cell: Cell) -> None:
    detach(encoder)
    with torch.inference_mode(False):
        encoder.to(getattr(torch, cell.dtype)).eval()
    encoder.set_default_att_context_size(list(cell.context))
    gc.collect()
    torch.cuda.empty_cache()


def _timed_row(encoder: Any, cell: Cell) -> dict[str, Any]:
    stream, device = _SteadyStream(encoder, cell.batch), torch.device("cuda", torch.cuda.current_device())
    eager_peak = _peak_bytes(lambda: [stream.step_with(_eager(encoder)) for _ in range(3)])
    eager_ms = _p50_ms(lambda: stream.step_with(_eager(encoder)), device)
    step = attach(encoder, GraphOptions(warmup_steps=0))
    graphed_peak = _peak_bytes(lambda: [stream.step_with(step.step) for _ in range(3)])
    _require_equal(encoder, step, stream, cell)
    graphed_ms = _p50_ms(lambda: stream.step_with(step.step), device)
    bare_ms = _p50_ms(step.newest.graph.replay, device)
    seconds = cell.batch * (cell.context[1] + 1) * FRAME_MS / 1e3
    row = {
        "context": list(cell.context),
        "batch": cell.batch,
        "dtype": cell.dtype,
        "eager_ms_p50": eager_ms,
        "graphed_ms_p50": graphed_ms,
        "bare_replay_ms_p50": bare_ms,
        "peer_ms_p50": None,
        "speedup": eager_ms / graphed_ms,
        "over_bare_replay": graphed_ms / bare_ms,
        "streams_eager": int(seconds / eager_ms * 1e3),
        "streams_graphed": int(seconds / graphed_ms * 1e3),
        "bytes_eager_peak": eager_peak,
        "bytes_graphed_peak": graphed_peak,
        "bytes_held": step.report()["held_bytes"],
        "capture_ms": step.report()["last_capture_ms"],
    }
    detach(encoder)
    return row | _peer(encoder, stream, device)


def _peer(encoder: Any, stream: _SteadyStream, device: torch.device) -> dict[str, float]:
    """NeMo's own graphed step, where this NeMo has one."""
    setter = getattr(type(encoder), "set_streaming_cuda_graphs", None)
    if setter is None or getattr(setter, "added_by_workbench", False):
        return {}
    encoder.set_streaming_cuda_graphs(True)
    try:
        return {"peer_ms_p50": _p50_ms(lambda: stream.step_with(encoder.cache_aware_stream_step), device, warmup=6)}
    finally:
        encoder.set_streaming_cuda_graphs(False)


def _profiled_row(encoder: Any, cell: Cell, folder: Path) -> dict[str, Any]:
    stream, found = _SteadyStream(encoder, cell.batch), {}
    name = f"{cell.dtype}_r{cell.context[1]}_b{cell.batch}"
    step = attach(encoder, GraphOptions(warmup_steps=0))
    for kind, function in (("eager", _eager(encoder)), ("graphed", step.step)):
        record = profile_steps(
            lambda function=function: stream.step_with(function),  # type: ignore[misc]
            device="cuda",
            trace_path=folder / f"{name}_{kind}.json.gz",
            steps=3,
        )
        numbers = record.numbers
        found[f"launches_{kind}"] = numbers["launches_per_step"]
        found[f"kernels_{kind}"] = numbers["kernels_per_step"]
        found[f"gpu_idle_{kind}"] = numbers["gpu_idle_share_of_p50"]
    detach(encoder)
    return {**found, "kernels": found["kernels_graphed"]}


def _require_equal(encoder: Any, step: Any, stream: _SteadyStream, cell: Cell) -> None:
    inputs = StepInputs(*next(stream.fresh), *stream.state)
    pairs = zip(step.step(*inputs, False), _eager(encoder)(*inputs, False), strict=True)
    if not all(torch.equal(graphed, eager) for graphed, eager in pairs):
        raise RecordError(f"{cell}: the graphed step differs from the eager one, its time means nothing")


def _p50_ms(step: Callable[[], Any], device: torch.device, warmup: int = 10) -> float:
    return percentiles_ms(time_steps(step, device=device, warmup=warmup, bound_s=3.0), "step", (50,))["step_p50_ms"]


def _peak_bytes(work: Callable[[], Any]) -> int:
    """Peak of allocated bytes while `work` runs, weights and caches included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


class _tf32:
    """TF32 for fp32 matrix products inside the block."""

    def __enter__(self) -> None:
        self.before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True

    def __exit__(self, *_: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self.before


def markdown_table(record: Record) -> str:
    """The record as the two tables of the original feature: time and streams, then memory."""
    time_head = ["context (chunk)", "batch", "dtype", "eager ms", "graphed ms", "bare replay ms", "speed-up", "streams"]
    time_head += ["launches → kernels eager", "launches graphed", "GPU idle eager → graphed"]
    peer = any(row.get("peer_ms_p50") is not None for row in record.rows)
    time_rows, memory_rows = [], []
    for row in record.rows:
        chunk = (row["context"][1] + 1) * record.config["frame_ms"]
        first = [f"[{row['context'][0]}, {row['context'][1]}] ({chunk} ms)", row["batch"], row["dtype"]]
        cells = [f"{row[key]:.2f}" for key in ("eager_ms_p50", "graphed_ms_p50", "bare_replay_ms_p50")]
        cells += [
            f"{row['speedup']:.1f}×",
            f"{row['streams_eager']:,} → {row['streams_graphed']:,}",
            *_profile_cells(row),
        ]
        if peer:
            cells.append("–" if row["peer_ms_p50"] is None else f"{row['peer_ms_p50']:.2f}")
        time_rows.append([*first, *cells])
        eager, graphed = row["bytes_eager_peak"] / 1e6, row["bytes_graphed_peak"] / 1e6
        memory_rows.append(
            [
                *first,
                f"{eager:,.0f} MB",
                f"{graphed:,.0f} MB",
                f"{graphed - eager:+,.0f} MB",
                f"{row['bytes_held'] / 1e6:,.0f} MB",
            ]
        )
    memory_head = ["context (chunk)", "batch", "dtype", "eager peak", "graphed peak", "overhead", "held by the graph"]
    return (
        _table(time_head + (["NeMo's own graphs ms"] if peer else []), time_rows)
        + "\n"
        + _table(memory_head, memory_rows)
    )


def _profile_cells(row: dict[str, Any]) -> list[str]:
    if "launches_eager" not in row:
        return ["–", "–", "–"]
    return [
        f"{row['launches_eager']:,.0f} → {row['kernels_eager']:,.0f}",
        f"{row['launches_graphed']:,.0f}",
        f"{row['gpu_idle_eager']:.0%} → {row['gpu_idle_graphed']:.0%}",
    ]


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
