"""The resident engine: arrays in, arrays out; one graph launch takes a batch of chunks from samples to labels.

    engine = ResidentEngine(loaded, rows=1024, ladder=(1, 2, 4, 8, 16, 32, 64, 128, 256))
    engine.warm_up()
    out = engine.step(rows, blocks, mel_frames, kind)      # rows [B], blocks [B, S], true mel frames [B], kind: mel frames fed, frames dropped
    out.labels[n, : out.counts[n]], out.frames[n, : out.counts[n]]
    flight = engine.start(rows, blocks, mel_frames, kind)  # the same in two halves: other work may be done until flight.ready()
    out = engine.finish(flight)

Front end, resident encoder, language prompt, joint's projection and the first decoding rounds are captured together per kind and batch size;
a batch is padded up to the next size with the scratch row. A first chunk makes its rows fresh before anything else, whatever they held. Rows
that emit more labels than the rounds in the graph ask for further ones. Where there is no CUDA the same code runs without capture.

One thread at a time may call it. Shapes: B batch, S samples of a chunk with its history, T encoder frames, cap = T * max_symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.batching.buckets import bucket_for
from workbench.encoder.resident import ResidentEncoder
from workbench.errors import DeviceMemoryError
from workbench.model.load import LoadedModel
from workbench.runtime.encoding import prompted
from workbench.runtime.frontend import MelFrontend
from workbench.runtime.resident_decoder import ResidentDecoder, Work

# Labels beyond one per frame that a batch may emit before the host must ask for more rounds.
SPARE_ROUNDS = 2
Kind = tuple[int, int]
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class StepLabels:
    """Labels of one step: counts [B], labels [B, cap] and the stream's encoder frame of each [B, cap]."""

    counts: Ints
    labels: Ints
    frames: Ints


class Flight:
    """A step under way; `ready` says whether `ResidentEngine.finish` would have to wait."""

    def __init__(self, call: _Captured, batch: int) -> None:
        self.call, self.batch = call, batch

    def ready(self) -> bool:
        """Whether the device is done with the rounds asked for so far."""
        return self.call.ready()


