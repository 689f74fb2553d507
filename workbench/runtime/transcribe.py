"""Transcribe recordings as streams, many at a time, and go on when one of them is bad.

    for row in transcribe(recognizer, find_audio(["clips/"]).items, concurrency=8):
        print(row.path, row.text or row.error)

Each recording is pushed as a live stream would be, so the text is the streaming text. Rows come in the order of the items.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.config import Config, to_dict
from workbench.errors import AudioError, QueueFull
from workbench.model.speech import AudioItem, Samples, read_audio
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer, Stream
from workbench.runtime.text import Word


@dataclass(frozen=True)
class Transcript:
    """One recording's result: text, or the error that kept it from being read. `differs_offline` only if compared; `words` with times
    only from offline recognition."""

    path: str
    duration_s: float
    text: str | None
    reference: str | None
    error: str | None = None
    differs_offline: bool | None = None
    words: tuple[Word, ...] = ()


def transcribe(
    recognizer: Recognizer,
    items: Iterable[AudioItem],
    concurrency: int = 1,
    compare_offline: bool = False,
    timeout_s: float = 600.0,
) -> Iterator[Transcript]:
    """Yield a `Transcript` per item, with up to `concurrency` streams open at once (more need batching to run together)."""
    pending: deque[tuple[AudioItem, Samples, Stream | None, AudioError | None]] = deque()
    window = max(1, min(concurrency, recognizer.arena.rows))
    for item in items:
        try:
            samples = read_audio(item, recognizer.loaded.geometry.sample_rate_hz, recognizer.config.asr.channel)
        except AudioError as error:
            pending.append((item, np.zeros(0, np.float32), None, error))
        else:
            while sum(stream is not None for _, _, stream, _ in pending) >= window:
                yield _collect(recognizer, pending.popleft(), compare_offline, timeout_s)
            pending.append((item, samples, _start(recognizer, samples), None))
    while pending:
        yield _collect(recognizer, pending.popleft(), compare_offline, timeout_s)


def word_errors(rows: Sequence[Transcript]) -> dict[str, float | int]:
    """Word error rate over the rows that have a reference, case and punctuation ignored: `wer`, `words`, `clips`."""
    import jiwer

    pairs = [(plain(row.reference), plain(row.text or "")) for row in rows if row.reference and row.error is None]
    pairs = [pair for pair in pairs if pair[0]]
    if not pairs:
        return {"clips": 0, "words": 0}
    measures = jiwer.process_words([r for r, _ in pairs], [h for _, h in pairs])
    words = measures.hits + measures.substitutions + measures.deletions
    return {"wer": round(measures.wer, 5), "words": words, "clips": len(pairs)}


def plain(text: str) -> str:
    """Lower case, apostrophes kept, other punctuation dropped, single spaces."""
    kept = "".join(ch if ch.isalnum() or ch in "' " else " " for ch in text.lower())
    return " ".join(kept.split())


def _start(recognizer: Recognizer, samples: Samples) -> Stream:
    stream = recognizer.stream()
    stream.push(samples)
    with contextlib.suppress(QueueFull):  # `_collect` submits again
        stream.end()
    return stream


def _collect(
    recognizer: Recognizer,
    entry: tuple[AudioItem, Samples, Stream | None, AudioError | None],
    compare: bool,
    timeout_s: float,
) -> Transcript:
    item, samples, stream, error = entry
    if stream is None:
        return Transcript(str(item.path), 0.0, None, item.text, str(error))
    if not stream.done:
        stream.finish(timeout_s)
    differs = None
    if compare:
        from workbench.runtime.offline import offline_labels

        with recognizer.stage.device_lock:
            differs = offline_labels(recognizer.loaded, samples) != stream.labels
    duration_s = samples.size / recognizer.loaded.geometry.sample_rate_hz
    return Transcript(str(item.path), round(duration_s, 3), stream.text, item.text, None, differs)


def transcript_record(
    config: Config, rows: Sequence[Transcript], errors: Sequence[str], notes: Sequence[str] = ()
) -> Record:
    """Rows and scores as one record; `skipped` in the counters lists every input that could not be used and why."""
    done = [row for row in rows if row.error is None]
    compared = [row for row in done if row.differs_offline is not None]
    numbers = {
        "transcribed": len(done),
        "audio_s": round(sum(row.duration_s for row in done), 3),
        **{f"wer_{name}" if name != "wer" else name: value for name, value in word_errors(rows).items()},
    }
    if compared:
        numbers |= {
            "offline_compared": len(compared),
            "offline_differences": sum(bool(row.differs_offline) for row in compared),
        }
    skipped = [*errors, *(row.error for row in rows if row.error is not None)]
    return Record(
        kind="transcripts",
        config=to_dict(config),
        numbers=numbers,
        rows=[{name: value for name, value in dataclasses.asdict(row).items() if name != "words"} for row in rows],
        counters={"skipped": skipped},
        notes=list(notes),
    )
