"""A gate before the superlink: sites may pass, nobody else.

Flower's superlink has one port for three things: sites fetch their messages there (``/v1/fleet``),
its operator starts runs and registers sites (``/v1/control``), and its own processes talk to it
(``/v1/runtime``). Only the first asks who is there. Whoever reaches the second can register a key
of their own or send code to every site. So the superlink listens on its own machine only, and the
world sees this gate, which lets the first pass.

The gate does not know who is there either; the superlink finds that out. So what anybody may send
it is bounded (:mod:`perfed.flower.listener`), it hands on what comes piece by piece, and a large
body only of a registered key: the superlink keeps it in memory.

One thing the gate answers itself: a site that comes when the run is over asks for a *handout*
(:mod:`perfed.flower.handout`). With TLS, its key must be registered at the superlink.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from perfed.core.errors import ConfigError
from perfed.flower.asking import LONGEST_QUESTION, PATH, Question
from perfed.flower.handout import find_handout
from perfed.flower.listener import BACKLOG, listen
from perfed.flower.protocol import Refused, one_line
from perfed.flower.registered import KEY, SIGNED_AT, Registered

SITES = "/v1/fleet/"
PLAIN = re.compile(r"[A-Za-z0-9_/-]+")  # what Flower's paths are made of
NOT_PASSED = {"connection", "expect", "host", "transfer-encoding"}
PATIENCE = httpx.Timeout(60.0)
LARGEST_BODY = 32 * 2**20  # bytes; Flower sends messages in pieces of 5 MiB
SMALL_BODY = 2**16  # bytes; of any other request of Flower's
CLOSED = {"connection": "close"}  # nothing more is read from there

ACTIVATE = f"{SITES}activate-node"
NOT_ACTIVATED = 2004  # Flower's number for it; a supernode prints what comes with it, and ends
AHEAD, BEHIND = 5.0, 300.0  # seconds by which Flower lets a site's clock differ
REFUSED = 409  # the status of a refusal; its text is for the site
SPEAKS_TLS = 412
MOST_SEEN = 10_000
FORGETS = 120.0  # seconds; Flower notices after 50 to 60 that a site is gone
NO_TLS = "this port speaks TLS: start the supernode with --root-certificates, not --insecure"
TOO_SOON = (
    "A site with this key was here {ago:.0f} s ago, and is still counted as connected: if it was "
    "just stopped, start it again in a minute."
)
WRONG_CLOCK = (
    "This site's clock is {seconds:.0f} s {way} the coordinator's, and at most {most:.0f} s are "
    "admitted: set the clock that is wrong, best by NTP."
)
UNKNOWN = (
    "This key is not registered at the coordinator: its public part goes into 'certificates' there."
)
OR_TOO_SOON = (
    " Or a site with it was connected when this gate was started, {age:.0f} s ago: then start it "
    "again in a minute."
)


class TooLarge(Exception):
    """A body of more bytes than any site sends."""


def gate(superlink: str, certificates: Path | None, run: Path) -> Starlette:
    """The application: what is for sites goes on to ``superlink`` (host:port), and back. Without
    certificates nobody speaks TLS or has a key."""
    client = httpx.AsyncClient(
        base_url=f"{'https' if certificates else 'http'}://{superlink}",
        verify=_trusted(certificates),
        timeout=PATIENCE,
        limits=httpx.Limits(max_connections=None),  # the listener has its own
    )
    registered = Registered(client)
    began = time.monotonic()
    seen: dict[str, float] = {}  # keys that the superlink knows, and when they were last here

    async def refuse(request: Request) -> Response:
        return PlainTextResponse("only sites pass here", 403, CLOSED)

    def too_large() -> Response:
        return PlainTextResponse("more bytes than any site sends", 413, CLOSED)

    async def refusal(request: Request, path: str) -> Response | None:
        """Why a request does not go on, before anything of its body is read."""
        if not PLAIN.fullmatch(path):
            return await refuse(request)
        if {"content-length", "transfer-encoding"} <= {*request.headers}:  # two ends of one body
            return PlainTextResponse("a body has one length", 400, CLOSED)
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > LARGEST_BODY:
            return too_large()
        is_large = "transfer-encoding" in request.headers or int(length) > SMALL_BODY
        if not is_large or certificates is None:
            return None
        try:
            is_known = await registered.has_sent(request.headers)
        except Refused as error:
            return PlainTextResponse(str(error), 502, CLOSED)
        return None if is_known else PlainTextResponse("a large body without a key", 401, CLOSED)

    def why_not(request: Request, status: int) -> str:
        """Where Flower lets no site in: what the site's log is to say of it."""
        if status == 401:  # of this Flower's supernode would say nothing
            return _wrong_clock(request.headers.get(SIGNED_AT, ""))
        if status != 412:
            return ""
        ago = time.monotonic() - seen.get(request.headers.get(KEY, ""), -float("inf"))
        return TOO_SOON.format(ago=ago) if ago < FORGETS else _unknown(began)

    async def let_pass(request: Request) -> Response:
        # What was checked is what is sent: the decoded path, and no way up out of it.
        path: str = request.scope["path"]  # of a URL the Host would be a part
        if refused := await refusal(request, path):
            return refused
        key = request.headers.get(KEY, "")
        try:
            answer = await client.send(
                client.build_request(
                    "POST", path, headers=_as_it_came(request), content=_body(request)
                ),
                stream=True,
            )
        except TooLarge:
            return too_large()
        except (httpx.TransportError, ClientDisconnect):
            return PlainTextResponse("the superlink does not answer", 502, CLOSED)
        if path == ACTIVATE and (why := why_not(request, answer.status_code)):
            await answer.aclose()
            return JSONResponse(_flower_error(why), 412)
        if answer.is_success and key:
            if len(seen) >= MOST_SEEN:  # a superlink that asks for no keys lets any pass
                seen.clear()
            seen[key] = time.monotonic()
        return StreamingResponse(_content(answer), answer.status_code, _passed(answer.headers))

    async def hand_out(request: Request) -> Response:
        try:
            question = Question.decode(await _small(request))
            if certificates is not None:
                question.check_signature()
                if question.key.encode() not in await registered.keys():
                    raise Refused(UNKNOWN)
            return FileResponse(find_handout(run, question.network))
        except (TooLarge, ClientDisconnect):
            return too_large()
        except Refused as error:
            return PlainTextResponse(one_line(str(error)), REFUSED, CLOSED)

    @asynccontextmanager
    async def closing(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    return Starlette(
        lifespan=closing,
        routes=[
            Route(f"{SITES}{{rest:path}}", let_pass, methods=["POST"]),
            Route(PATH, hand_out, methods=["POST"]),
            Route("/{rest:path}", refuse, methods=["GET", "POST", "PUT", "DELETE", "PATCH"]),
        ],
    )


def _trusted(certificates: Path | None) -> ssl.SSLContext | bool:
    if certificates is None:
        return False
    return ssl.create_default_context(cafile=str(certificates / "ca.crt"))


async def _small(request: Request) -> bytes:
    return b"".join([piece async for piece in _body(request, LONGEST_QUESTION)])


async def _body(request: Request, most: int = LARGEST_BODY) -> AsyncIterator[bytes]:
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > most:
            raise TooLarge
        yield piece


async def _content(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


def _wrong_clock(signed_at: str) -> str:
    """Why Flower refuses what was signed at this time; empty where that is not why."""
    try:
        age = (datetime.now(UTC) - datetime.fromisoformat(signed_at)).total_seconds()
    except (TypeError, ValueError, OverflowError):  # no time, or one that names no zone
        return ""
    if age < -AHEAD:
        return WRONG_CLOCK.format(seconds=-age, way="ahead of", most=AHEAD)
    if age > BEHIND:
        return WRONG_CLOCK.format(seconds=age, way="behind", most=BEHIND)
    return ""


def _unknown(began: float) -> str:
    """A gate that is old enough has seen every site that Flower still counts as connected."""
    age = time.monotonic() - began
    return UNKNOWN + (OR_TOO_SOON.format(age=age) if age < FORGETS else "")


def _flower_error(why: str) -> dict[str, int | str]:
    return {"code": NOT_ACTIVATED, "detail": "Failed to activate SuperNode.", "extra": why}


def _no_tls() -> bytes:
    """In plain HTTP, since that is what is spoken there."""
    body = json.dumps(_flower_error(NO_TLS)).encode()
    head = "HTTP/1.1 412 Precondition Failed\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


def _as_it_came(request: Request) -> list[tuple[bytes, bytes]]:
    """Bytes, each as often as it came: nobody behind here reads another one than the gate does."""
    return [(name, value) for name, value in request.headers.raw if name.decode() not in NOT_PASSED]


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in NOT_PASSED}


def serve(superlink: str, certificates: Path | None, run: Path, host: str, port: int) -> None:
    """Until it is stopped."""
    context = None if certificates is None else _own(certificates)
    try:
        listener = socket.create_server(
            (host, port), family=_family(host), backlog=BACKLOG, reuse_port=False
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", "--port") from None
    with listener:
        asyncio.run(listen(gate(superlink, certificates, run), listener, context, _no_tls()))


def _own(certificates: Path) -> ssl.SSLContext:
    for name in ("ca.crt", "server.crt", "server.key"):
        if not (certificates / name).is_file():
            raise ConfigError(f"no {name} in {certificates}", "--certificates")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    return context


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
