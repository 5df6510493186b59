"""PerFed-Evidence against its formulas, written out by hand, and what must follow from them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import perfed
from perfed.algorithms.perfed_evidence import (
    FLOOR,
    PRIOR_SAMPLES,
    SHARES,
    SHARPNESS,
    choice,
    concentrations,
    label_mix,
    pooled_evidence,
)
from perfed.algorithms.perfed_kin import TRAINING_SAMPLES
from perfed.algorithms.witnesses import RIDGE, SMALLEST_PROBABILITY, SMALLEST_SHARE
from perfed.core import tensorfile
from perfed.core.algorithm import Adjusted, Mixture
from perfed.core.errors import ConfigError, RunError
from perfed.core.message import Message
from perfed.core.streams import stream_key, uniform_indices
from perfed.core.tree import Weights
from perfed.data import build_federation
from perfed.engines.base import ClientRecord
from perfed.runs.model_file import PredictorModule, module_of
from tests.conftest import played, simulate, tiny
from tests.engines.clients import run_task

CLASSES = 4
CAUTION = 3.0


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def random_decisions(clients: int, samples: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return softmax(2 * random.normal(size=(clients, samples, CLASSES)))


def by_brute_force(decisions: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """The least squares of the module's docstring, with ℓ and every c_k(x) as unknowns."""
    clients, size, classes = decisions.shape
    spoken = decisions.mean(1) + SMALLEST_SHARE / classes
    spoken /= spoken.sum(1, keepdims=True)
    ridge = RIDGE / classes * samples.sum() / clients
    smallest = SMALLEST_PROBABILITY / classes
    evidence = np.zeros((size, classes))
    for x in range(size):
        rows, wanted = [], []
        for k in range(clients):
            for y in range(classes):
                weight = np.sqrt(samples[k] * spoken[k, y])
                row = np.zeros(classes + clients)
                row[y] = row[classes + k] = weight
                rows.append(row)
                ratio = np.log(max(decisions[k, x, y], smallest) / spoken[k, y])
                wanted.append(weight * ratio)
        for y in range(classes):
            row = np.zeros(classes + clients)
            row[y] = np.sqrt(ridge)
            rows.append(row)
            wanted.append(0.0)
        evidence[x] = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0][:classes]
    return evidence - evidence.mean(1, keepdims=True)


@pytest.mark.usefixtures("float64")
def test_the_evidence_is_the_least_squares_solution() -> None:
    decisions, samples = random_decisions(clients=5, samples=3), np.array([3.0, 40, 7, 1, 12])
    found = pooled_evidence(torch.tensor(decisions), torch.tensor(samples))
    assert np.allclose(found.numpy(), by_brute_force(decisions, samples), atol=1e-9)


def experts(likelihood: np.ndarray, pairs: list[tuple[int, int]]) -> torch.Tensor:
    """What clients say who each know two classes, equally often, and know them perfectly."""
    said = np.full((len(pairs), *likelihood.shape), 1e-9)
    for k, (a, b) in enumerate(pairs):
        said[k][:, [a, b]] = likelihood[:, [a, b]] / likelihood[:, [a, b]].sum(1, keepdims=True)
    return torch.tensor(said / said.sum(2, keepdims=True))


def test_experts_for_two_classes_each_make_one_for_all() -> None:
    """Nobody has seen more than two of four classes; pooled, they tell all four apart."""
    random = np.random.default_rng(1)
    label = np.repeat(np.arange(CLASSES), 50)
    likelihood = np.exp(random.normal(size=(200, CLASSES)) + 3 * np.eye(CLASSES)[label])
    chain = experts(likelihood, [(0, 1), (1, 2), (2, 3)])
    evidence = pooled_evidence(chain, torch.full((3,), 20))
    right = (evidence.argmax(1).numpy() == label).mean()
    best = (likelihood.argmax(1) == label).mean()
    assert best > 0.9
    assert right > best - 0.05
    mean = chain.mean(0)  # what one centroid would teach
    assert right > (mean.argmax(1).numpy() == label).mean() + 0.1


