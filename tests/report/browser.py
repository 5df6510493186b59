"""A headless Chromium, driven through its own debugging protocol: no more than the tests need."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",  # which Chromium cannot have as root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
PATIENCE = 60  # seconds; a machine may be busy


class Page:
    """One tab, and what it complained about or asked for."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self._events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=PATIENCE))
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._events.append(answer)

    def show(self, file: Path, width: int = 1200, dark: bool = False) -> None:
        """Load a file in a window of so many pixels."""
        self.open(file.absolute().as_uri(), width, dark)

    def open(self, address: str, width: int = 1200, dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self._events.clear()
        self.call("Page.navigate", url=address)
        ends = time.monotonic() + PATIENCE
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            assert time.monotonic() < ends, "the page did not load"
            time.sleep(0.01)
            self.call("Runtime.evaluate", expression="0")  # events come with the answer

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Until what was asked for is on the screen, scrolling for example."""
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def move_to(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def errors(self) -> list[str]:
        """What the console shows in red."""
        return [
            json.dumps(event["params"])
            for event in self._events
            if event["method"] == "Runtime.exceptionThrown"
            or (event["method"] == "Log.entryAdded" and _is_bad(event["params"]["entry"]))
            or (event["method"] == "Runtime.consoleAPICalled" and _is_bad(event["params"]))
        ]

    def requests(self) -> list[str]:
        """Every address that was asked for, apart from what the page has in itself."""
        urls = [
            event["params"]["request"]["url"]
            for event in self._events
            if event["method"] == "Network.requestWillBeSent"
        ]
        return [url for url in urls if not url.startswith("data:")]

    def screenshot(self, path: Path) -> None:
        """The whole page, from top to bottom."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))


def _is_bad(entry: dict[str, Any]) -> bool:
    return entry.get("level", entry.get("type")) in ("error", "warning", "assert")


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with an empty profile, gone at the end."""
    assert CHROMIUM is not None
    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with connect(_address(profile, process), max_size=2**28) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)


def _address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """Where the first tab listens."""
    file = profile / "DevToolsActivePort"
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends and process.poll() is None:
        if file.is_file() and file.read_text().count("\n"):
            port = file.read_text().split("\n")[0]
            with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as answer:
                tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
            if tabs:
                return str(tabs[0]["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise AssertionError("Chromium did not start")
