"""Transcribe recordings as streams, many at a time, and go on when one of them is bad.

    for row in transcribe(recognizer, find_audio(["clips/"]).items, concurrency=8):
        print(row.path, row.text or row.error)

Each recording is pushed as a live stream would be, so the text is the streaming text. Rows come in the order of the items.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from workbench.config import Config, to_dict
from workbench.errors import AudioError, QueueFull, StepTimeout
from workbench.model.speech import AudioItem, Samples, read_audio
from workbench.results import Record
from workbench.runtime.recognizer import Event, Recognizer, Stream
from workbench.runtime.text import Word

_Pending = tuple[AudioItem, Samples, "Stream | None", "AudioError | None"]


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
    pending: deque[_Pending] = deque()
    window = StreamWindow(recognizer, concurrency, timeout_s)
    for item in items:
        try:
            samples = read_audio(item, recognizer.loaded.geometry.sample_rate_hz, recognizer.config.asr.channel)
        except AudioError as error:
            pending.append((item, np.zeros(0, np.float32), None, error))
        else:
            pending.append((item, samples, window.start(samples), None))
        while pending and (pending[0][2] is None or pending[0][2].done):
            yield _row(recognizer, pending.popleft(), compare_offline)
    for entry in pending:
        if entry[2] is not None:
            window.finish(entry[2])
        yield _row(recognizer, entry, compare_offline)


class StreamWindow:
    """Streams of whole recordings, at most `concurrency` of them open; the next begins when any of them ends."""

    def __init__(self, recognizer: Recognizer, concurrency: int, timeout_s: float = 600.0) -> None:
        self._recognizer, self._timeout_s = recognizer, timeout_s
        self._size = max(1, min(concurrency, recognizer.arena.rows))
        self._live: list[Stream] = []
        self._ended = threading.Event()

    def start(self, samples: Samples) -> Stream:
        """Wait for room, open a stream and give it the whole recording [S]. Raises StepTimeout, and what broke another stream."""
        self._wait(lambda: len(self._live) < self._size)
        stream = self._recognizer.stream(self._note)
        stream.push(samples)
        self._live.append(stream)
        with contextlib.suppress(QueueFull):  # `_wait` asks again
            stream.end()
        return stream

    def finish(self, stream: Stream) -> None:
        """Wait for the end of one of these streams."""
        self._wait(lambda: stream.done)

    def _note(self, event: Event) -> None:
        if event.kind == "final":
            self._ended.set()

    def _wait(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            for stream in self._live:
                if stream.error is not None:
                    raise stream.error
            self._live = [stream for stream in self._live if not stream.done]
            if reached():
                return
            if time.monotonic() > deadline:
                raise StepTimeout(f"no stream ended within {self._timeout_s} s")
            for stream in self._live:
                with contextlib.suppress(QueueFull):  # a stream that met a full queue asks again
                    stream.end()
            self._ended.wait(0.05)
            self._ended.clear()


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


def _row(recognizer: Recognizer, entry: _Pending, compare: bool) -> Transcript:
    item, samples, stream, error = entry
    if stream is None:
        return Transcript(str(item.path), 0.0, None, item.text, str(error))
    if stream.error is not None:
        raise stream.error
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
