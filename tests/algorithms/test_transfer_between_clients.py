"""Rivals that send outputs on public samples: KT-pFL, Selective-FD and COSMOS.

Rounds by hand, of softmax regression as in ``test_numpy_reference``; what each method becomes with
its idea switched off; selectors and clusters against closed forms; what a round costs.

Faults seen in public code, and the test that would catch each here:

* KL divided by the number of classes: all by hand
* a regularizer without a gradient: test_cosmoss_smoothness_has_a_gradient
* a matrix multiplied where its inverse should be: test_the_density_ratio_is_the_minimum_of_kulsif
* the last public mini-batch dropped: all by hand, whose mini-batches are larger than the public set
* a state that is trained and never saved: test_cosmos_by_hand over rounds, and
  test_every_algorithm.test_resumed_after_every_round_it_ends_with_the_same_bits
* clusters or selectors chosen by labels of public or test samples: the public set has none here,
  and test_limits.test_no_algorithm_looks_at_test_data
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from perfed.algorithms import Cosmos, KTpFL, SelectiveFD
from perfed.algorithms.cosmos import eliminated, greedy_clusters
from perfed.algorithms.kt_pfl import divergence_gradient
from perfed.algorithms.selective_fd import RIDGE, density_ratios, passed_on, spread_evenly
from perfed.core.admission import check
from perfed.core.algorithm import ClientInfo
from perfed.core.channel import Channel
from perfed.core.errors import ConfigError, Refused
from perfed.core.message import Message
from perfed.core.streams import numpy_stream, stream_key, torch_stream, uniform_indices
from tests.algorithms.test_limits import LOCAL, after, assert_equal, models
from tests.algorithms.test_numpy_reference import (
    CLIENTS,
    PUBLIC,
    SEED,
    Array,
    World,
    descend,
    rate_in,
    softmax,
    stacked,
)
from tests.algorithms.test_numpy_reference import assert_equal as assert_model
from tests.conftest import played, simulate, spec
from tests.engines.clients import working_client

PUBLIC_BATCH, CLASSES = 64, 10  # the default size of a public mini-batch, and of digits

exact = pytest.mark.usefixtures("float64")


def digested(
    world: World, θ: Array, client: int, round: int, steps: int, taught: Array, **how: Any
) -> Array:
    """Steps on the mean of KL(taught ‖ softmax(z / T)) over samples, weighed by ``counts``."""
    temperature, counts = how.get("temperature", 1.0), how.get("counts", np.ones(PUBLIC))
    key = stream_key(SEED, "public-batches/1", client, round)
    for index in uniform_indices(key, (steps, PUBLIC_BATCH), PUBLIC, torch.device("cpu")).numpy():
        x, w = world.public_x[index], counts[index][:, None]
        error = w * (softmax(x @ θ.T / temperature) - taught[index]) / temperature
        θ = θ - rate_in(round) * error.T @ x / max(1.0, w.sum())
    return θ


def random_decisions(clients: int, seed: int = 0, sharpness: float = 2.0) -> torch.Tensor:
    normal = torch.from_numpy(np.random.default_rng(seed).normal(size=(clients, 7, 4)))
    return (sharpness * normal).softmax(2)


def distributed(simulation: Any, client: int) -> Message:
    info = ClientInfo(client, simulation.population.architectures[client], 1)
    return simulation.algorithm.broadcast(simulation.server(0), simulation.progress.state, info)


# KT-pFL


def on_simplex(v: Array) -> Array:
    """The nearest point of the simplex: max(v − τ, 0), τ found by bisection."""
    low, high = v.min() - 1, v.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(v - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(v - low, 0)


def objective(row: torch.Tensor, said: torch.Tensor, own: int, pull: float) -> torch.Tensor:
    """What the server minimises for one client, as the paper has it."""
    teacher = sum(c * s for c, s in zip(row, said, strict=True))
    divergence = (teacher * (teacher / said[own]).log()).sum(1).mean()  # type: ignore[union-attr]
    return divergence + pull * (row - 1 / len(row)).square().sum()


@exact
def test_kt_pfl_by_hand() -> None:
    """With clients that come in late, and rows that reach the edge of the simplex."""
    T, ρ, rate, steps = 1.5, 0.05, 4.0, 2
    options = {"temperature": T, "pull": ρ, "coefficient_rate": rate, "digest_steps": steps}
    world = World("kt-pfl", **options)
    own = dict.fromkeys(range(CLIENTS), world.initial())
    said: dict[int, Array] = {}
    rows: dict[int, dict[int, float]] = {}
    late = set()
    for t, drawn in world.rounds(4):
        teachers = {
            k: sum(c * said[n] for n, c in rows[k].items()) if k in rows else mean_of(said.values())
            for k in drawn
            if said
        }
        for k in drawn:
            start = own[k]
            if teachers:
                start = digested(world, start, k, t, steps, teachers[k], temperature=T)
            own[k] = descend(start, world.batches(k, t), rate_in(t))
        new = [k for k in drawn if k not in said]
        late |= set(new) if t else set()
        said |= {k: softmax(world.public_x @ own[k].T / T) for k in drawn}
        for row in rows.values():  # room for the new ones
            for n in row:
                row[n] *= (len(said) - len(new)) / len(said)
            row |= dict.fromkeys(new, 1 / len(said))
        rows |= {k: dict.fromkeys(said, 1 / len(said)) for k in new}
        everybody = torch.from_numpy(np.stack([said[n] for n in said]))
        for k in drawn:
            row = torch.tensor([rows[k][n] for n in said], requires_grad=True)
            objective(row, everybody, list(said).index(k), ρ).backward()
            moved = on_simplex((row - rate * row.grad).detach().numpy())  # type: ignore[operator]
            rows[k] = dict(zip(said, moved, strict=True))
        order = world.state["order"].tolist()
        assert set(order) == set(said)
        for k in range(CLIENTS):
            assert_model(world.evaluated(k, t)["personal"], own[k])
        for k, row in rows.items():
            found = world.state["coefficients"][order.index(k)].tolist()
            assert dict(zip(order, found, strict=True)) == pytest.approx(row, abs=1e-9)
    assert late
    values = [c for row in rows.values() for c in row.values()]
    assert min(values) == 0 < max(values) < 1


def mean_of(values: Any) -> Array:
    return np.mean(list(values), axis=0)


def test_kt_pfls_gradient_is_autograds() -> None:
    said = random_decisions(5)
    row = torch.tensor([0.1, 0.4, 0.2, 0.05, 0.25], dtype=torch.float64, requires_grad=True)
    objective(row, said, 2, 0.0).backward()
    found = divergence_gradient(row.detach(), said, said[2])
    assert torch.allclose(found, row.grad, atol=1e-12)  # type: ignore[arg-type]


STEPS = 600


def settled(algorithm: KTpFL, said: torch.Tensor, own: int) -> torch.Tensor:
    row = torch.full((len(said),), 1 / len(said), dtype=torch.float64)
    for _ in range(STEPS):
        row = algorithm.moved(row, said, own)
    return row


@pytest.mark.parametrize("pull", [0.02, 0.7])
def test_kt_pfls_rows_settle_at_the_minimum(pull: float) -> None:
    """No other mean of the clients does better, neither at random nor near by."""
    said, random = random_decisions(5), np.random.default_rng(1)
    row = settled(KTpFL(pull=pull, coefficient_rate=0.25), said, 2)
    best = float(objective(row, said, 2, pull))
    for other in torch.from_numpy(random.dirichlet(np.ones(5), 100)):
        for near in (other, 0.99 * row + 0.01 * other):
            assert float(objective(near, said, 2, pull)) >= best - 1e-9


def test_kt_pfl_without_a_pull_ends_with_oneself_and_with_a_strong_one_with_the_mean() -> None:
    said = random_decisions(4)
    alone = settled(KTpFL(pull=0.0, coefficient_rate=0.25), said, 1)
    assert alone.tolist() == pytest.approx([0, 1, 0, 0], abs=0.02)
    mean = settled(KTpFL(pull=100.0, coefficient_rate=2e-3), said, 1)
    assert mean.tolist() == pytest.approx([0.25] * 4, abs=1e-2)


def test_kt_pfl_listens_to_those_that_say_the_same() -> None:
    one, other = random_decisions(2)
    row = settled(KTpFL(pull=0.01, coefficient_rate=0.25), torch.stack([one, one, other, other]), 0)
    assert row.tolist() == pytest.approx([0.5, 0.5, 0, 0], abs=0.05)


def test_kt_pfl_bears_probabilities_of_zero() -> None:
    sure = torch.eye(4, dtype=torch.float64)[torch.tensor([[0, 1, 2], [3, 3, 2]])]
    row = settled(KTpFL(), sure, 0)
    assert bool(row.isfinite().all())
    assert float(row.sum()) == pytest.approx(1)


def test_kt_pfl_at_rate_zero_teaches_everybody_the_mean() -> None:
    """And what clients that were not selected said last is part of it."""
    options = {"name": "kt-pfl", "coefficient_rate": 0, "digest_steps": 2}
    simulation = played(3, algorithm=options)
    bank = simulation.progress.state["bank"]
    assert len(bank) > 3
    mean = torch.stack([*bank.values()]).mean(0)
    for client in range(6):
        assert torch.allclose(distributed(simulation, client)["teacher"], mean, atol=1e-6)


# Selective-FD


class KuLSIF:
    """The ratio as its inventors write it: Σ α_i k(x, a_i) + 1/(mλ) Σ k(x, z_j)."""

    def __init__(self, points: Array, width: float) -> None:
        self.points, self.width, n = points, width, len(points)
        self.inverse = np.linalg.inv(self.kernel(points, points) / n + RIDGE * np.eye(n))

    def kernel(self, left: Array, right: Array) -> Array:
        squared = (left**2).sum(1)[:, None] + (right**2).sum(1) - 2 * left @ right.T
        kernel: Array = np.exp(-squared / (2 * self.width**2))
        return kernel

    def ratio(self, x: Array, own: Array) -> Array:
        n, m = len(self.points), len(own)
        α = -self.inverse @ self.kernel(self.points, own).sum(1) / (n * m * RIDGE)
        return self.kernel(x, self.points) @ α + self.kernel(x, own).sum(1) / (m * RIDGE)


@exact
def test_selective_fd_by_hand() -> None:
    """Of a linear network the features are the pixels. Each sample is left out by fitting anew."""
    width, ambiguity, quantile, steps = 0.25, 0.7, 0.4, 2
    options = {"width": width, "ambiguity": ambiguity, "quantile": quantile, "digest_steps": steps}
    world = World("selective-fd", **options)
    pixels = world.public_x[:, :-1]
    center, spread = pixels.mean(), pixels.std(ddof=1)
    public = (pixels - center) / spread
    box = numpy_stream(0, "selective-fd/auxiliary").random((250, 64))
    points = public.min() + (public.max() - public.min()) * box

    estimator = KuLSIF(points, 8 * width)

    def chosen_by(client: int) -> Array:
        z = (world.data(client, "train")[0][:, :-1] - center) / spread
        alone = [estimator.ratio(z[i : i + 1], np.delete(z, i, axis=0))[0] for i in range(len(z))]
        return estimator.ratio(public, z) > np.quantile(alone, quantile)

    own = dict.fromkeys(range(CLIENTS), world.initial())
    ensemble, precise = np.zeros((PUBLIC, CLASSES)), np.zeros(PUBLIC)
    kinds = set()
    for t, drawn in world.rounds(3):
        total, speakers = np.zeros((PUBLIC, CLASSES)), np.zeros(PUBLIC)
        for k in drawn:
            start = own[k]
            if t:
                start = digested(world, start, k, t, steps, ensemble, counts=precise)
            own[k] = descend(start, world.batches(k, t), rate_in(t))
            chosen = chosen_by(k)
            total += chosen[:, None] * softmax(world.public_x @ own[k].T)
            speakers += chosen
        mean = total / np.maximum(speakers, 1)[:, None]
        entropy = -(mean * np.log(np.maximum(mean, 1e-300))).sum(1)
        precise = ((speakers > 0) & (entropy <= ambiguity * np.log(CLASSES))).astype(float)
        ensemble = np.where(precise[:, None] > 0, mean, 1 / CLASSES)
        kinds |= set(zip(speakers > 0, precise > 0, strict=True))
        assert world.state["precise"].tolist() == (precise > 0).tolist()
        np.testing.assert_allclose(world.state["ensemble"].numpy(), ensemble, atol=1e-10)
        for k in range(CLIENTS):
            assert_model(world.evaluated(k, t)["personal"], own[k])
    assert kinds == {(False, False), (True, False), (True, True)}


def test_the_density_ratio_is_the_minimum_of_kulsif() -> None:
    """½ mean r(a)² − mean r(z) + λ/2 ‖r‖² is least where, at all points x of both kinds,
    mean_i k(x, a_i) r(a_i) − mean_j k(x, z_j) + λ r(x) = 0."""
    random = np.random.default_rng(0)
    own = torch.from_numpy(random.normal(size=(20, 3)))
    points = torch.from_numpy(random.uniform(-3, 3, size=(40, 3)))
    width, everything = 0.8, torch.cat([points, own])
    ratio = density_ratios(everything, own, points, width).mean(1)
    k = (-torch.cdist(everything, everything).square() / (2 * width**2)).exp()
    slope = k[:, :40] @ ratio[:40] / 40 - k[:, 40:].mean(1) + RIDGE * ratio
    assert float(slope.abs().max()) < 1e-12


def test_the_density_ratio_of_a_normal_law_in_one_dimension() -> None:
    """p standard normal, q even on [−4, 4]. With samples without end, the Fourier transform of the
    estimate is that of p/q times k/(k + 8λ), k the kernel's."""
    width, random = 0.5, np.random.default_rng(0)
    own = torch.from_numpy(random.normal(size=(4000, 1)))
    points = torch.linspace(-4, 4, 250, dtype=torch.float64)[:, None]
    x = np.linspace(-2, 2, 9)
    found = density_ratios(torch.from_numpy(x)[:, None], own, points, width).mean(1).numpy()
    ω = np.linspace(-20, 20, 4001)
    kernel = width * np.sqrt(2 * np.pi) * np.exp(-((width * ω) ** 2) / 2)
    transform = 8 * np.exp(-(ω**2) / 2) * kernel / (kernel + 8 * RIDGE)
    expected = (np.cos(np.outer(x, ω)) * transform).sum(1) * (ω[1] - ω[0]) / (2 * np.pi)
    assert found == pytest.approx(expected, abs=0.1)  # up to 2.2
    truth = 8 * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    assert np.corrcoef(found, truth)[0, 1] > 0.995


