"""Benchmarks behind `workbench bench`: closed-loop throughput, paced runs and cost tables of a configured recogniser.

    record = bench_asr(config, ["clips/"], "stream", [1, 8, 16])

Closed-loop throughput (`bench asr`) says how much audio per second a recogniser chews when callers wait for their results; it says
nothing about latency, which only a paced run can (`bench paced`). One recogniser serves all levels, its batching sized for the highest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from workbench.config import Config, check_rows, replace, to_dict
from workbench.errors import ConfigError
from workbench.measure.compare import Compare, compare_batching, compare_nemo, sized_for
from workbench.measure.costs import measure_costs
from workbench.measure.offline_run import offline_cost_rows
from workbench.measure.paced import run_paced
from workbench.measure.progress import count_bar
from workbench.measure.steps import speech_clips
from workbench.model.load import load_configured
from workbench.model.speech import SHIPPED_SPEECH, AudioItem, find_audio
from workbench.results import Record, percentiles_ms
from workbench.runtime.recognizer import Recognizer
from workbench.runtime.transcribe import transcribe


def bench_asr(
    config: Config, audio: Sequence[str], mode: str, levels: Sequence[int], compare: Compare | None = None
) -> Record:
    """Run every recording at every level of concurrency. Rows: rtfx (audio seconds per second), utterances_per_s, mismatches against
    the first result of each input. `audio` empty: the shipped speech. Raises ConfigError for a wrong mode or level, AudioError if nothing can be used."""
    if mode not in ("stream", "offline"):
        raise ConfigError(f"--mode: got {mode!r}; allowed are stream and offline")
    if not levels or min(levels) < 1:
        raise ConfigError(f"--concurrency: got {list(levels)}; allowed are integers from 1")
    compare = compare or Compare()
    if mode == "offline" and (compare.batching or compare.nemo):
        raise ConfigError("--compare-batching and --compare-nemo: got --mode offline; allowed is --mode stream")
    found = find_audio(audio or [SHIPPED_SPEECH])
    skipped = [str(error) for error in found.errors]
    if not found.items:
        raise found.errors[0]
    loaded = load_configured(config.asr)
    with Recognizer(loaded, sized_for(config, max(levels))) as recognizer:
        recognizer.warm_up()
        first: dict[str, str] = {}
        rows: list[dict[str, Any]] = []
        for level in levels:
            rows.append(_level(recognizer, found.items, mode, level, first, skipped))
        stages = {stage.name: stage.snapshot() for stage in recognizer.stage_metrics()}
        record = Record(
            kind="bench",
            config=to_dict(recognizer.config),
            rows=rows,
            numbers={"clips": len(first), "mode": mode, "batch_cap": recognizer.batch_cap},
            counters={
                "skipped": sorted(set(skipped)),
                "step": recognizer.metrics.snapshot(),
                "stages": stages,
                "batch_cap_set_by": recognizer.batch_cap_set_by,
            },
            notes=list(loaded.notes),
        )
    if compare.batching:
        record.numbers.update(compare_batching(loaded, config, found.items, max(levels)))
    if compare.nemo:
        record.numbers.update(compare_nemo(loaded, config, found.items))
    return record


def paced_configured(config: Config, audio: Sequence[str] | None, progress: Callable[[float], None]) -> Record:
    """One paced run of `config.load` on a fresh recogniser. Raises ConfigError if its streams do not fit `state_arena_slots`."""
    check_rows(config)
    with Recognizer.open(config) as recognizer:
        clips = speech_clips(recognizer.loaded.geometry.sample_rate_hz, audio)
        recognizer.warm_up()
        return run_paced(recognizer, clips, config.load, progress)


def costs_configured(
    config: Config, batches: Sequence[int], repeats: int = 8, lengths_s: Sequence[float] = ()
) -> Record:
    """The cost table of a configured recogniser over the shipped speech; lengths_s: also of whole recordings of these lengths."""
    slots = max([*batches, config.asr.batching.state_arena_slots])
    with (
        Recognizer.open(replace(config, **{"asr.batching.state_arena_slots": slots})) as recognizer,
        count_bar("costs") as progress,
    ):
        clips = speech_clips(recognizer.loaded.geometry.sample_rate_hz)
        record = measure_costs(recognizer, clips, batches, repeats, progress)
        record.rows.extend(offline_cost_rows(recognizer, clips, batches, lengths_s) if lengths_s else [])
        return record


def _level(
    recognizer: Recognizer, items: Sequence[AudioItem], mode: str, level: int, first: dict[str, str], skipped: list[str]
) -> dict[str, Any]:
    results, took_s, walls = [], 0.0, []
    start_s = last_s = time.perf_counter()
    for path, text, duration_s, error in _results(recognizer, items, mode, level):
        now_s = time.perf_counter()
        walls.append(now_s - last_s)
        last_s = now_s
        if error is not None:
            skipped.append(error)
            continue
        results.append((path, text, duration_s))
    took_s = last_s - start_s
    mismatches = sum(first.setdefault(path, text) != text for path, text, _ in results)
    audio_s = sum(duration_s for _, _, duration_s in results)
    return {
        "concurrency": level,
        "rtfx": audio_s / took_s,
        "utterances_per_s": len(results) / took_s,
        "audio_s": round(audio_s, 3),
        "took_s": round(took_s, 4),
        "mismatches": mismatches,
        **percentiles_ms(walls, "between_results"),
    }


def _results(recognizer: Recognizer, items: Sequence[AudioItem], mode: str, level: int) -> Any:
    if mode == "stream":
        for row in transcribe(recognizer, items, level):
            yield row.path, row.text or "", row.duration_s, row.error
        return
    for row in recognizer.transcribe(items, level):
        yield row.path, row.text or "", row.duration_s, row.error
