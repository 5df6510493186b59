"""Methods that share a small network or a generator, a second time: their rounds by hand.

Written from the methods' formulas. A network is a list of layers, a matrix and a bias each, with a
ReLU between them; gradients are autograd's, everything else is written out.

Faults seen in public libraries, and the test that would catch each here:

* FedMRL's projector is trained and never saved: test_fedmrl, test_a_saved_spliced_model_predicts…
* FedGen's generator is trained and never saved: test_fedgen
* FedKD's SVD zeroes a layer when the last singular value is needed: test_no_layer_is_lost_…
* KL is divided by the number of classes: test_fml, test_fedkd
* BatchNorm buffers are not averaged: test_the_shared_networks_statistics_are_averaged
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import perfed
from perfed.algorithms.fedkd import Factored, factored, largest_rank, multiplied, received
from perfed.core.admission import check
from perfed.core.algorithm import Spliced
from perfed.core.channel import Channel
from perfed.core.errors import ConfigError, Diverged, Refused
from perfed.core.message import Message
from perfed.core.predictor import predictor_of
from perfed.core.streams import numpy_stream, torch_stream
from perfed.core.tree import Weights
from perfed.runs.simulation import Simulation
from tests.algorithms.test_limits import LOCAL, models
from tests.algorithms.test_numpy_reference import CLIENTS, DRAWN, SEED, World, rate_in
from tests.conftest import SEQUENTIAL, played, tiny
from tests.engines.clients import working_client
from tests.methods import PLUGINS

Net = list[tuple[Tensor, Tensor]]
Nets = dict[str, Net]
Batches = Sequence[tuple[np.ndarray, np.ndarray]]

SMALL = {"name": "mlp", "hidden": [4]}
OTHER = {"name": "mlp", "hidden": [7, 5]}

pytestmark = pytest.mark.usefixtures("float64")


# Networks by hand.


def net_of(weights: Weights) -> Net:
    layers = sorted({int(name.split(".")[0]) for name in weights.params})
    params = weights.params
    return [(params[f"{n}.weight"].clone(), params[f"{n}.bias"].clone()) for n in layers]


def features(net: Net, x: Tensor) -> Tensor:
    for matrix, bias in net[:-1]:
        x = (x @ matrix.T + bias).clamp(min=0)
    return x


def last(net: Net, x: Tensor) -> Tensor:
    return x @ net[-1][0].T + net[-1][1]


def logits(net: Net, x: Tensor) -> Tensor:
    return last(net, features(net, x))


def log_probabilities(z: Tensor) -> Tensor:
    return z - z.exp().sum(1, keepdim=True).log()


def labels_loss(z: Tensor, y: Tensor) -> Tensor:
    return -log_probabilities(z)[torch.arange(len(y)), y].mean()


def divergence(teacher: Tensor, student: Tensor) -> Tensor:
    """KL; the teacher is a constant."""
    return kl(teacher.detach(), student)


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Summed over classes and averaged over samples."""
    told = log_probabilities(teacher)
    return (told.exp() * (told - log_probabilities(student))).sum(1).mean()


def descend(nets: Nets, batches: Batches, rate: float, loss: Callable[..., Tensor]) -> Nets:
    for with_ones, labels in batches:
        flat = [t.detach().requires_grad_() for net in nets.values() for one in net for t in one]
        given = iter(flat)
        nets = {name: [(next(given), next(given)) for _ in net] for name, net in nets.items()}
        value = loss(nets, torch.tensor(with_ones[:, :-1]), torch.tensor(labels))
        moved = iter(
            (t - rate * g).detach()
            for t, g in zip(flat, torch.autograd.grad(value, flat), strict=True)
        )
        nets = {name: [(next(moved), next(moved)) for _ in net] for name, net in nets.items()}
    return nets


def mean(nets: Sequence[Net]) -> Net:
    """Clients are drawn by their size, so each counts the same."""
    layers = zip(*nets, strict=True)
    return [
        (torch.stack([m for m, _ in layer]).mean(0), torch.stack([b for _, b in layer]).mean(0))
        for layer in layers
    ]


