"""FedPer, FedRep, pFedMe and APFL: a second time in NumPy, their limits, and what they cost.

The networks by hand are softmax regression, as in ``test_numpy_reference``, and one with a hidden
layer: its base B (hidden × inputs + 1) and its head H (classes × hidden + 1) are two arrays, and
the gradient is written down, not asked for.

Faults seen in public libraries, and the test that would catch each here:

* BatchNorm buffers not averaged: test_running_statistics_are_averaged…
* statistics of a mixture taken from models that it is not: test_a_personal_model_has_the_running…
* a μ=0 default: test_no_default_turns_a_method_into_another
* dropped batches: test_a_client_with_less_than_a_batch_trains
* a fixed part that momentum or weight decay moves: test_a_fixed_part_is_fixed_for_every_optimizer
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import perfed
from perfed.algorithms.fedrep import with_fixed
from perfed.core.admission import check
from perfed.core.algorithm import OWN, Algorithm
from perfed.core.channel import Channel
from perfed.core.declaration import lines
from perfed.core.errors import ConfigError, Refused
from perfed.core.message import Message
from perfed.core.streams import stream_key, uniform_indices
from perfed.core.tree import Weights
from perfed.runs.simulation import Simulation
from tests.algorithms.test_limits import after, assert_equal, models
from tests.algorithms.test_numpy_reference import (
    BATCH,
    CLIENTS,
    LINEAR,
    STEPS,
    World,
    descend,
    gradient,
    rate_in,
    softmax,
    stacked,
)
from tests.algorithms.test_numpy_reference import assert_equal as assert_near
from tests.conftest import STACKED, played, simulate, spec, tiny
from tests.engines.clients import run_task, working_client

Array = np.ndarray
Batch = tuple[Array, Array]
HIDDEN = 6
MLP = f"mlp(hidden={HIDDEN})"
BATCHNORM = {"name": "cnn", "batchnorm": True}
METHODS = ["fedper", "fedrep", "pfedme", "apfl"]
LOCAL = {"name": "local", "participation": "selected"}
ONE = {"clients": 1, "clients_per_round": 1, "partition": "iid"}


# A network with a hidden layer, by hand.


def gradients(base: Array, head: Array, batch: Batch) -> tuple[Array, Array]:
    """Of the mean cross-entropy of H·[relu(B·x), 1]."""
    x, y = batch
    before = x @ base.T
    hidden = np.hstack([np.maximum(before, 0), np.ones((len(x), 1))])
    wrong = (softmax(hidden @ head.T) - np.eye(10)[y]) / len(y)
    back = (wrong @ head[:, :-1]) * (before > 0)
    return back.T @ x, wrong.T @ hidden


def trained_together(base: Array, head: Array, batches: list[Batch], rate: float) -> Any:
    for batch in batches:
        of_base, of_head = gradients(base, head, batch)
        base, head = base - rate * of_base, head - rate * of_head
    return base, head


def layer(params: Mapping[str, torch.Tensor], name: str) -> Array:
    weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
    return np.hstack([weight.numpy(), bias.numpy()[:, None]])


def assert_layers(actual: Weights, base: Array, head: Array) -> None:
    np.testing.assert_allclose(layer(actual.params, "1"), base, rtol=0, atol=1e-10)
    np.testing.assert_allclose(layer(actual.params, "3"), head, rtol=0, atol=1e-10)


class Split(World):
    """Clients 1, 3, 5 have a hidden layer; 0, 2, 4 are nothing but a head."""

    def __init__(self, algorithm: str, **options: Any) -> None:
        super().__init__(algorithm, [{"name": "mlp", "hidden": [HIDDEN]}], **options)
        first = self.simulation.population.initial_weights(MLP).params
        self.base = layer(first, "1")
        self.heads = dict.fromkeys(range(1, CLIENTS, 2), layer(first, "3"))
        self.linear = dict.fromkeys(range(0, CLIENTS, 2), self.initial())

    def assert_same(self, round: int) -> None:
        """The package's server, and what each client is evaluated with, are these."""
        np.testing.assert_allclose(layer(self.state[MLP].params, "1"), self.base, atol=1e-10)
        assert set(self.state[MLP].params) == {"1.weight", "1.bias"}
        assert not self.state[LINEAR].params
        for k, head in self.heads.items():
            assert_layers(self.evaluated(k, round)["personal"], self.base, head)
        for k, θ in self.linear.items():
            assert_near(self.evaluated(k, round)["personal"], θ)


