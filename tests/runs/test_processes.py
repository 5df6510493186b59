"""A study on several processes: the numbers of one, and nothing left behind."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from perfed import Execution
from perfed.core.errors import ConfigError
from perfed.runs import processes
from perfed.runs.design import Conduct, design
from tests.conftest import SEQUENTIAL
from tests.runs.test_design import STUDY, numbers

SMALL = STUDY | {"methods": ["local", "fedavg"], "tuning": None}


def test_the_numbers_are_those_of_one_process(tmp_path: Path) -> None:
    one, two = (Conduct(design(copy.deepcopy(SMALL)), tmp_path / name) for name in ("one", "two"))
    one.run(SEQUENTIAL)
    two.run(SEQUENTIAL, methods=["local"], settings=["IID"])  # is done already
    said: list[str] = []
    cells = two.unfinished()
    assert len(cells) == 3
    processes.run(SMALL, two.folder, cells, 2, SEQUENTIAL, say=said.append)
    assert numbers(two) == numbers(one)
    assert two.unfinished() == []
    assert sorted(line.partition(":")[0] for line in said) == [
        "IID, fedavg",
        "groups, fedavg",
        "groups, local",
    ]


def test_ray_has_workers_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--processes: Ray has workers of its own"):
        processes.run(SMALL, tmp_path, [], 2, Execution(engine="ray"))


@pytest.mark.long
def test_ctrl_c_ends_all_of_them_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(SMALL | {"rounds": 100_000, "evaluate_every": 100_000}))
    command = [sys.executable, "-m", "perfed", "study", str(file), "--processes", "2"]
    command += ["--out", str(tmp_path / "out"), "--device", "cpu"]
    study = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        ends = time.monotonic() + 400  # two processes import torch, on a machine that may be busy
        while len([*tmp_path.glob("out/runs/*/timing.jsonl")]) < 2:  # both have played a round
            assert study.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.05)
        os.killpg(study.pid, signal.SIGINT)  # as a terminal does
        _, errors = study.communicate(timeout=200)
    except BaseException:  # it would go on for 100,000 rounds
        os.killpg(study.pid, signal.SIGKILL)
        raise
    assert study.returncode == 128 + signal.SIGINT
    assert "Traceback" not in errors
    assert "interrupted; the same command goes on" in errors
    while _is_there(study.pid):  # soon nobody of the group is
        assert time.monotonic() < ends
        time.sleep(0.05)
    assert [*tmp_path.glob("out/runs/*/checkpoint/manifest.json")]  # the round was saved


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
