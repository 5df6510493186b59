"""The ten commands of docs/federation.md as they stand there, then those of docs/use.md for a site
that comes later; each program from nothing, in a network of its own."""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from perfed.flower.overview import look
from tests.flower.machines import Machines, allowed, machines
from tests.flower.processes import wait_until

DOCS = Path(__file__).parents[2] / "docs"
HOST = "link.example.org"
INSTALL = "pip install --constraint constraints.txt '.[flower]'"


def blocks(page: str, section: str) -> list[list[str]]:
    """The commands of a section, block by block."""
    part = (DOCS / page).read_text("utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    found = re.findall(r"```sh\n(.*?)```", part, re.S)
    return [[line.partition("  #")[0].strip() for line in block.splitlines()] for block in found]


def test_there_are_ten() -> None:
    coordinator, site = blocks("federation.md", "Ten commands")
    assert len(coordinator) + len(site) == 10
    assert coordinator[0] == site[0] == INSTALL  # what tests/test_package.py does


@pytest.mark.long
@pytest.mark.skipif(not allowed(), reason="no network of one's own may be made here")
def test_they_lead_from_nothing_to_a_used_model() -> None:
    # A socket's path is short, and pytest's folders are not.
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as short,
        machines(Path(short), HOST) as there,
    ):
        place = Path(short)
        federation = coordinator(there, place / "coordinator")
        newcomer = Newcomer(there, federation, place / "new")
        newcomer.is_refused("this site has a key of its own now")
        newcomer.is_refused("This key is not registered at the coordinator")
        newcomer.is_registered()
        newcomer.is_refused("the federation has not finished a round")
        sites = [site(there, federation, place, client) for client in range(3)]
        _, _, _, _, start, status = blocks("federation.md", "Ten commands")[0]
        run = there.start(federation, "run", start)
        wait_until(lambda: "round 1/10" in run.text(), f"a round is done: {run.text()}")
        newcomer.is_refused("the federation is not over")
        assert run.code() == 0, run.text()
        code, said = there.run(federation, "status", status)
        assert (code, "10 of 10 rounds are done\nfinished" in said) == (0, True), said
        assert [one.rounds for one in look(federation / "run").sites] == [10, 10, 10]
        for machine in sites:
            uses_its_model(there, machine)
        newcomer.learns()


def coordinator(there: Machines, folder: Path) -> Path:
    """It serves from now on."""
    _, init, cd, serve, *_ = blocks("federation.md", "Ten commands")[0]
    folder.mkdir()
    code, said = there.run(folder, "init", init)
    assert code == 0, said
    federation = folder / cd.removeprefix("cd ")
    serving = there.start(federation, "serve", serve)
    wait_until(
        lambda: "sites come in at port 8443" in serving.text(), f"it serves\n{serving.text()}"
    )
    return federation


def site(there: Machines, federation: Path, place: Path, client: int) -> Path:
    """It takes part from now on. The page has the commands of site 0."""
    machine = place / f"machine-{client}"
    machine.mkdir()
    shutil.copy(federation / "kits" / f"site-{client}.tar.gz", machine)
    picture(machine)
    start = blocks("federation.md", "Ten commands")[1][1]
    there.start(machine, "site", start.replace("site-0", f"site-{client}"))
    return machine


def picture(folder: Path) -> None:
    pixels = load_digits().images[0] * 255 / 16
    Image.fromarray(pixels.astype(np.uint8)).save(folder / "mine.png")


def uses_its_model(there: Machines, machine: Path) -> None:
    client = machine.name[-1]
    ledger, predict = (
        line.replace("site-0", f"site-{client}").replace("state-0", f"state-{client}")
        for line in blocks("federation.md", "Ten commands")[1][2:]
    )
    code, said = there.run(machine, "ledger", ledger)
    assert (code, "none changed or missing" in said) == (0, True), said
    assert_predicts(there, machine, predict)


def assert_predicts(there: Machines, machine: Path, command: str) -> None:
    code, said = there.run(machine, "predict", command)
    assert code == 0, said
    assert re.search(r"(?m)^mine\.png +\d +[01]\.\d{3}", said), said


class Newcomer:
    """It has a kit as the others, and no number among theirs."""

    def __init__(self, there: Machines, federation: Path, machine: Path) -> None:
        self._there, self._federation, self._machine = there, federation, machine
        machine.mkdir()
        picture(machine)
        values = yaml.safe_load((federation / "site-2.yaml").read_text())
        values |= {"client": 3, "state": "state-3", "data": values["data"] | {"clients": 4}}
        (federation / "site-3.yaml").write_text(yaml.safe_dump(values))
        kits, (self._learn, self._predict) = blocks("use.md", "A site that comes later")
        code, said = there.run(federation, "kits", *kits)
        assert code == 0, said
        shutil.copy(federation / "kits" / "site-3.tar.gz", machine)

    def is_refused(self, reason: str) -> None:
        code, said = self._there.run(self._machine, "learn", self._learn)
        assert code == 2, said
        assert reason in said
        assert len(said.splitlines()) == 1

    def is_registered(self) -> None:
        key = self._machine / "site-3" / "key.pub"
        shutil.copy(key, self._federation / "certificates" / "site-3.pub")
        log = self._federation / "serve.log"
        wait_until(lambda: "site-3.pub is registered" in log.read_text(), "it is registered")

    def learns(self) -> None:
        code, said = self._there.run(self._machine, "learn", self._learn)
        assert code == 0, said
        assert "round 9: accuracy" in said
        assert_predicts(self._there, self._machine, self._predict)
