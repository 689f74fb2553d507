"""The slot-resident step against NeMo's own: same frames out, whatever the rows held before and whoever the neighbours are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from resident_walk import ResidentWalk, lone_frames, relative_error, small_encoder

from workbench.encoder.resident import ResidentEncoder, why_not_resident
from workbench.errors import ModelError

CONTEXTS = [(56, 0), (56, 1), (56, 3), (56, 6), (56, 13)]
RNG = 7


def mel_of(encoder, geometry, frames, seed, batch=1):
    """Random log-mel-like features [B, F, M]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, encoder._feat_in, frames, generator=generator) * 2 - 6


def frames_for(geometry, chunks, cut=0):
    """Mel frames of so many chunks, the last one `cut` frames short."""
    return geometry.first_mel_frames + (chunks - 1) * geometry.next_mel_frames - cut


@pytest.mark.parametrize("context", CONTEXTS)
@torch.inference_mode()
def test_equals_nemo_through_fill_steady_state_and_a_cut_end(context):
    encoder, geometry = small_encoder(context)
    chunks = 2 + -(-56 // geometry.chunk_frames) + 4
    for cut in (0, 3, geometry.next_mel_frames - 1):
        mel = mel_of(encoder, geometry, frames_for(geometry, chunks, cut), RNG)
        want = lone_frames(encoder, geometry, mel)
        resident = ResidentEncoder(encoder, rows=3)
        got = ResidentWalk(resident, geometry).whole([1], mel)[0]
        assert got.shape == want.shape
        assert relative_error(got, want) < 1e-5


@torch.inference_mode()
def test_rows_join_and_leave_at_random_among_poison():
    """Free rows and the scratch row hold NaN, rows are reused, batches are padded: every stream equals itself alone."""
    encoder, geometry = small_encoder((56, 1))
    rng = np.random.default_rng(RNG)
    resident = ResidentEncoder(encoder, rows=5)
    resident.rings.kv.fill_(float("nan"))
    resident.rings.conv.fill_(float("nan"))
    lengths = [int(rng.integers(4, 40)) for _ in range(14)]
    mels = [
        mel_of(encoder, geometry, frames_for(geometry, n, int(rng.integers(0, 16))), 100 + i)
        for i, n in enumerate(lengths)
    ]
    wanted = [lone_frames(encoder, geometry, mel) for mel in mels]
    walk = ResidentWalk(resident, geometry)
    found = walk.crowd(mels, rng, buckets=(1, 2, 4, 8))
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape and relative_error(got, want) < 1e-5
    assert walk.reused > 0 and walk.padded > 0


@torch.inference_mode()
def test_a_step_leaves_other_rows_bitwise_unchanged():
    encoder, geometry = small_encoder((56, 3))
    resident = ResidentEncoder(encoder, rows=6)
    for tensor in (resident.rings.kv, resident.rings.conv):
        tensor.normal_()
    before = [t.clone() for t in (resident.rings.kv, resident.rings.conv, resident.rings.position)]
    mel = mel_of(encoder, geometry, geometry.steady_mel_frames, 1, batch=2)
    resident.step(mel, torch.tensor([mel.size(2)] * 2), torch.tensor([4, 1]), drop=2)
    others = [0, 2, 3, 5, 6]
    assert torch.equal(resident.rings.kv[:, others], before[0][:, others])
    assert torch.equal(resident.rings.conv[:, others], before[1][:, others])
    assert torch.equal(resident.rings.position[others], before[2][others])
    assert resident.rings.position[[4, 1]].tolist() == [4, 4]


@torch.inference_mode()
def test_folded_projections_of_a_lone_frame_give_the_same_frames():
    encoder, geometry = small_encoder((56, 0))
    mel = mel_of(encoder, geometry, frames_for(geometry, 64, 3), RNG)
    want = lone_frames(encoder, geometry, mel)
    folded = ResidentEncoder(encoder, rows=1, fold=True)
    assert folded.folded and relative_error(ResidentWalk(folded, geometry).whole([0], mel)[0], want) < 1e-5


@torch.inference_mode()
def test_bfloat16_stays_near_fp32():
    encoder, geometry = small_encoder((56, 3))
    mel = mel_of(encoder, geometry, frames_for(geometry, 24), RNG)
    want = lone_frames(encoder, geometry, mel)
    half = ResidentEncoder(encoder, rows=1, dtype=torch.bfloat16)
    assert relative_error(ResidentWalk(half, geometry).whole([0], mel)[0].float(), want) < 2e-2


@torch.inference_mode()
def test_an_encoder_without_a_resident_step_says_why():
    encoder, _ = small_encoder((56, 0))
    assert why_not_resident(encoder) is None
    encoder.att_context_style = "regular"
    with pytest.raises(ModelError, match="context style is 'regular'"):
        ResidentEncoder(encoder, rows=1)
