"""Pictures stay bytes in memory, and nothing that comes of them changes by a bit: every run is
compared with one on the same pictures, scaled to float32 beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perfed
from perfed.core.inputs import Tokens
from perfed.core.pixels import joined, numbers, samples_at, scaled
from perfed.data import Dataset, Federation, Samples, Shift, build_federation, datasets, partitions
from perfed.data.federation import Split
from perfed.data.needs import needs_of
from perfed.engines.stacked import StackedEngine
from perfed.flower.protocol import public_hash
from perfed.flower.settings import PublicSet
from perfed.runs.simulation import Simulation
from tests.conftest import RAY, SEQUENTIAL, STACKED, spec, tiny
from tests.engines.test_stacked import CNN, CNN_BN, contents, play, recording

RANDOM = np.random.default_rng(5)
PICTURES = RANDOM.integers(0, 256, (300, 1, 8, 8), dtype=np.uint8)
PUBLIC = RANDOM.integers(0, 256, (30, 1, 8, 8), dtype=np.uint8)
LABELS = np.arange(300) % 4
TRAINING = {"steps": 6, "batch_size": 8, "public_batch_size": 8, "learning_rate": 0.1}


def threaded(experiment: perfed.Experiment) -> Simulation:
    return Simulation(experiment, how=STACKED, engine=StackedEngine(threads=2))


ENGINES: dict[str, Callable[[perfed.Experiment], Simulation]] = {
    "sequential": lambda experiment: Simulation(experiment, how=SEQUENTIAL),
    "stacked": lambda experiment: Simulation(experiment, how=STACKED),
    "recording": recording,
}


def written(folder: Path) -> dict[str, dict[str, Any]]:
    """The same pictures in two files, and as which type."""
    for kind, (x, public) in {
        "bytes": (PICTURES, PUBLIC),
        "floats": (scaled(PICTURES), scaled(PUBLIC)),
    }.items():
        np.savez(folder / f"{kind}.npz", x=x, y=LABELS, public=public)
    return {
        kind: {"name": "npz", "path": str(folder / f"{kind}.npz")} for kind in ("bytes", "floats")
    }


def experiment(data: dict[str, Any], **changes: Any) -> perfed.Experiment:
    usual = {"models": [CNN_BN, CNN], "training": TRAINING, "split": {"train": [0.4]}}
    return tiny(**usual | {"data": data, "partition": "iid"} | changes)


def assert_same_bits(one: Simulation, other: Simulation) -> None:
    for simulation in (one, other):
        simulation.engine.collect(simulation.population)
    left, right = contents(one), contents(other)
    assert left.keys() == right.keys()
    assert [name for name, tensor in left.items() if not torch.equal(tensor, right[name])] == []


def assert_bytes_change_nothing(
    folder: Path,
    begin: Callable[[perfed.Experiment], Simulation],
    held_as: type[np.generic] = np.uint8,
    public_as: type[np.generic] = np.uint8,
    **changes: Any,
) -> None:
    played = {
        kind: play(begin(experiment(data, **changes))) for kind, data in written(folder).items()
    }
    samples = played["bytes"].federation.samples
    assert (samples.x.dtype, samples.public_x.dtype) == (held_as, public_as)
    assert played["floats"].federation.samples.x.dtype == np.float32
    assert_same_bits(*played.values())
    for simulation in played.values():
        simulation.engine.close()


# The seam.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_torch_makes_the_same_numbers_of_bytes_as_numpy(dtype: torch.dtype) -> None:
    every = np.arange(256, dtype=np.uint8).reshape(-1, 1, 4)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        made = numbers(torch.as_tensor(every))
        where = torch.tensor([[3, 0], [63, 3]])
        rows = samples_at(torch.as_tensor(every), where)
    finally:
        torch.set_default_dtype(before)
    assert made.dtype == dtype
    assert torch.equal(made, torch.as_tensor(scaled(every)).to(dtype))
    assert torch.equal(rows, made[where])


def test_what_are_no_bytes_stays() -> None:
    for table in (torch.randn(5, 2), torch.arange(10).view(5, 2), torch.randn(5, 2).double()):
        assert numbers(table) is table
        assert torch.equal(samples_at(table, torch.tensor([4, 1])), table[[4, 1]])


def test_tables_of_two_kinds_are_joined_as_numbers() -> None:
    pictures = torch.as_tensor(PUBLIC)
    assert joined([pictures]) is pictures
    assert joined([pictures, pictures]).dtype == torch.uint8
    both = joined([pictures, numbers(pictures)])
    assert torch.equal(both[:30], both[30:])
    assert torch.equal(both[:30], torch.as_tensor(scaled(PUBLIC)))


# Memory.


def test_tables_have_one_byte_for_each_number_and_are_there_once(tmp_path: Path) -> None:
    made = ENGINES["stacked"](experiment(written(tmp_path)["bytes"]))
    samples, population = made.federation.samples, made.population
    for array, table in ((samples.x, population.x), (samples.public_x, population.public_x)):
        assert array.itemsize == table.element_size() == 1
        assert table.data_ptr() == array.ctypes.data
    play(made)
    assert made.engine._tables.x.data_ptr() == samples.x.ctypes.data  # type: ignore[attr-defined]


def test_a_server_that_looks_at_the_public_set_sees_numbers(tmp_path: Path) -> None:
    seen = [
        ENGINES["sequential"](experiment(data)).server(0).public_x
        for data in written(tmp_path).values()
    ]
    assert torch.equal(*seen)


# Whole runs.


@pytest.mark.parametrize("name", ["ditto", "perfed-ckt"])
@pytest.mark.parametrize("engine", list(ENGINES))
def test_runs_are_the_same_on_every_engine(tmp_path: Path, engine: str, name: str) -> None:
    """With steps enough that most are played back from a tape; the second has public samples."""
    assert_bytes_change_nothing(tmp_path, ENGINES[engine], algorithm=spec(name))


@pytest.mark.ray
@pytest.mark.parametrize("name", ["ditto", "perfed-ckt"])
def test_runs_are_the_same_on_workers(tmp_path: Path, name: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'perfed[ray]'")
    begin = lambda made: Simulation(made, how=RAY)  # noqa: E731
    assert_bytes_change_nothing(tmp_path, begin, algorithm=spec(name))


@pytest.mark.parametrize("name", ["ditto", "perfed-ckt"])
def test_runs_of_large_networks_are_the_same(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client in a stack, on threads."""
    monkeypatch.setattr("perfed.engines.population.LARGE_STEP", 0)
    monkeypatch.setattr("perfed.engines.stacked.engine.WORTH_THREADS", 0)
    assert_bytes_change_nothing(tmp_path, threaded, algorithm=spec(name))


