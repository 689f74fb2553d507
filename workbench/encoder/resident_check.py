"""Is the resident step NeMo's on this very model? A short stream through both, before the fast one is chosen.

    found = equality(model.encoder, ResidentEncoder(model.encoder, rows=2))
    found.relative_error <= found.allowed

Streams of random frames from their first chunk on, in rows that held NaN, two together and one alone (which has kernels of its own), at the precision that the model has; fp32 is compared with TF32 off,
since TF32 differs between any two orders of summation. `allowed` is 1e-5 in fp32, and in half precision three times what NeMo's own rounding
was measured to cost there (1.2e-2 on the 0.6 B shape, studies/h200/fast_step.json).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from workbench.encoder.resident import ResidentEncoder
from workbench.encoder.steady import steady_mel_frames

CHECK_ROWS = 2
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 3.6e-2}


@dataclass(frozen=True)
class Equality:
    """||resident - NeMo|| / ||NeMo|| over the stream, and what is allowed at this precision."""

    relative_error: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether the two are one step; never for NaN."""
        return self.relative_error <= self.allowed


@torch.inference_mode()
def equality(encoder: Any, resident: ResidentEncoder, steps: int = 12) -> Equality:
    """Compare `steps` steps on rows 0 and 1 of `resident`, which must be free and are fresh again afterwards; NeMo's settings are left as they were."""
    with _exact_fp32():
        found = [_relative_error(encoder, resident, steps, rows) for rows in ([1, 0], [1])]
    resident.reset(torch.arange(CHECK_ROWS, device=resident.device))
    return Equality(max(found, key=lambda error: (error != error, error)), ALLOWED[resident.dtype])


def _relative_error(encoder: Any, resident: ResidentEncoder, steps: int, chosen: list[int]) -> float:
    cfg, rows = encoder.streaming_cfg, torch.tensor(chosen, device=resident.device)
    drop, batch = cfg.drop_extra_pre_encoded, len(chosen)
    state = encoder.get_initial_cache_state(batch_size=batch, dtype=resident.dtype, device=resident.device)
    for ring in (resident.rings.kv, resident.rings.conv):
        ring[:, :CHECK_ROWS] = float("nan")
    resident.reset(rows)
    difference = reference = 0.0
    for index, (mel, lengths) in enumerate(_chunks(encoder, resident, steps, batch)):
        given = 0 if index == 0 else drop
        try:
            out = type(encoder).cache_aware_stream_step(encoder, mel, lengths, *state, False, given)
        finally:
            cfg.drop_extra_pre_encoded = drop
        state, want = out[2:], out[0].transpose(1, 2).double()
        got = resident.step(mel, lengths, rows, given)[0].double()
        difference += float((got - want).square().sum())
        reference += float(want.square().sum())
    return (difference / reference) ** 0.5


def _chunks(
    encoder: Any, resident: ResidentEncoder, steps: int, batch: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random mel [B, F, M] and its lengths [B]: a first chunk, then steady ones."""
    generator = torch.Generator().manual_seed(0)
    for index in range(steps):
        frames = encoder.streaming_cfg.chunk_size[0] if index == 0 else steady_mel_frames(encoder.streaming_cfg)
        mel = torch.randn(batch, encoder._feat_in, frames, generator=generator) * 2 - 6
        yield mel.to(resident.device, resident.dtype), torch.full((batch,), frames, device=resident.device)


@contextmanager
def _exact_fp32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
