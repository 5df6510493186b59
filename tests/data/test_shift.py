"""Groups of clients whose labels mean something else, or whose samples look different."""

import dataclasses
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfed
from perfed.core.errors import ConfigError
from perfed.core.pixels import scaled
from perfed.data import Federation, Split, build_federation, partitions, shifts
from perfed.data.datasets import Dataset, Samples, hold_out_public
from tests.cli.test_cli import refusal
from tests.conftest import RAY, SEQUENTIAL, STACKED, tiny
from tests.runs.test_resume import StopAfter

PICTURES: dict[str, Any] = {"models": "mlp", "partition": "iid", "split": {"train": [0.4]}}
CHANGES = ("labels", "rotation", "noise", "contrast")


def made(shift: Any = None, **changes: Any) -> Federation:
    return tiny(**PICTURES | {"clients": 12, "shift": shift} | changes).federation()


def everything(federation: Federation, client: int) -> tuple[np.ndarray, np.ndarray]:
    """All samples of a client, in all parts."""
    where = np.concatenate([*vars(federation.splits[client]).values()])
    return federation.samples.x[where], federation.samples.y[where]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    times=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_groups_are_as_large_as_told_and_the_seed_deals_them(
    sizes: list[int], times: int, seed: int
) -> None:
    """Proportions of the clients are counts where they sum to them."""
    shift, clients = shifts.build({"name": "noise", "groups": sizes}), times * sum(sizes)
    groups = shift.deal(clients, seed)
    assert np.bincount(groups).tolist() == [times * size for size in sizes]
    assert (groups == shift.deal(clients, seed)).all()


def test_three_equal_groups_a_minority_and_one_odd_client() -> None:
    for groups, clients, expected in (
        ([1, 1, 1], 30, [10, 10, 10]),
        ([1, 1, 1], 20, [7, 6, 7]),
        ([8, 2], 20, [16, 4]),
        ([9, 1], 50, [45, 5]),
        ([29, 1], 30, [29, 1]),
    ):
        assert (
            shifts.build({"name": "labels", "groups": groups}).sizes(clients).tolist() == expected
        )
    shift = shifts.build({"name": "labels", "groups": [29, 1]})
    odd = [int(shift.deal(30, seed).argmax()) for seed in range(40)]
    assert len(set(odd)) > 15  # anybody may be it


@given(classes=st.integers(2, 40), groups=st.integers(2, 10), seed=st.integers(0, 999))
def test_labels_are_permuted_and_no_two_groups_agree_on_any(
    classes: int, groups: int, seed: int
) -> None:
    groups = min(groups, classes)
    shift, labels = shifts.build({"name": "labels", "groups": [1] * groups}), np.arange(classes)
    meant = [labels] + [
        shift.labels(labels, g, classes, np.random.default_rng(seed)) for g in range(1, groups)
    ]
    assert all(sorted(one) == labels.tolist() for one in meant)
    for one, other in combinations(meant, 2):
        assert not (one == other).any()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_permutation_undone_gives_back_the_data(seed: int) -> None:
    before = made(seed=seed)
    after = made({"name": "labels", "groups": [2, 1, 1]}, seed=seed)
    found: dict[int, dict[int, int]] = {0: {}, 1: {}, 2: {}}
    for client, group in enumerate(after.groups.tolist()):
        (x, y), (own_x, own_y) = everything(before, client), everything(after, client)
        assert np.array_equal(x, own_x)
        for label, own in zip(y.tolist(), own_y.tolist(), strict=True):
            assert found[group].setdefault(label, own) == own  # one meaning in a group
        undone = {own: label for label, own in found[group].items()}
        assert [undone[own] for own in own_y.tolist()] == y.tolist()
    assert found[0] == {label: label for label in range(10)}
    assert all(len(set(meant.values())) == 10 for meant in found.values())
    assert not any(found[1][label] in (label, found[2][label]) for label in range(10))


