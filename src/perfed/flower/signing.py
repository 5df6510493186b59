"""A Flower app without code, signed: what a site's supernode runs, and nothing else.

Flower sends an app to every site and runs it there. A supernode with ``--trusted-entities`` runs an
app only if one of these keys has signed it. Flower itself takes signatures from its hub alone. Here
they are made and kept without it:

    app.fab                 the app, as Flower packs it
    app.signatures.json     who has signed these bytes: key id → signature and time
    trusted-entities.yaml   at a site, beside its key: key id → public key

A signature is Flower's own: Ed25519, over the time and the SHA-256 of the app. What Flower's hub
would do, :func:`start` does: it puts the app with its signatures into the superlink's database.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import time
import tomllib
import warnings
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import click
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from perfed.config import dump_yaml
from perfed.core.errors import ConfigError, RunError
from perfed.core.tensorfile import write_atomically

COMPONENTS = {
    "serverapp": "perfed.flower.server_app:app",
    "clientapp": "perfed.flower.client_app:app",
}
FILES = {"pyproject.toml", ".info/CONTENT"}
LARGEST = 2**16  # bytes of a file in an app without code
SIGNATURES, TRUSTED = "app.signatures.json", "trusted-entities.yaml"


def build(app: Path) -> bytes:
    """As ``flwr run`` would send this folder."""
    from flwr.cli.build import build_fab_from_disk

    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # Flower's own
        content: bytes = build_fab_from_disk(app)
    return content


def check_without_code(content: bytes) -> dict[str, Any]:
    """That all it holds is where perfed's two components are; returns its ``pyproject.toml``."""
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            names = [info.filename for info in archive.infolist()]
            more = sorted({*names} - FILES) or sorted(n for n in names if names.count(n) > 1)
            if more:
                raise ConfigError(f"the app has a file of its own, {more[0]!a}: it is not signed")
            if any(info.file_size > LARGEST for info in archive.infolist()):
                raise ConfigError(f"the app has a file of more than {LARGEST} bytes")
            project = tomllib.loads(archive.read("pyproject.toml").decode())
            components = project["tool"]["flwr"]["app"]["components"]
            needs = project["project"].get("dependencies", [])
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise ConfigError(f"this is no Flower app: {type(error).__name__}") from None
    if components != COMPONENTS:
        raise ConfigError(f"the app runs {components!a}, not perfed's own: it is not signed")
    if needs:
        raise ConfigError(f"the app would install {needs!a}: it is not signed")
    return project


def run_nothing_else() -> None:
    """In this process and those that it forks, a site's Flower runs no app with code of its own,
    whoever has signed it. Flower unpacks an app with this function before it looks into it."""
    module = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    install = module.install_from_fab

    def checked(content: bytes | Path, *rest: Any, **more: Any) -> Any:
        check_without_code(content if isinstance(content, bytes) else content.read_bytes())
        return install(content, *rest, **more)

    module.install_from_fab = checked  # type: ignore[attr-defined]


def sign(app: Path, key: Path) -> list[str]:
    """Sign ``app.fab``: adds to the signatures beside it, and writes beside the key whom a site
    with this key trusts. Returns what was signed."""
    content = _read(app)
    project = check_without_code(content)
    private = _private_key(key)
    signed_at = int(time.time())
    digest = hashlib.sha256(content).digest()
    signature = private.sign(signed_at.to_bytes(8, "big") + digest)
    public = private.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    key_id = f"fpk_{hashlib.sha256(public.encode()).hexdigest()[:32]}"
    entry = {
        "signature": base64.urlsafe_b64encode(signature).rstrip(b"=").decode(),
        "signed_at": signed_at,
    }
    signatures = signatures_of(app) | {key_id: entry}
    write_atomically(app.with_name(SIGNATURES), f"{json.dumps(signatures, indent=1)}\n".encode())
    write_atomically(key.with_name(TRUSTED), dump_yaml({key_id: public}).encode())
    config = project["tool"]["flwr"]["app"].get("config", {})
    return [
        f"signed: {app}, sha256 {digest.hex()}; it has no code, and sets {config}",
        f"signatures: {app.with_name(SIGNATURES)}",
        f"whom a site with this key trusts: {key.with_name(TRUSTED)}",
    ]


