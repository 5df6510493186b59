"""FD, FedProto, FedTGP, FedGH and LG-FedAvg, a second time: by hand, in NumPy, in float64.

Written from the methods' formulas, not from the package's code. Two networks give 64 features: one
has a hidden layer of 64, the other is linear, and its features are the pixels themselves. A model
is a body (hidden × inputs + 1, or none) and a head (classes × features + 1); the last column is
the bias.

Faults seen in public libraries, and the test that would catch each here:

* cross-entropy against raw logits, or divided by the number of classes:
  test_fd, test_distillation_pulls_to_probabilities_and_is_not_divided_by_classes
* batches dropped: test_no_prototype_is_dropped
* a server's part that is trained and never saved, or never moved: test_fedtgp, test_fedgh,
  test_what_the_server_trains_goes_on_from_round_to_round
* a class that a client does not have, taken for a mean: test_rows_of_absent_classes_mean_nothing
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from perfed.algorithms.class_means import shuffled_batches
from perfed.algorithms.fd import FD
from perfed.algorithms.fedgh import initial_head
from perfed.algorithms.fedproto import FedProto
from perfed.algorithms.fedtgp import FedTGP, distances_between, generated, initial_network
from perfed.core.algorithm import Private, Reply
from perfed.core.channel import Channel
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.tree import flatten
from perfed.runs.simulation import Simulation
from tests.algorithms.test_limits import LOCAL, MODELS, after, assert_equal, models
from tests.algorithms.test_numpy_reference import (
    CLIENTS,
    Array,
    Batch,
    Recorder,
    World,
    rate_in,
    softmax,
)
from tests.conftest import MLP_50, TINY, simulate, spec
from tests.engines.clients import working_client

pytestmark = pytest.mark.usefixtures("float64")

WIDTH = 64
FOUR = ["fd", "fedproto", "fedtgp", "fedgh"]  # those that send means by class
PROTOTYPES = ["fedproto", "fedtgp", "fedgh"]
ALL = [*FOUR, "lg-fedavg"]


def with_one(rows: Array) -> Array:
    return np.hstack([rows, np.ones((len(rows), 1))])


class Net(NamedTuple):
    body: Array | None
    head: Array

    def features(self, x: Array) -> Array:
        """Of samples that end in a 1."""
        return x[:, :-1] if self.body is None else np.maximum(x @ self.body.T, 0)

    def logits(self, x: Array) -> Array:
        return with_one(self.features(x)) @ self.head.T


def joined(params: Mapping[str, Any], layer: str) -> Array:
    weight, bias = (params[f"{layer}{part}"].numpy() for part in ("weight", "bias"))
    return np.hstack([weight, bias[:, None]])


def net(params: Mapping[str, Any]) -> Net:
    """The package's model."""
    if "3.weight" in params:
        return Net(joined(params, "1."), joined(params, "3."))
    return Net(None, joined(params, "1."))


Extra = Callable[[Array, Array, Array], tuple[Any, Any]]


def descend(
    model: Net, batches: Sequence[Batch], rate: float, extra: Extra = lambda f, z, y: (0.0, 0.0)
) -> Net:
    """A step of cross-entropy for each mini-batch; ``extra`` adds to its gradients by features and
    by logits."""
    for x, y in batches:
        f, z = model.features(x), model.logits(x)
        by_features, by_logits = extra(f, z, y)
        dz = (softmax(z) - np.eye(10)[y]) / len(y) + by_logits
        df = dz @ model.head[:, :-1] + by_features
        head = model.head - rate * dz.T @ with_one(f)
        body = None if model.body is None else model.body - rate * (df * (f > 0)).T @ x
        model = Net(body, head)
    return model


def means_by_class(rows: Array, y: Array) -> dict[int, Array]:
    return {int(c): rows[y == c].mean(0) for c in np.unique(y)}


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=1e-10)


