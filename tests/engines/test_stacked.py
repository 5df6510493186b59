"""Every algorithm gives on the stacked engine what it gives on the sequential one, client by
client; what cannot be stacked is said, and still right."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import random
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import perfed
from perfed import Execution
from perfed.core.algorithm import Algorithm, Client, Network, Private, Public
from perfed.core.channel import Channel
from perfed.core.errors import ConfigError, RunError
from perfed.core.message import Message
from perfed.core.tree import Weights, flatten
from perfed.engines import SequentialEngine, local
from perfed.engines.stacked import StackedEngine
from perfed.engines.stacked import engine as stacked_engine_module
from perfed.engines.stacked.alone import LoneModule, channels_last
from perfed.engines.stacked.engine import JobStreams
from perfed.engines.stacked.plan import Plan
from perfed.engines.stacked.recorded import (
    RecordedForward,
    TapedForward,
    TapedTraining,
    without_collection,
)
from perfed.engines.stacked.requests import objective_key
from perfed.engines.stacked.stack import DICE, StackedModule, StackedStep, stack_tensors
from perfed.runs.simulation import Simulation
from tests.conftest import MLP_50, SEQUENTIAL, STACKED, TINY, simulate, spec, tiny

CNN = {"name": "cnn"}
CNN_BN = {"name": "cnn", "batchnorm": True}
ALIKE = {"batchnorm": [CNN_BN], "plain": [CNN]}
MIXED = [MLP_50, CNN_BN, CNN]


class Odd(nn.Module):
    """Layers with a rule beside things that have none, and a parameter outside any layer."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(shape[0], 4, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = self.convolution(x)
        features = features.view(len(x), 4, -1).view(features.shape)  # only of what lies in order
        logits: Tensor = self.head(self.scale * self.norm(features).relu())
        return logits


class WithDropout(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, classes))


class Dropping(nn.Module):
    """Channels by a layer, numbers by a function."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(0.2))
        self.head = nn.Linear(144, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = nn.functional.dropout(self.features(x).relu(), 0.3, self.training)
        logits: Tensor = self.head(features.flatten(1))
        return logits


class Shuffling(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        logits: Tensor = self.layer(x[:, torch.randperm(64)] if self.training else x)
        return logits


class Dicing(nn.Module):
    thrown: ClassVar[list[bool]] = []

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, classes)
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        self.thrown.append(self.dice() < 0.5)
        y: Tensor = self.layer(x.flatten(1))
        return 2 * y if self.thrown[-1] else y

    def dice(self) -> float:
        return random.random()


class NumPyDicing(Dicing):
    def dice(self) -> float:
        return np.random.random()


class OwnDicing(Dicing):
    def dice(self) -> float:
        return self.generator.random()


class ByValue(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.flatten(1))
        return y if float(y.detach().sum()) > 0 else 2 * y


def play(simulation: Simulation, rounds: int = 3) -> Simulation:
    channel = Channel()
    simulation.begin(channel)
    for round in range(rounds):
        simulation.play_round(round, channel)
    return simulation


def stacked(experiment: perfed.Experiment) -> Simulation:
    return Simulation(experiment, how=STACKED)


def recording(experiment: perfed.Experiment) -> Simulation:
    """On a CPU too: traced, and with a fixed number of lanes."""
    return Simulation(experiment, how=STACKED, engine=StackedEngine(record=True))


def contents(simulation: Simulation) -> dict[str, Tensor]:
    """Everything a simulation has produced, by name."""
    records = simulation.population.records
    clients = {str(k): {"model": records[k].weights, "state": records[k].state} for k in records}
    messages = simulation.evaluation_messages(9)
    columns = simulation.population.evaluate(messages, 9)
    evaluated = {
        kind: {name: torch.tensor(values) for name, values in column.items()}
        for kind, column in columns.items()
    }
    return flatten(
        {"clients": clients, "server": simulation.progress.state, "evaluated": evaluated}
    )


def assert_same(one: Simulation, other: Simulation, tolerance: float) -> None:
    left, right = contents(one), contents(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        torch.testing.assert_close(
            tensor, right[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", list(perfed.algorithms))
@pytest.mark.parametrize("models", [[CNN_BN], MIXED], ids=["batchnorm", "mixed"])
def test_every_algorithm_is_the_same_in_float64(name: str, models: Any) -> None:
    """With steps enough that most are played back from a tape."""
    experiment = tiny(algorithm=spec(name), models=models, training=TINY["training"] | {"steps": 6})
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    assert_same(play(Simulation(experiment, how=STACKED)), reference, 1e-8)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", list(perfed.algorithms))
def test_stacks_side_by_side_on_threads_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten clients of three architectures a round, so that some stacks are cut in two."""
    monkeypatch.setattr(stacked_engine_module, "WORTH_THREADS", 0)
    size = {"clients": 15, "clients_per_round": 10}
    experiment = tiny(algorithm=spec(name), models=MIXED, training={"steps": 5}, **size)
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    threaded = Simulation(experiment, how=STACKED, engine=StackedEngine(threads=2))
    assert_same(play(threaded), reference, 1e-8)
    if name != "majority":  # which does not train
        assert any(kept.ready for kept in threaded.engine.recordings.values())  # type: ignore[attr-defined]
    threaded.engine.close()


