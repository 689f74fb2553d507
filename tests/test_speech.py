"""Speech in: every usable format and rate comes out as float32 mono, every unusable one is named with its reason."""

from __future__ import annotations

import json

import numpy as np
import pytest
import soundfile

from workbench.errors import AudioError
from workbench.model.speech import AudioItem, as_speech, find_audio, read_audio, read_manifest


@pytest.fixture
def tone():
    return (0.2 * np.sin(np.arange(16000) * 2 * np.pi * 440 / 16000)).astype(np.float32)


@pytest.mark.parametrize("suffix", [".wav", ".flac", ".ogg"])
@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_formats_and_rates(tmp_path, tone, suffix, rate):
    path = tmp_path / f"a{suffix}"
    soundfile.write(path, np.interp(np.arange(rate) / rate, np.arange(16000) / 16000, tone), rate)
    samples = read_audio(path)
    assert samples.dtype == np.float32 and samples.ndim == 1
    assert abs(samples.size - 16000) <= 2
    middle = slice(2000, 14000)
    assert np.corrcoef(samples[middle], tone[middle])[0, 1] > 0.99


def test_channel_by_choice(tmp_path, tone):
    soundfile.write(tmp_path / "s.wav", np.stack([tone, -tone], axis=1), 16000)
    assert np.allclose(read_audio(tmp_path / "s.wav", channel=1), -read_audio(tmp_path / "s.wav", channel=0), atol=1e-4)
    with pytest.raises(AudioError, match="channel 2 was asked for; the file has 2"):
        read_audio(tmp_path / "s.wav", channel=2)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"this is text\n" * 50, "not audio"),
        (b"RIFF\x00\x00\x00\x00WAVE", "decoded|no samples"),
        (b"\x00" * 4000, "not audio"),
    ],
)
def test_files_that_are_no_audio_are_named(tmp_path, content, reason):
    (tmp_path / "bad.wav").write_bytes(content)
    with pytest.raises(AudioError, match=reason) as caught:
        read_audio(tmp_path / "bad.wav")
    assert "bad.wav" in str(caught.value)


def test_absent_empty_and_not_finite(tmp_path, tone):
    with pytest.raises(AudioError, match="no such file"):
        read_audio(tmp_path / "absent.wav")
    soundfile.write(tmp_path / "none.wav", np.zeros(0, np.float32), 16000)
    with pytest.raises(AudioError, match="no samples"):
        read_audio(tmp_path / "none.wav")
    tone[5] = np.nan
    soundfile.write(tmp_path / "nan.wav", tone, 16000, subtype="FLOAT")
    with pytest.raises(AudioError, match="1 samples are NaN"):
        read_audio(tmp_path / "nan.wav")


@pytest.mark.parametrize("value", [np.zeros((2, 10)), np.array(["a"]), np.zeros(0), np.array([np.inf])])
def test_arrays_that_are_no_speech_are_refused(value):
    with pytest.raises(AudioError):
        as_speech(value, 16000, 16000)


@pytest.mark.parametrize("scale", [32767.0, 1e20, 1e300])
def test_audio_of_another_scale_is_refused_and_not_recognised_as_something_else(scale):
    speech = np.sin(np.arange(1600)) * scale
    with pytest.raises(AudioError, match="full scale is 1"):
        as_speech(speech, 16000, 16000)
    assert as_speech(speech / scale * 3, 16000, 16000).max() > 2  # louder than full scale is still audio


def test_integer_samples_are_scaled():
    assert np.allclose(as_speech(np.array([-32768, 0, 16384], np.int16), 16000, 16000), [-1.0, 0.0, 0.5])


