"""Randomness is addressed: what one client does never moves another's numbers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perfed.core.algorithm import Adjusted, supervised
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.tree import OWN
from perfed.engines.base import EngineClient, Request, Sgd, mini_batches
from tests.conftest import simulate
from tests.engines.clients import working_client


class WithDropout(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, classes))


def batches(client: EngineClient, steps: int, count: int = 1) -> list[Any]:
    """The private mini-batches of a client's first training."""
    models = {OWN: client.weights}
    request = Sgd(client, models, {OWN: {}}, True, supervised, (), steps, 0.1, count, 0, None)
    return [private for private, _ in mini_batches(request)]


def flat(weights: tuple[dict[str, Tensor], ...]) -> Tensor:
    return torch.cat([t.flatten().double() for part in weights for t in part.values()])


def test_order_and_dropped_clients_do_not_matter() -> None:
    simulation = simulate(
        models={"architectures": [f"{__name__}:WithDropout", {"name": "cnn", "batchnorm": True}]}
    )
    message = Message(centroids=torch.rand(2, 30, 10).softmax(-1))

    def run(clients: list[int]) -> dict[int, Tensor]:
        messages = dict.fromkeys(clients, message)
        simulation.engine.perform([simulation.population.call("client_round", messages, 5)])
        return {k: flat(kept.weights) for k, kept in simulation.population.pending.items()}

    everyone = run([0, 1, 2, 3])
    reordered = run([3, 1, 0, 2])
    dropped = run([2, 0])
    assert all(torch.equal(everyone[k], reordered[k]) for k in everyone)
    assert all(torch.equal(everyone[k], dropped[k]) for k in dropped)


def test_rounds_and_clients_draw_different_batches() -> None:
    simulation = simulate(clients=6)
    seen = set()
    for client in (0, 1):
        for round in (0, 1):
            drawn = batches(working_client(simulation.population, client, round), 2)
            seen.add(tuple(float(private.x.sum()) for private in drawn))
    assert len(seen) == 4


def test_two_trainings_in_one_round_draw_different_batches() -> None:
    client = working_client(simulate(algorithm="local").population, 0, 0)
    trainings: list[list[float]] = []

    def objective(model, private, public):  # type: ignore[no-untyped-def]
        trainings[-1].append(float(private.x.sum()))
        return model(private.x).sum()

    for stream in (None, None, 0):
        trainings.append([])
        client.sgd(client.weights, objective, stream=stream)
    assert trainings[0] != trainings[1]
    assert trainings[0] == trainings[2]


def test_several_batches_a_step_are_independent_and_the_first_is_the_usual_one() -> None:
    client = working_client(simulate(algorithm="local").population, 0, 0)
    usual = [float(private.x.sum()) for private in batches(client, 2)]
    three = [tuple(float(p.x.sum()) for p in private) for private in batches(client, 2, 3)]
    assert [sums[0] for sums in three] == usual
    assert len({sum_ for sums in three for sum_ in sums}) == 6


def test_sgd_leaves_what_it_was_given_as_it_was() -> None:
    simulation = simulate(models={"architectures": [{"name": "cnn", "batchnorm": True}]})
    client = working_client(simulation.population, 0, 0)
    before = flat(client.weights)
    client.sgd(client.weights, simulation.algorithm.objective, torch.full((30, 10), 0.1))
    assert torch.equal(flat(client.weights), before)


def test_a_client_smaller_than_a_batch_trains_on_all_it_has() -> None:
    """No `drop_last`: with 3 samples and a batch of 64 every step still sees 64 draws of them."""
    simulation = simulate(training={"steps": 4, "batch_size": 64})
    engine = simulation.population
    splits = list(engine.federation.splits)
    splits[0] = replace(splits[0], train=splits[0].train[:3])
    engine.federation = replace(engine.federation, splits=splits)
    shapes = [private.x.shape[0] for private in batches(working_client(engine, 0, 0), 4)]
    assert shapes == [64] * 4
    distinct = {
        tuple(x.flatten().tolist())
        for private in batches(working_client(engine, 0, 0), 4)
        for x in private.x
    }
    assert len(distinct) == 3


def test_no_steps_ask_for_nothing() -> None:
    """An engine may prepare itself with the first step's samples, and there are none."""
    client = simulate(algorithm="local").population.client(0, 0)  # nobody would answer it
    assert client.sgd(client.weights, supervised, steps=0) is client.weights


@pytest.mark.parametrize("part", ["test", "unused", "trai"])
def test_an_algorithm_cannot_look_at_what_its_clients_are_evaluated_on(part: str) -> None:
    client = working_client(simulate(algorithm="local").population, 0, 0)
    for look, at in ((client.losses, [client.weights]), (client.likelihoods, [client.weights])):
        assert look(at, "train").isfinite().all()
        with pytest.raises(ConfigError, match=f"'{part}' .* must be train or validation"):
            look(at, part)


def test_models_of_the_same_weights_share_a_pass_over_the_samples() -> None:
    client = working_client(simulate(algorithm="local").population, 0, 0)
    asked: list[Request] = []
    answer = client.ask

    def count(requests: Sequence[Request]) -> list[Any]:
        asked.extend(requests)
        return answer(requests)

    client.ask = count
    nothing = torch.zeros(10)
    models = [
        client.weights,
        *(Adjusted(client.weights, torch.tensor(b), nothing) for b in (1.0, 0.0)),
    ]
    plain, same, sure_of_nothing = client.likelihoods(models, "train")
    assert len(asked) == 1
    torch.testing.assert_close(plain, same, rtol=0, atol=0)
    torch.testing.assert_close(sure_of_nothing, torch.full_like(plain, 0.1))
    other = client.weights.clone()
    for tensor in other.params.values():
        tensor.zero_()
    first, second = client.likelihoods([client.weights, other], "train")
    assert len(asked) == 3
    torch.testing.assert_close(first, plain, rtol=0, atol=0)
    torch.testing.assert_close(second, sure_of_nothing)


class HalfFrozen(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.Linear(16, classes))
        self[1].weight.requires_grad_(False)


def test_frozen_parameters_stay_frozen() -> None:
    simulation = simulate(models=f"{__name__}:HalfFrozen", algorithm="local")
    client = working_client(simulation.population, 0, 0)
    before = client.weights.params
    simulation.algorithm.client_round(client, Message())
    after = client.weights.params
    assert torch.equal(before["1.weight"], after["1.weight"])
    assert not torch.equal(before["1.bias"], after["1.bias"])


def test_own_initial_weights_differ_and_common_ones_do_not() -> None:
    for initial, equal in (("common", True), ("own", False)):
        engine = simulate(models={"architectures": ["mlp"], "initial": initial}).population
        first, second = (flat(working_client(engine, k, 0).weights) for k in (0, 1))
        assert torch.equal(first, second) is equal
