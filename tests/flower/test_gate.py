"""The gate, by real sockets: what strangers may cost it, and what it says to them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import resource
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.control_pb2 import ListNodesResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from perfed.flower import gate as gate_module
from perfed.flower import registered
from perfed.flower.certificates import write_certificates
from perfed.flower.gate import ACTIVATE, LARGEST_BODY, NO_TLS, SMALL_BODY, gate
from perfed.flower.listener import Limits, listen
from perfed.flower.registered import KEY, NODES, SIGNATURE, SIGNED_AT, Registered

PATIENT = Limits(handshake=30, header=30, request=60, per_address=10, connections=20)


class Serving:
    """An application in a thread, as the gate serves it."""

    def __init__(self, app: Any, context: ssl.SSLContext, limits: Limits) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(
            listen(app, self._listener, context, gate_module._no_tls(), limits)
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._listener.close()


SITE_KEY = ec.generate_private_key(ec.SECP384R1())


def signed(key: ec.EllipticCurvePrivateKey = SITE_KEY, at: str = "") -> dict[str, str]:
    """As a supernode signs."""
    at = at or datetime.now(UTC).isoformat()
    own = {
        KEY: public_key_to_bytes(key.public_key()),
        SIGNATURE: sign_message(key, at.encode()),
    }
    return {name: b64encode(value).decode() for name, value in own.items()} | {SIGNED_AT: at}


class Superlink:
    """What is behind the gate: it knows the key "good", for the first time it is shown."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.keys: list[list[str]] = []
        self.asked = 0
        self.registered = [public_key_to_bytes(SITE_KEY.public_key())]
        routes = [
            Route(ACTIVATE, self.activate, methods=["POST"]),
            Route("/v1/fleet/push-object", self.take, methods=["POST"]),
            Route("/v1/fleet/pull-object", self.give, methods=["POST"]),
            Route(NODES, self.nodes, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)
        self._active = False

    async def activate(self, request: Request) -> Response:
        self.keys.append(request.headers.getlist("flwr-public-key"))
        if "flwr-timestamp" in request.headers:  # as Flower answers who signed at a wrong time
            return JSONResponse({"detail": "Invalid SuperNode authentication"}, 401)
        if request.headers["flwr-public-key"] != "good" or self._active:
            return JSONResponse({"code": 2004, "detail": "Failed to activate SuperNode."}, 412)
        self._active = True
        return Response(b"node")

    async def nodes(self, request: Request) -> Response:
        self.asked += 1
        known = [NodeInfo(public_key=key, status="online") for key in self.registered]
        return Response(ListNodesResponse(nodes_info=known).SerializeToString())

    async def take(self, request: Request) -> Response:
        self.received.append(0)
        with contextlib.suppress(ClientDisconnect):
            async for piece in request.stream():
                self.received[-1] += len(piece)
        return Response(b"taken")

    async def give(self, request: Request) -> Response:
        async def pieces() -> Any:
            for _ in range(20):
                yield b"x" * 2**20

        return StreamingResponse(pieces())


Door = tuple[int, ssl.SSLContext, Superlink]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate") / "certificates"
    write_certificates(folder, 0, [])
    return folder


@pytest.fixture
def open_gate(certificates: Path) -> Iterator[Callable[[Limits], Door]]:
    served: list[Serving] = []

    def start(limits: Limits = PATIENT) -> Door:
        own = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        own.load_cert_chain(certificates / "server.crt", certificates / "server.key")
        superlink = Superlink()
        served.append(Serving(superlink.app, own, Limits()))
        app = gate(f"127.0.0.1:{served[0].port}", certificates, Path("run"))
        served.append(Serving(app, own, limits))
        trusting = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        return served[1].port, trusting, superlink

    yield start
    for one in reversed(served):
        one.stop()


def ask(
    port: int, context: ssl.SSLContext, path: str = "/v1/fleet/push-object", **more: Any
) -> httpx.Response:
    with httpx.Client(verify=context, timeout=60) as client:
        return client.post(f"https://127.0.0.1:{port}{path}", **more)


def connected(
    port: int, context: ssl.SSLContext | None = None, source: str = "127.0.0.1"
) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", port), 60, (source, 0))
    return context.wrap_socket(plain, server_hostname="127.0.0.1") if context else plain


def is_closed(connection: socket.socket) -> bool:
    """Within a minute; by a reset, too."""
    try:
        while connection.recv(2**16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_what_passes_comes_out_as_it_went_in(open_gate: Callable[..., Door]) -> None:
    port, context, superlink = open_gate()
    body = b"x" * (5 * 2**20)
    assert ask(port, context, content=body, headers=signed()).content == b"taken"
    pieces = (body[:1000] for _ in range(3))
    assert ask(port, context, content=pieces, headers=signed()).content == b"taken"  # chunked
    assert superlink.received == [len(body), 3000]
    assert len(ask(port, context, "/v1/fleet/pull-object").content) == 20 * 2**20
    assert ask(port, context, "/v1/control/x").status_code == 403


@pytest.mark.attack(14)
@pytest.mark.parametrize("chunked", [False, True])
def test_600_megabytes_are_refused_early(
    chunked: bool, open_gate: Callable[..., Door], request: pytest.FixtureRequest
) -> None:
    port, context, superlink = open_gate()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
    request.addfinalizer(connection.close)
    piece, sent = b"x" * 2**20, 0

    def pieces() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(600):
            sent += len(piece)
            yield piece

    headers = signed() | ({} if chunked else {"Content-Length": str(600 * 2**20)})
    with contextlib.suppress(OSError):  # it is closed while this side still writes
        connection.request("POST", "/v1/fleet/push-object", pieces(), headers)
        assert connection.getresponse().status == 413
    assert sent < 2 * LARGEST_BODY
    assert sum(superlink.received) <= LARGEST_BODY
    assert ask(port, context, content=b"next").content == b"taken"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 60 * 1024  # kilobytes, of this side and the superlink, too


@pytest.mark.attack(14)
def test_a_large_body_goes_on_for_a_registered_key_alone(open_gate: Callable[..., Door]) -> None:
    """The superlink would keep it in memory before it looks who sends it."""
    port, context, superlink = open_gate()
    body = b"x" * (SMALL_BODY + 1)
    stranger, theirs = ec.generate_private_key(ec.SECP384R1()), signed()
    borrowed = signed(stranger) | {KEY: theirs[KEY]}
    nonsense = signed() | {SIGNATURE: "é", SIGNED_AT: "x"}
    for headers in ({}, signed(stranger), borrowed, {**theirs, SIGNED_AT: "then"}, {KEY: "????"}):
        assert ask(port, context, content=body, headers=headers).status_code == 401
        in_pieces = ask(port, context, content=iter([b"x"]), headers=headers)
        assert in_pieces.status_code == 401
    raw = [(name.encode(), value.encode("latin-1")) for name, value in nonsense.items()]
    assert ask(port, context, content=body, headers=raw).status_code == 401
    assert superlink.received == []
    assert superlink.asked < 5  # not for each of them
    assert ask(port, context, content=body, headers=theirs).content == b"taken"
    assert ask(port, context, content=body[1:]).content == b"taken"  # it decides itself


@pytest.mark.attack("stolen-key")
def test_a_large_body_of_a_key_that_was_unregistered_stays_outside(
    open_gate: Callable[..., Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The superlink would refuse it, but only once it has all of it in memory."""
    port, context, superlink = open_gate()
    body = b"x" * (SMALL_BODY + 1)
    for _ in range(3):
        assert ask(port, context, content=body, headers=signed()).content == b"taken"
    assert superlink.asked == 1
    superlink.registered.clear()
    monkeypatch.setattr(registered, "ANEW", 0.0)  # as half a minute later
    assert ask(port, context, content=body, headers=signed()).status_code == 401
    assert len(superlink.received) == 3


def test_a_site_that_is_known_does_not_wait_while_the_superlink_is_asked_of_strangers() -> None:
    asked = 0

    async def knows() -> tuple[bool, bool]:
        nonlocal asked
        superlink = Registered(httpx.AsyncClient())
        superlink._keys, superlink._asked = {b"known"}, time.monotonic() - registered.AGAIN
        answers = asyncio.Event()

        async def keys() -> set[bytes]:
            nonlocal asked
            asked += 1
            await answers.wait()
            return {b"known"}

        superlink.keys = keys  # type: ignore[method-assign]
        strangers = [asyncio.create_task(superlink._knows(b"stranger")) for _ in range(3)]
        await asyncio.sleep(0)
        known = await asyncio.wait_for(superlink._knows(b"known"), 10)
        answers.set()
        return known, any(await asyncio.gather(*strangers))

    assert asyncio.run(knows()) == (True, False)
    assert asked == 1


@pytest.mark.attack("gate-large-header")
def test_a_header_without_end_is_refused(open_gate: Callable[..., Door]) -> None:
    port, context, _ = open_gate()
    with connected(port, context) as slow:
        with contextlib.suppress(OSError):
            slow.sendall(b"POST /v1/fleet/x HTTP/1.1\r\n" + b"a: b\r\n" * 50_000)
        assert is_closed(slow)
    assert ask(port, context, content=b"next").content == b"taken"


@pytest.mark.attack("gate-slow-connections")
@pytest.mark.parametrize("begin", [None, b"", b"POST /v1/fleet/push-object HTTP/1.1\r\nx"])
def test_who_does_not_go_on_is_not_waited_for(
    begin: bytes | None, open_gate: Callable[..., Door]
) -> None:
    """Without TLS, without a header, with half of one."""
    port, context, _ = open_gate(Limits(handshake=0.5, header=0.5, request=60))
    with connected(port, None if begin is None else context) as slow:
        slow.sendall(begin or b"")
        assert is_closed(slow)


@pytest.mark.attack("gate-slow-connections")
def test_a_body_that_does_not_go_on_is_not_waited_for(open_gate: Callable[..., Door]) -> None:
    port, context, _ = open_gate(Limits(request=0.5))
    with connected(port, context) as slow:
        slow.sendall(b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\n")
        slow.sendall(b"Content-Length: 1000\r\n\r\nabc")
        assert is_closed(slow)
    with connected(port, context) as drop_by_drop:
        drop_by_drop.sendall(b"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\n")
        drop_by_drop.sendall(b"Content-Length: 60000\r\n\r\n")
        ends = time.monotonic() + 60
        with contextlib.suppress(OSError):
            while time.monotonic() < ends:
                drop_by_drop.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() < ends


@pytest.mark.attack("gate-many-connections")
def test_one_address_cannot_take_all_connections(open_gate: Callable[..., Door]) -> None:
    port, context, _ = open_gate()
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(port)) for _ in range(PATIENT.per_address)]
        more = [stack.enter_context(connected(port)) for _ in range(50)]
        assert all(is_closed(one) for one in more)
        other = httpx.HTTPTransport(verify=context, local_address="127.0.0.2")
        with httpx.Client(transport=other, timeout=60) as client:
            url = f"https://127.0.0.1:{port}/v1/fleet/push-object"
            assert client.post(url, content=b"next").content == b"taken"
        for n in (3, 4):  # all the others
            source = f"127.0.0.{n}"
            held += [stack.enter_context(connected(port, None, source)) for _ in range(10)]
        assert is_closed(stack.enter_context(connected(port, None, "127.0.0.5")))
        for one in held:
            one.close()
    deadline = time.monotonic() + 60
    while True:  # as soon as those are gone
        with contextlib.suppress(httpx.TransportError):
            assert ask(port, context, content=b"next").content == b"taken"
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.attack(39)
def test_who_speaks_no_tls_is_told_so_at_once(open_gate: Callable[..., Door]) -> None:
    """In the words of Flower's errors: its supernode prints them, and ends."""
    port, _, _ = open_gate()
    answer = httpx.post(f"http://127.0.0.1:{port}{ACTIVATE}", content=b"x", timeout=60)
    assert answer.status_code == 412
    assert answer.json()["extra"] == NO_TLS


@pytest.mark.attack(38)
def test_a_wrong_key_and_a_start_too_soon_are_told_apart(open_gate: Callable[..., Door]) -> None:
    port, context, _ = open_gate()

    def activate(key: str) -> httpx.Response:
        return ask(port, context, ACTIVATE, headers={"flwr-public-key": key}, content=b"x")

    assert "This key is not registered" in activate("bad").json()["extra"]
    assert activate("good").content == b"node"
    again = activate("good")
    assert again.status_code == 412
    assert "is still counted as connected" in again.json()["extra"]
    assert "This key is not registered" in activate("bad").json()["extra"]


def spoken(port: int, context: ssl.SSLContext, line: str, *headers: str, body: str = "") -> bytes:
    """What comes back for a request that no library would write."""
    lines = [f"POST {line} HTTP/1.1", "Host: x", "Connection: close", *headers, "", body]
    with connected(port, context) as connection:
        connection.sendall("\r\n".join(lines).encode("latin-1"))
        answer = b""
        while piece := connection.recv(2**16):
            answer += piece
    return answer


TO_CONTROL = "POST /v1/control/x HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.attack("gate-smuggling")
@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (["Content-Length: 5", CHUNKED], f"0\r\n\r\n{TO_CONTROL}"),
        (["Content-Length: 2", CHUNKED], "40\r\n" + "x" * 64 + "\r\n0\r\n\r\n"),
        ([f"Content-Length: {len(TO_CONTROL)}", "Content-Length: 0"], TO_CONTROL),
        (["Content-Length : 9"], TO_CONTROL),
        ([CHUNKED, "Transfer-Encoding: identity"], f"0\r\n\r\n{TO_CONTROL}"),
    ],
)
def test_a_body_with_two_ends_goes_nowhere(
    headers: list[str], body: str, open_gate: Callable[..., Door]
) -> None:
    port, context, superlink = open_gate()
    answer = spoken(port, context, "/v1/fleet/push-object", *headers, body=body)
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    assert superlink.received == []


@pytest.mark.attack("gate-odd-requests")
@pytest.mark.parametrize(
    "path",
    ["x%1b[2J", "x%20y", "x%3Fy", "x%23y", "%c3%a9", "%ef%bc%8e%ef%bc%8e/control", "x%5c..%5cy"],
)
def test_a_path_of_other_signs_is_refused_in_a_word(
    path: str, open_gate: Callable[..., Door]
) -> None:
    port, context, _ = open_gate()
    answer = spoken(port, context, f"/v1/fleet/{path}", "Content-Length: 0")
    assert answer.startswith(b"HTTP/1.1 403")


@pytest.mark.attack("gate-odd-requests")
def test_headers_pass_as_they_came(open_gate: Callable[..., Door]) -> None:
    """Bytes that are no ASCII, one header twice, and a Host that is a path."""
    port, context, superlink = open_gate()
    odd = ["flwr-public-key: \xe9", "flwr-public-key: b", "X: \xff", "Content-Length: 0"]
    assert spoken(port, context, ACTIVATE, *odd).startswith(b"HTTP/1.1 412")
    assert superlink.keys == [["\xe9", "b"]]
    host = "Host: y/v1/control/list-nodes?"
    assert spoken(port, context, ACTIVATE, host).startswith(b"HTTP/1.1 400")
    asked = ask(port, context, ACTIVATE, headers={"host": host[6:], "flwr-public-key": "good"})
    assert asked.content == b"node"  # where the path leads, not the host


@pytest.mark.attack("wrong-clock")
@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (40, "40 s ahead of the coordinator's, and at most 5 s are"),
        (-900, "900 s behind the coordinator's, and at most 300 s are"),
        (0, ""),
    ],
)
def test_a_site_with_a_wrong_clock_is_told_so(
    seconds: float, said: str, open_gate: Callable[..., Door]
) -> None:
    port, context, _ = open_gate()
    signed_at = (datetime.now(UTC) + timedelta(seconds=seconds + 0.4)).isoformat()
    answer = ask(port, context, ACTIVATE, headers={"flwr-timestamp": signed_at}, content=b"x")
    assert answer.status_code == (412 if said else 401)
    assert said in answer.json().get("extra", "")
    for odd in ("", "yesterday", "2026-01-01T00:00:00", "9" * 400):
        assert ask(port, context, ACTIVATE, headers={"flwr-timestamp": odd}).status_code == 401
