"""The resident engine as a stage of the recogniser: whole steps of `StepItem`s, in place of NeMo's parts and their caches.

    stage = ResidentStage(loaded, ResidentRows(slots), ladder=(1, 2, 4, 8))
    results = stage.run(items)                     # as `FusedStage.run`: one StepResult per item, in their order

Rows are handed out by the same pure `SlotAllocator`; what they hold is never zeroed, since a stream's first chunk makes its row fresh inside the
step. A chunk that the end cut short is filled up to the full size, with its true mel frames beside it. Biased labels are not supported.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from workbench.batching.buckets import bucket_for
from workbench.batching.slots import SlotAllocator
from workbench.encoder.resident import ResidentEncoder
from workbench.encoder.resident_check import CHECK_ROWS, Equality, equality
from workbench.errors import ConfigError, ModelError
from workbench.geometry import Chunk
from workbench.model.load import LoadedModel
from workbench.model.speech import Samples
from workbench.runtime.arena import decoding_computer
from workbench.runtime.encoding import StepItem, StepResult, step_item
from workbench.runtime.resident_engine import Kind, ResidentEngine

DTYPES = ("float32", "bfloat16")


class ResidentRows:
    """`rows` rows of an engine, each with at most one owner."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._allocator = SlotAllocator(rows)
        self._lock = threading.Lock()  # callers acquire and release while a worker prepares a batch

    def acquire(self) -> int:
        """Take the lowest free row. Raises ArenaFull."""
        with self._lock:
            return self._allocator.acquire()

    def release(self, row: int) -> None:
        """Give a row back."""
        with self._lock:
            self._allocator.release(row)

    def left_over(self, rows: Sequence[int]) -> list[int]:
        """Those of these rows whose state is still an earlier owner's; each is named once."""
        with self._lock:
            return [row for start, stop in self._allocator.take_dirty(rows) for row in range(start, stop)]

    @property
    def used(self) -> int:
        """Rows taken now."""
        return self._allocator.in_use

    def snapshot(self) -> dict[str, int]:
        """Use of the rows as plain data."""
        with self._lock:
            return self._allocator.snapshot()


class ResidentStage:
    """Runs batches of `StepItem` on an engine; `ladder`: the batch sizes that it pads to; `weights`: `native` or `int8`. Raises ModelError for a
    model without a resident step."""

    def __init__(
        self, loaded: LoadedModel, arena: ResidentRows, ladder: tuple[int, ...], weights: str = "native"
    ) -> None:
        if loaded.dtype not in DTYPES:
            raise ModelError(f"no resident step in {loaded.dtype}; allowed are {', '.join(DTYPES)}")
        self.loaded, self.arena, self.geometry = loaded, arena, loaded.geometry
        max_symbols = decoding_computer(loaded.model).max_symbols
        self.engine = ResidentEngine(loaded, arena.rows, ladder, max_symbols, weights)
        self.frontend = self.engine.frontend
        self.device_lock = threading.Lock()

    def equality(self) -> Equality:
        """How far the resident step is from NeMo's on this model, tried on a small copy with rows of its own."""
        return equality(self.loaded.model.encoder, ResidentEncoder(self.loaded.model.encoder, rows=CHECK_ROWS))

    @property
    def encoder(self) -> ResidentEngine:
        """What pads batches: it has a `ladder` and counts `padded_rows`."""
        return self.engine

    def item(self, row: int, chunk: Chunk, block: Samples, **more: Any) -> StepItem:
        """Wrap one chunk with its compatibility key; `more` are further fields of `StepItem`."""
        return step_item(self.geometry, row, chunk, block, **more)

    def run(self, items: Sequence[StepItem]) -> list[StepResult]:
        """One step of every item; all keys must be equal. Results in the order of the items. Raises ConfigError for biased items."""
        key = items[0].key
        if key.has_bias:
            raise ConfigError(
                "bias: got one with asr.encoder: resident, which takes none; allowed is asr.encoder: nemo"
            )
        full = self.geometry.chunk(items[0].chunk.index)
        kind = (full.input_mel_frames, key.drop_encoded)
        rows = np.array([item.row for item in items])
        mel_frames = np.array([item.chunk.input_mel_frames for item in items])
        prompts = np.array([item.prompt for item in items])
        blocks = self._blocks(items, kind)
        left_over = self.arena.left_over(rows.tolist())
        with self.device_lock:
            if left_over and key.drop_encoded:  # not a first chunk, which would do it itself
                self.engine.reset(left_over)
            out = self.engine.step(rows, blocks, mel_frames, kind, prompts)
        return [
            StepResult(tuple(out.labels[n, :count].tolist()), tuple(out.frames[n, :count].tolist()))
            for n, count in enumerate(out.counts.tolist())
        ]

    def warm_up(self, most: int) -> None:
        """Capture every kind and the batch sizes that batches of up to `most` streams need, without touching any stream's row."""
        with self.device_lock:
            self.engine.warm_up(
                sizes=[size for size in self.engine.ladder if size <= bucket_for(most, self.engine.ladder)]
            )

    def counters(self) -> dict[str, int]:
        """What the engine did so far."""
        return {
            "captured": self.engine.captured,
            "padded_rows": self.engine.padded_rows,
            "extra_rounds": self.engine.extra_rounds,
        }

    def _blocks(self, items: Sequence[StepItem], kind: Kind) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Blocks [B, S] of the full size, zeros behind those that the end cut short."""
        blocks = np.zeros((len(items), self.engine.block_samples(kind)), np.float32)
        for position, item in enumerate(items):
            blocks[position, : item.block.size] = item.block
        return blocks
