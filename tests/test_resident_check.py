"""The check before the resident step is chosen: it passes on the same model, and sees a weight that changed."""

from __future__ import annotations

import pytest
import torch
from resident_walk import small_encoder
from small_models import recognizer_for, rnnt

from workbench.encoder.resident import ResidentEncoder
from workbench.encoder.resident_check import equality


@pytest.mark.parametrize("context", [(56, 0), (56, 13)])
def test_the_same_model_is_equal_and_left_as_it_was(context):
    encoder, _ = small_encoder(context)
    resident = ResidentEncoder(encoder, rows=2)
    drop = encoder.streaming_cfg.drop_extra_pre_encoded
    found = equality(encoder, resident)
    assert found.holds and found.relative_error < 1e-6
    assert encoder.streaming_cfg.drop_extra_pre_encoded == drop
    assert resident.rings.position.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "part", ["self_attn.linear_q.weight", "conv.depthwise_conv.weight", "self_attn.linear_pos.weight"]
)
def test_a_changed_weight_is_seen(part):
    encoder, _ = small_encoder((56, 1))
    resident = ResidentEncoder(encoder, rows=2)
    for tensor in (resident.rings.kv, resident.rings.conv):
        tensor.zero_()
    with torch.no_grad():
        encoder.layers[1].get_parameter(part).add_(0.01)
    assert not equality(encoder, resident).holds


def test_auto_says_what_it_chose():
    with recognizer_for(rnnt(), "asr.encoder=auto") as recognizer:
        assert any("auto chose nemo, since there is no CUDA here" in note for note in recognizer.loaded.notes)
    with recognizer_for(rnnt(), "asr.encoder=auto", "asr.pipeline=staged") as recognizer:
        assert any("asr.pipeline is staged" in note for note in recognizer.loaded.notes)
