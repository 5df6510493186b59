"""A site that comes when the federation is over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from perfed.core import tensorfile
from perfed.core.errors import PerfedError
from perfed.flower.coordinator import SERVER
from perfed.flower.later import Handout, handout, learn
from perfed.flower.ledger import Ledger
from perfed.flower.purse import Purse
from perfed.flower.site import Site
from tests.flower.setting import MODELS, desk, write_federation
from tests.flower.test_coordinator import run

EIGHT_BIT = f"{Path(__file__).parents[1] / 'plugins' / 'eight_bit.py'}:EightBit"
SAME = [MODELS[0]] * 3


def federation(folder: Path, **changes: Any) -> Path:
    """It is over; site-3.yaml is of somebody who comes now."""
    write_federation(folder, SAME, **changes)
    run(folder, desk(folder))
    values = yaml.safe_load((folder / "site-0.yaml").read_text())
    values["data"]["clients"] = 4
    values |= {"client": 3, "state": "state-3"}
    (folder / "later.yaml").write_text(yaml.safe_dump(values))
    return folder


def newcomer(folder: Path, given: Handout, rounds: int | None = None) -> list[dict[str, Any]]:
    learn(Site.open(folder / "later.yaml", lambda line: None), given, rounds)
    (report,) = (folder / "state-3").glob("*+later/report.jsonl")
    return [json.loads(line) for line in report.read_text().splitlines()]


def test_what_the_server_knows_is_what_it_would_broadcast(tmp_path: Path) -> None:
    folder = federation(tmp_path / "f")
    given = handout(folder / "coordinator.yaml", "", 10)
    state = tensorfile.load(folder / "run" / SERVER)
    assert torch.equal(given.down["centroids"], state["centroids"])
    assert [*given.down.arrays] == ["centroids"]  # as it is declared, and nothing else
    given.save(folder / "handout")
    lines = newcomer(folder, Handout.load(folder / "handout"), 2)
    assert [line["round"] for line in lines] == [0, 1, 1]
    assert "gain" in lines[-1]
    # Again: nothing is trained twice.
    (file,) = (folder / "state-3").glob("*+later/personal.safetensors")
    before = file.read_bytes()
    newcomer(folder, given, 2)
    assert file.read_bytes() == before
    contents = Ledger(folder / "state-3").read()
    assert "handout" in contents.table(None).text()
    assert "left" not in contents.table(None).text().replace("nothing leaves", "")


def test_what_stays_here_costs_no_privacy(tmp_path: Path) -> None:
    folder = federation(tmp_path / "f")
    given = handout(folder / "coordinator.yaml", "", 10)
    values = yaml.safe_load((folder / "later.yaml").read_text())
    values["privacy"] = {"noise": 1.0, "count_noise": 3.0}
    (folder / "later.yaml").write_text(yaml.safe_dump(values))
    lines = newcomer(folder, given, 2)
    assert "test_accuracy" in lines[-1]
    assert Purse(folder / "state-3").spent == []


def test_without_weight_the_lesson_is_local_training(tmp_path: Path) -> None:
    """A limit: λ=0 looks at no centroid, so that the model is the one that trained alone."""
    folder = federation(
        tmp_path / "f", algorithm={"name": "perfed-ckt", "clusters": 2, "weight": 0.0}
    )
    lines = newcomer(folder, handout(folder / "coordinator.yaml", "", 10))
    assert lines[-1]["gain"] == 0
    files = [
        tensorfile.load(next((folder / "state-3").glob(f"*+later/{name}.safetensors")))
        for name in ("personal", "alone")
    ]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[1])


def test_with_weights_it_gets_the_global_model(tmp_path: Path) -> None:
    """As the others have it, but for what eight bits take from it on the way to them."""
    folder = federation(tmp_path / "f", algorithm="fedavg", wire=[{"name": EIGHT_BIT}])
    given = handout(folder / "coordinator.yaml", "", 10)
    newcomer(folder, given, 1)
    (mine,) = (folder / "state-3").glob("*+later/personal.safetensors")
    (theirs,) = (folder / "state-0").glob("*/personal.safetensors")
    ours, global_model = tensorfile.load(mine), tensorfile.load(theirs)
    for name, theirs_now in global_model.items():
        step = float(theirs_now.max() - theirs_now.min()) / 255
        assert torch.allclose(ours[name], theirs_now, atol=step + 1e-7)


def test_a_link_of_codes_does_not_reach_a_handout(tmp_path: Path) -> None:
    """A file needs none, and at its writing nobody knows what the other end has."""
    plain = federation(tmp_path / "plain")
    tiny = [{"name": "probability-bits", "bits": 2}, "cached", "deflate"]
    coded = federation(tmp_path / "coded", wire=tiny)
    shapes = []
    for folder in (plain, coded):
        given = handout(folder / "coordinator.yaml", "", 10)
        shapes.append({n: (t.shape, t.dtype) for n, t in given.down.arrays.items()})
        assert "test_accuracy" in newcomer(folder, given, 1)[-1]
    assert shapes[0] == shapes[1]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = federation(tmp_path / "f")
    given = handout(folder / "coordinator.yaml", "", 10)
    given.save(folder / "handout")
    values = yaml.safe_load((folder / "later.yaml").read_text())

    def refused(reason: str, **changes: Any) -> None:
        (folder / "later.yaml").write_text(yaml.safe_dump(values | changes))
        with pytest.raises(PerfedError, match=reason):
            newcomer(folder, Handout.load(folder / "handout"))

    refused(
        "this site is client 9; the run's are 0 … 3",
        client=9,
        data=values["data"] | {"clients": 10},
    )
    refused("takes part in 'other', not in 'trial'", run="other")
    refused("does not agree to 3 rounds", agrees={"rounds": 2})
    public = {"dataset": values["public"]["dataset"] | {"public": 29}}
    refused("another public set|public set", public=public)
    (folder / "handout").write_bytes(tensorfile.sealed({}, '{"client": 1}')[0])
    refused("is no handout")
    (folder / "run" / SERVER).unlink()
    with pytest.raises(PerfedError, match="an earlier version did not keep it"):
        handout(folder / "coordinator.yaml", "", 10)
