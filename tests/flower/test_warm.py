"""Programs forked from a warm process: what they are, and how they end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from perfed.flower import warm
from tests.flower.processes import PATIENCE

WARM = """
import importlib.util, os, subprocess, sys, time
from pathlib import Path

# By its path, alone: perfed itself would import torch.
spec = importlib.util.spec_from_file_location("warm", FILE)
warm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(warm)
place = Path(sys.argv[1])

def program():
    if "wait" in sys.argv:
        time.sleep(1000)
    print(os.getcwd(), os.environ["MINE"], sys.argv[1:], flush=True)
    raise SystemExit(int(sys.argv[-1]))

process = warm.Warm({"flwr-clientapp": program})
"""


def script(folder: Path, text: str) -> list[str]:
    (folder / "own").mkdir()
    code = WARM.replace("FILE", repr(warm.__file__))
    return [sys.executable, "-c", f"{code}\n{text}", str(folder)]


def test_a_forked_program_has_its_own_folder_environment_words_and_code(tmp_path: Path) -> None:
    text = """
import tempfile
mine = tempfile.TemporaryDirectory()  # goes when this process ends, and not with a fork
environment = process.environment(place) | {"MINE": "yes"}
asked = subprocess.Popen(["flwr-clientapp", "a b", "7"], cwd=place / "own", env=environment)
while asked.poll() is None:
    process.turn(0.02)
pid = process.start("flwr-clientapp", ["3"], place, environment)
print(asked.returncode, process.turn(10) == {pid: 3}, flush=True)
process.close()
print(process._folder.exists(), Path(mine.name).exists(), flush=True)
"""
    done = subprocess.run(script(tmp_path, text), capture_output=True, text=True, check=True)
    own, here = tmp_path / "own", tmp_path
    assert done.stdout.splitlines() == [
        f"{own} yes ['a b', '7']",
        f"{here} yes ['3']",
        "7 True",
        "False True",
    ]


WAITING = """
environment = process.environment(place) | {"MINE": "yes"}
asked = subprocess.Popen(["flwr-clientapp", "wait"], env=environment)
for _ in range(100):
    process.turn(0.02)
    if process._lines:
        break
print("pids", asked.pid, *process._lines, flush=True)
while process._lines:
    process.turn(0.1)
    asked.poll()
print("gone", flush=True)
"""


def started(process: subprocess.Popen[str]) -> tuple[list[int], list[int]]:
    """Who asked, and what was forked for it."""
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()[-2:]]
    return pids, [os.pidfd_open(pid) for pid in pids]


def all_end(watched: list[int]) -> bool:
    for process in watched:
        readable, _, _ = select.select([process], [], [], PATIENCE)
        os.close(process)
        if not readable:
            return False
    return True


def test_who_asked_and_what_was_forked_for_it_end_together(tmp_path: Path) -> None:
    command = script(tmp_path, WAITING)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        (asker, forked), watched = started(process)
        assert asker != forked
        os.kill(asker, signal.SIGKILL)
        assert all_end(watched)
        assert process.wait(PATIENCE) == 0


def test_nothing_outlives_a_warm_process_that_is_killed(tmp_path: Path) -> None:
    command = script(tmp_path, WAITING)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        _, watched = started(process)
        process.kill()
        assert all_end(watched)


LOADED = """
import torch

asked = []
for name in ("is_available", "device_count", "init", "_lazy_init"):
    setattr(torch.cuda, name, lambda *words, name=name: asked.append(name))
from pathlib import Path
from perfed.flower.services import Services

kept = Services(Path("."))
print(torch.cuda.is_initialized(), asked)
kept.close()
"""


def test_the_warm_process_never_touches_a_gpu(tmp_path: Path) -> None:
    """After a fork CUDA works only if nothing has asked for it before, be it how many GPUs there
    are."""
    command = [sys.executable, "-c", LOADED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False []\n", 0), done.stderr


ON_A_GPU = """
import torch

def program():
    x = torch.ones(1, 4, device="cuda", requires_grad=True)
    (x @ torch.ones(4, 2, device="cuda")).square().sum().backward()
    raise SystemExit(int(x.grad.sum().item()))

process = warm.Warm({"flwr-clientapp": program})
pids = [process.start("flwr-clientapp", [], place, os.environ) for _ in range(2)]
ended = {}
while len(ended) < 2:
    ended |= process.turn(60)
print([ended[pid] for pid in pids], torch.cuda.is_initialized())
process.close()
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_forked_programs_train_on_a_gpu(tmp_path: Path) -> None:
    """The gradient of Σ (x·1)² at x = 1 is 2·4 for each of two columns: 16, in four places."""
    done = subprocess.run(script(tmp_path, ON_A_GPU), capture_output=True, text=True)
    assert done.stdout == "[64, 64] False\n", done.stderr
