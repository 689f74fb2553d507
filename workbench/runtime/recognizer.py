"""`Recognizer`: one model for many live streams and whole recordings, batched or not, with the same results.

    with Recognizer.open(config) as recognizer:
        with recognizer.stream() as stream:
            stream.push(piece); stream.step(); print(stream.finish()[-1].text)
        for row in recognizer.transcribe(find_audio(["clips/"]).items): print(row.path, row.text)
        print(table(recognizer.stage_metrics()))

With batching on, chunks of different streams meet in the pipeline that `asr.pipeline` names; off, every stream runs its chunks in its caller's
thread. Streams may be opened and driven from any number of threads and asyncio tasks.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from workbench.batching.buckets import checked_ladder, default_ladder
from workbench.batching.metrics import StageMetrics
from workbench.config import Config, effective_batch_cap
from workbench.errors import ConfigError, InputError, ModelError, StreamClosed
from workbench.model.load import LoadedModel, load_configured
from workbench.runtime.arena import StateArena
from workbench.runtime.encoding import RowEncoder, StepItem, StepResult, prompt_index
from workbench.runtime.frontend import AudioBuffer
from workbench.runtime.offline_batches import OfflineBatches, transcribe_offline
from workbench.runtime.pipelines import FusedPipeline, Pipeline, StagedPipeline
from workbench.runtime.resident_stage import ResidentRows, ResidentStage
from workbench.runtime.staged import StagedStage
from workbench.runtime.stages import FusedStage
from workbench.runtime.stream import MOST_WAITING_S, Event, Stream, StreamOptions
from workbench.runtime.text import Detokenizer
from workbench.runtime.workers import EXECUTION_SLOTS

if TYPE_CHECKING:
    from workbench.model.speech import AudioItem
    from workbench.runtime.transcribe import Transcript

__all__ = ["Event", "Recognizer", "Stream"]


class Recognizer:
    """One model, one arena and, with batching on, one pipeline."""

    def __init__(self, loaded: LoadedModel, config: Config, slots: int | None = None) -> None:
        batching = config.asr.batching
        # Where the host's cores are the device, a batch formed before the device is free is only a smaller batch.
        slots = slots or (1 if loaded.device == "cpu" else EXECUTION_SLOTS)
        self.loaded, self.config = loaded, config
        self.batch_cap, self.batch_cap_set_by = effective_batch_cap(batching)
        self.arena: StateArena | ResidentRows
        self.stage: FusedStage | StagedStage | ResidentStage
        if (resident := self._resident()) is not None:
            self.arena, self.stage = resident.arena, resident
        else:
            self.arena, self.stage = self._nemo()
        self.detokenizer = Detokenizer(loaded.model)
        self.closed = False
        self._open_streams: set[Stream] = set()
        self._lock = threading.Lock()
        self._alone = StageMetrics("step")
        self.offline = OfflineBatches(loaded, self.stage.device_lock, batching, self.batch_cap)
        self.pipeline: Pipeline | None = None
        if batching.enabled and isinstance(self.stage, StagedStage):
            self.pipeline = StagedPipeline(self.stage, batching, self.batch_cap, self.offline, slots)
        elif batching.enabled and not isinstance(self.stage, StagedStage):
            self.pipeline = FusedPipeline(self.stage, batching, self.batch_cap, self.offline, slots)

    @classmethod
    def open(cls, config: Config) -> Recognizer:
        """Load the configured model and make it ready. Raises ModelError or ConfigError."""
        return cls(load_configured(config.asr), config)

    def stream(
        self,
        on_event: Callable[[Event], None] | None = None,
        *,
        language: str | None = None,
        bias: npt.ArrayLike | None = None,
        coordinated: bool = False,
        most_waiting_s: float = MOST_WAITING_S,
    ) -> Stream:
        """Open a stream. Raises ArenaFull, StreamClosed, and InputError for a language or bias that the model cannot take.

        on_event: called for every event in the thread that completed it; language: of a prompted model; bias: [V], added to the scores of labels
        (not of blank) when one is chosen; coordinated: its chunks wait up to `ingress_cohort_delay_us` for those of other such streams;
        most_waiting_s: `push` refuses what is further ahead of the recogniser, so that all rows times this is the most that is ever owed.
        """
        if isinstance(most_waiting_s, bool) or not isinstance(most_waiting_s, int | float) or not most_waiting_s > 0:
            raise InputError(f"most_waiting_s: got {most_waiting_s!r}; allowed is more than 0 seconds")
        prompt = prompt_index(self.loaded.model, language)
        options = StreamOptions(on_event, prompt, self._bias(bias), coordinated, most_waiting_s)
        with self._lock:
            if self.closed:
                raise StreamClosed("the recogniser is closed")
            stream = Stream(self, self.arena.acquire(), options)
            self._open_streams.add(stream)
        if coordinated and self.pipeline is not None:
            self.pipeline.ingress.register(stream)
        return stream

    def transcribe(self, items: Iterable[AudioItem], concurrency: int | None = None) -> Iterator[Transcript]:
        """Whole recordings, recognised offline in batches; those beyond the model's position limit are streamed. Bad files become rows
        with an error. Rows come in the order of the items. concurrency: recordings in the works at once, the batch cap by default."""
        return transcribe_offline(self, items, concurrency)

    def run_alone(self, item: StepItem) -> StepResult:
        """One chunk in the caller's thread, past every queue."""
        start_s = _now()
        result = self.stage.run([item])[0]
        with self._lock:
            self._alone.dispatched("capacity", (0.0,), 1, 1)
            self._alone.finished(_now() - start_s)
        return result

    def release(self, stream: Stream) -> None:
        """Give a stream's row back; called by the stream once."""
        with self._lock:
            self._open_streams.discard(stream)
            self.arena.release(stream.row)

    @property
    def metrics(self) -> StageMetrics:
        """Metrics of the stage that every chunk passes exactly once: `step`, or `encoder` in the staged pipeline."""
        return self._alone if self.pipeline is None else self.pipeline.main_metrics

    def stage_metrics(self) -> list[StageMetrics]:
        """A consistent copy of the metrics of every stage, for `table`, `prometheus` and `StageMetrics.snapshot`."""
        if self.pipeline is None:
            with self._lock:
                return copy.deepcopy([self._alone, *self.offline.stages()])
        with self.pipeline.workers.changed:
            return copy.deepcopy([*self.pipeline.stages(), *self.offline.stages()])

    def graph_counters(self) -> dict[str, Any]:
        """Captured, replayed and eager steps of the graphed encoder, empty where it is off; of a resident engine, its own counts."""
        if isinstance(self.stage, ResidentStage):
            return self.stage.counters()
        from workbench.encoder.graphed import attached_step

        step = attached_step(self.loaded.model.encoder)
        return {} if step is None else step.counters.as_dict()

    @property
    def open_streams(self) -> int:
        """Streams that hold a row."""
        return len(self._open_streams)

    def warm_up(self, steps: int = 3) -> None:
        """Run a few steps of silence of every kind, past the queue, so that first-call costs are paid before traffic.

        Where the step is graphed, every batch size of the ladder is captured here. Call it before streams are open.
        """
        row = self.arena.acquire()
        try:
            if isinstance(self.stage, ResidentStage):
                self.stage.warm_up(self.batch_cap)
                self._silence(row, steps)
            else:
                self._warm_up_nemo(self.stage.encoder, row, steps)
        finally:
            self.arena.release(row)

    def _warm_up_nemo(self, encoder: RowEncoder, row: int, steps: int) -> None:
        ladder = encoder.ladder
        try:
            for size in ladder or (1,):
                encoder.ladder = None if ladder is None else (size,)
                # The second chunk comes once an utterance, and a shape is captured when it is seen again.
                for _ in range(1 if ladder is None else 2):
                    self._silence(row, steps)
        finally:
            encoder.ladder = ladder

    def _silence(self, row: int, steps: int) -> None:
        import numpy as np

        geometry = self.loaded.geometry
        buffer = AudioBuffer(geometry, self.stage.frontend.preemphasis, self.stage.frontend.n_fft)
        buffer.push(np.zeros(geometry.chunk_ready_samples(steps + 1) + geometry.hop_samples, np.float32))
        buffer.end()
        while (chunk := buffer.next_chunk()) is not None:
            self.stage.run([self.stage.item(row, chunk, buffer.peek(chunk))])
            buffer.consume(chunk)

    def close(self, timeout_s: float = 30.0) -> None:
        """Reject new work, complete what is queued, cancel what is open. Safe to call twice."""
        with self._lock:
            self.closed = True
            left = list(self._open_streams)
        if self.pipeline is not None:
            self.pipeline.workers.close(timeout_s)
        for stream in left:
            stream.cancel()

    def __enter__(self) -> Recognizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, note: str) -> None:
        self.loaded = dataclasses.replace(self.loaded, notes=(*self.loaded.notes, note))

    def _resident(self) -> ResidentStage | None:
        """The resident stage if it is wanted and this model has one; what was chosen is a note."""
        asr, loaded = self.config.asr, self.loaded
        if asr.encoder == "nemo":
            return None
        if asr.encoder == "auto" and (reason := self._why_not_auto()) is not None:
            self._note(f"asr.encoder: auto chose nemo, since {reason}")
            return None
        if asr.pipeline != "fused":
            raise ConfigError(f"asr.pipeline: got {asr.pipeline} with asr.encoder: resident; allowed is fused")
        rows = ResidentRows(asr.batching.state_arena_slots)
        try:
            # Without batching only a measurement runs more than one stream at a time: sizes for it, none of them warmed up.
            ladder = self._ladder() if asr.batching.enabled or asr.batch_buckets else default_ladder(rows.rows)
            stage = ResidentStage(loaded, rows, ladder, asr.weights)
        except ModelError as reason:
            if asr.weights != "native":
                raise ConfigError(
                    f"asr.weights: got {asr.weights} for a model that cannot run so ({reason}); allowed is native"
                ) from reason
            self._note(f"asr.encoder: nemo instead of resident, since {reason}")
            return None
        if asr.encoder == "auto" and not (found := stage.equality()).holds:
            self._note(
                f"asr.encoder: auto chose nemo, since the resident step differs by {found.relative_error:.1e} on this model "
                f"(allowed {found.allowed:.0e})"
            )
            return None
        self._note(
            f"asr.encoder: resident{', int8 weights' if asr.weights == 'int8' else ''}"
            if asr.encoder == "resident"
            else f"asr.encoder: auto chose resident, whose step differs from NeMo's by {found.relative_error:.1e} on this model (allowed {found.allowed:.0e})"
        )
        if asr.cuda_graphs:
            self._note("asr.cuda_graphs: no effect with asr.encoder: resident, whose steps are always captured on CUDA")
        return stage

    def _why_not_auto(self) -> str | None:
        """What speaks against the resident step before it is tried."""
        asr = self.config.asr
        if asr.pipeline != "fused":
            return f"asr.pipeline is {asr.pipeline}"
        if asr.cuda_graphs:
            return "asr.cuda_graphs asks for NeMo's own step as a graph"
        return "there is no CUDA here" if self.loaded.device == "cpu" else None

    def _nemo(self) -> tuple[StateArena, FusedStage | StagedStage]:
        """NeMo's step, graphed if that is wanted and possible, on an arena of its caches."""
        import torch

        asr = self.config.asr
        if asr.cuda_graphs and self.loaded.device == "cpu":
            self._note("asr.cuda_graphs: no CUDA here, every step runs eagerly")
        loaded = self.loaded
        ladder, staged = self._graphed_ladder(), asr.pipeline == "staged"
        arena = StateArena(
            loaded.model, asr.batching.state_arena_slots, loaded.device, getattr(torch, loaded.dtype),
            staged_frames=loaded.geometry.chunk_frames if staged else None,
        )  # fmt: skip
        return arena, (StagedStage if staged else FusedStage)(loaded, arena, ladder)

    def _ladder(self) -> tuple[int, ...]:
        sizes = self.config.asr.batch_buckets
        return checked_ladder(sizes, self.batch_cap) if sizes else default_ladder(self.batch_cap)

    def _graphed_ladder(self) -> tuple[int, ...] | None:
        """Graph the encoder if that is wanted and possible; the batch sizes that it then runs at."""
        ladder = self._ladder()
        if not self.config.asr.cuda_graphs or self.loaded.device == "cpu":
            return None
        from workbench.encoder.graphed import attached_step, find_encoder, native_setter, set_streaming_cuda_graphs

        if native_setter(find_encoder(self.loaded.model)) is not None:
            set_streaming_cuda_graphs(self.loaded.model, True, max_graphs=max(8, 3 * len(ladder)))
            return ladder
        # Per size a graph for the first chunk, the steady ones, and the second where that has a shape of its own. Those of an earlier
        # recogniser of this model go on to serve.
        needed, attached = max(8, 3 * len(ladder)), attached_step(self.loaded.model.encoder)
        if attached is None or attached.options.max_graphs < needed or not attached.options.first_chunk:
            set_streaming_cuda_graphs(self.loaded.model, True, max_graphs=needed, first_chunk=True)
        return ladder

    def _bias(self, bias: npt.ArrayLike | None) -> Any:
        if bias is None:
            return None
        if isinstance(self.stage, ResidentStage):
            raise ConfigError(
                "bias: got one with asr.encoder: resident, which takes none; allowed is asr.encoder: nemo"
            )
        import numpy as np
        import torch

        values, size = np.asarray(bias, np.float32), len(self.loaded.model.joint.vocabulary)
        if values.shape != (size,) or not np.isfinite(values).all():
            raise ConfigError(f"bias: got shape {values.shape}; allowed are {size} finite values, one per label")
        return torch.from_numpy(values).to(self.loaded.device)


def _now() -> float:
    import time

    return time.perf_counter()
