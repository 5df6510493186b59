"""What a client told when it first came is what counts."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from perfed import cli
from perfed.flower.certificates import fingerprint
from perfed.flower.coordinator import FederatedRun
from perfed.flower.membership import Member, Membership
from perfed.flower.protocol import JOIN, NOTICE, Envelope, Header
from perfed.flower.settings import read_coordinator
from perfed.runs.directory import RunDirectory
from tests.flower.setting import write_federation

INVITATION = Envelope(Header(JOIN, "trial-1", -1, "public"))


class Door:
    """One node, which answers every invitation with the same facts until these are changed."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.asked: list[Header] = []

    def nodes(self) -> list[int]:
        return [10]

    def key(self, node: int) -> str:
        return ""

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        self.asked.append(task.header)
        return f"invitation {len(self.asked)}"

    def receive(self, names: Iterable[str]) -> dict[str, Envelope | str]:
        return {name: Envelope(self.asked[-1], facts=self.facts) for name in names}


@pytest.mark.attack("other-sizes-on-coming-back")
@pytest.mark.parametrize("trained", [False, True])
def test_who_has_trained_cannot_come_back_with_other_sizes(tmp_path: Path, trained: bool) -> None:
    sizes = {"train": 20, "validation": 5, "test": 25}
    door = Door({"client": 1, "sizes": sizes, "architecture": "mlp", "site": "here"})
    said: list[str] = []
    options = read_coordinator(write_federation(tmp_path / "federation") / "coordinator.yaml")
    membership = Membership(door, INVITATION, options, said.append)
    membership.has_trained = lambda client: trained
    membership.look()
    membership.look()
    assert membership.present() == [1]
    membership.leave_out(1, 10)
    door.facts = door.facts | {"sizes": sizes | {"train": 10**9}}
    membership.look()
    membership.look()
    assert membership.members[1].sizes["train"] == (20 if trained else 10**9)
    assert membership.present() == ([] if trained else [1])
    assert any("what it told first counts" in line for line in said) is trained


