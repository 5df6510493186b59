"""Real processes: a superlink, three supernodes with a network each, ``flwr run``; kill -9; TLS."""

from __future__ import annotations

import http.client
import json
import shutil
import ssl
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)

from perfed import Result
from perfed.core import tensorfile
from perfed.core.predictor import Mixture
from perfed.flower.certificates import fingerprint, write_certificates, write_node_key
from perfed.flower.coordinator import coordinate
from perfed.flower.initialise import APP
from perfed.flower.protocol import Envelope
from perfed.flower.signing import build, sign
from tests import warm
from tests.flower.processes import BIN, Network, Process, network, wait_until
from tests.flower.setting import desk, personal_checkpoint, simulated, write_federation

# Every message starts a process at its site, which imports Flower and torch: seconds each. So they
# are forked from one that has imported them. What comes back after a kill starts from nothing.
PROCESSES: dict[str, Any] = {"poll": 0.3, "deadline": 120}


def start(net: Network, folder: Path, name: str = "run") -> Process:
    app = folder / "app"
    app.mkdir(exist_ok=True)
    coordinator = folder / "coordinator.yaml"
    (app / "pyproject.toml").write_text(APP.format(coordinator=coordinator))
    return net.run(name, app, coordinator)


def start_signed(net: Network, folder: Path, signer: Path) -> Process:
    """The same app, packed and signed."""
    (folder / "app").mkdir()
    text = APP.format(coordinator=folder / "coordinator.yaml")
    (folder / "app" / "pyproject.toml").write_text(text)
    (folder / "app.fab").write_bytes(build(folder / "app"))
    sign(folder / "app.fab", signer)
    command = ["perfed", "federation", "start", str(folder / "app.fab")]
    return net.start("signed", *command, "--database", str(net.folder / "superlink.db"))


HOSTILE_SERVER = """
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    asked = [Message(RecordDict(), node, "query") for node in grid.get_node_ids()]
    for answer in grid.send_and_receive(asked, timeout=240):
        print("answer:", answer.error.reason if answer.has_error() else "none", flush=True)
"""
HOSTILE_CLIENT = """
from pathlib import Path

Path({ran!r}).touch()
from flwr.clientapp import ClientApp

app = ClientApp()
"""


def start_hostile(net: Network, folder: Path) -> Process:
    """An app of the same name, with code of its own."""
    app = folder / "hostile"
    (app / "own").mkdir(parents=True)
    (app / "own" / "server.py").write_text(HOSTILE_SERVER)
    (app / "own" / "client.py").write_text(HOSTILE_CLIENT.format(ran=str(folder / "ran")))
    text = APP.format(coordinator="").replace("perfed.flower.server_app", "own.server")
    (app / "pyproject.toml").write_text(text.replace("perfed.flower.client_app", "own.client"))
    return net.start("hostile", "flwr", "run", str(app), "loop", "--stream")


def keys_of_members(folder: Path) -> list[str]:
    path = folder / "run" / "partition.json"
    known = json.loads(path.read_text())["clients"] if path.is_file() else []
    return [member["key"] for member in known if member is not None]


