"""A site is upgraded in the middle of a run, and goes back: two wheels, each in a virtual
environment of its own, with another version number."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from perfed.flower.backup import state_of
from perfed.flower.initialise import initialise
from perfed.flower.ledger import Ledger
from tests import warm
from tests.flower.processes import PATIENCE, Process, free_port, wait_until

ROOT = Path(__file__).parents[2]
OLD, NEW = "0.1.0", "0.2.0"
BUILD = "import setuptools.build_meta as backend, sys; backend.build_wheel(sys.argv[1])"
PERFED = "#!{python}\nfrom perfed.cli import main\nmain()\n"


def environment_with(version: str, folder: Path) -> Path:
    """A virtual environment with a wheel of this version, and else what is installed here; returns
    its program."""
    own = shutil.ignore_patterns("__pycache__", "*.egg-info")
    tree = folder / f"tree-{version}"
    shutil.copytree(ROOT / "src", tree / "src", ignore=own)
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    project = (tree / "pyproject.toml").read_text("utf-8")
    assert project.count(f'\nversion = "{OLD}"\n') == 1
    (tree / "pyproject.toml").write_text(project.replace(f'"{OLD}"', f'"{version}"', 1), "utf-8")
    words = [sys.executable, "-c", BUILD, str(tree)]
    subprocess.run(words, cwd=tree, check=True, capture_output=True)
    place = folder / f"venv-{version}"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True)
    (packages,) = place.glob("lib/python*/site-packages")
    (wheel,) = tree.glob(f"perfed-{version}-*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(packages)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # comes second
    program = place / "bin" / "perfed"
    program.write_text(PERFED.format(python=place / "bin" / "python"))
    program.chmod(0o755)
    return program


class Coordinator:
    """A coordinator and site 0 of this tree, and a run that goes on for as long as the test."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self.folder, self._ends = folder, ends
        initialise(folder, 2, tls=False, hosts=[], port=free_port(), rounds=10_000)
        path = {"PATH": f"{warm.programs()}{os.pathsep}{os.environ['PATH']}"}
        # A version is what is installed, and not what is on this path.
        self.environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.environment |= path | {"OMP_NUM_THREADS": "1"}
        serve = self.start("perfed", "serve", "federation", "serve", str(folder))
        wait_until(lambda: "listens at" in serve.text(), "the superlink listens")
        self.start("perfed", "site-0", "site", "start", str(self.kit(0)))
        self.start("perfed", "run", "federation", "start", "--no-stream")

    def kit(self, client: int) -> Path:
        return self.folder / "kits" / f"site-{client}.tar.gz"

    def start(self, program: str, name: str, *words: str) -> Process:
        process = Process([program, *words], self.folder / f"{name}.log", self.environment)
        self._ends.callback(process.kill)
        return process

    def perform(self, program: Path, *words: object) -> subprocess.CompletedProcess[str]:
        command = [str(word) for word in (program, *words)]
        return subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True
        )

    def rounds_of_site_1(self) -> list[int]:
        path = self.folder / "run" / "rounds.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        rounds = [json.loads(line) for line in lines if line.endswith("}")]
        return [line["round"] for line in rounds if 1 in line["clients"] and line["round"] >= 0]


def take_part(coordinator: Coordinator, program: Path, name: str) -> None:
    """Until the site has done a round more; then it is stopped, as systemd stops it."""
    before = len(coordinator.rounds_of_site_1())
    kit = str(coordinator.kit(1))
    site = coordinator.start(str(program), name, "site", "start", kit)
    wait_until(
        lambda: len(coordinator.rounds_of_site_1()) > before or site.ended(),
        f"site 1 takes part:\n{site.text()}",
    )
    assert not site.ended(), site.text()
    os.kill(site.pid, signal.SIGTERM)
    wait_until(site.ended, "it is stopped", PATIENCE)
    assert site.code() == 0, site.text()


@pytest.mark.long
def test_a_site_is_upgraded_in_the_middle_of_a_run_and_goes_back(tmp_path: Path) -> None:
    old, new = (environment_with(version, tmp_path) for version in (OLD, NEW))
    # A socket's path is short, and pytest's folders are not.
    with tempfile.TemporaryDirectory(dir="/tmp") as short, ExitStack() as ends:
        coordinator = Coordinator(Path(short) / "trial", ends)
        take_part(coordinator, old, "old")
        site = coordinator.folder / "kits" / "site-1" / "site.yaml"
        saved = coordinator.perform(old, "site", "backup", site, "old.tar.gz")
        assert saved.returncode == 0, saved.stderr
        checked = coordinator.perform(new, "site", "check", site)
        assert checked.returncode == 0, checked.stderr
        take_part(coordinator, new, "new")
        saved = coordinator.perform(new, "site", "backup", site, "new.tar.gz")
        assert saved.returncode == 0, saved.stderr
        refused = coordinator.perform(old, "site", "restore", site, "new.tar.gz")
        assert refused.returncode == 2
        assert f"was made by perfed {NEW}, here is {OLD}" in refused.stderr
        restored = coordinator.perform(old, "site", "restore", site, "old.tar.gz")
        assert restored.returncode == 0, restored.stderr
        take_part(coordinator, old, "old-again")
        ledger = Ledger(state_of(site))
        ledger.read().check(ledger.path)
        rounds = coordinator.rounds_of_site_1()
        assert len(rounds) == len(set(rounds)) >= 3
