"""The table of the fast step: NeMo's eager step, the bit-exact graph and the resident step in one run, with the floor and the error.

    record = run_fast_table("nemotron-0.6b")                    # rows context, batch, dtype, eager/graphed/fast ms, floor, rel_error

What is timed is the encoder step of streams in steady state with full caches, fresh mel frames from device memory, host clock with a
synchronisation. The resident step is captured as one graph; its inputs are copied in before each replay, as they are for the bit-exact
graph. `floor_ms` is the least time by bytes and arithmetic (`measure.floor`) against the ceilings measured in the same run.

Errors are relative, ||fast - reference|| / ||reference|| over a stream from its first chunk through full caches, against NeMo in fp32 with TF32
off: `rel_error` of the resident step at the row's precision, `rel_error_nemo` of NeMo's own step at that precision, and `rel_error_fp32` of the
resident step in exact fp32, which is what its equality is judged by. A row of dtype `bfloat16+int8` reads the projections as int8 (`encoder.int8`): NeMo's
columns are those of bfloat16, the errors are of a lone stream through the one-row kernels, and `rel_error_fp32` is what int8 alone costs.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from workbench.encoder.graphed import GraphOptions, attach, detach
from workbench.encoder.resident import ResidentEncoder
from workbench.encoder.steady import StepShape, steady_call, steady_mel_frames
from workbench.errors import RecordError
from workbench.measure.floor import StepDimensions, step_work
from workbench.measure.graphed_table import Cell
from workbench.measure.profile import measure_ceilings, profile_steps, time_steps
from workbench.model.shapes import SHAPES, build_model
from workbench.results import Record, percentiles_ms

FAST_CELLS = (
    *(Cell((56, right), batch) for right, batch in ((0, 1), (0, 8), (0, 32), (3, 8), (3, 32), (13, 1), (13, 32))),
    *(Cell((56, right), batch, "bfloat16") for right, batch in ((0, 1), (0, 32), (0, 256), (13, 32), (13, 256))),
)
# The one row whose kernels read int8; added by who asks for it.
INT8_CELL = Cell((56, 0), 1, "bfloat16+int8")
ERROR_BATCH = 2


def run_fast_table(
    model: str = "nemotron-0.6b",
    cells: Sequence[Cell] = FAST_CELLS,
    *,
    profiled: bool = True,
    eager: bool = True,
    report: Callable[[str], None] = lambda line: None,
) -> Record:
    """Measure the rows on the current CUDA device with TF32 allowed. Raises RecordError without a GPU or for an unknown shape.

    profiled: also count launches and kernels of the fast step and list its costliest kernels. eager: also time NeMo's step, eager and
    graphed. report: called with each finished row.
    """
    if not torch.cuda.is_available():
        raise RecordError("the fast table needs a CUDA GPU; a recorded one is studies/h200/fast_step.json")
    if model not in SHAPES:
        raise RecordError(f"model: got {model!r}; allowed are {', '.join(SHAPES)}")
    encoders = {"float32": build_model(model).encoder.cuda().eval()}
    for dtype in {_precision(cell) for cell in cells} - {"float32"}:
        encoders[dtype] = copy.deepcopy(encoders["float32"]).to(getattr(torch, dtype))
    rows: dict[Cell, dict[str, Any]] = {}
    errors: dict[tuple[Any, str, int], dict[str, float]] = {}
    with torch.inference_mode():
        ceilings = {True: _ceilings(True), False: _ceilings(False)}
        for cell in sorted(cells, key=lambda cell: (cell.context, cell.dtype, cell.batch)):
            for encoder in encoders.values():
                encoder.set_default_att_context_size(list(cell.context))
            streams = min(cell.batch, ERROR_BATCH)  # one stream alone has kernels of its own
            kind = (cell.context, cell.dtype, streams)
            if kind not in errors:
                errors[kind] = _errors(encoders["float32"], encoders[_precision(cell)], _weights(cell), streams)
            with _tf32(True):
                row = _row(encoders[_precision(cell)], cell, ceilings[_precision(cell) == "float32"], eager)
            rows[cell] = row | errors[kind]
            report(str(rows[cell]))
        if profiled:
            for cell in cells:
                encoder = encoders[_precision(cell)]
                encoder.set_default_att_context_size(list(cell.context))
                with _tf32(True):
                    rows[cell] |= _profiled(encoder, cell)
    return Record(
        kind="fast_table",
        config={"model": model, "what": "encoder step", "tf32": True},
        rows=[rows[cell] for cell in cells],
        numbers={f"{name}_tf32" if tf32 else name: value for tf32, c in ceilings.items() for name, value in c.items()},
        notes=["untrained weights: only timing and errors are meaningful", "the encoder step alone"],
    )


class FastStep:
    """A resident step of `batch` streams as one graph: call it with mel [B, F, M] on the device."""

    def __init__(self, encoder: Any, batch: int, **options: Any) -> None:
        self.resident = ResidentEncoder(encoder, rows=batch, **options)
        self.resident.rings.kv.normal_()
        self.resident.rings.conv.normal_()
        self.resident.rings.position.fill_(1000)
        device, frames = self.resident.device, steady_mel_frames(encoder.streaming_cfg)
        weight = next(encoder.parameters())
        self.mel = torch.randn(batch, encoder._feat_in, frames, device=device, dtype=weight.dtype)
        self.lengths = torch.full((batch,), frames, device=device)
        self.rows = torch.randperm(batch, device=device)
        self.drop = int(encoder.streaming_cfg.drop_extra_pre_encoded)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=side):
            self.encoded, self.valid = self._step()

    def __call__(self, mel: torch.Tensor) -> torch.Tensor:
        """Encoded frames [B, T, D] of one step."""
        self.mel.copy_(mel)
        self.graph.replay()
        return self.encoded

    def _step(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.resident.step(self.mel, self.lengths, self.rows, self.drop)


def _row(encoder: Any, cell: Cell, ceilings: dict[str, float], eager: bool) -> dict[str, Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    row: dict[str, Any] = {"context": list(cell.context), "batch": cell.batch, "dtype": cell.dtype}
    row |= _nemo_ms(encoder, cell, device) if eager else {"eager_ms_p50": None, "graphed_ms_p50": None}
    row |= _fast_ms(encoder, cell, device)
    dtype = "bfloat16" if _precision(cell) == "bfloat16" else "float32"
    work = step_work(_dimensions(encoder, cell), cell.batch)
    flops_per_s = ceilings[f"matmul_{dtype}_gflop_per_s"] * 1e9
    row["floor_ms"] = work.floor_ms(ceilings["copy_gb_per_s"] * 1e9, flops_per_s)
    row["over_floor"] = row["fast_ms_p50"] / row["floor_ms"]
    if eager:
        row["speedup"] = row["eager_ms_p50"] / row["fast_ms_p50"]
        row["over_graphed"] = row["graphed_ms_p50"] / row["fast_ms_p50"]
    return row


def _fast_ms(encoder: Any, cell: Cell, device: torch.device) -> dict[str, float]:
    _free()
    fast = FastStep(encoder, cell.batch, weights=_weights(cell))
    fresh = itertools.cycle([torch.randn_like(fast.mel) for _ in range(4)])
    return {
        "fast_ms_p50": _p50_ms(lambda: fast(next(fresh)), device),
        "fast_bare_replay_ms_p50": _p50_ms(fast.graph.replay, device),
        "row_bytes": fast.resident.rings.row_bytes,
    }


def _nemo_ms(encoder: Any, cell: Cell, device: torch.device) -> dict[str, float]:
    _free()
    calls = [steady_call(encoder, StepShape(batch=cell.batch)) for _ in range(4)]
    fresh, state = itertools.cycle([call.inputs[:2] for call in calls]), [calls[0].inputs[2:]]

    def through(function: Callable[..., Any]) -> None:
        state[0] = function(*next(fresh), *state[0], False)[2:]

    eager = _p50_ms(lambda: through(lambda *i: type(encoder).cache_aware_stream_step(encoder, *i)), device, 1.5)
    step = attach(encoder, GraphOptions(warmup_steps=0))
    graphed = _p50_ms(lambda: through(step.step), device, 1.5)
    detach(encoder)
    return {"eager_ms_p50": eager, "graphed_ms_p50": graphed}


def _profiled(encoder: Any, cell: Cell) -> dict[str, Any]:
    _free()
    fast = FastStep(encoder, cell.batch, weights=_weights(cell))
    mel = torch.randn_like(fast.mel)
    with TemporaryDirectory() as folder:
        record = profile_steps(lambda: fast(mel), device="cuda", trace_path=Path(folder) / "fast.json.gz", steps=3)
    kernels = [row for row in record.rows if row["kind"] != "stage"]
    return {
        "launches_fast": record.numbers["launches_per_step"],
        "kernels_fast": record.numbers["kernels_per_step"],
        "gpu_idle_fast": record.numbers["gpu_idle_share_of_p50"],
        "top_kernels": kernels[:14],
    }


def _precision(cell: Cell) -> str:
    return cell.dtype.partition("+")[0]


def _weights(cell: Cell) -> str:
    return cell.dtype.partition("+")[2] or "native"


def _errors(exact_encoder: Any, encoder: Any, weights: str, streams: int) -> dict[str, float]:
    """Relative errors over a whole stream from its first chunk, of two rows that step together or of the first of them alone."""
    with _tf32(False):
        reference = torch.cat(list(_nemo_stream(exact_encoder)), dim=1)
        exact = _error(torch.cat(list(_fast_stream(exact_encoder, streams, weights)), dim=1), reference[:streams])
    with _tf32(True):
        fast = _error(torch.cat(list(_fast_stream(encoder, streams, weights)), dim=1), reference[:streams])
        nemo = _error(torch.cat(list(_nemo_stream(encoder)), dim=1)[:streams], reference[:streams])
    return {"rel_error": fast, "rel_error_nemo": nemo, "rel_error_fp32": exact}


def _mels(encoder: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Random mel chunks of the stream, the same for everybody: first chunk, then steady ones until the caches are full and turn over."""
    cfg, weight = encoder.streaming_cfg, next(encoder.parameters())
    generator = torch.Generator().manual_seed(5)
    steps = -(-cfg.last_channel_cache_size // cfg.valid_out_len) + 6
    for index in range(steps):
        frames = cfg.chunk_size[0] if index == 0 else steady_mel_frames(cfg)
        mel = torch.randn(ERROR_BATCH, encoder._feat_in, frames, generator=generator)
        lengths = torch.full((ERROR_BATCH,), frames, device=weight.device)
        yield mel.to(weight.device, weight.dtype), lengths, 0 if index == 0 else int(cfg.drop_extra_pre_encoded)


def _nemo_stream(encoder: Any) -> Iterator[torch.Tensor]:
    weight = next(encoder.parameters())
    state = encoder.get_initial_cache_state(batch_size=ERROR_BATCH, dtype=weight.dtype, device=weight.device)
    drop_before = encoder.streaming_cfg.drop_extra_pre_encoded
    for mel, lengths, drop in list(_mels(encoder)):
        out = type(encoder).cache_aware_stream_step(encoder, mel, lengths, *state, False, drop)
        encoder.streaming_cfg.drop_extra_pre_encoded = drop_before
        state = out[2:]
        yield out[0].transpose(1, 2).double()


def _fast_stream(encoder: Any, streams: int, weights: str) -> Iterator[torch.Tensor]:
    resident = ResidentEncoder(encoder, rows=ERROR_BATCH, weights=weights)
    rows = torch.tensor([1, 0], device=resident.device)[:streams]
    for mel, lengths, drop in list(_mels(encoder)):
        yield resident.step(mel[:streams], lengths[:streams], rows, drop)[0].double()


def _error(got: torch.Tensor, reference: torch.Tensor) -> float:
    return float((got - reference).norm() / reference.norm())


def _dimensions(encoder: Any, cell: Cell) -> StepDimensions:
    layer = encoder.layers[0]
    return StepDimensions(
        layers=len(encoder.layers),
        width=int(encoder.d_model),
        feed_forward=layer.feed_forward1.linear1.out_features,
        kernel=layer.conv.kernel_size,
        window=cell.context[0],
        frames=cell.context[1] + 1,
        # The positional projections are computed once per context: a step reads their results, not these weights.
        weights=sum(p.numel() for name, p in encoder.named_parameters() if not name.endswith("linear_pos.weight")),
        bytes_per_value=next(encoder.parameters()).element_size(),
        int8=_weights(cell) == "int8",
    )


def _ceilings(tf32: bool) -> dict[str, float]:
    with _tf32(tf32):
        return measure_ceilings("cuda")


def _p50_ms(step: Callable[[], Any], device: torch.device, bound_s: float = 1.0) -> float:
    return percentiles_ms(time_steps(step, device=device, warmup=10, bound_s=bound_s), "step", (50,))["step_p50_ms"]


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
