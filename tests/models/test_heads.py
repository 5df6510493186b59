"""The last layer of a network: found, named, checked; and what goes into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from perfed.core.algorithm import Algorithm, Client, Server, weighted_average
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.tree import Weights
from perfed.engines.stacked import StackedEngine
from perfed.models import architectures, build_module, find_head
from perfed.runs.simulation import Simulation
from tests.conftest import SEQUENTIAL, STACKED, tiny
from tests.engines.clients import working_client
from tests.engines.test_stacked import assert_same, play
from tests.flower.setting import desk, write_federation
from tests.flower.test_coordinator import run

SHAPE = (1, 8, 8)


class Residual(nn.Module):
    """The layers are not in the order in which they run; the head is not the last one."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(20, classes)
        self.first = nn.Linear(64, 20)
        self.second = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x.flatten(1)).relu()
        logits: Tensor = self.classifier(y + self.second(y).relu())
        return logits


class Convolutional(nn.Module):
    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__()
        self.last = nn.Conv2d(1, classes, 8)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(x).flatten(1)
        return logits


class Normalised(nn.Module):
    """Its tail has running statistics, and is called by keyword."""

    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(64, 20)
        self.tail = nn.Sequential(nn.BatchNorm1d(20), nn.Linear(20, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.tail(input=self.first(input=x.flatten(1)))
        return logits


class Scaled(nn.Module):
    def __init__(self, shape: Any, classes: int) -> None:
        super().__init__()
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = 3 * self.fc(x.flatten(1))
        return logits


def found(spec: Any) -> tuple[str, int]:
    architecture = architectures.build(spec)
    return find_head(architecture, build_module(architecture, SHAPE, 10), SHAPE)


def own(name: str, head: str = "") -> dict[str, Any]:
    return {"name": "imported", "factory": f"{__name__}:{name}", "head": head}


def test_built_in_networks_end_in_their_head() -> None:
    assert found("mlp") == ("3", 64)
    assert found({"name": "mlp", "hidden": []}) == ("1", 64)
    assert found("cnn")[1] == 50
    assert found({"name": "cnn", "batchnorm": True})[1] == 50
    architecture = architectures.build("vgg11-bn")
    module = build_module(architecture, (3, 32, 32), 10)
    assert find_head(architecture, module, (3, 32, 32))[1] == 512


def test_a_head_is_the_last_linear_or_the_one_that_is_named() -> None:
    assert found(own("Residual", "classifier")) == ("classifier", 20)
    assert found(own("Normalised")) == ("tail.1", 20)
    for name, head, fault in [
        ("Residual", "", "changes the output of its layer 'second' before"),
        ("Residual", "clasifier", "no layer 'clasifier'; did you mean 'classifier'"),
        ("Convolutional", "", "has no Linear layer that could be its head: name its last"),
        ("Convolutional", "last", "features must be a row of numbers"),
        ("Normalised", "tail", "keeps running statistics in its last layer 'tail'"),
        ("Scaled", "", "changes the output of its layer 'fc'"),
    ]:
        with pytest.raises(ConfigError, match=fault):
            found(own(name, head))


class FarFeatures(Algorithm):
    """Trains with features pushed to zero, on private and on public samples."""

    needs_features = needs_public_set = trains_on_public_set = uses_validation = True

    def client_round(self, client: Client, message: Message) -> Message:
        client.weights = client.sgd(client.weights, self.objective)
        return Message(
            features=client.features(on="public"), of_validation=client.features(on="validation")
        )

    def objective(self, model: Any, private: Any, public: Any) -> Tensor:
        features = model.features(private.x)
        loss = cross_entropy(model.head(features), private.y)
        far: Tensor = 0.1 * features.square().mean() + model.public_features(public.x).abs().mean()
        return loss + far


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "models",
    [["mlp"], [{"name": "cnn", "batchnorm": True}], [own("Residual", "classifier")]],
    ids=["chain", "batchnorm", "module"],
)
def test_features_and_heads_are_the_same_on_both_engines(models: list[Any]) -> None:
    experiment = tiny(algorithm=FarFeatures, models=models)
    plain, stacked = (play(Simulation(experiment, how=how)) for how in (SEQUENTIAL, STACKED))
    assert_same(stacked, plain, 1e-8)
    client = working_client(plain.population, 0, 3)
    head = plain.population.modules[client.architecture].get_submodule(
        plain.population.head(client.architecture)
    )
    features = client.features(on="validation")
    made = torch.func.functional_call(head, client.head_of(client.weights), (features,))
    assert torch.allclose(made, client.logits(on="validation"), atol=1e-12)
    assert torch.equal(made, client.head(features))


def test_who_does_not_declare_that_it_looks_at_features_is_told() -> None:
    class Silent(FarFeatures):
        needs_features = False

    for how in (SEQUENTIAL, STACKED):
        with pytest.raises(ConfigError, match="must say so: needs_features = True"):
            play(Simulation(tiny(algorithm=Silent), how=how), 1)


class Twofold(Algorithm):
    """Each client keeps a second network of its own."""

    uses_validation = True

    def networks(self) -> dict[str, Any]:
        return {"small": {"name": "mlp", "hidden": [5]}}

    def start(self, server: Server) -> dict[str, Any]:
        return {"small": server.initial("small", 0)}

    def broadcast(self, server: Server, state: Any, client: Any) -> Message:
        return Message(first=state["small"])

    def client_round(self, client: Client, message: Message) -> Message:
        small = client.state.get("small", message["first"])
        client.state = {"small": client.sgd({"small": small}, self.objective)["small"]}
        said = client.logits(client.state["small"], on="validation", network="small")
        return Message(sum=said.abs().sum())

    def objective(self, models: Any, private: Any, public: Any) -> Tensor:
        return cross_entropy(models["small"](private.x), private.y)


@pytest.mark.usefixtures("float64")
def test_a_second_network_of_ones_own_is_the_same_on_every_engine() -> None:
    """Clients of several architectures train it side by side, in other numbers in every round."""
    models = {"architectures": ["mlp", "cnn"], "assign": "list", "per_client": [1, 0, 0, 0, 0, 0]}
    experiment = tiny(algorithm=Twofold, models=models)
    reference = play(Simulation(experiment, how=SEQUENTIAL), 5)
    assert_same(play(Simulation(experiment, how=STACKED), 5), reference, 1e-9)
    recorded = Simulation(experiment, how=STACKED, engine=StackedEngine(record=True))
    assert_same(play(recorded, 5), reference, 1e-9)


def test_a_second_networks_weights_must_be_given() -> None:
    simulation = Simulation(tiny(algorithm=Twofold), how=SEQUENTIAL)
    with pytest.raises(ConfigError, match="the weights of 'small' must be given"):
        working_client(simulation.population, 0, 0).logits(network="small")


def test_test_samples_have_no_features_for_an_algorithm() -> None:
    simulation = Simulation(tiny(algorithm=FarFeatures), how=SEQUENTIAL)
    client = working_client(simulation.population, 0, 0)
    for part in ("test", "everything"):
        with pytest.raises(ConfigError, match="must be train or validation"):
            client.features(on=part)
        with pytest.raises(ConfigError, match="must be train or validation"):
            client.class_sums(torch.zeros(1, 2), part)


def test_parts_of_models_are_averaged_as_whole_ones_are() -> None:
    parts = [{"weight": torch.full((2,), n), "more": {"bias": torch.tensor(n)}} for n in (1.0, 4.0)]
    mean = weighted_average(parts, [1, 2])
    assert mean["weight"].tolist() == [3.0, 3.0]
    assert float(mean["more"]["bias"]) == 3.0


# Networks beside the clients' own.


class ServerOnly(Algorithm):
    """The server has a network that no client has, and tells clients what it says."""

    needs_public_set = True

    def networks(self) -> dict[str, Any]:
        return {"oracle": {"name": "mlp", "hidden": [7]}}

    def start(self, server: Server) -> dict[str, Any]:
        return {"oracle": server.initial("oracle", 0)}

    def broadcast(self, server: Server, state: Any, client: Any) -> Message:
        weights: Weights = state["oracle"]
        module = server.modules["oracle"]
        with torch.no_grad():
            said = torch.func.functional_call(module, weights.params, (server.public_x,))
        return Message(said=said)

    def client_round(self, client: Client, message: Message) -> Message:
        return Message(difference=(client.logits() - message["said"]).abs().mean())


def test_a_server_can_have_a_network_that_no_client_has(tmp_path: Path) -> None:
    simulation = play(Simulation(tiny(algorithm=ServerOnly), how=STACKED), 1)
    first = next(iter(simulation.progress.state["oracle"].params.values()))
    assert first.shape == (7, 64)
    assert "oracle" not in simulation.population.architectures
    algorithm = {"name": f"{__name__}:ServerOnly"}
    folder = write_federation(tmp_path / "federation", rounds=1, algorithm=algorithm)
    assert run(folder, desk(folder)).summary["finished"]


def test_a_networks_name_is_its_own() -> None:
    class Twice(ServerOnly):
        def networks(self) -> dict[str, Any]:
            return {"own": "mlp"}

    with pytest.raises(ConfigError, match="'own' is the name of a client's network"):
        Simulation(tiny(algorithm=Twice))

    class Unknown(ServerOnly):
        def client_round(self, client: Client, message: Message) -> Message:
            client.sgd({"own": client.weights, "orcale": client.weights}, lambda *given: given[0])
            return Message()

    with pytest.raises(ConfigError, match="has no network 'orcale'; did you mean 'oracle'"):
        play(Simulation(tiny(algorithm=Unknown), how=SEQUENTIAL), 1)
