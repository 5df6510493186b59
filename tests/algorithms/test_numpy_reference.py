"""The methods PerFed-CKT is compared with, a second time: softmax regression by hand, in NumPy.

Written from the methods' formulas, not from the package's code. A model is one array θ (classes ×
inputs + 1): the last column is the bias, and every sample ends in a 1. The learning rate decays, so
that a method which uses another round's rate is found out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from perfed.core.channel import Channel
from perfed.core.message import Message
from perfed.core.streams import stream_key, uniform_indices
from perfed.core.tree import Weights
from perfed.runs.simulation import Simulation
from tests.conftest import simulate

Array = np.ndarray
Batch = tuple[Array, Array]  # samples, labels

LINEAR = "mlp(hidden=)"
CLIENTS, DRAWN, PUBLIC, SEED = 6, 4, 30, 6
STEPS, BATCH, RATE, DECAY = 3, 8, 0.3, 0.25

pytestmark = pytest.mark.usefixtures("float64")


def with_ones(x: Array) -> Array:
    x = x.reshape(len(x), -1).astype(float)
    return np.hstack([x, np.ones((len(x), 1))])


def softmax(z: Array) -> Array:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def loss(θ: Array, batch: Batch) -> float:
    x, y = batch
    return float(-np.log(softmax(x @ θ.T)[np.arange(len(y)), y]).mean())


def gradient(θ: Array, batch: Batch) -> Array:
    x, y = batch
    return (softmax(x @ θ.T) - np.eye(10)[y]).T @ x / len(y)


def descend(
    θ: Array, batches: Sequence[Batch], rate: float, extra: Callable[[Array], Any] = lambda θ: 0.0
) -> Array:
    """A step θ − η(∇f + extra) for each mini-batch."""
    for batch in batches:
        θ = θ - rate * (gradient(θ, batch) + extra(θ))
    return θ


def stacked(params: Mapping[str, torch.Tensor]) -> Array:
    """The package's linear model as θ."""
    assert set(params) == {"1.weight", "1.bias"}
    return np.hstack([params["1.weight"].numpy(), params["1.bias"].numpy()[:, None]])


def assert_equal(actual: Weights | Mapping[str, torch.Tensor], expected: Array) -> None:
    params = actual.params if isinstance(actual, Weights) else actual
    np.testing.assert_allclose(stacked(params), expected, rtol=0, atol=1e-10)


class World:
    """The package's simulation, and from it what NumPy needs: data, first models, mini-batches."""

    def __init__(
        self,
        algorithm: str,
        architectures: Sequence[Any] = (),
        averaging: str = "size-once",
        **options: Any,
    ) -> None:
        networks = [{"name": "mlp", "hidden": []}, *architectures]
        self.simulation: Simulation = simulate(
            seed=SEED,
            clients=CLIENTS,
            clients_per_round=DRAWN,
            averaging=averaging,
            data={"name": "digits", "public": PUBLIC},
            models={
                "architectures": networks,
                "assign": "list",
                "per_client": [k % len(networks) for k in range(CLIENTS)],
            },
            training={
                "steps": STEPS,
                "batch_size": BATCH,
                "learning_rate": RATE,
                "decay": DECAY,
            },
            algorithm={"name": algorithm, **options},
        )
        federation = self.simulation.federation
        self.splits, self.sizes = federation.splits, [len(s.train) for s in federation.splits]
        assert self.simulation.experiment.selection == "by-size"
        self.by_size = averaging == "by-size"
        self.x, self.y = with_ones(federation.samples.x), federation.samples.y
        self.public_x = with_ones(federation.samples.public_x)

    def rounds(self, count: int, channel: Channel | None = None) -> Iterator[tuple[int, list[int]]]:
        """The package's rounds, one by one: the number and the clients that were drawn."""
        simulation = self.simulation
        simulation.progress.state = simulation.algorithm.start(simulation.server(-1))
        for round in range(count):
            drawn, _ = simulation.play_round(round, channel or Channel())
            assert len(drawn) == DRAWN
            yield round, drawn

    @property
    def state(self) -> Any:
        """What the package's server remembers."""
        return self.simulation.progress.state

    def evaluated(self, client: int, round: int) -> dict[str, Any]:
        message = self.simulation.evaluation_messages(round)[client]
        return self.simulation.population.models(client, message, round)

    def initial(self, number: int = 0) -> Array:
        return stacked(self.simulation.population.initial_weights(LINEAR, number).params)

    def data(self, client: int, part: str) -> Batch:
        where = getattr(self.splits[client], part)
        return self.x[where], self.y[where]

    def batches(
        self, client: int, round: int, which: str = "", steps: int = STEPS, stream: int = 0
    ) -> list[Batch]:
        """The mini-batches of a client's first training in a round, or of another."""
        key = stream_key(SEED, f"private-batches{which}/{stream}", client, round)
        x, y = self.data(client, "train")
        drawn = uniform_indices(key, (steps, BATCH), len(y), torch.device("cpu")).numpy()
        return [(x[index], y[index]) for index in drawn]

    def mean(self, models: Mapping[int, Array]) -> Array:
        """Of clients' models: clients are drawn by their size, so each counts the same; or as many
        times as it has training samples, where an experiment says so."""
        counts = {k: self.sizes[k] if self.by_size else 1 for k in models}
        total = sum(counts.values())
        return sum((counts[k] / total * θ for k, θ in models.items()), np.zeros((10, 65)))