@pytest.mark.usefixtures("float64")
def test_fedper() -> None:
    world = Split("fedper")
    for t, drawn in world.rounds(3):
        bases = []
        for k in drawn:
            batches = world.batches(k, t)
            if k in world.linear:  # nothing to share: it trains for itself
                world.linear[k] = descend(world.linear[k], batches, rate_in(t))
            else:
                base, world.heads[k] = trained_together(
                    world.base, world.heads[k], batches, rate_in(t)
                )
                bases.append(base)
        world.base = np.mean(bases, axis=0) if bases else world.base
        world.assert_same(t)
    assert len(bases) > 1  # an average was one of several


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("share", "base_steps"), [(0.33, 1), (0.6, 2), (0.01, 1)])
def test_fedrep(share: float, base_steps: int) -> None:
    world = Split("fedrep", base_share=share)
    for t, drawn in world.rounds(3):
        bases = []
        for k in drawn:
            first = world.batches(k, t, steps=STEPS - base_steps)
            then = world.batches(k, t, steps=base_steps, stream=1)
            if k in world.linear:
                world.linear[k] = descend(world.linear[k], first, rate_in(t))
                continue
            base, head = world.base, world.heads[k]
            for batch in first:
                head = head - rate_in(t) * gradients(base, head, batch)[1]
            for batch in then:
                base = base - rate_in(t) * gradients(base, head, batch)[0]
            world.heads[k] = head
            bases.append(base)
        world.base = np.mean(bases, axis=0) if bases else world.base
        world.assert_same(t)
    assert len(bases) > 1


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("averaging", ["size-once", "by-size"])
def test_pfedme(averaging: str) -> None:
    λ, K, ρ, β = 3.0, 4, 0.2, 1.5
    world = World(
        "pfedme", averaging=averaging, weight=λ, personal_steps=K, personal_rate=ρ, mixing=β
    )
    x = world.initial()
    personal = dict.fromkeys(range(CLIENTS), x)
    for t, drawn in world.rounds(3):
        local = {}
        for k in drawn:
            w = θ = x
            for batch in world.batches(k, t):
                for _ in range(K):
                    θ = θ - ρ * (gradient(θ, batch) + λ * (θ - w))
                w = w - rate_in(t) * λ * (w - θ)
            local[k], personal[k] = w, θ
        x = (1 - β) * x + β * world.mean(local)
        assert_near(world.state[LINEAR], x)
        for k in range(CLIENTS):
            evaluated = world.evaluated(k, t)
            assert_near(evaluated["global"], x)
            assert_near(evaluated["personal"], personal[k])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("adaptive", [False, True])
def test_apfl(adaptive: bool) -> None:
    world = World("apfl", share=0.3, adaptive=adaptive)
    x = world.initial()
    own = mixture = dict.fromkeys(range(CLIENTS), x)
    shares = dict.fromkeys(range(CLIENTS), 0.3)
    for t, drawn in world.rounds(4):
        local = {}
        for k in drawn:
            v, w, α, η = own[k], x, shares[k], rate_in(t)
            batches = world.batches(k, t)
            if adaptive:
                slope = ((v - w) * gradient(α * v + (1 - α) * w, batches[0])).sum()
                α = float(np.clip(α - η * slope, 0, 1))
            for batch in batches:
                of_mixture = gradient(α * v + (1 - α) * w, batch)
                v, w = v - η * α * of_mixture, w - η * gradient(w, batch)
            own, shares = own | {k: v}, shares | {k: α}
            mixture, local[k] = mixture | {k: α * v + (1 - α) * w}, w
        x = world.mean(local)
        for k in range(CLIENTS):
            evaluated = world.evaluated(k, t)
            assert_near(evaluated["global"], x)
            assert_near(evaluated["personal"], mixture[k])
        for k in drawn:
            state = world.simulation.population.records[k].state
            assert_near(state["own"], own[k])
            assert float(state["share"]) == pytest.approx(shares[k], abs=1e-12)
    assert (len(set(shares.values())) > 2) == adaptive


