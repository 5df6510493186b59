"""How many rounds a site misses that is killed with -9 and started again at once.

    python benchmarks/restarted_site.py --out benchmarks/results/restarted_site.json  # 10 minutes

A coordinator (``perfed federation serve``) and three sites (``perfed site start``), each a real
process on this machine, once without keys and once with TLS and node keys. In the middle of a
round, site 2 and all that it has started are killed, and it is started again. Rounds take a few
seconds here: what a site misses is counted in rounds and in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from perfed.flower.initialise import initialise
from perfed.flower.kit import KITS, write_kits
from perfed.runs.directory import environment

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.flower.processes import BIN, Process, free_port, wait_until

ROUNDS = 2000  # more than will be done
BEFORE, AFTER = 3, 3  # rounds that all three do before it is killed, and when it is back
TIMES = 2
KILLED = 2
PATIENCE = 600.0


class Federation:
    """Its processes, each with a log in one folder."""

    def __init__(self, folder: Path, tls: bool, ends: ExitStack) -> None:
        self.folder, self._tls, self._ends = folder, tls, ends
        gate = free_port()
        hosts = ["localhost"] if tls else []
        initialise(folder, 3, tls=tls, hosts=hosts, port=free_port(), rounds=ROUNDS)
        write_kits(folder, f"localhost:{gate}")
        self._environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        self.start("serve", "federation", "serve", str(folder), "--port", str(gate))
        self.sites = [self.site(client) for client in range(3)]
        wait_until(lambda: "listens at" in self.log("serve"), "the superlink listens", PATIENCE)
        self.start("run", "federation", "start", "--no-stream")

    def start(self, name: str, *words: str) -> Process:
        process = Process(["perfed", *words], self.folder / f"{name}.log", self._environment)
        self._ends.callback(process.kill)
        return process

    def site(self, client: int) -> Process:
        return self.start(f"site-{client}", "site", "start", str(self.kit(client)))

    def kit(self, client: int) -> Path:
        return self.folder / KITS / f"site-{client}.tar.gz"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text("utf-8", errors="replace")

    def rounds(self) -> list[dict[str, Any]]:
        path = self.folder / "run" / "rounds.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        rounds = [json.loads(line) for line in lines if line.endswith("}")]
        return [line for line in rounds if line["round"] >= 0]

    def present(self) -> int:
        """In how many of the newest rounds, one after the other, all three took part."""
        count = 0
        for line in reversed(self.rounds()):
            if len(line["clients"]) < 3:
                break
            count += 1
        return count


def measure(tls: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/tmp") as place, ExitStack() as ends:
        federation = Federation(Path(place) / "f", tls, ends)
        wait_until(lambda: federation.present() >= BEFORE, "all take part", PATIENCE)
        done = len(federation.rounds())
        began = time.monotonic()
        federation.sites[KILLED].kill()
        federation.site(KILLED)
        wait_until(lambda: len(federation.rounds()) > done, "the round ends", PATIENCE)
        round_ended = time.monotonic() - began
        wait_until(
            lambda: any(KILLED in line["clients"] for line in federation.rounds()[done + 1 :]),
            "it takes part again",
            PATIENCE,
        )
        back = time.monotonic() - began
        wait_until(lambda: federation.present() >= AFTER, "it goes on doing so", PATIENCE)
        lines = federation.rounds()
        missed = [line for line in lines if KILLED not in line["clients"]]
        return {
            "node_keys": tls,
            "missed": len(missed),
            "why": [line["absent"].get(str(KILLED), "") for line in missed],
            "seconds_of_the_round_in_which_it_was_killed": round(round_ended, 1),
            "seconds_until_its_first_round_was_done": round(back, 1),
            "rounds": len(lines),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--keys", choices=["with", "without"], help="one of the two alone")
    given = parser.parse_args()
    ways = {"without": False, "with": True}
    chosen = [tls for name, tls in ways.items() if given.keys in (None, name)]
    records = []
    for _ in range(given.times):
        for tls in chosen:
            records.append(measure(tls))
            print(json.dumps(records[-1]), flush=True)
    result = {
        "kills": records,
        "load": os.getloadavg(),
        "environment": environment(torch.device("cpu")),
    }
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