@pytest.mark.usefixtures("float64")
def test_runs_in_float64_are_the_same(tmp_path: Path) -> None:
    assert_bytes_change_nothing(tmp_path, ENGINES["stacked"])


@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize(
    "changes",
    [
        {"training": TRAINING | {"augment": ["flip", "crop"]}},
        {"algorithm": spec("feddf"), "models": [CNN]},  # whose server trains on the public set
        {
            "privacy": {"noise": 1.0, "epsilon": 50.0},
            "models": [CNN],
            "algorithm": {"name": "fedavg"},
        },
        {"clients": 3, "shared_test": True},
        {"shift": {"name": "labels"}},
        {"shift": {"name": "rotation", "public": True}, "shared_test": True},
    ],
    ids=["augment", "server", "privacy", "shared-test", "labels", "rotation"],
)
def test_other_ways_to_look_at_pictures_are_the_same(
    tmp_path: Path, engine: str, changes: dict[str, Any]
) -> None:
    assert_bytes_change_nothing(tmp_path, ENGINES[engine], **changes)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("name", ["noise", "contrast"])
def test_what_computes_with_pixels_gets_numbers(
    tmp_path: Path, engine: str, name: str, public: bool
) -> None:
    """The public set stays bytes, unless it is changed too."""
    shift = {"name": name, "public": public}
    public_as = np.float32 if public else np.uint8
    assert_bytes_change_nothing(tmp_path, ENGINES[engine], np.float32, public_as, shift=shift)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_fresh_samples_are_the_same(tmp_path: Path, engine: str) -> None:
    played = [
        play(ENGINES[engine](experiment(data | {"samples": 120}, clients=3, fresh_test=40)))
        for data in written(tmp_path).values()
    ]
    assert played[0].federation.samples.x.itemsize == 1
    assert len(played[0].federation.samples.x) > 120
    assert_same_bits(*played)


@pytest.mark.parametrize("shift", [None, "rotation", "noise"])
@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_pictures_that_stay_on_disk_are_the_same(
    tmp_path: Path, engine: str, shift: str | None
) -> None:
    played = []
    for kind, x, public in (
        ("bytes", PICTURES, PUBLIC),
        ("floats", scaled(PICTURES), scaled(PUBLIC)),
    ):
        folder = tmp_path / kind
        folder.mkdir()
        arrays = {"x": x, "y": LABELS, "public": public, "sizes": np.full(6, 50)}
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
        data = {"name": "mapped", "path": str(folder)}
        changes = {"partition": "given", "shift": shift, "rounds": 6}
        played.append(play(ENGINES[engine](experiment(data, **changes)), 6))
    window = played[0].population.x
    assert window.dtype == (torch.float32 if shift == "noise" else torch.uint8)
    assert played[0].population.public_x.dtype == torch.uint8
    assert_same_bits(*played)


# What are no pictures in bytes, or must not look like them.


def federation(dataset: Dataset, shift: Shift | None = None) -> Federation:
    return build_federation(dataset, partitions.build("iid"), Split(), 3, 0, shift=shift)


