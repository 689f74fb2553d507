"""Panels without a browser: the life of the engine's process, what its reports move, and the explorers' pictures."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from fake_live_engine import FAILS, HANGS
from hypothesis import given, settings
from hypothesis import strategies as st
from small_study import small_study

from workbench.batching.microbatcher import MicroBatcher
from workbench.config import load_config, replace
from workbench.errors import ConfigError, RecordError
from workbench.measure.loadgen import build_schedule
from workbench.show import live_engine, panels
from workbench.show.queue import queue_waterfall
from workbench.show.sparks import bar_chart, line_chart, nice_top

TRACE = Path(__file__).parent / "data" / "traces" / "cpu_linear_norm_relu.json.gz"


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(panels, "ENGINE", "tests.fake_live_engine")
    monkeypatch.setattr(panels, "STOP_TIMEOUT_S", 1.0)
    monkeypatch.chdir(Path(__file__).parents[1])
    return lambda seed=0: panels.live_panel({"load": {"streams": 3, "seed": seed}})


async def until(condition, seconds=20.0):
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("did not happen in time")


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_panel_starts_moves_turns_and_stops(fake):
    async def story():
        panel = fake()
        empty = panel.charts["latency"].value
        panel.button.value = True
        await until(lambda: "3 streams" in panel.status.value)
        pid, before = panel._process.pid, panel.charts["latency"].value
        assert before != empty and panel.button.description == "Stop"
        panel.knobs["load.streams"].value = 9
        await until(lambda: "9 streams" in panel.status.value)
        panel.knobs["asr.batching.max_batch_size"].value = 2
        await until(lambda: "max_batch_size 2" in panel.status.value)
        assert panel.charts["latency"].value != before
        panel.button.value = False
        await asyncio.wait_for(panel.closed(), 10)
        assert gone(pid) and panel.status.value == "Stopped." and panel.button.description == "Start"

    asyncio.run(story())


def test_starting_twice_runs_one_process_and_a_stopped_panel_starts_again(fake):
    async def story():
        panel = fake()
        pids = []
        for _ in range(2):
            panel.button.value = True
            panel.start()
            await until(lambda: panel._process is not None and "Running" in panel.status.value)
            pids.append(panel._process.pid)
            panel.button.value = False
            await asyncio.wait_for(panel.closed(), 10)
        assert len(set(pids)) == 2 and all(map(gone, pids))

    asyncio.run(story())


def test_an_engine_that_does_not_end_is_killed(fake):
    async def story():
        panel = fake(HANGS)
        panel.button.value = True
        await until(lambda: "Running" in panel.status.value)
        pid = panel._process.pid
        panel.button.value = False
        await asyncio.wait_for(panel.closed(), 10)
        assert gone(pid)

    asyncio.run(story())


def test_an_engine_that_fails_says_why_and_its_words_are_no_markup(fake):
    async def story():
        panel = fake(FAILS)
        panel.start()
        await asyncio.wait_for(panel.closed(), 20)
        assert panel.status.value == "Stopped: ModelError: &lt;no model&gt;" and panel.button.value is False

    asyncio.run(story())


def test_cancelling_the_panels_task_leaves_no_process(fake):
    async def story():
        panel = fake()
        panel.start()
        await until(lambda: "Running" in panel.status.value)
        pid = panel._process.pid
        panel._task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await panel.closed()
        assert gone(pid)

    asyncio.run(story())


class ListedClips:
    """Two short recordings; the engine's model and speech are replaced by these and by the small model."""

    def __init__(self, noise):
        self.clips = [noise(0.9, seed=1), noise(1.3, seed=2)]

    def __call__(self, rate_hz):
        return self.clips


@pytest.fixture
def engine(monkeypatch, tiny_model, noise):
    monkeypatch.setattr("workbench.model.load.load_configured", lambda asr: tiny_model)
    monkeypatch.setattr("workbench.measure.steps.speech_clips", ListedClips(noise))


def test_the_engine_reports_changes_its_knobs_and_ends_with_its_input(engine):
    commands, reports = queue.SimpleQueue(), []
    commands.put({"config": {"asr": {"batching": {"enabled": True}}, "load": {"streams": 2}}})
    change = {"load.streams": 3, "asr.batching.max_batch_size": 1}

    def emit(report):
        reports.append(json.loads(json.dumps(report)))
        ticks = [tick for tick in reports if tick["kind"] == "tick"]
        if len(ticks) == 4:
            commands.put(change)
        if ticks and ticks[-1]["streams"] == 3 and ticks[-1]["time_s"] > 1.2:
            commands.put(None)

    live_engine.serve(commands, emit)
    ticks = [report for report in reports if report["kind"] == "tick"]
    assert reports[0]["kind"] == "ready" and [t["streams"] for t in ticks[:4]] == [2] * 4
    assert ticks[-1]["streams"] == 3 and ticks[-1]["max_batch_size"] == 1
    assert any(tick["latency_ms"] for tick in ticks) and all(v > 0 for tick in ticks for v in tick["latency_ms"])
    after = [tick for tick in ticks if tick["streams"] == 3]
    assert {size for tick in after for size in tick["batch_sizes"]} == {"1"}
    assert all(0 <= tick["idle_share"] <= 1 and tick["open"] >= 0 for tick in ticks)
    assert not [t for t in threading.enumerate() if t.name.startswith("workbench-slot") and t.is_alive()]