def rounds(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "rounds.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def done(folder: Path, round: int) -> bool:
    return any(line["round"] >= round for line in rounds(folder))


def finish(process: Process, folder: Path) -> Result:
    wait_until(lambda: process.ended() or finished(folder), f"the run ends:\n{process.text()}")
    assert finished(folder), process.text()
    return Result(folder / "run")


def finished(folder: Path) -> bool:
    return (folder / "run" / "summary.json").is_file()


def assert_personal_models_of(folder: Path, reference: Result) -> None:
    index = json.loads((reference.path / "models" / "index.json").read_text())
    for client, entry in enumerate(index["clients"]):
        ours = tensorfile.load(personal_checkpoint(folder, client))
        theirs = tensorfile.load(reference.path / "models" / entry["models"]["personal"])
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.allclose(ours[name], tensor, rtol=1e-4, atol=1e-6), (client, name)


@pytest.mark.long
@pytest.mark.attack(33)
def test_three_sites_end_as_the_simulation_though_the_coordinator_is_killed(
    tmp_path: Path,
) -> None:
    """The coordinator's whole machine goes away in the middle of a round and comes back."""
    folder = write_federation(tmp_path / "federation", options=PROCESSES)
    with network(tmp_path / "net", warm.programs()) as net:
        superlink = net.superlink()
        nodes = [net.supernode(f"node-{n}", folder / f"site-{n}.yaml") for n in range(3)]
        first = start(net, folder, "first")
        wait_until(lambda: done(folder, 0), f"round 0:\n{first.text()}")
        wait_until(lambda: "ROUND 1]" in nodes[0].text(), "round 1 begins")
        superlink.kill()
        first.kill()
        assert not done(folder, 1)
        net.use(BIN)
        net.superlink()
        again = start(net, folder, "again")
        result = finish(again, folder)
        # Not from the beginning. Flower shows what a run says some seconds late.
        wait_until(lambda: "round 1 of 3" in again.text(), f"it says where:\n{again.text()}")
        assert "round 0 of 3" not in again.text()
    reference = simulated(tmp_path / "simulation")
    assert_personal_models_of(folder, reference)
    assert [line["clients"] for line in rounds(folder)] == [[0, 1, 2]] * 4
    assert result.summary["traffic"] == reference.summary["traffic"]
    reports = [(folder / f"state-{n}").glob("*/report.jsonl") for n in range(3)]
    for (report,) in reports:  # every site sees what it gains
        assert [json.loads(line)["round"] for line in report.read_text().splitlines()] == [0, 1, 2]
        assert "alone_test_accuracy" in report.read_text()


@pytest.mark.long
@pytest.mark.attack(13, 15, 22, 38)
def test_with_tls_only_registered_sites_and_a_signed_app_take_part(tmp_path: Path) -> None:
    """With PerFed-Evidence, whose clients have two models each."""
    changes = {"algorithm": {"name": "perfed-evidence", "caution": 0.0}, "rounds": 2}
    certificates = tmp_path / "certificates"
    write_certificates(certificates, 3, [])
    write_certificates(tmp_path / "other", 1, [])  # another authority
    write_node_key(certificates / "stranger")
    options = PROCESSES | {"node_keys": True}
    folder = write_federation(tmp_path / "federation", options=options, **changes)
    trusted = ["--root-certificates", str(certificates / "ca.crt")]
    signed = ["--trusted-entities", str(certificates / "trusted-entities.yaml")]
    wrong = ["--root-certificates", str(tmp_path / "other" / "ca.crt")]

    def key(name: str) -> list[str]:
        return ["--auth-supernode-private-key", str(certificates / name)]

    with network(tmp_path / "net", warm.programs(), certificates=certificates) as net:
        net.superlink()
        net.gate()
        register = ["flwr", "supernode", "register"]
        keys = [str(certificates / f"site-{n}.pub") for n in range(3)]
        for done in [net.start("register", *register, public, "loop") for public in keys]:
            assert done.code() == 0, done.text()
        run = start_signed(net, folder, certificates / "signer")
        for n in range(3):
            file = folder / f"site-{n}.yaml"
            net.supernode(f"node-{n}", file, *trusted, *signed, *key(f"site-{n}"))
        for n, name in ((0, "stranger"), (1, "misled"), (2, "keyless")):
            shutil.copy(folder / f"site-{n}.yaml", folder / f"{name}.yaml")
        stranger = net.supernode("stranger", folder / "stranger.yaml", *trusted, *key("stranger"))
        misled = net.supernode(
            "misled",
            folder / "wrong-certificate.yaml",
            *wrong,
            *key("site-1"),
            "--max-retries",
            "1",
        )
        keyless = net.supernode("keyless", folder / "keyless.yaml", *trusted)
        itself = net.start("itself", *register, str(certificates / "stranger.pub"), "gate")
        assert itself.code() != 0
        assert_only_sites_pass(net.gate_port, certificates)
        wait_until(lambda: len(keys_of_members(folder)) == 3, f"all sites:\n{run.text()}")
        hostile = start_hostile(net, folder)
        finish(run, folder)
        wait_until(hostile.ended, f"the hostile app ends:\n{hostile.text()}")
        answers = [line for line in hostile.text().splitlines() if line.startswith("answer: ")]
        assert answers == ["answer: The FAB could not be verified."] * 3, hostile.text()
        assert not (folder / "ran").exists()
        for intruder in (stranger, misled, keyless):
            wait_until(intruder.ended, f"refused:\n{intruder.text()}")
            assert intruder.code() != 0
            assert "Receiving" not in intruder.text()  # saw no message
            assert "SuperNode ID" not in intruder.text()
        assert stranger.code() % 256 == 305 % 256 or "305" in stranger.text()
        assert "certificate" in misled.text().lower()
    for n, known in enumerate(keys_of_members(folder)):
        key_of_site = load_ssh_public_key((certificates / f"site-{n}.pub").read_bytes())
        assert known == fingerprint(
            key_of_site.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        )
    assert_personal_models_of(folder, simulated(tmp_path / "simulation", **changes))
    files = [tensorfile.load(personal_checkpoint(folder, client)) for client in range(3)]
    assert any(Mixture.marker in file for file in files)  # of two models


@pytest.mark.long
@pytest.mark.attack("stolen-key")
def test_a_key_that_was_stolen_is_shut_out_at_once_and_for_good(tmp_path: Path) -> None:
    certificates = tmp_path / "certificates"
    write_certificates(certificates, 2, [])
    theirs, others = (certificates / f"site-{n}.pub" for n in range(2))
    folder = write_federation(tmp_path / "federation", options=PROCESSES)
    trusted = ["--root-certificates", str(certificates / "ca.crt")]
    key = ["--auth-supernode-private-key", str(certificates / "site-0")]
    with network(tmp_path / "net", warm.programs(), certificates=certificates) as net:
        net.superlink()
        net.gate()
        register = ["flwr", "supernode", "register"]
        for public in (theirs, others):
            assert net.start("register", *register, str(public), "loop").code() == 0
        thief = net.supernode("thief", folder / "site-0.yaml", *trusted, *key)
        wait_until(lambda: "SuperNode ID" in thief.text(), f"it is let in:\n{thief.text()}")
        unregister = ["perfed", "federation", "unregister", str(theirs)]
        done = net.start("unregister", *unregister)
        assert done.code() == 0, done.text()
        kept = certificates / "site-0.pub.unregistered"
        assert f"its file is now {kept}" in done.text()
        wait_until(thief.ended, f"it is let in no more:\n{thief.text()}")
        assert net.start("anew", *register, str(kept), "loop").code() != 0
        kept.rename(theirs)
        again = net.start("again", *unregister)
        assert (again.code(), "knows no site with the key" in again.text()) == (2, True)
        assert others.is_file()


def assert_only_sites_pass(port: int, certificates: Path) -> None:
    """Neither the operator's requests nor a way round by dots get through the gate."""
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    for path in (
        "/v1/control/list-runs",
        "/v1/runtime/get-nodes",
        "/v1/fleet/../control/list-runs",
        "/v1/fleet/%2e%2e/control/list-runs",
        "//v1/control/list-runs",
        "/",
    ):
        connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=30)
        connection.request("POST", path, body=b"")
        assert connection.getresponse().status == 403, path
        connection.close()


