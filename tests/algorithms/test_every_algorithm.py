"""What must hold for all of them, whatever they do.

Faults seen in public libraries, and the test that would catch each here:

* control variates never written back: test_numpy_reference.test_scaffold,
  test_limits.test_scaffolds_control_variates_stay_the_mean_of_the_clients
* a correction on tensors that have no gradient: the same (its last line)
* a shared μ=0 default: test_limits.test_no_default_turns_a_method_into_another
* BatchNorm buffers not averaged: test_batchnorm_buffers_are_averaged
* drop_last drops all data of small clients: test_sequential.test_a_client_smaller_than_a_batch…,
  test_clients_smaller_than_a_batch_and_of_one_label_are_no_trouble
* the best test round as the result: test_result.test_the_chosen_round_is_chosen_on_validation
* clusters chosen with test labels: test_limits.test_no_algorithm_looks_at_test_data
* only the last client's seed fixed: test_sequential.test_order_and_dropped_clients_do_not_matter
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perfed
from perfed import Execution
from perfed.algorithms.fedprox import held_near
from perfed.core.channel import Channel
from perfed.core.declaration import networks
from perfed.core.errors import Diverged, Refused
from perfed.core.message import Message
from perfed.core.tensorfile import decode, encode
from perfed.core.tree import Tree
from perfed.core.wire import At, Stage
from tests.conftest import MLP_50, played, simulate, spec, tiny
from tests.engines.clients import working_client

ALL = list(perfed.algorithms)


class WithDropout(torch.nn.Sequential):
    """Draws random numbers in training mode: they too must be addressed."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        layers = torch.nn.Flatten(), torch.nn.Linear(64, 50), torch.nn.Dropout(0.5)
        super().__init__(*layers, torch.nn.Linear(50, classes))


@dataclass(frozen=True)
class Scrambled(Stage):
    """What is sent in round 1 is lost on the way."""

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        if at.round == 1:
            raise Refused("cannot be read")
        return message, state


MODELS = {"architectures": [MLP_50, {"name": "cnn", "batchnorm": True}]}


@pytest.mark.parametrize("name", ALL)
def test_resumed_after_every_round_it_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """All state is in the checkpoint: control variates, the bank, affinities, clusters."""
    models = {"architectures": [f"{__name__}:WithDropout", {"name": "cnn", "batchnorm": True}]}
    experiment = tiny(algorithm=spec(name), models=models, rounds=4)
    whole = perfed.run(experiment, tmp_path / "whole")

    class Stop(perfed.Callback):
        def on_round(self, report: perfed.runs.RoundReport) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perfed.run(
            experiment, tmp_path / "cut", callbacks=[Stop()], how=Execution(checkpoint_seconds=0)
        )
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            perfed.resume(tmp_path / "cut", callbacks=[Stop()], how=Execution(checkpoint_seconds=0))
    perfed.resume(tmp_path / "cut")
    for file in ("rounds.jsonl", "clients.jsonl", "summary.json"):
        assert (tmp_path / "cut" / file).read_bytes() == (whole.path / file).read_bytes()


@pytest.mark.parametrize("name", ALL)
def test_what_a_method_says_it_sends_is_what_it_declares(name: str) -> None:
    """The words by which ``perfed list`` and the documentation sort methods."""
    algorithm = perfed.algorithms[name]()
    sent = algorithm.messages().up or {}
    of_networks = networks(sent)  # "" is a client's own
    second = set(algorithm.networks()) & of_networks
    assert (algorithm.sends == "nothing") == (not sent)
    assert (algorithm.sends in ("weights", "parts of networks")) == ("" in of_networks)
    assert (algorithm.sends == "a second network") == bool(second)
    assert (algorithm.sends == "outputs on public samples") <= algorithm.needs_public_set


@pytest.mark.parametrize("name", ALL)
def test_a_round_in_which_nobody_answers_changes_nothing(name: str) -> None:
    """Clients train, but their replies cannot be read."""
    wire = [f"{__name__}:Scrambled"]
    simulation = played(1, algorithm=spec(name), models=MODELS, wire=wire)
    before = simulation.progress.state
    simulation.play_round(1, Channel())
    assert simulation.progress.state is before or name in ("local", "majority")  # nothing is sent
    simulation.play_round(2, Channel())  # and it goes on


