"""The page in a real browser, and what a hostile page or program may try on its server."""

from __future__ import annotations

import base64
import http.client
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from perfed.core.errors import ConfigError
from perfed.data.needs import Needs
from perfed.use import serving
from perfed.use.opening import Ready, of_module
from perfed.use.serving import Asked, PageServer
from tests.report.browser import CHROMIUM, Page, browser

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
NAMES = ("<img src=x onerror=alert(1)>", "dark", "bright")


class Brightness(nn.Module):
    """The brighter a picture, the more it is 'bright'; ``turned``: the other way round."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.sign = -1.0 if turned else 1.0

    def forward(self, x: Tensor) -> Tensor:
        mean = 4 * self.sign * x.mean((1, 2, 3))
        return torch.stack([torch.full_like(mean, -1.0), -mean, mean], 1)


def model(turned: bool = False) -> Ready:
    needs = Needs(shape=(3, 8, 8), classes=3, names=NAMES, pixels=(-1.0, 1.0))
    card = {"run": "trial", "test accuracy": "90.0 %, on this site's own test samples"}
    return of_module(Brightness(turned), needs, card)


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with PageServer(Asked.of(model(), model(turned=True))) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def png(brightness: int, size: tuple[int, int] = (20, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (brightness,) * 3).save(file, "png")
    return file.getvalue()


def ask(
    server: PageServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(serving.HOST, server.server_port, timeout=20)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    is_json = "json" in (answer.getheader("Content-Type") or "")
    return answer.status, json.loads(content) if is_json else content


def test_both_models_are_asked(server: PageServer) -> None:
    status, answer = ask(server, "POST", "/predict", png(200))
    assert status == 200
    with_others, alone = answer["models"]
    mean = 4 * (200 / 127.5 - 1)
    must = np.exp([mean, -1, -mean]) / np.exp([mean, -1, -mean]).sum()
    assert [c["name"] for c in with_others["classes"]] == ["bright", NAMES[0], "dark"]
    assert [c["probability"] for c in with_others["classes"]] == pytest.approx(must, rel=1e-5)
    assert alone["classes"][0]["name"] == "dark"
    assert not with_others["unsure"]
    assert ask(server, "POST", "/predict", png(140))[1]["models"][0]["unsure"]


def bomb() -> bytes:
    """A picture of 60 million pixels in a few kilobytes."""
    file = io.BytesIO()
    Image.new("1", (10_000, 6_000)).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "this file is no picture"),
        (b"%PDF-1.4", "this file is no picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "this file is no picture"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "this file is no picture"),
        (png(9)[:-20], "this file is no picture"),
        (bomb(), "6000×10000 pixels, at most 50,000,000"),
    ],
    ids=["empty", "pdf", "svg", "eps", "cut off", "bomb"],
)
def test_what_is_no_picture_is_said(server: PageServer, content: bytes, reason: str) -> None:
    status, answer = ask(server, "POST", "/predict", content)
    assert status == 422
    assert reason in answer["error"]


def test_a_file_that_is_too_large_is_not_read(server: PageServer) -> None:
    with socket.create_connection((serving.HOST, server.server_port), timeout=20) as peer:
        host = f"Host: {serving.HOST}:{server.server_port}\r\n"
        peer.sendall(f"POST /predict HTTP/1.1\r\n{host}Content-Length: 99999999\r\n\r\n".encode())
        assert b" 413 " in peer.recv(1000)  # before a byte of it was sent
    for length in ("-1", "1e3", "9" * 5000, "²"):
        with socket.create_connection((serving.HOST, server.server_port), timeout=20) as peer:
            head = f"POST /predict HTTP/1.1\r\n{host}Content-Length: {length}\r\n\r\n"
            peer.sendall(head.encode())
            assert peer.recv(1000).split()[1] in (b"411", b"413")


@pytest.mark.parametrize("path", ["/../opening.py", "/page.css/../opening.py", "//etc/passwd"])
def test_no_other_file_is_given_out(server: PageServer, path: str) -> None:
    assert ask(server, "GET", path)[0] == 404
    assert ask(server, "POST", path, png(9))[0] == 404


def test_other_pages_cannot_ask(server: PageServer) -> None:
    """A name of theirs that leads here (DNS rebinding), and a request across origins."""
    port = server.server_port
    for host in (f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", f"[::1]:{port}"):
        status, answer = ask(server, "POST", "/predict", png(9), Host=host)
        assert (status, answer["error"]) == (421, f"open {server.address} instead")
    evil = {"Origin": "https://evil.example"}, {"Sec_Fetch_Site": "cross-site"}, {"Origin": "null"}
    for headers in evil:
        assert ask(server, "POST", "/predict", png(9), **headers)[0] == 403
    assert ask(server, "GET", "/", Host=f"localhost:{port}")[0] == 200
    assert server.socket.getsockname()[0] == "127.0.0.1"


def test_who_says_nothing_keeps_nobody_waiting(server: PageServer) -> None:
    silent = [socket.create_connection((serving.HOST, server.server_port)) for _ in range(20)]
    assert ask(server, "POST", "/predict", png(200))[0] == 200
    for one in silent:
        one.close()


def test_a_table_has_no_page() -> None:
    table = of_module(nn.Linear(2, 3), Needs(shape=(2,), classes=3, columns=("a", "b")), {})
    with pytest.raises(ConfigError, match="takes a table with the columns 'a', 'b'"):
        Asked.of(table, None)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


DROP = """(() => {
  const bytes = Uint8Array.from(atob("%s"), c => c.charCodeAt(0));
  const files = new DataTransfer();
  files.items.add(new File([bytes], "photo.png"));
  dispatchEvent(new DragEvent("drop", {dataTransfer: files, bubbles: true}));
})()"""


def until(tab: Page, expression: str) -> None:
    ends = time.monotonic() + 60
    while not tab.ask(expression):
        assert time.monotonic() < ends, expression
        time.sleep(0.02)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_a_person_drops_a_picture(server: PageServer, tab: Page, width: int, dark: bool) -> None:
    tab.open(server.address, width, dark)
    until(tab, "document.getElementById('takes').textContent.includes('8×8 in colour')")
    tab.ask(DROP % base64.b64encode(png(200)).decode())
    until(tab, "document.querySelectorAll('.model').length == 2")
    said = "[...document.querySelectorAll('.said')].map(one => one.textContent)"
    assert tab.ask(said) == ["bright", "dark"]
    assert tab.ask("document.getElementById('verdict').textContent") == "The two models disagree."
    assert tab.ask("document.querySelectorAll('.row').length") == 6
    assert (
        tab.ask("[...document.querySelectorAll('.row span')].map(s => s.textContent)").count(
            NAMES[0]
        )
        == 2
    )  # a class's name is text, whatever it looks like
    assert tab.ask("document.querySelectorAll('.model img').length") == 0
    assert tab.ask("document.documentElement.scrollWidth") <= width  # nothing sticks out
    tab.screenshot(SCREENSHOTS / f"serve-{width}-{'dark' if dark else 'light'}.png")
    assert not tab.errors()
    assert all(url.startswith((server.address, "blob:")) for url in tab.requests())
    tab.ask(DROP % base64.b64encode(b"no picture").decode())
    until(tab, "document.getElementById('fault').textContent.includes('no picture')")
    assert tab.ask("document.querySelectorAll('.model').length") == 0
