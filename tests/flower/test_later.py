"""A site that comes when the federation is over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.control_pb2 import ListNodesResponse
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import perfed
from perfed.core import tensorfile
from perfed.core.errors import PerfedError
from perfed.flower import asking, later
from perfed.flower.asking import LONGEST_QUESTION, PATH, Question
from perfed.flower.certificates import write_certificates, write_node_key
from perfed.flower.gate import _own, gate
from perfed.flower.handout import Handout, find_handout
from perfed.flower.kit import LINK_FILE
from perfed.flower.later import fetch, learn
from perfed.flower.ledger import Ledger
from perfed.flower.listener import Limits
from perfed.flower.protocol import ROUND
from perfed.flower.purse import Purse
from perfed.flower.registered import NODES
from perfed.flower.site import Site
from tests.conftest import spec
from tests.flower.processes import free_port
from tests.flower.setting import MODELS, desk, write_federation
from tests.flower.test_coordinator import run
from tests.flower.test_gate import Serving

EIGHT_BIT = f"{Path(__file__).parents[1] / 'plugins' / 'eight_bit.py'}:EightBit"
SAME = [MODELS[0]] * 3
MLP = "mlp(hidden=8)"


def federation(folder: Path, **changes: Any) -> Path:
    """It is over; site-3.yaml is of somebody who comes now."""
    write_federation(folder, SAME, **changes)
    run(folder, desk(folder))
    values = yaml.safe_load((folder / "site-0.yaml").read_text())
    values["data"]["clients"] = 4
    values |= {"client": 3, "state": "state-3"}
    (folder / "later.yaml").write_text(yaml.safe_dump(values))
    return folder


def handout(folder: Path) -> Handout:
    return Handout.load(find_handout(folder / "run", MLP))


def newcomer(folder: Path, given: Handout, rounds: int | None = None) -> list[dict[str, Any]]:
    learn(Site.open(folder / "later.yaml", lambda line: None), given, rounds)
    (report,) = (folder / "state-3").glob("*+later/report.jsonl")
    return [json.loads(line) for line in report.read_text().splitlines()]


def test_a_handout_is_what_the_next_round_would_have_sent(tmp_path: Path) -> None:
    """And it is all that the file holds: the same run, with a round more, is the witness."""
    folder = federation(tmp_path / "f")
    longer = write_federation(tmp_path / "longer", SAME, rounds=4)
    through = desk(longer)
    run(longer, through)
    (sent, *_) = [t for _, t in through.tasks if (t.header.kind, t.header.round) == (ROUND, 3)]
    arrays = tensorfile.load(find_handout(folder / "run", "whatever network"))
    assert [*arrays] == ["down/centroids"]
    assert torch.equal(arrays["down/centroids"], sent.message["centroids"])


def test_a_site_learns_once(tmp_path: Path) -> None:
    folder = federation(tmp_path / "f")
    given = handout(folder)
    lines = newcomer(folder, given, 2)
    assert [line["round"] for line in lines] == [0, 1]
    assert "gain" in lines[-1]
    # Again: nothing is trained twice.
    (file,) = (folder / "state-3").glob("*+later/personal.safetensors")
    before = file.read_bytes()
    newcomer(folder, given, 2)
    assert file.read_bytes() == before
    events = [entry["event"] for entry in Ledger(folder / "state-3").read().entries]
    assert events == ["approved", "told", "told"]  # nothing has left


def test_a_site_is_told_of_the_models_it_has(tmp_path: Path) -> None:
    folder = federation(tmp_path / "f")
    given = handout(folder)

    def told(file: str, rounds: int) -> list[str]:
        said: list[str] = []
        learn(Site.open(folder / file, said.append), given, rounds)
        return [line for line in said if "this site" in line]

    assert told("later.yaml", 2) == []
    (line,) = told("later.yaml", 1)
    assert line == "this site has learned for 2 rounds already: nothing more is trained"
    assert told("later.yaml", 3) == []
    (line,) = told("site-0.yaml", 1)  # it took part
    assert line.startswith("this site took part in the run: its model of then stays in ")
    assert f"{given.header.run}/personal.safetensors, and is not used" in line


@pytest.mark.parametrize("name", sorted(perfed.algorithms))
def test_every_algorithm_has_something_for_a_newcomer(name: str, tmp_path: Path) -> None:
    folder = federation(tmp_path / "f", algorithm=spec(name), rounds=1)
    assert "test_accuracy" in newcomer(folder, handout(folder))[-1]


def test_an_algorithm_that_knows_no_newcomers_ends_its_run_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "known.py").write_text(KNOWN)
    algorithm = {"name": f"{tmp_path / 'known.py'}:Known"}
    folder, said = write_federation(tmp_path / "f", SAME, algorithm=algorithm, rounds=1), []
    run(folder, desk(folder), said)
    (line,) = [line for line in said if "later" in line]
    assert "known.py, line 13" in line
    with pytest.raises(PerfedError, match="has nothing for later sites: its log says why"):
        handout(folder)


KNOWN = """
from dataclasses import dataclass

