"""``perfed federation init``, ``perfed federation check``, ``perfed site check``."""

from __future__ import annotations

import re
import ssl
import stat
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    load_ssh_private_key,
    load_ssh_public_key,
)

from perfed import cli
from perfed.core.errors import ConfigError, PerfedError
from perfed.data import Split, build_federation, datasets, partitions
from perfed.flower.agreement import Agreement, built_in_names
from perfed.flower.coordinator import coordinate
from perfed.flower.initialise import check_coordinator, check_site, initialise, require_flower
from perfed.flower.settings import SiteData, read_coordinator, read_site
from tests.flower.setting import desk
from tests.flower.test_site import PLAN


def test_what_is_written_is_a_federation_that_runs(tmp_path: Path) -> None:
    folder = tmp_path / "hospitals"
    initialise(folder, 4, tls=False, hosts=[])
    assert sorted(path.name for path in (folder / "app").iterdir()) == ["pyproject.toml"]
    said = check_coordinator(folder / "coordinator.yaml")
    (digest,) = re.findall(r"public set: (\w+)", said[1])
    for client in range(4):
        found = check_site(folder / f"site-{client}.yaml")
        assert f"public set: {digest}, as the coordinator's" in found.lines
        assert not found.faults
    text = (folder / "coordinator.yaml").read_text()
    (folder / "coordinator.yaml").write_text(text.replace("rounds: 10", "rounds: 1"))
    result = coordinate(folder / "coordinator.yaml", desk(folder), [].append)
    assert result.summary["finished"]
    assert result.per_client()["architecture"].nunique() == 3


def test_its_sites_work_with_every_algorithm_and_say_the_defaults(tmp_path: Path) -> None:
    initialise(tmp_path / "f", 1, tls=False, hosts=[])
    agrees = read_site(tmp_path / "f" / "site-0.yaml").agrees
    assert replace(agrees, algorithms=()) == Agreement()
    for name in built_in_names("algorithms"):
        assert agrees.plan(PLAN.to_mapping() | {"algorithm": name}, 50)


def test_every_option_with_a_comment_is_one(tmp_path: Path) -> None:
    """A key that was renamed would be refused when the file is read."""
    initialise(tmp_path / "f", 2, tls=False, hosts=[])
    written = yaml.safe_load((tmp_path / "f" / "coordinator.yaml").read_text())
    options = read_coordinator(tmp_path / "f" / "coordinator.yaml")
    assert set(written) <= set(vars(options))
    assert options.experiment.name == "f"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minimum": 4}, "minimum: 4 answers of 2 clients a round"),
        ({"start_with": 3}, "start_with: 3 of 2 clients"),
        ({"experiment": {"fresh_test": 50}}, "experiment.fresh_test: there are no samples here"),
        ({"experiment": {"shared_test": True}}, "experiment.shared_test: there are no samples"),
        (
            {"experiment": {"shift": {"name": "labels", "groups": [1, 1]}}},
            "experiment.shift: there are no samples here",
        ),
    ],
)
def test_what_a_coordinator_cannot_do(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    initialise(tmp_path / "f", 2, tls=False, hosts=[])
    path = tmp_path / "f" / "coordinator.yaml"
    written = yaml.safe_load(path.read_text())
    experiment = written["experiment"] | change.get("experiment", {})
    path.write_text(yaml.safe_dump(written | change | {"experiment": experiment}))
    with pytest.raises(ConfigError, match=message):
        read_coordinator(path)


def test_nothing_is_overwritten_and_nothing_is_left_half_written(tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    folder.mkdir()
    (folder / "mine").write_text("keep")
    with pytest.raises(PerfedError, match="exists already"):
        initialise(folder, 3, tls=False, hosts=[])
    with pytest.raises(PerfedError, match="cannot name a folder"):
        initialise(tmp_path / "two words", 3, tls=False, hosts=[])
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert [path.name for path in folder.iterdir()] == ["mine"]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "link.example.org", "10.0.0.7"])
def test_the_certificate_is_good_for_its_hosts_and_no_other(tmp_path: Path, host: str) -> None:
    """Predictor by OpenSSL: a handshake with a verifying client."""
    hosts = ["link.example.org", "10.0.0.7"]
    initialise(tmp_path / "f", 1, tls=True, hosts=hosts)
    initialise(tmp_path / "g", 1, tls=True, hosts=hosts)
    certificates = tmp_path / "f" / "certificates"
    handshake(certificates, certificates, host)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(certificates, certificates, "elsewhere.example.org")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(certificates, tmp_path / "g" / "certificates", host)


