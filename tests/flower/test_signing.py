"""An app that is signed at sites, and what their supernodes do with any other (ATTACKS.md 22)."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import warnings
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from flwr.supercore.fab import Fab
from flwr.supernode.cli.flower_supernode import (
    _try_obtain_trusted_entities,
    _validate_public_keys_ed25519,
)
from flwr.supernode.start_client_internal import _verify_fab

from perfed import cli
from perfed.core.errors import PerfedError
from perfed.flower.certificates import write_node_key, write_signing_key
from perfed.flower.initialise import APP, initialise
from perfed.flower.signing import (
    build,
    check_without_code,
    run_nothing_else,
    sign,
    signatures_of,
    start,
)

PYPROJECT = APP.format(coordinator="coordinator.yaml")


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return packed(tmp_path, PYPROJECT)


def packed(folder: Path, pyproject: str, **more: str) -> Path:
    """A folder, as Flower packs it."""
    for name, text in {"pyproject.toml": pyproject, **more}.items():
        path = folder / "app" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "app.fab").write_bytes(build(folder / "app"))
    return folder / "app.fab"


def runs_at(trusted: Path, content: bytes, signatures: dict[str, Any]) -> bool:
    """What Flower's supernode decides, by its own code."""
    entities = _try_obtain_trusted_entities(trusted)
    assert entities
    _validate_public_keys_ed25519(entities)
    told = {key_id: json.dumps(entry) for key_id, entry in signatures.items()}
    return _verify_fab(Fab(hashlib.sha256(content).hexdigest(), content, told), entities)


@pytest.mark.attack(22)
def test_a_supernode_runs_what_its_site_has_signed_and_nothing_else(
    app: Path, tmp_path: Path
) -> None:
    """Two sites, each with a key of its own, sign the same app; a third one has not."""
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
        write_signing_key(tmp_path / name / "signer")
    for name in ("one", "two"):
        said = sign(app, tmp_path / name / "signer")
        assert hashlib.sha256(app.read_bytes()).hexdigest() in said[0]
    other = tmp_path / "other"
    other.mkdir()
    sign(packed(other, PYPROJECT + "\n"), tmp_path / "three" / "signer")
    signatures = signatures_of(app)
    assert len(signatures) == 2
    for name, runs in (("one", True), ("two", True), ("three", False)):
        trusted = tmp_path / name / "trusted-entities.yaml"
        assert len(yaml.safe_load(trusted.read_text())) == 1
        assert runs_at(trusted, app.read_bytes(), signatures) is runs
        assert not runs_at(trusted, app.read_bytes() + b"x", signatures)  # another app
        assert not runs_at(trusted, app.read_bytes(), {})
        moved = {key: e | {"signed_at": e["signed_at"] + 1} for key, e in signatures.items()}
        assert not runs_at(trusted, app.read_bytes(), moved)


OWN = {"own.py": "app = None"}
SHADOW = {"perfed/flower/client_app.py": "app = None"}


@pytest.mark.attack(22)
@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        (("", ""), OWN, "the app has a file of its own, 'own.py'"),
        (("", ""), SHADOW, "the app has a file of its own, 'perfed/flower/client_app.py'"),
        (("perfed.flower.client_app:app", "os:app"), {}, "the app runs"),
        (("dependencies = []", 'dependencies = ["evil"]'), {}, "the app would install ['evil']"),
    ],
)
def test_an_app_with_code_of_its_own_is_not_signed(
    change: tuple[str, str], more: dict[str, str], said: str, tmp_path: Path
) -> None:
    write_signing_key(tmp_path / "signer")
    app = packed(tmp_path, PYPROJECT.replace(*change) if change[0] else PYPROJECT, **more)
    with pytest.raises(PerfedError, match=r".") as refused:
        sign(app, tmp_path / "signer")
    assert said in str(refused.value)
    assert not (tmp_path / "trusted-entities.yaml").exists()
    assert signatures_of(app) == {}