from perfed.core.algorithm import Algorithm, algorithms, supervised
from perfed.core.message import Message


@algorithms.register("known")
@dataclass(frozen=True)
class Known(Algorithm):

    def broadcast(self, server, state, client):
        return Message(number={0: 1, 1: 2, 2: 3}[client.id])

    def client_round(self, client, message):
        client.weights = client.sgd(client.weights, supervised)
        return Message()
"""


def test_what_stays_here_costs_no_privacy(tmp_path: Path) -> None:
    folder = federation(tmp_path / "f")
    given = handout(folder)
    values = yaml.safe_load((folder / "later.yaml").read_text())
    values["privacy"] = {"noise": 1.0, "count_noise": 3.0}
    (folder / "later.yaml").write_text(yaml.safe_dump(values))
    lines = newcomer(folder, given, 2)
    assert "test_accuracy" in lines[-1]
    assert Purse(folder / "state-3").spent == []


def test_without_weight_the_lesson_is_local_training(tmp_path: Path) -> None:
    """A limit: λ=0 looks at no centroid, so that the model is the one that trained alone."""
    folder = federation(
        tmp_path / "f", algorithm={"name": "perfed-ckt", "clusters": 2, "weight": 0.0}
    )
    lines = newcomer(folder, handout(folder))
    assert lines[-1]["gain"] == 0
    files = [
        tensorfile.load(next((folder / "state-3").glob(f"*+later/{name}.safetensors")))
        for name in ("personal", "alone")
    ]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[1])


def test_with_weights_it_gets_the_global_model(tmp_path: Path) -> None:
    """As the others have it, but for what eight bits take from it on the way to them."""
    folder = federation(tmp_path / "f", algorithm="fedavg", wire=[{"name": EIGHT_BIT}])
    given = handout(folder)
    newcomer(folder, given, 1)
    (mine,) = (folder / "state-3").glob("*+later/personal.safetensors")
    (theirs,) = (folder / "state-0").glob("*/personal.safetensors")
    ours, global_model = tensorfile.load(mine), tensorfile.load(theirs)
    for name, theirs_now in global_model.items():
        step = float(theirs_now.max() - theirs_now.min()) / 255
        assert torch.allclose(ours[name], theirs_now, atol=step + 1e-7)


def test_a_link_of_codes_does_not_reach_a_handout(tmp_path: Path) -> None:
    """A file needs none, and at its writing nobody knows what the other end has."""
    plain = federation(tmp_path / "plain")
    tiny = [{"name": "probability-bits", "bits": 2}, "cached", "deflate"]
    coded = federation(tmp_path / "coded", wire=tiny)
    shapes = []
    for folder in (plain, coded):
        given = handout(folder)
        shapes.append({n: (t.shape, t.dtype) for n, t in given.down.arrays.items()})
        assert "test_accuracy" in newcomer(folder, given, 1)[-1]
    assert shapes[0] == shapes[1]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = federation(tmp_path / "f")
    given = handout(folder)
    values = yaml.safe_load((folder / "later.yaml").read_text())

    def refused(reason: str, given: Handout = given, **changes: Any) -> None:
        (folder / "later.yaml").write_text(yaml.safe_dump(values | changes))
        with pytest.raises(PerfedError, match=reason):
            newcomer(folder, given)

    refused("takes part in 'other', not in 'trial'", run="other")
    refused("does not agree to 3 rounds", agrees={"rounds": 2})
    refused("does not agree to 2480 bytes in a message", agrees={"bytes_in": 100})
    public = {"dataset": values["public"]["dataset"] | {"public": 29}}
    refused("the public set of the coordinator is", public=public)
    refused(
        "speaks version 3 of the protocol", replace(given, header=replace(given.header, protocol=3))
    )
    refused("is no run's id", replace(given, header=replace(given.header, run="../out")))
    newcomer(folder, given, 1)
    other = {**given.plan, "training": {**given.plan["training"], "steps": 9}}
    refused(
        r"the plan is not the one that was approved here: training\.steps",
        replace(given, plan=other),
    )
    assert not (tmp_path / "out+later").exists()


@pytest.mark.parametrize(
    "about",
    [
        "",
        "[]",
        "{}",
        '{"plan": {}}',
        '{"plan": 1, "kind": "round", "run": "a", "round": 1, "public": "b"}',
    ],
)
def test_a_file_that_is_no_handout_is_named(about: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(tensorfile.sealed({}, about)[0])
    with pytest.raises(PerfedError, match="file: this is no handout"):
        Handout.load(path)


# Through the gate.


class Superlink:
    """It knows some keys, and says so to its operator."""

    def __init__(self) -> None:
        self.known: list[NodeInfo] = []
        self.app = Starlette(routes=[Route(NODES, self.nodes, methods=["POST"])])

    async def nodes(self, request: Request) -> Response:
        return Response(ListNodesResponse(nodes_info=self.known).SerializeToString())

    def register(self, key: Path, status: str = "registered") -> None:
        private = load_ssh_private_key(key.read_bytes(), None)
        known = public_key_to_bytes(private.public_key())  # as Flower keeps it
        self.known = [NodeInfo(public_key=known, status=status)]


Gate = tuple[Path, Superlink, int]


@pytest.fixture
def finished(tmp_path: Path) -> Iterator[Callable[[bool], Gate]]:
    """A federation that is over, its gate, and a site that comes now, in 'new'."""
    served: list[Serving] = []

    def start(tls: bool) -> Gate:
        folder = federation(tmp_path / "f")
        write_certificates(folder / "certificates", 0, [])
        certificates = folder / "certificates" if tls else None
        context = _own(certificates) if certificates else None
        superlink = Superlink()
        served.append(Serving(superlink.app, context, Limits()))
        app = gate(f"127.0.0.1:{served[0].port}", certificates, folder / "run")
        served.append(Serving(app, context, Limits()))
        new = folder / "new"
        new.mkdir()
        shutil.move(folder / "later.yaml", new / "site.yaml")
        shutil.copy(folder / "certificates" / "ca.crt", new)
        link(folder, served[1].port, tls)
        return folder, superlink, served[1].port

    yield start
    for one in reversed(served):
        one.stop()


def link(folder: Path, port: int, tls: bool) -> None:
    text = LINK_FILE.format(superlink=f"127.0.0.1:{port}", tls=str(tls).lower())
    (folder / "new" / "link.yaml").write_text(text)


def asked(folder: Path) -> Handout:
    return fetch(Site.open(folder / "new" / "site.yaml", lambda line: None))


def not_given(folder: Path, reason: str) -> None:
    with pytest.raises(PerfedError, match=reason) as refused:
        asked(folder)
    assert "\n" not in str(refused.value)


def test_without_tls_a_site_gets_what_the_file_holds(finished: Callable[[bool], Gate]) -> None:
    folder, _, _ = finished(False)
    site = Site.open(folder / "new" / "site.yaml", lambda line: None)
    given = fetch(site)
    assert given.encode() == handout(folder).encode()
    learn(site, given, 1)
    left = [entry for entry in site.ledger.read().entries if entry["event"] == "left"]
    assert [entry["facts"] for entry in left] == [["network"]]
    assert list(site.state.glob("*+later/personal.safetensors"))


@pytest.mark.attack("handout-for-a-stranger")
def test_with_tls_a_site_needs_a_registered_key(finished: Callable[[bool], Gate]) -> None:
    folder, superlink, _ = finished(True)
    not_given(folder, r"this site has a key of its own now: send .*key\.pub")
    not_given(folder, "gives no model: This key is not registered at the coordinator")
    superlink.register(folder / "new" / "key", "unregistered")
    not_given(folder, "gives no model: This key is not registered at the coordinator")
    superlink.register(folder / "new" / "key", "online")
    assert asked(folder).encode() == handout(folder).encode()
    (folder / "new" / "key").unlink()
    write_node_key(folder / "new" / "key")
    not_given(folder, "gives no model: This key is not registered at the coordinator")


@pytest.mark.attack("handout-for-a-stranger")
def test_a_registered_key_that_one_does_not_have_is_of_no_use(
    finished: Callable[[bool], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its public part is no secret."""
    folder, superlink, _ = finished(True)
    for name in ("key", "other"):
        write_node_key(folder / "new" / name)
    superlink.register(folder / "new" / "key")
    mine = Question.signed(MLP, folder / "new" / "key")
    other = Question.signed(MLP, folder / "new" / "other")
    for wrong in (
        replace(other, key=mine.key),
        replace(mine, signature=""),
        replace(mine, signature="é"),
        replace(mine, time=mine.time + 1),  # what was signed at another time, and for
        replace(mine, network="cnn"),  # another network
        replace(mine, key="\ud800"),
    ):
        monkeypatch.setattr(later.Question, "signed", lambda network, path, wrong=wrong: wrong)
        not_given(folder, "gives no model: the signature is not one by this key")
    monkeypatch.setattr(asking.time, "time", lambda: mine.time + 1000)
    monkeypatch.setattr(later.Question, "signed", lambda network, path: mine)
    not_given(folder, "the clocks of the site and the coordinator differ")


