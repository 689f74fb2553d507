"""The comparing benchmarks on a small model: both sides give the same labels, and the counts add up."""

from __future__ import annotations

import pytest
from small_models import rnnt, shipped_clips

from workbench.config import load_config
from workbench.measure import overload
from workbench.measure.compare import compare_batching, compare_nemo
from workbench.model.speech import SHIPPED_SPEECH, find_audio
from workbench.runtime.recognizer import Recognizer


@pytest.fixture(scope="module")
def model():
    return rnnt(context=(56, 13))


@pytest.fixture(scope="module")
def items():
    return find_audio([SHIPPED_SPEECH]).items[:3]


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
def test_batched_against_unbatched(model, items, pipeline):
    config = load_config({}, ["asr.model=tiny", f"asr.pipeline={pipeline}"])
    numbers = compare_batching(model, config, items, streams=4, rounds=1)
    assert numbers["mismatches_batched"] == 0 and numbers["streams"] == 4
    assert numbers["speedup"] == pytest.approx(numbers["batched_rtfx"] / numbers["unbatched_rtfx"])


def test_lone_stream_against_nemo(model, items):
    numbers = compare_nemo(model, load_config({}, ["asr.model=tiny"]), items, rounds=1, limit=1)
    assert numbers["mismatches_nemo"] == 0 and numbers["lone_over_nemo_cpu"] > 0


def test_an_overload_is_survived(model, monkeypatch):
    monkeypatch.setattr(Recognizer, "open", classmethod(lambda cls, config: cls(model, config)))
    monkeypatch.setattr(overload, "speech_clips", lambda rate_hz, sources: shipped_clips(4, most_s=1.5))
    keys = ["asr.model=tiny", "asr.batching.max_queue_depth=2", "asr.batching.state_arena_slots=6"]
    numbers = overload.overload_configured(load_config({}, keys), None, seconds=1.0, factor=6.0).numbers
    assert numbers["accepted"] == numbers["completed"] and numbers["mismatches"] == 0
    assert numbers["refused_queue_full"] + numbers["refused_arena_full"] == numbers["offered"] - numbers["accepted"] > 0
