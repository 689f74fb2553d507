"""Fetches recorded human speech from Debian packages and writes 16 kHz FLAC files with a NeMo JSON manifest.

The demo model was trained on, and is tested with, telephone prompts that Debian packages carry together with their
transcripts (`asterisk-core-sounds-en-g722`, CC-BY-SA-3.0) and a few read sentences (`pocketsphinx-testdata`, BSD-2).
This script repeats that step on a Debian or Ubuntu machine with a network; the workbench itself does not need it.

    python -m workbench.model.fetch_speech out_folder            # needs apt-get, dpkg, and ffmpeg or `pip install av`

G.722 (ITU-T G.722, 64 kbit/s, 16 kHz) is decoded by the `ffmpeg` program where it is installed, else by PyAV.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import soundfile as sf

from workbench.errors import AudioError, InputError

SAMPLE_RATE_HZ = 16000
PACKAGES = ("asterisk-core-sounds-en", "asterisk-core-sounds-en-g722", "pocketsphinx-testdata")
PROMPTS = Path("usr/share/asterisk/sounds/en_US_f_Allison")
TRANSCRIPTS = Path("usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz")
SPHINX = Path("usr/share/pocketsphinx/test/data")

# fmt: off
ONES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
        "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
# fmt: on

# Spelling slips of the transcript file, and how symbols and abbreviations are spoken.
REPLACEMENTS = (
    (r"\(note: [^)]*\)|\(simple tone[^)]*\)", " "),
    (r"open source pbx", "open source p b x"),
    (r"\bpbx\b", "p b x"),
    (r"\bivr\b", "i v r"),
    (r"\biax2?\b", "i a x"),
    (r"\bip\b", "i p"),
    (r"\bh\.323", "h three twenty three"),
    (r"\bvm\b", "voicemail"),
    (r"\bdahdi\b", "dahdi"),
    (r"www\.asterisk\.org", "w w w dot asterisk dot org"),
    (r"28\.8", "twenty eight point eight"),
    (r"\b3d\b", "three d"),
    (r"\ba\.m\.", "a m"),
    (r"\bp\.m\.", "p m"),
    (r"\[[^\]]*\]", " "),
    (r"#", " pound "),
    (r"\*", " star "),
    (r"un-indentified or witheld", "unidentified or withheld"),
    (r"\bumute\b", "unmute"),
    (r"represenatives", "representatives"),
    (r"\bthru\b", "through"),
    (r"fourtieth", "fortieth"),
    (r"exclaimation", "exclamation"),
)


@dataclass(frozen=True)
class Clip:
    """One recording: file path, seconds, spoken words, and where it comes from."""

    audio_filepath: str
    duration: float
    text: str
    id: str
    source: str
    speaker: str
    licence: str


def number_words(number: int) -> str:
    """Words of a whole number below 10,000 as prompts speak it: 21 → "twenty one", 500 → "five hundred"."""
    if not 0 <= number < 10_000:
        raise ValueError(f"got {number}; numbers from 0 to 9999 are allowed")
    if number < 20:
        return ONES[number]
    if number < 100:
        return TENS[number // 10] + (f" {ONES[number % 10]}" if number % 10 else "")
    if number >= 1000 and number % 1000:
        if number % 100 == 0:
            return f"{number_words(number // 100)} hundred"
        return " ".join(ONES[int(digit)] for digit in str(number))
    unit, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    rest = f" {number_words(number % unit)}" if number % unit else ""
    return f"{ONES[number // unit]} {name}{rest}"


def normalise_text(text: str) -> str:
    """Lower-case words as they are spoken: letters, apostrophes and single spaces only.

    >>> normalise_text("Press 9 for more entries.")
    'press nine for more entries'
    """
    text = text.lower()
    for pattern, words in REPLACEMENTS:
        text = re.sub(pattern, words, text)
    text = re.sub(r"\d+", lambda match: f" {number_words(int(match[0]))} ", text)
    text = re.sub(r"[^a-z' ]+", " ", text)
    text = re.sub(r"(?<![a-z])'|'(?![a-z])", " ", text)
    return " ".join(text.split())


def download(packages: tuple[str, ...], folder: Path) -> Path:
    """Downloads and unpacks Debian packages below `folder`; returns the unpacked tree. Needs a Debian-like machine."""
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise InputError(
                f"the program {program} was not found; run this on Debian or Ubuntu, or use the shipped clips"
            )
    packed, root = folder / "packages", folder / "root"
    packed.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["apt-get", "download", *packages], cwd=packed, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(
            f"apt-get could not download {', '.join(packages)} (try `apt-get update`): {done.stderr.strip()}"
        )
    for package in sorted(packed.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    return root


def decode_g722(path: Path) -> np.ndarray:
    """Samples of a headerless G.722 file as int16 [N] at 16 kHz."""
    if shutil.which("ffmpeg"):
        command = [
            "ffmpeg",
            "-v",
            "error",
            "-f",
            "g722",
            "-i",
            str(path),
            "-f",
            "s16le",
            "-ac",
            "1",
            "-ar",
            "16000",
            "-",
        ]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode:
            raise AudioError(path, f"ffmpeg could not decode it: {done.stderr.decode().strip()}")
        return np.frombuffer(done.stdout, dtype=np.int16)
    try:
        import av
    except ImportError as error:
        raise InputError("decoding G.722 needs the program ffmpeg or the package av (`pip install av`)") from error
    with av.open(str(path), format="g722") as container:
        frames = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
    if not frames:
        raise AudioError(path, "it holds no audio")
    return np.concatenate(frames).astype(np.int16)


def prompts(root: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """(id, text, samples) of every spoken prompt; tones, silences and animal noises are left out."""
    for line in gzip.decompress((root / TRANSCRIPTS).read_bytes()).decode().splitlines():
        name, separator, spoken = line.partition(": ")
        if not separator or line.startswith(";") or re.match(r"^\s*[\[(<]", spoken):
            continue
        path = root / PROMPTS / f"{name}.g722"
        if path.exists():
            yield name, normalise_text(spoken), decode_g722(path)


def sentences(root: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """(id, text, samples) of the sentences read from a novel in the speech recogniser's test data."""
    for line in (root / SPHINX / "librivox/transcription").read_text().splitlines():
        found = re.match(r"<s> (.*) </s> \((.*)\)", line)
        if found is None:
            continue
        samples, rate_hz = sf.read(root / SPHINX / f"librivox/{found[2]}.wav", dtype="int16")
        if rate_hz != SAMPLE_RATE_HZ:
            raise AudioError(found[2], f"got {rate_hz} Hz; 16000 Hz is expected")
        yield found[2], normalise_text(found[1]), samples