@exact
def test_a_client_speaks_of_samples_like_its_own() -> None:
    """Public samples are other clients' here, so that their labels are known."""
    simulation = simulate(
        algorithm="selective-fd", models={"architectures": [{"name": "mlp", "hidden": []}]}
    )
    population, splits = simulation.population, simulation.federation.splits
    others = torch.as_tensor(np.concatenate([split.train for split in splits[1:]]))
    population.public_x = population.x[others]
    chosen = simulation.algorithm.chosen(working_client(population, 0, 0))  # type: ignore[attr-defined]
    like = torch.isin(population.y[others], population.y[torch.as_tensor(splits[0].train)])
    assert 0.1 < float(like.double().mean()) < 0.9
    assert float(chosen[like].double().mean()) > 2 * float(chosen[~like].double().mean())


def test_the_servers_selector_drops_what_is_ambiguous_or_unsaid() -> None:
    """Entropies of log 1, log 2 and log 4, of four classes; and a sample nobody speaks of."""
    certain, half, nothing = [1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25] * 4
    said = torch.tensor([[certain, half, nothing, certain], [nothing, nothing, nothing, certain]])
    chosen = torch.tensor([[True, True, True, False], [False, False, True, False]])
    for ambiguity, kept in ((0.0, 1), (0.49, 1), (0.51, 2), (0.99, 2), (1.0, 3)):
        state = passed_on(said, chosen, ambiguity)
        assert state["precise"].tolist() == [n < kept for n in range(4)]
        rows = [row if n < kept else nothing for n, row in enumerate([certain, half, nothing])]
        assert state["ensemble"].tolist() == [*rows, nothing]


