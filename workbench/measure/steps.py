"""Steps with a known state, for profiles and cost tables: `batch` streams of real speech brought to where every cache is full.

    with PreparedSteps(recognizer, clips, batch=8) as steps:
        steps.fill()            # run until the attention caches are full
        steps.run("steady")     # one step of all 8 streams, state moving on

Kinds of step differ in shape: `first` (no history), `second` (short history), `steady`, and `cut` (the last chunk, cut by the end).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

import numpy as np

from workbench.errors import AudioError, ConfigError
from workbench.geometry import Chunk
from workbench.model.speech import SHIPPED_SPEECH, Samples, find_audio, read_audio
from workbench.runtime.frontend import AudioBuffer
from workbench.runtime.recognizer import Recognizer
from workbench.runtime.stages import StepItem, StepResult

Kind = Literal["first", "second", "steady", "cut"]
KINDS: tuple[Kind, ...] = ("first", "second", "steady", "cut")


class PreparedSteps:
    """`batch` arena rows and, for each kind of step, blocks cut from real speech."""

    def __init__(self, recognizer: Recognizer, clips: Sequence[Samples], batch: int) -> None:
        if batch < 1 or not clips:
            raise ConfigError(f"steps: got batch {batch} and {len(clips)} clips; both must be at least 1")
        self.recognizer, self.batch, self._clips = recognizer, batch, clips
        self._rows = [recognizer.arena.acquire() for _ in range(batch)]
        self._variant = 0

    def run(self, kind: Kind = "steady") -> list[StepResult]:
        """One step of all rows. Successive calls take successive pieces of speech, so that the decoder has something to say."""
        self._variant += 1
        return self.recognizer.stage.run(self.items(kind))

    def items(self, kind: Kind, batch: int | None = None) -> list[StepItem]:
        """The work of one step of the first `batch` rows (all by default)."""
        stage, geometry = self.recognizer.stage, self.recognizer.loaded.geometry
        chunk = {
            "first": geometry.chunk(0),
            "second": geometry.chunk(1),
            "steady": geometry.chunk(2),
            "cut": geometry.chunk(2, stop_mel=geometry.mel_start(2) + max(1, geometry.next_mel_frames // 2)),
        }[kind]
        return [stage.item(row, chunk, self._block(chunk, position)) for position, row in enumerate(self._rows[:batch])]

    def fill(self) -> None:
        """Bring every row to the steady state with full attention caches."""
        geometry = self.recognizer.loaded.geometry
        self.run("first")
        self.run("second")
        for _ in range(-(-geometry.left_frames // geometry.chunk_frames)):
            self.run("steady")

    def close(self) -> None:
        """Give the rows back."""
        for row in self._rows:
            self.recognizer.arena.release(row)
        self._rows = []

    def __enter__(self) -> PreparedSteps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _block(self, chunk: Chunk, position: int) -> Samples:
        geometry, frontend = self.recognizer.loaded.geometry, self.recognizer.stage.frontend
        buffer = AudioBuffer(geometry, frontend.preemphasis, frontend.n_fft)
        clip = self._clips[position % len(self._clips)]
        needed = geometry.samples_for_mel(chunk.stop_mel) + frontend.n_fft
        shift = (self._variant * geometry.chunk_samples) % max(1, clip.size)
        buffer.push(np.resize(np.roll(clip, -shift), needed))
        return buffer.peek(chunk)


def speech_clips(sample_rate_hz: int, sources: Sequence[str] | None = None, limit: int = 64) -> list[Samples]:
    """Decoded recordings: those of `sources`, or the shipped speech. Raises the first error if none of them can be used."""
    found = find_audio(sources or [str(SHIPPED_SPEECH)])
    clips: list[Samples] = []
    errors: list[AudioError] = list(found.errors)
    for item in found.items[:limit]:
        try:
            clips.append(read_audio(item, sample_rate_hz))
        except AudioError as error:
            errors.append(error)
    for error in errors if clips else ():
        print(f"skipped: {error}", file=sys.stderr)
    if not clips:
        raise errors[0] if errors else ConfigError("audio: nothing was given")
    return clips
