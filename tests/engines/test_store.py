"""Clients' models in memory, and on disk beyond a limit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import perfed
from perfed import Execution
from perfed.core.tree import Weights
from perfed.engines import ClientRecord, ClientStore
from tests.conftest import tiny

CPU = torch.device("cpu")


def record(number: float) -> ClientRecord:
    weights = Weights({"0.weight": torch.full((25,), number)}, {"0.count": torch.tensor(3)})
    return ClientRecord(weights, {"control": {"0.weight": torch.tensor([number])}})


def number_of(kept: ClientRecord) -> float:
    assert int(kept.weights.buffers["0.count"]) == 3
    assert kept.state["control"]["0.weight"].tolist() == [kept.weights.params["0.weight"][7]]
    return float(kept.weights.params["0.weight"][0])


@given(st.lists(st.tuples(st.sampled_from("srd"), st.integers(0, 7), st.integers(0, 99))))
def test_it_is_a_dictionary_whatever_the_limit(actions: list[tuple[str, int, int]]) -> None:
    """Room for two records of 112 bytes; the others are on disk."""
    store, truth = ClientStore(CPU, limit=250), {}
    for action, client, value in actions:
        if action == "s":
            store[client], truth[client] = record(value), value
        elif action == "d" and client in truth:
            del store[client], truth[client]
        elif client in truth:
            assert number_of(store[client]) == truth[client]
        assert set(store) == set(truth)
        assert len(store) == len(truth)
        assert len(store.in_memory) <= 2
    assert {client: number_of(store[client]) for client in store} == truth
    store.close()


def test_files_are_where_they_are_wanted_and_go_away(tmp_path: Path) -> None:
    store = ClientStore(CPU, limit=0)
    store.folder = tmp_path
    store.update({client: record(client) for client in range(4)})
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 3  # the one used last is in memory
    store.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["perfed-ckt", "scaffold", "fedfomo", "ditto"])
def test_a_run_is_the_same_with_its_clients_on_disk(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = ["mlp", {"name": "cnn", "batchnorm": True}]
    spec = {"name": name, "clusters": 2} if name == "perfed-ckt" else name
    experiment = tiny(algorithm=spec, models=models, rounds=4)
    spilled: list[int] = []
    spill = ClientStore._spill
    monkeypatch.setattr(ClientStore, "_spill", lambda s, k: (spilled.append(k), spill(s, k)))
    memory = perfed.run(experiment, tmp_path / "memory")
    assert not spilled
    disk = perfed.run(experiment, tmp_path / "disk", how=Execution(store_limit=0.001))
    assert spilled
    for file in ("clients.jsonl", "summary.json"):
        assert (memory.path / file).read_bytes() == (disk.path / file).read_bytes()
    assert not list(disk.path.glob("store-*"))
