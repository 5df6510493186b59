"""The federation's logic, without Flower's processes: a desk passes the envelopes."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

import perfed
from perfed import Result
from perfed.core import tensorfile
from perfed.core.errors import ConfigError, PerfedError, RunError
from perfed.core.message import Message
from perfed.flower.coordinator import coordinate
from perfed.flower.ledger import Ledger
from perfed.flower.membership import introduction
from perfed.flower.numbers import NEEDED, checked_numbers
from perfed.flower.protocol import EVALUATE, FIRST, JOIN, ROUND, Envelope, Header, Refused
from tests.conftest import MLP_50, spec
from tests.flower import setting
from tests.flower.setting import (
    MODELS,
    Desk,
    desk,
    personal_checkpoint,
    simulated,
    write_federation,
)

SAME = [MODELS[0]] * 3


def lines(path: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def run(folder: Path, through: Desk, said: list[str] | None = None) -> Result:
    return coordinate(
        folder / "coordinator.yaml", through, (said if said is not None else []).append
    )


def assert_same_numbers(federated: Path, reference: Path) -> None:
    ours, theirs = lines(federated, "clients.jsonl"), lines(reference, "clients.jsonl")
    assert [line["round"] for line in ours] == [line["round"] for line in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for kind in one.keys() - {"round"}:
            for name, values in one[kind].items():
                assert values == pytest.approx(other[kind][name], rel=1e-5), (kind, name)
    for name in ("traffic", "clients", "round"):
        mine = [line[name] for line in lines(federated, "rounds.jsonl")]
        assert mine == [line[name] for line in lines(reference, "rounds.jsonl")], name


@pytest.mark.parametrize("name", sorted(perfed.algorithms))
def test_every_algorithm_gives_what_the_simulation_gives(name: str, tmp_path: Path) -> None:
    """Unchanged, also where clients differ in architecture, and counted alike by the channel."""
    models = [MLP_50, {"name": "mlp", "hidden": [12, 50]}, {"name": "cnn", "batchnorm": True}]
    changes = {"algorithm": spec(name), "rounds": 2}
    folder = write_federation(tmp_path / "federation", models, **changes)
    run(folder, desk(folder))
    simulated(tmp_path / "simulation", models, **changes)
    assert_same_numbers(folder / "run", tmp_path / "simulation")


@pytest.mark.parametrize(
    ("name", "drawn", "split"),
    [("fedavg", 2, {}), ("fedfomo", 3, {"second_validation": True})],
    ids=["averaged plainly", "validation in halves"],
)
def test_what_counts_and_what_is_held_out_are_the_simulations(
    name: str,
    drawn: int,
    split: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(setting, "SPLIT", setting.SPLIT | split)
    changes = {"algorithm": {"name": name}, "clients_per_round": drawn}
    same = [{"name": "mlp", "hidden": [8]}] * 3
    folder = write_federation(tmp_path / "federation", same, **changes)
    run(folder, desk(folder))
    simulated(tmp_path / "simulation", same, **changes)
    assert_same_numbers(folder / "run", tmp_path / "simulation")


def test_robust_stages_do_what_they_do_in_a_simulation(tmp_path: Path) -> None:
    changes = {"algorithm": {"name": "perfed-kin"}, "wire": ["history", "bounded"], "rounds": 3}
    folder = write_federation(tmp_path / "federation", **changes)
    run(folder, desk(folder))
    simulated(tmp_path / "simulation", **changes)
    assert_same_numbers(folder / "run", tmp_path / "simulation")


def test_hostile_clients_are_for_simulations(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", hostile="random")
    with pytest.raises(ConfigError, match=r"experiment\.hostile: sites are what they are"):
        run(folder, desk(folder))


def test_two_of_three_a_round_are_the_ones_the_simulation_draws(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", clients_per_round=2)
    run(folder, desk(folder))
    simulated(tmp_path / "simulation", clients_per_round=2)
    drawn = [line["clients"] for line in lines(folder / "run", "rounds.jsonl")]
    assert drawn == [line["clients"] for line in lines(tmp_path / "simulation", "rounds.jsonl")]
    assert any(len(clients) == 2 for clients in drawn)
    for client in range(3):
        ours = tensorfile.load(personal_checkpoint(folder, client))
        theirs = Result(tmp_path / "simulation").model(client).state_dict()
        for tensor_name, tensor in theirs.items():
            assert torch.allclose(ours[tensor_name], tensor, atol=1e-6)


def test_the_server_of_perfed_ckt_sees_soft_decisions_and_nothing_else(tmp_path: Path) -> None:
    """Its file names no architecture, and no answer holds a tensor of a model's shape."""
    folder = write_federation(tmp_path / "federation")
    values = yaml.safe_load((folder / "coordinator.yaml").read_text())
    del values["experiment"]["models"]
    (folder / "coordinator.yaml").write_text(yaml.safe_dump(values))
    seen: list[Message] = []

    class Listening(Desk):
        def receive(self, names: Any) -> Any:
            arrived = super().receive(names)
            seen.extend(answer.message for answer in arrived.values())  # type: ignore[union-attr]
            return arrived

    listening = Listening(desk(folder).sites)
    run(folder, listening)
    assert {tuple(m["soft_decisions"].shape) for m in seen if m} == {(30, 10)}
    assert {name for message in seen for name in message.arrays} == {"soft_decisions"}


