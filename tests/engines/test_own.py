"""An algorithm and a network in files outside the package, on every engine, and after a kill."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import perfed
from perfed.core.errors import ConfigError
from perfed.runs.coordinator import RoundReport
from tests.conftest import played, tiny

ROOT = Path(__file__).parents[2]
NET = """
from torch import nn


class Net(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.LazyLinear(8), nn.LazyLinear(classes))

    def forward(self, x):
        return self.layers(x)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's working directory, with the algorithm of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "half_way_here.py").write_text(code)
    (tmp_path / "net_here.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    perfed.algorithms.forget("half-way")  # of another test
    yield tmp_path
    perfed.algorithms.forget("half-way")


def own(path: str) -> perfed.Experiment:
    return tiny(
        algorithm={"name": path, "distance": 0.3},
        models={
            "architectures": ["net_here.py:Net", {"name": "mlp", "hidden": [8]}],
            "assign": "shares",
            "shares": [0.5, 0.5],
        },
    )


class Stop(perfed.Callback):
    def on_round(self, report: RoundReport) -> None:
        if report.round == 0:
            raise KeyboardInterrupt


def numbers(result: perfed.Result) -> np.ndarray:
    return result.per_client()["test_loss"].to_numpy()


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("half_way_here.py:HalfWay", marks=pytest.mark.ray),
        "half_way_here:HalfWay",  # which only a Ray that starts in the folder can import
    ],
)
def test_one_file_outside_the_package_works_with_every_engine(folder: Path, path: str) -> None:
    pytest.importorskip("ray")
    engines: list[dict[str, Any]] = [{"engine": "stacked"}, {"engine": "ray", "workers": 2}]
    plain = perfed.run(own(path), "plain", how=perfed.Execution(engine="sequential", device="cpu"))
    assert plain.experiment.to_mapping()["algorithm"] == {"name": path, "distance": 0.3}
    for options in engines:
        how = perfed.Execution(device="cpu", checkpoint_seconds=0, **options)
        with how.several_runs():
            with pytest.raises(KeyboardInterrupt):
                perfed.run(own(path), options["engine"], how=how, callbacks=[Stop()])
            resumed = perfed.resume(options["engine"], how=how)
        assert np.allclose(numbers(resumed), numbers(plain), atol=1e-3)
    assert perfed.Result("plain").model(0)(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def test_a_network_in_a_folder_is_known_to_the_server(folder: Path) -> None:
    """By its path, which has a slash, as names within a state may."""
    (folder / "nets").mkdir()
    (folder / "nets" / "own.py").write_text(NET)
    experiment = tiny(algorithm="scaffold", models="nets/own.py:Net")
    with pytest.raises(KeyboardInterrupt):
        perfed.run(
            experiment, "run", callbacks=[Stop()], how=perfed.Execution(checkpoint_seconds=0)
        )
    assert np.array_equal(
        numbers(perfed.resume("run")), numbers(perfed.run(experiment, "in_one_go"))
    )


class Masked(torch.nn.Module):
    """Attention over the rows of a picture, each over those above it and itself."""

    mask: torch.Tensor

    def __init__(self, hidden: float) -> None:
        super().__init__()
        self.enter = torch.nn.Linear(8, 8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.leave = torch.nn.Linear(8, 10)
        self.register_buffer("mask", torch.full((8, 8), hidden).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.enter(x.squeeze(1))
        seen = self.attention(rows, rows, rows, attn_mask=self.mask, need_weights=False)[0]
        logits: torch.Tensor = self.leave(seen.mean(1))
        return logits


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_mask_with_infinite_numbers_stays_in_the_network(engine: str, tmp_path: Path) -> None:
    """It was sent, and refused since it is not finite; and a model with it could not be loaded."""
    how = perfed.Execution(device="cpu", engine=engine)
    runs = {}
    for hidden in (-torch.inf, -1e9):  # the second is a part of the model, and hides as well
        torch.manual_seed(0)
        experiment = tiny(algorithm="fedavg", models={"architectures": [Masked(hidden)]})
        runs[hidden] = perfed.run(experiment, tmp_path / str(hidden), how=how)
    assert np.allclose(*map(numbers, runs.values()), rtol=1e-4)
    infinite, finite = (run.summary["traffic"]["up_bytes"] for run in runs.values())
    answers = sum(len(line["clients"]) for line in runs[-1e9].directory.lines("rounds.jsonl"))
    assert finite - infinite >= 64 * 4 * answers
    model = runs[-torch.inf].model(0, "global")
    assert torch.equal(model.mask, Masked(-torch.inf).mask)
    assert model(torch.zeros(2, 1, 8, 8)).isfinite().all()


class Lazy(torch.nn.Sequential):
    def __init__(self) -> None:
        layers = torch.nn.LazyLinear(8), torch.nn.LazyBatchNorm1d(), torch.nn.LazyLinear(10)
        super().__init__(torch.nn.Flatten(), *layers)


def test_lazy_layers_that_have_seen_no_data_are_refused_in_one_line() -> None:
    """A module given as an object is copied, which torch cannot do; by its class it works."""
    played(1, algorithm="local", models={"architectures": [Lazy]})
    with pytest.raises(ConfigError, match="cannot take samples of shape 1×8×8"):
        played(1, algorithm="local", models={"architectures": [Lazy()]})


class Loudest(torch.nn.Module):
    """Divides by the largest number that it has seen in training, so far none."""

    peak: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.leave = torch.nn.Linear(64, 10)
        self.register_buffer("peak", torch.tensor(-torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.peak.copy_(torch.maximum(self.peak, x.detach().max()))
        logits: torch.Tensor = self.leave(x.flatten(1) / self.peak)
        return logits


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_buffer_that_begins_at_infinity_is_each_clients_own(engine: str, tmp_path: Path) -> None:
    """It was taken for a mask: all clients moved the same one, and no model in a file had it."""
    how = perfed.Execution(device="cpu", engine=engine)
    experiment = tiny(algorithm="local", models={"architectures": [Loudest()]})
    run = perfed.run(experiment, tmp_path / "run", how=how)
    models = [run.model(client) for client in range(experiment.clients)]
    assert all(torch.isfinite(dict(model.named_buffers())["peak"]) for model in models)
