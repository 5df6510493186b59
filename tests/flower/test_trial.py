"""``perfed federation try``: real processes, forked from one that has everything loaded."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from pathlib import Path

import pytest

from perfed.flower.coordinator import coordinate
from perfed.flower.initialise import initialise
from tests import warm
from tests.flower.processes import descendants, wait_until
from tests.flower.setting import desk


def started_in(place: Path, *words: str) -> tuple[warm.Warm, Path]:
    """Its temporary files are in this folder."""
    output = place / "output"
    environment = os.environ | {"TMPDIR": str(place), "OMP_NUM_THREADS": "1"}
    with open(output, "wb") as file:
        command = ["federation", "try", "--sites", "2", *words]
        return warm.start(command, cwd=place, env=environment, stdout=file, stderr=file), output


@pytest.mark.long
def test_a_trial_shows_a_table_and_its_models_are_those_of_one_process_to_the_bit() -> None:
    # A socket's path is short, and pytest's folders are not.
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        place = Path(short)
        process, output = started_in(place, "--rounds", "1", "--keep", "kept")
        assert process.wait(300) == 0, output.read_text()
        said = output.read_text()
        assert "round 1/1: accuracy" in said
        gains = re.findall(r"(?m)^site-\d +([\d.]+) % +([\d.]+) % +([+-][\d.]+)$", said)
        assert len(gains) == 2
        for federated, alone, gain in gains:
            assert float(federated) - float(alone) == pytest.approx(float(gain), abs=0.11)
        assert descendants(process.pid) == []
        assert sorted(path.name for path in place.iterdir()) == ["kept", "output"]
        twin = place / "trial"  # the same name: it is in the plan
        initialise(twin, 2, tls=False, hosts=[], rounds=1)
        coordinate(twin / "coordinator.yaml", desk(twin), [].append)
        for client in range(2):
            state = f"state-{client}"
            (forked,) = place.glob(f"kept/sites/site-{client}/{state}/*/personal.safetensors")
            (plain,) = twin.glob(f"{state}/*/personal.safetensors")
            assert forked.read_bytes() == plain.read_bytes()


@pytest.mark.long
def test_ctrl_c_leaves_neither_a_process_nor_a_file() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        place = Path(short)
        process, output = started_in(place, "--rounds", "9")
        wait_until(lambda: "client 1 is there" in output.read_text(), "both sites are there")
        assert descendants(process.pid)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130, output.read_text()
        assert "stopped; nothing is left running" in output.read_text()
        assert descendants(process.pid) == []
        assert [path.name for path in place.iterdir()] == ["output"]
