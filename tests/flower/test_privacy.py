"""A site whose messages are private, by its own file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from perfed.core.accounting import Spending
from perfed.core.errors import ConfigError, PerfedError
from perfed.core.message import Message
from perfed.core.tree import flatten
from perfed.flower.coordinator import coordinate
from perfed.flower.ledger import Ledger
from perfed.flower.protocol import Envelope
from perfed.flower.purse import Purse
from perfed.flower.settings import read_coordinator
from perfed.flower.site import Checkpoint
from tests.flower.setting import Desk, desk, write_federation

PRIVATE = {"noise": 1.0, "clip": 0.5, "epsilon": 8.0, "count_noise": 3.0}
MODELS = [{"name": "mlp", "hidden": [8]}] * 3


class Listening(Desk):
    """Keeps all that sites sent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(desk(folder).sites)
        self.heard: list[Envelope] = []

    def receive(self, names: Any) -> Any:
        arrived = super().receive(names)
        self.heard += [one for one in arrived.values() if isinstance(one, Envelope)]
        return arrived


def private_sites(folder: Path, privacy: dict[str, Any] = PRIVATE, **changes: Any) -> Path:
    write_federation(folder, MODELS, **({"rounds": 3} | changes))
    for path in folder.glob("site-*.yaml"):
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"privacy": privacy}))
    return folder


def purse_of(folder: Path, client: int = 0) -> Purse:
    return Purse(folder / f"state-{client}")


