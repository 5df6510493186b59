"""HTTP for strangers, with TLS or without: what one connection may cost before anybody knows who
is there.

A connection has so many seconds to begin TLS, to send a header, and to send a body and fetch the
answer; there are so many at a time, and so many from one address, so that nobody takes all of
them. uvicorn reads HTTP, in the strict parser that also bounds a header.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

HANDSHAKE = b"\x16"  # the first byte of TLS
BACKLOG = 256


@dataclass(frozen=True)
class Limits:
    """Seconds and numbers. A site of Flower has one or two connections, each for a moment."""

    handshake: float = 10.0
    header: float = 10.0
    request: float = 120.0
    """From the header to the end of the answer."""
    header_bytes: int = 16 * 1024
    connections: int = 400
    per_address: int = 50


LIMITS = Limits()


async def listen(
    app: Starlette,
    listener: socket.socket,
    context: ssl.SSLContext | None,
    no_tls: bytes = b"",
    limits: Limits = LIMITS,
) -> None:
    """Until it is cancelled. ``no_tls`` is for those who do not begin TLS where there is a
    ``context`` for it."""
    config = uvicorn.Config(
        app,
        http=H11Protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=limits.header_bytes,
    )
    config.load()
    state, loop = ServerState(), asyncio.get_running_loop()
    open_at: Counter[str] = Counter()
    tasks: set[asyncio.Task[None]] = set()

    async def one(connection: socket.socket) -> None:
        with suppress(OSError, TimeoutError):  # it went away, or speaks no TLS that is spoken here
            if context and not await _begins_tls(connection, limits.handshake, no_tls):
                return
            seconds = limits.handshake if context else None
            _, protocol = await loop.connect_accepted_socket(
                lambda: _Limited(config, state, limits),
                connection,
                ssl=context,
                ssl_handshake_timeout=seconds,
                ssl_shutdown_timeout=seconds,
            )
            await protocol.closed

    def ended(task: asyncio.Task[None], address: str) -> None:
        tasks.discard(task)
        open_at[address] -= 1
        if not open_at[address]:
            del open_at[address]

    async def accept() -> None:
        try:
            connection, (address, *_) = await loop.sock_accept(listener)
        except OSError:  # no more files, say: those that are open will end
            await asyncio.sleep(0.1)
            return
        if len(tasks) >= limits.connections or open_at[address] >= limits.per_address:
            connection.close()
            return
        open_at[address] += 1
        task = loop.create_task(one(connection))
        tasks.add(task)
        task.add_done_callback(partial(ended, address=address))

    listener.setblocking(False)
    async with app.router.lifespan_context(app):
        try:
            while True:
                await accept()
                await asyncio.sleep(0)  # a flood of them must not keep the others from their turn
        finally:
            for protocol in list(state.connections):
                protocol.transport.abort()
            await asyncio.gather(*tasks, *state.tasks, return_exceptions=True)


async def _begins_tls(connection: socket.socket, seconds: float, else_say: bytes) -> bool:
    """Whether its first byte is that of TLS; where it is not, it is closed."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    begins = False
    try:
        async with asyncio.timeout(seconds):
            loop.add_reader(connection, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(connection)
            first = connection.recv(1, socket.MSG_PEEK)
            begins = first == HANDSHAKE
            if first and not begins:
                await loop.sock_sendall(connection, else_say)
    finally:
        if not begins:
            connection.close()
    return begins


class _Limited(H11Protocol):
    """One connection, with a clock for each part of a request."""

    def __init__(self, config: uvicorn.Config, state: ServerState, limits: Limits) -> None:
        super().__init__(config, state, {})
        self.closed: asyncio.Future[None] = self.loop.create_future()
        self._limits = limits
        self._part: Any = None
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_clock()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_clock()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_clock()
        if not self.closed.done():
            self.closed.set_result(None)

    def _set_clock(self) -> None:
        """Anew with each part: between two requests it waits for a header."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._part == (self.cycle, answering) or self.closed.done():
            return
        self._part = (self.cycle, answering)
        self._stop_clock()
        seconds = self._limits.request if answering else self._limits.header
        self._clock = self.loop.call_later(seconds, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
