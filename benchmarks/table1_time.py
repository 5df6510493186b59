"""How long a whole run of the paper's Table 1 takes on a GPU: PerFed-CKT, K=100, 500 rounds.

    python benchmarks/table1_time.py --out benchmarks/results/table1_time.json
    python benchmarks/table1_time.py --method perfed-kin --rounds 30     where its time goes

VGG11 with BatchNorm, ten clients a round, τ=50, 64 private and 128 public samples a step, all 100
clients evaluated every ten rounds, checkpoints and final models written. The 60,000 images are made
up (ten patterns with noise), since what they show does not matter for the time.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import perfed
from perfed.core.schema import from_mapping
from perfed.runs import RoundReport


def write_images(file: Path) -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 60_000)
    patterns = random.integers(40, 216, (10, 3, 32, 32))
    noise = random.normal(0, 60, (60_000, 3, 32, 32))
    images = np.clip(patterns[labels] + noise, 0, 255).astype(np.uint8)
    public = random.integers(0, 256, (2_000, 3, 32, 32), dtype=np.uint8)
    np.savez(file, x=images, y=labels, public=public)


METHODS: dict[str, dict[str, Any]] = {
    "perfed-ckt": {"name": "perfed-ckt", "clusters": 3, "weight": 2.0},
    "perfed-kin": {"name": "perfed-kin"},
    "local": {"name": "local", "participation": "selected"},
}


def experiment(file: Path, rounds: int, method: str) -> perfed.Experiment:
    return from_mapping(
        perfed.Experiment,
        {
            "name": "table1-time",
            "rounds": rounds,
            "clients": 100,
            "clients_per_round": 10,
            "evaluate_every": 10,
            "data": {"name": "npz", "path": str(file)},
            "partition": {"name": "dirichlet", "alpha": 0.01, "minimum": 20},
            "models": ["vgg11-bn"],
            "training": {
                "learning_rate": 0.001,
                "steps": 50,
                "batch_size": 64,
                "public_batch_size": 128,
            },
            "algorithm": METHODS[method],
        },
    )


class Pace(perfed.Callback):
    def on_round(self, report: RoundReport) -> None:
        if (report.round + 1) % 50 == 0:
            print(f"round {report.round + 1}: {report.seconds:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--method", choices=METHODS, default="perfed-ckt")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--precision", default="bf16")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder) / "images.npz")
        chosen = experiment(Path(folder) / "images.npz", arguments.rounds, arguments.method)
        how = perfed.Execution(precision=arguments.precision)
        began = time.perf_counter()
        result = perfed.run(chosen, Path(folder) / "run", callbacks=[Pace()], how=how)
        seconds = time.perf_counter() - began
        lines = (result.path / "timing.jsonl").read_text().splitlines()
        rounds = [json.loads(line) for line in lines]
        record = {
            "seconds": seconds,
            "rounds": arguments.rounds,
            "phases": {
                phase: sum(line.get(phase, 0) for line in rounds)
                for phase in ("broadcast", "clients", "merge", "evaluate")
            },
            "config": chosen.to_mapping(),
            "environment": json.loads((result.path / "environment.json").read_text()),
        }
    print(f"{seconds:.1f} s; {record['phases']}")
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
