"""Pictures in any layout become channels × height × width; other data stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import perfed
from perfed.core.errors import ConfigError
from perfed.data import datasets
from perfed.models import architectures, build_module

RANDOM = np.random.default_rng(3)
CHW = RANDOM.integers(0, 256, (40, 3, 10, 12)).astype(np.uint8)
Y = np.arange(40) % 4


def loaded(folder: Path, x: np.ndarray, **options: Any) -> np.ndarray:
    np.savez(folder / "a.npz", x=x, y=Y, public=x[:5])
    samples = datasets.build({"name": "npz", "path": str(folder / "a.npz"), **options}).load(0)
    assert samples.public_x.shape[1:] == samples.x.shape[1:]
    return samples.numbers(samples.x)


def test_every_layout_gives_the_same_pictures(tmp_path: Path) -> None:
    expected = loaded(tmp_path, CHW)
    assert expected.shape == (40, 3, 10, 12)
    assert np.array_equal(loaded(tmp_path, np.moveaxis(CHW, 1, -1)), expected)
    floats = np.moveaxis(CHW, 1, -1) / 127.5 - 1
    assert np.allclose(loaded(tmp_path, floats), expected, atol=1e-6)
    grey = loaded(tmp_path, CHW[:, 0])
    assert np.array_equal(grey, expected[:, :1])
    assert np.array_equal(loaded(tmp_path, CHW[:, 0, :, :, None]), grey)
    numbers = CHW[:, 0] / 127.5 - 1
    assert np.allclose(loaded(tmp_path, numbers, layout="HW"), grey, atol=1e-6)


def test_a_torch_dataset_too() -> None:
    x = torch.as_tensor(np.moveaxis(CHW, 1, -1) / 255)
    mine = TensorDataset(x, torch.as_tensor(Y))
    data = datasets.build({"name": "torch", "path": mine})
    assert data.load(0).x.shape == (40, 3, 10, 12)


def test_what_is_no_picture_stays(tmp_path: Path) -> None:
    for shape in [(40, 7), (40, 9, 3), (40, 3, 4, 4), (40, 2, 5, 6, 3)]:
        assert loaded(tmp_path, RANDOM.normal(size=shape)).shape == shape
    assert loaded(tmp_path, np.moveaxis(CHW, 1, -1), layout="none").shape == (40, 10, 12, 3)


def test_what_to_write_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"28×28: if these are pictures .* data.layout: HW"):
        build_module(architectures.build("cnn"), (28, 28), 10)
    with pytest.raises(ConfigError, match="samples of 'x' are 3×10×12: 'layout: HW' is of 2"):
        loaded(tmp_path, CHW, layout="HW")


def test_a_network_trains_on_pictures_with_channels_last(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.moveaxis(CHW, 1, -1), y=Y)
    experiment = perfed.Experiment(
        data={"name": "npz", "path": str(tmp_path / "a.npz"), "public": 8},
        models="cnn",
        algorithm="fedavg",
        clients=3,
        clients_per_round=2,
        rounds=1,
        partition="iid",
        training={"steps": 1},
    )
    assert perfed.run(experiment, tmp_path / "run").summary["finished"]