def test_a_client_of_one_label_has_nothing_to_say() -> None:
    decisions = torch.tensor(random_decisions(clients=4, samples=20))
    samples = torch.tensor([5, 10, 20, 8])
    stubborn = torch.full((1, 20, CLASSES), 1e-6, dtype=torch.float64)
    stubborn[..., 2] = 1
    alone = pooled_evidence(decisions, samples)
    joined = pooled_evidence(torch.cat([decisions, stubborn]), torch.cat([samples, samples[:1]]))
    assert torch.allclose(alone, joined, atol=0.01)


@pytest.mark.usefixtures("float64")
@given(st.lists(st.integers(0, 30), min_size=2, max_size=6).filter(any), st.randoms())
def test_a_label_mix_is_a_distribution_that_follows_the_counts(counts: list[int], random) -> None:
    mix = label_mix(torch.tensor(counts))
    assert torch.isclose(mix.sum(), torch.tensor(1.0))
    assert (mix > 0).all()
    order = list(range(len(counts)))
    random.shuffle(order)
    assert torch.allclose(label_mix(torch.tensor(counts)[order]), mix[order])
    many = label_mix(1000 * torch.tensor(counts))
    assert torch.allclose(many, torch.tensor(counts) / sum(counts), atol=0.02)


def test_five_samples_tell_a_client_of_one_label_from_one_of_all() -> None:
    assert label_mix(torch.tensor([5, 0, 0, 0, 0]))[0] > 0.9
    assert label_mix(torch.tensor([1, 1, 1, 1, 1])).max() < 0.25


@pytest.mark.parametrize("classes", [2, 10, 100, 1000])
def test_a_label_mix_may_be_one_label_or_uniform_for_any_number_of_classes(classes: int) -> None:
    """Where there is one sample of each class, and two of one, that is little proof that this one
    is twice as frequent."""
    one = torch.zeros(classes)
    one[0] = 20
    assert label_mix(one)[0] > 0.95
    even = torch.ones(classes)
    even[0] = 2
    mix = label_mix(even)
    assert float(mix[0] / mix[1]) < 1.5
    assert concentrations(10) == [0.1, 0.3, 1, 3, 10, 30, 100]


def gains_of(best: tuple[int, int], gain: float) -> torch.Tensor:
    gains = torch.zeros(len(SHARPNESS), len(SHARES))
    gains[best] = gain
    return gains


@pytest.mark.parametrize("sharpness", range(len(SHARPNESS)))
@pytest.mark.parametrize("share", range(len(SHARES)))
def test_a_student_is_listened_to_as_far_as_it_proves_itself(sharpness: int, share: int) -> None:
    burden = CAUTION * SHARES[share]
    found = choice(gains_of((sharpness, share), burden + 0.1), CAUTION)
    assert [float(f) for f in found] == [SHARES[share], SHARPNESS[sharpness]]
    assert float(choice(gains_of((sharpness, share), burden - 0.1), CAUTION)[0]) == 0


def test_of_two_choices_the_one_worth_more_than_its_burden_is_taken() -> None:
    gains = gains_of((0, 0), CAUTION * SHARES[0] + 1.0)
    gains[2, 3] = CAUTION * SHARES[3] + 0.9  # a larger gain, and a larger burden
    assert float(choice(gains, CAUTION)[0]) == SHARES[0]
    gains[2, 3] += 0.2
    assert [float(f) for f in choice(gains, CAUTION)] == [SHARES[3], SHARPNESS[2]]


@pytest.mark.parametrize("public_batchnorm", ["separate", "private", "shared"])
def test_the_witness_is_local_training_to_the_bit(public_batchnorm: str) -> None:
    changes = {
        "models": {"architectures": ["mlp", {"name": "cnn", "batchnorm": True}]},
        "training": {"steps": 3, "batch_size": 8, "public_batchnorm": public_batchnorm},
    }
    evidence = played(3, algorithm="perfed-evidence", **changes)
    local = played(3, algorithm={"name": "local", "participation": "selected"}, **changes)
    drawn = 0
    for client, record in evidence.population.records.items():
        if record.state:
            drawn += 1
            ours, theirs = record.weights, local.population.record(client).weights
            assert all(torch.equal(ours.params[name], theirs.params[name]) for name in ours.params)
            assert all(torch.equal(ours.buffers[n], theirs.buffers[n]) for n in ours.buffers)
    assert drawn


