"""Private messages: what speaks is trained with noise, and nothing else is said."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softmax

import perfed
from perfed.core.algorithm import Algorithm, Parts, Private
from perfed.core.channel import Channel
from perfed.core.declaration import Messages
from perfed.core.errors import ConfigError
from perfed.core.gradients import Noise, clipped_gradient
from perfed.core.message import Message
from perfed.core.streams import gaussian, random_bits, stream_key, substream
from perfed.core.tree import flatten
from perfed.engines import Execution
from perfed.engines.base import STEPS
from perfed.engines.speaker import SPEAKER, Speaker
from perfed.runs.simulation import Simulation, resume_run
from tests.conftest import MLP_50, RAY, SEQUENTIAL, STACKED, simulate, spec
from tests.engines.clients import working_client

PRIVACY = {"noise": 0.7, "clip": 0.5, "count_noise": 4.0}
TRAINING = {"steps": 3, "batch_size": 6, "public_batch_size": 8, "learning_rate": 0.1}
COVERED = sorted(name for name in perfed.algorithms if not perfed.algorithms[name].not_private)
REFUSED = sorted(set(perfed.algorithms) - set(COVERED))


def private(how: Execution = SEQUENTIAL, **changes: Any) -> Simulation:
    usual = {"privacy": PRIVACY, "training": TRAINING, "models": [MLP_50, "cnn"]}
    return simulate(how, **(usual | changes))


def played(simulation: Simulation, rounds: int = 2) -> list[dict[str, Tensor]]:
    """What clients sent, by round."""
    sent: list[dict[str, Tensor]] = []
    said = simulation._sent

    def listening(round: int, outcomes: Any) -> Any:
        replies = said(round, outcomes)
        sent.append(flatten({str(k): dict(m.arrays) for k, m in replies.items()}))
        return replies

    simulation._sent = listening  # type: ignore[method-assign]
    channel = Channel()
    simulation.begin(channel)
    for round in range(rounds):
        simulation.play_round(round, channel)
    return sent


def records_of(simulation: Simulation) -> dict[str, Tensor]:
    simulation.engine.collect(simulation.population)
    return flatten({str(k): r.tree() for k, r in simulation.population.records.items()})


@pytest.mark.usefixtures("float64")
def test_a_private_round_by_hand() -> None:
    """PerFed-CKT: samples drawn one by one, gradients clipped one by one, noise on their sum; the
    lesson on public samples as it is."""
    simulation = private(algorithm={"name": "perfed-ckt", "clusters": 1}, models=["cnn"])
    population = simulation.population
    home = working_client(population, 0, 0)
    speaker, module = Speaker(home), population.modules["cnn"]
    teacher = torch.rand(len(population.public_x), 10).softmax(1)
    params = {name: t.clone() for name, t in speaker.weights.params.items()}
    count, steps, expected = population.train_size(0), TRAINING["steps"], TRAINING["batch_size"]
    assert population.told_size(0) != count
    rate = expected / population.told_size(0)
    samples = population.positions(0, "train")

    def key(what: str) -> Tensor:
        return torch.tensor(stream_key(population.secret, f"{what}/0", 0, 0))

    drawn = random_bits(key("private-batches"), steps * count).view(steps, count) < rate * 2**63
    public = random_bits(key("public-batches"), steps * 8).view(steps, 8) % len(teacher)
    noise = random_bits(key("noise"), steps)
    for step in range(steps):
        total = {name: torch.zeros_like(t) for name, t in params.items()}

        def gradient(loss: Any, at: dict[str, Tensor]) -> dict[str, Tensor]:
            leaves = {name: t.detach().requires_grad_() for name, t in at.items()}
            said = torch.func.functional_call(module, leaves, loss[0])
            return dict(zip(leaves, torch.autograd.grad(loss[1](said), [*leaves.values()])))  # noqa: B905

        for where in samples[drawn[step]]:
            x, y = population.x[where][None], population.y[where][None]
            own = gradient(((x,), lambda said, y=y: cross_entropy(said, y)), params)
            norm = math.sqrt(sum(float(g.square().sum()) for g in own.values()))
            for name, g in own.items():
                total[name] += g * min(1.0, PRIVACY["clip"] / norm)
        lesson = gradient(
            (
                (population.public_x[public[step]],),
                lambda said, step=step: (
                    2.0 * (teacher[public[step]] - softmax(said, 1)).square().sum(1).mean()
                ),
            ),
            params,
        )
        for number, name in enumerate(sorted(params)):
            draws = gaussian(substream(noise[step], number), params[name].shape)
            noised = total[name] + PRIVACY["noise"] * PRIVACY["clip"] * draws
            params[name] = params[name] - 0.1 * (noised / expected + lesson[name])
    algorithm: Any = simulation.algorithm
    trained = speaker.sgd(speaker.weights, algorithm.objective, teacher)
    for name, tensor in params.items():
        torch.testing.assert_close(trained.params[name], tensor, rtol=1e-9, atol=1e-9)
    assert speaker.spent == steps


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "name",
    [
        "apfl",
        "cfd",
        "ditto",
        "fedavg",
        "fedkd",
        "fedmd",
        "fedrep",
        "fml",
        "local",
        "scaffold",
        "perfed-ckt",
        "perfed-evidence",
        "perfed-kin",
    ],
)
def test_stacked_clients_speak_as_one_by_one(name: str) -> None:
    """At different sampling rates, with different networks, and what is kept for each; some make
    fewer steps than others."""
    changes = {"algorithm": spec(name), "participation": {"stragglers": 0.5}}
    one, other = (private(how, **changes) for how in (SEQUENTIAL, STACKED))
    sent, said = played(one), played(other)
    for ours, theirs in zip(sent, said, strict=True):
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            torch.testing.assert_close(theirs[key], tensor, rtol=1e-7, atol=1e-7)
    left, right = records_of(one), records_of(other)
    assert left.keys() == right.keys()
    for key, tensor in left.items():
        torch.testing.assert_close(right[key], tensor, rtol=1e-7, atol=1e-7)
    silent = one.algorithm.messages().up == {}
    assert silent != any(f"kept/{STEPS}" in key for key in left)


@pytest.mark.ray
def test_workers_speak_as_one_by_one() -> None:
    one, other = (private(how, algorithm=spec("perfed-kin")) for how in (SEQUENTIAL, RAY))
    try:
        played(one), played(other)
        right = records_of(other)
        for key, tensor in records_of(one).items():
            torch.testing.assert_close(right[key], tensor, rtol=1e-3, atol=1e-4)
        assert one._private_steps == other._private_steps
    finally:
        other.engine.close()


def with_other_samples(simulation: Simulation, parts: Sequence[str]) -> None:
    """In place of those that clients have."""
    samples = simulation.population.federation.samples
    for split in simulation.population.federation.splits:
        where = np.concatenate([getattr(split, part) for part in parts])
        samples.y[where] = (samples.y[where] + 1) % 10
        samples.x[where] = 1.0 - 2 * samples.x[where][::-1]


@pytest.mark.parametrize("name", COVERED)
def test_what_stays_at_home_is_in_no_message(name: str) -> None:
    """Only noised training looks at samples. Where none is affordable, clients with quite other
    samples, and so with other models and states at home, send the same to the last bit."""
    privacy = PRIVACY | {"noise": 1e-4, "epsilon": 2.0}
    spent = {"privacy": privacy, "algorithm": spec(name), "models": [MLP_50]}
    plain, other = private(**spent), private(**spent)
    with_other_samples(other, ("train", "validation", "test"))
    for ours, theirs in zip(played(plain), played(other), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert (plain.population.y != other.population.y).any()


@pytest.mark.parametrize("name", ["perfed-ckt", "perfed-kin", "scaffold", "fedrep"])
def test_while_it_trains_too(name: str) -> None:
    """Models at home and validation samples are spoilt; every bit that is sent stays the same."""
    plain, spoilt = (private(algorithm=spec(name), models=[MLP_50]) for _ in range(2))
    with_other_samples(spoilt, ("validation", "test"))
    population = spoilt.population
    commit = population.commit

    def spoil(records: Any) -> None:
        commit(
            {
                k: dataclasses.replace(
                    r,
                    weights=r.weights._replace(
                        params={n: 1.5 * t + 0.1 for n, t in r.weights.params.items()}
                    ),
                )
                for k, r in records.items()
            }
        )

    population.commit = spoil  # type: ignore[method-assign]
    for ours, theirs in zip(played(plain), played(spoilt), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_one_sample_moves_a_step_by_no_more_than_its_bound() -> None:
    """A wrong label and a huge picture in its place; noise as small as rounding."""
    settings = {
        "algorithm": "fedavg",
        "models": [MLP_50],
        "training": TRAINING | {"steps": 1, "batch_size": 1000},  # every sample is drawn
        "privacy": PRIVACY | {"noise": 1e-9},
    }
    one, other = private(**settings), private(**settings)
    where = int(one.population.places(0, "train")[0])
    other.population.federation.samples.x[where] *= 1e4
    other.population.federation.samples.y[where] = 9 - other.population.federation.samples.y[where]
    first, second = played(one, 1)[0], played(other, 1)[0]
    moved = torch.stack(
        [(first[k] - second[k]).double().square().sum() for k in first if k.startswith("0/model")]
    )
    bound = 2 * PRIVACY["clip"] * 0.1 / 1000
    assert 0.01 * bound < moved.sum().sqrt() <= bound * 1.001
    others = [key for key in first if not key.startswith("0/")]
    assert others
    assert all(torch.equal(first[key], second[key]) for key in others)


def test_the_bound_holds_where_networks_compute_in_bf16() -> None:
    """Rounded to bf16, sums of 64 differ by 1.04 bounds for one sample."""
    params = {"own": {"w": torch.zeros(50)}}
    x = torch.rand(64, 50, generator=torch.Generator().manual_seed(0)) + 1

    def along(objective: Any, at: Any, batch: Any) -> Tensor:
        moved: Tensor = (at["own"]["w"] * batch.x[0]).sum()
        return moved

    def total(count: int) -> Tensor:
        batch, filled = Private(x[:count], torch.zeros(count)), torch.ones(count).bool()
        nothing = Noise(torch.tensor(0), 0.0, 1)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            found = clipped_gradient(along, lambda: None, params, batch, 1.0, filled, nothing)
        return found["own"]["w"]

    assert total(64).dtype == torch.float32
    assert all((total(n) - total(n - 1)).norm() <= 1.00001 for n in range(48, 65))


def test_a_sample_without_a_finite_gradient_does_not_tell_on_itself() -> None:
    simulation = private(algorithm="fedavg", models=[MLP_50])
    where = int(simulation.population.places(0, "train")[0])
    simulation.population.federation.samples.x[where] = np.inf
    speaker = Speaker(working_client(simulation.population, 0, 0))
    trained = speaker.sgd(speaker.weights, perfed.core.algorithm.supervised)
    assert all(tensor.isfinite().all() for tensor in trained.params.values())


def test_no_two_trainings_share_noise_or_draws() -> None:
    """Also where a method asks for the same mini-batches twice, and from round to round."""
    speaker = Speaker(working_client(private(algorithm="fedavg").population, 0, 0))
    supervised = perfed.core.algorithm.supervised
    twice = [speaker.sgd(speaker.weights, supervised, stream=0).params for _ in range(2)]
    assert not any(torch.equal(twice[0][name], twice[1][name]) for name in twice[0])
    lesson = Parts(None, lambda model, private, public: sum(p.sum() for p in model.params.values()))
    before = speaker.spent
    speaker.sgd(speaker.weights, lesson)
    assert speaker.spent == before == 6  # what looks at no private sample costs nothing


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_no_noise_covers_are_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^algorithm: '{name}' .*: choose another method"):
        private(algorithm=spec(name))
    simulate(algorithm=spec(name))  # without privacy they run


class Peeping(Algorithm):
    """Looks at what it must not, in a way that the class says."""

    how = "label_counts"

    def client_round(self, client: Any, message: Message) -> Message:
        looks = {
            "label_counts": client.label_counts,
            "losses": lambda: client.losses([client.weights], "train"),
            "features": lambda: client.features(on="train"),
            "logits": lambda: client.logits(on="train"),
            "sums": lambda: client.class_sums(torch.zeros(int(client.samples), 2)),
        }
        found = looks[self.how]()
        return Message(seen=found[0] if self.how == "sums" else found)


class Whispering(Algorithm):
    """Says that it says nothing."""

    def messages(self) -> Messages:
        return Messages(up={})

    def client_round(self, client: Any, message: Message) -> Message:
        return Message(counts=client.label_counts())


class Eager(Algorithm):
    has_opening = True

    def first_message(self, client: Any) -> Message:
        return Message(model=client.sgd(client.weights, perfed.core.algorithm.supervised))

    def client_round(self, client: Any, message: Message) -> Message:
        return Message()


@pytest.mark.parametrize("how", ["label_counts", "losses", "features", "logits", "sums"])
def test_an_algorithm_of_ones_own_meets_the_wall(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Peeping, "how", how)
    monkeypatch.setattr(Peeping, "needs_features", True)
    with pytest.raises(ConfigError, match="to make its message, which no noise covers"):
        played(private(algorithm=Peeping))


def test_who_declares_to_be_silent_must_be() -> None:
    with pytest.raises(ConfigError, match="declares that its clients send nothing, and sends"):
        played(private(algorithm=Whispering))


def test_an_opening_that_trains_is_refused() -> None:
    with pytest.raises(ConfigError, match="trains before the first round"):
        played(private(algorithm=Eager))


def test_batchnorm_epochs_and_augmentation_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs a network without it, such as one with GroupNorm"):
        private(models=[{"name": "cnn", "batchnorm": True}])
    private(models=[{"name": "cnn", "batchnorm": True}], algorithm="local")  # who is silent may
    for key, value in (("epochs", 2), ("augment", ["flip"])):
        with pytest.raises(ConfigError, match=f"training.{key}: privacy draws each sample anew"):
            private(training=TRAINING | {key: value})


def test_a_budget_that_telling_a_number_would_pass_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy.epsilon: 0\.5: to tell the number of samples"):
        private(privacy=PRIVACY | {"epsilon": 0.5})


def test_the_server_knows_noised_numbers_only() -> None:
    simulation = private(algorithm="fedavg", selection="by-size")
    true = simulation.federation.train_sizes
    told = [simulation.info(client).samples for client in range(simulation.clients)]
    assert told == simulation._told_sizes.tolist()
    assert (np.array(told) != true).any()
    again = private(algorithm="fedavg", seed=1)
    assert [again.info(client).samples for client in range(again.clients)] != told
    sent = played(simulation, 1)[0]
    assert all(int(sent[key]) == told[int(key[0])] for key in sent if key.endswith("samples"))


def test_a_budget_ends_training_for_others_and_is_in_the_run_directory(tmp_path: Path) -> None:
    privacy = PRIVACY | {"noise": 0.7, "epsilon": 6.0}
    settings = {"algorithm": "perfed-ckt", "privacy": privacy, "rounds": 6, "clients_per_round": 6}
    simulation = private(**settings)
    accounts = map(simulation.population.account, range(simulation.clients))
    steps = [next(n for n in range(0, 99, 3) if not one.allows(n, 3)) for one in accounts]
    stopped = [client for client, n in enumerate(steps) if n <= 12]
    assert any(steps[client] for client in stopped)  # they train for a while
    assert len(stopped) < len(steps)
    result = perfed.run(simulation.experiment, tmp_path / "run", how=SEQUENTIAL)
    frame = result.per_client()
    last = frame[frame["round"] == 5]
    assert (last["epsilon"] <= 6.0).all()
    assert simulation.population.epsilon(0, 0) < 2.0 < last["epsilon"].max()
    assert result.summary["privacy"]["epsilon"] == pytest.approx(last["epsilon"].max())
    assert result.summary["privacy"]["spent_up"] == len(stopped)
    assert "ε" in result.table()
    sent = played(private(**settings), 6)
    for key in sent[-1]:  # who has spent it all still answers, from what it knew
        moved = not torch.equal(sent[-1][key], sent[-2][key])
        assert moved == (int(key.split("/")[0]) not in stopped), key


def test_a_resumed_run_has_spent_what_it_had(tmp_path: Path) -> None:
    experiment = private(rounds=4).experiment

    class Stopping(perfed.Callback):
        def on_round(self, report: Any) -> None:
            if report.round == 1:
                raise KeyboardInterrupt

    how = dataclasses.replace(SEQUENTIAL, checkpoint_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(experiment, tmp_path / "run", callbacks=[Stopping()], how=how)
    resumed = resume_run(tmp_path / "run", how=how)
    whole = perfed.run(experiment, tmp_path / "whole", how=how)
    for name in ("rounds.jsonl", "clients.jsonl"):
        assert resumed.directory.lines(name) == whole.directory.lines(name)


def test_the_speaker_is_kept_apart_from_the_model_at_home() -> None:
    """At home a client trains as without privacy, where it is taught nothing."""
    untaught = {"name": "perfed-ckt", "weight": 0.0, "clusters": 1}
    settings: dict[str, Any] = {"algorithm": untaught, "selection": "uniform"}
    noised, plain = private(**settings), private(**settings, privacy=None)
    played(noised), played(plain)
    assert plain.population.records
    for client, record in plain.population.records.items():
        kept = noised.population.records[client]
        assert SPEAKER in kept.kept
        assert not record.kept
        home = kept.weights.params
        assert all(torch.equal(home[n], t) for n, t in record.weights.params.items())