def test_a_client_first_drawn_in_round_300_starts_as_the_method_says() -> None:
    """From its initial model, without control variates, and with no exploration left."""

    def late(name: str) -> tuple[Any, Any]:
        simulation = played(0, algorithm=name, models={"architectures": ["mlp"]})
        simulation.select = lambda round: [0, 1]  # type: ignore[method-assign]
        for round in range(2):
            simulation.play_round(round, Channel())
        simulation.select = lambda round: [0, 5]  # type: ignore[method-assign]
        before = simulation.progress.state
        simulation.play_round(300, Channel())
        assert simulation.progress.trained == {0: 3, 1: 2, 5: 1}
        return simulation, before

    # SCAFFOLD: c_i was zero, so its new one is (x − y)/(τη) − c, and c still is the mean.
    scaffold, _ = late("scaffold")
    controls = [
        record.state["control"]["1.weight"] for record in scaffold.population.records.values()
    ]
    mean = sum(controls) / 6
    assert torch.allclose(scaffold.progress.state["mlp"]["control"]["1.weight"], mean, atol=1e-6)
    # Ditto: its personal model made its first steps from the initial one, not from the global.
    ditto, before = late("ditto")
    fresh = working_client(
        simulate(algorithm="ditto", models={"architectures": ["mlp"]}).population, 5, 300
    )
    first = ditto.population.initial_weights("mlp")
    expected = fresh.sgd(first, held_near(1.0), before["mlp"].params)
    kept = ditto.population.records[5].weights.params["1.weight"]
    assert torch.equal(kept, expected.params["1.weight"])
    # FedFomo: what it had before its first training is what it got by mixing, or its initial model.
    fomo, _ = late("fedfomo")
    start = fomo.population.records[5].state["before"]
    client = working_client(fomo.population, 5, 300)
    again = client.sgd(start, perfed.core.algorithm.supervised)
    assert torch.equal(again.params["1.weight"], client.weights.params["1.weight"])


@pytest.mark.parametrize("name", ALL)
def test_clients_smaller_than_a_batch_and_of_one_label_are_no_trouble(
    name: str, tmp_path: Path
) -> None:
    """Three samples a client, so one to train on, with BatchNorm and a batch of 64."""
    result = perfed.run(
        tiny(
            algorithm=spec(name),
            clients=40,
            clients_per_round=3,
            partition={"name": "dirichlet", "alpha": 0.01, "minimum": 3},
            models=MODELS,
            training={"steps": 2, "batch_size": 64},
            rounds=2,
        ),
        tmp_path / "run",
    )
    frame = result.per_client()
    assert frame["train_size"].min() == 1
    assert np.isfinite(frame["test_loss"]).all()
    assert frame["test_accuracy"].between(0, 1).all()


@pytest.mark.parametrize("name", ALL)
def test_only_messages_cross(name: str, tmp_path: Path) -> None:
    """A client's round sees the server through its message alone: encoded and decoded again, as a
    network would, every message gives the same numbers."""
    outcomes = []
    for wire in ([], [f"{__name__}:Bytes"]):
        simulation = played(3, algorithm=spec(name), models=MODELS, wire=wire)
        columns = simulation.population.evaluate(simulation.evaluation_messages(3), 3)
        outcomes.append({k: v.tolist() for kind in columns.values() for k, v in kind.items()})
    assert outcomes[0] == outcomes[1]


@dataclass(frozen=True)
class Bytes(Stage):
    """Sends bytes, and nothing but bytes."""

    directions = ("up", "down")

    def send(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        encoded = bytearray(encode(message.arrays))
        return Message(encoded=torch.frombuffer(encoded, dtype=torch.uint8)), state

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        return Message.from_arrays(decode(bytes(message["encoded"].tolist()))[0]), state


@pytest.mark.parametrize("name", [name for name in ALL if name != "majority"])  # it never trains
def test_who_diverges_is_told_so_in_a_line(name: str, tmp_path: Path) -> None:
    training = {"learning_rate": 1e12, "steps": 4, "batch_size": 8, "public_batch_size": 8}
    experiment = tiny(algorithm=spec(name), models=[MLP_50], training=training)
    with pytest.raises(Diverged, match="is not finite"):
        perfed.run(experiment, tmp_path / "run")


def test_personal_and_global_models_are_both_reported(tmp_path: Path) -> None:
    for name in ("ditto", "per-fedavg", "fedavg-ft"):
        result = perfed.run(tiny(algorithm=name), tmp_path / name)
        assert set(result.summary["models"]) == {"personal", "global"}
        lines = [line.split()[:4] for line in result.table().splitlines() if name in line]
        kinds = {"personal", "global"} & {word for line in lines for word in line}
        assert kinds == {"personal", "global"}
        assert result.model(0, "global") is not None


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddf", "fedfomo", "hypcluster"])
def test_what_crosses_does_not_depend_on_how_public_batches_would_be_treated(name: str) -> None:
    totals = []
    for mode in ("separate", "private"):
        channel = Channel()
        training = {"steps": 1, "public_batchnorm": mode}
        played(2, channel, algorithm=spec(name), models=MODELS, training=training)
        totals.append(vars(channel.total))
    assert totals[0] == totals[1]


def test_running_statistics_are_no_parameters() -> None:
    channel = Channel()
    played(1, channel, algorithm="fedavg", models={"architectures": [MODELS["architectures"][1]]})
    module = perfed.architectures.build(MODELS["architectures"][1]).build((1, 8, 8), 10)
    assert channel.total.down_parameters == sum(p.numel() for p in module.parameters())
    assert channel.total.up_parameters == 3 * channel.total.down_parameters


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "feddf", "per-fedavg", "ditto"])
def test_batchnorm_buffers_are_averaged(name: str) -> None:
    """A global model whose running statistics stayed at their start would be useless."""
    simulation = played(1, algorithm=name, models={"architectures": [MODELS["architectures"][1]]})
    message = simulation.evaluation_messages(0)[0]
    buffers = simulation.population.models(0, message, 0)["global"].buffers  # type: ignore[union-attr]
    assert float(buffers["1.running_mean"].abs().sum()) > 0
    assert int(buffers["1.num_batches_tracked"]) >= 2
