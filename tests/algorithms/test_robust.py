"""Robust stages against their formulas in NumPy, and what must follow from them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perfed
from perfed.algorithms import robust
from perfed.algorithms.perfed_kin import PerFedKin, found_kinds
from perfed.algorithms.robust import Bounded, History, Median, Trimmed
from perfed.core.algorithm import ClientInfo, Reply
from perfed.core.channel import Channel
from perfed.core.declaration import PROBABILITIES, REALS, SAMPLES, Array, Entries, Reals
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.tree import Tree, flatten
from perfed.core.wire import Link, Together
from perfed.engines import Execution
from tests.algorithms.test_perfed_kin import ByHand, world
from tests.conftest import played, simulate, spec, tiny
from tests.runs.test_resume import StopAfter

DECLARED: Entries = {"x": Array((3,), REALS), "samples": SAMPLES}
SPOKEN: Entries = {"soft_decisions": Array(("P", "N"), PROBABILITIES), "samples": SAMPLES}
SAME = {"architectures": [{"name": "mlp", "hidden": [8]}]}


def replies(rows: np.ndarray, samples: Any = None, name: str = "x") -> list[Reply]:
    sizes = [10] * len(rows) if samples is None else [int(n) for n in samples]
    return [
        Reply(
            ClientInfo(k, "net", n),
            Message(**{name: torch.tensor(row), "samples": torch.tensor(n)}),
            float(n),
        )
        for k, (row, n) in enumerate(zip(rows, sizes, strict=True))
    ]


def gathered(stage: Any, sent: list[Reply], state: Tree | None = None) -> tuple[np.ndarray, Tree]:
    merged, kept = Link((stage,)).gather(sent, 0, state or {}, DECLARED)
    return np.stack([reply.message["x"].numpy() for reply in merged]), kept


def drawn(count: int = 7, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, 3))


@pytest.mark.parametrize("count", [6, 7])
def test_median_and_trimmed_mean_are_those_of_numpy(count: int) -> None:
    rows = drawn(count)
    assert np.allclose(gathered(Median(), replies(rows))[0], np.median(rows, 0))
    cut = int(0.3 * count)
    wanted = np.sort(rows, 0)[cut : count - cut].mean(0)
    assert np.allclose(gathered(Trimmed(share=0.3), replies(rows))[0], wanted)
    # With nothing trimmed it is the mean.
    assert np.allclose(gathered(Trimmed(share=0.0), replies(rows))[0], rows.mean(0))


def test_bounded_by_hand() -> None:
    rows = drawn()
    rows[2] = 1e20
    middle = np.median(rows, 0)
    distance = np.linalg.norm(rows - middle, axis=1)
    limit = 2 * np.median(distance)
    wanted = middle + np.minimum(1, limit / distance)[:, None] * (rows - middle)
    found = gathered(Bounded(reach=2.0), replies(rows))[0]
    assert np.allclose(found, wanted)
    assert np.linalg.norm(found - middle, axis=1).max() <= limit * (1 + 1e-9)
    near = np.delete(rows, 2, 0)  # who is near stays to the bit
    assert np.array_equal(gathered(Bounded(reach=1e9), replies(near))[0], near)


@pytest.mark.attack("false-sample-count")
def test_no_client_counts_for_many_times_the_usual_number_of_samples() -> None:
    sent = replies(drawn(), [10, 20, 30, 40, 50, 60, 10**9])
    merged, _ = Link((Bounded(reach=1e9, samples=1.5),)).gather(sent, 0, {}, DECLARED)
    for reply, size in zip(merged, [10, 20, 30, 40, 50, 60, 60], strict=True):
        told = (reply.client.samples, int(reply.message["samples"]), reply.weight)
        assert told == (size, size, size)


def test_few_clients_or_all_alike_are_left_as_they_are() -> None:
    two = drawn(2)
    alike = np.ones((5, 3))
    alike[0] = 7.0
    for stage in (Bounded(), History(), Median()):
        assert np.array_equal(gathered(stage, replies(two))[0], two)
    assert np.array_equal(gathered(Bounded(), replies(alike))[0], alike)


def test_history_of_distances_by_hand() -> None:
    """Excess is a distance over the median one, less 2; shares are exponential in its sum."""
    against, state = np.zeros(7), {}
    for round in range(3):
        rows = drawn(seed=round)
        rows[4] += 9.0
        middle = np.median(rows, 0)
        distance = np.linalg.norm(rows - middle, axis=1)
        against += np.maximum(distance / np.median(distance) - 2, 0)
        wanted = middle + np.exp(-0.5 * against)[:, None] * (rows - middle)
        found, state = gathered(History(rate=0.5), replies(rows), state)
        assert np.allclose(found, wanted, atol=1e-6)
    assert against.argmax() == 4


@pytest.mark.attack("hostile-strangers")
def test_history_of_kinship_by_hand() -> None:
    """The log-likelihood ratio of kin against stranger, round after round; a share goes to the
    mean of what is heard."""
    members = [*range(8)]
    against, state = np.zeros(8), {}
    for number in range(2):
        decisions, samples = world([0] * 8, 1.0, number)
        decisions[3] = np.random.default_rng(number).dirichlet(np.ones(5), size=len(decisions[3]))
        plain = ByHand(decisions, np.minimum(samples, np.sort(samples)[3]))  # torch's median
        kin = np.array([plain.kinship(k, members) for k in members])
        ratio = np.log(kin / (1 - kin)) - math.log(7)
        against = np.clip(against + np.clip(ratio, -2, 2), -20, 0)
        share = np.exp(against)
        middle = np.average(decisions, axis=0, weights=share)
        wanted = middle + share[:, None, None] * (decisions - middle)
        sent = replies(decisions, samples, "soft_decisions")
        merged, state = Link((History(),)).gather(sent, number, state, SPOKEN)
        found = np.stack([reply.message["soft_decisions"].numpy() for reply in merged])
        assert np.allclose(found, wanted, atol=1e-5)
    assert share[3] < 0.2
    assert np.delete(share, 3).min() > 0.9
    told = min(samples[3], np.sort(samples)[3])
    assert merged[3].client.samples == max(1, round(share[3] * told))


@pytest.mark.attack("hostile-strangers")
@pytest.mark.parametrize("largest_only", [False, True])
def test_a_small_group_that_agrees_counts_for_little_if_only_the_largest_is_heard(
    largest_only: bool,
) -> None:
    """Three of nine agree on other labels, and claim much. What they say of public samples stays,
    for who keeps a table for each kind; the others lose nothing."""
    declared = SPOKEN | {"gains": Array((2,), Reals(-5, 5))}
    state: Tree = {}
    for number in range(3):
        decisions, _ = world([0] * 6 + [1] * 3, 1.0, number)
        sent = [
            replace(reply, message=Message(**reply.message, gains=torch.tensor(gains)))
            for reply, gains in zip(
                replies(decisions, [10] * 6 + [1000] * 3, "soft_decisions"),
                [[0.5, 0.1]] * 6 + [[5.0, 5.0]] * 3,
                strict=True,
            )
        ]
        stage = History(largest_only=largest_only)
        merged, state = Link((stage,)).gather(sent, number, state, declared)
    for reply, heard in zip(sent[:6], merged[:6], strict=True):
        assert heard.client.samples >= 9
        assert torch.allclose(heard.message["gains"], reply.message["gains"], atol=0.05)
    for reply, heard in zip(sent[6:], merged[6:], strict=True):
        said, now = (r.message["soft_decisions"] for r in (reply, heard))
        assert torch.allclose(said, now, atol=0.02)
        assert heard.client.samples == (1 if largest_only else 1000)
        claimed = float(heard.message["gains"].max())
        assert claimed < 0.6 if largest_only else claimed == 5


def test_in_a_small_group_nobody_vouches_for_anybody() -> None:
    """Who was found to lie is trusted again by what agrees in the largest group alone."""
    decisions, samples = world([0] * 6 + [1] * 3)
    before = {"trust": {str(client): torch.tensor(-1.0) for client in range(9)}}
    sent = replies(decisions, samples, "soft_decisions")
    trust = History().gather(sent, Together(0, 3, 0, SPOKEN, False), before)[1]["trust"]
    assert all(float(trust[str(client)]) > -1 for client in range(6))
    assert all(float(trust[str(client)]) == -1 for client in range(6, 9))


def test_what_speaks_against_a_client_has_an_end() -> None:
    trust = {"3": torch.tensor(-19.0)}
    for speaks, wanted in ((-2.0, -20.0), (-9.0, -20.0), (9.0, -18.0)):
        trust = History()._added(trust, torch.tensor([speaks]), {"3": 0}, {"3": 0})
        assert float(trust["3"]) == wanted


@pytest.mark.parametrize("seed", [0, 1, 15])
def test_who_is_put_apart_gains_by_it_on_both_sides(seed: int) -> None:
    """PerFed-Kin parts a quiet kind from a loud one that has nothing to gain. A client that is put
    apart here may not be heard, so that is not enough."""
    decisions, _ = world([0] * 14 + [1] * 4, 3.0, seed)
    samples = [80.0] * 14 + [4.0] * 4
    bank = {
        str(k): {"said": torch.tensor(decisions[k]), "samples": torch.tensor(samples[k]).double()}
        for k in range(18)
    }
    said, kind = robust.heard(bank)
    assert len(found_kinds(said, PerFedKin().standard_errors).unique()) == 2
    assert len(kind.unique()) == 1


def test_of_two_groups_as_large_both_are_heard() -> None:
    """Which of them is the first says nothing about who lies."""
    stage, state = History(largest_only=True), dict[str, Any]()
    for round in range(4):
        decisions, _ = world([0, 1] * 4, noise=0.3, seed=round)
        sent = replies(decisions, [100] * 8, "soft_decisions")
        heard, state = Link((stage,)).gather(sent, round, state, SPOKEN)
        assert [reply.client.samples for reply in heard] == [100] * 8


@pytest.mark.parametrize("name", ["perfed-kin", "perfed-ckt", "hypcluster", "fedproto"])
def test_a_median_is_refused_where_no_mean_is_taken(name: str) -> None:
    for stage in ("median", "trimmed"):
        with pytest.raises(ConfigError, match=rf"^wire\[0\]: the server of '{name}' takes no mean"):
            tiny(algorithm=spec(name), wire=[stage])
    assert tiny(algorithm=spec(name), wire=["history", "bounded"])


@pytest.mark.parametrize("name", ["fedavg", "ditto", "fedmd"])
def test_where_all_say_the_same_a_median_changes_nothing(name: str) -> None:
    """Three clients with the same answer: the median is the mean."""
    simulation = simulate(algorithm=spec(name), models=SAME, wire=["median"])
    simulation.begin(Channel())
    model = simulation.population.initial_weights(simulation.population.architectures[0], 0)
    sent = {"fedmd": Message(logits=torch.randn(30, 10))}.get(name, Message(model=model, samples=5))
    simulation.merge(0, dict.fromkeys((0, 1, 2), sent))
    with_median = flatten(simulation.progress.state)
    plain = simulate(algorithm=spec(name), models=SAME)
    plain.begin(Channel())
    plain.merge(0, dict.fromkeys((0, 1, 2), sent))
    for path, tensor in flatten(plain.progress.state).items():
        torch.testing.assert_close(with_median[path], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.attack("huge-weights")
def test_weights_of_1e20_do_not_end_a_run_with_a_robust_stage() -> None:
    hostile = {"name": "scaled", "strength": 1e20, "share": 0.34}
    for stage in ("bounded", "median"):
        run = played(
            2, algorithm="fedavg", hostile=hostile, models=SAME, wire=[stage], clients_per_round=6
        )
        largest = max(float(t.abs().max()) for t in flatten(run.progress.state).values())
        assert largest < 10


def test_a_history_is_resumed_to_the_bit(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "algorithm": "perfed-kin",
        "wire": ["history", "bounded"],
        "hostile": {"name": "random", "share": 0.34},
        "clients_per_round": 5,
    }
    whole = perfed.run(tiny(**changes), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        perfed.run(
            tiny(**changes),
            tmp_path / "cut",
            callbacks=[StopAfter(2)],
            how=Execution(checkpoint_seconds=0),
        )
    perfed.resume(tmp_path / "cut")
    for name in ("rounds.jsonl", "clients.jsonl"):
        assert (whole.path / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


@pytest.mark.attack("huge-class-means")
@pytest.mark.parametrize("name", ["fedproto", "fedtgp", "fedgh"])
def test_class_means_of_any_size_do_not_end_a_run(name: str) -> None:
    """Those of 1e30 are brought to the bound that is declared, and a run goes on with less, too."""
    for strength in (1e30, 1e4):
        hostile = {"name": "scaled", "strength": strength, "share": 0.34}
        run = played(3, algorithm=spec(name), models=SAME, hostile=hostile, clients_per_round=6)
        assert not run.refused
        largest = max(float(t.abs().max()) for t in flatten(run.progress.state).values())
        assert largest < 1e3