def assert_equal(actual: Weights, expected: Net, tolerance: float = 1e-10) -> None:
    for one, other in zip(net_of(actual), expected, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def numbers(net: Net) -> int:
    return sum(t.numel() for one in net for t in one)


class Recorder(Channel):
    """Keeps what crossed in the newest round."""

    sent_down: Mapping[int, Message]
    sent_up: Mapping[int, Message]

    def down(self, messages: Any, sent: Any = None) -> None:
        self.sent_down = messages
        super().down(messages, sent)

    def up(self, messages: Any, sent: Any = None) -> None:
        self.sent_up = messages
        super().up(messages, sent)


def first_nets(world: World) -> dict[int, Net]:
    population = world.simulation.population
    return {k: net_of(population.record(k).weights) for k in range(CLIENTS)}


def initial(world: World, client: int, network: str) -> Net:
    return net_of(working_client(world.simulation.population, client, 0).initial(network))


def own_weights(world: World, client: int) -> Weights:
    return world.simulation.population.record(client).weights


# FML.


def test_fml() -> None:
    α, β = 0.3, 0.6
    world = World("fml", [OTHER], small=SMALL, own_labels=α, small_labels=β)
    own, small = first_nets(world), initial(world, 0, "small")

    def loss(nets: Nets, x: Tensor, y: Tensor) -> Tensor:
        one, other = logits(nets["own"], x), logits(nets["small"], x)
        own_loss = α * labels_loss(one, y) + (1 - α) * divergence(other, one)
        return own_loss + β * labels_loss(other, y) + (1 - β) * divergence(one, other)

    channel = Channel()
    for t, drawn in world.rounds(3, channel):
        trained = []
        for k in drawn:
            nets = {"own": own[k], "small": small}
            nets = descend(nets, world.batches(k, t), rate_in(t), loss)
            own[k] = nets["own"]
            trained.append(nets["small"])
        small = mean(trained)
        assert_equal(world.state["model"], small)
        for k in range(CLIENTS):
            assert_equal(world.evaluated(k, t)["personal"], own[k])
            assert_equal(world.evaluated(k, t)["global"].weights, small)
    assert channel.total.down_parameters == 3 * numbers(small)
    assert channel.total.up_parameters == 3 * DRAWN * numbers(small)


def test_fml_by_labels_alone_is_local_training_and_fedavg_of_the_small_network() -> None:
    networks = {"architectures": [OTHER, {"name": "cnn", "batchnorm": True}]}
    fml = {"name": "fml", "small": SMALL, "own_labels": 1, "small_labels": 1}
    together = played(3, algorithm=fml, models=networks)
    alone = played(3, algorithm=LOCAL, models=networks)
    for one, other in zip(models(together, "personal"), models(alone, "personal"), strict=True):
        assert all(torch.allclose(one[name], other[name], atol=1e-12) for name in other)
    shared = played(3, algorithm="fedavg", models={"architectures": [SMALL]})
    (average,) = shared.progress.state.values()
    found = together.progress.state["model"].params
    assert all(torch.allclose(found[n], t, atol=1e-12) for n, t in average.params.items())


def test_the_shared_networks_statistics_are_averaged() -> None:
    small = {"name": "cnn", "batchnorm": True}
    for name, option in (("fml", "small"), ("fedmrl", "small"), ("fedkd", "student")):
        networks = {"architectures": [{"name": "mlp", "hidden": [50]}]}
        recorder = Recorder()
        simulation = played(1, recorder, algorithm={"name": name, option: small}, models=networks)
        entry = "update" if name == "fedkd" else "model"
        sent = [m[entry].buffers["1.running_mean"] for m in recorder.sent_up.values()]
        found = simulation.progress.state["model"].buffers["1.running_mean"]
        assert float(found.abs().sum()) > 0
        torch.testing.assert_close(found, torch.stack(sent).mean(0), rtol=0, atol=1e-12)


# FedMRL.


def test_fedmrl() -> None:
    fine, coarse = 0.9, 0.4
    world = World("fedmrl", [OTHER], small=SMALL, fine=fine, coarse=coarse)
    own, small = first_nets(world), initial(world, 0, "small")
    projector = {k: initial(world, k, "projector") for k in range(CLIENTS)}
    last_small = dict.fromkeys(range(CLIENTS), small)
    assert {tuple(p[0][0].shape) for p in projector.values()} == {(64, 68), (5, 9)}

    def loss(nets: Nets, x: Tensor, y: Tensor) -> Tensor:
        both = torch.cat([features(nets["small"], x), features(nets["own"], x)], 1)
        nested = last(nets["projector"], both)
        coarse_logits = last(nets["small"], nested[:, :4])
        fine_logits = last(nets["own"], nested)
        return fine * labels_loss(fine_logits, y) + coarse * labels_loss(coarse_logits, y)

    channel = Channel()
    seen: set[int] = set()
    for t, drawn in world.rounds(3, channel):
        for k in drawn:
            nets = {"own": own[k], "small": small, "projector": projector[k]}
            nets = descend(nets, world.batches(k, t), rate_in(t), loss)
            own[k], last_small[k], projector[k] = nets["own"], nets["small"], nets["projector"]
        assert seen & set(drawn) or t == 0  # a client came back, with the projector it had trained
        seen |= set(drawn)
        small = mean([last_small[k] for k in drawn])
        assert_equal(world.state["model"], small)
        for k in range(CLIENTS):
            model = world.evaluated(k, t)["personal"]
            assert_equal(model.own, own[k])
            assert_equal(model.second, last_small[k])
            assert_equal(model.between, projector[k])
    # The projector never crosses.
    assert channel.total.down_parameters == 3 * numbers(small)
    assert channel.total.up_parameters == 3 * DRAWN * numbers(small)
    # What is evaluated is the own head on the projected features of both.
    x = torch.tensor(world.data(1, "train")[0][:, :-1])
    client = working_client(world.simulation.population, 1, 3)
    said = client.likelihoods([world.evaluated(1, 2)["personal"]], "train")[0]
    both = torch.cat([features(last_small[1], x), features(own[1], x)], 1)
    z = log_probabilities(last(own[1], last(projector[1], both)))
    y = torch.tensor(world.data(1, "train")[1])
    torch.testing.assert_close(said, z[torch.arange(len(y)), y].exp(), rtol=0, atol=1e-10)


def test_a_projector_that_takes_the_own_features_alone_leaves_the_own_network() -> None:
    simulation = played(
        2, algorithm={"name": "fedmrl", "small": SMALL}, models={"architectures": [OTHER]}
    )
    client = working_client(simulation.population, 0, 2)
    through = {"1.weight": torch.eye(5, 9).roll(4, 1), "1.bias": torch.zeros(5)}
    small = client.initial("small")
    model = Spliced(client.weights, small, Weights(through, {}), ("small", "projector"))
    alone, spliced = client.likelihoods([client.weights, model], "train")
    torch.testing.assert_close(spliced, alone, rtol=0, atol=1e-12)


def test_without_the_coarse_loss_the_small_head_stays_and_its_features_are_trained() -> None:
    algorithm = {"name": "fedmrl", "small": SMALL, "coarse": 0}
    simulation = played(2, algorithm=algorithm, models={"architectures": [OTHER]})
    first = simulation.population.initial_weights("small").params
    now = simulation.progress.state["model"].params
    assert torch.allclose(now["3.weight"], first["3.weight"], atol=1e-12)
    assert not torch.allclose(now["1.weight"], first["1.weight"], atol=1e-6)


@pytest.mark.parametrize("name", ["fml", "fedmrl", "fedkd", "fedgen"])
def test_a_saved_model_predicts_as_it_was_evaluated(name: str, tmp_path: Path) -> None:
    """Also where it is made of three networks."""
    torch.set_default_dtype(torch.float32)
    networks = [{"name": "mlp", "hidden": [50]}, {"name": "cnn", "batchnorm": True}]
    experiment = tiny(algorithm=name, models=networks)
    result = perfed.run(experiment, tmp_path / "run", how=SEQUENTIAL)
    samples = Simulation(experiment, how=SEQUENTIAL).federation.samples
    splits = Simulation(experiment, how=SEQUENTIAL).federation.splits
    frame = result.per_client()
    last_round = frame[frame["round"] == frame["round"].max()]
    for client in range(4):
        for kind in last_round["model"].unique():
            where = splits[client].test
            said = result.model(client, kind)(torch.tensor(samples.x[where]).float()).detach()
            found = torch.nn.functional.cross_entropy(said, torch.tensor(samples.y[where]))
            row = last_round[(last_round["model"] == kind) & (last_round["client"] == client)]
            assert float(found) == pytest.approx(float(row["test_loss"].iloc[0]), rel=1e-4)


def test_a_spliced_model_and_its_tensors_are_one() -> None:
    parts = [Weights({f"{n}.weight": torch.randn(2, 3)}, {"m": torch.ones(1)}) for n in range(3)]
    model = Spliced(*parts, names=("small", "projector"))
    again = predictor_of(model.tensors())
    assert isinstance(again, Spliced)
    assert again.names == model.names
    assert again.tensors().keys() == model.tensors().keys()
    assert torch.equal(again.between.params["2.weight"], parts[2].params["2.weight"])


def test_a_small_network_wider_than_the_own_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="gives 8 features, and a client's own network 5: must"):
        played(
            1,
            algorithm={"name": "fedmrl", "small": {"name": "mlp", "hidden": [8]}},
            models={"architectures": [OTHER]},
        )
    with pytest.raises(ConfigError, match="fine: is 0, and so is coarse"):
        tiny(algorithm={"name": "fedmrl", "fine": 0, "coarse": 0})