@pytest.mark.long
def test_a_site_killed_in_a_round_is_left_out_and_rejoins_with_its_own_model(
    tmp_path: Path,
) -> None:
    """SIGKILL while client 2 works on round 0. It comes back at once, but what it was asked is
    gone with it: the round ends without it. (The deadline, for those that do not come back, is in
    test_coordinator.py: it is no business of Flower's.)"""
    folder = write_federation(tmp_path / "federation", options=PROCESSES, rounds=2)
    with network(tmp_path / "net", warm.programs()) as net:
        net.superlink()
        nodes = [net.supernode(f"node-{n}", folder / f"site-{n}.yaml") for n in range(3)]
        run = start(net, folder)
        wait_until(lambda: "ROUND 0]" in nodes[2].text(), f"round 0 begins:\n{run.text()}")
        nodes[2].kill()
        assert not done(folder, 0)
        net.use(BIN)
        net.supernode("node-2-again", folder / "site-2.yaml")
        result = finish(run, folder)
    lines = {line["round"]: line for line in rounds(folder)}
    assert [lines[n]["clients"] for n in (-1, 0, 1)] == [[0, 1, 2], [0, 1], [0, 1, 2]]
    assert lines[0]["absent"] == {"2": "was started anew"}
    assert result.per_client()["client"].nunique() == 3
    # The same without Flower: node 12 never hears of round 0 and comes back as node 13.
    twin = write_federation(tmp_path / "twin", options={"deadline": 1}, rounds=2)
    through = desk(twin)

    def fate(node: int, task: Envelope) -> str | None:
        if (node, task.header.round) == (12, 0):
            through.sites[13] = through.sites[12]
        return "dead" if node == 12 and 13 in through.sites else None

    through.fate = fate
    coordinate(twin / "coordinator.yaml", through, [].append)
    for client in range(3):
        ours = tensorfile.load(personal_checkpoint(folder, client))
        for name, tensor in tensorfile.load(personal_checkpoint(twin, client)).items():
            assert torch.allclose(ours[name], tensor, rtol=1e-4, atol=1e-6), (client, name)