def test_manifest_keeps_good_lines_and_numbers_bad_ones(tmp_path, tone):
    soundfile.write(tmp_path / "ok.wav", tone, 16000)
    lines = [
        json.dumps({"audio_filepath": "ok.wav", "duration": 1.0, "text": "hello"}),
        "{broken",
        "",
        json.dumps({"duration": 1.0}),
        json.dumps({"audio_filepath": "ok.wav", "duration": -1}),
        json.dumps({"audio_filepath": "ok.wav", "text": 7}),
        json.dumps(["ok.wav"]),
        json.dumps({"audio_filepath": str(tmp_path / "ok.wav")}),
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    found = read_manifest(tmp_path / "m.jsonl")
    assert [(item.path.name, item.text, item.line) for item in found.items] == [
        ("ok.wav", "hello", 1),
        ("ok.wav", None, 8),
    ]
    assert [error.line for error in found.errors] == [2, 4, 5, 6, 7]
    assert all("m.jsonl" in str(error) for error in found.errors)


def test_a_segment_of_a_file_is_cut_out(tmp_path, tone):
    soundfile.write(tmp_path / "ok.wav", tone, 16000, subtype="FLOAT")
    lines = [
        {"audio_filepath": "ok.wav", "offset": 0.25, "duration": 0.5},
        {"audio_filepath": "ok.wav", "offset": 0.75},
        {"audio_filepath": "ok.wav", "offset": 99},
        {"audio_filepath": "ok.wav", "offset": -2},
        {"audio_filepath": "ok.wav", "offset": "abc"},
    ]
    (tmp_path / "m.jsonl").write_text("\ufeff" + "\r\n".join(map(json.dumps, lines)), encoding="utf-8")
    found = read_manifest(tmp_path / "m.jsonl")
    assert [error.line for error in found.errors] == [4, 5]
    assert np.array_equal(read_audio(found.items[0]), tone[4000:12000])
    assert np.array_equal(read_audio(found.items[1]), tone[12000:])
    with pytest.raises(AudioError, match=r"m\.jsonl:3: .*starts at 99 s; the file lasts 1\.000 s"):
        read_audio(found.items[2])


def test_odd_names_rates_and_lines_are_named_and_do_not_end_a_batch(tmp_path, tone):
    soundfile.write(tmp_path / "slow.wav", tone, 1)
    with pytest.raises(AudioError, match="sample rate of 1 Hz"):
        read_audio(tmp_path / "slow.wav")
    with pytest.raises(AudioError, match="not UTF-8"):
        read_audio(tmp_path / "bad\udcff.wav")
    good = json.dumps({"audio_filepath": "a.wav"})
    (tmp_path / "m.jsonl").write_text("\n".join(["[" * 100_000, '{"duration": ' + "9" * 6000 + "}", good]))
    found = read_manifest(tmp_path / "m.jsonl")
    assert [error.line for error in found.errors] == [1, 2] and len(found.items) == 1


def test_error_of_a_manifest_item_names_the_line(tmp_path):
    item = AudioItem(tmp_path / "gone.wav", None, tmp_path / "m.jsonl", 3)
    with pytest.raises(AudioError, match=r"m\.jsonl:3: .*gone\.wav: no such file"):
        read_audio(item)


def test_folders_globs_and_nothing(tmp_path, tone):
    (tmp_path / "deep").mkdir()
    for name in ("b.wav", "a.flac", "deep/c.wav"):
        soundfile.write(tmp_path / name, tone, 16000)
    (tmp_path / "notes.txt").write_text("not audio")
    assert [i.path.name for i in find_audio([tmp_path]).items] == ["a.flac", "b.wav", "c.wav"]
    assert [i.path.name for i in find_audio([str(tmp_path / "*.wav")]).items] == ["b.wav"]
    assert [i.path.name for i in find_audio([tmp_path / "notes.txt"]).items] == ["notes.txt"], "a named file is tried"
    (tmp_path / "none").mkdir()
    found = find_audio([tmp_path / "none", tmp_path / "absent", str(tmp_path / "*.mp3")])
    assert not found.items and len(found.errors) == 3


def test_a_folder_with_a_manifest_gives_each_file_once(tmp_path, tone):
    soundfile.write(tmp_path / "a.wav", tone, 16000)
    soundfile.write(tmp_path / "b.wav", tone, 16000)
    (tmp_path / "m.jsonl").write_text(json.dumps({"audio_filepath": "a.wav", "text": "x"}))
    assert [(i.path.name, i.text) for i in find_audio([tmp_path]).items] == [("a.wav", "x"), ("b.wav", None)]


def test_an_empty_manifest_and_one_that_is_no_text(tmp_path):
    (tmp_path / "e.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "empty" in str(read_manifest(tmp_path / "e.jsonl").errors[0])
    assert "cannot be read" in str(read_manifest(tmp_path / "b.jsonl").errors[0])
