"""PerFed-CKT against the paper's formulas, written out by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import perfed
from perfed.core.message import Message
from perfed.core.streams import stream_key, uniform_indices
from perfed.core.tree import Weights
from tests.conftest import simulate, tiny
from tests.engines.clients import run_task, working_client

LINEAR = {"architectures": [{"name": "mlp", "hidden": []}]}


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@pytest.mark.usefixtures("float64")
def test_one_step_is_the_papers_update_rule() -> None:
    """w − η[ 2λ/|P| Σ ∇s(w,x)ᵀ(s(w,x) − s̄(x)) + 1/|ξ| Σ ∇f(w,ξ) ], for s = softmax(Wx + b)."""
    rate, weight, batch, public_batch, round = 0.3, 1.7, 5, 4, 2
    simulation = simulate(
        models=LINEAR,
        algorithm={"name": "perfed-ckt", "clusters": 2, "weight": weight},
        training={
            "learning_rate": rate,
            "steps": 1,
            "batch_size": batch,
            "public_batch_size": public_batch,
        },
    )
    engine, client = simulation.population, 1
    centroids = torch.rand(2, 30, 10).softmax(-1)
    replies, records = run_task(
        engine, simulation.algorithm.client_round, {client: Message(centroids=centroids)}, round
    )

    before = engine.initial_weights("mlp(hidden=)").params
    w, b = before["1.weight"].numpy(), before["1.bias"].numpy()
    public = simulation.federation.samples.public_x.reshape(30, 64).astype(float)
    own = softmax(public @ w.T + b)
    distances = [((c.numpy() - own) ** 2).sum() for c in centroids]
    teacher = centroids[int(np.argmin(distances))].numpy()

    def drawn(what: str, count: int, bound: int) -> np.ndarray:
        key = stream_key(0, f"{what}-batches/0", client, round)
        return uniform_indices(key, (1, count), bound, torch.device("cpu"))[0].numpy()

    train = simulation.federation.splits[client].train
    chosen = train[drawn("private", batch, len(train))]
    x = simulation.federation.samples.x[chosen].reshape(batch, 64).astype(float)
    y = simulation.federation.samples.y[chosen]
    error = (softmax(x @ w.T + b) - np.eye(10)[y]) / batch  # ∂f/∂z of cross-entropy
    grad_w, grad_b = error.T @ x, error.sum(axis=0)
    for index in drawn("public", public_batch, 30):
        s = own[index]
        jacobian = np.diag(s) - np.outer(s, s)  # ∂s/∂z
        dz = 2 * weight / public_batch * jacobian.T @ (s - teacher[index])
        grad_w += np.outer(dz, public[index])
        grad_b += dz

    after = records[client].weights.params
    assert after["1.weight"].numpy() == pytest.approx(w - rate * grad_w, abs=1e-12)
    assert after["1.bias"].numpy() == pytest.approx(b - rate * grad_b, abs=1e-12)
    sent = replies[client]["soft_decisions"].numpy()
    z = public @ after["1.weight"].numpy().T + after["1.bias"].numpy()
    assert sent == pytest.approx(softmax(z), abs=1e-12)


def final_weights(directory: Path, **changes: object) -> dict[int, dict[str, torch.Tensor]]:
    result = perfed.run(tiny(**changes), directory)
    return {k: result.model(k).state_dict() for k in range(6)}


@pytest.mark.parametrize("batchnorm", ["private", "shared", "separate"])
def test_weight_zero_is_local_training_to_the_bit(tmp_path: Path, batchnorm: str) -> None:
    changes = {
        "models": {"architectures": ["mlp", {"name": "cnn", "batchnorm": True}]},
        "training": {"steps": 3, "batch_size": 4, "public_batchnorm": batchnorm},
    }
    ckt = final_weights(
        tmp_path / "ckt", algorithm={"name": "perfed-ckt", "clusters": 2, "weight": 0}, **changes
    )
    local = final_weights(
        tmp_path / "local", algorithm={"name": "local", "participation": "selected"}, **changes
    )
    for k in range(6):
        assert all(torch.equal(ckt[k][name], local[k][name]) for name in local[k])


def test_c_equal_m_is_each_client_against_its_nearest_peer() -> None:
    simulation = simulate(algorithm={"name": "perfed-ckt", "clusters": 3})
    sent = {k: torch.rand(30, 10).softmax(-1) for k in range(3)}
    simulation.merge(0, {k: Message(soft_decisions=s) for k, s in sent.items()})
    centroids = simulation.progress.state["centroids"]
    assert {tuple(c.flatten().tolist()) for c in centroids} == {
        tuple(s.flatten().tolist()) for s in sent.values()
    }


def test_one_cluster_teaches_the_plain_mean() -> None:
    simulation = simulate(algorithm={"name": "perfed-ckt", "clusters": 1})
    sent = {k: torch.rand(30, 10).softmax(-1) for k in range(3)}
    simulation.merge(0, {k: Message(soft_decisions=s) for k, s in sent.items()})
    mean = torch.stack(list(sent.values())).double().mean(0).float()
    assert torch.equal(simulation.progress.state["centroids"][0], mean)


def test_soft_decisions_are_probabilities_in_evaluation_mode() -> None:
    models = {"architectures": [{"name": "cnn", "batchnorm": True}]}
    simulation = simulate(models=models)
    client = working_client(simulation.population, 0, 0)
    first, second = client.soft_decisions(), client.soft_decisions()
    assert first.shape == (30, 10)
    assert torch.allclose(first.sum(1), torch.ones(30))
    assert torch.equal(first, second)  # nothing moved
    trained = client.sgd(client.weights, simulation.algorithm.objective, first)
    together = client.soft_decisions(trained)
    simulation.population.public_x = simulation.population.public_x[:1]
    alone = client.soft_decisions(trained)
    assert torch.allclose(alone[0], together[0], atol=1e-5)  # no batch statistics in it


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("mode", ["private", "shared", "separate"])
def test_how_public_batches_treat_batchnorm(mode: str) -> None:
    """Running means after one step, from the batches themselves (momentum 0.1, start 0)."""
    simulation = simulate(
        models={"architectures": [{"name": "cnn", "batchnorm": True}]},
        training={"steps": 1, "batch_size": 4, "public_batch_size": 6, "public_batchnorm": mode},
    )
    engine = simulation.population
    client = working_client(engine, 0, 0)
    seen: dict[str, torch.Tensor] = {}

    def objective(model, private, public, teacher):  # type: ignore[no-untyped-def]
        seen.update(private=private.x, public=public.x)
        return simulation.algorithm.objective(model, private, public, teacher)

    after: Weights = client.sgd(client.weights, objective, torch.full((30, 10), 0.1))
    convolution = engine.modules["cnn(batchnorm=True)"][0]
    start = client.weights.params

    def channel_means(x: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.conv2d(
            x, start["0.weight"], start["0.bias"], padding=convolution.padding
        )
        return out.mean((0, 2, 3))

    private, public = channel_means(seen["private"]), channel_means(seen["public"])
    expected = 0.1 * private
    if mode == "shared":
        expected = 0.9 * expected + 0.1 * public
    assert torch.allclose(after.buffers["1.running_mean"], expected, atol=1e-12)
    if mode == "separate":
        assert torch.allclose(after.public_buffers["1.running_mean"], 0.1 * public, atol=1e-12)
    else:
        assert after.public_buffers == {}
    used = after.public_buffers if mode == "separate" else after.buffers
    module = engine.modules["cnn(batchnorm=True)"].eval()
    logits = torch.func.functional_call(module, after.params | used, (engine.public_x,))
    assert torch.allclose(client.soft_decisions(after), logits.softmax(1), atol=1e-12)


def test_a_client_keeps_its_model_and_buffers_until_drawn_again() -> None:
    simulation = simulate(models={"architectures": [{"name": "cnn", "batchnorm": True}]})
    engine, task = simulation.population, simulation.algorithm.client_round
    message = Message(centroids=torch.full((1, 30, 10), 0.1))
    _, records = run_task(engine, task, {0: message}, 0)
    engine.commit(records)
    kept = records[0].weights.clone()
    for round in range(1, 4):  # others train meanwhile
        engine.commit(run_task(engine, task, {1: message, 2: message}, round)[1])
    now = working_client(engine, 0, 4).weights
    for part, before in zip(now, kept, strict=True):
        assert all(torch.equal(part[name], before[name]) for name in before)
    assert int(now.buffers["1.num_batches_tracked"]) == simulation.experiment.training.steps


def test_the_first_centroids_come_from_the_initial_set(tmp_path: Path) -> None:
    """S(−1) of m clients sends; with common initial models of two kinds, two matrices arrive."""
    result = perfed.run(tiny(rounds=1), tmp_path / "run")
    lines = result.directory.lines("rounds.jsonl")
    assert [line["round"] for line in lines] == [-1, 0]
    assert len(lines[0]["clients"]) == 3
    assert lines[0]["traffic"]["up_parameters"] == 3 * 30 * 10
    assert lines[0]["traffic"]["down_parameters"] == 0
    kinds = {
        line["architecture"] for line in result.directory.read_json("partition.json")["clients"]
    }
    centroids = lines[1]["traffic"]["down_parameters"] / (30 * 10)
    assert 1 <= centroids <= min(2, len(kinds))
    assert lines[1]["traffic"]["up_parameters"] == 3 * 30 * 10


def test_a_decaying_step_decays() -> None:
    training = tiny(training={"learning_rate": 0.4, "decay": 0.5}).training
    assert [training.learning_rate_at(t, 10) for t in (0, 2, 6)] == pytest.approx([0.4, 0.2, 0.1])


def test_what_the_server_says_of_its_centroids_is_logged(tmp_path: Path) -> None:
    run = perfed.run(tiny(), tmp_path / "run")
    lines = [json.loads(line) for line in (run.path / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [-1, 0, 1, 2]
    for before, line in zip([lines[0], *lines], lines, strict=False):
        now = np.array(line["server_state"]["centroid_overlap"])
        earlier = np.array(line["server_state"]["earlier_overlap"])
        np.testing.assert_allclose(np.diag(now), 1, rtol=1e-5)
        np.testing.assert_allclose(now, now.T)
        assert earlier.shape == (len(before["server_state"]["centroid_overlap"]), len(now))
        assert (earlier <= 1 + 1e-5).all()
    silent = perfed.run(tiny(algorithm="local"), tmp_path / "local")
    assert "server_state" not in (silent.path / "rounds.jsonl").read_text()