def test_threads_are_woken_for_what_is_worth_it() -> None:
    """Three clients, two steps each, eight samples a step; backward counts as twice forward."""
    flops = 3 * 2 * 8 * 3 * 2 * (64 * 64 + 64 * 10)
    shape = {"models": [{"name": "mlp", "hidden": [64]}], "training": {"steps": 2, "batch_size": 8}}
    experiment = tiny(algorithm="fedavg", clients_per_round=3, **shape)
    for worth, woken in ((flops + 1, False), (flops, True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stacked_engine_module, "WORTH_THREADS", worth)
            engine = StackedEngine(threads=2)
            play(Simulation(experiment, how=STACKED, engine=engine), 1)
        assert (engine._pool is not None) == woken
        engine.close()


class PoolingAfterRelu(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        convolution = nn.Conv2d(shape[0], 3, 3, padding=1)
        norm = nn.BatchNorm2d(3)
        layers = [convolution, norm, nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), nn.Flatten()]
        super().__init__(*layers, nn.Linear(48, 16), nn.Linear(16, classes))


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x).view(len(x), -1)  # only of what lies in order


def test_channels_are_last_in_memory_where_a_module_can_take_it() -> None:
    x, whole = torch.randn(4, 3, 8, 8), nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten())
    for module, taken in ((Viewing(), False), (whole, True)):
        alone = LoneModule(module, x)
        assert alone._channels_last == taken
        found = alone.outputs(False, "logits", dict(module.named_parameters()), x)
        torch.testing.assert_close(found, module(x))


def test_one_channel_is_first_and_last_and_the_strides_say_last() -> None:
    x = torch.randn(2, 1, 5, 7)
    assert channels_last(x).stride() == (35, 1, 7, 1)
    assert torch.equal(channels_last(x), x)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", list(perfed.algorithms))
