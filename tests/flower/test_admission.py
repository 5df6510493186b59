"""Hostile sites, and a hostile coordinator: each message is measured alone, by its declaration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from perfed.core.message import Message
from perfed.flower.protocol import EVALUATE, FIRST, ROUND, Envelope
from tests.conftest import spec
from tests.flower.setting import MODELS, Desk, desk, write_federation
from tests.flower.test_coordinator import lines, run
from tests.flower.test_site import header, join, site
from tests.hostile import LIES, Arrays

SAME = [MODELS[0]] * 3
TRIED = [
    *(("perfed-ckt", lie) for lie in LIES["perfed-ckt"]),
    *(("perfed-evidence", lie) for lie in ("samples 1e9", "samples -1e6", "gains 1e30")),
    *(("perfed-kin", lie) for lie in LIES["perfed-kin"]),
    *(("fedavg", lie) for lie in ("one more", "other shape", "samples 1e9")),
    ("fedfomo", "one more"),
    ("hypcluster", "cluster 7"),
]


class Lying(Desk):
    """What some nodes answer is not what their sites said."""

    def __init__(self, folder: Path, nodes: set[int], lie: Any, kind: str = ROUND) -> None:
        super().__init__(desk(folder).sites)
        self.liars, self.lie, self.kind = nodes, lie, kind

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        name = super().send(node, task, seconds)
        answer = self._arrived.get(name)
        if node in self.liars and task.header.kind == self.kind and isinstance(answer, Envelope):
            said: Arrays = self.lie(answer.message.arrays)
            self._arrived[name] = answer.answer(Message.from_arrays(said), dict(answer.facts))
        return name


def honest_numbers(folder: Path) -> list[Any]:
    """Of clients 0 and 2, after every round."""
    return [
        {
            kind: {name: [values[0], values[2]] for name, values in column.items()}
            for kind, column in line.items()
            if kind != "round"
        }
        for line in lines(folder / "run", "clients.jsonl")
    ]


@pytest.mark.attack(1, 3, 6, 7, 8, 9, 10)
@pytest.mark.parametrize(("name", "lie"), TRIED)
def test_a_lie_is_refused_alone_and_nobody_else_is_blamed(
    name: str, lie: str, tmp_path: Path
) -> None:
    changes = {"algorithm": spec(name), "rounds": 2}
    folder = write_federation(tmp_path / "lying", SAME, **changes)
    said: list[str] = []
    change, reason = LIES[name][lie]
    result = run(folder, Lying(folder, {11}, change), said)
    _, line, *_ = [None, *lines(result.path, "rounds.jsonl")][-3:]
    assert line["clients"] == [0, 2]
    assert list(line["refused"]) == list(line["absent"]) == ["1"]
    assert reason in line["refused"]["1"]
    assert line["absent"]["1"] == line["refused"]["1"]
    assert any(f"client 1 is left out: {line['refused']['1']}" == text for text in said)
    assert not any("client 0 is left out" in x or "client 2 is left out" in x for x in said)
    without = write_federation(tmp_path / "without", SAME, **changes)
    run(without, desk(without, lambda n, t: "gone" if (n, t.header.kind) == (11, ROUND) else None))
    assert honest_numbers(folder) == honest_numbers(without)


@pytest.mark.attack(4)
def test_two_liars_of_three_do_not_end_the_run(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", rounds=2)
    result = run(folder, Lying(folder, {10, 11}, LIES["perfed-ckt"]["short"][0]))
    assert result.summary["finished"]
    _, line, *_ = lines(result.path, "rounds.jsonl")
    assert line["clients"] == [2]
    assert sorted(line["refused"]) == ["0", "1"]


@pytest.mark.attack(5)
def test_a_lie_in_the_opening_does_not_become_the_state(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "federation", rounds=1)
    result = run(folder, Lying(folder, {10, 11}, LIES["perfed-ckt"]["short"][0], FIRST))
    opening, line = lines(result.path, "rounds.jsonl")
    assert opening["clients"] == [2]
    assert sorted(opening["refused"]) == ["0", "1"]
    assert 2 in line["clients"]
    assert "refused" not in line


@pytest.mark.attack(6)
def test_a_refused_site_is_not_asked_again_and_again_in_one_round(tmp_path: Path) -> None:
    """All three are needed. One lies for a while; it is asked once for each deadline."""
    options = {"minimum": 3, "deadline": 0.4}
    folder = write_federation(tmp_path / "federation", rounds=1, options=options)
    lies = iter(range(2))
    change, reason = LIES["perfed-ckt"]["zeros"]
    lying = Lying(folder, {11}, lambda a: a if next(lies, None) is None else change(a))
    said: list[str] = []
    result = run(folder, lying, said)
    assert sum(reason in text for text in said) == 2
    *_, line = lines(result.path, "rounds.jsonl")
    assert line["clients"] == [0, 1, 2]
    assert "refused" not in line
    asked = [task for node, task in lying.tasks if (node, task.header.kind) == (11, ROUND)]
    assert len(asked) == 3


def test_what_merge_stumbles_over_is_an_error_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perfed.algorithms import PerFedCKT

    def stumble(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(PerFedCKT, "merge", stumble)
    folder = write_federation(tmp_path / "federation", rounds=1)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run(folder, desk(folder))


@pytest.mark.attack(24, 25, 26)
@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"centroids": torch.full((2, 30, 10), 1e3)}, "centroids: row 0 sums to 10000, must be 1"),
        ({"centroids": torch.full((9, 30, 10), 0.1)}, "is 9×30×10, must be at most 2×|P|×N"),
        ({"centroids": torch.full((2, 30, 10), float("nan"))}, "centroids: is not finite"),
        ({}, "centroids: is missing"),
        (
            {"centroids": torch.full((1, 30, 10), 0.1), "more": torch.zeros(10**6)},
            "an unknown array 'more', must be centroids",
        ),
    ],
)
def test_a_site_does_not_use_what_is_not_declared(
    arrays: Arrays, reason: str, tmp_path: Path
) -> None:
    here = site(write_federation(tmp_path / "federation"))
    join(here)
    answer = here.answer(Envelope(header(here, ROUND, 0), Message.from_arrays(arrays)))
    assert reason in answer.refusal
    right = Message(centroids=torch.full((2, 30, 10), 0.1))
    assert not here.answer(Envelope(header(here, ROUND, 0), right)).refusal


@pytest.mark.attack(24)
def test_a_site_gets_nothing_with_the_opening_or_an_evaluation(tmp_path: Path) -> None:
    here = site(write_federation(tmp_path / "federation"))
    join(here)
    for kind, round in ((FIRST, -1), (EVALUATE, 0)):
        answer = here.answer(Envelope(header(here, kind, round), Message(more=torch.zeros(9))))
        assert "an unknown array 'more', must be nothing" in answer.refusal
