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


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
def test_an_overload_is_survived(model, monkeypatch, pipeline):
    monkeypatch.setattr(Recognizer, "open", classmethod(lambda cls, config: cls(model, config)))
    monkeypatch.setattr(overload, "speech_clips", lambda rate_hz, sources: shipped_clips(4, most_s=1.5))
    keys = ["asr.batching.max_queue_depth=2", "asr.batching.state_arena_slots=6", f"asr.pipeline={pipeline}"]
    config = load_config({}, ["asr.model=tiny", *keys])
    record = overload.overload_configured(config, None, seconds=1.0, factor=6.0)
    numbers = record.numbers
    assert numbers["accepted"] == numbers["completed"] and numbers["mismatches"] == 0
    assert numbers["refused_queue_full"] + numbers["refused_arena_full"] == numbers["offered"] - numbers["accepted"] > 0
    assert [row["at_s"] for row in record.rows] == sorted(row["at_s"] for row in record.rows) != []


def test_memory_numbers_tell_growth_that_ended_from_growth_that_goes_on():
    grows = [(second, 100.0 + 2 * second) for second in range(40)]
    ended = [(second, 100.0 + 2 * min(second, 20)) for second in range(40)]
    numbers = overload.memory_numbers(grows)
    assert numbers["memory_growth_mib"] == pytest.approx(40.0)
    assert numbers["memory_slope_second_half_mib_per_min"] == pytest.approx(120.0)
    numbers = overload.memory_numbers(ended)
    assert numbers["memory_slope_first_half_mib_per_min"] == pytest.approx(120.0)
    assert numbers["memory_slope_second_half_mib_per_min"] == pytest.approx(0.0)
    assert set(overload.memory_numbers(grows[:7]).values()) == {None}
