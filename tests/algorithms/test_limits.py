"""Limit cases, exact: each method with its own idea switched off is the method it came from."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perfed
from perfed.algorithms.fedfomo import FedFomo, distance_between, mix
from perfed.core.channel import Channel
from perfed.core.message import Message
from perfed.core.streams import stream_key
from perfed.core.tree import Weights
from perfed.engines.base import Sgd
from perfed.runs.simulation import Simulation
from tests.conftest import MLP_50, played, simulate, spec
from tests.engines.clients import run_task, working_client

MODELS = {"architectures": [MLP_50, {"name": "cnn", "batchnorm": True}]}
LOCAL = {"name": "local", "participation": "selected"}


def after(rounds: int, algorithm: Any, **changes: Any) -> Simulation:
    return played(rounds, algorithm=algorithm, **({"models": MODELS} | changes))


def models(simulation: Simulation, kind: str, round: int = 3) -> list[dict[str, torch.Tensor]]:
    messages = simulation.evaluation_messages(round)
    found = []
    for client, message in messages.items():
        model = simulation.population.models(client, message, round)[kind]
        found.append(model.params | model.buffers)
    return found


def assert_equal(left: list[dict], right: list[dict]) -> None:
    for one, other in zip(left, right, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "fedprox", "proximal": 0},
        {"name": "hypcluster", "clusters": 1},
        {"name": "per-fedavg", "inner_rate": 0},
        {"name": "feddf", "steps": 0},
        {"name": "fedavg-ft"},  # its global part
        {"name": "fedavg-ft", "tuning_steps": 0},
        {"name": "ditto"},  # its global part
    ],
)
def test_these_are_fedavg_to_the_bit(algorithm: dict) -> None:
    reference = models(after(3, "fedavg"), "global")
    own = algorithm["name"] == "hypcluster" or algorithm.get("tuning_steps") == 0
    kind = "personal" if own else "global"
    assert_equal(models(after(3, algorithm), kind), reference)


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ({"name": "ditto", "weight": 0}, {}),
        # Nobody else has sent anything, so its own model is the only candidate.
        ({"name": "fedfomo"}, {"clients": 1, "clients_per_round": 1, "partition": "iid"}),
    ],
)
def test_these_are_local_training_to_the_bit(algorithm: dict, changes: dict) -> None:
    reference = models(after(3, LOCAL, **changes), "personal")
    assert_equal(models(after(3, algorithm, **changes), "personal"), reference)


@pytest.mark.parametrize(
    ("algorithm", "base"),
    [
        ({"name": "fedprox"}, "fedavg"),
        ({"name": "scaffold"}, "fedavg"),
        ({"name": "feddf"}, "fedavg"),
        ({"name": "per-fedavg"}, "fedavg"),
        ({"name": "ditto"}, LOCAL),
        ({"name": "fedfomo"}, LOCAL),
        ({"name": "perfed-ckt", "clusters": 2}, LOCAL),
    ],
)
def test_no_default_turns_a_method_into_another(algorithm: dict, base: Any) -> None:
    """A shared μ=0 default has made FedProx FedAvg and Ditto local training elsewhere."""
    first, second = (after(3, a, models={"architectures": ["mlp"]}) for a in (algorithm, base))
    kind = "global" if base == "fedavg" else "personal"
    largest = max(
        float((one[name] - other[name]).abs().max())
        for one, other in zip(models(first, kind), models(second, kind), strict=True)
        for name in one
    )
    assert largest > 1e-4


@pytest.mark.usefixtures("float64")
def test_scaffolds_control_variates_stay_the_mean_of_the_clients() -> None:
    """c = 1/N Σ c_i over all N clients of an architecture, after any rounds (paper, eq. 5)."""
    simulation = after(5, "scaffold")
    engine = simulation.population
    for architecture, count in Counter(simulation.population.architectures).items():
        control = simulation.progress.state[architecture]["control"]
        drawn = [
            engine.records[k].state["control"]
            for k in range(6)
            if engine.architectures[k] == architecture and k in engine.records
        ]
        for name, tensor in control.items():
            total = sum(own[name] for own in drawn)
            assert torch.allclose(tensor, total / count, atol=1e-12)
        assert set(control) == set(engine.initial_weights(architecture).params)  # no buffers


@pytest.mark.usefixtures("float64")
def test_scaffold_on_identical_clients_is_fedavg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all clients make the same steps, c_i = c, and the correction is zero in effect."""

    def identical(algorithm: str) -> Simulation:
        simulation = simulate(
            algorithm=algorithm, clients_per_round=6, models={"architectures": ["mlp"]}
        )
        splits = simulation.federation.splits
        alike = [replace(split, train=splits[0].train) for split in splits]
        simulation.population.federation = replace(simulation.federation, splits=alike)
        # And the same mini-batches: every client is client 0 to the streams.
        monkeypatch.setattr(
            Sgd, "_key", lambda self, what: stream_key(0, what, 0, self.client.round)
        )
        simulation.begin(Channel())
        for round in range(4):
            simulation.play_round(round, Channel())
        return simulation

    scaffold, fedavg = identical("scaffold"), identical("fedavg")
    for one, other in zip(models(scaffold, "global"), models(fedavg, "global"), strict=True):
        assert all(torch.allclose(one[name], other[name], atol=1e-10) for name in one)
    control = scaffold.progress.state["mlp"]["control"]
    assert max(float(t.abs().max()) for t in control.values()) > 1e-3  # yet they are not zero