def rate_in(round: int) -> float:
    return RATE / (1 + DECAY * round)


@pytest.mark.parametrize("averaging", ["size-once", "by-size"])
def test_fedavg(averaging: str) -> None:
    world = World("fedavg", averaging=averaging)
    x = world.initial()
    for t, drawn in world.rounds(3):
        x = world.mean({k: descend(x, world.batches(k, t), rate_in(t)) for k in drawn})
        assert_equal(world.state[LINEAR], x)
        assert_equal(world.evaluated(0, t)["global"], x)


def test_fedavg_ft() -> None:
    world = World("fedavg-ft", tuning_steps=4)
    x = world.initial()
    for t, drawn in world.rounds(2):
        x = world.mean({k: descend(x, world.batches(k, t), rate_in(t)) for k in drawn})
        for k in range(CLIENTS):
            evaluated = world.evaluated(k, t)
            assert_equal(evaluated["global"], x)
            own = world.batches(k, t, steps=4, stream=1)
            assert_equal(evaluated["personal"], descend(x, own, rate_in(t)))


def test_fedprox() -> None:
    world = World("fedprox", proximal=0.7)
    x = world.initial()
    for t, drawn in world.rounds(3):
        x = world.mean(
            {
                k: descend(x, world.batches(k, t), rate_in(t), lambda w, x=x: 0.7 * (w - x))
                for k in drawn
            }
        )
        assert_equal(world.state[LINEAR], x)


def test_scaffold() -> None:
    world = World("scaffold", global_rate=0.8)
    x = world.initial()
    c = np.zeros_like(x)
    controls = dict.fromkeys(range(CLIENTS), c)
    seen: set[int] = set()
    for t, drawn in world.rounds(3):
        change_x, change_c = np.zeros_like(x), np.zeros_like(x)
        for k in drawn:
            drift = c - controls[k]
            y = descend(x, world.batches(k, t), rate_in(t), lambda w, drift=drift: drift)
            after = controls[k] - c + (x - y) / (STEPS * rate_in(t))
            change_x += (y - x) / DRAWN
            change_c += (after - controls[k]) / CLIENTS
            controls[k] = after
        x, c = x + 0.8 * change_x, c + change_c
        assert_equal(world.state[LINEAR]["model"], x)
        assert_equal(world.state[LINEAR]["control"], c)
        for k in drawn:
            assert_equal(world.simulation.population.records[k].state["control"], controls[k])
        again, seen = seen & set(drawn), seen | set(drawn)
        assert again or t == 0  # a client came back with a control variate of its own
    np.testing.assert_allclose(c, sum(controls.values()) / CLIENTS, atol=1e-12)


