"""What must hold for all of them, whatever they do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perfed
from perfed.core.channel import Channel
from perfed.core.message import Message
from perfed.core.tensorfile import decode, encode
from tests.conftest import played, simulate, tiny

ALL = list(perfed.algorithms)
MODELS = {"architectures": ["mlp", {"name": "cnn", "batchnorm": True}]}


def spec(name: str) -> Any:
    return {"name": name, "clusters": 2} if name in ("perfed-ckt", "hypcluster") else name


@pytest.mark.parametrize("name", ALL)
def test_resumed_after_every_round_it_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """All state is in the checkpoint: control variates, the bank, affinities, clusters."""
    experiment = tiny(algorithm=spec(name), models=MODELS, rounds=4)
    whole = perfed.run(experiment, tmp_path / "whole")

    class Stop(perfed.Callback):
        def on_round(self, report: perfed.runs.RoundReport) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perfed.run(experiment, tmp_path / "cut", callbacks=[Stop()], checkpoint_seconds=0)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            perfed.resume(tmp_path / "cut", callbacks=[Stop()], checkpoint_seconds=0)
    perfed.resume(tmp_path / "cut")
    for file in ("rounds.jsonl", "clients.jsonl", "summary.json"):
        assert (tmp_path / "cut" / file).read_bytes() == (whole.path / file).read_bytes()


@pytest.mark.parametrize("name", ALL)
def test_a_round_in_which_nobody_answers_changes_nothing(name: str) -> None:
    simulation = simulate(algorithm=spec(name))
    before = simulation.progress.state = simulation.algorithm.start(simulation._server(-1))
    simulation._merge(0, {})
    assert simulation.progress.state is before


@pytest.mark.parametrize("name", ALL)
def test_a_client_first_drawn_in_round_300_takes_part(name: str) -> None:
    simulation = simulate(algorithm=spec(name), models=MODELS)
    algorithm, channel = simulation.algorithm, Channel()
    simulation.begin(channel)
    simulation._select = lambda round: [0, 1]  # type: ignore[method-assign]
    for round in range(2):
        simulation.play_round(round, channel)
    simulation._select = lambda round: [0, 5]  # type: ignore[method-assign]
    simulation.play_round(300, channel)
    assert simulation.progress.trained[5] == (3 if algorithm.trains_everyone() else 1)
    model = simulation.engine.models(5, simulation._evaluation_messages(300)[5], 300)
    assert model


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
    for channel in (Channel(), Wire()):
        simulation = played(3, channel, algorithm=spec(name), models=MODELS)
        columns = simulation.engine.evaluate(simulation._evaluation_messages(3), 3)
        outcomes.append({k: v.tolist() for kind in columns.values() for k, v in kind.items()})
    assert outcomes[0] == outcomes[1]


class Wire(Channel):
    """Sends bytes."""

    def down(self, messages: Any) -> Any:
        return {k: resent(m) for k, m in super().down(messages).items()}

    def up(self, messages: Any) -> Any:
        return {k: resent(m) for k, m in super().up(messages).items()}


def resent(message: Message) -> Message:
    return Message.from_arrays(decode(encode(message.arrays))[0])


def test_personal_and_global_models_are_both_reported(tmp_path: Path) -> None:
    for name in ("ditto", "per-fedavg"):
        result = perfed.run(tiny(algorithm=name), tmp_path / name)
        assert set(result.summary["models"]) == {"personal", "global"}
        lines = [line.split()[:4] for line in result.table().splitlines() if name in line]
        kinds = {"LM", "GM"} & {word for line in lines for word in line}
        assert kinds == {"LM", "GM"}
        assert result.model(0, "global") is not None


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "feddf", "per-fedavg", "ditto"])
def test_batchnorm_buffers_are_averaged(name: str) -> None:
    """A global model whose running statistics stayed at their start would be useless."""
    simulation = played(1, algorithm=name, models={"architectures": [MODELS["architectures"][1]]})
    message = simulation._evaluation_messages(0)[0]
    buffers = simulation.engine.models(0, message, 0)["global"].buffers  # type: ignore[union-attr]
    assert float(buffers["1.running_mean"].abs().sum()) > 0
    assert int(buffers["1.num_batches_tracked"]) >= 2
