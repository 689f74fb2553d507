"""What a capacity search can put under load: the configured recogniser, the resident engine, or NeMo's own loop (the twin needs nothing of this).

    with levels_in_process(EngineSpec("pipeline", config), rule) as run_at:      # the model stays loaded
        find_capacity(run_at, rule)
    find_capacity(levels_in_fresh_processes(spec, rule), rule)                   # a new process for every level

A level gets as many arena rows as its streams may hold. The collector's objects are frozen before the load (`gc.freeze`), since a full
collection over millions of objects stops every stream at once. A level gives up as soon as more chunks were late than the rule allows.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from workbench import errors
from workbench.config import Config, replace
from workbench.errors import ConfigError, LoadNotCarried
from workbench.measure.capacity import CapacityRule
from workbench.results import Record

ENGINES = ("pipeline", "nemo-loop", "resident")
RunAt = Callable[[int], Record]
ShownRunAt = Callable[..., Record]
_LEVEL_EXTRA_S = 600.0  # loading a model, capturing graphs and draining, beside the load itself


def _silent(seconds: float) -> None:
    """No progress shown."""


@dataclass(frozen=True)
class EngineSpec:
    """engine: one of `ENGINES`; audio: what streams speak, the shipped speech if None; decoder_graphs: whether NeMo's own loop uses
    NeMo's graph-captured decoder on CUDA, which is NeMo's default; most_rows: of the resident engine, allocated once for all levels of a
    process."""

    engine: str
    config: Config
    audio: tuple[str, ...] | None = None
    decoder_graphs: bool = True
    most_rows: int = 1

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"--engine: got {self.engine!r}; allowed are {', '.join(ENGINES)}")


def level_config(config: Config, rule: CapacityRule, streams: int) -> Config:
    """The configuration of one level: batching on, two arena rows a stream, the rule's load."""
    return replace(
        config,
        **{
            "asr.batching.enabled": True,
            "asr.batching.state_arena_slots": max(2 * streams, config.asr.batching.state_arena_slots),
            "load.streams": streams,
            "load.seconds": rule.seconds,
            "load.starts": rule.starts,
        },
    )


@contextmanager
def levels_in_process(spec: EngineSpec, rule: CapacityRule) -> Iterator[ShownRunAt]:
    """`run_at` in this process; the model is loaded once."""
    from workbench.measure.steps import speech_clips
    from workbench.model.load import load_configured

    loaded = load_configured(spec.config.asr)
    clips = speech_clips(loaded.geometry.sample_rate_hz, spec.audio)
    yield model_levels(spec, rule, loaded, clips)


def model_levels(spec: EngineSpec, rule: CapacityRule, loaded: Any, clips: Any) -> ShownRunAt:
    """`run_at(streams, progress)` on a loaded model; `progress` is called with the seconds played and may be left out."""
    run = _level_of(spec)

    def run_at(streams: int, progress: Callable[[float], None] = _silent) -> Record:
        config = level_config(spec.config, rule, streams)
        with still_collector():
            try:
                record = run(loaded, config, clips, rule, progress)
            except RuntimeError as error:
                if type(error).__name__ != "OutOfMemoryError":
                    raise
                raise LoadNotCarried(f"{streams} streams: the device is out of memory ({error})") from error
        return dataclasses.replace(record, notes=[*record.notes, "gc.freeze before the load"])

    return run_at


def levels_in_fresh_processes(spec: EngineSpec, rule: CapacityRule) -> RunAt:
    """`run_at` that starts a new process for every level; a process that dies is a failed level with its exit code."""

    def run_at(streams: int) -> Record:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(spec, rule, streams, theirs), daemon=True)
        child.start()
        theirs.close()
        try:
            if not ours.poll(rule.seconds + _LEVEL_EXTRA_S):
                raise LoadNotCarried(f"{streams} streams: no result after {rule.seconds + _LEVEL_EXTRA_S:.0f} s")
            return _unpacked(ours.recv())
        except EOFError:
            child.join(10)
            raise LoadNotCarried(f"{streams} streams: the process ended with exit code {child.exitcode}") from None
        finally:
            ours.close()
            child.terminate()
            child.join(10)

    return run_at


@contextmanager
def still_collector() -> Iterator[None]:
    """Everything that exists is taken out of the garbage collector's sight for a while."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


def _level_of(spec: EngineSpec) -> Callable[..., Record]:
    if spec.engine == "resident":
        from workbench.measure.resident_levels import ResidentLevels

        return ResidentLevels(spec.most_rows).level
    return partial(_nemo_level, spec.decoder_graphs) if spec.engine == "nemo-loop" else _pipeline_level


def _pipeline_level(loaded: Any, config: Config, clips: Any, rule: CapacityRule, progress: Any) -> Record:
    from workbench.measure.paced import PacedOptions, run_paced
    from workbench.runtime.recognizer import Recognizer

    options = PacedOptions(compare=False, most_late_share=rule.late_share_max)
    with Recognizer(loaded, config) as recognizer:
        recognizer.warm_up()
        gc.freeze()
        return run_paced(recognizer, clips, config.load, progress, options)


def _nemo_level(
    decoder_graphs: bool, loaded: Any, config: Config, clips: Any, rule: CapacityRule, progress: Any
) -> Record:
    from workbench.measure.nemo_loop import NemoLoop, nemo_model, run_nemo_loop
    from workbench.measure.paced import PacedOptions

    options = PacedOptions(most_late_share=rule.late_share_max)
    with nemo_model(loaded, config.asr.max_symbols, decoder_graphs and loaded.device != "cpu"):
        loop = NemoLoop(loaded, min(config.load.streams, config.asr.batching.max_batch_size))
        loop.warm_up(clips[0])
        gc.freeze()
        return run_nemo_loop(loop, clips, config, progress, options)


def _child(spec: EngineSpec, rule: CapacityRule, streams: int, sender: Any) -> None:
    """In the new process: one level, its record or its typed error sent back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears of Ctrl-C and ends this process
    try:
        with levels_in_process(spec, rule) as run_at:
            sender.send(("record", dataclasses.asdict(run_at(streams))))
    except (errors.InputError, errors.QueueFull, errors.ArenaFull, errors.StepTimeout) as error:
        sender.send((type(error).__name__, str(error)))


def _unpacked(message: tuple[str, Any]) -> Record:
    kind, content = message
    if kind == "record":
        return Record(**content)
    known = getattr(errors, kind)
    raise known(content, "") if known is errors.AudioError else known(content)
