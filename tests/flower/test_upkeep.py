"""A server whose state has turned bad, and one that is gone: found, said, and mended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from perfed import cli
from perfed.core.errors import Diverged, RunError
from perfed.core.message import Message
from perfed.flower.protocol import ROUND, Envelope
from perfed.flower.upkeep import roll_back, status
from perfed.flower.watch import Watch, typical_accuracy
from perfed.runs.directory import RunDirectory
from tests.flower.setting import MODELS, Desk, desk, write_federation
from tests.flower.test_coordinator import lines, numbers, run

SAME = [MODELS[0]] * 3


class Killed(Desk):
    """The coordinator is, in the middle of a round."""

    def __init__(self, folder: Path, round: int) -> None:
        super().__init__(desk(folder).sites)
        self.last = round

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        name = super().send(node, task, seconds)
        if (task.header.kind, task.header.round, node) == (ROUND, self.last, 12):
            raise KeyboardInterrupt
        return name


def sent(through: Desk, round: int) -> Message:
    return next(
        t.message for _, t in through.tasks if (t.header.kind, t.header.round) == (ROUND, round)
    )


def same(one: Message, other: Message) -> bool:
    return all(torch.equal(one.arrays[name], other.arrays[name]) for name in one.arrays)


def perfed(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["perfed", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


# What is seen.


def seen(answered: int, admitted: int, accuracy: float | None = None) -> dict[str, Any]:
    about = {"answered": answered, "admitted": admitted}
    return about if accuracy is None else about | {"validation_accuracy": accuracy}


@pytest.mark.attack("state-turned-bad")
def test_each_sign_is_said_when_it_begins() -> None:
    watch = Watch()
    assert watch.note(0, seen(3, 3, 0.5)) == []
    assert watch.note(1, seen(4, 2, 0.8)) == []
    assert watch.note(2, seen(4, 1, 0.41)) == ["1 of 4 answers were admitted"]
    assert watch.note(3, seen(4, 1, 0.39)) == [
        "the sites' validation accuracy is 39.0 %, and was 80.0 % after round 1"
    ]
    assert watch.note(4, seen(4, 1)) == watch.note(5, seen(4, 1, 0.2)) == []
    assert watch.note(6, seen(4, 4, 0.6)) == []
    assert len(watch.note(7, seen(4, 1, 0.2))) == 2
    assert watch.best_round == 1


@pytest.mark.attack(11, "state-turned-bad")
def test_a_minority_of_false_accuracies_moves_the_typical_one_little() -> None:
    told = {n: {"personal": {"validation_accuracy": v}} for n, v in enumerate((0.8, 0.82, 1.0))}
    assert typical_accuracy(told) == 0.82
    told[2]["personal"]["validation_accuracy"] = 0.0
    assert typical_accuracy(told) == 0.8


@pytest.mark.attack("state-turned-bad")
def test_an_accuracy_that_collapses_is_said_with_the_way_back(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", rounds=4)

    class Telling(Desk):
        """What sites say of their models: good after rounds 0 and 1, bad afterwards."""

        def send(self, node: int, task: Envelope, seconds: float) -> str:
            name = super().send(node, task, seconds)
            answer = self._arrived[name]
            if task.header.kind == ROUND and isinstance(answer, Envelope):
                value = 0.9 if task.header.round < 2 else 0.1
                told = {"personal": numbers(validation_accuracy=value)}
                self._arrived[name] = answer.answer(answer.message, {"numbers": told})
            return name

    said: list[str] = []
    result = run(folder, Telling(desk(folder).sites), said)
    by_round = {line["round"]: line for line in lines(result.path, "rounds.jsonl")}
    assert [round for round in by_round if "suspect" in by_round[round]] == [2]
    (warning,) = (text for text in said if "WARNING" in text)
    assert f"'perfed federation rollback --to 1 {folder / 'run'}'" in warning


# Going back.


@pytest.mark.attack("state-turned-bad")
def test_the_server_goes_on_from_the_state_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With FedAvg, whose state is what it sends. Sites do no round twice."""
    changes = {"algorithm": "fedavg", "rounds": 6}
    folder = write_federation(tmp_path / "federation", SAME, {"states": 3}, **changes)
    first = Killed(folder, 4)
    with pytest.raises(KeyboardInterrupt):
        run(folder, first)
    path = folder / "run"
    before = (path / "rounds.jsonl").read_bytes()
    assert perfed("federation", "rollback", str(path), "--to", "9", monkeypatch=monkeypatch) == 2
    assert "there is no state after round 9: kept are those after " in capsys.readouterr().err
    assert perfed("federation", "rollback", str(path), "--to", "1", monkeypatch=monkeypatch) == 0
    assert "round 4 will begin with the server's state after round 1" in capsys.readouterr().out
    assert (path / "rounds.jsonl").read_bytes() == before
    again = desk(folder)
    result = run(folder, again)
    assert same(sent(again, 4), sent(first, 2))
    assert not same(sent(again, 4), sent(first, 3))
    by_round = {line["round"]: line for line in lines(path, "rounds.jsonl")}
    assert [line.get("rolled_back_to") for line in by_round.values()] == [None] * 4 + [1, None]
    assert not any(line["absent"] for line in by_round.values())
    assert result.summary["finished"]
    with pytest.raises(RunError, match="is finished"):
        roll_back(path, 3)


