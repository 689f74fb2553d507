"""The resident engine against a lone stream of the recogniser: same labels at the same frames, whoever the neighbours are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from resident_crowd import CrowdStream, crowd, step
from small_models import alone, prompted, recognizer_for, rnnt, shipped_clips, tdt

from workbench.errors import ModelError
from workbench.model.load import set_context, set_decoding
from workbench.runtime.resident_decoder import ResidentDecoder
from workbench.runtime.resident_engine import ResidentEngine

MODELS = {
    "rnnt": lambda: rnnt(layers=2),
    "rnnt-320ms": lambda: rnnt(layers=2, context=(56, 3)),
    "tdt": tdt,
    "prompted": prompted,
}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request):
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def speech():
    clips = shipped_clips(6, most_s=3.0)
    return [np.ascontiguousarray(clip[: clip.size - 977 * turn]) for turn in range(3) for clip in clips]


def test_a_crowd_equals_each_stream_alone(model, speech):
    expected = [alone(recognizer_for(model), clip) for clip in speech]
    assert any(labels for labels, _ in expected)
    engine = ResidentEngine(model, rows=5, ladder=(1, 2, 4, 8), max_symbols=3)
    engine.encoder.rings.kv.fill_(float("nan"))
    engine.encoder.rings.conv.fill_(float("nan"))
    found, steps = crowd(engine, speech, np.random.default_rng(0))
    assert found == expected
    assert engine.padded_rows > 0 and steps > len(speech)


def test_rows_that_emit_much_get_further_rounds(speech):
    model = rnnt(context=(56, 0))
    model.model.joint.joint_net[-1].bias.data[-1] -= 30.0  # hardly ever a blank: max_symbols labels at every frame
    set_decoding(model.model, max_symbols=7)
    expected = [alone(recognizer_for(model), clip) for clip in speech[:3]]
    engine = ResidentEngine(model, rows=3, ladder=(4,), max_symbols=7)
    found, _ = crowd(engine, speech[:3], np.random.default_rng(1))
    assert found == expected
    assert engine.extra_rounds > 0


def test_prompts_are_taken_per_row(speech):
    model = prompted()
    languages = ["en-US", "de-DE", "de-DE", "en-US"]
    expected = [
        alone(recognizer_for(model), clip, language=name) for clip, name in zip(speech, languages, strict=False)
    ]
    engine = ResidentEngine(model, rows=4, ladder=(4,), max_symbols=3)
    found, _ = crowd(engine, speech[:4], np.random.default_rng(2), prompts=[0, 5, 5, 0])
    assert found == expected


def test_streams_of_two_look_aheads_share_one_model(speech):
    """An engine per look-ahead over the same weights, their steps taking turns: the model's present context is no state of theirs."""
    short = rnnt(layers=2)
    expected_short = alone(recognizer_for(short), speech[0])
    long = dataclasses.replace(short, geometry=set_context(short.model, (56, 13)))
    expected_long = alone(recognizer_for(long), speech[1])
    engines = [ResidentEngine(long, rows=2, ladder=(2,), max_symbols=3)]
    set_context(short.model, (56, 0))
    engines.append(ResidentEngine(short, rows=2, ladder=(2,), max_symbols=3))
    streams = [CrowdStream(engine, clip) for engine, clip in zip(engines, (speech[1], speech[0]), strict=True)]
    for stream, engine in zip(streams, engines, strict=True):
        stream.row = 1
        engine.reset([1])
    going = True
    while going:
        going = False
        for stream, engine in zip(streams, engines, strict=True):
            if (item := stream.item(engine.geometry)) is not None:
                step(engine, [stream], [item])
                going = True
    found = [(tuple(stream.labels), tuple(stream.frames)) for stream in streams]
    assert found == [expected_long, expected_short]


def test_a_predictor_that_is_no_lstm_is_refused():
    model = rnnt().model
    model.decoder.prediction["dec_rnn"].lstm = None
    with pytest.raises(ModelError, match="not a plain LSTM"):
        ResidentDecoder(model, rows=1, max_symbols=3, dtype=next(model.parameters()).dtype)