def test_a_witness_of_public_samples_has_seen_some() -> None:
    """BatchNorm's statistics of public batches: a witness that never saw any would say nonsense."""
    models = {"architectures": [{"name": "cnn", "batchnorm": True}]}
    simulation = played(1, algorithm="perfed-evidence", models=models)
    for record in simulation.population.records.values():
        counts = [b for n, b in record.weights.public_buffers.items() if "num_batches" in n]
        assert counts
        assert all(int(count) == simulation.experiment.training.steps for count in counts)


def test_the_server_pools_what_each_client_sent_last() -> None:
    simulation = simulate(algorithm="perfed-evidence")
    random = torch.Generator().manual_seed(0)

    def said(samples: int, gain: float) -> Message:
        decisions = torch.rand(30, 10, generator=random).softmax(-1)
        gains = gains_of((1, 2), gain)
        return Message(soft_decisions=decisions, samples=samples, gains=gains)

    early = {0: said(5, -9.0), 1: said(8, 0.5)}
    late = {0: said(5, 0.25), 2: said(3, 1.0)}
    simulation.merge(0, early)
    simulation.merge(1, late)
    state = simulation.progress.state
    last = [late[0], early[1], late[2]]
    expected = pooled_evidence(
        torch.stack([m["soft_decisions"] for m in last]), torch.tensor([5, 8, 3])
    )
    assert torch.allclose(state["evidence"], expected, atol=1e-6)
    # Every client counts the same there, however many samples it has.
    assert torch.allclose(state["gains"], gains_of((1, 2), (0.25 + 0.5 + 1.0) / 3))


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_client_predicts_with_a_mixture_of_its_two_models(share: float) -> None:
    """Predictor by an engine, and made a module of; a share of zero is the witness alone."""
    simulation = played(
        2, algorithm="perfed-evidence", models={"architectures": [{"name": "mlp", "hidden": []}]}
    )
    population, samples = simulation.population, simulation.federation.samples
    client, record = next((k, r) for k, r in population.records.items() if r.state)
    shown = gains_of((0, SHARES.index(share)), 10.0) if share else gains_of((0, 0), 0.0)
    record.state |= {"proof": shown}
    population.commit({client: record})
    split = simulation.federation.splits[client]
    x = samples.x[split.test].reshape(len(split.test), 64)
    mix = label_mix(torch.bincount(torch.tensor(samples.y[split.train]), minlength=10)).numpy()

    def logits(weights: Weights) -> np.ndarray:
        return x @ weights.params["1.weight"].numpy().T + weights.params["1.bias"].numpy()

    witness = softmax(logits(record.weights))
    student = softmax(0.5 * logits(record.state["student"]) + np.log(mix))
    expected = (1 - share) * witness + share * student

    message = simulation.evaluation_messages(2)[client]
    model = population.models(client, message, 2)["personal"]
    assert isinstance(model, Mixture) is (share > 0)
    evaluated = population.evaluate({client: message}, 2)["personal"]
    likelihoods = expected[np.arange(len(x)), samples.y[split.test]]
    assert evaluated["test_loss"][client] == pytest.approx(-np.log(likelihoods).mean(), rel=1e-4)

    def network(name: str) -> tuple[torch.nn.Module, str]:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)), "1"

    said = module_of(model.tensors(), network)(torch.tensor(x).float()).softmax(1)
    assert np.allclose(said.detach().numpy(), expected, atol=1e-5)