@pytest.mark.attack("state-turned-bad")
def test_a_state_that_is_not_finite_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perfed.algorithms import FedAvg

    folder = write_federation(tmp_path / "federation", SAME, algorithm="fedavg", rounds=4)
    merge = FedAvg.merge

    def spoilt(self: FedAvg, server: Any, state: Any, replies: Any) -> Any:
        merged = merge(self, server, state, replies)
        if server.round == 2:
            for weights in merged.values():
                for tensor in weights.params.values():
                    tensor.fill_(float("nan"))
        return merged

    monkeypatch.setattr(FedAvg, "merge", spoilt)
    with pytest.raises(Diverged, match="'perfed federation rollback --to"):
        run(folder, desk(folder))
    path = folder / "run"
    assert status(path)[1] is False
    roll_back(path, 1)
    through = desk(folder)
    result = run(folder, through)
    by_round = {line["round"]: line for line in lines(path, "rounds.jsonl")}
    assert [*by_round][-4:] == [0, 1, 2, 3]
    assert "is not finite" in by_round[2]["failed"]
    assert by_round[3]["rolled_back_to"] == 1
    assert result.table()
    assert all(tensor.isfinite().all() for tensor in sent(through, 3).arrays.values())
    assert result.summary["finished"]


def test_the_best_state_is_kept_beside_the_last_ones(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", options={"states": 2}, rounds=6)
    with pytest.raises(KeyboardInterrupt):
        run(folder, Killed(folder, 5))
    directory = RunDirectory(folder / "run")
    kept = {int(round) for round in directory.read_json("checkpoint/manifest.json")["states"]}
    watch = Watch()
    watch.recall(directory.lines("rounds.jsonl"))
    assert kept == {3, 4, watch.best_round}
    files = {path.name for path in (folder / "run" / "checkpoint").glob("server-*")}
    assert len(files) == len(kept)


# Whether it lives.


@pytest.mark.attack(32)
def test_a_coordinator_that_is_gone_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_federation(tmp_path / "federation", rounds=3)
    with pytest.raises(KeyboardInterrupt):
        run(folder, Killed(folder, 1))
    path = folder / "run"
    assert perfed("federation", "status", str(path), monkeypatch=monkeypatch) == 1
    told = capsys.readouterr().out
    assert "1 of 3 rounds are done" in told
    assert "NOT at work" in told
    with RunDirectory(path).locked():
        assert perfed("federation", "status", str(path), monkeypatch=monkeypatch) == 0
        assert "at work; its newest line is" in capsys.readouterr().out
        with pytest.raises(RunError, match="in use by another process"):
            roll_back(path, 0)
    run(folder, desk(folder))
    assert perfed("federation", "status", str(path), monkeypatch=monkeypatch) == 0
    assert "3 of 3 rounds are done\nfinished" in capsys.readouterr().out
    assert perfed("federation", "status", str(tmp_path), monkeypatch=monkeypatch) == 2
