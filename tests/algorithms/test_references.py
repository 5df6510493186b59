"""The reference rows: majority, local training, FedAvg."""

from pathlib import Path

import numpy as np
import pytest
import torch

import perfed
from perfed.core.channel import Channel
from perfed.core.message import Message
from tests.conftest import played, simulate, tiny
from tests.engines.clients import working_client

BATCHNORM = {"architectures": ["mlp", {"name": "cnn", "batchnorm": True}]}


def test_majority_predicts_the_most_frequent_training_label(tmp_path: Path) -> None:
    result = perfed.run(tiny(algorithm="majority", rounds=1), tmp_path / "run")
    simulation = simulate(algorithm="majority")
    labels = simulation.federation.samples.y
    frame = result.per_client()
    for k, split in enumerate(simulation.federation.splits):
        majority = np.bincount(labels[split.train], minlength=10).argmax()
        expected = (labels[split.test] == majority).mean()
        assert frame["test_accuracy"][k] == pytest.approx(expected)
        assert int(result.model(k)(torch.zeros(1, 1, 8, 8)).argmax()) == majority
    assert np.isfinite(frame["test_loss"]).all()
    assert result.summary["traffic"]["up_bytes"] == 0


def test_local_trains_everyone_or_those_drawn(tmp_path: Path) -> None:
    everyone = perfed.run(tiny(algorithm="local"), tmp_path / "all")
    drawn = perfed.run(
        tiny(algorithm={"name": "local", "participation": "selected"}), tmp_path / "drawn"
    )
    sizes = [
        {len(line["clients"]) for line in result.directory.lines("rounds.jsonl")}
        for result in (everyone, drawn)
    ]
    assert sizes == [{6}, {3}]
    assert everyone.summary["traffic"]["up_bytes"] == 0


@pytest.mark.usefixtures("float64")
def test_fedavg_is_the_sample_weighted_mean_per_architecture_with_buffers() -> None:
    simulation = simulate(algorithm="fedavg", models=BATCHNORM, clients_per_round=6)
    engine = simulation.population
    state = simulation.algorithm.start(simulation.server(0))
    assert set(state) == {"mlp", "cnn(batchnorm=True)"}
    trained, sizes = {}, simulation.federation.train_sizes
    for k in range(6):  # each client by itself, from the same start
        client = working_client(engine, k, 0)
        reply = simulation.algorithm.client_round(
            client, Message(model=state[engine.architectures[k]])
        )
        trained[k] = reply["model"]
        assert int(reply["samples"]) == sizes[k]
    simulation.progress.state = state
    simulation.play_round(0, Channel())
    for architecture, merged in simulation.progress.state.items():
        members = [k for k in range(6) if engine.architectures[k] == architecture]
        shares = sizes[members] / sizes[members].sum()
        for part in ("params", "buffers"):
            for name, tensor in getattr(merged, part).items():
                mean = sum(
                    share * getattr(trained[k], part)[name].double()
                    for share, k in zip(shares, members, strict=True)
                )
                assert torch.allclose(tensor.double(), mean, atol=1e-12), name
    moved = simulation.progress.state["cnn(batchnorm=True)"].buffers["1.running_mean"]
    assert moved.abs().sum() > 0


def test_fedavg_with_one_client_is_sgd() -> None:
    """Limit case: K = m = 1 is plain training of one model."""
    changes = {"clients": 1, "clients_per_round": 1, "partition": "iid"}
    models = []
    for algorithm in ("fedavg", "local"):
        simulation = played(3, algorithm=algorithm, **changes)
        message = simulation.evaluation_messages(2)[0]
        (model,) = simulation.population.models(0, message, 2).values()
        models.append(model)
    for name, tensor in models[0].params.items():
        assert torch.allclose(tensor, models[1].params[name], atol=1e-7)


def test_an_architecture_nobody_drew_keeps_its_global_model() -> None:
    simulation = simulate(algorithm="fedavg", models=BATCHNORM)
    state = simulation.progress.state = simulation.algorithm.start(simulation.server(0))
    k = simulation.population.architectures.index("mlp")
    reply = Message(model=state["mlp"], samples=3)
    simulation.merge(0, {k: reply})
    kept = simulation.progress.state["cnn(batchnorm=True)"]
    assert kept is state["cnn(batchnorm=True)"]
    simulation.merge(1, {})  # nobody answered at all
    assert simulation.progress.state["cnn(batchnorm=True)"] is kept