def reports(folder: Path, client: int) -> list[dict[str, Any]]:
    (path,) = (folder / f"state-{client}").glob("*/report.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ["perfed-ckt", "fedavg"])
def test_nothing_leaves_but_noised_messages(algorithm: str, tmp_path: Path) -> None:
    folder = private_sites(tmp_path / "one", algorithm={"name": algorithm})
    listening, said = Listening(folder), []  # type: ignore[var-annotated]
    result = coordinate(folder / "coordinator.yaml", listening, said.append)
    assert result.directory.finished
    facts = [answer.facts for answer in listening.heard]
    assert not any("numbers" in one for one in facts)
    for client in range(3):
        purse = purse_of(folder, client)
        told = [one["sizes"] for one in facts if one.get("client") == client]
        assert told
        assert all(one == {"train": purse.told, "validation": 1, "test": 1} for one in told)
        assert purse.spent == [Spending(2, min(1.0, 8 / purse.told), 1.0)] * len(purse.spent)
        lines = reports(folder, client)
        assert 0 < lines[0]["epsilon"] <= lines[-1]["epsilon"] <= 8.0
        assert "test_accuracy" in lines[-1]  # for the people at the site


def test_noise_is_new_in_every_run_whatever_the_seed(tmp_path: Path) -> None:
    """Two federations of one seed and the same samples say different things, also where a site's
    folder is a copy."""
    folders = [private_sites(tmp_path / name, rounds=1) for name in ("one", "other")]
    said: list[list[Message]] = []
    for folder in folders:
        for client in range(3):
            (folder / f"state-{client}").mkdir()
            copied = {"told": 20, "count_noise": 3.0, "spent": []}
            (folder / f"state-{client}" / "privacy.json").write_text(json.dumps(copied))
        listening = Listening(folder)
        coordinate(folder / "coordinator.yaml", listening, [].append)
        said.append([a.message for a in listening.heard if a.header.round == 0 and a.message])
    one, other = (messages[0]["soft_decisions"] for messages in said)
    assert one.shape == other.shape
    assert (one - other).abs().max() > 1e-3


def test_a_budget_outlives_a_run_and_a_round_that_was_lost(tmp_path: Path) -> None:
    folder = private_sites(tmp_path / "one", PRIVATE | {"epsilon": 6.0})
    state = folder / "state-0"
    state.mkdir()
    (state / "privacy.json").write_text('{"told": 20, "count_noise": 3.0, "spent": []}')
    coordinate(folder / "coordinator.yaml", desk(folder), [].append)
    spent = purse_of(folder).spent
    assert spent == [Spending(2, 0.4, 1.0)]  # the budget lasts for one round of three
    again = private_sites(tmp_path / "again", PRIVATE | {"epsilon": 6.0})
    for client in range(3):  # another run of the same sites: another coordinator, a new folder
        (again / f"state-{client}").mkdir()
        before = (folder / f"state-{client}" / "privacy.json").read_text()
        (again / f"state-{client}" / "privacy.json").write_text(before)
    coordinate(again / "coordinator.yaml", desk(again), [].append)
    assert purse_of(again).spent == spent
    assert reports(again, 0)[-1]["epsilon"] <= 6.0
    (state / "privacy.json").write_text("{")
    with pytest.raises(PerfedError, match="nobody knows what this site has spent"):
        purse_of(folder)


class _Breaking(Listening):
    """A server that sends weights on which networks give no numbers, in one round and afterwards
    when it asks for an evaluation. It stops when it has what it wants to know."""

    kind = "round"

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        if task.header.kind == self.kind and task.header.round == 1:
            huge = {n: t * 1e30 if t.ndim else t for n, t in task.message.arrays.items()}
            task = dataclasses.replace(task, message=Message.from_arrays(huge))
        return super().send(node, task, seconds)

    def receive(self, names: Any) -> Any:
        arrived = super().receive(names)
        if any((a.header.kind, a.header.round) == (self.kind, 1) for a in self.heard):
            raise KeyboardInterrupt
        return arrived


@pytest.mark.parametrize(("algorithm", "kind"), [("fedrep", "round"), ("fedavg", "evaluate")])
def test_what_breaks_at_home_is_not_told(algorithm: str, kind: str, tmp_path: Path) -> None:
    """A refusal would be an answer: a server can send weights that only one sample breaks on."""
    folder = private_sites(tmp_path / "one", algorithm={"name": algorithm})
    listening = _Breaking(folder)
    listening.kind = kind
    with pytest.raises(KeyboardInterrupt):
        coordinate(folder / "coordinator.yaml", listening, [].append)
    assert any("is not finite" in line for line in listening.said)  # at the site it is
    answers = [a for a in listening.heard if (a.header.kind, a.header.round) == (kind, 1)]
    assert [a.refusal for a in answers] == [""] * 3
    assert all(t.isfinite().all() for a in answers for t in a.message.arrays.values())
    for client in range(3):
        (path,) = (folder / f"state-{client}").glob("*/checkpoint.safetensors")
        kept = Checkpoint.load(path, torch.device("cpu"))
        assert kept.round == 1
        assert kept.record is not None
        assert all(t.isfinite().all() for t in flatten(kept.record.tree()).values())


def test_a_coordinator_has_no_say_in_it(tmp_path: Path) -> None:
    folder = private_sites(tmp_path / "one", algorithm={"name": "fedproto"})
    values = yaml.safe_load((folder / "coordinator.yaml").read_text())
    (folder / "coordinator.yaml").write_text(yaml.safe_dump(values | {"deadline": 0.3}))
    site = desk(folder)
    with pytest.raises(PerfedError):
        coordinate(folder / "coordinator.yaml", _Impatient(site.sites), [].append)
    refusals = [line["why"] for line in Ledger(folder / "state-0").read().entries if "why" in line]
    expected = "what leaves this site is private: algorithm: 'fedproto' sends"
    assert any(expected in why for why in refusals)
    values["experiment"] = values["experiment"] | {"privacy": {"noise": 1e-6}, "algorithm": "local"}
    (folder / "coordinator.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"experiment\.privacy: is each site's own"):
        read_coordinator(folder / "coordinator.yaml")


class _Impatient(Desk):
    """Gives up once every site has refused to join."""

    def receive(self, names: Any) -> Any:
        if len(self.tasks) > 6:
            raise PerfedError("nobody joins")
        return super().receive(names)
