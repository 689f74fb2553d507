"""Training audio as one block of device memory, and batches drawn from it.

All clips lie one after another in an int16 tensor on the GPU; a batch is a list of `Piece`s (which clip, where in the
utterance, at what speed), drawn by another process and rendered on the device in one gather. Utterances are one
to six clips of one voice group, joined with short silences up to the batch's target length."""

from __future__ import annotations

import gc
import json
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soundfile as sf
import torch
from split import held_out_pattern

RATE_HZ = 16000
MOST_PIECES = 6
HELD_OUT = held_out_pattern()


@dataclass
class Clips:
    """Texts, word pieces and place in the audio block of the clips of one voice group, sorted by length."""

    texts: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    offsets: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def extend(self, rows: list[tuple[str, list[int], int, int]]) -> None:
        """Adds (text, tokens, offset, samples) rows and keeps the order by length."""
        merged = sorted(
            [*zip(self.texts, self.tokens, self.offsets, self.samples, strict=True), *rows], key=lambda r: r[3]
        )
        self.texts, self.tokens = [row[0] for row in merged], [row[1] for row in merged]
        self.offsets = np.array([row[2] for row in merged], np.int64)
        self.samples = np.array([row[3] for row in merged], np.int64)


def read_audio(path: Path) -> np.ndarray:
    """int16 samples of a shard (.npy) or of a packed sound file."""
    return np.load(path) if path.suffix == ".npy" else sf.read(path, dtype="int16")[0]


class Pool:
    """What is known about the clips of the audio block, per voice group; grows while synthesis goes on."""

    def __init__(self, tokenize: Callable[[str], list[int]], capacity_s: float) -> None:
        self.tokenize, self.used, self.capacity = tokenize, 0, int(capacity_s * RATE_HZ)
        self.groups: dict[str, Clips] = {}
        self.seen: set[str] = set()
        self.loads: list[tuple[Path, int]] = []  # sound files and where in the block they belong

    def add(self, listed: list[tuple[Path, list[dict]]]) -> None:
        """Appends files of consecutive clips (dicts with text, voice, samples) to the block."""
        grouped: dict[str, list] = {}
        for path, rows in listed:
            if self.used + sum(row["samples"] for row in rows) > self.capacity:
                return
            self.loads.append((path, self.used))
            for row in rows:
                # Variants of one engine share a group: espeak-en-us+f3 → espeak.
                voice = "espeak" if row["voice"].startswith("espeak") else row["voice"]
                item = (row["text"], self.tokenize(row["text"]), self.used, row["samples"])
                grouped.setdefault(voice, []).append(item)
                self.used += row["samples"]
        for voice, items in grouped.items():
            self.groups.setdefault(voice, Clips()).extend(items)

    def add_human(self, folder: Path) -> None:
        """Adds the packed human prompts under the voice `human`."""
        rows = [json.loads(line) for line in (folder / "human.jsonl").read_text().splitlines()]
        self.add([(folder / "human.opus", [row | {"voice": "human"} for row in rows])])

    def add_shards(self, folder: Path, limit: int) -> int:
        """Adds up to `limit` finished training shards not seen before; returns how many."""
        fresh = [path for path in sorted(folder.glob("train_*.json")) if path.name not in self.seen][:limit]
        self.seen.update(path.name for path in fresh)
        self.add([(path.with_suffix(".npy"), json.loads(path.read_text())) for path in fresh])
        return len(fresh)


class AudioBlock:
    """All clips one after another in device memory."""

    def __init__(self, device: torch.device, capacity_s: float) -> None:
        self.samples = torch.zeros(int(capacity_s * RATE_HZ), dtype=torch.int16, device=device)

    def load(self, loads: list[tuple[Path, int]]) -> None:
        """Copies sound files to their places."""
        for path, offset in loads:
            audio = torch.from_numpy(read_audio(path))
            self.samples[offset : offset + len(audio)] = audio.to(self.samples.device)