def test_points_are_spread_over_the_box_and_the_same_for_all() -> None:
    values = torch.tensor([[-2.0, 3.0], [0.0, 1.0]], dtype=torch.float64)
    points = spread_evenly(values)
    assert points.shape == (250, 2)
    assert -2 <= float(points.min()) < -1.9
    assert 2.9 < float(points.max()) <= 3
    assert torch.equal(points, spread_evenly(values.flip(0)))


def test_a_client_with_one_sample_speaks_of_nothing() -> None:
    simulation = simulate(
        algorithm="selective-fd",
        clients=40,
        partition={"name": "dirichlet", "alpha": 0.01, "minimum": 3},
    )
    sizes = simulation.federation.train_sizes
    client = working_client(simulation.population, int(sizes.argmin()), 0)
    assert sizes.min() == 1
    reply = simulation.algorithm.client_round(client, Message())
    assert not reply["chosen"].any()
    assert torch.equal(reply["soft_decisions"], torch.full((30, 10), 0.1))


def test_a_mask_of_numbers_is_refused() -> None:
    simulation = simulate(algorithm="selective-fd")
    up = simulation.algorithm.messages().up
    rows, known = torch.full((30, 10), 0.1), simulation.known(0)
    check(Message(soft_decisions=rows, chosen=torch.ones(30).bool()), up, known)
    with pytest.raises(Refused, match="chosen: is float32, must be bool"):
        check(Message(soft_decisions=rows, chosen=torch.ones(30)), up, known)
    with pytest.raises(Refused, match="chosen: is 29"):
        check(Message(soft_decisions=rows, chosen=torch.ones(29).bool()), up, known)


