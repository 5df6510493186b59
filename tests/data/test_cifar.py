"""The stored sets as datasets of an experiment."""

from pathlib import Path

import numpy as np
import pytest

import perfed
from perfed.core.errors import ConfigError
from perfed.core.pixels import scaled
from perfed.data import Split, build_federation, cache, datasets, partitions
from perfed.data.cifar import CIFAR10, CIFAR100, Cifar10, Cifar100
from tests.conftest import tiny
from tests.data import sets

PUBLIC = np.random.default_rng(1).integers(256, size=(40, 3, 32, 32), dtype=np.uint8)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small CIFAR-10, and an unlabeled CIFAR-100, where they are looked for."""
    root = tmp_path / "stored"
    monkeypatch.setenv("PERFED_DATA", str(root))
    cache.get(CIFAR10, root, sets.npz(tmp_path / "10.npz"))
    cache.get(CIFAR100, root, sets.npz(tmp_path / "100.npz", images=PUBLIC))
    return root


@pytest.fixture
def labeled(tmp_path: Path) -> str:
    """A small CIFAR-100 with labels, in a folder of its own."""
    root = tmp_path / "labeled"
    labels = np.arange(40) % 7
    cache.get(CIFAR100, root, sets.npz(tmp_path / "l.npz", images=PUBLIC, labels=labels))
    return str(root)


def test_the_names_of_the_classes() -> None:
    for each, count in ((CIFAR10, 10), (CIFAR100, 100)):
        assert len(set(each.classes)) == count
        assert list(each.classes) == sorted(each.classes)  # as both sets are numbered


def test_bytes_are_scaled_from_minus_one_to_one() -> None:
    every = np.arange(256, dtype=np.uint8)
    result = scaled(every)
    assert result.dtype == np.float32
    assert (result[0], result[255]) == (-1, 1)
    assert np.allclose(result, np.linspace(-1, 1, 256), atol=1e-6)
    assert every[255] == 255
    assert np.array_equal(scaled(np.array([0.5, 3.0])), [0.5, 3.0])


@pytest.mark.parametrize("samples", [0, 12])
def test_samples_say_where_they_stood(stored: Path, samples: int) -> None:
    loaded = Cifar10(public=15, samples=samples).load(3)
    assert len(loaded.x) == len(loaded.y) == len(loaded.index) == (samples or 30)
    assert np.array_equal(loaded.x, sets.PIXELS[loaded.index])
    assert np.array_equal(loaded.numbers(loaded.x), scaled(sets.PIXELS[loaded.index]))
    assert np.array_equal(loaded.y, sets.LABELS[loaded.index])
    assert len(loaded.public_index) == 15
    assert np.array_equal(loaded.public_x, PUBLIC[loaded.public_index])
    for index in (loaded.index, loaded.public_index):
        assert (np.diff(index) > 0).all()
    assert loaded.classes == 10
    assert (loaded.x.dtype, loaded.public_x.dtype) == (np.uint8, np.uint8)


def test_the_seed_draws_and_draws_do_not_disturb_each_other(stored: Path) -> None:
    first = Cifar10(public=15, samples=12).load(0)
    same, other = Cifar10(public=15, samples=12).load(0), Cifar10(public=15, samples=12).load(1)
    assert np.array_equal(first.index, same.index)
    assert np.array_equal(first.public_index, same.public_index)
    assert not np.array_equal(first.index, other.index)
    assert not np.array_equal(first.public_index, other.public_index)
    fewer_private = Cifar10(public=15, samples=5).load(0)
    fewer_public = Cifar10(public=3, samples=12).load(0)
    assert np.array_equal(fewer_private.public_index, first.public_index)
    assert np.array_equal(fewer_public.index, first.index)
    assert set(fewer_private.index) < set(first.index)  # more samples are the same and others
    assert set(fewer_public.public_index) < set(first.public_index)


def test_what_a_run_does_to_its_samples_stays_there(stored: Path) -> None:
    for samples in (0, 12):
        loaded = Cifar10(public=15, samples=samples).load(0)
        for array in (loaded.x, loaded.y, loaded.public_x):
            array[:] = 7
    assert np.array_equal(Cifar10(public=0).load(0).x, sets.PIXELS)
    assert np.array_equal(Cifar10(public=0).load(0).y, sets.LABELS)


def test_without_a_public_set_cifar100_is_not_needed(tmp_path: Path) -> None:
    cache.get(CIFAR10, tmp_path, sets.npz(tmp_path / "10.npz"))
    loaded = Cifar10(public=0, folder=str(tmp_path)).load(0)
    assert loaded.public_x.shape == (0, 3, 32, 32)
    assert loaded.public_x.dtype == np.uint8


def test_cifar10_can_hold_its_public_set_out_of_itself(stored: Path) -> None:
    """No image is in both sets, and none is lost."""
    whole = Cifar10(public=0).load(3)
    held = Cifar10(public=7, public_from="itself").load(3)
    images = [image.tobytes() for image in (*held.x, *held.public_x)]
    assert len(held.public_x) == 7
    assert sorted(images) == sorted(image.tobytes() for image in whole.x)
    assert held.classes == 10


def test_cifar100_holds_its_public_set_out_of_itself(labeled: str) -> None:
    loaded = Cifar100(public=10, samples=20, folder=labeled).load(0)
    assert loaded.classes == 100  # though only seven of them occur
    assert len(loaded.index) == 20
    assert set(loaded.index).isdisjoint(loaded.public_index)
    assert np.array_equal(loaded.x, PUBLIC[loaded.index])
    assert np.array_equal(loaded.y, loaded.index % 7)
    assert np.array_equal(loaded.public_x, PUBLIC[loaded.public_index])
    everything = Cifar100(public=10, folder=labeled).load(0)
    assert np.array_equal(everything.public_index, loaded.public_index)
    assert sorted([*everything.index, *everything.public_index]) == list(range(40))


def test_what_is_not_there_names_the_command(stored: Path, labeled: str, tmp_path: Path) -> None:
    for options, message in (
        ({"name": "cifar10", "folder": labeled}, rf"get cifar10 --to {labeled}$"),
        ({"name": "cifar10", "public": 41}, r"data\.public: 41 public images of the 40 stored"),
        ({"name": "cifar10", "samples": 31, "public": 1}, r"data\.samples: 31 samples of the 30"),
        ({"name": "cifar100"}, "data: the stored cifar100 has no labels"),
        ({"name": "cifar100", "folder": labeled, "public": 40}, "data.public: 40 public samples"),
        ({"name": "cifar100", "folder": str(tmp_path / "no")}, "cifar100 is not in .*/no; get it"),
    ):
        with pytest.raises(ConfigError, match=message):
            datasets.build(options).load(0)
    (stored / "cifar100").rename(tmp_path / "away")
    with pytest.raises(ConfigError, match=r"data: cifar100 .*: perfed data get cifar100$"):
        Cifar10().load(0)


def test_a_run_records_numbers_of_the_stored_set(stored: Path, tmp_path: Path) -> None:
    data = Cifar10(public=15, samples=24)
    record = build_federation(data, partitions.build("iid"), Split(), 3, 0).record()
    parts = ("train", "validation", "test", "unused")
    held = sorted(n for client in record["clients"] for part in parts for n in client[part])
    assert held == data.load(0).index.tolist()
    assert record["public"] == data.load(0).public_index.tolist()
    options = {"name": "cifar10", "public": 15, "samples": 24}
    experiment = tiny(data=options, clients=4, clients_per_round=2, rounds=1, partition="iid")
    result = perfed.run(experiment, tmp_path / "run")
    assert result.experiment.data == data