def test_another_seed_permutes_otherwise() -> None:
    shift = shifts.build({"name": "labels", "groups": [1, 1]})
    labels = np.arange(10)
    drawn = {tuple(shift.labels(labels, 1, 10, np.random.default_rng(s))) for s in range(20)}
    assert len(drawn) == 20


def test_pictures_are_turned_by_quarters() -> None:
    before, after = made(), made({"name": "rotation", "groups": [1, 1, 1, 1]})
    assert sorted(after.groups.tolist()) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    for client, group in enumerate(after.groups.tolist()):
        (x, y), (own_x, own_y) = everything(before, client), everything(after, client)
        assert np.array_equal(y, own_y)
        for picture, turned in zip(x, own_x, strict=True):
            assert np.array_equal(turned[0], np.rot90(picture[0], group))
    assert np.array_equal(before.samples.public_x, after.samples.public_x)


def test_noise_rises_with_the_group() -> None:
    before = made()
    after = made({"name": "noise", "groups": [1, 1, 1], "deviation": 0.8})
    for client, group in enumerate(after.groups.tolist()):
        added = everything(after, client)[0] - everything(before, client)[0]
        assert added.std() == pytest.approx([0, 0.4, 0.8][group], rel=0.05)
        assert abs(added.mean()) < 0.05
    first, second = (int(k) for k in np.flatnonzero(after.groups == 2)[:2])
    assert not np.array_equal(everything(after, first)[0][0], everything(after, second)[0][0])


def test_contrast_falls_with_the_group_and_brightness_stays() -> None:
    before = made()
    after = made({"name": "contrast", "groups": [1, 1, 1], "contrast": 0.5})
    for client, group in enumerate(after.groups.tolist()):
        x, own = everything(before, client)[0], everything(after, client)[0]
        pictures = (-2, -1)
        assert own.mean(pictures) == pytest.approx(x.mean(pictures), abs=1e-5)
        kept = [1, 0.75, 0.5][group]
        assert own.std(pictures) == pytest.approx(kept * x.std(pictures), rel=1e-4)


@pytest.mark.parametrize("name", ["rotation", "noise", "contrast"])
def test_the_public_set_is_changed_only_where_asked_and_by_all_groups(name: str) -> None:
    data = {"name": "digits", "public": 600}
    before = made(data=data).samples.public_x
    shift = {"name": name, "groups": [2, 1, 1]}
    assert np.array_equal(made(shift, data=data).samples.public_x, before)
    after = made(shift | {"public": True}, data=data)
    assert np.array_equal(after.samples.public_index, made(data=data).samples.public_index)
    same = (after.samples.public_x == before).all(axis=(1, 2, 3))
    assert same.mean() == pytest.approx(0.5, abs=0.08)  # group 0 is half of the clients
    if name == "rotation":
        for turns in (1, 2):
            like = (after.samples.public_x == np.rot90(before, turns, (-2, -1))).all(axis=(1, 2, 3))
            assert like.mean() == pytest.approx(0.25, abs=0.08)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize(
    "partition",
    [
        "iid",
        {"name": "groups", "groups": 3},
        {"name": "dirichlet", "alpha": 0.1, "minimum": 20},
    ],
)
def test_only_the_other_groups_samples_differ(name: str, partition: Any) -> None:
    before = made(partition=partition)
    after = made({"name": name, "groups": [3, 1]}, partition=partition)
    assert np.bincount(after.groups).tolist() == [9, 3]
    again = made({"name": name, "groups": [3, 1]}, partition=partition)
    for client, group in enumerate(after.groups.tolist()):
        assert vars(before.splits[client]).keys() == vars(after.splits[client]).keys()
        pairs = zip(everything(before, client), everything(after, client), strict=True)
        x_stays, y_stays = (np.array_equal(one, other) for one, other in pairs)
        assert x_stays == (group == 0 or name == "labels")
        assert y_stays == (group == 0 or name != "labels")
        for one, other in zip(everything(after, client), everything(again, client), strict=True):
            assert np.array_equal(one, other)
    assert not before.groups.any()  # without a shift all are alike
    assert "groups" not in before.record()
    assert after.record()["groups"] == after.groups.tolist()