@exact
def test_without_selectors_and_coefficients_both_teach_the_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Everybody takes part: KT-pFL at rate 0 and Selective-FD that drops nothing are one method."""
    monkeypatch.setattr(
        SelectiveFD, "chosen", lambda self, client: torch.ones(30, dtype=torch.bool)
    )
    selective = {"name": "selective-fd", "ambiguity": 1, "digest_steps": 3}
    plain = {"name": "kt-pfl", "coefficient_rate": 0, "temperature": 1, "digest_steps": 3}
    one, other = (after(3, a, clients_per_round=6) for a in (selective, plain))
    for left, right in zip(models(one, "personal"), models(other, "personal"), strict=True):
        assert all(torch.allclose(left[name], right[name], atol=1e-10) for name in right)


# COSMOS


def greedy(distances: Array, B: float) -> list[set[int]]:
    """As Algorithm 1 reads, with dictionaries."""
    near = {
        i: {j for j in range(len(distances)) if j != i and distances[i, j] <= B}
        for i in range(len(distances))
    }
    found = []
    while near:
        founder = max(near, key=lambda i: len(near[i]))
        cluster = {founder, *near[founder]}
        found.append(cluster)
        near = {i: others - cluster for i, others in near.items() if i not in cluster}
    return found


def as_sets(labels: Sequence[int]) -> list[set[int]]:
    return [{i for i, c in enumerate(labels) if c == n} for n in range(max(labels) + 1)]


def pairwise(said: torch.Tensor) -> Array:
    flat = said.flatten(1).numpy()
    distances: Array = np.sqrt(((flat[:, None] - flat) ** 2).sum(2))
    return distances


@pytest.mark.parametrize("seed", range(5))
def test_cosmos_clusters_as_algorithm_1_at_the_first_distance_that_is_enough(seed: int) -> None:
    said = random_decisions(9, seed)
    distances = pairwise(said)
    for most in (1, 2, 4, 9):
        found = as_sets(greedy_clusters(said, most))
        assert len(found) <= most
        candidates = sorted({0.0, *distances[np.triu_indices(9, 1)]})
        fitting = [n for n, B in enumerate(candidates) if greedy(distances, B + 1e-9) == found]
        assert fitting
        first = fitting[0]
        assert first == 0 or len(greedy(distances, candidates[first - 1] + 1e-9)) > most


def test_cosmos_finds_planted_groups_and_a_tie_goes_to_the_first() -> None:
    centers = random_decisions(3, sharpness=6)
    noise = random_decisions(12, seed=5)
    said = torch.stack([0.95 * centers[k % 3] + 0.05 * noise[k] for k in range(12)])
    found = greedy_clusters(said, 3)
    assert all(found[k] == found[k % 3] for k in range(12))
    assert len(set(found)) == 3
    assert eliminated(torch.eye(3).bool()) == [0, 1, 2]
    chain = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]).bool()
    assert eliminated(chain) == [0, 0, 0, 1]  # the second has as many neighbours as the third


def adam(θ: Array, world: World, target: Array, number: int, round: int, how: Any) -> Array:
    key = stream_key(SEED, f"server/cosmos/{number}", round=round)
    shape = (how["steps"], how["batch_size"])
    drawn = uniform_indices(key, shape, PUBLIC, torch.device("cpu")).numpy()
    m, v = np.zeros_like(θ), np.zeros_like(θ)
    for t, index in enumerate(drawn, start=1):
        x = world.public_x[index]
        g = (softmax(x @ θ.T) - target[index]).T @ x / len(index)
        g = g * min(1.0, 1 / (np.sqrt((g**2).sum()) + 1e-6))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        step = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        θ = θ - how["rate"] * step
    return θ


@exact
def test_cosmos_by_hand() -> None:
    """Networks of clusters go on from where they were; a newcomer joins the nearest cluster."""
    how = {"steps": 4, "batch_size": 40, "rate": 0.05}
    linear = {"name": "mlp", "hidden": []}
    world = World("cosmos", **how, clusters=2, digest_steps=2, smoothness=0, network=linear)
    initial = world.simulation.population.initial_weights
    own = dict.fromkeys(range(CLIENTS), world.initial())
    said: dict[int, Array] = {}
    member: dict[int, int] = {}
    networks: dict[int, Array] = {}
    labels: dict[int, Array] = {}
    joined = set()
    for t, drawn in world.rounds(5):
        for k in drawn:
            start = own[k]
            if k in member:
                start = digested(world, start, k, t, 2, labels[member[k]])
            own[k] = descend(start, world.batches(k, t), rate_in(t))
        said |= {k: softmax(world.public_x @ own[k].T) for k in drawn}
        if not member:
            distances = pairwise(torch.from_numpy(np.stack([said[k] for k in drawn])))
            candidates = sorted(distances[np.triu_indices(len(drawn), 1)])
            B = next(d for d in candidates if len(greedy(distances, d + 1e-9)) <= 2)
            for number, cluster in enumerate(greedy(distances, B + 1e-9)):
                member |= {drawn[i]: number for i in cluster}
        means = {
            c: mean_of(said[k] for k in member if member[k] == c) for c in set(member.values())
        }
        for k in drawn:
            if k not in member:
                member[k] = min(means, key=lambda c, k=k: ((means[c] - said[k]) ** 2).sum())
                joined.add(k)
        answered = {member[k] for k in drawn}
        for c in answered:
            before = networks.get(c)
            if before is None:
                before = stacked(initial("server", c).params)
            target = mean_of(said[k] for k in said if member[k] == c)
            networks[c] = adam(before, world, target, c, t, how)
            labels[c] = softmax(world.public_x @ networks[c].T)
        assert {int(k): int(c) for k, c in world.state["cluster"].items()} == member
        for c, θ in networks.items():
            assert_model(world.state["models"][str(c)], θ)
            np.testing.assert_allclose(world.state["labels"][str(c)].numpy(), labels[c], atol=1e-10)
        for k in range(CLIENTS):
            assert_model(world.evaluated(k, t)["personal"], own[k])
    assert len(networks) == 2
    assert joined


@exact
def test_a_cluster_that_did_not_answer_stays_as_it_was() -> None:
    simulation = simulate(algorithm={"name": "cosmos", "clusters": 2, "steps": 2})
    said = [torch.eye(10)[torch.full((30,), n)] * 0.9 + 0.01 for n in (3, 7)]
    simulation.merge(0, {k: Message(soft_decisions=said[k % 2]) for k in range(3)})
    before = simulation.progress.state
    simulation.merge(1, {1: Message(soft_decisions=said[1])})
    now = simulation.progress.state
    assert [int(c) for c in now["cluster"].values()] == [0, 1, 0]
    assert now["models"]["0"] is before["models"]["0"]
    assert now["models"]["1"] is not before["models"]["1"]
    assert "pseudo_labels" not in distributed(simulation, 5)  # never answered


@exact
def test_cosmoss_smoothness_has_a_gradient() -> None:
    """λ mean (softmax f(x + e) − softmax f(x))², for a linear f."""
    x, target = torch.rand(8, 64), torch.rand(8, 10).softmax(1)
    w, size = (0.1 * torch.randn(10, 64)).requires_grad_(), torch.tensor(0.3)
    slopes = []
    for λ in (0.0, 5.0):
        with torch_stream(1, "noise"):
            loss = Cosmos(smoothness=λ).server_loss(lambda x: x @ w.T, x, target, size)
        with torch_stream(1, "noise"):
            moved = x + 0.3 * torch.randn_like(x)
        said, other = ((v @ w.T).softmax(1) for v in (x, moved))
        expected = -(target * said.log()).sum(1).mean() + λ * (said - other).square().mean()
        found, right = (torch.autograd.grad(v, w, retain_graph=True)[0] for v in (loss, expected))
        assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
        assert torch.allclose(found, right, atol=1e-12)
        slopes.append(found)
    assert float((slopes[1] - slopes[0]).abs().max()) > 1e-4


def test_cosmoss_noise_is_that_of_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.05 of the public set's spread; the same again in the same round, other in the next."""
    simulation = simulate(algorithm={"name": "cosmos", "steps": 2})
    spread, sizes = float(simulation.population.public_x.std()), set()
    plain = Cosmos.server_loss

    def noted(self: Cosmos, said: Any, x: Any, target: Any, noise: Any) -> Any:
        sizes.add(float(noise))
        return plain(self, said, x, target, noise)

    monkeypatch.setattr(Cosmos, "server_loss", noted)
    start, target = simulation.server(0).initial("server", 0), torch.full((30, 10), 0.1)
    trained = [
        simulation.algorithm.trained(simulation.server(round), 0, start, target)  # type: ignore[attr-defined]
        for round in (0, 0, 1)
    ]
    first, again, later = (weights.params["1.weight"] for weights in trained)
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert [*sizes] == pytest.approx([0.05 * spread])