# FedGen.


class Generator:
    """By hand: one hidden layer with BatchNorm, and Adam."""

    def __init__(self, weights: Weights) -> None:
        self.tensors = {name: t.clone() for name, t in weights.params.items()}
        self.mean = weights.buffers["norm.running_mean"].clone()
        self.variance = weights.buffers["norm.running_var"].clone()

    def __call__(self, noise: Tensor, y: Tensor, training: bool) -> Tensor:
        p = self.tensors
        given = torch.cat([noise, torch.eye(10)[y]], 1)
        hidden = given @ p["hidden.weight"].T + p["hidden.bias"]
        center, spread = self.mean, self.variance
        if training:
            center, spread = hidden.mean(0), hidden.var(0, unbiased=False)
            self.mean = 0.9 * self.mean + 0.1 * center.detach()
            self.variance = 0.9 * self.variance + 0.1 * hidden.detach().var(0, unbiased=True)
        hidden = (hidden - center) / (spread + 1e-5).sqrt() * p["norm.weight"] + p["norm.bias"]
        return hidden.clamp(min=0) @ p["features.weight"].T + p["features.bias"]

    def train(
        self, heads: Sequence[Net], counts: Tensor, round: int, steps: int, batch_size: int,
        noise: int, rate: float, shrinkage: float, diversity: float,
    ) -> None:  # fmt: skip
        present = [label for label in range(10) if counts[:, label].sum() > 0]
        random = numpy_stream(SEED, "server/generator", round=round)
        m = {name: torch.zeros_like(t) for name, t in self.tensors.items()}
        v = {name: torch.zeros_like(t) for name, t in self.tensors.items()}
        for step in range(1, steps + 1):
            y = torch.tensor(random.choice(present, batch_size))
            ε = torch.tensor(random.random((batch_size, noise)))
            self.tensors = {n: t.detach().requires_grad_() for n, t in self.tensors.items()}
            made = self(ε, y, training=True)
            taught = torch.zeros(())
            for k, head in enumerate(heads):
                right = log_probabilities(last(head, made))[torch.arange(batch_size), y]
                taught = taught - (right * counts[k, y] / counts[:, y].sum(0)).mean()
            apart = torch.stack([(ε - row).pow(2).mean(1) for row in ε])
            differ = torch.stack([(made - row).abs().mean(1) for row in made])
            loss = taught + diversity * torch.exp(torch.mean(-apart * differ))
            gradients = torch.autograd.grad(loss, [*self.tensors.values()])
            moved = {}
            for (name, t), found in zip(self.tensors.items(), gradients, strict=True):
                g = found + shrinkage * t.detach()
                m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.999 * v[name] + 0.001 * g * g
                m_hat, v_hat = m[name] / (1 - 0.9**step), v[name] / (1 - 0.999**step)
                moved[name] = t.detach() - rate * m_hat / (v_hat.sqrt() + 1e-8)
            self.tensors = moved