@pytest.mark.usefixtures("float64")
def test_one_step_is_the_gradient_of_the_objective() -> None:
    rate, weight, batch, public_batch, round, client = 0.3, 1.7, 5, 4, 2, 1
    simulation = simulate(
        models={"architectures": [{"name": "mlp", "hidden": []}]},
        algorithm={"name": "perfed-evidence", "weight": weight},
        training={
            "learning_rate": rate,
            "steps": 1,
            "batch_size": batch,
            "public_batch_size": public_batch,
        },
    )
    evidence = torch.randn(30, 10, generator=torch.Generator().manual_seed(0))
    message = Message(evidence=evidence, gains=gains_of((0, 0), 0.0))
    population = simulation.population
    _, records = run_task(population, simulation.algorithm.client_round, {client: message}, round)

    before = population.initial_weights("mlp(hidden=)").params
    w, b = before["1.weight"].numpy(), before["1.bias"].numpy()
    samples, train = simulation.federation.samples, simulation.federation.splits[client].train
    counts = np.bincount(samples.y[train], minlength=10)
    mix = label_mix(torch.tensor(counts)).numpy()
    log_attention = np.log(mix / 2 + 1 / 20)

    def drawn(what: str, count: int, bound: int) -> np.ndarray:
        key = stream_key(0, f"{what}-batches/0", client, round)
        return uniform_indices(key, (1, count), bound, torch.device("cpu"))[0].numpy()

    chosen = train[drawn("private", batch, len(train))]
    x = samples.x[chosen].reshape(batch, 64).astype(float)
    error = softmax(x @ w.T + b + np.log(mix)) - np.eye(10)[samples.y[chosen]]
    grad_w, grad_b = error.T @ x / batch, error.sum(0) / batch
    for index in drawn("public", public_batch, 30):
        p = samples.public_x[index].reshape(64).astype(float)
        s = softmax(w @ p + b + log_attention)
        dz = weight * (s - softmax(evidence[index].numpy() + log_attention)) / public_batch
        grad_w, grad_b = grad_w + np.outer(dz, p), grad_b + dz
    after = records[client].state["student"].params
    assert np.allclose(after["1.weight"].numpy(), w - rate * grad_w, atol=1e-10)
    assert np.allclose(after["1.bias"].numpy(), b - rate * grad_b, atol=1e-10)


def test_a_saved_model_predicts_as_it_was_evaluated(tmp_path: Path) -> None:
    experiment = tiny(
        algorithm={"name": "perfed-evidence", "caution": 0.0},
        models={"architectures": [{"name": "cnn", "batchnorm": True}]},
        training={"learning_rate": 0.1, "steps": 10, "batch_size": 8, "public_batch_size": 16},
    )
    result = perfed.run(experiment, tmp_path / "run")
    frame = result.per_client()
    last = frame[frame["round"] == frame["round"].max()].set_index("client")
    e = experiment
    federation = build_federation(e.data, e.partition, e.split, e.clients, e.seed)
    mixtures = 0
    for client, split in enumerate(federation.splits):
        model = result.model(client)
        mixtures += isinstance(model, PredictorModule)
        logits = model(torch.tensor(federation.samples.x[split.test]).float()).detach()
        y = torch.tensor(federation.samples.y[split.test]).long()
        loss = torch.nn.functional.cross_entropy(logits, y)
        assert float(loss) == pytest.approx(last.loc[client, "test_loss"], rel=1e-4)
    assert mixtures


