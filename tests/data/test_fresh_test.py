"""Evaluating clients on samples that nobody holds, or on the test samples of all."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import perfed
from perfed.core.errors import ConfigError
from perfed.data import Split, build_federation, partitions
from perfed.data.datasets import Digits, Samples, finished
from perfed.data.federation import ClientSplit, freshly_tested, jointly_tested
from perfed.data.files import Npz
from tests.conftest import tiny

LABELS = 4


@given(
    labels=st.lists(st.integers(0, LABELS - 1), min_size=30, max_size=80),
    clients=st.integers(1, 4),
    count=st.integers(1, 40),
    mix=st.sampled_from(["test", "held"]),
    seed=st.integers(0, 99),
)
def test_fresh_samples_are_nobodys_and_have_each_clients_label_mix(
    labels: list[int], clients: int, count: int, mix: Any, seed: int
) -> None:
    held = np.array(labels)
    y = np.concatenate([held, np.repeat(np.arange(LABELS), 60)])
    x = np.arange(len(y), dtype=np.float32)[:, None]
    none = np.zeros(0, dtype=np.int64)
    stored = Samples(x, y, 1000 + np.arange(len(y)), x[:1], none, LABELS)
    samples = finished(stored, len(held), seed)
    random = np.random.default_rng(seed)
    owner = random.permutation(np.arange(len(held)) % clients)
    splits = [
        ClientSplit(*np.array_split(random.permutation(np.flatnonzero(owner == k)), 4))
        for k in range(clients)
    ]

    after, fresh = freshly_tested(samples, splits, count, mix, seed)

    for before, split in zip(splits, fresh, strict=True):
        assert len(split.test) == len(set(split.test.tolist())) == count
        # The same samples as in the stored set, by number, none of which any client holds.
        assert not set(after.index[split.test]) & set(samples.index)
        assert (after.y[split.test] == stored.y[after.index[split.test] - 1000]).all()
        assert (after.x[split.test] == stored.x[after.index[split.test] - 1000]).all()
        own = before.test if mix == "test" else np.concatenate([*vars(before).values()])
        due = count * np.bincount(samples.y[own], minlength=LABELS) / len(own)
        found = np.bincount(after.y[split.test], minlength=LABELS)
        assert (np.abs(found - due) <= 1).all()
        assert (found[due == 0] == 0).all()
        # Nothing else changes.
        assert (split.train == before.train).all()
        assert (split.validation == before.validation).all()
        assert sorted(split.unused) == sorted([*before.unused, *before.test])
    assert (after.x[: len(held)] == samples.x).all()


@given(
    labels=st.lists(st.integers(0, LABELS - 1), min_size=30, max_size=80),
    clients=st.integers(1, 4),
    mix=st.sampled_from(["test", "held"]),
    seed=st.integers(0, 99),
)
def test_shared_test_samples_are_no_training_samples_and_have_each_clients_label_mix(
    labels: list[int], clients: int, mix: Any, seed: int
) -> None:
    y = np.array(labels)
    x = np.arange(len(y), dtype=np.float32)[:, None]
    none = np.zeros(0, dtype=np.int64)
    samples = Samples(x, y, 1000 + np.arange(len(y)), x[:1], none, LABELS)
    random = np.random.default_rng(seed)
    owner = random.permutation(np.arange(len(y)) % clients)
    splits = [
        ClientSplit(*np.array_split(random.permutation(np.flatnonzero(owner == k)), 4))
        for k in range(clients)
    ]
    pool = {1000 + i for split in splits for i in split.test.tolist()}
    there = np.bincount([y[i - 1000] for i in pool], minlength=LABELS)

    after, shared = jointly_tested(samples, splits, mix, seed)

    for before, split in zip(splits, shared, strict=True):
        assert split.test.min() >= len(y)  # copies: a shift changes them alone
        original = after.index[split.test]
        assert set(original) <= pool
        assert len(set(original)) == len(original)
        assert (after.y[split.test] == y[original - 1000]).all()
        assert (after.x[split.test] == x[original - 1000]).all()
        own = before.test if mix == "test" else np.concatenate([*vars(before).values()])
        counts = np.where(there > 0, np.bincount(y[own], minlength=LABELS), 0)
        due = len(original) * counts / counts.sum()
        found = np.bincount(after.y[split.test], minlength=LABELS)
        assert (np.abs(found - due) <= 1).all()
        # Some label is used up, or nearly.
        assert (there - found)[counts > 0].min() <= 1
        if mix == "test":
            assert len(original) >= len(before.test)
        assert (split.train == before.train).all()
        assert (split.validation == before.validation).all()
        assert sorted(split.unused) == sorted([*before.unused, *before.test])
    assert (after.x[: len(y)] == x).all()


def test_with_shared_test_samples_training_is_the_same_and_one_sample_weighs_less(
    tmp_path: Path,
) -> None:
    experiment = tiny(partition={"name": "dirichlet", "alpha": 0.5, "minimum": 10})
    own = perfed.run(experiment, tmp_path / "own")
    shared = perfed.run(dataclasses.replace(experiment, shared_test=True), tmp_path / "shared")
    for k in range(experiment.clients):
        pairs = zip(own.model(k).parameters(), shared.model(k).parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert (shared.per_client()["test_size"] > own.per_client()["test_size"]).all()
    # A sample of the pool judges several clients. Whoever holds more still counts for more.
    frame = shared.per_client()
    accuracy = frame[frame["round"] == frame["round"].max()]["test_accuracy"]
    held = shared.directory.read_json("partition.json")["sizes"]
    weighted = shared.summary["models"]["personal"]["last"]["test_accuracy_weighted"]
    assert weighted == pytest.approx(np.average(accuracy, weights=held))
    recorded = shared.directory.read_json("partition.json")["clients"]
    trained_on = {i for c in recorded for part in ("train", "validation") for i in c[part]}
    assert not trained_on & {i for c in recorded for i in c["test"]}


def test_it_is_said_where_all_test_samples_are_poor_judges(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("perfed.data.federation.say_once", said.append)
    y = np.array([0] * 20 + [1] * 2 + [2])
    x = np.arange(len(y), dtype=np.float32)[:, None]
    none = np.zeros(0, dtype=np.int64)
    samples = Samples(x, y, np.arange(len(y)), x[:1], none, 3)
    # One client has all there is to test: 9 of label 0 and one of label 1. It holds two of that,
    # and the only sample of label 2.
    test, train = np.r_[0:9, 20], np.r_[9:20, 21, 22]
    alone = [ClientSplit(train, none, test, none)]
    _, (judged,) = jointly_tested(samples, alone, "test", 0)
    assert len(judged.test) == 10
    assert not said
    jointly_tested(samples, alone, "held", 0)
    assert said[0].startswith("no client has a test sample of label 2: ")
    rare = [ClientSplit(np.r_[9:20, 22], none, np.r_[0:9, 20, 21], none)]
    jointly_tested(replace_labels(samples, {19: 1, 18: 1, 17: 1, 16: 1}), rare, "held", 0)
    assert said[-1].startswith("with shared_test 1 of 1 clients are evaluated on fewer samples")


def replace_labels(samples: Samples, labels: dict[int, int]) -> Samples:
    y = samples.y.copy()
    for place, label in labels.items():
        y[place] = label
    return dataclasses.replace(samples, y=y)


def test_fresh_and_shared_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="shared_test: clients are evaluated on fresh samples"):
        tiny(fresh_test=5, shared_test=True)


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, Any]:
    random = np.random.default_rng(0)
    y = np.arange(900) % 3
    x = random.normal(size=(900, 5)).astype(np.float32) + np.eye(5, dtype=np.float32)[y]
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    return {"name": "npz", "path": str(tmp_path / "mine.npz"), "public": 50, "samples": 300}


def test_training_is_the_same_and_only_the_evaluation_differs(
    stored: dict[str, Any], tmp_path: Path
) -> None:
    experiment = tiny(
        data=stored,
        partition={"name": "dirichlet", "alpha": 0.5, "minimum": 10},
        models={"architectures": [{"name": "mlp", "hidden": []}]},
    )
    own = perfed.run(experiment, tmp_path / "own")
    fresh = perfed.run(dataclasses.replace(experiment, fresh_test=120), tmp_path / "fresh")
    before, after = own.per_client(), fresh.per_client()
    for k in range(experiment.clients):
        for one, other in zip(own.model(k).parameters(), fresh.model(k).parameters(), strict=True):
            assert torch.equal(one, other)
    assert (after["test_size"] == 120).all()
    assert (before["test_size"] < 120).all()
    client = after[after["round"] == after["round"].max()].iloc[0]
    samples = np.load(stored["path"])
    held = fresh.directory.read_json("partition.json")["clients"][int(client["client"])]["test"]
    predicted = fresh.model(int(client["client"]))(torch.as_tensor(samples["x"][held])).argmax(1)
    assert (predicted.numpy() == samples["y"][held]).mean() == pytest.approx(
        client["test_accuracy"]
    )


def test_neither_public_nor_kept_once_it_is_chosen(stored: dict[str, Any]) -> None:
    """Pictures, as bytes: what a client is evaluated on is in nobody's hands, not in the public
    set's either; and the rest of the data does not stay in memory."""
    path = Path(stored["path"]).with_name("pictures.npz")
    random = np.random.default_rng(1)
    x = random.integers(0, 256, (600, 3, 4, 4), dtype=np.uint8)
    np.savez(path, x=x, y=np.arange(600) % 3)
    data = Npz(path=str(path), public=100, samples=200)
    federation = build_federation(data, partitions.build("iid"), Split(), 5, 3, fresh_test=60)
    record, samples = federation.record(), federation.samples
    held = {
        i for c in record["clients"] for part in ("train", "validation", "unused") for i in c[part]
    }
    fresh = {i for c in record["clients"] for i in c["test"]}
    assert len(held) == 200
    assert not fresh & (held | set(record["public"]))
    for split, client in zip(federation.splits, record["clients"], strict=True):
        assert np.array_equal(samples.x[split.test], x[client["test"]])
    assert samples.spare is None


