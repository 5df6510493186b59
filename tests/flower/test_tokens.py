"""A federation on tokens: what the simulation gives, and one line where sites do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import perfed
from perfed.config import dump_yaml
from perfed.core.errors import ConfigError, DataError
from perfed.core.schema import from_mapping
from perfed.flower.initialise import check_coordinator
from perfed.flower.settings import read_coordinator
from perfed.flower.site import Site
from tests.conftest import SEQUENTIAL
from tests.flower.setting import EXPERIMENT, SPLIT, desk, write_federation
from tests.flower.test_coordinator import assert_same_numbers, run

DATA = {"name": "phrases", "clients": 3, "each": 40, "public": 20}
MODELS: list[Any] = [
    {"name": "token-mean", "width": 4, "padding": 0},
    {"name": "token-gru", "width": 4, "hidden": 3, "padding": 0},
    {"name": "token-mean", "width": 4, "padding": 0},
]


def change(path: Path, **values: Any) -> Path:
    path.write_text(dump_yaml(yaml.safe_load(path.read_text()) | values))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = write_federation(tmp_path / "federation", MODELS, {"classes": 6, "public": public(DATA)})
    for path in made.glob("site-*.yaml"):
        data = {"dataset": DATA, "partition": "given", "clients": 3}
        change(path, classes=6, data=data, public=public(DATA))
    return made


def public(data: Any) -> dict[str, Any]:
    return {"dataset": data}


def test_it_gives_what_the_simulation_gives(folder: Path, tmp_path: Path) -> None:
    run(folder, desk(folder))
    models = {"architectures": MODELS[:2], "assign": "list", "per_client": [0, 1, 0]}
    values = {"data": DATA, "partition": "given", "split": SPLIT, "models": models}
    experiment = from_mapping(perfed.Experiment, EXPERIMENT | values)
    perfed.run(experiment, tmp_path / "simulation", how=SEQUENTIAL)
    assert_same_numbers(folder / "run", tmp_path / "simulation")
    assert "each 20 tokens of 541" in check_coordinator(folder / "coordinator.yaml")[1]


SOURCE = """
import numpy as np
def own():
    random = np.random.default_rng(0)
    return random.integers(0, 9, (40, 5)), random.integers(0, 6, 40)
"""


def test_arrays_of_a_site_need_the_vocabulary_of_all(folder: Path) -> None:
    (folder / "mine.py").write_text(SOURCE)
    np.save(folder / "public.npy", np.arange(50).reshape(10, 5) % 20)
    own = {"data": {"source": "mine.py:own"}, "public": {"file": "public.npy"}}
    path = change(folder / "site-0.yaml", **own)
    with pytest.raises(ConfigError, match="vocabulary: missing: samples are tokens"):
        Site.open(path)
    with pytest.raises(DataError, match=r"token 15 at .* is out of range: with vocabulary 15"):
        Site.open(change(path, vocabulary=15))
    at = Site.open(change(path, vocabulary=30), lambda line: None)
    assert at.samples.x.dtype == at.samples.public_x.dtype == np.int64
    with pytest.raises(ConfigError, match="'cnn' needs numbers, and these samples are tokens"):
        Site.open(change(path, model="cnn"), lambda line: None).check()


def test_a_coordinator_without_public_set_knows_the_vocabulary(folder: Path) -> None:
    change(folder / "coordinator.yaml", public={}, input_shape=[5], vocabulary=30)
    path = folder / "coordinator.yaml"
    values = yaml.safe_load(path.read_text())
    values["experiment"]["algorithm"] = "fedavg"
    path.write_text(dump_yaml(values))
    samples, inputs = read_coordinator(path).public_samples()
    assert samples.shape == (0, 5)
    assert inputs.vocabulary == 30
    assert inputs.tensor(samples).dtype == torch.int64
