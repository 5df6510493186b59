"""Whatever a user's data comes as, the same samples arrive, and what is wrong is one clear line."""

import logging
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import perfed
from perfed import Split, datasets, partitions
from perfed.core.errors import ConfigError
from perfed.core.notices import say_once
from perfed.core.pixels import scaled
from perfed.data import build_federation
from perfed.data.datasets import Samples
from perfed.data.likeness import check_alike, oddities
from tests.conftest import tiny
from tests.data import own_files

X = np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8), dtype=np.uint8)
Y = np.arange(40) % 4


class Forty(Dataset[Any]):
    """What an import path names."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> Any:
        return X[number], int(Y[number])


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return ((torch.tensor(x), torch.tensor(y)) for x, y in zip(X, Y, strict=True))


class FortyAlone(Forty):
    def __getitem__(self, number: int) -> Any:
        return X[number]


def load(seed: int = 0, **options: Any) -> Samples:
    return datasets.build(options).load(seed)


def sources(root: Path) -> dict[str, dict[str, Any]]:
    """The same samples in every way there is."""
    np.savez(root / "all.npz", x=X, y=Y)
    np.save(root / "x.npy", X)
    np.save(root / "y.npy", Y)
    for number, (x, y) in enumerate(zip(X, Y, strict=True)):
        own_files.save(root / "photos" / "abcd"[y] / f"{number:02d}.png", x.transpose(1, 2, 0))
    return {
        "npz": {"name": "npz", "path": str(root / "all.npz")},
        "npy": {"name": "npz", "path": str(root / "x.npy"), "labels": str(root / "y.npy")},
        "images": {"name": "images", "path": str(root / "photos")},
        "class": {"name": "torch", "path": f"{__name__}:Forty"},
        "object": {"name": "torch", "path": Forty()},
        "stream": {"name": "torch", "path": Stream()},
        "tensors": {"name": "torch", "path": TensorDataset(torch.tensor(X), torch.tensor(Y))},
    }


KINDS = ("npz", "npy", "images", "class", "object", "stream", "tensors")


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_same_samples(tmp_path: Path, kind: str) -> None:
    samples = load(**sources(tmp_path)[kind])
    order = np.argsort(Y, kind="stable") if kind == "images" else np.arange(40)
    assert np.allclose(samples.numbers(samples.x), X[order] / 127.5 - 1, atol=1e-6)
    assert samples.y.tolist() == Y[order].tolist()
    assert samples.classes == 4
    assert samples.origin["samples"] == 40


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_can_be_the_public_set(tmp_path: Path, kind: str) -> None:
    all_sources = sources(tmp_path)
    public = all_sources[kind] | {"samples": 15}
    samples = load(**all_sources["npz"], public=public, seed=3)
    assert len(samples.x) == 40  # nothing is held out
    order = np.argsort(Y, kind="stable") if kind == "images" else np.arange(40)
    assert len(samples.public_index) == 15
    public_x = samples.numbers(samples.public_x)
    assert np.allclose(public_x, X[order][samples.public_index] / 127.5 - 1, atol=1e-6)
    again = load(**all_sources["npz"], public=public, seed=3).public_index
    assert np.array_equal(samples.public_index, again)
    assert len(samples.origin["public"]["hash"]) == 32


def test_samples_of_one_class_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    """They were when the models were written, after the last round."""
    np.savez(tmp_path / "one.npz", x=X, y=np.zeros(40, dtype=np.int64))
    for number in range(12):
        own_files.save(tmp_path / "photos" / "cat" / f"{number}.png", X[number].transpose(1, 2, 0))
    for data, name in (
        ({"name": "npz", "path": str(tmp_path / "one.npz")}, "0"),
        ({"name": "images", "path": str(tmp_path / "photos")}, "cat"),
    ):
        experiment = tiny(data=data, clients=3, partition="iid", algorithm="local")
        with pytest.raises(ConfigError, match=f"data: all samples are of one class, '{name}'"):
            perfed.run(experiment, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_numbers_are_in_memory_once(tmp_path: Path) -> None:
    """While a file is read, too; to look for what is not finite takes a quarter more."""
    x = np.ones((500, 3, 32, 32), np.float32)
    np.savez(tmp_path / "all.npz", x=x, y=np.arange(500) % 10)
    tracemalloc.start()
    try:
        samples = load(name="npz", path=str(tmp_path / "all.npz"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(samples.x, x)
    assert peak < 1.5 * x.nbytes


def test_numbers_of_a_mapped_file_are_read(tmp_path: Path) -> None:
    """torch wants arrays that can be written to."""
    np.save(tmp_path / "x.npy", np.ones((4, 2), np.float32))
    found = scaled(np.load(tmp_path / "x.npy", mmap_mode="r"))
    assert found.flags.writeable
    assert not isinstance(found.base, np.memmap)


def test_a_public_set_needs_no_labels(tmp_path: Path) -> None:
    all_sources = sources(tmp_path)
    own_files.save(tmp_path / "flat" / "deep" / "er" / "1.png", X[0].transpose(1, 2, 0))
    own_files.save(tmp_path / "flat" / "2.bmp", X[1].transpose(1, 2, 0))
    np.savez(tmp_path / "only.npz", x=X[:5])
    for public, count in (
        ({"name": "images", "path": str(tmp_path / "flat")}, 2),
        ({"name": "npz", "path": str(tmp_path / "x.npy")}, 40),
        ({"name": "npz", "path": str(tmp_path / "only.npz")}, 5),
        ({"name": "torch", "path": f"{__name__}:FortyAlone"}, 40),
    ):
        assert len(load(**all_sources["npz"], public=public).public_x) == count
        with pytest.raises(ConfigError, match=r"label|no array 'y'|no folders"):
            load(**public)


def test_held_out_samples_are_no_longer_private(tmp_path: Path) -> None:
    samples = load(**sources(tmp_path)["images"], public=10, samples=20)
    assert (len(samples.x), len(samples.public_x)) == (20, 10)
    assert not set(samples.index) & set(samples.public_index)


def test_folders_by_client_are_the_partition(tmp_path: Path) -> None:
    names = {"b": ("cat", "dog"), "a": ("dog", "emu"), "c": ("cat", "emu")}
    for seed, (client, classes) in enumerate(names.items()):
        own_files.photos(tmp_path / client, classes, each=5, first_seed=100 * seed)
    data = datasets.build({"name": "images", "path": str(tmp_path), "by_client": True})
    samples = data.load(0)
    assert samples.origin["classes"] == ["cat", "dog", "emu"]
    held = {c: set(samples.y[samples.client_ids == c]) for c in "abc"}
    assert held == {"a": {1, 2}, "b": {0, 1}, "c": {0, 2}}
    federation = build_federation(data, partitions.build("given"), Split(), 3, 0)
    record = federation.record()
    assert record["client_names"] == ["a", "b", "c"]
    assert record["sizes"] == [10, 10, 10]
    with pytest.raises(ConfigError, match="if 'a' is a client's, set by_client: true"):
        load(name="images", path=str(tmp_path))
    (tmp_path / "d").mkdir()
    own_files.save(tmp_path / "d" / "cat" / "1.png", own_files.picture(0, 0))
    with pytest.raises(ConfigError, match="client d has 1 samples"):
        build_federation(data, partitions.build("given"), Split(), 4, 0)
    own_files.save(tmp_path / "d" / "cat" / "1.png", own_files.picture(0, 0, (9, 8)))
    with pytest.raises(ConfigError, match="the samples of 'd' are 3×9×8, those of 'a' 3×8×8"):
        data.load(0)


def test_a_file_for_each_client(tmp_path: Path) -> None:
    for number in range(3):
        np.savez(tmp_path / f"site.{number}.npz", x=X[number::3], y=Y[number::3])
    samples = load(name="npz", path=str(tmp_path), by_client=True)
    assert sorted(set(samples.client_ids)) == ["site.0", "site.1", "site.2"]
    assert np.array_equal(samples.x[samples.client_ids == "site.1"], X[1::3])


def test_splits_of_a_folder_are_taken_together(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        own_files.photos(tmp_path / split, ("a", "b"), each=3)
    assert len(load(name="images", path=str(tmp_path)).x) == 18


def test_pictures_are_resized_and_grey_where_told(tmp_path: Path) -> None:
    own_files.photos(tmp_path, ("a",), each=2, size=(8, 8))
    own_files.photos(tmp_path, ("b",), each=2, size=(16, 12))
    with pytest.raises(ConfigError, match=r"b/000.png is 16×12.*set 'size' to have them resized"):
        load(name="images", path=str(tmp_path))
    samples = load(name="images", path=str(tmp_path), size=[6, 4], colours="grey")
    assert samples.x.shape == (4, 1, 6, 4)
    with Image.open(tmp_path / "b" / "001.png") as opened:
        by_hand = np.asarray(opened.convert("L").resize((4, 6), Image.Resampling.BILINEAR))
    assert np.array_equal(samples.x[3, 0], by_hand)
    with pytest.raises(ConfigError, match="size: \\[32\\] is not a height and a width"):
        datasets.build({"name": "images", "path": "x", "size": [32]})


def broken(root: Path) -> dict[str, tuple[dict[str, Any], str]]:
    own_files.photos(root / "ok", ("a", "b"), each=2)
    (root / "ok" / "a" / "bad.png").write_bytes(b"no picture")
    (root / "empty").mkdir()
    np.savez(root / "a.npz", x=X, y=Y)
    np.savez(root / "p.npz", x=X, y=Y, public=X)

    class Ragged(Forty):
        def __getitem__(self, number: int) -> Any:
            return X[number][:, : 8 - number // 39], 0

    class Words(Forty):
        def __getitem__(self, number: int) -> Any:
            return X[number], "cat"

    class Fails(Forty):
        def __getitem__(self, number: int) -> Any:
            raise KeyError("file 7 is gone")

    class Pictures(Forty):
        def __getitem__(self, number: int) -> Any:
            return Image.new("RGB", (8, 8)), 0

    def torch_(value: Any) -> dict[str, Any]:
        return {"name": "torch", "path": value}

    return {
        "no path": ({"name": "images"}, "data.path: missing"),
        "no folder": ({"name": "images", "path": "gone"}, "data.path: no such folder: 'gone'"),
        "no pictures": (
            {"name": "images", "path": str(root / "empty")},
            "it needs a folder of pictures for each class",
        ),
        "bad picture": ({"name": "images", "path": str(root / "ok")}, "bad.png: is no picture"),
        "npz labels": (
            {"name": "npz", "path": str(root / "a.npz"), "labels": "y.npy"},
            "data.labels: only for an .npy file",
        ),
        "public path": (
            {"name": "npz", "path": str(root / "a.npz"), "public": {"name": "images", "path": "g"}},
            "data.public.path: no such folder: 'g'",
        ),
        "too many public": (
            {"name": "npz", "path": str(root / "a.npz"), "public": 40},
            "data.public: 40 public samples of 40",
        ),
        "too many drawn": (
            {
                "name": "npz",
                "path": str(root / "a.npz"),
                "public": {"name": "npz", "path": str(root / "a.npz"), "samples": 41},
            },
            "data.public.samples: 41 samples of the 40",
        ),
        "two public": (
            {"name": "npz", "path": str(root / "p.npz"), "public": torch_(Forty())},
            "p.npz has a public set of its own: leave out either",
        ),
        "no dataset": (torch_(f"{__name__}:X"), "is a ndarray, not a torch.utils.data.Dataset"),
        "no such name": (torch_(f"{__name__}:Fourty"), "did you mean 'Forty'?"),
        "fails": (torch_(f"{__name__}:makes_nothing"), "ValueError: nothing to be had"),
        "ragged": (torch_(Ragged()), "item 39 of the dataset: x is of shape (3, 7, 8)"),
        "words": (torch_(Words()), "item 0 of the dataset: label 'cat' must be 0, 1, 2"),
        "raises": (torch_(Fails()), "item 0 of the dataset: KeyError: 'file 7 is gone'"),
        "pictures": (torch_(Pictures()), "x is a Image, must be a tensor or an array"),
        "object": (torch_(3), "a int is no torch.utils.data.Dataset"),
    }


def makes_nothing() -> None:
    raise ValueError("nothing to be had")


FAULTS = (
    "no path, no folder, no pictures, bad picture, npz labels, public path, too many public, "
    "too many drawn, two public, no dataset, no such name, fails, ragged, words, raises, "
    "pictures, object"
)


@pytest.mark.parametrize("fault", FAULTS.split(", "))
def test_what_is_wrong_is_one_line_that_says_where(tmp_path: Path, fault: str) -> None:
    cases = broken(tmp_path)
    options, message = cases[fault]
    with pytest.raises(ConfigError) as caught:
        load(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    arrays_of.arrays(
        st.sampled_from([np.uint8, np.float32, np.float64, np.int64]),
        arrays_of.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4),
        elements={"min_value": 0, "max_value": 100},
    )
)
def test_any_array_is_read_as_it_is_or_refused_in_words(
    tmp_path_factory: pytest.TempPathFactory, x: np.ndarray
) -> None:
    path = tmp_path_factory.mktemp("any") / "x.npz"
    np.savez(path, x=x, y=np.arange(len(x)) % 2)
    if x.ndim < 2 or not x.size:
        with pytest.raises(ConfigError, match="must be numbers, samples × features"):
            load(name="npz", path=str(path))
        return
    samples = load(name="npz", path=str(path))
    expected = x / 127.5 - 1 if x.dtype == np.uint8 else x
    assert np.allclose(
        samples.numbers(samples.x).reshape(x.shape), expected
    )  # pictures get a channel
    assert samples.x.ndim == x.ndim + (x.ndim == 3 and x.dtype == np.uint8)


def test_a_hash_tells_data_apart_and_changed_data_stops_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    x = np.random.default_rng(1).normal(size=(200, 5))
    np.savez(path, x=x, y=np.arange(200) % 3)

    class Stop(perfed.Callback):
        def on_round(self, report: Any) -> None:
            raise KeyboardInterrupt

    experiment = tiny(
        data={"name": "npz", "path": str(path), "public": 30},
        models=["mlp"],
        partition={"name": "groups", "groups": 2},
    )
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        perfed.run(experiment, run, callbacks=[Stop()], how=perfed.Execution(checkpoint_seconds=0))
    np.savez(path, x=x + 0.001, y=np.arange(200) % 3)  # the partition is the same
    with pytest.raises(perfed.PerfedError, match="the data is not what it was"):
        perfed.resume(run)
    np.savez(path, x=x, y=np.arange(200) % 3)
    assert perfed.resume(run).summary["finished"]


IMAGES = np.random.default_rng(2).uniform(-1, 1, (50, 3, 8, 8)).astype(np.float32)
GREY = np.repeat(IMAGES[:, :1], 3, axis=1)


@pytest.mark.parametrize(
    ("private", "public", "words"),
    [
        (IMAGES, IMAGES[::-1], []),
        (IMAGES, IMAGES[:0], []),
        (IMAGES, (IMAGES + 1) * 127.5, ["public values look unlike private ones: 0"]),
        (IMAGES, IMAGES / 255, ["public values look unlike private ones"]),
        (IMAGES, GREY, ["public images are all grey, private ones in colour"]),
        (GREY, IMAGES, ["public images are all in colour, private ones grey"]),
        (GREY, GREY * 100, ["public values look unlike private ones"]),
    ],
)
def test_oddities_are_said_in_words(
    private: np.ndarray, public: np.ndarray, words: list[str]
) -> None:
    lines = list(oddities(private, public))
    assert len(lines) == len(words)
    for line, word in zip(lines, words, strict=True):
        assert word in line


def test_shapes_that_differ_are_an_error_that_says_what_is_right() -> None:
    with pytest.raises(ConfigError, match=r"public samples are 3×9×9, .* \{size: \[8, 8\]\}"):
        check_alike(IMAGES, np.zeros((5, 3, 9, 9)))
    with pytest.raises(ConfigError, match=r"\{size: \[8, 8\], colours: rgb\}"):
        check_alike(IMAGES, np.zeros((5, 1, 9, 9)))
    with pytest.raises(ConfigError, match="public samples are 4, private ones 5: they must be"):
        check_alike(np.zeros((3, 5)), np.zeros((3, 4)))


def test_a_user_is_warned_once_of_an_odd_public_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_files.photos(tmp_path / "mine", each=5)
    own_files.photos(tmp_path / "other", each=5, size=(40, 40), grey=True)
    public = {"name": "images", "path": str(tmp_path / "other"), "size": [8, 8]}
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "perfed"):
        for _ in range(2):
            load(name="images", path=str(tmp_path / "mine"), public=public)
    assert caplog.messages == [
        "public images were 40×40 before they were resized, private ones 8×8: "
        "details may look different",
        "public images are all grey, private ones in colour",
    ]


def test_a_stray_label_and_clients_that_are_dealt_anew_are_spoken_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    np.savez(tmp_path / "own.npz", x=x, y=y, client=np.arange(40) % 4)
    np.savez(tmp_path / "stray.npz", x=x, y=np.where(np.arange(40) == 7, 1000, y))
    with caplog.at_level(logging.WARNING, "perfed"):
        say_once.cache_clear()
        own, stray = (
            datasets.build({"name": "npz", "path": str(tmp_path / f"{name}.npz")})
            for name in ("own", "stray")
        )
        own.load(0)
        assert not caplog.messages
        stray.load(0)
        assert "networks have 1001 outputs, but only 3 labels occur" in caplog.text
        caplog.clear()
        for partition in ("given", "iid", "iid"):
            build_federation(own, partitions.build(partition), Split(), 4, 0)
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "the data say whose each sample is"
    ]
