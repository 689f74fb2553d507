"""Panels for JupyterLab: a live load with knobs; a step's timeline and a study's trials (those two live in `explorers`).

    from workbench.show.panels import live_panel, study_panel, timeline_panel
    live_panel()                                      # start, turn knobs, watch; the load runs in a process of its own
    timeline_panel("demo/trace_eager.json.gz")        # one step of a profiler trace, with zoom
    study_panel("demo/study.json")                    # charts of a study, and why a trial is what it is

Everything shown is a trait of a widget, set in the kernel's event loop: output of a thread lands nowhere in some kernels. Pictures are SVG in the
colour of the page, so light and dark themes both work.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import numpy as np

from workbench.config import Config, field_path_type, load_config, replace, to_dict
from workbench.show.explorers import study_panel, timeline_panel
from workbench.show.sparks import bar_chart, line_chart

__all__ = ["LivePanel", "live_panel", "study_panel", "timeline_panel"]

ENGINE = "workbench.show.live_engine"
SHOWN_S = 60.0
SMOOTHED_TICKS = 8  # latency and idle share are of the last two seconds
STOP_TIMEOUT_S = 5.0
LIVE_DEFAULT = {
    "asr": {"att_context_size": [56, 6], "batching": {"enabled": True, "max_batch_size": 16}},
    "load": {"streams": 4},
}
KNOBS = {
    "load.streams": "live streams",
    "asr.batching.max_batch_size": "max_batch_size",
    "asr.batching.max_queue_delay_us": "max_queue_delay_us",
}


def live_panel(config: Config | Mapping[str, Any] | None = None) -> LivePanel:
    """Start and stop a paced load and turn its knobs; `config` sets model, context and where the knobs begin."""
    return LivePanel(config if isinstance(config, Config) else load_config(config or LIVE_DEFAULT))


class LivePanel:
    """`view` is the widget. `start` and `stop` do what the buttons do; `closed` is awaited for the end of the process."""

    def __init__(self, config: Config) -> None:
        self.config = replace(config, **{"asr.batching.enabled": True})
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._ticks: deque[dict[str, Any]] = deque()
        self._clock_s = 0.0
        self.button = widgets.ToggleButton(description="Start", icon="play", tooltip="Start or stop the load")
        self.status = widgets.HTML("Stopped.")
        self.knobs = _knobs(self.config)
        self.charts = {name: widgets.HTML() for name in ("latency", "sizes", "open", "idle")}
        self.button.observe(lambda change: self.start() if change["new"] else self.stop(), "value")
        for knob in self.knobs.values():
            knob.observe(lambda _: self._turn(), "value")
        boxes = list(self.charts.values())
        for box in boxes:
            box.layout = widgets.Layout(width="350px", max_width="100%", margin="4px 8px 4px 0")
        flow = widgets.Layout(display="flex", flex_flow="row wrap", width="100%")
        self.view = widgets.VBox(
            [
                widgets.HBox([self.button, self.status], layout=flow),
                widgets.HBox(list(self.knobs.values()), layout=flow),
                widgets.HBox(boxes, layout=flow),
            ]
        )
        self._draw()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        return self.view._repr_mimebundle_(**kwargs)

    def start(self) -> None:
        """Start the engine's process; a second call while it runs does nothing."""
        if self._task is None or self._task.done():
            self._ticks.clear()
            self._clock_s = 0.0
            self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Ask the process to end; it is killed if it has not after 5 seconds."""
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        self.status.value = "Stopping…"
        asyncio.get_running_loop().call_later(STOP_TIMEOUT_S, _kill, process)

    async def closed(self) -> None:
        """Return once no process is left."""
        if self._task is not None:
            await self._task

    async def _run(self) -> None:
        """The panel's one task: it reads the reports until the process ends."""
        self.button.description, self.button.icon = "Stop", "stop"
        self.status.value = "Loading the model…"
        message = "Stopped."
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", ENGINE),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=1 << 20,
        )
        self._process = process
        assert process.stdout is not None
        try:
            self._send({"config": to_dict(replace(self.config, **self._values()))})
            async for line in process.stdout:
                report = json.loads(line)
                if report["kind"] == "error":
                    message = f"Stopped: {html.escape(report['message'])}"
                elif report["kind"] == "tick":
                    self._take(report)
        finally:
            await _end(process)
            self._process = None
            self.status.value = message
            self.button.description, self.button.icon = "Start", "play"
            self.button.value = False

    def _values(self) -> dict[str, Any]:
        return {key: knob.value for key, knob in self.knobs.items()}

    def _turn(self) -> None:
        if self._process is not None:
            self._send(self._values())

    def _send(self, command: Mapping[str, Any]) -> None:
        stdin = self._process.stdin if self._process is not None else None
        if stdin is not None and not stdin.is_closing():
            stdin.write((json.dumps(command) + "\n").encode())

    def _take(self, tick: dict[str, Any]) -> None:
        """One report: the panel's own time axis goes on where the knobs made the engine start anew."""
        self._clock_s += 0.25 if not self._ticks else max(0.05, tick["time_s"] - self._ticks[-1]["time_s"])
        self._ticks.append({**tick, "at_s": self._clock_s})
        while self._ticks[0]["at_s"] < self._clock_s - SHOWN_S:
            self._ticks.popleft()
        refused = f" · <b>{tick['refused']} chunks refused</b>" if tick["refused"] else ""
        late = (
            f" · load generator late by up to {tick['generator_late_ms']:.0f} ms"
            if tick["generator_late_ms"] > 20
            else ""
        )
        self.status.value = (
            f"Running: {tick['streams']} streams, max_batch_size {tick['max_batch_size']}, max_queue_delay_us {tick['max_queue_delay_us']}"
            f"{refused}{late}"
        )
        self._draw()

    def _draw(self) -> None:
        ticks = list(self._ticks)
        times_s = [tick["at_s"] for tick in ticks]
        recent = [
            [v for tick in ticks[max(0, i + 1 - SMOOTHED_TICKS) : i + 1] for v in tick["latency_ms"]]
            for i in range(len(ticks))
        ]
        points = {f"p{q}": [float(np.percentile(v, q)) if v else None for v in recent] for q in (50, 95)}
        self.charts["latency"].value = line_chart("Chunk latency", "ms", times_s, points)
        self.charts["sizes"].value = bar_chart("Chunks by batch size, last 10 s", _size_shares(ticks), "%")
        waiting = {"open": [float(tick["open"]) for tick in ticks]}
        self.charts["open"].value = line_chart("Chunks waiting or running", "", times_s, waiting)
        shares = [tick["idle_share"] for tick in ticks]
        idle = {
            "idle": [100 * float(np.mean(shares[max(0, i + 1 - SMOOTHED_TICKS) : i + 1])) for i in range(len(shares))]
        }
        self.charts["idle"].value = line_chart("Worker idle", "%", times_s, idle)


