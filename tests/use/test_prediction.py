"""Predictions: samples go the way of training, and what does not fit is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import perfed
from perfed import cli
from perfed.cli import use
from perfed.core import tensorfile
from perfed.core.errors import DataError, PerfedError, RunError
from perfed.data.needs import Needs, pixel_range
from perfed.runs.model_file import Blueprint
from perfed.use import open_model, predict
from tests.conftest import SEQUENTIAL, tiny
from tests.flower.setting import desk, write_federation
from tests.flower.test_coordinator import run as federate

CSV = {"name": "csv", "path": "t.csv", "target": "kind", "public": 10}
TABLE = [
    (f"{age}", colour, "sick" if age > 50 else "well")
    for age, colour in zip(range(1, 101), ["red", "blue"] * 50, strict=True)
]


def run(folder: Path, **changes: Any) -> perfed.Result:
    return perfed.run(tiny(**changes), folder, how=SEQUENTIAL)


def table(path: Path, rows: list[tuple[str, ...]], header: str) -> None:
    path.write_text("\n".join([header, *(",".join(row) for row in rows)]) + "\n")


def test_a_table_is_scaled_as_in_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of training themselves: the numbers that the network got then."""
    monkeypatch.chdir(tmp_path)
    table(tmp_path / "t.csv", TABLE, "age,colour,kind")
    made = run(tmp_path / "run", data=CSV, models="mlp", algorithm="local", partition="iid")
    federation = made.experiment.federation()
    needs = made.needs()
    assert needs.columns == ("age", "colour=blue", "colour=red")
    # Another order of columns, none for the label, one more that nobody asked for.
    table(tmp_path / "new.csv", [(c, a, "7") for a, c, _ in TABLE], "colour,age,id")
    ((names, x),) = needs.read(Path("new.csv"))
    assert names[0] == "line 2"
    assert np.array_equal(x[federation.samples.index], federation.samples.x)
    model = made.model(2)
    must = model(torch.as_tensor(x)).softmax(1).max(1)
    found = list(predict(open_model(Path("run"), client=2), Path("new.csv")))
    assert [p.name for p in found] == [["sick", "well"][label] for label in must.indices]
    assert np.allclose([p.probability for p in found], must.values.detach())
    assert [p.unsure for p in found] == [p.probability < 0.8 for p in found]
    wrong = {
        "age,colour\n1,green\n": "line 2, column 'colour': 'green' did not occur in training",
        "age\n1\n": "has no column 'colour'; this model takes 'age', 'colour'",
        "age,colour\nold,red\n": "line 2, column 'age': 'old' is not a number",
        "age,colour\n1e39,red\n": "too large for float32",
    }
    for text, reason in wrong.items():
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(DataError, match=re.escape(reason)):
            list(needs.read(Path("bad.csv")))
    monkeypatch.setattr("sys.argv", ["perfed", "predict", "run", "new.csv", "--client", "9"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err == "perfed: no client 9: they are 0 … 5\n"


def test_pictures_and_arrays(tmp_path: Path) -> None:
    needs = Needs(shape=(3, 4, 6), classes=2, pixels=(-1.0, 1.0))
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), dtype=np.uint8)
    must = np.moveaxis(pixels, -1, 1) / 127.5 - 1
    (tmp_path / "deep").mkdir()
    for number, picture in enumerate(pixels):
        Image.fromarray(picture).save(tmp_path / "deep" / f"{number}.png")
    np.savez(tmp_path / "bytes.npz", x=pixels)
    np.save(tmp_path / "floats.npy", must)
    for name in ("deep", "bytes.npz", "floats.npy"):
        ((_, x),) = needs.read(tmp_path / name)
        assert np.allclose(x, must, atol=1e-6)
        assert x.dtype == np.float32
    # A black and a white picture of another size and mode.
    Image.new("L", (50, 20), 255).save(tmp_path / "white.jpg")
    ((_, white),) = needs.read(tmp_path / "white.jpg")
    assert white.shape == (1, 3, 4, 6)
    assert (white == 1).all()
    faults: dict[str, Any] = {
        "values from 0 to 255, this model takes pixels from -1 to 1": pixels.astype(float),
        "samples are 4×6, this model takes 3×4×6": pixels[..., 0],
        "is not finite": np.full((1, 3, 4, 6), np.nan),
    }
    for reason, x in faults.items():
        np.save(tmp_path / "bad.npy", x)
        with pytest.raises(DataError, match=reason):
            list(needs.read(tmp_path / "bad.npy"))
    plain = Needs(shape=(3, 4, 6), classes=2)
    with pytest.raises(DataError, match="does not take pictures"):
        list(plain.read(tmp_path / "white.jpg"))
    (tmp_path / "deep" / "5.png").write_text("no picture")
    with pytest.raises(DataError, match=r"5\.png: is no picture that can be read"):
        list(needs.read(tmp_path / "deep"))


