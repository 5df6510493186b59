"""Hostile clients: who they are, what they send, and that all numbers told are of the others."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perfed
from perfed.core.channel import Channel
from perfed.core.declaration import Known
from perfed.core.errors import ConfigError, Diverged, RunError
from perfed.core.hostile import Attack, Attacker, attacks
from perfed.core.message import Message
from perfed.core.selection import evaluated_clients
from perfed.core.tree import Weights, flatten
from perfed.runs.result import headline_kind, hostile_words
from perfed.runs.simulation import Simulation
from perfed.runs.study import honest_accuracies, record_of
from perfed.runs.tables import standing
from tests.conftest import SEQUENTIAL, STACKED, played, simulate, spec, tiny
from tests.engines.test_stacked import MIXED

HALF = {"share": 0.5}
SAME = {"architectures": [{"name": "mlp", "hidden": [8]}]}


def attacker(client: int = 0, round: int = 3, **received: Any) -> Attacker:
    weights = Weights({"0.weight": torch.zeros(4, 5), "2.weight": torch.zeros(3, 4)}, {})
    known = Known({"P": 6, "N": 3}, 40, lambda network: weights, received=Message(**received))
    return Attacker(1, client, round, known)


def rows(seed: int = 0) -> torch.Tensor:
    drawn = np.random.default_rng(seed).dirichlet(np.ones(3), size=6)
    return torch.tensor(drawn, dtype=torch.float32)


def test_a_larger_share_has_the_hostile_clients_of_a_smaller_one() -> None:
    few, many = (perfed.core.hostile.Random(share=s).clients(40, seed=7) for s in (0.1, 0.3))
    assert (few.sum(), many.sum()) == (4, 12)
    assert not (few & ~many).any()
    assert (few != perfed.core.hostile.Random(share=0.1).clients(40, seed=8)).any()


def test_what_each_attack_makes_of_soft_decisions() -> None:
    honest, who = rows(), attacker()
    said = {name: attacks[name]().rows(honest, who, "x") for name in attacks}
    flipped = said["flipped"]
    assert torch.equal(flipped.sort(1).values, honest.sort(1).values)
    assert torch.equal(flipped.argmax(1), honest.argmin(1))
    assert torch.equal(said["worst"], torch.eye(3)[honest.argmin(1)])
    assert torch.equal(said["scaled"], torch.eye(3)[honest.argmax(1)])
    assert len(said["constant"].unique(dim=0)) == 1
    renamed = who.renaming(3)
    assert (renamed != torch.arange(3)).all()
    assert torch.equal(said["confusing"], honest[:, renamed])
    assert torch.allclose(said["random"].sum(1), torch.ones(6))
    # What the server told is believed before one's own model.
    told = attacker(centroids=torch.stack([rows(5), rows(6)]))
    assert torch.equal(
        attacks["worst"]().rows(honest, told, "x"), torch.eye(3)[(rows(5) + rows(6)).argmin(1)]
    )


def test_colluders_say_the_same_and_others_do_not() -> None:
    for name, same in (("colluding", True), ("random", False)):
        attack = attacks[name]()
        one, other = (attack.rows(rows(k), attacker(k, k), "x") for k in (1, 2))
        assert torch.equal(one, other) is same
        again = attack.rows(rows(1), attacker(1, 1), "x")
        assert torch.equal(one, again)  # addressed, not consumed


def test_what_attacks_make_of_weights() -> None:
    sent, own = torch.randn(3, 4), torch.randn(3, 4)
    who = attacker()
    made = {
        name: attacks[name]().parameter(own, sent, who, "model/params/2.weight")
        for name in ("flipped", "scaled", "worst", "constant", "confusing")
    }
    assert torch.allclose(made["flipped"] - sent, sent - own)
    assert torch.allclose(made["scaled"] - sent, 10 * (own - sent), atol=1e-5)
    assert torch.allclose(made["worst"] - sent, 5 * (sent - own), atol=1e-5)
    assert not made["constant"].any()
    # As a model would be that was trained with exchanged labels: the last layer, and no other.
    assert torch.equal(made["confusing"], own[who.renaming(3)])
    body = attacks["confusing"]().parameter(own, sent, who, "model/params/0.weight")
    assert torch.equal(body, own)


@pytest.mark.attack("hostile-answers")
@pytest.mark.parametrize(
    ("name", "attack"),
    [
        *zip(
            sorted(perfed.algorithms),
            cycle(sorted(set(attacks) - {"silent"})),
            strict=False,
        )
    ],
)
def test_in_every_method_they_send_what_is_admitted(name: str, attack: str) -> None:
    """So nobody is refused, and the run goes on."""
    hostile = {"name": attack, "samples": 100.0} | HALF
    simulation = played(2, algorithm=spec(name), hostile=hostile, models=SAME)
    assert not simulation.refused
    assert sum(simulation.federation.partition_facts["hostile"]) == 3


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["perfed-kin", "fedavg"])
def test_engines_agree_on_what_hostile_clients_send(name: str) -> None:
    """In float64: a rounding may decide which class is the least likely."""
    changes: dict[str, Any] = {
        "algorithm": spec(name),
        "hostile": {"name": "worst"} | HALF,
        "wire": ["history", "bounded"],
        "models": MIXED,
        "clients_per_round": 6,
    }
    one, other = (played(2, how=how, **changes) for how in (SEQUENTIAL, STACKED))
    states = [flatten(s.progress.state) | flatten(s.progress.link) for s in (one, other)]
    assert states[0].keys() == states[1].keys()
    for path, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][path], rtol=1e-6, atol=1e-6)


@pytest.mark.ray
def test_workers_of_ray_know_who_is_hostile() -> None:
    from tests.conftest import RAY

    changes: dict[str, Any] = {"hostile": {"name": "colluding"} | HALF, "clients_per_round": 6}
    states = []
    for how in (SEQUENTIAL, RAY):
        simulation = played(1, how=how, **changes)
        states.append(simulation.progress.state["centroids"])
        simulation.engine.close()
    torch.testing.assert_close(*states, rtol=1e-3, atol=1e-3)


def test_a_false_number_of_samples_is_what_the_server_knows() -> None:
    simulation = simulate(
        algorithm="fedavg", hostile={"name": "random", "samples": 100.0} | HALF, models=SAME
    )
    hostile = simulation.federation.partition_facts["hostile"]
    sizes = simulation.federation.train_sizes
    told = [simulation.info(client).samples for client in range(6)]
    assert told == [int(100 * n if liar else n) for n, liar in zip(sizes, hostile, strict=True)]
    simulation.begin(Channel())
    simulation.play_round(0, Channel())
    assert not simulation.refused


def test_silent_clients_are_as_if_they_were_not_there() -> None:
    simulation = simulate(hostile={"name": "silent"} | HALF, clients_per_round=6)
    simulation.begin(Channel())
    heard: list[int] = []
    merge = simulation.merge
    simulation.merge = lambda r, m: (heard.extend(m), merge(r, m))  # type: ignore[method-assign,func-returns-value]
    simulation.play_round(0, Channel())
    assert heard == np.flatnonzero(~simulation.federation.partition_facts["hostile"]).tolist()


@pytest.mark.parametrize("algorithm", [{"name": "perfed-ckt", "clusters": 1}, "perfed-evidence"])
def test_where_nobody_says_anything_first_the_run_ends_in_one_line(algorithm: Any) -> None:
    silent = {"hostile": {"name": "silent"} | HALF, "clients_per_round": 1}
    tried = (simulate(algorithm=algorithm, seed=seed, **silent) for seed in range(20))
    simulation = next(s for s in tried if s.federation.partition_facts["hostile"][s.select(-1)[0]])
    with pytest.raises(
        RunError, match=r"no first message is admitted; client \d+: it says nothing"
    ):
        simulation.begin(Channel())


def test_means_are_of_honest_clients_and_all_are_written_down(tmp_path: Path) -> None:
    result = perfed.run(tiny(hostile={"name": "worst"} | HALF, rounds=1), tmp_path / "run")
    hostile = np.array(result.directory.read_json("partition.json")["hostile"])
    frame = result.per_client()
    assert frame["hostile"].tolist() == hostile.tolist()
    honest = frame[~frame["hostile"]]["test_accuracy"].mean()
    assert honest != frame["test_accuracy"].mean()
    assert result.summary["models"]["personal"]["last"]["test_accuracy"] == pytest.approx(honest)
    assert "3 clients are hostile" in result.table()


def test_a_comparison_ranks_and_tests_honest_clients_and_says_so(tmp_path: Path) -> None:
    experiment = tiny(hostile={"name": "worst"} | HALF, rounds=1)
    methods = ["local", "fedavg", "perfed-ckt"]
    found = perfed.compare(perfed.Comparison(experiment, methods, [0]), tmp_path / "all")
    stand = standing(found.results)
    reached = {run.experiment.algorithm.label(): run.summary["models"] for run in found.results}
    means = {
        label: models[headline_kind(models)]["last"]["test_accuracy"]
        for label, models in reached.items()
    }
    assert stand is not None
    assert means[stand.best] == max(means.values())
    record = record_of(found.results[0].path)
    assert len(honest_accuracies(record, "personal")) == 3 < len(record["clients"]["hostile"])
    assert "3 clients are hostile; all means are of the others." in found.table()
    page = found.report().read_text("utf-8")
    assert "hostile clients: worst" in page
    assert "3 clients are hostile" in page
    assert "mean over all honest clients" in page


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ([], ""),
        ([[True, False]], "1 client is hostile; all means are of the others."),
        ([[True, False], [True, True]], "1 to 2 clients are hostile; all means are of the others."),
    ],
)
def test_how_many_are_hostile_is_said_in_words(masks: list[list[bool]], words: str) -> None:
    assert hostile_words(masks, some_evaluated=False) == words


def test_where_some_clients_are_evaluated_some_of_these_are_honest(tmp_path: Path) -> None:
    some = [
        tiny(hostile={"name": "worst"} | HALF, rounds=1, evaluate_clients=1, seed=seed)
        for seed in range(10)
    ]

    def honest(experiment: perfed.Experiment) -> bool:
        (client,) = evaluated_clients(6, 1, experiment.seed)
        return not experiment.federation().partition_facts["hostile"][client]

    result = perfed.run(next(filter(honest, some)), tmp_path / "run")
    assert "1 of 6 clients are evaluated.\n0 of the evaluated clients are hostile" in result.table()
    with pytest.raises(ConfigError, match="evaluate_clients: none of the 1 that are eval"):
        Simulation(next(experiment for experiment in some if not honest(experiment)))


def test_with_nobody_hostile_nothing_changes() -> None:
    plain = played(2).progress.state["centroids"]
    nobody = played(2, hostile={"name": "worst", "share": 0.0}).progress.state["centroids"]
    assert torch.equal(plain, nobody)


@pytest.mark.parametrize(
    ("hostile", "says"),
    [
        ({"name": "worst", "share": 1.0}, "hostile.share: no client is left that is honest"),
        ({"name": "worst", "share": 2}, "hostile.share"),
        ("liar", "unknown attack 'liar'"),
    ],
)
def test_bad_options_are_said_in_one_line(hostile: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")) as caught:
        tiny(hostile=hostile)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"evaluate_clients": 1, "hostile": {"name": "worst", "share": 0.8}},
            "evaluate_clients: none of the 1 that are evaluated is honest",
        ),
        (
            {
                "clients": 40,
                "partition": {"name": "dirichlet", "minimum": 200, "repair": False},
                "hostile": {"name": "worst", "share": 0.9},
            },
            "hostile.share: none of the 2 clients that are left is honest",
        ),
    ],
)
def test_somebody_who_is_evaluated_must_be_honest(changes: Any, says: str) -> None:
    """There are no means of nobody. Who is left and who is evaluated follows from the seed."""
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        simulate(algorithm="local", **changes)


@pytest.mark.parametrize(
    ("algorithm", "attack"), [("perfed-kin", "worst"), ("perfed-evidence", "confusing")]
)
def test_a_hostile_client_whose_training_diverges_ends_the_run_in_one_line(
    algorithm: str, attack: str
) -> None:
    training = {"steps": 2, "batch_size": 8, "learning_rate": 1e30}
    with pytest.raises(Diverged, match="is not finite"):
        played(3, algorithm=algorithm, training=training, hostile={"name": attack} | HALF)


def test_an_attack_of_ones_own_is_a_class() -> None:
    assert isinstance(tiny(hostile={"name": f"{__name__}:Quiet"}).hostile, Quiet)


class Quiet(Attack):
    """Nothing but the guess that all classes are alike."""

    def rows(self, rows: torch.Tensor, who: Attacker, path: str) -> torch.Tensor:
        return torch.full_like(rows, 1 / rows.shape[-1])
