"""Greedy transducer decoding of one chunk as a walk that says which device operation it needs next (pure).

    walk = ChunkWalk(state, frames=2, max_symbols=10, blank=1024)
    walk.op()                               # ("joint", 2): label every remaining frame under the present predictor output
    walk.joined([1024, 7], None)            # blank, then label 7 at frame 1: emitted; what lies behind it was speculative
    walk.op()                               # ("predictor", 1): the next output, from the bank that the emission committed
    walk.predicted(); walk.op()             # ("joint", 1)

Why apart from the device: a batch of walks asks for different operations at different times, and the scheduler groups equal ones. The rules
are those of NeMo's greedy label-looping decoders for RNNT and TDT: at most `max_symbols` labels at one frame, then one frame on; a TDT blank
moves at least one frame; a TDT jump past the end of a chunk is carried into the next.

Banks: the predictor reads the LSTM state of bank `b` and writes bank `1 - b`. A blank leaves everything as it is; a label flips `b`, which
commits the state after the previous label at no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Op = tuple[str, int]


@dataclass
class WalkState:
    """What one stream's decoder carries from chunk to chunk on the host.

    bank: which bank the present predictor output was computed from; pending: a label emitted but not yet given to the predictor; jump: frames
    that a TDT label skipped beyond the end of the last chunk; decoded: encoder frames walked so far.
    """

    bank: int = 0
    pending: int | None = None
    jump: int = 0
    decoded: int = 0


class ChunkWalk:
    """The walk over `frames` encoder frames of one chunk; `labels` and their stream-wide `at_frames` are its result."""

    def __init__(self, state: WalkState, frames: int, max_symbols: int | None, blank: int) -> None:
        self.state, self.frames = state, frames
        self.labels: list[int] = []
        self.at_frames: list[int] = []
        self.time = state.jump
        self._max_symbols, self._blank = max_symbols, blank
        self._last_time, self._at_last_time = -1, 0
        self._finish_if_past_end()

    @property
    def finished(self) -> bool:
        """Whether the chunk is walked. A last label may still be pending: the next chunk begins with its predictor step."""
        return self.time >= self.frames

    def op(self) -> Op | None:
        """The operation needed next: ("predictor", bank to read), ("joint", remaining frames), or None when finished."""
        if self.finished:
            return None
        if self.state.pending is not None:
            return ("predictor", self.state.bank)
        return ("joint", self.frames - self.time)

    def predicted(self) -> None:
        """The predictor took the pending label."""
        self.state.pending = None

    def joined(self, labels: Sequence[int], durations: Sequence[int] | None) -> None:
        """Best labels, and for TDT durations, of all remaining frames: go on to the first label or to the end."""
        start = self.time
        while self.time < self.frames:
            label = labels[self.time - start]
            duration = 0 if durations is None else durations[self.time - start]
            if label == self._blank:
                self.time += max(1, duration)
            else:
                self._emit(label, duration)
                break
        self._finish_if_past_end()

    def _emit(self, label: int, duration: int) -> None:
        self._at_last_time = self._at_last_time + 1 if self.time == self._last_time else 1
        self._last_time = self.time
        self.labels.append(label)
        self.at_frames.append(self.state.decoded + self.time)
        self.state.pending = label
        self.state.bank = 1 - self.state.bank
        self.time += duration
        if duration == 0 and self._max_symbols is not None and self._at_last_time >= self._max_symbols:
            self.time += 1

    def _finish_if_past_end(self) -> None:
        if self.finished:
            self.state.jump = self.time - self.frames
            self.state.decoded += self.frames