def test_the_engine_refuses_a_wrong_configuration():
    commands = queue.SimpleQueue()
    commands.put({"config": {"asr": {"modle": "x"}}})
    with pytest.raises(ConfigError, match="did you mean model"):
        live_engine.serve(commands, lambda report: None)


@pytest.mark.parametrize(
    ("given", "code", "report"),
    [("", 0, None), ('{"config": {"asr": {"modle": "x"}}}', 1, {"kind": "error"})],
    ids=["its starter is gone", "wrong key"],
)
def test_the_engines_process_ends_with_its_input_and_reports_what_was_wrong(given, code, report):
    command = [sys.executable, "-m", "workbench.show.live_engine"]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    lines = [json.loads(line)["kind"] for line in done.stdout.splitlines()]
    assert lines == ([report["kind"]] if report else [])


def test_lines_become_commands_and_their_end_becomes_none():
    commands = queue.SimpleQueue()
    live_engine.read_commands(['{"load.streams": 2}\n', "\n"], commands)
    assert [commands.get(), commands.get()] == [{"load.streams": 2}, None]


@given(st.floats(1e-6, 1e7))
@settings(max_examples=60, deadline=None)
def test_an_axis_ends_just_above_its_values(value):
    assert value <= nice_top(value) <= 20.001 * value


def test_charts_are_well_formed_keep_gaps_and_carry_units():
    text = line_chart("A & B", "ms", [0.0, 1.0, 2.0, 3.0], {"p50": [1.0, None, 2.0, 3.0], "p95": [2.0, 2.0, 4.0, 5.0]})
    root = ET.fromstring(text)
    lines = [element for element in root if element.tag == "polyline"]
    assert len(lines) == 3 and root.get("aria-label") == "A & B"
    words = " ".join("".join(element.itertext()) for element in root)
    assert "3 ms" in words and "5 ms" in words and "3 s" in words
    assert len({line.get("stroke") for line in lines}) == 2 and "currentColor" in text
    assert len([e for e in ET.fromstring(bar_chart("x", {"1": 30.0, "2": 70.0}, "%")) if e.tag == "rect"]) == 2
    ET.fromstring(line_chart("nothing yet", "ms", [], {"p50": []}))
    ET.fromstring(bar_chart("nothing yet", {}, "%"))


def test_a_timeline_panel_zooms_and_says_what_took_longest():
    view = panels.timeline_panel(TRACE)
    (step, part), picture, table = view.children[0].children, view.children[1], view.children[2]
    assert "currentColor" in picture.value and "costliest in this part" in table.value
    glyphs = re.findall(r'<g id="text_\d+">.*?<g style="fill: ([^"]+?)["; ]', picture.value, re.DOTALL)
    assert glyphs and set(glyphs) == {"currentColor"}
    whole = (picture.value, table.value)
    part.value = (0.0, part.max / 50)
    assert picture.value != whole[0] and table.value != whole[1]
    step.value = step.max
    assert "<svg" in picture.value and len(picture.value) < 600_000


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return small_study(tmp_path_factory.mktemp("study"))


def test_a_study_panel_shows_each_chart_and_each_trial(study, tmp_path):
    view = panels.study_panel(study.save(tmp_path / "study.json"))
    _, chart, picture, trial, table = view.children
    seen = set()
    for name in chart.options:
        chart.value = name
        seen.add(picture.value)
    assert len(seen) == 3 == len(chart.options)
    tables = set()
    for _, index in trial.options:
        trial.value = index
        tables.add(table.value)
    assert len(tables) > 1 and all("max_queue_delay_us" in text and "latency p95, ms" in text for text in tables)


def test_a_waterfall_has_a_row_per_item_and_names_each_reason():
    batcher = MicroBatcher(max_batch_size=2, max_queue_delay_s=0.01, max_queue_depth=8)
    done = []
    for number in range(3):
        batcher.submit(number, key="k", now=0.001 * number)
    for now in (0.002, 0.02):
        batch = batcher.next_batch(now)
        batcher.finish(batch, now + 0.005)
        done.append((batch, now + 0.005))
    axes = queue_waterfall(done).axes[0]
    assert len(axes.patches) == 3 and [text.get_text().strip() for text in axes.texts] == ["capacity", "deadline"]
    with pytest.raises(RecordError, match="no batch"):
        queue_waterfall([])


def test_due_times_know_every_row(tiny_model):
    load = replace(load_config(), **{"load.streams": 2, "load.seconds": 3.0}).load
    schedule = build_schedule(load, tiny_model.geometry, [16000, 24000])
    assert len(live_engine._due_times(schedule)) == len(schedule)
