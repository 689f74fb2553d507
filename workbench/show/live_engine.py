"""The measured side of the live panel: a paced load in a process of its own, steered and reported by lines of JSON.

    python -m workbench.show.live_engine
    in:   {"config": {"asr": {…}, "load": {"streams": 4}}}      first line: the whole configuration
          {"load.streams": 8, "asr.batching.max_batch_size": 4} later lines: dotted keys to change
    out:  {"kind": "tick", "time_s": 2.5, "latency_ms": […], "batch_sizes": {"2": 5}, "open": 3, "idle_share": 0.4, …}

Why a process: a load generator beside a notebook's kernel would be late whenever the kernel works. The end of its input ends it, so it cannot
outlive whoever started it. A change of the knobs starts a new pipeline on the model that is loaded already; streams begin anew.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from workbench.config import Config, load_config, replace
from workbench.errors import ArenaFull, InputError, QueueFull
from workbench.measure.loadgen import Schedule, build_schedule

TICK_S = 0.25
SEGMENT_S = 300.0
# Utterances that ended but are not done keep their row: room for a backlog, after which new ones are refused and counted.
ROWS_PER_STREAM = 4

Emit = Callable[[dict[str, Any]], None]
Commands = queue.SimpleQueue  # of dicts; None is the end


def serve(commands: Commands[dict[str, Any] | None], emit: Emit) -> None:
    """Play until the commands end. Raises InputError for a configuration that cannot run."""
    first = commands.get()
    if first is None:
        return
    config: Config | None = load_config(first["config"])
    assert config is not None
    from workbench.measure.steps import speech_clips
    from workbench.model.load import load_configured

    loaded = load_configured(config.asr)
    clips = speech_clips(loaded.geometry.sample_rate_hz)
    emit({"kind": "ready", "chunk_ms": loaded.geometry.chunk_ms, "device": loaded.device, "model": loaded.name})
    while config is not None:
        config = _play(loaded, clips, config, commands, emit)


def _play(loaded: Any, clips: Sequence[Any], config: Config, commands: Any, emit: Emit) -> Config | None:
    """One pipeline until a command comes (the changed configuration), the segment ends (another seed) or the commands end (None)."""
    slots = ROWS_PER_STREAM * config.load.streams
    config = replace(config, **{"asr.batching.state_arena_slots": slots, "load.seconds": SEGMENT_S})
    play = LivePlay(loaded, clips, config)
    next_tick_s = TICK_S
    try:
        for row, due_s in enumerate(play.schedule.due_s.tolist()):
            while True:
                now_s = play.now_s()
                if now_s >= next_tick_s:
                    emit(play.tick())
                    next_tick_s = now_s + TICK_S
                try:  # the wait for the next row, or tick, is the wait for a command
                    command = commands.get(timeout=max(0.0, min(due_s, next_tick_s) - now_s))
                except queue.Empty:
                    if play.now_s() >= due_s:
                        break
                else:
                    return None if command is None else replace(config, **command)
            play.send(row)
        return replace(config, **{"load.seed": config.load.seed + 1})
    finally:
        play.close()


class LivePlay:
    """A recogniser with its load; times are seconds since the start."""

    def __init__(self, loaded: Any, clips: Sequence[Any], config: Config) -> None:
        from workbench.runtime.recognizer import Recognizer

        self.recognizer = Recognizer(loaded, config)
        self.recognizer.warm_up(1)
        self.schedule: Schedule = build_schedule(config.load, loaded.geometry, [clip.size for clip in clips])
        self._config, self._clips = config, clips
        self._due_s = _due_times(self.schedule)
        self._streams: dict[int, Any] = {}
        self._pushed: dict[int, int] = {}
        self._dropped: set[int] = set()
        self._latency_ms: deque[float] = deque()  # filled by the worker's threads: appending is atomic
        self._late_ms: deque[float] = deque()
        self.sent = self.done = self.refused = 0
        self._sizes: dict[int, int] = {}
        self._busy_s, self._ticked_s = 0.0, 0.0
        self._start_s = time.perf_counter()

    def now_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._start_s

    def send(self, row: int) -> None:
        """Push what was spoken by now; an utterance that finds no room is refused as a whole and counted."""
        schedule = self.schedule
        utterance, final = int(schedule.utterance[row]), bool(schedule.final[row])
        if utterance in self._dropped:
            return
        self._late_ms.append((self.now_s() - float(schedule.due_s[row])) * 1e3)
        try:
            stream = self._streams.get(utterance)
            if stream is None:
                stream = self.recognizer.stream(lambda event: self._note(utterance, event))
                self._streams[utterance] = stream
            clip = self._clips[schedule.utterances[utterance].clip]
            stop = int(schedule.stop_samples[row])
            stream.push(clip[self._pushed.get(utterance, 0) : stop])
            self._pushed[utterance] = stop
            self.sent += 1
            if final:
                del self._streams[utterance]
                stream.end()
            else:
                stream.submit()
        except (QueueFull, ArenaFull):
            self.refused += 1
            self._dropped.add(utterance)
            if stream is not None:
                stream.cancel()

    def tick(self) -> dict[str, Any]:
        """What happened since the last tick, as plain data."""
        now_s, pipeline = self.now_s(), self.recognizer.pipeline
        assert pipeline is not None
        with pipeline.workers.changed:
            sizes, busy_s = dict(pipeline.main_metrics.batch_sizes), pipeline.main_metrics.execution.sum_s
        new = {str(size): count - self._sizes.get(size, 0) for size, count in sizes.items()}
        busy_share = (busy_s - self._busy_s) / max(now_s - self._ticked_s, 1e-6)
        self._sizes, self._busy_s, self._ticked_s = sizes, busy_s, now_s
        return {
            "kind": "tick",
            "time_s": round(now_s, 3),
            "latency_ms": [round(value, 2) for value in _taken(self._latency_ms)],
            "generator_late_ms": round(max(_taken(self._late_ms), default=0.0), 2),
            "batch_sizes": {size: count for size, count in new.items() if count},
            "open": self.sent - self.done,
            "idle_share": round(min(1.0, max(0.0, 1.0 - busy_share)), 4),
            "refused": self.refused,
            "streams": self._config.load.streams,
            "max_batch_size": self._config.asr.batching.max_batch_size,
            "max_queue_delay_us": self._config.asr.batching.max_queue_delay_us,
        }

    def close(self) -> None:
        """Withdraw what is queued and end the threads."""
        for stream in list(self._streams.values()):
            stream.cancel()
        self.recognizer.close()

    def _note(self, utterance: int, event: Any) -> None:
        due_s = self._due_s.get((utterance, -1 if event.kind == "final" else event.chunk))
        if due_s is not None:
            self.done += 1
            self._latency_ms.append((event.completed_s - self._start_s - due_s) * 1e3)


def _due_times(schedule: Schedule) -> dict[tuple[int, int], float]:
    columns = (
        schedule.utterance.tolist(),
        schedule.chunk_index.tolist(),
        schedule.final.tolist(),
        schedule.due_s.tolist(),
    )
    return {(u, -1 if final else chunk): due_s for u, chunk, final, due_s in zip(*columns, strict=True)}


def _taken(values: deque[float]) -> list[float]:
    return [values.popleft() for _ in range(len(values))]


def read_commands(lines: Iterable[str], commands: Commands[dict[str, Any] | None]) -> None:
    """Put every line as a command, and None at the end."""
    for line in lines:
        if line.strip():
            commands.put(json.loads(line))
    commands.put(None)


def main() -> int:
    """Serve standard input; reports leave by standard output, whatever libraries print by standard error."""
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    commands: Commands[dict[str, Any] | None] = Commands()
    threading.Thread(target=read_commands, args=(sys.stdin, commands), daemon=True).start()

    def emit(report: dict[str, Any]) -> None:
        reports.write(json.dumps(report) + "\n")
        reports.flush()

    try:
        serve(commands, emit)
    except BrokenPipeError:
        return 0
    except (InputError, RuntimeError) as error:
        emit({"kind": "error", "message": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # threads that still wait for the device must not keep the process