def write(
    folder: Path, clips: Iterator[tuple[str, str, np.ndarray]], source: str, speaker: str, licence: str
) -> list[Clip]:
    """Writes one FLAC per clip below `folder` and returns the manifest rows."""
    rows = []
    for name, text, samples in clips:
        file_name = name.replace("/", "_") + ".flac"
        sf.write(folder / file_name, samples, SAMPLE_RATE_HZ, subtype="PCM_16")
        rows.append(Clip(file_name, round(len(samples) / SAMPLE_RATE_HZ, 3), text, name, source, speaker, licence))
    return rows


def fetch(folder: Path) -> Path:
    """Downloads, decodes and writes everything; returns the manifest's path."""
    root = download(PACKAGES, folder)
    audio = folder / "speech"
    audio.mkdir(parents=True, exist_ok=True)
    rows = write(audio, prompts(root), "asterisk-core-sounds-en-g722", "Allison Smith", "CC-BY-SA-3.0")
    rows += write(audio, sentences(root), "pocketsphinx-testdata (LibriVox)", "LibriVox reader", "BSD-2-Clause")
    manifest = audio / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    return manifest


def main() -> None:
    """Command line: one argument, the folder to write to."""
    parser = argparse.ArgumentParser(description="Fetch human speech with transcripts from Debian packages.")
    parser.add_argument("folder", type=Path)
    print(fetch(parser.parse_args().folder))


if __name__ == "__main__":
    main()