# With its own idea switched off, which method is it?


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_where_nothing_is_shared_clients_are_alone(name: str) -> None:
    linear = {"architectures": [{"name": "mlp", "hidden": []}]}
    channel = Channel()
    simulation = played(3, channel, algorithm=spec(name), models=linear)
    assert channel.total.parameters == 0
    if name == "fedper":
        reference = models(after(3, LOCAL, models=linear), "personal")
        assert_equal(models(simulation, "personal"), reference)


def test_a_base_of_nothing_survives_a_checkpoint(tmp_path: Path) -> None:
    """It leaves no trace in a file, so that it is not there when a run goes on."""
    linear = {"architectures": [{"name": "mlp", "hidden": []}]}

    class Stop(perfed.Callback):
        def on_round(self, report: perfed.runs.RoundReport) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perfed.run(
            tiny(algorithm="fedper", models=linear),
            tmp_path / "run",
            callbacks=[Stop()],
            how=perfed.Execution(checkpoint_seconds=0),
        )
    assert perfed.resume(tmp_path / "run").summary["rounds"] == 3


def test_one_client_of_fedper_trains_locally_to_the_bit() -> None:
    """The mean of one base is this base."""
    reference = models(after(3, LOCAL, **ONE), "personal")
    assert_equal(models(after(3, "fedper", **ONE), "personal"), reference)


def test_apfl_with_nothing_of_the_shared_model_is_local_training_to_the_bit() -> None:
    reference = models(after(3, LOCAL), "personal")
    assert_equal(models(after(3, {"name": "apfl", "share": 1}), "personal"), reference)


@pytest.mark.parametrize(
    "algorithm", [{"name": "apfl"}, {"name": "apfl", "share": 0.1, "adaptive": True}]
)
def test_apfls_global_model_is_fedavgs_to_the_bit(algorithm: dict) -> None:
    assert_equal(models(after(3, algorithm), "global"), models(after(3, "fedavg"), "global"))


def test_apfl_with_nothing_of_its_own_is_what_a_client_of_fedavg_sends() -> None:
    """Its parameters, to the bit."""
    simulation, plain = (simulate(algorithm=a) for a in ({"name": "apfl", "share": 0}, "fedavg"))
    mine, theirs = (
        run_task(
            one.population,
            one.algorithm.client_round,
            {k: Message(model=one.population.record(k).weights) for k in range(3)},
            0,
        )
        for one in (simulation, plain)
    )
    for k in range(3):
        kept, sent = mine[1][k].weights.params, theirs[0][k]["model"].params
        assert all(torch.equal(kept[name], sent[name]) for name in sent)


@pytest.mark.usefixtures("float64")
def test_pfedme_becomes_fedavg_as_its_models_are_held_together() -> None:
    """Steps of size 1/λ go to w − ∇f/λ, so that ηλ(w − θ̃) is FedAvg's step. There are two, for the
    first starts from the θ̃ of an older w."""
    reference = models(after(3, "fedavg"), "global")

    def distance(λ: float) -> float:
        held = {"name": "pfedme", "weight": λ, "personal_rate": 1 / λ, "personal_steps": 2}
        pairs = zip(models(after(3, held), "global"), reference, strict=True)
        return max(float((one[n] - other[n]).abs().max()) for one, other in pairs for n in other)

    assert distance(1e6) < 1e-5
    assert distance(10.0) > 1e-3