@exact
def test_a_clusters_network_learns_what_its_clients_say() -> None:
    simulation = simulate(algorithm={"name": "cosmos", "steps": 400, "rate": 0.01})
    target = torch.rand(30, 10).mul(5).softmax(1)
    simulation.merge(0, {0: Message(soft_decisions=target)})
    found = simulation.progress.state["labels"]["0"]
    divergence = float((target * (target / found).log()).sum(1).mean())
    untrained = float((target * (target / 0.1).log()).sum(1).mean())
    assert divergence < 0.3 * untrained


# All of them


@pytest.mark.parametrize("name", ["kt-pfl", "selective-fd", "cosmos"])
def test_without_distillation_they_are_local_training_to_the_bit(name: str) -> None:
    reference = models(after(3, LOCAL), "personal")
    few = {"steps": 1} if name == "cosmos" else {}
    found = after(3, {"name": name, "digest_steps": 0, **few})
    assert_equal(models(found, "personal"), reference)


@pytest.mark.parametrize("name", ["kt-pfl", "selective-fd", "cosmos"])
def test_no_default_turns_them_into_local_training(name: str) -> None:
    few = {"clusters": 2, "steps": 5} if name == "cosmos" else {}
    few |= {"ambiguity": 1} if name == "selective-fd" else {}  # after two steps nobody is sure
    first, second = (
        after(3, a, models={"architectures": ["mlp"]}) for a in ({"name": name, **few}, LOCAL)
    )
    pairs = zip(models(first, "personal"), models(second, "personal"), strict=True)
    assert max(float((a[n] - b[n]).abs().max()) for a, b in pairs for n in a) > 1e-4


