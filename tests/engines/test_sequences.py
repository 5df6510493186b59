"""Sequences and tokens on the engines: whole runs agree, and tokens are integers all the way."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perfed
from perfed import Algorithm, Message
from perfed.core.algorithm import supervised
from perfed.core.errors import ConfigError
from perfed.core.network import outputs
from perfed.engines.precision import PRECISIONS, bf16_crashes_here
from perfed.engines.stacked import StackedEngine
from perfed.runs.simulation import Simulation
from tests.conftest import SEQUENTIAL, STACKED, TINY, spec, tiny
from tests.engines.test_stacked import assert_same, play, recording
from tests.runs.test_own import Stop

SMALL = {"clients": 6, "each": 12, "public": 20}
SENSORS = {"name": "sensors", **SMALL}
PHRASES = {"name": "phrases", **SMALL}
EIGHT_BIT = f"{Path(__file__).parents[1]}/plugins/eight_bit.py:EightBit"
GRU = [{"name": "gru", "hidden": 4}, {"name": "gru", "hidden": 3, "both_ways": True}]
TOKEN = [
    {"name": "token-mean", "width": 4, "padding": 0, "dropout": 0.2},
    {"name": "token-gru", "width": 4, "hidden": 3, "padding": 0},
]
TRAINING = TINY["training"] | {"steps": 5}


def experiment(data: Any = PHRASES, models: Any = TOKEN, **changes: Any) -> perfed.Experiment:
    settings: dict[str, Any] = {"partition": "given", "training": TRAINING} | changes
    networks = {"architectures": models, "assign": "in-turn"}
    return tiny(data=data, models=networks, **settings)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("data", "models"), [(SENSORS, GRU), (PHRASES, TOKEN)], ids=["steps", "t"])
@pytest.mark.parametrize("name", ["perfed-ckt", "fedavg", "selective-fd"])
def test_a_whole_run_is_the_same_stacked(name: str, data: Any, models: Any) -> None:
    """With steps enough that some are played back from a tape; then with a fixed number of
    lanes. The third method asks for features."""
    one = experiment(data, models, algorithm=spec(name))
    reference = play(Simulation(one, how=SEQUENTIAL), 2)
    together = play(Simulation(one, how=STACKED), 2)
    assert isinstance(together.engine, StackedEngine)
    assert all(module.obstacle is None for module in together.engine._modules.values())
    assert_same(together, reference, 1e-8)
    if name == "perfed-ckt":
        assert_same(play(recording(one), 2), reference, 1e-8)


def test_tokens_are_integers_for_the_network_and_its_outputs_are_not() -> None:
    population = Simulation(experiment(), how=SEQUENTIAL).population
    assert population.x.dtype == population.public_x.dtype == torch.int64
    module = next(iter(population.modules.values()))
    tensors = dict(module.named_parameters())
    logits = outputs(module, "", tensors, population.x[:3], "logits")
    assert logits.dtype == torch.float32
    if not bf16_crashes_here():
        with PRECISIONS["bf16"].active(torch.device("cpu")):
            rounded = outputs(module, "", tensors, population.x[:3], "logits")
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(rounded, logits, rtol=0.1, atol=0.05)


@dataclass(frozen=True)
class Bounded(Algorithm):
    """Local training by gradients of single samples."""

    def client_round(self, client: Any, message: Message) -> Message:
        client.weights = client.sgd(client.weights, supervised, sample_clip=0.2)
        return Message()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("data", "models"), [(SENSORS, GRU), (PHRASES, TOKEN[1:])], ids=["s", "t"])
def test_samples_have_gradients_of_their_own(data: Any, models: Any) -> None:
    one = experiment(data, models, algorithm=Bounded())
    reference = play(Simulation(one, how=SEQUENTIAL), 1)
    assert_same(play(Simulation(one, how=STACKED), 1), reference, 1e-8)


def test_a_wire_and_an_optimizer_do_with_tokens_as_with_numbers() -> None:
    training = TRAINING | {"optimizer": "adam", "learning_rate": 0.01}
    one = experiment(wire=[EIGHT_BIT], training=training)
    assert_same(
        play(Simulation(one, how=STACKED), 2), play(Simulation(one, how=SEQUENTIAL), 2), 1e-3
    )


def test_a_run_of_tokens_is_cut_resumed_and_read_again(tmp_path: Path) -> None:
    whole = perfed.run(experiment(), tmp_path / "whole", how=STACKED)
    cut = tmp_path / "cut"
    how = perfed.Execution(engine="stacked", device="cpu", checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(experiment(), cut, how=how, callbacks=[Stop()])
    resumed = perfed.resume(cut, how=how)
    assert resumed.summary["models"] == whole.summary["models"]
    module = resumed.model(0)
    assert module(torch.tensor([[5, 9, 0]])).shape == (1, 6)


def test_whole_numbers_of_a_table_are_measurements_to_an_mlp(tmp_path: Path) -> None:
    """As they were before there were tokens."""
    x = np.random.default_rng(0).integers(0, 9, (60, 4))
    for kind in (np.int64, np.float32):
        np.savez(tmp_path / f"{kind.__name__}.npz", x=x.astype(kind), y=np.arange(60) % 3)
    runs = [
        play(
            Simulation(
                tiny(data={"name": "npz", "path": str(tmp_path / name), "public": 10}),
                how=SEQUENTIAL,
            )
        )
        for name in ("int64.npz", "float32.npz")
    ]
    assert runs[0].population.x.dtype == torch.float32
    assert_same(runs[0], runs[1], 0.0)


def test_networks_and_samples_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="'mlp' needs numbers, and these samples are tokens"):
        Simulation(experiment(models=["mlp"]))
    with pytest.raises(ConfigError, match="'token-mean' needs tokens"):
        Simulation(tiny(models=["token-mean"]))
    with pytest.raises(ConfigError, match=r"training.augment: needs images.* 20 tokens of 541"):
        Simulation(experiment(training=TRAINING | {"augment": ["flip"]}))


@pytest.mark.parametrize("preset", ["phrases-languages", "sensors-placements"])
def test_a_preset_learns_well_above_the_majority(preset: str) -> None:
    """A few rounds of everybody alone are enough to see it."""
    comparison = perfed.load(preset)
    assert isinstance(comparison, perfed.Comparison)
    one = dataclasses.replace(comparison.experiment, algorithm=perfed.algorithms.build("local"))
    simulation = play(Simulation(one, how=STACKED), 8)
    columns = simulation.population.evaluate(simulation.evaluation_messages(8), 8)
    labels = simulation.federation.samples.y
    majority = np.mean(
        [
            (labels[split.test] == np.bincount(labels[split.train]).argmax()).mean()
            for split in simulation.federation.splits
        ]
    )
    assert columns["personal"]["test_accuracy"].mean() > majority + 0.15
