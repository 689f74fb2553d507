"""The load on a resident engine and the recogniser's resident stage on the GPU: pinned staging, flights, graphs, rows passed on without a reset."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from small_models import alone, recognizer_for, rnnt, shipped_clips

from workbench.config import load_config
from workbench.errors import DeviceMemoryError, LoadNotCarried
from workbench.measure.resident_levels import rows_that_fit
from workbench.measure.resident_load import ResidentOptions, run_resident
from workbench.model.load import load_model
from workbench.runtime.resident_engine import ResidentEngine


@pytest.fixture(autouse=True)
def exact_fp32():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.fixture(scope="module")
def clips():
    return [np.ascontiguousarray(clip[: clip.size - 977 * n]) for n, clip in enumerate(shipped_clips(8, most_s=1.5))]


@pytest.mark.parametrize("context", [(56, 0), (56, 13)])
def test_hundreds_of_streams_get_the_labels_of_their_clips_alone(context, clips):
    model = rnnt(layers=2, context=context, device="cuda")
    engine = ResidentEngine(model, rows=300, ladder=(1, 8, 32, 64), max_symbols=3)
    engine.encoder.rings.kv.fill_(float("nan"))
    engine.encoder.rings.conv.fill_(float("nan"))
    engine.decoder.rings.h.fill_(float("nan"))
    engine.warm_up()
    captured = engine.captured
    config = load_config({}, ["asr.model=tiny", "load.streams=300", "load.seconds=4"])
    record = run_resident(engine, clips, config)
    numbers = record.numbers
    # Another batch size may choose another kernel, whose rounding may tip a near tie: rare.
    assert (
        numbers["transcripts_compared"] > 300
        and numbers["transcript_mismatches"] <= numbers["transcripts_compared"] // 100
    )
    assert engine.captured == captured and record.counters["batch_size_max_items"] > 8
    assert numbers["labels_per_audio_s"] > 0
    again = run_resident(engine, clips, config)
    assert again.numbers["labels_per_audio_s"] == pytest.approx(numbers["labels_per_audio_s"], rel=0.01)


def test_a_run_that_is_given_up_leaves_the_engine_usable(clips):
    model = rnnt(layers=1, device="cuda")
    engine = ResidentEngine(model, rows=4000, ladder=(1, 4), max_symbols=3)
    engine.warm_up()
    load = load_config({}, ["asr.model=tiny", "load.streams=4000", "load.seconds=3"])
    with pytest.raises(LoadNotCarried):
        run_resident(engine, clips, load, options=ResidentOptions(most_late_share=0.001))
    few = run_resident(engine, clips, load_config({}, ["asr.model=tiny", "load.streams=4", "load.seconds=3"]))
    assert few.numbers["transcript_mismatches"] == 0 < few.numbers["transcripts_compared"]


def test_rows_beyond_the_memory_are_refused_before_they_are_allocated():
    model = rnnt(layers=2, device="cuda")
    rows = rows_that_fit(model)
    with pytest.raises(DeviceMemoryError, match=r"resident rows: got .* GiB free"):
        ResidentEngine(model, rows=2 * rows, ladder=(1,), max_symbols=3)


def test_auto_chooses_the_resident_step_of_the_demo_model_and_gives_nemos_labels():
    model, speech = load_model("demo", (56, 0), "cuda"), shipped_clips(6)
    expected = [alone(recognizer_for(model), clip) for clip in speech]
    batched = ("asr.batching.enabled=true", "asr.batching.state_arena_slots=8")
    with recognizer_for(model, "asr.encoder=auto", *batched) as recognizer:
        assert any("auto chose resident" in note for note in recognizer.loaded.notes)
        recognizer.warm_up()
        streams = [recognizer.stream() for _ in speech]
        for stream, clip in zip(streams, speech, strict=True):
            stream.push(clip)
            stream.end()
        for stream in streams:
            stream.finish()
        assert [(stream.labels, stream.frames) for stream in streams] == expected
    with recognizer_for(model, "asr.encoder=auto", "asr.cuda_graphs=true") as recognizer:
        assert any("auto chose nemo" in note for note in recognizer.loaded.notes)


def test_the_recogniser_gives_nemos_labels_alone_and_in_a_crowd(clips):
    model = rnnt(layers=2, device="cuda")
    expected = [alone(recognizer_for(model), clip) for clip in clips]
    crowd = ("asr.encoder=resident", "asr.batching.enabled=true", "asr.batching.state_arena_slots=8")
    with recognizer_for(model, *crowd) as recognizer:
        recognizer.warm_up()
        assert recognizer.graph_counters()["captured"] > 0
        streams = [recognizer.stream() for _ in clips]
        for stream, clip in zip(streams, clips, strict=True):
            stream.push(clip)
            stream.end()
        for stream in streams:
            stream.finish()
        found = [(stream.labels, stream.frames) for stream in streams]
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 1
