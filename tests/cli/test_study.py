"""``perfed study`` as a user types it."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.runs.test_design import STUDY

SMALL: dict[str, Any] = STUDY | {
    "methods": ["local", "fedavg"],
    "settings": {"groups": {}, "IID": {"partition": "iid"}},
    "seeds": [0],
    "tuning": None,
}
CPU = ["--device", "cpu", "--engine", "sequential"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps(SMALL))
    return path


def perfed(*words: str, folder: Path) -> Any:
    return warm.perform(["study", *words], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_a_study_from_a_file_to_a_page(file: Path, tmp_path: Path) -> None:
    done = perfed("small.yaml", *CPU, "--figures", "pdf", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "runs" / "tiny"  # by its name
    assert "page: runs/tiny/study.html" in done.stdout
    assert "groups: one seed (0)" in done.stdout
    assert "IID: fedavg, seed 0: round 2/2" in done.stderr
    assert {"study.html", "study.md", "study.tex", "tuning.json", "csv", "figures"} <= {
        path.name for path in out.iterdir()
    }
    assert sorted(path.name for path in (out / "figures").iterdir()) == [
        "bytes-1.pdf",
        "bytes-2.pdf",
        "gains.pdf",
        "harm-1.pdf",
        "harm-2.pdf",
    ]
    again = perfed("small.yaml", "--json", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "round" not in again.stderr  # all of it is there
    assert {row["method"] for row in json.loads(again.stdout)["setting IID"]} == {"local", "fedavg"}


def test_killed_it_goes_on(file: Path, tmp_path: Path) -> None:
    file.write_text(json.dumps(SMALL | {"rounds": 30, "evaluate_every": 30}))
    command = ["study", "small.yaml", *CPU, "--checkpoint-seconds", "0", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "error").open("w") as error:
        process = warm.start(command, cwd=tmp_path, env=environment, stderr=error)
    log = tmp_path / "runs" / "tiny" / "runs" / "groups-fedavg-seed0" / "rounds.jsonl"
    deadline = time.monotonic() + 60
    while not (log.is_file() and log.stat().st_size > 1000):
        assert process.poll() is None, (tmp_path / "error").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    resumed = perfed(*command[1:], folder=tmp_path)
    whole = perfed(*command[1:], "--out", "whole", folder=tmp_path)
    assert (resumed.returncode, whole.returncode) == (0, 0), resumed.stderr + whole.stderr
    found = [json.loads(done.stdout) for done in (resumed, whole)]
    for tables in found:
        for rows in tables.values():
            for row in rows:
                row.pop("seconds_per_round", None)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.yaml"], "no file and no study is called 'nothing.yaml'"),
        (["small.yaml", "--methods", "fedavgg"], "--methods: 'fedavgg' is none of local, fedavg"),
        (["small.yaml", "--settings", "x"], "--settings: 'x' is none of groups, IID"),
        (["small.yaml", "--shard", "3/2"], "--shard: '3/2' is not a shard"),
        (["small.yaml", "--figures", "gif"], "--figures: 'gif' is none of png, pdf"),
        (["small.yaml", "--set", "methods=[lokal]"], "methods[0].name: unknown algorithm 'lokal'"),
        (["small.yaml", "--set", "rounds=x"], "rounds: expected a whole number"),
        (["bad.yaml"], "bad.yaml holds no keys and values"),
    ],
)
def test_bad_input_gets_one_line(
    words: list[str], message: str, file: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("[1, 2]")
    done = perfed(*words, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_study_is_no_experiment(file: Path, tmp_path: Path) -> None:
    done = warm.perform(["run", "small.yaml"], cwd=tmp_path)
    assert done.returncode == 2
    assert "is a study: 'perfed study' runs it" in done.stderr
