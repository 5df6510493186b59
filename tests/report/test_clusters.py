"""Clusters keep their names while their centroids move and change places."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import perfed
from perfed.algorithms.clustering import overlap
from perfed.report import gather
from perfed.report.clusters import letter, membership
from tests.conftest import tiny, without_checksums


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = perfed.run(tiny(rounds=1), tmp_path_factory.mktemp("clusters") / "run")
    return without_checksums(run.path)


def test_overlap_is_one_for_equals_and_zero_for_strangers() -> None:
    sure = torch.eye(3)
    one, other = sure[[0, 0, 1, 2]], sure[[1, 2, 0, 0]]
    half = (one + other) / 2
    table = overlap(torch.stack([one, other]), torch.stack([one, other, half]))
    assert table.tolist() == [[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]]
    a, b = torch.rand(2, 5, 4).softmax(2)
    by_hand = np.mean([sum(min(x, y) for x, y in zip(p, q, strict=True)) for p, q in zip(a, b)])  # noqa: B905
    assert overlap(a[None], b[None]).item() == pytest.approx(by_hand)


def write_rounds(path: Path, orders: list[list[int]]) -> None:
    """A run in which true cluster k stands at place orders[round].index(k), and client k always
    chooses cluster k: whatever the order, nobody ever changes."""
    count = len(orders[0])
    lines = []
    for round, order in enumerate(orders, start=-1):
        earlier = orders[max(0, round)] if round >= 0 else order
        # Of one cluster's centroids a round apart much is alike, of two clusters' little.
        alike = [[0.8 if old == new else 0.1 for new in order] for old in earlier]
        now = [[1.0 if a == b else 0.1 for b in order] for a in order]
        line = {"round": round, "clients": list(range(count)), "traffic_total": {}}
        line["server_state"] = {"centroid_overlap": now, "earlier_overlap": alike}
        if round >= 0:
            line["client_state"] = {"cluster": [earlier.index(k) for k in range(count)]}
        lines.append(json.dumps(line))
    (path / "rounds.jsonl").write_text("\n".join(lines) + "\n")


@given(data=st.data())
def test_a_cluster_is_followed_through_any_reordering(template: Path, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    orders = data.draw(st.lists(st.permutations(range(count)), min_size=2, max_size=8))
    write_rounds(template, [list(order) for order in orders])
    (run,) = gather.read([template])
    found = membership(run)
    assert found is not None
    assert found.traced
    assert found.count == count
    seen = {client: set(choices.values()) for client, choices in found.chosen.items()}
    followed = [seen[client] for client in range(count)]
    assert all(len(clusters) == 1 for clusters in followed)
    assert len({next(iter(clusters)) for clusters in followed}) == count
    again, same = found.returns()
    assert again == same


def test_fewer_centroids_than_before_and_more_again(template: Path) -> None:
    def line(round: int, alike: list[list[float]], chosen: list[int]) -> str:
        width = len(alike[0])
        state = {"earlier_overlap": alike, "centroid_overlap": np.eye(width).tolist()}
        return json.dumps(
            {
                "round": round,
                "clients": [0, 1],
                "server_state": state,
                **({"client_state": {"cluster": chosen}} if round >= 0 else {}),
            }
        )

    lines = [
        line(-1, [[1, 0], [0, 1]], []),
        line(0, [[0.2], [0.9]], [0, 1]),  # the second cluster goes on alone, as centroid 0
        line(1, [[0.1, 0.9]], [0, 0]),  # it goes on as centroid 1; centroid 0 is new
        line(2, [[1, 0], [0, 1]], [1, 0]),
    ]
    (template / "rounds.jsonl").write_text("\n".join(lines) + "\n")
    (run,) = gather.read([template])
    found = membership(run)
    assert found is not None
    first, second = (found.chosen[client] for client in (0, 1))
    assert second[0] == first[1] == second[1] == first[2]
    assert first[0] != second[0]
    assert found.count == 2


def test_methods_without_clusters_have_none(comparison: perfed.ComparisonResult) -> None:
    runs = gather.read([comparison.path])
    there = {run.label: membership(run) for run in runs}
    assert [label for label, found in there.items() if found] == [
        "perfed-ckt (c=2, λ=1)",
        "hypcluster (c=2)",
    ]
    hyper = there["hypcluster (c=2)"]
    assert hyper is not None
    assert not hyper.traced  # its clusters keep their numbers
    run = next(run for run in reversed(runs) if run.label == "hypcluster (c=2)")
    for line in run.rounds:
        groups = dict(zip(line["clients"], line["client_state"]["cluster"], strict=True))
        ours = {client: hyper.chosen[client][line["round"]] for client in groups}
        together = {(a, b) for a in groups for b in groups if groups[a] == groups[b]}
        assert together == {(a, b) for a in ours for b in ours if ours[a] == ours[b]}


def test_letters() -> None:
    assert [letter(n) for n in (0, 1, 25, 26)] == ["A", "B", "Z", "a"]
