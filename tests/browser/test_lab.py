"""JupyterLab in a real browser: the live panel answers to a slider, the explorers draw, tutorial 2 runs. Screenshots: .artifacts/browser."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest
from chrome import CHROMIUM, PICTURES, Page
from small_study import small_study

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(420),
    pytest.mark.skipif(CHROMIUM is None, reason="needs headless Chromium"),
    pytest.mark.skipif(
        shutil.which("jupyter-lab", path=str(Path(sys.executable).parent)) is None, reason="needs JupyterLab"
    ),
]
LIVE = """
from workbench.show.panels import live_panel
panel = live_panel({"asr": {"device": "cpu", "att_context_size": [56, 6]}, "load": {"streams": 3}})
panel
"""
EXPLORERS = """
from workbench.show.panels import study_panel, timeline_panel
display(timeline_panel("trace.json.gz"), study_panel("study.json"))
"""
DOCUMENT = "[...jupyterapp.shell.widgets('main')][0]"
KERNEL_STATUS = f"{DOCUMENT}?.context?.sessionContext?.session?.kernel?.status"
CHART = "document.querySelector('svg[aria-label=\"{}\"]')"
STATUS = "[...document.querySelectorAll('.widget-html-content')].map(e => e.textContent).join(' ')"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """URL of a running JupyterLab over a copy of the notebooks, and its folder."""
    home = tmp_path_factory.mktemp("lab")
    folder = home / "repository" / "notebooks"
    shutil.copytree(ROOT / "notebooks", folder)
    (home / "repository" / "studies").symlink_to(ROOT / "studies")
    shutil.copy(ROOT / "tests" / "data" / "traces" / "cpu_linear_norm_relu.json.gz", folder / "trace.json.gz")
    small_study(home).save(folder / "study.json")
    quiet = (
        home
        / "config"
        / "lab"
        / "user-settings"
        / "@jupyterlab"
        / "apputils-extension"
        / "notification.jupyterlab-settings"
    )
    quiet.parent.mkdir(parents=True)
    quiet.write_text('{"fetchNews": "false"}', encoding="utf-8")
    for name, source in (("live", LIVE), ("explorers", EXPLORERS)):
        cells = [nbformat.v4.new_code_cell(source.strip())]
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL}), folder / f"{name}.ipynb")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(home / "config"), "JUPYTER_DATA_DIR": str(home / "data")}
    environment |= {"JUPYTER_RUNTIME_DIR": str(home / "runtime"), "HOME": str(home)}
    command = [
        sys.executable,
        "-m",
        "jupyter",
        "lab",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
    ]
    command += [
        f"--notebook-dir={folder}",
        "--IdentityProvider.token=",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.news_url=None",
    ]
    server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        _await_server(url)
        yield url, folder
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}


def _await_server(url):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"{url}/api", timeout=2) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise AssertionError("JupyterLab did not start within 60 s")


@pytest.fixture
def page(tmp_path):
    with Page.open(tmp_path / "profile") as page:
        yield page


def open_and_run(page, lab, name):
    """Open a notebook by itself, as the active document, and run all its cells."""
    page.go(f"{lab[0]}/doc/tree/{name}")
    page.wait("!!(window.jupyterapp && document.querySelector('.jp-Notebook .jp-Cell'))", 90)
    page.run(f"jupyterapp.shell.activateById({DOCUMENT}.id)")
    page.wait(f"{KERNEL_STATUS} === 'idle' && jupyterapp.shell.currentWidget !== null", 90)
    page.run("void jupyterapp.commands.execute('notebook:run-all-cells')")


def engines():
    """Process ids of live engines of this machine's tests."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"workbench.show.live_engine" in words:
            found.append(int(process.name))
    return found


def test_the_live_panel_moves_with_its_slider_and_leaves_no_process(page, lab):
    before = set(engines())
    open_and_run(page, lab, "live.ipynb")
    button = "document.querySelector('.jupyter-widgets.widget-toggle-button')"
    page.wait(f"{button} !== null", 60)
    page.screenshot(PICTURES / "live_stopped.png")
    page.run(f"{button}.click()")
    page.wait(f"{STATUS}.includes('Running: 3 streams')", 120)
    latency = CHART.format("Chunk latency")
    page.wait(f"{latency}.querySelectorAll('polyline').length > 0", 30)
    first = page.run(f"{latency}.outerHTML")
    time.sleep(6)
    page.screenshot(PICTURES / "live_running.png")
    page.run("document.querySelector('.noUi-handle').focus()")
    page.press("ArrowRight", 39, times=3)
    page.wait(f"{STATUS}.includes('Running: 6 streams')", 30)
    time.sleep(6)
    assert page.run(f"{latency}.outerHTML") != first
    assert page.run(f"{CHART.format('Chunks by batch size, last 10 s')}.querySelectorAll('rect').length") > 0
    page.screenshot(PICTURES / "live_six_streams.png")
    page.run("void jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.resize(620, 1000)
    time.sleep(3)
    page.screenshot(PICTURES / "live_dark_narrow.png")
    assert set(engines()) - before
    page.run(f"{button}.click()")
    page.wait(f"{STATUS}.includes('Stopped.')", 30)
    assert not set(engines()) - before


def test_the_explorers_draw_and_answer(page, lab):
    open_and_run(page, lab, "explorers.ipynb")
    page.wait(f"{STATUS}.includes('costliest in this part') && {STATUS}.includes('of this trial')", 90)
    pictures = "[...document.querySelectorAll('.widget-html-content > svg')].map(e => e.outerHTML)"
    first = page.run(pictures)
    page.screenshot(PICTURES / "explorers.png")
    page.run(
        "[...document.querySelectorAll('.widget-toggle-buttons button')].find(b => b.textContent === 'front').click()"
    )
    page.run("document.querySelector('.noUi-handle').focus()")
    page.press("ArrowRight", 39)
    page.wait(f"{pictures}.every((text, i) => text !== {json.dumps(first)}[i])", 30)
    assert len(first) == 2


def test_tutorial_2_runs_in_the_browser(page, lab):
    open_and_run(page, lab, "02_where_time_goes.ipynb")
    cells = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(e => e.textContent)"
    page.wait(f"{KERNEL_STATUS} === 'busy'", 30)
    page.wait(f"{KERNEL_STATUS} === 'idle' && !{cells}.some(text => text.includes('*'))", 240)
    wrong = 'document.querySelectorAll(\'[data-mime-type="application/vnd.jupyter.error"], [data-mime-type="application/vnd.jupyter.stderr"]\')'
    assert page.run(f"{wrong}.length") == 0
    page.screenshot(PICTURES / "tutorial_2.png")
