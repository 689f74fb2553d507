"""The parts that both pipelines share: one chunk as a work item with its key, and the encoder step of a batch of rows.

    encoder = RowEncoder(loaded, arena, ladder=(1, 2, 4, 8))
    item = step_item(geometry, row, chunk, block)
    encoded_BDT, lengths_B = encoder(mel_BFT, [item])

Where the step is graphed, a batch of whole chunks is padded up to the next size of the ladder: padding rows read the arena's scratch row and
silence, and their outputs are dropped. The language prompt of a prompted model is chosen per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from workbench.batching.buckets import bucket_for
from workbench.errors import InputError
from workbench.geometry import Chunk, StreamGeometry
from workbench.model.load import LoadedModel
from workbench.model.speech import Samples
from workbench.runtime.arena import StateArena


@dataclass(frozen=True)
class StepKey:
    """What must be equal to share a batch: mel frames fed, pre-encoded frames dropped, whether the chunk was cut short by the end, and
    whether its labels are biased. Context, prompt width and data type are the same for all work of one recogniser."""

    input_mel_frames: int
    drop_encoded: int
    cut: bool
    has_bias: bool = False


@dataclass(frozen=True)
class StepItem:
    """One chunk of the stream in `row`: its block [S] of pre-emphasised samples, zeros behind the end of the audio.

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


def step_item(
    geometry: StreamGeometry, row: int, chunk: Chunk, block: Samples, extend: bool = False, **more: Any
) -> StepItem:
    """Wrap one chunk with its compatibility key; `more` are further fields of `StepItem`.

    extend: fill a chunk that the end cut short up to the full length, so that it can share a batch with full ones; the encoder masks what
    lies behind the end. A lone stream is better off without: its last step is then as short as its audio.
    """
    key = step_key(geometry, chunk, more.get("bias") is not None, extend)
    missing = (key.input_mel_frames - chunk.input_mel_frames) * geometry.hop_samples
    return StepItem(row, chunk, np.pad(block, (0, missing)) if missing else block, key, **more)


def step_key(geometry: StreamGeometry, chunk: Chunk, has_bias: bool = False, extend: bool = False) -> StepKey:
    """The compatibility key of a chunk; `extend` as in `step_item`."""
    # From the third chunk on all are alike.
    full = _full_key(geometry, min(chunk.index, 2), chunk.drop_encoded, has_bias)
    if extend or chunk.input_mel_frames == full.input_mel_frames:
        return full
    return StepKey(chunk.input_mel_frames, chunk.drop_encoded, True, has_bias)


@lru_cache(maxsize=256)
def _full_key(geometry: StreamGeometry, index: int, drop_encoded: int, has_bias: bool) -> StepKey:
    return StepKey(geometry.chunk(index).input_mel_frames, drop_encoded, False, has_bias)


class RowEncoder:
    """NeMo's cache-aware encoder step on arena rows. Call it under the device lock and in inference mode."""

    def __init__(self, loaded: LoadedModel, arena: StateArena, ladder: tuple[int, ...] | None = None) -> None:
        self.model, self.arena, self.ladder = loaded.model, arena, ladder
        self.padded_rows = 0
        self._dtype = getattr(torch, loaded.dtype)

    def __call__(self, mel_BFT: torch.Tensor, items: Sequence[StepItem]) -> tuple[torch.Tensor, torch.Tensor]:
        """mel [B, F, T] or [size_of(items), F, T] of items with one key -> encoded [B, D, T'], lengths [B]; the caches of the rows move on."""
        batch, key, size = len(items), items[0].key, self.size_of(items)
        self.padded_rows += size - batch
        index = self.arena.indices([item.row for item in items], size)
        channel, time, length = self.arena.gather_encoder(index)
        mel, mel_length = self._masked(mel_BFT.to(self._dtype), items, size)
        encoded, lengths, *caches = self.model.encoder.cache_aware_stream_step(
            processed_signal=mel,
            processed_signal_length=mel_length,
            cache_last_channel=channel,
            cache_last_time=time,
            cache_last_channel_len=length,
            keep_all_outputs=key.cut,
            drop_extra_pre_encoded=key.drop_encoded,
        )
        self.arena.scatter_encoder(index[:batch], (caches[0], caches[1], caches[2]))
        return apply_prompts(self.model, encoded[:batch], [item.prompt for item in items]), lengths[:batch]

    def _masked(self, mel_BFT: torch.Tensor, items: Sequence[StepItem], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """mel [size, F, T] with zeros where a chunk or the batch was filled up, and the true lengths [size]."""
        frames = mel_BFT.size(2)
        lengths = [item.chunk.input_mel_frames for item in items] + [frames] * (size - len(items))
        for position, length in enumerate(lengths):
            if length < frames:
                mel_BFT[position, :, length:] = 0
        if (missing := size - mel_BFT.size(0)) > 0:
            mel_BFT = torch.nn.functional.pad(mel_BFT, (0, 0, 0, 0, 0, missing))
        return mel_BFT, torch.tensor(lengths, dtype=torch.long).to(mel_BFT.device, non_blocking=True)

    def size_of(self, items: Sequence[StepItem]) -> int:
        """The batch size that items with one key are filled up to."""
        if self.ladder is None or items[0].key.cut:  # cut chunks never run as graphs, so padding them would be waste
            return len(items)
        return bucket_for(len(items), self.ladder)


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
    if language is None:
        return int(getattr(model, "_inference_prompt_index", 0))
    known = dict(model.cfg.model_defaults.get("prompt_dictionary", {}))
    if language not in known:
        raise InputError(f"language: got {language!r}; this model knows {', '.join(map(str, known))}")
    return int(known[language])
