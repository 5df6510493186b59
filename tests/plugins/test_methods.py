"""Methods and an optimizer, each one file outside the package: on every engine, after a resume, and
at sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import perfed
from perfed import Execution
from perfed.core.errors import ConfigError
from perfed.engines.stacked import StackedEngine
from perfed.runs.simulation import Simulation
from tests.conftest import RAY, SEQUENTIAL, STACKED, tiny
from tests.engines.clients import working_client
from tests.engines.test_stacked import assert_same, play
from tests.flower.setting import desk, simulated, write_federation
from tests.flower.test_coordinator import assert_same_numbers, lines, run
from tests.methods import CASES, TRAINING, case
from tests.runs.test_resume import assert_resumes_to_the_same_bytes

HERE = Path(__file__).parent


def played(name: str, how: Execution = SEQUENTIAL, **changes: Any) -> Simulation:
    return play(Simulation(tiny(**case(name, **changes)), how=how))


def test_each_is_a_short_file() -> None:
    files = [f for f in HERE.glob("*.py") if not f.name.startswith(("test_", "conftest", "__"))]
    assert len(files) >= 8
    assert all(len(file.read_text().splitlines()) < 60 for file in files)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", CASES)
def test_stacked_is_as_sequential(name: str) -> None:
    reference = played(name)
    assert_same(played(name, STACKED), reference, 1e-8)
    experiment = tiny(**case(name))
    recorded = Simulation(experiment, how=STACKED, engine=StackedEngine(record=True))
    assert_same(play(recorded), reference, 1e-8)


@pytest.mark.ray
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", CASES)
def test_ray_is_as_stacked(name: str) -> None:
    simulation = played(name, RAY)
    simulation.engine.collect(simulation.population)
    assert_same(simulation, played(name, STACKED), 1e-8)
    simulation.engine.close()


@pytest.mark.parametrize("name", CASES)
def test_resumed_it_ends_with_the_same_bytes(name: str, tmp_path: Path) -> None:
    experiment = tiny(**case(name), rounds=4)
    assert_resumes_to_the_same_bytes(experiment, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_sites_give_what_the_simulation_gives(name: str, tmp_path: Path) -> None:
    changes = case(name)
    models = [m if isinstance(m, dict) else {"name": m} for m in changes.pop("models")]
    models = (models * 2)[:3]
    folder = write_federation(tmp_path / "federation", models, **changes)
    run(folder, desk(folder))
    simulated(tmp_path / "simulation", models, **changes)
    assert_same_numbers(folder / "run", tmp_path / "simulation")
    assert not any("refused" in line for line in lines(folder / "run", "rounds.jsonl"))


@pytest.mark.parametrize("name", CASES)
def test_the_saved_model_predicts_as_it_was_evaluated(name: str, tmp_path: Path) -> None:
    experiment = tiny(**case(name))
    result = perfed.run(experiment, tmp_path / "run", how=SEQUENTIAL)
    federation = Simulation(experiment, how=SEQUENTIAL).federation
    frame = result.per_client()
    last = frame[frame["round"] == frame["round"].max()]
    for kind in last["model"].unique():
        split = federation.splits[0]
        x = torch.tensor(federation.samples.x[split.test]).float()
        logits = result.model(0, kind)(x).detach()
        loss = torch.nn.functional.cross_entropy(
            logits, torch.tensor(federation.samples.y[split.test])
        )
        (found,) = last[(last["model"] == kind) & (last["client"] == 0)]["test_loss"]
        assert float(loss) == pytest.approx(found, rel=1e-4)


# What each of them is, by other means.


def test_prototypes_are_the_means_of_features_by_class() -> None:
    simulation = played("fedproto")
    client = working_client(simulation.population, 0, 2)
    features, where = client.features().numpy(), simulation.federation.splits[0].train
    labels = simulation.federation.samples.y[where]
    sums, counts = client.class_sums(client.features())
    for label in range(10):
        assert int(counts[label]) == (labels == label).sum()
        expected = features[labels == label].sum(0) if (labels == label).any() else np.zeros(50)
        assert np.allclose(sums[label].numpy(), expected, atol=1e-4)


def test_networks_of_different_widths_are_refused_in_one_sentence(tmp_path: Path) -> None:
    for name in ("fedproto", "lg-fedavg"):
        with pytest.raises(ConfigError, match=r"different widths \('mlp' 64, 'cnn' 50\): must be"):
            Simulation(tiny(**case(name, models=[{"name": "mlp"}, "cnn"])))
    models = [{"name": "mlp", "hidden": [width]} for width in (50, 50, 40)]
    changes = case("fedproto")
    del changes["models"]
    folder = write_federation(tmp_path / "federation", models, {"start_with": 2}, **changes)
    with pytest.raises(ConfigError, match="different widths"):
        run(folder, desk(folder))
    file = folder / "coordinator.yaml"
    values = yaml.safe_load(file.read_text())
    values["experiment"]["models"] = models[:1]  # of the third site's network it does not know
    values["directory"] = "again"
    file.write_text(yaml.safe_dump(values))
    said: list[str] = []
    run(folder, desk(folder), said)
    assert any("gives 40 features, those of the others 50" in line for line in said)


def test_heads_are_one_and_the_rest_is_ones_own() -> None:
    simulation = played("lg-fedavg", clients=4, clients_per_round=4)
    message = simulation.algorithm.broadcast(
        None,  # type: ignore[arg-type]
        simulation.progress.state,
        None,  # type: ignore[arg-type]
    )
    for number in range(4):
        client = working_client(simulation.population, number, 5)
        joined = client.with_head(client.weights, message["head"])
        assert all(torch.equal(client.head_of(joined)[n], t) for n, t in message["head"].items())
        others = joined.params.keys() - {
            n
            for n in joined.params
            if n.startswith(simulation.population.head(client.architecture))
        }
        assert others
        assert all(joined.params[n] is client.weights.params[n] for n in others)


@pytest.mark.usefixtures("float64")
def test_without_imitation_the_own_network_trains_alone() -> None:
    spec = CASES["fml"]["algorithm"] | {"labels": 1.0}
    together = played("fml", algorithm=spec)
    alone = played("fml", algorithm={"name": "local", "participation": "selected"})
    for client in together.records:
        one, other = (s.records[client].weights.params for s in (together, alone))
        assert all(torch.allclose(one[name], other[name], atol=1e-12) for name in one)


def test_own_momentum_is_perfeds_to_the_bit() -> None:
    own = played("momentum")
    built_in = TRAINING | {"optimizer": {"name": "sgd", "momentum": 0.7}}
    theirs = played("momentum", training=built_in | {"optimizer_state": "kept"})
    for client in own.records:
        one, other = (s.records[client].weights.params for s in (own, theirs))
        assert all(torch.equal(one[name], other[name]) for name in one)