def _knobs(config: Config) -> dict[str, Any]:
    """The sliders; powers of two for the batch size. Their descriptions are the configuration's own."""
    sizes = [1 << power for power in range(8)]
    size = min(sizes, key=lambda value: abs(value - config.asr.batching.max_batch_size))
    shared = {"continuous_update": False, "layout": widgets.Layout(width="350px", max_width="100%")}
    shared["style"] = {"description_width": "140px"}
    sliders = (
        widgets.IntSlider(config.load.streams, 1, max(32, config.load.streams), **shared),
        widgets.SelectionSlider(options=sizes, value=size, **shared),
        widgets.IntSlider(min(config.asr.batching.max_queue_delay_us, 200_000), 0, 200_000, 1000, **shared),
    )
    for (key, label), slider in zip(KNOBS.items(), sliders, strict=True):
        slider.description = label
        slider.tooltip = field_path_type(key)[1]["description"]
    return dict(zip(KNOBS, sliders, strict=True))


def _size_shares(ticks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Per cent of the recent chunks by the size of the batch that they ran in."""
    chunks: Counter[int] = Counter()
    for tick in ticks[-40:]:
        for size, count in tick["batch_sizes"].items():
            chunks[int(size)] += int(size) * count
    return {str(size): 100 * chunks[size] / chunks.total() for size in sorted(chunks)}


async def _end(process: asyncio.subprocess.Process) -> None:
    """Close the input, which ends the engine; kill it if it does not end."""
    if process.stdin is not None:
        process.stdin.close()
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except asyncio.TimeoutError:
        _kill(process)
        await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
