"""What 'perfed init' writes runs as it is, whatever the data is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import perfed
from perfed import starter
from perfed.config import Comparison, parse
from perfed.core.errors import ConfigError
from tests.data import own_files

HERE = __name__


def semicolons(root: Path) -> str:
    path = own_files.table(root / "a.csv", own_files.people(90), own_files.HEADER)
    path.write_text(path.read_text().replace(",", ";"))
    return str(path)


def npz(root: Path) -> str:
    x = np.random.default_rng(0).normal(size=(90, 5))
    np.savez(root / "a.npz", x=x, y=np.arange(90) % 3)
    return str(root / "a.npz")


def by_client(root: Path) -> str:
    for number in range(3):
        own_files.photos(root / "sites" / f"s{number}", each=10, first_seed=10 * number)
    return str(root / "sites")


def tables_by_client(root: Path) -> str:
    for number in range(3):
        rows = own_files.people(30, number)
        own_files.table(root / "sites" / f"s{number}.csv", rows, own_files.HEADER)
    return str(root / "sites")


def tables_in_capitals(root: Path) -> str:
    folder = Path(tables_by_client(root))
    for file in [*folder.iterdir()]:
        file.rename(file.with_suffix(".CSV"))
    return str(folder)


def large(root: Path) -> str:
    own_files.photos(root / "large", each=8, size=(70, 90))
    own_files.photos(root / "large", ("emu",), each=8, size=(20, 30))
    return str(root / "large")


SOURCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "digits": (lambda root: "digits", {"name": "digits"}),
    "npz": (npz, {"name": "npz"}),
    "images": (
        lambda root: str(own_files.photos(root / "photos")),
        {"name": "images", "by_client": False, "size": ()},
    ),
    "large images": (large, {"name": "images", "size": (32, 32)}),
    "images by client": (by_client, {"name": "images", "by_client": True}),
    "csv": (
        lambda root: str(own_files.table(root / "a.csv", own_files.people(90), own_files.HEADER)),
        {"name": "csv", "target": "kind"},
    ),
    "csv with semicolons": (semicolons, {"name": "csv", "separator": ";", "target": "kind"}),
    "csv by client": (tables_by_client, {"name": "csv", "by_client": True, "target": "kind"}),
    "CSV by client": (tables_in_capitals, {"name": "csv", "by_client": True, "target": "kind"}),
}


def begin(text: str) -> starter.Start:
    source = starter.recognise(text)
    if source["name"] == "csv":
        source["target"] = starter.likely_target(source)
    return starter.Start.look(source)


@pytest.mark.parametrize("kind", SOURCES)
def test_what_is_written_runs_as_it_is(tmp_path: Path, kind: str) -> None:
    make, expected = SOURCES[kind]
    start = begin(make(tmp_path))
    clients = start.named_clients or start.likely_clients()
    algorithms = starter.several(starter.ALGORITHMS)
    what = start.experiment("mine", clients, algorithms, [start.likely_model()])
    file = tmp_path / "mine.yaml"
    starter.write(file, what)
    read = perfed.load(file)
    assert read == what
    assert isinstance(read, Comparison)
    data = read.experiment.data
    assert data.registered_name == expected.pop("name")
    for key, value in expected.items():
        assert getattr(data, key) == value
    assert (start.named_clients == 3) == ("client" in kind)
    # Samples that somebody's clients brought are like nobody else's.
    assert read.experiment.shared_test == ("client" not in kind)
    short = perfed.load(file, ["rounds=1", "training.steps=1"])
    assert isinstance(short, Comparison)
    result = perfed.compare(short, tmp_path / "run")
    assert len(result.results) == len(algorithms)


def test_every_key_is_there_with_its_meaning() -> None:
    start = starter.Start.look({"name": "digits"})
    what = start.experiment("mine", 6, ["hypcluster"], ["mlp", "cnn"])
    text = starter.commented(what)
    assert max(map(len, text.splitlines())) <= starter.WIDTH
    values = yaml.safe_load(text)
    assert parse(values) == what
    assert set(values) == set(what.to_mapping())
    for line in text.splitlines():
        stripped = line.strip()
        commented_above = text[: text.index(line)].splitlines()[-1:]
        if ":" in stripped and "name:" not in stripped and not stripped.startswith("#"):
            assert "  # " in line or commented_above[0].strip().startswith("#"), line
    assert values["clients_per_round"] == values["clients"] == 6  # all train, as local does
    assert values["algorithm"]["clusters"] == 3
    fewer = start.experiment("mine", 2, ["hypcluster"], ["mlp"])
    assert fewer.to_mapping()["algorithm"]["clusters"] == 1


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    start = starter.Start.look({"name": "digits"})
    for arguments, message in (
        ((6, ["fedaverage"], ["mlp"]), "did you mean 'fedavg'"),
        ((6, ["fedavg"], ["vgg11"]), "'vgg11' needs images of at least 16×16"),
        ((6, ["fedavg"], ["gone.py:Net"]), "cannot import 'gone.py'"),
        ((2000, ["fedavg"], ["mlp"]), "2000 clients need at least 6000 samples"),
    ):
        with pytest.raises(ConfigError, match=message):
            start.experiment("mine", *arguments)
    one = own_files.photos(tmp_path / "one", ["cat"])
    with pytest.raises(ConfigError, match="data: all samples are of one class, 'cat'"):
        starter.Start.look({"name": "images", "path": str(one)}).experiment(
            "mine", 2, ["local"], ["mlp"]
        )
    (tmp_path / "nothing").mkdir()
    for text, message in (
        ("digitz", "did you mean 'digits'"),
        (str(tmp_path / "nothing"), "holds neither folders of images by class nor"),
    ):
        with pytest.raises(ConfigError, match=message):
            starter.recognise(text)
    with pytest.raises(ConfigError, match="'-3' is not a whole number"):
        starter.whole_number("-3")
