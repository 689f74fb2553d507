"""Speech in: audio files, folders, globs and NeMo JSON manifests become float32 mono at the model's rate; bad ones are named.

    found = find_audio(["clips/", "more/*.flac", "test.jsonl"])
    for item in found.items:
        samples = read_audio(item, sample_rate_hz=16000)     # [samples] float32
    for error in found.errors: print(error)                  # broken manifest lines, paths without audio

soundfile decodes, soxr resamples. A manifest line is `{"audio_filepath": …, "duration": …, "text": …}`, with "offset" where it is a segment; relative paths are taken from
the manifest's folder. Reading never stops a batch: errors are values here and `AudioError` where one file is asked for.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from workbench.errors import AudioError

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".aiff", ".au", ".w64", ".caf")
MANIFEST_SUFFIXES = (".json", ".jsonl", ".manifest")
MIN_RATE_HZ, MAX_RATE_HZ = 1000, 768_000
# Full scale is 1. Floats that hold 16-bit values reach hundreds and thousands: they give wrong words, and far larger ones overflow.
MAX_PEAK = 100.0
SHIPPED_SPEECH = Path(__file__).parents[1] / "data" / "speech" / "manifest.jsonl"

Samples = npt.NDArray[np.float32]


@dataclass(frozen=True)
class AudioItem:
    """One utterance: a file, its reference text where known, and the manifest and line that named it.

    offset_s: where a manifest line names a segment, its start; it then lasts `duration_s`, or to the end of the file.
    """

    path: Path
    text: str | None = None
    manifest: Path | None = None
    line: int | None = None
    offset_s: float | None = None
    duration_s: float | None = None

    def error(self, reason: str) -> AudioError:
        """An AudioError that names the manifest line where there is one, else the file."""
        if self.manifest is None:
            return AudioError(self.path, reason)
        return AudioError(self.manifest, f"{self.path}: {reason}", self.line)


@dataclass(frozen=True)
class Found:
    """What a search for audio gave: items in a stable order, and an error for each thing that could not be used."""

    items: list[AudioItem]
    errors: list[AudioError]


def find_audio(sources: Iterable[str | Path]) -> Found:
    """Expand files, folders (recursive), globs and manifests. Every source that gives nothing becomes an error."""
    items: list[AudioItem] = []
    errors: list[AudioError] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in AUDIO_SUFFIXES and p.is_file())
            manifests = sorted(p for p in path.glob("*") if p.suffix.lower() in MANIFEST_SUFFIXES and p.is_file())
            named: set[Path] = set()
            for manifest in manifests:
                found = read_manifest(manifest)
                items += found.items
                errors += found.errors
                named |= {item.path.resolve() for item in found.items}
            items += [AudioItem(p) for p in inside if p.resolve() not in named]
            if not inside and not manifests:
                errors.append(
                    AudioError(path, f"the folder holds no audio ({', '.join(AUDIO_SUFFIXES)}) and no manifest")
                )
        elif path.is_file():
            if path.suffix.lower() in MANIFEST_SUFFIXES:
                found = read_manifest(path)
                items += found.items
                errors += found.errors
            else:
                items.append(AudioItem(path))
        else:
            matches = sorted(Path(p) for p in glob.glob(str(source), recursive=True) if Path(p).is_file())
            items += [AudioItem(p) for p in matches]
            if not matches:
                errors.append(AudioError(path, "no such file, folder or match"))
    return Found(items, errors)


def read_manifest(path: str | Path) -> Found:
    """Read a NeMo JSON-lines manifest. A broken line becomes an AudioError with its number; the others are used."""
    path = Path(path)
    items: list[AudioItem] = []
    errors: list[AudioError] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        return Found([], [AudioError(path, f"the manifest cannot be read ({error})")])
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            items.append(_manifest_item(path, number, json.loads(line)))
        except json.JSONDecodeError as error:
            errors.append(
                AudioError(path, f"not JSON ({error.msg.removesuffix(' at')} at column {error.colno})", number)
            )
        except AudioError as error:
            errors.append(error)
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets thousands deep
            errors.append(AudioError(path, f"not JSON that can be read ({type(error).__name__})", number))
    if not items and not errors:
        errors.append(AudioError(path, "the manifest is empty"))
    return Found(items, errors)


def read_audio(item: AudioItem | str | Path, sample_rate_hz: int = 16000, channel: int = 0) -> Samples:
    """Decode one file to float32 mono [samples] at `sample_rate_hz`. Raises AudioError for anything that is not usable speech."""
    import soundfile

    item = item if isinstance(item, AudioItem) else AudioItem(Path(item))
    try:
        str(item.path).encode("utf-8")
    except UnicodeEncodeError:
        raise AudioError(ascii(str(item.path)), "the file name is not UTF-8; rename it") from None
    if not item.path.is_file():
        raise item.error("no such file")
    if item.path.stat().st_size == 0:
        raise item.error("the file is empty (0 bytes)")
    try:
        with soundfile.SoundFile(item.path) as file:
            rate_hz = file.samplerate
            if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
                raise item.error(f"a sample rate of {rate_hz} Hz; allowed is {MIN_RATE_HZ} to {MAX_RATE_HZ}")
            data = _segment(item, file)
    except AudioError:
        raise
    except (soundfile.SoundFileError, RuntimeError, TypeError, OSError, MemoryError) as error:
        raise item.error(f"not audio that can be decoded ({' '.join(str(error).split())})") from None
    if channel >= data.shape[1]:
        raise item.error(f"channel {channel} was asked for; the file has {data.shape[1]}")
    return as_speech(data[:, channel], rate_hz, sample_rate_hz, item)


def _segment(item: AudioItem, file: Any) -> Samples:
    """The samples [frames, channels] of an open file that the item names: all, or its segment."""
    if item.offset_s is None:
        return np.asarray(file.read(dtype="float32", always_2d=True))
    start = round(item.offset_s * file.samplerate)
    if start >= file.frames:
        raise item.error(
            f"the segment starts at {item.offset_s} s; the file lasts {file.frames / file.samplerate:.3f} s"
        )
    file.seek(start)
    frames = -1 if item.duration_s is None else round(item.duration_s * file.samplerate)
    return np.asarray(file.read(frames, dtype="float32", always_2d=True))


def as_speech(samples: npt.ArrayLike, rate_hz: int, sample_rate_hz: int, item: AudioItem | None = None) -> Samples:
    """Check a mono signal [samples] and resample it to `sample_rate_hz` as contiguous float32."""
    data = np.asarray(samples)
    if data.dtype.kind == "i":
        data = data.astype(np.float32) / -float(np.iinfo(data.dtype).min)
    if problem := _problem(data):
        raise (item or AudioItem(Path("samples"))).error(problem)
    if rate_hz != sample_rate_hz:
        import soxr

        data = soxr.resample(data.astype(np.float32), rate_hz, sample_rate_hz, quality="HQ")
    return np.ascontiguousarray(data, dtype=np.float32)


def _problem(data: npt.NDArray[Any]) -> str | None:
    """What is wrong with a mono signal, if anything. Two reductions for a good one: this runs for every piece that a live caller pushes."""
    if data.ndim != 1 or data.dtype.kind != "f":
        return f"got an array of shape {data.shape} and type {data.dtype}; allowed is one channel [samples]"
    if data.size == 0:
        return "the audio holds no samples"
    peak = max(float(data.max()), -float(data.min()))  # NaN where any sample is
    if peak <= MAX_PEAK:
        return None
    if lost := int((~np.isfinite(data)).sum()):
        return f"{lost} samples are NaN or infinite"
    return f"a peak of {peak:.4g}; allowed is {MAX_PEAK:g}, full scale is 1 (divide 16-bit values by 32768)"


def _manifest_item(manifest: Path, number: int, data: Any) -> AudioItem:
    if not isinstance(data, dict) or not isinstance(data.get("audio_filepath"), str) or not data["audio_filepath"]:
        raise AudioError(manifest, 'a line must be an object with "audio_filepath"', number)
    duration, text = data.get("duration"), data.get("text")
    bad_number = isinstance(duration, bool) or not isinstance(duration, int | float) or not duration > 0
    if duration is not None and bad_number:
        raise AudioError(manifest, f'"duration" is {duration!r}; allowed is a positive number of seconds', number)
    if text is not None and not isinstance(text, str):
        raise AudioError(manifest, f'"text" is {text!r}; allowed is a string', number)
    offset = data.get("offset")
    if offset is not None and (
        isinstance(offset, bool) or not isinstance(offset, int | float) or not 0 <= offset < 1e9
    ):
        raise AudioError(manifest, f'"offset" is {offset!r}; allowed is a number of seconds from 0', number)
    path = Path(data["audio_filepath"])
    path = path if path.is_absolute() else manifest.parent / path
    return AudioItem(path, text, manifest, number, offset, duration)