def test_fedgen() -> None:
    """Two kinds of networks whose features are 64 numbers."""
    α, β, η, decay, many = 3.0, 0.7, 0.5, 0.9, 3
    server = {"steps": 3, "batch_size": 6, "noise": 4, "rate": 0.02, "shrinkage": 0.1}
    world = World(
        "fedgen", [{"name": "mlp", "hidden": [64]}], hidden=7, weight=α, agreement=β,
        decay=decay, generated=many, diversity=η, **server,
    )  # fmt: skip
    simulation = world.simulation
    own = first_nets(world)
    heads, known = None, torch.zeros(10)
    algorithm: Any = simulation.algorithm
    generator = Generator(algorithm.first_generator(simulation.server(-1), 10, 64))

    channel = Recorder()
    for t, drawn in world.rounds(4, channel):
        counts = torch.zeros(DRAWN, 10)
        for place, k in enumerate(drawn):
            counts[place] = torch.tensor(np.bincount(world.data(k, "train")[1], minlength=10))
            if heads is not None:
                own[k] = [*own[k][:-1], heads]
            with torch_stream(SEED, "module", k, t):
                noise = torch.rand(10 * many, 4)
            y_made = torch.arange(10).repeat_interleave(many)
            made = generator(noise, y_made, training=False).detach()
            told = [int(label) for label in range(10) if known[label]]

            def loss(nets: Nets, x: Tensor, y: Tensor, t=t, made=made, told=told) -> Tensor:  # type: ignore[no-untyped-def]
                z = logits(nets["own"], x)
                if t == 0:
                    return labels_loss(z, y)
                said = {c: last(nets["own"], made[many * c : many * c + many]) for c in told}
                taught = torch.stack([labels_loss(said[c], torch.full((many,), c)) for c in told])
                agreed = torch.zeros(())
                for row, label in zip(z, y.tolist(), strict=True):
                    for one in said.get(label, ()):
                        agreed = agreed + divergence(one[None], row[None]) / many / len(y)
                return labels_loss(z, y) + decay**t * (α * taught.mean() + β * agreed)

            trained = descend({"own": own[k]}, world.batches(k, t), rate_in(t), loss)
            own[k] = trained["own"]
        sent = [own[k][-1:] for k in drawn]
        rates = server | {"rate": server["rate"] * decay**t}
        generator.train(sent, counts, t, diversity=η, **rates)  # type: ignore[arg-type]
        heads = mean(sent)[0]
        known = torch.maximum(known, (counts.sum(0) > 0).to(known))
        for name, tensor in generator.tensors.items():
            found = world.state["generator"].params[name]
            torch.testing.assert_close(found, tensor, rtol=0, atol=1e-9)
        statistics = world.state["generator"].buffers
        torch.testing.assert_close(statistics["norm.running_var"], generator.variance)
        torch.testing.assert_close(statistics["norm.running_mean"], generator.mean)
        torch.testing.assert_close(world.state["head"]["weight"], heads[0], rtol=0, atol=1e-10)
        for k in range(CLIENTS):
            assert_equal(world.evaluated(k, t)["personal"], own[k], 1e-9)
    head, made_of = 64 * 10 + 10, 7 * (4 + 10) + 7 + 2 * 7 + 64 * 7 + 64
    assert channel.total.up_parameters == 4 * DRAWN * (head + 10)
    assert channel.total.down_parameters == 3 * (head + made_of + 10)