@pytest.mark.attack(31)
def test_a_node_that_does_not_answer_is_asked_again_soon_and_then_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the deadline is. What a slow node answers to an older invitation counts."""
    now = 1000.0
    monkeypatch.setattr("perfed.flower.membership.time.monotonic", lambda: now)
    sizes = {"train": 20, "validation": 5, "test": 25}
    silent = Door({"client": 1, "sizes": sizes, "architecture": "mlp", "site": "here"})
    answered: list[str] = []
    silent.receive = lambda names: {  # type: ignore[method-assign]
        name: Envelope(silent.asked[0], facts=silent.facts) for name in answered if name in names
    }
    folder = write_federation(tmp_path / "federation", options={"deadline": 3600})
    membership = Membership(
        silent, INVITATION, read_coordinator(folder / "coordinator.yaml"), [].append
    )
    asked_at = []
    for _ in range(200):
        before = len(silent.asked)
        membership.look()
        if len(silent.asked) > before:
            asked_at.append(now - 1000)
        now += 1
    assert asked_at == [0, 10, 30, 60, 90, 120, 150, 180]
    assert len({header.task for header in silent.asked}) == 8
    answered.append("invitation 1")
    membership.look()
    assert membership.present() == [1]
    now += 10**5
    membership.look()
    assert len(silent.asked) == 8


@pytest.mark.attack(36)
def test_who_was_there_is_named_by_its_client(tmp_path: Path) -> None:
    sizes = {"train": 20, "validation": 5, "test": 25}
    door = Door({"client": 1, "sizes": sizes, "architecture": "mlp", "site": "here"})
    said: list[str] = []
    options = read_coordinator(write_federation(tmp_path / "federation") / "coordinator.yaml")
    membership = Membership(door, INVITATION, options, said.append)
    for _ in range(2):
        membership.look()
    membership.leave_out(1, 10)
    door.facts = {}
    for _ in range(2):
        membership.look()
    assert said[-1] == "client 1 (node 10) may not join: it does not say who it is"


SIZES = {"train": 20, "validation": 5, "test": 25}


class Hall:
    """Nodes that come and go, each with a key and what it says of itself."""

    def __init__(self) -> None:
        self.there: dict[int, tuple[str, dict[str, Any]]] = {}
        self.asked: dict[str, tuple[int, Header]] = {}
        self.notices: list[tuple[int, str]] = []

    def come(self, node: int, key: str, site: str, client: int = 1) -> None:
        facts = {"client": client, "sizes": SIZES, "architecture": "mlp", "site": site}
        self.there[node] = key, facts

    def nodes(self) -> list[int]:
        return list(self.there)

    def key(self, node: int) -> str:
        return self.there[node][0]

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        if task.header.kind == NOTICE:
            self.notices.append((node, task.facts["reason"]))
            return "notice"
        name = f"message {len(self.asked)}"
        self.asked[name] = node, task.header
        return name

    def receive(self, names: Iterable[str]) -> dict[str, Envelope | str]:
        asked = {name: self.asked.pop(name) for name in list(names) if name in self.asked}
        return {
            name: Envelope(header, facts=self.there[node][1])
            for name, (node, header) in asked.items()
            if node in self.there
        }


def looked(
    tmp_path: Path, hall: Hall, keys: bool, said: list[str], known: Membership | None = None
) -> Membership:
    """Everybody who is there is asked, and has answered. A coordinator that is started again knows
    the members that it has written down."""
    folder = tmp_path / "federation"
    if not folder.exists():
        write_federation(folder, options={"node_keys": keys, "deadline": 1e-9})
    options = read_coordinator(folder / "coordinator.yaml")
    membership = Membership(hall, INVITATION, options, said.append)
    if known is not None:
        membership.members = {
            client: Member(**json.loads(json.dumps(dataclasses.asdict(member))))
            for client, member in known.members.items()
        }
    membership.look()
    membership.look()
    return membership


@pytest.mark.attack(13)
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("keys", [False, True])
def test_a_number_belongs_to_its_first_site_also_while_that_is_away(
    tmp_path: Path, keys: bool, restarted: bool
) -> None:
    said: list[str] = []
    hall = Hall()
    hall.come(10, "SHA256:first", "aaaaaaaa-secret")
    first = looked(tmp_path, hall, keys, said)
    hall.there.clear()
    first.look()
    assert first.present() == []
    hall.come(11, "SHA256:second", "bbbbbbbb-secret")
    if restarted:
        first = looked(tmp_path, hall, keys, said, first)
    else:
        first.look()
        first.look()
    assert first.present() == []
    before, now = ("key SHA256:first", "key SHA256:second") if keys else ("site aaaa", "site bbbb")
    assert f"already, {before}" in said[-1]
    assert f"give this one, {now}" in said[-1]
    who = "node 11 with the key SHA256:second" if keys else "node 11"
    assert said[-1].startswith(f"{who} may not join: ")
    assert hall.notices[-1][0] == 11
    assert hall.notices[-1][1] in said[-1]
    assert "secret" not in "".join(said)
    hall.come(10, "SHA256:first", "aaaaaaaa-secret")  # its owner is not locked out
    first.look()
    first.look()
    assert (first.present(), first.node(1)) == ([1], 10)


@pytest.mark.attack(13)
@pytest.mark.parametrize(
    ("keys", "key", "site", "is_let_in"),
    [
        (True, "SHA256:first", "lost its folder", True),
        (True, "SHA256:second", "first site", False),  # its folder was copied
        (False, "SHA256:second", "first site", True),  # without keys, every start makes a new one
    ],
)
def test_who_the_same_site_is(
    tmp_path: Path, keys: bool, key: str, site: str, is_let_in: bool
) -> None:
    hall = Hall()
    hall.come(10, "SHA256:first", "first site")
    membership = looked(tmp_path, hall, keys, [])
    del hall.there[10]
    hall.come(11, key, site)
    for _ in range(3):
        membership.look()
    assert membership.present() == ([1] if is_let_in else [])


@pytest.mark.attack(13, "two-numbers")
def test_a_site_that_has_trained_cannot_have_a_second_number(tmp_path: Path) -> None:
    said: list[str] = []
    hall = Hall()
    hall.come(10, "SHA256:first", "here")
    membership = looked(tmp_path, hall, True, said)
    membership.has_trained = lambda client: client == 1
    membership.leave_out(1, 10)
    hall.come(10, "SHA256:first", "here", client=2)
    for _ in range(3):
        membership.look()
    assert "key SHA256:first has trained as client 1: it keeps that number" in said[-1]
    assert membership.members.keys() == {1}


@pytest.mark.attack(13)
def test_a_number_is_given_to_another_site_on_purpose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the one that is named, and to nobody else who comes first."""
    folder = write_federation(tmp_path / "federation", rounds=1)

    def perfed(*words: str) -> tuple[Any, str]:
        file = str(folder / "coordinator.yaml")
        monkeypatch.setattr(sys, "argv", ["perfed", "federation", "release", file, *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, capsys.readouterr().err

    assert perfed("1", "SHA256:new")[0] == 2
    options = read_coordinator(folder / "coordinator.yaml")
    hall = Hall()
    run = FederatedRun(options, RunDirectory.create(folder / "run"), hall, say=[].append)
    assert "client 3: the run's are 0 … 2" in perfed("3", "SHA256:new")[1]
    assert perfed("1", "SHA256:new") == (0, "")
    assert not run.membership.is_released(1, "SHA256:thief")
    assert not run.membership.is_released(0, "SHA256:new")
    assert run.membership.is_released(1, "SHA256:new")
    assert not run.membership.is_released(1, "SHA256:new")
    membership = looked(tmp_path / "other", hall, True, [])
    hall.come(10, "SHA256:old", "old")
    membership.look()
    membership.look()
    del hall.there[10]
    membership.is_released = lambda client, name: name == "SHA256:new"
    hall.come(11, "SHA256:new", "new")
    membership.look()
    membership.look()
    assert membership.members[1].key == "SHA256:new"
    assert membership.present() == [1]


KEY = b"""-----BEGIN PUBLIC KEY-----
MHYwEAYHKoZIzj0CAQYFK4EEACIDYgAEiyfPW4U3MJgFykUKkMdqU5bZ3UNgJy7i
XOFWjqkX2tlAac7dBD2oKfggKQuyUJ67iP4slEfbaJq/W6E9zMcLmPP64ZhKRy4Y
6NTETvlWNT9pHUymh+AMtFudES06b67Q
-----END PUBLIC KEY-----
"""


def test_a_key_is_named_as_ssh_keygen_names_it() -> None:
    assert fingerprint(KEY) == "SHA256:NLB89tisBC6nF296fDHDTJRLsSvyMJtuKtqbO1viguo"
    assert fingerprint(b"") == fingerprint(KEY[:100]) == ""