@pytest.mark.usefixtures("float64")
def test_pfedmes_many_steps_find_the_moreau_envelopes_minimum() -> None:
    """There ∇f(θ) = λ(w − θ), so the local model moves by −η∇f(θ)."""
    world = World("pfedme", personal_steps=150, weight=4.0, personal_rate=0.05)
    population = world.simulation.population
    start, client = population.initial_weights(LINEAR), working_client(population, 2, 0)
    client.steps = 1
    reply = world.simulation.algorithm.client_round(client, Message(model=start))
    w, θ = stacked(start.params), stacked(client.weights.params)
    (batch,) = world.batches(2, 0, steps=1)
    np.testing.assert_allclose(gradient(θ, batch), 4.0 * (w - θ), atol=1e-8)
    assert_near(reply["model"], w - rate_in(0) * gradient(θ, batch))
    assert np.abs(w - θ).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("fedper", LOCAL),
        ("fedrep", LOCAL),
        ("fedrep", "fedper"),
        ("pfedme", LOCAL),
        ("pfedme", "ditto"),
        ("apfl", LOCAL),
        ("apfl", "ditto"),
    ],
)
def test_no_default_turns_a_method_into_another(name: str, base: Any) -> None:
    both = (after(3, a, models={"architectures": ["mlp"]}) for a in (name, base))
    pairs = zip(*(models(one, "personal") for one in both), strict=True)
    assert max(float((a[n] - b[n]).abs().max()) for a, b in pairs for n in a) > 1e-4


# What is fixed, frozen, kept and averaged.


@pytest.mark.parametrize(
    "optimizer", ["adamw", {"name": "sgd", "momentum": 0.5, "weight_decay": 0.1}]
)
def test_a_fixed_part_is_fixed_for_every_optimizer(optimizer: Any) -> None:
    """What stands in its place in the model, and decays there, has no effect on the other part."""
    training = {"steps": 4, "batch_size": 8, "learning_rate": 0.1, "optimizer": optimizer}
    simulation = simulate(algorithm="fedrep", training=training)
    client = working_client(simulation.population, 0, 0)
    start = client.weights
    base = client.base_of(start).params
    other = start._replace(params=start.params | {n: torch.randn_like(t) for n, t in base.items()})
    one, two = (client.sgd(w, with_fixed, base, stream=0) for w in (start, other))
    assert one.params.keys() - base.keys() == {"3.weight", "3.bias"}
    for name in one.params.keys() - base.keys():
        assert torch.equal(one.params[name], two.params[name])
        assert not torch.equal(one.params[name], start.params[name])
    # And each part that the client keeps is that of its own training, bit for bit.
    client = working_client(simulation.population, 0, 0)
    client.steps = 6
    kept = simulation.algorithm.trained(client, start)  # type: ignore[attr-defined]
    again = working_client(simulation.population, 0, 0)
    head = {
        n: t for n, t in again.sgd(start, with_fixed, base, steps=4).params.items() if n[0] == "3"
    }
    then = again.sgd(start._replace(params=base | head), with_fixed, head, steps=2).params
    assert all(torch.equal(kept.params[name], (then | head)[name]) for name in then)


