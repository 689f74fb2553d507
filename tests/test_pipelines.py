"""Both pipelines, batched or not, alone or in a crowd: the transcripts of NeMo's own loop over each recording by itself."""

from __future__ import annotations

import numpy as np
import pytest
from small_models import alone, prompted, recognizer_for, rnnt, shipped_clips, tdt

from workbench.batching.metrics import prometheus, table
from workbench.errors import ConfigError, InputError
from workbench.runtime.offline import nemo_stream_labels, offline_labels

BATCHED = ("asr.batching.enabled=true", "asr.batching.state_arena_slots=32")


@pytest.fixture(scope="module")
def models():
    """Kinds of transducer, made when first asked for, each with real speech and NeMo's labels of it."""
    made = {}
    makers = {
        "rnnt": rnnt,
        "rnnt-320ms": lambda: rnnt(layers=2, context=(56, 3)),
        "tdt": tdt,
        "tdt-80ms": lambda: tdt(context=(56, 0)),
    }

    def get(kind):
        if kind not in made:
            model, clips = makers[kind](), shipped_clips(6, most_s=1.4)
            labels = [nemo_stream_labels(model, clip) for clip in clips]
            frames = sum(model.geometry.encoded_frames(model.geometry.mel_frames(clip.size)) for clip in clips)
            assert frames / 8 < sum(map(len, labels)) < 2.5 * frames, "always or never a label would show nothing"
            made[kind] = (model, clips, labels)
        return made[kind]

    return get


def crowd(recognizer, clips, seed, **options):
    """All clips as streams that join at random times and get their audio in random pieces; returns their labels."""
    rng = np.random.default_rng(seed)
    waiting, live, labels = list(rng.permutation(len(clips))), {}, [None] * len(clips)
    while waiting or live:
        if waiting and (not live or rng.random() < 0.5):
            number = int(waiting.pop())
            live[number] = [recognizer.stream(**options), 0]
        number = int(rng.choice(list(live)))
        stream, start = live[number]
        stop = min(clips[number].size, start + int(rng.integers(1, 9000)))
        stream.push(clips[number][start:stop])
        live[number][1] = stop
        if stop < clips[number].size:
            stream.submit()
        else:
            stream.end()
            labels[number] = live.pop(number)[0]
    for stream in labels:
        stream.finish()
    return [stream.labels for stream in labels]


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
@pytest.mark.parametrize("kind", ["rnnt", "rnnt-320ms", "tdt", "tdt-80ms"])
def test_alone_and_unbatched_equals_nemo(models, kind, pipeline):
    model, clips, labels = models(kind)
    recognizer = recognizer_for(model, f"asr.pipeline={pipeline}")
    assert [alone(recognizer, clip)[0] for clip in clips] == labels
    assert recognizer.arena.used == 0
    counted = recognizer.metrics
    assert counted.items == counted.batches == sum(len(model.geometry.chunks(clip.size)) for clip in clips)


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
@pytest.mark.parametrize(("kind", "streams"), [("rnnt", 1), ("rnnt", 8), ("rnnt", 32), ("rnnt-320ms", 8), ("tdt", 8)])
def test_a_crowd_equals_each_alone(models, kind, streams, pipeline):
    model, clips, labels = models(kind)
    many = [clips[i % len(clips)] for i in range(streams)]
    with recognizer_for(model, f"asr.pipeline={pipeline}", *BATCHED) as recognizer:
        assert crowd(recognizer, many, seed=streams) == [labels[i % len(clips)] for i in range(streams)]
        stages = {stage.name: stage for stage in recognizer.stage_metrics()}
    for stage in stages.values():
        assert stage.items == sum(size * n for size, n in stage.batch_sizes.items())
        assert stage.batches == sum(stage.reasons.values())
    assert set(stages) == (
        {"step"} if pipeline == "fused" else {"frontend", "encoder", "admission", "predictor", "joint"}
    )
    chunks = sum(len(model.geometry.chunks(clip.size)) for clip in many)
    whole = ["step"] if pipeline == "fused" else ["frontend", "encoder"]
    assert all(stages[name].items == chunks for name in whole)
    if streams > 1:
        assert max(max(stage.batch_sizes) for stage in stages.values()) > 1
    text = prometheus(stages.values())
    assert all(name in table(stages.values()) and f'stage="{name}"' in text for name in stages)


def test_the_two_pipelines_agree_on_frames(models):
    model, clips, _ = models("tdt")
    found = [
        [alone(recognizer_for(model, f"asr.pipeline={name}"), clip)[1] for clip in clips]
        for name in ("fused", "staged")
    ]
    assert found[0] == found[1]
    assert all(list(frames) == sorted(frames) for frames in found[0])