@pytest.mark.parametrize("name", ["kt-pfl", "selective-fd", "cosmos"])
def test_batchnorm_has_seen_public_samples_before_it_speaks_of_them(name: str) -> None:
    """Also in the first round, in which nothing is distilled."""
    models = {"architectures": [{"name": "cnn", "batchnorm": True}]}
    simulation = played(1, algorithm=spec(name), models=models)
    for record in simulation.population.records.values():
        moved = record.weights.public_buffers["1.running_mean"]
        assert float(moved.abs().sum()) > 0
        assert not torch.equal(moved, record.weights.buffers["1.running_mean"])


def test_what_a_round_costs() -> None:
    """m clients of six, |P| public samples, N classes; a broadcast counts once."""
    m, P, N = 3, 30, 10
    rows = P * N

    def costs(algorithm: dict[str, Any], clients: list[list[int]]) -> list[tuple[int, int]]:
        simulation = simulate(algorithm=algorithm)
        simulation.begin(Channel())
        simulation.select = lambda round: clients[round]  # type: ignore[method-assign]
        found = []
        for round in range(len(clients)):
            channel = Channel()
            simulation.play_round(round, channel)
            found.append((channel.total.up_parameters, channel.total.down_parameters))
        return found

    drawn = [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    few = {"digest_steps": 1}
    assert costs({"name": "kt-pfl", **few}, drawn) == [
        (m * rows, 0), (m * rows, m * rows), (m * rows, m * rows)
    ]  # fmt: skip
    assert costs({"name": "selective-fd", **few}, drawn) == [
        (m * (rows + P), 0), (m * (rows + P), rows + P), (m * (rows + P), rows + P)
    ]  # fmt: skip
    two = {"name": "cosmos", "clusters": 2, "steps": 1, **few}
    assert costs(two, drawn) == [(m * rows, 0), (m * rows, 2 * rows), (m * rows, 0)]
    one = {"name": "cosmos", "clusters": 1, "steps": 1, **few}
    assert costs(one, drawn)[1] == (m * rows, rows)


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        ({"name": "kt-pfl", "temperature": 0}, "temperature: 0.0 is out of range: must be more"),
        ({"name": "kt-pfl", "pull": -1}, "pull: -1.0 is out of range"),
        ({"name": "selective-fd", "ambiguity": 1.5}, "ambiguity: 1.5 is out of range"),
        ({"name": "selective-fd", "width": 0}, "width: 0.0 is out of range"),
        ({"name": "cosmos", "clusters": 0}, "clusters: 0 is out of range"),
        ({"name": "cosmos", "network": "mpl"}, "did you mean 'mlp'"),
    ],
)
def test_impossible_options_get_one_line(algorithm: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        simulate(algorithm=algorithm)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
