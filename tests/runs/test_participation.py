"""Clients that sleep, join late, drop out or are slow: the same for every method and engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perfed
from perfed.core.channel import Channel
from perfed.core.errors import ConfigError
from perfed.core.participation import Participation
from perfed.core.schema import plain
from perfed.flower.settings import CoordinatorOptions
from perfed.runs.directory import RunDirectory
from tests.conftest import RAY, SEQUENTIAL, STACKED, played, simulate, spec, tiny
from tests.engines.test_stacked import assert_same, play, recording
from tests.runs.test_resume import StopAfter, contents

ROUGH: dict[str, Any] = {
    "shifts": 2,
    "shift_rounds": 2,
    "late": 0.4,
    "late_rounds": 3,
    "dropout": 0.3,
    "stragglers": 0.5,
    "straggler_steps": 0.4,
}
SIZE: dict[str, Any] = {
    "clients": 10,
    "clients_per_round": 4,
    "rounds": 6,
    "training": {"steps": 5, "batch_size": 8, "public_batch_size": 8},
}


def test_shifts_take_turns_and_have_everybody_once() -> None:
    shifts = Participation(shifts=3, shift_rounds=2)
    turns = [shifts.there(10, 7, round).tolist() for round in range(12)]
    assert turns[0] == turns[1] == turns[6]
    assert turns[0] != turns[2]
    assert sorted([*turns[0], *turns[2], *turns[4]]) == list(range(10))
    assert shifts.there(10, 7, -1).tolist() == list(range(10))  # before the first round


def test_late_clients_stay_once_they_are_there() -> None:
    late = Participation(late=0.5, late_rounds=6)
    before: set[int] = set()
    for round in range(8):
        there = {*late.there(20, 3, round).tolist()}
        assert before <= there
        before = there
    assert len(late.there(20, 3, 0)) == len(late.there(20, 3, -1)) == 10
    assert len(before) == 20
    assert len(Participation(late=0.99).there(3, 0, 0)) == 1  # somebody begins


def test_chances_are_what_they_say_and_each_client_has_its_own() -> None:
    often = Participation(dropout=0.3, stragglers=0.1)
    rounds = range(400)
    dropped = [often.dropped(range(20), 0, round) for round in rounds]
    assert np.mean([len(one) for one in dropped]) == pytest.approx(6, abs=0.3)
    slow = [len(often.slow(range(20), 0, round)) for round in rounds]
    assert np.mean(slow) == pytest.approx(2, abs=0.3)
    by_client = Counter(client for one in dropped for client in one)
    assert min(by_client.values()) > 80
    few = [often.dropped([3, 11], 0, round) for round in rounds]  # who else is asked is no matter
    assert few == [[c for c in one if c in (3, 11)] for one in dropped]


def test_a_slow_client_makes_its_first_steps_only() -> None:
    """A client of which all rounds are slow ends where one does that has fewer steps to make."""
    training = {"steps": 10, "batch_size": 8, "learning_rate": 0.1}
    slow = {"stragglers": 1.0, "straggler_steps": 0.4}
    one = played(2, algorithm="scaffold", training=training, participation=slow)
    other = played(2, algorithm="scaffold", training=training | {"steps": 4})
    assert_same(one, other, 0.0)


def test_a_slow_client_is_evaluated_with_all_steps() -> None:
    """What some methods train to be evaluated is not a part of the round."""
    population = simulate(training={"steps": 10}, participation={"stragglers": 1.0}).population
    assert population.client(0, 0).steps == 5
    assert population.client(0, 0, evaluated=True).steps == 10


def test_who_is_away_changes_no_number_of_the_others() -> None:
    """In the first round those that stay end with the bits that they have where nobody drops."""
    everybody = played(1, clients_per_round=6)
    rough = played(1, clients_per_round=6, participation={"dropout": 0.5})
    stayed = [*rough.population.records]
    assert 0 < len(stayed) < 6
    for client in stayed:
        ours, theirs = (s.population.records[client].weights for s in (rough, everybody))
        assert all(torch.equal(ours.params[name], theirs.params[name]) for name in ours.params)


def test_all_methods_meet_the_same_absences(tmp_path: Path) -> None:
    def absences(name: str) -> list[Any]:
        run = perfed.run(tiny(**SIZE, algorithm=name, participation=ROUGH), tmp_path / name)
        lines = RunDirectory(run.path).lines("rounds.jsonl")
        return [
            (line["clients"], line.get("dropped", []), line.get("slow", []))
            for line in lines
            if line["round"] >= 0
        ]

    found = absences("fedavg")
    assert found == absences("perfed-ckt")
    participation = Participation(**ROUGH)
    for round, (clients, dropped, slow) in enumerate(found):
        there = participation.there(10, 0, round).tolist()
        assert {*clients, *dropped} <= {*there}
        assert not {*clients} & {*dropped}
        assert {*slow} <= {*clients}
        assert len(clients) + len(dropped) == min(4, len(there))
    assert any(dropped for _, dropped, _ in found)
    assert any(slow for *_, slow in found)


def test_a_round_that_nobody_is_left_in(tmp_path: Path) -> None:
    run = perfed.run(
        tiny(clients_per_round=2, participation={"dropout": 0.9}, rounds=8), tmp_path / "run"
    )
    lines = [line for line in RunDirectory(run.path).lines("rounds.jsonl") if line["round"] >= 0]
    empty = [line for line in lines if not line["clients"]]
    assert empty
    assert all(line["traffic"]["up_bytes"] == 0 < line["traffic"]["down_bytes"] for line in empty)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["perfed-ckt", "fedrep", "local"])
def test_every_engine_is_the_same(name: str) -> None:
    changes = SIZE | {"algorithm": spec(name), "participation": ROUGH}
    reference = play(simulate(SEQUENTIAL, **changes), 5)
    assert_same(play(simulate(STACKED, **changes), 5), reference, 1e-8)
    assert_same(play(recording(tiny(**changes)), 5), reference, 1e-8)


@pytest.mark.ray
@pytest.mark.usefixtures("float64")
def test_ray_is_the_same() -> None:
    changes = SIZE | {"participation": ROUGH}
    reference = play(simulate(STACKED, **changes), 4)
    simulation, channel = simulate(RAY, **changes), Channel()
    simulation.begin(channel)
    for round in range(4):
        simulation.play_round(round, channel)
    simulation.engine.collect(simulation.population)
    assert_same(simulation, reference, 1e-8)
    simulation.engine.close()


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    experiment = tiny(**SIZE, participation=ROUGH)
    how = perfed.Execution(engine="stacked", device="cpu", checkpoint_seconds=0)
    whole = perfed.run(experiment, tmp_path / "whole", how=how)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(experiment, tmp_path / "cut", callbacks=[StopAfter(2)], how=how)
    assert contents(perfed.resume(tmp_path / "cut", how=how).path) == contents(whole.path)


def test_wrong_values() -> None:
    with pytest.raises(ConfigError, match=r"^participation\.shifts: 7 shifts of 6 clients"):
        tiny(participation={"shifts": 7})
    with pytest.raises(ConfigError, match=r"^participation\.dropout: 1.0 is out of range"):
        tiny(participation={"dropout": 1})
    rough = plain(tiny(participation={"late": 0.5}))
    with pytest.raises(ConfigError, match=r"^experiment\.participation: is for simulations"):
        CoordinatorOptions(experiment=rough, classes=10)