@pytest.mark.attack(22)
def test_a_site_that_perfed_started_unpacks_no_app_with_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flower = importlib.import_module("flwr.supernode.runtime.run_clientapp")
    unpacked: list[bytes] = []
    monkeypatch.setattr(flower, "install_from_fab", lambda app, **_: unpacked.append(app))
    run_nothing_else()
    honest, hostile = packed(tmp_path / "a", PYPROJECT), packed(tmp_path / "b", PYPROJECT, **OWN)
    with pytest.raises(PerfedError, match="a file of its own"):
        flower.install_from_fab(hostile.read_bytes(), skip_prompt=True)
    flower.install_from_fab(honest.read_bytes(), skip_prompt=True)
    assert unpacked == [honest.read_bytes()]
    # A Flower that unpacks apps in another way must be looked at again.
    assert "install_from_fab" in flower.run_clientapp.__code__.co_names


def zipped(*files: tuple[str, bytes]) -> bytes:
    buffer = BytesIO()
    quiet = warnings.catch_warnings(action="ignore")  # a name that is there twice
    with quiet, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            archive.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.attack(22)
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no Flower app"),
        (b"PK" + b"\0" * 30, "no Flower app"),
        (zipped(), "no Flower app"),
        (zipped(("pyproject.toml", b"\xff")), "no Flower app"),
        (zipped(("pyproject.toml", b"tool = 3")), "no Flower app"),
        (zipped(("pyproject.toml", b"#" * 10**8)), "more than 65536 bytes"),
        (zipped(("pyproject.toml", b""), ("pyproject.toml", b"#")), "a file of its own"),
        (zipped(("pyproject.toml", b""), ("../x", b"")), "a file of its own, '../x'"),
    ],
)
def test_what_is_no_app_is_one_line(content: bytes, said: str) -> None:
    with pytest.raises(PerfedError, match=said):
        check_without_code(content)


def perfed(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., tuple[Any, str, str]]:
    def run(*words: str) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["perfed", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return run


@pytest.mark.attack(22)
def test_init_with_tls_sets_up_whom_its_sites_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "trial"
    *_, last = initialise(folder, 1, tls=True, hosts=[])
    assert last == "perfed federation start"
    trusted = folder / "certificates" / "trusted-entities.yaml"
    app = folder / "app.fab"
    assert runs_at(trusted, app.read_bytes(), signatures_of(app))
    assert "node_keys: true" in (folder / "coordinator.yaml").read_text()
    run = perfed(monkeypatch, capsys)
    write_signing_key(tmp_path / "signer")
    code, out, _ = run("site", "sign", str(app), "--key", str(tmp_path / "signer"))
    assert (code, len(signatures_of(app))) == (0, 2)
    assert "it has no code" in out
    write_node_key(tmp_path / "node")
    for key in ("node", "node.pub", "nowhere"):
        code, _, wrong = run("site", "sign", str(app), "--key", str(tmp_path / key))
        assert (code, wrong.count("\n")) == (2, 1)


def test_a_superlink_that_does_not_run_is_told_with_what_starts_it(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(_: object) -> None:
        raise click.ClickException("Connection to the SuperLink is unavailable. Please check it.")

    monkeypatch.setattr("flwr.cli.utils.init_http_client_from_connection", nobody)
    monkeypatch.setattr("flwr.cli.flower_config.read_superlink_connection", lambda _: None)
    with pytest.raises(PerfedError, match="'perfed federation serve' must run here"):
        start(app.parent / "app", tmp_path / "superlink.db")


def test_what_cannot_be_started_is_one_line(app: Path, tmp_path: Path) -> None:
    with pytest.raises(PerfedError, match="nobody has signed"):
        start(app, tmp_path / "superlink.db")
    write_signing_key(tmp_path / "signer")
    sign(app, tmp_path / "signer")
    with pytest.raises(PerfedError, match="'perfed federation serve' first"):
        start(app, tmp_path / "superlink.db")
    for text in ("[]", "{"):
        app.with_name("app.signatures.json").write_text(text)
        with pytest.raises(PerfedError, match="is corrupt"):
            start(app, tmp_path / "superlink.db")
