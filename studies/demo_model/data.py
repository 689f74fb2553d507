"""Training audio as one block of device memory, and batches drawn from it.

All clips lie one after another in an int16 tensor on the GPU; a batch is a list of `Piece`s (which clip, where in the
utterance, at what speed), drawn by a background thread and rendered on the device in one gather. Utterances are one
to six clips of one voice group, joined with short silences up to the batch's target length."""

from __future__ import annotations

import json
import queue
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soundfile as sf
import torch
from split import held_out_texts

RATE_HZ = 16000
MOST_PIECES = 6
HELD_OUT = re.compile(f" (?:{'|'.join(held_out_texts())}) ")


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


class Pool:
    """The audio block and its voice groups; grows while synthesis goes on."""

    def __init__(self, tokenize, device: torch.device, capacity_s: float) -> None:
        self.tokenize, self.used = tokenize, 0
        self.audio = torch.zeros(int(capacity_s * RATE_HZ), dtype=torch.int16, device=device)
        self.groups: dict[str, Clips] = {}
        self.seen: set[str] = set()
        self.lock = threading.Lock()

    def add(self, samples: np.ndarray, rows: list[dict]) -> None:
        """Appends consecutive clips (dicts with text, voice, samples) to the block."""
        if self.used + len(samples) > len(self.audio):
            return
        self.audio[self.used : self.used + len(samples)] = torch.from_numpy(samples).to(self.audio.device)
        grouped: dict[str, list] = {}
        position = self.used
        for row in rows:
            item = (row["text"], self.tokenize(row["text"]), position, row["samples"])
            grouped.setdefault(row["voice"], []).append(item)
            position += row["samples"]
        self.used = position
        with self.lock:
            for voice, items in grouped.items():
                self.groups.setdefault(voice, Clips()).extend(items)

    def add_human(self, folder: Path) -> None:
        """Adds the packed human prompts under the voice `human`."""
        samples, _ = sf.read(folder / "human.opus", dtype="int16")
        rows = [json.loads(line) for line in (folder / "human.jsonl").read_text().splitlines()]
        self.add(samples, [row | {"voice": "human"} for row in rows])

    def add_shards(self, folder: Path, limit: int) -> int:
        """Adds up to `limit` finished training shards not seen before; returns how many."""
        fresh = [path for path in sorted(folder.glob("train_*.json")) if path.name not in self.seen][:limit]
        gathered, listed = [], []
        for path in fresh:
            self.seen.add(path.name)
            rows = json.loads(path.read_text())
            # Variants of one engine share a group: espeak-en-us+f3 → espeak.
            gathered.append(np.load(path.with_suffix(".npy")))
            listed += [
                row | {"voice": row["voice"].split("-")[0] if "espeak" in row["voice"] else row["voice"]}
                for row in rows
            ]
        if fresh:
            self.add(np.concatenate(gathered), listed)
        return len(fresh)


@dataclass(frozen=True)
class Plan:
    """One batch to render: per utterance and piece the source offset, start, length and speed; and the targets.

    source, start, length: [B, P] int64 in samples (length 0: no piece); speed: [B]; samples: utterance lengths [B];
    tokens: one list per utterance; spans: (first sample, end, tokens) of each piece, for the flat start.
    """

    source: np.ndarray
    start: np.ndarray
    length: np.ndarray
    speed: np.ndarray
    samples: np.ndarray
    tokens: list[list[int]]
    spans: list[list[tuple[int, int, list[int]]]]


class Planner:
    """Draws batches."""

    def __init__(self, pool: Pool, human_share: float, seed: int) -> None:
        self.pool, self.human_share, self.rng = pool, human_share, np.random.default_rng(seed)

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
        with self.pool.lock:
            groups = dict(self.pool.groups)
            return self.draw(groups, count, target)

    def draw(self, groups: dict[str, Clips], count: int, target: int) -> Plan:
        """The pieces of `count` utterances."""
        rng = self.rng
        voices = [voice for voice in groups if voice != "human"]
        reach = np.cumsum([groups[voice].samples.sum() for voice in voices]) if voices else np.zeros(1)
        source, start, length = (np.zeros((count, MOST_PIECES), np.int64) for _ in range(3))
        speed, samples, tokens, spans = np.ones(count), np.zeros(count, np.int64), [], []
        row = 0
        while row < count:
            human = not voices or rng.random() < self.human_share
            clips = groups["human" if human else voices[int(np.searchsorted(reach, rng.random() * reach[-1]))]]
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
            tokens.append([token for _, _, piece in spans[-1] for token in piece])
            samples[row] = spans[-1][-1][1]
            row += 1
        return Plan(source, start, length, speed, samples, tokens, spans)


def render(audio: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Waveforms [B, T] float32 in -1…1 and lengths [B] of a plan, by linear interpolation at each utterance's speed."""
    device = audio.device
    source, start, length = (torch.from_numpy(array).to(device) for array in (plan.source, plan.start, plan.length))
    speed = torch.from_numpy(plan.speed).to(device, torch.float64)[:, None]
    samples = torch.from_numpy(plan.samples).to(device)
    time = torch.arange(int(plan.samples.max()), device=device)[None].expand(len(samples), -1).contiguous()
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
    """Plans drawn ahead by a background thread."""

    def __init__(self, planner: Planner, audio_s: float, longest_s: float, ahead: int = 4) -> None:
        self.planner, self.queue = planner, queue.Queue(maxsize=ahead)
        self.audio_s, self.longest_s = audio_s, longest_s
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        """Draws for ever; the queue's bound paces it."""
        while True:
            self.queue.put(self.planner.plan(self.audio_s, self.longest_s))

    def next(self) -> Plan:
        """The next batch."""
        return self.queue.get(timeout=60)
