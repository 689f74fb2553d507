"""Device rows for the state of streams: encoder caches and decoder state, gathered and scattered by row index.

Why: a batch is any set of streams; with one tensor per kind of state and a row per stream, forming a batch is one gather per tensor and
nothing per stream. Rows are handed out by the pure `SlotAllocator`; a released row is dirty and is reset just before its next use.
Behind the last row lies one scratch row that only padding of a batch reads; nothing is ever written to it.

Shapes: L layers, R rows + 1, B batch. channel [L, R, C, D], time [L, R, D, K], length [R]; decoder: LSTM h and c [layers, R, H],
predictor output [R, 1, J], last label [R], decoded length [R] and, for TDT, the pending time jump [R] (`BatchedLabelLoopingState` of
NeMo's label-looping decoder). The staged pipeline also has a second bank of h and c, the projected encoder frames of the chunk in the works
[R, T, J], and per row a `WalkState` on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench.batching.slots import SlotAllocator
from workbench.errors import DeviceMemoryError, ModelError
from workbench.runtime.decoding import WalkState

# Dimension of the row index in each LSTM state tensor.
_PREDICTOR_ROW_DIM = 1


@dataclass
class DecoderRows:
    """Decoder state of all rows; `time_jumps` only for TDT."""

    predictor: list[torch.Tensor]
    outputs: torch.Tensor
    labels: torch.Tensor
    decoded: torch.Tensor
    time_jumps: torch.Tensor | None


@dataclass
class StagedRows:
    """What the staged decoder keeps per row: both banks of LSTM state, the frames of the current chunk, and the host's side of the walk."""

    banks: tuple[list[torch.Tensor], list[torch.Tensor]]
    frames: torch.Tensor
    walks: list[WalkState]


