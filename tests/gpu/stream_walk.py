"""Steps and whole streams taken eagerly and graphed side by side; shared by the tests of this folder."""

from __future__ import annotations

import torch

from workbench.encoder.key import StepInputs
from workbench.encoder.steady import StepShape, steady_call

CONTEXTS = ([56, 0], [56, 1], [56, 3], [56, 6], [56, 13])


def eager(encoder, call):
    """NeMo's own step, whatever is attached."""
    return type(encoder).cache_aware_stream_step(
        encoder, *call.inputs, call.keep_all_outputs, call.drop, call.bypass_pre_encode
    )


def run(step, call):
    return step.step(*call.inputs, call.keep_all_outputs, call.drop, call.bypass_pre_encode)


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def call_of(encoder, batch=2, **shape):
    return steady_call(encoder, StepShape(batch=batch, **shape))


def with_state(call, state):
    return call._replace(inputs=StepInputs(call.inputs.signal, call.inputs.signal_len, *state))


def walk(encoder, step, batch, after_full=3):
    """Whole streams, each walk on its own state: first chunk, cache fill, steady state, final step. Returns unequal step numbers."""
    cfg = encoder.streaming_cfg
    mine = reference = encoder.get_initial_cache_state(batch_size=batch, dtype=next(encoder.parameters()).dtype)
    chunks = -(-cfg.last_channel_cache_size // cfg.valid_out_len) + after_full
    unequal = []
    for index in range(chunks + 1):
        call = call_of(encoder, batch, mel_frames=cfg.chunk_size[0] if index == 0 else None)
        call = call._replace(keep_all_outputs=index == chunks, drop=0 if index == 0 else None)
        got, want = run(step, with_state(call, mine)), eager(encoder, with_state(call, reference))
        if not same(got, want):
            unequal.append(index)
        mine, reference = got[2:], want[2:]
    assert int(reference[2].min()) == cfg.last_channel_cache_size, "the caches must be full at the end"
    return unequal