def test_large_networks_run_one_client_at_a_time_and_are_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone in a stack, on threads, and played back; a ReLU changes places with pooling."""
    monkeypatch.setattr("perfed.engines.population.LARGE_STEP", 0)
    monkeypatch.setattr(stacked_engine_module, "WORTH_THREADS", 0)
    models = [f"{__name__}:{own}" for own in ("Odd", "PoolingAfterRelu", "WithDropout")]
    size = {"clients": 9, "clients_per_round": 6}
    experiment = tiny(algorithm=spec(name), models=models, training={"steps": 6}, **size)
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    threaded = Simulation(experiment, how=STACKED, engine=StackedEngine(threads=2))
    assert_same(play(threaded), reference, 1e-8)
    if name != "majority":
        assert any(kept.ready for kept in threaded.engine.recordings.values())  # type: ignore[attr-defined]
    threaded.engine.close()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", list(perfed.algorithms))
def test_a_recording_is_the_same_whatever_the_size_of_the_stack(name: str) -> None:
    """Three architectures, three clients a round: stacks of none to three, in one lane each."""
    experiment = tiny(algorithm=spec(name), models=MIXED, training={"steps": 3, "decay": 0.5})
    reference = play(Simulation(experiment, how=SEQUENTIAL), 4)
    assert_same(play(recording(experiment), 4), reference, 1e-8)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("large", [False, True])
def test_samples_in_chunks_give_the_same(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of four samples of a client, enough of them that most come from a tape."""
    if large:
        monkeypatch.setattr("perfed.engines.population.LARGE_STEP", 0)
    experiment = tiny(algorithm="hypcluster", models=["cnn"])
    numbers = []
    for chunks in (False, True):
        with monkeypatch.context() as patch:
            if chunks:
                patch.setattr(stacked_engine_module, "SAMPLES_AT_ONCE", 12)
                patch.setattr(stacked_engine_module, "SAMPLES_ALONE", 4)
            numbers.append(contents(play(Simulation(experiment, how=STACKED))))
    whole, in_chunks = numbers
    assert whole.keys() == in_chunks.keys()
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, in_chunks[name], rtol=1e-10, atol=1e-10)


def limit_memory(monkeypatch: pytest.MonkeyPatch, clients: int) -> None:
    """Memory holds so many clients at a time: a stack with more fails as it does on a GPU, where
    it is recorded or in the middle of its training."""

    def check(tensors: Any) -> None:
        if len(tree_flatten(tensors)[0][0]) > clients:
            raise torch.OutOfMemoryError

    class Training(TapedTraining):
        def begin(self, moving: Any, *rest: Any) -> Any:
            check(moving)
            return super().begin(moving, *rest)

    class Forward(TapedForward):
        def __init__(self, module: Any, what: Any, lanes: Any, at_once: Any, *rest: Any) -> None:
            check(rest[0])
            super().__init__(module, what, lanes, at_once, *rest)

    monkeypatch.setattr(stacked_engine_module, "TapedTraining", Training)
    monkeypatch.setattr(stacked_engine_module, "TapedForward", Forward)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["perfed-ckt", "scaffold"])