def test_fedgen_without_its_generators_losses_is_lg_fedavg() -> None:
    networks = {
        "architectures": [{"name": "mlp", "hidden": [50]}, {"name": "cnn", "batchnorm": True}]
    }
    off = {"name": "fedgen", "weight": 0, "agreement": 0, "steps": 1}
    plain = {"name": f"{PLUGINS}/lg_fedavg.py:LGFedAvg"}
    one, other = (played(3, algorithm=a, models=networks) for a in (off, plain))
    for mine, theirs in zip(models(one, "personal"), models(other, "personal"), strict=True):
        assert all(torch.allclose(mine[name], theirs[name], atol=1e-12) for name in theirs)


def test_the_generator_learns_what_heads_call_a_label() -> None:
    """After many steps the mean head finds most labels that features were made for."""
    simulation = played(
        2,
        algorithm={"name": "fedgen", "steps": 150, "rate": 0.01},
        models={"architectures": [{"name": "mlp", "hidden": [50]}]},
    )
    state, algorithm = simulation.progress.state, simulation.algorithm
    first = algorithm.first_generator(simulation.server(-1), 10, 50)  # type: ignore[attr-defined]

    def found(generator: Weights) -> float:
        made = algorithm.features(generator, state["labels"])  # type: ignore[attr-defined]
        said = made @ state["head"]["weight"].T + state["head"]["bias"]
        return float((said.argmax(2) == torch.arange(10)[:, None]).double().mean())

    assert found(first) < 0.3
    assert found(state["generator"]) > 0.7


