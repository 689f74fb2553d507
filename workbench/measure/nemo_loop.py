"""The yardstick of a capacity claim: NeMo's own `conformer_stream_step` in a loop over all streams that have a chunk due.

    with nemo_model(loaded, max_symbols=10, decoder_graphs=True):
        record = run_nemo_loop(NemoLoop(loaded, 256), clips, config)     # plays config.load; the names of a paced run

This is the loop that a careful user of NeMo writes: as soon as it is free it takes every stream whose next chunk is due and of the same shape as the
oldest, concatenates their caches, calls the step once, and splits the caches again, as NeMo's example of cache-aware streaming does. The encoder runs
eagerly, NeMo's decoder with its CUDA graphs as is its default, and chunks cut by the end are filled up so that they can join. It has no queue
and no thread: a chunk counts as sent when it was due. Latency is that of a paced run, completion minus due time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from workbench.batching.metrics import StageMetrics
from workbench.config import Config
from workbench.encoder.graphed import set_streaming_cuda_graphs
from workbench.errors import LoadNotCarried
from workbench.measure.loadgen import Schedule, build_schedule, run_record
from workbench.measure.paced import PacedOptions
from workbench.model.load import LoadedModel, set_decoding
from workbench.model.speech import Samples
from workbench.results import Record
from workbench.runtime.encoding import StepItem, StepKey, step_item
from workbench.runtime.frontend import AudioBuffer, MelFrontend

NOTE = "engine: NeMo's conformer_stream_step in a loop over all streams with a chunk due, caches concatenated, encoder eager"
_LEAD_S = 0.05
Caches = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Speaker:
    """One utterance in the loop: its chunks, and what NeMo's step carries from one to the next."""

    buffer: AudioBuffer
    caches: Caches | None = None
    hypothesis: Any = None


class NemoLoop:
    """The model with NeMo's own step; `max_batch_size` streams at most in one call."""

    def __init__(self, loaded: LoadedModel, max_batch_size: int) -> None:
        self.loaded, self.max_batch_size = loaded, max_batch_size
        self._frontend = MelFrontend(loaded.model.preprocessor.featurizer, loaded.device)
        self._dtype = getattr(torch, loaded.dtype)

    def speaker(self, samples: Samples) -> Speaker:
        """A new utterance [S]."""
        buffer = AudioBuffer(self.loaded.geometry, self._frontend.preemphasis, self._frontend.n_fft)
        buffer.push(samples)
        buffer.end()
        return Speaker(buffer)

    def item(self, speaker: Speaker) -> StepItem:
        """The next chunk of an utterance, filled up to its full length."""
        chunk = speaker.buffer.next_chunk()
        assert chunk is not None
        item = step_item(self.loaded.geometry, 0, chunk, speaker.buffer.peek(chunk), extend=True)
        speaker.buffer.consume(chunk)
        return item

    @torch.inference_mode()
    def step(self, speakers: Sequence[Speaker], items: Sequence[StepItem]) -> None:
        """One call of NeMo's step for utterances whose next chunks have one key, and a synchronisation."""
        model, device = self.loaded.model, self.loaded.device
        mel_BFT = self._frontend(torch.from_numpy(np.stack([item.block for item in items])))
        lengths = [item.chunk.input_mel_frames for item in items]
        for row, length in enumerate(lengths):
            mel_BFT[row, :, length:] = 0
        channel, time_, length_B = self._joined(speakers)
        _, _, *caches, hypotheses = model.conformer_stream_step(
            processed_signal=mel_BFT.to(self._dtype),
            processed_signal_length=torch.tensor(lengths, device=device),
            cache_last_channel=channel,
            cache_last_time=time_,
            cache_last_channel_len=length_B,
            keep_all_outputs=False,
            previous_hypotheses=None if speakers[0].hypothesis is None else [s.hypothesis for s in speakers],
            drop_extra_pre_encoded=items[0].key.drop_encoded,
            return_transcription=True,
        )
        split = zip(caches[0].split(1, 1), caches[1].split(1, 1), caches[2].split(1), hypotheses, strict=True)
        for speaker, (one_channel, one_time, one_length, hypothesis) in zip(speakers, split, strict=True):
            speaker.caches, speaker.hypothesis = (one_channel, one_time, one_length), hypothesis
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)

    def _joined(self, speakers: Sequence[Speaker]) -> Caches:
        kept = [speaker.caches for speaker in speakers if speaker.caches is not None]
        if not kept:
            encoder = self.loaded.model.encoder
            fresh = encoder.get_initial_cache_state(
                batch_size=len(speakers), dtype=self._dtype, device=torch.device(self.loaded.device)
            )
            return (fresh[0], fresh[1], fresh[2])
        channels, times, lengths = zip(*kept, strict=True)
        return torch.cat(channels, 1), torch.cat(times, 1), torch.cat(lengths)

    def warm_up(self, clip: Samples, chunks: int = 4) -> None:
        """Step the largest batch and a lone stream, so that first-call costs and the decoder's capture are paid before traffic."""
        for batch in (self.max_batch_size, 1, 2):
            speakers = [self.speaker(clip) for _ in range(batch)]
            for _ in range(chunks):
                if speakers[0].buffer.next_chunk() is not None:
                    self.step(speakers, [self.item(speaker) for speaker in speakers])


