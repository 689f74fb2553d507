"""A schedule as arrays that a loop without objects can play: where every chunk's block lies, of which kind it is, and what follows what.

    speech = SpokenClips(clips, geometry, preemphasis=0.97, n_fft=512)
    plan = LoadPlan.of(schedule, speech, geometry)
    speech.gather(plan.starts[rows], out)         # blocks [B, S] of rows of one kind, as AudioBuffer.peek gives them

All clips lie in one pre-emphasised array, each between zeros: half a window before it, a longest block behind it. So the block of any chunk is a
window of that array at a computed place; only the tail that the chunk may not see yet has to be zeroed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from workbench.geometry import StreamGeometry
from workbench.measure.loadgen import Schedule
from workbench.model.speech import Samples

Ints = NDArray[np.int64]
NO_WORK = -1


class SpokenClips:
    """Clips [S] at the model's rate in one array; `offsets[c]` is where the zeros before clip c begin."""

    def __init__(
        self, clips: Sequence[Samples], geometry: StreamGeometry, preemphasis: float | None, n_fft: int
    ) -> None:
        self.geometry, self.half = geometry, n_fft // 2
        longest = (geometry.steady_mel_frames - 1) * geometry.hop_samples + n_fft
        sizes = [self.half + clip.size + longest for clip in clips]
        self.offsets: Ints = np.cumsum([0, *sizes[:-1]])
        self.samples = np.zeros(sum(sizes), np.float32)
        for clip, offset in zip(clips, self.offsets.tolist(), strict=True):
            # What lies behind the window of the last frame of the clip belongs to no frame.
            seen = min(clip.size, geometry.samples_for_mel(geometry.mel_frames(clip.size)))
            self.samples[offset + self.half : offset + self.half + seen] = _sharpened(clip, preemphasis)[:seen]
        self._flat = torch.from_numpy(self.samples)

    def gather(self, starts: Ints, out: torch.Tensor) -> None:
        """Fill `out` [B, S] with the windows at `starts`, their unseen tails zeroed."""
        size = out.size(1)
        windows = self._flat.as_strided((self._flat.numel() - size + 1, size), (1, 1))
        torch.index_select(windows, 0, torch.from_numpy(starts), out=out)
        out[:, size - (self.half - self.geometry.right_samples) :].zero_()


@dataclass(frozen=True)
class LoadPlan:
    """Columns by row of the schedule.

    kinds: (mel frames, frames dropped) of each kind; kind: number of a row's kind, `NO_WORK` where the end left nothing to compute; starts: of the
    block in the clips' array; seen: samples of the block that exist, where that is less than the array has (a clip that the load's end cut), else
    -1; following: the next row of the same stream, -1 for its last; first_of_stream: rows without a row before them.
    """

    kinds: tuple[tuple[int, int], ...]
    kind: Ints
    starts: Ints
    mel_frames: Ints
    seen: Ints
    following: Ints
    first_of_stream: NDArray[np.bool_]

    @classmethod
    def of(cls, schedule: Schedule, speech: SpokenClips, geometry: StreamGeometry) -> LoadPlan:
        """The plan of a whole schedule."""
        chunks = [geometry.chunk(index) for index in range(int(schedule.chunk_index.max()) + 1)]
        found = [(c.input_mel_frames, c.drop_encoded) for c in chunks]
        kinds = tuple(dict.fromkeys(found))
        of_chunk = np.asarray([kinds.index(kind) for kind in found], np.int64)
        begin = np.asarray([(c.start_mel - c.history_mel) * geometry.hop_samples for c in chunks], np.int64)
        clip = np.asarray([u.clip for u in schedule.utterances], np.int64)[schedule.utterance]
        index, works = schedule.chunk_index, schedule.mel_frames > 0
        following, first = _neighbours(schedule)
        # Of a clip that the load's end cut, the array goes on: what was not spoken, and what no frame sees, must read as zeros.
        spoken = np.minimum(
            schedule.stop_samples, _window_end(begin[index] // geometry.hop_samples + schedule.mel_frames, geometry)
        )
        cut = np.asarray([u.cut for u in schedule.utterances], bool)[schedule.utterance]
        return cls(
            kinds=kinds,
            kind=np.where(works, of_chunk[index], NO_WORK),
            starts=speech.offsets[clip] + begin[index],
            mel_frames=schedule.mel_frames,
            seen=np.where(cut & schedule.final & works, spoken - begin[index] + speech.half, -1),
            following=following,
            first_of_stream=first,
        )


def _window_end(stop_mel: Ints, geometry: StreamGeometry) -> Ints:
    """`StreamGeometry.samples_for_mel` of an array."""
    return (stop_mel - 1) * geometry.hop_samples + geometry.right_samples


def _sharpened(clip: Samples, preemphasis: float | None) -> Samples:
    if not preemphasis or clip.size == 0:
        return clip
    before = np.concatenate((np.zeros(1, np.float32), clip[:-1]))
    return clip - np.float32(preemphasis) * before


def _neighbours(schedule: Schedule) -> tuple[Ints, NDArray[np.bool_]]:
    """For each row the next one of its stream, and whether it is its stream's first."""
    order = np.argsort(schedule.stream, kind="stable")
    same = schedule.stream[order[1:]] == schedule.stream[order[:-1]]
    following = np.full(len(schedule), -1, np.int64)
    following[order[:-1][same]] = order[1:][same]
    first = np.ones(len(schedule), bool)
    first[order[1:][same]] = False
    return following, first


class Lane:
    """Rows of one kind that are ready: those whose blocks are gathered, up to a full batch, and those behind them, the oldest first.

    buffers: two [most, S] on the host; while one is read by a step under way the other is filled.
    """

    def __init__(self, plan: LoadPlan, speech: SpokenClips, number: int, buffers: list[torch.Tensor]) -> None:
        self.kind, self._plan, self._speech = plan.kinds[number], plan, speech
        self._buffers, self._most = buffers, buffers[0].size(0)
        self._rows: Ints = np.zeros(self._most, np.int64)
        self._behind: Ints = np.zeros(0, np.int64)
        self._staged = 0

    @property
    def size(self) -> int:
        """Rows ready."""
        return self._staged + self._behind.size

    def head(self) -> int:
        """The row that has been due longest; rows are numbered in the order in which they are due."""
        return min(int(rows.min()) for rows in (self._rows[: self._staged], self._behind[:1]) if rows.size)

    def offer(self, rows: Ints) -> None:
        """Add rows."""
        if rows.size:
            self._behind = np.sort(np.concatenate((self._behind, rows)))

    def stage(self) -> None:
        """Gather blocks while the batch has room."""
        count = min(self._most - self._staged, self._behind.size)
        if count == 0:
            return
        rows, self._behind = self._behind[:count], self._behind[count:]
        stop = self._staged + count
        out = self._buffers[0][self._staged : stop]
        self._speech.gather(self._plan.starts[rows], out)
        seen = self._plan.seen[rows]
        for position in np.flatnonzero(seen >= 0).tolist():  # once a stream: where the load's end cuts its last clip
            out[position, int(seen[position]) :] = 0
        self._rows[self._staged : stop] = rows
        self._staged = stop

    def take(self) -> tuple[Ints, torch.Tensor]:
        """The batch: rows [B] and their blocks [B, S], which stay as they are until the next batch was taken."""
        self.stage()
        rows, blocks = self._rows[: self._staged].copy(), self._buffers[0][: self._staged]
        self._buffers.reverse()
        self._staged = 0
        return rows, blocks