class ResidentEngine:
    """`rows` streams of one model; `ladder`: batch sizes that are captured; `weights` of the encoder as in `ResidentEncoder`. Raises ModelError for a model without a resident path, and
    DeviceMemoryError for more rows than the GPU has memory for."""

    def __init__(
        self, loaded: LoadedModel, rows: int, ladder: Sequence[int], max_symbols: int = 10, weights: str = "native"
    ) -> None:
        self.loaded, self.geometry, self.ladder = loaded, loaded.geometry, tuple(ladder)
        self.device, self.rows = torch.device(loaded.device), rows
        self.dtype: torch.dtype = getattr(torch, loaded.dtype)
        _check_memory(loaded, rows)
        model = loaded.model
        self.frontend = MelFrontend(model.preprocessor.featurizer, loaded.device)
        self.encoder = ResidentEncoder(model.encoder, rows, self.dtype, weights=weights)
        self.decoder = ResidentDecoder(model, rows, max_symbols, self.dtype)
        self.padded_rows = self.extra_rounds = 0
        self._prompted = prompted(model)
        self._graphs: dict[tuple[Kind, int], _Captured] = {}
        self._pool: Any = None

    @property
    def captured(self) -> int:
        """Graphs held."""
        return sum(call.graph is not None for call in self._graphs.values())

    @property
    def steady(self) -> Kind:
        """The kind of every chunk from the third on."""
        return (self.geometry.steady_mel_frames, self.geometry.drop_encoded_frames)

    def kinds(self) -> list[Kind]:
        """The kinds of the first three chunks, which are all there are."""
        found = [(c.input_mel_frames, c.drop_encoded) for c in (self.geometry.chunk(index) for index in range(3))]
        return list(dict.fromkeys(found))

    def block_samples(self, kind: Kind) -> int:
        """Samples S of a chunk of this kind with its history."""
        return (kind[0] - 1) * self.frontend.hop + self.frontend.n_fft

    @torch.inference_mode()
    def reset(self, rows: Sequence[int] | NDArray[np.int64]) -> None:
        """Make rows fresh for new streams; a first chunk does that itself."""
        index = torch.as_tensor(rows, dtype=torch.int64).to(self.device)
        self.encoder.reset(index)
        self.decoder.reset(index)

    @torch.inference_mode()
    def warm_up(self, kinds: Sequence[Kind] | None = None, sizes: Sequence[int] | None = None) -> None:
        """Capture kinds and batch sizes now, by default all; only the scratch row is touched."""
        for kind in kinds or self.kinds():
            for size in sizes or self.ladder:
                self._graph(kind, size)

    @torch.inference_mode()
    def step(
        self,
        rows: NDArray[np.int64],
        blocks: NDArray[np.float32],
        mel_frames: NDArray[np.int64],
        kind: Kind,
        prompts: NDArray[np.int64] | None = None,
    ) -> StepLabels:
        """One chunk of each row (all different); at most the ladder's last size. What lies behind `mel_frames` must be zeros."""
        return self.finish(self.start(rows, blocks, mel_frames, kind, prompts))

    @torch.inference_mode()
    def start(
        self,
        rows: NDArray[np.int64],
        blocks: NDArray[np.float32] | torch.Tensor,
        mel_frames: NDArray[np.int64],
        kind: Kind,
        prompts: NDArray[np.int64] | None = None,
    ) -> Flight:
        """Begin what `step` does; one flight at a time. A part of `staging` as `blocks` is copied from where it lies and must stay as it is until
        the flight is finished."""
        batch = len(rows)
        size = bucket_for(batch, self.ladder)
        self.padded_rows += size - batch
        call = self._graph(kind, size)
        call.fill(batch, rows, blocks, mel_frames, prompts)
        call.run()
        return Flight(call, batch)

    @torch.inference_mode()
    def finish(self, flight: Flight) -> StepLabels:
        """Wait for a flight, and for the further rounds that its rows ask for."""
        packed = flight.call.result()
        while packed[: flight.batch, 1].any():
            self.extra_rounds += 1
            flight.call.run_more()
            packed = flight.call.result()
        cap = (packed.shape[1] - 2) // 2
        found = packed[: flight.batch].copy()
        return StepLabels(found[:, 0], found[:, 2 : 2 + cap], found[:, 2 + cap :])

    def staging(self, kind: Kind) -> torch.Tensor:
        """Host memory [the ladder's last size, S] from which blocks of this kind reach the device without another copy."""
        pinned = self.device.type == "cuda"
        return torch.zeros(self.ladder[-1], self.block_samples(kind), pin_memory=pinned)

    def bare_replay(self, kind: Kind, size: int) -> Callable[[], None] | None:
        """The first graph of a kind and captured size with whatever its inputs hold, to time the device alone; None without CUDA."""
        graph = self._graph(kind, size).graph
        return None if graph is None else graph.replay  # type: ignore[no-any-return]

    def _graph(self, kind: Kind, size: int) -> _Captured:
        found = self._graphs.get((kind, size))
        if found is None:
            found = _Captured(self, kind, size, self._pool)
            self._pool = found.pool
            self._graphs[kind, size] = found
        return found

    def _compute(self, inputs: _Inputs, kind: Kind) -> tuple[Work, torch.Tensor]:
        """From samples to the packed labels of the first rounds."""
        if kind[1] == 0:  # only a first chunk drops nothing
            self.encoder.reset(inputs.rows)
            self.decoder.reset(inputs.rows)
        mel_BFM = self.frontend(inputs.blocks).to(self.dtype)
        seen = torch.arange(mel_BFM.size(2), device=self.device) < inputs.mel_frames[:, None]
        mel_BFM = torch.where(seen[:, None], mel_BFM, 0.0)
        start_B = self.encoder.rings.position.index_select(0, inputs.rows)
        encoded_BTD, lengths_B = self.encoder.step(mel_BFM, inputs.mel_frames, inputs.rows, kind[1])
        if self._prompted:
            encoded_BTD = self._with_prompts(encoded_BTD, inputs.prompts)
        projected_BTJ = self.loaded.model.joint.enc(encoded_BTD)
        work = self.decoder.begin(projected_BTJ, lengths_B, start_B, inputs.rows)
        self.decoder.rounds(work, projected_BTJ.size(1) + SPARE_ROUNDS)
        return work, self.decoder.end(work)

    def _with_prompts(self, encoded_BTD: torch.Tensor, prompts_B: torch.Tensor) -> torch.Tensor:
        model = self.loaded.model
        one_hot = torch.nn.functional.one_hot(prompts_B, model.num_prompts).to(encoded_BTD.dtype)
        joined = torch.cat([encoded_BTD, one_hot[:, None].expand(-1, encoded_BTD.size(1), -1)], dim=-1)
        return model.prompt_kernel(joined).to(encoded_BTD.dtype)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Inputs:
    """Inputs of one captured size, on the device or pinned on the host: blocks [size, S] and, in one piece, rows, mel frames and prompts."""

    blocks: torch.Tensor
    numbers: torch.Tensor  # [3, size]

    @property
    def rows(self) -> torch.Tensor:
        return self.numbers[0]

    @property
    def mel_frames(self) -> torch.Tensor:
        return self.numbers[1]

    @property
    def prompts(self) -> torch.Tensor:
        return self.numbers[2]


