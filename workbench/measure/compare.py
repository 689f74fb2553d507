"""Two answers in one run each: what batching gains, and what our loop costs over NeMo's.

    compare_batching(loaded, config, items, streams=16)["speedup"]
    compare_nemo(loaded, config, items)["lone_over_nemo_cpu"]

Both sides take turns on the same model in the same process, so that a slow minute of a shared machine falls on both.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.config import Config, replace
from workbench.errors import AudioError
from workbench.model.load import LoadedModel
from workbench.model.speech import AudioItem, Samples, read_audio
from workbench.runtime.offline import nemo_stream_labels
from workbench.runtime.recognizer import Recognizer
from workbench.runtime.transcribe import StreamWindow


@dataclass(frozen=True)
class Compare:
    """What `bench asr` also measures: batched against unbatched streams, and a lone unbatched stream against NeMo's bare loop."""

    batching: bool = False
    nemo: bool = False


def sized_for(config: Config, streams: int) -> Config:
    """The configuration with batching on where more than one caller is expected, and a row for each of them."""
    if streams == 1:
        return config
    slots = max(streams, config.asr.batching.state_arena_slots)
    return replace(config, **{"asr.batching.enabled": True, "asr.batching.state_arena_slots": slots})


def compare_batching(
    loaded: LoadedModel, config: Config, items: Sequence[AudioItem], streams: int, rounds: int = 2
) -> dict[str, float | int]:
    """Audio per second of `streams` streams with batching on over that with batching off, the two taking turns on one model.

    `speedup` is the quotient of the summed times; `speedup_low` and `speedup_high` are those of the single rounds.
    """
    clips = _repeated(_readable(items, loaded, config), streams)
    sized = sized_for(config, streams)
    off = replace(sized, **{"asr.batching.enabled": False})
    texts: dict[bool, list[tuple[int, ...]]] = {}
    times_s: dict[bool, list[float]] = {True: [], False: []}
    for round_number in range(rounds + 1):
        for batched in (False, True) if round_number % 2 else (True, False):
            with Recognizer(loaded, sized if batched else off) as recognizer:
                # The first round only warms up, on a part of the clips.
                chosen = clips if round_number else clips[:streams]
                start_s = time.perf_counter()
                texts[batched] = _all_at_once(recognizer, chosen, streams)
                if round_number:
                    times_s[batched].append(time.perf_counter() - start_s)
    audio_s = sum(clip.size for clip in clips) / loaded.geometry.sample_rate_hz
    quotients = [off_s / on_s for off_s, on_s in zip(times_s[False], times_s[True], strict=True)]
    return {
        "streams": streams,
        "speedup": sum(times_s[False]) / sum(times_s[True]),
        "speedup_low": min(quotients),
        "speedup_high": max(quotients),
        "batched_rtfx": audio_s * rounds / sum(times_s[True]),
        "unbatched_rtfx": audio_s * rounds / sum(times_s[False]),
        "mismatches_batched": sum(a != b for a, b in zip(texts[True], texts[False], strict=True)),
    }


def compare_nemo(
    loaded: LoadedModel, config: Config, items: Sequence[AudioItem], rounds: int = 5, limit: int = 8
) -> dict[str, float | int]:
    """Time of a lone stream with batching off over that of NeMo's `conformer_stream_step` in a bare loop, clip by clip in turns.

    Per clip the fastest of the rounds counts, by processor time of the thread and by the clock on the wall.
    """
    clips = _readable(items, loaded, config)[:limit]
    off = replace(config, **{"asr.batching.enabled": False})
    with Recognizer(loaded, off) as recognizer:

        def ours(clip: Samples) -> tuple[int, ...]:
            with recognizer.stream() as stream:
                stream.push(clip)
                stream.step()
                stream.finish()
                return stream.labels

        runs = {"ours": ours, "nemo": lambda clip: nemo_stream_labels(loaded, clip)}
        best: dict[tuple[str, str], list[float]] = {}
        different = 0
        for clip in clips:
            labels: dict[str, tuple[int, ...]] = {}
            times: dict[tuple[str, str], list[float]] = {}
            for round_number in range(rounds):
                for name in sorted(runs, reverse=bool(round_number % 2)):
                    wall_s, cpu_s = time.perf_counter(), time.thread_time()
                    labels[name] = runs[name](clip)
                    times.setdefault((name, "cpu"), []).append(time.thread_time() - cpu_s)
                    times.setdefault((name, "wall"), []).append(time.perf_counter() - wall_s)
            different += labels["ours"] != labels["nemo"]
            for key, found in times.items():
                best.setdefault(key, []).append(min(found))
    total = {key: sum(values) for key, values in best.items()}
    chunks = sum(len(loaded.geometry.chunks(clip.size)) for clip in clips)
    return {
        "lone_over_nemo_cpu": total["ours", "cpu"] / total["nemo", "cpu"],
        "lone_over_nemo_wall": total["ours", "wall"] / total["nemo", "wall"],
        "lone_step_ms": total["ours", "wall"] / chunks * 1e3,
        "nemo_step_ms": total["nemo", "wall"] / chunks * 1e3,
        "mismatches_nemo": different,
    }


def _readable(items: Sequence[AudioItem], loaded: LoadedModel, config: Config) -> list[Samples]:
    clips = []
    for item in items:
        with contextlib.suppress(AudioError):  # the levels before have listed it as skipped
            clips.append(read_audio(item, loaded.geometry.sample_rate_hz, config.asr.channel))
    return clips


def _repeated(clips: Sequence[Samples], streams: int) -> list[Samples]:
    """At least as many recordings as streams."""
    return [clips[i % len(clips)] for i in range(max(len(clips), streams))]


def _all_at_once(recognizer: Recognizer, clips: Sequence[Samples], streams: int) -> list[tuple[int, ...]]:
    """Labels of all clips; `streams` of them are open at any time as long as clips are left."""
    window = StreamWindow(recognizer, streams)
    started = [window.start(clip) for clip in clips]
    for stream in started:
        window.finish(stream)
    return [stream.labels for stream in started]