def test_clients_that_memory_does_not_hold_take_turns(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """To the bit what stacks of that size give."""
    experiment = tiny(algorithm=spec(name), models=["mlp"], clients_per_round=6)
    numbers = []
    for limited in (False, True):
        with monkeypatch.context() as patch:
            if limited:
                limit_memory(patch, 2)
            else:
                patch.setattr(stacked_engine_module, "MOST_LANES", 2)
            simulation = Simulation(experiment, how=STACKED)
            simulation.begin(Channel())
            for round in range(3):
                simulation.play_round(round, Channel())
            columns = simulation.population.evaluate(simulation.evaluation_messages(3), 3)
        numbers.append((contents(simulation), columns))
    (unlimited, columns), (limited_contents, limited_columns) = numbers
    assert unlimited.keys() == limited_contents.keys()
    assert all(torch.equal(tensor, limited_contents[n]) for n, tensor in unlimited.items())
    np.testing.assert_equal(columns, limited_columns)
    said = [record.getMessage() for record in caplog.records]
    assert said[-1] == "memory holds 2 clients of 'mlp' at a time: they take turns"
    assert len(said) == 2  # of six clients, then of three; it is remembered


def test_memory_that_is_short_when_an_objective_is_tried_is_no_fault_of_the_objective(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    losses = StackedStep._losses

    def short(self: StackedStep, models: dict[str, Weights], *rest: Any) -> Any:
        if len(tree_flatten(models)[0][0]) > 2:
            raise torch.OutOfMemoryError
        return losses(self, models, *rest)

    monkeypatch.setattr(StackedStep, "_losses", short)
    simulation = simulate(STACKED, models=["mlp"], algorithm="fedavg", clients_per_round=6)
    simulation.begin(Channel())
    simulation.play_round(0, Channel())
    assert "memory holds 2 clients of 'mlp' at a time: they take turns" in caplog.text


def test_a_client_that_memory_does_not_hold_ends_the_run_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_memory(monkeypatch, 0)
    simulation = simulate(STACKED, models=["mlp"], algorithm="fedavg")
    simulation.begin(Channel())
    with pytest.raises(RunError, match="memory does not hold one client of 'mlp'"):
        simulation.play_round(0, Channel())


@pytest.mark.parametrize("algorithm", ["fedavg", "fedfomo"])
def test_little_of_a_recording_is_empty(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that all clients ask about, and of models of clients with few samples beside one
    with many: the places of a recording share them."""
    computed: list[int] = []
    run = RecordedForward.run

    def noted(self: RecordedForward, tensors: Mapping[str, Tensor], where: Tensor) -> Tensor:
        places, at_once = self._where.shape
        computed.append(places * at_once * -(-where.shape[1] // at_once))
        return run(self, tensors, where)

    monkeypatch.setattr(RecordedForward, "run", noted)
    experiment = tiny(
        models=["mlp"],
        algorithm=algorithm,
        clients=6,
        clients_per_round=3,
        partition={"name": "dirichlet", "alpha": 0.01},
        data={"name": "digits", "public": 100},
    )
    recorded = play(recording(experiment))
    computed.clear()
    columns = recorded.population.evaluate(recorded.evaluation_messages(9), 9)
    sizes = [
        len(recorded.federation.evaluated(k, "validation")) + recorded.federation.test_sizes[k]
        for k in range(6)
    ]
    assert max(sizes) > 10 * min(sizes)
    assert sum(computed) < 2 * sum(sizes)
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    expected = reference.population.evaluate(reference.evaluation_messages(9), 9)
    for kind, values in expected.items():
        for name, column in values.items():
            np.testing.assert_allclose(columns[kind][name], column, rtol=1e-4, atol=1e-6)


def test_nothing_is_recorded_again_for_another_size_or_rate() -> None:
    training = {"steps": 2, "decay": 0.5}
    simulation = recording(tiny(models=MIXED, training=training, clients=12, clients_per_round=5))
    play(simulation, 1)
    seen = set()
    for round in range(1, 8):
        drawn = simulation.select(round)
        seen.add(tuple(sorted(simulation.population.architectures[k] for k in drawn)))
        simulation.play_round(round, Channel())
    assert len(seen) > 2
    # For each of three architectures a training, and a forward pass on the public set.
    assert len(simulation.engine.recordings) == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", list(perfed.algorithms))
def test_every_algorithm_is_nearly_the_same_in_float32(name: str) -> None:
    """To a thousandth after three rounds: sums are rounded in another order."""
    experiment = tiny(algorithm=spec(name), models=MIXED)
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    assert_same(play(Simulation(experiment, how=STACKED)), reference, 1e-3)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mode", ["separate", "private", "shared"])
def test_public_batches_treat_batchnorm_alike(mode: str) -> None:
    training = {"steps": 3, "batch_size": 8, "public_batch_size": 8, "public_batchnorm": mode}
    experiment = tiny(models=[CNN_BN], training=training)
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    assert_same(play(Simulation(experiment, how=STACKED)), reference, 1e-8)
    assert_same(play(recording(experiment)), reference, 1e-8)


@pytest.mark.usefixtures("float64")
def test_a_users_own_module_is_stacked(caplog: pytest.LogCaptureFixture) -> None:
    experiment = tiny(models=[f"{__name__}:Odd"])
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    assert_same(play(Simulation(experiment, how=STACKED)), reference, 1e-8)
    assert not caplog.records


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["perfed-ckt", "per-fedavg", "ditto", "perfed-evidence"])
@pytest.mark.parametrize("engine", [{}, {"threads": 2}, {"record": True}], ids=str)
def test_dropout_is_stacked_and_each_client_has_its_own(
    name: str, engine: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    models = [f"{__name__}:WithDropout", f"{__name__}:Dropping"]
    training = TINY["training"] | {"steps": 6}
    experiment = tiny(algorithm=spec(name), models=models, training=training, clients_per_round=6)
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    stacked = Simulation(experiment, how=STACKED, engine=StackedEngine(**engine))
    assert_same(play(stacked), reference, 1e-8)
    assert not caplog.records


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("module", "reason"), [("Shuffling", "draws random numbers"), ("ByValue", ".item()")]
)
def test_what_cannot_be_mapped_runs_sequentially_and_says_why(
    module: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = tiny(models=[f"{__name__}:{module}", CNN_BN])
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    with caplog.at_level(logging.WARNING):
        stacked = play(Simulation(experiment, how=STACKED))
    assert_same(stacked, reference, 1e-8)
    (line,) = [record.getMessage() for record in caplog.records]
    assert module in line
    assert "sequential" in line
    assert reason in line


def test_dice_are_thrown_for_each_step_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    experiment = tiny(models=[f"{__name__}:Dicing"], algorithm="fedavg")
    throws = []
    for engine in (SequentialEngine(), StackedEngine(), StackedEngine(record=True)):
        simulation = play(Simulation(experiment, how=STACKED, engine=engine), 1)
        Dicing.thrown.clear()
        simulation.play_round(1, Channel())
        throws.append(len(Dicing.thrown))
    assert throws == [throws[0]] * 3
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2  # of both stacked engines
    assert all("one client at a time" in line and "Python's or NumPy's" in line for line in lines)


@pytest.mark.parametrize("kind", [Dicing, NumPyDicing, OwnDicing])
def test_a_trial_notices_dice_and_gives_them_back(kind: type[Dicing]) -> None:
    module = kind((1, 8, 8), 10)
    random.seed(0)
    np.random.seed(0)
    expected = random.random(), np.random.random()
    random.seed(0)
    np.random.seed(0)
    assert StackedModule(module, torch.randn(4, 1, 8, 8)).obstacle == DICE
    assert (random.random(), np.random.random()) == expected


def twice(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """One ReLU in two places, and a head that says nothing yet."""
    relu, head = nn.ReLU(), nn.Linear(16, classes)
    nn.init.zeros_(head.weight)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), relu, nn.Linear(16, 16), relu, head)


def tied(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Linear(64, classes))


class Untracked(nn.Sequential):
    """In evaluation, too, its BatchNorm looks at the whole batch."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        norm = nn.BatchNorm1d(16, track_running_stats=False)
        super().__init__(nn.Flatten(), nn.Linear(64, 16), norm, nn.Linear(16, classes))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("module", "lines"), [("twice", 0), ("tied", 0), ("Untracked", 1)])
def test_unusual_modules_are_right(
    module: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = tiny(models=[f"{__name__}:{module}"])
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    with caplog.at_level(logging.WARNING):
        assert_same(play(Simulation(experiment, how=STACKED)), reference, 1e-8)
    assert len(caplog.records) == lines  # the first two are stacked


class Unusual(Algorithm):
    """Asks for logits in ways of its own, and hands over an input that is no tensor."""

    trains_on_public_set = needs_public_set = True
    objective: ClassVar[Any]

    def client_round(self, client: Client, message: Message) -> Message:
        client.weights = client.sgd(client.weights, type(self).objective, None)
        return Message()


class Swapped(Unusual):
    @staticmethod
    def objective(model: Network, private: Private, public: Public, nothing: None) -> Tensor:
        return model(public.x).square().mean() + model.public(private.x).mean()


class OnlyCalls(Unusual):
    @staticmethod
    def objective(model: Network, private: Private, public: Public, nothing: None) -> Tensor:
        return model(public.x).square().mean() + model(private.x).mean()


class Keyword(Unusual):
    """Each client's objective has a default of its own."""

    def client_round(self, client: Client, message: Message) -> Message:
        def objective(model: Network, private: Private, public: Public, *, k: int = 1) -> Tensor:
            return k * model(private.x).square().mean() + model.public(public.x).mean()

        objective.__kwdefaults__ = {"k": int(client.samples)}
        client.weights = client.sgd(client.weights, objective)
        return Message()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("algorithm", [Swapped(), OnlyCalls(), Keyword()])
@pytest.mark.parametrize("models", [["mlp"], [CNN_BN]], ids=["mlp", "cnn"])
def test_objectives_that_ask_in_their_own_way(algorithm: Algorithm, models: Any) -> None:
    experiment = tiny(algorithm="local", models=models)
    object.__setattr__(experiment, "algorithm", algorithm)
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    assert_same(play(Simulation(experiment, how=STACKED)), reference, 1e-8)


class Noisy(Algorithm):
    def client_round(self, client: Client, message: Message) -> Message:
        client.weights = client.sgd(client.weights, noisy)
        return Message()


def noisy(model: Network, private: Private, public: None) -> Tensor:
    return model(private.x + torch.randn_like(private.x)).square().mean()


class Stopping(Algorithm):
    def client_round(self, client: Client, message: Message) -> Message:
        next(iter(()))
        return Message()


@pytest.mark.parametrize(
    ("algorithm", "error", "words"),
    [(Noisy(), ConfigError, "one by one"), (Stopping(), ConfigError, "raised StopIteration")],
)
def test_errors_come_out(algorithm: Algorithm, error: type[Exception], words: str) -> None:
    experiment = tiny(algorithm="local", models=["mlp"])
    object.__setattr__(experiment, "algorithm", algorithm)
    with pytest.raises(error, match=words):
        play(Simulation(experiment, how=STACKED))


class Closing(Algorithm):
    """Hides a tensor of each client in the closure of its objective, against the advice."""

    def client_round(self, client: Client, message: Message) -> Message:
        anchor = client.weights.params["1.weight"] * client.samples

        def objective(model: Network, private: Private, public: None) -> Tensor:
            return model(private.x).square().mean() + (anchor * model.params["1.weight"]).sum()

        client.weights = client.sgd(client.weights, objective)
        return Message()


class Deciding(Algorithm):
    """Decides by a tensor's value how often to train: stacks differ from step to step."""

    def client_round(self, client: Client, message: Message) -> Message:
        for _ in range(1 + int(client.samples) % 3):
            client.weights = client.sgd(client.weights, mean_square)
        client.state = {"noise": torch.rand(2)}  # from the client's own stream
        return Message()


def mean_square(model: Network, private: Private, public: None) -> Tensor:
    return model(private.x).square().mean()


@pytest.mark.parametrize("begin", [partial(Simulation, how=SEQUENTIAL), stacked, recording])
def test_no_steps_leave_a_model_as_it_is(begin: Callable[..., Simulation]) -> None:
    simulation = begin(tiny(algorithm={"name": "per-fedavg", "adaptation_steps": 0}))
    for client, message in play(simulation, 1).evaluation_messages(1).items():
        evaluated = simulation.population.models(client, message, 1)
        adapted, model = (evaluated[kind].params for kind in ("personal", "global"))  # type: ignore[union-attr]
        assert all(torch.equal(adapted[name], model[name]) for name in model)


def test_a_job_has_all_its_generators_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's too: here another generator stands for it."""
    gpu = torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (gpu,))
    module = "perfed.engines.stacked.engine"
    monkeypatch.setattr(f"{module}._generators", lambda jobs: [0])
    monkeypatch.setattr(
        f"{module}.seed_generators", lambda key: (torch.manual_seed(key), gpu.manual_seed(key))
    )
    simulation = Simulation(tiny(), how=SEQUENTIAL)
    messages = dict.fromkeys((0, 1), Message())
    jobs = simulation.population.jobs(simulation.population.call("client_round", messages, 0))
    in_turn = draws(JobStreams(jobs), [0, 1, 0, 1], gpu)
    assert in_turn[0::2] == draws(JobStreams(jobs), [0, 0], gpu)
    assert in_turn[1::2] == draws(JobStreams(jobs), [1, 1], gpu)


def draws(streams: JobStreams, turns: list[int], gpu: torch.Generator) -> list[Any]:
    """A number of each generator, turn by turn."""
    drawn = []
    for number in turns:
        streams.begin(number)
        drawn.append((float(torch.rand(1)), float(torch.rand(1, generator=gpu))))
        streams.pause(number)
    return drawn


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("algorithm", [Closing(), Deciding()])
def test_algorithms_that_do_as_they_like(algorithm: Algorithm) -> None:
    experiment = tiny(algorithm="local", models=["mlp"])
    object.__setattr__(experiment, "algorithm", algorithm)
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    assert_same(play(Simulation(experiment, how=STACKED)), reference, 1e-8)


def test_which_objectives_are_equal() -> None:
    def made(factor: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: x * factor

    assert objective_key(made(2.0)) == objective_key(made(2.0))
    assert objective_key(made(2.0)) != objective_key(made(3.0))
    assert objective_key(made(torch.ones(2))) is None
    three, four = (perfed.algorithms.build({"name": "perfed-ckt", "weight": w}) for w in (3, 4))
    again = perfed.algorithms.build({"name": "perfed-ckt", "weight": 3})
    assert objective_key(three.objective) == objective_key(again.objective)  # type: ignore[attr-defined]
    assert objective_key(three.objective) != objective_key(four.objective)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("float64")
def test_seeds_side_by_side_are_the_same_as_one_after_another(tmp_path: Path) -> None:
    comparison = perfed.Comparison(
        experiment=tiny(models=MIXED, rounds=3),
        algorithms=({"name": "perfed-ckt", "clusters": 2}, "scaffold"),
        seeds=(0, 1, 2),
    )
    alone = perfed.compare(comparison, tmp_path / "alone", how=STACKED)
    beside = perfed.compare(comparison, tmp_path / "beside", how=STACKED, side_by_side=True)
    assert len(beside.results) == 6
    for one, other in zip(alone.results, beside.results, strict=True):
        assert one.path.name == other.path.name
        left, right = (flat_numbers(result.path / "clients.jsonl") for result in (one, other))
        np.testing.assert_allclose(left, right, rtol=1e-8)


def test_what_runs_on_a_second_gpu_has_its_streams_and_recordings_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are made on the current one, and would record nothing of what runs elsewhere."""
    current: list[torch.device] = []
    seen: list[torch.device] = []

    @contextlib.contextmanager
    def device(one: torch.device) -> Iterator[None]:
        current.append(one)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(stacked_engine_module, "perform_together", lambda *_: [*current])
    population = SimpleNamespace(device=torch.device("cuda:1"))
    job: Any = SimpleNamespace(client=SimpleNamespace(population=population, architecture="a"))
    engine = StackedEngine()
    monkeypatch.setattr(engine, "module_of", lambda *_: seen.extend(current))
    assert engine.perform_jobs([job]) == seen == [population.device]
    population.device = torch.device("cpu")
    assert engine.perform_jobs([job]) == engine.perform_jobs([]) == []


@pytest.mark.usefixtures("float64")
def test_seeds_side_by_side_may_be_out_of_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all drop out of one seed's round, it is evaluated while the others train."""
    monkeypatch.setattr(local, "EVALUATED_AT_ONCE", 2)
    absent = tiny(
        clients_per_round=1,
        participation={"dropout": 0.5},
        rounds=4,
        evaluate_every=2,
        algorithm="fedavg",
    )
    comparison = perfed.Comparison(absent, ("fedavg",), (0, 1, 2))
    alone = perfed.compare(comparison, tmp_path / "alone", how=SEQUENTIAL)
    mixed: list[set[str]] = []
    perform = local.LocalEngine.perform

    def watched(engine: Any, calls: Any) -> list[Any]:
        mixed.append({call.method for call in calls})
        return perform(engine, calls)

    monkeypatch.setattr(local.LocalEngine, "perform", watched)
    beside = perfed.compare(comparison, tmp_path / "beside", how=SEQUENTIAL, side_by_side=True)
    assert {"client_round", "evaluate"} in mixed
    assert beside.table() == alone.table()


def flat_numbers(path: Path) -> list[float]:
    """All numbers of a log, in order."""

    def walk(value: Any) -> Iterator[float]:
        if isinstance(value, dict | list):
            for inner in value.values() if isinstance(value, dict) else value:
                yield from walk(inner)
        else:
            yield float(value)

    return [number for line in path.read_text().splitlines() for number in walk(json.loads(line))]


def test_private_and_public_samples_share_a_pass_only_where_both_are_asked_for() -> None:
    def passes(weight: float) -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []
        spec = {"name": "perfed-ckt", "clusters": 2, "weight": weight}
        simulation = Simulation(tiny(models=["mlp"], algorithm=spec), how=STACKED)
        population = simulation.population
        (architecture,) = population.modules
        module = simulation.engine.module_of(population, architecture)  # type: ignore[attr-defined]
        first, *others = module.plans[True].steps

        def spying(layer: Any, tensors: Any, at: str, x: Tensor) -> Tensor:
            seen.append(tuple(x.shape[:2]))
            y: Tensor = first.rule(layer, tensors, at, x)
            return y

        module.plans[True] = Plan((replace(first, rule=spying), *others))
        play(simulation, 1)
        return seen[-2:]  # the two steps; before them is the trial

    assert passes(2.0) == [(3, 16), (3, 16)]  # 8 private and 8 public samples in each
    assert passes(0.0) == [(3, 8), (3, 8)]


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_bf16_keeps_weights_in_float32_and_stays_close(engine: Any) -> None:
    experiment = tiny(models=[CNN_BN], training={"steps": 10, "batch_size": 16})
    exact = play(Simulation(experiment, how=SEQUENTIAL))
    how = Execution(engine=engine, device="cpu", precision="bf16")
    rough = play(Simulation(experiment, how=how))
    weights = [record.weights.params["0.weight"] for record in rough.population.records.values()]
    assert weights
    assert {weight.dtype for weight in weights} == {torch.float32}
    assert_same(rough, exact, 0.2)
    with pytest.raises(AssertionError):
        assert_same(rough, exact, 1e-5)


@pytest.mark.parametrize("models", [["mlp"], [f"{__name__}:Odd"]], ids=["mlp", "odd"])
def test_bf16_is_the_same_on_both_engines_after_many_steps(models: Any) -> None:
    training = {"steps": 30, "batch_size": 16, "learning_rate": 0.05}
    experiment = tiny(models=models, training=training)
    exact = play(Simulation(experiment, how=SEQUENTIAL), 1)
    for engine in ("sequential", "stacked"):
        how = Execution(engine=engine, device="cpu", precision="bf16")  # type: ignore[arg-type]
        assert_same(play(Simulation(experiment, how=how), 1), exact, 0.03)


def test_a_client_that_is_not_drawn_keeps_nothing() -> None:
    experiment = tiny(algorithm={"name": "local", "participation": "selected"}, clients=20)
    simulation = play(Simulation(experiment, how=STACKED), 1)
    assert len(simulation.population.records) == 3


def test_nothing_is_collected_while_a_graph_is_captured() -> None:
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()


def test_nothing_that_clients_made_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even until Python looks for circles, which may be many rounds later."""
    made: list[weakref.ref[Any]] = []
    work = StackedEngine._work

    def watched(self: StackedEngine, job: Any, ask: Any) -> Any:
        reply = work(self, job, ask)
        made.extend([weakref.ref(job.client), weakref.ref(reply)])
        return reply

    simulation = stacked(tiny(algorithm={"name": "fedavg"}))
    channel = Channel()
    simulation.begin(channel)
    monkeypatch.setattr(StackedEngine, "_work", watched)
    with without_collection():
        simulation.play_round(0, channel)
        assert made
        assert not [one for one in made if one() is not None]


@pytest.mark.parametrize("to_look_at", [False, True])
def test_what_all_clients_share_is_copied_only_to_be_changed(to_look_at: bool) -> None:
    shared, one, other = torch.randn(3, 4)
    stack = stack_tensors([{"a": shared, "b": one}, {"a": shared, "b": other}], to_look_at)
    assert (stack["a"].data_ptr() == shared.data_ptr()) is to_look_at
    torch.testing.assert_close(stack["a"], torch.stack([shared, shared]))
    torch.testing.assert_close(stack["b"], torch.stack([one, other]))
