"""The shipped speech: every clip readable, described truthfully, licensed, and of texts that training never sees."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import soundfile as sf

ROOT = Path(__file__).resolve().parents[1]
SPEECH = ROOT / "workbench" / "data" / "speech"
STUDY = ROOT / "studies" / "demo_model"


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def shipped() -> list[dict]:
    return rows(SPEECH / "manifest.jsonl")


def test_about_sixty_clips_of_one_to_twelve_seconds_in_six_mebibytes(shipped: list[dict]) -> None:
    durations_s = [row["duration"] for row in shipped]
    assert 55 <= len(shipped) <= 65
    assert min(durations_s) >= 1.0 and max(durations_s) <= 12.5
    assert sum(duration >= 5.0 for duration in durations_s) >= 8
    assert sum(path.stat().st_size for path in SPEECH.iterdir()) < 6 * 2**20


def test_every_clip_is_16_khz_mono_flac_of_the_stated_duration_and_none_is_unlisted(shipped: list[dict]) -> None:
    assert {row["audio_filepath"] for row in shipped} == {path.name for path in SPEECH.glob("*.flac")}
    for row in shipped:
        info = sf.info(SPEECH / row["audio_filepath"])
        assert (info.format, info.samplerate, info.channels) == ("FLAC", 16000, 1), row
        assert info.frames / info.samplerate == pytest.approx(row["duration"], abs=0.001)


def test_texts_are_normalised_and_sources_named(shipped: list[dict]) -> None:
    for row in shipped:
        assert re.fullmatch(r"[a-z']+( [a-z']+)*", row["text"]), row
        assert row["licence"] in ("CC-BY-SA-3.0", "BSD-2-Clause")
        assert row["source"] and row["speaker"]
    assert "CC-BY-SA-3.0" in (SPEECH / "ATTRIBUTION.md").read_text()
    assert "Attribution" in (SPEECH / "LICENSE-CC-BY-SA-3.0.txt").read_text()


def test_shipped_clips_are_part_of_the_held_out_set_and_no_training_text_repeats_one(shipped: list[dict]) -> None:
    held_out = {row["id"]: row["text"] for row in rows(STUDY / "human_test.jsonl")}
    assert all(held_out[row["id"]] == row["text"] for row in shipped)
    trained = [f" {row['text']} " for row in rows(STUDY / "human_train.jsonl")]
    assert not [text for text in held_out.values() if any(f" {text} " in one for one in trained)]