def test_with_the_mix_of_test_samples_nobody_is_evaluated_otherwise_on_average() -> None:
    """Who always names the most frequent training label is right as often as by its own test
    samples. With the mix of all it holds, training samples too, it is right more often."""
    random = np.random.default_rng(0)
    y = random.integers(0, LABELS, 6000)
    none = np.zeros(0, dtype=np.int64)
    stored = Samples(np.zeros((6000, 1), np.float32), y, np.arange(6000), none, none, LABELS)
    samples = finished(stored, 3000, 0)
    splits = [
        ClientSplit(*np.split(random.permutation(np.arange(20 * k, 20 * k + 20)), [6, 8, 18]))
        for k in range(150)
    ]

    def right(samples: Samples, splits: list[ClientSplit]) -> float:
        shares = []
        for split, first in zip(splits, favourites, strict=True):
            shares.append((samples.y[split.test] == first).mean())
        return float(np.mean(shares))

    favourites = [np.bincount(samples.y[split.train]).argmax() for split in splits]
    own = right(samples, splits)
    assert right(*freshly_tested(samples, splits, 100, "test", 0)) == pytest.approx(own, abs=0.005)
    assert right(*freshly_tested(samples, splits, 100, "held", 0)) > own + 0.05


def test_where_there_is_nothing_to_spare(stored: dict[str, Any], tmp_path: Path) -> None:
    iid = partitions.build("iid")
    with pytest.raises(ConfigError, match="fresh_test: every sample is some client's"):
        build_federation(Digits(), iid, Split(), 4, 0, fresh_test=100)
    data = Npz(path=stored["path"], public=0, samples=600)
    build_federation(data, iid, Split(), 4, 0, fresh_test=200)
    with pytest.raises(ConfigError, match=r"fewer, or fewer data.samples"):
        build_federation(data, iid, Split(), 4, 0, fresh_test=400)
    ids = np.arange(900) % 4
    np.savez(tmp_path / "given.npz", **np.load(stored["path"]), client=ids)
    given_clients = Npz(path=str(tmp_path / "given.npz"), public=0, samples=600)
    with pytest.raises(ConfigError, match="fresh_test: given clients may differ"):
        build_federation(given_clients, partitions.build("given"), Split(), 4, 0, fresh_test=10)
    with pytest.raises(ConfigError, match="shared_test: given clients may differ"):
        build_federation(given_clients, partitions.build("given"), Split(), 4, 0, shared_test=True)
