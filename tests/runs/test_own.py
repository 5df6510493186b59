"""Objects given in Python: run, interrupted, resumed, compared, read again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import perfed
from perfed.core import objects
from tests.conftest import STACKED, tiny

X = torch.randn(240, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


class Stop(perfed.Callback):
    def on_round(self, report: Any) -> None:
        if report.round == 1:
            raise KeyboardInterrupt


def of_objects(built: nn.Module) -> perfed.Experiment:
    return tiny(
        data={"name": "torch", "path": TensorDataset(X, Y), "public": 40},
        models={
            "architectures": [lambda shape, classes: nn.Linear(6, classes), built],
            "assign": "list",
            "per_client": [0, 1, 1, 0, 1, 0],
        },
    )


@pytest.fixture
def built() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def test_objects_run_and_resume_and_are_read_again(tmp_path: Path, built: nn.Module) -> None:
    whole = perfed.run(of_objects(built), tmp_path / "whole", how=STACKED)
    how = perfed.Execution(engine="stacked", device="cpu", checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(of_objects(built), tmp_path / "cut", how=how, callbacks=[Stop()])
    resumed = perfed.resume(tmp_path / "cut", how=how)
    assert resumed.summary["models"] == whole.summary["models"]
    model = perfed.Result(tmp_path / "whole").model(1)
    assert isinstance(model, nn.Sequential)
    assert model is not built
    comparison = perfed.Comparison(experiment=of_objects(built), algorithms=("local", "fedavg"))
    assert len(perfed.compare(comparison, tmp_path / "two", how=STACKED).results) == 2


def test_in_another_process_the_same_objects_must_be_given_again(
    tmp_path: Path, built: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = perfed.Execution(engine="sequential", device="cpu", checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(of_objects(built), tmp_path / "run", how=how, callbacks=[Stop()])
    monkeypatch.setattr(objects, "_given", {})  # as another process begins
    with pytest.raises(perfed.PerfedError, match="was given as an object, in another Python proc"):
        perfed.resume(tmp_path / "run", how=how)
    of_objects(built)
    assert perfed.resume(tmp_path / "run", how=how).summary["finished"]


def test_a_network_that_has_changed_stops_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from torch import nn\ndef net(s, c):\n    return nn.Sequential(nn.Flatten(), {})\n"
    file = tmp_path / "changing.py"
    monkeypatch.chdir(tmp_path)
    file.write_text(text.format("nn.Linear(64, c)"))
    how = perfed.Execution(engine="sequential", device="cpu", checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(tiny(models="changing.py:net"), "run", how=how, callbacks=[Stop()])
    file.write_text(text.format("nn.Linear(64, 5), nn.Linear(5, c)"))
    monkeypatch.delitem(objects.sys.modules, f"file:{file}")
    with pytest.raises(perfed.PerfedError, match="the networks are not what they were"):
        perfed.resume("run", how=how)
