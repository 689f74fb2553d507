"""The demo model's training recipe at toy size on the CPU: batches, both losses, checkpoint, export and restore.

The model is two layers of width 32 and the audio is a sine per word, so the whole recipe takes seconds; what it
proves is that every part runs and fits the next, not that the model learns to hear."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile as sf

STUDY = Path(__file__).resolve().parents[1] / "studies" / "demo_model"
sys.path.insert(0, str(STUDY))

WORDS = ("press one now", "goodbye", "seven seven", "the blue door is open today")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed data folder with four 'human' clips, texts, and one shard of synthetic ones."""
    data = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    clips = [(rng.standard_normal(16000 * (1 + number)) * 3000).astype(np.int16) for number in range(len(WORDS))]
    with sf.SoundFile(data / "human.opus", "w", 16000, 1, format="OGG", subtype="OPUS") as file:
        for clip in clips:
            file.write(clip)
    rows, offset = [], 0
    for text, clip in zip(WORDS, clips, strict=True):
        rows.append({"id": text, "offset": offset, "samples": len(clip), "text": text, "voice": "flite-slt"})
        offset += len(clip)
    (data / "human.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    import texts

    rng_texts = random.Random(0)
    sentences = [texts.domain_sentence(rng_texts) for _ in range(400)]
    (data / "texts.tsv").write_text("".join(f"domain\t{text}\n" for text in sentences))
    for name in ("train_0_00000", "test_00"):
        np.save(data / f"{name}.npy", np.concatenate(clips))
        (data / f"{name}.json").write_text(json.dumps(rows))
    return data


@pytest.fixture(scope="module")
def config():
    import build
    from omegaconf import OmegaConf

    widths = {"joint_hidden": 16, "pred_hidden": 16}
    changes = {
        "vocabulary": 64,
        "training": {"audio_per_step_s": 8.0, "flat_start_steps": 2, "wide_context_steps": 3, "curriculum_steps": 4},
        "model": {
            "encoder": {"n_layers": 2, "d_model": 32, "subsampling_conv_channels": 8},
            "model_defaults": {"enc_hidden": 32, **widths},
            "decoder": {"prednet": {"pred_hidden": 16}},
            "joint": {"jointnet": {"encoder_hidden": 32, **widths}},
        },
    }
    return OmegaConf.merge(build.load_config(STUDY / "config.yaml"), changes)


@pytest.mark.slow
def test_the_recipe_trains_resumes_and_exports_a_model_that_transcribes(folder: Path, config, tmp_path: Path) -> None:
    import build
    import torch
    from blank_bias import choose_blank_bias
    from data import AudioBlock, Loader, Planner, Pool
    from evaluate import evaluate, read_shards
    from train import Trainer

    device = torch.device("cpu")
    trainer = Trainer(config, folder, device)
    pool = Pool(trainer.model.tokenizer.text_to_ids, 60.0)
    pool.add_human(folder)
    block = AudioBlock(device, 60.0)
    loader = Loader(Planner(pool, {"human": 0.5}, seed=1), folder, 8.0, 6.0)
    seen = []
    for _ in range(5):
        trainer.model.train()
        trainer.set_contexts()
        plan, hours = loader.next(block)
        seen.append(trainer.update(plan, block.samples))
    assert hours == pytest.approx(20 / 3600)  # the shard is in too
    assert "frame" in seen[1] and "transducer" in seen[2] and "ctc" in seen[4]
    assert all(np.isfinite(float(value)) for logged in seen for value in logged.values())
    trainer.save(tmp_path)
    again = Trainer(config, folder, device)
    again.resume(tmp_path)
    assert again.step == 5
    for name, parameter in again.named.items():
        torch.testing.assert_close(parameter, trainer.named[name], rtol=1e-3, atol=1e-4)
    again.update(loader.next(block)[0], block.samples)
    for name in ("weights", "adam_m", "adam_v"):
        (tmp_path / f"{name}.pt").unlink()
    light = Trainer(config, folder, device)
    light.resume(tmp_path)
    assert light.learning_rate() < again.learning_rate() and not light.optimizer.state
    light.update(loader.next(block)[0], block.samples)

    build.export(again.model, tmp_path / "toy.nemo")
    restored = build.EncDecRNNTBPEModel.restore_from(str(tmp_path / "toy.nemo"), map_location="cpu")
    assert all(value.dtype == torch.float32 for value in restored.parameters())
    bias = float(restored.joint.joint_net[-1].bias[-1])
    chosen, rates = choose_blank_bias(restored, read_shards(folder), [0.0, 1.0])
    assert set(rates) == {"0.0", "1.0"} and chosen in (0.0, 1.0)
    assert bias - float(restored.joint.joint_net[-1].bias[-1]) == pytest.approx(chosen, abs=1e-5)
    record = evaluate(restored, read_shards(folder))
    assert set(record["contexts"]) == {"[56, 13]", "[56, 6]", "[56, 1]", "[56, 0]"}


def test_the_offset_with_the_least_dev_rate_is_taken() -> None:
    from blank_bias import best_offset

    assert best_offset({0.0: 56.0, 1.0: 52.9, 2.0: 53.4, 2.5: 54.5}) == 1.0
    assert best_offset({0.0: 50.0, 1.0: 50.0}) == 0.0


def test_a_rendered_batch_holds_the_clips_at_their_places(folder: Path) -> None:
    import torch
    from data import AudioBlock, Planner, Pool, render

    pool, block = Pool(lambda text: [1] * len(text.split()), 60.0), AudioBlock(torch.device("cpu"), 60.0)
    pool.add_human(folder)
    assert pool.add_shards(folder, 10) == 1 and pool.add_shards(folder, 10) == 0
    block.load(pool.loads)
    plan = Planner(pool, {"human": 1.0}, seed=3).plan(20.0, 6.0)
    waves, samples = render(block.samples, plan)
    assert waves.shape == (len(plan.counts), plan.width) and int(samples.max()) <= plan.width
    for row in np.flatnonzero(plan.speed == 1.0):
        for source, start, length in zip(plan.source[row], plan.start[row], plan.length[row], strict=True):
            expected = block.samples[source : source + length].float() / 32768
            torch.testing.assert_close(waves[row, start : start + length], expected)
    assert plan.counts.tolist() == [sum(len(t) for _, _, t in spans) for spans in plan.spans]


def test_flat_start_targets_spread_the_tokens_over_each_clip() -> None:
    from data import Plan, frame_targets

    empty = np.zeros((1, 6), np.int64)
    spans = [[(1280, 1280 * 5, [7, 8]), (1280 * 6, 1280 * 8, [9])]]
    targets, counts = np.array([[7, 8, 9]]), np.array([3])
    plan = Plan(empty, empty, empty, np.ones(1), np.array([1280 * 8]), targets, counts, 1280 * 9, spans)
    assert frame_targets(plan, 9, blank=64).tolist() == [[64, 7, 7, 8, 8, 64, 9, 9, 64]]


def test_near_duplicates_of_held_out_sentences_are_recognised() -> None:
    from split import alike, collides

    held_out = ["your message has been saved"]
    assert collides("thank you your message has been saved goodbye", held_out)
    assert collides("your message has been deleted", held_out)
    assert not collides("the train leaves at noon", held_out)
    assert alike(["press", "one", "to", "mute", "yourself"], ["please", "press", "one", "to", "mute", "yourself"])
    assert not alike(["press", "one", "to", "mute", "yourself"], ["the", "conference", "is", "full"])


def test_what_training_texts_share_with_held_out_sentences_is_counted() -> None:
    from overlap import overlap

    held_out = ["press five to hear the message", "goodbye for now", "the parking lot is closed today"]
    training = [
        "please press five to hear the message again",  # contained
        "press five to hear music while you are waiting in the line for somebody to talk to",  # four of six words in a row
        "the parking lot was closed today",  # alike
        "goodbye everybody",
        "goodbye everybody",
    ]
    found = overlap(training, held_out)
    assert found["distinct_texts"] == 4
    assert found["training_texts"] == {"contained": 1, "shared_run": 2, "alike": 2}
    assert found["held_out_sentences"] == {
        "contained": held_out[:1],
        "shared_run": held_out[:1],
        "alike": [held_out[0], held_out[2]],
    }


def test_joined_prompts_are_made_of_whole_prompts(folder: Path) -> None:
    from overlap import joined

    for text in joined(folder, 20):
        while text:
            first = next(word for word in WORDS if f"{text} ".startswith(f"{word} "))
            text = text[len(first) :].strip()


def test_errors_of_a_transcript_are_told_apart() -> None:
    from streamed import kinds_of_error

    reference = ["press", "one", "to", "mute", "yourself"]
    assert kinds_of_error(reference, ["press", "one", "to", "mute", "yourself"]) == (0, 0, 0)
    assert kinds_of_error(reference, ["press", "won", "mute", "yourself", "now"]) == (1, 1, 1)
    assert kinds_of_error(reference, []) == (0, 5, 0)


def test_pauses_guide_the_cutting_of_long_prompts() -> None:
    from human import cut

    tone = (np.sin(np.arange(16000 * 2) / 9) * 9000).astype(np.int16)
    gap = np.zeros(8000, np.int16)
    parts = cut(np.concatenate([tone, gap, tone, gap, tone]), "First part here. Other part here. Third part here.")
    assert [text for _, _, text in parts] == ["first part here", "other part here", "third part here"]
    assert [round(first / 16000, 1) for first, _, _ in parts] == pytest.approx([0.0, 2.2, 4.8], abs=0.15)


def test_grammar_sentences_are_plain_words() -> None:
    import texts

    rng = random.Random(5)
    for _ in range(500):
        text = texts.domain_sentence(rng)
        assert text and all(character.isalpha() or character in " '" for character in text), text


def test_the_plain_transducer_loss_equals_the_sum_over_all_alignments() -> None:
    import torch
    from transducer import transducer_loss

    torch.manual_seed(0)
    frames, tokens, blank = torch.tensor([4, 3]), torch.tensor([2, 1]), 3
    logits, targets = torch.randn(2, 4, 3, 4), torch.tensor([[0, 2], [1, 0]])

    def likelihood(row: int, frame: int, token: int) -> float:
        """Probability of all ways from a lattice point to the end."""
        if frame == frames[row]:
            return float(token == tokens[row])
        chance = logits[row, frame, token].softmax(-1)
        ways = float(chance[blank]) * likelihood(row, frame + 1, token)
        if token < tokens[row]:
            ways += float(chance[targets[row, token]]) * likelihood(row, frame, token + 1)
        return ways

    expected = -sum(np.log(likelihood(row, 0, 0)) for row in range(2)) / 3
    assert float(transducer_loss(logits, targets, frames, tokens, blank)) == pytest.approx(expected, rel=1e-5)


def test_the_composed_voice_cuts_the_recording_where_the_phones_lie(tmp_path: Path) -> None:
    from units import FADE, Units

    tones = {"SIL": 0, "AA": 220, "B": 400, "K": 700}
    frames = [("SIL", 20), ("AA", 20), ("B", 20), ("AA", 20), ("K", 20), ("AA", 20), ("SIL", 20)]
    audio = np.concatenate([np.sin(np.arange(n * 160) * 2 * np.pi * tones[p] / 16000) * 9000 for p, n in frames])
    with sf.SoundFile(tmp_path / "human.opus", "w", 16000, 1, format="OGG", subtype="OPUS") as file:
        file.write(audio.astype(np.int16))
    row = {"id": "a", "offset": 0, "phones": [[p, n, 0] for p, n in frames]}
    (tmp_path / "units.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "human.jsonl").write_text(json.dumps({"text": "press one two three"}) + "\n")
    (tmp_path / "lexicon.txt").write_text("ab AA B\nka K AA\n")
    units, rng = Units(tmp_path), random.Random(1)
    samples = units.speak("ka ab", rng)
    assert samples is not None and units.speak("unheard", rng) is None
    spoken = 5 * 20 * 160  # K AA AA B and two halves of silence, at most 12 frames of each pause
    assert abs(len(samples) - spoken) < 20 * 160 + 4 * FADE
    halves = [
        units.before[i] + units.after[i] for i in units.select(["SIL", "K", "AA", "SIL"], np.random.default_rng(0))
    ]
    assert halves == ["AASIL"] * 0 + ["SILAA", "AAAA", "AAAA", "KSIL", "KSIL", "AASIL"]
    assert set(units.phrases(rng).split()) <= {"press", "one", "two", "three"}
