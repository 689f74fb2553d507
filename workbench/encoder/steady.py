"""Steady steps to order: the tensors of a streaming step of a given shape, for capture before traffic, for tests and measurements.

    call = steady_call(encoder, StepShape(batch=8))
    encoder.cache_aware_stream_step(*call.inputs, keep_all_outputs=False)

The frames are random, the caches full of random values: zeros would hide unwritten outputs and can run faster than real data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from workbench.encoder.key import StepCall, StepInputs


@dataclass(frozen=True)
class StepShape:
    """A steady step. Fields left None are the encoder's own: steady mel frames, parameter dtype, current context.

    length_dtype: of the caller's mel lengths.
    """

    batch: int
    mel_frames: int | None = None
    dtype: torch.dtype | None = None
    att_context_size: tuple[int, int] | None = None
    length_dtype: torch.dtype = torch.int64


def steady_call(encoder: Any, shape: StepShape) -> StepCall:
    """The call of a steady step of this shape in the encoder's current context; every mel frame is valid and every cache full."""
    weight = next(encoder.parameters())
    device, dtype = weight.device, shape.dtype or weight.dtype
    cfg = encoder.streaming_cfg
    frames = shape.mel_frames or steady_mel_frames(cfg)
    channel, time, length = encoder.get_initial_cache_state(batch_size=shape.batch, dtype=dtype, device=device)
    signal = torch.randn(shape.batch, encoder._feat_in, frames, device=device, dtype=dtype)
    lengths = torch.full((shape.batch,), frames, device=device, dtype=shape.length_dtype)
    length.fill_(cfg.last_channel_cache_size)
    return StepCall(StepInputs(signal, lengths, channel.normal_(), time.normal_(), length), keep_all_outputs=False)


def steady_mel_frames(streaming_cfg: Any) -> int:
    """Mel frames of a steady step: the new ones and the pre-encoder's history."""
    return sum(
        value[1] if isinstance(value, (list, tuple)) else value
        for value in (streaming_cfg.chunk_size, streaming_cfg.pre_encode_cache_size)
    )
