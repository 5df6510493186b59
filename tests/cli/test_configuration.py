"""A new user with a folder of images, a network and an algorithm of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perfed import algorithms
from perfed.cli.configuration import _folded
from tests import warm
from tests.cli.test_cli import perfed as here
from tests.data import own_files

ROOT = Path(__file__).parents[2]
NETWORKS = '''
from torch import nn


class Wrong(nn.Module):
    """Ends in ten outputs, as the example it was copied from."""

    def __init__(self):
        super().__init__()
        self.hidden, self.last = nn.Linear(3 * 8 * 8, 16), nn.Linear(16, 10)

    def forward(self, x):
        return self.last(self.hidden(x.flatten(1)).relu())


class Right(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.hidden, self.last = nn.Linear(3 * 8 * 8, 16), nn.Linear(16, classes)

    def forward(self, x):
        return self.last(self.hidden(x.flatten(1)).relu())
'''


def perfed(folder: Path, *arguments: object, answers: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, in a user's folder."""
    environment = {**os.environ, "COLUMNS": "150"}
    return warm.perform(arguments, cwd=folder, env=environment, input=answers)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    own_files.photos(tmp_path / "photos", each=30)
    (tmp_path / "net.py").write_text(NETWORKS)
    return tmp_path


def test_from_a_folder_of_images_to_a_finished_run(folder: Path) -> None:
    made = perfed(folder, "init", "mine.yaml", "--data", "photos", "--clients", 4, "--yes")
    assert made.returncode == 0, made.stderr
    assert "images: 72 samples of 3×8×8, 3 classes (cat, dog, emu), 18 public" in made.stdout
    assert "run it: perfed run mine.yaml" in made.stdout

    wrong = perfed(folder, "run", "mine.yaml", "--set", "models=net.py:Wrong")
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert wrong.stderr == (
        "perfed: models: 'net.py:Wrong' gives 10 numbers for one sample, but the data has 3 "
        "classes: its last layer must have 3 outputs\n"
    )
    assert not (folder / "runs").exists()

    shares = "models={architectures: [mlp, 'net.py:Right'], assign: shares, shares: [0.5, 0.5]}"
    right = perfed(folder, "run", "mine.yaml", "--set", shares, "--set", "rounds=3", "--out", "run")
    assert right.returncode == 0, right.stderr
    told = right.stderr.splitlines()
    assert re.fullmatch(r"network +parameters +clients", told[1])
    parameters = 3 * 8 * 8 * 16 + 16 + 16 * 3 + 3
    assert re.fullmatch(rf"net.py:Right +{parameters:,} +2  \(.*\)", told[2])
    assert re.fullmatch(r"mlp +12,547 +2  \(.*\)", told[3])
    assert right.stdout.splitlines()[-1] == "run directory: run"
    (partition,) = (folder / "run").glob("local*/partition.json")
    record = json.loads(partition.read_text())
    assert record["architectures"]["net.py:Right"] == {"clients": 2, "parameters": parameters}
    assert record["data"]["classes"] == ["cat", "dog", "emu"]


def test_init_asks_a_few_questions_and_overwrites_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = "photos\n3\nfedavg\nnet.py:Right\n"
    asked = perfed(folder, "init", answers=answers)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.count("?") == 4
    silent = perfed(folder, "init", "silent.yaml", "--data", "photos", answers="")
    assert silent.returncode == 2
    assert silent.stderr.endswith(
        'perfed: init: "How many clients?" was not answered: --yes takes what stands in brackets\n'
    )
    text = (folder / "experiment.yaml").read_text()
    assert "factory: 'net.py:Right'" in text
    monkeypatch.chdir(folder)
    assert here(monkeypatch, "init", "--yes") == 2
    error = capsys.readouterr().err
    assert error == "perfed: init: experiment.yaml exists already: choose another name\n"
    assert (folder / "experiment.yaml").read_text() == text
    flags = ("--data", "photos", "-m", "net.py:Wrong", "--yes")
    assert here(monkeypatch, "init", "b.yaml", *flags) == 2
    assert "its last layer must have 3 outputs" in capsys.readouterr().err
    assert not (folder / "b.yaml").exists()


@pytest.mark.parametrize(
    "path", ["half_way.py", "half_way", "half_way.py:HalfWay", "half_way:HalfWay"]
)
def test_an_algorithm_of_ones_own_is_listed_and_explained(
    folder: Path, path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (folder / "half_way.py").write_text(code)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "150")
    algorithms.forget("half-way")  # of another test
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("half_way", None)
    name = path if ":" in path else f"{path}:HalfWay"
    assert here(monkeypatch, "list", "algorithms", "--with", path) == 0
    listed = capsys.readouterr().out
    assert name in listed.split()
    assert "distance" in listed
    assert "half-way" not in listed.split()  # a name no other command would know
    assert here(monkeypatch, "explain", name) == 0
    assert "how far: 0 is local training" in capsys.readouterr().out


def test_a_file_without_components_is_said_to_be_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(monkeypatch, "list", "--with", folder / "net.py") == 2
    assert "defines no algorithm" in capsys.readouterr().err


def test_on_a_terminal_explain_breaks_lines_between_words_and_further_in() -> None:
    line = "  caution: how much better the taught model must explain"
    assert _folded(line, 24) == [
        "  caution: how much",
        "    better the taught",
        "    model must explain",
    ]
    assert _folded(line, 80) == [line]
    assert _folded("", 80) == [""]


def test_list_shows_an_option_without_a_value_as_set_takes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(monkeypatch, "list", "algorithms") == 0
    listed = capsys.readouterr().out
    assert "distil_steps = null" in listed
    assert "distil_steps = none" not in listed


def test_explain_prints_and_mends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert here(monkeypatch, "explain") == 0
    assert "algorithm.clusters (perfed-ckt)" in capsys.readouterr().out
    assert here(monkeypatch, "explain", "training.steps") == 0
    assert "τ: training steps per round" in capsys.readouterr().out
    assert here(monkeypatch, "explain", "training.stepps") == 2
    assert "did you mean 'training.steps'?" in capsys.readouterr().err
    assert here(monkeypatch, "explain", "mine.py") == 2
    assert "name what is in it: mine.py:Name" in capsys.readouterr().err