@pytest.fixture
def stored(tmp_path: Path) -> dict[str, Any]:
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (900, 3, 6, 6), dtype=np.uint8)
    np.savez(tmp_path / "mine.npz", x=x, y=np.arange(900) % 3)
    return {"name": "npz", "path": str(tmp_path / "mine.npz"), "public": 50, "samples": 300}


@pytest.mark.parametrize("judges", [{"fresh_test": 90}, {"shared_test": True}])
@pytest.mark.parametrize("name", CHANGES)
def test_others_samples_are_shifted_like_a_clients_own(
    stored: dict[str, Any], name: str, judges: dict[str, Any]
) -> None:
    shift = {"name": name, "groups": [1, 1, 1]}
    after = made(shift, data=stored, **judges)
    before = made(data=stored, **judges)
    pictures = np.load(stored["path"])
    meant: list[dict[int, int]] = [{}, {}, {}]  # by group, from what clients train on
    for client, group in enumerate(after.groups.tolist()):
        train = after.splits[client].train
        meant[group] |= dict(zip(before.samples.y[train], after.samples.y[train], strict=True))
    for client, group in enumerate(after.groups.tolist()):
        split, old = after.splits[client], before.splits[client]
        samples = after.samples
        assert np.array_equal(samples.index[split.test], before.samples.index[old.test])
        assert len(np.unique(split.test)) == len(old.test)
        x = scaled(pictures["x"][samples.index[split.test]])
        y = pictures["y"][samples.index[split.test]]
        own_x, own_y = samples.numbers(samples.x[split.test]), samples.y[split.test]
        if name == "labels":
            assert own_y.tolist() == [meant[group][label] for label in y]
            assert np.array_equal(own_x, x)
            continue
        assert np.array_equal(own_y, y)
        if name == "rotation":
            assert np.array_equal(own_x, np.rot90(x, group, (-2, -1)))
        elif name == "noise":
            assert (own_x - x).std() == pytest.approx(0.25 * group, rel=0.05)
        else:
            kept = 1 - 0.4 * group
            assert own_x.std((-2, -1)) == pytest.approx(kept * x.std((-2, -1)), rel=1e-4)


