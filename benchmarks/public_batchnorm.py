"""How should public mini-batches treat BatchNorm? The measurement behind the default.

    python benchmarks/public_batchnorm.py [OUT.json]     (about ten minutes on one core)

PerFed-CKT (c=3, λ=1) on digits, every client with the CNN with BatchNorm, the three settings of
``training.public_batchnorm`` and three partitions; mean *validation* accuracy of the last round on
seeds that are used for nothing else. Two public sets: digits (like the private data) and their
negatives with noise (unlike it: another distribution of pixels, as CIFAR-100 is to CIFAR-10).
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import perfed
from perfed.core.schema import from_mapping
from perfed.data.datasets import Digits
from perfed.runs.directory import environment

SEEDS = range(1000, 1004)
MODES = ("private", "shared", "separate")
PARTITIONS = {
    "groups": {"name": "groups", "groups": 3},
    "dirichlet-0.1": {"name": "dirichlet", "alpha": 0.1, "minimum": 20},
    "iid": {"name": "iid"},
}


def unlike_digits(seed: int, folder: Path) -> dict[str, object]:
    """The same private digits, and a public set that does not look like them."""
    samples = Digits().load(seed)
    noise = np.random.default_rng(seed).normal(0, 0.5, samples.public_x.shape)
    path = folder / f"unlike-{seed}.npz"
    np.savez(path, x=samples.x, y=samples.y, public=(-samples.public_x + noise).astype(np.float32))
    return {"name": "npz", "path": str(path)}


def accuracy(mode: str, partition: dict[str, object], public: str, seed: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = {"name": "digits"} if public == "like" else unlike_digits(seed, folder)
        experiment = from_mapping(
            perfed.Experiment,
            {
                "seed": seed,
                "rounds": 40,
                "evaluate_every": 40,
                "data": data,
                "partition": partition,
                "models": {"architectures": [{"name": "cnn", "batchnorm": True}]},
                "training": {"learning_rate": 0.2, "steps": 10, "public_batchnorm": mode},
                "algorithm": {"name": "perfed-ckt", "clusters": 3, "weight": 1.0},
            },
        )
        summary = perfed.run(experiment, folder / "run").summary
    return float(summary["models"]["personal"]["last"]["validation_accuracy"])


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "benchmarks/results/public_batchnorm.json")
    rows = []
    for public in ("like", "unlike"):
        for name, partition in PARTITIONS.items():
            for mode in MODES:
                values = [accuracy(mode, partition, public, seed) for seed in SEEDS]
                rows.append({"public": public, "partition": name, "mode": mode, "values": values})
                mean, deviation = statistics.mean(values), statistics.stdev(values)
                print(f"{public:7} {name:14} {mode:9} {mean:.3f} ± {deviation:.3f}", flush=True)
    record = {"seeds": list(SEEDS), "environment": environment(torch.device("cpu")), "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
