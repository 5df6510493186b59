"""A long run in which much goes wrong ends as it would have, and does not grow.

    python benchmarks/soak.py            (some minutes; ``make soak``)

2,000 rounds; of each client's messages a quarter is lost or not admitted (``soak_wire.py``). Once
undisturbed, and once killed three times (SIGKILL) and resumed. The logs, the summary and the models
of both must be the same bytes, and the memory of the process must not grow with the rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from committed import ROOT

from perfed.config import dump_yaml
from perfed.runs.directory import environment

RESULT = ROOT / "benchmarks" / "results" / "soak.json"
MOST_GROWTH = 2.0  # kB a round: a list of one number per round would be 0.03, a lost message 5
WARM_UP = 0.2  # of the rounds: until then allocators and caches find their size
COMPARED = ("rounds.jsonl", "clients.jsonl", "summary.json", "partition.json", "config.yaml")


def experiment(rounds: int) -> dict[str, Any]:
    return {
        "name": "soak",
        "rounds": rounds,
        "evaluate_every": 50,
        "clients": 8,
        "clients_per_round": 6,
        "data": {"name": "digits", "public": 40},
        "partition": {"name": "groups", "groups": 2},
        "models": {"architectures": [{"name": "mlp", "hidden": [n]} for n in (8, 12)]},
        "training": {"steps": 2, "batch_size": 8, "public_batch_size": 8, "learning_rate": 0.02},
        "algorithm": {"name": "perfed-ckt", "clusters": 2},
        "wire": [f"{Path(__file__).with_name('soak_wire.py')}:Trouble"],
    }


class Watched:
    """A process of ``perfed run``, its memory, and how many rounds it has done."""

    def __init__(self, folder: Path, config: Path | None = None) -> None:
        self.log = folder / "rounds.jsonl"
        where = [str(config), "--out", str(folder)] if config else ["--resume", str(folder)]
        command = [sys.executable, "-m", "perfed", "run", *where]
        command += ["--engine=sequential", "--device=cpu", "--checkpoint-seconds=2", "--json"]
        self.said = folder.with_suffix(".log")
        with open(self.said, "ab") as said:
            self.process = subprocess.Popen(command, stdout=said, stderr=said)
        self.samples: list[tuple[int, int]] = []  # rounds done, kB

    def rounds(self) -> int:
        return self.log.read_bytes().count(b"\n") - 1 if self.log.is_file() else 0

    def watch(self, until: int) -> bool:
        """Until so many rounds are done; whether it still runs then."""
        while self.process.poll() is None:
            self._sample()
            if self.rounds() >= until:
                return True
            time.sleep(0.2)
        if self.process.returncode:
            sys.exit(f"it failed: {self.said.read_text()[-2000:]}")
        return False

    def _sample(self) -> None:
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:  # it has just ended
            return
        for line in status.splitlines():
            if line.startswith("VmRSS:"):
                self.samples.append((self.rounds(), int(line.split()[1])))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def growth(samples: list[tuple[int, int]], rounds: int) -> float:
    """kB a round, by a line through the samples after the warm-up."""
    late = [(r, kb) for r, kb in samples if r >= WARM_UP * rounds]
    return float(np.polyfit(*zip(*late, strict=True), 1)[0])


def contents(run: Path) -> dict[str, bytes]:
    files = [run / name for name in COMPARED] + sorted((run / "models").iterdir())
    return {file.name: file.read_bytes() for file in files}


def refused(run: Path) -> Counter[str]:
    """How many messages were not used, by what was said of them."""
    lines = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    reasons = [reason for line in lines for reason in line.get("refused", {}).values()]
    return Counter("lost" if reason == "is not there" else "not admitted" for reason in reasons)


def main() -> None:
    parser = argparse.ArgumentParser(description="2,000 rounds, three kills")
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "soak.yaml"
        config.write_text(dump_yaml(experiment(rounds)))
        calm = Watched(folder / "calm", config)
        calm.watch(rounds + 1)
        run = Watched(folder / "killed", config)
        kills = []
        for share in (0.2, 0.5, 0.8):
            if run.watch(round(share * rounds)):
                kills.append(run.rounds())
                run.kill()
                run = Watched(folder / "killed")
        run.watch(rounds + 1)
        same = contents(folder / "calm") == contents(folder / "killed")
        unused = refused(folder / "killed")
    record = {
        "environment": environment(torch.device("cpu")),
        "rounds": rounds,
        "killed_after": kills,
        "same_results": same,
        "lost": unused["lost"],
        "not_admitted": unused["not admitted"],
        "growth_kb_per_round": round(growth(calm.samples, rounds), 3),
        "memory_mb": round(max(kb for _, kb in calm.samples) / 1024),
        "seconds": round(time.monotonic() - began),
    }
    print(json.dumps(record, indent=1))
    if rounds == 2000:
        RESULT.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    right = same and len(kills) == 3 and record["growth_kb_per_round"] <= MOST_GROWTH
    sys.exit(0 if right else "not as it must be: see above")


if __name__ == "__main__":
    main()