def run_nemo_loop(
    loop: NemoLoop,
    clips: Sequence[Samples],
    config: Config,
    progress: Callable[[float], None] = lambda seconds: None,
    options: PacedOptions | None = None,
) -> Record:
    """Play `config.load` on NeMo's own loop; the record has the names of a paced run. Raises LoadNotCarried where it was given up."""
    schedule = build_schedule(config.load, loop.loaded.geometry, [clip.size for clip in clips])
    run = _Run(loop, schedule, clips, options or PacedOptions())
    run.play(progress)
    times_s = (schedule.due_s, run.completed_s)
    record = run_record("paced", Config(asr=config.asr, load=config.load), schedule, times_s, run.metrics.snapshot())
    record.notes.extend([*loop.loaded.notes, NOTE])
    return record


@contextmanager
def nemo_model(loaded: LoadedModel, max_symbols: int, decoder_graphs: bool) -> Iterator[LoadedModel]:
    """The model as NeMo runs it, without our graphed step and with NeMo's decoder graphs; afterwards as our recogniser needs it."""
    set_streaming_cuda_graphs(loaded.model, False)
    set_decoding(loaded.model, max_symbols, decoder_graphs=decoder_graphs)
    try:
        yield loaded
    finally:
        set_decoding(loaded.model, max_symbols)


class _Run:
    """One playing of a schedule; times are seconds on the schedule's axis."""

    def __init__(self, loop: NemoLoop, schedule: Schedule, clips: Sequence[Samples], options: PacedOptions) -> None:
        self._loop, self._schedule, self._clips = loop, schedule, clips
        self.completed_s = np.full(len(schedule), np.nan)
        self.metrics = StageMetrics("step")
        self._due_s: list[float] = schedule.due_s.tolist()
        self._utterance: list[int] = schedule.utterance.tolist()
        self._speakers: dict[int, Speaker] = {}
        self._backlog: dict[int, deque[int]] = {}  # rows of an utterance that wait for the chunk before them
        self._ready: dict[StepKey, deque[tuple[int, StepItem]]] = {}
        self._late, self._most_late = 0, int(options.most_late_share * len(schedule))
        self._stop_s = schedule.seconds + options.drain_timeout_s

    def play(self, progress: Callable[[float], None]) -> None:
        """Run until every row has completed."""
        origin_s = time.perf_counter() + _LEAD_S
        rows, row, reported_s = len(self._due_s), 0, 0.0
        while row < rows or self._ready:
            now_s = time.perf_counter() - origin_s
            while row < rows and self._due_s[row] <= now_s:
                self._arrive(row, now_s)
                row += 1
            if self._ready:
                self._step(now_s, origin_s)
            elif row < rows:
                time.sleep(max(0.0, self._due_s[row] - (time.perf_counter() - origin_s)))
            self._check(now_s)
            if now_s - reported_s > 0.2:
                reported_s = now_s
                progress(now_s)

    def _arrive(self, row: int, now_s: float) -> None:
        utterance = self._utterance[row]
        waiting = self._backlog.get(utterance)
        if waiting is not None:
            waiting.append(row)
            return
        self._backlog[utterance] = deque()
        self._next(row, utterance, now_s)

    def _next(self, row: int, utterance: int, now_s: float) -> None:
        """The chunk of a row becomes ready; an end with nothing left to compute is done at once, and so is its utterance."""
        if not self._schedule.mel_frames[row]:
            self._done(row, now_s)
            del self._backlog[utterance]
            self._speakers.pop(utterance, None)
            return
        speaker = self._speakers.get(utterance)
        if speaker is None:
            spoken = self._schedule.utterances[utterance]
            speaker = self._speakers[utterance] = self._loop.speaker(self._clips[spoken.clip][: spoken.samples])
        item = self._loop.item(speaker)
        self._ready.setdefault(item.key, deque()).append((row, item))

    def _step(self, now_s: float, origin_s: float) -> None:
        """One step of the kind whose oldest chunk has waited longest."""
        key = min(self._ready, key=lambda key: self._due_s[self._ready[key][0][0]])
        queue = self._ready[key]
        compatible, ready = len(queue), sum(map(len, self._ready.values()))
        taken = [queue.popleft() for _ in range(min(compatible, self._loop.max_batch_size))]
        if not queue:
            del self._ready[key]
        waited_s = tuple(now_s - self._due_s[row] for row, _ in taken)
        self.metrics.dispatched("drain", waited_s, compatible, ready)
        utterances = [self._utterance[row] for row, _ in taken]
        self._loop.step([self._speakers[utterance] for utterance in utterances], [item for _, item in taken])
        done_s = time.perf_counter() - origin_s
        self.metrics.finished(done_s - now_s)
        for (row, _), utterance in zip(taken, utterances, strict=True):
            self._done(row, done_s)
            waiting = self._backlog[utterance]
            if waiting:
                self._next(waiting.popleft(), utterance, done_s)
            else:
                del self._backlog[utterance]
            if self._schedule.final[row]:
                self._speakers.pop(utterance, None)

    def _done(self, row: int, now_s: float) -> None:
        self.completed_s[row] = now_s
        self._late += now_s - self._due_s[row] > self._schedule.chunk_s

    def _check(self, now_s: float) -> None:
        if self._late > self._most_late or now_s > self._stop_s:
            raise LoadNotCarried(
                f"load: {self._late} of {len(self._due_s)} chunks were late by one chunk after {now_s:.1f} s of "
                f"{self._schedule.seconds:g} s; allowed are {self._most_late}"
            )
