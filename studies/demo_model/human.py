"""Packs the human training prompts into one Opus file and a list, long prompts cut at pauses.

Training uses clips of up to 12 s, but a fifth of the recorded time is in long menus. `cut` matches the punctuation of
the transcript with the pauses of the recording: over all monotone assignments it minimises how far each part's
speaking time is from its share of letters (dynamic programming), and prefers long pauses.

    python studies/demo_model/human.py human/speech human/root out_folder
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from pathlib import Path

import numpy as np
import soundfile as sf

from workbench.model.fetch_speech import SAMPLE_RATE_HZ, TRANSCRIPTS, normalise_text

HERE = Path(__file__).parent
FRAME = 320
LONGEST_S = 11.0
QUALITY = {"compression_level": 0.86}  # about 40 kbit/s
SHORTEST_PAUSE_FRAMES = 8


def pauses(samples: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Speaking time in frames of 20 ms up to each frame [F + 1], and the silent stretches (first frame, length)."""
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME).astype(np.float32)
    level = np.sqrt((frames**2).mean(axis=1))
    active = level > max(60.0, 0.03 * float(np.percentile(level, 95)))
    spoken = np.concatenate([[0], np.cumsum(active)])
    edges = np.flatnonzero(np.diff(np.concatenate([[1], active.astype(int), [1]])))
    silent = [(int(a), int(b - a)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return spoken, [pause for pause in silent if pause[1] >= SHORTEST_PAUSE_FRAMES]


def cut(samples: np.ndarray, raw_text: str) -> list[tuple[int, int, str]]:
    """Parts (first sample, end, text) of a long prompt; every cut is in the middle of a pause after punctuation."""
    phrases = [text for part in re.split(r"(?<=[.,;!?:])\s+", raw_text) if (text := normalise_text(part))]
    spoken, silent = pauses(samples)
    inner = [pause for pause in silent if pause[0] > 0 and pause[0] + pause[1] < len(spoken) - 1]
    points = [0, *(start + length // 2 for start, length in inner), len(spoken) - 1]
    bonus = [0.0, *(min(length, 30) * 1.0 for _, length in inner), 0.0]
    letters = np.concatenate([[0], np.cumsum([len(text) for text in phrases])])
    rate = spoken[-1] / letters[-1]
    best = np.full((len(letters), len(points)), np.inf)
    back = np.zeros((*best.shape, 2), dtype=int)
    best[0, 0] = 0
    for j in range(1, len(letters)):
        for p in range(1, len(points)):
            for i in range(j):
                expected = (letters[j] - letters[i]) * rate
                actual = spoken[points[p]] - spoken[np.array(points[:p])]
                cost = best[i, :p] + (actual - expected) ** 2 / (2 * expected) + 12 * (j - i - 1)
                q = int(np.argmin(cost))
                if cost[q] - bonus[p] < best[j, p]:
                    best[j, p], back[j, p] = cost[q] - bonus[p], (i, q)
    parts, j, p = [], len(letters) - 1, len(points) - 1
    while j > 0:
        i, q = back[j, p]
        end = len(samples) if p == len(points) - 1 else points[p] * FRAME
        parts.append((points[q] * FRAME, end, " ".join(phrases[i:j])))
        j, p = i, q
    return parts[::-1]


def main() -> None:
    """Command line: speech folder with manifest, unpacked packages, and where to write human.opus and human.jsonl."""
    parser = argparse.ArgumentParser()
    for name in ("speech", "packages", "out"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    raw = dict(
        line.split(": ", 1)
        for line in gzip.decompress((arguments.packages / TRANSCRIPTS).read_bytes()).decode().splitlines()
        if ": " in line
    )
    wanted = {json.loads(line)["id"] for line in (HERE / "human_train.jsonl").read_text().splitlines()}
    rows, pieces, position = [], [], 0
    for line in (arguments.speech / "manifest.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["id"] not in wanted:
            continue
        samples, _ = sf.read(arguments.speech / row["audio_filepath"], dtype="int16")
        parts = cut(samples, raw[row["id"]]) if row["duration"] > LONGEST_S else [(0, len(samples), row["text"])]
        for first, end, text in parts:
            pieces.append(samples[first:end])
            rows.append({"id": row["id"], "offset": position, "samples": end - first, "text": text})
            position += end - first
    arguments.out.mkdir(parents=True, exist_ok=True)
    audio = np.concatenate(pieces)
    # libsndfile's Opus encoder crashes on one very long write; a file handle takes it in blocks.
    with sf.SoundFile(
        arguments.out / "human.opus", "w", SAMPLE_RATE_HZ, 1, format="OGG", subtype="OPUS", **QUALITY
    ) as file:
        for block in range(0, len(audio), SAMPLE_RATE_HZ):
            file.write(audio[block : block + SAMPLE_RATE_HZ])
    (arguments.out / "human.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} parts, {position / SAMPLE_RATE_HZ:.0f} s")


if __name__ == "__main__":
    main()