def test_classes_that_a_client_never_saw_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its model calls them something else, and is often sure of it."""
    skewed = {"name": "dirichlet", "alpha": 0.01}
    made = run(tmp_path / "run", models="mlp", algorithm="fedavg-ft", partition=skewed)
    federation = made.experiment.federation()
    client = 1
    seen = federation.samples.y[federation.splits[client].train]
    unseen = sorted({*range(10)} - {*seen.tolist()})
    assert unseen
    np.save(tmp_path / "x.npy", federation.samples.x[:2])
    model = open_model(tmp_path / "run", client)
    assert model.card["no training sample of"] == ", ".join(map(str, unseen))
    use.predict(tmp_path / "run", tmp_path / "x.npy", client)
    said = " ".join(capsys.readouterr().out.split())
    assert f"no training sample of: {', '.join(map(str, unseen))}." in said
    assert "no training sample of" not in open_model(tmp_path / "run", client, "global").card


def test_the_range_of_pixels_is_told_from_the_data() -> None:
    for low, high, must in [
        (-1, 1, (-1, 1)),
        (-0.9, 0.8, (-1, 1)),
        (0, 1, (0, 1)),
        (0, 255, (0, 255)),
        (0, 16, ()),  # in sixteenths: nobody knows what a byte would be
        (-3, 3, ()),  # standardised
    ]:
        x = np.linspace(low, high, 24).reshape(2, 1, 3, 4)
        assert pixel_range(x) == must


METHODS = ["fedmrl", "perfed-kin", "fedavg"]


@pytest.mark.parametrize("method", METHODS)
def test_a_sites_model_file_says_what_it_is(method: str, tmp_path: Path) -> None:
    """The spliced model of FedMRL has networks beside the site's own."""
    folder = write_federation(tmp_path / "f", rounds=1, algorithm=method)
    federate(folder, desk(folder))
    (file,) = (folder / "state-2").glob("*/personal.safetensors")
    x = torch.rand(4, 1, 8, 8) * 2 - 1
    loaded = perfed.load_model(file)(x)
    network = perfed.models.build_module(
        perfed.architectures.build({"name": "cnn", "batchnorm": True}), (1, 8, 8), 10
    )
    assert torch.equal(perfed.load_model(file, network)(x), loaded)
    for place in (file, file.parent, folder / "state-2", folder / "site-2.yaml"):
        ready = open_model(place)
        assert np.allclose(ready.probabilities(x.numpy()), loaded.softmax(1).detach(), atol=1e-6)
        assert ready.needs.pixels == (-1.0, 1.0)
        assert ready.alone == file.with_name("alone.safetensors")
    assert open_model(ready.alone).card["model"] == "alone, without the federation"


def test_a_file_cannot_say_what_is_imported(tmp_path: Path) -> None:
    made = run(tmp_path / "run", models="mlp", algorithm="local", rounds=1)
    index = json.loads((tmp_path / "run/models/index.json").read_text())
    tensors = tensorfile.load(tmp_path / "run/models/personal-0000.safetensors")
    blueprint = made._blueprint(index, index["clients"][0])
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\n")
    hostile = blueprint.text().replace('"name": "mlp"', f'"name": "{trap}:Net"')
    file = tmp_path / "m.safetensors"
    file.write_bytes(tensorfile.sealed(tensors, hostile)[0])
    for load in (perfed.load_model, open_model):
        with pytest.raises(RunError, match="not imported because a file says so"):
            load(file)
    assert not (tmp_path / "sprung").exists()
    # What it says of itself is under its checksum, too.
    content = tensorfile.sealed(tensors, blueprint.text())[0]
    file.write_bytes(content.replace(b"8]", b"9]", 1))
    with pytest.raises(RunError, match="corrupt"):
        open_model(file)
    for text in ("{}", "[]", "1", '{"networks": {}, "needs": {"shape": [0]}, "card": {}}'):
        file.write_bytes(tensorfile.sealed(tensors, text)[0])
        with pytest.raises(PerfedError) as caught:
            open_model(file)
        assert "\n" not in str(caught.value)
    assert Blueprint.from_text(blueprint.text()) == blueprint


def test_what_is_not_there_is_said_before_anything_else(tmp_path: Path) -> None:
    """As where a shell finds no file for 'runs/own/perfed-kin*'."""
    with pytest.raises(RunError, match="no such file or folder"):
        open_model(tmp_path / "perfed-kin*", client=0)
