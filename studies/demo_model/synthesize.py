"""Speaks the texts with many synthetic voices on all cores, into shards that training picks up while they appear.

Three engines: hibari-tts (neural, one voice) whose predicted pitch and spectra are warped into many speakers, flite
(five recorded voices), and espeak-ng (formant synthesis, many variants). Half as many hours are said by the human
voice of the training prompts, put together from its phones (units.py). A shard is `NAME.npy` (int16 samples at 16
kHz, one clip after another) and `NAME.json` (a list of text, voice and sample count); the .json is written last, so
that its presence means the shard is whole. The held-out domain sentences come first, as shards `test_*`, and those
for choosing the blank's bias, as `dev_*`, said by the composed human voice.

    python studies/demo_model/synthesize.py texts.tsv tts_folder out_folder --hours 30 --processes 14
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from multiprocessing import Pool
from pathlib import Path

import numpy as np
import soundfile as sf
import units
from scipy.signal import resample_poly

RATE_HZ = 16000
TEXTS_PER_SHARD = 64
ENGINES = {"hibari": 0.66, "flite": 0.2, "espeak": 0.14}
FLITE_VOICES = ("slt", "rms", "awb", "kal16", "slt")
ESPEAK_LANGUAGES = ("en-us", "en-us", "en-us", "en-gb", "en-gb-scotland")
ESPEAK_VARIANTS = ("m1", "m2", "m3", "m4", "m7", "f1", "f2", "f3", "f4", "f5")
UNITS = "units"
PHRASE_SHARE = 0.45  # of the composed human speech: texts made from the prompts' phrases
PRINT_KEPT = 0.35  # of the printed sentences; they are far from the domain
# Speakers made from the neural voice: (weight, pitch factor range, formant factor range).
SPEAKERS = ((0.65, (0.85, 1.2), (0.94, 1.08)), (0.25, (0.5, 0.75), (0.82, 0.93)), (0.1, (1.2, 1.45), (1.08, 1.18)))


@cache
def hibari(folder: Path):
    """The neural synthesiser, loaded once per process."""
    sys.path.append(str(folder / "python"))
    from hibari import Hibari

    return Hibari(threads=1)


def speak_hibari(text: str, folder: Path, rng: random.Random) -> tuple[np.ndarray, str]:
    """Speaks as a speaker that does not exist: pitch scaled, flattened or widened; spectrum stretched over frequency."""
    tts = hibari(folder)  # also puts the synthesiser on the module path
    from hibari import dsp

    weights, pitches, formants = zip(*SPEAKERS, strict=True)
    kind = rng.choices(range(len(SPEAKERS)), weights)[0]
    pitch, formant = rng.uniform(*pitches[kind]), rng.uniform(*formants[kind])
    liveliness, speed = rng.uniform(0.6, 1.4), rng.uniform(0.8, 1.25)
    noise = np.random.default_rng(rng.getrandbits(32))
    parts = []
    for phonemes in tts.phonemize(text):
        feed = {"ids": np.asarray([tts.ids(phonemes)], np.int64), "speed": np.asarray([speed], np.float32)}
        lh, th, ln, lr, phi, f0 = (output[0] for output in tts.sess.run(None, feed))
        bins = np.minimum(np.round(np.arange(len(lh)) / formant), len(lh) - 1).astype(int)
        voiced = f0 > 40
        mean = float(f0[voiced].mean()) if voiced.any() else 200.0
        f0 = np.where(voiced, mean * pitch * (np.maximum(f0, 40) / mean) ** liveliness, f0).astype(np.float32)
        parts.append(dsp.synth(lh[bins], th[bins], ln[bins], lr[bins], phi, f0, noise))
    samples = resample_poly(np.concatenate(parts), 2, 3) if parts else np.zeros(0)
    return samples, f"hibari-{kind}"


def run_program(command: list[str], folder: Path, text: str) -> np.ndarray:
    """Samples at 16 kHz that a command-line synthesiser writes to its standard output as WAV."""
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder / "lib")}
    done = subprocess.run([*command, text], capture_output=True, env=environment, check=True)
    data = bytearray(done.stdout)
    if data[40:44] not in (b"", (len(data) - 44).to_bytes(4, "little")):
        data[4:8], data[40:44] = (len(data) - 8).to_bytes(4, "little"), (len(data) - 44).to_bytes(4, "little")
    samples, rate_hz = sf.read(io.BytesIO(bytes(data)), dtype="float32")
    return (
        resample_poly(samples, 320, 441)
        if rate_hz == 22050
        else resample_poly(samples, RATE_HZ // 1000, rate_hz // 1000)
    )


def speak_flite(text: str, folder: Path, rng: random.Random) -> tuple[np.ndarray, str]:
    """One of flite's recorded voices at a random tempo."""
    voice = rng.choice(FLITE_VOICES)
    stretch = f"duration_stretch={rng.uniform(0.8, 1.2):.2f}"
    command = [str(folder / "bin/flite"), "-voice", voice, "--setf", stretch, "-o", "/dev/stdout", "-t"]
    return run_program(command, folder, text), f"flite-{voice}"