class _Captured:
    """The computation of one kind and batch size: captured on CUDA, called directly elsewhere."""

    def __init__(self, engine: ResidentEngine, kind: Kind, size: int, pool: Any) -> None:
        self.engine, self.kind, self.pool = engine, kind, pool
        self.graph: Any = None
        self._more: Any = None
        cuda = engine.device.type == "cuda"
        self._device = self._buffers(size, engine.device, pinned=False)
        self._host = self._buffers(size, torch.device("cpu"), pinned=True) if cuda else self._device
        self._scratch = engine.encoder.scratch
        if cuda:
            self._capture()

    def fill(self, batch: int, rows: Any, blocks: Any, mel_frames: Any, prompts: Any) -> None:
        """Put a batch into the inputs; the rest points at the scratch row."""
        host, device = self._host, self._device
        numbers = host.numbers.numpy()
        numbers[0, :batch], numbers[0, batch:] = rows, self._scratch
        numbers[1, :batch], numbers[1, batch:] = mel_frames, self.kind[0]
        numbers[2, :batch] = 0 if prompts is None else prompts
        if host is device:
            device.blocks[:batch] = torch.as_tensor(blocks)
            return
        if not isinstance(blocks, torch.Tensor):
            host.blocks[:batch] = torch.from_numpy(blocks)
            blocks = host.blocks[:batch]
        device.numbers.copy_(host.numbers, non_blocking=True)
        device.blocks[:batch].copy_(blocks, non_blocking=True)

    def run(self) -> None:
        """Start the first rounds."""
        if self.graph is None:
            self._work, self._packed = self.engine._compute(self._device, self.kind)
            return
        self.graph.replay()
        self._fetch()

    def run_more(self) -> None:
        """Start further rounds."""
        if self._more is None:
            self._rounds()
            return
        self._more.replay()
        self._fetch()

    def ready(self) -> bool:
        """Whether the result is there."""
        return self.graph is None or bool(self._fetched.query())

    def result(self) -> Ints:
        """The packed result so far, on the host; overwritten by the next run of this size."""
        if self.graph is None:
            return self._packed.numpy()
        self._fetched.synchronize()
        return self._result.numpy()

    def _rounds(self) -> None:
        self.engine.decoder.rounds(self._work, SPARE_ROUNDS + 1)
        self._packed = self.engine.decoder.end(self._work)

    def _fetch(self) -> None:
        self._result.copy_(self._packed_out, non_blocking=True)
        self._fetched.record(torch.cuda.current_stream(self.engine.device))

    def _capture(self) -> None:
        """Warm up on a side stream on the scratch row, then capture; further rounds are a graph of their own over the same tensors."""
        device = self.engine.device
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(2):
                self._work, self._packed = self.engine._compute(self._device, self.kind)
                self._rounds()
        torch.cuda.current_stream(device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=self.pool, stream=side):
            self._work, packed = self.engine._compute(self._device, self.kind)
            # Fixed places, which the graph of further rounds reads and writes.
            self._packed_out = packed.clone()
            self._carried = _carried(self._work)
        self.pool = self.pool or self.graph.pool()
        self._more = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._more, pool=self.pool, stream=side):
            before = self._carried
            self._rounds()
            for place, value in zip(before, _carried(self._work), strict=True):
                place.copy_(value)
            self._packed_out.copy_(self._packed)
        self._result = torch.empty_like(self._packed_out, device="cpu", pin_memory=True)
        self._fetched = torch.cuda.Event()
        del self._work, self._packed

    def _buffers(self, size: int, device: torch.device, pinned: bool) -> _Inputs:
        where: dict[str, Any] = {"device": device, "pin_memory": pinned}
        kind, engine = self.kind, self.engine
        numbers = torch.zeros(3, size, dtype=torch.int64, **where)
        numbers[0], numbers[1] = engine.encoder.scratch, kind[0]
        return _Inputs(torch.zeros(size, engine.block_samples(kind), **where), numbers)


def row_bytes(loaded: LoadedModel) -> int:
    """Bytes of one row of an engine, known before it is built: rings of keys, values and convolution inputs of all layers, and decoder state."""
    encoder, geometry, decoder = loaded.model.encoder, loaded.geometry, loaded.model.decoder
    ring = geometry.left_frames + geometry.chunk_frames
    conv = encoder.layers[0].conv.kernel_size - 1 + geometry.chunk_frames
    values = len(encoder.layers) * (2 * ring + conv) * int(encoder.d_model)
    values += 2 * getattr(decoder, "pred_rnn_layers", 0) * decoder.pred_hidden + loaded.model.joint.joint_hidden
    return int(values * torch.finfo(getattr(torch, loaded.dtype)).bits // 8 + 12)


def _check_memory(loaded: LoadedModel, rows: int) -> None:
    if loaded.device == "cpu":
        return
    device, needed = torch.device(loaded.device), (rows + 1) * row_bytes(loaded)
    # What PyTorch holds for reuse is free as well.
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + held
    if needed > 0.95 * free:
        raise DeviceMemoryError(
            f"resident rows: got {rows}, which need {needed / 2**30:.1f} GiB; the GPU has {free / 2**30:.1f} GiB free, enough for "
            f"{int(0.95 * free / row_bytes(loaded))}"
        )


def _carried(work: Work) -> list[torch.Tensor]:
    """What further rounds change."""
    return [work.h, work.c, work.output, work.time, work.at_frame, work.count]
