"""What a round costs when there are many clients: time and memory, for K = 1,000 and K = 100,000.

    python benchmarks/scale.py --out benchmarks/results/scale.json      (about 3 minutes)

Ten clients with a multilayer perceptron train in each round. Each size runs in a process of its
own. The samples, ten for each client, are handwritten digits with noise on them: there are not
enough digits for so many clients.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import perfed
from perfed.core.channel import Channel
from perfed.core.schema import from_mapping
from perfed.core.threads import cpu_threads
from perfed.runs.directory import environment
from perfed.runs.simulation import Simulation

ROUNDS = 60
SAMPLES_EACH = 10


def experiment(clients: int, file: Path) -> perfed.Experiment:
    return from_mapping(
        perfed.Experiment,
        {
            "name": f"scale-{clients}",
            "rounds": ROUNDS,
            "clients": clients,
            "clients_per_round": 10,
            "data": {"name": "npz", "path": str(file)},
            "partition": "iid",
            "models": ["mlp"],
            "algorithm": {"name": "perfed-ckt", "clusters": 3},
        },
    )


def write_samples(clients: int, file: Path) -> None:
    images, labels = load_digits(return_X_y=True)
    random = np.random.default_rng(0)
    chosen = random.integers(0, len(labels), clients * SAMPLES_EACH)
    noisy = images[chosen] * 16 + random.normal(0, 16, (len(chosen), 64))
    x = np.clip(noisy, 0, 255).astype(np.uint8).reshape(-1, 1, 8, 8)
    np.savez(file, x=x, y=labels[chosen], public=x[:400])


def measure(clients: int) -> dict[str, Any]:
    """In this process: build, play, and look at the memory."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "samples.npz"
        write_samples(clients, file)
        began = time.perf_counter()
        simulation = Simulation(experiment(clients, file), how=perfed.Execution(device="cpu"))
    built = time.perf_counter() - began
    seconds = []
    with cpu_threads(1):
        channel = Channel()
        simulation.begin(channel)
        for round in range(ROUNDS):
            began = time.perf_counter()
            simulation.play_round(round, channel)
            seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        simulation.population.evaluate(simulation.evaluation_messages(ROUNDS), ROUNDS)
    return {
        "clients": clients,
        "round_ms": 1e3 * statistics.median(seconds[5:]),
        "build_seconds": built,
        "evaluation_of_all_seconds": time.perf_counter() - began,
        "clients_with_a_model": len(simulation.population.records),
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clients", type=int)
    arguments = parser.parse_args()
    if arguments.clients:
        print(json.dumps(measure(arguments.clients)))
        return
    rows: list[dict[str, Any]] = []
    for clients in (1_000, 100_000, 1_000, 100_000):  # twice, for machines are never quite idle
        command = [sys.executable, __file__, "--clients", str(clients)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout))
        print(rows[-1], flush=True)
    best = {
        clients: min(row["round_ms"] for row in rows if row["clients"] == clients)
        for clients in (1_000, 100_000)
    }
    import torch

    result = {
        "rows": rows,
        "round_ratio": best[100_000] / best[1_000],
        "rounds": ROUNDS,
        "environment": environment(torch.device("cpu")),
    }
    print(f"a round at K=100,000 takes {result['round_ratio']:.2f} times that at K=1,000")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
