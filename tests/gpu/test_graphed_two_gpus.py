"""Device index other than 0, a model moved between devices, two models on two devices in two threads. Needs two GPUs."""

from __future__ import annotations

import threading

import pytest
import torch
from stream_walk import call_of, eager, run, same, walk

from workbench.encoder.graphed import set_streaming_cuda_graphs

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def _encoder(device):
    from workbench.model.shapes import build_model

    return build_model("tiny").encoder.to(device).eval()


def test_capture_and_replay_on_the_second_device_while_the_first_is_current():
    encoder = _encoder("cuda:1")
    step = set_streaming_cuda_graphs(encoder)
    with torch.inference_mode():
        assert torch.cuda.current_device() == 0
        assert walk(encoder, step, 4) == []
    assert step.report()["captured"] == 1 and torch.cuda.current_device() == 0


def test_a_model_moved_between_devices_captures_anew():
    encoder = _encoder("cuda:0")
    step = set_streaming_cuda_graphs(encoder, warmup_steps=0)
    with torch.inference_mode():
        for index, device in enumerate(("cuda:0", "cuda:1", "cuda:0"), 1):
            with torch.inference_mode(False):
                encoder.to(device)
            call = call_of(encoder, 3)
            got = run(step, call)
            assert got[0].device == torch.device(device) and same(got, eager(encoder, call))
            assert step.report()["captured"] == index and step.report()["held"] == 1


def test_two_models_on_two_devices_in_two_threads():
    encoders = [_encoder("cuda:0"), _encoder("cuda:1")]
    steps = [set_streaming_cuda_graphs(encoder) for encoder in encoders]
    outcome = {}

    def work(index):
        with torch.cuda.device(index), torch.inference_mode():
            outcome[index] = [walk(encoders[index], steps[index], batch) for batch in (1, 4)]

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=180)
    assert outcome == {0: [[], []], 1: [[], []]}