def test_ditto() -> None:
    world = World("ditto", weight=0.6)
    x = world.initial()
    personal = dict.fromkeys(range(CLIENTS), x)
    for t, drawn in world.rounds(3):
        for k in drawn:
            personal[k] = descend(
                personal[k], world.batches(k, t), rate_in(t), lambda v, x=x: 0.6 * (v - x)
            )
        x = world.mean({k: descend(x, world.batches(k, t), rate_in(t)) for k in drawn})
        for k in range(CLIENTS):
            evaluated = world.evaluated(k, t)
            assert_equal(evaluated["personal"], personal[k])
            assert_equal(evaluated["global"], x)


@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
def test_per_fedavg(variant: str) -> None:
    α, δ, adaptation = 0.4, 0.01, 2
    world = World(
        "per-fedavg",
        inner_rate=α,
        difference=δ,
        variant=variant,
        adaptation_steps=adaptation,
    )

    def meta_trained(w: Array, client: int, round: int) -> Array:
        streams = [world.batches(client, round, which) for which in ("", "1", "2")]
        for outer, inner, curvature in zip(*streams, strict=True):
            g = gradient(w - α * gradient(w, inner), outer)
            ahead, behind = gradient(w + δ * g, curvature), gradient(w - δ * g, curvature)
            product = (ahead - behind) / (2 * δ) if variant == "hessian-free" else 0.0
            w = w - rate_in(round) * (g - α * product)
        return w

    x = world.initial()
    for t, drawn in world.rounds(2):
        x = world.mean({k: meta_trained(x, k, t) for k in drawn})
        for k in range(CLIENTS):
            evaluated = world.evaluated(k, t)
            assert_equal(evaluated["global"], x)
            fresh = world.batches(k, t, steps=adaptation, stream=1)
            assert_equal(evaluated["personal"], descend(x, fresh, α))


def test_hypcluster() -> None:
    world = World("hypcluster", clusters=3)
    models = [world.initial(number) for number in range(3)]
    used: set[int] = set()
    idle: set[int] = set()
    for t, drawn in world.rounds(3):
        choice = {}
        for k in drawn:
            losses = [loss(θ, world.data(k, "train")) for θ in models]
            choice[k] = int(np.argmin(losses))
            assert int(world.simulation.population.records[k].state["cluster"]) == choice[k]
        for cluster in set(choice.values()):
            start = models[cluster]
            models[cluster] = world.mean(
                {
                    k: descend(start, world.batches(k, t), rate_in(t))
                    for k in drawn
                    if choice[k] == cluster
                }
            )
        for cluster, θ in enumerate(models):
            assert_equal(world.state[LINEAR][str(cluster)], θ)
        for k in range(CLIENTS):  # evaluated is the model the client would now pick
            best = min(models, key=lambda θ, k=k: loss(θ, world.data(k, "train")))
            assert_equal(world.evaluated(k, t)["personal"], best)
        idle |= used - set(choice.values())
        used |= set(choice.values())
    assert len(used) > 1
    assert idle  # a cluster that had moved was empty in a later round, and stayed


