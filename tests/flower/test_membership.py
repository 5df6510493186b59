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

    def nodes(self) -> list[int]:
        return [10]

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        return "invitation"

    def receive(self, names: Iterable[str]) -> dict[str, Envelope | str]:
        return {"invitation": Envelope(INVITATION.header, facts=self.facts)}


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