def speak_espeak(text: str, folder: Path, rng: random.Random) -> tuple[np.ndarray, str]:
    """One of espeak-ng's English voices and variants at a random tempo and pitch."""
    voice = f"{rng.choice(ESPEAK_LANGUAGES)}+{rng.choice(ESPEAK_VARIANTS)}"
    tempo, pitch = str(rng.randint(120, 185)), str(rng.randint(25, 75))
    command = [str(folder / "bin/espeak-ng"), f"--path={folder}", "-v", voice, "-s", tempo, "-p", pitch, "--stdout"]
    return run_program(command, folder, text), f"espeak-{voice}"


@cache
def human_units(folder: Path) -> units.Units:
    """The human voice's phones, loaded once per process."""
    return units.Units(folder)


def speak_units(text: str, folder: Path, rng: random.Random) -> tuple[np.ndarray, str]:
    """The human voice of the training prompts; nothing if a word's pronunciation is not known."""
    samples = human_units(folder).speak(text, rng)
    return (np.zeros(0) if samples is None else samples), UNITS


SPEAK: dict[str, Callable[[str, Path, random.Random], tuple[np.ndarray, str]]] = {
    "hibari": speak_hibari,
    "flite": speak_flite,
    "espeak": speak_espeak,
}


def speak(text: str, composed: bool, folders: tuple[Path, Path], rng: random.Random) -> tuple[str, np.ndarray, str]:
    """(text, samples, voice): a synthetic voice, or the composed human one, sometimes with a text of its own."""
    tts, data = folders
    if composed:
        if rng.random() < PHRASE_SHARE:
            text = human_units(data).phrases(rng)
        return text, *speak_units(text, data, rng)
    engine = rng.choices(list(ENGINES), list(ENGINES.values()))[0]
    return text, *SPEAK[engine](text, tts, rng)


def speak_shard(task: tuple[str, list[str], int], folders: tuple[Path, Path], out: Path) -> float:
    """Speaks the texts of one shard; returns seconds of audio. folders: synthesisers, data."""
    name, texts, seed = task
    rng = random.Random(seed)
    clips, rows = [], []
    for given in texts:
        text, samples, voice = speak(given, UNITS in name, folders, rng)
        peak = float(np.abs(samples).max()) if len(samples) else 0.0
        if peak < 1e-3 or len(samples) > 14 * RATE_HZ:
            continue
        clips.append((samples / peak * 0.7 * 32767).astype(np.int16))
        rows.append({"text": text, "voice": voice, "samples": len(samples)})
    np.save(out / f"{name}.npy", np.concatenate(clips))
    (out / f"{name}.part").write_text(json.dumps(rows))
    (out / f"{name}.part").rename(out / f"{name}.json")
    return sum(len(clip) for clip in clips) / RATE_HZ


def tasks(rows: list[tuple[str, str]], seed: int) -> list[tuple[str, list[str], int]]:
    """(name, texts, seed) of every shard: held-out sentences first, then the training texts in three shuffled passes.

    Every third training shard is for the composed human voice."""
    rng = random.Random(seed)
    held_out = {kind: [text for row_kind, text in rows if row_kind == kind] for kind in ("test", "dev")}
    train = [text for kind, text in rows if kind not in held_out and (kind != "print" or rng.random() < PRINT_KEPT)]
    test, dev = held_out["test"], held_out["dev"]
    listed = [(f"test_{i // 50:02d}", test[i : i + 50], seed + i) for i in range(0, len(test), 50)]
    listed += [(f"dev_{UNITS}_{i // 50:02d}", dev[i : i + 50], seed + i) for i in range(0, len(dev), 50)]
    for turn in range(3):
        rng.shuffle(train)
        for number, i in enumerate(range(0, len(train), TEXTS_PER_SHARD)):
            kind = f"{turn}_{UNITS}" if number % 3 == 0 else turn
            listed.append((f"train_{kind}_{number:05d}", train[i : i + TEXTS_PER_SHARD], rng.getrandbits(32)))
    return listed


def main() -> None:
    """Command line: texts, synthesisers, output folder, how much and how fast."""
    parser = argparse.ArgumentParser()
    for name in ("texts", "tts", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--hours", type=float, default=30.0)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.nice(10)
    rows = [tuple(line.split("\t", 1)) for line in arguments.texts.read_text().splitlines()]
    human_units(arguments.texts.parent)  # before the processes are forked
    waiting = [task for task in tasks(rows, arguments.seed) if not (arguments.out / f"{task[0]}.json").exists()]
    start, seconds = time.perf_counter(), 0.0
    with Pool(arguments.processes) as pool:
        work = partial(speak_shard, folders=(arguments.tts.resolve(), arguments.texts.parent), out=arguments.out)
        for count, made in enumerate(pool.imap_unordered(work, waiting)):
            seconds += made
            if count % 100 == 0:
                print(f"{seconds / 3600:.1f} h spoken in {time.perf_counter() - start:.0f} s", flush=True)
            if seconds > arguments.hours * 3600:
                break
        pool.terminate()


if __name__ == "__main__":
    main()
