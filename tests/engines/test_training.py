"""How clients train: optimizers, schedules, epochs, augmentation, per-sample gradients.

On one client against PyTorch's own, and on every engine against the plain one."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import perfed
from perfed import Training
from perfed.core.algorithm import Algorithm, supervised
from perfed.core.augmentation import CODES, MARGIN, augmented
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.optimizer import Optimizer, clipped, optimizers
from perfed.core.streams import shuffled_indices
from perfed.engines.base import private_draws
from perfed.engines.stacked import StackedEngine
from perfed.runs.simulation import Simulation
from tests.conftest import SEQUENTIAL, STACKED, simulate, spec, tiny
from tests.engines.clients import working_client
from tests.engines.test_stacked import MIXED, assert_same, play
from tests.runs.test_resume import assert_resumes_to_the_same_bytes

LOCAL = {"name": "local", "participation": "selected"}
BASE = {"steps": 4, "batch_size": 8, "public_batch_size": 8, "learning_rate": 0.05}
OPTIMIZERS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, lambda p: torch.optim.SGD(p, lr=0.05)),
    "momentum": ({"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)),
    "nesterov": (
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "decay": ({"weight_decay": 0.3}, lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.3)),
    "adam": ({"name": "adam"}, lambda p: torch.optim.Adam(p, lr=0.05)),
    "adam, decay": (
        {"name": "adam", "beta1": 0.5, "weight_decay": 0.2},
        lambda p: torch.optim.Adam(p, lr=0.05, betas=(0.5, 0.999), weight_decay=0.2),
    ),
    "adamw": (
        {"name": "adamw", "weight_decay": 0.4},
        lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.4),
    ),
}


def optimizer(name: str, **more: Any) -> dict[str, Any]:
    return {"name": "sgd"} | OPTIMIZERS[name][0] | more


def drawn_batches(
    simulation: Simulation, steps: int, round: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """The mini-batches of client 0 in a round, from its streams."""
    seen: list[tuple[Tensor, Tensor]] = []

    def spying(model: Any, private: Any, public: Any) -> Tensor:
        seen.append((private.x, private.y))
        return supervised(model, private, public)

    client = working_client(simulation.population, 0, round)
    client.sgd(client.weights, spying, steps=steps)
    return seen


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("clip", [0.0, 0.3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_pytorchs(name: str, clip: float) -> None:
    training = BASE | {"optimizer": optimizer(name, clip=clip)}
    simulation = simulate(algorithm=LOCAL, models=["cnn"], training=training)
    batches = drawn_batches(simulation, 6)
    client = working_client(simulation.population, 0, 0)
    trained = client.sgd(client.weights, supervised, steps=6)
    module = simulation.population.modules["cnn"]
    module.load_state_dict(client.weights.params)
    theirs = OPTIMIZERS[name][1](module.parameters())
    for x, y in batches:
        theirs.zero_grad()
        cross_entropy(module(x), y).backward()
        norm = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
        for p in module.parameters():
            p.grad *= min(1.0, clip / norm) if clip else 1.0
        theirs.step()
    for parameter, expected in module.named_parameters():
        found = trained.params[parameter]
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)


def test_clipping_shortens_only_what_is_too_long() -> None:
    gradients = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    assert clipped(gradients, 10.0)["a"].tolist() == [3.0, 0.0]
    shorter = clipped(gradients, 1.0)
    assert shorter["a"].tolist() == pytest.approx([0.6, 0.0])
    assert float(shorter["b"]) == pytest.approx(0.8)
    assert float(clipped({"a": torch.zeros(2)}, 1.0)["a"].sum()) == 0


def test_schedules() -> None:
    def rates(schedule: Any, rounds: int = 10) -> list[float]:
        training = tiny(training={"learning_rate": 0.4, "schedule": schedule}).training
        return [training.learning_rate_at(t, rounds) for t in range(rounds)]

    assert rates("constant") == [0.4] * 10
    assert rates({"name": "inverse", "decay": 0.5})[:3] == pytest.approx([0.4, 0.4 / 1.5, 0.2])
    cosine = rates({"name": "cosine", "final": 0.25})
    assert cosine[0] == 0.4
    assert cosine[5] == pytest.approx(0.4 * (1 + 0.25) / 2)
    assert cosine[9] == pytest.approx(0.4 * (0.25 + 0.75 * (1 + math.cos(0.9 * math.pi)) / 2))
    steps = rates({"name": "steps", "every": 4, "factor": 0.5})
    assert steps == pytest.approx([0.4] * 4 + [0.2] * 4 + [0.1] * 2)
    with pytest.raises(ConfigError, match="both 'decay' and 'schedule'"):
        tiny(training={"decay": 0.1, "schedule": "cosine"})


def test_a_runs_log_has_the_rate_of_each_round(tmp_path: Path) -> None:
    training = BASE | {"schedule": {"name": "cosine"}}
    result = perfed.run(tiny(rounds=4, algorithm=LOCAL, training=training), tmp_path / "run")
    lines = (result.path / "rounds.jsonl").read_text().splitlines()
    found = [json.loads(line)["learning_rate"] for line in lines]
    assert found == pytest.approx([0.05 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)])


def test_scaffold_says_that_it_needs_plain_sgd() -> None:
    for options in (optimizer("momentum"), optimizer("adam"), optimizer("plain", clip=1.0)):
        with pytest.raises(ConfigError, match=r"training.optimizer: 'scaffold' needs plain SGD"):
            tiny(algorithm="scaffold", training={"optimizer": options})
    tiny(algorithm="scaffold", training={"optimizer": {"name": "sgd"}})


# Epochs.


@pytest.mark.parametrize("bound", [1, 5, 64])
def test_without_replacement_every_pass_has_every_sample_once(bound: int) -> None:
    drawn = shuffled_indices(7, 3 * bound + bound // 2, bound, torch.device("cpu"))
    for start in range(0, 3 * bound, bound):
        assert sorted(drawn[start : start + bound].tolist()) == list(range(bound))
    assert not torch.equal(drawn, shuffled_indices(8, len(drawn), bound, drawn.device)) or bound < 5
    longer = shuffled_indices(7, 4 * bound, bound, drawn.device)
    assert torch.equal(longer[: len(drawn)], drawn)  # a longer training begins in the same way


def test_epochs_show_a_client_all_its_samples() -> None:
    training = BASE | {"epochs": 2, "batch_size": 4}
    simulation = simulate(algorithm=LOCAL, training=training)
    client = working_client(simulation.population, 0, 0)
    size = simulation.population.train_size(0)
    assert client.steps == math.ceil(2 * size / 4)
    requests: list[Any] = []
    client.ask = lambda asked: requests.extend(asked) or SEQUENTIAL.build_engine().answers(asked)  # type: ignore
    client.sgd(client.weights, supervised)
    (request,) = requests
    seen = private_draws(request, request.private_keys()[0]).flatten()
    counts = torch.bincount(seen, minlength=size)
    assert int(counts.min()) >= 2
    assert int(counts.max()) <= 3  # the last mini-batch is filled up from a third pass
    assert Training(epochs=3, batch_size=10).steps_of(10) == 3


# Augmentation.


def plainly_augmented(image: np.ndarray, code: int, how: tuple[str, ...]) -> np.ndarray:
    if "flip" in how and code % 2:
        image = image[..., ::-1]
    if "crop" in how:
        places = 2 * MARGIN + 1
        down, right = code // 2 % places, code // (2 * places)
        padded = np.pad(image, ((0, 0), (MARGIN, MARGIN), (MARGIN, MARGIN)))
        image = padded[:, down : down + image.shape[1], right : right + image.shape[2]]
    return image


@pytest.mark.parametrize("how", [(), ("flip",), ("crop",), ("flip", "crop")])
def test_an_image_is_flipped_and_moved_as_its_code_says(how: tuple[str, ...]) -> None:
    x, codes = torch.rand(CODES, 2, 5, 7), torch.arange(CODES)
    found = augmented(x, codes, how).numpy()
    for image, code, expected in zip(x.numpy(), range(CODES), found, strict=True):
        assert np.array_equal(plainly_augmented(image, code, how), expected)
    stacked = augmented(x.view(2, -1, 2, 5, 7), codes.view(2, -1), how)
    assert torch.equal(stacked.flatten(0, 1), augmented(x, codes, how))


def test_augmentation_is_off_by_default_and_needs_images() -> None:
    assert tiny().training.augment == ()
    plain, moved = (
        drawn_batches(simulate(algorithm=LOCAL, training=BASE | {"augment": how}), 2)
        for how in ([], ["crop"])
    )
    assert torch.equal(plain[0][1], moved[0][1])  # the same samples
    assert not torch.equal(plain[0][0], moved[0][0])
    with pytest.raises(ConfigError, match="none of 'flip', 'crop'"):
        tiny(training={"augment": ["rotate"]})


# Per-sample gradients.


class Clipping(Algorithm):
    """Local training whose samples have little influence each."""

    def client_round(self, client: Any, message: Message) -> Message:
        client.weights = client.sgd(client.weights, supervised, sample_clip=0.2)
        return Message()


@pytest.mark.usefixtures("float64")
def test_sample_gradients_are_clipped_one_by_one() -> None:
    simulation = simulate(algorithm=Clipping, models=["cnn"], training=BASE)
    ((x, y),) = drawn_batches(simulation, 1)
    client = working_client(simulation.population, 0, 0)
    bound = 1.14
    trained = client.sgd(client.weights, supervised, steps=1, sample_clip=bound)
    module = simulation.population.modules["cnn"]
    module.load_state_dict(client.weights.params)
    expected = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    lengths = []
    for sample in range(len(x)):
        module.zero_grad()
        cross_entropy(module(x[sample : sample + 1]), y[sample : sample + 1]).backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in module.parameters()))
        lengths.append(norm)
        for name, p in module.named_parameters():
            expected[name] += p.grad * min(1.0, bound / norm) / len(x)
    assert min(lengths) < bound < max(lengths)  # some are shortened, some are not
    for name, gradient in expected.items():
        moved = client.weights.params[name] - 0.05 * gradient
        torch.testing.assert_close(trained.params[name], moved, rtol=1e-9, atol=1e-9)


def test_sample_gradients_need_a_network_without_batchnorm() -> None:
    for how in (SEQUENTIAL, STACKED):
        models = [{"name": "cnn", "batchnorm": True}]
        with pytest.raises(ConfigError, match="sample_clip needs a network without it"):
            play(simulate(how, algorithm=Clipping, models=models), 1)


# Every engine.

SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": optimizer(name)} for name in OPTIMIZERS},
    "clip": {"optimizer": optimizer("momentum", clip=0.2)},
    "kept": {"optimizer": optimizer("momentum"), "optimizer_state": "kept"},
    "kept adam": {"optimizer": optimizer("adam"), "optimizer_state": "kept"},
    "epochs": {"epochs": 2, "batch_size": 5},
    "epochs, kept": {
        "epochs": 1,
        "batch_size": 5,
        "optimizer": optimizer("adamw"),
        "optimizer_state": "kept",
    },
    "augment": {"augment": ["flip", "crop"]},
    "all": {
        "epochs": 1,
        "augment": ["crop"],
        "schedule": {"name": "cosine"},
        "optimizer": optimizer("nesterov", clip=1.0),
    },
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "algorithm"),
    # The others differ in which networks they train, and in whose state is kept.
    [
        *product(SETTINGS, ["perfed-ckt"]),
        *product(["clip", "kept adam", "epochs, kept", "all"], ["ditto", "fedavg"]),
    ],
)
def test_stacked_trains_as_sequential(name: str, algorithm: str) -> None:
    # A bias before a BatchNorm has a gradient of zero, up to rounding. Adam makes whole steps of
    # that, so engines that round differently part there.
    models = ["mlp", "cnn"] if "adam" in str(SETTINGS[name]) else MIXED
    experiment = tiny(algorithm=spec(algorithm), models=models, training=BASE | SETTINGS[name])
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    assert_same(play(Simulation(experiment, how=STACKED)), reference, 1e-7)
    if algorithm == "perfed-ckt":
        recorded = Simulation(experiment, how=STACKED, engine=StackedEngine(record=True))
        assert_same(play(recorded), reference, 1e-7)


@pytest.mark.usefixtures("float64")
def test_stacked_clips_samples_as_sequential() -> None:
    experiment = tiny(algorithm=Clipping, models=["mlp", "cnn"], training=BASE)
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    assert_same(play(Simulation(experiment, how=STACKED)), reference, 1e-9)
    recorded = Simulation(experiment, how=STACKED, engine=StackedEngine(record=True))
    assert_same(play(recorded), reference, 1e-9)


@pytest.mark.parametrize("name", ["kept adam", "epochs, kept", "all"])
def test_resumed_it_ends_with_the_same_bytes(name: str, tmp_path: Path) -> None:
    experiment = tiny(rounds=4, models=MIXED, training=BASE | SETTINGS[name])
    assert_resumes_to_the_same_bytes(experiment, tmp_path)


def test_kept_state_goes_on_and_new_state_begins_anew() -> None:
    def velocity(how: str) -> Any:
        training = BASE | {"optimizer": optimizer("momentum"), "optimizer_state": how}
        simulation = play(simulate(algorithm=LOCAL, training=training), 3)
        return [record.kept for record in simulation.records.values()]

    assert not any(velocity("new"))
    assert all("training-0" in kept for kept in velocity("kept"))


@pytest.mark.usefixtures("float64")
def test_kept_state_is_pytorchs_over_two_rounds() -> None:
    training = BASE | {"optimizer": optimizer("momentum"), "optimizer_state": "kept"}
    everyone = {"clients": 3, "clients_per_round": 3}
    simulation = simulate(algorithm=LOCAL, models=["mlp"], training=training, **everyone)
    module = simulation.population.modules["mlp"]
    module.load_state_dict(working_client(simulation.population, 0, 0).weights.params)
    theirs = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for round in (0, 1):
        for x, y in drawn_batches(simulation, 4, round):
            theirs.zero_grad()
            cross_entropy(module(x), y).backward()
            theirs.step()
    play(simulation, 2)
    for name, expected in module.named_parameters():
        found = simulation.records[0].weights.params[name]
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)


@dataclass(frozen=True)
class Delayed(Optimizer):
    """Goes by the gradient before the last: what it returns are tensors of its old state."""

    def init(self, params: Any) -> Any:
        zeros = {name: torch.zeros_like(p) for name, p in params.items()}
        return {"last": zeros, "before": dict(zeros)}

    def step(self, gradients: Any, params: Any, state: Any) -> Any:
        return state["before"], {"last": dict(gradients), "before": state["last"]}


@pytest.mark.usefixtures("float64")
def test_an_optimizer_may_hand_on_its_old_state() -> None:
    experiment = tiny(algorithm=LOCAL, training=BASE | {"optimizer": Delayed()})
    reference = play(Simulation(experiment, how=SEQUENTIAL))
    assert_same(play(Simulation(experiment, how=STACKED)), reference, 1e-9)
    recorded = Simulation(experiment, how=STACKED, engine=StackedEngine(record=True))
    assert_same(play(recorded), reference, 1e-9)


def test_the_decay_of_an_earlier_configuration_is_a_schedule() -> None:
    now = tiny(training=BASE | {"schedule": {"name": "inverse", "decay": 0.5}})
    assert tiny(training=BASE | {"decay": 0.5}) == now
    assert tiny(training=BASE | {"decay": 0.0}) == tiny(training=BASE)
    assert now.training.learning_rate_at(-1, 3) == 0.05  # the opening


def test_an_optimizers_order_of_names_does_not_matter() -> None:
    """A stack's state is put back name by name."""

    class Reordered(optimizers["adam"]):  # type: ignore[misc]
        def step(self, *given: Any) -> Any:
            directions, state = super().step(*given)
            return directions, dict(reversed(state.items()))

    plain, reordered = optimizers.build("adam"), Reordered()
    assert isinstance(reordered, Optimizer)
    found = []
    for value in (plain, reordered):
        experiment = tiny(algorithm=LOCAL, training=BASE | {"optimizer": value})
        found.append(play(Simulation(experiment, how=STACKED)))
    assert_same(*found, 0)