@pytest.mark.attack(35)
def test_who_does_not_answer_is_left_out_and_comes_back(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", options={"deadline": 0.3}, rounds=4)
    dead_in_round_1 = desk(
        folder,
        lambda node, task: (
            "dead" if (node, task.header.round, task.header.kind) == (12, 1, ROUND) else None
        ),
    )
    said: list[str] = []
    result = run(folder, dead_in_round_1, said)
    assert "client 2 is left out: no answer within 0.3 s" in said
    took_part = {line["round"]: line for line in lines(result.path, "rounds.jsonl")}
    assert took_part[1]["clients"] == [0, 1]
    assert "no answer within 0.3 s" in took_part[1]["absent"]["2"]
    assert 2 in took_part[3]["clients"]
    assert took_part[3]["absent"] == {}
    rejoined = [task for node, task in dead_in_round_1.tasks if node == 12]
    assert [task.header.kind for task in rejoined].count(JOIN) == 2


def test_a_wrong_number_can_be_corrected(tmp_path: Path) -> None:
    """Site 2 is the first to come, as client 0, which is then refused; later it comes as 2."""
    folder = write_federation(tmp_path / "federation", options={"deadline": 0.2}, rounds=1)
    file = folder / "site-2.yaml"
    file.write_text(file.read_text().replace("client: 2", "client: 0"))
    asked: list[int] = []

    def fate(node: int, task: Envelope) -> None:
        asked.append(node)
        assert len(asked) < 50, "it waits for ever"
        through.sites |= others
        if asked.count(10) == 2 and others:  # site 0 was refused: somebody looks into it
            file.write_text(file.read_text().replace("client: 0", "client: 2"))
            through.sites[13] = through.sites.pop(12)
            others.clear()

    through = desk(folder, fate)
    others = {node: through.sites.pop(node) for node in (10, 11)}
    said: list[str] = []
    (first, *_) = lines(run(folder, through, said).path, "rounds.jsonl")
    assert any("client 0 is another site already" in line for line in said)
    assert first["clients"] == [0, 1, 2]


@pytest.mark.attack(36)
def test_every_round_says_who_is_gone(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", options={"start_with": 2}, rounds=2)
    through = desk(folder)
    del through.sites[12]
    said = [line["absent"] for line in lines(run(folder, through).path, "rounds.jsonl")]
    assert said == [{"2": "is not there"}] * 3  # two rounds, and the end


def test_nobody_waits_for_a_site_that_was_started_anew(tmp_path: Path) -> None:
    """It is there again under another node's number: what the old one was asked is lost."""
    folder = write_federation(tmp_path / "federation", options={"deadline": 3600}, rounds=2)
    through = desk(folder)

    def fate(node: int, task: Envelope) -> str | None:
        if (node, task.header.round) == (12, 0):
            through.sites[13] = through.sites[12]
        return "dead" if node == 12 and 13 in through.sites else None

    through.fate = fate
    result = run(folder, through)
    line, last = lines(result.path, "rounds.jsonl")[1:]
    assert (line["clients"], line["absent"]) == ([0, 1], {"2": "was started anew"})
    assert last["clients"] == [0, 1, 2]


def test_a_site_that_fails_is_left_out_with_its_reason(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", options={"deadline": 30})

    def fate(node: int, task: Envelope) -> str | None:
        return "out of memory" if (node, task.header.round) == (11, 0) else None

    result = run(folder, desk(folder, fate))
    line = lines(result.path, "rounds.jsonl")[1]
    assert (line["clients"], line["absent"]) == ([0, 2], {"1": "out of memory"})


def test_an_answer_that_was_lost_is_given_again_and_nothing_is_trained_twice(
    tmp_path: Path,
) -> None:
    """All answers of round 1 are lost once; the numbers are those of a run without a loss."""
    options = {"deadline": 0.3, "minimum": 3}
    folder = write_federation(tmp_path / "federation", options=options)
    lost: set[int] = set()

    def fate(node: int, task: Envelope) -> str | None:
        if task.header.round == 1 and node not in lost:
            lost.add(node)
            return "lost"
        return None

    through = desk(folder, fate)
    run(folder, through)
    assert sum("answered from the checkpoint" in text for text in through.said) == 3
    simulated(tmp_path / "simulation")
    for line in lines(folder / "run", "clients.jsonl"):
        reference = lines(tmp_path / "simulation", "clients.jsonl")[line["round"]]
        assert line["personal"]["test_loss"] == pytest.approx(reference["personal"]["test_loss"])


def test_the_opening_waits_until_somebody_has_answered(tmp_path: Path) -> None:
    """Without S(−1) there are no centroids to send: the round is tried again, not skipped."""
    folder = write_federation(tmp_path / "federation", options={"deadline": 0.2})
    asked: list[int] = []

    def fate(node: int, task: Envelope) -> str | None:
        if task.header.kind == FIRST:
            asked.append(node)
            return "dead" if len(asked) <= 3 else None
        return None

    result = run(folder, desk(folder, fate))
    assert len(asked) > 3
    assert lines(result.path, "rounds.jsonl")[0]["clients"]
    assert result.summary["finished"]


def test_fewer_answers_than_the_minimum_make_the_round_go_on(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", options={"deadline": 0.2, "minimum": 3})
    refused: list[int] = []

    def fate(node: int, task: Envelope) -> str | None:
        if task.header.round == 0 and node == 10 and len(refused) < 2:
            refused.append(node)
            return "not now"
        return None

    result = run(folder, desk(folder, fate))
    assert len(refused) == 2
    assert all(line["clients"] == [0, 1, 2] for line in lines(result.path, "rounds.jsonl"))


class Killed(BaseException):
    """The coordinator's process is gone: nothing is tidied up."""


@pytest.mark.parametrize(
    ("name", "moment"),
    [
        ("perfed-ckt", "opening"),
        ("perfed-ckt", "round 0"),
        ("perfed-ckt", "round 1"),
        ("scaffold", "round 0"),
        ("scaffold", "evaluation"),
        ("fedfomo", "round 1"),
    ],
)
def test_a_killed_coordinator_goes_on_and_loses_nothing(
    name: str, moment: str, tmp_path: Path
) -> None:
    """Killed while the last site works; started again, the run ends as if nothing had been."""
    changes: dict[str, Any] = {"algorithm": {"name": name}, "models": SAME}
    if name == "perfed-ckt":
        changes["algorithm"]["clusters"] = 2
    folder = write_federation(tmp_path / "federation", SAME, algorithm=changes["algorithm"])
    seen: list[Envelope] = []

    def fate(node: int, task: Envelope) -> str | None:
        header = task.header
        moments = {
            "opening": header.kind == FIRST,
            "round 0": header.kind == ROUND and header.round == 0,
            "round 1": header.kind == ROUND and header.round == 1,
            "evaluation": header.kind == EVALUATE and header.round == 1,
        }
        if moments[moment]:
            seen.append(task)
            if len(seen) == 3:
                raise Killed
        return None

    through = desk(folder, fate)
    with pytest.raises(Killed):
        run(folder, through)
    run(folder, desk(folder))
    simulated(tmp_path / "simulation", SAME, algorithm=changes["algorithm"])
    assert_same_numbers(folder / "run", tmp_path / "simulation")


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", rounds=1)
    run(folder, desk(folder))
    silent = desk(folder)
    run(folder, silent)
    assert silent.tasks == []


def test_another_configuration_does_not_go_on_in_the_same_directory(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", rounds=1)
    run(folder, desk(folder))
    text = (folder / "coordinator.yaml").read_text()
    (folder / "coordinator.yaml").write_text(text.replace("rounds: 1", "rounds: 2"))
    with pytest.raises(RunError, match="other settings: rounds is 2, was 1; choose another"):
        run(folder, desk(folder))


STATES = ["state-1", "elsewhere"]


@pytest.mark.attack(13, 37)
def test_a_number_that_two_sites_claim_is_refused(tmp_path: Path) -> None:
    """The commonest mistake: a site's file copied with its number. Who is refused is told so."""
    folder = write_federation(tmp_path / "federation", rounds=1, clients=3)
    copied = yaml.safe_load((folder / "site-1.yaml").read_text()) | {"state": "elsewhere"}
    (folder / "site-copy.yaml").write_text(yaml.safe_dump(copied))
    said: list[str] = []
    run(folder, desk(folder), said)
    names = [json.loads((folder / s / "site.json").read_text())["site"][:8] for s in STATES]
    for state, name, other in zip(STATES, names, reversed(names), strict=True):
        told = [e for e in Ledger(folder / state).read().entries if e["event"] == "told"]
        for entry in told:
            assert f"already, site {other}: give this one, site {name}, its own" in entry["why"]
        assert bool(told) is any(entry["why"] in line for entry in told for line in said)
    assert any("client 1 is another site already" in line for line in said)


def test_weights_of_an_unknown_architecture_cannot_be_served(tmp_path: Path) -> None:
    """FedAvg's server must know the network; a site with another one is told so and stays out."""
    folder = write_federation(
        tmp_path / "federation", algorithm="fedavg", rounds=1, clients_per_round=2
    )
    values = yaml.safe_load((folder / "coordinator.yaml").read_text())
    values["experiment"]["models"] = MODELS[:2]
    values["start_with"] = 2
    (folder / "coordinator.yaml").write_text(yaml.safe_dump(values))
    said: list[str] = []
    result = run(folder, desk(folder), said)
    assert any("is not among the coordinator's" in line for line in said)
    assert result.per_client()["client"].tolist() == [0, 1]


@pytest.mark.attack(1)
def test_a_reply_that_is_not_finite_does_not_reach_the_server(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", rounds=1)

    class Broken(Desk):
        def receive(self, names: Any) -> Any:
            arrived = super().receive(names)
            for name, answer in arrived.items():
                if answer.message and answer.header.kind == ROUND:  # type: ignore[union-attr]
                    spoilt = Message(soft_decisions=torch.full((30, 10), float("nan")))
                    arrived[name] = answer.answer(spoilt, {})  # type: ignore[union-attr]
                    break
            return arrived

    result = run(folder, Broken(desk(folder).sites))
    (absent,) = lines(result.path, "rounds.jsonl")[1]["absent"].values()
    assert "not finite" in absent


@pytest.mark.attack(2)
def test_an_answer_to_another_round_is_ignored(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", rounds=2)

    class Confused(Desk):
        def receive(self, names: Any) -> Any:
            arrived = super().receive(names)
            for name, answer in arrived.items():
                header = answer.header  # type: ignore[union-attr]
                if (header.kind, header.round) == (ROUND, 1):
                    old = Header(ROUND, header.run, 0, header.public)
                    arrived[name] = Envelope(old, answer.message)  # type: ignore[union-attr]
                    break
            return arrived

    result = run(folder, Confused(desk(folder).sites))
    (reason,) = lines(result.path, "rounds.jsonl")[2]["absent"].values()
    assert "an answer to 'round' of round 0" in reason


def test_the_reports_of_a_simulation_work_on_a_federation(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", rounds=2)
    result = run(folder, desk(folder))
    assert "perfed-ckt" in result.table()
    assert len(result.per_round()) == 2
    frame = result.per_client()
    assert frame["train_size"].gt(0).all()
    assert result.plot(tmp_path / "figure.png").is_file()
    with pytest.raises(PerfedError, match="has no models: they are at their sites"):
        result.model(0)


def numbers(**changes: Any) -> dict[str, Any]:
    return dict.fromkeys(NEEDED, 0.5) | changes


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.sampled_from(NEEDED), inner, max_size=5)
        | st.fixed_dictionaries(dict.fromkeys(NEEDED, inner))
        | st.fixed_dictionaries({"personal": inner})
        | st.fixed_dictionaries({"train": inner, "validation": inner, "test": inner})
    ),
    max_leaves=9,
)
KNOWN = ("client", "sizes", "architecture", "site", "numbers")


@pytest.mark.attack(2)
@given(values | st.fixed_dictionaries({}, optional=dict.fromkeys(KNOWN, values)))
@example([1])
def test_any_facts_are_an_introduction_or_refused(facts: Any) -> None:
    with contextlib.suppress(Refused):
        introduction(facts, 3)
    with contextlib.suppress(Refused):
        checked_numbers({"numbers": facts})


@pytest.mark.attack(2, 9, 11)
@pytest.mark.parametrize(
    ("kind", "lie"),
    [
        (JOIN, {"client": 7}),
        (JOIN, {"client": -1}),
        (JOIN, {"client": "all"}),
        (JOIN, {"sizes": {"train": 0, "validation": 1, "test": 1}}),
        (JOIN, {"sizes": None}),
        (JOIN, {"sizes": {"train": float("inf"), "validation": 1, "test": 1}}),
        (JOIN, {"sizes": {"train": 10**30, "validation": 1, "test": 1}}),
        (JOIN, {"numbers": {"personal": {"test_accuracy": "high"}}}),
        (JOIN, {"architecture": "mlp\ud800"}),  # half of a character cannot be printed
        (JOIN, {"numbers": {"personal": numbers(test_loss=10**400)}}),
        (ROUND, {"numbers": {"personal": numbers(test_loss=10**400)}}),
        (ROUND, {"numbers": {"personal": numbers(test_accuracy=1e308)}}),  # no mean of it is finite
        (ROUND, {"numbers": {"personal": {name: [0.5] for name in numbers()}}}),
        (ROUND, {"numbers": {"imperial": {}}}),
        (ROUND, {"numbers": None}),
    ],
)
def test_a_site_that_talks_nonsense_harms_nobody(
    kind: str, lie: dict[str, Any], tmp_path: Path
) -> None:
    folder = write_federation(
        tmp_path / "federation", options={"start_with": 2}, rounds=1, clients_per_round=2
    )

    class Lying(Desk):
        """Node 11 does."""

        def send(self, node: int, task: Envelope, seconds: float) -> str:
            name = super().send(node, task, seconds)
            answer = self._arrived[name]
            if node == 11 and task.header.kind == kind and isinstance(answer, Envelope):
                self._arrived[name] = answer.answer(answer.message, {**answer.facts, **lie})
            return name

    result = run(folder, Lying(desk(folder).sites))
    assert result.summary["finished"]
    last = lines(result.path, "rounds.jsonl")[-1]
    assert 1 not in last["clients"]
    assert last["clients"]


@pytest.mark.attack(3)
@pytest.mark.parametrize("oddity", ["another name", "another shape", "nothing", "too large"])
def test_an_answer_that_does_not_fit_the_others_is_left_out(oddity: str, tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", rounds=2, clients_per_round=3)

    class Odd(Desk):
        """Node 11's answers are."""

        def send(self, node: int, task: Envelope, seconds: float) -> str:
            name = super().send(node, task, seconds)
            answer = self._arrived.get(name)
            if node == 11 and task.header.kind == ROUND and isinstance(answer, Envelope):
                right = answer.message["soft_decisions"]
                arrays = {
                    "another name": {"other": right},
                    "another shape": {"soft_decisions": right[:3]},
                    "nothing": {},
                    "too large": {"soft_decisions": right + 3e38},  # finite, unlike its square
                }[oddity]
                odd = Message.from_arrays(arrays)
                self._arrived[name] = answer.answer(odd, dict(answer.facts))
            return name

    result = run(folder, Odd(desk(folder).sites))
    assert result.summary["finished"]
    reason = {
        "another name": "an unknown array 'other', must be soft_decisions",
        "another shape": "soft_decisions: is 3×10, must be |P|×N (30×10)",
        "nothing": "soft_decisions: is missing",
        "too large": "soft_decisions: has 3e+38, more than can be summed",
    }[oddity]
    _, first, *_ = lines(result.path, "rounds.jsonl")
    assert first["clients"] == [0, 2]
    assert first["absent"]["1"] == first["refused"]["1"] == reason


def test_the_final_models_are_evaluated_though_nobody_answers_at_first(tmp_path: Path) -> None:
    folder = write_federation(
        tmp_path / "federation", SAME, algorithm="fedavg", rounds=2, evaluate_every=2
    )
    silent = iter([True] * 3)

    def fate(node: int, task: Envelope) -> str | None:
        lost = task.header.kind == EVALUATE and next(silent, False)
        return "node unavailable" if lost else None

    result = run(folder, desk(folder, fate))
    assert result.summary["finished"]
    assert result.summary["rounds"] == 2


def test_a_message_that_flower_does_not_take_leaves_one_site_out(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", rounds=4, clients_per_round=3)

    class Full(Desk):
        """There is no room for what node 12 is to get in round 0."""

        def send(self, node: int, task: Envelope, seconds: float) -> str:
            if node == 12 and task.header.kind == ROUND and task.header.round == 0:
                raise RunError("Flower does not take the message")
            return super().send(node, task, seconds)

    result = run(folder, Full(desk(folder).sites))
    first, *_, last = (line for line in lines(result.path, "rounds.jsonl") if line["round"] >= 0)
    assert 2 not in first["clients"]
    assert 2 in last["clients"]


def test_a_start_that_failed_does_not_block_the_folder(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", rounds=1)
    (folder / "run").mkdir()
    (folder / "run" / ".lock").touch()
    assert run(folder, desk(folder)).summary["finished"]


@pytest.mark.attack("evaluates-other-models")
def test_who_evaluates_other_models_than_the_rest_is_not_counted(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", rounds=1)

    class Other(Desk):
        """Node 11 evaluates a global model, where there are personal ones."""

        def send(self, node: int, task: Envelope, seconds: float) -> str:
            name = super().send(node, task, seconds)
            answer = self._arrived[name]
            if node == 11 and isinstance(answer, Envelope) and "numbers" in answer.facts:
                numbers = {"global": answer.facts["numbers"]["personal"]}
                self._arrived[name] = answer.answer(
                    answer.message, {**answer.facts, "numbers": numbers}
                )
            return name

    result = run(folder, Other(desk(folder).sites))
    evaluated = lines(result.path, "clients.jsonl")[-1]
    assert evaluated.keys() == {"round", "personal"}
    counted = [value is not None for value in evaluated["personal"]["test_accuracy"]]
    assert counted == [True, False, True]


class Restarted(Desk):
    """Node 12 is killed in round 1. As long as Flower has not noticed, nobody else may have its
    key; then the round ends without it, and it is there again half a second later."""

    def __init__(self, folder: Path, away: float) -> None:
        super().__init__(desk(folder).sites)
        self.away, self.lost = away, float("inf")

    def nodes(self) -> list[int]:
        gone = 0 <= time.monotonic() - self.lost < self.away
        return [node for node in self.sites if node != 12 or not gone]

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        if (node, task.header.kind, task.header.round) == (12, ROUND, 1):
            self.fate, self.lost = lambda node, task: "Node Unavailable", time.monotonic()
            name = super().send(node, task, seconds)
            self.fate = lambda node, task: None
            return name
        return super().send(node, task, seconds)


def test_a_site_that_was_killed_and_is_soon_back_misses_one_round(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "f", rounds=4)
    result = run(folder, Restarted(folder, 0.5))
    taking_part = [line["clients"] for line in lines(result.path, "rounds.jsonl")]
    assert taking_part == [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1, 2], [0, 1, 2]]


def test_who_does_not_come_back_is_waited_for_once(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "f", options={"deadline": 2}, rounds=5)
    result = run(folder, Restarted(folder, 1000))
    times = [line["clients"] for line in lines(result.path, "timing.jsonl")]
    assert times[2] > 2 > max(times[3:])
