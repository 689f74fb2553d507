"""Parts of a sitting on a GPU host that measure the resident engine: its whole step, and how many live streams it carries.

    with in_dtype(loaded, "bfloat16") as half:
        step_rows(half, clips, batches=(1, 32))                # ms of a step from samples to labels, host and device apart

One model serves both precisions: its transducer is cast for the length of a part and afterwards every tensor is the one that it was.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from workbench.config import Config
from workbench.measure.capacity import CapacityRule, LevelRun, SearchPlan, find_capacity
from workbench.measure.capacity_engines import EngineSpec, model_levels
from workbench.measure.resident_levels import allow_tf32, rows_that_fit
from workbench.measure.resident_plan import SpokenClips
from workbench.model.load import LoadedModel
from workbench.model.speech import Samples
from workbench.results import Record, percentiles_ms
from workbench.runtime.encoding import prompt_index
from workbench.runtime.resident_engine import ResidentEngine

WARM_UP_STEPS = 10
REPLAYS = 50


@dataclass(frozen=True)
class Timing:
    """Seconds of each step: gathering blocks on the host, until it was under way, and from then until its labels were on the host."""

    gather_s: list[float]
    begin_s: list[float]
    wait_s: list[float]


@dataclass(frozen=True)
class ResidentSearch:
    """A capacity search of the resident engine; budget_s: no level starts later than this, the capture of the graphs included."""

    config: Config
    rule: CapacityRule
    plan: SearchPlan
    budget_s: float

    def run(
        self,
        loaded: LoadedModel,
        clips: Sequence[Samples],
        save: Callable[[Record], None],
        report: Callable[[str], None] = print,
    ) -> None:
        """Hand the record so far to `save` after every level and at the end; `runs_in_full` in its counters holds all numbers of every level."""
        stop_s, runs = time.perf_counter() + self.budget_s, list[dict[str, Any]]()
        plan = self.plan
        if loaded.device != "cpu":
            most = min(plan.most_streams, rows_that_fit(loaded))
            plan = dataclasses.replace(plan, start=min(plan.start, most), most_streams=most)

        def described(record: Record) -> Record:
            notes = [*record.notes, "all levels in one process, one run a level", *loaded.notes]
            return dataclasses.replace(record, notes=notes, counters={**record.counters, "runs_in_full": runs})

        def on_level(record: Record, level: LevelRun) -> None:
            report(f"resident {loaded.dtype}: {level.streams} {level.passed} {level.why} {level.numbers}")
            runs.append({"streams": level.streams, **level.numbers})
            save(described(record))

        spec = EngineSpec("resident", self.config, most_rows=plan.most_streams)
        run_at = model_levels(spec, self.rule, loaded, clips)
        save(described(find_capacity(run_at, self.rule, plan, on_level, lambda: time.perf_counter() < stop_s)))


@contextmanager
def in_dtype(loaded: LoadedModel, dtype: str) -> Iterator[LoadedModel]:
    """The model with what follows its front end in another data type; on leaving, its own tensors are put back."""
    if dtype == loaded.dtype:
        yield loaded
        return
    model = loaded.model
    parts = [model.encoder, model.decoder, model.joint, getattr(model, "prompt_kernel", None)]
    parts = [part for part in parts if part is not None]
    parameters = [(parameter, parameter.data) for part in parts for parameter in part.parameters()]
    owners = [module for part in parts for module in part.modules()]
    buffers = [(module, name, value) for module in owners for name, value in module._buffers.items()]
    try:
        for part in parts:
            part.to(getattr(torch, dtype))
        yield dataclasses.replace(loaded, dtype=dtype)
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for module, name, value in buffers:
            module._buffers[name] = value


def step_rows(
    loaded: LoadedModel, clips: Sequence[Samples], batches: Sequence[int], steps: int = 200, max_symbols: int = 2
) -> list[dict[str, Any]]:
    """A row per batch size: milliseconds of a steady step of that many streams of real speech, from blocks on the host to labels on the host.

    step = begin (the host's part until the step is under way) + wait (the device, the copy back, further rounds). graph: the captured graph alone,
    None without CUDA; outside_graph: what a step takes beyond it. gather: cutting the blocks out of the audio, which a loop does meanwhile.
    """
    notes = allow_tf32(loaded)
    engine = ResidentEngine(loaded, max(batches), tuple(sorted(batches)), max_symbols)
    engine.warm_up([engine.steady])
    rows = []
    for batch in batches:
        extra = engine.extra_rounds
        timing, labels = _timed_steps(engine, clips, batch, steps)
        whole_s = [begin + wait for begin, wait in zip(timing.begin_s, timing.wait_s, strict=True)]
        row = {
            "context": [loaded.geometry.left_frames, loaded.geometry.right_frames],
            "batch": batch,
            "dtype": loaded.dtype,
            "tf32": bool(notes),
            **percentiles_ms(whole_s, "step", (50, 95)),
            **percentiles_ms(timing.begin_s, "begin", (50,)),
            **percentiles_ms(timing.gather_s, "gather", (50,)),
            "graph_ms": _graph_ms(engine, batch),
            "labels_per_audio_s": labels / (batch * steps * loaded.geometry.chunk_s),
            "further_rounds_share": (engine.extra_rounds - extra) / (steps + WARM_UP_STEPS),
        }
        row["outside_graph_ms"] = None if row["graph_ms"] is None else row["step_p50_ms"] - row["graph_ms"]
        rows.append(row)
    return rows


def freed() -> None:
    """Give the memory of engines that are gone back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _timed_steps(engine: ResidentEngine, clips: Sequence[Samples], batch: int, steps: int) -> tuple[Timing, int]:
    """Steps in lock-step through all clips joined, every stream from a place of its own; the labels that were emitted."""
    geometry = engine.geometry
    speech = SpokenClips([np.concatenate(clips)], geometry, engine.frontend.preemphasis, engine.frontend.n_fft)
    blocks = engine.staging(engine.steady)[:batch]
    last = speech.samples.size - 2 * blocks.size(1)
    place = np.random.default_rng(0).integers(0, last, batch) // geometry.hop_samples * geometry.hop_samples
    rows, mel_frames = np.arange(batch), np.full(batch, engine.steady[0])
    prompts = np.full(batch, prompt_index(engine.loaded.model, None))
    engine.reset(rows)
    timing, labels = Timing([], [], []), 0
    for number in range(WARM_UP_STEPS + steps):
        start_s = time.perf_counter()
        speech.gather((place + number * geometry.chunk_samples) % last, blocks)
        gathered_s = time.perf_counter()
        flight = engine.start(rows, blocks, mel_frames, engine.steady, prompts)
        begun_s = time.perf_counter()
        out = engine.finish(flight)
        done_s = time.perf_counter()
        if number >= WARM_UP_STEPS:
            timing.gather_s.append(gathered_s - start_s)
            timing.begin_s.append(begun_s - gathered_s)
            timing.wait_s.append(done_s - begun_s)
            labels += int(out.counts.sum())
    return timing, labels


def _graph_ms(engine: ResidentEngine, batch: int) -> float | None:
    """Milliseconds of one bare replay, from many in a row."""
    replay: Callable[[], None] | None = engine.bare_replay(engine.steady, batch)
    if replay is None:
        return None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / REPLAYS
