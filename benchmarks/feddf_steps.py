"""Are FedDF's distillation steps enough? Accuracy, and how near the student comes to its teacher.

    python benchmarks/feddf_steps.py      (about twenty minutes on one core)

Handwritten digits, 30 clients, ten of them a round, seeds 0 to 2, with more and more steps. If the
steps are enough, more of them bring the student hardly nearer to the ensemble that it learns from,
and change accuracy by less than seeds do.

Results go to ``benchmarks/results/feddf_steps.json``, row by row; the same command goes on.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from typing import Any

import torch
from committed import RESULTS
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import kl_div, log_softmax

import perfed
from perfed.algorithms.feddf import FedDF
from perfed.core.algorithm import Server
from perfed.core.schema import from_mapping
from perfed.core.tree import Weights
from perfed.runs.directory import environment

MLP, CNN = {"name": "mlp", "hidden": [128]}, {"name": "cnn", "batchnorm": True}
SKEW = {"name": "dirichlet", "alpha": 0.01, "minimum": 20}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "Dir(0.01), MLP": (SKEW, MLP, (0, 25, 100, 400, 800)),
    "3 groups, MLP": ({"name": "groups", "groups": 3}, MLP, (0, 25, 100, 400, 800)),
    "Dir(0.01), CNN with BatchNorm": (SKEW, CNN, (0, 25, 100, 400, 800)),
}
"""Partition, network, and steps to try."""
OUT = RESULTS / "feddf_steps.json"
SEEDS = (0, 1, 2)
ROUNDS = 20
LAST = 5  # rounds over which distances are averaged
BASE = {
    "rounds": ROUNDS,
    "evaluate_every": ROUNDS,
    "clients": 30,
    "clients_per_round": 10,
    "selection": "uniform",
    "data": {"name": "digits", "public": 400},
    "training": {"learning_rate": 0.1, "steps": 10, "batch_size": 32},
}


class Distances:
    """KL(teacher, student) on the whole public set, in evaluation mode, before and after each
    distillation."""

    def __init__(self) -> None:
        self.before: list[float] = []
        self.after: list[float] = []

    def watch(self) -> None:
        distil = FedDF.distil

        def watched(
            algorithm: FedDF, server: Server, architecture: str, student: Weights, teacher: Tensor
        ) -> Weights:
            self.before.append(distance(server, architecture, student, teacher))
            taught = distil(algorithm, server, architecture, student, teacher)
            self.after.append(distance(server, architecture, taught, teacher))
            return taught

        FedDF.distil = watched  # type: ignore[method-assign]


@torch.no_grad()
def distance(server: Server, architecture: str, student: Weights, teacher: Tensor) -> float:
    module = server.modules[architecture].eval()
    logits = functional_call(module, student.params | student.buffers, (server.public_x,))
    return float(kl_div(log_softmax(logits, 1), teacher, reduction="batchmean"))


def measure(setting: dict[str, Any], steps: int, seed: int, distances: Distances) -> Any:
    distances.before.clear()
    distances.after.clear()
    algorithm = {"name": "feddf", "steps": steps}
    values = BASE | setting | {"algorithm": algorithm, "seed": seed}
    experiment = from_mapping(perfed.Experiment, values)
    with tempfile.TemporaryDirectory() as folder:
        summary = perfed.run(experiment, f"{folder}/run").summary
    return {
        "test_accuracy": summary["models"]["global"]["last"]["test_accuracy"],
        # Without steps nothing is distilled, and there is no teacher to compare with.
        "before": statistics.mean(distances.before[-LAST:]) if steps else None,
        "after": statistics.mean(distances.after[-LAST:]) if steps else None,
    }


def earlier_rows() -> list[dict[str, Any]]:
    """Of a measurement that was stopped, if it was the same one."""
    found = json.loads(OUT.read_text("utf-8")) if OUT.is_file() else {}
    same = (found.get("experiment"), found.get("seeds")) == (BASE, list(SEEDS))
    rows: list[dict[str, Any]] = found["rows"] if same else []
    return rows


def main() -> None:
    distances = Distances()
    distances.watch()
    result = {
        "experiment": BASE,
        "seeds": SEEDS,
        "last": LAST,
        "default": FedDF().steps,
        "environment": environment(torch.device("cpu")),
        "rows": [],
    }
    rows = earlier_rows()
    done = {(row["setting"], row["steps"]) for row in rows}
    for name, (partition, network, all_steps) in SETTINGS.items():
        setting = {"partition": partition, "models": [network]}
        for steps in all_steps:
            if (name, steps) in done:
                continue
            seeds = [measure(setting, steps, seed, distances) for seed in SEEDS]
            rows.append(
                {"setting": name, "steps": steps}
                | {key: [seed[key] for seed in seeds] for key in seeds[0]}
            )
            print(json.dumps(rows[-1]), flush=True)
            text = json.dumps(result | {"rows": rows}, indent=1)
            OUT.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
