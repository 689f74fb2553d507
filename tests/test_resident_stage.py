"""`asr.encoder: resident` in the recogniser: the results of NeMo's step on every kind of model, alone and in a crowd, and clear refusals."""

from __future__ import annotations

import dataclasses
import threading

import jiwer
import numpy as np
import pytest
from small_models import alone, prompted, recognizer_for, rnnt, shipped_clips, tdt

from workbench.config import load_config
from workbench.errors import ArenaFull, ConfigError, ModelError
from workbench.model.load import load_model
from workbench.model.speech import SHIPPED_SPEECH, find_audio
from workbench.runtime.recognizer import Recognizer
from workbench.runtime.resident_stage import ResidentStage
from workbench.runtime.transcribe import transcribe

RESIDENT = "asr.encoder=resident"
BATCHED = ("asr.batching.enabled=true", "asr.batching.state_arena_slots=8", "asr.batching.max_queue_delay_us=20000")
MODELS = {"rnnt": lambda: rnnt(layers=2), "rnnt-320ms": lambda: rnnt(context=(56, 3)), "tdt": tdt, "prompted": prompted}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request):
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def clips():
    return [np.ascontiguousarray(clip[: clip.size - 977 * n]) for n, clip in enumerate(shipped_clips(6, most_s=2.5))]


def resident_for(model, *overrides):
    recognizer = recognizer_for(model, RESIDENT, *overrides)
    assert isinstance(recognizer.stage, ResidentStage) and "asr.encoder: resident" in recognizer.loaded.notes
    return recognizer


def test_a_lone_stream_equals_nemos_however_it_is_cut(model, clips):
    with recognizer_for(model) as nemo, resident_for(model) as resident:
        for clip in clips[:3]:
            expected = alone(nemo, clip)
            assert alone(resident, clip) == expected  # rows are used again
            with resident.stream() as stream:
                for start in range(0, clip.size, 3001):
                    stream.push(clip[start : start + 3001])
                    stream.step()
                stream.finish()
                assert (stream.labels, stream.frames) == expected


def test_a_crowd_equals_nemos_streams_alone(model, clips):
    with recognizer_for(model) as nemo:
        expected = [alone(nemo, clip) for clip in clips]
    assert any(labels for labels, _ in expected)
    found = [None] * len(clips)
    with resident_for(model, *BATCHED) as resident:
        resident.stage.engine.encoder.rings.kv.fill_(float("nan"))
        resident.warm_up()

        def speak(n):
            found[n] = alone(resident, clips[n])

        threads = [threading.Thread(target=speak, args=(n,)) for n in range(len(clips))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert max(resident.metrics.batch_sizes) > 1
        assert resident.arena.used == 0 and resident.graph_counters()["captured"] == 0
    assert found == expected


def test_the_language_is_taken_per_stream(clips):
    model = prompted()
    with recognizer_for(model) as nemo, resident_for(model) as resident:
        for language in ("en-US", "de-DE"):
            assert alone(resident, clips[0], language=language) == alone(nemo, clips[0], language=language)


def test_what_it_cannot_do_is_refused_by_name():
    model = rnnt()
    with pytest.raises(ConfigError, match=r"asr\.pipeline: got staged with asr\.encoder: resident; allowed is fused"):
        recognizer_for(model, RESIDENT, "asr.pipeline=staged")
    with resident_for(model, "asr.batching.state_arena_slots=1") as resident:
        size = len(model.model.joint.vocabulary)
        with pytest.raises(ConfigError, match=r"bias: .* asr\.encoder: resident"):
            resident.stream(bias=np.zeros(size))
        with resident.stream(), pytest.raises(ArenaFull):
            resident.stream()
    with pytest.raises(ConfigError, match=r"asr\.encoder: got 'fast'"):
        load_config({}, ["asr.encoder=fast"])


def test_a_model_without_a_resident_step_runs_nemos_and_says_why(clips):
    model = rnnt()
    expected = alone(recognizer_for(model), clips[0])
    model.model.encoder.layers[0].conv.pointwise_activation = "silu"
    with recognizer_for(model, RESIDENT) as recognizer:
        assert not isinstance(recognizer.stage, ResidentStage)
        assert any("nemo instead of resident" in note and "GLU" in note for note in recognizer.loaded.notes)
    model.model.encoder.layers[0].conv.pointwise_activation = "glu_"
    assert alone(recognizer_for(model, RESIDENT), clips[0]) == expected


def test_half_precision_without_an_equality_test_is_not_taken():
    with pytest.raises(ModelError, match="no resident step in float16; allowed are float32, bfloat16"):
        ResidentStage(dataclasses.replace(rnnt(), dtype="float16"), None, (1,))


@pytest.mark.slow
@pytest.mark.parametrize(("context", "every", "most_wrong"), [((56, 0), 6, 0.30), ((56, 13), 1, 0.28)])
def test_all_shipped_speech_with_the_demo_model_is_the_same_text(context, every, most_wrong):
    """All 60 clips in a crowd, every so many of them also alone; the prompts' word error rate is what the demo model has to keep."""
    loaded, items = load_model("demo", context, "cpu"), find_audio([str(SHIPPED_SPEECH)]).items
    crowd = ("asr.batching.enabled=true", "asr.batching.state_arena_slots=12")
    expected = texts(loaded, items, 12, *crowd)
    assert len(expected) == 60 and sum(map(bool, expected)) > 50
    prompts = [
        (item.text, text) for item, text in zip(items, expected, strict=True) if not item.path.stem.startswith("sense")
    ]
    assert len(prompts) == 56 and jiwer.wer(*map(list, zip(*prompts, strict=True))) <= most_wrong
    assert texts(loaded, items, 12, RESIDENT, *crowd) == expected
    assert texts(loaded, items[::every], 1, RESIDENT) == expected[::every]


def texts(loaded, items, concurrency, *overrides):
    with Recognizer(loaded, load_config({}, list(overrides))) as recognizer:
        return [row.text for row in transcribe(recognizer, items, concurrency)]
