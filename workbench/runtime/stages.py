"""The fused stage: front end, NeMo's cache-aware encoder step and batched label-looping decoding of any set of streams in one call.

A `StepItem` is one chunk of one stream; items with an equal `StepKey` run as one batch. The stage owns no thread and no queue: it is called by
the caller's own thread (batching off) or by a worker with a released batch; what it gives to the device it gives under the device lock.

Equal to NeMo's `conformer_stream_step` on each stream alone, token for token: the same three NeMo parts are called, but state is gathered from
arena rows instead of being carried in per-stream hypothesis objects, whose merging grows with the age of the stream.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

from workbench.geometry import Chunk
from workbench.model.load import LoadedModel
from workbench.model.speech import Samples
from workbench.runtime.arena import StateArena, decoding_computer
from workbench.runtime.encoding import RowEncoder, StepItem, StepKey, StepResult, step_item
from workbench.runtime.frontend import MelFrontend

__all__ = ["FusedStage", "StepItem", "StepKey", "StepResult", "blocks_of"]


class FusedStage:
    """Runs batches of `StepItem` on one model and arena; `ladder`: batch sizes that steady batches are padded up to."""

    def __init__(self, loaded: LoadedModel, arena: StateArena, ladder: tuple[int, ...] | None = None) -> None:
        self.loaded, self.arena, self.model = loaded, arena, loaded.model
        self.geometry = loaded.geometry
        self.frontend = MelFrontend(loaded.model.preprocessor.featurizer, loaded.device)
        self.encoder = RowEncoder(loaded, arena, ladder)
        self.device_lock = threading.Lock()
        self._computer = decoding_computer(loaded.model)

    def item(self, row: int, chunk: Chunk, block: Samples, **more: Any) -> StepItem:
        """Wrap one chunk with its compatibility key; `more` are further fields of `StepItem`."""
        return step_item(self.geometry, row, chunk, block, **more)

    def run(self, items: Sequence[StepItem]) -> list[StepResult]:
        """One step of every item; all keys must be equal. Results in the order of the items."""
        blocks = blocks_of(items, self.encoder.size_of(items))
        with self.device_lock, torch.inference_mode():
            with record_function("workbench.frontend"):
                mel_BFT = self.frontend(blocks)
            with record_function("workbench.encoder"):
                encoded_BDT, lengths_B = self.encoder(mel_BFT, items)
            with record_function("workbench.decoder"):
                hypotheses = self._decode(encoded_BDT, lengths_B, items)
        return _results(hypotheses)

    def _decode(
        self, encoded_BDT: torch.Tensor, lengths_B: torch.Tensor, items: Sequence[StepItem]
    ) -> tuple[Any, Any, Any]:
        index_B = self.arena.indices([item.row for item in items])
        state = self.arena.gather_decoder(index_B)
        encoded_BTD = encoded_BDT.transpose(1, 2)
        if items[0].key.has_bias:
            hypotheses, state = _biased(self._computer, encoded_BTD, lengths_B, state, items)
        else:
            hypotheses, state = self._computer(
                x=encoded_BTD, out_len=lengths_B, prev_batched_state=state, multi_biasing_ids=None
            )
        self.arena.scatter_decoder(index_B, state)
        counts, labels, frames = (t[: len(items)].cpu().numpy() for t in hypotheses.get_data_without_blank()[:3])
        return counts, labels, frames


class _RowBias:
    """A stateless shallow-fusion model in NeMo's sense: fixed scores per row. Only its own batch may use it."""

    def __init__(self, bias_BV: torch.Tensor) -> None:
        self._bias_BV = bias_BV
        self._same = torch.zeros(bias_BV.shape, dtype=torch.long, device=bias_BV.device)

    def to(self, device: Any) -> _RowBias:
        return self

    def advance(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._bias_BV.clone(), self._same


def _biased(
    computer: Any, encoded_BTD: torch.Tensor, lengths_B: torch.Tensor, state: Any, items: Sequence[StepItem]
) -> Any:
    """NeMo's decoder with the rows' biases fused in: whether a label comes is decided without them, which label with them."""
    bias_BV = torch.stack([item.bias for item in items if item.bias is not None]).to(encoded_BTD.dtype)
    state.fusion_states_list = [torch.zeros(len(items), dtype=torch.long, device=bias_BV.device)]
    before = computer.fusion_models, computer.fusion_models_alpha
    computer.fusion_models, computer.fusion_models_alpha = [_RowBias(bias_BV)], [1.0]
    try:
        return computer.torch_impl(encoded_BTD, lengths_B, state, None)
    finally:
        computer.fusion_models, computer.fusion_models_alpha = before


def blocks_of(items: Sequence[StepItem], size: int = 0) -> torch.Tensor:
    """Blocks [max(B, size), S] of items with equal keys, on the host; silence behind the last. Why filled up: a graphed encoder
    pads the batch anyway, and every new batch size costs the front end a new FFT plan (up to 0.5 ms on an H200)."""
    blocks = np.zeros((max(len(items), size), items[0].block.size), np.float32)
    for position, item in enumerate(items):
        blocks[position] = item.block
    return torch.from_numpy(blocks)


def _results(hypotheses: tuple[Any, Any, Any]) -> list[StepResult]:
    counts, labels, frames = hypotheses
    return [
        StepResult(tuple(labels[i, :n].tolist()), tuple(frames[i, :n].tolist())) for i, n in enumerate(counts.tolist())
    ]