class Nets(World):
    """Clients with a hidden layer and linear ones, in turn; a class is two clients' at most."""

    def __init__(self, algorithm: str, averaging: str = "size-once", **options: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(TINY, "partition", "shards")
            super().__init__(algorithm, [{"name": "mlp", "hidden": [WIDTH]}], averaging, **options)
        population = self.simulation.population
        self.nets = {
            k: net(population.initial_weights(population.architectures[k]).params)
            for k in range(CLIENTS)
        }

    def weight(self, client: int) -> float:
        """How much a client counts in a mean."""
        return self.sizes[client] if self.by_size else 1.0

    def features(self, client: int) -> dict[int, Array]:
        x, y = self.data(client, "train")
        return means_by_class(self.nets[client].features(x), y)

    def train(self, client: int, round: int, extra: Extra | None = None) -> None:
        batches, rate = self.batches(client, round), rate_in(round)
        more = (extra,) if extra else ()
        self.nets[client] = descend(self.nets[client], batches, rate, *more)
        kept = net(self.simulation.population.records[client].weights.params)
        close(kept.head, self.nets[client].head)
        if kept.body is not None:
            close(kept.body, self.nets[client].body)


@pytest.mark.parametrize("averaging", ["size-once", "by-size"])
def test_fd(averaging: str) -> None:
    """Each learns from what the others of the last round said, and not from itself."""
    γ = 0.7
    world = Nets("fd", averaging, weight=γ)
    sent: dict[int, dict[int, Array]] = {}
    alone = 0
    for t, drawn in world.rounds(4):
        for k in drawn:
            taught = others_means(world, {j: rows for j, rows in sent.items() if j != k})
            alone += len(sent.get(k, {}).keys() - taught.keys())
            world.train(k, t, imitating(taught, γ))
        sent = {}
        for k in drawn:
            x, y = world.data(k, "train")
            sent[k] = means_by_class(softmax(world.nets[k].logits(x)), y)
    assert alone  # some had classes that no other had sent


def others_means(world: Nets, sent: Mapping[int, Mapping[int, Array]]) -> dict[int, Array]:
    """By class, of the clients that sent a row for it."""
    means = {}
    for c in {c for rows in sent.values() for c in rows}:
        amounts = {j: world.weight(j) for j in sent if c in sent[j]}
        total = sum(amounts.values())
        means[c] = sum((a / total * sent[j][c] for j, a in amounts.items()), np.zeros(10))
    return means


def imitating(taught: Mapping[int, Array], γ: float) -> Extra:
    """The gradient of γ times cross-entropy against the rows there are."""

    def extra(f: Array, z: Array, y: Array) -> tuple[Any, Any]:
        off = [p - taught[c] if c in taught else 0 * p for p, c in zip(softmax(z), y, strict=True)]
        return 0.0, γ * np.array(off) / len(y)

    return extra


@pytest.mark.parametrize("averaging", ["size-once", "by-size"])
def test_fedproto(averaging: str) -> None:
    λ = 0.6
    world = Nets("fedproto", averaging, weight=λ)
    known: dict[int, Array] = {}
    kept = 0
    for t, drawn in world.rounds(5):
        for k in drawn:
            world.train(k, t, drawn_to(known, λ))
        sent = {k: world.features(k) for k in drawn}
        counts = {k: np.bincount(world.data(k, "train")[1], minlength=10) for k in drawn}
        seen = {c for prototypes in sent.values() for c in prototypes}
        kept += len(known.keys() - seen)
        for c in seen:
            own = [k for k in drawn if c in sent[k]]
            amounts = {k: world.weight(k) * counts[k][c] / counts[k].sum() for k in own}
            total = sum(amounts.values())
            known[c] = sum((amounts[k] / total * sent[k][c] for k in own), np.zeros(WIDTH))
        assert_prototypes(world, known)
        for k in range(CLIENTS):  # evaluated among its own classes
            own_classes = set(world.data(k, "train")[1].tolist()) & known.keys()
            assert_predicts_the_nearest(world, k, t, known, own_classes or set(known))
    assert kept  # a class that nobody sent kept its prototype


def drawn_to(known: Mapping[int, Array], λ: float) -> Extra:
    """The gradient of λ times the mean squared difference from the prototypes there are."""

    def extra(f: Array, z: Array, y: Array) -> tuple[Any, Any]:
        away = np.array([f[i] - known[c] if c in known else 0 * f[i] for i, c in enumerate(y)])
        return λ * 2 * away / away.size, 0.0

    return extra


def assert_prototypes(world: Nets, known: Mapping[int, Array]) -> None:
    assert set(np.flatnonzero(world.state["known"].numpy())) == known.keys()
    for c, prototype in known.items():
        close(world.state["prototypes"][c], prototype)


def assert_predicts_the_nearest(
    world: Nets, client: int, round: int, known: Mapping[int, Array], among: set[int]
) -> None:
    model = world.evaluated(client, round)["personal"]
    x, _ = world.data(client, "test")
    features = world.nets[client].features(x)
    found = model.logits(lambda weights, what: torch.tensor(features)).argmax(1).tolist()
    candidates = sorted(among)
    distances = [np.square(features - known[c]).sum(1) for c in candidates]
    assert found == [candidates[i] for i in np.argmin(distances, axis=0)]


@pytest.mark.parametrize("limit", [100.0, 0.5])
def test_fedtgp(limit: float) -> None:
    λ, epochs, rate, size = 2.0, 2, 0.05, 7
    options = {"epochs": epochs, "rate": rate, "batch_size": size, "margin": limit}
    world = Nets("fedtgp", weight=λ, **options)
    start = initial_network(world.simulation.server(0), 10, WIDTH)
    E = start["vectors.weight"].numpy()
    H, L = joined(start, "hidden."), joined(start, "last.")
    known: dict[int, Array] = {}
    for t, drawn in world.rounds(2):
        for k in drawn:
            world.train(k, t, drawn_to(known, λ))
        sent = [(c, p) for k in drawn for c, p in sorted(world.features(k).items())]
        labels, rows = np.array([c for c, _ in sent]), np.array([p for _, p in sent])
        margin = min(margin_of(labels, rows), limit)
        assert (margin == limit) == (limit == 0.5)
        random = world.simulation.server(t).random("prototypes")
        for _ in range(epochs):
            order = random.permutation(len(rows))
            for i in range(0, len(rows), size):
                batch = order[i : i + size]
                E, H, L = tgp_step(E, H, L, rows[batch], labels[batch], margin, rate)
        made = with_one(np.maximum(with_one(E) @ H.T, 0)) @ L.T
        known = {c: made[c] for c in known.keys() | set(labels.tolist())}
        assert_prototypes(world, known)
        close(joined(world.state["network"], "hidden."), H)
        for k in range(CLIENTS):
            assert_predicts_the_nearest(world, k, t, known, set(known))


def margin_of(labels: Array, rows: Array) -> float:
    """The largest distance of a class from its nearest other."""
    centres = {c: rows[labels == c].mean(0) for c in set(labels.tolist())}
    nearest = [
        min(float(np.linalg.norm(p - q)) for d, q in centres.items() if d != c)
        for c, p in centres.items()
    ]
    return max(nearest)


def tgp_step(
    E: Array, H: Array, L: Array, rows: Array, y: Array, margin: float, rate: float
) -> tuple[Array, Array, Array]:
    """A step of cross-entropy of −(distance + margin to one's own class)."""
    hidden = np.maximum(with_one(E) @ H.T, 0)
    made = with_one(hidden) @ L.T
    differences = made[None] - rows[:, None]
    distance = np.sqrt(np.square(differences).sum(2))
    own = np.eye(10)[y]
    by_distance = -(softmax(-(distance + margin * own)) - own) / len(y)
    d_made = np.einsum("ic,icf->cf", by_distance / distance, differences)
    d_hidden = d_made @ L[:, :-1] * (hidden > 0)
    return (
        E - rate * d_hidden @ H[:, :-1],
        H - rate * d_hidden.T @ with_one(E),
        L - rate * d_made.T @ with_one(hidden),
    )


@pytest.mark.parametrize(("epochs", "size"), [(1, 1), (3, 5)])
def test_fedgh(epochs: int, size: int) -> None:
    world = Nets("fedgh", rate=0.2, epochs=epochs, batch_size=size)
    head = joined(initial_head(world.simulation.server(0), 10, WIDTH), "")
    for t, drawn in world.rounds(3):
        for k in drawn:
            if t:
                world.nets[k] = world.nets[k]._replace(head=head)
            world.train(k, t)
        sent = [(c, p) for k in drawn for c, p in sorted(world.features(k).items())]
        labels, rows = np.array([c for c, _ in sent]), with_one(np.array([p for _, p in sent]))
        random = world.simulation.server(t).random("head")
        for _ in range(epochs):
            order = random.permutation(len(rows))
            for i in range(0, len(rows), size):
                batch = order[i : i + size]
                error = softmax(rows[batch] @ head.T) - np.eye(10)[labels[batch]]
                head = head - 0.2 * error.T @ rows[batch] / len(batch)
        close(joined(world.state["head"], ""), head)
        for k in range(CLIENTS):
            assert_both_heads(world, k, t, head)


def assert_both_heads(world: Nets, client: int, round: int, shared: Array) -> None:
    """Evaluated is the trained model, and the same body with the shared head."""
    evaluated = world.evaluated(client, round)
    close(net(evaluated["personal"].params).head, world.nets[client].head)
    close(net(evaluated["global"].params).head, shared)
    if world.nets[client].body is not None:
        for kind in ("personal", "global"):
            close(net(evaluated[kind].params).body, world.nets[client].body)


@pytest.mark.parametrize("averaging", ["size-once", "by-size"])
def test_lg_fedavg(averaging: str) -> None:
    world = Nets("lg-fedavg", averaging)
    head: Array | None = None
    for t, drawn in world.rounds(3):
        for k in drawn:
            if head is not None:
                world.nets[k] = world.nets[k]._replace(head=head)
            world.train(k, t)
        head = world.mean({k: world.nets[k].head for k in drawn})
        close(joined(world.state["head"], ""), head)
        for k in range(CLIENTS):
            assert_both_heads(world, k, t, head)


# With their own idea switched off.


@pytest.mark.parametrize("name", ["fd", "fedproto", "fedtgp"])
def test_without_weight_these_are_local_training_to_the_bit(name: str) -> None:
    alone, taught = (after(3, a) for a in (LOCAL, spec(name) | {"weight": 0}))
    records = taught.population.records
    assert set(records) == set(alone.population.records)
    for k, record in alone.population.records.items():
        assert_equal([records[k].weights.tensors()], [record.weights.tensors()])


def test_fd_with_nobody_else_is_local_training() -> None:
    """There is nobody to learn from, and a client is not taught by itself."""
    one = {"clients": 1, "clients_per_round": 1, "partition": "iid"}
    alone, fd = (models(after(3, a, **one), "personal") for a in (LOCAL, "fd"))
    for name, tensor in alone[0].items():
        torch.testing.assert_close(fd[0][name], tensor, rtol=0, atol=1e-12)


def test_lg_fedavg_of_networks_that_are_all_head_is_fedavg_to_the_bit() -> None:
    linear = {"models": {"architectures": [{"name": "mlp", "hidden": []}]}}
    lg, fedavg = (models(after(3, a, **linear), "global") for a in ("lg-fedavg", "fedavg"))
    assert_equal(lg, fedavg)


def test_lg_fedavg_with_one_client_is_local_training_to_the_bit() -> None:
    one = {"clients": 1, "clients_per_round": 1, "partition": "iid"}
    alone = models(after(3, LOCAL, **one), "personal")
    for kind in ("personal", "global"):
        assert_equal(models(after(3, "lg-fedavg", **one), kind), alone)


def test_fedtgps_clients_are_fedprotos() -> None:
    """Sent the same prototypes, with the same weight, they do the same."""
    outcomes = []
    for algorithm in (FedProto(weight=10.0), FedTGP()):
        simulation = simulate(algorithm=algorithm, models=MODELS)
        client = working_client(simulation.population, 0, 0)
        message = Message(prototypes=torch.ones(10, 50), known=torch.ones(10))
        reply = algorithm.client_round(client, message)
        outcomes.append(client.weights.tensors() | reply.arrays)
    assert_equal(outcomes[:1], outcomes[1:])


def test_fedtgp_separates_prototypes_that_their_mean_would_not() -> None:
    """Two classes whose means coincide, since two clients have them the other way round."""
    simulation = simulate(algorithm={"name": "fedtgp", "epochs": 300, "rate": 0.1})
    there = torch.tensor([1.0] * 2 + [0.0] * 8)
    first, second = torch.zeros(10, 8), torch.zeros(10, 8)
    first[0], first[1] = 3.0, -3.0
    second[0], second[1] = -2.0, 4.0
    replies = [
        reply(simulation, k, Message(prototypes=p, counts=there))
        for k, p in enumerate((first, second))
    ]
    state = simulation.algorithm.merge(simulation.server(0), {}, replies)
    centres = torch.stack([first, second]).mean(0)[:2]
    made = state["prototypes"][:2]
    assert float((made[0] - made[1]).norm()) > float((centres[0] - centres[1]).norm())
    assert float(state["prototypes"][2:].abs().max()) == 0  # nobody has these classes
    assert state["known"].tolist() == there.tolist()


def test_fedghs_head_learns_all_classes_that_clients_have_between_them() -> None:
    """No client has all of them."""
    options = {"name": "fedgh", "rate": 0.5, "epochs": 200, "batch_size": 10}
    linear = {"architectures": [{"name": "mlp", "hidden": []}]}
    simulation = after(1, options, models=linear, clients=10, clients_per_round=10)
    x, y = (getattr(simulation.population, part) for part in ("x", "y"))
    head = simulation.progress.state["head"]
    said = (x.flatten(1) @ head["weight"].T + head["bias"]).argmax(1)
    assert max(len(set(y[s.train].tolist())) for s in simulation.federation.splits) < 10
    assert float((said == y).double().mean()) > 0.8


# Faults of others.


class Fixed:
    """A network that says what it is told to."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits


def test_distillation_pulls_to_probabilities_and_is_not_divided_by_classes() -> None:
    """Its gradient is the difference of probabilities, over the samples; none where they agree."""
    random = torch.Generator().manual_seed(0)
    teacher = torch.randn(10, 10, generator=random).softmax(1)
    logits, y = torch.randn(4, 10, generator=random), torch.tensor([3, 1, 1, 9])
    sent = {"soft_targets": teacher, "known": torch.ones(10)}

    def gradient(logits: torch.Tensor, weight: float) -> torch.Tensor:
        logits = logits.clone().requires_grad_()
        value = FD(weight=weight).objective(Fixed(logits), Private(logits, y), None, sent)  # type: ignore[arg-type]
        return torch.autograd.grad(value, logits)[0]

    pull = gradient(logits, 2.0) - gradient(logits, 0.0)
    torch.testing.assert_close(pull, 2.0 * (logits.softmax(1) - teacher[y]) / 4)
    agreeing = teacher[y].log() + 7.0
    torch.testing.assert_close(gradient(agreeing, 2.0), gradient(agreeing, 0.0))


def test_what_fd_sends_are_probabilities() -> None:
    channel = Recorder()
    simulation = simulate(algorithm="fd", models=MODELS)
    simulation.begin(channel)
    simulation.play_round(0, channel)
    for message in channel.sent.values():
        torch.testing.assert_close(message["soft_targets"].sum(1), torch.ones(10))
        absent = message["counts"] == 0
        assert absent.any()
        assert set(message["soft_targets"][absent].flatten().tolist()) == {0.1}


def test_no_prototype_is_dropped() -> None:
    """Each is used once in an epoch, in batches of which the last may be small."""
    batches = list(shuffled_batches(torch.zeros(7, 2), 2, 3, np.random.default_rng(0)))
    assert [len(batch) for batch in batches] == [3, 3, 1, 3, 3, 1]
    for epoch in (batches[:3], batches[3:]):
        assert sorted(torch.cat(epoch).tolist()) == list(range(7))
    assert not torch.equal(torch.cat(batches[:3]), torch.cat(batches[3:]))


@pytest.mark.parametrize(("name", "part"), [("fedtgp", "network"), ("fedgh", "head")])
def test_what_the_server_trains_goes_on_from_round_to_round(name: str, part: str) -> None:
    simulation = simulate(algorithm=spec(name), models=MODELS)
    channel = Channel()
    simulation.begin(channel)
    states = []
    for round in range(3):
        simulation.play_round(round, channel)
        states.append(flatten(simulation.progress.state[part]))
    algorithm, server = simulation.algorithm, simulation.server(2)
    for before, now in itertools.pairwise(states):
        for tensor, moved in zip(before.values(), now.values(), strict=True):
            step = float((tensor - moved).abs().max())
            assert 0 < step < 0.5 * float(tensor.abs().max())  # moved, and not begun anew
    sent = algorithm.broadcast(server, simulation.progress.state, simulation.info(0))
    if name == "fedgh":
        assert all(torch.equal(sent["head"][n], t) for n, t in states[-1].items())
    else:
        made = generated(simulation.progress.state[part])
        known = sent["known"] > 0
        assert torch.equal(sent["prototypes"][known], made[known])


def reply(simulation: Simulation, client: int, message: Message, weight: float = 1.0) -> Reply:
    return Reply(simulation.info(client), message, weight)


def replies_of(name: str) -> tuple[Simulation, list[Reply]]:
    """What clients that lack some classes sent in a round."""
    channel = Recorder()
    simulation = simulate(algorithm=spec(name), models=MODELS)
    simulation.begin(channel)
    simulation.play_round(0, channel)
    return simulation, [reply(simulation, k, m, k + 1.0) for k, m in channel.sent.items()]


def changed(replies: Sequence[Reply], **changes: Callable[[Any, Message], Any]) -> Iterator[Reply]:
    for one in replies:
        content = {name: one.message[name] for name in one.message}
        new = {name: change(content[name], one.message) for name, change in changes.items()}
        yield replace(one, message=Message(**content | new))


def assert_same_state(name: str, replies: Sequence[Reply], others: Sequence[Reply]) -> None:
    simulation = simulate(algorithm=spec(name), models=MODELS)
    merged = [simulation.algorithm.merge(simulation.server(0), {}, r) for r in (replies, others)]
    one, other = map(flatten, merged)
    for path, tensor in one.items():
        torch.testing.assert_close(tensor, other[path], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FOUR)
def test_rows_of_absent_classes_mean_nothing(name: str) -> None:
    """Whatever they hold, the server merges the same."""
    _, replies = replies_of(name)
    rows = "soft_targets" if name == "fd" else "prototypes"

    def spoilt(values: torch.Tensor, message: Message) -> torch.Tensor:
        absent = message["counts"] == 0
        assert absent.any()
        return torch.where(absent[:, None], torch.eye(*values.shape), values)

    assert_same_state(name, replies, list(changed(replies, **{rows: spoilt})))


@pytest.mark.parametrize("name", FOUR)
def test_a_client_gains_no_weight_by_boasting_of_its_samples(name: str) -> None:
    _, replies = replies_of(name)
    boasting = changed(replies[:1], counts=lambda counts, message: counts * 1e9)
    assert_same_state(name, replies, [*boasting, *replies[1:]])


def test_distances_of_equal_rows_have_a_gradient_that_is_a_number() -> None:
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * 1e3
    moved = rows.clone().requires_grad_()
    distances = distances_between(rows, moved)
    assert distances.diagonal().tolist() == [0, 0, 0]
    (gradient,) = torch.autograd.grad(distances.sum(), moved)
    assert torch.isfinite(gradient).all()


def test_fedtgps_margin_is_its_limit_where_there_is_one_class() -> None:
    simulation = simulate(algorithm={"name": "fedtgp", "margin": 3.0})
    counts = torch.tensor([0.0, 5.0] + [0.0] * 8)
    one = reply(simulation, 0, Message(prototypes=torch.ones(10, 8), counts=counts))
    assert simulation.algorithm.margin_between([one]) == 3.0  # type: ignore[attr-defined]
    state = simulation.algorithm.merge(simulation.server(0), {}, [one])
    assert all(torch.isfinite(tensor).all() for tensor in flatten(state).values())


# Networks that do not fit.


@pytest.mark.parametrize("name", [*PROTOTYPES, "lg-fedavg"])
def test_networks_of_different_widths_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=r"different widths \('mlp' 64, 'cnn' 50\): must be"):
        simulate(algorithm=spec(name), models={"architectures": ["mlp", "cnn"]})


def test_fd_takes_networks_of_any_width() -> None:
    simulation = after(2, "fd", models={"architectures": ["mlp", "cnn"]})
    assert len(simulation.population.records) > 1


class NoBias(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, classes, bias=False))


def test_fedgh_needs_a_head_with_a_bias_and_says_so() -> None:
    with pytest.raises(ConfigError, match="has another head than"):
        after(2, "fedgh", models={"architectures": [f"{__name__}:NoBias"]}, clients_per_round=6)


@pytest.mark.parametrize("name", ["lg-fedavg", "fedgen", "fedgh"])
def test_heads_of_one_width_that_differ_are_refused_where_they_would_meet(name: str) -> None:
    """One with a bias and one without: what they have in common was averaged, or a KeyError came of
    it, whichever was first."""
    models = [f"{__name__}:NoBias", {"name": "mlp", "hidden": [64]}]
    for order in (models, models[::-1]):
        with pytest.raises(ConfigError, match=r"last layers of their networks differ \(.*bias 10"):
            simulate(algorithm=spec(name), models={"architectures": order, "assign": "in-turn"})
    simulate(algorithm="fedproto", models={"architectures": models, "assign": "in-turn"})


# What crosses.


@pytest.mark.parametrize("name", ALL)
def test_what_a_round_costs(name: str) -> None:
    """N classes, F features, m clients a round, all of them in each: up m·(N·F + N), down N·F + N,
    a broadcast. FD's rows are N×N, and each client gets a table of its own."""
    n, f, m = 10, 50, 6
    channel = Channel()
    simulation = simulate(algorithm=spec(name), models=MODELS, clients_per_round=m)
    simulation.begin(channel)
    simulation.play_round(0, channel)
    table = n * n + n if name == "fd" else n * f + n
    assert channel.total.up_parameters == m * table
    assert channel.total.down_parameters == 0  # there was nothing to send yet
    simulation.play_round(1, channel)
    assert channel.total.up_parameters == 2 * m * table
    assert channel.total.down_parameters == (m * table if name == "fd" else table)
    numbers = 8 * channel.total.parameters  # in float64; to each client its own copy
    copies = 8 * (m - 1) * table if name != "fd" else 0
    bytes_of_numbers = numbers + copies
    assert bytes_of_numbers < channel.total.bytes < 1.5 * bytes_of_numbers


def test_who_did_not_answer_last_time_is_sent_the_mean_of_all() -> None:
    """One table for all of those: it counts once."""
    simulation = simulate(algorithm="fd", models=[MLP_50])
    channel = Channel()
    simulation.begin(channel)
    simulation.select = lambda round: [[0, 1], [1, 2, 3]][round]  # type: ignore[method-assign]
    simulation.play_round(0, channel)
    simulation.play_round(1, channel)
    assert channel.total.down_parameters == 2 * 110
