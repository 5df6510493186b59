"""Validation samples that an algorithm has seen choose nothing: half of them are kept from it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import perfed
from perfed.core.algorithm import Algorithm, Client, algorithms
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.runs.simulation import Simulation
from perfed.runs.tables import summary
from perfed.runs.tune import Search, tables
from tests.algorithms.test_numpy_reference import Recorder
from tests.conftest import SEQUENTIAL, STACKED, TINY, simulate, tiny
from tests.engines.clients import working_client

SPLIT = {"train": [0.3], "validation": 0.2, "test": 0.4}
TWICE = SPLIT | {"second_validation": True}
FEDFOMO = {"name": "fedfomo"}


def test_the_halves_have_nothing_in_common_and_leave_nothing_over() -> None:
    once = simulate(split=SPLIT).federation
    twice = simulate(split=TWICE).federation
    for client in range(once.clients):
        whole = once.splits[client].validation
        assert np.array_equal(once.seen(client, "validation"), whole)
        assert np.array_equal(once.evaluated(client, "validation"), whole)
        seen, evaluated = twice.seen(client, "validation"), twice.evaluated(client, "validation")
        assert sorted([*seen, *evaluated]) == sorted(whole)
        assert 0 <= len(seen) - len(evaluated) <= 1
        assert len(evaluated) > 0
        for part in ("train", "test"):  # nothing else changes
            own = getattr(once.splits[client], part)
            assert np.array_equal(twice.seen(client, part), own)
            assert np.array_equal(twice.evaluated(client, part), own)


@pytest.mark.usefixtures("float64")
def test_an_algorithm_sees_one_half_and_is_evaluated_on_the_other() -> None:
    simulation = simulate(split=TWICE, algorithm=FEDFOMO)
    population, samples = simulation.population, simulation.federation.samples
    for number in range(simulation.federation.clients):
        client = working_client(population, number, 0)
        module = population.modules[client.architecture].eval()

        def logits(where: np.ndarray, module: Any = module, client: Any = client) -> torch.Tensor:
            x = torch.tensor(samples.x[where]).double()
            return torch.func.functional_call(module, client.weights.params, (x,))

        seen = simulation.federation.seen(number, "validation")
        loss = cross_entropy(logits(seen), torch.tensor(samples.y[seen]))
        assert float(client.losses([client.weights], "validation")) == pytest.approx(float(loss))
        other = simulation.federation.evaluated(number, "validation")
        right = logits(other).argmax(1).numpy() == samples.y[other]
        told = {
            "personal": logits(np.concatenate([other, simulation.federation.splits[number].test]))
        }
        columns = population.measured([number], [told])["personal"]
        assert columns["validation_accuracy"][0] == pytest.approx(right.mean())


@pytest.mark.parametrize("how", [SEQUENTIAL, STACKED], ids=["sequential", "stacked"])
@pytest.mark.parametrize("name", ["fedfomo", "perfed-evidence"])
def test_only_the_half_that_an_algorithm_sees_changes_what_it_does(name: str, how: Any) -> None:
    experiment = tiny(split=TWICE, algorithm={"name": name})
    plain, seen, evaluated = (
        what_it_does(Simulation(experiment, how=how), changed)
        for changed in ("", "seen", "evaluated")
    )
    assert plain == evaluated
    assert plain != seen


def what_it_does(simulation: Simulation, wrong_labels: str = "") -> list[bytes]:
    """All that clients send in three rounds, with the labels of one half of validation changed."""
    federation, y = simulation.federation, simulation.population.y
    for client in range(federation.clients) if wrong_labels else ():
        where = torch.as_tensor(getattr(federation, wrong_labels)(client, "validation"))
        y[where] = (y[where] + 1) % 10
    channel, sent = Recorder(), list[bytes]()
    simulation.begin(channel)
    for round in range(3):
        simulation.play_round(round, channel)
        sent += [
            tensor.numpy().tobytes()
            for client in sorted(channel.sent)
            for tensor in channel.sent[client].arrays.values()
        ]
    return sent


def test_a_client_with_one_validation_sample_is_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"split\.second_validation: client 0 has one validation sample, and two are needed",
    ):
        simulate(clients=200, split=TWICE | {"validation": 0.1})


class Peeks(Algorithm):
    def client_round(self, client: Client, message: Message) -> Message:
        return Message(loss=client.losses([client.weights], "validation")[0])


def test_who_does_not_declare_that_it_looks_at_validation_samples_is_told() -> None:
    with pytest.raises(ConfigError, match="'Peeks' looks at validation samples: declare"):
        what_it_does(simulate(algorithm=Peeks))


def test_who_declares_it() -> None:
    declared = [name for name in algorithms if algorithms[name].uses_validation]
    # Other tests register algorithms, too.
    assert {name for name in declared if algorithms[name].__module__.startswith("perfed.")} == {
        "fedfomo",
        "perfed-evidence",
        "perfed-kin",
    }


def test_tuning_holds_out_what_the_algorithm_would_use() -> None:
    for name, held_out in (("fedfomo", True), ("perfed-evidence", True), ("ditto", False)):
        values = TINY | {"algorithm": {"name": name}}
        search = Search(values, {"training.learning_rate": (0.1, 0.01)})
        assert search.experiment(search.choices()[0], 1000).split.second_validation is held_out
        (shown,) = tables(search.result({}))
        assert ("saw half of the validation samples" in (shown.note or "")) is held_out


def test_no_round_is_chosen_by_samples_that_the_algorithm_has_seen(tmp_path: Path) -> None:
    chosen = {}
    for name, algorithm, split in (
        ("ditto", {"name": "ditto"}, SPLIT),
        ("used", FEDFOMO, SPLIT),
        ("held out", FEDFOMO, TWICE),
    ):
        result = perfed.run(
            tiny(rounds=1, algorithm=algorithm, split=split), tmp_path / name, how=SEQUENTIAL
        )
        shown = summary([result.summary])
        chosen[name] = shown.rows[0][list(shown.header).index("chosen")]
        assert ("A dash for chosen" in (shown.note or "")) is (name == "used")
    assert chosen["used"] == "–"
    assert "–" not in (chosen["ditto"], chosen["held out"])
