from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import perfed
from perfed.core.errors import ConfigError
from perfed.core.notices import say_once
from perfed.core.streams import numpy_stream
from perfed.data import Split, build_federation, partitions
from perfed.data.datasets import Digits
from perfed.data.federation import ClientSplit, split_client
from perfed.data.files import Npz
from perfed.data.partition import Partition, move_to_minimum
from perfed.runs.study import record_of
from tests.conftest import SEQUENTIAL, STACKED, tiny
from tests.runs.test_resume import StopAfter

alphas = st.floats(-3, 3).map(lambda exponent: 10.0**exponent)
PARTS = ("train", "validation", "test", "unused")


def owners(
    partition: Partition, labels: np.ndarray, classes: int, clients: int, seed: int
) -> np.ndarray:
    random = np.random.default_rng(seed)
    owner = partition.assign(labels, classes, clients, random)
    return move_to_minimum(owner, clients, partition.minimum_size(), random)


@st.composite
def any_partition(draw: st.DrawFn) -> Partition:
    name = draw(st.sampled_from(["dirichlet", "client-dirichlet", "groups", "iid", "shards"]))
    options: dict = {"name": name}
    if "dirichlet" in name:
        options["alpha"] = draw(alphas)
    if name == "dirichlet":
        options["minimum"] = draw(st.integers(0, 3))
    if name == "groups":
        options |= {"groups": draw(st.integers(1, 3)), "mixed": draw(st.floats(0, 1))}
    if name == "shards":
        options["per_client"] = draw(st.integers(1, 4))
    return partitions.build(options)


@settings(max_examples=150)
@given(
    partition=any_partition(),
    clients=st.integers(3, 60),
    classes=st.integers(3, 10),
    each=st.integers(3, 12),
    seed=st.integers(0, 2**32),
)
def test_every_sample_goes_to_one_client_and_the_seed_decides(
    partition: Partition, clients: int, classes: int, each: int, seed: int
) -> None:
    labels = np.random.default_rng(seed).integers(classes, size=clients * each)
    owner = owners(partition, labels, classes, clients, seed)
    assert owner.shape == labels.shape
    assert owner.min() >= 0
    assert owner.max() < clients
    sizes = np.bincount(owner, minlength=clients)
    assert sizes.min() >= partition.minimum_size()
    assert (owner == owners(partition, labels, classes, clients, seed)).all()


@settings(max_examples=25)
@given(alpha=alphas, clients=st.integers(1, 1000), seed=st.integers(0, 999))
def test_the_papers_partition_ends_at_any_skew_and_any_number_of_clients(
    alpha: float, clients: int, seed: int
) -> None:
    labels = np.repeat(np.arange(10), 2000)
    partition = partitions.build({"name": "dirichlet", "alpha": alpha, "minimum": 20})
    sizes = np.bincount(owners(partition, labels, 10, clients, seed), minlength=clients)
    assert sizes.min() >= 20
    assert sizes.sum() == len(labels)


def test_small_alpha_skews_and_large_alpha_does_not() -> None:
    labels = np.repeat(np.arange(10), 6000)

    def labels_per_client(alpha: float) -> float:
        partition = partitions.build({"name": "dirichlet", "alpha": alpha, "minimum": 0})
        owner = owners(partition, labels, 10, 100, 0)
        return float(np.mean([len(np.unique(labels[owner == k])) for k in range(100)]))

    assert labels_per_client(0.01) < 2
    assert labels_per_client(1e3) == 10


def test_label_shares_follow_the_dirichlet_law() -> None:
    """With two clients, client 0's share of each label is Beta(α, α)."""
    classes = 2000
    labels = np.repeat(np.arange(classes), 100)
    partition = partitions.build({"name": "dirichlet", "alpha": 2.0, "minimum": 0})
    owner = owners(partition, labels, classes, 2, 0)
    shares = 1 - owner.reshape(classes, 100).mean(axis=1)
    assert shares.mean() == pytest.approx(0.5, abs=0.02)
    assert shares.var() == pytest.approx(1 / (4 * (2 * 2 + 1)), rel=0.1)


def test_moving_to_the_minimum_takes_from_the_largest_and_moves_no_more_than_needed() -> None:
    owner = np.repeat([0, 1, 3], [50, 9, 1])
    moved = move_to_minimum(owner, 4, 5, np.random.default_rng(0))
    assert np.bincount(moved, minlength=4).tolist() == [41, 9, 5, 5]
    assert (moved != owner).sum() == 9
    with pytest.raises(ConfigError, match="need 80, there are 60"):
        move_to_minimum(owner, 4, 20, np.random.default_rng(0))


def test_groups_share_a_label_mix_and_shards_have_few_labels() -> None:
    labels = np.repeat(np.arange(10), 100)
    groups = partitions.build({"name": "groups", "groups": 3})
    owner = owners(groups, labels, 10, 12, 0)
    seen = [frozenset(labels[owner == k].tolist()) for k in range(12)]
    assert all(seen[k] == seen[k % 3] for k in range(12))
    assert sum(len(seen[g]) for g in range(3)) == 10
    shards = partitions.build({"name": "shards", "per_client": 2})
    owner = owners(shards, labels, 10, 10, 0)
    assert all(len(set(labels[owner == k].tolist())) <= 4 for k in range(10))


