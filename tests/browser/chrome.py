"""A page in headless Chromium, driven over its DevTools protocol with a plain WebSocket: no driver program, no framework.

    with Page.open(folder, width=1280) as page:
        page.go("http://127.0.0.1:8888/lab")
        page.wait("document.querySelector('.jp-Notebook') !== null")
        page.screenshot(path)

Protocol: https://chromedevtools.github.io/devtools-protocol (domains Page, Runtime, Input).
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


PICTURES = Path(__file__).parents[2] / ".artifacts" / "browser"
FAILED = PICTURES / "failed.png"


class Page:
    """One tab."""

    def __init__(self, socket):
        self._socket, self._number = socket, 0

    @classmethod
    @contextmanager
    def open(cls, profile, width=1360, height=1000):
        """Start Chromium with an empty profile folder and end it afterwards."""
        import urllib.request

        import websocket

        process = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
             "--remote-allow-origins=*", "--no-first-run", f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            port = next(m[1] for line in process.stderr if (m := re.search(r"ws://127\.0\.0\.1:(\d+)/", line)))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=20) as answer:
                tab = next(tab for tab in json.load(answer) if tab["type"] == "page")
            socket = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=60, suppress_origin=True)
            yield cls(socket)
            socket.close()
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()

    def send(self, method, **params):
        """One command; returns its result and skips events."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]

    def go(self, url):
        # A page in the background has no active document: JupyterLab's commands would find none to work on.
        self.send("Emulation.setFocusEmulationEnabled", enabled=True)
        self.send("Page.navigate", url=url)

    def run(self, script):
        """The value of an expression; a promise is awaited."""
        result = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition, seconds=60):
        """Until an expression is true; returns its value."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if value := self.run(condition):
                return value
            time.sleep(0.25)
        self.screenshot(FAILED)
        raise AssertionError(f"not within {seconds} s: {condition} (picture: {FAILED.name})")

    def press(self, key, code, times=1):
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def resize(self, width, height):
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
        return path
