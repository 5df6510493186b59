"""A gate before the superlink: sites may pass, nobody else.

Flower's superlink has one port for three things: sites fetch their messages there (``/v1/fleet``),
its operator starts runs and registers sites (``/v1/control``), and its own processes talk to it
(``/v1/runtime``). Only the first asks who is there. Whoever reaches the second can register a key
of their own or send code to every site. So the superlink listens on its own machine only, and the
world sees this gate, which lets the first pass.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from perfed.core.errors import ConfigError

SITES = "/v1/fleet/"
NOT_PASSED = {"connection", "content-encoding", "content-length", "host", "transfer-encoding"}
PATIENCE = httpx.Timeout(60.0)


def gate(superlink: str, certificates: Path) -> Starlette:
    """The application: what is for sites goes on to ``superlink`` (host:port), and back."""
    trusted = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    client = httpx.AsyncClient(base_url=f"https://{superlink}", verify=trusted, timeout=PATIENCE)

    async def refuse(request: Request) -> Response:
        return PlainTextResponse("only sites pass here", 403)

    async def let_pass(request: Request) -> Response:
        # What was checked is what is sent: the decoded path, and no way up out of it.
        path = request.url.path
        if ".." in path or "%" in path:
            return await refuse(request)
        try:
            answer = await client.post(
                path, headers=_passed(request.headers), content=await request.body()
            )
        except httpx.TransportError:
            return PlainTextResponse("the superlink does not answer", 502)
        return Response(answer.content, answer.status_code, _passed(answer.headers))

    return Starlette(
        routes=[
            Route(f"{SITES}{{rest:path}}", let_pass, methods=["POST"]),
            Route("/{rest:path}", refuse, methods=["GET", "POST", "PUT", "DELETE", "PATCH"]),
        ]
    )


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in NOT_PASSED}


def serve(superlink: str, certificates: Path, host: str, port: int) -> None:
    """Until it is stopped."""
    for name in ("ca.crt", "server.crt", "server.key"):
        if not (certificates / name).is_file():
            raise ConfigError(f"no {name} in {certificates}", "--certificates")
    uvicorn.run(
        gate(superlink, certificates),
        host=host,
        port=port,
        ssl_certfile=certificates / "server.crt",
        ssl_keyfile=certificates / "server.key",
        log_level="warning",
    )