class StateArena:
    """`rows` rows of stream state for one model; `staged_frames`: encoder frames per chunk, where the staged decoder's rows are wanted."""

    def __init__(
        self, model: Any, rows: int, device: str, dtype: torch.dtype, staged_frames: int | None = None
    ) -> None:
        self.rows, self.device = rows, torch.device(device)
        self._allocator = SlotAllocator(rows)
        self._allocator_lock = threading.Lock()  # callers acquire and release while a worker prepares a batch
        self._computer = decoding_computer(model)
        self._check_memory(model, rows, dtype)
        self.channel, self.time, self.length = model.encoder.get_initial_cache_state(
            batch_size=rows + 1, dtype=dtype, device=self.device
        )
        self._start = self._computer._get_decoding_state_item_after_sos(device=self.device)
        self.decoder = self._decoder_rows(rows + 1)
        self.staged = None if staged_frames is None else self._staged_rows(rows + 1, staged_frames)

    @property
    def scratch(self) -> int:
        """The row that padding reads."""
        return self.rows

    def acquire(self) -> int:
        """Take the lowest free row. Raises ArenaFull."""
        with self._allocator_lock:
            return self._allocator.acquire()

    def release(self, row: int) -> None:
        """Give a row back; its content is reset before the row is used again."""
        with self._allocator_lock:
            self._allocator.release(row)

    @property
    def used(self) -> int:
        """Rows taken now."""
        return self._allocator.in_use

    def snapshot(self) -> dict[str, int]:
        """Use of the rows as plain data."""
        with self._allocator_lock:
            return self._allocator.snapshot()

    def indices(self, rows: Sequence[int], pad_to: int = 0) -> torch.Tensor:
        """Row numbers as an index tensor [max(B, pad_to)] on the device, after resetting those that are dirty; padding is the scratch row."""
        with self._allocator_lock:
            ranges = self._allocator.take_dirty(rows)
        for start, stop in ranges:
            self._reset(start, stop)
        padded = [*rows, *([self.scratch] * (pad_to - len(rows)))]
        return torch.tensor(padded, dtype=torch.long).to(self.device, non_blocking=True)

    def gather_encoder(self, index_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Encoder caches ([L, B, C, D], [L, B, D, K], [B]) of the rows."""
        return (
            self.channel.index_select(1, index_B),
            self.time.index_select(1, index_B),
            self.length.index_select(0, index_B),
        )

    def scatter_encoder(self, index_B: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Write encoder caches back to the rows; no other row is touched. Caches of padding behind the first B are ignored."""
        batch = index_B.numel()
        self.channel.index_copy_(1, index_B, caches[0][:, :batch].to(self.channel.dtype))
        self.time.index_copy_(1, index_B, caches[1][:, :batch].to(self.time.dtype))
        self.length.index_copy_(0, index_B, caches[2][:batch])

    def gather_decoder(self, index_B: torch.Tensor) -> Any:
        """NeMo's batched label-looping state of the rows."""
        from nemo.collections.asr.parts.submodules.transducer_decoding.label_looping_base import (
            BatchedLabelLoopingState,
        )

        d = self.decoder
        return BatchedLabelLoopingState(
            predictor_states=tuple(t.index_select(_PREDICTOR_ROW_DIM, index_B) for t in d.predictor),
            predictor_outputs=d.outputs.index_select(0, index_B),
            labels=d.labels.index_select(0, index_B),
            decoded_lengths=d.decoded.index_select(0, index_B),
            fusion_states_list=[],
            time_jumps=None if d.time_jumps is None else d.time_jumps.index_select(0, index_B),
        )

    def scatter_decoder(self, index_B: torch.Tensor, state: Any) -> None:
        """Write NeMo's batched label-looping state back to the rows."""
        d, batch = self.decoder, index_B.numel()
        for rows, new in zip(d.predictor, state.predictor_states, strict=True):
            rows.index_copy_(_PREDICTOR_ROW_DIM, index_B, new[:, :batch].to(rows.dtype))
        d.outputs.index_copy_(0, index_B, state.predictor_outputs[:batch].to(d.outputs.dtype))
        d.labels.index_copy_(0, index_B, state.labels[:batch])
        d.decoded.index_copy_(0, index_B, state.decoded_lengths[:batch])
        if d.time_jumps is not None:
            d.time_jumps.index_copy_(0, index_B, state.time_jumps[:batch])

    def _reset(self, start: int, stop: int) -> None:
        self.channel[:, start:stop] = 0
        self.time[:, start:stop] = 0
        self.length[start:stop] = 0
        d, item = self.decoder, self._start
        for rows, first in zip(d.predictor, item.predictor_state, strict=True):
            rows[:, start:stop] = first.unsqueeze(1)
        d.outputs[start:stop] = item.predictor_output
        d.labels[start:stop] = item.label
        d.decoded[start:stop] = item.decoded_length
        if d.time_jumps is not None:
            d.time_jumps[start:stop] = item.time_jump
        if self.staged is not None:
            self.staged.frames[start:stop] = 0
            for bank in self.staged.banks[0]:
                bank[:, start:stop] = 0
            self.staged.walks[start:stop] = [WalkState() for _ in range(start, stop)]

    def _decoder_rows(self, rows: int) -> DecoderRows:
        item = self._start
        if not isinstance(item.predictor_state, tuple | list) or any(s.dim() != 2 for s in item.predictor_state):
            raise ModelError("the predictor of this model is not an LSTM; its state cannot be kept in rows")
        return DecoderRows(
            predictor=[s.unsqueeze(1).repeat(1, rows, 1) for s in item.predictor_state],
            outputs=item.predictor_output.unsqueeze(0).repeat(rows, 1, 1),
            labels=item.label.repeat(rows),
            decoded=item.decoded_length.repeat(rows),
            time_jumps=None if item.time_jump is None else item.time_jump.repeat(rows),
        )

    def _staged_rows(self, rows: int, frames: int) -> StagedRows:
        """Bank 1 starts as the state after the start symbol, since a fresh `WalkState` says that the output was computed from bank 0."""
        after_start, outputs = self.decoder.predictor, self.decoder.outputs
        return StagedRows(
            banks=([torch.zeros_like(state) for state in after_start], after_start),
            frames=torch.zeros(rows, frames, outputs.size(-1), dtype=outputs.dtype, device=self.device),
            walks=[WalkState() for _ in range(rows)],
        )

    def _check_memory(self, model: Any, rows: int, dtype: torch.dtype) -> None:
        if self.device.type != "cuda":
            return
        encoder = model.encoder
        values = encoder.streaming_cfg.last_channel_cache_size + encoder.conv_context_size[0]
        needed = rows * len(encoder.layers) * encoder.d_model * values * torch.finfo(dtype).bits // 8
        free = torch.cuda.mem_get_info(self.device)[0]
        if needed > 0.9 * free:
            raise DeviceMemoryError(
                f"asr.batching.state_arena_slots: {rows} rows need {needed / 2**30:.1f} GiB; the GPU has {free / 2**30:.1f} GiB free, enough "
                f"for {int(rows * 0.9 * free / needed)}"
            )


def decoding_computer(model: Any) -> Any:
    """NeMo's batched label-looping computer of a model (RNNT or TDT). Raises ModelError if decoding is set otherwise."""
    computer = getattr(model.decoding.decoding, "decoding_computer", None)
    if computer is None:
        raise ModelError("decoding is not greedy_batch with label looping; use workbench.model.load.set_decoding")
    return computer
