"""A resident engine under a capacity search: how many rows the device holds, and one engine for all levels.

    levels = ResidentLevels(most_rows=16384)
    record = levels.level(loaded, config, clips, rule, progress)     # config.load.streams streams

On CUDA the rows of the largest level, or as many as there is memory for, are allocated once, since capturing the graphs takes longer than a level. A
level beyond them raises DeviceMemoryError, which a search counts as failed. Elsewhere rows follow the level.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from workbench.batching.buckets import checked_ladder, default_ladder
from workbench.config import Config
from workbench.errors import DeviceMemoryError
from workbench.measure.capacity import CapacityRule
from workbench.measure.resident_load import ResidentOptions, run_resident
from workbench.model.load import LoadedModel
from workbench.results import Record
from workbench.runtime.resident_engine import ResidentEngine, row_bytes

MOST_BATCH = 256
# Beside rows and weights: graphs, activations of the largest batch, the library's workspaces.
RESERVE_BYTES = 4 << 30
COMPARE_CLIPS = 8


def engine_ladder(config: Config) -> tuple[int, ...]:
    """`asr.batch_buckets`, else powers of two up to `asr.batching.max_batch_size`, at most 256."""
    sizes = config.asr.batch_buckets
    return (
        checked_ladder(sizes, sizes[-1])
        if sizes
        else default_ladder(min(config.asr.batching.max_batch_size, MOST_BATCH))
    )


def rows_that_fit(loaded: LoadedModel) -> int:
    """Rows that the free memory of the CUDA device holds beside an engine's own copy of the weights and its graphs."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(torch.device(loaded.device))[0]
    weights = sum(p.numel() * p.element_size() for p in loaded.model.encoder.parameters())
    return max(0, (free - 2 * weights - RESERVE_BYTES) // row_bytes(loaded) - 1)


def allow_tf32(loaded: LoadedModel) -> tuple[str, ...]:
    """On CUDA, let fp32 products use TF32 in this process; the note that says so."""
    if loaded.device == "cpu" or loaded.dtype != "float32":
        return ()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    return ("fp32 with TF32 products",)


class ResidentLevels:
    """Levels of one search; `most_rows`: of its largest level."""

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self._engine: ResidentEngine | None = None

    def level(
        self, loaded: LoadedModel, config: Config, clips: Any, rule: CapacityRule, progress: Callable[[float], None]
    ) -> Record:
        """One run of `config.load`. Raises DeviceMemoryError where the device cannot hold a row for every stream."""
        notes = allow_tf32(loaded)
        engine = self._engine_for(loaded, config)
        gc.freeze()
        options = ResidentOptions(COMPARE_CLIPS, most_late_share=rule.late_share_max)
        record = run_resident(engine, clips, config, progress, options)
        record.notes.extend(notes)
        return record

    def _engine_for(self, loaded: LoadedModel, config: Config) -> ResidentEngine:
        streams = config.load.streams
        if self._engine is None or (self._engine.rows < streams and loaded.device == "cpu"):
            self._engine = None
            rows = streams if loaded.device == "cpu" else min(max(streams, self._most_rows), rows_that_fit(loaded))
            if rows >= streams:
                self._engine = ResidentEngine(
                    loaded, rows, engine_ladder(config), config.asr.max_symbols, config.asr.weights
                )
                self._engine.warm_up()
        if self._engine is None or self._engine.rows < streams:
            held = rows_that_fit(loaded) if self._engine is None else self._engine.rows
            raise DeviceMemoryError(
                f"load.streams: got {streams}; the GPU holds {held} rows of {row_bytes(loaded) / 2**20:.1f} MiB in {loaded.dtype}"
            )
        return self._engine
