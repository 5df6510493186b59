"""Values that no network can learn from are said as such, before anything is made of them."""

import logging
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from perfed import Split, datasets, partitions
from perfed.core.errors import ConfigError, DataError
from perfed.core.notices import say_once
from perfed.data import build_federation, huggingface
from perfed.data.datasets import Samples
from perfed.data.readers import Look, decoded_picture, read_pictures
from perfed.data.sources import MOST_OUTPUTS
from tests.data import own_files

X = np.random.default_rng(0).normal(size=(400, 3))
Y = np.arange(400) % 2


def npz(root: Path, **arrays: Any) -> Path:
    np.savez(root / "a.npz", **({"x": X, "y": Y} | arrays))
    return root / "a.npz"


def load(path: Any, name: str = "npz", **options: Any) -> Samples:
    path = str(path) if isinstance(path, Path) else path
    return datasets.build({"name": name, "path": path, **options}).load(0)


def changed(array: np.ndarray, where: Any, value: Any) -> np.ndarray:
    result = array.copy()
    result[where] = value
    return result


@pytest.mark.attack(57)
@pytest.mark.parametrize("label", [MOST_OUTPUTS, 10**9, 1e300, float("inf"), 2**63])
def test_a_label_that_is_too_high_is_refused_before_memory_is_taken(
    tmp_path: Path, label: Any
) -> None:
    y = changed(Y.astype(type(label) if label != 2**63 else np.uint64), 7, label)
    path = npz(tmp_path, y=y)
    tracemalloc.start()
    with pytest.raises(ConfigError, match=r"label .* of sample 7 is too high: .* at most 32,768"):
        load(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


@pytest.mark.filterwarnings("error")
def test_the_highest_label_is_taken(tmp_path: Path) -> None:
    assert load(npz(tmp_path, y=changed(Y, 7, MOST_OUTPUTS - 1))).classes == MOST_OUTPUTS


@pytest.mark.parametrize("label", [10**9, 1e300])
def test_a_label_of_a_torch_dataset_is_as_high_as_any(label: Any) -> None:
    y = torch.from_numpy(np.array([0, 1, label, 1]))
    with pytest.raises(ConfigError, match=r"of item 2 of the dataset is too high"):
        load(TensorDataset(torch.zeros(4, 2), y), "torch")


def test_a_label_of_the_hub_must_have_a_name() -> None:
    class ClassLabel:
        names = ("cat", "dog")

    class Loaded(dict[str, list[int]]):
        features = {"label": ClassLabel()}  # noqa: RUF012

    with pytest.raises(DataError, match="label 1000000000 of sample 1 has no name: 'label' names"):
        huggingface._labels(Loaded(label=[0, 10**9]), "label")


@pytest.mark.attack(63, 64)
@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": changed(X, (5, 1), 1e39)}, r"'x': 1e\+39 at \[5, 1\] is too large for float32"),
        ({"x": changed(X, (5, 1), -1e300)}, r"'x': -1e\+300 at \[5, 1\] is too large"),
        ({"public": changed(X, (6, 2), 1e39)}, r"'public': 1e\+39 at \[6, 2\] is too large"),
        ({"x": X.astype(complex)}, r"'x' is complex \(complex128\), must be real"),
        ({"public": X.astype(np.complex64)}, "'public' is complex"),
        ({"y": Y.astype(complex)}, "labels must be 0, 1, 2, …, not "),
        ({"x": X[:, :0]}, "'x' must be numbers, .* some of each; it is 400×0 of float64"),
        ({"x": np.zeros((400, 3, 0, 8))}, "it is 400×3×0×8"),
        ({"x": X.astype("m8[s]")}, "'x' must be numbers"),
        ({"y": Y.astype("m8[s]")}, "labels must be 0, 1, 2"),
        ({"y": Y + 0.5}, "labels must be 0, 1, 2, …, not 0.5 as of sample 0"),
        ({"y": changed(Y.astype(float), 3, np.nan)}, "not nan as of sample 3"),
        ({"y": changed(Y, 3, -1)}, "not -1 as of sample 3"),
    ],
)
def test_odd_arrays_are_one_line(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"a\.npz: .*{message}"):
        load(npz(tmp_path, **arrays))


