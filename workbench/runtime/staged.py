"""The staged stages: front end, encoder, predictor and joint as four batched operations on arena rows.

    stage = StagedStage(loaded, arena)          # arena made with staged_frames=geometry.chunk_frames
    mel = stage.mel(items)                      # one batch of equal blocks
    walks = stage.encode(items, mel)            # encoder step, frames projected by joint.enc once, one ChunkWalk per item
    stage.decode(("joint", 2), walks)           # one joint batch; or ("predictor", bank)

`run` does the whole step of a batch in place, which is the path with batching off; with batching on the four operations are scheduled apart.
All decoder state is read and written by row index on the device; the host sees only the best labels. Call the single operations under
`device_lock`; the results equal the fused stage token for token.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import record_function

from workbench.errors import ConfigError
from workbench.geometry import Chunk
from workbench.model.load import LoadedModel
from workbench.model.speech import Samples
from workbench.runtime.arena import StagedRows, StateArena, decoding_computer
from workbench.runtime.decoding import ChunkWalk, Op
from workbench.runtime.encoding import RowEncoder, StepItem, StepResult, step_item
from workbench.runtime.frontend import MelFrontend
from workbench.runtime.stages import blocks_of


@dataclass(eq=False)
class RowWalk:
    """One item with the walk over its chunk."""

    item: StepItem
    walk: ChunkWalk

    @property
    def result(self) -> StepResult:
        """Labels and frames so far."""
        return StepResult(tuple(self.walk.labels), tuple(self.walk.at_frames))


class StagedStage:
    """The four operations on one model and arena; `ladder` as for the fused stage."""

    def __init__(self, loaded: LoadedModel, arena: StateArena, ladder: tuple[int, ...] | None = None) -> None:
        if arena.staged is None:
            raise ConfigError("the staged pipeline needs an arena with staged rows (staged_frames)")
        self.loaded, self.arena, self.model = loaded, arena, loaded.model
        self.geometry = loaded.geometry
        self.frontend = MelFrontend(loaded.model.preprocessor.featurizer, loaded.device)
        self.encoder = RowEncoder(loaded, arena, ladder)
        self.device_lock = threading.Lock()
        self._rows: StagedRows = arena.staged
        computer = decoding_computer(loaded.model)
        self._decoder, self._joint = computer.decoder, computer.joint
        self._max_symbols, self._blank = computer.max_symbols, computer._blank_index
        durations = getattr(computer, "durations", None)
        self._durations = None if durations is None else durations.to(arena.device)

    def item(self, row: int, chunk: Chunk, block: Samples, **more: Any) -> StepItem:
        """Wrap one chunk with its compatibility key; `more` are further fields of `StepItem`."""
        return step_item(self.geometry, row, chunk, block, **more)

    def run(self, items: Sequence[StepItem]) -> list[StepResult]:
        """The whole step of a batch with equal keys. Results in the order of the items."""
        blocks = blocks_of(items, self.encoder.size_of(items))
        with self.device_lock, torch.inference_mode():
            with record_function("workbench.frontend"):
                mel_BFT = self.frontend(blocks)
            with record_function("workbench.encoder"):
                walks = self.encode(items, mel_BFT)
            with record_function("workbench.decoder"):
                self._walk_to_end(walks)
        return [walk.result for walk in walks]

    def mel(self, items: Sequence[StepItem]) -> torch.Tensor:
        """Log-mel [B, F, T] of items with blocks of one size."""
        return self.frontend(blocks_of(items))

    def encode(self, items: Sequence[StepItem], mel_BFT: torch.Tensor) -> list[RowWalk]:
        """Encoder step of items with one key; the projected frames wait in the rows for the joint."""
        encoded_BDT, lengths_B = self.encoder(mel_BFT, items)
        projected_BTJ = self._joint.project_encoder(encoded_BDT.transpose(1, 2))
        frames, rows = projected_BTJ.size(1), [item.row for item in items]
        self._rows.frames[:, :frames].index_copy_(
            0, self.arena.indices(rows), projected_BTJ.to(self._rows.frames.dtype)
        )
        return [
            RowWalk(item, ChunkWalk(self._rows.walks[item.row], length, self._max_symbols, self._blank))
            for item, length in zip(items, lengths_B.clamp(max=frames).tolist(), strict=True)
        ]

    def decode(self, op: Op, walks: Sequence[RowWalk]) -> None:
        """One decoder operation that all these walks asked for."""
        if op[0] == "predictor":
            self._predict(op[1], walks)
        else:
            self._join(op[1], walks)

    def _predict(self, bank: int, walks: Sequence[RowWalk]) -> None:
        """Read the LSTM state from `bank`, take the pending labels, write the other bank and the projected output."""
        wanted = [[walk.item.row for walk in walks], [walk.walk.state.pending for walk in walks]]
        index_B, labels_B = torch.tensor(wanted, dtype=torch.long).to(self.arena.device, non_blocking=True)
        state = tuple(rows.index_select(1, index_B) for rows in self._rows.banks[bank])
        output, state, *_ = self._decoder.predict(labels_B.unsqueeze(1), state, add_sos=False, batch_size=len(walks))
        for rows, new in zip(self._rows.banks[1 - bank], state, strict=True):
            rows.index_copy_(1, index_B, new.to(rows.dtype))
        outputs = self.arena.decoder.outputs
        outputs.index_copy_(0, index_B, self._joint.project_prednet(output).to(outputs.dtype))
        for walk in walks:
            walk.walk.predicted()

    def _join(self, frames: int, walks: Sequence[RowWalk]) -> None:
        """Best label (and TDT duration) of all remaining frames under the present predictor output."""
        wanted = [[walk.item.row for walk in walks], [walk.walk.time for walk in walks]]
        index_B, time_B = torch.tensor(wanted, dtype=torch.long).to(self.arena.device, non_blocking=True)
        time_BT = time_B.unsqueeze(1) + torch.arange(frames, device=time_B.device)
        encoded_BTJ = self._rows.frames[index_B.unsqueeze(1), time_BT]
        logits_BTV = self._joint.joint_after_projection(
            encoded_BTJ, self.arena.decoder.outputs.index_select(0, index_B)
        ).squeeze(2)
        durations: list[list[int] | None] = [None] * len(walks)
        if self._durations is not None:
            count = self._durations.numel()
            durations = self._durations[logits_BTV[..., -count:].argmax(-1)].tolist()
            logits_BTV = logits_BTV[..., :-count]
        labels_BT = logits_BTV.argmax(-1)
        if walks[0].item.bias is not None:
            # As NeMo fuses scores: whether a label comes is decided without the bias, which label with it.
            bias_BV = torch.stack([walk.item.bias for walk in walks if walk.item.bias is not None])
            biased_BT = (logits_BTV[..., : self._blank] + bias_BV.unsqueeze(1).to(logits_BTV.dtype)).argmax(-1)
            labels_BT = torch.where(labels_BT == self._blank, labels_BT, biased_BT)
        for walk, labels, spans in zip(walks, labels_BT.tolist(), durations, strict=True):
            walk.walk.joined(labels, spans)

    def _walk_to_end(self, walks: Sequence[RowWalk]) -> None:
        while groups := _by_op(walks):
            for op, group in groups.items():
                self.decode(op, group)


def _by_op(walks: Sequence[RowWalk]) -> dict[Op, list[RowWalk]]:
    groups: dict[Op, list[RowWalk]] = {}
    for walk in walks:
        op = walk.walk.op()
        if op is not None:
            groups.setdefault(op, []).append(walk)
    return groups