@dataclass(frozen=True)
class Plan:
    """One batch to render: per utterance and piece the source offset, start, length and speed; and the targets.

    source, start, length: [B, P] int64 in samples (length 0: no piece); speed: [B]; samples: utterance lengths [B];
    targets: [B, U] word pieces, counts: [B] how many; spans: (first sample, end, tokens) of each piece, for the flat
    start; width: samples of the rendered batch. It takes few values, so that the GPU libraries plan few shapes.
    """

    source: np.ndarray
    start: np.ndarray
    length: np.ndarray
    speed: np.ndarray
    samples: np.ndarray
    targets: np.ndarray
    counts: np.ndarray
    width: int
    spans: list[list[tuple[int, int, list[int]]]]


class Planner:
    """Draws batches."""

    def __init__(self, pool: Pool, shares: dict[str, float], seed: int) -> None:
        """shares: which part of the utterances these voice groups get; the others share the rest by their length."""
        self.pool, self.shares, self.rng = pool, shares, np.random.default_rng(seed)

    def utterance(self, clips: Clips, target: int, speed: float) -> list[tuple[int, int]]:
        """(clip, start sample) of the pieces of one utterance of about `target` samples."""
        rng, chosen = self.rng, []
        position = int(rng.uniform(0, 0.3) * RATE_HZ)
        for number in range(MOST_PIECES):
            fits = int(np.searchsorted(clips.samples, (target - position) * speed, side="right"))
            if fits == 0:
                break
            # The first piece is often a long one; otherwise the many one-word clips would make up every utterance.
            low = int(fits * 0.6) if number == 0 and rng.random() < 0.6 else 0
            clip = int(rng.integers(low, fits))
            chosen.append((clip, position))
            position += int(clips.samples[clip] / speed) + int(rng.uniform(0.0, 0.5) * RATE_HZ)
            if rng.random() < 0.15:
                break
        return chosen

    def plan(self, audio_s: float, longest_s: float) -> Plan:
        """One batch of about `audio_s` seconds with utterances of at most `longest_s`."""
        rng = self.rng
        target_s = rng.choice([0.25, 0.45, 0.7, 1.0], p=[0.15, 0.3, 0.3, 0.25]) * longest_s
        count, target = max(1, int(audio_s / target_s)), int(target_s * RATE_HZ)
        return self.draw(count, target)

    def weights(self) -> tuple[list[str], np.ndarray]:
        """The voice groups at hand and the cumulated chances to draw them."""
        groups = self.pool.groups
        fixed = [voice for voice in self.shares if voice in groups]
        others = [voice for voice in groups if voice not in self.shares]
        lengths = np.array([groups[voice].samples.sum() for voice in others], float)
        rest = (1 - sum(self.shares[voice] for voice in fixed)) * lengths / max(lengths.sum(), 1)
        reach = np.cumsum([*(self.shares[voice] for voice in fixed), *rest])
        return [*fixed, *others], reach / reach[-1]

    def draw(self, count: int, target: int) -> Plan:
        """The pieces of `count` utterances."""
        rng, groups = self.rng, self.pool.groups
        voices, reach = self.weights()
        source, start, length = (np.zeros((count, MOST_PIECES), np.int64) for _ in range(3))
        speed, samples, spans = np.ones(count), np.zeros(count, np.int64), []
        row = 0
        while row < count:
            clips = groups[voices[int(np.searchsorted(reach, rng.random()))]]
            pace = float(rng.uniform(0.88, 1.14)) if rng.random() < 0.7 else 1.0
            chosen = self.utterance(clips, target, pace)
            text = " ".join(clips.texts[clip] for clip, _ in chosen)
            # Clips joined at random must not spell a held-out sentence either.
            if not chosen or HELD_OUT.search(f" {text} "):
                continue
            speed[row] = pace
            spans.append([])
            for number, (clip, first) in enumerate(chosen):
                long = int(clips.samples[clip] / pace)
                source[row, number], start[row, number], length[row, number] = clips.offsets[clip], first, long
                spans[-1].append((first, first + long, clips.tokens[clip]))
            samples[row] = spans[-1][-1][1]
            row += 1
        joined = [[token for _, _, piece in pieces for token in piece] for pieces in spans]
        counts = np.array([len(tokens) for tokens in joined])
        targets = np.zeros((count, counts.max()), np.int64)
        for row, tokens in enumerate(joined):
            targets[row, : len(tokens)] = tokens
        return Plan(source, start, length, speed, samples, targets, counts, target, spans)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device; the host does not wait for it."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def render(audio: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Waveforms [B, T] float32 in -1…1 and lengths [B] of a plan, by linear interpolation at each utterance's speed."""
    device = audio.device
    source, start, length = (to_device(array, device) for array in (plan.source, plan.start, plan.length))
    speed = to_device(plan.speed, device)[:, None]
    samples = to_device(plan.samples, device)
    time = torch.arange(plan.width, device=device)[None].expand(len(samples), -1).contiguous()
    order = torch.where(length > 0, start, torch.full_like(start, 2**40))
    piece = (torch.searchsorted(order, time, right=True) - 1).clamp(min=0)
    into = time - start.gather(1, piece)
    valid = (into >= 0) & (into < length.gather(1, piece))
    position = source.gather(1, piece) + into.clamp(min=0) * speed
    whole = position.floor()
    part = (position - whole).float()
    index = whole.long().clamp(max=len(audio) - 2)
    waves = torch.lerp(audio[index].float(), audio[index + 1].float(), part) / 32768
    return waves * valid, samples