def test_fedfomo_sent_only_its_own_model_is_local_training() -> None:
    """Shares of one and the same model: it, up to the rounding of their sum."""
    simulation = simulate(algorithm="fedfomo", models=MODELS)
    engine, algorithm = simulation.population, simulation.algorithm
    local = simulate(algorithm=LOCAL, models=MODELS)
    reference = local.population
    for round in range(4):
        own = working_client(engine, 2, round).weights
        message = Message(candidates={"0": own, "1": own})
        engine.commit(run_task(engine, algorithm.client_round, {2: message}, round)[1])
        task = local.algorithm.client_round
        reference.commit(run_task(reference, task, {2: Message()}, round)[1])
    for mine, theirs in zip(engine.records[2].weights, reference.records[2].weights, strict=True):
        assert all(torch.allclose(mine[name], theirs[name], atol=1e-6) for name in theirs)


def test_fedfomo_ignores_candidates_that_do_not_help() -> None:
    simulation = simulate(algorithm="fedfomo", models={"architectures": ["mlp"]})
    engine, algorithm = simulation.population, FedFomo()
    weigh, keeps_trained = algorithm.weigh, replace(algorithm, fallback="trained").weigh
    good = engine.initial_weights("mlp")
    bad = good._replace(params={n: t + 3 * torch.randn_like(t) for n, t in good.params.items()})
    client = working_client(engine, 0, 0)
    worse, better = client.losses([bad, good], "validation")
    assert worse > better
    assert weigh(client, good, [bad, bad, bad]).tolist() == [1, 0, 0, 0]  # back to where it was
    assert keeps_trained(client, good, [bad, bad, bad]).tolist() == [0, 1, 0, 0]
    assert weigh(client, bad, [bad, good]).tolist() == [0, 0, 1]
    assert weigh(client, bad, [good, bad]).tolist() == [0, 1, 0]


def test_fedfomo_pairs_tensors_by_name_and_rounds_counts() -> None:
    """What came over a network may come in another order."""
    one = Weights({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}, {"n": torch.tensor(3)})
    other = Weights(
        {"b": torch.tensor([7.0]), "a": torch.tensor([1.0, 5.0])}, {"n": torch.tensor(4)}
    )
    assert float(distance_between(one, other)) == 5.0
    mixed = mix([one, other], torch.tensor([0.25, 0.75]))
    assert mixed.params["a"].tolist() == [1.0, 4.25]
    assert mixed.params["b"].tolist() == [6.0]
    assert mixed.buffers["n"].item() == 4
    assert mixed.buffers["n"].dtype == torch.int64
    one, other = (
        Weights({"a": torch.tensor([v], dtype=torch.float64)}, {}) for v in (1 / 3, 2 / 3)
    )
    doubled = mix([one, other], torch.tensor([0.5, 0.5]))  # shares have a loss's precision
    assert doubled.params["a"].item() == pytest.approx(0.5, abs=1e-15)


def test_fedfomo_explores_less_and_less_and_then_follows_affinity() -> None:
    """Each place is given at random with chance ε, else to the best liked that is left."""
    simulation = simulate(algorithm={"name": "fedfomo", "candidates": 2})
    bank = {"mlp(hidden=8)": {str(k): None for k in range(5)}}
    state = {"bank": bank, "affinity": {"9": {"3": torch.tensor(0.7), "1": torch.tensor(0.2)}}}
    info = perfed.core.algorithm.ClientInfo(9, "mlp(hidden=8)", 5)

    def shares(round: int) -> tuple[float, float]:
        chosen = []
        for seed in range(800):
            server = perfed.core.algorithm.Server(seed, round, {}, None, {}, None)  # type: ignore[arg-type]
            chosen.append(simulation.algorithm.choose(server, state, info))  # type: ignore[attr-defined]
        firsts = np.mean([senders[0] == "3" for senders in chosen])
        both = np.mean([set(senders) == {"1", "3"} for senders in chosen])
        return float(firsts), float(both)

    first, both = shares(0)
    assert first == pytest.approx(0.7 + 0.3 / 5, abs=0.05)
    # 3 then 1, or 1 then 3: the first at random, the second greedy or at random among four.
    assert both == pytest.approx(0.76 * (0.7 + 0.3 / 4) + 0.06 * (0.7 + 0.3 / 4), abs=0.06)
    assert shares(6) == (1.0, 1.0)  # ε = 0.3 − 6·0.05 = 0


