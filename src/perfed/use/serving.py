"""A page on this computer: drop a picture, see what a site's model says, alone and with the others.

It listens on the loopback interface alone. A web page from elsewhere that is open in the same
browser could still send requests here, by a name of its own that leads to 127.0.0.1. So the Host of
every request must be this one, and what says where it comes from must say that it comes from here.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any

import numpy as np

from perfed.core.errors import ConfigError, PerfedError, RunError
from perfed.use.opening import Ready
from perfed.use.prediction import SURE

HOST = "127.0.0.1"
LIMIT = 32 * 2**20  # bytes of a picture's file
AT_ONCE = 4  # pictures that are read at a time; each may take half a gigabyte while it is decoded
PATIENCE = 20.0  # seconds that a request may take to arrive
SHOWN = 5  # classes
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src blob: data:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Asked:
    """The models that a page asks, by what they are called there."""

    models: Mapping[str, Ready]
    sure: float = SURE

    @classmethod
    def of(cls, model: Ready, alone: Ready | None, sure: float = SURE) -> Asked:
        for one in (model, alone):
            if one is not None and not one.needs.takes_pictures:
                raise ConfigError(
                    f"takes {one.needs.described()}, and a page shows pictures alone: use 'perfed "
                    "predict'",
                    "MODEL",
                )
        if alone is None:
            return cls({"This model": model}, sure)
        if alone.needs.classes != model.needs.classes or alone.needs.names != model.needs.names:
            raise ConfigError("has other classes than the model", "--alone")
        return cls({"With the federation": model, "Alone": alone}, sure)

    def about(self) -> dict[str, Any]:
        first = next(iter(self.models.values()))
        accuracies = {
            f"{title.lower()}: {name}": value
            for title, model in self.models.items()
            for name, value in model.card.items()
            if name == "test accuracy"
        }
        card = {name: value for name, value in first.card.items() if name != "test accuracy"}
        names = [first.needs.name(label) for label in range(first.needs.classes)]
        card |= accuracies | {"classes": ", ".join(names[:50]), "unsure": f"below {self.sure:g}"}
        return {"takes": first.needs.described(), "card": card, "limit": LIMIT}

    def answer(self, picture: bytes) -> dict[str, Any]:
        """What each model says about a picture, the file's bytes."""
        return {
            "models": [
                {"title": title, **self._said(model, model.needs.from_picture(picture))}
                for title, model in self.models.items()
            ]
        }

    def _said(self, model: Ready, x: np.ndarray) -> dict[str, Any]:
        (row,) = model.probabilities(x)
        best: Sequence[int] = np.argsort(-row, kind="stable")[:SHOWN].tolist()
        classes = [{"name": model.needs.name(n), "probability": float(row[n])} for n in best]
        return {"classes": classes, "unsure": bool(row[best[0]] < self.sure)}


class PageServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 16

    def __init__(self, asked: Asked, port: int = 0) -> None:
        self.asked = asked
        self.pages = {
            path: (resources.files("perfed.use").joinpath(file).read_bytes(), kind)
            for path, (file, kind) in FILES.items()
        }
        self.places = threading.BoundedSemaphore(AT_ONCE)
        self.one_by_one = threading.Lock()  # a model is no faster for two at a time
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise RunError(
                f"cannot listen on {HOST}, port {port}: {error.strerror}; choose another: --port"
            ) from None
        names = (HOST, "localhost")
        self.hosts = {f"{name}:{self.server_port}" for name in names}
        self.origins = {f"http://{host}" for host in self.hosts}

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever hangs up in the middle of a request is no fault."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "perfed", ""
    timeout = PATIENCE

    def do_GET(self) -> None:
        if not self._comes_from_here():
            return
        if self.path == "/about":
            self._say(HTTPStatus.OK, self.server.asked.about())
        elif self.path in self.server.pages:
            self._send(HTTPStatus.OK, *self.server.pages[self.path])
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def do_POST(self) -> None:
        if not self._comes_from_here():
            return
        if self.path != "/predict":
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the request does not say how long it is")
        elif len(length) > 12 or int(length) > LIMIT:
            most = f"at most {LIMIT // 2**20} MiB"
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the file is too large: {most}")
        elif not self.server.places.acquire(blocking=False):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many pictures at once: try again")
        else:
            try:
                self._predict(int(length))
            finally:
                self.server.places.release()

    def _predict(self, length: int) -> None:
        picture = self.rfile.read(length)
        if len(picture) < length:
            self._refuse(HTTPStatus.BAD_REQUEST, "the picture is cut off")
            return
        try:
            with self.server.one_by_one:
                answer = self.server.asked.answer(picture)
        except PerfedError as error:
            self._say(HTTPStatus.UNPROCESSABLE_ENTITY, {"error": f"this file {error}"})
        except MemoryError:
            self._refuse(HTTPStatus.INSUFFICIENT_STORAGE, "not enough memory for this picture")
        else:
            self._say(HTTPStatus.OK, answer)

    def _comes_from_here(self) -> bool:
        hosts = self.headers.get_all("Host", [])
        origin = self.headers.get("Origin")
        site = self.headers.get("Sec-Fetch-Site", "none")
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts:
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, f"open {self.server.address} instead")
            return False
        if site not in ("none", "same-origin") or (origin and origin not in self.server.origins):
            self._refuse(HTTPStatus.FORBIDDEN, "another page must not ask here")
            return False
        return True

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        """What was sent with the request is not read: the connection ends."""
        self.close_connection = True
        self._say(status, {"error": reason})

    def _say(self, status: HTTPStatus, values: Mapping[str, Any]) -> None:
        content = json.dumps(values, allow_nan=False).encode()
        self._send(status, content, "application/json; charset=utf-8")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is kept of what is asked."""
