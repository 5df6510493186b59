"""Small traps: what goes wrong silently elsewhere is said here, in one line."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn

import perfed
from perfed import Algorithm
from perfed.core.algorithm import Client
from perfed.core.errors import ConfigError, did_you_mean
from perfed.core.message import Message
from perfed.core.notices import say_once
from perfed.data import datasets
from perfed.models import architectures, build_module
from perfed.starter import names_of_rows
from tests.cli.test_cli import perfed as command
from tests.conftest import SEQUENTIAL, STACKED, played, simulate, tiny
from tests.engines.clients import working_client


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    say_once.cache_clear()


def load(folder: Path, x: np.ndarray, y: np.ndarray, **options: Any) -> Any:
    np.savez(folder / "a.npz", x=x, y=y)
    return datasets.build({"name": "npz", "path": str(folder / "a.npz"), **options}).load(0)


def test_labels_from_1_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = np.random.default_rng(0).normal(size=(30, 4))
    assert load(tmp_path, x, np.arange(30) % 3 + 1).classes == 4
    assert "labels begin at 1, not at 0" in caplog.text
    assert "subtract 1" in caplog.text
    caplog.clear()
    load(tmp_path, x, np.arange(30) % 3)
    assert caplog.text == ""


def test_bytes_may_be_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    x = np.random.default_rng(0).integers(0, 50, (30, 12)).astype(np.uint8)
    samples = load(tmp_path, x, np.arange(30) % 3)
    assert samples.numbers(samples.x).max() <= 1
    assert "taken for pixels" in caplog.text
    assert "if they are tokens, set data.vocabulary" in caplog.text
    caplog.clear()
    samples = load(tmp_path, x, np.arange(30) % 3, vocabulary=50)
    assert samples.x.dtype == np.int64
    assert samples.x.max() == x.max()
    assert caplog.text == ""


class Ending(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.flatten(1))
        return y


class WithSoftmax(Ending):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


class WithLogSoftmax(Ending):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(1)


@pytest.mark.parametrize(
    ("name", "said"), [("Ending", ""), ("WithSoftmax", "softmax"), ("WithLogSoftmax", "log-soft")]
)
def test_a_network_that_ends_in_softmax_is_said(
    name: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    build_module(architectures.build(f"{__name__}:{name}"), (1, 8, 8), 10)
    assert f"ends in {said}" in caplog.text if said else not caplog.text


def test_initials_are_understood() -> None:
    with pytest.raises(ConfigError, match=r"training\.lr: .* did you mean 'learning_rate'\?"):
        tiny(training={"lr": 0.1})
    assert "did you mean 'batch_size'?" in did_you_mean("bs", ["batch_size", "steps"])
    assert "did you mean" not in did_you_mean("zz", ["batch_size", "steps"])


def test_init_says_that_it_guesses_and_leaves_ids_and_dates_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random = np.random.default_rng(0)
    with (tmp_path / "people.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["patientId", "seen", "who", "age", "height", "kind"])
        for row in range(120):
            age, height = random.normal(50, 9), random.normal(170, 9)
            seen, who = f"2025-03-{row % 28 + 1:02}", f"P{row}"
            writer.writerow([1000 + row, seen, who, age, height, "ab"[row % 2]])
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, "init", "e.yaml", "--data", "people.csv", "-y", "-a", "local") == 0
    out = capsys.readouterr().out
    assert "label: column 'kind', a guess; --target names another" in out
    assert "left out, as ids or dates: patientId, seen, who" in out
    ignored = yaml.safe_load(Path("e.yaml").read_text())["data"]["ignore"]
    assert ignored == ["patientId", "seen", "who"]


def test_init_keeps_words_that_come_again_and_numbers_with_a_decimal_comma(tmp_path: Path) -> None:
    rows = [f"{row},5;w{row // 2};P{row};{'ab'[row % 2]}" for row in range(60)]
    table = tmp_path / "people.csv"
    table.write_text("\n".join(["height;ward;who;kind", *rows]))
    source = {"name": "csv", "path": str(table), "separator": ";", "target": "kind"}
    assert names_of_rows(source) == ["who"]


@dataclass(frozen=True)
class AsksForPublic(Algorithm):
    def client_round(self, client: Client, message: Message) -> Message:
        def objective(model: Any, private: Any, public: Any) -> Tensor:
            loss: Tensor = model(public.x).square().mean()
            return loss

        client.weights = client.sgd(client.weights, objective)
        return Message()


@pytest.mark.parametrize("how", [SEQUENTIAL, STACKED], ids=["sequential", "stacked"])
def test_public_samples_for_nobody_get_a_sentence(how: perfed.Execution) -> None:
    with pytest.raises(ConfigError, match="must say trains_on_public_set = True"):
        played(1, how=how, algorithm=AsksForPublic())


def test_a_list_is_refused_where_it_is_set() -> None:
    client = working_client(simulate(algorithm="local").population, 0, 0)
    with pytest.raises(ConfigError, match=r"client\.state: 'seen' is a list: must be a tensor"):
        client.state["seen"] = [1, 2]
    with pytest.raises(ConfigError, match=r"client\.state: 'seen' is a int"):
        client.state = {"seen": 3}
    with pytest.raises(ConfigError, match=r"client\.state: is a list"):
        client.state = [torch.ones(1)]  # type: ignore[assignment]
    client.state["seen"] = torch.ones(2)
    assert type(client.record().state) is dict
