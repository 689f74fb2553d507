"""The fused stage: front end, NeMo's cache-aware encoder step and batched label-looping decoding of any set of streams in one call.

A `StepItem` is one chunk of one stream; items with an equal `StepKey` run as one batch. The stage owns no thread and no queue: it is called by
the caller's own thread (batching off) or by a worker with a released batch, always under the device lock.

Equal to NeMo's `conformer_stream_step` on each stream alone, token for token: the same three NeMo parts are called, but state is gathered from
arena rows instead of being carried in per-stream hypothesis objects, whose merging grows with the age of the stream.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

from workbench.geometry import Chunk
from workbench.model.load import LoadedModel
from workbench.model.speech import Samples
from workbench.runtime.arena import StateArena, decoding_computer
from workbench.runtime.frontend import MelFrontend


@dataclass(frozen=True)
class StepKey:
    """What must be equal to share a batch: mel frames fed, pre-encoded frames dropped, whether the chunk was cut by the end."""

    input_mel_frames: int
    drop_encoded: int
    cut: bool


@dataclass(frozen=True)
class StepItem:
    """One chunk of the stream in `row`: its block [S] of pre-emphasised samples."""

    row: int
    chunk: Chunk
    block: Samples = field(repr=False)
    key: StepKey


@dataclass(frozen=True)
class StepResult:
    """New label ids of one chunk and, for each, the encoder frame of the stream at which it was emitted."""

    labels: tuple[int, ...]
    frames: tuple[int, ...]


class FusedStage:
    """Runs batches of `StepItem` on one model and arena."""

    def __init__(self, loaded: LoadedModel, arena: StateArena) -> None:
        self.loaded, self.arena, self.model = loaded, arena, loaded.model
        self.geometry = loaded.geometry
        self.frontend = MelFrontend(loaded.model.preprocessor.featurizer, loaded.device)
        self.device_lock = threading.Lock()
        self._dtype = getattr(torch, loaded.dtype)
        self._computer = decoding_computer(loaded.model)

    def item(self, row: int, chunk: Chunk, block: Samples) -> StepItem:
        """Wrap one chunk with its compatibility key."""
        full = chunk == self.geometry.chunk(chunk.index)
        return StepItem(row, chunk, block, StepKey(chunk.input_mel_frames, chunk.drop_encoded, not full))

    def run(self, items: Sequence[StepItem]) -> list[StepResult]:
        """One step of every item; all keys must be equal. Results in the order of the items."""
        with self.device_lock, torch.inference_mode():
            index_B = self.arena.indices([item.row for item in items])
            with record_function("workbench.frontend"):
                mel_BFT = self.frontend(torch.from_numpy(np.stack([item.block for item in items]))).to(self._dtype)
            with record_function("workbench.encoder"):
                encoded_BDT, lengths_B = self._encode(mel_BFT, index_B, items[0].key)
            with record_function("workbench.decoder"):
                return self._decode(encoded_BDT, lengths_B, index_B)

    def _encode(self, mel_BFT: torch.Tensor, index_B: torch.Tensor, key: StepKey) -> tuple[torch.Tensor, torch.Tensor]:
        channel, time, length = self.arena.gather_encoder(index_B)
        encoded, lengths, *caches = self.model.encoder.cache_aware_stream_step(
            processed_signal=mel_BFT,
            processed_signal_length=torch.full(
                (mel_BFT.size(0),), mel_BFT.size(2), dtype=torch.long, device=mel_BFT.device
            ),
            cache_last_channel=channel,
            cache_last_time=time,
            cache_last_channel_len=length,
            keep_all_outputs=key.cut,
            drop_extra_pre_encoded=key.drop_encoded,
        )
        self.arena.scatter_encoder(index_B, (caches[0], caches[1], caches[2]))
        if hasattr(self.model, "_apply_prompt_to_encoded"):
            encoded = self.model._apply_prompt_to_encoded(encoded)
        return encoded, lengths

    def _decode(self, encoded_BDT: torch.Tensor, lengths_B: torch.Tensor, index_B: torch.Tensor) -> list[StepResult]:
        hypotheses, state = self._computer(
            x=encoded_BDT.transpose(1, 2),
            out_len=lengths_B,
            prev_batched_state=self.arena.gather_decoder(index_B),
            multi_biasing_ids=None,
        )
        self.arena.scatter_decoder(index_B, state)
        return _results(hypotheses, index_B.numel())


def _results(hypotheses: Any, batch: int) -> list[StepResult]:
    counts, labels, frames = (t[:batch].cpu().numpy() for t in hypotheses.get_data_without_blank()[:3])
    return [
        StepResult(tuple(labels[i, :n].tolist()), tuple(frames[i, :n].tolist())) for i, n in enumerate(counts.tolist())
    ]