def test_what_float32_can_just_hold_is_taken(tmp_path: Path) -> None:
    x = changed(X, (5, 1), float(np.finfo(np.float32).max))
    assert np.isfinite(load(npz(tmp_path, x=x)).x).all()


@pytest.mark.attack(63)
@pytest.mark.parametrize("scale", ["standard", "none"])
@pytest.mark.parametrize("cell", ["1e300", "-1e39", "1e999"])
def test_a_cell_that_float32_cannot_hold_is_named(tmp_path: Path, cell: str, scale: str) -> None:
    message = rf"line 3, column 'n': {cell} is too large for float32, which ends at 3.4e\+38"
    rows = [[1, 2, "a"], [1, cell, "b"]]
    path = own_files.table(tmp_path / "a.csv", rows, ["m", "n", "label"])
    with pytest.raises(ConfigError, match=message):
        load(path, "csv", scale=scale)
    # Where all are too large, they are no words either.
    path = own_files.table(tmp_path / "a.csv", [[cell, "a"], [cell, "b"]], ["n", "label"])
    with pytest.raises(ConfigError, match=r"line 2, column 'n': .* is too large"):
        load(path, "csv", scale=scale)
    words = own_files.table(tmp_path / "b.csv", [["inf", "a"], ["nan", "b"]], ["n", "label"])
    assert load(words, "csv").origin["columns"] == ["n=inf", "n=nan"]


def test_a_value_that_standardising_drives_out_of_float32_is_named(tmp_path: Path) -> None:
    rows = [[n, n * 1e-60, "ab"[n % 2]] for n in range(40)]
    path = own_files.table(tmp_path / "a.csv", rows, ["m", "n", "label"])
    data = datasets.build({"name": "csv", "path": str(path)})
    made = build_federation(data, partitions.build("iid"), Split(), 2, 0)
    rows[int(made.splits[0].test[0])][1] = 1.0
    own_files.table(path, rows, ["m", "n", "label"])
    with pytest.raises(ConfigError, match="column 'n' has a value too far off those that train"):
        build_federation(data, partitions.build("iid"), Split(), 2, 0)


def table(root: Path, label: Any) -> Path:
    rows = [[n, label(n)] for n in range(400)]
    return own_files.table(root / "a.csv", rows, ["n", "label"])


@pytest.mark.attack(64)
def test_measurements_are_no_labels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"column 'label' has \d+ different values such as .* cl"):
        load(table(tmp_path, lambda n: n % 300 / 7), "csv")
    say_once.cache_clear()
    with caplog.at_level(logging.WARNING, "perfed"):
        for label in (lambda n: n % 300, lambda n: n % 10 / 2, lambda n: f"v{n % 300 / 7}"):
            load(table(tmp_path, label), "csv")
        load(npz(tmp_path, y=np.arange(400) % 300))
        load(npz(tmp_path, y=np.arange(400) % 100 + 0.0))
        assert not caplog.messages
        load(table(tmp_path, lambda n: f"{n % 300}.0"), "csv")
        load(npz(tmp_path, y=np.arange(400) % 300 + 0.0))
    assert [line.partition(", each a class")[0] for line in caplog.messages] == [
        "column 'label' has 300 different values such as 0.0 and 1.0",
        "labels are 300 different float64 numbers",
    ]


@pytest.mark.attack("wide-pixels")
@pytest.mark.parametrize(
    ("kind", "ending"),
    [("uint16", "png"), ("uint16", "tiff"), ("int32", "tiff"), ("float32", "tiff")],
)
def test_pictures_of_more_than_bytes_are_refused(tmp_path: Path, kind: str, ending: str) -> None:
    """As a scanner writes them. All but the darkest of it would become white, without a word."""
    file = tmp_path / f"scan.{ending}"
    Image.fromarray((np.arange(64).reshape(8, 8) * 60).astype(kind)).save(file)
    with pytest.raises(DataError, match=r"scan\.\w+:? is no picture of bytes: .* with 8 bits"):
        read_pictures([file])
    with pytest.raises(DataError, match="save it with 8 bits"):
        decoded_picture(file.read_bytes(), Look((8, 8), grey=True))
