"""Datasets of the Hugging Face library, here from folders: the Hub is out of a test's reach."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perfed import datasets
from perfed.core.errors import ConfigError
from perfed.data.datasets import Samples
from tests.data import own_files

os.environ.setdefault("HF_HUB_OFFLINE", "1")
library = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _quiet_and_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    library.disable_progress_bars()
    yield
    library.enable_progress_bars()


def load(path: Path | str, **options: Any) -> Samples:
    return datasets.build({"name": "huggingface", "path": str(path), **options}).load(0)


def pictures(count: int, labels: Any, size: tuple[int, int] = (8, 6)) -> Any:
    pixels = [own_files.picture(number, 0, size) for number in range(count)]
    features = library.Features(image=library.Image(), label=labels, who=library.Value("string"))
    rows = {
        "image": [Image.fromarray(p) for p in pixels],
        "label": [number % 2 for number in range(count)],
        "who": [f"w{number % 3}" for number in range(count)],
    }
    return library.Dataset.from_dict(rows, features=features)


def test_pictures_with_named_classes(tmp_path: Path) -> None:
    made = pictures(12, library.ClassLabel(names=["cat", "dog"]))
    made.to_parquet(tmp_path / "set" / "train.parquet")
    samples = load(tmp_path / "set", client="who")
    assert samples.x.shape == (12, 3, 8, 6)
    expected = own_files.picture(5, 0, (8, 6)).transpose(2, 0, 1) / 127.5 - 1
    assert np.allclose(samples.numbers(samples.x[5]), expected, atol=1e-6)
    assert samples.y.tolist() == [0, 1] * 6
    assert samples.origin["classes"] == ["cat", "dog"]
    assert samples.client_ids is not None
    assert samples.client_ids.tolist() == ["w0", "w1", "w2"] * 4
    grey = load(tmp_path / "set", size=[4, 4], colours="grey", public=3)
    assert (grey.x.shape, grey.public_x.shape) == ((9, 1, 4, 4), (3, 1, 4, 4))


def test_splits_and_what_save_to_disk_wrote(tmp_path: Path) -> None:
    labels = library.ClassLabel(names=["cat", "dog"])
    both = library.DatasetDict(train=pictures(8, labels), test=pictures(4, labels))
    both.save_to_disk(tmp_path / "saved")
    assert len(load(tmp_path / "saved").x) == 8
    assert len(load(tmp_path / "saved", split="train+test").x) == 12
    with pytest.raises(ConfigError, match=r"data.split: no split 'tests'; did you mean 'test'"):
        load(tmp_path / "saved", split="tests")
    both["train"].save_to_disk(tmp_path / "one")
    assert len(load(tmp_path / "one").x) == 8
    for name, part in both.items():
        part.to_parquet(tmp_path / "files" / f"{name}.parquet")
    assert len(load(tmp_path / "files", split="train[:50%]+test").x) == 8


def test_numbers_and_arrays(tmp_path: Path) -> None:
    rows = {"a": [1, 2, 3, 4], "b": [0.5, 0.25, 1, 2], "label": ["x", "y", "y", "x"]}
    library.Dataset.from_dict(rows).to_parquet(tmp_path / "n" / "train.parquet")
    samples = load(tmp_path / "n")
    assert samples.x.tolist() == [[1, 0.5], [2, 0.25], [3, 1], [4, 2]]
    assert samples.y.tolist() == [0, 1, 1, 0]
    assert load(tmp_path / "n", inputs=["b"]).x.tolist() == [[0.5], [0.25], [1], [2]]
    arrays = {"x": np.arange(24).reshape(4, 3, 2).tolist(), "label": [0, 1, 0, 2]}
    library.Dataset.from_dict(arrays).to_parquet(tmp_path / "x" / "train.parquet")
    samples = load(tmp_path / "x", public={"name": "huggingface", "path": str(tmp_path / "x")})
    assert np.array_equal(samples.x, np.arange(24).reshape(4, 3, 2))
    assert np.array_equal(samples.public_x, samples.x)


def test_what_is_wrong_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"text": ["a", "b", "c"], "label": [0, 1, None]}
    library.Dataset.from_dict(rows).to_parquet(tmp_path / "t" / "train.parquet")
    for options, message in (
        ({}, "data.inputs: name the column of images or numbers (there are: text, label)"),
        ({"inputs": ["txt"]}, "data.inputs: there is no column 'txt'; did you mean 'text'?"),
        ({"inputs": ["text"]}, "must be numbers"),
        ({"split": "dev"}, "cannot be loaded: ValueError"),
    ):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / "t", **options)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    numbers = {"n": [1, 2, 3], "label": [0, 1, None]}
    library.Dataset.from_dict(numbers).to_parquet(tmp_path / "u" / "train.parquet")
    with pytest.raises(ConfigError, match="sample 2 has no 'label'"):
        load(tmp_path / "u")
    with pytest.raises(ConfigError, match=r"data.target: there is no column 'lable'; did you mean"):
        load(tmp_path / "u", target="lable")
    with pytest.raises(ConfigError, match="'nobody/nothing' cannot be loaded"):
        load("nobody/nothing")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"datasets is not installed: pip install 'perfed\[hugg"):
        load("nobody/nothing")
