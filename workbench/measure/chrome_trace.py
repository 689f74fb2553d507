"""Chrome traces of torch.profiler as a short list of plain events: read, and written small.

    trace = load_trace("step.json.gz")          # .json or .json.gz, told apart by content
    save_trace(trace, "small.json.gz")          # only what the analysis needs; opens in Perfetto

A profile of a few steps of a large model is easily 100 MB of JSON. The file is therefore decoded one event at a time from a
sliding buffer, and of each event only name, category, thread, times, correlation, stream and device stay in memory.
Format: "Trace Event Format" (Google), with the categories that Kineto writes (cpu_op, cuda_runtime, kernel, …); times are µs.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from workbench.errors import RecordError

CALL_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver"})
DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
CATEGORIES = CALL_CATEGORIES | DEVICE_CATEGORIES | {"cpu_op", "user_annotation"}
SYNC_ROWS = frozenset(
    {
        *("Event Sync", "Context Sync", "Stream Sync", "Stream Wait Event"),
        *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize"),
    }
)
CHUNK_CHARACTERS = 1 << 20
EVENT_CHARACTERS_LIMIT = 8 << 20  # one event is a few hundred characters; a broken file must not fill the memory

_DECODER = json.JSONDecoder(strict=False)  # kernel names may carry control characters
_ARRAY = re.compile(r'"traceEvents"\s*:\s*\[|\A\s*\[')
_SEPARATORS = re.compile(r"[\s,]*")
_API_VERSION = re.compile(r"(_ptsz|_ptds)?(_v\d+)?$")


@dataclass(frozen=True, slots=True)
class Event:
    """One complete event. Times in µs on the trace's clock; a duration that the profiler did not record is −1.

    correlation, stream and device are −1 where the event has none; thread is "process/thread".
    """

    name: str
    category: str
    thread: str
    start_us: float
    duration_us: float
    correlation: int = -1
    stream: int = -1
    device: int = -1

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class Trace:
    """The events that the analysis needs, ordered by start; source names the file in messages."""

    events: tuple[Event, ...]
    source: str = "trace"


def load_trace(path: str | Path) -> Trace:
    """Read a trace. Raises RecordError naming the file if it is missing, damaged, cut short or not a trace."""
    file = Path(path)
    try:
        with file.open("rb") as raw:
            opener = gzip.open if raw.read(2) == b"\x1f\x8b" else open
        with opener(file, "rt", encoding="utf-8", errors="replace") as text:
            events = [event for item in _items(text, file.name) if (event := _event(item, file.name)) is not None]
    except FileNotFoundError:
        raise RecordError(f"{file.name}: no such trace") from None
    except (OSError, EOFError, zlib.error) as error:
        raise RecordError(f"{file.name}: cannot be read to its end ({error})") from None
    events.sort(key=lambda event: (event.start_us, -event.duration_us))
    return Trace(tuple(events), file.name)


def save_trace(trace: Trace, path: str | Path) -> Path:
    """Write the kept events as a Chrome trace, gzipped if the name ends in .gz, and return the path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(_chrome(event), separators=(",", ":")) for event in trace.events)
    data = f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n'.encode()
    target.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)
    return target


def _items(text: TextIO, source: str) -> Iterator[dict[str, Any]]:
    """The objects of the traceEvents array, one at a time."""
    buffer, at = _open_array(text, source)
    while True:
        separators = _SEPARATORS.match(buffer, at)
        at = separators.end() if separators else at
        if buffer[at : at + 1] == "]":
            return
        try:
            item, end = _DECODER.raw_decode(buffer, at)
        except ValueError as error:
            more = text.read(CHUNK_CHARACTERS)
            if not more or len(buffer) - at > EVENT_CHARACTERS_LIMIT:
                raise RecordError(f"{source}: the list of events is damaged or cut short ({error})") from None
            buffer, at = buffer[at:] + more, 0
            continue
        if not isinstance(item, dict):
            raise RecordError(f"{source}: an event is {str(item)[:40]!r}; allowed are JSON objects")
        yield item
        at = end


def _open_array(text: TextIO, source: str) -> tuple[str, int]:
    buffer = ""
    while more := text.read(CHUNK_CHARACTERS):
        buffer += more
        if found := _ARRAY.search(buffer):
            return buffer, found.end()
    raise RecordError(f"{source}: no traceEvents; a Chrome trace as torch.profiler exports it is needed")


def _event(item: dict[str, Any], source: str) -> Event | None:
    category = item.get("cat")
    name = str(item.get("name", ""))
    # Synchronisation is drawn on the GPU's tracks too, and by some versions under the kernels' category: it is not work.
    if item.get("ph") != "X" or category not in CATEGORIES or (category in DEVICE_CATEGORIES and name in SYNC_ROWS):
        return None
    args = item.get("args") or {}
    on_device = category in DEVICE_CATEGORIES
    try:
        start_us, duration_us = float(item["ts"]), float(item.get("dur", -1.0))
        event = Event(
            name=_call_name(name) if category in CALL_CATEGORIES else sys.intern(name),
            category=sys.intern(str(category)),
            thread=sys.intern(f"{item.get('pid')}/{item.get('tid')}"),
            start_us=start_us,
            duration_us=duration_us if math.isfinite(duration_us) else -1.0,
            correlation=int(args.get("correlation", -1)),
            stream=int(args.get("stream", -1)) if on_device else -1,
            device=int(args.get("device", -1)) if on_device else -1,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(
            f"{source}: event {name!r} lacks usable times or ids ({type(error).__name__}: {error})"
        ) from None
    if not math.isfinite(start_us):
        raise RecordError(f"{source}: event {name!r} starts at {start_us}; a finite time is needed")
    return event


@lru_cache(maxsize=4096)
def _call_name(name: str) -> str:
    """CUPTI's name of an API call without its version suffix: cudaLaunchKernel_v7000 → cudaLaunchKernel."""
    return sys.intern(_API_VERSION.sub("", name))


def _chrome(event: Event) -> dict[str, Any]:
    process, _, thread = event.thread.partition("/")
    ids = {"correlation": event.correlation, "stream": event.stream, "device": event.device}
    return {
        "ph": "X",
        "cat": event.category,
        "name": event.name,
        "pid": _number(process),
        "tid": _number(thread),
        "ts": event.start_us,
        "dur": event.duration_us,
        "args": {name: value for name, value in ids.items() if value >= 0},
    }


def _number(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text