@dataclass(frozen=True)
class Raw(Dataset):
    """A user's own, which says nothing of pixels."""

    def load(self, seed: int) -> Samples:
        return Samples(PICTURES, LABELS, np.arange(300), PUBLIC, np.arange(30), 4)


def test_bytes_that_nobody_calls_pixels_reach_networks_as_they_are() -> None:
    made = tiny(data=f"{__name__}:Raw", partition="iid", models=["mlp"])
    population = Simulation(made, how=SEQUENTIAL).population
    assert torch.equal(population.x, torch.as_tensor(PICTURES).float())
    assert torch.equal(population.public_x, torch.as_tensor(PUBLIC).float())


def test_bytes_that_are_tokens_stay_integers(tmp_path: Path) -> None:
    x = PICTURES[:, 0, 0]
    np.savez(tmp_path / "tokens.npz", x=x, y=LABELS)
    data = {"name": "npz", "path": str(tmp_path / "tokens.npz"), "vocabulary": 256}
    made = tiny(data=data | {"public": 30}, partition="iid", models=["token-mean"])
    simulation = Simulation(made, how=SEQUENTIAL)
    assert simulation.population.x.dtype == torch.int64
    samples = simulation.federation.samples
    assert np.array_equal(samples.numbers(samples.x), x[samples.index])
    assert samples.tokens == Tokens(256)


def test_a_public_set_of_bytes_is_standardised_as_numbers(tmp_path: Path) -> None:
    """By the columns of a private table, as those of float32 are."""
    rows = [f"{number % 7},{number % 5},{number % 2}" for number in range(60)]
    (tmp_path / "a.csv").write_text("\n".join(["a,b,label", *rows]))
    public = PUBLIC[:, 0, 0, :2]
    made = []
    for kind, x in (("bytes", public), ("floats", scaled(public))):
        np.savez(tmp_path / f"{kind}.npz", x=x, y=np.arange(30) % 2)
        other = {"name": "npz", "path": str(tmp_path / f"{kind}.npz")}
        own = {"name": "csv", "path": str(tmp_path / "a.csv"), "public": other}
        made.append(federation(datasets.build(own)).samples)
    assert made[0].public_x.dtype == np.float32
    assert np.array_equal(made[0].public_x, made[1].public_x)
    assert not made[0].pixels


def test_private_numbers_may_have_a_public_set_of_bytes(tmp_path: Path) -> None:
    data = written(tmp_path)
    np.savez(tmp_path / "own.npz", x=scaled(PICTURES), y=LABELS)
    own = {"name": "npz", "path": str(tmp_path / "own.npz")}
    played = [
        play(ENGINES["stacked"](experiment(own | {"public": public}))) for public in data.values()
    ]
    samples = played[0].federation.samples
    assert (samples.x.itemsize, samples.public_x.itemsize) == (4, 1)
    assert_same_bits(*played)


@dataclass(frozen=True)
class Darker(Shift):
    """A user's own shift, which computes."""

    def inputs(self, x: np.ndarray, group: int, random: np.random.Generator) -> np.ndarray:
        assert x.dtype == np.float32
        return np.asarray(x - np.float32(0.25 * group))


def test_a_shift_of_ones_own_gets_numbers(tmp_path: Path) -> None:
    shift = Darker(groups=(1, 1))
    made = [federation(datasets.build(data), shift).samples for data in written(tmp_path).values()]
    assert made[0].x.dtype == np.float32
    assert made[0].x.min() < -1
    assert np.array_equal(made[0].x, made[1].x)


# Who looks at samples.


def test_a_model_of_bytes_says_that_it_takes_pixels(tmp_path: Path) -> None:
    made = [federation(datasets.build(data)) for data in written(tmp_path).values()]
    needs = [needs_of(one, one.inputs) for one in made]
    assert needs[0] == needs[1]
    assert needs[0].pixels == (-1.0, 1.0)


def test_ranges_are_said_in_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A public set in other units, beside bytes and beside the same pictures as numbers."""
    said: list[str] = []
    monkeypatch.setattr("perfed.data.likeness.say_once", said.append)
    for kind, x in (("bytes", PICTURES), ("floats", scaled(PICTURES))):
        path = tmp_path / f"{kind}.npz"
        np.savez(path, x=x, y=LABELS, public=50 * scaled(PUBLIC))
        datasets.build({"name": "npz", "path": str(path)}).load(0)
    assert said[0] == said[1]
    assert "-50 … 50 (mean" in said[0]
    assert "against -1 … 1 (mean" in said[0]


def test_two_sites_agree_on_a_public_set_whether_it_is_bytes_or_numbers(tmp_path: Path) -> None:
    hashes = set()
    for data in written(tmp_path).values():
        for public in (PublicSet(dataset=datasets.build(data)), PublicSet(file=data["path"])):
            read = public.load(0)
            assert read is not None
            hashes.add(public_hash(read.x))
    assert hashes == {public_hash(scaled(PUBLIC))}
