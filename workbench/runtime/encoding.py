"""The parts that both pipelines share: one chunk as a work item with its key, and the encoder step of a batch of rows.

    encoder = RowEncoder(loaded, arena, ladder=(1, 2, 4, 8))
    encoded_BDT, lengths_B = encoder(mel_BFT, rows, key, prompts)

Where the step is graphed, a batch of steady chunks is padded up to the next size of the ladder: padding rows read the arena's scratch row and
silence, and their outputs are dropped. The language prompt of a prompted model is chosen per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from workbench.batching.buckets import bucket_for
from workbench.errors import InputError
from workbench.geometry import Chunk, StreamGeometry
from workbench.model.load import LoadedModel
from workbench.model.speech import Samples
from workbench.runtime.arena import StateArena


@dataclass(frozen=True)
class StepKey:
    """What must be equal to share a batch: mel frames fed, pre-encoded frames dropped, whether the chunk was cut by the end, and whether
    its labels are biased. Context, prompt width and data type are the same for all work of one recogniser."""

    input_mel_frames: int
    drop_encoded: int
    cut: bool
    has_bias: bool = False


@dataclass(frozen=True)
class StepItem:
    """One chunk of the stream in `row`: its block [S] of pre-emphasised samples.

    prompt: language index of a prompted model; bias: [V] added to the scores of labels other than blank, on the device; next_key: the key of
    the stream's following chunk if its audio is already there.
    """

    row: int
    chunk: Chunk
    block: Samples = field(repr=False)
    key: StepKey
    prompt: int = 0
    bias: torch.Tensor | None = field(default=None, repr=False)
    next_key: StepKey | None = None


@dataclass(frozen=True)
class StepResult:
    """New label ids of one chunk and, for each, the encoder frame of the stream at which it was emitted."""

    labels: tuple[int, ...]
    frames: tuple[int, ...]


def step_key(geometry: StreamGeometry, chunk: Chunk, has_bias: bool = False) -> StepKey:
    """The compatibility key of a chunk."""
    full = chunk == geometry.chunk(chunk.index)
    return StepKey(chunk.input_mel_frames, chunk.drop_encoded, not full, has_bias)


class RowEncoder:
    """NeMo's cache-aware encoder step on arena rows. Call it under the device lock and in inference mode."""

    def __init__(self, loaded: LoadedModel, arena: StateArena, ladder: tuple[int, ...] | None = None) -> None:
        self.model, self.arena, self.ladder = loaded.model, arena, ladder
        self.padded_rows = 0
        self._dtype = getattr(torch, loaded.dtype)

    def __call__(
        self, mel_BFT: torch.Tensor, rows: Sequence[int], key: StepKey, prompts: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """mel [B, F, T] -> encoded [B, D, T'], lengths [B]; the caches of the rows move on."""
        batch = len(rows)
        size = self._padded_size(batch, key)
        index = self.arena.indices(rows, size)
        channel, time, length = self.arena.gather_encoder(index)
        mel = mel_BFT.to(self._dtype)
        if size > batch:
            mel = torch.nn.functional.pad(mel, (0, 0, 0, 0, 0, size - batch))
        encoded, lengths, *caches = self.model.encoder.cache_aware_stream_step(
            processed_signal=mel,
            processed_signal_length=torch.full((size,), mel.size(2), dtype=torch.long, device=mel.device),
            cache_last_channel=channel,
            cache_last_time=time,
            cache_last_channel_len=length,
            keep_all_outputs=key.cut,
            drop_extra_pre_encoded=key.drop_encoded,
        )
        self.arena.scatter_encoder(index[:batch], (caches[0], caches[1], caches[2]))
        return apply_prompts(self.model, encoded[:batch], prompts), lengths[:batch]

    def _padded_size(self, batch: int, key: StepKey) -> int:
        # First and cut chunks never run as graphs, so padding them would be waste.
        if self.ladder is None or key.cut or not key.drop_encoded:
            return batch
        size = bucket_for(batch, self.ladder)
        self.padded_rows += size - batch
        return size


def apply_prompts(model: Any, encoded_BDT: torch.Tensor, prompts: Sequence[int]) -> torch.Tensor:
    """Join a one-hot language prompt to every encoder frame of its row, as prompted models expect; other models' frames pass unchanged."""
    if not prompted(model):
        return encoded_BDT
    encoded_BTD = encoded_BDT.transpose(1, 2)
    index_B = torch.tensor(list(prompts), device=encoded_BTD.device)
    one_hot = torch.nn.functional.one_hot(index_B, model.num_prompts).to(encoded_BTD.dtype)
    joined = torch.cat([encoded_BTD, one_hot.unsqueeze(1).expand(-1, encoded_BTD.size(1), -1)], dim=-1)
    return model.prompt_kernel(joined).to(encoded_BTD.dtype).transpose(1, 2)  # type: ignore[no-any-return]


def prompted(model: Any) -> bool:
    """Whether the model takes a language prompt."""
    return hasattr(model, "prompt_kernel") and bool(getattr(model, "concat", False))


def prompt_index(model: Any, language: str | None) -> int:
    """Index of a language in the model's prompt dictionary; the model's own present prompt for None.

    Raises InputError for an unknown language, or for any language where the model takes no prompt.
    """
    if not prompted(model):
        if language is not None:
            raise InputError(f"language: got {language!r}; this model takes no language prompt")
        return 0
    known = dict(model.cfg.model_defaults.get("prompt_dictionary", {}))
    if language is None:
        return int(getattr(model, "_inference_prompt_index", 0))
    if language not in known:
        raise InputError(f"language: got {language!r}; this model knows {', '.join(map(str, known))}")
    return int(known[language])
