"""Seconds a round: every program of Flower's started from nothing, and forked from a warm process.

    python benchmarks/federation_pace.py --out benchmarks/results/federation_pace.json  # 10 minutes

The two take turns in one run, so that a busy machine slows both. "From nothing" is what
perfed's first version did: Flower's own commands, with Flower's own polling. "Forked" is
``perfed federation serve`` and ``perfed site start``. Both train the same models, to the bit; the
record says so. Digits, PerFed-CKT, ten steps a round, all sites on this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from perfed.flower.initialise import initialise
from perfed.flower.kit import KITS, open_kit, write_kits
from perfed.flower.services import (
    HOME,
    LOOPBACK,
    keep_gate,
    keep_site,
    keep_superlink,
    services,
)
from perfed.flower.trial import follow, moved, start_run
from perfed.runs.directory import environment

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.flower.processes import PATIENCE, free_port, network, wait_until

SETTINGS: list[dict[str, Any]] = [
    {"sites": 4, "rounds": 3, "times": 1, "ways": ["from nothing", "forked"]},
    {"sites": 20, "rounds": 3, "times": 1, "ways": ["forked"]},  # the other: half an hour
]


def make_ten_steps(coordinator: Path) -> None:
    """Training is to take little of a round: what is measured is the rest."""
    text = coordinator.read_text()
    assert text.count("steps: 50") == 1
    coordinator.write_text(text.replace("steps: 50", "steps: 10"))


def seconds(folder: Path) -> list[float]:
    """Without the first round, for which sites fetch the app."""
    lines = (folder / "run" / "timing.jsonl").read_text().splitlines()
    return [json.loads(line)["clients"] for line in lines[1:]]


def from_nothing(folder: Path, sites: int) -> list[Path]:
    path = folder / "coordinator.yaml"
    path.write_text(f"{path.read_text()}\npoll: 1\n")
    with network(folder / "net") as net:
        net.environment.pop("FLWR_SUPEREXEC_TASK_POLL_INTERVAL")
        net.environment.pop("OMP_NUM_THREADS")
        net.superlink()
        for client in range(sites):
            net.supernode(f"node-{client}", folder / f"site-{client}.yaml")
        run = net.run("run", folder / "app", path)
        done = folder / "run" / "summary.json"
        wait_until(lambda: done.is_file() or run.ended(), "the run ends", 10 * PATIENCE)
        assert done.is_file(), run.text()
    return [next(folder.glob(f"state-{client}/*/personal.safetensors")) for client in range(sites)]


def forked(folder: Path, sites: int) -> list[Path]:
    with services(folder / HOME) as kept, open(folder / "flower.log", "wb", 0) as log:
        kept.output = log.fileno()
        gate = free_port()
        write_kits(folder, f"{LOOPBACK}:{gate}")
        keep_superlink(kept, folder)
        keep_gate(kept, folder, LOOPBACK, gate)
        for kit in sorted((folder / KITS).iterdir()):
            keep_site(kept, open_kit(moved(kit, folder)))
        start_run(kept, folder)
        follow(kept, folder / "run", folder / "flower.log", lambda line: None)
    place = folder / "sites"
    return [next(place.glob(f"site-{n}/state-{n}/*/personal.safetensors")) for n in range(sites)]


WAYS = {"from nothing": from_nothing, "forked": forked}


def measure(setting: dict[str, Any]) -> dict[str, Any]:
    taken: dict[str, list[float]] = {way: [] for way in setting["ways"]}
    models: set[tuple[bytes, ...]] = set()
    for _ in range(setting["times"]):
        for way in setting["ways"]:
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place) / "pace"
                size = {"port": free_port(), "rounds": setting["rounds"]}
                initialise(folder, setting["sites"], tls=False, hosts=[], **size)
                make_ten_steps(folder / "coordinator.yaml")
                models.add(tuple(path.read_bytes() for path in WAYS[way](folder, setting["sites"])))
                taken[way] += seconds(folder)
                print(setting["sites"], way, [round(s, 1) for s in seconds(folder)], flush=True)
    medians = {way: statistics.median(values) for way, values in taken.items()}
    return {
        "sites": setting["sites"],
        "seconds": taken,
        "median": medians,
        "same_models": len(models) == 1 if len(taken) > 1 else None,  # nothing to compare with
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sites", type=int, help="one of the settings alone")
    given = parser.parse_args()
    chosen = [s for s in SETTINGS if given.sites in (None, s["sites"])]
    records = [measure(setting) for setting in chosen]
    machine = environment(torch.device("cpu"))
    # Who else wants the processors, at the end of it: the machine may not have been ours alone.
    result = {"settings": records, "load": os.getloadavg(), "environment": machine}
    print(json.dumps([{k: r[k] for k in ("sites", "median", "same_models")} for r in records]))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