def frame_targets(plan: Plan, frames: int, blank: int) -> torch.Tensor:
    """Flat-start targets [B, frames]: each piece's tokens spread evenly over its span, blank elsewhere."""
    targets = np.full((len(plan.spans), frames), blank, np.int64)
    for row, spans in enumerate(plan.spans):
        for first, end, tokens in spans:
            a, b = first // 1280, min(end // 1280, frames)
            if b > a and tokens:
                index = np.minimum(np.arange(b - a) * len(tokens) // (b - a), len(tokens) - 1)
                targets[row, a:b] = np.array(tokens)[index]
    return torch.from_numpy(targets)


class Loader:
    """Plans drawn ahead by another process, which also keeps the books of the audio block.

    A thread would do it under Python's global lock and slow the launching of kernels, which sets the pace. The process
    is forked and uses only NumPy and the tokenizer, never the GPU. What is to be copied to the block comes before the
    first plan that uses it.
    """

    def __init__(self, planner: Planner, shards: Path, audio_s: float, longest_s: float, ahead: int = 6) -> None:
        context = multiprocessing.get_context("fork")
        self.queue, self.longest_s = context.Queue(maxsize=ahead), context.Value("d", longest_s)
        process = context.Process(target=self.run, args=(planner, shards, audio_s), daemon=True)
        gc.freeze()  # or the process might collect, and so free, what it inherited of the GPU
        process.start()

    def run(self, planner: Planner, shards: Path, audio_s: float) -> None:
        """Draws for ever; the queue's bound paces it."""
        gc.disable()
        while True:
            # New shards come in after each batch, a few at a time; until the first are in, as many as there are.
            planner.pool.add_shards(shards, 6 if planner.pool.seen else 4000)
            loads, planner.pool.loads = planner.pool.loads, []
            plan = planner.plan(audio_s, self.longest_s.value)
            self.queue.put((loads, planner.pool.used, plan))

    def next(self, block: AudioBlock) -> tuple[Plan, float]:
        """The next batch, and how many hours the block holds; raises queue.Empty if none comes for a minute."""
        loads, used, plan = self.queue.get(timeout=60)
        block.load(loads)
        return plan, used / RATE_HZ / 3600
