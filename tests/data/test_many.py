"""Very many clients: their samples are made or read for those at work, and for nobody else."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perfed
from perfed import Execution
from perfed.core.channel import Channel
from perfed.core.errors import ConfigError, RunError
from perfed.core.schema import from_mapping
from perfed.core.tree import flatten
from perfed.data.federation import SPLITS_IN_MEMORY, Split, Splits, build_federation, split_client
from perfed.data.many import Mapped, Synthetic
from perfed.data.partition import IID, Given
from perfed.runs.checkpoint import _trained
from perfed.runs.simulation import Simulation, resume_run
from tests.conftest import SEQUENTIAL, STACKED
from tests.runs.test_resume import StopAfter, contents


def many(clients: int = 100_000, **changed: Any) -> perfed.Experiment:
    values = {
        "rounds": 3,
        "clients": clients,
        "clients_per_round": 6,
        "selection": "uniform",
        "evaluate_every": 2,
        "evaluate_clients": 5,
        "data": {"name": "synthetic", "samples": 12, "features": 4, "classes": 3, "public": 20},
        "partition": "given",
        "split": {"train": [0.4], "validation": 0.1, "test": 0.5},
        "models": [{"name": "mlp", "hidden": [4]}],
        "training": {"steps": 3, "batch_size": 4},
        "algorithm": {"name": "perfed-ckt", "clusters": 2},
    }
    return from_mapping(perfed.Experiment, values | changed)


def test_a_split_is_made_when_it_is_asked_for_and_always_the_same() -> None:
    held = [np.arange(10 * k, 10 * k + 5 + k % 7) for k in range(2 * SPLITS_IN_MEMORY)]
    split = Split()
    splits = Splits(held.__getitem__, np.array([len(h) for h in held]), split, seed=3)
    made = list(splits)
    for client in (0, 17, len(held) - 1):
        expected = split_client(held[client], split, 3, client)
        for one in (made[client], splits[client]):
            assert all(np.array_equal(vars(one)[p], vars(expected)[p]) for p in vars(expected))
    assert splits[-1].train.tolist() == made[-1].train.tolist()
    assert len(splits._made) <= SPLITS_IN_MEMORY
    sizes = [(len(s.train), len(s.validation), len(s.test)) for s in made]
    assert splits.part_sizes().tolist() == [list(each) for each in sizes]


def test_only_clients_at_work_have_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(many(), how=STACKED)
    distant, asked = simulation.federation.distant, set[int]()
    assert distant is not None
    make = distant.client

    def noted(number: int) -> tuple[np.ndarray, np.ndarray]:
        asked.add(number)
        return make(number)

    monkeypatch.setattr(distant, "client", noted)
    directory = perfed.runs.directory.RunDirectory.create(tmp_path / "run")
    result = simulation.finish_in(directory)
    selected = {k for line in directory.lines("rounds.jsonl") for k in line["clients"]}
    assert asked == selected | set(simulation.evaluated)
    assert len(simulation.population.x) <= 12 * 2 * 6  # room for a call, or twice that
    assert sum(file.stat().st_size for file in tmp_path.rglob("*")) < 100_000  # one byte a client
    frame = result.per_client()
    assert sorted(set(frame["client"])) == simulation.evaluated
    result.model(simulation.evaluated[2])
    with pytest.raises(RunError, match=r"no client \d+: those evaluated are"):
        result.model(min(set(range(100)) - set(simulation.evaluated)))
    assert "5 of 100,000 clients are evaluated" in result.table()


def test_it_goes_on_after_a_stop_as_if_there_had_been_none(tmp_path: Path) -> None:
    whole = perfed.run(many(), tmp_path / "whole", how=STACKED)
    often = Execution(engine="stacked", device="cpu", checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(many(), tmp_path / "stopped", how=often, callbacks=[StopAfter(2)])
    resumed = resume_run(tmp_path / "stopped", how=STACKED)
    found, expected = contents(resumed.path), contents(whole.path)
    assert [name for name in expected if found[name] != expected[name]] == []


def test_a_checkpoint_of_an_earlier_version_counts_every_client() -> None:
    assert _trained([0, 2, 1], 3) == _trained({"1": 2, "2": 1}, 3) == {1: 2, 2: 1}
    for wrong in ([0, 2], {"3": 1}, {"1": -1}):
        with pytest.raises(ValueError, match=r"trained|count|zip"):
            _trained(wrong, 3)


def written(folder: Path, clients: int = 9) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    sizes = random.integers(8, 15, clients)
    x = random.integers(0, 256, (sizes.sum(), 1, 8, 8)).astype(np.uint8)
    y = random.integers(0, 3, len(x))
    public = random.integers(0, 256, (20, 1, 8, 8)).astype(np.uint8)
    arrays = {"x": x, "y": y, "sizes": sizes, "public": public}
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return arrays


@pytest.mark.parametrize("how", [SEQUENTIAL, STACKED], ids=lambda how: how.engine)
def test_mapped_arrays_give_what_arrays_in_memory_give(how: Execution, tmp_path: Path) -> None:
    arrays = written(tmp_path / "mapped")
    owner = np.repeat(np.arange(9), arrays["sizes"])
    file = tmp_path / "memory.npz"
    np.savez(file, x=arrays["x"], y=arrays["y"], public=arrays["public"], client=owner)
    numbers = []
    for data in (
        {"name": "mapped", "path": str(tmp_path / "mapped")},
        {"name": "npz", "path": str(file)},
    ):
        experiment = many(9, data=data, evaluate_clients=0, selection="by-size")
        simulation, channel = Simulation(experiment, how=how), Channel()
        simulation.begin(channel)
        for round in range(6):  # enough for a tape, which looks at where samples were
            simulation.play_round(round, channel)
        columns = simulation.population.evaluate(simulation.evaluation_messages(6), 6)
        kept = {
            client: {name: tensor.numpy() for name, tensor in flatten(record.tree()).items()}
            for client, record in simulation.population.records.items()
        }
        assert len(kept) > 6
        numbers.append((kept, columns))
    np.testing.assert_equal(*numbers)


@pytest.mark.skipif(not Path("/proc/self/smaps").is_file(), reason="Linux says what is in memory")
def test_mapped_arrays_that_were_read_do_not_stay_in_memory(tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((1000, 4096), np.float32)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(1000) % 3)
    np.save(tmp_path / "sizes.npy", np.full(100, 10))
    data = Mapped(str(tmp_path)).client_data(0, 100)
    for client in range(100):
        own, _ = data.client(client)
        np.testing.assert_array_equal(own, x[10 * client : 10 * client + 10])
    lines = Path("/proc/self/smaps").read_text().splitlines()
    (start,) = [n for n, line in enumerate(lines) if line.endswith(str(tmp_path / "x.npy"))]
    (resident,) = [line for line in lines[start : start + 6] if line.startswith("Rss:")]
    assert int(resident.split()[1]) < x.nbytes / 1024 / 4


def test_mapped_arrays_are_not_sent_but_read_again(tmp_path: Path) -> None:
    written(tmp_path / "mapped")
    data = Mapped(str(tmp_path / "mapped")).client_data(0, 9)
    sent = pickle.dumps(data)
    assert len(sent) < 500
    again = pickle.loads(sent)
    np.testing.assert_array_equal(again.client(4)[0], data.client(4)[0])


def test_wrong_folders_are_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x\.npy cannot be read"):
        Mapped(str(tmp_path)).client_data(0, 9)
    arrays = written(tmp_path / "a")
    with pytest.raises(ConfigError, match="the data has 9 clients, not 8"):
        Mapped(str(tmp_path / "a")).client_data(0, 8)
    np.save(tmp_path / "a" / "y.npy", arrays["y"][1:])
    with pytest.raises(ConfigError, match="must be the same number"):
        Mapped(str(tmp_path / "a")).client_data(0, 9)
    np.save(tmp_path / "a" / "y.npy", arrays["y"] + 0.5)
    with pytest.raises(ConfigError, match=r"y\.npy must be a list of whole numbers"):
        Mapped(str(tmp_path / "a")).client_data(0, 9)


def test_clients_with_data_of_their_own_keep_them() -> None:
    with pytest.raises(ConfigError, match="must be given"):
        build_federation(Synthetic(), IID(), Split(), 5, 0)
    with pytest.raises(ConfigError, match="fresh_test: clients' samples are never together"):
        build_federation(Synthetic(), Given(), Split(), 5, 0, fresh_test=3)
    with pytest.raises(ConfigError, match="must be at most clients"):
        many(4, clients_per_round=2, evaluate_clients=5)