class FrozenBase(nn.Sequential):
    """The base gives what it gets, and is not to be trained."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        base = nn.Linear(64, 64)
        super().__init__(nn.Flatten(), base, nn.Linear(64, classes))
        with torch.no_grad():
            base.weight.copy_(torch.eye(64))
            base.bias.zero_()
        base.requires_grad_(False)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("how", [{}, {"how": STACKED}], ids=["sequential", "stacked"])
@pytest.mark.parametrize("name", [*METHODS, "per-fedavg"])
def test_a_frozen_base_stays_as_it_is(name: str, how: dict) -> None:
    """Also in the steps to a personal model: these are those of a network without that base."""

    def final(architecture: Any) -> list[dict[str, torch.Tensor]]:
        simulation = simulate(algorithm=spec(name), models={"architectures": [architecture]}, **how)
        same = torch.linspace(-1, 1, 640).view(10, 64)
        for label in simulation.population.modules:
            first = simulation.population.initial_weights(label)
            first.params[max(first.params)].copy_(same)  # the last layer's weight
            first.params[max(n for n in first.params if n.endswith("bias"))].zero_()
        simulation.begin(Channel())
        for round in range(2):
            simulation.play_round(round, Channel())
        return models(simulation, "personal", 2)

    frozen, plain = final(f"{__name__}:FrozenBase"), final({"name": "mlp", "hidden": []})
    for one, other in zip(frozen, plain, strict=True):
        assert torch.equal(one["1.weight"], torch.eye(64))
        assert torch.allclose(one["2.weight"], other["1.weight"], atol=1e-10)


@pytest.mark.parametrize("name", METHODS)
def test_running_statistics_are_averaged_with_what_they_belong_to(name: str) -> None:
    """A model whose running statistics stayed at their start would be useless."""
    simulation = simulate(algorithm=spec(name), models={"architectures": [BATCHNORM]})
    simulation.begin(Channel())
    architecture = simulation.population.architectures[0]
    state = simulation.progress.state
    messages = {
        k: simulation.algorithm.broadcast(simulation.server(0), state, simulation.info(k))
        for k in range(2)
    }
    replies, _ = run_task(simulation.population, simulation.algorithm.client_round, messages, 0)
    simulation.merge(0, replies)
    sent = [(reply.get("base") or reply["model"]).buffers for reply in replies.values()]
    merged = simulation.progress.state[architecture].buffers
    for part in ("1.running_mean", "1.running_var"):
        assert torch.allclose(merged[part], (sent[0][part] + sent[1][part]) / 2)
        assert not torch.equal(sent[0][part], sent[1][part])
    assert int(merged["1.num_batches_tracked"]) == 2  # steps, in FedRep one of each part
    personal = name in ("fedper", "fedrep")  # a client that has not trained is evaluated with them
    used = models(simulation, "personal" if personal else "global")[5]
    assert torch.equal(used["1.running_mean"], merged["1.running_mean"])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("how", ["sequential", "stacked"])
@pytest.mark.parametrize("name", ["pfedme", "apfl"])
def test_a_personal_model_has_the_running_statistics_of_its_own_parameters(
    name: str, how: str
) -> None:
    """A model's of one step: what its first layer gave for the mini-batch at those parameters."""
    training = {"steps": 1, "batch_size": 8, "learning_rate": 0.1}
    changes = {"algorithm": spec(name), "training": training}
    changes |= {"models": {"architectures": [BATCHNORM]}}
    simulation = simulate(**changes) if how == "sequential" else simulate(STACKED, **changes)
    simulation.begin(Channel())
    simulation.select = lambda round: [0, 1]  # type: ignore[method-assign]
    simulation.play_round(0, Channel())
    before = simulation.population.records[0]
    shared = next(iter(simulation.progress.state.values()))
    simulation.play_round(1, Channel())
    kept = simulation.population.records[0]
    where = batch_positions(simulation, 0, 1)
    if name == "apfl":  # at the mixture, as it stood before the step
        own = before.state["own"]
        at = {n: 0.5 * own[n] + 0.5 * shared.params[n] for n in own}
        old = before.weights
    else:  # at θ̃, which is the model that is kept
        at, old = kept.weights.params, shared
    x = simulation.population.x[where]
    given = torch.nn.functional.conv2d(x, at["0.weight"], at["0.bias"], padding=1)
    expected = 0.9 * old.buffers["1.running_mean"] + 0.1 * given.mean((0, 2, 3))
    assert torch.allclose(kept.weights.buffers["1.running_mean"], expected, atol=1e-10)


def batch_positions(simulation: Simulation, client: int, round: int) -> torch.Tensor:
    """Of the first mini-batch of a client's round."""
    train = simulation.population.positions(client, "train")
    key = stream_key(simulation.experiment.seed, "private-batches/0", client, round)
    return train[uniform_indices(key, (1, BATCH), len(train), torch.device("cpu"))[0]]