def test_client_dirichlet_gives_equal_sizes() -> None:
    labels = np.repeat(np.arange(5), 41)
    partition = partitions.build({"name": "client-dirichlet", "alpha": 0.05})
    sizes = np.bincount(owners(partition, labels, 5, 10, 0), minlength=10)
    assert sizes.max() - sizes.min() <= 1


@given(
    count=st.integers(3, 300),
    train=st.lists(st.floats(0.01, 0.6), min_size=1, max_size=3),
    validation=st.floats(0.01, 0.2),
    test=st.floats(0.01, 0.2),
    seed=st.integers(0, 999),
)
def test_a_clients_parts_are_disjoint_and_never_empty(
    count: int, train: list[float], validation: float, test: float, seed: int
) -> None:
    held = np.arange(1000, 1000 + count)
    split = split_client(held, Split(tuple(train), validation, test), seed, client=3)
    pieces = [getattr(split, part) for part in PARTS]
    assert np.sort(np.concatenate(pieces)).tolist() == held.tolist()
    assert all(len(piece) >= 1 for piece in pieces[:3])


def test_the_papers_split() -> None:
    shares = set()
    for client in range(60):
        split = split_client(np.arange(1000), Split(), 0, client)
        assert (len(split.validation), len(split.test)) == (100, 500)
        shares.add(len(split.train))
    assert shares == {100, 300, 400}


def test_public_and_private_samples_are_disjoint_and_all_are_used() -> None:
    federation = build_federation(
        Digits(public=397), partitions.build({"name": "dirichlet", "minimum": 5}), Split(), 50, 7
    )
    record = federation.record()
    private = [i for client in record["clients"] for part in PARTS for i in client[part]]
    assert sorted(private + record["public"]) == list(range(1797))
    assert record["moved_to_minimum"] > 0
    assert min(record["sizes"]) >= 5


SKEWED = {"name": "dirichlet", "alpha": 0.05, "minimum": 20}