def handshake(server: Path, trusted: Path, host: str) -> None:
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_cert_chain(server / "server.crt", server / "server.key")
    verifying = ssl.create_default_context(cafile=str(trusted / "ca.crt"))
    verifying.verify_flags |= ssl.VERIFY_X509_STRICT
    client = verifying.wrap_bio(back, there, server_hostname=host)
    far = listening.wrap_bio(there, back, server_side=True)
    for _ in range(4):
        for side in (client, far):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == "TLSv1.3"


def test_keys_are_what_flower_wants_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    initialise(tmp_path / "f", 2, tls=True, hosts=[])
    certificates = tmp_path / "f" / "certificates"
    for client in range(2):
        private = load_ssh_private_key((certificates / f"site-{client}").read_bytes(), None)
        public = load_ssh_public_key((certificates / f"site-{client}.pub").read_bytes())
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        assert isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == public
    for name in ("ca.key", "server.key", "site-0", "site-1"):
        assert stat.S_IMODE((certificates / name).stat().st_mode) == 0o600


def test_the_commands_are_shown_and_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def perfed(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["perfed", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    code, out, _ = perfed("federation", "init", "trial", "--tls", "--sites", "2", "--host", "link")
    assert code == 0
    assert out.count("perfed site start kits/site-") == 2
    assert "perfed federation serve" in out
    assert perfed("federation", "check", "trial/coordinator.yaml")[0] == 0
    assert perfed("site", "check", "trial/site-0.yaml")[0] == 0
    text = (tmp_path / "trial" / "site-0.yaml").read_text()
    (tmp_path / "trial" / "site-0.yaml").write_text(text.replace("classes: 10", "classes: 9"))
    code, out, wrong = perfed("site", "check", "trial/site-0.yaml")
    assert (code, out, wrong.count("\n")) == (2, "", 1)
    assert "label 9 in the data" in wrong
    if not torch.cuda.is_available():
        (tmp_path / "trial" / "site-0.yaml").write_text(
            text.replace("device: auto", "device: cuda")
        )
        code, out, wrong = perfed("site", "check", "trial/site-0.yaml")
        assert (code, out, wrong.count("\n")) == (2, "", 1)
        assert wrong.startswith("perfed: device 'cuda' cannot be used: ")
    code, _, wrong = perfed("site", "check", "nowhere.yaml")
    assert (code, wrong) == (2, "perfed: no such file: nowhere.yaml\n")
    code, _, wrong = perfed("site", "check", "trial")
    assert (code, wrong) == (2, "perfed: trial is a folder: name the .yaml file in it\n")
    code, _, wrong = perfed("site", "check", "trial/kits/site-0.tar.gz")
    assert (code, wrong.count("\n")) == (2, 1)
    assert "site-0.tar.gz is a kit: 'perfed site start' unpacks it" in wrong
    code, _, wrong = perfed("federation", "gate", "--certificates", "nowhere")
    assert (code, wrong) == (2, "perfed: --certificates: no ca.crt in nowhere\n")


@pytest.mark.parametrize("version", [None, "1.43.0", "1.4.1"])
def test_without_flower_one_line_says_what_to_install(
    version: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(ConfigError, match=r"pip install 'perfed\[flower\]'"):
        require_flower()
    with pytest.raises(ConfigError):
        initialise(tmp_path / "f", 3, tls=True, hosts=[])


def test_a_site_beyond_those_that_a_partition_leaves() -> None:
    digits = datasets.build("digits")
    skewed = partitions.build({"name": "dirichlet", "alpha": 0.05, "repair": False})
    data = SiteData(dataset=digits, partition=skewed, clients=40)
    left = build_federation(digits, skewed, Split(), 40, 0).clients
    assert len(data.load(left - 1, Split(), 0)[2].train)
    with pytest.raises(ConfigError, match=rf"client {left}: the partition leaves only {left}"):
        data.load(left, Split(), 0)
