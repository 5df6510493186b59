"""benchmarks/readings.py: every reading is another experiment, and only in what it says."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import perfed
from tests.conftest import SEQUENTIAL, tiny

sys.path.insert(0, str(Path(perfed.__file__).parents[2] / "benchmarks"))
import readings

NAMES = list(readings.READINGS)


def planned(reading: int, method: str) -> dict[str, Any]:
    return readings.study().experiments[readings.run_name(reading, method, 0)].to_mapping()


def differences(reading: int, method: str) -> set[str]:
    first, other = planned(0, method), planned(reading, method)
    return {key for key in first if first[key] != other[key]}


@pytest.mark.parametrize("reading", range(1, len(NAMES)), ids=NAMES[1:])
def test_a_reading_changes_what_it_names(reading: int) -> None:
    changes = readings.READINGS[NAMES[reading]]
    sections = {key for key in changes if key not in ("local", "perfed-ckt")}
    for method in readings.METHODS:
        own = {"algorithm"} if method.startswith(tuple(changes)) else set()
        length = {"rounds", "evaluate_every"} if method in changes else set()
        assert differences(reading, method) == sections | own | length


def test_local_training_makes_as_many_steps_as_the_others() -> None:
    """All clients in some rounds, or those that are selected in every round."""
    for number, name in enumerate(NAMES):
        local, other = planned(number, "local"), planned(number, "perfed-ckt-1")
        everybody = local["algorithm"]["participation"] == "all"
        share = other["clients_per_round"] / other["clients"] if everybody else 1
        assert local["rounds"] == share * other["rounds"], name


def test_a_sum_over_a_mini_batch_is_its_size_times_the_mean() -> None:
    first = planned(0, "perfed-ckt-3")
    summed = planned(
        NAMES.index("agreement summed over a mini-batch, not averaged"), "perfed-ckt-3"
    )
    ratio = summed["algorithm"]["weight"] / first["algorithm"]["weight"]
    assert ratio == first["training"]["public_batch_size"]


def test_quick_needs_no_download() -> None:
    quick = readings.study(quick=True).experiments
    assert len(quick) == 6 * 3 * 3
    assert {e.data.registered_name for e in quick.values()} == {"digits"}


def test_runs_are_looked_at_once_more_when_they_are_over(tmp_path: Path) -> None:
    """A client's best round is no worse than its last, nor the mean of best rounds than the best
    mean; and batch statistics are of the client's test samples alone."""
    with_batchnorm = {"architectures": [{"name": "cnn", "batchnorm": True}]}
    experiment = tiny(rounds=4, models=with_batchnorm, partition="iid")
    result = perfed.run(experiment, tmp_path / "run")
    means = result.summary["models"]["personal"]
    best = readings.best_rounds(result)
    assert best >= means["best_test"]["test_accuracy"] >= means["last"]["test_accuracy"]
    found, federation = [], experiment.federation()
    for client in range(experiment.clients):
        model = result.model(client).train()  # it has nothing but BatchNorm that this changes
        test = federation.splits[client].test
        x = torch.tensor(federation.samples.numbers(federation.samples.x[test]))
        y = torch.tensor(federation.samples.y[test])
        found.append(float((model(x).argmax(1) == y).double().mean()))
    assert readings.in_training_mode(result, federation) == pytest.approx(np.mean(found))
    assert np.mean(found) != pytest.approx(means["last"]["test_accuracy"])


def test_looking_at_runs_goes_on_where_it_was_stopped_and_leaves_no_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models of VGG11 beside the committed records would be forty gigabytes."""
    seen: list[int] = []
    plain = tiny(algorithm="local", rounds=3)
    run = SimpleNamespace(
        methods={"local": None},
        fractions=[1.0],
        seeds=[0, 1],
        experiment=lambda method, fraction, seed: replace(plain, seed=seed),
    )

    def looked_at(result: perfed.Result) -> float:
        seen.append(result.experiment.seed)
        if seen == [0, 1]:
            raise KeyboardInterrupt
        return 0.5

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(readings, "METHODS", ["local"])
    monkeypatch.setattr(readings, "chosen", lambda quick: run)
    monkeypatch.setattr(readings, "best_rounds", looked_at)
    records = tmp_path / "records"
    readings.looked_at_after(records, True, SEQUENTIAL, seconds=0)
    assert not seen
    with pytest.raises(KeyboardInterrupt):
        readings.looked_at_after(records, True, SEQUENTIAL)
    readings.looked_at_after(records, True, SEQUENTIAL)
    assert seen == [0, 1, 1]
    assert list(json.loads((records / "after.json").read_text())) == ["local-seed0", "local-seed1"]
    assert [path.name for path in records.iterdir()] == ["after.json"]
    assert not list((tmp_path / "runs").rglob("*.safetensors"))
