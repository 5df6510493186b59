"""All that is wrong with a site, at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from perfed import cli
from perfed.flower.checking import check_site
from perfed.flower.initialise import check_coordinator
from tests.flower.setting import write_federation

OWN = """
import numpy as np

def load():
    random = np.random.default_rng(0)
    x = random.random((20, 1, 8, 8), dtype=np.float32) * 2 - 1
    return x * {factor}, np.arange(20) % 10 + {first}
"""


def write(file: Path, factor: int, first: int) -> None:
    file.write_text(OWN.format(factor=factor, first=first))


def test_all_faults_at_once(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "f", algorithm="fedavg", rounds=20, name="other")
    write(folder / "own.py", factor=100, first=1)
    changes = {
        "data": {"source": "own.py:load"},
        "split": {"train": [0.5], "validation": 0.2, "test": 0.3},
        "client": 7,
        "agrees": {"rounds": 10, "batch_size": 4},
    }
    file = folder / "site-0.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changes))
    check_coordinator(folder / "coordinator.yaml", folder / "plan.json")
    found = check_site(file, folder / "plan.json")
    text = "\n".join(found.faults)
    for reason in (
        "labels in the data go from 1 to 10: with 10 classes they are 0 … 9; subtract 1",
        "does not agree to 'fedavg', which sends weights; agrees: {algorithms: [fedavg]}",
        "does not agree to 20 rounds, at most 10",
        "does not agree to 8 samples a step, at most 4",
    ):
        assert reason in text
    assert len(found.faults) == 4
    notices = "\n".join(found.notices)
    assert "public values look unlike private ones" in notices
    assert "split: 10 samples to train, fewer than 20" in notices
    assert "split: 4 samples to validate, fewer than 5" in notices
    assert "occurs among samples to test and not among those to train" in notices
    # Once it agrees, what else is not this site's run.
    values = yaml.safe_load(file.read_text()) | {"agrees": {"algorithms": ["fedavg"]}}
    write(folder / "right.py", factor=1, first=0)
    values["data"] = {"source": "right.py:load"}
    file.write_text(yaml.safe_dump(values))
    found = check_site(file, folder / "plan.json")
    assert found.faults == [
        "this site takes part in 'trial', not in 'other'",
        "this site is client 7; the run's are 0 … 2",
    ]
    assert not any("unlike" in line for line in found.notices)
    file.write_text(yaml.safe_dump(values | {"client": 1}))
    assert check_site(file).faults == []
    assert len(check_site(file).lines) == 3


def test_words_of_a_table_may_be_others_elsewhere(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "f")
    rows = [f"{row % 7},{'fm'[row % 2]},{row % 3}" for row in range(90)]
    (folder / "own.csv").write_text("\n".join(["age,sex,label", *rows]))
    file = folder / "site-0.yaml"
    table = {"dataset": {"name": "csv", "path": "own.csv", "scale": "none"}}
    np.save(folder / "public.npy", np.random.default_rng(0).integers(0, 2, (40, 3)) * 1.0)
    public = {"file": "public.npy"}
    values = yaml.safe_load(file.read_text()) | {"data": table, "public": public, "classes": 3}
    file.write_text(yaml.safe_dump(values))
    found = check_site(file)
    assert found.faults == []
    (said,) = [line for line in found.notices if "word" in line]
    assert said.startswith("data: column 'sex' has a number for each word that occurs here (f, m):")
    np.save(folder / "public.npy", np.zeros((40, 2)))
    (fault,) = check_site(file).faults
    assert fault == "public: public samples are 2, this site's own are 3 (age, sex=f, sex=m)"


def test_a_column_of_numbers_may_have_any_name_and_a_word_any_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_federation(tmp_path / "f")
    rows = [f"{row % 7},{('f', chr(27) + '[31mm')[row % 2]},{row % 3}" for row in range(90)]
    (folder / "own.csv").write_text("\n".join(["BMI=kg,sex,label", *rows]))
    np.save(folder / "public.npy", np.zeros((40, 3)))
    file = folder / "site-0.yaml"
    table = {"dataset": {"name": "csv", "path": "own.csv", "scale": "none"}}
    values = {"data": table, "public": {"file": "public.npy"}, "classes": 3}
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | values))
    monkeypatch.setattr("sys.argv", ["perfed", "site", "check", str(file)])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    said = capsys.readouterr().out
    assert "column 'sex' has a number for each word that occurs here (\ufffd[31mm, f)" in said
    assert "column 'BMI" not in said
    assert "\x1b" not in said


def test_data_and_public_set_are_both_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_federation(tmp_path / "f")
    np.savez(folder / "p.npz", private=np.zeros((2, 2)))
    site_file = folder / "site-0.yaml"
    values = yaml.safe_load(site_file.read_text())
    values |= {"data": {"source": "nowhere.py:load"}, "public": {"file": "p.npz"}}
    site_file.write_text(yaml.safe_dump(values))
    monkeypatch.setattr("sys.argv", ["perfed", "site", "check", str(site_file)])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    out, wrong = capsys.readouterr()
    assert out == ""
    assert [line.partition(" ")[0] for line in wrong.splitlines()] == ["perfed:", "perfed:"]
    assert "cannot import 'nowhere.py'" in wrong
    assert "p.npz has no array 'public'" in wrong