@pytest.mark.attack("handout-of-something-else")
def test_a_site_gets_nothing_else(finished: Callable[[bool], Gate]) -> None:
    folder, _, port = finished(False)
    url = f"http://127.0.0.1:{port}{PATH}"
    for network in ("../../config", "/etc/passwd", "\ud800", "x" * 10_000):
        answer = httpx.post(url, content=Question(network).encode())
        assert Handout.decode(answer.content).encode() == handout(folder).encode()
    for odd in (
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"network": 1}',
        b'{"network": "a", "x": 1}',
        b"[" * 9999,
    ):
        answer = httpx.post(url, content=odd)
        assert (answer.status_code, answer.text) == (409, "this is no question for a handout")
    assert httpx.post(url, content=b"x" * (LONGEST_QUESTION + 1)).status_code == 413
    assert httpx.get(url).status_code == 403
    for path in ("/run/federation.json", f"{PATH}/../config.yaml", f"{PATH}/0.safetensors"):
        assert httpx.post(f"http://127.0.0.1:{port}{path}").status_code == 403


def test_what_a_careless_user_meets(
    finished: Callable[[bool], Gate], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, port = finished(False)
    whole = folder / "run"
    shutil.move(whole, folder / "over")
    not_given(folder, "has not finished a round: 'perfed site start' takes part in it")
    shutil.copytree(folder / "over", whole)
    for name in ("handouts", "summary.json", "checksums.json"):
        path = whole / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    not_given(folder, "the federation is not over, 3 rounds are done")
    link(folder, port, tls=True)
    write_node_key(folder / "new" / "key")
    not_given(folder, f"127.0.0.1:{port} speaks no TLS, and link.yaml says 'tls: true'")
    link(folder, free_port(), tls=False)
    not_given(folder, "no answer from 127.0.0.1:.*: is 'superlink' in link.yaml right")
    (folder / "new" / "link.yaml").unlink()
    not_given(folder, "no link.yaml in .*new: 'perfed federation kits' makes a site's folder")


def test_tls_that_does_not_fit_is_named(finished: Callable[[bool], Gate]) -> None:
    folder, _, port = finished(True)
    write_node_key(folder / "new" / "key")
    link(folder, port, tls=False)
    not_given(folder, f"127.0.0.1:{port} speaks TLS, and link.yaml says 'tls: false'")
    link(folder, port, tls=True)
    write_certificates(folder / "others", 0, [])
    shutil.copy(folder / "others" / "ca.crt", folder / "new")
    not_given(folder, "shows a certificate that ca.crt does not vouch for")
    (folder / "new" / "ca.crt").unlink()
    not_given(folder, r"no certificate in .*ca\.crt: the kit has it")


@pytest.mark.attack("handout-without-end")
def test_a_site_takes_no_more_than_it_agrees_to(
    finished: Callable[[bool], Gate], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _ = finished(False)
    monkeypatch.setattr(later, "BESIDE", 100)
    site = folder / "new" / "site.yaml"
    values = yaml.safe_load(site.read_text())
    site.write_text(yaml.safe_dump(values | {"agrees": {"bytes_in": 100}}))
    not_given(folder, "sends more than 300 bytes")


def test_another_server_is_not_taken_for_a_gate(finished: Callable[[bool], Gate]) -> None:
    folder, _, _ = finished(False)
    other = Serving(Starlette(), None, Limits())
    link(folder, other.port, tls=False)
    not_given(folder, r"no gate of perfed's is at 127.0.0.1:\d+ \(it answers 404\)")
    other.stop()