def test_fedfomo_keeps_an_architectures_models_until_it_answers_again() -> None:
    simulation = simulate(algorithm="fedfomo", models=MODELS)
    engine = simulation.population
    mlp, cnn = (engine.architectures.index(a) for a in ("mlp(hidden=50)", "cnn(batchnorm=True)"))
    for round, client in enumerate((mlp, cnn)):
        model = working_client(engine, client, 0).weights
        simulation.merge(round, {client: Message(model=model, amounts=torch.zeros(0))})
    bank = simulation.progress.state["bank"]
    assert set(bank["mlp(hidden=50)"]) == {str(mlp)}
    assert set(bank["cnn(batchnorm=True)"]) == {str(cnn)}


def test_feddf_students_approach_the_ensemble() -> None:
    """Also across architectures: every student's public predictions move towards the teacher."""
    simulation = after(2, {"name": "feddf", "steps": 0})
    server = simulation.server(9)
    teacher = torch.rand(30, 10).mul(4).softmax(1)
    longer = perfed.algorithms.build({"name": "feddf", "steps": 200, "rate": 0.01})

    def divergence(architecture: str, weights: Any) -> float:
        client = working_client(
            simulation.population, simulation.population.architectures.index(architecture), 0
        )
        said = client.soft_decisions(weights).log()
        return float(torch.nn.functional.kl_div(said, teacher, reduction="batchmean"))

    for architecture, student in simulation.progress.state.items():
        taught = longer.distil(server, architecture, student, teacher)  # type: ignore[attr-defined]
        assert divergence(architecture, taught) < 0.5 * divergence(architecture, student)


def test_feddf_with_a_single_answer_is_fedavg_to_the_bit() -> None:
    """A model cannot teach itself: what Adam would follow is the rounding of its own output."""
    alone = {"clients": 1, "clients_per_round": 1, "partition": "iid"}
    reference = models(after(2, "fedavg", **alone), "global")
    assert_equal(models(after(2, {"name": "feddf", "steps": 3}, **alone), "global"), reference)


def test_hypclusters_empty_cluster_stays_as_it_was() -> None:
    simulation = simulate(algorithm={"name": "hypcluster", "clusters": 3})
    state = simulation.progress.state = simulation.algorithm.start(simulation.server(-1))
    architecture = simulation.population.architectures[0]
    other = state[architecture]["1"].clone()
    simulation.merge(0, {0: Message(model=other, cluster=torch.tensor(2), samples=5)})
    now = simulation.progress.state[architecture]
    assert now["0"] is state[architecture]["0"]
    assert now["1"] is state[architecture]["1"]
    assert torch.equal(now["2"].params["1.weight"], other.params["1.weight"])


def test_hypclusters_models_start_different_and_are_chosen_by_training_loss() -> None:
    simulation = simulate(algorithm={"name": "hypcluster", "clusters": 3})
    state = simulation.progress.state = simulation.algorithm.start(simulation.server(-1))
    weights = [
        state[simulation.population.architectures[0]][str(c)].params["1.weight"] for c in range(3)
    ]
    assert not torch.equal(weights[0], weights[1])
    # Labels of the test part are made useless; the choice must not change.
    message = simulation.evaluation_messages(0)[0]
    before = simulation.population.models(0, message, 0)["personal"].params["1.weight"]
    test = torch.as_tensor(simulation.federation.splits[0].test)
    simulation.population.y[test] = (simulation.population.y[test] + 5) % 10
    after_ = simulation.population.models(0, message, 0)["personal"].params["1.weight"]
    assert torch.equal(before, after_)


@pytest.mark.parametrize("name", list(perfed.algorithms))
def test_no_algorithm_looks_at_test_data(name: str, tmp_path: Path) -> None:
    """Test labels changed, everything the algorithm does stays the same."""

    def trained(spoil: bool) -> list[dict[str, torch.Tensor]]:
        simulation = simulate(algorithm=spec(name), models=MODELS)
        if spoil:
            for split in simulation.federation.splits:
                where = torch.as_tensor(split.test)
                simulation.population.y[where] = (simulation.population.y[where] + 1) % 10
        simulation.begin(Channel())
        for round in range(3):
            simulation.play_round(round, Channel())
        messages = simulation.evaluation_messages(3)
        evaluated = [
            model
            for k, m in messages.items()
            for model in simulation.population.models(k, m, 3).values()
        ]
        return [model.tensors() for model in evaluated]

    assert_equal(trained(True), trained(False))