@pytest.mark.parametrize("fallback", ["before", "trained"])
def test_fedfomo(fallback: str) -> None:
    """θ ← θ_before + Σ w_n (θ_n − θ_before), the own trained model among the candidates."""
    world = World("fedfomo", candidates=DRAWN, fallback=fallback)
    own = dict.fromkeys(range(CLIENTS), world.initial())
    before = dict(own)
    sent: dict[int, Array] = {}
    affinity: dict[tuple[int, int], float] = {}
    helpers = set()
    for t, drawn in world.rounds(6):
        trained = {}
        for k in drawn:
            validation, base = world.data(k, "validation"), before[k]
            others = {n: θ for n, θ in sent.items() if n != k}
            start = own[k]
            if others:
                start = base if fallback == "before" else own[k]
                candidates = {k: own[k], **others}
                weights = {}
                for n, θ in candidates.items():
                    gain, distance = loss(base, validation) - loss(θ, validation), norm(θ - base)
                    weights[n] = max(0.0, gain / distance) if distance else 0.0
                total = sum(weights.values())
                helpers.add((len(others), sum(weights[n] > 0 for n in others), total > 0))
                if total > 0:
                    weights = {n: weight / total for n, weight in weights.items()}
                    start = base + sum(w * (candidates[n] - base) for n, w in weights.items())
                for n in others:
                    affinity[k, n] = affinity.get((k, n), 0.0) + weights[n]
            before[k] = start
            trained[k] = descend(start, world.batches(k, t), rate_in(t))
        own, sent = own | trained, trained
        for k in range(CLIENTS):
            assert_equal(world.evaluated(k, t)["personal"], own[k])
        for (k, n), weight in affinity.items():
            found = float(world.state["affinity"][str(k)][str(n)])
            assert found == pytest.approx(weight, abs=1e-10)
    # Some of the others, but not all, were mixed; somewhere none helped, not even the own model.
    assert any(0 < helping < number for number, helping, _ in helpers)
    assert any(not helped for *_, helped in helpers)


def norm(θ: Array) -> float:
    return float(np.sqrt((θ**2).sum()))


class Recorder(Channel):
    """Keeps what clients sent."""

    sent: Mapping[int, Message]

    def up(
        self, messages: Mapping[int, Message], sent: Mapping[int, Message] | None = None
    ) -> None:
        self.sent = messages
        super().up(messages, sent)


def distilled(
    world: World, θ: Array, teacher: Array, round: int, steps: int, batch: int, rate: float
) -> Array:
    """Adam on KL(teacher ‖ student), the rate falling to zero by a cosine."""
    key = stream_key(SEED, f"server/distillation/{LINEAR}", round=round)
    drawn = uniform_indices(key, (steps, batch), PUBLIC, torch.device("cpu")).numpy()
    m, v = np.zeros_like(θ), np.zeros_like(θ)
    for t, index in enumerate(drawn):
        x = world.public_x[index]
        g = (softmax(x @ θ.T) - teacher[index]).T @ x / batch
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        m_hat, v_hat = m / (1 - 0.9 ** (t + 1)), v / (1 - 0.999 ** (t + 1))
        now = rate * (1 + np.cos(np.pi * t / steps)) / 2
        θ = θ - now * m_hat / (np.sqrt(v_hat) + 1e-8)
    return θ


@pytest.mark.parametrize("hidden", [None, 8])
def test_feddf(hidden: int | None) -> None:
    """The linear student; with ``hidden``, networks of another architecture are teachers too."""
    steps, batch, rate = 5, 7, 0.01
    others = [{"name": "mlp", "hidden": [hidden]}] if hidden else []
    # By size: the plain mean of linear models has the ensemble's own logits, and nothing to learn.
    world = World("feddf", others, "by-size", steps=steps, batch_size=batch, rate=rate)
    channel = Recorder()

    def others_logits(client: int) -> Array:  # as the network came in: its training is not ours
        p = {name: t.numpy() for name, t in channel.sent[client]["model"].params.items()}
        relu = np.maximum(world.public_x[:, :-1] @ p["1.weight"].T + p["1.bias"], 0)
        return relu @ p["3.weight"].T + p["3.bias"]

    x = world.initial()
    for t, drawn in world.rounds(2, channel):
        linear = [k for k in drawn if world.simulation.population.architectures[k] == LINEAR]
        assert linear
        assert (len(linear) < len(drawn)) == bool(hidden)
        received = {k: descend(x, world.batches(k, t), rate_in(t)) for k in linear}
        logits = [
            world.public_x @ received[k].T if k in received else others_logits(k) for k in drawn
        ]
        teacher = softmax(np.mean(logits, axis=0))
        average = world.mean(received)
        x = distilled(world, average, teacher, t, steps, batch, rate)
        assert np.abs(x - average).max() > 1e-3
        assert_equal(world.state[LINEAR], x)