@pytest.mark.parametrize("name", METHODS)
def test_a_client_with_less_than_a_batch_trains(name: str) -> None:
    simulation = simulate(algorithm=spec(name), training={"steps": 2, "batch_size": 512})
    simulation.begin(Channel())
    state, population = simulation.progress.state, simulation.population
    assert population.train_size(0) < 512
    message = simulation.algorithm.broadcast(simulation.server(0), state, simulation.info(0))
    replies, records = run_task(population, simulation.algorithm.client_round, {0: message}, 0)
    sent = {path: t for path, t in replies[0].arrays.items() if path in message.arrays}
    assert sent
    assert not any(torch.equal(t, message.arrays[path]) for path, t in sent.items())
    first = population.initial_weights(population.architectures[0])
    kept = records[0].weights
    assert not any(torch.equal(kept.params[n], t) for n, t in first.params.items())


# What crosses.


@pytest.mark.parametrize("name", METHODS)
def test_a_round_costs_what_the_formula_says(name: str) -> None:
    """Of S clients, each sends |base| or |model|, and each architecture's is broadcast once."""
    head = 9 * 10 if name in ("fedper", "fedrep") else 0
    size = {
        "mlp(hidden=8)": 65 * 8 + 9 * 10 - head,
        "mlp(hidden=12-8)": 65 * 12 + 13 * 8 + 9 * 10 - head,
    }
    channel, simulation = Channel(), simulate(algorithm=spec(name))
    simulation.begin(channel)
    for round in range(2):
        before = channel.total.up_parameters, channel.total.down_parameters
        drawn, _ = simulation.play_round(round, channel)
        labels = [simulation.population.architectures[k] for k in drawn]
        assert channel.total.up_parameters - before[0] == sum(size[label] for label in labels)
        assert channel.total.down_parameters - before[1] == sum(size[a] for a in set(labels))


def test_a_head_that_is_sent_is_refused() -> None:
    simulation = simulate(algorithm="fedper", models={"architectures": [BATCHNORM]})
    declared = simulation.algorithm.messages().up
    assert declared is not None
    known, client = simulation.population.known(0), working_client(simulation.population, 0, 0)
    whole, base = client.weights, client.base_of(client.weights)
    check(Message(base=base, samples=client.samples), declared, known)
    with pytest.raises(Refused, match="an unknown array"):
        check(Message(base=whole, samples=client.samples), declared, known)
    buffers = {n: t for n, t in base.buffers.items() if n != "1.running_var"}
    less = Message(base=base._replace(buffers=buffers), samples=client.samples)
    with pytest.raises(Refused, match=r"1\.running_var: is missing"):
        check(less, declared, known)
    said = lines(simulation.algorithm.messages())
    assert said[0] == "client → server: base, weights of all but the head of the client's network"


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"personal_rate.*must be below 0\.133333"):
        simulate(algorithm={"name": "pfedme", "personal_rate": 0.2})
    for wrong in ({"name": "apfl", "share": 1.5}, {"name": "fedrep", "base_share": 0}):
        with pytest.raises(ConfigError):
            simulate(algorithm=wrong)
    momentum = {"steps": 1, "optimizer": {"name": "sgd", "momentum": 0.9}}
    simulate(algorithm="apfl", training=momentum)
    for plain in ("pfedme", {"name": "apfl", "adaptive": True}):
        with pytest.raises(ConfigError, match="plain"):
            simulate(algorithm=plain, training=momentum)


# The seam: a second model of the client's own network.


class Twice(Algorithm):
    """Trains two models of its own network, and asks for one that it has not named."""

    def networks(self) -> Mapping[str, Any]:
        return {"second": OWN}

    def client_round(self, client: Any, message: Message) -> Message:
        client.sgd({OWN: client.weights, "secnd": client.weights}, lambda *given: None)
        return Message()


def test_a_second_model_that_is_not_named_is_an_error() -> None:
    simulation = simulate(algorithm=f"{__name__}:Twice")
    with pytest.raises(ConfigError, match=r"no network 'secnd'.*'second'"):
        simulation.play_round(0, Channel())