@pytest.mark.parametrize("kind", ["rnnt", "tdt"])
def test_a_bias_is_the_same_in_both_pipelines_and_keeps_blanks(models, kind):
    model, clips, labels = models(kind)
    bias = np.zeros(256, np.float32)
    wanted = next(label for label in range(256) if label not in labels[0])
    bias[wanted] = 1e4
    found = []
    for pipeline in ("fused", "staged"):
        with recognizer_for(model, f"asr.pipeline={pipeline}", *BATCHED) as recognizer:
            streams = [recognizer.stream(bias=b) for b in (bias, None, bias * 0, bias)]
            for stream, clip in zip(streams, [clips[0], clips[0], clips[0], clips[1]], strict=True):
                stream.push(clip)
                stream.end()
            for stream in streams:
                stream.finish()
            found.append([stream.labels for stream in streams])
            with pytest.raises(ConfigError, match="256 finite values"):
                recognizer.stream(bias=bias[:10])
    assert found[0] == found[1]
    boosted, plain, zero, _ = found[0]
    assert plain == zero == labels[0]
    assert set(boosted) == {wanted}, "a large bias decides which label comes; whether one comes is not its business"


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
def test_two_languages_in_one_batch(pipeline):
    model, clips = prompted(), shipped_clips(2, most_s=1.2)
    offline = {
        language: [offline_labels(model, clip, prompt=index) for clip in clips]
        for language, index in (("en-US", 0), ("de-DE", 5))
    }
    assert offline["en-US"] != offline["de-DE"]
    with recognizer_for(model, f"asr.pipeline={pipeline}", *BATCHED) as recognizer:
        streams = [(recognizer.stream(language=name), name, i) for name in offline for i in range(2)]
        for stream, _, i in streams:
            stream.push(clips[i])
            stream.end()
        for stream, name, i in streams:
            stream.finish()
            assert stream.labels == offline[name][i], (name, i)
        assert max(recognizer.metrics.batch_sizes) == 4, "the languages did not share a batch"
        with pytest.raises(InputError, match=r"'fr-FR'.*en-US, de-DE"):
            recognizer.stream(language="fr-FR")


def test_a_language_for_a_model_without_prompts(models):
    with pytest.raises(InputError, match="no language prompt"):
        recognizer_for(models("rnnt")[0]).stream(language="en-US")


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
def test_a_short_stream_beside_a_long_one(models, noise, pipeline):
    """Also last chunks of every length, which in a crowd meet chunks of other lengths."""
    model, clips, labels = models("rnnt")
    short = [noise(0.01 * i, seed=i) for i in range(1, 24, 2)]
    expected = [nemo_stream_labels(model, clip) for clip in short]
    with recognizer_for(model, f"asr.pipeline={pipeline}", *BATCHED) as recognizer:
        assert crowd(recognizer, [clips[0], *short], seed=3) == [labels[0], *expected]


@pytest.mark.parametrize("pipeline", ["fused", "staged"])
def test_padding_to_a_ladder_changes_nothing_and_is_counted(models, pipeline):
    model, clips, labels = models("rnnt")
    with recognizer_for(model, f"asr.pipeline={pipeline}", *BATCHED) as recognizer:
        recognizer.stage.encoder.ladder = (4, 32)
        recognizer.arena.channel[:, recognizer.arena.scratch] = float("nan")
        assert crowd(recognizer, clips, seed=1) == labels
        counted = recognizer.metrics
        assert 0 < counted.padding_rows < 32 * counted.batches
        assert counted.items == sum(len(model.geometry.chunks(clip.size)) for clip in clips)


def test_ten_minutes_of_digital_silence_then_speech():
    """Once every cache is full of silence, more of it changes nothing: the speech behind it is heard as behind ten seconds."""
    model, speech = rnnt(context=(56, 13), memory=0, seed=2), shipped_clips(1)[0]
    model.model.joint.joint_net[-1].bias.data[-1] += 0.2
    chunk = model.geometry.chunk_samples
    some, silence = np.zeros(9 * chunk, np.float32), np.zeros(600 * 16000 // chunk * chunk, np.float32)
    before = len(nemo_stream_labels(model, some))
    expected = nemo_stream_labels(model, np.concatenate([some, speech]))[before:]
    with recognizer_for(model, "asr.pipeline=staged", *BATCHED) as recognizer, recognizer.stream() as stream:
        for piece in np.array_split(silence, 20):
            stream.push(piece)
            stream.step()
        before = len(stream.labels)
        stream.push(speech)
        stream.finish()
        assert stream.labels[before:] == expected and len(expected) > 3, "silence before speech wedged the stream"