class OwnNames(torch.nn.Module):
    """A network whose parameters have the names of parts of a mixture."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = torch.nn.Parameter(torch.full((3,), 2.0))
        self.logit_scale = torch.nn.Parameter(torch.tensor(3.0))
        self.linear = torch.nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logit_scale * self.linear(x) + self.shares


def test_a_file_keeps_a_networks_own_names_apart(tmp_path: Path) -> None:
    network, x = OwnNames(), torch.randn(5, 2)
    weights = Weights({n: p.detach() for n, p in network.named_parameters()}, {})
    student = Adjusted(weights, torch.tensor(0.5), torch.tensor([1.0, 0, -1]))
    model = Mixture((weights, student), torch.tensor([0.25, 0.75]))
    tensorfile.save(tmp_path / "personal.safetensors", model.tensors())
    loaded = perfed.load_model(tmp_path / "personal.safetensors", OwnNames())
    taught = (0.5 * network(x) + student.offset).softmax(1)
    expected = 0.25 * network(x).softmax(1) + 0.75 * taught
    assert torch.allclose(loaded(x).softmax(1), expected, atol=1e-6)
    with pytest.raises(RunError, match="holds other tensors"):
        perfed.load_model(tmp_path / "personal.safetensors", torch.nn.Linear(2, 3))
    with pytest.raises(ConfigError, match=r"network: expected a network, a torch.nn.Module, got"):
        perfed.load_model(tmp_path / "personal.safetensors", "mlp")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("method", "at_home"), [("perfed-evidence", 0.0), ("perfed-kin", TRAINING_SAMPLES)]
)
def test_a_client_sends_its_witness_and_what_its_student_is_worth(
    method: str, at_home: float
) -> None:
    """All that a client sends and keeps, computed once more from its two models."""
    simulation = simulate(
        models={"architectures": [{"name": "mlp", "hidden": []}]},
        algorithm={"name": method, "weight": 4.0, "caution": CAUTION},
        training={"learning_rate": 0.5, "steps": 40, "batch_size": 8, "public_batch_size": 16},
    )
    evidence = 9 * torch.randn(30, 10, generator=torch.Generator().manual_seed(0))
    everybodys = torch.rand(3, 4, generator=torch.Generator().manual_seed(1)) / 2
    even = torch.full((10,), 0.1)
    message = Message(evidence=evidence, gains=everybodys, mix=even)
    population, samples = simulation.population, simulation.federation.samples
    clients = dict.fromkeys(range(6), message)
    replies, records = run_task(population, simulation.algorithm.client_round, clients, 0)

    def logits(weights: Weights, x: np.ndarray) -> np.ndarray:
        flat = x.reshape(len(x), 64)
        return flat @ weights.params["1.weight"].numpy().T + weights.params["1.bias"].numpy()

    def gain(
        record: ClientRecord, part: np.ndarray, mix: np.ndarray, beta: float, w: float
    ) -> np.ndarray:
        x, y = samples.x[part], samples.y[part]
        own = softmax(logits(record.weights, x))[np.arange(len(y)), y]
        z = beta * logits(record.state["student"], x) + np.log(mix)
        mixed = (1 - w) * own + w * softmax(z)[np.arange(len(y)), y]
        return np.asarray(np.log((mixed + FLOOR) / (own + FLOOR)))

    chosen = set()
    for client, reply in replies.items():
        split, record = simulation.federation.splits[client], records[client]
        said = softmax(logits(record.weights, samples.public_x))
        assert np.allclose(reply["soft_decisions"].numpy(), said, atol=1e-5)
        assert int(reply["samples"]) == len(split.train)
        mix = label_mix(torch.bincount(torch.tensor(samples.y[split.train]), minlength=10)).numpy()
        worth = {}
        for i, beta in enumerate(SHARPNESS):
            for j, w in enumerate(SHARES):
                validated = gain(record, split.validation, mix, beta, w)
                assert float(reply["gains"][i, j]) == pytest.approx(validated.mean(), abs=1e-4)
                prior = PRIOR_SAMPLES * float(everybodys[i, j])
                learned = at_home * gain(record, split.train, mix, beta, w).mean()
                worth[w, beta] = validated.sum() + prior + learned - CAUTION * w
                proof = float(record.state["proof"][i, j])
                assert proof == pytest.approx(worth[w, beta] + CAUTION * w, abs=1e-2)
        best = max(worth, key=lambda choice: worth[choice])
        share = best[0] if worth[best] > 0 else 0.0
        found = choice(record.state["proof"], CAUTION)
        assert float(found[0]) == share
        assert not share or float(found[1]) == best[1]
        chosen.add(share)
    # Evidence by chance is wrong, and training samples say so to everybody.
    assert chosen == {0.0} if at_home else len(chosen) > 1


def test_a_student_goes_on_where_it_was() -> None:
    simulation = played(
        1, algorithm="perfed-evidence", training={"learning_rate": 1e-3, "steps": 1}
    )
    population = simulation.population
    client, record = next((k, r) for k, r in population.records.items() if r.state)
    student: Weights = record.state["student"]
    forgetful = Weights(*({n: torch.zeros_like(t) for n, t in part.items()} for part in student))
    population.commit({client: ClientRecord(record.weights, record.state | {"student": forgetful})})
    message = Message(evidence=torch.zeros(30, 10), gains=gains_of((0, 0), 0.0))
    _, records = run_task(population, simulation.algorithm.client_round, {client: message}, 1)

    def largest(weights: Weights) -> float:
        return max(float(tensor.abs().max()) for tensor in weights.params.values())

    assert largest(records[client].state["student"]) < 0.01
    assert largest(records[client].weights) > 0.1
