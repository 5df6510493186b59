"""Whether bf16 ends where float32 ends: three seeds, side by side, on a GPU.

    python benchmarks/bf16_accuracy.py [FILE.npz] --out benchmarks/results/bf16_accuracy.json

The embedded default, and where FILE has CIFAR images, VGG11 with BatchNorm (twelve rounds).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import perfed
from perfed.bench import default_experiment
from perfed.core.schema import from_mapping

SEEDS = (0, 1, 2)


def vgg(file: str, learning_rate: float) -> perfed.Experiment:
    return from_mapping(
        perfed.Experiment,
        {
            "name": f"vgg11-bn-{learning_rate}",
            "rounds": 12,
            "clients": 20,
            "clients_per_round": 10,
            "evaluate_every": 12,
            "data": {"name": "npz", "path": file},
            "partition": {"name": "groups", "groups": 2},
            "models": ["vgg11-bn"],
            "training": {
                "learning_rate": learning_rate,
                "steps": 25,
                "batch_size": 64,
                "public_batch_size": 128,
            },
            "algorithm": {"name": "perfed-ckt", "clusters": 2, "weight": 1.0},
        },
    )


def accuracies(experiment: perfed.Experiment, precision: Any, folder: Path) -> dict[str, Any]:
    began = time.perf_counter()
    comparison = perfed.Comparison(
        experiment=experiment, algorithms=(experiment.algorithm,), seeds=SEEDS
    )
    how = perfed.Execution(precision=precision, engine="stacked")
    result = perfed.compare(comparison, folder, how=how, side_by_side=True)
    return {
        "test_accuracy": [
            run.summary["models"]["personal"]["last"]["test_accuracy"] for run in result.results
        ],
        "seconds": time.perf_counter() - began,
        "environment": result.record()["environment"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    experiments = [default_experiment()]
    if arguments.file:
        experiments += [vgg(arguments.file, rate) for rate in (0.01, 0.05)]
    rows = []
    for experiment in experiments:
        for precision in ("float32", "bf16"):
            with tempfile.TemporaryDirectory() as folder:
                row = accuracies(experiment, precision, Path(folder) / "runs")
            rows.append({"name": experiment.name, "precision": precision, **row})
            print({key: rows[-1][key] for key in ("name", "precision", "test_accuracy")})
            if arguments.out:
                record = {"seeds": SEEDS, "rows": rows}
                arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
