"""Profile one steady step of a configured recogniser: front end, encoder, decoder, as live traffic runs it.

    record = profile_configured(config, batch=1, trace_path="runs/step.json.gz")

The streams are brought to full caches first; a step whose caches still fill has other work to do.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from workbench.config import Config, replace, to_dict
from workbench.measure.profile import StepWork, measure_ceilings, profile_steps, weight_bytes, with_achieved
from workbench.measure.steps import PreparedSteps, speech_clips
from workbench.results import Record
from workbench.runtime.recognizer import Recognizer


def profile_configured(config: Config, batch: int, trace_path: str | Path) -> Record:
    """Load the model and profile one steady step of `batch` streams."""
    slots = max(batch, config.asr.batching.state_arena_slots)
    with Recognizer.open(replace(config, **{"asr.batching.state_arena_slots": slots})) as recognizer:
        return profile_recognizer(recognizer, batch, trace_path)


def profile_recognizer(recognizer: Recognizer, batch: int, trace_path: str | Path) -> Record:
    """Profile one steady step of `batch` streams on an open recogniser."""
    clips = speech_clips(recognizer.loaded.geometry.sample_rate_hz)
    with PreparedSteps(recognizer, clips, batch) as steps:
        steps.fill()
        items = steps.items("steady")
        record = profile_steps(lambda: _step(recognizer, items), device=recognizer.loaded.device, trace_path=trace_path)
    # The least a step must move: every weight of the encoder once.
    work = StepWork(bytes_moved=weight_bytes(recognizer.loaded.model.encoder), flops=0.0)
    record = with_achieved(record, work, measure_ceilings(recognizer.loaded.device))
    return dataclasses.replace(
        record,
        config={**to_dict(recognizer.config), "profile": {**record.config, "batch": batch}},
        numbers={"batch": batch, "chunk_ms": recognizer.loaded.geometry.chunk_ms, **record.numbers},
        counters={**record.counters, "graphs": recognizer.graph_counters()},
        notes=[*recognizer.loaded.notes, *record.notes],
    )


def _step(recognizer: Recognizer, items: list) -> None:  # type: ignore[type-arg]
    recognizer.stage.run(items)