def signatures_of(app: Path) -> dict[str, Any]:
    path = app.with_name(SIGNATURES)
    if not path.is_file():
        return {}
    try:
        signatures = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is corrupt: {error}") from None
    if not isinstance(signatures, dict):
        raise RunError(f"{path} is corrupt: it holds a {type(signatures).__name__}")
    return signatures


def start(app: Path, database: Path, show: bool = True) -> int:
    """Starts the run of an app: of a folder, as ``flwr run`` does, or of a signed ``app.fab``.
    Shows what it says until it ends. Returns Flower's number of the run."""
    from flwr.cli.flower_config import read_superlink_connection
    from flwr.cli.log import start_stream
    from flwr.cli.utils import flwr_cli_exc_handler, init_http_client_from_connection
    from flwr.common.serde import fab_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    content = build(app) if app.is_dir() else _read(app)
    project = check_without_code(content)
    if app.is_dir():
        app_id, fab = "", Fab(hashlib.sha256(content).hexdigest(), content, {})
    else:
        app_id = f"@{project['tool']['flwr']['app']['publisher']}/{project['project']['name']}"
        fab = Fab(_store_signed(app, content, app_id, database), b"", {})
    try:
        client = init_http_client_from_connection(read_superlink_connection(None))
        try:
            asked = StartRunRequest(fab=fab_to_proto(fab), app_spec=app_id)
            with flwr_cli_exc_handler():
                answer = client.StartRun(asked)
            if not answer.HasField("run_id"):
                raise RunError("the superlink does not start the run; its log says more")
            run_id: int = answer.run_id
            print(f"run {run_id} is started", flush=True)
            if show:
                start_stream(run_id, client)
            return run_id
        finally:
            client.close()
    except click.ClickException as error:
        raise RunError(_with_a_way_out(error.format_message())) from None


def _with_a_way_out(said: str) -> str:
    if "SuperLink is unavailable" not in said:
        return said
    return f"{said.rstrip('.')}. 'perfed federation serve' must run here"


def _store_signed(app: Path, content: bytes, app_id: str, database: Path) -> str:
    signatures = signatures_of(app)
    if not signatures:
        raise RunError(f"nobody has signed {app}: 'perfed site sign {app} --key KEY' does")
    if not database.is_file():
        raise RunError(
            f"no {database}: 'perfed federation serve' first (or Flower's own superlink, with "
            f"'--database {database}')"
        )
    return _store(content, signatures, app_id, database)


def _store(content: bytes, signatures: dict[str, Any], app_id: str, database: Path) -> str:
    """Into the superlink's database, by Flower's own code."""
    from flwr.common.constant import NOOP_FLWR_AID
    from flwr.server.superlink.linkstate import LinkStateFactory
    from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
    from flwr.supercore.fab import Fab
    from flwr.supercore.object_store import ObjectStoreFactory
    from flwr.superlink.federation import NoOpFederationManager

    path = str(database.absolute())
    verifications = {key_id: json.dumps(entry) for key_id, entry in signatures.items()}
    # Flower's word for "there are signatures"; without it, a supernode looks at none.
    fab = Fab(
        hashlib.sha256(content).hexdigest(), content, verifications | {"valid_license": "Valid"}
    )
    state = LinkStateFactory(path, NoOpFederationManager(), ObjectStoreFactory(path)).state()
    stored: str = state.store_app(
        fab, NOOP_FEDERATION_ID, app_id, TaskType.SERVER_APP, NOOP_FLWR_AID
    )
    return stored


def _private_key(path: Path) -> Ed25519PrivateKey:
    try:
        key = load_ssh_private_key(_read(path), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            f"{path} is no key to sign with: 'ssh-keygen -t ed25519 -N \"\" -f signer' makes one",
            "--key",
        )
    return key


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