def test_what_is_generated_for_a_label_nobody_has_is_not_learnt() -> None:
    simulation = played(
        0, algorithm="fedgen", models={"architectures": [{"name": "mlp", "hidden": [50]}]}
    )
    algorithm: Any = simulation.algorithm
    unknown = int(simulation.population.y[simulation.population.positions(0, "train")][0])
    labels = torch.ones(10)
    labels[unknown] = 0
    one = torch.randn(10, 4, 50)
    other = one.clone()
    other[unknown] += 3
    trained = []
    for generated, known in ((one, labels), (other, labels), (other, torch.ones(10))):
        client = working_client(simulation.population, 0, 0)
        inputs = (generated, known, torch.tensor(1.0))
        trained.append(client.sgd(client.weights, algorithm.objective, *inputs).params["3.weight"])
    assert torch.equal(trained[0], trained[1])
    assert not torch.allclose(trained[1], trained[2], atol=1e-6)


class TwoLayers(torch.nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.base = torch.nn.Flatten()
        self.head = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Linear(8, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.base(x))
        return logits


def test_a_head_of_two_layers_is_refused_in_one_line() -> None:
    network = {"name": "imported", "factory": f"{__name__}:TwoLayers", "head": "head"}
    with pytest.raises(ConfigError, match="needs a head that is one Linear layer"):
        played(1, algorithm="fedgen", models={"architectures": [network]})


# FedKD.


def cut(matrix: np.ndarray, energy: float) -> tuple[np.ndarray, int]:
    """A matrix as it arrives, and how many numbers have crossed."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    for rank in range(1, len(values) + 1):
        if (values[:rank] ** 2).sum() >= energy * (values**2).sum():
            break
    crossed = rank * sum(matrix.shape)
    if crossed >= matrix.size:
        return matrix, matrix.size
    return (left[:, :rank] * values[:rank]) @ right[:rank], crossed


def cut_net(net: Net, energy: float) -> tuple[Net, int]:
    arrived, crossed = [], 0
    for matrix, bias in net:
        found, count = cut(matrix.numpy(), energy)
        arrived.append((torch.tensor(found), bias))
        crossed += count + bias.numel()
    return arrived, crossed


def added(net: Net, update: Net, sign: int = 1) -> Net:
    pairs = zip(net, update, strict=True)
    return [(w + sign * v, a + sign * b) for (w, a), (v, b) in pairs]


@pytest.mark.parametrize("energies", [(0.6, 0.9), (1.0, 1.0)])
def test_fedkd(energies: tuple[float, float]) -> None:
    first, end = energies
    world = World(
        "fedkd", [OTHER], student={"name": "mlp", "hidden": [16]},
        energy_first=first, energy_last=end, rising=2,
    )  # fmt: skip
    own, student = first_nets(world), initial(world, 0, "student")
    maps = {k: initial(world, k, "hidden") for k in range(CLIENTS)}

    def loss(nets: Nets, x: Tensor, y: Tensor) -> Tensor:
        own_features, student_features = (features(nets[n], x) for n in ("own", "student"))
        teaching, learning = logits(nets["own"], x), logits(nets["student"], x)
        labels = labels_loss(teaching, y), labels_loss(learning, y)
        strength = 1 / (labels[0] + labels[1])
        hidden = (last(nets["hidden"], student_features) - own_features).pow(2).mean()
        own_loss = labels[0] + strength * (kl(learning, teaching) + hidden)
        return own_loss + labels[1] + strength * (kl(teaching, learning) + hidden)

    channel = Recorder()
    up = down = 0
    answered: set[int] = set()
    update_size = 0
    ways = set()
    for t, drawn in world.rounds(4, channel):
        energy = first + (end - first) * min(1, (t + 1) / 2)
        ways |= {k in answered for k in drawn}
        down += update_size if set(drawn) & answered else 0
        down += numbers(student) if set(drawn) - answered else 0
        assert {k for k, m in channel.sent_down.items() if not int(m["whole"])} == (
            set(drawn) & answered
        )
        updates = []
        for k in drawn:
            nets = {"own": own[k], "student": student, "hidden": maps[k]}
            nets = descend(nets, world.batches(k, t), rate_in(t), loss)
            own[k], maps[k] = nets["own"], nets["hidden"]
            arrived, crossed = cut_net(added(nets["student"], student, -1), energy)
            updates.append(arrived)
            up += crossed
        update, update_size = cut_net(mean(updates), energy)
        student, answered = added(student, update), set(drawn)
        assert_equal(world.state["model"], student, 1e-9)
        for k in range(CLIENTS):
            assert_equal(world.evaluated(k, t)["personal"], own[k], 1e-9)
            assert_equal(world.evaluated(k, t)["global"].weights, student, 1e-9)
    assert ways == {True, False}  # some were sent an update, others the whole student
    assert (channel.total.up_parameters, channel.total.down_parameters) == (up, down)
    assert (up < 4 * DRAWN * numbers(student)) == (first < 1)


@pytest.mark.parametrize("energy", [0.5, 0.95, 0.98, 0.9999, 1.0])
def test_no_layer_is_lost_whatever_its_singular_values(energy: float) -> None:
    """An update loses at most 1 − T of its energy, also where the last singular value is needed."""
    generator = torch.Generator().manual_seed(3)
    rotation = torch.linalg.qr(torch.randn(12, 12, generator=generator)).Q
    tensors = {
        "flat": rotation,
        "steep": rotation @ torch.diag(torch.logspace(0, -12, 12)) @ rotation.T,
        "one": torch.outer(torch.arange(9.0), torch.arange(5.0)),
        "tall": torch.randn(40, 3, generator=generator),
        "row": torch.randn(1, 30, generator=generator),
        "kernel": torch.randn(6, 3, 3, 3, generator=generator),
        "bias": torch.randn(7, generator=generator),
        "nothing": torch.zeros(8, 8),
    }
    sent = factored(tensors, energy)
    arrived = multiplied(sent, tensors)
    for name, tensor in tensors.items():
        assert arrived[name].shape == tensor.shape
        lost = float((arrived[name] - tensor).square().sum())
        assert lost <= (1 - energy + 1e-12) * float(tensor.square().sum())
        whole = name in sent
        size = sum(t.numel() for n, t in sent.items() if n.split(":")[0] == name)
        assert size == tensor.numel() if whole else size < tensor.numel()
    assert "one:left" in sent
    assert sent["one:left"].shape == (9, 1)
    assert "flat" in sent or energy == 0.5


def test_factors_that_do_not_fit_are_refused() -> None:
    simulation = played(1, algorithm="fedkd", models={"architectures": [OTHER]})
    known = simulation.known(0)
    model = simulation.progress.state["model"]
    declared = {"update": Factored("student")}
    rows, columns = model.params["1.weight"].shape
    others = {n: t for n, t in model.params.items() if n != "1.weight"}

    def sent(left: Any, right: Any, **more: Tensor) -> Message:
        factors = {"1.weight:left": torch.zeros(left), "1.weight:right": torch.zeros(right)}
        return Message(update=Weights(others | factors | more, {}))

    most = largest_rank((rows, columns))
    check(sent((rows, 1), (1, columns)), declared, known)
    check(sent((rows, most), (most, columns)), declared, known)
    for message, reason in (
        (sent((rows, most + 1), (most + 1, columns)), "at most"),
        (sent((rows, 2), (3, columns)), "must be 2×64"),
        (sent((rows + 1, 1), (1, columns)), "left"),
        (sent((), (1, columns)), "left"),
        (sent((rows, 1), (1, columns), **{"1.weight": model.params["1.weight"]}), "unknown array"),
        (Message(update=Weights(others, {})), "is missing"),
    ):
        with pytest.raises(Refused, match=reason):
            check(message, declared, known)


def test_an_update_meets_the_student_that_it_is_of() -> None:
    one = Weights({"0.bias": torch.ones(2)}, {})
    kept = {"model": one, "version": torch.tensor(4)}

    def message(version: int, whole: int) -> Message:
        return Message(update=one, version=version, whole=whole)

    assert received({}, message(0, 1)).params["0.bias"].tolist() == [1, 1]
    assert received(kept, message(5, 0)).params["0.bias"].tolist() == [2, 2]
    assert received(kept, message(4, 0)) is one  # once more, for its answer was lost
    for have in (kept, {}):
        with pytest.raises(ConfigError, match="is sent an update of student 7, and this client"):
            received(have, message(8, 0))


def test_the_energy_that_crosses_cannot_fall() -> None:
    with pytest.raises(ConfigError, match=r"energy_last: 0\.5 is less than energy_first"):
        tiny(algorithm={"name": "fedkd", "energy_last": 0.5})


def test_a_student_of_fedkd_that_diverges_ends_the_run_in_one_line() -> None:
    """No matrix that is not finite has singular values."""
    with pytest.raises(Diverged, match="is not finite"):
        played(3, algorithm="fedkd", training={"steps": 2, "learning_rate": 1e30})