@pytest.mark.parametrize("seed", range(3))
def test_without_repair_small_clients_are_left_out_and_the_others_stay_as_drawn(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    samples = Digits().load(seed)
    drawn = partitions.build(SKEWED).assign(samples.y, 10, 40, numpy_stream(seed, "partition"))
    natural = [k for k in range(40) if (drawn == k).sum() >= 20]
    assert 0 < len(natural) < 40
    say_once.cache_clear()
    federation = build_federation(
        Digits(), partitions.build(SKEWED | {"repair": False}), Split(), 40, seed
    )
    record = federation.record()
    assert federation.clients == len(record["clients"]) == len(natural)
    for client, number in zip(record["clients"], natural, strict=True):
        held = sorted(i for part in PARTS for i in client[part])
        assert held == samples.index[drawn == number].tolist()
    lost = len(drawn) - sum(record["sizes"])
    assert record["left_out"] == {"clients": 40 - len(natural), "samples": lost}
    assert record["moved_to_minimum"] == 0
    assert record["repaired"] == [False] * len(natural)
    assert caplog.messages == [
        f"{40 - len(natural)} of 40 clients have fewer than 20 samples and are left out, with "
        f"{lost} samples"
    ]


def test_who_was_brought_up_to_the_minimum_is_recorded() -> None:
    samples = Digits().load(3)
    drawn = partitions.build(SKEWED).assign(samples.y, 10, 40, numpy_stream(3, "partition"))
    record = build_federation(Digits(), partitions.build(SKEWED), Split(), 40, 3).record()
    sizes = [int((drawn == k).sum()) for k in range(40)]
    assert record["repaired"] == [size < 20 for size in sizes]
    assert record["moved_to_minimum"] == sum(20 - size for size in sizes if size < 20)
    assert "left_out" not in record
    assert (
        "repaired"
        not in build_federation(Digits(), partitions.build("iid"), Split(), 5, 3).record()
    )


def test_where_nobody_is_left() -> None:
    few = partitions.build({"name": "dirichlet", "alpha": 100, "minimum": 500, "repair": False})
    with pytest.raises(ConfigError, match="minimum: none of 40 clients has 500 samples"):
        build_federation(Digits(), few, Split(), 40, 0)


def test_a_run_without_repair(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of all clients that are left, as many as there are, on both engines; and it resumes."""
    common: dict[str, Any] = {
        "clients": 40,
        "clients_per_round": 30,
        "partition": SKEWED | {"repair": False},
        "shift": {"name": "labels", "groups": [1, 1]},
        "rounds": 2,
    }
    left = tiny(**common).federation().clients
    assert left < 30
    say_once.cache_clear()
    for how in (SEQUENTIAL, STACKED):
        result = perfed.run(tiny(**common), tmp_path / how.engine, how=how)
        rows = result.per_client()
        assert sorted(set(rows["client"])) == list(range(left))
        assert not rows["repaired"].any()
        assert np.bincount(rows["group"])[0] in (left // 2 * 2, (left + 1) // 2 * 2)
        for line in result.directory.lines("rounds.jsonl"):
            assert line["clients"] == list(range(left))
    assert f"{left} clients are left: all of them are selected" in caplog.text
    often = replace(SEQUENTIAL, checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(tiny(**common), tmp_path / "part", callbacks=[StopAfter(1)], how=often)
    resumed = perfed.resume(tmp_path / "part", how=SEQUENTIAL)
    whole = perfed.Result(tmp_path / "sequential")
    assert resumed.per_client().equals(whole.per_client())
    with pytest.raises(ConfigError, match=rf"evaluate_clients: 35 of {left} clients that are left"):
        perfed.run(tiny(**common, evaluate_clients=35), tmp_path / "some")
    many = {"name": "perfed-ckt", "clusters": left + 1}
    with pytest.raises(ConfigError, match=rf"algorithm.clusters: {left + 1} clusters of {left}"):
        perfed.run(tiny(**common | {"algorithm": many}), tmp_path / "clusters")


def test_repaired_clients_are_told_apart_in_results(tmp_path: Path) -> None:
    experiment = tiny(clients=40, partition=SKEWED, rounds=1)
    result = perfed.run(experiment, tmp_path / "run")
    repaired = experiment.federation().record()["repaired"]
    assert 0 < sum(repaired) < 40
    assert result.per_client()["repaired"].tolist() == repaired
    assert record_of(tmp_path / "run")["clients"]["repaired"] == repaired
    assert "of 40 clients" not in result.report().read_text("utf-8")
    left = perfed.run(tiny(partition=SKEWED | {"repair": False}, rounds=1), tmp_path / "left")
    assert "of 6 clients those with at least 20 samples" in left.report().read_text("utf-8")


def test_too_many_clients_is_one_clear_line() -> None:
    for name in ("iid", "dirichlet", "shards", "client-dirichlet"):
        with pytest.raises(ConfigError, match=r"600 clients need at least 1800 samples"):
            build_federation(Digits(), partitions.build(name), Split(), 600, 0)
    with pytest.raises(ConfigError, match="need 2000, there are 1397"):
        build_federation(Digits(), partitions.build("dirichlet"), Split(), 100, 0)


def test_given_client_ids(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    ids = np.array(["b", "a", "c", "a"] * 10)
    np.savez(path, x=np.zeros((40, 3)), y=np.arange(40) % 4, client=ids)
    data = Npz(path=str(path), public=0)
    federation = build_federation(data, partitions.build("given"), Split(), 3, 0)

    def whole(split: ClientSplit) -> list[int]:
        return sorted(int(i) for part in PARTS for i in getattr(split, part))

    assert whole(federation.splits[0]) == np.flatnonzero(ids == "a").tolist()
    with pytest.raises(ConfigError, match="names 3 clients, not 4"):
        build_federation(data, partitions.build("given"), Split(), 4, 0)
    with pytest.raises(ConfigError, match="names no clients"):
        build_federation(Digits(), partitions.build("given"), Split(), 4, 0)


def test_bad_npz_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        Npz(path=str(tmp_path / "absent.npz")).load(0)
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"not a zip")
    with pytest.raises(ConfigError, match="cannot be read"):
        Npz(path=str(broken)).load(0)
    x, y = np.zeros((4, 2)), np.arange(4)
    np.savez(broken, x=x, y=y)
    broken.write_bytes(broken.read_bytes()[:-30])
    with pytest.raises(ConfigError, match="cannot be read"):
        Npz(path=str(broken)).load(0)
    with open(broken, "wb") as file:
        np.save(file, x)
    with pytest.raises(ConfigError, match="one array alone"):
        Npz(path=str(broken)).load(0)
    for arrays, message in (
        ({"x": x}, "no array 'y'"),
        ({"x": x, "y": np.zeros(3)}, "4 samples but labels of shape"),
        ({"x": x, "y": np.eye(4)}, "4 samples but labels of shape"),
        ({"x": x, "y": y + 0.7}, "labels must be 0, 1, 2"),
        ({"x": x, "y": y - 1}, "labels must be 0, 1, 2, …, not -1 as of sample 0"),
        ({"x": x, "y": np.array(list("abcd"))}, "labels must be 0, 1, 2"),
        ({"x": np.array(3.0), "y": y}, "'x' must be numbers, samples × features"),
        ({"x": x[:0], "y": y[:0]}, "'x' must be numbers, samples × features"),
        ({"x": x + np.nan, "y": y}, r"'x' is not finite: nan at \[0, 0\]"),
        ({"x": x, "y": y, "public": np.zeros((9, 3))}, "public samples are"),
        ({"x": x, "y": y, "client": y[:2]}, "4 samples but 2 client ids"),
    ):
        np.savez(broken, **arrays)
        with pytest.raises(ConfigError, match=message):
            Npz(path=str(broken)).load(0)
