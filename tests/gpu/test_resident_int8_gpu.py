"""Int8 weights on the GPU: the one-row kernels against PyTorch, one stream alone against the same stream in a crowd, and the demo model's frames."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from resident_walk import ResidentWalk, relative_error, small_encoder
from test_resident import frames_for, mel_of

from workbench.encoder import resident_ops
from workbench.encoder.resident import ResidentEncoder
from workbench.model.load import load_model
from workbench.runtime.resident_engine import ResidentEngine


@pytest.fixture(autouse=True)
def exact_fp32():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def demo():
    loaded = load_model("demo", (56, 0), "cuda")
    return loaded.model.encoder, loaded.geometry


ENCODERS = {
    "demo": demo,
    "nemotron": lambda: small_encoder((56, 0), device="cuda", layers=3, name="nemotron-0.6b"),
}


@pytest.mark.parametrize("name", list(ENCODERS))
@torch.inference_mode()
def test_a_lone_stream_by_the_kernels_equals_pytorch_and_itself_in_a_crowd(name):
    encoder, geometry = ENCODERS[name]()
    mel = mel_of(encoder, geometry, frames_for(geometry, 64, 3), 7, batch=8).cuda()
    lone, plain, crowd, native = (
        ResidentEncoder(encoder, rows=8, **options)
        for options in ({"weights": "int8"}, {"weights": "int8", "ops": resident_ops}, {"weights": "int8"}, {})
    )
    assert lone.folded and not plain.folded
    for resident in (lone, crowd):
        resident.rings.kv.fill_(float("nan"))
        resident.rings.conv.fill_(float("nan"))
    got = ResidentWalk(lone, geometry).whole([3], mel[:1])[0]
    assert relative_error(got, ResidentWalk(plain, geometry).whole([0], mel[:1])[0]) < 1e-5
    assert relative_error(ResidentWalk(crowd, geometry).whole(list(range(8)), mel)[0], got) < 1e-5
    assert 1e-4 < relative_error(got, ResidentWalk(native, geometry).whole([0], mel[:1])[0]) < 5e-2


@torch.inference_mode()
def test_in_bfloat16_a_stream_alone_and_in_a_crowd_differ_by_rounding():
    encoder, geometry = ENCODERS["nemotron"]()
    mel = mel_of(encoder, geometry, frames_for(geometry, 64, 3), 7, batch=8).cuda()
    exact, lone, crowd = (
        ResidentEncoder(encoder, rows=8, dtype=dtype, weights="int8")
        for dtype in (torch.float32, torch.bfloat16, torch.bfloat16)
    )
    want = ResidentWalk(exact, geometry).whole([0], mel[:1])[0]
    alone = ResidentWalk(lone, geometry).whole([0], mel[:1])[0]
    among = ResidentWalk(crowd, geometry).whole(list(range(8)), mel)[0]
    assert relative_error(alone, want) < 2e-2 and relative_error(among, want) < 2e-2


@torch.inference_mode()
def test_every_size_of_an_engine_is_captured_on_int8_weights():
    loaded = load_model("demo", (56, 0), "cuda")
    engine = ResidentEngine(loaded, rows=9, ladder=(1, 8), weights="int8")
    engine.warm_up()
    assert engine.captured == 2 * len(engine.kinds())
    assert engine.encoder.weights == "int8" and engine.encoder.layers[0].ff1_out.int8 is not None
