"""What a client told when it first came is what counts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from perfed.flower.membership import Membership
from perfed.flower.protocol import JOIN, Envelope, Header
from perfed.flower.settings import read_coordinator
from tests.flower.setting import write_federation

INVITATION = Envelope(Header(JOIN, "trial-1", -1, "public"))


class Door:
    """One node, which answers every invitation with the same facts until these are changed."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.asked: list[Header] = []

    def nodes(self) -> list[int]:
        return [10]

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        self.asked.append(task.header)
        return f"invitation {len(self.asked)}"

    def receive(self, names: Iterable[str]) -> dict[str, Envelope | str]:
        return {name: Envelope(self.asked[-1], facts=self.facts) for name in names}


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
    assert asked_at == [0, 10, 30, 70, 150]
    assert len({header.task for header in silent.asked}) == 5
    answered.append("invitation 1")
    membership.look()
    assert membership.present() == [1]
    now += 10**5
    membership.look()
    assert len(silent.asked) == 5


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