def test_tables_can_have_noise_in_units_of_their_columns(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [f"{1e6 * random.normal():.1f},{random.normal():.4f},{n % 2}" for n in range(600)]
    (tmp_path / "t.csv").write_text("a,b,label\n" + "\n".join(rows) + "\n")
    data = {"name": "csv", "path": str(tmp_path / "t.csv"), "public": 20}
    before, after = made(data=data), made({"name": "noise", "groups": [1, 1]}, data=data)
    for client, group in enumerate(after.groups.tolist()):
        added = everything(after, client)[0] - everything(before, client)[0]
        assert added.std(axis=0) == pytest.approx([0.5 * group] * 2, rel=0.3)


def test_clients_whose_samples_are_made_when_needed_are_shifted_then() -> None:
    data = {"name": "synthetic", "samples": 30, "features": 5, "classes": 4}
    common = {"data": data, "partition": "given", "clients": 40}
    before, after = made(**common), made({"name": "labels", "groups": [3, 1]}, **common)
    assert before.distant is not None
    assert after.distant is not None
    meant: dict[int, int] = {}
    for client, group in enumerate(after.groups.tolist()):
        (x, y), (own_x, own_y) = before.distant.client(client), after.distant.client(client)
        assert np.array_equal(x, own_x)
        if group == 0:
            assert np.array_equal(y, own_y)
            continue
        assert not (y == own_y).any()
        for label, own in zip(y.tolist(), own_y.tolist(), strict=True):
            assert meant.setdefault(label, own) == own
    assert after.record()["groups"] == after.groups.tolist()
    noisy = made({"name": "noise", "groups": [3, 1], "public": True}, **common)
    assert noisy.distant is not None
    odd = int(noisy.groups.argmax())
    assert np.array_equal(noisy.distant.client(odd)[0], noisy.distant.client(odd)[0])
    assert not np.array_equal(noisy.distant.client(odd)[0], before.distant.client(odd)[0])


def test_turned_pictures_of_a_large_population_train(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", random.normal(size=(60, 1, 4, 4)).astype(np.float32))
    np.save(tmp_path / "y.npy", np.arange(60) % 3)
    np.save(tmp_path / "sizes.npy", np.full(6, 10))
    experiment = tiny(
        data={"name": "mapped", "path": str(tmp_path)},
        partition="given",
        shift={"name": "rotation", "groups": [1, 1]},
        algorithm="fedavg",
        rounds=1,
    )
    one = perfed.run(experiment, tmp_path / "one", how=SEQUENTIAL).per_client()
    other = perfed.run(experiment, tmp_path / "other", how=STACKED).per_client()
    assert one["test_accuracy"].tolist() == pytest.approx(other["test_accuracy"].tolist())


@pytest.mark.parametrize(
    "how", [SEQUENTIAL, STACKED, pytest.param(RAY, marks=[pytest.mark.ray, pytest.mark.long])]
)
def test_a_run_writes_the_groups_down_and_resumes(tmp_path: Path, how: Any) -> None:
    experiment = tiny(shift={"name": "labels", "groups": [2, 1]})
    result = perfed.run(experiment, tmp_path / "run", how=how)
    groups = experiment.federation().groups.tolist()
    assert sorted(groups) == [0, 0, 0, 0, 1, 1]
    assert result.directory.read_json("partition.json")["groups"] == groups
    rows = result.per_client()
    assert rows["group"].tolist() == [groups[client] for client in rows["client"]]
    assert "group" not in perfed.run(tiny(rounds=1), tmp_path / "plain").per_client()
    again = perfed.Result(tmp_path / "run").experiment
    assert again == experiment


def test_some_clients_are_evaluated_and_their_groups_written_down(tmp_path: Path) -> None:
    experiment = tiny(shift="labels", evaluate_clients=4, rounds=1)
    rows = perfed.run(experiment, tmp_path / "run").per_client()
    groups = experiment.federation().groups
    assert rows["group"].tolist() == [groups[client] for client in rows["client"]]
    assert len(rows) == 4


def test_stopped_and_resumed_it_is_the_same(tmp_path: Path) -> None:
    experiment = tiny(shift={"name": "noise", "groups": [1, 1]}, rounds=4)

    often = dataclasses.replace(SEQUENTIAL, checkpoint_seconds=0)
    whole = perfed.run(experiment, tmp_path / "whole", how=SEQUENTIAL)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(experiment, tmp_path / "part", callbacks=[StopAfter(2)], how=often)
    rest = perfed.resume(tmp_path / "part", how=SEQUENTIAL)
    assert rest.summary["models"] == whole.summary["models"]
    assert rest.per_client().equals(whole.per_client())


def test_labels_that_mean_something_else_hurt_one_model_for_all(tmp_path: Path) -> None:
    """What the option is for: FedAvg cannot serve two groups that disagree on every label."""
    common: dict[str, Any] = {
        "partition": "iid",
        "rounds": 15,
        "clients_per_round": 6,
        "algorithm": "fedavg",
        "models": "mlp",
        "training": {"steps": 10, "learning_rate": 0.1},
    }
    alike = perfed.run(tiny(**common), tmp_path / "alike")
    apart = perfed.run(
        tiny(**common, shift={"name": "labels", "groups": [1, 1]}), tmp_path / "apart"
    )
    accuracy = [r.summary["models"]["global"]["last"]["test_accuracy"] for r in (alike, apart)]
    assert accuracy[0] > 0.8
    assert accuracy[1] < 0.6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["shift.groups=[1]", "shift.name=labels"], "shift.groups: one group has nothing"),
        (["shift=rotated"], "shift.name: unknown shift 'rotated'; did you mean 'rotation'?"),
        (["shift.groups=[1, 1]"], "shift: expected a name (contrast, labels, noise, rotation)"),
        (["shift={name: labels, groups: [1, 0]}"], "shift.groups: 0 is out of range"),
        (["shift={name: rotation, groups: [1, 1, 1, 1, 1]}"], "shift.groups: 5 groups: there are"),
        (
            ["shift={name: noise, groups: [99, 1]}"],
            "shift.groups: of 30 clients, group 1 gets none",
        ),
        (
            ["shift={name: labels, groups: [1,1,1,1,1,1,1,1,1,1,1]}"],
            "shift.groups: 11 groups cannot disagree on 10 labels: must be at most 10",
        ),
        (
            ["shift=rotation", "data=sensors", "partition=given", "models=gru"],
            "shift: 'rotation' needs square pictures, channels×height×width; these samples are "
            "16×3",
        ),
        (
            ["shift=contrast", "data=phrases", "partition=given", "models=token-mean"],
            "shift: 'contrast' needs pictures, channels×height×width; these samples are 20 tokens",
        ),
        (
            ["shift=noise", "data=phrases", "partition=given", "models=token-mean"],
            "shift: 'noise' needs numbers; these samples are 20 tokens",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    settings: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [word for setting in settings for word in ("--set", setting)]
    assert message in refusal(monkeypatch, capsys, "run", "--set", "rounds=1", *options)
    assert not list(tmp_path.iterdir())


def test_oblong_pictures_are_not_turned(tmp_path: Path) -> None:
    np.savez(tmp_path / "wide.npz", x=np.zeros((90, 1, 4, 6), np.float32), y=np.arange(90) % 3)
    data = {"name": "npz", "path": str(tmp_path / "wide.npz"), "public": 0}
    with pytest.raises(ConfigError, match=r"needs square pictures.*are 1×4×6"):
        made("rotation", data=data)
    faded = made("contrast", data=data)  # they need not be square for that
    assert faded.groups.any()


def test_the_datasets_own_arrays_stay_as_they_are() -> None:
    """A dataset may keep what it has loaded, and give it to the next run."""
    data = tiny().data
    samples = data.load(0)
    kept = dataclasses.replace(samples, x=samples.x.copy(), y=samples.y.copy())

    @dataclasses.dataclass(frozen=True)
    class Kept(type(data)):  # type: ignore[misc]
        def load(self, seed: int) -> Any:
            return samples

    for name in CHANGES:
        shift: Any = {"name": name} | ({} if name == "labels" else {"public": True})
        made(shift, data=Kept())
    assert np.array_equal(samples.x, kept.x)
    assert np.array_equal(samples.y, kept.y)
    assert np.array_equal(samples.public_x, kept.public_x)


@dataclasses.dataclass(frozen=True)
class Counts(Dataset):
    """Whole numbers that are no pixels."""

    def load(self, seed: int) -> Samples:
        random = np.random.default_rng(seed)
        x = random.integers(0, 256, (400, 1, 8, 8)).astype(np.uint8)
        return hold_out_public(x, random.integers(0, 4, 400), 40, seed)


@pytest.mark.parametrize("public", [False, True])
def test_noise_on_whole_numbers_neither_wraps_round_nor_is_cut_off(public: bool) -> None:
    """As bytes, 250 + 20 would be 14."""
    shift = shifts.build({"name": "noise", "groups": [1, 1], "deviation": 20.0, "public": public})
    plain, noisy = (
        build_federation(Counts(), partitions.build("iid"), Split(), 4, 0, shift=given)
        for given in (None, shift)
    )
    changed = np.concatenate(
        [
            everything(noisy, client)[0] - everything(plain, client)[0].astype(np.float32)
            for client in np.flatnonzero(noisy.groups)
        ]
    )
    assert 19 < changed.std() < 21
    assert np.abs(changed).max() < 120
    if public:
        moved = noisy.samples.public_x - plain.samples.public_x.astype(np.float32)
        assert np.abs(moved).max() < 120
        assert (moved % 1 > 0).any()
